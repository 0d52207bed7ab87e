// Searches side by side: points drawn at random, attune's own, and Halide's autoschedulers, each from scratch under the
// same budget on the same case.
#pragma once

#include "tuner.h"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace attune::tools {

struct Searcher {
    std::string name, about;
};
const std::vector<Searcher> &searchers();

// Kernels that Halide's autoschedulers make for this case, in the order in which they are tried.
std::vector<nlohmann::ordered_json> autoscheduled_entries(const Case &c, const Setting &setting, int threads);

// `folder`: for the plug-ins of this search alone.
TuneResult run_searcher(const std::string &name, const Case &c, TuneOptions options, const std::string &folder);

// The best gain over the default at a time since the beginning; 0: nothing was timed yet.
double best_until(const TuneResult &result, double seconds);

} // namespace attune::tools
