// Adapters between the kernel ABI and Halide functions: they turn int64 pointers and strides into the buffers of one
// task, gather the rows of a tile, and put results where they belong. The signatures are those of
// generators/halide/phases.h.
//
// The generated registry instantiates the templates at the end once for each kernel; the work is in phases.cpp.
#pragma once

#include "attune/kernel.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

struct halide_buffer_t;

namespace attune::rt::halide {

// User functions (docs/kernels.md) of a kernel. Functions that have them take an array of pointers, since the number of
// their arguments differs.
using UserFn = int (*)(void **);
struct UserMeta {
    const attune_mod_param *params;
    int64_t num_params;
    bool scores;        // some are of scores
    UserFn blocks, row; // generators/halide/strategies/user.cpp; blocks is null where none is a mask
};

// What the adapters need to know of a kernel; the numbers come from the catalogue.
struct KernelMeta {
    int64_t dk, dv;       // 0: run-time sizes
    int64_t q, k;         // rows of a tile, keys of a block
    int64_t panel;        // keys of a packed panel; 0: K is read as it is
    int64_t split_keys;   // keys of one split; 0: the key axis is not split
    bool keeps_scores;    // all N * M scores lie in the shared memory
    bool whole;           // one call does a whole batch element
    bool pairs;           // multiplies pairs of bf16: see ../pairs.h
    const UserMeta *user; // null: it has no user functions
};

// Memory that a Halide function takes for itself: on the stack, and through halide_malloc: heap + per_key * M +
// per_feature * dv bytes.
struct Memory {
    int64_t stack, heap, heap_per_key, heap_per_feature;
};

using PackFn = int (*)(void *, halide_buffer_t *key, halide_buffer_t *packed, halide_buffer_t *bits);
// What decides who sees whom comes first in the phases that mask (MaskedPhase in generators/halide/phases.h).
#define ATTUNE_MASK_ARGUMENTS                                                                                          \
    halide_buffer_t *lo, halide_buffer_t *hi, halide_buffer_t *position, halide_buffer_t *slope,                       \
        halide_buffer_t *mask, halide_buffer_t *bias, halide_buffer_t *mask_tail, halide_buffer_t *bias_tail,          \
        bool use_mask, bool use_bias, bool use_softcap, bool use_alibi, float softcap, int32_t first_row,              \
        int32_t rows_per_head, int32_t num_rows, int32_t num_keys
using AttendFn = int (*)(void *, ATTUNE_MASK_ARGUMENTS, halide_buffer_t *query, halide_buffer_t *key,
                         halide_buffer_t *value, int32_t begin, int32_t end, int32_t full_begin, int32_t full_end,
                         float unit, float scale, bool exact_sum, halide_buffer_t *out, halide_buffer_t *row_max,
                         halide_buffer_t *row_sum);
using MaskFn = int (*)(void *, ATTUNE_MASK_ARGUMENTS, halide_buffer_t *raw, halide_buffer_t *masked);
using ScoreFn = int (*)(void *, halide_buffer_t *query, halide_buffer_t *key, halide_buffer_t *scores);
using SoftmaxFn = int (*)(void *, halide_buffer_t *scores, float unit, halide_buffer_t *weights,
                          halide_buffer_t *row_max, halide_buffer_t *row_sum);
using MatmulFn = int (*)(void *, halide_buffer_t *weights, halide_buffer_t *value, halide_buffer_t *row_sum,
                         int32_t num_keys, halide_buffer_t *out);
using WholeFn = int (*)(halide_buffer_t *query, halide_buffer_t *key, halide_buffer_t *value, halide_buffer_t *lo,
                        halide_buffer_t *hi, float scale, int32_t group, halide_buffer_t *out, halide_buffer_t *row_max,
                        halide_buffer_t *row_sum);
using MergeFn = int (*)(void *, halide_buffer_t *part_out, halide_buffer_t *part_max, halide_buffer_t *part_sum,
                        float unit, halide_buffer_t *out, halide_buffer_t *row_max, halide_buffer_t *row_sum);

// One function a kind of phase. `tasks` says into how many tasks its work is cut.
#define ATTUNE_PHASE_KINDS(X)                                                                                          \
    X(pack, PackFn)                                                                                                    \
    X(attend, AttendFn)                                                                                                \
    X(merge, MergeFn)                                                                                                  \
    X(score, ScoreFn)                                                                                                  \
    X(mask, MaskFn)                                                                                                    \
    X(softmax, SoftmaxFn) X(matmul, MatmulFn) X(whole, WholeFn) X(attend_user, UserFn) X(mask_user, UserFn)
#define ATTUNE_DECLARE(kind, Fn)                                                                                       \
    int kind(const KernelMeta &meta, const Memory &memory, Fn fn, const attune_args &args, int64_t begin, int64_t end, \
             void *scratch);                                                                                           \
    int64_t kind##_tasks(const KernelMeta &meta, const attune_args &args);
ATTUNE_PHASE_KINDS(ATTUNE_DECLARE)
#undef ATTUNE_DECLARE

size_t shared_bytes(const KernelMeta &meta, const attune_problem &problem);
size_t scratch_bytes(const KernelMeta &meta, const Memory &memory, const attune_problem &problem);

// One instance for each phase of each kernel.
#define ATTUNE_INSTANCE(kind, Fn)                                                                                      \
    template <const KernelMeta &meta, const Memory &memory, Fn fn>                                                     \
    int kind##_phase(const attune_args *args, int64_t begin, int64_t end, void *scratch) {                             \
        return kind(meta, memory, fn, *args, begin, end, scratch);                                                     \
    }                                                                                                                  \
    template <const KernelMeta &meta> int64_t kind##_phase_tasks(const attune_args *args) {                            \
        return kind##_tasks(meta, *args);                                                                              \
    }
ATTUNE_PHASE_KINDS(ATTUNE_INSTANCE)
#undef ATTUNE_INSTANCE

// A phase with a function for each type of K and V, which it reads in place.
template <attune_dtype a, attune_phase_fn of_a, attune_dtype b, attune_phase_fn of_b, attune_dtype c,
          attune_phase_fn of_c>
int by_kv(const attune_args *args, int64_t begin, int64_t end, void *scratch) {
    static_assert(a != b && b != c && c != a);
    const attune_dtype kv = args->problem->kv_dtype;
    return (kv == a ? of_a : kv == b ? of_b : of_c)(args, begin, end, scratch);
}

template <const KernelMeta &meta> size_t kernel_shared_bytes(const attune_problem *p) {
    return shared_bytes(meta, *p);
}
template <const KernelMeta &meta, const Memory &memory> size_t kernel_scratch_bytes(const attune_problem *p) {
    return scratch_bytes(meta, memory, *p);
}
template <const Memory &memory> size_t kernel_stack_bytes(const attune_problem *) {
    return size_t(memory.stack);
}

// The phases of a kernel run one after the other, in the same memory.
constexpr Memory largest(std::initializer_list<Memory> phases) {
    Memory m{};
    for (const Memory &x : phases)
        m = {std::max(m.stack, x.stack), std::max(m.heap, x.heap), std::max(m.heap_per_key, x.heap_per_key),
             std::max(m.heap_per_feature, x.heap_per_feature)};
    return m;
}

} // namespace attune::rt::halide
