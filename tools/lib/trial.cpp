// What a search draws, and what it makes of times.
#include "trial.h"

#include "numbers.h"

#include <algorithm>
#include <cmath>

namespace attune::tools {

uint64_t mixed(uint64_t seed, std::string_view text) {
    uint64_t h = 14695981039346656037u; // FNV-1a
    for (unsigned char c : text) h = (h ^ c) * 1099511628211u;
    return Random(seed, h).bits();
}

Ratio ratio_of(const std::vector<double> &over, const std::vector<double> &of) {
    std::vector<double> logs;
    for (size_t i = 0; i < std::min(over.size(), of.size()); ++i) logs.push_back(std::log(over[i] / of[i]));
    if (logs.empty()) return {0, INFINITY};
    std::sort(logs.begin(), logs.end());
    const size_t cut = logs.size() / 5;
    double sum = 0, squares = 0;
    const size_t n = logs.size() - 2 * cut;
    for (size_t i = cut; i < cut + n; ++i) sum += logs[i];
    const double mean = sum / double(n);
    // Winsorised: what is cut counts as the outermost that is kept.
    for (size_t i = 0; i < logs.size(); ++i) {
        const double x = logs[std::clamp(i, cut, cut + n - 1)] - mean;
        squares += x * x;
    }
    const double deviation = std::sqrt(squares / std::max(1.0, double(logs.size()) - 1));
    return {std::exp(mean), deviation / (0.6 * std::sqrt(double(logs.size())))};
}

Case shorter(const Case &c, int threads) {
    Case s = c;
    const double target = 2.5e8 * threads; // operations: a few milliseconds
    while (s.q_lens.empty() && useful_flops(s) > target) {
        if (s.B > 1) {
            s.B = 1;
            for (auto *list : {&s.kv_len, &s.offsets})
                if (!list->empty()) list->erase(list->begin() + 1, list->end());
        } else if (s.Hkv > threads) {
            const int64_t group = s.Hq / s.Hkv;
            s.Hkv = std::max<int64_t>(threads, s.Hkv / 2);
            s.Hq = s.Hkv * group;
        } else if (std::max(s.N, s.M) > 512 && s.kv_len.empty() && s.offsets.empty() && s.offset == 0) {
            const bool square = s.N == s.M, rows = s.N >= s.M;
            if (rows) s.N = std::max<int64_t>(512, s.N / 2);
            if (square || !rows) s.M = std::max<int64_t>(512, s.M / 2);
        } else {
            break;
        }
    }
    return s;
}

std::vector<DrawnPoint> drawn_points(const std::vector<TuningSpace> &spaces, uint64_t seed, size_t most) {
    std::vector<std::vector<size_t>> order(spaces.size());
    size_t longest = 0;
    for (size_t i = 0; i < spaces.size(); ++i) {
        for (size_t k = 0; k < spaces[i].points.size(); ++k) order[i].push_back(k);
        Random random(seed, mixed(seed, spaces[i].strategy));
        for (size_t k = order[i].size(); k > 1; --k)
            std::swap(order[i][k - 1], order[i][size_t(random.between(0, int64_t(k) - 1))]);
        longest = std::max(longest, order[i].size());
    }
    std::vector<DrawnPoint> drawn;
    for (size_t k = 0; k < longest; ++k)
        for (size_t i = 0; i < spaces.size() && drawn.size() < most; ++i)
            if (k < order[i].size()) drawn.push_back({i, spaces[i].points[order[i][k]]});
    return drawn;
}

} // namespace attune::tools
