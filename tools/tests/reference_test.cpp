// The float64 reference itself: hand-checked values, a second and literal computation, properties of attention, and
// whether check_outputs sees what is wrong.
#include "lib/inputs.h"
#include "lib/numbers.h"
#include "lib/reference.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <rapidcheck.h>
#include <vector>

namespace attune::tools {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Dense [1,1,S,D] arrays for problems written by hand.
struct Small {
    attune_problem problem;
    attune_tensors tensors;
    std::vector<float> q, k, v, o, lse;
    attune_tensor lse_view{};

    Small(std::vector<float> q_, std::vector<float> k_, std::vector<float> v_, int64_t dk, int64_t dv)
        : q(std::move(q_)), k(std::move(k_)), v(std::move(v_)) {
        attune_problem_init(&problem);
        attune_tensors_init(&tensors);
        problem.Hq = problem.Hkv = 1;
        problem.N = int64_t(q.size()) / dk;
        problem.M = int64_t(k.size()) / dk;
        problem.dk = dk;
        problem.dv = dv;
        o.resize(size_t(problem.N * dv));
        lse.resize(size_t(problem.N));
        tensors.q = view(q.data(), ATTUNE_F32, Layout::bhsd, 1, 1, problem.N, dk);
        tensors.k = view(k.data(), ATTUNE_F32, Layout::bhsd, 1, 1, problem.M, dk);
        tensors.v = view(v.data(), ATTUNE_F32, Layout::bhsd, 1, 1, problem.M, dv);
        tensors.o = view(o.data(), ATTUNE_F32, Layout::bhsd, 1, 1, problem.N, dv);
        lse_view = view(lse.data(), ATTUNE_F32, Layout::bhsd, 1, 1, problem.N, 1);
        tensors.lse = &lse_view;
    }
    Reference reference() const { return make_reference(problem, tensors); }
};

Small three_keys() {
    return Small({1, 0}, {1, 0, 0, 1, 1, 1}, {10, 20, 40}, 2, 1);
}

std::vector<double> weights(Small &s) {
    // Values that are unit vectors make the output the weights.
    Small w(s.q, s.k, {1, 0, 0, 0, 1, 0, 0, 0, 1}, 2, 3);
    w.problem.flags = s.problem.flags;
    w.problem.scale = s.problem.scale;
    return w.reference().o;
}

TEST(Reference, HandCheckedThreeKeys) {
    Small s = three_keys();
    const auto w = weights(s);
    EXPECT_NEAR(w[0], 0.401, 5e-4);
    EXPECT_NEAR(w[1], 0.198, 5e-4);
    EXPECT_NEAR(w[2], 0.401, 5e-4);
    const Reference r = s.reference();
    EXPECT_NEAR(r.o[0], 24.0, 0.05);
    EXPECT_NEAR(r.o[0], 10 * w[0] + 20 * w[1] + 40 * w[2], 1e-12);
    const double a = 1 / std::sqrt(2.0);
    EXPECT_NEAR(r.lse[0], std::log(2 * std::exp(a) + 1), 1e-12);
}

TEST(Reference, HandCheckedUnscaledTimesEight) {
    Small s = three_keys();
    s.problem.flags = ATTUNE_SCALE;
    s.problem.scale = 8;
    const auto w = weights(s);
    EXPECT_NEAR(w[0], 0.49992, 5e-6);
    EXPECT_NEAR(w[1], 0.00017, 5e-6);
    EXPECT_NEAR(w[2], 0.49992, 5e-6);
}

TEST(Reference, UnscaledSoftmaxOf512FeaturesIsAlmostOneHot) {
    // Averaged over 100 queries with 10 keys each: the largest weight.
    double unscaled = 0, scaled = 0;
    for (uint64_t seed = 0; seed < 100; ++seed) {
        Random random(seed);
        std::vector<float> q(512), k(5120), v(100, 0.0f);
        for (float &x : q) x = float(random.normal());
        for (float &x : k) x = float(random.normal());
        for (size_t j = 0; j < 10; ++j) v[11 * j] = 1;
        Small s(q, k, v, 512, 10);
        const auto largest = [](const Reference &r) { return *std::max_element(r.o.begin(), r.o.end()); };
        scaled += largest(s.reference()) / 100;
        s.problem.flags = ATTUNE_SCALE;
        s.problem.scale = 1;
        unscaled += largest(s.reference()) / 100;
    }
    EXPECT_GT(unscaled, 0.9);
    EXPECT_LT(scaled, 0.5);
}

// The definition written out once more, with a matrix of scores, in long double: slow and with nothing shared.
std::vector<long double> literal(const Inputs &inputs, std::vector<long double> &lse) {
    const attune_problem &p = inputs.problem();
    const attune_tensors &t = inputs.tensors();
    const auto get = [](const attune_tensor &x, int64_t a, int64_t b, int64_t c, int64_t d) {
        return (long double)load_element(x.data, x.dtype,
                                         a * x.stride[0] + b * x.stride[1] + c * x.stride[2] + d * x.stride[3]);
    };
    std::vector<long double> out;
    for (int64_t b = 0; b < p.B; ++b)
        for (int64_t h = 0; h < p.Hq; ++h)
            for (int64_t i = 0; i < p.N; ++i) {
                const int64_t g = h * p.Hkv / p.Hq, at = i + ((p.flags & ATTUNE_OFFSETS) ? t.offsets[b] : p.offset);
                std::vector<long double> weight(size_t(p.M), 0.0L);
                long double sum = (p.flags & ATTUNE_SINK) ? std::exp((long double)t.sinks[h]) : 0.0L;
                for (int64_t j = 0; j < p.M; ++j) {
                    bool visible = !(p.flags & ATTUNE_KV_LEN) || j < t.kv_len[b];
                    visible = visible && (!(p.flags & ATTUNE_CAUSAL) || j <= at);
                    visible = visible && (p.window_left < 0 || j >= at - p.window_left);
                    visible = visible && (p.window_right < 0 || j <= at + p.window_right);
                    if (p.flags & ATTUNE_MASK)
                        visible = visible && static_cast<const uint8_t *>(
                                                 t.mask->data)[b * t.mask->stride[0] + h * t.mask->stride[1] +
                                                               i * t.mask->stride[2] + j * t.mask->stride[3]];
                    if (!visible) continue;
                    long double s = 0;
                    for (int64_t d = 0; d < p.dk; ++d) s += get(t.q, b, h, i, d) * get(t.k, b, g, j, d);
                    s *= (p.flags & ATTUNE_SCALE) ? (long double)p.scale : 1 / std::sqrt((long double)p.dk);
                    if (p.flags & ATTUNE_SOFTCAP) s = p.softcap * std::tanh(s / p.softcap);
                    if (p.flags & ATTUNE_ALIBI) s -= t.alibi_slopes[h] * (long double)std::abs(at - j);
                    if (p.flags & ATTUNE_BIAS) s += get(*t.bias, b, h, i, j);
                    sum += weight[size_t(j)] = std::exp(s);
                }
                lse.push_back(std::log(sum));
                for (int64_t d = 0; d < p.dv; ++d) {
                    long double o = 0;
                    for (int64_t j = 0; j < p.M; ++j)
                        if (weight[size_t(j)] > 0) o += weight[size_t(j)] / sum * get(t.v, b, g, j, d);
                    out.push_back(o);
                }
            }
    return out;
}

TEST(Reference, AgreesWithTheLiteralDefinition) {
    rc::check("O64 and LSE", [](uint64_t seed) {
        CaseSpace space;
        space.most = 30'000;
        space.flags &= ~uint32_t(ATTUNE_VARLEN); // see PackedSequencesAreSequences
        space.dtypes = {{ATTUNE_F32, ATTUNE_F32}, {ATTUNE_BF16, ATTUNE_BF16}, {ATTUNE_F16, ATTUNE_F32}};
        const Case c = random_case(seed, space);
        const Inputs inputs(c, {seed, Guard::end, true});
        const Reference r = make_reference(inputs.problem(), inputs.tensors());
        RC_ASSERT(int64_t(r.rows.size()) == r.total_rows);
        std::vector<long double> lse;
        const auto expected = literal(inputs, lse);
        RC_ASSERT(expected.size() == r.o.size());
        for (size_t i = 0; i < expected.size(); ++i)
            if (!(std::abs(double(expected[i]) - r.o[i]) <= 1e-12 * (1 + r.max_value)))
                RC_FAIL(to_string(c) + ": O[" + std::to_string(i) + "]");
        for (size_t i = 0; i < lse.size(); ++i)
            if (!(r.lse[i] == double(lse[i]) ||
                  std::abs(double(lse[i]) - r.lse[i]) <= 1e-12 * (1 + std::abs(r.lse[i]))))
                RC_FAIL(to_string(c) + ": LSE[" + std::to_string(i) + "]");
    });
}

// Packed sequences, against the reference of each by itself.
TEST(Reference, PackedSequencesAreSequences) {
    const Case c = parse_case("f32:h4/2:d5/3:varlen=3,0,7:varlenk=6,2,9:causal-br:mask=bool:mask=bias:kvlen=5,1,9");
    for (Layout layout : {Layout::bhsd, Layout::bshd}) {
        Case packed_case = c;
        packed_case.layout = layout;
        const Inputs packed(packed_case, {3, Guard::end, true});
        const Reference all = make_reference(packed.problem(), packed.tensors());
        ASSERT_EQ(all.total_rows, 4 * 10);
        ASSERT_EQ(all.rows.size(), 40u);
        for (int64_t b = 0; b < 3; ++b) {
            attune_problem p = packed.problem();
            attune_tensors t = packed.tensors();
            p.B = 1;
            p.N = rows_of(c, b);
            p.M = keys_of(c, b);
            p.flags &= ~uint32_t(ATTUNE_VARLEN | ATTUNE_OFFSETS);
            p.offset = p.M - p.N;
            const auto cut = [](attune_tensor &x, int dim, int64_t first) {
                x.data = static_cast<char *>(x.data) + first * x.stride[dim] * int64_t(dtype_size(x.dtype));
            };
            cut(t.q, 2, t.cu_seqlens_q[b]);
            cut(t.k, 2, t.cu_seqlens_k[b]);
            cut(t.v, 2, t.cu_seqlens_k[b]);
            attune_tensor mask = *t.mask;
            cut(mask, 0, b);
            t.mask = &mask;
            t.kv_len += b;
            const Reference one = make_reference(p, t);
            for (int64_t h = 0; h < 4; ++h)
                for (int64_t i = 0; i < p.N; ++i) {
                    const size_t at = size_t(h * 10 + t.cu_seqlens_q[b] + i), in_one = size_t(h * p.N + i);
                    EXPECT_EQ(all.lse[at], one.lse[in_one]);
                    for (size_t d = 0; d < 3; ++d) EXPECT_EQ(all.o[at * 3 + d], one.o[in_one * 3 + d]);
                }
        }
    }
}

// Writes the plain f32 stages (or any other numbers) to O and LSE of every row.
void write_outputs(const Inputs &inputs, const Reference &r, const std::vector<double> &o,
                   const std::vector<double> &lse) {
    const attune_problem &p = inputs.problem();
    const attune_tensors &t = inputs.tensors();
    for (size_t k = 0; k < r.rows.size(); ++k) {
        const int64_t row = r.rows[k], i = row % p.N, h = row / p.N % p.Hq, b = row / p.N / p.Hq;
        for (int64_t d = 0; d < p.dv; ++d)
            store_element(t.o.data, p.o_dtype,
                          b * t.o.stride[0] + h * t.o.stride[1] + i * t.o.stride[2] + d * t.o.stride[3],
                          float(o[k * size_t(p.dv) + size_t(d)]));
        store_element(t.lse->data, ATTUNE_F32, row, float(lse[k]));
    }
}

TEST(Check, PlainStagesAndRoundedTruthAreWithinTheBound) {
    rc::check("both pass", [](uint64_t seed) {
        CaseSpace space;
        space.most = 30'000;
        space.flags &= ~uint32_t(ATTUNE_VARLEN); // see PackedSequencesAreSequences
        space.dtypes = {{ATTUNE_F32, ATTUNE_F32}, {ATTUNE_BF16, ATTUNE_BF16}, {ATTUNE_F16, ATTUNE_F16}};
        const Case c = random_case(seed, space);
        const Inputs inputs(c, {seed, Guard::none, true});
        const Reference r = make_reference(inputs.problem(), inputs.tensors());
        write_outputs(inputs, r, r.o_plain, r.lse_plain);
        Verdict v = check_outputs(r, inputs.tensors());
        if (!v.ok) RC_FAIL(to_string(c) + ": " + v.why);
        RC_ASSERT(v.o_error <= v.o_bound / 2);
        write_outputs(inputs, r, r.o, r.lse);
        v = check_outputs(r, inputs.tensors());
        if (!v.ok) RC_FAIL(to_string(c) + ": " + v.why);
    });
}

TEST(Check, BoundIsTight) {
    // Were it loose, nothing above would mean much: for f32 of this size it is some 1e-6.
    const Inputs inputs(parse_case("f32:h2:n64:d64"), {});
    const Reference r = make_reference(inputs.problem(), inputs.tensors());
    EXPECT_LT(r.o_bound, 2e-5);
    EXPECT_GT(r.o_bound, 1e-7);
    EXPECT_LT(r.lse_bound(0), 1e-5);
}

TEST(Check, SeesOneWrongElement) {
    Inputs inputs(parse_case("f32:b2:h2:n5:m9:d4"), {});
    const Reference r = make_reference(inputs.problem(), inputs.tensors());
    const auto verdict_with = [&](size_t element, double change, size_t row, double lse_change) {
        auto o = r.o;
        auto lse = r.lse;
        o[element] += change;
        lse[row] += lse_change;
        write_outputs(inputs, r, o, lse);
        return check_outputs(r, inputs.tensors());
    };
    EXPECT_TRUE(verdict_with(0, 0, 0, 0).ok);
    Verdict v = verdict_with(53, 1e-3, 0, 0); // row 13, d 1: b 1, h 0, i 3
    EXPECT_FALSE(v.ok);
    EXPECT_NEAR(v.o_error, 1e-3, 1e-5);
    EXPECT_EQ(v.why.substr(0, v.why.find(" =")), "O[b=1, h=0, i=3, d=1]");
    EXPECT_FALSE(verdict_with(0, kNaN, 0, 0).ok);
    EXPECT_FALSE(verdict_with(0, kInf, 0, 0).ok);
    v = verdict_with(0, 0, 19, 1e-3);
    EXPECT_FALSE(v.ok);
    EXPECT_EQ(v.why.substr(0, v.why.find(" =")), "LSE[b=1, h=1, i=4]");
    inputs.reset_outputs(); // nothing written
    EXPECT_FALSE(check_outputs(r, inputs.tensors()).ok);
}

TEST(Check, LargeProblemsAreSampledAndTheRestMustBeWritten) {
    Inputs inputs(parse_case("f32:h4:n256:d16"), {});
    ReferenceOptions options;
    options.budget = 256 * 32 * 100; // 100 rows' worth
    const Reference r = make_reference(inputs.problem(), inputs.tensors(), options);
    ASSERT_EQ(r.rows.size(), 100u);
    EXPECT_EQ(r.total_rows, 1024);
    EXPECT_EQ(r.rows.front(), 0);
    EXPECT_EQ(r.rows.back(), 1023);
    write_outputs(inputs, r, r.o, r.lse);
    const Verdict unwritten = check_outputs(r, inputs.tensors());
    EXPECT_FALSE(unwritten.ok);
    EXPECT_EQ(unwritten.rows_checked, 100);
    EXPECT_EQ(unwritten.rows_total, 1024);
    const Reference all = make_reference(inputs.problem(), inputs.tensors());
    ASSERT_EQ(all.rows.size(), 1024u);
    write_outputs(inputs, all, all.o, all.lse);
    EXPECT_TRUE(check_outputs(r, inputs.tensors()).ok);
}

TEST(Reference, RowsThatSeeNothing) {
    Inputs inputs(parse_case("f32:n4:m6:d8:causal:offset=-2"), {});
    const Reference r = make_reference(inputs.problem(), inputs.tensors());
    EXPECT_EQ(r.o[0], 0);
    EXPECT_EQ(r.lse[0], -kInf);
    EXPECT_EQ(r.lse[1], -kInf);
    EXPECT_TRUE(std::isfinite(r.lse[2]));
    Inputs none(parse_case("f32:n4:m0:d8:sink"), {});
    const Reference s = make_reference(none.problem(), none.tensors());
    EXPECT_EQ(s.o[5], 0);
    EXPECT_FLOAT_EQ(float(s.lse[3]), none.tensors().sinks[0]);
}

TEST(Reference, NaNAndPlusInfinityStayInTheirRow) {
    for (const float bad : {kNaN, kInf}) {
        Small s({1, 0, bad, 1, 0, 1}, {1, 0, 1, 1}, {1, 2}, 2, 1);
        const Reference r = s.reference();
        EXPECT_TRUE(std::isfinite(r.o[0]));
        EXPECT_TRUE(std::isnan(r.o[1]));
        EXPECT_TRUE(std::isnan(r.lse[1]));
        EXPECT_TRUE(std::isfinite(r.o[2]));
        EXPECT_FALSE(r.finite);
    }
}

TEST(Reference, InvisibleKeysDoNotMatterWhateverTheyHold) {
    Small s({1, 0}, {1, 0, kNaN, kInf, 1, 1}, {10, kNaN, 40}, 2, 1);
    const uint8_t mask[] = {1, 0, 1};
    const attune_tensor mask_view = view(const_cast<uint8_t *>(mask), ATTUNE_U8, Layout::bhsd, 1, 1, 1, 3);
    s.problem.flags = ATTUNE_MASK;
    s.tensors.mask = &mask_view;
    EXPECT_NEAR(s.reference().o[0], 25.0, 1e-12);
}

TEST(Reference, ABiasMasksByInfinityAndByNothingElse) {
    Small s({0, 0}, {1, 0, 0, 1, 1, 1}, {10, 20, 40}, 2, 1);
    float bias[] = {-kInf, -kInf, -1e30f};
    const attune_tensor bias_view = view(bias, ATTUNE_F32, Layout::bhsd, 1, 1, 1, 3);
    s.problem.flags = ATTUNE_BIAS;
    s.tensors.bias = &bias_view;
    EXPECT_EQ(s.reference().o[0], 40); // a finite bias, however low, is a number
    bias[2] = -kInf;
    EXPECT_EQ(s.reference().o[0], 0);
    EXPECT_EQ(s.reference().lse[0], -kInf);
}

TEST(Reference, AddingAConstantToAllScoresShiftsLseOnly) {
    Small s = three_keys();
    const Reference before = s.reference();
    float bias[] = {5, 5, 5};
    const attune_tensor bias_view = view(bias, ATTUNE_F32, Layout::bhsd, 1, 1, 1, 3);
    s.problem.flags = ATTUNE_BIAS;
    s.tensors.bias = &bias_view;
    const Reference after = s.reference();
    EXPECT_NEAR(after.o[0], before.o[0], 1e-12);
    EXPECT_NEAR(after.lse[0], before.lse[0] + 5, 1e-12);
}

TEST(Reference, ScoresAtEachStage) {
    Small s({3, 0}, {1, 0, 0, 1, 1, 1}, {10, 20, 40}, 2, 1);
    s.problem.flags = ATTUNE_SCORES | ATTUNE_SOFTCAP | ATTUNE_CAUSAL | ATTUNE_SCALE;
    s.problem.scale = 1;
    s.problem.softcap = 2;
    s.problem.offset = 1; // keys 0 and 1
    std::vector<float> scores(3);
    const attune_tensor scores_view = view(scores.data(), ATTUNE_F32, Layout::bhsd, 1, 1, 1, 3);
    s.tensors.scores = &scores_view;
    const double capped = 2 * std::tanh(1.5), weight = std::exp(capped) / (std::exp(capped) + 1);
    const std::vector<std::vector<double>> expected = {
        {3, 0, 3}, {capped, 0, capped}, {capped, 0, -double(kInf)}, {weight, 1 - weight, 0}};
    for (int stage = 0; stage < 4; ++stage) {
        s.problem.scores_stage = attune_scores_stage(stage);
        const Reference r = s.reference();
        for (size_t j = 0; j < 3; ++j)
            EXPECT_TRUE(r.scores[j] == expected[size_t(stage)][j] ||
                        std::abs(r.scores[j] - expected[size_t(stage)][j]) < 1e-12)
                << "stage " << stage << " key " << j << ": " << r.scores[j];
        // check_outputs sees a wrong score.
        s.o[0] = float(r.o[0]);
        s.lse[0] = float(r.lse[0]);
        for (size_t j = 0; j < 3; ++j) scores[j] = float(r.scores[j]);
        EXPECT_TRUE(check_outputs(r, s.tensors).ok) << check_outputs(r, s.tensors).why;
        scores[1] += 0.01f;
        EXPECT_FALSE(check_outputs(r, s.tensors).ok);
    }
}

TEST(Reference, GroupedHeadsShareTheirKeys) {
    const Inputs grouped(parse_case("f32:b2:h6/2:n3:m5:d4"), {});
    const Reference r = make_reference(grouped.problem(), grouped.tensors());
    // The same with K and V repeated by strides: heads 0-2 use key head 0, heads 3-5 head 1.
    attune_problem p = grouped.problem();
    attune_tensors t = grouped.tensors();
    for (int64_t h = 0; h < 6; ++h) {
        attune_problem one = p;
        one.Hq = one.Hkv = 1;
        attune_tensors x = t;
        x.q.data = static_cast<float *>(t.q.data) + h * t.q.stride[1];
        x.k.data = static_cast<float *>(t.k.data) + h / 3 * t.k.stride[1];
        x.v.data = static_cast<float *>(t.v.data) + h / 3 * t.v.stride[1];
        const Reference single = make_reference(one, x);
        for (int64_t b = 0; b < 2; ++b)
            for (int64_t e = 0; e < 12; ++e) ASSERT_EQ(single.o[size_t(b * 12 + e)], r.o[size_t((b * 6 + h) * 12 + e)]);
    }
}

TEST(Reference, NoRowsNoWork) {
    for (const char *text : {"f32:b0:n4:d8", "f32:n0:m3:d8"}) {
        const Inputs inputs(parse_case(text), {});
        const Reference r = make_reference(inputs.problem(), inputs.tensors());
        EXPECT_TRUE(r.rows.empty());
        EXPECT_TRUE(check_outputs(r, inputs.tensors()).ok);
    }
}

} // namespace
} // namespace attune::tools
