// The only place with threads: phases of tasks, handed out to workers. Kernels are serial over ranges of tasks.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

namespace attune::rt {

constexpr int kMaxPhases = 8; // of a kernel

// Does tasks [begin, end) of a phase. A worker's number is the number of its scratch memory.
using TaskRange = void (*)(void *context, int phase, int worker, int64_t begin, int64_t end);

// Runs the phases one after the other, phase i with tasks[i] tasks, by at most `threads` workers numbered from 0. Each
// task is done once; a phase begins when the one before is done. If `seconds` is not empty, it gets each phase's time.
// With one worker, or inside a forked child, everything runs on the calling thread, a call a phase.
void parallel_phases(int threads, std::span<const int64_t> tasks, TaskRange run, void *context,
                     std::span<double> seconds = {});

// For kernels with parallel loops of their own, which run on Halide's pool: its size from now on.
void limit_own_threads(int threads);

} // namespace attune::rt
