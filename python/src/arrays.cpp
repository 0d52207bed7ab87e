#include "arrays.h"

#include <nanobind/stl/string.h>

#include <algorithm>

namespace attune::python {

namespace {

std::string text(const nb::ndarray<nb::ro> &array) {
    std::string result = "(";
    for (std::size_t i = 0; i < array.ndim(); i++) result += (i ? ", " : "") + std::to_string(array.shape(i));
    return result + (array.ndim() == 1 ? ",)" : ")");
}

std::string kind_of(nb::handle object) {
    const nb::object name = object.type().attr("__name__");
    return nb::cast<std::string>(name);
}

std::string dtype_name(const nb::dlpack::dtype &t) {
    const char *kind = "a type that DLPack calls ";
    switch (nb::dlpack::dtype_code(t.code)) {
    case nb::dlpack::dtype_code::Int:
        kind = "int";
        break;
    case nb::dlpack::dtype_code::UInt:
        kind = "uint";
        break;
    case nb::dlpack::dtype_code::Float:
        kind = "float";
        break;
    case nb::dlpack::dtype_code::Bfloat:
        kind = "bfloat";
        break;
    case nb::dlpack::dtype_code::Complex:
        kind = "complex";
        break;
    case nb::dlpack::dtype_code::Bool:
        return "bool";
    default:
        return kind + std::to_string(t.code) + " of " + std::to_string(t.bits) + " bits";
    }
    return kind + std::to_string(t.bits);
}

std::optional<Dtype> float_type(const nb::dlpack::dtype &t) {
    if (t == nb::dtype<float>()) return Dtype::f32;
    if (t.lanes != 1 || t.bits != 16) return std::nullopt;
    if (t.code == std::uint8_t(nb::dlpack::dtype_code::Float)) return Dtype::f16;
    if (t.code == std::uint8_t(nb::dlpack::dtype_code::Bfloat)) return Dtype::bf16;
    return std::nullopt;
}

const char *device_name(int type) {
    switch (type) {
    case nb::device::cuda::value:
    case nb::device::cuda_managed::value:
        return "a CUDA device";
    case nb::device::rocm::value:
        return "a ROCm device";
    case nb::device::metal::value:
        return "a Metal device";
    case nb::device::opencl::value:
        return "an OpenCL device";
    case nb::device::vulkan::value:
        return "a Vulkan device";
    default:
        return "another device";
    }
}

// `bits` becomes true where the array is NumPy's view of a type that NumPy itself does not have (ml_dtypes.bfloat16),
// which neither of the two protocols can describe.
nb::ndarray<nb::ro> import(nb::handle object, const std::string &name, bool written, bool *bits = nullptr) {
    if (nb::hasattr(object, "requires_grad") && nb::cast<bool>(object.attr("requires_grad")))
        wrong(name + " requires grad, and attune has no backward pass: expected " + name + ".detach()");
    nb::ndarray<nb::ro> array;
    if (written) {
        nb::ndarray<> writable;
        if (nb::try_cast(object, writable)) {
            array = nb::ndarray<nb::ro>(writable);
        } else if (nb::try_cast(object, array)) {
            wrong(name + " is read-only: expected an array that may be written");
        }
    } else {
        nb::try_cast(object, array);
    }
    if (!array.is_valid() && bits && nb::hasattr(object, "dtype") &&
        nb::cast<std::string>(nb::str(nb::object(object.attr("dtype")))) == "bfloat16") {
        *bits = true;
        return import(object.attr("view")("uint16"), name, written);
    }
    if (!array.is_valid())
        wrong_type(name + " is of type " + kind_of(object) +
                   ": expected an array that offers DLPack or the buffer protocol, with strides of whole elements");
    const int device = array.device_type();
    if (device != nb::device::cpu::value && device != nb::device::cuda_host::value &&
        device != nb::device::rocm_host::value)
        wrong(name + " is on " + device_name(device) + ": expected memory of the CPU");
    return array;
}

Operand operand(nb::ndarray<nb::ro> array, Dtype dtype) {
    Operand o;
    o.rank = int(array.ndim());
    o.view.data = array.data();
    o.view.dtype = dtype;
    o.view.shape.fill(1);
    for (int i = 0; i < o.rank; i++) {
        o.view.shape[std::size_t(4 - o.rank + i)] = std::int64_t(array.shape(std::size_t(i)));
        o.view.stride[std::size_t(4 - o.rank + i)] = array.stride(std::size_t(i));
    }
    o.array = std::move(array);
    return o;
}

template <class T> Vector<T> vector(nb::handle object, const char *name, const char *type) {
    Vector<T> result;
    result.array = import(object, name, false);
    if (result.array.dtype() != nb::dtype<T>())
        wrong_type(std::string(name) + ".dtype is " + dtype_name(result.array.dtype()) + ": expected " + type);
    if (result.array.ndim() != 1 || (result.array.shape(0) > 1 && result.array.stride(0) != 1))
        wrong(std::string(name) + ".shape is " + text(result.array) + ": expected one dimension, contiguous");
    result.values = {static_cast<const T *>(result.array.data()), result.array.shape(0)};
    return result;
}

} // namespace

std::string Operand::shape() const {
    return text(array);
}

void wrong(const std::string &message) {
    throw Error(ATTUNE_INVALID_ARGUMENT, message);
}

void wrong_type(const std::string &message) {
    throw nb::type_error(message.c_str());
}

Operand tensor(nb::handle object, const char *name, int min_rank, bool written) {
    bool bfloat = false;
    nb::ndarray<nb::ro> array = import(object, name, written, &bfloat);
    const std::optional<Dtype> dtype = bfloat ? Dtype::bf16 : float_type(array.dtype());
    if (!dtype)
        wrong_type(std::string(name) + ".dtype is " + dtype_name(array.dtype()) +
                   ": expected float32, float16 or bfloat16");
    if (array.ndim() < std::size_t(min_rank) || array.ndim() > 4)
        wrong(std::string(name) + ".shape is " + text(array) + ": expected " + std::to_string(min_rank) +
              " to 4 dimensions");
    return operand(std::move(array), *dtype);
}

Operand scores_like(nb::handle object, const char *name, Dtype dtype, const std::array<std::int64_t, 4> &shape,
                    bool written) {
    nb::ndarray<nb::ro> array = import(object, name, written);
    const bool right = dtype == Dtype::u8
                           ? array.dtype() == nb::dtype<bool>() || array.dtype() == nb::dtype<std::uint8_t>()
                           : array.dtype() == nb::dtype<float>();
    if (!right)
        wrong_type(std::string(name) + ".dtype is " + dtype_name(array.dtype()) + ": expected " +
                   (dtype == Dtype::u8 ? "bool or uint8" : "float32"));
    bool fits = array.ndim() <= 4;
    for (std::size_t i = 0; fits && i < array.ndim(); i++) {
        const std::int64_t wanted = shape[4 - array.ndim() + i], given = std::int64_t(array.shape(i));
        fits = given == wanted || (given == 1 && !written);
    }
    for (std::size_t i = array.ndim(); written && i < 4; i++) fits = fits && shape[3 - i] == 1;
    if (!fits)
        wrong(std::string(name) + ".shape is " + text(array) + ": expected " +
              (written ? "" : "a shape that broadcasts to ") + "(B, Hq, N, M) = " + detail::text(shape));
    Operand o = operand(std::move(array), dtype);
    for (std::size_t i = 0; i < 4; i++)
        if (o.view.shape[i] != shape[i]) o.view.stride[i] = 0;
    o.view.shape = shape;
    return o;
}

Operand dense_f32(nb::handle object, const char *name, int rank) {
    nb::ndarray<nb::ro> array = import(object, name, false);
    if (array.dtype() != nb::dtype<float>())
        wrong_type(std::string(name) + ".dtype is " + dtype_name(array.dtype()) + ": expected float32");
    if (array.ndim() != std::size_t(rank))
        wrong(std::string(name) + ".shape is " + text(array) + ": expected " + std::to_string(rank) + " dimensions");
    std::int64_t dense = 1;
    for (std::size_t i = array.ndim(); i-- > 0;) {
        if (array.shape(i) > 1 && array.stride(i) != dense)
            wrong(std::string(name) + " is not contiguous: expected rows that follow one another");
        dense *= std::int64_t(array.shape(i));
    }
    return operand(std::move(array), Dtype::f32);
}

Vector<std::int64_t> int64_vector(nb::handle object, const char *name) {
    return vector<std::int64_t>(object, name, "int64");
}

Vector<float> f32_vector(nb::handle object, const char *name) {
    return vector<float>(object, name, "float32");
}

} // namespace attune::python
