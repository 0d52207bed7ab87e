// What must not end a process: kernels that fail on one of several threads, allocations that fail, a library that is
// unloaded after use, kernels for another machine.
#include "contract/count_allocations.h"

#include "lib/inputs.h"
#include "lib/reference.h"
#include "lib/runner.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <thread>
#include <vector>

namespace attune::tools {
namespace {

using contract::can_count_allocations;
using contract::fail_allocations;

// Any kernel of the registry for any sizes, as a pattern for kernels of our own.
const attune_kernel &pattern() {
    for (const attune_kernel *k : all_kernels())
        if (k->device == ATTUNE_CPU && k->dk == 0 && k->n_min <= 1 && !std::strcmp(k->isa, "sse41") &&
            k->q_dtype == ATTUNE_F32)
            return *k;
    throw std::runtime_error("no kernel for any sizes");
}

attune_kernel kernel_of_ours(const char *name, const attune_phase *phases, int64_t num_phases) {
    attune_kernel k = pattern();
    k.name = k.strategy = name;
    k.phases = phases;
    k.num_phases = num_phases;
    k.traits = ATTUNE_TRAIT_ON_REQUEST;
    k.shared_bytes = k.scratch_bytes = k.stack_bytes = nullptr;
    return k;
}

int64_t hundred_tasks(const attune_args *) {
    return 100;
}

// Runs `c` on a kernel; the status, and the message.
attune_status run_on(const char *kernel, const Case &c, int threads, std::string &message,
                     const std::function<void(Inputs &)> &after = {}) {
    Inputs inputs(c, {});
    std::string why;
    const Plan plan = make_plan(inputs.problem(), kernel, "", threads, why);
    if (!plan) {
        message = why;
        return ATTUNE_UNSUPPORTED;
    }
    const Buffer workspace(attune_plan_workspace(plan.get()), Guard::end);
    const attune_status status = attune_run(plan.get(), &inputs.tensors(), workspace.data(), workspace.size());
    message = attune_last_error();
    if (after) after(inputs);
    return status;
}

// --- a task that fails, on whichever thread it is ------------------------------------------------------------------

std::atomic<int> started{0};
bool failing = true;

int fail_at_37(const attune_args *, int64_t begin, int64_t end, void *) {
    started += int(end - begin);
    if (!failing || begin > 37 || end <= 37) return 0;
    attune_run(nullptr, nullptr, nullptr, 0); // leaves a message on this thread
    return 42;
}
int never(const attune_args *, int64_t, int64_t, void *) {
    ADD_FAILURE() << "a phase ran after one that had failed";
    return 0;
}

TEST(Faults, error_inside_a_parallel_region) {
    static const attune_phase phases[] = {{"main", fail_at_37, hundred_tasks}, {"merge", never, hundred_tasks}};
    static const attune_kernel kernel = kernel_of_ours("faults_failing", phases, 2);
    ASSERT_EQ(attune_register_kernel(&kernel), ATTUNE_OK) << attune_last_error();
    const Case c = parse_case("f32:b1:h2:n4:d8");
    for (int threads : {1, 2, 8}) {
        failing = true;
        std::string message;
        EXPECT_EQ(run_on(kernel.name, c, threads, message), ATTUNE_KERNEL_FAILED);
        for (const char *word : {"faults_failing", "phase main", "error 42", "plan is null"})
            EXPECT_NE(message.find(word), std::string::npos) << threads << " threads: " << message;
    }
    // Packed sequences fail in the same way.
    std::string message;
    EXPECT_EQ(run_on(kernel.name, parse_case("f32:h2:d8:varlen=4,5"), 2, message), ATTUNE_KERNEL_FAILED);
    EXPECT_NE(message.find("phase main: error 42"), std::string::npos) << message;
}

// A message that was there before is not taken for the kernel's.
int silent(const attune_args *, int64_t, int64_t, void *) {
    return 7;
}
TEST(Faults, error_without_a_message) {
    static const attune_phase phases[] = {{"main", silent, hundred_tasks}};
    static const attune_kernel kernel = kernel_of_ours("faults_silent", phases, 1);
    ASSERT_EQ(attune_register_kernel(&kernel), ATTUNE_OK);
    attune_find_kernel(nullptr);
    attune_run(nullptr, nullptr, nullptr, 0);
    std::string message;
    EXPECT_EQ(run_on(kernel.name, parse_case("f32:b1:h2:n4:d8"), 1, message), ATTUNE_KERNEL_FAILED);
    EXPECT_NE(message.find("error 7: (no message)"), std::string::npos) << message;
}

// --- packed sequences: the memory of a group is its own between its phases -----------------------------------------

size_t shared_by_rows(const attune_problem *p) {
    return size_t(16 * p->N + 64);
}
int64_t one_task(const attune_args *) {
    return 1;
}
int sign(const attune_args *args, int64_t, int64_t, void *) {
    std::memset(args->shared, int(args->problem->N), shared_by_rows(args->problem));
    return 0;
}
int check_and_write(const attune_args *args, int64_t, int64_t, void *) {
    const attune_problem &p = *args->problem;
    const auto *bytes = static_cast<const unsigned char *>(args->shared);
    float intact = float(p.N);
    for (size_t n = 0; n < shared_by_rows(&p); n++)
        if (bytes[n] != p.N) intact = -1;
    const attune_tensor &o = args->tensors->o;
    for (int64_t i = 0; i < p.N; i++)
        for (int64_t d = 0; d < p.dv; d++)
            static_cast<float *>(o.data)[args->group * o.stride[1] + i * o.stride[2] + d * o.stride[3]] = intact;
    return 0;
}

TEST(Faults, packed_sequences_in_memory_of_their_own) {
    static const attune_phase phases[] = {{"pack", sign, one_task}, {"main", check_and_write, one_task}};
    static attune_kernel kernel = kernel_of_ours("faults_signing", phases, 2);
    kernel.shared_bytes = shared_by_rows;
    ASSERT_EQ(attune_register_kernel(&kernel), ATTUNE_OK);
    std::string lengths = "200,0";
    for (int n = 0; n < 40; n++) lengths += fmt::format(",{}", 65 + n);
    const Case c = parse_case("f32:h2:d8:varlen=" + lengths);
    for (int threads : {1, 3, 8}) {
        std::string message;
        EXPECT_EQ(run_on(kernel.name, c, threads, message,
                         [&](Inputs &inputs) {
                             const attune_tensor &o = inputs.tensors().o;
                             int64_t row = 0;
                             for (int64_t length : c.q_lens)
                                 for (int64_t i = 0; i < length; i++, row++)
                                     for (int64_t h = 0; h < 2; h++)
                                         ASSERT_EQ(static_cast<float *>(o.data)[h * o.stride[1] + row * o.stride[2]],
                                                   float(length))
                                             << "row " << row;
                         }),
                  ATTUNE_OK)
            << message;
    }
}

// --- no memory -----------------------------------------------------------------------------------------------------

// Each allocation in turn is the first that fails: a status, never an end of the process, and success at last.
void expect_statuses(const char *what, const std::function<attune_status()> &call) {
    if (!can_count_allocations()) GTEST_SKIP() << "another tool stands in for malloc";
    int failures = 0;
    for (int64_t after = 0; after < 5000; after++) {
        fail_allocations(after);
        const attune_status status = call();
        fail_allocations(-1);
        if (status == ATTUNE_OK) {
            EXPECT_GT(failures, 0) << what << ": nothing was allocated";
            return;
        }
        failures++;
        ASSERT_TRUE(status == ATTUNE_OUT_OF_MEMORY || status == ATTUNE_IO_ERROR)
            << what << ": " << attune_status_string(status) << ": " << attune_last_error();
        ASSERT_STRNE(attune_last_error(), "") << what;
    }
    ADD_FAILURE() << what << ": it never came to an end";
}

TEST(Faults, no_memory_for_a_plan) {
    const attune_problem p = to_problem(parse_case("f32:b1:h2:n30:m70:d64:causal"));
    expect_statuses("attune_plan_create", [&] {
        attune_plan *plan = nullptr;
        const attune_status status = attune_plan_create(&p, nullptr, &plan);
        if (status != ATTUNE_OK && plan) ADD_FAILURE() << "a plan in spite of the failure";
        attune_plan_destroy(plan);
        return status;
    });
}

TEST(Faults, no_memory_for_a_module) {
    std::vector<float> w(64 * 64, 0.1f);
    attune_mha_config config;
    attune_mha_config_init(&config);
    config.d_model = 64;
    config.Hq = 4;
    attune_mha_weights weights;
    attune_mha_weights_init(&weights);
    weights.wq = weights.wk = weights.wv = weights.wo = w.data();
    expect_statuses("attune_mha_create", [&] {
        attune_mha *mha = nullptr;
        const attune_status status = attune_mha_create(&config, &weights, &mha);
        attune_mha_destroy(mha);
        return status;
    });
}

// Wrong arguments without memory for a message: still the right status.
TEST(Faults, no_memory_for_a_message) {
    if (!can_count_allocations()) GTEST_SKIP() << "another tool stands in for malloc";
    attune_problem p = to_problem(parse_case("f32:b1:h2:n30:m70:d64"));
    p.dk = -5;
    attune_plan *plan = nullptr;
    const attune_kernel &kernel = pattern();
    Inputs inputs(parse_case("f32:b1:h2:n30:m70:d64"), {});
    std::string why;
    const Plan good = make_plan(inputs.problem(), "", "", 1, why);
    ASSERT_TRUE(good) << why;
    attune_tensors wrong = inputs.tensors();
    wrong.v.shape[2] = 71;
    fail_allocations(0);
    const attune_status status = attune_plan_create(&p, nullptr, &plan);
    const attune_status no_plan = attune_run(nullptr, nullptr, nullptr, 0);
    const attune_status wrong_shape = attune_run(good.get(), &wrong, nullptr, 0);
    const char *const refusal = attune_kernel_refuses(&kernel, &p);
    const int64_t kernels = attune_num_kernels();
    fail_allocations(-1);
    EXPECT_TRUE(status == ATTUNE_INVALID_ARGUMENT || status == ATTUNE_OUT_OF_MEMORY);
    EXPECT_EQ(no_plan, ATTUNE_INVALID_ARGUMENT);
    EXPECT_TRUE(wrong_shape == ATTUNE_INVALID_ARGUMENT || wrong_shape == ATTUNE_OUT_OF_MEMORY);
    EXPECT_NE(refusal, nullptr);
    EXPECT_GT(kernels, 0);
    EXPECT_EQ(attune_plan_create(&p, nullptr, &plan), ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find("problem.dk is -5"), std::string::npos) << attune_last_error();
}

// The autoscheduled kernels take memory from the heap during a run: without it, a status.
TEST(Faults, no_memory_during_a_run) {
    if (!can_count_allocations()) GTEST_SKIP() << "another tool stands in for malloc";
    bool any = false;
    for (const attune_kernel *k : all_kernels()) {
        if (k->device != ATTUNE_CPU || !(k->traits & ATTUNE_TRAIT_OWN_THREADS)) continue;
        Case c = parse_case("f32:b1:h8:n128:m128:d64");
        c.dk = c.dv = k->dk;
        attune_problem p = to_problem(c);
        if (attune_kernel_refuses(k, &p)) continue;
        Inputs inputs(c, {});
        std::string why;
        const Plan plan = make_plan(p, k->name, "", 1, why);
        ASSERT_TRUE(plan) << why;
        const Buffer workspace(attune_plan_workspace(plan.get()), Guard::end);
        const auto run = [&] { return attune_run(plan.get(), &inputs.tensors(), workspace.data(), workspace.size()); };
        ASSERT_EQ(run(), ATTUNE_OK) << attune_last_error();
        fail_allocations(0);
        const attune_status status = run();
        fail_allocations(-1);
        any = any || status == ATTUNE_KERNEL_FAILED;
        EXPECT_TRUE(status == ATTUNE_OK || status == ATTUNE_KERNEL_FAILED) << k->name;
        EXPECT_EQ(run(), ATTUNE_OK) << k->name << " does not recover: " << attune_last_error();
    }
    if (!any) GTEST_SKIP() << "no kernel here takes memory during a run";
}

// --- libraries and machines ----------------------------------------------------------------------------------------

TEST(Faults, library_that_is_unloaded) {
    for (int round = 0; round < 3; round++) {
        void *library = dlopen(FAULTS_PLUGIN, RTLD_NOW | RTLD_LOCAL);
        ASSERT_NE(library, nullptr) << dlerror();
        const auto run = reinterpret_cast<int (*)()>(dlsym(library, "faults_plugin_run"));
        ASSERT_NE(run, nullptr);
        EXPECT_EQ(run(), 0);
        std::thread other([&] { EXPECT_EQ(run(), 0); });
        other.join();
        EXPECT_EQ(dlclose(library), 0);
    }
}

TEST(Faults, kernel_for_another_machine) {
    setenv("ATTUNE_ISA", "sse41", 1); // before anything asks
    if (std::string(attune_isa()) != "sse41") GTEST_SKIP() << "the ISA was chosen before this test: run it alone";
    attune_kernel foreign = pattern();
    foreign.name = foreign.strategy = "faults_neon";
    foreign.isa = "neon"; // a token of another architecture
    EXPECT_EQ(attune_register_kernel(&foreign), ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find("kernel->isa is 'neon'"), std::string::npos);
    // One that this machine is not to run: refused by name too, and never chosen.
    const Case c = parse_case("f32:b1:h2:n4:d8");
    const attune_problem p = to_problem(c);
    int refused = 0;
    for (const attune_kernel *k : all_kernels()) {
        if (k->device != ATTUNE_CPU || !std::strcmp(k->isa, "sse41")) continue;
        const char *why = attune_kernel_refuses(k, &p);
        ASSERT_NE(why, nullptr) << k->name;
        EXPECT_TRUE(std::strstr(why, "this CPU has no") || std::strstr(why, "ATTUNE_ISA allows sse41 at most")) << why;
        std::string message;
        EXPECT_EQ(run_on(k->name, c, 1, message), ATTUNE_UNSUPPORTED) << k->name;
        refused++;
    }
    EXPECT_GT(refused, 0);
    std::string reason;
    const Plan plan = make_plan(p, "", "", 1, reason);
    ASSERT_TRUE(plan) << reason;
    EXPECT_STREQ(attune_find_kernel(attune_plan_kernel(plan.get()))->isa, "sse41");
}

} // namespace
} // namespace attune::tools
