// attune_load_kernels: a shared library of kernels into the registry. A plug-in has its own copy of the adapters and of
// Halide's runtime, so that nothing but the ABI of kernel.h lies between it and this library.
#include "cpu_features.h"
#include "registry.h"
#include "status.h"

#include <dlfcn.h>
#include <mutex>
#include <new>
#include <string>
#include <vector>

using namespace attune::rt;

namespace {

struct Loaded {
    std::mutex mutex;
    std::vector<const attune_kernel_set *> sets;
};

Loaded &loaded() {
    static Loaded l;
    return l;
}

std::string dl_message() {
    const char *text = dlerror();
    return text ? text : "no reason given";
}

} // namespace

std::string attune::rt::plugin_refusal(const attune_kernel_set *set, std::string_view cpu_isa) {
    if (!set || set->struct_size < sizeof(size_t) + sizeof(uint32_t)) return "attune_plugin() gave no set of kernels";
    // Fields behind these two may lie elsewhere in another version.
    if (set->abi != ATTUNE_KERNEL_ABI)
        return formatted("made for version {} of the kernel ABI: expected {} (attune {})", set->abi, ATTUNE_KERNEL_ABI,
                         attune_version());
    if (set->struct_size != sizeof(attune_kernel_set) || !set->kernels || set->num_kernels < 1)
        return formatted("its set has struct_size {} and {} kernels: expected {} and 1 or more", set->struct_size,
                         set->num_kernels, sizeof(attune_kernel_set));
    for (int64_t i = 0; i < set->num_kernels; i++) {
        const attune_kernel *k = set->kernels[i];
        if (k && k->struct_size == sizeof(attune_kernel) && k->device == ATTUNE_CPU && k->isa &&
            isa_rank(k->isa) > isa_rank(cpu_isa))
            return formatted("kernel {} needs {}, which this CPU lacks: it has {}", k->name ? k->name : "?", k->isa,
                             cpu_isa);
    }
    return "";
}

extern "C" attune_status attune_load_kernels(const char *path) try {
    if (!path || !*path) return fail(ATTUNE_INVALID_ARGUMENT, "path is {}: expected a plug-in", path ? "''" : "null");
    // Without a slash, the system's folders would be searched.
    const std::string file =
        std::string_view(path).find('/') == std::string_view::npos ? "./" + std::string(path) : path;
    void *library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) return fail(ATTUNE_IO_ERROR, "{}: cannot be loaded: {}", path, dl_message());
    struct Closer {
        void *library;
        ~Closer() {
            if (library) dlclose(library);
        }
    } closer{library};
    using Entry = const attune_kernel_set *(*)();
    const auto entry = reinterpret_cast<Entry>(dlsym(library, "attune_plugin"));
    if (!entry)
        return fail(ATTUNE_INVALID_ARGUMENT, "{}: has no function attune_plugin: expected a plug-in of `attune build`",
                    path);
    const attune_kernel_set *set = entry();
    std::lock_guard lock(loaded().mutex);
    for (const attune_kernel_set *known : loaded().sets)
        if (known == set) return ATTUNE_OK; // the same library
    if (const std::string why = plugin_refusal(set, detected_isa()); !why.empty())
        return fail(ATTUNE_UNSUPPORTED, "{}: {}", path, why);
    loaded().sets.reserve(loaded().sets.size() + 1);
    if (attune_status s = register_all({set->kernels, size_t(set->num_kernels)}))
        return fail(s, "{}: {}", path, std::string(attune_last_error()));
    loaded().sets.push_back(set);
    closer.library = nullptr; // for good
    return ATTUNE_OK;
} catch (const std::bad_alloc &) {
    return fail(ATTUNE_OUT_OF_MEMORY, "no memory to load a plug-in");
}
