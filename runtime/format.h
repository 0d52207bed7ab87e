// Text for messages, by {fmt}. What formats is compiled once, in format.cpp: {fmt}'s own library would be a dependency
// of whoever links the archive, and its header-only form costs 0.2 MB in each object that formats something.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace attune::rt {

std::string vformatted(fmt::string_view text, fmt::format_args args);

template <typename... Args> std::string formatted(fmt::format_string<Args...> text, Args &&...args) {
    return vformatted(text, fmt::make_format_args(args...));
}

// "a, b, c"
std::string joined(std::span<const std::string_view> words);
std::string joined(std::span<const int64_t> numbers);

// "[a, b, c, d]"
std::string list(std::span<const int64_t> numbers);

} // namespace attune::rt
