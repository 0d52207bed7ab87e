// Own CPUID and XGETBV reading: Halide 21's dispatcher ignores feature bits that its runtime does not know, so that a
// kernel for Zen 4 would pass on any x86, and it never asks whether the operating system saves the wide registers.
#include "cpu_features.h"

#include "attune/attune.h"
#include "format.h"

#include <cstdint>
#include <cstdlib>
#include <iterator>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace attune::rt {

namespace {

#if defined(__x86_64__)
int read_rank() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return -1;
    const bool sse41 = c >> 19 & 1, fma = c >> 12 & 1, f16c = c >> 29 & 1, avx = c >> 28 & 1, osxsave = c >> 27 & 1;
    if (!sse41) return -1;
    if (!osxsave || !avx) return 0;
    unsigned lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    const bool os_ymm = (lo & 0x6) == 0x6, os_zmm = (lo & 0xe6) == 0xe6;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    const bool avx2 = b >> 5 & 1;
    if (!os_ymm || !avx2 || !fma || !f16c) return 0;
    const unsigned f = 1u << 16, dq = 1u << 17, cd = 1u << 28, bw = 1u << 30, vl = 1u << 31,
                   all = f | dq | cd | bw | vl;
    // Halide's feature for avx512_bf16 is that of Zen 4: the compiler may use whatever AVX-512 comes with it there (and
    // on Sapphire Rapids). Cooper Lake has bf16, but no VBMI.
    const bool ifma = b >> 21 & 1, vbmi = c >> 1 & 1, vbmi2 = c >> 6 & 1, gfni = c >> 8 & 1, vaes = c >> 9 & 1,
               vpclmul = c >> 10 & 1, vnni = c >> 11 & 1, bitalg = c >> 12 & 1, popcnt = c >> 14 & 1;
    const bool companions = ifma && vbmi && vbmi2 && gfni && vaes && vpclmul && vnni && bitalg && popcnt;
    if (!os_zmm || (b & all) != all) return 1;
    unsigned a1 = 0, b1, c1, d1;
    __get_cpuid_count(7, 1, &a1, &b1, &c1, &d1);
    const bool bf16 = a1 >> 5 & 1;
    return bf16 && companions ? 3 : 2;
}
#else
int read_rank() {
    return -1;
}
#endif

int detected_rank() {
    static const int rank = read_rank();
    return rank;
}

} // namespace

int isa_rank(std::string_view isa) {
    for (int i = 0; i < int(std::size(kIsas)); i++)
        if (kIsas[i] == isa) return i;
    return -1;
}

std::string_view detected_isa() {
    return detected_rank() < 0 ? std::string_view("none") : kIsas[detected_rank()];
}

bool cpu_has(std::string_view isa) {
    return isa_rank(isa) >= 0 && isa_rank(isa) <= detected_rank();
}

std::string_view dispatch_isa(std::string *error) {
    // Resolved once: packed weights depend on it, and a run must not allocate.
    struct Choice {
        std::string_view isa = detected_isa();
        std::string error;
        Choice() {
            const char *forced = std::getenv("ATTUNE_ISA");
            if (!forced || !*forced) return;
            if (isa_rank(forced) < 0)
                error = formatted("ATTUNE_ISA is '{}': expected one of {}", forced, joined(kIsas));
            else if (!cpu_has(forced))
                error = formatted("ATTUNE_ISA is '{}': this CPU offers {} at most", forced, detected_isa());
            else
                isa = kIsas[isa_rank(forced)];
        }
    };
    static const Choice choice;
    if (error) *error = choice.error;
    return choice.isa;
}

} // namespace attune::rt

extern "C" const char *attune_isa(void) {
    return attune::rt::dispatch_isa().data();
}
