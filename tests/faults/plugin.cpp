// What a plug-in that links attune might do: one attention by two threads, checked against the definition.
#include "attune/attune.hpp"

#include <cmath>
#include <vector>

// 0 if all is well.
extern "C" __attribute__((visibility("default"))) int faults_plugin_run() try {
    constexpr std::int64_t kHeads = 4, kRows = 40, kKeys = 50, kFeatures = 16;
    std::vector<float> q(kHeads * kRows * kFeatures), k(kHeads * kKeys * kFeatures), v(k), o(q);
    for (std::size_t i = 0; i < q.size(); i++) q[i] = std::sin(float(i));
    for (std::size_t i = 0; i < k.size(); i++) k[i] = std::cos(float(i)), v[i] = std::sin(float(3 * i));
    const attune::Plan plan({.Hq = kHeads, .N = kRows, .M = kKeys, .dk = kFeatures}, {.threads = 2});
    attune::Workspace workspace;
    attune::run(plan,
                {.q = attune::bhsd(q, 1, kHeads, kRows, kFeatures),
                 .k = attune::bhsd(k, 1, kHeads, kKeys, kFeatures),
                 .v = attune::bhsd(v, 1, kHeads, kKeys, kFeatures),
                 .o = attune::bhsd(o, 1, kHeads, kRows, kFeatures)},
                workspace);
    for (std::int64_t row = 0; row < kHeads * kRows; row++) {
        double sum = 0, first = 0;
        for (std::int64_t j = 0; j < kKeys; j++) {
            const std::int64_t key = (row / kRows * kKeys + j) * kFeatures;
            double s = 0;
            for (std::int64_t d = 0; d < kFeatures; d++)
                s += double(q[std::size_t(row * kFeatures + d)]) * double(k[std::size_t(key + d)]);
            const double w = std::exp(s / 4);
            sum += w;
            first += w * double(v[std::size_t(key)]);
        }
        if (!(std::abs(first / sum - double(o[std::size_t(row * kFeatures)])) < 1e-4)) return 1;
    }
    // Its message lives in the library, and goes with it.
    return attune_run(nullptr, nullptr, nullptr, 0) == ATTUNE_INVALID_ARGUMENT ? 0 : 2;
} catch (...) {
    return 3;
}
