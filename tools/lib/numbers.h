// Numbers that must not depend on the machine or on a library's version: a counter-based generator, and the conversions
// between f32 and the two 16-bit types (round to nearest even).
#pragma once

#include "attune/attune.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace attune::tools {

// SplitMix64 (Steele, Lea, Flood 2014). Seeding by (seed, stream) gives each array a stream of its own, so that Q, K
// and V stay the same when a mask is added to a case.
class Random {
  public:
    explicit Random(uint64_t seed, uint64_t stream = 0) : state_(mix(seed) ^ mix(stream + 0x632be59bd9b4e019u)) {}

    uint64_t bits() { return mix(state_ += 0x9e3779b97f4a7c15u); }
    // [0, 1)
    double uniform() { return double(bits() >> 11) * 0x1p-53; }
    // [low, high]. The modulo bias is below 2^-32 for the ranges that are used here.
    int64_t between(int64_t low, int64_t high) { return low + int64_t(bits() % uint64_t(high - low + 1)); }
    bool chance(double probability) { return uniform() < probability; }
    template <typename T, size_t n> const T &pick(const T (&choices)[n]) { return choices[between(0, int64_t(n) - 1)]; }

    // N(0,1) by Box and Muller, two at a time.
    double normal() {
        if (has_spare_) {
            has_spare_ = false;
            return spare_;
        }
        const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
        const double angle = 6.283185307179586 * uniform();
        spare_ = radius * std::sin(angle);
        has_spare_ = true;
        return radius * std::cos(angle);
    }

  private:
    static uint64_t mix(uint64_t z) {
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }

    uint64_t state_;
    double spare_ = 0;
    bool has_spare_ = false;
};

inline float bf16_to_float(uint16_t h) {
    return std::bit_cast<float>(uint32_t(h) << 16);
}

inline uint16_t float_to_bf16(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40u); // NaN stays NaN
    return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline float f16_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 0x3ffu;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
    const float magnitude = exponent == 0 ? std::ldexp(float(fraction), -24)
                                          : std::bit_cast<float>(((exponent + 112u) << 23) | (fraction << 13));
    return sign ? -magnitude : magnitude;
}

inline uint16_t float_to_f16(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u); // 65520 and up round to infinity
    if (magnitude < 0x38800000u)                                   // below 2^-14: a multiple of 2^-24
        return uint16_t(sign | uint32_t(std::nearbyint(std::ldexp(std::bit_cast<float>(magnitude), 24))));
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return uint16_t(sign | ((rounded - 0x38000000u) >> 13));
}

inline size_t dtype_size(attune_dtype dtype) {
    switch (dtype) {
    case ATTUNE_F32:
    case ATTUNE_I32:
        return 4;
    case ATTUNE_BF16:
    case ATTUNE_F16:
        return 2;
    case ATTUNE_U8:
        return 1;
    case ATTUNE_I64:
        return 8;
    }
    return 0;
}

// The distance from 1 to the next number of the type.
inline double dtype_epsilon(attune_dtype dtype) {
    return dtype == ATTUNE_BF16 ? 0x1p-7 : dtype == ATTUNE_F16 ? 0x1p-10 : 0x1p-23;
}

// Element `index` of an array of f32, bf16 or f16.
inline float load_element(const void *data, attune_dtype dtype, int64_t index) {
    if (dtype == ATTUNE_F32) {
        float x;
        std::memcpy(&x, static_cast<const char *>(data) + index * 4, 4);
        return x;
    }
    uint16_t h;
    std::memcpy(&h, static_cast<const char *>(data) + index * 2, 2);
    return dtype == ATTUNE_BF16 ? bf16_to_float(h) : f16_to_float(h);
}

inline void store_element(void *data, attune_dtype dtype, int64_t index, float x) {
    if (dtype == ATTUNE_F32) {
        std::memcpy(static_cast<char *>(data) + index * 4, &x, 4);
        return;
    }
    const uint16_t h = dtype == ATTUNE_BF16 ? float_to_bf16(x) : float_to_f16(x);
    std::memcpy(static_cast<char *>(data) + index * 2, &h, 2);
}

// x as the type would keep it.
inline float round_to(float x, attune_dtype dtype) {
    if (dtype == ATTUNE_BF16) return bf16_to_float(float_to_bf16(x));
    if (dtype == ATTUNE_F16) return f16_to_float(float_to_f16(x));
    return x;
}

} // namespace attune::tools
