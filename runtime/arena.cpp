#include "arena.h"

#include "status.h"

#include "HalideRuntime.h"

#include <cstdlib>

namespace attune::rt {

void *Arena::allocate(size_t bytes) {
    const size_t aligned = (bytes + 63) & ~size_t(63);
    if (live_ == kMaxBlocks || aligned > size_ - used_) return nullptr;
    blocks_[live_++] = {used_, true};
    used_ += aligned;
    return base_ + blocks_[live_ - 1].offset;
}

// Halide frees a buffer after its last use, which need not be in the reverse order of allocation: memory comes back
// once everything above it is free as well.
void Arena::release(void *block) {
    const size_t offset = static_cast<char *>(block) - base_;
    for (int i = live_ - 1; i >= 0; i--)
        if (blocks_[i].offset == offset) blocks_[i].in_use = false;
    while (live_ > 0 && !blocks_[live_ - 1].in_use) used_ = blocks_[--live_].offset;
}

namespace {

// Without a context (auto_* kernels, which bring their own threads) memory comes from the heap.
void *allocate(void *user_context, size_t bytes) {
    if (user_context) return static_cast<Arena *>(user_context)->allocate(bytes);
    return std::aligned_alloc(128, (bytes + 255) / 128 * 128);
}

void release(void *user_context, void *block) {
    if (!block) return;
    if (user_context) return static_cast<Arena *>(user_context)->release(block);
    std::free(block);
}

void error(void *, const char *message) {
    set_last_error(message);
}

} // namespace

void install_halide_hooks() {
    static const bool once = [] {
        halide_set_custom_malloc(allocate);
        halide_set_custom_free(release);
        halide_set_error_handler(error);
        return true;
    }();
    (void)once;
}

} // namespace attune::rt
