// glibc lets a program define malloc; what glibc itself would have done stays available under the __libc names.
#include "count_allocations.h"

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <malloc.h>

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define ATTUNE_COUNTS 1
#endif

namespace attune::contract {

namespace {
std::atomic<int64_t> count{0};
thread_local int64_t left = -1; // before allocations fail
} // namespace

void fail_allocations(int64_t after) {
    left = after;
}

int64_t allocations() {
    return count.load();
}

#ifdef ATTUNE_COUNTS
bool can_count_allocations() {
    return true;
}
// False if the allocation has to fail.
bool count_one() {
    count.fetch_add(1, std::memory_order_relaxed);
    if (left < 0) return true;
    if (left > 0) return --left, true;
    errno = ENOMEM;
    return false;
}
#else
bool can_count_allocations() {
    return false;
}
#endif

} // namespace attune::contract

#ifdef ATTUNE_COUNTS
extern "C" {
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

void *malloc(size_t n) {
    return attune::contract::count_one() ? __libc_malloc(n) : nullptr;
}
void *calloc(size_t n, size_t size) {
    return attune::contract::count_one() ? __libc_calloc(n, size) : nullptr;
}
void *realloc(void *p, size_t n) {
    return attune::contract::count_one() ? __libc_realloc(p, n) : nullptr;
}
void *memalign(size_t alignment, size_t n) {
    return attune::contract::count_one() ? __libc_memalign(alignment, n) : nullptr;
}
void *aligned_alloc(size_t alignment, size_t n) {
    return attune::contract::count_one() ? __libc_memalign(alignment, n) : nullptr;
}
int posix_memalign(void **p, size_t alignment, size_t n) {
    void *made = attune::contract::count_one() ? __libc_memalign(alignment, n) : nullptr;
    if (made) *p = made;
    return made ? 0 : ENOMEM;
}
}
#endif
