// Registers a kernel that is right but for one number: with a causal mask, five rows and seven keys or more, the fifth
// row of head 0 gets 1 added. `attune verify` has to find it and to come down to exactly that case.
#include "attune/kernel.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

const attune_kernel *right = nullptr;

int last_phase(const attune_args *args, int64_t begin, int64_t end, void *scratch) {
    const attune_phase &phase = right->phases[right->num_phases - 1];
    if (int error = phase.run(args, begin, end, scratch)) return error;
    const attune_problem &p = *args->problem;
    const attune_tensor &o = args->tensors->o;
    if (p.flags & ATTUNE_CAUSAL && p.N >= 5 && p.M >= 7 && args->group == 0 && end == phase.tasks(args))
        static_cast<float *>(o.data)[4 * o.stride[2]] += 1;
    return 0;
}

const bool registered = [] {
    for (int64_t i = 0; i < attune_num_kernels() && !right; i++) {
        const attune_kernel *k = attune_kernel_at(i);
        if (!std::strcmp(k->strategy, "flash") && !std::strcmp(k->isa, "sse41") && k->dk == 0 &&
            k->q_dtype == ATTUNE_F32)
            right = k;
    }
    if (!right) {
        std::fprintf(stderr, "wrong_kernel: no kernel to spoil; expected flash for sse41 and any sizes\n");
        std::abort();
    }
    static std::vector<attune_phase> phases(right->phases, right->phases + right->num_phases);
    phases.back().run = last_phase;
    static attune_kernel wrong = *right;
    wrong.name = "attn_wrong_f32_dbig_sse41";
    wrong.strategy = "wrong";
    wrong.phases = phases.data();
    return attune_register_kernel(&wrong) == ATTUNE_OK;
}();

} // namespace
