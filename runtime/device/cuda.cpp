// CUDA through its driver. The primary context and its default stream, unless a caller brings a context and a stream.
#include "cuda.h"

#include "cuda_numbers.h"
#include "status.h"

#include "HalideRuntimeCuda.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace attune::rt::device {

namespace cuda {

namespace {

Driver functions;
void *primary = nullptr;
thread_local Queue chosen{nullptr, nullptr};
std::atomic<void (*)(void *)> unload{nullptr};

using namespace attune::cuda;

std::string name_of(Result result) {
    const char *name = nullptr;
    if (functions.error_name && functions.error_name(result, &name) == 0 && name) return name;
    return formatted("CUDA error {}", result);
}

} // namespace

const Driver &driver() {
    return functions;
}

Queue current() {
    return chosen.context ? chosen : Queue{primary, nullptr};
}

void when_forgotten(void (*f)(void *)) {
    unload = f;
}

Current::Current() : error(functions.ctx_push(current().context)) {}
Current::~Current() {
    void *old;
    if (error == 0) functions.ctx_pop(&old);
}

attune_status failed(Result result, const char *what) {
    return fail(result == kOutOfMemory ? ATTUNE_OUT_OF_MEMORY : ATTUNE_DEVICE_ERROR, "CUDA: {} failed: {}", what,
                name_of(result));
}

namespace {

class Cuda : public Backend {
  public:
    Cuda() { open(); }

    attune_status use(void *context, void *queue) override {
        cuda::chosen = {context, queue};
        return ATTUNE_OK;
    }
    void *context() override { return current().context; }
    bool has_pointers() const override { return true; }
    const halide_device_interface_t *interface() override { return halide_cuda_device_interface(); }

    attune_status allocate(size_t bytes, Handle &handle) override {
        const Current now;
        if (now.error) return failed(now.error, "cuCtxPushCurrent");
        Pointer p = 0;
        if (Result r = functions.mem_alloc(&p, bytes))
            return fail(r == kOutOfMemory ? ATTUNE_OUT_OF_MEMORY : ATTUNE_DEVICE_ERROR,
                        "CUDA: {} bytes could not be allocated: {}", bytes, name_of(r));
        handle = p;
        return ATTUNE_OK;
    }
    attune_status import(void *theirs, Handle &handle) override {
        handle = reinterpret_cast<Handle>(theirs);
        return ATTUNE_OK;
    }
    void release(Handle handle, bool imported) override {
        const Current now;
        if (!imported && !now.error) functions.mem_free(handle);
    }
    attune_status copy_in(Handle to, int64_t offset, const void *from, size_t bytes) override {
        return on_stream("cuMemcpyHtoDAsync",
                         [&](void *stream) { return functions.copy_in(to + Pointer(offset), from, bytes, stream); });
    }
    attune_status copy_out(void *to, Handle from, int64_t offset, size_t bytes) override {
        return on_stream("cuMemcpyDtoHAsync",
                         [&](void *stream) { return functions.copy_out(to, from + Pointer(offset), bytes, stream); });
    }
    attune_status synchronize() override {
        return on_stream("", [](void *) { return Result(0); });
    }
    void forget_code() override {
        if (!cuda::chosen.context) return;
        const Current now;
        if (now.error) return;
        if (void (*f)(void *) = unload) f(cuda::chosen.context);
        halide_device_release(nullptr, interface());
    }
    attune_status crop(Handle handle, int64_t offset, Handle &cropped) override {
        cropped = handle + Handle(offset);
        return ATTUNE_OK;
    }
    void end_crop(Handle) override {}

  private:
    Library library_;

    template <typename F> attune_status on_stream(const char *what, F f) {
        const Current now;
        if (now.error) return failed(now.error, "cuCtxPushCurrent");
        void *stream = current().stream;
        if (Result r = f(stream)) return failed(r, what);
        if (Result r = functions.stream_synchronize(stream)) return failed(r, "cuStreamSynchronize");
        return ATTUNE_OK;
    }

