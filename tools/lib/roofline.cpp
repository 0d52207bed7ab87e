#include "roofline.h"

#include "numbers.h"

#include <algorithm>
#include <string_view>

namespace attune::tools {

namespace {

// A GPU of each architecture that kernels are assembled for, from NVIDIA's data sheets and tuning guides.
struct Gpu {
    std::string_view arch;
    const char *name;
    int64_t units, lanes; // multiprocessors, f32 multiply-adds of each in a clock
    double ghz, gb_per_second;
    int64_t threads, groups, shared_bytes; // of a multiprocessor at once
};
constexpr Gpu kGpus[] = {{"sm_80", "A100", 108, 64, 1.41, 1555, 2048, 32, 164 << 10},
                         {"sm_86", "RTX 3090", 82, 128, 1.70, 936, 1536, 16, 100 << 10},
                         {"sm_90", "H100", 132, 128, 1.98, 3350, 2048, 32, 228 << 10}};
constexpr int64_t kRegisters = 65536, kRegisterStep = 8, kSharedReserved = 1024;

int64_t round_up(int64_t a, int64_t b) {
    return (a + b - 1) / b * b;
}

} // namespace

Roofline estimate(const attune_device_code &code, const attune_problem &p, int64_t rows_of_group) {
    Roofline r;
    const auto *gpu =
        std::find_if(std::begin(kGpus), std::end(kGpus), [&](const Gpu &g) { return g.arch == code.arch; });
    if (gpu == std::end(kGpus) || code.registers <= 0 || code.threads <= 0) return r;
    r.gpu = gpu->name;
    const struct {
        const char *what;
        int64_t groups;
    } limits[] = {
        {"registers", kRegisters / (round_up(code.registers, kRegisterStep) * code.threads)},
        {"shared memory", gpu->shared_bytes / (code.shared_bytes + kSharedReserved)},
        {"threads", gpu->threads / code.threads},
        {"workgroups", gpu->groups},
    };
    const auto &least = *std::min_element(std::begin(limits), std::end(limits),
                                          [](const auto &a, const auto &b) { return a.groups < b.groups; });
    r.groups_per_unit = least.groups;
    r.limit = least.what;
    r.warps_per_unit = r.groups_per_unit * code.threads / 32;
    if (!r.groups_per_unit) return r;

    const int64_t groups = p.B * p.Hq * ((p.N + rows_of_group - 1) / rows_of_group);
    const double flops = 2.0 * double(p.dk + p.dv) * double(p.B * p.Hq) * double(p.N) * double(p.M);
    // Whole waves: each multiprocessor does its share of the workgroups, the fullest one decides.
    const int64_t most = (groups + gpu->units - 1) / gpu->units;
    const double of_group = flops / double(groups);
    const double compute = double(most) * of_group / (2.0 * double(gpu->lanes) * gpu->ghz * 1e9);
    const double width = double(dtype_size(p.q_dtype));
    const double bytes =
        width * double(p.B) *
        (double(p.Hq) * double(p.N) * double(p.dk + p.dv) + double(p.Hkv) * double(p.M) * double(p.dk + p.dv));
    const double memory = bytes / (gpu->gb_per_second * 1e9);
    r.by_memory = memory > compute;
    r.seconds = std::max(memory, compute);
    r.tflops = flops / r.seconds * 1e-12;
    return r;
}

} // namespace attune::tools
