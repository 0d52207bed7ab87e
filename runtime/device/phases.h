// Adapters between the kernel ABI and functions that Halide made for devices. The signature is that of
// generators/halide/gpu_phases.h, the same for all phases but for their buffers at the end.
//
// The generated registry instantiates the templates at the end once for each kernel; the work is in phases.cpp.
#pragma once

#include "attune/kernel.h"

#include <cstddef>
#include <cstdint>

struct halide_buffer_t;

namespace attune::rt::gpu {

// User functions of a kernel, whose functions then take an array of pointers.
using UserFn = int(void **);
struct UserMeta {
    const attune_mod_param *params;
    int64_t num_params;
    bool scores; // some are of scores
};

// What the adapters need to know of a kernel; the numbers come from the catalogue.
struct KernelMeta {
    int64_t dk, dv;       // features that the code is unrolled for; 0: at run time
    int64_t split_keys;   // keys of a part, where the key axis is split
    bool keeps_scores;    // all N*M of them lie in the workspace
    bool half_as_bits;    // f16 is handed over as 16-bit integers
    const UserMeta *user; // null: it has no user functions
};

using Buffer = halide_buffer_t *;
// query, key, value, mask, bias, batch, head, low, high, keys, position, flags, softcap, rows, num_keys, features,
// columns, group, scale, unit, ln_unit; then the phase's own buffers.
#define ATTUNE_GPU_ARGUMENTS                                                                                           \
    Buffer, Buffer, Buffer, Buffer, Buffer, Buffer, Buffer, int32_t, int32_t, int32_t, int32_t, int32_t, float,        \
        int32_t, int32_t, int32_t, int32_t, int32_t, float, float, float
using BlockFn = int(ATTUNE_GPU_ARGUMENTS, Buffer out, Buffer lse);                  // gpu_block
using StrictFn = int(ATTUNE_GPU_ARGUMENTS, Buffer written, Buffer out, Buffer lse); // gpu_strict
using ScoreFn = int(ATTUNE_GPU_ARGUMENTS, Buffer scores);                           // gpu_score
using MaskFn = int(ATTUNE_GPU_ARGUMENTS, Buffer raw, Buffer scores);                // gpu_mask
using SoftmaxFn = int(ATTUNE_GPU_ARGUMENTS, Buffer scores, Buffer weights);         // gpu_softmax
using MatmulFn = int(ATTUNE_GPU_ARGUMENTS, Buffer weights, Buffer out, Buffer lse); // gpu_matmul
using PartialFn = int(ATTUNE_GPU_ARGUMENTS, Buffer parts);                          // gpu_partial
using MergeFn = int(ATTUNE_GPU_ARGUMENTS, Buffer parts, Buffer out, Buffer lse);    // gpu_merge
#undef ATTUNE_GPU_ARGUMENTS

int block(const KernelMeta &meta, BlockFn *fn, const attune_args &args);
int strict(const KernelMeta &meta, StrictFn *fn, const attune_args &args);
int score(const KernelMeta &meta, ScoreFn *fn, const attune_args &args);
int mask(const KernelMeta &meta, MaskFn *fn, const attune_args &args);
int softmax(const KernelMeta &meta, SoftmaxFn *fn, const attune_args &args);
int matmul(const KernelMeta &meta, MatmulFn *fn, const attune_args &args);
int partial(const KernelMeta &meta, PartialFn *fn, const attune_args &args);
int merge(const KernelMeta &meta, MergeFn *fn, const attune_args &args);
// The same with user functions.
int block(const KernelMeta &meta, UserFn *fn, const attune_args &args);
int strict(const KernelMeta &meta, UserFn *fn, const attune_args &args);
int mask(const KernelMeta &meta, UserFn *fn, const attune_args &args);
int partial(const KernelMeta &meta, UserFn *fn, const attune_args &args);

size_t shared_bytes(const KernelMeta &meta, const attune_problem &problem);

inline int64_t one_task(const attune_args *) {
    return 1;
}
#define ATTUNE_GPU_PHASE(name, Fn)                                                                                     \
    template <const KernelMeta &meta, Fn *fn> int name##_phase(const attune_args *args, int64_t, int64_t, void *) {    \
        return name(meta, fn, *args);                                                                                  \
    }
ATTUNE_GPU_PHASE(block, BlockFn)
ATTUNE_GPU_PHASE(strict, StrictFn)
ATTUNE_GPU_PHASE(score, ScoreFn)
ATTUNE_GPU_PHASE(mask, MaskFn)
ATTUNE_GPU_PHASE(softmax, SoftmaxFn)
ATTUNE_GPU_PHASE(matmul, MatmulFn)
ATTUNE_GPU_PHASE(partial, PartialFn)
ATTUNE_GPU_PHASE(merge, MergeFn)
#define ATTUNE_GPU_USER_PHASE(name)                                                                                    \
    template <const KernelMeta &meta, UserFn *fn>                                                                      \
    int name##_user_phase(const attune_args *args, int64_t, int64_t, void *) {                                         \
        return name(meta, fn, *args);                                                                                  \
    }
ATTUNE_GPU_USER_PHASE(block)
ATTUNE_GPU_USER_PHASE(strict)
ATTUNE_GPU_USER_PHASE(mask)
ATTUNE_GPU_USER_PHASE(partial)
#undef ATTUNE_GPU_USER_PHASE
#undef ATTUNE_GPU_PHASE

template <const KernelMeta &meta> size_t kernel_shared_bytes(const attune_problem *p) {
    return shared_bytes(meta, *p);
}

} // namespace attune::rt::gpu
