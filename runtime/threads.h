// The only place with threads: a parallel-for over workers. Kernels are serial over ranges of tasks.
#pragma once

#include <cstdint>
#include <functional>

namespace attune::rt {

// Calls task(worker, index) once for each index in [0, n); indices are handed out one by one, lowest first, to at most
// `threads` workers numbered from 0, so that a worker's number is the number of its scratch memory. Returns when all
// are done. With one worker, one index, or inside a forked child everything runs on the calling thread.
void parallel_tasks(int threads, int64_t n, void (*task)(void *context, int worker, int64_t index), void *context);

// For kernels with parallel loops of their own, which run on Halide's pool: its size from now on.
void limit_own_threads(int threads);

} // namespace attune::rt
