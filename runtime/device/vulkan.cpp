// Vulkan: devices are listed here, all else goes through Halide's runtime, whose memory handles are its own. The first
// GPU, else a software device; HL_VK_DEVICE_TYPE (cpu, gpu, discrete-gpu, integrated-gpu, virtual-gpu) narrows the
// choice, as in Halide's runtime.
#include "device.h"

#include "status.h"

#include "HalideRuntimeVulkan.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace attune::rt::device {

namespace {

// The little of vulkan.h that is used here.
struct InstanceInfo {
    int32_t type;
    const void *next;
    uint32_t flags;
    const void *application;
    uint32_t num_layers;
    const char *const *layers;
    uint32_t num_extensions;
    const char *const *extensions;
};
struct ApplicationInfo {
    int32_t type;
    const void *next;
    const char *name;
    uint32_t version;
    const char *engine;
    uint32_t engine_version, api_version;
};
// VkPhysicalDeviceProperties: its head, and of the limits those in between.
struct Properties {
    uint32_t api_version, driver_version, vendor, device, type;
    char name[256];
    uint8_t uuid[16];
    struct Limits {
        uint32_t image_dimensions[5], texel_elements, uniform_range, storage_range, push_constants, allocations,
            samplers;
        uint64_t granularity, sparse_address_space;
        uint32_t sets[16];  // bound descriptor sets, per stage, per set
        uint32_t vertex[5]; // input attributes … output components
        uint32_t tessellation[8];
        uint32_t geometry[5];
        uint32_t fragment[4];
        uint32_t shared_bytes, workgroups[3], max_threads, workgroup_size[3];
        uint8_t rest[512];
    } limits;
    uint8_t rest[256];
};
static_assert(offsetof(Properties, limits) == 296 && offsetof(Properties::Limits, shared_bytes) == 216);
struct Heap {
    uint64_t bytes;
    uint32_t flags;
};
struct MemoryProperties {
    uint32_t num_types, types[32][2], num_heaps;
    Heap heaps[16];
};
enum Type : uint32_t { kIntegrated = 1, kDiscrete = 2, kVirtual = 3, kCpu = 4 };

class Vulkan : public Backend {
  public:
    Vulkan() { open(); }

    attune_status use(void *context, void *) override {
        return context ? fail(ATTUNE_UNSUPPORTED, "queue.device is ATTUNE_VULKAN: expected OpenCL or CUDA; Vulkan "
                                                  "kernels run on attune's own queue")
                       : ATTUNE_OK;
    }
    void *context() override { return nullptr; }
    const halide_device_interface_t *interface() override { return halide_vulkan_device_interface(); }

    attune_status allocate(size_t bytes, Handle &handle) override {
        View view(0, 0, bytes);
        if (int e = halide_device_malloc(nullptr, &view.buffer, interface()))
            return fail(e == halide_error_code_device_malloc_failed || e == halide_error_code_out_of_memory
                            ? ATTUNE_OUT_OF_MEMORY
                            : ATTUNE_DEVICE_ERROR,
                        "Vulkan: {} bytes could not be allocated: {}", bytes, std::string(attune_last_error()));
        // Halide 21 does not count the allocation itself as a use of its memory: the end of a view of it would free it.
        // So one view is kept as long as the buffer lives.
        Handle first = 0;
        if (attune_status s = crop(view.buffer.device, 0, first)) {
            halide_device_free(nullptr, &view.buffer);
            return s;
        }
        std::lock_guard lock(mutex_);
        first_views_[view.buffer.device] = first;
        handle = view.buffer.device;
        return ATTUNE_OK;
    }
    attune_status import(void *, Handle &) override {
        return fail(ATTUNE_UNSUPPORTED, "device is ATTUNE_VULKAN: expected OpenCL or CUDA; buffers of another Vulkan "
                                        "program cannot be used");
    }
    void release(Handle handle, bool) override {
        {
            std::lock_guard lock(mutex_);
            end_crop(first_views_[handle]);
            first_views_.erase(handle);
        }
        View view(handle, 0, size_t(kChunk));
        view.buffer.device_interface = interface();
        halide_device_free(nullptr, &view.buffer);
    }

