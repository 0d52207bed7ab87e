// Checks of what a caller hands in. Each failure names the argument, its value and what was expected.
#pragma once

#include "attune/kernel.h"

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
// The parameters of the kernel's user functions (params.cpp).
attune_status validate_params(const attune_kernel &kernel, const attune_problem &problem,
                              const attune_tensors &tensors);
// Of checked tensors: the one of that name.
const attune_param &param_of(const attune_tensors &tensors, const attune_mod_param &wanted);

} // namespace attune::rt
