// Contract 3.13, 3.15 and 3.16: workspace, re-entrancy, threads, and what a plan says about itself.
#include "bed.h"
#include "count_allocations.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <fmt/format.h>
#include <limits>
#include <numeric>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace attune::contract {
namespace {

using namespace tools;

using Contract_3_13 = ContractTest;
using Contract_3_15 = ContractTest;
using Contract_3_16 = ContractTest;

const char *const kCases[] = {"f32:b2:h4/2:n30:m70:d64:causal-br", "f32:b1:h2:n3:m1100:d40:kvlen=1030",
                              "f32:b2:h2:n50:m130:d64:mask=bool:mask=bias", "f32:b1:h2:n26:m200:d300/300",
                              "f32:b1:h6/2:n1:m2100:d128"};

// Exactly the stated size, against an unreadable page on either side, at any alignment; what lies in it before the run
// does not matter.
TEST_F(Contract_3_13, workspace_is_exactly_the_stated_size) {
    for (const char *text : kCases)
        for (const Group &group : groups(parse_case(text)))
            for (const attune_kernel *k : group.kernels)
                for (int threads : {1, 3}) {
                    Bed bed(group.c, 1), other(group.c, 1);
                    if (!run(*k, bed, {.threads = threads, .fill = 0})) continue;
                    for (const auto &[guard, shift] : {std::pair<Guard, size_t>{Guard::end, 0},
                                                       {Guard::start, 0},
                                                       {Guard::end, 1},
                                                       {Guard::start, 31},
                                                       {Guard::end, 63},
                                                       {Guard::start, 64}}) {
                        if (!run(*k, other, {.threads = threads, .guard = guard, .fill = 0xff, .shift = shift}))
                            continue;
                        EXPECT_EQ(other.bits_differ(bed), "")
                            << k->name << ": workspace " << shift << " bytes off, full of NaN, on " << bed.text();
                    }
                }
}

TEST_F(Contract_3_13, workspace_one_byte_short) {
    for (const char *text : kCases)
        for (const Group &group : groups(parse_case(text)))
            for (const attune_kernel *k : group.kernels) {
                Bed bed(group.c, 1);
                std::string why;
                const Plan plan = make_plan(bed.p, k->name, "", 2, why);
                ASSERT_TRUE(plan) << why;
                const size_t size = attune_plan_workspace(plan.get());
                if (size == 0) continue;
                const Workspace workspace(device_under_test(), size, Guard::end);
                bed.reset_outputs();
                const attune_tensors t = bed.tensors();
                EXPECT_EQ(attune_run(plan.get(), &t, workspace.data(), size - 1), ATTUNE_INVALID_ARGUMENT);
                const std::string message = attune_last_error();
                EXPECT_NE(message.find("workspace_size"), std::string::npos) << message;
                EXPECT_NE(message.find(std::to_string(size - 1)), std::string::npos) << message;
                EXPECT_NE(message.find(std::to_string(size)), std::string::npos) << message;
                EXPECT_TRUE(bed.o.all_pattern() && bed.lse.all_pattern()) << k->name << ": it wrote";
            }
}

// Counts what runs allocate, after one that lets the thread pool come up.
void expect_no_allocation(const std::string &text, const std::function<void(Bed &)> &edit = {},
                          const Places &places = {}) {
    bool fused = false;
    for (const Group &group : groups(parse_case(text)))
        for (const attune_kernel *k : group.kernels) {
            if (k->traits & ATTUNE_TRAIT_OWN_THREADS) continue;
            Bed bed(group.c, 1, places);
            if (edit) edit(bed);
            for (int threads : {1, 2}) {
                std::string why;
                const Plan plan = make_plan(bed.p, k->name, "", threads, why);
                ASSERT_TRUE(plan) << why;
                const Workspace workspace(device_under_test(), attune_plan_workspace(plan.get()), Guard::end);
                const attune_tensors t = bed.tensors();
                ASSERT_EQ(attune_run(plan.get(), &t, workspace.data(), workspace.size()), ATTUNE_OK);
                const int64_t before = allocations();
                const attune_status status = attune_run(plan.get(), &t, workspace.data(), workspace.size());
                const int64_t count = allocations() - before;
                ASSERT_EQ(status, ATTUNE_OK);
                EXPECT_EQ(count, 0) << k->name << ", " << threads << " threads, allocated in a run of " << bed.text();
            }
            fused = fused || is_fused(*k);
        }
    EXPECT_TRUE(fused) << text << ": no fused kernel took it";
}

TEST_F(Contract_3_13, no_allocation_in_run) {
    if (!can_count_allocations()) GTEST_SKIP() << "another tool stands in for malloc";
    const int64_t before = allocations();
    const std::string long_enough(100, 'x');
    ASSERT_GT(allocations(), before) << "the counter does not count " << long_enough;
    for (const char *text : kCases) expect_no_allocation(text);
    expect_no_allocation("f32:b1:h2:n30:m70:d64:softcap=2:alibi:sink");
    expect_no_allocation("f32:b1:h2:n5:m0:d64");
}

// Nor where NaN, or strides that no kernel takes, call for the strict code.
TEST_F(Contract_3_13, no_allocation_in_strict_run) {
    if (!can_count_allocations()) GTEST_SKIP() << "another tool stands in for malloc";
    expect_no_allocation("f32:b1:h2:n30:m70:d64", [](Bed &bed) {
        bed.k.set(0, 0, 3, 0, std::numeric_limits<float>::quiet_NaN());
        bed.v.set(0, 1, 3, 0, std::numeric_limits<float>::infinity());
    });
    Places columns;
    columns.v = spec_of(Layout::col);
    expect_no_allocation("f32:b1:h2:n30:m70:d40", {}, columns);
}

// One plan, eight threads at once, each with its own tensors.
TEST_F(Contract_3_13, plan_shared_by_eight_threads) {
    for (const char *text : {"f32:b1:h4/2:n30:m130:d64:causal-br", "f32:b1:h2:n2:m1100:d40"})
        for (const Group &group : groups(parse_case(text), Fit::features))
            for (const attune_kernel *k : group.kernels)
                for (int threads : {1, 2}) {
                    std::string why;
                    Bed first(group.c, 1);
                    const Plan plan = make_plan(first.p, k->name, "", threads, why);
                    ASSERT_TRUE(plan) << why;
                    constexpr int kCallers = 8, kRuns = 3;
                    std::vector<std::unique_ptr<Bed>> beds;
                    std::vector<std::string> wrong(kCallers);
                    for (int n = 0; n < kCallers; n++) {
                        beds.push_back(std::make_unique<Bed>(group.c, uint64_t(n + 1)));
                        ASSERT_TRUE(run(*k, *beds.back()));
                    }
                    std::atomic<int> waiting{kCallers};
                    std::vector<std::thread> callers;
                    for (int n = 0; n < kCallers; n++)
                        callers.emplace_back([&, n] {
                            Bed &bed = *beds[size_t(n)];
                            const std::vector<uint32_t> alone = bed.bits();
                            const Workspace workspace(device_under_test(), attune_plan_workspace(plan.get()),
                                                      Guard::end);
                            const attune_tensors t = bed.tensors();
                            waiting--;
                            while (waiting > 0) std::this_thread::yield();
                            for (int r = 0; r < kRuns && wrong[size_t(n)].empty(); r++) {
                                bed.reset_outputs();
                                if (attune_run(plan.get(), &t, workspace.data(), workspace.size()) != ATTUNE_OK)
                                    wrong[size_t(n)] = attune_last_error();
                                else if (bed.bits() != alone)
                                    wrong[size_t(n)] = "other bits than alone";
                                else if (!workspace.slack_intact() || !bed.gaps_intact())
                                    wrong[size_t(n)] = "it wrote beside its memory";
                            }
                        });
                    for (std::thread &caller : callers) caller.join();
                    for (const std::string &w : wrong) EXPECT_EQ(w, "") << k->name << " on " << first.text();
                }
}

// The problem and the options may go once the plan is made.
TEST_F(Contract_3_13, plan_outlives_what_it_was_made_from) {
    const Case c = parse_case("f32:b1:h2:n30:m70:d64:causal");
    Bed bed(c, 1);
    attune_plan *raw = nullptr;
    {
        auto problem = std::make_unique<attune_problem>(bed.p);
        auto kernel = std::make_unique<std::string>(groups(c, Fit::features)[0].kernels[0]->name);
        auto options = std::make_unique<attune_plan_options>();
        attune_plan_options_init(options.get());
        Case mine = adapt(c, *attune_find_kernel(kernel->c_str()));
        *problem = to_problem(mine);
        problem->device = device_under_test();
        options->kernel = kernel->c_str();
        ASSERT_EQ(attune_plan_create(problem.get(), options.get(), &raw), ATTUNE_OK) << attune_last_error();
        std::memset(problem.get(), 0xff, sizeof(attune_problem));
        std::fill(kernel->begin(), kernel->end(), '!');
    }
    const Plan plan(raw);
    const attune_kernel *k = attune_find_kernel(attune_plan_kernel(plan.get()));
    ASSERT_NE(k, nullptr);
    Bed mine(adapt(c, *k), 1);
    const Workspace workspace(device_under_test(), attune_plan_workspace(plan.get()), Guard::end);
    const attune_tensors t = mine.tensors();
    ASSERT_EQ(attune_run(plan.get(), &t, workspace.data(), workspace.size()), ATTUNE_OK) << attune_last_error();
    EXPECT_TRUE(check_outputs(mine.reference(), t).ok);
}

// Rounding mode, denormals and exception masks are the caller's.
TEST_F(Contract_3_13, floating_point_environment_is_left_alone) {
#if defined(__x86_64__)
    constexpr unsigned kControl = 0xffc0; // rounding, flush to zero, denormals are zero, masks
    constexpr unsigned initial = 0x1f80;  // the default: nearest, denormals kept, exceptions masked
    const unsigned mine = _mm_getcsr();
    for (const char *text : {"f32:b1:h2:n30:m130:d64:causal-br", "f32:b1:h2:n2:m1100:d40"})
        for (const Group &group : groups(parse_case(text)))
            for (const attune_kernel *k : group.kernels)
                for (unsigned mode : {initial, initial | 0x8040u, initial | 0x4000u}) {
                    Bed bed(group.c, 1);
                    std::string why;
                    const Plan plan = make_plan(bed.p, k->name, "", 2, why);
                    ASSERT_TRUE(plan) << why;
                    const Workspace workspace(device_under_test(), attune_plan_workspace(plan.get()), Guard::end);
                    const attune_tensors t = bed.tensors();
                    _mm_setcsr(mode);
                    const attune_status status = attune_run(plan.get(), &t, workspace.data(), workspace.size());
                    const unsigned after = _mm_getcsr();
                    _mm_setcsr(mine);
                    EXPECT_EQ(status, ATTUNE_OK);
                    EXPECT_EQ(after & kControl, mode & kControl) << k->name;
                }
#endif
}

// Inputs are only read.
TEST_F(Contract_3_13, inputs_are_left_alone) {
    for (const char *text : {"f32:b2:h4/2:n30:m70:d64:mask=bool:mask=bias:kvlen=70,3:sink", "f32:b1:h2:n2:m1100:d40"})
        for (const Group &group : groups(parse_case(text)))
            for (const attune_kernel *k : group.kernels) {
                Bed bed(group.c, 1);
                bed.v.set(0, 0, 2, 0, std::numeric_limits<float>::quiet_NaN());
                const uint64_t before = bed.input_hash();
                if (run(*k, bed, {.threads = 2})) {
                    EXPECT_EQ(bed.input_hash(), before) << k->name << " changed an input";
                }
            }
}

// A replacement of the pool that does the tasks in an order of its own.
struct Order {
    enum { reverse, random, threads } how;
    std::atomic<int64_t> loops{0};
};

void parallel_for(void *context, int64_t n, attune_task_fn task, void *closure) {
    Order &order = *static_cast<Order *>(context);
    const int64_t loop = order.loops++;
    std::vector<int64_t> indices(static_cast<size_t>(n));
    std::iota(indices.begin(), indices.end(), 0);
    std::reverse(indices.begin(), indices.end());
    Random random{uint64_t(loop)};
    if (order.how == Order::random)
        for (int64_t i = n - 1; i > 0; i--) std::swap(indices[size_t(i)], indices[size_t(random.between(0, i))]);
    if (order.how != Order::threads) {
        for (int64_t i : indices) task(closure, i);
        return;
    }
    std::vector<std::thread> workers;
    for (int64_t i : indices) workers.emplace_back([=] { task(closure, i); });
    for (std::thread &w : workers) w.join();
}

const char *const kBitsCases[] = {
    "f32:b2:h4/2:n50:m200:d64:causal-br",       "f32:b2:h4/2:n3:m2100:d64",
    "f32:b3:h2:n30:m70:d40:kvlen=70,0,33",      "f32:b1:h6/3:n26:m130:d128:mask=bool:mask=bias",
    "f32:b1:h2:n100:m100:d64:window=20,5:sink", "f32:b1:h1:n1:m1:d300"};

TEST_F(Contract_3_15, bits_do_not_depend_on_threads) {
    for (const char *text : kBitsCases)
        for (const Group &group : groups(parse_case(text)))
            for (const attune_kernel *k : group.kernels) {
                Bed one(group.c, 1), several(group.c, 1);
                if (!run(*k, one, {.threads = 1})) continue;
                for (int threads : {2, 3, 8})
                    if (run(*k, several, {.threads = threads})) {
                        EXPECT_EQ(several.bits_differ(one), "") << k->name << ", " << threads << " threads";
                    }
            }
}

TEST_F(Contract_3_15, bits_do_not_depend_on_the_order_of_tasks) {
    for (const char *text : kBitsCases)
        for (const Group &group : groups(parse_case(text), Fit::features))
            for (const attune_kernel *k : group.kernels) {
                if (k->traits & ATTUNE_TRAIT_OWN_THREADS) continue;
                Bed one(group.c, 1), other(group.c, 1);
                if (!run(*k, one, {.threads = 1})) continue;
                for (auto how : {Order::reverse, Order::random, Order::threads})
                    for (int threads : {2, 8}) {
                        Order order{how};
                        attune_set_parallel_for(parallel_for, &order);
                        const bool ok = run(*k, other, {.threads = threads});
                        attune_set_parallel_for(nullptr, nullptr);
                        if (!ok) continue;
                        EXPECT_EQ(other.bits_differ(one), "")
                            << k->name << ", " << threads << " threads, order " << how;
                    }
            }
    // It was really used.
    Order order{Order::reverse};
    Bed bed(typed(parse_case("f32:b2:h4:n50:m50:d64")), 1);
    attune_set_parallel_for(parallel_for, &order);
    for (const attune_kernel *k : kernels_under_test())
        if (is_fused(*k) && !attune_kernel_refuses(k, &bed.p)) run(*k, bed, {.threads = 2});
    attune_set_parallel_for(nullptr, nullptr);
    EXPECT_GT(order.loops, 0);
}

// A child process has none of the pool's threads: it runs alone, and ends.
TEST_F(Contract_3_15, runs_in_a_forked_child) {
    for (const char *text : {"f32:b2:h4/2:n50:m200:d64:causal-br", "f32:b1:h2:n3:m2100:d40"})
        for (const Group &group : groups(parse_case(text)))
            for (const attune_kernel *k : group.kernels) {
                Bed bed(group.c, 1), other(group.c, 1);
                if (!run(*k, bed, {.threads = 2})) continue; // the pool is up
                const pid_t child = fork();
                ASSERT_GE(child, 0);
                if (child == 0) {
                    alarm(30); // ends a child that waits for ever
                    _exit(run(*k, other, {.threads = 2}) && other.bits_differ(bed).empty() ? 0 : 1);
                }
                int status = 0;
                ASSERT_EQ(waitpid(child, &status, 0), child);
                EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
                    << k->name << ": the child ended with status " << status << " on " << bed.text();
            }
}

// The pool may be at work, and hold its lock, at the moment of the fork.
TEST_F(Contract_3_15, runs_in_a_child_forked_amid_work) {
    const Case c = parse_case("f32:b1:h2:n40:m70:d64");
    std::string why;
    for (const Group &group : groups(c, Fit::sizes)) {
        Bed busy(group.c, 1);
        const Plan plan = make_plan(busy.p, "", "", 2, why);
        ASSERT_TRUE(plan) << why;
        const Workspace workspace(ATTUNE_CPU, attune_plan_workspace(plan.get()), Guard::none);
        for (const attune_kernel *k : group.kernels) {
            Bed bed(group.c, 1), other(group.c, 1);
            if (!run(*k, bed, {.threads = 2})) continue;
            std::atomic<bool> stop{false};
            std::thread worker([&] {
                const attune_tensors t = busy.tensors();
                while (!stop) attune_run(plan.get(), &t, workspace.data(), workspace.size());
            });
            const bool own = k->traits & ATTUNE_TRAIT_OWN_THREADS;
            for (int n = 0; n < (own ? 30 : 3); n++) {
                const pid_t child = fork();
                if (child == 0) {
                    alarm(20);
                    _exit(run(*k, other, {.threads = 2}) && other.bits_differ(bed).empty() ? 0 : 1);
                }
                int status = 0;
                const bool ended = child > 0 && waitpid(child, &status, 0) == child && status == 0;
                EXPECT_TRUE(ended) << k->name << ": the child ended with status " << status << " on " << bed.text();
                if (!ended) break;
            }
            stop = true;
            worker.join();
        }
    }
}

// The phases' own contract: any split of the tasks into calls, in any order, gives the same bits.
TEST_F(Contract_3_15, phases_take_any_range_of_tasks) {
    for (const char *text : kBitsCases)
        for (const Group &group : groups(parse_case(text), Fit::features))
            for (const attune_kernel *k : group.kernels) {
                if (k->traits & ATTUNE_TRAIT_OWN_THREADS) continue;
                Bed bed(group.c, 1), other(group.c, 1);
                if (!run(*k, bed, {.threads = 1})) continue;
                const attune_tensors t = other.tensors();
                const size_t shared = k->shared_bytes ? k->shared_bytes(&other.p) : 0,
                             scratch = k->scratch_bytes ? k->scratch_bytes(&other.p) : 0;
                for (int64_t chunk : {int64_t(1), int64_t(3), std::numeric_limits<int64_t>::max()}) {
                    const Buffer shared_memory(shared + 64, Guard::none), scratch_memory(scratch + 64, Guard::none);
                    auto args =
                        attune_args{sizeof(attune_args),
                                    &other.p,
                                    &t,
                                    other.p.flags & ATTUNE_SCALE ? other.p.scale : 1.0f / std::sqrt(float(other.p.dk)),
                                    0,
                                    shared_memory.data(),
                                    0};
                    other.reset_outputs();
                    int error = 0;
                    for (; args.group < other.p.B * other.p.Hkv; args.group++)
                        for (int64_t n = 0; n < k->num_phases; n++) {
                            const int64_t tasks = k->phases[n].tasks(&args);
                            for (int64_t end = tasks; end > 0 && !error;) { // the last ones first
                                const int64_t begin = std::max<int64_t>(0, end - std::min(chunk, end));
                                error = k->phases[n].run(&args, begin, end, scratch_memory.data());
                                end = begin;
                            }
                        }
                    ASSERT_EQ(error, 0) << k->name << ": " << attune_last_error();
                    EXPECT_EQ(other.bits_differ(bed), "") << k->name << ", calls of " << chunk << " tasks";
                }
            }
}

// A batch element alone gives the bits that it gives among others.
TEST_F(Contract_3_15, bits_do_not_depend_on_the_rest_of_the_batch) {
    for (const char *text : {"f32:b3:h4/2:n30:m70:d64:causal:offset=40,3,-7",
                             "f32:b3:h2:n3:m1100:d40:kvlen=1100,0,1030", "f32:b2:h2:n26:m130:d64:mask=bool:mask=bias"})
        for (bool spoilt : {false, true}) // another element that needs the strict code
            for (const Group &group : groups(parse_case(text)))
                for (const attune_kernel *k : group.kernels) {
                    Bed all(group.c, 1);
                    if (spoilt) all.v.set(0, 0, 0, 0, std::numeric_limits<float>::quiet_NaN());
                    if (!run(*k, all, {.threads = 2})) continue;
                    for (int64_t b = spoilt ? 1 : 0; b < group.c.B; b++) {
                        Case c = group.c;
                        c.B = 1;
                        if (!c.offsets.empty()) c.offsets = {c.offsets[size_t(b)]};
                        if (!c.kv_len.empty()) c.kv_len = {c.kv_len[size_t(b)]};
                        Bed alone(c, 1);
                        const auto copy = [b](Array &to, const Array &from) {
                            to.each([&](int64_t, int64_t h, int64_t i, int64_t d) {
                                to.set(0, h, i, d, from.get(b, h, i, d));
                            });
                        };
                        copy(alone.q, all.q);
                        copy(alone.k, all.k);
                        copy(alone.v, all.v);
                        if (c.mask) copy(alone.mask, all.mask);
                        if (c.bias) copy(alone.bias, all.bias);
                        if (!run(*k, alone)) continue;
                        int64_t wrong = 0;
                        alone.o.each([&](int64_t, int64_t h, int64_t i, int64_t d) {
                            wrong += std::bit_cast<uint32_t>(alone.o.get(0, h, i, d)) !=
                                     std::bit_cast<uint32_t>(all.o.get(b, h, i, d));
                        });
                        alone.lse.each([&](int64_t, int64_t h, int64_t i, int64_t) {
                            wrong += std::bit_cast<uint32_t>(alone.lse.get(0, h, i, 0)) !=
                                     std::bit_cast<uint32_t>(all.lse.get(b, h, i, 0));
                        });
                        EXPECT_EQ(wrong, 0) << k->name << ": element " << b << " alone has other bits, " << all.text();
                    }
                }
}

// Ordinary numbers never meet the strict code, and where it is called for, only by the tiles concerned.
TEST_F(Contract_3_15, strict_code_serves_only_the_tiles_concerned) {
    for (const char *text : {"f32:b2:h2:n100:m40:d64", "f32:b3:h2:n70:m200:d40:causal-br", "f32:b2:h4:n1:m1100:d64",
                             "f32:b2:h2:n100:m50:d64:mask=bool:mask=bias:kvlen=50,31"})
        for (const Group &group : groups(parse_case(text)))
            for (const attune_kernel *k : group.kernels) {
                const auto strict_tiles = [&](Bed &bed) {
                    const uint64_t before = attune_strict_tiles();
                    run(*k, bed);
                    return attune_strict_tiles() - before;
                };
                Bed plain(group.c, 1), one_row(group.c, 1), one_head(group.c, 1), all(group.c, 1);
                EXPECT_EQ(strict_tiles(plain), 0u) << k->name << " on " << plain.text();
                // No tile does without it.
                all.k.fill(std::numeric_limits<float>::quiet_NaN());
                const uint64_t most = strict_tiles(all);
                EXPECT_GT(most, 0u) << k->name << " on " << all.text();
                one_row.q.set(0, 1, group.c.N - 1, 0, std::numeric_limits<float>::quiet_NaN());
                const uint64_t few = strict_tiles(one_row);
                EXPECT_GT(few, 0u) << k->name << " on " << one_row.text();
                EXPECT_LE(2 * few, most) << k->name << ": of " << most << " tiles, " << one_row.text();
                // The last key of the last head is of no interest to the other batch elements.
                one_head.v.set(group.c.B - 1, group.c.Hkv - 1, 0, 0, std::numeric_limits<float>::quiet_NaN());
                const uint64_t some = strict_tiles(one_head);
                EXPECT_GT(some, 0u) << k->name << " on " << one_head.text();
                EXPECT_LE(2 * some, most) << k->name << ": of " << most << " tiles, " << one_head.text();
            }
}

// Keys that no row sees are not packed: whatever a group before, or nobody, has left there takes no part.
TEST_F(Contract_3_15, keys_that_no_row_sees_are_not_read) {
    for (const char *text :
         {"f32:b3:h2/1:n30:m1400:d64:kvlen=5,700,1030", "f32:b2:h2:n40:m1500:d40:causal:offset=700,3",
          "f32:b1:h2:n20:m1300:d64/48:window=30,10:offset=900", "f32:b2:h2:n1:m2100:d128:kvlen=1,1025",
          "f32:b2:h3:n70:m1100:d64:layout=col:window=100,0:offset=600"})
        for (const Group &group : groups(parse_case(text)))
            for (const attune_kernel *k : group.kernels) {
                Bed bed(group.c, 1);
                const Reference reference = bed.reference();
                const uint64_t before = attune_strict_tiles();
                run_and_check(*k, bed, reference, {.threads = 2, .fill = 0xff}); // NaN
                if (group.c.layout != Layout::col) {
                    EXPECT_EQ(attune_strict_tiles(), before) << k->name << " on " << bed.text();
                }
            }
}

// With `deterministic`, the choice looks neither at threads nor at B.
TEST_F(Contract_3_15, deterministic_choice) {
    for (const char *text :
         {"f32:b1:h8:n1:m4096:d64", "f32:b1:h8:n100:m100:d64", "f32:b1:h8:n1024:m1024:d128:causal"}) {
        std::string chosen;
        for (int64_t B : {1, 2, 64})
            for (int threads : {1, 2, 16}) {
                Case c = parse_case(text);
                c.B = B;
                attune_problem p = to_problem(c);
                p.flags |= ATTUNE_DETERMINISTIC;
                std::string why;
                const Plan plan = make_plan(p, "", "", threads, why);
                ASSERT_TRUE(plan) << why;
                if (chosen.empty()) chosen = attune_plan_kernel(plan.get());
                EXPECT_EQ(attune_plan_kernel(plan.get()), chosen) << text << " B " << B << " threads " << threads;
            }
    }
}

// What explain() says of each kernel: the chosen one is chosen, the others have a reason.
TEST_F(Contract_3_16, explain_names_every_kernel_with_its_reason) {
    for (const char *text : {"f32:b1:h8:n128:m128:d64", "f32:b1:h8/2:n1:m1000:d40:mask=bool:mask=bias",
                             "f32:b2:h1:n3:m5:d300/17:causal:window=3,-1", "f32:b1:h8:n128:m128:d32:softcap=2:alibi"})
        for (bool forced : {false, true}) {
            const attune_problem p = to_problem(parse_case(text));
            std::string why, name;
            for (const attune_kernel *k : all_kernels())
                if (forced && !attune_kernel_refuses(k, &p)) name = k->name;
            const Plan plan = make_plan(p, name, "", 1, why);
            ASSERT_TRUE(plan) << why;
            const std::string chosen = attune_plan_kernel(plan.get());
            if (forced) {
                EXPECT_EQ(chosen, name);
            }
            EXPECT_NE(attune_find_kernel(chosen.c_str()), nullptr);
            EXPECT_EQ(attune_kernel_refuses(attune_find_kernel(chosen.c_str()), &p), nullptr);
            std::string explain = attune_plan_explain(plan.get());
            size_t lines = 0;
            for (size_t at = 0; at < explain.size(); at = explain.find('\n', at) + 1) lines++;
            EXPECT_EQ(lines, all_kernels().size()) << explain;
            for (const attune_kernel *k : all_kernels()) {
                const size_t at = ("\n" + explain).find(fmt::format("\n{}: ", k->name));
                ASSERT_NE(at, std::string::npos) << k->name << " is not explained";
                const std::string line = explain.substr(at, explain.find('\n', at) - at);
                const std::string reason = line.substr(std::strlen(k->name) + 2);
                EXPECT_GT(reason.size(), 5u) << line;
                if (k->name == chosen) {
                    EXPECT_EQ(reason.find("chosen"), 0u) << line;
                } else if (const char *refusal = attune_kernel_refuses(k, &p)) {
                    EXPECT_EQ(reason, refusal);
                } else if (forced) {
                    EXPECT_NE(reason.find("asked for"), std::string::npos) << line;
                }
            }
            EXPECT_EQ(explain.find(chosen), 0u) << "the chosen kernel comes first: " << explain;
        }
}

// By strategy, the plan takes a kernel of it, or says why each cannot.
TEST_F(Contract_3_16, strategy_asked_for) {
    const attune_problem p = to_problem(parse_case("f32:b1:h8:n128:m128:d64"));
    for (const std::string &strategy : all_strategies()) {
        std::string why;
        const Plan plan = make_plan(p, "", strategy, 1, why);
        if (plan)
            EXPECT_EQ(attune_find_kernel(attune_plan_kernel(plan.get()))->strategy, strategy);
        else
            for (const attune_kernel *k : all_kernels()) EXPECT_NE(why.find(k->name), std::string::npos) << why;
    }
}

// The planner by itself takes a kernel of the best ISA, never one that is only run when asked for.
TEST_F(Contract_3_16, planner_takes_the_isa_under_test) {
    for (const char *text : {"f32:b1:h8:n128:m128:d64", "f32:b1:h8/2:n1:m1000:d40", "f32:b2:h1:n3:m5:d300/17:causal"}) {
        std::string why;
        const Plan plan = make_plan(to_problem(parse_case(text)), "", "", 1, why);
        ASSERT_TRUE(plan) << why;
        const attune_kernel *k = attune_find_kernel(attune_plan_kernel(plan.get()));
        EXPECT_EQ(k->isa, isa_under_test());
        EXPECT_FALSE(k->traits & ATTUNE_TRAIT_ON_REQUEST) << k->name;
    }
}

} // namespace
} // namespace attune::contract
