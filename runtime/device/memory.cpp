// Device addresses and the public functions of attune/device.h.
#include "device.h"

#include "arena.h"
#include "status.h"

#include <algorithm>
#include <cstring>
#include <dlfcn.h>
#include <iterator>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <sys/mman.h>

namespace attune::rt::device {

namespace {

// Buffers of the backends that have handles in place of addresses, by the first address of the range reserved for each.
struct Buffer {
    Handle handle;
    size_t bytes, reserved;
    bool imported;
};
struct Addresses {
    std::shared_mutex mutex;
    std::map<uintptr_t, Buffer> buffers;
};

Addresses &addresses(attune_device device) {
    static Addresses all[4];
    return all[device];
}

attune_status reserve(attune_device device, const Buffer &buffer, void **address) {
    constexpr size_t kPage = 4096;
    Buffer b = buffer;
    b.reserved = (std::max<size_t>(b.bytes, 1) + 2 * kPage - 1) / kPage * kPage; // a page behind it: no two touch
    void *range = mmap(nullptr, b.reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED)
        return fail(ATTUNE_OUT_OF_MEMORY, "no address range of {} bytes could be reserved for a device buffer",
                    b.reserved);
    Addresses &a = addresses(device);
    std::unique_lock lock(a.mutex);
    a.buffers[reinterpret_cast<uintptr_t>(range)] = b;
    *address = range;
    return ATTUNE_OK;
}

} // namespace

const char *title(attune_device device) {
    constexpr const char *kTitles[] = {"the CPU", "OpenCL", "Vulkan", "CUDA"};
    return kTitles[device];
}

Backend &backend(attune_device device) {
    install_halide_hooks(); // Halide's own handler of errors ends the program
    return device == ATTUNE_OPENCL ? opencl_backend() : device == ATTUNE_VULKAN ? vulkan_backend() : cuda_backend();
}

bool locate(attune_device device, const void *address, Place &place) {
    if (backend(device).has_pointers()) {
        place = {reinterpret_cast<Handle>(address), 0, INT64_MAX};
        return address != nullptr;
    }
    Addresses &a = addresses(device);
    std::shared_lock lock(a.mutex);
    const auto at = reinterpret_cast<uintptr_t>(address);
    auto found = a.buffers.upper_bound(at);
    if (found == a.buffers.begin()) return false;
    const auto &[base, buffer] = *std::prev(found);
    if (at - base >= std::max<size_t>(buffer.bytes, 1)) return false;
    place = {buffer.handle, int64_t(at - base), int64_t(buffer.bytes - (at - base))};
    return true;
}

attune_status allocate(attune_device device, size_t bytes, void **address) {
    Backend &b = backend(device);
    // Room behind the end: Halide 21's Vulkan runtime wants whole multiples of 64 bytes, and copies use them.
    const size_t padded = (bytes + 2 * size_t(kAlign) - 1) / size_t(kAlign) * size_t(kAlign);
    if (padded < bytes || padded > size_t(b.chosen->max_buffer_bytes))
        return fail(ATTUNE_OUT_OF_MEMORY, "bytes is {}: expected at most {}, the largest buffer that {} has", bytes,
                    b.chosen->max_buffer_bytes, b.chosen->name);
    Handle handle = 0;
    if (attune_status s = b.allocate(padded, handle)) return s;
    if (b.has_pointers()) {
        *address = reinterpret_cast<void *>(handle);
        return ATTUNE_OK;
    }
    const attune_status s = reserve(device, {handle, padded, 0, false}, address);
    if (s) b.release(handle, false);
    return s;
}

attune_status release(attune_device device, void *address) {
    if (!address) return ATTUNE_OK;
    Backend &b = backend(device);
    if (b.has_pointers()) {
        b.release(reinterpret_cast<Handle>(address), false);
        return ATTUNE_OK;
    }
    Addresses &a = addresses(device);
    Buffer buffer;
    {
        std::unique_lock lock(a.mutex);
        const auto found = a.buffers.find(reinterpret_cast<uintptr_t>(address));
        if (found == a.buffers.end())
            return fail(ATTUNE_INVALID_ARGUMENT, "address is {}: expected one that attune_device_malloc gave for {}",
                        address, title(device));
        buffer = found->second;
        a.buffers.erase(found);
    }
    b.release(buffer.handle, buffer.imported);
    munmap(address, buffer.reserved);
    return ATTUNE_OK;
}

bool Library::open(const std::vector<std::string> &names, std::string &why) {
    for (const std::string &name : names) {
        handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL);
        name_ = name;
        if (handle_) return true;
        if (why.empty()) {
            const char *text = dlerror();
            why = formatted("{} cannot be loaded ({})", name, text ? text : "no reason given");
        }
    }
    return false;
}

bool Library::find(void *&function, const char *name, std::string &why) {
    function = dlsym(handle_, name);
    if (!function && why.empty()) why = formatted("{} has no {}", name_, name);
    return function != nullptr;
}

} // namespace attune::rt::device

using namespace attune::rt;
using namespace attune::rt::device;

