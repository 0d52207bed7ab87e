// Counts calls of malloc and its relatives (operator new included) of the whole process, by defining malloc itself:
// glibc keeps its allocator under other names for exactly this use. free() stays glibc's, which takes any of these
// pointers. Linked into the tools, and built once more as a library that is preloaded into the peers' processes.
#include "malloc_counter.h"

#include <atomic>
#include <cerrno>
#include <cstddef>

// Sanitizers bring their own malloc.
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define ATTUNE_COUNT_ALLOCATIONS 1
#else
#define ATTUNE_COUNT_ALLOCATIONS 0
#endif

namespace {
std::atomic<bool> counting{false};
std::atomic<int64_t> allocations{0};
} // namespace

extern "C" {
void attune_count_begin(void) {
    allocations = 0;
    counting = true;
}
int64_t attune_count_now(void) {
    return allocations;
}
int64_t attune_count_end(void) {
    counting = false;
    return allocations;
}
int attune_count_available(void) {
    return ATTUNE_COUNT_ALLOCATIONS;
}

#if ATTUNE_COUNT_ALLOCATIONS
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming,readability-inconsistent-declaration-parameter-name)
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

static inline void count_one() {
    if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
}

// Visible, so that a preloaded library takes malloc's place.
#define ATTUNE_VISIBLE __attribute__((visibility("default")))
ATTUNE_VISIBLE void *malloc(size_t size) {
    count_one();
    return __libc_malloc(size);
}
ATTUNE_VISIBLE void *calloc(size_t count, size_t size) {
    count_one();
    return __libc_calloc(count, size);
}
ATTUNE_VISIBLE void *realloc(void *pointer, size_t size) {
    count_one();
    return __libc_realloc(pointer, size);
}
ATTUNE_VISIBLE void *memalign(size_t alignment, size_t size) {
    count_one();
    return __libc_memalign(alignment, size);
}
ATTUNE_VISIBLE void *aligned_alloc(size_t alignment, size_t size) {
    count_one();
    return __libc_memalign(alignment, size);
}
ATTUNE_VISIBLE int posix_memalign(void **result, size_t alignment, size_t size) {
    if (alignment % sizeof(void *) != 0 || (alignment & (alignment - 1)) != 0 || alignment == 0) return EINVAL;
    count_one();
    void *pointer = __libc_memalign(alignment, size);
    if (!pointer) return ENOMEM;
    *result = pointer;
    return 0;
}
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming,readability-inconsistent-declaration-parameter-name)
#endif
}