    bool load() {
        std::vector<std::string> names{"libcuda.so.1", "libcuda.so"};
        if (const char *name = std::getenv("ATTUNE_CUDA_LIBRARY"); name && *name) names = {name};
        if (!library_.open(names, why_not)) return false;
        Driver &f = functions;
        std::string ignored;
        library_.get(f.error_name, "cuGetErrorName", ignored);
        return library_.get(f.init, "cuInit", why_not) &&
               library_.get(f.driver_get_version, "cuDriverGetVersion", why_not) &&
               library_.get(f.device_get_count, "cuDeviceGetCount", why_not) &&
               library_.get(f.device_get, "cuDeviceGet", why_not) &&
               library_.get(f.device_get_name, "cuDeviceGetName", why_not) &&
               library_.get(f.device_total_mem, "cuDeviceTotalMem_v2", why_not) &&
               library_.get(f.device_get_attribute, "cuDeviceGetAttribute", why_not) &&
               library_.get(f.primary_ctx_retain, "cuDevicePrimaryCtxRetain", why_not) &&
               library_.get(f.ctx_push, "cuCtxPushCurrent_v2", why_not) &&
               library_.get(f.ctx_pop, "cuCtxPopCurrent_v2", why_not) &&
               library_.get(f.mem_alloc, "cuMemAlloc_v2", why_not) &&
               library_.get(f.mem_free, "cuMemFree_v2", why_not) &&
               library_.get(f.copy_in, "cuMemcpyHtoDAsync_v2", why_not) &&
               library_.get(f.copy_out, "cuMemcpyDtoHAsync_v2", why_not) &&
               library_.get(f.set_bytes, "cuMemsetD8Async", why_not) &&
               library_.get(f.stream_synchronize, "cuStreamSynchronize", why_not) &&
               library_.get(f.module_load, "cuModuleLoadDataEx", why_not) &&
               library_.get(f.module_unload, "cuModuleUnload", why_not) &&
               library_.get(f.module_get_function, "cuModuleGetFunction", why_not) &&
               library_.get(f.function_set_attribute, "cuFuncSetAttribute", why_not) &&
               library_.get(f.launch, "cuLaunchKernel", why_not);
    }

    void open() {
        if (!load()) {
            why_not = "there is no CUDA driver: " + why_not;
            return;
        }
        const auto broken = [&](Result r, const char *what) {
            if (r) why_not = formatted("the CUDA driver does not work: {} failed: {}", what, name_of(r));
            return r != 0;
        };
        int count = 0, version = 0;
        if (broken(functions.init(0), "cuInit") || broken(functions.device_get_count(&count), "cuDeviceGetCount"))
            return;
        functions.driver_get_version(&version);
        if (count == 0) {
            why_not = "the CUDA driver finds no device";
            return;
        }
        for (int i = 0; i < count; i++) devices.push_back(describe(i, version));
        int wanted = 0;
        if (const char *text = std::getenv("HL_GPU_DEVICE")) wanted = std::clamp(std::atoi(text), 0, count - 1);
        if (broken(functions.primary_ctx_retain(&primary, wanted), "cuDevicePrimaryCtxRetain")) return;
        devices[size_t(wanted)].is_default = 1;
        Backend::chosen = &devices[size_t(wanted)];

        // Halide 21 caps the registers of a thread at 64 where this is not set, and its kernels would spill.
        setenv("HL_CUDA_JIT_MAX_REGISTERS", "255", 0);
        halide_set_cuda_acquire_context([](void *, void **context, bool) {
            *context = current().context;
            return 0;
        });
        halide_set_cuda_release_context([](void *) { return 0; });
        halide_set_cuda_get_stream([](void *, void *, void **stream) {
            *stream = current().stream;
            return 0;
        });
    }

    static attune_device_info describe(int index, int version) {
        attune_device_info info;
        attune_device_info_init(&info);
        info.device = ATTUNE_CUDA;
        int device = 0;
        functions.device_get(&device, index);
        functions.device_get_name(info.name, int(sizeof info.name), device);
        const auto attribute = [device](Attribute a) {
            int value = 0;
            functions.device_get_attribute(&value, a, device);
            return int64_t(value);
        };
        info.capability = 10 * attribute(kMajor) + attribute(kMinor);
        std::snprintf(info.driver, sizeof info.driver, "CUDA %d.%d, sm_%lld", version / 1000, version % 1000 / 10,
                      static_cast<long long>(info.capability));
        size_t memory = 0;
        functions.device_total_mem(&memory, device);
        info.memory_bytes = info.max_buffer_bytes = int64_t(memory);
        info.shared_bytes = attribute(kMaxSharedPerBlock);
        info.max_threads = attribute(kMaxThreadsPerBlock);
        info.compute_units = attribute(kMultiprocessors);
        info.clock_khz = attribute(kClockKhz);
        return info;
    }
};

} // namespace
} // namespace cuda

Backend &cuda_backend() {
    static cuda::Cuda backend;
    return backend;
}

} // namespace attune::rt::device
