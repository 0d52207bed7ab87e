#include "registry.h"

#include "cpu_features.h"
#include "device/run.h"
#include "status.h"
#include "threads.h"
#include "validate.h"

#include <deque>
#include <limits>
#include <mutex>
#include <tuple>

namespace attune::rt {

namespace {

struct Registry {
    std::mutex mutex;
    std::deque<const attune_kernel *> kernels;
    Registry() {
        for (const attune_kernel *const *k = builtin_kernels; *k; ++k) kernels.push_back(*k);
    }
};

Registry &registry() {
    static Registry r;
    return r;
}

constexpr struct {
    uint32_t flag;
    const char *name;
} kFlagNames[] = {{ATTUNE_CAUSAL, "causal"}, {ATTUNE_MASK, "bool mask"},  {ATTUNE_BIAS, "bias"},
                  {ATTUNE_KV_LEN, "kv_len"}, {ATTUNE_OFFSETS, "offsets"}, {ATTUNE_SOFTCAP, "softcap"},
                  {ATTUNE_ALIBI, "alibi"},   {ATTUNE_SINK, "sink"},       {ATTUNE_SCORES, "scores output"}};

} // namespace

std::vector<const attune_kernel *> all_kernels() {
    std::lock_guard lock(registry().mutex);
    return {registry().kernels.begin(), registry().kernels.end()};
}

std::string refusal(const attune_kernel &k, const attune_problem &p) {
    if (k.device != p.device) return "it is for another device";
    if (k.device == ATTUNE_CPU && !cpu_has(k.isa)) return formatted("this CPU has no {}", k.isa);
    if (k.device == ATTUNE_CPU && isa_rank(k.isa) > isa_rank(dispatch_isa()))
        return formatted("ATTUNE_ISA allows {} at most", dispatch_isa());
    const std::string_view wanted = p.mods ? p.mods : "", mods = k.mods ? k.mods : "";
    if (wanted != mods)
        return mods.empty() ? formatted("it has no user functions {}", wanted)
                            : formatted("it is made with the user functions {}", mods);
    if (k.device != ATTUNE_CPU)
        if (std::string why = device::refusal(k, p); !why.empty()) return why;
    const auto takes = [&k](attune_dtype built, attune_dtype asked, uint32_t any) {
        return built == asked || k.traits & any;
    };
    if (!takes(k.q_dtype, p.q_dtype, ATTUNE_TRAIT_ANY_Q) || !takes(k.kv_dtype, p.kv_dtype, ATTUNE_TRAIT_ANY_KV) ||
        !takes(k.o_dtype, p.o_dtype, ATTUNE_TRAIT_ANY_O)) {
        const auto built = [&k](attune_dtype t, uint32_t any) {
            return k.traits & any ? "any" : attune_dtype_string(t);
        };
        return formatted("it is built for q, kv, o of {}, {}, {}", built(k.q_dtype, ATTUNE_TRAIT_ANY_Q),
                         built(k.kv_dtype, ATTUNE_TRAIT_ANY_KV), built(k.o_dtype, ATTUNE_TRAIT_ANY_O));
    }
    if (p.dk < k.dk_min || p.dk > k.dk_max) return formatted("it takes dk from {} to {}", k.dk_min, k.dk_max);
    if (p.dv && (p.dv < k.dv_min || p.dv > k.dv_max)) return formatted("it takes dv from {} to {}", k.dv_min, k.dv_max);
    for (const auto &[what, n, least] :
         {std::tuple{"rows (N)", p.N, k.n_min}, {"keys (M)", p.M, k.m_min}, {"query heads (Hq)", p.Hq, k.h_min}})
        if (n && n < least) return formatted("it needs {} {} or more", least, what);
    for (const auto &[flag, name] : kFlagNames)
        if (p.flags & flag && !(k.flags & flag)) return formatted("it has no {}", name);
    if ((p.window_left >= 0 || p.window_right >= 0) && !k.window) return "it has no window";
    if (p.Hq != p.Hkv && !k.gqa) return "it has no grouped heads";
    // The runtime runs a packed sequence as a problem of its own, whose sizes are known at the run only.
    if (p.flags & ATTUNE_VARLEN &&
        (k.device != ATTUNE_CPU || k.n_min > 1 || k.m_min > 1 || k.traits & ATTUNE_TRAIT_OWN_THREADS))
        return "it has no packed sequences";
    constexpr int64_t kLimit = std::numeric_limits<int32_t>::max() - (1 << 16);
    if (p.M > kLimit || (p.Hkv && p.Hq / p.Hkv * p.N > kLimit))
        return "it counts keys, and rows of a kv head, in 32 bits";
    if (k.refuses)
        if (const char *why = k.refuses(&p)) return why;
    return "";
}

namespace {

attune_status check_descriptor(const attune_kernel *kernel) {
    if (!kernel) return fail(ATTUNE_INVALID_ARGUMENT, "kernel is null: expected a descriptor");
    if (kernel->struct_size != sizeof(attune_kernel))
        return fail(ATTUNE_INVALID_ARGUMENT, "kernel->struct_size is {}: expected {} (built for another version?)",
                    kernel->struct_size, sizeof(attune_kernel));
    if (kernel->abi != ATTUNE_KERNEL_ABI)
        return fail(ATTUNE_INVALID_ARGUMENT, "kernel->abi is {}: expected {}", kernel->abi, ATTUNE_KERNEL_ABI);
    if (!kernel->name || !kernel->strategy || !kernel->isa || !kernel->backend)
        return fail(ATTUNE_INVALID_ARGUMENT, "kernel has a null name, strategy, backend or isa: expected strings");
    if (kernel->device == ATTUNE_CPU && isa_rank(kernel->isa) < 0)
        return fail(ATTUNE_INVALID_ARGUMENT, "kernel->isa is '{}': expected an ISA token", kernel->isa);
    if (!kernel->phases || kernel->num_phases < 1 || kernel->num_phases > kMaxPhases)
        return fail(ATTUNE_INVALID_ARGUMENT, "kernel->num_phases is {}: expected 1 to {}, with phases",
                    kernel->num_phases, kMaxPhases);
    return ATTUNE_OK;
}

} // namespace

attune_status register_all(std::span<const attune_kernel *const> added) {
    for (const attune_kernel *k : added)
        if (attune_status s = check_descriptor(k)) return s;
    std::lock_guard lock(registry().mutex);
    auto &kernels = registry().kernels;
    const size_t before = kernels.size();
    try {
        for (const attune_kernel *k : added) {
            for (const attune_kernel *other : kernels)
                if (std::string_view(other->name) == k->name) {
                    kernels.resize(before);
                    return fail(ATTUNE_INVALID_ARGUMENT,
                                "kernel->name is '{}': a kernel of that name is registered already", k->name);
                }
            kernels.push_back(k);
        }
    } catch (const std::bad_alloc &) {
        kernels.resize(before);
        throw;
    }
    return ATTUNE_OK;
}

} // namespace attune::rt

