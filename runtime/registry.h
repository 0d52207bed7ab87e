// The run-time registry: the built-in kernels of the generated table, then those registered later. Equal citizens.
#pragma once

#include "attune/kernel.h"

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace attune::rt {

// The generated table of the kernels that are linked; ends with a null pointer (cmake/catalogue.py).
extern const attune_kernel *const builtin_kernels[];

// Registers all of them, or none and the reason. Names must be new.
attune_status register_all(std::span<const attune_kernel *const> kernels);

// Why a CPU of this ISA does not take a plug-in's kernels; empty if it does.
std::string plugin_refusal(const attune_kernel_set *set, std::string_view cpu_isa);

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
