// The CUDA driver, loaded at run time: what attune calls of it, for adapters that launch their own modules.
#pragma once

#include "device.h"

namespace attune::rt::device::cuda {

using Result = int;                 // CUresult
using Pointer = unsigned long long; // CUdeviceptr

// The driver's functions, by their present names (…_v2).
struct Driver {
    Result (*init)(unsigned);
    Result (*driver_get_version)(int *);
    Result (*device_get_count)(int *);
    Result (*device_get)(int *, int);
    Result (*device_get_name)(char *, int, int);
    Result (*device_total_mem)(size_t *, int);
    Result (*device_get_attribute)(int *, int, int);
    Result (*primary_ctx_retain)(void **, int);
    Result (*ctx_push)(void *);
    Result (*ctx_pop)(void **);
    Result (*mem_alloc)(Pointer *, size_t);
    Result (*mem_free)(Pointer);
    Result (*copy_in)(Pointer, const void *, size_t, void *);
    Result (*copy_out)(void *, Pointer, size_t, void *);
    Result (*set_bytes)(Pointer, unsigned char, size_t, void *);
    Result (*stream_synchronize)(void *);
    Result (*module_load)(void **, const void *, unsigned, int *, void **);
    Result (*module_unload)(void *);
    Result (*module_get_function)(void **, void *, const char *);
    Result (*function_set_attribute)(void *, int, int);
    Result (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                     unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **params,
                     void **extra);
    Result (*error_name)(Result, const char **);
};

// Valid where cuda_backend().why_not is empty.
const Driver &driver();

// The calling thread's context and stream.
struct Queue {
    void *context, *stream;
};
Queue current();

// Makes the calling thread's context current while it lives. `error` is the driver's answer.
class Current {
  public:
    Current();
    ~Current();
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;
    Result error;
};

// Adapters that load modules of their own name a function here that unloads those of a context.
void when_forgotten(void (*unload)(void *context));

// A status with the driver's name of the error and what was tried.
attune_status failed(Result result, const char *what);

} // namespace attune::rt::device::cuda
