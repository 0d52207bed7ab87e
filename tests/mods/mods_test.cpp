#include "mods.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace attune::mods_test {

using namespace tools;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

// Packed sequences have their own number of keys each; arrays by key are as long as the longest.
int64_t keys_at_most(const Case &c) {
    return std::max(c.N, c.M);
}

std::vector<double> numbers(int64_t n, const std::function<double(int64_t)> &f) {
    std::vector<double> x(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; i++) x[size_t(i)] = f(i);
    return x;
}

const std::vector<std::string> kCases = {
    "f32:b2:h4/2:n70:m70:d64",
    "f32:b1:h2:n300:m300:d64",
    "f32:b3:h6/2:n3:m333:d64",
    "f32:b1:h2:n1:m700:d64",
    "f32:b2:h4/2:n64:m128:d64:causal-br",
    "f32:b1:h3/1:n90:m200:d64:window=40,3:offset=60",
    "f32:b2:h2:n50:m256:d64:kvlen=200,77:mask=bool",
    "f32:b1:h2:n40:m100:d64:mask=bias:softcap=4:alibi:sink",
    "f32:h2:d64:varlen=60,1,30:varlenk=90,7,64",
};

} // namespace

void Params::add(const char *name, attune_dtype dtype, const std::vector<int64_t> &shape,
                 const std::vector<double> &values) {
    memory_.emplace_back(4 * values.size(), Guard::end);
    Buffer &b = memory_.back();
    for (size_t i = 0; i < values.size(); i++) {
        if (dtype == ATTUNE_F32)
            b.as<float>()[i] = float(values[i]);
        else
            b.as<int32_t>()[i] = int32_t(values[i]);
    }
    attune_param p{};
    p.name = name;
    p.dtype = dtype;
    p.rank = int(shape.size());
    p.data = b.data();
    int64_t step = 1;
    for (int d = p.rank - 1; d >= 0; d--) {
        p.shape[d] = shape[size_t(d)];
        p.stride[d] = step;
        step *= p.shape[d];
    }
    ASSERT_EQ(size_t(step), values.size());
    params_.push_back(p);
}

const std::vector<Mod> &mods() {
    static const std::vector<Mod> all = {
        {"alibi",
         [](const Case &c, Params &p) -> Function {
             const auto slopes =
                 numbers(c.Hq, [&](int64_t h) { return float(std::exp2(-8.0 * double(h + 1) / double(c.Hq))); });
             p.floats("slopes", {c.Hq}, slopes);
             return [=](int64_t, int64_t h, int64_t q, int64_t k, double &s) {
                 s -= slopes[size_t(h)] * std::abs(double(q - k));
                 return true;
             };
         }},
        {"softcap",
         [](const Case &, Params &p) -> Function {
             p.scalar("cap", 1.5f);
             return [](int64_t, int64_t, int64_t, int64_t, double &s) {
                 s = 1.5 * std::tanh(s / 1.5);
                 return true;
             };
         }},
        {"sliding",
         [](const Case &, Params &p) -> Function {
             p.scalar("left", int64_t(37));
             return [](int64_t, int64_t, int64_t q, int64_t k, double &) { return k <= q && q - k <= 37; };
         }},
        {"dilated",
         [](const Case &, Params &p) -> Function {
             p.scalar("step", int64_t(3));
             p.scalar("count", int64_t(20));
             return [](int64_t, int64_t, int64_t q, int64_t k, double &) {
                 return std::abs(q - k) % 3 == 0 && std::abs(q - k) <= 60;
             };
         }},
        {"longformer",
         [](const Case &, Params &p) -> Function {
             p.scalar("window", int64_t(33));
             p.scalar("global_tokens", int64_t(2));
             return [](int64_t, int64_t, int64_t q, int64_t k, double &) {
                 return std::abs(q - k) <= 33 || q < 2 || k < 2;
             };
         }},
        {"prefixlm",
         [](const Case &c, Params &p) -> Function {
             const auto prefix = numbers(c.B, [](int64_t b) { return 40 + 7 * b; });
             p.ints("prefix", {c.B}, prefix);
             return [=](int64_t b, int64_t, int64_t q, int64_t k, double &) {
                 return k <= q || k < int64_t(prefix[size_t(b)]);
             };
         }},
        {"document",
         [](const Case &c, Params &p) -> Function {
             const int64_t n = keys_at_most(c);
             // Documents of 45 keys in the first batch element, of 56, 67 … in the others.
             const auto document = numbers(c.B * n, [n](int64_t i) { return (i % n) / (45 + 11 * (i / n)); });
             p.ints("document", {c.B, n}, document);
             return [=](int64_t b, int64_t, int64_t q, int64_t k, double &) {
                 return document[size_t(b * n + q)] == document[size_t(b * n + k)];
             };
         }},
        {"sharedprefix",
         [](const Case &c, Params &p) -> Function {
             const int64_t n = keys_at_most(c);
             const auto answer = numbers(n, [](int64_t i) { return i < 50 ? 0 : 1 + (i - 50) / 70; });
             p.scalar("prompt", int64_t(50));
             p.ints("answer", {n}, answer);
             return [=](int64_t, int64_t, int64_t q, int64_t k, double &) {
                 return k <= q && (k < 50 || answer[size_t(q)] == answer[size_t(k)]);
             };
         }},
        {"neighbourhood",
         [](const Case &, Params &p) -> Function {
             p.scalar("width", int64_t(17));
             p.scalar("radius", int64_t(2));
             return [](int64_t, int64_t, int64_t q, int64_t k, double &) {
                 return std::abs(q / 17 - k / 17) <= 2 && std::abs(q % 17 - k % 17) <= 2;
             };
         }},
        {"relative",
         [](const Case &c, Params &p) -> Function {
             const int64_t furthest = 20, width = 2 * furthest + 1;
             const auto table = numbers(c.Hq * width, [](int64_t i) { return float(std::sin(double(i))); });
             p.floats("table", {c.Hq, width}, table);
             p.scalar("furthest", furthest);
             return [=](int64_t, int64_t h, int64_t q, int64_t k, double &s) {
                 s += table[size_t(h * width + std::clamp(k - q, -furthest, furthest) + furthest)];
                 return true;
             };
         }},
        {"sigmoid",
         [](const Case &, Params &p) -> Function {
             p.scalar("shift", -2.0f);
             return [](int64_t, int64_t, int64_t, int64_t, double &s) {
                 s = -std::log1p(std::exp(-(s - 2.0)));
                 return true;
             };
         }},
        {"softcap,document",
         [](const Case &c, Params &p) -> Function {
             const Function cap = mod("softcap").make(c, p), document = mod("document").make(c, p);
             return [=](int64_t b, int64_t h, int64_t q, int64_t k, double &s) {
                 return cap(b, h, q, k, s) && document(b, h, q, k, s);
             };
         }},
    };
    return all;
}

