// Plug-ins that attune_load_kernels has to refuse, one for each FAULT.
#include "attune/kernel.h"

namespace {

int run(const attune_args *, int64_t, int64_t, void *) {
    return 0;
}
int64_t tasks(const attune_args *) {
    return 1;
}
size_t none(const attune_problem *) {
    return 0;
}

constexpr attune_phase kPhases[] = {{"main", run, tasks}};

constexpr attune_kernel kernel(const char *name, const char *isa) {
    attune_kernel k{};
    k.struct_size = sizeof(attune_kernel);
    k.abi = ATTUNE_KERNEL_ABI;
    k.name = name;
    k.strategy = "bad";
    k.backend = "test";
    k.isa = isa;
    k.dk_max = k.dv_max = -1; // it takes no problem
    k.params = "{}";
    k.why = "";
    k.phases = kPhases;
    k.num_phases = 1;
    k.shared_bytes = k.scratch_bytes = k.stack_bytes = none;
    return k;
}

constexpr attune_kernel kFirst = kernel("attn_bad_first_" FAULT_NAME, "sse41");
constexpr attune_kernel kSecond =
#if FAULT == 2
    kernel("attn_bad_second", "avx512_bf16"); // loaded under a CPU that has less
#elif FAULT == 3
    kernel("attn_bad_second", "tpu");
#else
    kernel("attn_bad_first_" FAULT_NAME, "sse41"); // the same name twice
#endif
constexpr const attune_kernel *kKernels[] = {&kFirst, &kSecond};
constexpr attune_kernel_set kSet{sizeof(attune_kernel_set), ATTUNE_KERNEL_ABI + (FAULT == 1), "0.0.0", kKernels, 2};

} // namespace

#if FAULT != 0
extern "C" ATTUNE_API const attune_kernel_set *attune_plugin(void) {
    return &kSet;
}
#else
extern "C" ATTUNE_API const attune_kernel_set *something_else(void) {
    return &kSet;
}
#endif
