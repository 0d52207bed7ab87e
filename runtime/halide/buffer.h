// Halide's buffer descriptor over memory that somebody else owns.
#pragma once

#include "HalideRuntime.h"

#include <array>
#include <cstdint>
#include <type_traits>

namespace attune::rt::halide {

// A halide_buffer_t with room for its dimensions.
template <int N> struct Buffer : halide_buffer_t {
    halide_dimension_t dims[N];

    Buffer() : halide_buffer_t{} {}
    Buffer(const Buffer &) = delete;
    template <typename T> Buffer(T *data, const std::array<int64_t, N> &extent, const std::array<int64_t, N> &stride)
        : halide_buffer_t{} {
        using E = std::remove_const_t<T>;
        type = halide_type_t(std::is_floating_point_v<E> ? halide_type_float
                             : std::is_signed_v<E>       ? halide_type_int
                                                         : halide_type_uint,
                             8 * sizeof(E));
        host = reinterpret_cast<uint8_t *>(const_cast<E *>(data));
        dimensions = N;
        dim = dims;
        for (int i = 0; i < N; i++) dims[i] = halide_dimension_t(0, int32_t(extent[i]), int32_t(stride[i]));
    }
    template <typename T> void move_to(T *data) {
        host = reinterpret_cast<uint8_t *>(const_cast<std::remove_const_t<T> *>(data));
    }
};

// For calls through templates, which do not convert by themselves.
inline halide_buffer_t *base(halide_buffer_t &b) {
    return &b;
}

} // namespace attune::rt::halide
