// Checked runs of all kernels that can do a case, the space of random cases, and making a failing case small.
#pragma once

#include "runner.h"

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace attune::tools {

// What a seed decides besides the numbers: at which end of the arrays the unreadable page lies, and, for every third
// seed, NaN and infinities at keys that no row may see. (These send whole tiles to the strict code: not always, or the
// fast code would never meet an edge.)
InputOptions verify_options(uint64_t seed);

struct Outcome {
    const attune_kernel *kernel;
    int threads;
    KernelCheck check;
};

struct CaseOutcome {
    std::vector<Outcome> outcomes;
    std::map<std::string, std::vector<std::string>> refusals; // reason -> kernels
    bool all_ok() const;
};

// Every kernel of `filter` that does not refuse the case, at each thread count; the bits have to be the same.
CaseOutcome verify_case(const Case &c, uint64_t seed, const KernelFilter &filter, const std::vector<int> &threads);

// The part of the problem space that some kernel of `filter` claims. `unclaimed` gets the names of the rest.
CaseSpace claimed_space(const KernelFilter &filter, std::string &unclaimed);

// Makes a failing case smaller, as long as `fails` holds: features go, sizes fall. The result is minimal in that no one
// step makes it smaller, unless `budget` calls of `fails` were not enough.
Case shrink(Case c, const std::function<bool(const Case &)> &fails, int budget = 600);

} // namespace attune::tools