namespace {

attune_status check_device(attune_device device) {
    if (device < ATTUNE_OPENCL || device > ATTUNE_CUDA)
        return fail(ATTUNE_INVALID_ARGUMENT, "device is {}: expected ATTUNE_OPENCL, ATTUNE_VULKAN or ATTUNE_CUDA",
                    int(device));
    const Backend &b = backend(device);
    return b.why_not.empty() ? ATTUNE_OK : fail(ATTUNE_DEVICE_ERROR, "{}", b.why_not);
}

// The place of an argument that holds at least `bytes`.
attune_status check_place(attune_device device, const char *name, const void *address, size_t bytes, Place &place) {
    if (!locate(device, address, place))
        return fail(ATTUNE_INVALID_ARGUMENT, "{} is {}: expected an address of attune_device_malloc for {}", name,
                    address, title(device));
    if (place.bytes < 0 || size_t(place.bytes) < bytes)
        return fail(ATTUNE_INVALID_ARGUMENT, "bytes is {}: expected at most {}, what is left of the buffer behind {}",
                    bytes, place.bytes, name);
    return ATTUNE_OK;
}

struct Argument {
    const char *name;
    const void *address;
};

// A copy between the host and a device, once its arguments are checked.
template <typename F>
attune_status copy(attune_device device, const Argument &host, const Argument &there, size_t bytes, F run) {
    if (attune_status s = check_device(device)) return s;
    if (!bytes) return ATTUNE_OK;
    if (!host.address) return fail(ATTUNE_INVALID_ARGUMENT, "{} is null: expected {} bytes", host.name, bytes);
    Place place;
    if (attune_status s = check_place(device, there.name, there.address, bytes, place)) return s;
    return run(backend(device), place);
}

} // namespace

extern "C" void attune_device_info_init(attune_device_info *info) {
    if (!info) return;
    *info = attune_device_info{};
    info->struct_size = sizeof(attune_device_info);
}

extern "C" attune_status attune_device_count(attune_device device, int64_t *count) {
    if (!count) return fail(ATTUNE_INVALID_ARGUMENT, "count is null: expected the address of an int64_t");
    *count = 0;
    if (attune_status s = check_device(device)) return s;
    *count = int64_t(backend(device).devices.size());
    return ATTUNE_OK;
}

extern "C" attune_status attune_device_describe(attune_device device, int64_t index, attune_device_info *info) {
    if (!info || info->struct_size != sizeof(attune_device_info))
        return fail(ATTUNE_INVALID_ARGUMENT,
                    "info is {}: expected an attune_device_info; call attune_device_info_init first",
                    info ? "of another size" : "null");
    if (attune_status s = check_device(device)) return s;
    const auto &devices = backend(device).devices;
    if (index < 0 || index >= int64_t(devices.size()))
        return fail(ATTUNE_INVALID_ARGUMENT, "index is {}: expected 0 to {}", index, int64_t(devices.size()) - 1);
    *info = devices[size_t(index)];
    return ATTUNE_OK;
}

extern "C" attune_status attune_device_malloc(attune_device device, size_t bytes, void **address) {
    if (!address) return fail(ATTUNE_INVALID_ARGUMENT, "address is null: expected the address of a pointer");
    *address = nullptr;
    if (attune_status s = check_device(device)) return s;
    return allocate(device, bytes, address);
}

extern "C" attune_status attune_device_free(attune_device device, void *address) {
    if (attune_status s = check_device(device)) return s;
    return release(device, address);
}

extern "C" attune_status attune_device_import(attune_device device, void *handle, size_t bytes, void **address) {
    if (!address) return fail(ATTUNE_INVALID_ARGUMENT, "address is null: expected the address of a pointer");
    *address = nullptr;
    if (attune_status s = check_device(device)) return s;
    if (!handle) return fail(ATTUNE_INVALID_ARGUMENT, "handle is null: expected a buffer of {}", title(device));
    Backend &b = backend(device);
    if (b.has_pointers()) {
        *address = handle;
        return ATTUNE_OK;
    }
    Handle ours = 0;
    if (attune_status s = b.import(handle, ours)) return s;
    const attune_status s = reserve(device, {ours, bytes, 0, true}, address);
    if (s) b.release(ours, true);
    return s;
}

extern "C" attune_status attune_device_copy_in(attune_device device, void *to, const void *from_host, size_t bytes) {
    return copy(device, {"from_host", from_host}, {"to", to}, bytes, [&](Backend &b, const Place &place) {
        return b.copy_in(place.handle, place.offset, from_host, bytes);
    });
}

extern "C" attune_status attune_device_copy_out(attune_device device, void *to_host, const void *from, size_t bytes) {
    return copy(device, {"to_host", to_host}, {"from", from}, bytes,
                [&](Backend &b, const Place &place) { return b.copy_out(to_host, place.handle, place.offset, bytes); });
}

extern "C" attune_status attune_device_synchronize(attune_device device) {
    if (attune_status s = check_device(device)) return s;
    return backend(device).synchronize();
}

extern "C" attune_status attune_device_use_queue(const attune_device_queue *queue) {
    if (!queue) return fail(ATTUNE_INVALID_ARGUMENT, "queue is null: expected an attune_device_queue");
    if (queue->struct_size != sizeof(attune_device_queue))
        return fail(ATTUNE_INVALID_ARGUMENT, "queue.struct_size is {}: expected {}", queue->struct_size,
                    sizeof(attune_device_queue));
    if (attune_status s = check_device(queue->device)) return s;
    if (!queue->context) return fail(ATTUNE_INVALID_ARGUMENT, "queue.context is null: expected a context");
    return backend(queue->device).use(queue->context, queue->queue);
}

extern "C" attune_status attune_device_use_default(attune_device device) {
    if (attune_status s = check_device(device)) return s;
    return backend(device).use(nullptr, nullptr);
}
