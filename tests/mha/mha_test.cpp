// Multi-head attention against a float64 reference: the three uses of the literature, every way to give the weights,
// every flag that passes through to attention, odd strides, and what must not happen (reads of padding, writes outside
// y, allocations in a run).
#include "attune/attune.hpp"
#include "reference.h"
#include "runtime/safetensors.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <thread>
#include <unistd.h>

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define ATTUNE_COUNT_ALLOCATIONS 1
#endif

namespace {
std::atomic<bool> counting{false};
std::atomic<long> allocations{0};
} // namespace

#ifdef ATTUNE_COUNT_ALLOCATIONS
// Every way to the heap, C++ and Halide's runtime included, passes through one of these.
extern "C" {
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

void *malloc(size_t size) {
    if (counting) allocations++;
    return __libc_malloc(size);
}
void *calloc(size_t n, size_t size) {
    if (counting) allocations++;
    return __libc_calloc(n, size);
}
void *realloc(void *p, size_t size) {
    if (counting) allocations++;
    return __libc_realloc(p, size);
}
void *memalign(size_t alignment, size_t size) {
    if (counting) allocations++;
    return __libc_memalign(alignment, size);
}
void *aligned_alloc(size_t alignment, size_t size) {
    if (counting) allocations++;
    return __libc_memalign(alignment, size);
}
int posix_memalign(void **p, size_t alignment, size_t size) {
    if (counting) allocations++;
    *p = __libc_memalign(alignment, size);
    return *p ? 0 : 12;
}
}
#endif

