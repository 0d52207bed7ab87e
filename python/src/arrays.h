// Arguments from Python as attune's tensors, without a copy: whatever offers DLPack or the buffer protocol (NumPy,
// PyTorch, memoryview …). Every message names the argument, its value and what was expected.
#pragma once

#include <attune/attune.hpp>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <span>
#include <string>

namespace attune::python {

namespace nb = nanobind;

// An argument's memory; the array keeps it alive.
struct Operand {
    nb::ndarray<nb::ro> array;
    TensorView view; // four dimensions; those that the argument lacks are 1, in front
    int rank = 0;

    // The shape as Python prints it, for messages.
    std::string shape() const;
};

// q, k, v, x …: f32, bf16 or f16, on the CPU, of min_rank to 4 dimensions. `written` where it is an output.
Operand tensor(nb::handle object, const char *name, int min_rank, bool written = false);

// Something that is broadcast to the shape of the scores, [B, Hq, N, M]: `dtype` u8 takes bool as well.
Operand scores_like(nb::handle object, const char *name, Dtype dtype, const std::array<std::int64_t, 4> &shape,
                    bool written = false);

// A dense f32 matrix or vector of the given rank.
Operand dense_f32(nb::handle object, const char *name, int rank);

// One number for each batch entry or head: contiguous, of T's type.
template <class T> struct Vector {
    nb::ndarray<nb::ro> array;
    std::span<const T> values;
};
Vector<std::int64_t> int64_vector(nb::handle object, const char *name);
Vector<float> f32_vector(nb::handle object, const char *name);

[[noreturn]] void wrong(const std::string &message);      // InvalidArgument
[[noreturn]] void wrong_type(const std::string &message); // TypeError

} // namespace attune::python
