// What LLVM's ThreadSanitizer, and so the code that Halide instruments, calls for blocks of memory. GCC's runtime lacks
// these names (weak: Clang's has them); what it does know is the functions by their usual ones.
#include <cstddef>
#include <cstring>

extern "C" __attribute__((weak)) void *__tsan_memset(void *to, int byte, std::size_t n) {
    return std::memset(to, byte, n);
}
extern "C" __attribute__((weak)) void *__tsan_memcpy(void *to, const void *from, std::size_t n) {
    return std::memcpy(to, from, n);
}
extern "C" __attribute__((weak)) void *__tsan_memmove(void *to, const void *from, std::size_t n) {
    return std::memmove(to, from, n);
}
