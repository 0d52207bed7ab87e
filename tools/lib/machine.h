// This machine: its CPU, caches and cores, and what it can reach at most, measured here and now. A share of the peak is
// only worth something against a peak of the same process, the same minute and the same number of threads.
#pragma once

#include "attune/attune.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace attune::tools {

struct Machine {
    std::string cpu;               // model name
    int cores = 1;                 // that this process may use
    std::vector<std::string> isas; // of the tokens sse41, avx2, avx512, avx512_bf16: those that the CPU has, ascending
    int64_t l1d = 0, l2 = 0, l3 = 0; // bytes of the first core's caches; 0: unknown
    int64_t memory = 0;              // bytes
};

Machine detect_machine();

// A loop of independent multiply-adds in inline assembly (mulps + addps for sse41, vfmadd for avx2 and avx512,
// vdpbf16ps for avx512_bf16) on each of `threads` threads at once, for about `seconds`. 0 if the ISA is not there.
double measure_peak_gflops(const std::string &isa, int threads, double seconds = 0.02);

// The peak that a kernel of this type is measured against: the best of the CPU's ISAs.
double measure_peak_gflops(const Machine &machine, attune_dtype dtype, int threads, double seconds = 0.02);

// GB/s of reading memory that is in no cache (buffers of 4 x L3 in all), on `threads` threads at once.
double measure_read_gbps(const Machine &machine, int threads, double seconds = 0.05);
// The same of these arrays, over and over, each thread its share of each: on a kernel's own pages. The best of 1, 2 and
// 4 streams at once.
double measure_read_gbps(const Machine &machine, int threads, const std::vector<std::span<const std::byte>> &arrays,
                         double seconds = 0.3);

} // namespace attune::tools
