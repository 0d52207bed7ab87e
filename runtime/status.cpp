#include "status.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace attune::rt {

namespace {
// A buffer and no string: messages are wanted where memory has run out, and even a string's destructor at a thread's
// end takes memory to register. The longest message is the list of reasons why no kernel can do a problem.
thread_local char last_error[16384];
thread_local unsigned count = 0;
} // namespace

void set_last_error(std::string_view message) noexcept {
    const size_t n = std::min(message.size(), sizeof last_error - 1);
    std::memmove(last_error, message.data(), n); // it may be (a part of) the last one
    last_error[n] = '\0';
    count++;
}

unsigned error_count() {
    return count;
}

void TaskError::note(int code, const char *where, unsigned before) {
    int none = 0;
    if (!code_.compare_exchange_strong(none, code)) return;
    where_ = where;
    try {
        message_ = count != before ? last_error : "(no message)";
    } catch (const std::bad_alloc &) { // the code will have to do
    }
}

} // namespace attune::rt

extern "C" const char *attune_last_error(void) {
    return attune::rt::last_error;
}

extern "C" const char *attune_status_string(attune_status status) {
    switch (status) {
    case ATTUNE_OK:
        return "ok";
    case ATTUNE_INVALID_ARGUMENT:
        return "invalid argument";
    case ATTUNE_UNSUPPORTED:
        return "unsupported";
    case ATTUNE_OUT_OF_MEMORY:
        return "out of memory";
    case ATTUNE_KERNEL_FAILED:
        return "kernel failed";
    case ATTUNE_IO_ERROR:
        return "input/output error";
    case ATTUNE_DEVICE_ERROR:
        return "device error";
    }
    return "unknown status";
}

extern "C" const char *attune_dtype_string(attune_dtype dtype) {
    switch (dtype) {
    case ATTUNE_F32:
        return "f32";
    case ATTUNE_BF16:
        return "bf16";
    case ATTUNE_F16:
        return "f16";
    case ATTUNE_U8:
        return "u8";
    case ATTUNE_I64:
        return "i64";
    case ATTUNE_I32:
        return "i32";
    }
    return "unknown";
}

extern "C" const char *attune_version(void) {
    return ATTUNE_VERSION;
}
