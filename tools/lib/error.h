// The one exception of the tools: a message for the person at the terminal. It names the argument, its value and what
// was expected; attune_main.cpp prints it and exits with status 2.
#pragma once

#include <fmt/format.h>
#include <stdexcept>
#include <string>

namespace attune::tools {

class Error : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

template <typename... Args> [[noreturn]] void fail(fmt::format_string<Args...> format, Args &&...args) {
    throw Error(fmt::format(format, std::forward<Args>(args)...));
}

} // namespace attune::tools
