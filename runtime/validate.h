// Checks of what a caller hands in. Each failure names the argument, its value and what was expected.
#pragma once

#include "attune/attune.h"

namespace attune::rt {

attune_status validate_problem(const attune_problem *problem);
attune_status validate_tensors(const attune_problem &problem, const attune_tensors *tensors);

} // namespace attune::rt
