// Arguments of a generated function, for its entry that takes an array of pointers: buffers, and addresses of scalars.
#pragma once

#include "attune/attune.h"

#include "HalideRuntime.h"

#include <array>
#include <cstddef>
#include <type_traits>

namespace attune::rt::halide {

class Arguments {
  public:
    template <typename T> void add(T &argument) {
        if constexpr (std::is_convertible_v<T, halide_buffer_t *>)
            values_[count_++] = static_cast<halide_buffer_t *>(argument);
        else if constexpr (std::is_base_of_v<halide_buffer_t, T>)
            values_[count_++] = static_cast<halide_buffer_t *>(&argument);
        else
            values_[count_++] = const_cast<std::remove_const_t<T> *>(&argument);
    }
    void **data() { return values_.data(); }

  private:
    std::array<void *, 48 + ATTUNE_MAX_PARAMS> values_;
    size_t count_ = 0;
};

// Calls fn with `all`; add_user(arguments) adds its own ahead of the last `outputs` of them.
template <size_t outputs, typename Fn, typename AddUser, typename... All>
int call_with_user(Fn fn, AddUser add_user, All... all) {
    Arguments arguments;
    size_t n = 0;
    const auto add = [&](auto &x) {
        if (n++ == sizeof...(All) - outputs) add_user(arguments);
        arguments.add(x);
    };
    (add(all), ...);
    return fn(arguments.data());
}

} // namespace attune::rt::halide
