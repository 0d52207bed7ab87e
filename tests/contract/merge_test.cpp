// attune_merge (contract 3.11): attentions over parts of the keys become the attention over all of them.
#include "bed.h"
#include "count_allocations.h"

#include "attune/attune.hpp"

#include <cmath>
#include <cstring>
#include <fmt/format.h>
#include <limits>

namespace attune::contract {
namespace {

using namespace tools;
using tools::Plan; // not the one of attune.hpp

using Contract_merge = ContractTest;

constexpr float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();

// Attention over a part: O and LSE of [B, H, N, dv], dense.
struct Part {
    Array o, lse;
    Part(int64_t B, int64_t H, int64_t N, int64_t dv, attune_dtype dtype = ATTUNE_F32, const Spec &spec = {})
        : o(dtype, {B, H, N, dv}, spec, Guard::end, true), lse(ATTUNE_F32, {B, H, N, 1}, {}, Guard::end, true) {}
    attune_partial view() const { return {o.t, lse.t}; }
};

attune_status merge(const std::vector<const Part *> &parts, Part &out, const float *sinks = nullptr) {
    std::vector<attune_partial> views;
    for (const Part *part : parts) views.push_back(part->view());
    return attune_merge(views.data(), int64_t(views.size()), sinks, &out.o.t, &out.lse.t);
}

// Part `n` of a seed: random numbers; now and then a row that saw no key, whose O is not even a number.
Part random_part(uint64_t seed, uint64_t n, int64_t B = 2, int64_t H = 3, int64_t N = 5, int64_t dv = 20) {
    Part part(B, H, N, dv);
    Random random(seed, 100 + n);
    const double spread = seed % 3 == 0 ? 60 : 3, far = seed % 4 == 0 ? 2.45e5 : 0;
    part.lse.each([&](int64_t b, int64_t h, int64_t i, int64_t) {
        const bool empty = random.chance(0.25);
        part.lse.set(b, h, i, 0, empty ? -kInf : float(far + spread * random.normal()));
        for (int64_t d = 0; d < dv; d++) part.o.set(b, h, i, d, empty ? kNaN : float(random.normal()));
    });
    return part;
}

// The largest difference of two results, in units of what rounding may do to them: LSE has an error of its own last
// digit, which becomes one of O where they are merged again.
double distance(const Part &a, const Part &b) {
    double worst = 0;
    a.lse.each([&](int64_t n, int64_t h, int64_t i, int64_t) {
        const double x = a.lse.get(n, h, i, 0), y = b.lse.get(n, h, i, 0);
        const double size = std::isfinite(x) ? std::max(1.0, std::abs(x)) : 1.0, eps = 0x1p-23;
        if (!(x == y)) worst = std::max(worst, std::abs(x - y) / (4 * eps * size));
        for (int64_t d = 0; d < a.o.t.shape[3]; d++) {
            const double difference = std::abs(double(a.o.get(n, h, i, d)) - double(b.o.get(n, h, i, d)));
            worst = std::max(worst, difference / (4 * eps * (8 + 4 * size)));
        }
    });
    return worst;
}

// Keys [first, last) of a bed as a problem of its own, in the same memory.
struct Split {
    attune_problem p;
    attune_tensors t;
    attune_tensor mask, bias;
    std::vector<int64_t> offsets, kv_len;

