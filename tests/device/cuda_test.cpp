// A caller's own CUDA context and stream: all work goes there and nowhere else, what a context had is gone with it, and
// the calling thread's current context is left alone. On a GPU, or on the driver that runs on the PTX interpreter
// (tests/ptx/driver), which also counts where work went. And tensors that span more than 2 GiB.
#include "attune/device.h"
#include "lib/device_memory.h"
#include "lib/inputs.h"
#include "lib/reference.h"
#include "lib/runner.h"

#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <string>
#include <thread>

namespace attune {
namespace {

using namespace tools;

struct Cuda {
    int (*context_create)(void **, unsigned, int) = nullptr;
    int (*context_destroy)(void *) = nullptr;
    int (*context_push)(void *) = nullptr;
    int (*context_pop)(void **) = nullptr;
    int (*context_current)(void **) = nullptr;
    int (*primary_retain)(void **, int) = nullptr;
    int (*stream_create)(void **, unsigned) = nullptr;
    int (*stream_destroy)(void *) = nullptr;
    int (*allocate)(unsigned long long *, size_t) = nullptr;
    int (*copy_in)(unsigned long long, const void *, size_t) = nullptr;
    int (*work)(void *, void *) = nullptr; // of the test driver only

    bool load() {
        const char *name = std::getenv("ATTUNE_CUDA_LIBRARY");
        void *library = dlopen(name && *name ? name : "libcuda.so.1", RTLD_NOW);
        const auto get = [library]<typename F>(F *&f, const char *symbol) {
            f = reinterpret_cast<F *>(library ? dlsym(library, symbol) : nullptr);
            return f != nullptr;
        };
        get(work, "attune_ptx_work");
        return get(context_create, "cuCtxCreate_v2") && get(context_destroy, "cuCtxDestroy_v2") &&
               get(context_push, "cuCtxPushCurrent_v2") && get(context_pop, "cuCtxPopCurrent_v2") &&
               get(context_current, "cuCtxGetCurrent") && get(primary_retain, "cuDevicePrimaryCtxRetain") &&
               get(stream_create, "cuStreamCreate") && get(stream_destroy, "cuStreamDestroy_v2") &&
               get(allocate, "cuMemAlloc_v2") && get(copy_in, "cuMemcpyHtoD_v2");
    }
};

class CallersQueue : public ::testing::Test {
  protected:
    Cuda cuda;
    void *primary = nullptr;

    void SetUp() override {
        int64_t count = 0;
        if (attune_device_count(ATTUNE_CUDA, &count) != ATTUNE_OK) GTEST_SKIP() << attune_last_error();
        ASSERT_TRUE(cuda.load());
        ASSERT_EQ(cuda.primary_retain(&primary, 0), 0);
    }
    void TearDown() override { attune_device_use_default(ATTUNE_CUDA); }