const Mod &mod(const std::string &name) {
    for (const Mod &m : mods())
        if (m.name == name) return m;
    throw std::invalid_argument(name);
}

int expect_right(const std::string &name, const std::string &case_text, const std::function<void(Bed &)> &edit) {
    int done = 0;
    for (const attune_kernel *k : all_kernels()) {
        if (!k->mods || name != k->mods) continue;
        for (Guard guard : {Guard::end, Guard::start}) {
            Bed bed(contract::adapt(parse_case(case_text), *k), 1, {}, guard);
            Params params;
            ReferenceOptions options;
            options.user = mod(name).make(bed.c, params);
            bed.params = params.list();
            bed.p.mods = name.c_str();
            if (edit) edit(bed);
            if (attune_kernel_refuses(k, &bed.p)) break;
            const Reference reference = make_reference(bed.p, bed.tensors(), options);
            done += contract::run_and_check(*k, bed, reference, {.guard = guard});
            if (guard == Guard::start) continue;
            Bed other(bed.c, 1, {}, guard);
            other.copy_inputs(bed);
            other.params = bed.params;
            other.p = bed.p;
            if (contract::run(*k, other, {.threads = 3})) {
                EXPECT_EQ(other.bits_differ(bed), "") << k->name;
            }
        }
    }
    return done;
}

class EachMod : public ::testing::TestWithParam<std::string> {};

TEST_P(EachMod, is_right_in_every_kernel) {
    if (attune_isa() == std::string("sse41")) GTEST_SKIP() << "these kernels are for avx2";
    if (const std::string why = contract::device_missing(); !why.empty()) GTEST_SKIP() << why;
    for (const std::string &text : kCases) {
        if (contract::device_under_test() != ATTUNE_CPU && parse_case(text).q_lens.size()) continue;
        EXPECT_GT(expect_right(GetParam(), text), 0) << text;
    }
}

INSTANTIATE_TEST_SUITE_P(, EachMod, ::testing::ValuesIn([] {
                             std::vector<std::string> names;
                             for (const Mod &m : mods()) names.push_back(m.name);
                             return names;
                         }()),
                         [](const auto &info) {
                             std::string name = info.param;
                             std::replace(name.begin(), name.end(), ',', '_');
                             return name;
                         });

// Keys that no row sees by the user's mask, and what they hold, do not matter (contract 3.8).
TEST(UserFunctions, nan_in_keys_that_they_hide_has_no_influence) {
    for (const char *text : {"f32:b1:h2:n60:m300:d64", "f32:b1:h2:n2:m300:d64"})
        EXPECT_GT(expect_right("document", text,
                               [](Bed &bed) { // rows are of the first two documents, keys 0 to 89
                                   for (int64_t h = 0; h < bed.c.Hkv; h++)
                                       for (int64_t j = 100; j < 300; j += 3) {
                                           bed.k.set(0, h, j, 5, kNan);
                                           bed.v.set(0, h, j + 1, 6, kInf);
                                       }
                               }),
                  0);
}

