// Why the scale 1/sqrt(d_k)? The product of two random vectors of d_k features with unit variance has the variance d_k.
// At d_k = 512 the scores of ten keys are therefore some twenty apart, their softmax is almost one-hot, and its
// gradient almost zero. Divided by sqrt(d_k) they have unit variance again, and the softmax is spread. This draws both.
#include "../example.h"
#include "attune/attune.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int64_t kFeatures = 512, kKeys = 10, kQueries = 200;

// The attention weights of every query, [kQueries, kKeys].
std::vector<float> weights(const std::vector<float> &q, const std::vector<float> &k, float scale) {
    std::vector<float> result(kQueries * kKeys), output(kQueries * kFeatures);
    const attune::Plan plan = attune::plan(
        {.N = kQueries, .M = kKeys, .dk = kFeatures, .scale = scale, .scores = attune::Scores::probabilities});
    attune::Workspace workspace;
    attune::run(plan,
                {.q = attune::bhsd(q, 1, 1, kQueries, kFeatures),
                 .k = attune::bhsd(k, 1, 1, kKeys, kFeatures),
                 .v = attune::bhsd(k, 1, 1, kKeys, kFeatures),
                 .o = attune::bhsd(output, 1, 1, kQueries, kFeatures),
                 .extras = {.scores = attune::bhsd(result, 1, 1, kQueries, kKeys)}},
                workspace);
    return result;
}

struct Spread {
    double largest = 0, keys = 0; // means over the queries; keys: exp(entropy), how many keys effectively take part
};

Spread spread_of(const std::vector<float> &w) {
    Spread spread;
    for (int64_t i = 0; i < kQueries; i++) {
        double largest = 0, entropy = 0;
        for (int64_t j = 0; j < kKeys; j++) {
            const double p = w[i * kKeys + j];
            largest = std::max(largest, p);
            if (p > 0) entropy -= p * std::log(p);
        }
        spread.largest += largest / kQueries;
        spread.keys += std::exp(entropy) / kQueries;
    }
    return spread;
}

void draw(const char *title, const std::vector<float> &w, const Spread &spread) {
    std::printf("\n%s\n", title);
    for (int64_t j = 0; j < kKeys; j++)
        std::printf("  key %lld  %.4f  %s\n", static_cast<long long>(j), w[j],
                    std::string(size_t(std::lround(std::clamp(w[j], 0.0f, 1.0f) * 60)), '#').c_str());
    std::printf("  over %lld queries: largest weight %.3f, keys that take part %.2f of %lld\n",
                static_cast<long long>(kQueries), spread.largest, spread.keys, static_cast<long long>(kKeys));
}

} // namespace

int main() {
    return example::run([] {
        std::mt19937 random(7);
        std::normal_distribution<float> unit;
        std::vector<float> q(kQueries * kFeatures), k(kKeys * kFeatures);
        for (float &x : q) x = unit(random);
        for (float &x : k) x = unit(random);

        const auto unscaled = weights(q, k, 1.0f), scaled = weights(q, k, 1.0f / std::sqrt(float(kFeatures)));
        const Spread one_hot = spread_of(unscaled), spread = spread_of(scaled);
        std::printf("Attention weights of one query over %lld random keys of %lld features\n",
                    static_cast<long long>(kKeys), static_cast<long long>(kFeatures));
        draw("unscaled: softmax(q.k)", unscaled, one_hot);
        draw("scaled: softmax(q.k / sqrt(512))", scaled, spread);

        example::expect(one_hot.largest > 0.9, "unscaled: the largest weight is above 0.9 on average");
        example::expect(one_hot.keys < 1.5, "unscaled: fewer than 1.5 keys take part on average");
        example::expect(spread.largest < 0.5, "scaled: the largest weight is below 0.5 on average");
        example::expect(spread.keys > 5, "scaled: more than 5 keys take part on average");
        for (int64_t i = 0; i < kQueries; i++) {
            double sum = 0;
            for (int64_t j = 0; j < kKeys; j++) sum += scaled[i * kKeys + j];
            example::expect_near(sum, 1, 1e-5, "the sum of a query's weights");
        }
    });
}
