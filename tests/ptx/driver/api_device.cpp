// The driver's functions for devices, contexts, streams, events and errors.
#include "state.h"

using namespace attune::ptx;

DRIVER_API cuInit(unsigned) {
    if (environment("ATTUNE_PTX_NO_DEVICE", 0)) return kNoDevice;
    Driver::get().ready = true;
    return kSuccess;
}
DRIVER_API cuDriverGetVersion(int *version) {
    *version = 12080;
    return kSuccess;
}
DRIVER_API cuDeviceGetCount(int *count) {
    *count = 1;
    return kSuccess;
}
DRIVER_API cuDeviceGet(int *device, int index) {
    *device = index;
    return index == 0 ? kSuccess : kInvalidValue;
}
DRIVER_API cuDeviceGetName(char *name, int length, int) {
    std::snprintf(name, size_t(length), "PTX interpreter");
    return kSuccess;
}
DRIVER_API cuDeviceTotalMem_v2(size_t *bytes, int) {
    *bytes = Driver::get().memory_bytes();
    return kSuccess;
}
DRIVER_API cuDeviceGetAttribute(int *value, int attribute, int) {
    const int capability = int(environment("ATTUNE_PTX_CAPABILITY", 80));
    static const std::map<int, int> values = {{kMaxThreadsPerBlock, 1024},
                                              {kMaxBlockX, 1024},
                                              {kMaxBlockY, 1024},
                                              {kMaxBlockZ, 64},
                                              {kMaxGridX, 2147483647},
                                              {kMaxGridY, 65535},
                                              {kMaxGridZ, 65535},
                                              {kMaxSharedPerBlock, 48 << 10},
                                              {kWarpSize, 32},
                                              {kMaxRegistersPerBlock, 65536},
                                              {kClockKhz, 1410000},
                                              {kMultiprocessors, 108},
                                              {kConcurrentKernels, 0},
                                              {kMemoryClockKhz, 1215000},
                                              {kMemoryBusBits, 5120},
                                              {kL2Bytes, 40 << 20},
                                              {kMaxThreadsPerMultiprocessor, 2048},
                                              {kUnifiedAddressing, 1},
                                              {kMaxSharedPerMultiprocessor, 164 << 10},
                                              {kMaxRegistersPerMultiprocessor, 65536},
                                              {kMaxSharedPerBlockOptin, 163 << 10},
                                              {kMaxBlocksPerMultiprocessor, 32}};
    if (attribute == kMajor || attribute == kMinor) {
        *value = attribute == kMajor ? capability / 10 : capability % 10;
        return kSuccess;
    }
    const auto found = values.find(attribute);
    *value = found == values.end() ? 0 : found->second;
    return kSuccess;
}

namespace {
int an_event; // a handle: only its address counts
} // namespace

DRIVER_API attune_ptx_work(void *context, void *stream) {
    Driver &driver = Driver::get();
    Lock lock(driver.mutex);
    return driver.work(context, stream);
}

DRIVER_API cuDevicePrimaryCtxRetain(void **context, int) {
    *context = Driver::get().primary();
    return kSuccess;
}
DRIVER_API cuDevicePrimaryCtxRelease_v2(int) {
    return kSuccess;
}
DRIVER_API cuCtxCreate_v2(void **context, unsigned, int) {
    ENTER;
    *context = driver.create_context();
    return Contexts::current().push(*context);
}
DRIVER_API cuCtxDestroy_v2(void *context) {
    ENTER;
    return driver.destroy_context(context);
}
DRIVER_API cuCtxPushCurrent_v2(void *context) {
    Driver &driver = Driver::get();
    Lock lock(driver.mutex);
    if (!driver.is_context(context)) return kInvalidContext;
    return Contexts::current().push(context);
}
DRIVER_API cuCtxPopCurrent_v2(void **context) {
    auto &stack = Contexts::current();
    if (stack.empty()) return kInvalidContext;
    if (context) *context = stack.back();
    stack.pop();
    return kSuccess;
}
DRIVER_API cuCtxSetCurrent(void *context) {
    ENTER;
    if (context && !driver.is_context(context)) return kInvalidContext;
    auto &stack = Contexts::current();
    if (!stack.empty()) stack.pop();
    return context ? stack.push(context) : kSuccess;
}
DRIVER_API cuCtxGetCurrent(void **context) {
    *context = Contexts::current().empty() ? nullptr : Contexts::current().back();
    return kSuccess;
}
DRIVER_API cuCtxGetDevice(int *device) {
    *device = 0;
    return kSuccess;
}
DRIVER_API cuCtxGetApiVersion(void *, unsigned *version) {
    *version = 3020;
    return kSuccess;
}
DRIVER_API cuCtxSynchronize() {
    ENTER;
    return kSuccess;
}
DRIVER_API cuProfilerStop() {
    return kSuccess;
}

// --- streams, events, errors

DRIVER_API cuStreamCreate(void **stream, unsigned) {
    ENTER;
    if (Contexts::current().empty()) return kInvalidContext;
    *stream = driver.create_stream();
    return kSuccess;
}
DRIVER_API cuStreamDestroy_v2(void *stream) {
    ENTER;
    return driver.destroy_stream(stream);
}
DRIVER_API cuStreamSynchronize(void *stream) {
    ENTER;
    return driver.check_stream(stream);
}
DRIVER_API cuStreamQuery(void *stream) {
    ENTER;
    return driver.check_stream(stream);
}
DRIVER_API cuStreamGetCtx(void *stream, void **context) {
    ENTER;
    *context = stream || Contexts::current().empty() ? driver.context_of(stream) : Contexts::current().back();
    return *context ? kSuccess : kInvalidHandle;
}
DRIVER_API cuEventCreate(void **event, unsigned) {
    *event = &an_event;
    return kSuccess;
}
DRIVER_API cuEventDestroy_v2(void *) {
    return kSuccess;
}
DRIVER_API cuEventRecord(void *, void *) {
    return kSuccess;
}
DRIVER_API cuEventSynchronize(void *) {
    ENTER;
    return kSuccess;
}
DRIVER_API cuEventElapsedTime(float *milliseconds, void *, void *) {
    *milliseconds = 1;
    return kSuccess;
}
DRIVER_API cuGetErrorName(int error, const char **name) {
    static const std::map<int, const char *> names = {
        {kSuccess, "CUDA_SUCCESS"},
        {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
        {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
        {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
        {kNoDevice, "CUDA_ERROR_NO_DEVICE"},
        {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
        {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
        {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
        {kNotFound, "CUDA_ERROR_NOT_FOUND"},
        {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"},
    };
    const auto found = names.find(error);
    *name = found == names.end() ? "CUDA_ERROR_UNKNOWN" : found->second;
    return kSuccess;
}
DRIVER_API cuGetErrorString(int error, const char **text) {
    return cuGetErrorName(error, text);
}