namespace {

using reference::Scoring;
using reference::Sizes;
using reference::Weights;

enum class Give { whole, heads, file };

struct Case {
    const char *name;
    Sizes s;
    attune::WeightLayout layout = attune::WeightLayout::in_out;
    Give give = Give::whole;
    bool biases = true;
    attune::Problem attention{};
    std::vector<int64_t> kv_len{};
    std::vector<int64_t> offsets{};
};

void PrintTo(const Case &c, std::ostream *out) {
    *out << c.name;
}

std::string temporary_file(const std::string &name) {
    return (std::filesystem::temp_directory_path() / ("attune_mha_test_" + std::to_string(::getpid()) + "_" + name))
        .string();
}

struct RemoveAtExit {
    std::string path;
    ~RemoveAtExit() { std::remove(path.c_str()); }
};

// The module of `c` with weights `w`, given in the case's way.
attune::MultiHeadAttention make(const Sizes &s, const Weights &w, attune::WeightLayout layout, Give give) {
    const attune::MhaConfig config{.d_model = s.d_model,
                                   .d_model_kv = s.d_model_kv,
                                   .d_out = s.d_out,
                                   .Hq = s.Hq,
                                   .Hkv = s.Hkv,
                                   .dk = s.dk,
                                   .dv = s.dv,
                                   .layout = layout};
    struct Matrix {
        const char *name, *bias_name;
        const std::vector<float> *in_out, *bias;
        int64_t in, out, heads;
        bool heads_are_inputs;
    };
    const Matrix matrices[4] = {{"wq", "bq", &w.wq, &w.bq, s.d_model, s.Hq * s.dk, s.Hq, false},
                                {"wk", "bk", &w.wk, &w.bk, s.d_model_kv, s.Hkv * s.dk, s.Hkv, false},
                                {"wv", "bv", &w.wv, &w.bv, s.d_model_kv, s.Hkv * s.dv, s.Hkv, false},
                                {"wo", "bo", &w.wo, &w.bo, s.Hq * s.dv, s.d_out, s.Hq, true}};
    const bool out_in = layout == attune::WeightLayout::out_in;
    std::vector<float> stored[4];
    for (int m = 0; m < 4; m++)
        stored[m] =
            out_in ? reference::transposed(*matrices[m].in_out, matrices[m].in, matrices[m].out) : *matrices[m].in_out;

    if (give == Give::whole)
        return {config,
                {.wq = stored[0],
                 .wk = stored[1],
                 .wv = stored[2],
                 .wo = stored[3],
                 .bq = w.bq,
                 .bk = w.bk,
                 .bv = w.bv,
                 .bo = w.bo}};

    if (give == Give::heads) {
        std::vector<std::vector<float>> heads[4];
        std::vector<std::span<const float>> spans[4];
        for (int m = 0; m < 4; m++) {
            const Matrix &x = matrices[m];
            const int64_t in = x.heads_are_inputs ? x.in / x.heads : x.in,
                          out = x.heads_are_inputs ? x.out : x.out / x.heads;
            for (int64_t h = 0; h < x.heads; h++) {
                std::vector<float> head(size_t(in * out));
                for (int64_t i = 0; i < in; i++)
                    for (int64_t o = 0; o < out; o++)
                        head[size_t(i * out + o)] = x.heads_are_inputs ? (*x.in_out)[size_t((h * in + i) * x.out + o)]
                                                                       : (*x.in_out)[size_t(i * x.out + h * out + o)];
                heads[m].push_back(out_in ? reference::transposed(head, in, out) : head);
            }
            spans[m].assign(heads[m].begin(), heads[m].end());
        }
        return {config,
                {.wq_heads = spans[0],
                 .wk_heads = spans[1],
                 .wv_heads = spans[2],
                 .wo_heads = spans[3],
                 .bq = w.bq,
                 .bk = w.bk,
                 .bv = w.bv,
                 .bo = w.bo}};
    }

    std::map<std::string, attune::rt::SafetensorsFile::Tensor> tensors;
    for (int m = 0; m < 4; m++) {
        const Matrix &x = matrices[m];
        const auto bytes = std::as_bytes(std::span(stored[m]));
        tensors[std::string("module.") + x.name] = {"F32", out_in ? std::vector{x.out, x.in} : std::vector{x.in, x.out},
                                                    bytes.data(), bytes.size()};
        const auto bias = std::as_bytes(std::span(*x.bias));
        if (!bias.empty()) tensors[std::string("module.") + x.bias_name] = {"F32", {x.out}, bias.data(), bias.size()};
    }
    const RemoveAtExit file{temporary_file("weights.safetensors")};
    std::string error;
    if (!attune::rt::write_safetensors(file.path, tensors, error)) throw std::runtime_error(error);
    attune::MhaNames names{"module.wq", "module.wk", "module.wv", "module.wo", "", "", "", ""};
    if (!w.bq.empty())
        names = {"module.wq", "module.wk", "module.wv", "module.wo",
                 "module.bq", "module.bk", "module.bv", "module.bo"};
    return attune::MultiHeadAttention::load(config, file.path, names);
}

template <class A, class B> double largest_error(const A &values, const B &truth) {
    EXPECT_EQ(values.size(), truth.size());
    double largest = 0;
    for (size_t i = 0; i < truth.size(); i++) {
        if (double(values[i]) == double(truth[i])) continue; // -inf too
        const double error = std::abs(double(values[i]) - double(truth[i]));
        if (!(error <= largest)) largest = std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
    }
    return largest;
}

template <class V> double largest_finite(const V &values) {
    double largest = 0;
    for (auto x : values)
        if (std::isfinite(x)) largest = std::max(largest, std::abs(double(x)));
    return largest;
}

// Twice the error that plain float arithmetic makes, and a little for where that happens to make none.
template <class F, class D> double bound(const F &plain, const D &truth, double largest_score) {
    return 2 * largest_error(plain, truth) +
           std::ldexp(1.0, -23) * (8 + 4 * largest_score) * std::max(largest_finite(truth), 1e-3);
}

// What the case's flags mean, for the reference.
Scoring scoring_of(const Case &c, const std::vector<uint8_t> &mask, const std::vector<float> &bias) {
    Scoring scoring;
    scoring.scale = c.attention.scale ? double(*c.attention.scale) : 1 / std::sqrt(double(c.s.dk));
    scoring.visible = [&c, &mask](int64_t b, int64_t, int64_t i, int64_t j) {
        const int64_t at = i + (c.attention.offsets ? c.offsets[size_t(b)] : c.attention.offset);
        if (c.attention.causal && j > at) return false;
        if (c.attention.window_left >= 0 && j < at - c.attention.window_left) return false;
        if (c.attention.window_right >= 0 && j > at + c.attention.window_right) return false;
        if (c.attention.kv_len && j >= c.kv_len[size_t(b)]) return false;
        return !c.attention.mask || mask[size_t(b * c.s.M + j)] != 0;
    };
    if (c.attention.bias)
        scoring.bias = [&c, &bias](int64_t, int64_t h, int64_t i, int64_t j) {
            return bias[size_t((h * c.s.N + i) * c.s.M + j)];
        };
    return scoring;
}

class Mha : public testing::TestWithParam<Case> {};

TEST_P(Mha, AgreesWithFloat64) {
    const Case &c = GetParam();
    const Sizes &s = c.s;
    std::mt19937 random(5);
    const Weights w = reference::random_weights(random, s, c.biases);
    const auto x_q = reference::random_floats(random, s.B * s.N * s.d_model, 1);
    const auto x_kv = reference::random_floats(random, s.B * s.M * s.d_model_kv, 1);
    std::vector<uint8_t> mask(size_t(s.B * s.M));
    for (size_t i = 0; i < mask.size(); i++) mask[i] = random() % 5 != 0 ? 2 : 0; // any nonzero byte attends
    const auto bias = reference::random_floats(random, s.Hq * s.N * s.M, 1);
    const Scoring scoring = scoring_of(c, mask, bias);
    const auto truth = reference::mha<double>(s, w, x_q, x_kv, scoring);
    const auto plain = reference::mha<float>(s, w, x_q, x_kv, scoring);

    const auto module = make(s, w, c.layout, c.give);
    std::vector<float> y(size_t(s.B * s.N * s.d_out), -77.0f), lse(size_t(s.B * s.Hq * s.N)),
        scores(c.attention.scores ? size_t(s.B * s.Hq * s.N * s.M) : 0);
    attune::MhaCall call{.x_q = attune::rows(x_q, s.B, s.N, s.d_model),
                         .x_kv = attune::rows(x_kv, s.B, s.M, s.d_model_kv),
                         .y = attune::rows(y, s.B, s.N, s.d_out),
                         .attention = c.attention};
    call.extras.lse = attune::bhsd(lse, s.B, s.Hq, s.N, 1);
    if (c.attention.mask) call.extras.mask = attune::per_key(mask, s.B, s.Hq, s.N, s.M);
    if (c.attention.bias) call.extras.bias = attune::strided(bias, {s.B, s.Hq, s.N, s.M}, {0, s.N * s.M, s.M, 1});
    if (c.attention.kv_len) call.extras.kv_len = c.kv_len;
    if (c.attention.offsets) call.extras.offsets = c.offsets;
    if (c.attention.scores) call.extras.scores = attune::bhsd(scores, s.B, s.Hq, s.N, s.M);
    attune::Workspace workspace;
    module.run(call, workspace);

    EXPECT_LE(largest_error(y, truth.y), bound(plain.y, truth.y, truth.largest_score));
    EXPECT_LE(largest_error(lse, truth.lse), bound(plain.lse, truth.lse, truth.largest_score));
    if (c.attention.scores) {
        const bool raw = *c.attention.scores == attune::Scores::raw,
                   biased = *c.attention.scores == attune::Scores::biased;
        const auto &t = raw ? truth.raw : biased ? truth.biased : truth.probabilities;
        const auto &p = raw ? plain.raw : biased ? plain.biased : plain.probabilities;
        EXPECT_LE(largest_error(scores, t), bound(p, t, truth.largest_score));
    }
}

constexpr auto kOutIn = attune::WeightLayout::out_in;
constexpr auto kInOut = attune::WeightLayout::in_out;

// B, N, M, d_model, d_model_kv, d_out, Hq, Hkv, dk, dv
const Case kCases[] = {
    {"encoder", {2, 37, 37, 48, 48, 48, 4, 4, 12, 12}},
    {"encoder_minilm_size", {2, 50, 50, 384, 384, 384, 12, 12, 32, 32}, kOutIn},
    {"encoder_padded", {3, 33, 33, 64, 64, 64, 2, 2, 32, 32}, kOutIn, Give::whole, true, {.kv_len = true}, {33, 1, 20}},
    {"padded_to_nothing", {2, 9, 9, 16, 16, 16, 2, 2, 8, 8}, kInOut, Give::whole, true, {.kv_len = true}, {0, 9}},
    {"encoder_no_biases", {1, 130, 130, 64, 64, 64, 1, 1, 64, 64}, kInOut, Give::whole, false},
    {"cross", {2, 19, 45, 64, 40, 24, 4, 4, 16, 16}},
    {"cross_out_in_heads", {2, 19, 45, 64, 40, 24, 4, 4, 16, 16}, kOutIn, Give::heads},
    {"cross_in_out_heads_no_biases", {2, 19, 45, 64, 40, 24, 4, 4, 16, 16}, kInOut, Give::heads, false},
    {"cross_file_out_in", {2, 19, 45, 64, 40, 24, 4, 4, 16, 16}, kOutIn, Give::file},
    {"cross_file_in_out_no_biases", {2, 19, 45, 64, 40, 24, 4, 4, 16, 16}, kInOut, Give::file, false},
    {"decoder", {2, 65, 65, 64, 64, 64, 4, 4, 16, 16}, kInOut, Give::whole, true, {.causal = true}},
    {"decoder_window",
     {1, 70, 70, 64, 64, 64, 4, 4, 16, 16},
     kInOut,
     Give::whole,
     true,
     {.causal = true, .window_left = 9}},
    {"window_both_sides",
     {1, 70, 70, 32, 32, 32, 2, 2, 16, 16},
     kInOut,
     Give::whole,
     true,
     {.window_left = 5, .window_right = 3}},
    {"decode_step", {3, 1, 41, 64, 64, 64, 4, 4, 16, 16}, kInOut, Give::whole, true, {.causal = true, .offset = 40}},
    {"decode_step_offsets",
     {3, 1, 41, 64, 64, 64, 4, 4, 16, 16},
     kInOut,
     Give::whole,
     true,
     {.causal = true, .offsets = true},
     {},
     {40, 3, 17}},
    {"gqa", {2, 21, 34, 64, 64, 64, 8, 2, 16, 16}, kOutIn},
    {"gqa_heads_causal", {1, 40, 40, 48, 48, 48, 6, 2, 8, 8}, kOutIn, Give::heads, true, {.causal = true}},
    {"mqa_file", {1, 12, 31, 32, 32, 32, 4, 1, 8, 8}, kOutIn, Give::file},
    {"dk_is_not_dv", {2, 17, 23, 30, 20, 10, 3, 3, 24, 40}},
    {"dk_is_not_dv_heads", {2, 17, 23, 30, 20, 10, 3, 3, 7, 5}, kOutIn, Give::heads},
    {"one_feature", {1, 5, 6, 1, 1, 1, 1, 1, 1, 1}},
    {"odd_everything", {3, 7, 11, 13, 17, 19, 6, 3, 5, 9}, kOutIn, Give::file},
    {"mask", {2, 26, 38, 32, 32, 32, 2, 2, 16, 16}, kInOut, Give::whole, true, {.mask = true}},
    {"bias", {2, 26, 38, 32, 32, 32, 2, 2, 16, 16}, kInOut, Give::whole, true, {.bias = true}},
    {"all_at_once",
     {2, 26, 38, 32, 32, 32, 4, 2, 8, 16},
     kOutIn,
     Give::whole,
     true,
     {.scale = 0.4f, .causal = true, .offset = 12, .mask = true, .bias = true, .kv_len = true},
     {38, 30}},
    {"attention_weights",
     {2, 14, 22, 32, 32, 32, 2, 2, 16, 16},
     kInOut,
     Give::whole,
     true,
     {.scores = attune::Scores::probabilities}},
    {"attention_weights_causal",
     {1, 22, 22, 32, 32, 32, 2, 1, 16, 16},
     kInOut,
     Give::whole,
     true,
     {.causal = true, .scores = attune::Scores::probabilities}},
    {"raw_scores", {2, 14, 22, 32, 32, 32, 2, 2, 16, 16}, kInOut, Give::whole, true, {.scores = attune::Scores::raw}},
    {"biased_scores",
     {2, 14, 22, 32, 32, 32, 2, 2, 16, 16},
     kInOut,
     Give::whole,
     true,
     {.bias = true, .kv_len = true, .scores = attune::Scores::biased},
     {22, 9}},
    {"no_keys", {2, 3, 0, 16, 16, 16, 2, 2, 8, 8}},
};

INSTANTIATE_TEST_SUITE_P(Cases, Mha, testing::ValuesIn(kCases),
                         [](const auto &info) { return std::string(info.param.name); });

// A module, its inputs and the dense result: what the tests of memory and threads start from.
struct Dense {
    Sizes s;
    Weights w;
    std::vector<float> x_q, x_kv, y;
    attune::MultiHeadAttention module;
    attune::Workspace workspace;

