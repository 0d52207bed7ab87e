// Which kernels a problem with user functions gets, and what a run says of wrong parameters.
#include "mods.h"

#include "attune/attune.hpp"

#include <cmath>
#include <gmock/gmock.h>
#include <numeric>

namespace attune::mods_test {

namespace {

using ::testing::HasSubstr;

attune_problem problem_of(const char *mods) {
    attune_problem p;
    attune_problem_init(&p);
    p.B = 2, p.Hq = p.Hkv = 4, p.N = 20, p.M = 30, p.dk = p.dv = 64;
    p.mods = mods;
    return p;
}

std::string planned(const char *mods) {
    const attune_problem p = problem_of(mods);
    std::string why;
    const tools::Plan plan = tools::make_plan(p, "", "", 1, why);
    return plan ? attune_plan_kernel(plan.get()) : why;
}

bool missing() {
    return std::string(attune_isa()) == "sse41"; // these kernels are for avx2
}

} // namespace

TEST(UserFunctionPlans, kernels_of_exactly_these_functions) {
    if (missing()) GTEST_SKIP() << "these kernels are for avx2";
    EXPECT_THAT(planned("alibi"), HasSubstr("_alibi"));
    EXPECT_THAT(planned("softcap,document"), HasSubstr("_softcap_document"));
    for (const char *none : {static_cast<const char *>(nullptr), ""})
        for (const Mod &m : mods()) EXPECT_THAT(planned(none), ::testing::Not(HasSubstr("_" + m.name)));
    EXPECT_THAT(planned("document,softcap"), HasSubstr("it has no user functions document,softcap"));
    EXPECT_THAT(planned("alibi,alibi"), HasSubstr("_alibi: it is made with the user functions alibi"));
    const attune_kernel *k = attune_find_kernel("attn_flash_f32_d64_avx2_alibi");
    ASSERT_NE(k, nullptr);
    ASSERT_EQ(k->num_mod_params, 1);
    EXPECT_STREQ(k->mod_params[0].name, "slopes");
    EXPECT_EQ(k->mod_params[0].dtype, ATTUNE_F32);
    EXPECT_EQ(k->mod_params[0].by[0], ATTUNE_BY_HEAD);
}

TEST(UserFunctionPlans, a_plan_keeps_the_names) {
    if (missing()) GTEST_SKIP() << "these kernels are for avx2";
    std::string names = "alibi", why;
    const attune_problem p = problem_of(names.c_str());
    const tools::Plan plan = tools::make_plan(p, "", "", 1, why);
    ASSERT_TRUE(plan) << why;
    names = "other";
    EXPECT_STREQ(attune_plan_problem(plan.get())->mods, "alibi");
}

// Each wrong parameter in turn, and what is said of it.
TEST(UserFunctionParameters, wrong_ones_are_named) {
    if (missing()) GTEST_SKIP() << "these kernels are for avx2";
    const attune_problem p = problem_of("relative");
    std::string why;
    const tools::Plan plan = tools::make_plan(p, "", "", 1, why);
    ASSERT_TRUE(plan) << why;
    std::vector<float> q(2 * 4 * 20 * 64, 0.5f), k(2 * 4 * 30 * 64, 0.5f), o(q.size()), table(4 * 9);
    const int32_t furthest = 4;
    const int64_t wide = 4;
    std::vector<char> workspace(attune_plan_workspace(plan.get()));
    const attune_param good[2] = {{"table", ATTUNE_F32, 2, table.data(), {4, 9}, {9, 1}},
                                  {"furthest", ATTUNE_I32, 0, &furthest, {}, {}}};
    const auto run = [&](const std::vector<attune_param> &params, int64_t count = -1) {
        attune_tensors t;
        attune_tensors_init(&t);
        const auto dense = [](std::vector<float> &x, int64_t rows) {
            return attune_tensor{x.data(), ATTUNE_F32, ATTUNE_CPU, {2, 4, rows, 64}, {4 * rows * 64, rows * 64, 64, 1}};
        };
        t.q = dense(q, 20), t.k = t.v = dense(k, 30), t.o = dense(o, 20);
        t.params = params.empty() ? nullptr : params.data();
        t.num_params = count < 0 ? int64_t(params.size()) : count;
        const attune_status status = attune_run(plan.get(), &t, workspace.data(), workspace.size());
        return status == ATTUNE_OK ? std::string("ok") : std::string(attune_last_error());
    };
    const auto with = [&](int which, const std::function<void(attune_param &)> &edit) {
        std::vector<attune_param> params(good, good + 2);
        edit(params[size_t(which)]);
        return run(params);
    };
    EXPECT_EQ(run({good[0], good[1]}), "ok");
    EXPECT_EQ(run({good[1], good[0]}), "ok");
    EXPECT_EQ(run({}), "tensors.params lacks table: expected f32 of rank 2 (user functions relative)");
    EXPECT_EQ(run({good[0]}), "tensors.params lacks furthest: expected i32 of rank 0 (user functions relative)");
    EXPECT_EQ(run({}, 2), "tensors.params is null: expected 2 parameters");
    EXPECT_EQ(run({good[0], good[1]}, 17), "tensors.num_params is 17: expected 0 to 16");
    EXPECT_EQ(run({good[0], good[1], good[0]}),
              "tensors.params[2].name is 'table': expected each of these once: table, furthest");
    EXPECT_EQ(run({good[0], good[1], {"tabel", ATTUNE_F32, 0, &furthest, {}, {}}}),
              "tensors.params[2].name is 'tabel': expected each of these once: table, furthest");
    EXPECT_EQ(with(1, [&](attune_param &x) { x.dtype = ATTUNE_I64, x.data = &wide; }),
              "tensors.params[1] (furthest) is of type i64 and rank 0: expected i32 and rank 0");
    EXPECT_EQ(with(0, [](attune_param &x) { x.rank = 1; }),
              "tensors.params[0] (table) is of type f32 and rank 1: expected f32 and rank 2");
    EXPECT_EQ(with(0, [](attune_param &x) { x.data = nullptr; }),
              "tensors.params[0] (table).data is null: expected a pointer to its elements");
    EXPECT_THAT(with(0, [](attune_param &x) { x.data = static_cast<const char *>(x.data) + 1; }),
                HasSubstr("expected an address aligned to its 4-byte elements"));
    EXPECT_EQ(with(0, [](attune_param &x) { x.shape[0] = 3; }),
              "tensors.params[0] (table).shape[0] is 3: expected Hq = 4 to 2^31 - 1");
    EXPECT_EQ(with(0, [](attune_param &x) { x.shape[1] = 0; }),
              "tensors.params[0] (table).shape[1] is 0: expected 1 to 2^31 - 1");
    EXPECT_EQ(with(0, [](attune_param &x) { x.stride[1] = 2; }),
              "tensors.params[0] (table).stride[1] is 2: expected 1 for the last dimension");
    EXPECT_THAT(with(0, [](attune_param &x) { x.stride[0] = -9; }),
                HasSubstr("(table).stride[0] is -9: expected 0 or more"));
    EXPECT_THAT(with(0, [](attune_param &x) { x.stride[0] = int64_t(1) << 30; }),
                HasSubstr("fewer than 2^31 elements"));
    // Broadcast along the heads, and an index that runs outside of the table.
    EXPECT_EQ(with(0, [](attune_param &x) { x.stride[0] = 0, x.shape[1] = 3; }), "ok");
}

TEST(UserFunctionParameters, a_plan_without_functions_takes_none) {
    const attune_problem p = problem_of(nullptr);
    std::string why;
    const tools::Plan plan = tools::make_plan(p, "", "", 1, why);
    ASSERT_TRUE(plan) << why;
    contract::Bed bed(tools::parse_case("f32:b2:h4:n20:m30:d64"), 1);
    const float one = 1;
    bed.params = {{"slopes", ATTUNE_F32, 0, &one, {}, {}}};
    const attune_tensors t = bed.tensors();
    std::vector<char> workspace(attune_plan_workspace(plan.get()));
    EXPECT_EQ(attune_run(plan.get(), &t, workspace.data(), workspace.size()), ATTUNE_INVALID_ARGUMENT);
    EXPECT_STREQ(attune_last_error(), "tensors.params[0].name is 'slopes': expected each of these once: none");
}

// The C++ layer, and multi-head attention, which hands functions and parameters on.
TEST(UserFunctionParameters, in_cpp) {
    if (missing()) GTEST_SKIP() << "these kernels are for avx2";
    std::vector<float> q(2 * 5 * 64), k(2 * 7 * 64), o(q.size()), expected(q.size());
    std::iota(q.begin(), q.end(), 0.0f), std::iota(k.begin(), k.end(), 0.0f);
    for (auto *x : {&q, &k})
        for (float &y : *x) y = std::sin(y);
    const std::vector<float> slopes = {0.25f, 0.5f};
    const auto tensors = [&](std::vector<float> &out) {
        return Tensors{.q = bhsd(q, 1, 2, 5, 64),
                       .k = bhsd(k, 1, 2, 7, 64),
                       .v = bhsd(k, 1, 2, 7, 64),
                       .o = bhsd(out, 1, 2, 5, 64)};
    };
    Workspace workspace;
    Problem problem{.Hq = 2, .N = 5, .M = 7, .dk = 64};
    problem.alibi = true;
    Tensors builtin = tensors(expected);
    builtin.extras.alibi_slopes = slopes;
    run(plan(problem), builtin, workspace);
    problem.alibi = false, problem.mods = "alibi";
    Tensors own = tensors(o);
    own.extras.params = {param("slopes", slopes, {2})};
    run(plan(problem), own, workspace);
    for (size_t i = 0; i < o.size(); i++) ASSERT_NEAR(o[i], expected[i], 1e-6) << i;

    own.extras.params = {param("slopes", 0.5f)};
    EXPECT_THROW(run(plan(problem), own, workspace), Error);
    EXPECT_THROW(param("slopes", slopes, {3}), Error);
    own.extras.params.assign(17, param("slopes", slopes, {2}));
    EXPECT_THROW(run(plan(problem), own, workspace), Error);
}

} // namespace attune::mods_test
