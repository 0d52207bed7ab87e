// The projections of multi-head attention: y[r, c] = sum_k x[r, k] * w[k, c] + bias[c], by generated kernels
// (generators/halide/strategies/projection.cpp) over weights that are packed once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace attune::rt {

// Bytes of the packed form, for any ISA.
size_t matmul_packed_bytes(int64_t in, int64_t out);

// w(k, c) is w[k * in_stride + c * out_stride]; `packed` is 64-byte aligned.
void matmul_pack(const float *w, int64_t in, int64_t out, int64_t in_stride, int64_t out_stride, void *packed);

// x: rows x in with row stride x_stride, y: rows x out with row stride y_stride, features dense; bias may be null. Runs
// on `threads` threads. 0, or an error of the kernel's.
int matmul_run(const void *packed, int64_t in, int64_t out, const float *x, int64_t x_stride, int64_t rows,
               const float *bias, float *y, int64_t y_stride);

} // namespace attune::rt
