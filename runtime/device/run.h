// A run on a device: tensors that are on the host are copied to the device and back, then the kernel's phases queue
// their work one after the other.
#pragma once

#include "attune/kernel.h"

#include <string>

namespace attune::rt::device {

// args.shared is the kernel's part of the workspace. `seconds` gets the time of each phase, if it is not null.
attune_status run(const attune_kernel &kernel, const attune_args &args, double *seconds);

// Whether a kernel can run on the device that attune's own queue is on; empty, or why not.
std::string refusal(const attune_kernel &kernel, const attune_problem &problem);

} // namespace attune::rt::device
