// Adapters between the kernel ABI and functions that MLIR made: they turn int64 pointers and strides into the memref
// descriptors of one task. The signatures are those of generators/mlir/payload/strategies.py; a function is called
// through its C interface (_mlir_ciface_NAME), which takes descriptors by address.
//
// The generated registry instantiates the templates at the end once for each kernel; the work is in phases.cpp.
#pragma once

#include "attune/kernel.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace attune::rt::mlir {

// What the adapters need to know of a kernel; the numbers come from the catalogue.
struct KernelMeta {
    int64_t dk, dv;
    int64_t q;     // rows of a tile: the largest of the kernel's blocks
    int64_t panel; // keys of a packed panel
    bool strip;    // all scores of a tile lie in scratch memory
};

// What a function takes from the stack.
struct Memory {
    int64_t stack;
};

// MLIR's descriptor of strided memory; index and sizes are 64-bit.
template <typename T, int N> struct Memref {
    T *allocated, *aligned;
    int64_t offset;
    int64_t sizes[N], strides[N];
};

using PackFn = void (*)(const Memref<const float, 2> *key, Memref<float, 3> *packed, Memref<int32_t, 1> *bits);
using AttendFn = void (*)(const Memref<float, 2> *query, const Memref<float, 3> *keys,
                          const Memref<const float, 2> *values, const Memref<int32_t, 1> *lows,
                          const Memref<int32_t, 1> *highs, const Memref<int32_t, 1> *positions,
                          const Memref<float, 1> *slopes, const Memref<const uint8_t, 1> *mask,
                          const Memref<int64_t, 1> *mask_rows, const Memref<const int32_t, 1> *bias_bits,
                          const Memref<int64_t, 1> *bias_rows, Memref<float, 2> *out, Memref<float, 1> *row_max,
                          Memref<float, 1> *row_sum, Memref<float, 1> *strip, int64_t begin, int64_t end,
                          int64_t full_begin, int64_t full_end, int64_t use_softcap, int64_t use_alibi,
                          int64_t use_bias, int64_t use_mask, float softcap, float unit, int64_t rows);

int64_t pack_tasks(const KernelMeta &meta, const attune_args &args);
int pack(const KernelMeta &meta, PackFn fn, const attune_args &args, int64_t begin, int64_t end, void *scratch);
int64_t attend_tasks(const KernelMeta &meta, const attune_args &args);
int attend(const KernelMeta &meta, AttendFn fn, const attune_args &args, int64_t begin, int64_t end, void *scratch);

size_t shared_bytes(const KernelMeta &meta, const attune_problem &problem);
size_t scratch_bytes(const KernelMeta &meta, const attune_problem &problem);

// One instance for each phase of each kernel.
template <const KernelMeta &meta, PackFn fn>
int pack_phase(const attune_args *args, int64_t begin, int64_t end, void *scratch) {
    return pack(meta, fn, *args, begin, end, scratch);
}
template <const KernelMeta &meta, AttendFn fn>
int attend_phase(const attune_args *args, int64_t begin, int64_t end, void *scratch) {
    return attend(meta, fn, *args, begin, end, scratch);
}
template <const KernelMeta &meta> int64_t pack_phase_tasks(const attune_args *args) {
    return pack_tasks(meta, *args);
}
template <const KernelMeta &meta> int64_t attend_phase_tasks(const attune_args *args) {
    return attend_tasks(meta, *args);
}
template <const KernelMeta &meta> size_t kernel_shared_bytes(const attune_problem *p) {
    return shared_bytes(meta, *p);
}
template <const KernelMeta &meta> size_t kernel_scratch_bytes(const attune_problem *p) {
    return scratch_bytes(meta, *p);
}
template <const Memory &memory> size_t kernel_stack_bytes(const attune_problem *) {
    return size_t(memory.stack);
}

constexpr Memory largest(std::initializer_list<Memory> phases) {
    Memory m{};
    for (const Memory &x : phases) m.stack = std::max(m.stack, x.stack);
    return m;
}

} // namespace attune::rt::mlir
