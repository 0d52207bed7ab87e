// The only place with threads: the tasks of groups, phase by phase, handed out to workers. Kernels are serial over
// ranges of tasks.
#pragma once

#include <cstdint>
#include <span>

namespace attune::rt {

constexpr int kMaxPhases = 8; // of a kernel

// Tasks [begin, end) of a phase of a group. No two groups are in a slot at once: its number is that of the memory which
// the group's phases share. A worker's number is the number of its scratch memory.
struct Part {
    int64_t group;
    int phase, slot, worker;
    int64_t begin, end;
};
using RunPart = void (*)(void *context, const Part &part);

// The most groups in flight.
int slots(int threads, int64_t groups);

// Runs all phases of `groups` independent groups by at most `threads` workers numbered from 0; phase i of a group has
// tasks[i] tasks and begins when phase i - 1 of that group is done. Each task is done once. If `seconds` is not empty,
// it gets each phase's time: that of all workers, divided by their number. With one worker, or inside a forked child,
// everything runs on the calling thread, a call for each phase of each group.
void parallel_groups(int threads, int64_t groups, std::span<const int64_t> tasks, RunPart run, void *context,
                     std::span<double> seconds = {});

// For kernels with parallel loops of their own, which run on Halide's pool: its size from now on.
void limit_own_threads(int threads);

} // namespace attune::rt
