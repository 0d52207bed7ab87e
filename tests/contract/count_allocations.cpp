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
}

int64_t allocations() {
    return count.load();
}

#ifdef ATTUNE_COUNTS
bool can_count_allocations() {
    return true;
}
void count_one() {
    count.fetch_add(1, std::memory_order_relaxed);
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
    attune::contract::count_one();
    return __libc_malloc(n);
}
void *calloc(size_t n, size_t size) {
    attune::contract::count_one();
    return __libc_calloc(n, size);
}
void *realloc(void *p, size_t n) {
    attune::contract::count_one();
    return __libc_realloc(p, n);
}
void *memalign(size_t alignment, size_t n) {
    attune::contract::count_one();
    return __libc_memalign(alignment, n);
}
void *aligned_alloc(size_t alignment, size_t n) {
    attune::contract::count_one();
    return __libc_memalign(alignment, n);
}
int posix_memalign(void **p, size_t alignment, size_t n) {
    attune::contract::count_one();
    *p = __libc_memalign(alignment, n);
    return *p ? 0 : ENOMEM;
}
}
#endif
