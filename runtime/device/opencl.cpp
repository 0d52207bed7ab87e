// OpenCL, loaded at run time. A context and an in-order queue on the first GPU, else on the first device of any kind,
// unless a caller brings both. HL_OCL_PLATFORM_NAME and HL_OCL_DEVICE_TYPE (cpu, gpu, acc) narrow the choice, as in
// Halide's own runtime, whose context hooks are replaced here.
#include "device.h"

#include "status.h"

#include "HalideRuntimeOpenCL.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

namespace attune::rt::device {

namespace {

// The little of cl.h that is used here.
using Error = int32_t;
using Object = void *;
constexpr Error kSuccess = 0, kAllocationFailure = -4, kOutOfResources = -5, kOutOfHostMemory = -6,
                kInvalidBufferSize = -61;
constexpr uint64_t kReadWrite = 1, kAllTypes = 0xffffffff, kCpu = 2, kGpu = 4, kAccelerator = 8;
constexpr uint32_t kPlatformName = 0x0902;
enum Info : uint32_t {
    kType = 0x1000,
    kUnits = 0x1002,
    kMaxThreads = 0x1004,
    kClockMhz = 0x100c,
    kMaxAlloc = 0x1010,
    kBaseAlign = 0x1019, // in bits
    kMemory = 0x101f,
    kSharedBytes = 0x1023,
    kName = 0x102b,
    kDriverVersion = 0x102d,
    kVersion = 0x102f,
};

struct Functions {
    Error (*platforms)(uint32_t, Object *, uint32_t *);
    Error (*platform_info)(Object, uint32_t, size_t, void *, size_t *);
    Error (*devices)(Object, uint64_t, uint32_t, Object *, uint32_t *);
    Error (*device_info)(Object, uint32_t, size_t, void *, size_t *);
    Object (*create_context)(const intptr_t *, uint32_t, const Object *, void *, void *, Error *);
    Object (*create_queue)(Object, Object, uint64_t, Error *);
    Object (*create_buffer)(Object, uint64_t, size_t, void *, Error *);
    Error (*release_buffer)(Object);
    Error (*read)(Object, Object, uint32_t, size_t, size_t, void *, uint32_t, const void *, void *);
    Error (*write)(Object, Object, uint32_t, size_t, size_t, const void *, uint32_t, const void *, void *);
    Error (*finish)(Object);
} cl;

struct Queue {
    Object context, queue;
};
Queue own{nullptr, nullptr};
thread_local Queue theirs{nullptr, nullptr};

Queue current() {
    return theirs.context ? theirs : own;
}

// What Halide 21's runtime keeps in halide_buffer_t::device.
struct ClBuffer {
    uint64_t offset;
    Object memory;
};

ClBuffer *buffer_of(Handle handle) {
    return reinterpret_cast<ClBuffer *>(handle);
}

attune_status failed(Error error, const char *what) {
    const bool memory = error == kAllocationFailure || error == kOutOfResources || error == kOutOfHostMemory ||
                        error == kInvalidBufferSize;
    return fail(memory ? ATTUNE_OUT_OF_MEMORY : ATTUNE_DEVICE_ERROR, "OpenCL: {} failed: error {}{}", what, error,
                memory ? " (out of memory)" : "");
}

class OpenCL : public Backend {
  public:
    OpenCL() { open(); }
    // Halide's runtime cleans up when the process ends, after the drivers' own clean-up: it must find nothing to do.
    ~OpenCL() override { own = {nullptr, nullptr}; }

    attune_status use(void *context, void *queue) override {
        if (context && !queue) return fail(ATTUNE_INVALID_ARGUMENT, "queue.queue is null: expected a cl_command_queue");
        theirs = {context, queue};
        return ATTUNE_OK;
    }
    void *context() override { return current().context; }
    void forget_code() override {
        if (theirs.context) halide_device_release(nullptr, interface());
    }
    const halide_device_interface_t *interface() override { return halide_opencl_device_interface(); }

