// Errors: a status code to return and a message that the calling thread keeps. Nothing throws across the C interface.
#pragma once

#include "attune/attune.h"

#include <fmt/format.h>

#include <string>

namespace attune::rt {

void set_last_error(std::string message);

// Sets the calling thread's message and returns `status`.
template <typename... Args>
attune_status fail(attune_status status, fmt::format_string<Args...> format, Args &&...args) {
    set_last_error(fmt::format(format, std::forward<Args>(args)...));
    return status;
}

} // namespace attune::rt
