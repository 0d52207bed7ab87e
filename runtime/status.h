// Errors: a status code to return and a message that the calling thread keeps. Nothing throws across the C interface.
#pragma once

#include "attune/attune.h"
#include "format.h"

#include <atomic>
#include <string>
#include <string_view>

namespace attune::rt {

void set_last_error(std::string_view message) noexcept;
// How many messages the calling thread has been given so far.
unsigned error_count();

// The first error of tasks that run in parallel, with its message, which the failing thread only has.
class TaskError {
  public:
    bool any() const { return code_.load(std::memory_order_relaxed); }
    // Of run(), which returns an error code, the first that is not 0. For the calling thread only, all tasks being
    // done:
    int code() const { return code_; }
    const char *where() const { return where_; }
    const std::string &message() const { return message_; }
    template <typename F> void watch(const char *where, F run) {
        const unsigned before = error_count();
        if (const int code = run()) note(code, where, before);
    }

  private:
    void note(int code, const char *where, unsigned before);

    std::atomic<int> code_{0};
    const char *where_ = "";
    std::string message_;
};

// Sets the calling thread's message and returns `status`. Where there is no memory for the message, a shorter one.
template <typename... Args>
attune_status fail(attune_status status, fmt::format_string<Args...> text, Args &&...args) noexcept {
    try {
        set_last_error(formatted(text, std::forward<Args>(args)...));
    } catch (const std::bad_alloc &) {
        set_last_error("out of memory, also for the message of this error");
    }
    return status;
}

} // namespace attune::rt