    // Copies are of whole multiples of 64 bytes, for the same reason as in open(): every buffer has room behind its
    // end. What lies there is read first and written back.
    attune_status copy_in(Handle to, int64_t offset, const void *from, size_t bytes) override {
        const size_t whole = bytes / kChunk * kChunk, rest = bytes - whole;
        if (whole)
            if (attune_status s = copy(true, to, offset, const_cast<void *>(from), whole)) return s;
        if (!rest) return ATTUNE_OK;
        unsigned char last[kChunk];
        if (attune_status s = copy(false, to, offset + int64_t(whole), last, kChunk)) return s;
        std::memcpy(last, static_cast<const char *>(from) + whole, rest);
        return copy(true, to, offset + int64_t(whole), last, kChunk);
    }
    attune_status copy_out(void *to, Handle from, int64_t offset, size_t bytes) override {
        const size_t whole = bytes / kChunk * kChunk, rest = bytes - whole;
        if (whole)
            if (attune_status s = copy(false, from, offset, to, whole)) return s;
        if (!rest) return ATTUNE_OK;
        unsigned char last[kChunk];
        if (attune_status s = copy(false, from, offset + int64_t(whole), last, kChunk)) return s;
        std::memcpy(static_cast<char *>(to) + whole, last, rest);
        return ATTUNE_OK;
    }
    attune_status synchronize() override {
        return checked(halide_device_sync_global(nullptr, interface()), "waiting for the queue");
    }
    attune_status crop(Handle handle, int64_t offset, Handle &cropped) override {
        View whole(handle, 0, size_t(kChunk)), part(0, offset, size_t(kChunk));
        whole.buffer.device_interface = interface();
        if (int e = halide_device_crop(nullptr, &whole.buffer, &part.buffer)) return checked(e, "a view of a buffer");
        cropped = part.buffer.device;
        return ATTUNE_OK;
    }
    void end_crop(Handle cropped) override {
        View part(cropped, 0, size_t(kChunk));
        part.buffer.device_interface = interface();
        halide_device_release_crop(nullptr, &part.buffer);
    }

  private:
    static constexpr size_t kChunk = 64;
    static constexpr int64_t kRow = int64_t(1) << 20;
    Library library_;
    std::mutex mutex_;
    std::map<Handle, Handle> first_views_;

    // Bytes [offset, offset + n) of a buffer as Halide sees them: in rows, as an extent has 31 bits.
    struct View {
        halide_buffer_t buffer{};
        halide_dimension_t dim[2];
        View(Handle handle, int64_t offset, size_t n) {
            const auto low = int32_t(offset % kRow), high = int32_t(offset / kRow);
            const auto bytes = int64_t(n);
            if (bytes <= INT32_MAX)
                dim[0] = halide_dimension_t(low, int32_t(bytes), 1),
                dim[1] = halide_dimension_t(high, 1, int32_t(kRow));
            else
                dim[0] = halide_dimension_t(low, int32_t(kRow), 1),
                dim[1] = halide_dimension_t(high, int32_t((bytes + kRow - 1) / kRow), int32_t(kRow));
            buffer.device = handle;
            buffer.type = halide_type_t(halide_type_uint, 8);
            buffer.dimensions = 2;
            buffer.dim = dim;
        }
    };

    static attune_status checked(int error, const char *what) {
        return error ? fail(ATTUNE_DEVICE_ERROR, "Vulkan: {} failed: {}", what, std::string(attune_last_error()))
                     : ATTUNE_OK;
    }

    attune_status copy(bool in, Handle handle, int64_t offset, void *host, size_t bytes) {
        constexpr size_t kMost = size_t(1) << 26; // of one staging buffer
        for (size_t done = 0; done < bytes; done += kMost) {
            const size_t n = std::min(kMost, bytes - done);
            const int64_t from = offset + int64_t(done);
            Handle part = handle;
            if (from)
                if (attune_status s = crop(handle, from, part)) return s;
            View view(part, 0, n);
            view.buffer.host = static_cast<uint8_t *>(host) + done;
            view.buffer.device_interface = interface();
            view.buffer.set_host_dirty(in);
            view.buffer.set_device_dirty(!in);
            const int e = in ? halide_copy_to_device(nullptr, &view.buffer, interface())
                             : halide_copy_to_host(nullptr, &view.buffer);
            if (from) end_crop(part);
            if (e) return checked(e, in ? "a copy to the device" : "a copy from the device");
        }
        return ATTUNE_OK;
    }

