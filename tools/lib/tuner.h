// The search of attune tune: over the points of all strategies' spaces, for one case on this machine. docs/tuning.md
// says how it goes.
#pragma once

#include "trial.h"

#include <deque>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace attune::tools {

struct TuneOptions {
    int threads = 1;
    uint64_t seed = 0;
    double budget = 60;      // seconds
    double build_limit = 60; // for one candidate
    double run_limit = 30;   // for its first run
    size_t batch = 6;        // candidates that are built before the next measurement
    bool neighbours = true;  // false: random sampling, to compare searches with
    std::vector<std::string> strategies;
    bool linked = true, stored = true;           // begin with these kernels; the default is always among them
    std::vector<nlohmann::ordered_json> entries; // of a catalogue: candidates in place of the spaces' points
    std::string folder;                          // for plug-ins; empty: the cache's
    std::function<void(double done, const std::string &note)> progress; // seconds since the beginning
    std::function<void(const nlohmann::json &)> save;                   // what is known, after each turn
};

struct TuneResult {
    std::vector<TuningSpace> spaces;
    std::string default_kernel;
    double default_seconds = 0, best_seconds = 0; // medians of the last comparison
    std::optional<Trial> best;                    // empty: nothing beats the default
    Ratio gain;                                   // of the best, in the last comparison
    std::deque<Trial> trials;                     // the default first
    bool interrupted = false;
    double seconds = 0;
};

// `known`: what an earlier search saved. Throws Error for a case that cannot be tuned.
TuneResult tune(const Case &c, const TuneOptions &options, const nlohmann::json &known);

} // namespace attune::tools