using namespace attune::rt;

extern "C" int64_t attune_num_kernels(void) {
    std::lock_guard lock(registry().mutex);
    return int64_t(registry().kernels.size());
}

extern "C" const attune_kernel *attune_kernel_at(int64_t index) {
    std::lock_guard lock(registry().mutex);
    const auto &kernels = registry().kernels;
    return index >= 0 && index < int64_t(kernels.size()) ? kernels[index] : nullptr;
}

extern "C" const attune_kernel *attune_find_kernel(const char *name) {
    if (!name) return nullptr;
    std::lock_guard lock(registry().mutex);
    for (const attune_kernel *k : registry().kernels)
        if (std::string_view(name) == k->name) return k;
    return nullptr;
}

extern "C" attune_status attune_register_kernel(const attune_kernel *kernel) try {
    return register_all({&kernel, 1});
} catch (const std::bad_alloc &) {
    return fail(ATTUNE_OUT_OF_MEMORY, "no memory for another entry of the registry");
}

extern "C" const char *attune_kernel_refuses(const attune_kernel *kernel, const attune_problem *problem) try {
    thread_local char reason[1024]; // no string, for the same reason as in status.cpp
    if (!kernel) return "kernel is null: expected one of the registry";
    const std::string why = validate_problem(problem) != ATTUNE_OK ? attune_last_error() : refusal(*kernel, *problem);
    reason[why.copy(reason, sizeof reason - 1)] = '\0';
    return why.empty() ? nullptr : reason;
} catch (const std::bad_alloc &) {
    return "there is no memory to find out";
}