    Split(const Bed &bed, int64_t first, int64_t last, const Part &out) : p(bed.p), t(bed.tensors()) {
        p.M = last - first;
        p.flags &= ~uint32_t(ATTUNE_SINK);
        p.offset -= first;
        t.sinks = nullptr;
        for (int64_t &offset : offsets = bed.offsets) offset -= first;
        for (int64_t &length : kv_len = bed.kv_len) length = std::clamp<int64_t>(length - first, 0, p.M);
        if (t.offsets) t.offsets = offsets.data();
        if (t.kv_len) t.kv_len = kv_len.data();
        const auto cut = [&](attune_tensor &x, int dim) {
            x.data = static_cast<char *>(x.data) + first * x.stride[dim] * int64_t(dtype_size(x.dtype));
            x.shape[dim] = p.M;
        };
        cut(t.k, 2);
        cut(t.v, 2);
        if (t.mask) cut(mask = *t.mask, 3), t.mask = &mask;
        if (t.bias) cut(bias = *t.bias, 3), t.bias = &bias;
        t.o = out.o.t;
        t.lse = &out.lse.t;
    }
};

// Every kernel, split at every kind of place: the merged parts are right, by the bound of the whole.
TEST_F(Contract_merge, split_and_merged_is_the_whole) {
    const std::vector<std::vector<int64_t>> cuts = {
        {0, 70}, {0, 33, 70}, {0, 1, 2, 64, 70}, {0, 0, 70, 70}, {0, 10, 20, 30, 40, 50, 60, 70}};
    uint64_t seed = 0;
    for (const char *text : {"f32:b2:h4/2:n30:m70:d64", "f32:b1:h2:n9:m70:d40:causal-br:sink",
                             "f32:b2:h2:n26:m70:d64:causal:window=20,-1:offset=30,3:kvlen=70,41:sink",
                             "f32:b1:h2:n5:m70:d64/80:mask=bool:mask=bias:softcap=3:alibi:sink:offset=12"})
        for (const Group &group : groups(parse_case(text), Fit::features)) {
            Bed bed(group.c, ++seed);
            const Reference reference = bed.reference();
            for (const attune_kernel *k : group.kernels)
                for (const auto &cut : cuts) {
                    std::vector<Part> parts;
                    parts.reserve(cut.size());
                    std::vector<attune_partial> views;
                    bool ok = true;
                    for (size_t n = 0; n + 1 < cut.size(); n++) {
                        parts.emplace_back(bed.p.B, bed.p.Hq, bed.p.N, bed.p.dv);
                        const Split split(bed, cut[n], cut[n + 1], parts.back());
                        std::string why;
                        const Plan plan = make_plan(split.p, k->name, "", 1, why);
                        if (!plan) {
                            ok = false; // needs more keys than the part has
                            break;
                        }
                        const Workspace workspace(device_under_test(), attune_plan_workspace(plan.get()), Guard::end);
                        ASSERT_EQ(attune_run(plan.get(), &split.t, workspace.data(), workspace.size()), ATTUNE_OK)
                            << attune_last_error();
                        views.push_back(parts.back().view());
                    }
                    if (!ok) {
                        EXPECT_FALSE(is_fused(*k) && k->m_min <= 1) << k->name;
                        continue;
                    }
                    bed.reset_outputs();
                    const attune_tensors t = bed.tensors();
                    ASSERT_EQ(attune_merge(views.data(), int64_t(views.size()), t.sinks, &t.o, t.lse), ATTUNE_OK)
                        << attune_last_error();
                    const Verdict verdict = check_outputs(reference, t);
                    EXPECT_TRUE(verdict.ok)
                        << k->name << ", " << views.size() << " parts of " << bed.text() << ": " << verdict.why;
                    EXPECT_TRUE(bed.gaps_intact());
                }
        }
}

// (a + b) + c = a + (b + c) = a + b + c = c + a + b, whatever is among them.
TEST_F(Contract_merge, associative_and_commutative) {
    for (uint64_t seed = 1; seed <= 300; seed++) {
        const Part a = random_part(seed, 0), b = random_part(seed, 1), c = random_part(seed, 2);
        Part all(2, 3, 5, 20), ab(2, 3, 5, 20), bc(2, 3, 5, 20), left(2, 3, 5, 20), right(2, 3, 5, 20),
            turned(2, 3, 5, 20);
        ASSERT_EQ(merge({&a, &b, &c}, all), ATTUNE_OK) << attune_last_error();
        ASSERT_EQ(merge({&a, &b}, ab), ATTUNE_OK);
        ASSERT_EQ(merge({&b, &c}, bc), ATTUNE_OK);
        ASSERT_EQ(merge({&ab, &c}, left), ATTUNE_OK);
        ASSERT_EQ(merge({&a, &bc}, right), ATTUNE_OK);
        ASSERT_EQ(merge({&c, &a, &b}, turned), ATTUNE_OK);
        for (const Part *other : {&left, &right, &turned}) EXPECT_LE(distance(all, *other), 1) << "seed " << seed;
    }
}

// Against float64, written down from the formula.
TEST_F(Contract_merge, formula) {
    for (uint64_t seed = 1; seed <= 100; seed++) {
        std::vector<Part> parts;
        std::vector<const Part *> list;
        for (uint64_t n = 0; n < 1 + seed % 6; n++) parts.push_back(random_part(seed, n));
        for (const Part &part : parts) list.push_back(&part);
        const bool with_sink = seed % 2;
        Random random(seed);
        float sinks[3];
        for (float &s : sinks) s = float(random.normal());
        Part out(2, 3, 5, 20);
        ASSERT_EQ(merge(list, out, with_sink ? sinks : nullptr), ATTUNE_OK);
        out.lse.each([&](int64_t b, int64_t h, int64_t i, int64_t) {
            double top = with_sink ? double(sinks[h]) : -double(kInf), sum = 0;
            for (const Part &part : parts) top = std::max(top, double(part.lse.get(b, h, i, 0)));
            const auto weight = [&](double lse) { return std::isinf(top) ? 0 : std::exp(lse - top); };
            for (const Part &part : parts) sum += weight(double(part.lse.get(b, h, i, 0)));
            if (with_sink) sum += weight(double(sinks[h]));
            const double lse = top + (sum > 0 ? std::log(sum) : 0), got = out.lse.get(b, h, i, 0);
            EXPECT_TRUE(got == lse || std::abs(got - lse) <= 2 * 0x1p-23 * std::max(1.0, std::abs(lse)))
                << got << " instead of " << lse << ", seed " << seed;
            for (int64_t d = 0; d < 20; d++) {
                double o = 0;
                for (const Part &part : parts)
                    if (part.lse.get(b, h, i, 0) > -kInf)
                        o += weight(double(part.lse.get(b, h, i, 0))) / sum * double(part.o.get(b, h, i, d));
                EXPECT_NEAR(double(out.o.get(b, h, i, d)), o, 8 * 0x1p-23 * 4) << "seed " << seed;
            }
        });
    }
}

TEST_F(Contract_merge, parts_that_saw_nothing) {
    Part a(1, 1, 1, 3), b(1, 1, 1, 3), out(1, 1, 1, 3);
    for (Part *part : {&a, &b}) {
        part->o.fill(kNaN); // it must not matter
        part->lse.fill(-kInf);
    }
    const float sink = 0.5f;
    for (const float *sinks : {static_cast<const float *>(nullptr), &sink})
        for (const std::vector<const Part *> &parts :
             {std::vector<const Part *>{}, std::vector<const Part *>{&a}, std::vector<const Part *>{&a, &b}}) {
            out.o.fill(7);
            ASSERT_EQ(merge(parts, out, sinks), ATTUNE_OK);
            EXPECT_EQ(out.lse.get(0, 0, 0, 0), sinks ? sink : -kInf);
            for (int64_t d = 0; d < 3; d++) EXPECT_EQ(out.o.get(0, 0, 0, d), 0.0f);
        }
    // Beside one that did, they change no bit.
    const Part real = random_part(2, 0, 1, 1, 1, 3);
    Part one(1, 1, 1, 3);
    one.o.each([&](int64_t x, int64_t y, int64_t z, int64_t d) { one.o.set(x, y, z, d, 0.1f * float(d + 1)); });
    one.lse.fill(1.7f);
    ASSERT_EQ(merge({&a, &one, &b}, out), ATTUNE_OK);
    EXPECT_EQ(out.lse.get(0, 0, 0, 0), 1.7f);
    for (int64_t d = 0; d < 3; d++) EXPECT_EQ(out.o.get(0, 0, 0, d), 0.1f * float(d + 1));
}

// Contract 3.10 for merges: that row and no other.
TEST_F(Contract_merge, nan_and_infinity) {
    for (float bad : {kNaN, kInf, -kNaN}) {
        Part a = random_part(1, 0), b = random_part(1, 1);
        a.lse.set(1, 2, 3, 0, bad);
        Part out(2, 3, 5, 20), again(2, 3, 5, 20);
        ASSERT_EQ(merge({&a, &b}, out), ATTUNE_OK);
        ASSERT_EQ(merge({&out}, again), ATTUNE_OK); // and through the next merge
        for (const Part *part : {&out, &again})
            part->lse.each([&](int64_t n, int64_t h, int64_t i, int64_t) {
                const bool here = n == 1 && h == 2 && i == 3;
                EXPECT_EQ(std::isnan(part->lse.get(n, h, i, 0)), here);
                for (int64_t d = 0; d < 20; d++) EXPECT_EQ(std::isnan(part->o.get(n, h, i, d)), here);
            });
    }
    // A NaN in O of a part that counts touches its feature; an infinity stays one, however little it counts.
    Part a(1, 1, 1, 2), b(1, 1, 1, 2), out(1, 1, 1, 2);
    a.lse.fill(0);
    b.lse.fill(-200);
    for (Part *part : {&a, &b}) part->o.fill(1);
    b.o.set(0, 0, 0, 0, kNaN);
    b.o.set(0, 0, 0, 1, kInf);
    ASSERT_EQ(merge({&a, &b}, out), ATTUNE_OK);
    EXPECT_TRUE(std::isnan(out.o.get(0, 0, 0, 0)));
    EXPECT_EQ(out.o.get(0, 0, 0, 1), kInf);
    // A sink of NaN or +inf makes its head NaN, one of -inf is none.
    const Part c = random_part(1, 0, 1, 3, 2, 4), d = random_part(1, 1, 1, 3, 2, 4);
    const float sinks[3] = {kNaN, -kInf, kInf};
    Part with(1, 3, 2, 4), without(1, 3, 2, 4);
    ASSERT_EQ(merge({&c, &d}, with, sinks), ATTUNE_OK);
    ASSERT_EQ(merge({&c, &d}, without), ATTUNE_OK);
    for (int64_t i = 0; i < 2; i++) {
        EXPECT_EQ(with.lse.get(0, 1, i, 0), without.lse.get(0, 1, i, 0));
        EXPECT_EQ(with.o.get(0, 1, i, 2), without.o.get(0, 1, i, 2));
        for (int64_t h : {0, 2}) {
            if (without.lse.get(0, h, i, 0) == -kInf) continue;
            EXPECT_TRUE(std::isnan(with.o.get(0, h, i, 0)) && std::isnan(with.lse.get(0, h, i, 0)));
        }
    }
}

// The sink comes in once, at the end: in the last of two merges as in the only one.
TEST_F(Contract_merge, sink_in_the_last_merge_only) {
    const float sinks[3] = {0.3f, -2, 5};
    for (uint64_t seed = 1; seed <= 50; seed++) {
        const Part a = random_part(seed, 0), b = random_part(seed, 1), c = random_part(seed, 2);
        Part once(2, 3, 5, 20), first(2, 3, 5, 20), last(2, 3, 5, 20);
        ASSERT_EQ(merge({&a, &b, &c}, once, sinks), ATTUNE_OK);
        ASSERT_EQ(merge({&a, &b}, first), ATTUNE_OK);
        ASSERT_EQ(merge({&first, &c}, last, sinks), ATTUNE_OK);
        EXPECT_LE(distance(once, last), 1) << "seed " << seed;
    }
}

TEST_F(Contract_merge, anywhere_in_memory) {
    const Part a = random_part(1, 0, 2, 3, 5, 300), b = random_part(1, 1, 2, 3, 5, 300); // several chunks of features
    Part plain(2, 3, 5, 300);
    ASSERT_EQ(merge({&a, &b}, plain), ATTUNE_OK);
    Spec padded;
    padded.pad = {3, 5, 7, 0};
    padded.step = {1, 1, 1, 2};
    padded.lead = 3;
    for (const Spec &spec : {spec_of(Layout::bshd), spec_of(Layout::col), padded}) {
        Part from(2, 3, 5, 300, ATTUNE_F32, spec), to(2, 3, 5, 300, ATTUNE_F32, spec);
        const auto copy = [](Array &x, const Array &y) {
            x.each([&](int64_t n, int64_t h, int64_t i, int64_t d) { x.set(n, h, i, d, y.get(n, h, i, d)); });
        };
        copy(from.o, a.o);
        copy(from.lse, a.lse);
        ASSERT_EQ(merge({&from, &b}, to), ATTUNE_OK);
        EXPECT_EQ(distance(to, plain), 0);
        EXPECT_TRUE(to.o.gaps_intact() && to.lse.gaps_intact());
        ASSERT_EQ(merge({&from, &b}, from), ATTUNE_OK); // in place
        EXPECT_EQ(distance(from, plain), 0);
    }
    Part last = random_part(1, 1, 2, 3, 5, 300);
    ASSERT_EQ(merge({&a, &last}, last), ATTUNE_OK); // in the place of the second
    EXPECT_EQ(distance(last, plain), 0);
}

// 16-bit parts and outputs: sums stay f32, the result is rounded once.
TEST_F(Contract_merge, sixteen_bits) {
    for (attune_dtype dtype : {ATTUNE_BF16, ATTUNE_F16}) {
        Part a(1, 2, 3, 9, dtype), b(1, 2, 3, 9, dtype), wide_a(1, 2, 3, 9), wide_b(1, 2, 3, 9), out(1, 2, 3, 9, dtype),
            wide(1, 2, 3, 9);
        Random random(1);
        for (auto [narrow, same] : {std::pair{&a, &wide_a}, {&b, &wide_b}}) {
            narrow->o.each([&](int64_t n, int64_t h, int64_t i, int64_t d) {
                narrow->o.set(n, h, i, d, float(random.normal()));
                same->o.set(n, h, i, d, narrow->o.get(n, h, i, d));
            });
            narrow->lse.each([&](int64_t n, int64_t h, int64_t i, int64_t) {
                narrow->lse.set(n, h, i, 0, float(random.normal()));
                same->lse.set(n, h, i, 0, narrow->lse.get(n, h, i, 0));
            });
        }
        ASSERT_EQ(merge({&a, &b}, out), ATTUNE_OK) << attune_last_error();
        ASSERT_EQ(merge({&wide_a, &wide_b}, wide), ATTUNE_OK);
        wide.o.each([&](int64_t n, int64_t h, int64_t i, int64_t d) {
            EXPECT_EQ(out.o.get(n, h, i, d), round_to(wide.o.get(n, h, i, d), dtype));
        });
        EXPECT_EQ(out.lse.get(0, 1, 2, 0), wide.lse.get(0, 1, 2, 0));
    }
}

TEST_F(Contract_merge, threads_and_allocations) {
    const Part a = random_part(1, 0, 4, 8, 64, 64), b = random_part(1, 1, 4, 8, 64, 64);
    Part one(4, 8, 64, 64), many(4, 8, 64, 64);
    attune_set_num_threads(1);
    ASSERT_EQ(merge({&a, &b}, one), ATTUNE_OK);
    for (int threads : {2, 8}) {
        attune_set_num_threads(threads);
        ASSERT_EQ(merge({&a, &b}, many), ATTUNE_OK);
        EXPECT_EQ(distance(many, one), 0);
        const attune_partial views[] = {a.view(), b.view()};
        const int64_t before = allocations();
        ASSERT_EQ(attune_merge(views, 2, nullptr, &many.o.t, &many.lse.t), ATTUNE_OK);
        if (can_count_allocations()) {
            EXPECT_EQ(allocations(), before);
        }
    }
    attune_set_num_threads(0);
}

TEST_F(Contract_merge, wrong_arguments) {
    const Part a = random_part(1, 0);
    Part out(2, 3, 5, 20);
    struct Wrong {
        std::function<void(attune_partial (&)[2], attune_tensor &, attune_tensor &)> change;
        std::vector<std::string> words;
    };
    using Parts = attune_partial(&)[2];
    const Wrong wrongs[] = {
        {[](Parts p, attune_tensor &, attune_tensor &) { p[1].o.shape[3] = 21; },
         {"parts[1].o.shape", "[2, 3, 5, 20]"}},
        {[](Parts p, attune_tensor &, attune_tensor &) { p[0].lse.shape[3] = 20; },
         {"parts[0].lse.shape", "[2, 3, 5, 1]"}},
        {[](Parts p, attune_tensor &, attune_tensor &) { p[1].lse.dtype = ATTUNE_BF16; },
         {"parts[1].lse.dtype is bf16", "f32"}},
        {[](Parts p, attune_tensor &, attune_tensor &) { p[1].o.dtype = ATTUNE_U8; },
         {"parts[1].o.dtype is u8", "f16"}},
        {[](Parts p, attune_tensor &, attune_tensor &) { p[0].o.data = nullptr; }, {"parts[0].o.data is null"}},
        {[](Parts, attune_tensor &o, attune_tensor &) { o.data = nullptr; }, {"o.data is null"}},
        {[](Parts, attune_tensor &o, attune_tensor &) { o.stride[2] = 0; }, {"o.stride[2] is 0"}},
        {[](Parts, attune_tensor &o, attune_tensor &) { o.shape[1] = -3; }, {"o.shape[1] is -3"}},
        {[](Parts, attune_tensor &o, attune_tensor &) { o.device = ATTUNE_CUDA; }, {"o.device is 3"}},
        {[](Parts, attune_tensor &, attune_tensor &l) { l.shape[2] = 6; }, {"lse.shape"}},
        {[](Parts, attune_tensor &o, attune_tensor &) { o.data = static_cast<char *>(o.data) + 1; },
         {"o.data", "aligned"}},
    };
    for (const Wrong &wrong : wrongs) {
        attune_partial parts[2] = {a.view(), a.view()};
        attune_tensor o = out.o.t, lse = out.lse.t;
        wrong.change(parts, o, lse);
        out.o.reset();
        EXPECT_EQ(attune_merge(parts, 2, nullptr, &o, &lse), ATTUNE_INVALID_ARGUMENT) << wrong.words[0];
        const std::string message = attune_last_error();
        for (const std::string &word : wrong.words)
            EXPECT_NE(message.find(word), std::string::npos) << "'" << message << "' lacks '" << word << "'";
        EXPECT_TRUE(out.o.all_pattern()) << wrong.words[0] << ": it wrote";
    }
    const attune_partial part = a.view();
    EXPECT_EQ(attune_merge(nullptr, 1, nullptr, &out.o.t, nullptr), ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find("parts is null: expected 1"), std::string::npos);
    EXPECT_EQ(attune_merge(&part, -1, nullptr, &out.o.t, nullptr), ATTUNE_INVALID_ARGUMENT);
    EXPECT_EQ(attune_merge(&part, 1, nullptr, nullptr, nullptr), ATTUNE_INVALID_ARGUMENT);
    EXPECT_EQ(attune_merge(&part, 1, nullptr, &out.o.t, nullptr), ATTUNE_OK); // LSE is optional
}

TEST_F(Contract_merge, from_cpp) {
    std::vector<float> o{1, 2, 3, 4}, lse{0, 0}, sum(4), sum_lse(2);
    const std::vector<float> sink{0};
    const auto part = attune::Partial{attune::bhsd(o, 1, 1, 2, 2), attune::bhsd(lse, 1, 1, 2, 1)};
    const std::vector<attune::Partial> parts{part, part, part};
    attune::merge(parts, attune::bhsd(sum, 1, 1, 2, 2), attune::bhsd(sum_lse, 1, 1, 2, 1), sink);
    for (size_t n = 0; n < 4; n++) EXPECT_FLOAT_EQ(sum[n], o[n] * 0.75f); // three parts and a sink, all alike
    EXPECT_FLOAT_EQ(sum_lse[0], std::log(4.0f));
    const std::vector<float> wrong(2);
    EXPECT_THROW(attune::merge(parts, attune::bhsd(sum, 1, 1, 2, 2), {}, wrong), attune::Error);
    EXPECT_EQ(attune::try_merge({}, attune::bhsd(sum, 1, 1, 2, 2)), ATTUNE_OK);
    EXPECT_EQ(sum[3], 0);
}

} // namespace
} // namespace attune::contract
