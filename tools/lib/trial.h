// A candidate of attune tune and what is known of it; the estimator; the order in which points are drawn.
#pragma once

#include "space.h"

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace attune::tools {

// Ratios of two contestants' times in the same rounds: robust against lucky and unlucky rounds.
struct Ratio {
    double mean = 1;  // of the ratios: exp of the mean of their logarithms, without the outer fifths
    double error = 0; // standard error of the logarithm
};
// over[i] / of[i]: above 1 where `of` is faster.
Ratio ratio_of(const std::vector<double> &over, const std::vector<double> &of);

// A problem of the same kind that takes less time: fewer batch elements, then fewer heads, then shorter.
Case shorter(const Case &c, int threads);

struct Trial {
    std::string name, strategy, knobs;
    std::string entry;     // of a catalogue, as JSON; empty: a linked kernel
    std::string library;   // its plug-in
    std::string status;    // right, slow, not built, wrong, crashed
    std::string why;       // what went wrong
    std::string origin;    // linked, stored, sampled, neighbour
    double short_gain = 0; // default's time / its time, on the shorter problem; 0: not timed
    double gain = 0;       // on the whole one
    double at = 0;         // seconds since the search began
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Trial, name, strategy, knobs, entry, library, status, why, origin, short_gain, gain,
                                   at)

// The points in the order in which they are drawn: a strategy after the other, by the seed alone.
struct DrawnPoint {
    size_t space;
    TuningSpace::Point point;
};
std::vector<DrawnPoint> drawn_points(const std::vector<TuningSpace> &spaces, uint64_t seed, size_t most);

// A number that depends on nothing but these two.
uint64_t mixed(uint64_t seed, std::string_view text);

} // namespace attune::tools
