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
    static const std::map<int, int> values = {
        {1, 1024},       {2, 1024},     {3, 1024},       {4, 64},        {5, 2147483647}, {6, 65535},
        {7, 65535},      {8, 48 << 10}, {10, 32},        {12, 65536},    {13, 1410000},   {16, 108},
        {31, 0},         {36, 1215000}, {37, 5120},      {38, 40 << 20}, {39, 2048},      {41, 1},
        {81, 164 << 10}, {82, 65536},   {97, 163 << 10}, {106, 32}};
    if (attribute == 75 || attribute == 76) {
        *value = attribute == 75 ? capability / 10 : capability % 10;
        return kSuccess;
    }
    const auto found = values.find(attribute);
    *value = found == values.end() ? 0 : found->second;
    return kSuccess;
}

namespace {
int a_stream, an_event; // handles: only their addresses count
std::vector<void *> &contexts = *new std::vector<void *>;
} // namespace

DRIVER_API cuDevicePrimaryCtxRetain(void **context, int) {
    *context = &a_context;
    return kSuccess;
}
DRIVER_API cuDevicePrimaryCtxRelease_v2(int) {
    return kSuccess;
}
DRIVER_API cuCtxCreate_v2(void **context, unsigned, int) {
    *context = &a_context;
    contexts.push_back(*context);
    return kSuccess;
}
DRIVER_API cuCtxDestroy_v2(void *) {
    return kSuccess;
}
DRIVER_API cuCtxPushCurrent_v2(void *context) {
    if (!context) return kInvalidValue;
    contexts.push_back(context);
    return kSuccess;
}
DRIVER_API cuCtxPopCurrent_v2(void **context) {
    if (contexts.empty()) return kInvalidValue;
    if (context) *context = contexts.back();
    contexts.pop_back();
    return kSuccess;
}
DRIVER_API cuCtxSetCurrent(void *context) {
    contexts.assign(context ? 1 : 0, context);
    return kSuccess;
}
DRIVER_API cuCtxGetCurrent(void **context) {
    *context = contexts.empty() ? nullptr : contexts.back();
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
    *stream = &a_stream;
    return kSuccess;
}
DRIVER_API cuStreamDestroy_v2(void *) {
    return kSuccess;
}
DRIVER_API cuStreamSynchronize(void *) {
    ENTER;
    return kSuccess;
}
DRIVER_API cuStreamQuery(void *) {
    ENTER;
    return kSuccess;
}
DRIVER_API cuStreamGetCtx(void *, void **context) {
    *context = &a_context;
    return kSuccess;
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
