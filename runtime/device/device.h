// Devices behind one face: their drivers, found at run time, and their memory. What the public functions of
// attune/device.h, the planner and the adapters of device kernels use.
#pragma once

#include "attune/device.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct halide_device_interface_t;

namespace attune::rt::device {

// Kernels may rely on it for their workspace; every allocation starts at a multiple of it. No driver asks for more of a
// buffer's offset (Vulkan: 256 bytes at most; OpenCL: 128 to 256 in practice, checked where the device is opened).
constexpr int64_t kAlign = 256;

// Memory as a driver knows it: a CUdeviceptr, or a pointer to what Halide's runtime expects in halide_buffer_t::device.
using Handle = uint64_t;

// A kind of device. Each function that can fail returns a status and sets the thread's message.
class Backend {
  public:
    virtual ~Backend() = default;

    // Empty, or why there is no such device here. Settled once, when the backend is first asked for.
    std::string why_not;
    std::vector<attune_device_info> devices;
    const attune_device_info *chosen = nullptr; // where attune's own queue is

    virtual attune_status use(void *context, void *queue) = 0; // of the calling thread; nulls: attune's own
    virtual void *context() = 0;                               // of the calling thread: addresses belong to it
    virtual attune_status allocate(size_t bytes, Handle &handle) = 0;
    virtual attune_status import(void *theirs, Handle &handle) = 0;
    virtual void release(Handle handle, bool imported) = 0;
    virtual attune_status copy_in(Handle to, int64_t offset, const void *from, size_t bytes) = 0;
    virtual attune_status copy_out(void *to, Handle from, int64_t offset, size_t bytes) = 0;
    virtual attune_status synchronize() = 0;
    // Unloads the code of kernels from the calling thread's context, where that is a caller's.
    virtual void forget_code() {}
    virtual const halide_device_interface_t *interface() = 0;
    // A handle for memory from `offset` on, a multiple of kAlign unless has_pointers. Ended by end_crop.
    virtual attune_status crop(Handle handle, int64_t offset, Handle &cropped) = 0;
    virtual void end_crop(Handle cropped) = 0;
    virtual bool has_pointers() const { return false; } // handles are addresses: any offset can be added
};

// Never fails: a backend that has no device says why.
Backend &backend(attune_device device);
Backend &opencl_backend();
Backend &vulkan_backend();
Backend &cuda_backend();

// Where a device address leads.
struct Place {
    Handle handle = 0;
    int64_t offset = 0; // bytes from the start of the handle's memory
    int64_t bytes = 0;  // left behind it
};
bool locate(attune_device device, const void *address, Place &place);

// What attune_device_malloc and attune_device_free do.
attune_status allocate(attune_device device, size_t bytes, void **address);
attune_status release(attune_device device, void *address);

// "OpenCL", "Vulkan", "CUDA", "the CPU", for messages.
const char *title(attune_device device);

// A shared library, and functions out of it.
class Library {
  public:
    // Opens the first of `names` that there is, for all to see (Halide's runtime looks its functions up globally).
    // `why` gets the loader's message if none is.
    bool open(const std::vector<std::string> &names, std::string &why);
    // False, with `why`, if it lacks the function.
    template <typename F> bool get(F &function, const char *name, std::string &why) {
        return find(reinterpret_cast<void *&>(function), name, why);
    }

  private:
    bool find(void *&function, const char *name, std::string &why);
    void *handle_ = nullptr;
    std::string name_;
};

} // namespace attune::rt::device
