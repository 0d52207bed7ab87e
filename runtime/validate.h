// Checks of what a caller hands in. Each failure names the argument, its value and what was expected.
#pragma once

#include "attune/attune.h"

namespace attune::rt {

// What a tensor has to be.
struct Expected {
    const char *name;
    const attune_tensor &tensor;
    attune_dtype dtype;
    attune_device device;
    int64_t shape[4];
    bool broadcast; // strides of 0 are allowed, as for everything that is only read
};
attune_status check_tensor(const Expected &expected);

attune_status validate_problem(const attune_problem *problem);
attune_status validate_tensors(const attune_problem &problem, const attune_tensors *tensors);

} // namespace attune::rt
