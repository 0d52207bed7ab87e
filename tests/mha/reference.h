// Multi-head attention written out as its definition, one loop for each index, in a floating-point type of choice:
// double is the truth, float gives the error that plain float arithmetic makes and so the scale of what may be expected
// of a kernel. Shares no code with the runtime.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <vector>

namespace reference {

struct Sizes {
    int64_t B = 1, N = 1, M = 1;                    // batch, query rows, keys
    int64_t d_model = 1, d_model_kv = 1, d_out = 1; // widths of the inputs and the output
    int64_t Hq = 1, Hkv = 1, dk = 1, dv = 1;        // heads and their features
};

// Matrices [in, out], row-major. Biases may be empty.
struct Weights {
    std::vector<float> wq, wk, wv, wo, bq, bk, bv, bo;
};

struct Scoring {
    double scale = 1;
    std::function<bool(int64_t b, int64_t h, int64_t i, int64_t j)> visible; // empty: everything is
    std::function<double(int64_t b, int64_t h, int64_t i, int64_t j)> bias;  // empty: none
};

template <class T> struct Result {
    std::vector<T> y;                          // [B, N, d_out]
    std::vector<T> raw, biased, probabilities; // [B, Hq, N, M]
    std::vector<T> lse;                        // [B, Hq, N]
    double largest_score = 0;
};

template <class T> std::vector<T> linear(const T *x, int64_t rows, int64_t in, int64_t out, const std::vector<float> &w,
                                         const std::vector<float> &b) {
    std::vector<T> y(size_t(rows * out));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < out; c++) {
            T sum = 0;
            for (int64_t k = 0; k < in; k++) sum += x[r * in + k] * T(w[size_t(k * out + c)]);
            y[size_t(r * out + c)] = b.empty() ? sum : sum + T(b[size_t(c)]);
        }
    return y;
}

template <class T> Result<T> mha(const Sizes &s, const Weights &w, const std::vector<float> &x_q,
                                 const std::vector<float> &x_kv, const Scoring &scoring) {
    const std::vector<T> xq(x_q.begin(), x_q.end()), xkv(x_kv.begin(), x_kv.end());
    const auto q = linear<T>(xq.data(), s.B * s.N, s.d_model, s.Hq * s.dk, w.wq, w.bq);
    const auto k = linear<T>(xkv.data(), s.B * s.M, s.d_model_kv, s.Hkv * s.dk, w.wk, w.bk);
    const auto v = linear<T>(xkv.data(), s.B * s.M, s.d_model_kv, s.Hkv * s.dv, w.wv, w.bv);
    Result<T> result;
    const size_t pairs = size_t(s.B * s.Hq * s.N * s.M);
    result.raw.resize(pairs);
    result.biased.resize(pairs);
    result.probabilities.resize(pairs);
    result.lse.resize(size_t(s.B * s.Hq * s.N));
    std::vector<T> o(size_t(s.B * s.N * s.Hq * s.dv));
    const T infinity = std::numeric_limits<T>::infinity();
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t h = 0; h < s.Hq; h++)
            for (int64_t i = 0; i < s.N; i++) {
                const int64_t g = h / (s.Hq / s.Hkv), row = (b * s.Hq + h) * s.N + i;
                T largest = -infinity, sum = 0;
                for (int64_t j = 0; j < s.M; j++) {
                    T score = 0;
                    for (int64_t d = 0; d < s.dk; d++)
                        score += q[size_t(((b * s.N + i) * s.Hq + h) * s.dk + d)] *
                                 k[size_t(((b * s.M + j) * s.Hkv + g) * s.dk + d)];
                    score *= T(scoring.scale);
                    result.raw[size_t(row * s.M + j)] = score;
                    if (scoring.bias) score += T(scoring.bias(b, h, i, j));
                    if (scoring.visible && !scoring.visible(b, h, i, j)) score = -infinity;
                    result.biased[size_t(row * s.M + j)] = score;
                    largest = std::max(largest, score);
                    if (score != -infinity)
                        result.largest_score = std::max(result.largest_score, std::abs(double(score)));
                }
                for (int64_t j = 0; j < s.M; j++) {
                    const T score = result.biased[size_t(row * s.M + j)];
                    const T e = score == -infinity ? T(0) : std::exp(score - largest);
                    result.probabilities[size_t(row * s.M + j)] = e;
                    sum += e;
                }
                result.lse[size_t(row)] = sum > 0 ? largest + std::log(sum) : -infinity;
                for (int64_t j = 0; j < s.M && sum > 0; j++) {
                    T &p = result.probabilities[size_t(row * s.M + j)];
                    p /= sum;
                    if (p == 0) continue; // an invisible key has no influence, whatever its value holds
                    for (int64_t d = 0; d < s.dv; d++)
                        o[size_t(((b * s.N + i) * s.Hq + h) * s.dv + d)] +=
                            p * v[size_t(((b * s.M + j) * s.Hkv + g) * s.dv + d)];
                }
            }
    result.y = linear<T>(o.data(), s.B * s.N, s.Hq * s.dv, s.d_out, w.wo, w.bo);
    return result;
}

inline std::vector<float> random_floats(std::mt19937 &random, int64_t n, double deviation) {
    std::normal_distribution<float> normal(0, float(deviation));
    std::vector<float> result(static_cast<size_t>(n));
    for (float &x : result) x = normal(random);
    return result;
}

inline Weights random_weights(std::mt19937 &random, const Sizes &s, bool biases) {
    Weights w;
    w.wq = random_floats(random, s.d_model * s.Hq * s.dk, 1 / std::sqrt(double(s.d_model)));
    w.wk = random_floats(random, s.d_model_kv * s.Hkv * s.dk, 1 / std::sqrt(double(s.d_model_kv)));
    w.wv = random_floats(random, s.d_model_kv * s.Hkv * s.dv, 1 / std::sqrt(double(s.d_model_kv)));
    w.wo = random_floats(random, s.Hq * s.dv * s.d_out, 1 / std::sqrt(double(s.Hq * s.dv)));
    if (biases) {
        w.bq = random_floats(random, s.Hq * s.dk, 0.3);
        w.bk = random_floats(random, s.Hkv * s.dk, 0.3);
        w.bv = random_floats(random, s.Hkv * s.dv, 0.3);
        w.bo = random_floats(random, s.d_out, 0.3);
    }
    return w;
}

// [in, out] -> [out, in]
inline std::vector<float> transposed(const std::vector<float> &w, int64_t in, int64_t out) {
    std::vector<float> result(w.size());
    for (int64_t i = 0; i < in; i++)
        for (int64_t c = 0; c < out; c++) result[size_t(c * in + i)] = w[size_t(i * out + c)];
    return result;
}

} // namespace reference
