// What a CUDA kernel could reach at most, from what the assembler says of it: an estimate, made without a GPU.
//
//   occupancy   workgroups that fit on a multiprocessor, by registers, shared memory and threads
//   multiply-adds   useful ones, on the multiprocessors that have a workgroup, in whole waves
//   bytes       Q, K, V and O once each from memory
//
// Instructions beside the multiply-adds, barriers and latencies are left out: a kernel is slower than this.
#pragma once

#include "attune/kernel.h"

#include <string>

namespace attune::tools {

struct Roofline {
    std::string gpu;
    int64_t groups_per_unit = 0, warps_per_unit = 0; // of a multiprocessor
    std::string limit;                               // what allows no more workgroups
    double seconds = 0, tflops = 0;
    bool by_memory = false;
};

// For the kernel's main function (its first) as assembled for `code.arch`, on a GPU of that architecture.
// rows_of_group: query rows that a workgroup does. An empty .gpu where the figures are not known.
Roofline estimate(const attune_device_code &code, const attune_problem &problem, int64_t rows_of_group);

} // namespace attune::tools
