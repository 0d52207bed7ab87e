// A CUDA driver without a GPU, for tests: the driver API's functions, whose launches run on the PTX interpreter
// (interpreter.py, a child process). Named libcuda.so.1, so that LD_LIBRARY_PATH or ATTUNE_CUDA_LIBRARY puts it in
// place of the real one.
//
// Device memory is one file that both processes map; device addresses lie where no host memory is, so that a host
// access through one is a fault. Memory is NaN until written, allocations have gaps between them, and everything is
// synchronous. What a kernel did wrong is printed, and becomes CUDA_ERROR_ILLEGAL_ADDRESS for this and all later calls.
//
// int attune_ptx_work(context, stream) says how many copies, fills and launches a stream has had.
//
// Failures on purpose, by environment variables: ATTUNE_PTX_NO_DEVICE=1, ATTUNE_PTX_MEMORY=bytes (device memory,
// default 1 GiB), ATTUNE_PTX_FAIL_LAUNCH=k (the k-th launch fails). ATTUNE_PTX_CAPABILITY=80 is the compute capability.
#pragma once

#include "device/cuda_numbers.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace attune::ptx {

using nlohmann::json;

using namespace attune::cuda;

constexpr uint64_t kBase = uint64_t(1) << 33, kAlign = 512; // addresses as CUDA's: 512-byte aligned
constexpr size_t kFilled = size_t(64) << 20;                // of an allocation, with NaN

struct Function {
    int id = 0;
    std::vector<size_t> parameters;
    int shared = 0, threads = 0, allowed = 48 << 10;
};

struct Module {
    int id;
    void *context;
    std::vector<std::unique_ptr<Function>> functions;
};

// The contexts that a thread has made current, the last one on top. It has no destructor: Halide's runtime makes one
// current after the thread's other variables are gone.
class Contexts {
  public:
    static Contexts &current(); // the calling thread's
    bool empty() const { return count_ == 0; }
    void *back() const { return items_[count_ - 1]; }
    Result push(void *context) {
        if (count_ == kMost) return kInvalidValue;
        items_[count_++] = context;
        return kSuccess;
    }
    void pop() { count_--; }
    void remove(void *context) { count_ = int(std::remove(items_, items_ + count_, context) - items_); }

  private:
    static constexpr int kMost = 64;
    void *items_[kMost];
    int count_;
};

int64_t environment(const char *name, int64_t missing);

// Device memory, and the interpreter.
class Driver {
  public:
    static Driver &get();
    std::recursive_mutex mutex;
    bool ready = false;
    Result sticky = kSuccess; // a kernel that failed leaves the context unusable
    int launches = 0;

    // Contexts and their streams. Work goes to a stream of the current context (null: its default one); how much of it
    // went where is counted.
    void *primary() { return &primary_; }
    void *create_context();
    Result destroy_context(void *context); // with its memory, modules and streams
    bool is_context(void *context) const { return context == &primary_ || contexts_.count(context); }
    void *create_stream();
    Result destroy_stream(void *stream);
    void *context_of(void *stream) const; // null: there is no such stream
    Result check_stream(void *stream) const;
    Result work_on(void *stream);
    int work(void *context, void *stream) const;

    // Modules belong to a context, and their functions to them.
    json load(void **module, const char *text); // the interpreter's answer
    Result unload(void *module);
    Result function(void **function, void *module, const char *name);
    bool owns(void *function) const; // the current context's modules have it

    size_t memory_bytes() const { return size_; }
    size_t free_bytes() const;
    Result allocate(uint64_t *address, size_t bytes);
    Result release(uint64_t address);
    bool inside(uint64_t address, size_t bytes) const;
    // The allocation that an address lies in.
    bool find(uint64_t address, uint64_t *begin, size_t *bytes) const;
    void *owner(uint64_t address) const { return std::prev(allocations_.upper_bound(address))->second.context; }
    uint8_t *host(uint64_t address) { return memory_ + (address - kBase); }
    Result write(uint64_t to, const void *from, size_t bytes);
    Result read(void *to, uint64_t from, size_t bytes);
    Result outside(const char *what, uint64_t address, size_t bytes) const;

    // Sends a request (with raw bytes after it) and returns the answer.
    json ask(json request, const char *text = nullptr, size_t bytes = 0);

  private:
    Driver();
    void map_memory();
    void start();

    size_t size_ = 0;
    uint8_t *memory_ = nullptr;
    int file_ = -1;
    FILE *to_child_ = nullptr, *from_child_ = nullptr;
    struct Allocation {
        size_t bytes;
        void *context;
    };
    char primary_ = 0; // a handle: only its address counts
    std::set<void *> contexts_;
    std::map<void *, void *> streams_; // and their contexts
    std::map<std::pair<void *, void *>, int> work_;
    std::map<void *, std::unique_ptr<Module>> modules_;
    int next_module_ = 0;
    std::map<uint64_t, Allocation> allocations_;
    std::vector<std::pair<uint64_t, size_t>> written_;
};

using Lock = std::lock_guard<std::recursive_mutex>;

} // namespace attune::ptx

#define DRIVER_API extern "C" __attribute__((visibility("default"))) int
#define ENTER                                                                                                          \
    Driver &driver = Driver::get();                                                                                    \
    Lock lock(driver.mutex);                                                                                           \
    if (!driver.ready) return kNotInitialized;                                                                         \
    if (driver.sticky) return driver.sticky
