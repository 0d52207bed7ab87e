// Adapters between the kernel ABI and the tensor core kernels that MLIR made for CUDA (generators/mlir/mma): they load
// the PTX and launch its functions on the calling thread's stream.
//
// A kernel has the phases main (attend), strict (recompute, see there) and, where keys are split, merge. attend wants
// aligned memory; for other strides recompute does all rows, right but slow.
#pragma once

#include "attune/kernel.h"

#include <cstddef>
#include <cstdint>

namespace attune::rt::mlir {

// The code for some features; the numbers come from the catalogue.
struct MmaTile {
    int64_t dk, dv;        // the most features
    int64_t q, k, warps;   // rows and keys of a block, warps
    int64_t dynamic_bytes; // shared memory that a launch of attend asks for
    bool wide_query;       // Q is read 16 bytes at a time, not 4
    const char *ptx;       // for sm_80, which later devices take too
};

// What the adapters need to know of a kernel.
struct MmaMeta {
    const char *name;
    int64_t split_keys;   // keys of a part at least; 0: not split
    const MmaTile *tiles; // of these the first that is large enough
    int64_t num_tiles;
};

int mma_main(const MmaMeta &meta, const attune_args &args);
int mma_strict(const MmaMeta &meta, const attune_args &args);
int mma_merge(const MmaMeta &meta, const attune_args &args);
size_t mma_shared_bytes(const MmaMeta &meta, const attune_problem &problem);
const char *mma_refuses(const attune_problem *problem);

inline int64_t mma_tasks(const attune_args *) {
    return 1;
}
template <const MmaMeta &meta> int mma_main_phase(const attune_args *args, int64_t, int64_t, void *) {
    return mma_main(meta, *args);
}
template <const MmaMeta &meta> int mma_strict_phase(const attune_args *args, int64_t, int64_t, void *) {
    return mma_strict(meta, *args);
}
template <const MmaMeta &meta> int mma_merge_phase(const attune_args *args, int64_t, int64_t, void *) {
    return mma_merge(meta, *args);
}
template <const MmaMeta &meta> size_t mma_kernel_shared_bytes(const attune_problem *p) {
    return mma_shared_bytes(meta, *p);
}

} // namespace attune::rt::mlir
