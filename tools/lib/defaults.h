// The planner's checked-in ranking of strategies (generators/catalogue/ranking.json), from measurements: attune tune
// --defaults.
#pragma once

#include "case.h"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace attune::tools {

// The time of a strategy's kernel on a case.
struct Observation {
    std::string case_text, strategy;
    int64_t rows = 0; // query rows that share a kv head: what rules go by
    double seconds = 0;
};

// `ranking` with the strategies of each rule in the order of their mean loss: the logarithm of a time over the best of
// the same case, over the cases that the rule is for. Strategies that were not observed (those of devices) keep their
// places.
nlohmann::ordered_json ranked(nlohmann::ordered_json ranking, const std::vector<Observation> &observations);

// Times the planner's kernel of each strategy on a case, interleaved.
std::vector<Observation> observe(const Case &c, int threads, uint64_t seed);

} // namespace attune::tools