// Blocks that no row sees are not read at all: NaN in their V would send the tile to the strict code. (The masks of
// these are far from them in every panel size.)
TEST(UserFunctions, blocks_that_they_hide_are_not_read) {
    if (attune_isa() == std::string("sse41")) GTEST_SKIP() << "these kernels are for avx2";
    struct Skip {
        const char *mod, *text;
        int64_t first, last; // keys that no row sees, with a block to spare on either side
    };
    for (const Skip &skip : {Skip{"sliding", "f32:h2:n64:m900:d64", 320, 900},
                             {"dilated", "f32:h2:n64:m900:d64", 384, 900},
                             {"prefixlm", "f32:h2:n64:m900:d64", 320, 900},
                             {"document", "f32:h2:n40:m900:d64", 320, 900},
                             {"neighbourhood", "f32:h2:n64:m900:d64", 384, 900},
                             {"softcap,document", "f32:h2:n3:m900:d64", 320, 900}}) {
        int done = 0;
        for (const attune_kernel *k : all_kernels()) {
            if (!k->mods || std::string(skip.mod) != k->mods || k->traits & ATTUNE_TRAIT_QUADRATIC) continue;
            Bed bed(contract::adapt(parse_case(skip.text), *k), 1);
            Params params;
            ReferenceOptions options;
            options.user = mod(skip.mod).make(bed.c, params);
            bed.params = params.list();
            bed.p.mods = skip.mod;
            if (attune_kernel_refuses(k, &bed.p)) continue;
            for (int64_t j = skip.first; j < skip.last; j++) bed.v.set(0, 1, j, 3, kNan);
            const uint64_t before = attune_strict_tiles();
            const Reference reference = make_reference(bed.p, bed.tensors(), options);
            done += contract::run_and_check(*k, bed, reference);
            EXPECT_EQ(attune_strict_tiles(), before) << k->name << ": it read keys that no row sees";
        }
        EXPECT_GT(done, 0) << skip.mod;
    }
}

// NaN and +inf from a user function make the row NaN, and no other (contract 3.10); -inf hides (3.8).
TEST(UserFunctions, infinities_and_nan_of_their_parameters) {
    if (const std::string why = contract::device_missing(); !why.empty()) GTEST_SKIP() << why;
    for (const float x : {kNan, kInf, -kInf})
        for (const char *text : {"f32:b1:h4:n60:m90:d64", "f32:b1:h4/2:n1:m90:d64:mask=bias"}) {
            int done = 0;
            for (const attune_kernel *k : all_kernels()) {
                if (!k->mods || std::string("relative") != k->mods) continue;
                Bed bed(contract::adapt(parse_case(text), *k), 1);
                Params params;
                ReferenceOptions options;
                const Function plain = mod("relative").make(bed.c, params);
                bed.params = params.list();
                bed.p.mods = "relative";
                if (attune_kernel_refuses(k, &bed.p)) continue;
                static_cast<float *>(const_cast<void *>(bed.params[0].data))[41 + 23] = x; // head 1, key 3 further
                options.user = [&](int64_t b, int64_t h, int64_t q, int64_t key, double &s) {
                    if (h != 1 || key - q != 3) return plain(b, h, q, key, s);
                    s = double(x);
                    return x != -kInf;
                };
                const Reference reference = make_reference(bed.p, bed.tensors(), options);
                done += contract::run_and_check(*k, bed, reference);
            }
            if (contract::device_under_test() != ATTUNE_VULKAN) {
                EXPECT_GT(done, 0) << text;
            }
        }
}

// e^LSE times O is what sigmoid attention is.
TEST(UserFunctions, sigmoid_attention) {
    const Case c = parse_case("f32:b1:h2:n20:m30:d64");
    Bed bed(c, 1);
    Params params;
    mod("sigmoid").make(c, params);
    bed.params = params.list();
    bed.p.mods = "sigmoid";
    int done = 0;
    for (const attune_kernel *k : all_kernels()) {
        if (!k->mods || std::string("sigmoid") != k->mods || attune_kernel_refuses(k, &bed.p)) continue;
        ASSERT_TRUE(contract::run(*k, bed));
        for (int64_t h = 0; h < 2; h++)
            for (int64_t i = 0; i < 20; i++)
                for (int64_t d = 0; d < 64; d += 9) {
                    double o = 0;
                    for (int64_t j = 0; j < 30; j++) {
                        double s = 0;
                        for (int64_t e = 0; e < 64; e++) s += double(bed.q.get(0, h, i, e)) * bed.k.get(0, h, j, e);
                        o += 1 / (1 + std::exp(-(s / 8 - 2))) * bed.v.get(0, h, j, d);
                    }
                    EXPECT_NEAR(bed.o_at(0, h, i, d) * std::exp(double(bed.lse.get(0, h, i, 0))), o, 1e-4);
                }
        done++;
    }
    EXPECT_GT(done, 0);
}

} // namespace attune::mods_test
