// 16-bit floats for the passes of the runtime that no kernel does. (tools/lib/numbers.h has its own: the reference
// shares no code with what it judges.)
#pragma once

#include "attune/attune.h"

#include <bit>
#include <cmath>
#include <cstdint>

namespace attune::rt {

inline float bf16_to_float(uint16_t h) {
    return std::bit_cast<float>(uint32_t(h) << 16);
}

inline uint16_t float_to_bf16(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t(u >> 16 | 0x40u); // NaN stays NaN
    return uint16_t((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

inline float f16_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = h >> 10 & 31u, fraction = h & 0x3ffu;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | fraction << 13);
    const float magnitude =
        exponent ? std::bit_cast<float>((exponent + 112u) << 23 | fraction << 13) : float(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

inline uint16_t float_to_f16(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u); // 65520 and up round to infinity
    if (magnitude < 0x38800000u)                                   // below 2^-14: a multiple of 2^-24
        return uint16_t(sign | uint32_t(std::nearbyint(std::bit_cast<float>(magnitude) * 0x1p24f)));
    const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return uint16_t(sign | (rounded - 0x38000000u) >> 13);
}

} // namespace attune::rt