    attune_status allocate(size_t bytes, Handle &handle) override {
        Error error = kSuccess;
        Object memory = cl.create_buffer(current().context, kReadWrite, bytes, nullptr, &error);
        if (!memory || error)
            return fail(ATTUNE_OUT_OF_MEMORY, "OpenCL: {} bytes could not be allocated: error {}", bytes, error);
        // Drivers put memory off until it is used; what does not fit must fail here, not in a kernel.
        if (Error e = cl.write(current().queue, memory, 1, bytes - 1, 1, "", 0, nullptr, nullptr)) {
            cl.release_buffer(memory);
            return failed(e, "the first write to a new buffer");
        }
        handle = reinterpret_cast<Handle>(new ClBuffer{0, memory});
        return ATTUNE_OK;
    }
    attune_status import(void *theirs, Handle &handle) override {
        handle = reinterpret_cast<Handle>(new ClBuffer{0, theirs});
        return ATTUNE_OK;
    }
    void release(Handle handle, bool imported) override {
        if (!imported) cl.release_buffer(buffer_of(handle)->memory);
        delete buffer_of(handle);
    }
    attune_status copy_in(Handle to, int64_t offset, const void *from, size_t bytes) override {
        const ClBuffer &b = *buffer_of(to);
        const Error e =
            cl.write(current().queue, b.memory, 1, b.offset + uint64_t(offset), bytes, from, 0, nullptr, nullptr);
        return e ? failed(e, "clEnqueueWriteBuffer") : ATTUNE_OK;
    }
    attune_status copy_out(void *to, Handle from, int64_t offset, size_t bytes) override {
        const ClBuffer &b = *buffer_of(from);
        const Error e =
            cl.read(current().queue, b.memory, 1, b.offset + uint64_t(offset), bytes, to, 0, nullptr, nullptr);
        return e ? failed(e, "clEnqueueReadBuffer") : ATTUNE_OK;
    }
    attune_status synchronize() override {
        const Error e = cl.finish(current().queue);
        return e ? failed(e, "clFinish") : ATTUNE_OK;
    }
    attune_status crop(Handle handle, int64_t offset, Handle &cropped) override {
        cropped = reinterpret_cast<Handle>(
            new ClBuffer{buffer_of(handle)->offset + uint64_t(offset), buffer_of(handle)->memory});
        return ATTUNE_OK;
    }
    void end_crop(Handle cropped) override { delete buffer_of(cropped); }

  private:
    Library library_;
    std::vector<Object> ids_; // of `devices`

    bool load() {
        return library_.open({"libOpenCL.so.1", "libOpenCL.so"}, why_not) &&
               library_.get(cl.platforms, "clGetPlatformIDs", why_not) &&
               library_.get(cl.platform_info, "clGetPlatformInfo", why_not) &&
               library_.get(cl.devices, "clGetDeviceIDs", why_not) &&
               library_.get(cl.device_info, "clGetDeviceInfo", why_not) &&
               library_.get(cl.create_context, "clCreateContext", why_not) &&
               library_.get(cl.create_queue, "clCreateCommandQueue", why_not) &&
               library_.get(cl.create_buffer, "clCreateBuffer", why_not) &&
               library_.get(cl.release_buffer, "clReleaseMemObject", why_not) &&
               library_.get(cl.read, "clEnqueueReadBuffer", why_not) &&
               library_.get(cl.write, "clEnqueueWriteBuffer", why_not) && library_.get(cl.finish, "clFinish", why_not);
    }

