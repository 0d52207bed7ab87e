// Gaussian-kernel regression is attention. The Nadaraya-Watson estimate at a point q, from samples y_j seen at k_j, is
//     sum_j w_j y_j / sum_j w_j   with   w_j = exp(-|q - k_j|^2 / (2 h^2)),
// a softmax over the scores -|q - k_j|^2 / (2 h^2) = (q.k_j - |k_j|^2 / 2 - |q|^2 / 2) / h^2. The term in |q|^2 is the
// same for all keys and cancels in the softmax; that in |k_j|^2 does not, and is a bias per key. So: scale 1/h^2, the
// bias
// -|k_j|^2 / (2 h^2) broadcast over the query rows by a stride of 0, and the values y. The log-sum-exp gives, with the
// |q|^2 term put back, the log of the kernel density.
//
// The samples lie in the plane at unequal distances from the origin: without the bias, far samples would win by their
// norm.
#include "../example.h"
#include "attune/attune.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr int64_t kSamples = 300, kPoints = 64, kFeatures = 2, kOutputs = 2;
constexpr double kBandwidth = 0.35;

double squared_distance(const float *a, const float *b) {
    double sum = 0;
    for (int64_t d = 0; d < kFeatures; d++) sum += (double(a[d]) - b[d]) * (double(a[d]) - b[d]);
    return sum;
}

} // namespace

int main() {
    return example::run([] {
        std::mt19937 random(3);
        std::uniform_real_distribution<float> place(-2, 2);
        std::normal_distribution<float> noise(0, 0.05f);
        std::vector<float> samples(kSamples * kFeatures), seen(kSamples * kOutputs), points(kPoints * kFeatures);
        for (float &x : samples) x = place(random);
        for (int64_t j = 0; j < kSamples; j++) {
            const float *k = &samples[j * kFeatures];
            seen[j * kOutputs] = std::sin(2 * k[0]) * std::cos(k[1]) + noise(random);
            seen[j * kOutputs + 1] = k[0] * k[1] + noise(random);
        }
        for (int64_t i = 0; i < kPoints; i++) { // along a diagonal
            points[i * kFeatures] = -1.8f + 3.6f * float(i) / float(kPoints - 1);
            points[i * kFeatures + 1] = 0.5f * points[i * kFeatures];
        }

        const float scale = float(1 / (kBandwidth * kBandwidth));
        std::vector<float> bias(kSamples);
        const float origin[kFeatures] = {};
        for (int64_t j = 0; j < kSamples; j++)
            bias[j] = float(-0.5 * scale * squared_distance(&samples[j * kFeatures], origin));

        std::vector<float> estimate(kPoints * kOutputs), log_sum(kPoints);
        const attune::Plan plan =
            attune::plan({.N = kPoints, .M = kSamples, .dk = kFeatures, .dv = kOutputs, .scale = scale, .bias = true});
        attune::Workspace workspace;
        attune::run(plan,
                    {.q = attune::bhsd(points, 1, 1, kPoints, kFeatures),
                     .k = attune::bhsd(samples, 1, 1, kSamples, kFeatures),
                     .v = attune::bhsd(seen, 1, 1, kSamples, kOutputs),
                     .o = attune::bhsd(estimate, 1, 1, kPoints, kOutputs),
                     .extras = {.bias = attune::per_key(bias, 1, 1, kPoints, kSamples),
                                .lse = attune::bhsd(log_sum, 1, 1, kPoints, 1)}},
                    workspace);

        std::printf("kernel %s\n    x      y    estimates      the functions themselves\n", plan.kernel().c_str());
        double error = 0, density_error = 0;
        for (int64_t i = 0; i < kPoints; i++) {
            const float *q = &points[i * kFeatures];
            double sum = 0, expected[kOutputs] = {};
            for (int64_t j = 0; j < kSamples; j++) {
                const double w =
                    std::exp(-0.5 * squared_distance(q, &samples[j * kFeatures]) / (kBandwidth * kBandwidth));
                sum += w;
                for (int64_t c = 0; c < kOutputs; c++) expected[c] += w * seen[j * kOutputs + c];
            }
            for (int64_t c = 0; c < kOutputs; c++) {
                const double difference = std::abs(estimate[i * kOutputs + c] - expected[c] / sum);
                example::expect(difference <= 1e-4, "an estimate agrees with the direct formula within 1e-4");
                error = std::max(error, difference);
            }
            const double density = log_sum[i] - 0.5 * squared_distance(q, origin) / (kBandwidth * kBandwidth);
            example::expect_near(density, std::log(sum), 1e-4, "the log of the kernel density");
            density_error = std::max(density_error, std::abs(density - std::log(sum)));
            if (i % 9 == 0)
                std::printf("%6.2f %6.2f   %6.3f %6.3f   %6.3f %6.3f\n", q[0], q[1], estimate[i * kOutputs],
                            estimate[i * kOutputs + 1], std::sin(2 * q[0]) * std::cos(q[1]), q[0] * q[1]);
        }
        std::printf("largest difference from the direct formula: estimates %.2g, log density %.2g\n", error,
                    density_error);
    });
}
