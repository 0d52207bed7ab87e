// A CUDA driver without a GPU, for tests: the driver API's functions, whose launches run on the PTX interpreter
// (interpreter.py, a child process). Named libcuda.so.1, so that LD_LIBRARY_PATH or ATTUNE_CUDA_LIBRARY puts it in
// place of the real one.
//
// Device memory is one file that both processes map; device addresses lie where no host memory is, so that a host
// access through one is a fault. Memory is NaN until written, allocations have gaps between them, and everything is
// synchronous. What a kernel did wrong is printed, and becomes CUDA_ERROR_ILLEGAL_ADDRESS for this and all later calls.
//
// Failures on purpose, by environment variables: ATTUNE_PTX_NO_DEVICE=1, ATTUNE_PTX_MEMORY=bytes (device memory,
// default 1 GiB), ATTUNE_PTX_FAIL_LAUNCH=k (the k-th launch fails). ATTUNE_PTX_CAPABILITY=80 is the compute capability.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace attune::ptx {

using nlohmann::json;

enum Result { // CUresult
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNotInitialized = 3,
    kNoDevice = 100,
    kInvalidImage = 200,
    kInvalidHandle = 400,
    kNotFound = 500,
    kIllegalAddress = 700,
    kLaunchFailed = 719,
};

constexpr uint64_t kBase = uint64_t(1) << 33, kAlign = 512; // addresses as CUDA's: 512-byte aligned

struct Function {
    int id = 0;
    std::vector<size_t> parameters;
    int shared = 0, threads = 0, allowed = 48 << 10;
};

struct Module {
    int id;
};

int64_t environment(const char *name, int64_t missing);

// Device memory, and the interpreter.
class Driver {
  public:
    static Driver &get();
    std::recursive_mutex mutex;
    bool ready = false;
    Result sticky = kSuccess; // a kernel that failed leaves the context unusable
    int launches = 0, modules = 0;

    size_t memory_bytes() const { return size_; }
    size_t free_bytes() const;
    Result allocate(uint64_t *address, size_t bytes);
    Result release(uint64_t address);
    bool inside(uint64_t address, size_t bytes) const;
    // The allocation that an address lies in.
    bool find(uint64_t address, uint64_t *begin, size_t *bytes) const;
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
    std::map<uint64_t, size_t> allocations_;
    std::vector<std::pair<uint64_t, size_t>> written_;
};

using Lock = std::lock_guard<std::recursive_mutex>;
extern int a_context; // a handle: only its address counts

} // namespace attune::ptx

#define DRIVER_API extern "C" __attribute__((visibility("default"))) int
#define ENTER                                                                                                          \
    Driver &driver = Driver::get();                                                                                    \
    Lock lock(driver.mutex);                                                                                           \
    if (!driver.ready) return kNotInitialized;                                                                         \
    if (driver.sticky) return driver.sticky
