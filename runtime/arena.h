// Where the generated code's own allocations go: a bump allocator over the calling thread's part of the workspace. It
// is handed to a Halide function as its user_context.
#pragma once

#include <cstddef>
#include <cstdint>

namespace attune::rt {

class Arena {
  public:
    Arena(void *base, size_t size) : base_(static_cast<char *>(base)), size_(size) {}
    void *allocate(
        size_t bytes);         // 64-byte aligned; nullptr if the arena is full (a kernel bug: reported, never overrun)
    void release(void *block); // in any order
    void reset() { live_ = 0, used_ = 0; }

  private:
    static constexpr int kMaxBlocks = 64;
    struct Block {
        size_t offset;
        bool in_use;
    };
    char *base_;
    size_t size_, used_ = 0;
    int live_ = 0;
    Block blocks_[kMaxBlocks];
};

// Routes halide_malloc, halide_free and halide_error here. Called once, before the first kernel runs.
void install_halide_hooks();

} // namespace attune::rt