    // A context and a stream of it; nothing is current afterwards.
    void make(void *&context, void *&stream) {
        ASSERT_EQ(cuda.context_create(&context, 0, 0), 0);
        ASSERT_EQ(cuda.stream_create(&stream, 0), 0);
        void *popped = nullptr;
        ASSERT_EQ(cuda.context_pop(&popped), 0);
        ASSERT_EQ(popped, context);
    }
    static void use(void *context, void *stream) {
        const attune_device_queue queue{sizeof(attune_device_queue), ATTUNE_CUDA, context, stream};
        ASSERT_EQ(attune_device_use_queue(&queue), ATTUNE_OK) << attune_last_error();
    }
    int work(void *context, void *stream) const { return cuda.work ? cuda.work(context, stream) : 0; }
};

// One kernel of each strategy that the planner may take, with a case that it can do.
std::vector<std::pair<const attune_kernel *, Case>> strategies() {
    std::vector<std::pair<const attune_kernel *, Case>> some;
    std::string had;
    for (const attune_kernel *k : all_kernels()) {
        if (k->device != ATTUNE_CUDA || had.find(fmt::format("<{}>", k->strategy)) != std::string::npos) continue;
        for (const char *type : {"f32", "f16"}) {
            const Case c = parse_case(fmt::format("{}:b2:h4/2:n5:m70:d64:kvlen=70,33", type));
            attune_problem p = to_problem(c);
            p.device = ATTUNE_CUDA;
            if (attune_kernel_refuses(k, &p)) continue;
            some.emplace_back(k, c);
            had += fmt::format("<{}>", k->strategy);
            break;
        }
    }
    return some;
}

// From the host, then with all tensors in the context, K at an address of the caller's own allocation.
void run_both_ways(const Cuda &cuda, void *context, const attune_kernel &k, const Case &c) {
    Inputs inputs(c, {});
    const Reference reference = make_reference(inputs.problem(), inputs.tensors());
    const KernelCheck check = check_kernel(k, inputs, reference, 1, Guard::none);
    EXPECT_TRUE(check.verdict.ok) << k.name << ": " << check.verdict.why;

    attune_problem p = inputs.problem();
    p.device = ATTUNE_CUDA;
    std::string why;
    const Plan plan = make_plan(p, k.name, "", 1, why);
    ASSERT_TRUE(plan) << why;
    const Workspace workspace(ATTUNE_CUDA, attune_plan_workspace(plan.get()), Guard::none);
    DeviceTensors there(ATTUNE_CUDA, inputs.tensors());
    there.fill_outputs(0xff);
    attune_tensors t = there.tensors();
    const size_t bytes = size_t(c.B * c.Hkv * c.M * c.dk) * (c.dtype == ATTUNE_F32 ? 4 : 2);
    unsigned long long memory = 0;
    ASSERT_EQ(cuda.context_push(context), 0);
    ASSERT_EQ(cuda.allocate(&memory, bytes + 256), 0);
    ASSERT_EQ(cuda.copy_in(memory + 256, inputs.tensors().k.data, bytes), 0);
    ASSERT_EQ(cuda.context_pop(nullptr), 0);
    ASSERT_EQ(attune_device_import(ATTUNE_CUDA, reinterpret_cast<void *>(memory), bytes + 256, &t.k.data), ATTUNE_OK);
    t.k.data = static_cast<char *>(t.k.data) + 256;
    ASSERT_EQ(attune_run(plan.get(), &t, workspace.data(), workspace.size()), ATTUNE_OK) << attune_last_error();
    ASSERT_EQ(attune_device_synchronize(ATTUNE_CUDA), ATTUNE_OK) << attune_last_error();
    inputs.reset_outputs();
    there.fetch_outputs();
    const Verdict verdict = check_outputs(reference, inputs.tensors());
    EXPECT_TRUE(verdict.ok) << k.name << ": " << verdict.why;
}

TEST_F(CallersQueue, cuda_context_and_stream) {
    void *context = nullptr, *stream = nullptr;
    make(context, stream);
    const auto kernels = strategies();
    ASSERT_GE(kernels.size(), 3u);
    use(context, stream);
    const int at_home = work(primary, nullptr);
    for (const auto &[k, c] : kernels) {
        SCOPED_TRACE(k->name);
        const int before = work(context, stream), aside = work(context, nullptr);
        run_both_ways(cuda, context, *k, c);
        if (!cuda.work) continue;
        EXPECT_GE(work(context, stream) - before, 8) << "copies and launches are not on the caller's stream";
        EXPECT_EQ(work(context, nullptr) - aside, 1) << "more than the test's own copy is on the default stream";
    }
    EXPECT_EQ(work(primary, nullptr), at_home) << "something is in the primary context";

    void *current = &context;
    EXPECT_EQ(cuda.context_current(&current), 0);
    EXPECT_EQ(current, nullptr) << "a context was left current";

    // What one thread uses is no other thread's affair.
    const int here = work(context, stream);
    std::thread([&] {
        Inputs inputs(kernels[0].second, {});
        const Reference reference = make_reference(inputs.problem(), inputs.tensors());
        EXPECT_TRUE(check_kernel(*kernels[0].first, inputs, reference, 1, Guard::none).verdict.ok);
    }).join();
    EXPECT_EQ(work(context, stream), here);
    if (cuda.work) {
        EXPECT_GT(work(primary, nullptr), at_home);
    }

    ASSERT_EQ(attune_device_trim(ATTUNE_CUDA), ATTUNE_OK) << attune_last_error();
    ASSERT_EQ(attune_device_use_default(ATTUNE_CUDA), ATTUNE_OK);
    EXPECT_EQ(cuda.stream_destroy(stream), 0);
    EXPECT_EQ(cuda.context_destroy(context), 0);
}

// Contexts come and go, perhaps at the same address: nothing of an old one is used in a new one. The default stream of
// a caller's context is one too.
TEST_F(CallersQueue, cuda_contexts_one_after_another) {
    const auto kernels = strategies();
    for (int n = 0; n < 3; n++) {
        void *context = nullptr, *stream = nullptr;
        make(context, stream);
        use(context, n == 1 ? nullptr : stream);
        for (const auto &[k, c] : kernels) run_both_ways(cuda, context, *k, c);
        ASSERT_EQ(attune_device_trim(ATTUNE_CUDA), ATTUNE_OK) << attune_last_error();
        ASSERT_EQ(attune_device_use_default(ATTUNE_CUDA), ATTUNE_OK);
        EXPECT_EQ(cuda.stream_destroy(stream), 0);
        EXPECT_EQ(cuda.context_destroy(context), 0);
        Inputs inputs(kernels[0].second, {});
        const Reference reference = make_reference(inputs.problem(), inputs.tensors());
        const KernelCheck check = check_kernel(*kernels[0].first, inputs, reference, 1, Guard::none);
        EXPECT_TRUE(check.verdict.ok) << check.verdict.why;
    }
}

// A stream of another context, a context that is gone: the driver's error, and all is well after it.
TEST_F(CallersQueue, cuda_what_does_not_belong_together) {
    if (!cuda.work) GTEST_SKIP() << "drivers of GPUs do not check it";
    void *contexts[2] = {}, *streams[2] = {};
    for (int i : {0, 1}) make(contexts[i], streams[i]);
    const auto [k, c] = strategies()[0];
    Inputs inputs(c, {});
    const Reference reference = make_reference(inputs.problem(), inputs.tensors());
    const auto fails = [&](const char *error) {
        void *address = nullptr;
        char byte = 0;
        attune_status status = attune_device_malloc(ATTUNE_CUDA, 256, &address);
        if (status == ATTUNE_OK) status = attune_device_copy_in(ATTUNE_CUDA, address, &byte, 1);
        EXPECT_EQ(status, ATTUNE_DEVICE_ERROR);
        EXPECT_NE(std::string(attune_last_error()).find(error), std::string::npos) << attune_last_error();
    };
    use(contexts[0], streams[1]);
    fails("CUDA_ERROR_INVALID_HANDLE");
    ASSERT_EQ(cuda.context_destroy(contexts[1]), 0);
    use(contexts[1], nullptr);
    fails("CUDA_ERROR_INVALID_CONTEXT");
    use(contexts[0], streams[0]);
    EXPECT_TRUE(check_kernel(*k, inputs, reference, 1, Guard::none).verdict.ok);
    ASSERT_EQ(attune_device_trim(ATTUNE_CUDA), ATTUNE_OK) << attune_last_error();
    ASSERT_EQ(attune_device_use_default(ATTUNE_CUDA), ATTUNE_OK);
    EXPECT_EQ(cuda.context_destroy(contexts[0]), 0);
    EXPECT_TRUE(check_kernel(*k, inputs, reference, 1, Guard::none).verdict.ok);
}

// Keys and values of two heads, more than 2 GiB apart: tensor core kernels have 64-bit strides, and the others say what
// they cannot do.
TEST(LargeTensors, cuda) {
    int64_t count = 0;
    if (attune_device_count(ATTUNE_CUDA, &count) != ATTUNE_OK) GTEST_SKIP() << attune_last_error();
    const Case c = parse_case("f16:b1:h2:n5:m70:d64:causal-br");
    constexpr int64_t kStride = (int64_t(1) << 30) + 4096, kValues = 1 << 16; // elements
    void *memory = nullptr;
    if (attune_device_malloc(ATTUNE_CUDA, size_t(kStride + 2 * kValues) * 2, &memory) != ATTUNE_OK)
        GTEST_SKIP() << attune_last_error();
    Inputs inputs(c, {});
    const Reference reference = make_reference(inputs.problem(), inputs.tensors());
    attune_tensors t = inputs.tensors();
    for (auto [tensor, at] : {std::pair{&t.k, int64_t(0)}, {&t.v, kValues}}) {
        const size_t head = size_t(c.M * tensor->shape[3] * 2);
        char *there = static_cast<char *>(memory) + 2 * at;
        for (int64_t h = 0; h < 2; h++)
            ASSERT_EQ(attune_device_copy_in(ATTUNE_CUDA, there + 2 * h * kStride,
                                            static_cast<const char *>(tensor->data) + size_t(h) * head, head),
                      ATTUNE_OK);
        tensor->data = there;
        tensor->device = ATTUNE_CUDA;
        tensor->stride[0] = 2 * kStride;
        tensor->stride[1] = kStride;
    }
    attune_problem p = inputs.problem();
    p.device = ATTUNE_CUDA;
    int right = 0, refused = 0;
    for (const attune_kernel *k : all_kernels()) {
        if (k->device != ATTUNE_CUDA || attune_kernel_refuses(k, &p)) continue;
        std::string why;
        const Plan plan = make_plan(p, k->name, "", 1, why);
        ASSERT_TRUE(plan) << why;
        const Workspace workspace(ATTUNE_CUDA, attune_plan_workspace(plan.get()), Guard::none);
        inputs.reset_outputs();
        const attune_status status = attune_run(plan.get(), &t, workspace.data(), workspace.size());
        if (std::string(k->backend) == "mlir") {
            EXPECT_EQ(status, ATTUNE_OK) << k->name << ": " << attune_last_error();
            EXPECT_TRUE(check_outputs(reference, inputs.tensors()).ok) << k->name;
            right++;
            continue;
        }
        EXPECT_EQ(status, ATTUNE_UNSUPPORTED) << k->name;
        EXPECT_NE(std::string(attune_last_error()).find("tensors.k has strides 2147491840, 1073745920, 64, 1"),
                  std::string::npos)
            << attune_last_error();
        refused++;
    }
    EXPECT_GE(right + refused, 1) << "no kernel takes the case";
    EXPECT_EQ(attune_device_free(ATTUNE_CUDA, memory), ATTUNE_OK);
}

} // namespace
} // namespace attune