    void open() {
        void *(*get_proc)(void *, const char *) = nullptr;
        if (!library_.open({"libvulkan.so.1", "libvulkan.so"}, why_not) ||
            !library_.get(get_proc, "vkGetInstanceProcAddr", why_not)) {
            why_not = "there is no Vulkan: " + why_not;
            return;
        }
        const auto create = reinterpret_cast<int (*)(const InstanceInfo *, const void *, void **)>(
            get_proc(nullptr, "vkCreateInstance"));
        const ApplicationInfo application{0, nullptr, "attune", 1, "attune", 1, (1u << 22) | (1u << 12)};
        const InstanceInfo wanted{1, nullptr, 0, &application, 0, nullptr, 0, nullptr};
        void *instance = nullptr;
        if (const int e = create ? create(&wanted, nullptr, &instance) : -1) {
            why_not = formatted("Vulkan makes no instance (error {}): no driver is installed", e);
            return;
        }
        const auto enumerate =
            reinterpret_cast<int (*)(void *, uint32_t *, void **)>(get_proc(instance, "vkEnumeratePhysicalDevices"));
        const auto describe =
            reinterpret_cast<void (*)(void *, Properties *)>(get_proc(instance, "vkGetPhysicalDeviceProperties"));
        const auto memory = reinterpret_cast<void (*)(void *, MemoryProperties *)>(
            get_proc(instance, "vkGetPhysicalDeviceMemoryProperties"));
        const auto destroy = reinterpret_cast<void (*)(void *, const void *)>(get_proc(instance, "vkDestroyInstance"));
        void *found[16];
        uint32_t count = 16;
        if (enumerate(instance, &count, found) < 0) count = 0;
        std::vector<uint32_t> types;
        for (uint32_t i = 0; i < count; i++) {
            Properties p{};
            MemoryProperties m{};
            describe(found[i], &p);
            memory(found[i], &m);
            types.push_back(p.type);
            devices.push_back(info_of(p, m));
        }
        destroy(instance, nullptr);
        choose(types);
        // Halide 21 takes too little memory for sizes that are not multiples of 64 (its issue 9223), those of its own
        // argument and staging buffers among them, unless told to round up. It says so where it prints to.
        setenv("HL_VK_ALLOC_CONFIG", "0:1:0:0:256", 0);
        halide_set_custom_print([](void *, const char *) {});
    }

    void choose(const std::vector<uint32_t> &types) {
        const char *text = std::getenv("HL_VK_DEVICE_TYPE");
        const std::string type = text ? text : "";
        const auto matches = [](const std::string &name, uint32_t t) {
            return (name == "cpu" && t == kCpu) || (name == "integrated-gpu" && t == kIntegrated) ||
                   (name == "discrete-gpu" && t == kDiscrete) || (name == "virtual-gpu" && t == kVirtual) ||
                   (name == "gpu" && (t == kIntegrated || t == kDiscrete));
        };
        // Halide's runtime takes the first device of a type.
        for (const std::string &name :
             type.empty() ? std::vector<std::string>{"gpu", "virtual-gpu", "cpu"} : std::vector<std::string>{type})
            for (size_t i = 0; i < devices.size(); i++)
                if (matches(name, types[i])) {
                    halide_vulkan_set_device_type(name.c_str());
                    devices[i].is_default = 1;
                    chosen = &devices[i];
                    return;
                }
        why_not = devices.empty() ? "Vulkan finds no device"
                                  : formatted("Vulkan finds no device with HL_VK_DEVICE_TYPE='{}'", type);
    }

    static attune_device_info info_of(const Properties &p, const MemoryProperties &m) {
        attune_device_info info;
        attune_device_info_init(&info);
        info.device = ATTUNE_VULKAN;
        info.is_software = p.type == kCpu;
        std::memcpy(info.name, p.name, sizeof info.name - 1);
        std::snprintf(info.driver, sizeof info.driver, "Vulkan %u.%u.%u", p.api_version >> 22 & 0x7f,
                      p.api_version >> 12 & 0x3ff, p.api_version & 0xfff);
        for (uint32_t i = 0; i < std::min(m.num_heaps, 16u); i++)
            if (m.heaps[i].flags & 1) info.memory_bytes = std::max(info.memory_bytes, int64_t(m.heaps[i].bytes));
        info.max_buffer_bytes = p.limits.storage_range;
        info.shared_bytes = p.limits.shared_bytes;
        info.max_threads = p.limits.max_threads;
        return info;
    }
};

} // namespace

Backend &vulkan_backend() {
    static Vulkan backend;
    return backend;
}

} // namespace attune::rt::device
