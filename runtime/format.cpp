#include "format.h"

#include <fmt/format.h>

namespace attune::rt {

namespace {
template <typename T> std::string join(std::span<const T> items) {
    std::string text;
    for (const T &item : items) {
        if (!text.empty()) text += ", ";
        text += formatted("{}", item);
    }
    return text;
}
} // namespace

std::string vformatted(fmt::string_view text, fmt::format_args args) {
    return fmt::vformat(text, args);
}

std::string joined(std::span<const std::string_view> words) {
    return join(words);
}

std::string joined(std::span<const int64_t> numbers) {
    return join(numbers);
}

std::string list(std::span<const int64_t> numbers) {
    return formatted("[{}]", join(numbers));
}

} // namespace attune::rt
