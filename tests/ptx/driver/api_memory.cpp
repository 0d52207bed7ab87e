// The driver's functions for memory.
#include "state.h"

#include <cstring>

using namespace attune::ptx;

DRIVER_API cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER;
    *free_bytes = driver.free_bytes(), *total = driver.memory_bytes();
    return kSuccess;
}
DRIVER_API cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    ENTER;
    return driver.allocate(address, bytes);
}
DRIVER_API cuMemFree_v2(uint64_t address) {
    ENTER;
    return driver.release(address);
}
DRIVER_API cuMemAllocAsync(uint64_t *address, size_t bytes, void *) {
    ENTER;
    return driver.allocate(address, bytes);
}
DRIVER_API cuMemFreeAsync(uint64_t address, void *) {
    ENTER;
    return driver.release(address);
}
DRIVER_API cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t address) {
    ENTER;
    uint64_t begin = 0;
    size_t length = 0;
    if (!driver.find(address, &begin, &length)) return kNotFound;
    if (base) *base = begin;
    if (bytes) *bytes = length;
    return kSuccess;
}
DRIVER_API cuPointerGetAttribute(void *data, int attribute, uint64_t address) {
    ENTER;
    if (!driver.inside(address, 1)) return kInvalidValue;
    if (attribute == 1) *static_cast<void **>(data) = driver.owner(address); // CU_POINTER_ATTRIBUTE_CONTEXT
    if (attribute == 2) *static_cast<int *>(data) = 2;                       // …_MEMORY_TYPE: device
    return attribute == 1 || attribute == 2 ? kSuccess : kInvalidValue;
}
DRIVER_API cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    ENTER;
    if (const Result result = driver.work_on(stream)) return result;
    return driver.write(to, from, bytes);
}
DRIVER_API cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    ENTER;
    if (const Result result = driver.work_on(stream)) return result;
    return driver.read(to, from, bytes);
}
DRIVER_API cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    ENTER;
    if (const Result result = driver.work_on(stream)) return result;
    if (bytes && !driver.inside(from, bytes)) return driver.outside("read from", from, bytes);
    return driver.write(to, driver.host(from), bytes);
}
DRIVER_API cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
    return cuMemcpyHtoDAsync_v2(to, from, bytes, nullptr);
}
DRIVER_API cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
    return cuMemcpyDtoHAsync_v2(to, from, bytes, nullptr);
}
DRIVER_API cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t bytes) {
    return cuMemcpyDtoDAsync_v2(to, from, bytes, nullptr);
}
DRIVER_API cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void *stream) {
    ENTER;
    if (const Result result = driver.work_on(stream)) return result;
    return driver.write(to, std::vector<unsigned char>(bytes, value).data(), bytes);
}
DRIVER_API cuMemsetD8_v2(uint64_t to, unsigned char value, size_t bytes) {
    return cuMemsetD8Async(to, value, bytes, nullptr);
}
DRIVER_API cuMemsetD32Async(uint64_t to, unsigned value, size_t count, void *stream) {
    ENTER;
    if (const Result result = driver.work_on(stream)) return result;
    return driver.write(to, std::vector<unsigned>(count, value).data(), count * 4);
}
DRIVER_API cuMemsetD32_v2(uint64_t to, unsigned value, size_t count) {
    return cuMemsetD32Async(to, value, count, nullptr);
}

struct Copy3D { // CUDA_MEMCPY3D
    size_t from_x, from_y, from_z, from_lod;
    int from_kind;
    const void *from_host;
    uint64_t from_device;
    void *from_array, *reserved0;
    size_t from_pitch, from_height;
    size_t to_x, to_y, to_z, to_lod;
    int to_kind;
    void *to_host;
    uint64_t to_device;
    void *to_array, *reserved1;
    size_t to_pitch, to_height;
    size_t width, height, depth;
};
DRIVER_API cuMemcpy3D_v2(const Copy3D *c) {
    ENTER;
    if (const Result result = driver.work_on(nullptr)) return result;
    for (size_t z = 0; z < c->depth; z++)
        for (size_t y = 0; y < c->height; y++) {
            const size_t from =
                c->from_x + (c->from_y + y) * c->from_pitch + (c->from_z + z) * c->from_pitch * c->from_height;
            const size_t to = c->to_x + (c->to_y + y) * c->to_pitch + (c->to_z + z) * c->to_pitch * c->to_height;
            std::vector<char> row(c->width);
            int result = kSuccess;
            if (c->from_kind == 1)
                std::memcpy(row.data(), static_cast<const char *>(c->from_host) + from, c->width);
            else
                result = driver.read(row.data(), c->from_device + from, c->width);
            if (result) return result;
            if (c->to_kind == 1)
                std::memcpy(static_cast<char *>(c->to_host) + to, row.data(), c->width);
            else
                result = driver.write(c->to_device + to, row.data(), c->width);
            if (result) return result;
        }
    return kSuccess;
}
