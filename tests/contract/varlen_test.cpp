// Contract 3.7, packed sequences: cu_seqlens for queries and keys, by every kernel, as each sequence by itself.
#include "bed.h"
#include "count_allocations.h"

#include "attune/attune.hpp"

#include <cstring>
#include <fmt/format.h>

namespace attune::contract {
namespace {

using namespace tools;
using tools::Plan; // not the one of attune.hpp

using Contract_3_7_varlen = ContractTest;

const char *const kPacked[] = {
    "f32:h2:d64:varlen=30,70,1,26",
    "f32:h4/2:d40:varlen=3,17,25,1:varlenk=130,0,7,65:causal-br",
    "f32:h4/2:d64/80:varlen=1,1,1,1,1:varlenk=300,1,0,33,129",       // decode
    "f32:h2:d64:varlen=0,0,1,1,2:varlenk=5,0,40,70,0:causal",        // D4: empty ones between
    "f32:h2:d300:varlen=9,33:varlenk=70,20:window=5,3:offset=60,-3", // positions count within the sequence
    "f32:h6/3:d64:varlen=50,2,27:varlenk=60,140,90:kvlen=60,77,0:mask=bool:mask=bias:causal-br",
    "f32:h3:d64:varlen=5,40:varlenk=90,66:softcap=2:alibi:sink:scale=-0.2",
    "f32:h2:d64:varlen=12,31:n100:m200:layout=bshd", // shorter than the plan is for
    "f32:h2:d64:varlen=12,31:varlenk=70,31:layout=col",
    "f32:h2:d64:varlen=40"};

TEST_F(Contract_3_7_varlen, against_the_reference) {
    uint64_t seed = 0;
    for (const char *text : kPacked) expect_case(parse_case(text), Fit::features, ++seed);
}

// The same memory, cut by hand: sequence b of the packed tensors as a problem of its own.
attune_tensors cut(const Bed &bed, int64_t b, attune_problem &p, attune_tensor (&views)[3]) {
    const int64_t row = bed.cu_q[size_t(b)], key = bed.cu_k[size_t(b)];
    p = bed.p;
    p.B = 1;
    p.N = rows_of(bed.c, b);
    p.M = keys_of(bed.c, b);
    p.flags &= ~uint32_t(ATTUNE_VARLEN);
    attune_tensors t = bed.tensors();
    t.cu_seqlens_q = t.cu_seqlens_k = nullptr;
    const auto move = [](attune_tensor &x, int dim, int64_t by, int64_t rows) {
        x.data = static_cast<char *>(x.data) + by * x.stride[dim] * int64_t(dtype_size(x.dtype));
        x.shape[dim] = rows;
    };
    move(t.q, 2, row, p.N);
    move(t.o, 2, row, p.N);
    move(t.k, 2, key, p.M);
    move(t.v, 2, key, p.M);
    views[0] = *t.lse;
    move(views[0], 2, row, p.N);
    t.lse = &views[0];
    const attune_tensor *const whole[] = {t.mask, t.bias};
    for (int n : {0, 1}) {
        if (!whole[n]) continue;
        views[n + 1] = *whole[n];
        move(views[n + 1], 0, b, 1);
        views[n + 1].shape[2] = p.N;
        views[n + 1].shape[3] = p.M;
        (n == 0 ? t.mask : t.bias) = &views[n + 1];
    }
    if (t.kv_len) t.kv_len += b;
    if (t.offsets) t.offsets += b;
    return t;
}

// One plan for the packed batch; then a plan for each sequence alone, with the same kernel: the same bits.
TEST_F(Contract_3_7_varlen, bits_are_those_of_each_sequence_alone) {
    for (const char *text : kPacked)
        for (const Group &group : groups(parse_case(text), Fit::features))
            for (const attune_kernel *k : group.kernels)
                for (Layout layout : {Layout::bhsd, Layout::bshd}) {
                    Bed packed(group.c, 5, all_in(layout)), alone(group.c, 5, all_in(layout));
                    alone.reset_outputs();
                    bool ok = true;
                    for (int64_t b = 0; b < packed.p.B && ok; b++) {
                        attune_problem p;
                        attune_tensor views[3];
                        const attune_tensors t = cut(alone, b, p, views);
                        std::string why;
                        const Plan plan = make_plan(p, k->name, "", 1, why);
                        ASSERT_TRUE(plan) << why;
                        const Buffer workspace(attune_plan_workspace(plan.get()), Guard::end);
                        const Running running_now(fmt::format("{}, sequence {} of {}", k->name, b, alone.text()));
                        ok = attune_run(plan.get(), &t, workspace.data(), workspace.size()) == ATTUNE_OK;
                        EXPECT_TRUE(ok) << attune_last_error();
                    }
                    for (int threads : {1, 2, 8}) {
                        if (!ok || !run(*k, packed, {.threads = threads})) continue;
                        EXPECT_EQ(packed.bits_differ(alone), "")
                            << k->name << ", " << threads << " threads, " << packed.text();
                    }
                }
}

// The plan knows the longest sequence only: one plan runs any lengths, with a workspace of its size.
TEST_F(Contract_3_7_varlen, one_plan_for_all_lengths) {
    const Case capacity = parse_case("f32:h4/2:d64:varlen=40,40,40,40:causal-br");
    const char *const lengths[] = {"0,0,0,0", "40,40,40,40", "1,2,3,4", "40,0,17,40", "0,0,0,1"};
    for (const Group &group : groups(capacity, Fit::features))
        for (const attune_kernel *k : group.kernels) {
            attune_problem p = to_problem(group.c);
            std::string why;
            const Plan plan = make_plan(p, k->name, "", 2, why);
            ASSERT_TRUE(plan) << why;
            const Buffer workspace(attune_plan_workspace(plan.get()), Guard::end);
            for (const char *rows : lengths)
                for (const char *keys : lengths) {
                    Case c = group.c;
                    const Case these = parse_case(fmt::format("f32:h1:d1:varlen={}:varlenk={}", rows, keys));
                    c.q_lens = these.q_lens;
                    c.k_lens = these.k_lens;
                    Bed bed(c, 3);
                    bed.reset_outputs();
                    const attune_tensors t = bed.tensors();
                    ASSERT_EQ(attune_run(plan.get(), &t, workspace.data(), workspace.size()), ATTUNE_OK)
                        << k->name << ": " << attune_last_error();
                    const Verdict verdict = check_outputs(bed.reference(), t);
                    EXPECT_TRUE(verdict.ok) << k->name << " on " << bed.text() << ": " << verdict.why;
                    EXPECT_TRUE(bed.gaps_intact() && workspace.slack_intact()) << k->name << " on " << bed.text();
                }
        }
}

TEST_F(Contract_3_7_varlen, scores_output) {
    Bed bed(parse_case("f32:h4/2:d64:varlen=3,30:varlenk=70,20:causal-br"), 4);
    bed.ask_for_scores(ATTUNE_SCORES_PROBABILITIES);
    const Reference reference = bed.reference();
    int done = 0;
    for (const attune_kernel *k : kernels_under_test())
        if (!attune_kernel_refuses(k, &bed.p)) done += run_and_check(*k, bed, reference);
    EXPECT_GT(done, 0);
}

TEST_F(Contract_3_7_varlen, allocates_nothing) {
    if (!can_count_allocations()) GTEST_SKIP() << "another tool stands in for malloc";
    for (const Group &group : groups(parse_case(kPacked[1]), Fit::features))
        for (const attune_kernel *k : group.kernels) {
            Bed bed(group.c, 1);
            std::string why;
            const Plan plan = make_plan(bed.p, k->name, "", 2, why);
            ASSERT_TRUE(plan) << why;
            const Buffer workspace(attune_plan_workspace(plan.get()), Guard::end);
            const attune_tensors t = bed.tensors();
            ASSERT_EQ(attune_run(plan.get(), &t, workspace.data(), workspace.size()), ATTUNE_OK);
            const int64_t before = allocations();
            ASSERT_EQ(attune_run(plan.get(), &t, workspace.data(), workspace.size()), ATTUNE_OK);
            EXPECT_EQ(allocations() - before, 0) << k->name;
        }
}

TEST_F(Contract_3_7_varlen, workspace_of_the_plan) {
    // As much for many sequences as for a few: only what is in flight takes memory.
    std::string why;
    Case c = parse_case("f32:h2:d64:varlen=400,10,10,10");
    const Plan few = make_plan(to_problem(c), "", "", 1, why);
    c.B = 64;
    const Plan many = make_plan(to_problem(c), few ? attune_plan_kernel(few.get()) : "", "", 1, why);
    ASSERT_TRUE(few && many) << why;
    EXPECT_EQ(attune_plan_workspace(few.get()), attune_plan_workspace(many.get()));
    Bed bed(parse_case(kPacked[0]), 1);
    const Plan plan = make_plan(bed.p, "", "", 2, why);
    ASSERT_TRUE(plan) << why;
    const size_t size = attune_plan_workspace(plan.get());
    const Buffer workspace(size, Guard::end);
    bed.reset_outputs();
    const attune_tensors t = bed.tensors();
    EXPECT_EQ(attune_run(plan.get(), &t, workspace.data(), size - 1), ATTUNE_INVALID_ARGUMENT);
    EXPECT_TRUE(bed.o.all_pattern());
}

// Each wrong argument: what is changed, and words of the message.
TEST_F(Contract_3_7_varlen, wrong_arguments) {
    struct Wrong {
        std::vector<std::string> words;
        std::function<void(Bed &, attune_tensors &)> run = [](Bed &, attune_tensors &) {};
    };
    const Wrong wrongs[] = {
        {{"cu_seqlens_q is null", "ATTUNE_VARLEN"}, [](Bed &, attune_tensors &t) { t.cu_seqlens_q = nullptr; }},
        {{"cu_seqlens_k is null", "ATTUNE_VARLEN"}, [](Bed &, attune_tensors &t) { t.cu_seqlens_k = nullptr; }},
        {{"cu_seqlens_q[0] is 1", "expected 0"}, [](Bed &b, attune_tensors &) { b.cu_q[0] = 1; }},
        {{"cu_seqlens_k[0] is -7", "expected 0"}, [](Bed &b, attune_tensors &) { b.cu_k[0] = -7; }},
        {{"cu_seqlens_q[2] is 2", "at least the 3 before"}, [](Bed &b, attune_tensors &) { b.cu_q[2] = 2; }},
        {{"cu_seqlens_k[2] is -9223372036854775808", "before"},
         [](Bed &b, attune_tensors &) { b.cu_k[2] = INT64_MIN; }},
        {{"cu_seqlens_k[1] is 41", "at most M = 40"}, [](Bed &b, attune_tensors &) { b.cu_k[1] = 41; }},
        {{"cu_seqlens_q[3], the last, is 35", "tensors.q.shape[2] = 37"},
         [](Bed &b, attune_tensors &) { b.cu_q[3] = 35; }},
        {{"cu_seqlens_k[3], the last, is 48", "tensors.k.shape[2] = 47"},
         [](Bed &b, attune_tensors &) { b.cu_k[3] = 48; }},
        {{"tensors.q.shape[2] is 121", "B * N = 102"}, [](Bed &, attune_tensors &t) { t.q.shape[2] = 121; }},
        {{"tensors.k.shape[2] is -1", "expected 0"}, [](Bed &, attune_tensors &t) { t.k.shape[2] = -1; }},
        {{"tensors.q.shape is [3", "expected [1"}, [](Bed &, attune_tensors &t) { t.q.shape[0] = 3; }},
        {{"tensors.v.shape", "expected [1, 2, 47"}, [](Bed &, attune_tensors &t) { t.v.shape[2] = 46; }},
        {{"tensors.o.shape", "expected [1, 2, 37"}, [](Bed &, attune_tensors &t) { t.o.shape[2] = 36; }},
        {{"kv_len[1] is 6", "the sequence's keys = 5"}, [](Bed &b, attune_tensors &) { b.kv_len[1] = 6; }},
    };
    const Case c = parse_case("f32:h2:d64:varlen=3,0,34:varlenk=40,5,2:n40:m40:kvlen=40,5,2");
    for (const Wrong &wrong : wrongs) {
        Bed bed(c, 1);
        attune_problem p = bed.p;
        p.N = 34;
        std::string message;
        attune_plan *made = nullptr;
        if (attune_plan_create(&p, nullptr, &made) != ATTUNE_OK) {
            message = attune_last_error();
        } else {
            const Plan plan(made);
            const Buffer workspace(attune_plan_workspace(made), Guard::end);
            bed.reset_outputs();
            attune_tensors t = bed.tensors();
            if (wrong.run) wrong.run(bed, t);
            EXPECT_EQ(attune_run(made, &t, workspace.data(), workspace.size()), ATTUNE_INVALID_ARGUMENT)
                << wrong.words[0];
            message = attune_last_error();
            EXPECT_TRUE(bed.o.all_pattern()) << wrong.words[0] << ": it wrote";
        }
        for (const std::string &word : wrong.words)
            EXPECT_NE(message.find(word), std::string::npos) << "'" << message << "' lacks '" << word << "'";
    }
    // Lengths are not given where nothing asks for them.
    Bed dense(parse_case("f32:b1:h2:n5:d64"), 1);
    std::string why;
    const Plan plan = make_plan(dense.p, "", "", 1, why);
    ASSERT_TRUE(plan) << why;
    attune_tensors t = dense.tensors();
    const int64_t cu[] = {0, 5};
    t.cu_seqlens_q = cu;
    EXPECT_EQ(attune_run(plan.get(), &t, nullptr, 0), ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find("cu_seqlens_q is given"), std::string::npos);
}

// Of the autoscheduled kernels and the steps of the ladder, which work from a least size on: they say so.
TEST_F(Contract_3_7_varlen, who_cannot_says_so) {
    const Case c = parse_case("f32:h8:d64:varlen=200,200");
    bool fused = false;
    for (const attune_kernel *k : kernels_under_test()) {
        const attune_problem p = to_problem(adapt(c, *k));
        const char *why = attune_kernel_refuses(k, &p);
        if (k->traits & ATTUNE_TRAIT_OWN_THREADS || k->n_min > 1 || k->m_min > 1) {
            EXPECT_NE(std::string(why ? why : "").find("packed"), std::string::npos) << k->name;
        } else {
            EXPECT_EQ(why, nullptr) << k->name;
            fused = fused || is_fused(*k);
        }
    }
    EXPECT_TRUE(fused);
}

TEST_F(Contract_3_7_varlen, nothing_packed) {
    for (const char *text : {"f32:h2:d64:varlen=0,0", "f32:h2:d64:varlen=0,3:varlenk=0,0"}) expect_right(text);
    attune_problem p = to_problem(parse_case("f32:h2:d64:varlen=0"));
    p.B = 0; // no sequence at all, and no array of lengths
    std::string why;
    const Plan plan = make_plan(p, "", "", 1, why);
    ASSERT_TRUE(plan) << why;
    Bed bed(parse_case("f32:h2:d64:varlen=0"), 1);
    attune_tensors t = bed.tensors();
    t.cu_seqlens_q = t.cu_seqlens_k = nullptr;
    EXPECT_EQ(attune_run(plan.get(), &t, nullptr, 0), ATTUNE_OK) << attune_last_error();
}

TEST_F(Contract_3_7_varlen, from_cpp) {
    const std::vector<int64_t> cu{0, 3, 3, 10};
    std::vector<float> q(10 * 2 * 8), k(q), v(q), o(q), again(q);
    Random random(1);
    for (std::vector<float> *x : {&q, &k, &v})
        for (float &y : *x) y = float(random.normal());
    attune::Problem problem{.B = 3, .Hq = 2, .N = 7, .dk = 8, .causal = true, .varlen = true};
    const attune::Plan plan(problem);
    attune::Workspace workspace;
    attune::run(plan,
                {.q = attune::packed(q, 10, 2, 8),
                 .k = attune::packed(k, 10, 2, 8),
                 .v = attune::packed(v, 10, 2, 8),
                 .o = attune::packed(o, 10, 2, 8),
                 .extras = {.cu_seqlens_q = cu, .cu_seqlens_k = cu}},
                workspace);
    for (size_t b = 0; b < 3; b++) {
        const int64_t n = cu[b + 1] - cu[b], at = cu[b] * 16;
        const attune::Plan one({.Hq = 2, .N = n, .dk = 8, .causal = true}, {.kernel = plan.kernel()});
        const auto rows = [&](std::vector<float> &x) { return attune::packed(x.data() + at, n, 2, 8); };
        attune::run(one, {.q = rows(q), .k = rows(k), .v = rows(v), .o = rows(again)}, workspace);
    }
    EXPECT_EQ(std::memcmp(o.data(), again.data(), o.size() * sizeof(float)), 0);
    const std::vector<int64_t> too_many{0, 3, 3, 10, 10};
    try {
        attune::run(plan,
                    {.q = attune::packed(q, 10, 2, 8),
                     .k = attune::packed(k, 10, 2, 8),
                     .v = attune::packed(v, 10, 2, 8),
                     .o = attune::packed(o, 10, 2, 8),
                     .extras = {.cu_seqlens_q = cu, .cu_seqlens_k = too_many}},
                    workspace);
        ADD_FAILURE() << "cu_seqlens_k of five numbers was taken for three sequences";
    } catch (const attune::Error &e) {
        EXPECT_NE(std::string(e.what()).find("cu_seqlens_k has 5 entries: expected B + 1 = 4"), std::string::npos)
            << e.what();
    }
}

} // namespace
} // namespace attune::contract
