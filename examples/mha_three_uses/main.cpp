// The three uses of multi-head attention in a transformer, with random weights:
//   encoder    every position of a sentence attends to every other, padding excepted (kv_len);
//   cross      a decoder's positions attend to the encoder's output, which has another width here;
//   decoder    causal self-attention, over a whole sentence at once and again token by token.
// What each must satisfy is checked: padding has no influence, the causal past does not see the future, steps = whole.
#include "../example.h"
#include "attune/attune.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

namespace {

constexpr int64_t kModel = 64, kEncoderModel = 48, kHeads = 4;

std::vector<float> random_floats(size_t n, float deviation) {
    static std::mt19937 random(11);
    std::normal_distribution<float> normal(0, deviation);
    std::vector<float> result(n);
    for (float &x : result) x = normal(random);
    return result;
}

attune::MultiHeadAttention random_module(int64_t d_model, int64_t d_model_kv) {
    const auto wq = random_floats(d_model * d_model, 0.2f), wk = random_floats(d_model_kv * d_model, 0.2f);
    const auto wv = random_floats(d_model_kv * d_model, 0.2f), wo = random_floats(d_model * d_model, 0.2f);
    const auto bias = random_floats(d_model, 0.1f);
    return {{.d_model = d_model, .d_model_kv = d_model_kv, .Hq = kHeads},
            {.wq = wq, .wk = wk, .wv = wv, .wo = wo, .bq = bias, .bk = bias, .bv = bias, .bo = bias}};
}

double largest_difference(const float *a, const float *b, size_t n) {
    double largest = 0;
    for (size_t i = 0; i < n; i++) {
        const double difference = std::abs(double(a[i]) - b[i]);
        if (!(difference <= largest)) largest = difference; // keeps a NaN
    }
    return largest;
}

} // namespace

int main() {
    return example::run([] {
        attune::Workspace workspace; // serves all of them

        // Encoder: two sentences of 9 and 5 tokens in a batch padded to 9.
        const int64_t N = 9, lengths[] = {9, 5};
        const auto encoder = random_module(kEncoderModel, kEncoderModel);
        auto x = random_floats(2 * N * kEncoderModel, 1);
        std::vector<float> encoded(x.size()), again(x.size());
        auto encode = [&](std::vector<float> &y) {
            encoder.run({.x_q = attune::rows(x, 2, N, kEncoderModel),
                         .y = attune::rows(y, 2, N, kEncoderModel),
                         .attention = {.kv_len = true},
                         .extras = {.kv_len = lengths}},
                        workspace);
        };
        encode(encoded);
        std::fill(x.begin() + (N + 5) * kEncoderModel, x.end(), 1e6f); // other padding
        encode(again);
        const double padding = largest_difference(encoded.data(), again.data(), (N + 5) * kEncoderModel);
        std::printf("encoder   [2, %lld, %lld], lengths 9 and 5: influence of the padding %g\n",
                    static_cast<long long>(N), static_cast<long long>(kEncoderModel), padding);
        example::expect(padding == 0, "encoder: padding has no influence at all");

        // Cross-attention: 4 decoder positions of 64 features look at the encoder's output of 48; the weights are kept.
        const int64_t T = 4;
        const auto cross = random_module(kModel, kEncoderModel);
        const auto target = random_floats(2 * T * kModel, 1);
        std::vector<float> crossed(target.size()), weights(2 * kHeads * T * N);
        cross.run({.x_q = attune::rows(target, 2, T, kModel),
                   .x_kv = attune::rows(encoded, 2, N, kEncoderModel),
                   .y = attune::rows(crossed, 2, T, kModel),
                   .attention = {.kv_len = true, .scores = attune::Scores::probabilities},
                   .extras = {.scores = attune::bhsd(weights, 2, kHeads, T, N), .kv_len = lengths}},
                  workspace);
        std::printf("cross     [2, %lld, %lld] over [2, %lld, %lld]: weights of sentence 2, head 0, position 0:",
                    static_cast<long long>(T), static_cast<long long>(kModel), static_cast<long long>(N),
                    static_cast<long long>(kEncoderModel));
        for (int64_t j = 0; j < N; j++) std::printf(" %.2f", weights[kHeads * T * N + j]);
        std::printf("\n");
        for (int64_t row = 0; row < 2 * kHeads * T; row++) {
            const int64_t length = lengths[row / (kHeads * T)];
            double sum = 0, hidden = 0;
            for (int64_t j = 0; j < N; j++) (j < length ? sum : hidden) += weights[row * N + j];
            example::expect_near(sum, 1, 1e-5, "cross: the sum of the weights of the real tokens");
            example::expect(hidden == 0, "cross: padding has no weight");
        }

        // Decoder: the whole sentence at once, then token by token; step t attends to the inputs 0..t.
        const int64_t S = 12;
        const auto decoder = random_module(kModel, kModel);
        auto sentence = random_floats(S * kModel, 1);
        std::vector<float> whole(sentence.size()), steps(sentence.size()), changed(sentence.size());
        auto decode = [&](std::vector<float> &y) {
            decoder.run({.x_q = attune::rows(sentence, 1, S, kModel),
                         .y = attune::rows(y, 1, S, kModel),
                         .attention = {.causal = true}},
                        workspace);
        };
        decode(whole);
        for (int64_t t = 0; t < S; t++)
            decoder.run({.x_q = attune::rows(&sentence[t * kModel], 1, 1, kModel),
                         .x_kv = attune::rows(sentence, 1, t + 1, kModel),
                         .y = attune::rows(&steps[t * kModel], 1, 1, kModel),
                         .attention = {.causal = true, .offset = attune::decode_offset(t)}},
                        workspace);
        const double stepwise = largest_difference(whole.data(), steps.data(), whole.size());
        std::fill(sentence.begin() + 7 * kModel, sentence.end(), 3.0f); // another ending
        decode(changed);
        const double past = largest_difference(whole.data(), changed.data(), 7 * kModel);
        std::printf(
            "decoder   [1, %lld, %lld] causal: token by token differs by %.2g, the future changes the past by %g\n",
            static_cast<long long>(S), static_cast<long long>(kModel), stepwise, past);
        example::expect(stepwise < 1e-4, "decoder: token by token gives what the whole sentence gives, within 1e-4");
        example::expect(past == 0, "decoder: the future has no influence on the past");
        example::expect(largest_difference(&whole[7 * kModel], &changed[7 * kModel], kModel) > 0.01,
                        "decoder: a changed token does change its own row");
    });
}