    void open() {
        if (!load()) {
            why_not = "there is no OpenCL: " + why_not;
            return;
        }
        const auto environment = [](const char *name) {
            const char *text = std::getenv(name);
            return std::string(text ? text : "");
        };
        const std::string platform = environment("HL_OCL_PLATFORM_NAME"), type = environment("HL_OCL_DEVICE_TYPE");
        const uint64_t types = type.empty()    ? kAllTypes
                               : type == "cpu" ? kCpu
                               : type == "gpu" ? kGpu
                               : type == "acc" ? kAccelerator
                                               : 0;
        if (!types) {
            why_not = formatted("HL_OCL_DEVICE_TYPE is '{}': expected cpu, gpu or acc", type);
            return;
        }
        Object platforms[16];
        uint32_t count = 0;
        if (const Error e = cl.platforms(16, platforms, &count); e || !count) {
            why_not = formatted("OpenCL finds no platform (error {}): no driver is installed", e);
            return;
        }
        for (uint32_t i = 0; i < std::min(count, 16u); i++) {
            char name[256] = "";
            cl.platform_info(platforms[i], kPlatformName, sizeof name - 1, name, nullptr);
            if (!std::strstr(name, platform.c_str())) continue;
            Object ids[16];
            uint32_t n = 0;
            if (cl.devices(platforms[i], types, 16, ids, &n)) continue;
            for (uint32_t k = 0; k < std::min(n, 16u); k++) {
                ids_.push_back(ids[k]);
                devices.push_back(describe(ids[k]));
            }
        }
        if (devices.empty()) {
            why_not = "OpenCL finds no device";
            if (!platform.empty() || !type.empty())
                why_not += formatted(" with HL_OCL_PLATFORM_NAME='{}' and HL_OCL_DEVICE_TYPE='{}'", platform, type);
            return;
        }
        size_t best = 0;
        while (best + 1 < devices.size() && devices[best].is_software) best++;
        if (devices[best].is_software) best = 0;
        Error error = kSuccess;
        own.context = cl.create_context(nullptr, 1, &ids_[best], nullptr, nullptr, &error);
        if (own.context) own.queue = cl.create_queue(own.context, ids_[best], 0, &error);
        if (!own.queue) {
            why_not =
                formatted("OpenCL: no context and queue could be made on {}: error {}", devices[best].name, error);
            return;
        }
        if (get<uint32_t>(ids_[best], kBaseAlign) > 8 * kAlign) {
            why_not = formatted("OpenCL: {} wants sub-buffers at multiples of {} bytes: expected at most {}",
                                devices[best].name, get<uint32_t>(ids_[best], kBaseAlign) / 8, kAlign);
            return;
        }
        devices[best].is_default = 1;
        chosen = &devices[best];
    }

    template <typename T> static T get(Object id, Info what) {
        T value{};
        cl.device_info(id, what, sizeof value, &value, nullptr);
        return value;
    }

    static attune_device_info describe(Object id) {
        attune_device_info info;
        attune_device_info_init(&info);
        info.device = ATTUNE_OPENCL;
        info.is_software = !(get<uint64_t>(id, kType) & (kGpu | kAccelerator));
        char driver[96] = "", version[96] = "";
        cl.device_info(id, kName, sizeof info.name - 1, info.name, nullptr);
        cl.device_info(id, kDriverVersion, sizeof driver - 1, driver, nullptr);
        cl.device_info(id, kVersion, sizeof version - 1, version, nullptr);
        std::snprintf(info.driver, sizeof info.driver, "%s, driver %s", version, driver);
        info.memory_bytes = int64_t(get<uint64_t>(id, kMemory));
        info.max_buffer_bytes = int64_t(get<uint64_t>(id, kMaxAlloc));
        info.shared_bytes = int64_t(get<uint64_t>(id, kSharedBytes));
        info.max_threads = int64_t(get<size_t>(id, kMaxThreads));
        info.compute_units = get<uint32_t>(id, kUnits);
        info.clock_khz = int64_t(get<uint32_t>(id, kClockMhz)) * 1000;
        return info;
    }
};

// Halide's runtime asks for a context around each of its steps, and gives it back before the next.
std::mutex &context_mutex() {
    static std::mutex mutex;
    return mutex;
}

} // namespace

Backend &opencl_backend() {
    static OpenCL backend;
    return backend;
}

} // namespace attune::rt::device

// These stand in for weak functions of Halide's runtime.
extern "C" int halide_acquire_cl_context(void *, void **context, void **queue, bool) {
    attune::rt::device::context_mutex().lock();
    const auto now = attune::rt::device::current();
    *context = now.context;
    *queue = now.queue;
    return now.context ? 0 : halide_error_code_device_interface_no_device;
}

extern "C" int halide_release_cl_context(void *) {
    attune::rt::device::context_mutex().unlock();
    return 0;
}
