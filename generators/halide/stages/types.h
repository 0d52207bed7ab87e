// What every stage and strategy shares: names for the roles a Func's dimensions play, the exponential, and the two
// constants that stand for "invisible".
//
// Dimensions: d feature of Q and K, j key, r row of the query tile, c feature of V and O, kb key block. A task is one
// query tile: `r` runs over its rows only.
#pragma once

#include "Halide.h"

#include <limits>
#include <string>
#include <vector>

namespace attune_gen {

using namespace Halide;

// An invisible score, and the lowest value that a visible one may take. They differ by one ulp, so that "S !=
// kInvisible" is the visibility predicate (contract §3.8) however low a finite bias pushes a score. Finite on purpose:
// Halide compiles under no-infinities rules, where a select between a number and -inf may be folded to the number.
constexpr float kInvisible = -std::numeric_limits<float>::max();
constexpr float kLowestVisible = -3.4028232636e+38f;

constexpr float kLog2e = 1.44269504088896341f;

// 2^x for x <= 0. x = n + f with n = trunc(x), f in (-1, 0]; p(f) ~ 2^f by a degree-5 polynomial (relative minimax,
// error 7.5e-8), and n is added to the exponent bits. Below -126 the result is 2^-126, the smallest normal number: no
// denormals reach the matmul. trunc and not floor or round: these fall into half-width instructions on AVX-512 (96.5
// against 93.5 GFLOP/s).
inline Expr exp2_nonpositive(const Expr &x) {
    Expr clamped = max(x, -126.0f);
    Expr n = cast<int>(clamped);
    Expr f = clamped - cast<float>(n);
    Expr p = 0.00093878835f;
    for (float coefficient : {0.00918861176f, 0.0552797226f, 0.240172189f, 0.693142253f, 0.999999925f})
        p = p * f + coefficient;
    return reinterpret<float>(reinterpret<int>(p) + (n << 23));
}

// Pairs of bf16 as 32 bits, the first one in the lower half: what vdpbf16ps multiplies. Both functions are wrappers of
// Halide's runtime around one instruction, for vectors of 16 sums and of 32 numbers. (A sum over a pair as the
// innermost reduction, .atomic().vectorize(), gives the same code from packed operands; from two rows of V 10 GB/s
// instead of 34. cast<bfloat16_t> rounds in seven instructions: 182 instead of 196 GFLOP/s.)
inline HalidePureExtern_3(float, dpbf16ps, float, uint32_t, uint32_t);
inline HalidePureExtern_1(uint16_t, vcvtne2ps2bf16, float);

inline Expr pair(const Expr &first, const Expr &second) {
    return concat_bits({first, second});
}

// sum + a * b, or, where these are pairs, sum + a.first * b.first + a.second * b.second.
inline Expr multiply_add(const Expr &sum, const Expr &a, const Expr &b) {
    return a.type() == UInt(32) ? dpbf16ps(sum, a, b) : sum + a * b;
}

// 2^x for x <= 0 where the result is rounded to bf16 (relative error 2^-9): degree 3, relative error 7.5e-5.
inline Expr exp2_to_bf16(const Expr &x) {
    Expr clamped = max(x, -126.0f);
    Expr n = cast<int>(clamped);
    Expr f = clamped - cast<float>(n);
    Expr p = 0.0390122613f;
    for (float coefficient : {0.230070362f, 0.69102071f, 0.999925219f}) p = p * f + coefficient;
    return reinterpret<float>(reinterpret<int>(p) + (n << 23));
}

// tanh by its series near 0, where (1 - t) / (1 + t) loses digits, t = e^(-2|x|).
inline Expr fast_tanh(const Expr &x) {
    const Expr a = abs(x), x2 = x * x;
    const Expr t = exp2_nonpositive(a * (-2.0f * kLog2e)), far = (1.0f - t) / (1.0f + t);
    const Expr near =
        x * (1.0f + x2 * (-0.333333333f + x2 * (0.133333333f + x2 * (-0.0539682540f + x2 * 0.0218694885f))));
    return select(a < 0.25f, near, select(x < 0.0f, -far, far));
}

// A Func that is 0 and then accumulates over the reduction variable k.
struct Accumulation {
    Func acc;
    RDom dom;
};

} // namespace attune_gen
