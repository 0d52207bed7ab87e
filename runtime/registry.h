// The run-time registry: the built-in kernels of the generated table, then those registered later. Equal citizens.
#pragma once

#include "attune/kernel.h"

#include <string>
#include <vector>

namespace attune::rt {

// All kernels, in a snapshot that stays valid (kernels are never removed).
std::vector<const attune_kernel *> all_kernels();

// Empty if `kernel` can run `problem` here, otherwise why not.
std::string refusal(const attune_kernel &kernel, const attune_problem &problem);

// One rule of the checked-in ranking: which strategies to prefer for problems with this many rows for each kv head.
struct RankingRule {
    int64_t rows_min, rows_max;
    std::vector<const char *> strategies;
};
const std::vector<RankingRule> &ranking();

} // namespace attune::rt
