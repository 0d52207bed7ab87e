// Rows of f32, bf16 and f16 to and from f32, rounding to nearest even. What lets kernels that compute in f32 take
// tensors of any type: their adapters convert K and V while packing, Q for a tile, and O where it is written.
#pragma once

#include "attune/attune.h"

#include <cstdint>

namespace attune::rt {

constexpr int64_t bytes_of(attune_dtype t) {
    return t == ATTUNE_F32 || t == ATTUNE_I32 ? 4 : t == ATTUNE_U8 ? 1 : t == ATTUNE_I64 ? 8 : 2;
}

// y[c] = x[c * stride], for n elements of `dtype`.
void widen(attune_dtype dtype, const void *x, int64_t stride, int64_t n, float *y);

// y[c * stride] = x[c], rounded to `dtype`. A NaN stays one; what is too large becomes an infinity.
void narrow(attune_dtype dtype, const float *x, int64_t n, void *y, int64_t stride);

} // namespace attune::rt