    explicit Dense(const Sizes &sizes)
        : s(sizes), w(weights(sizes)), module(make(sizes, w, attune::WeightLayout::in_out, Give::whole)) {
        std::mt19937 random(6);
        x_q = reference::random_floats(random, s.B * s.N * s.d_model, 1);
        x_kv = reference::random_floats(random, s.B * s.M * s.d_model_kv, 1);
        y.resize(size_t(s.B * s.N * s.d_out));
        module.run(call(y), workspace);
    }

    static Weights weights(const Sizes &s) {
        std::mt19937 random(5);
        return reference::random_weights(random, s, true);
    }

    attune::MhaCall call(std::vector<float> &to) const {
        return {.x_q = attune::rows(x_q, s.B, s.N, s.d_model),
                .x_kv = attune::rows(x_kv, s.B, s.M, s.d_model_kv),
                .y = attune::rows(to, s.B, s.N, s.d_out)};
    }
};

const Sizes kSmall{3, 10, 13, 24, 20, 16, 4, 2, 6, 8};

TEST(MhaMemory, StridedInputsAndOutputsAreTheDenseOnes) {
    Dense dense(kSmall);
    const Sizes &s = dense.s;
    const float nan = std::numeric_limits<float>::quiet_NaN(), untouched = -77;
    // Rows 3 apart from each other's ends, batches 11: whatever lies between must be neither read nor written.
    auto spread = [&](const std::vector<float> &from, int64_t rows, int64_t features, int64_t row, int64_t batch) {
        std::vector<float> to(size_t(s.B * batch), nan);
        for (int64_t b = 0; b < s.B; b++)
            for (int64_t i = 0; i < rows; i++)
                std::copy_n(&from[size_t((b * rows + i) * features)], features, &to[size_t(b * batch + i * row)]);
        return to;
    };
    const int64_t rq = s.d_model + 3, bq = s.N * rq + 11, rk = s.d_model_kv + 3, bk = s.M * rk + 11;
    const auto x_q = spread(dense.x_q, s.N, s.d_model, rq, bq), x_kv = spread(dense.x_kv, s.M, s.d_model_kv, rk, bk);
    for (const bool batch_inside : {false, true}) {
        const int64_t ry = batch_inside ? s.B * s.d_out + 5 : s.d_out + 5, by = batch_inside ? s.d_out : s.N * ry + 2;
        std::vector<float> y(size_t(std::max(s.B * by, s.N * ry)), untouched);
        dense.module.run({.x_q = attune::strided(x_q, {s.B, 1, s.N, s.d_model}, {bq, 0, rq, 1}),
                          .x_kv = attune::strided(x_kv, {s.B, 1, s.M, s.d_model_kv}, {bk, 0, rk, 1}),
                          .y = attune::strided(y, {s.B, 1, s.N, s.d_out}, {by, 0, ry, 1})},
                         dense.workspace);
        for (int64_t b = 0; b < s.B; b++)
            for (int64_t i = 0; i < s.N; i++)
                for (int64_t c = 0; c < s.d_out; c++) {
                    float &value = y[size_t(b * by + i * ry + c)];
                    ASSERT_EQ(value, dense.y[size_t((b * s.N + i) * s.d_out + c)]) << b << " " << i << " " << c;
                    value = untouched;
                }
        for (float value : y) ASSERT_EQ(value, untouched);
    }
}

TEST(MhaMemory, RowsMayRunBackwards) {
    Dense dense(kSmall);
    const Sizes &s = dense.s;
    std::vector<float> reversed(dense.x_q.size()), y(dense.y.size());
    for (int64_t r = 0; r < s.B * s.N; r++)
        std::copy_n(&dense.x_q[size_t(r * s.d_model)], s.d_model, &reversed[size_t((s.B * s.N - 1 - r) * s.d_model)]);
    auto call = dense.call(y);
    call.x_q = attune::strided(static_cast<const float *>(&reversed[size_t((s.B * s.N - 1) * s.d_model)]),
                               {s.B, 1, s.N, s.d_model}, {-s.N * s.d_model, 0, -s.d_model, 1});
    dense.module.run(call, dense.workspace);
    EXPECT_EQ(largest_error(y, dense.y), 0);
}

TEST(MhaMemory, BatchesMayShareKeys) {
    Dense dense(kSmall);
    const Sizes &s = dense.s;
    std::vector<float> repeated, expected(dense.y.size()), y(dense.y.size());
    for (int64_t b = 0; b < s.B; b++)
        repeated.insert(repeated.end(), dense.x_kv.begin(), dense.x_kv.begin() + s.M * s.d_model_kv);
    auto call = dense.call(expected);
    call.x_kv = attune::rows(repeated, s.B, s.M, s.d_model_kv);
    dense.module.run(call, dense.workspace);
    call.y = attune::rows(y, s.B, s.N, s.d_out);
    call.x_kv = attune::strided(dense.x_kv, {s.B, 1, s.M, s.d_model_kv}, {0, 0, s.d_model_kv, 1});
    dense.module.run(call, dense.workspace);
    EXPECT_EQ(largest_error(y, expected), 0);
}

TEST(MhaMemory, OutputMayBeTheInput) {
    Dense dense({2, 21, 21, 32, 32, 32, 2, 2, 16, 16});
    const Sizes &s = dense.s;
    std::vector<float> x = dense.x_q, expected(dense.y.size());
    dense.module.run({.x_q = attune::rows(x, s.B, s.N, s.d_model), .y = attune::rows(expected, s.B, s.N, s.d_out)},
                     dense.workspace);
    dense.module.run({.x_q = attune::rows(x, s.B, s.N, s.d_model), .y = attune::rows(x, s.B, s.N, s.d_out)},
                     dense.workspace);
    EXPECT_EQ(largest_error(x, expected), 0);
}

TEST(MhaMemory, WorkspaceMayHaveAnyAlignmentAndIsNotOverrun) {
    Dense dense(kSmall);
    std::vector<float> y(dense.y.size());
    const auto call = dense.call(y);
    const size_t bytes = dense.module.workspace_size(call);
    for (const size_t shift : {0, 1, 7, 63}) {
        std::vector<std::byte> memory(bytes + 64 + 4096, std::byte{0xA5});
        std::fill(y.begin(), y.end(), -77.0f);
        dense.module.run(call, std::span(memory).subspan(shift, bytes));
        EXPECT_EQ(largest_error(y, dense.y), 0) << shift;
        for (size_t i = 0; i < memory.size(); i++)
            ASSERT_TRUE((i >= shift && i < shift + bytes) || memory[i] == std::byte{0xA5}) << shift << " " << i;
    }
}

TEST(MhaMemory, NothingAtAllIsSuccess) {
    Dense dense(kSmall);
    const Sizes &s = dense.s;
    std::vector<float> none;
    attune::MhaCall no_batch{.x_q = attune::rows(none, 0, s.N, s.d_model),
                             .x_kv = attune::rows(none, 0, s.M, s.d_model_kv),
                             .y = attune::rows(none, 0, s.N, s.d_out)};
    EXPECT_EQ(dense.module.workspace_size(no_batch), 0u);
    dense.module.run(no_batch, std::span<std::byte>());
    attune::MhaCall no_rows{.x_q = attune::rows(none, s.B, 0, s.d_model),
                            .x_kv = attune::rows(dense.x_kv, s.B, s.M, s.d_model_kv),
                            .y = attune::rows(none, s.B, 0, s.d_out)};
    dense.module.run(no_rows, std::span<std::byte>());
}

TEST(MhaMemory, PaddingMayHoldNaN) {
    const Sizes s{2, 16, 16, 32, 32, 32, 2, 2, 16, 16};
    Dense dense(s);
    const std::vector<int64_t> lengths = {16, 5};
    std::vector<float> x = dense.x_q, clean(dense.y.size()), dirty(dense.y.size());
    auto encode = [&](std::vector<float> &y) {
        dense.module.run({.x_q = attune::rows(x, s.B, s.N, s.d_model),
                          .y = attune::rows(y, s.B, s.N, s.d_out),
                          .attention = {.kv_len = true},
                          .extras = {.kv_len = lengths}},
                         dense.workspace);
    };
    encode(clean);
    std::fill(x.begin() + (s.N + 5) * s.d_model, x.end(), std::numeric_limits<float>::quiet_NaN());
    encode(dirty);
    // The second sentence may be done by the strict variant of the kernel, which rounds otherwise; the first may not.
    for (size_t i = 0; i < size_t(s.N * s.d_out); i++) ASSERT_EQ(dirty[i], clean[i]) << i;
    for (size_t i = size_t(s.N * s.d_out); i < size_t((s.N + 5) * s.d_out); i++)
        ASSERT_NEAR(dirty[i], clean[i], 1e-5f) << i;
}

TEST(MhaThreads, OneModuleServesManyThreads) {
    Dense dense(kSmall);
    const Sizes &s = dense.s;
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; t++)
        threads.emplace_back([&, t] {
            attune::Workspace workspace;
            for (int round = 0; round < 20; round++) {
                // Other shapes in between: every thread meets plans that are just being made.
                const int64_t N = 1 + (round * 3 + t) % s.N;
                std::vector<float> some(size_t(N * s.d_out)), all(dense.y.size());
                dense.module.run({.x_q = attune::rows(dense.x_q.data(), 1, N, s.d_model),
                                  .x_kv = attune::rows(dense.x_kv.data(), 1, s.M, s.d_model_kv),
                                  .y = attune::rows(some, 1, N, s.d_out)},
                                 workspace);
                dense.module.run(dense.call(all), workspace);
                if (largest_error(all, dense.y) != 0) wrong++;
                for (size_t i = 0; i < some.size(); i++)
                    if (!(std::abs(some[i] - dense.y[i]) < 1e-4f)) wrong++;
            }
        });
    for (auto &thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
}

TEST(MhaThreads, MorePlansThanAreKept) {
    Dense dense({1, 300, 8, 8, 8, 8, 1, 1, 8, 8});
    const Sizes &s = dense.s;
    for (int round = 0; round < 2; round++)
        for (int64_t N = 1; N <= s.N; N++) {
            std::vector<float> y(size_t(N * s.d_out));
            dense.module.run({.x_q = attune::rows(dense.x_q.data(), 1, N, s.d_model),
                              .x_kv = attune::rows(dense.x_kv, 1, s.M, s.d_model_kv),
                              .y = attune::rows(y, 1, N, s.d_out)},
                             dense.workspace);
            for (size_t i = 0; i < y.size(); i++) ASSERT_NEAR(y[i], dense.y[i], 1e-4f) << N << " " << i;
        }
}

TEST(MhaMemory, ASecondRunAllocatesNothing) {
#ifndef ATTUNE_COUNT_ALLOCATIONS
    GTEST_SKIP() << "allocations are not counted under a sanitizer";
#else
    Dense dense({2, 64, 64, 64, 64, 64, 4, 4, 16, 16});
    std::vector<float> y(dense.y.size());
    const auto call = dense.call(y);
    const size_t bytes = dense.module.workspace_size(call);
    allocations = 0;
    counting = true;
    const auto status = dense.module.try_run(call, std::span(dense.workspace.data(), bytes));
    counting = false;
    EXPECT_EQ(status, ATTUNE_OK) << attune_last_error();
    EXPECT_EQ(allocations, 0);
    EXPECT_EQ(largest_error(y, dense.y), 0);
    // The counter does count: a new shape needs a plan.
    std::vector<float> some(size_t(3 * dense.s.d_out));
    attune::MhaCall other{.x_q = attune::rows(dense.x_q.data(), 1, 3, dense.s.d_model),
                          .y = attune::rows(some, 1, 3, dense.s.d_out)};
    counting = true;
    const size_t other_bytes = dense.module.workspace_size(other);
    counting = false;
    EXPECT_GT(other_bytes, 0u);
    EXPECT_GT(allocations, 0);
#endif
}

} // namespace
