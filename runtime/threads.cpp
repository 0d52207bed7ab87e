#include "threads.h"

#include "attune/attune.h"
#include "status.h"

#include "HalideRuntime.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <thread>

namespace attune::rt {

namespace {

std::atomic<int> num_threads{0};
std::atomic<attune_parallel_for_fn> custom_parallel_for{nullptr};
std::atomic<void *> custom_context{nullptr};
// Halide's pool does not survive a fork: its threads exist in the parent only.
std::atomic<bool> forked{false};

int default_threads() {
    if (const char *text = std::getenv("ATTUNE_NUM_THREADS")) {
        int n = 0;
        const char *last = text + std::strlen(text);
        if (auto [end, error] = std::from_chars(text, last, n); error == std::errc() && end == last && n > 0) return n;
    }
    return std::max(1u, std::thread::hardware_concurrency());
}

using Clock = std::chrono::steady_clock;

constexpr int kMaxRanges = 16;

// Tasks [next, end) that nobody has taken yet.
struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
};

// All phases of a run. One region for all of them wakes the pool's threads once: a region for each costs 15 us more,
// 8 % at n 128, d 64 on two threads.
//
// The tasks of a phase lie in ranges. A worker starts with the range that is its own by number, the same part of every
// phase and of every run: what it packs, it reads, and the lines that it writes are still in its own cache from the run
// before. (One counter for all deals out heads and rows anew each time: packing K on two threads, whose cores may lie
// far apart, then took longer than on one.) Then it helps with the others.
struct Region {
    TaskRange run;
    void *context;
    int phases, workers, ranges;
    std::array<std::array<Range, kMaxRanges>, kMaxPhases> range;
    struct alignas(64) Progress {
        std::atomic<int64_t> left;
        Clock::time_point end; // written by whoever did the last task, read after the region
    };
    std::array<Progress, kMaxPhases> progress;
};

// Short waits: another worker is in the midst of its last tasks. A thread without a core of its own gives way.
void wait_for(const std::atomic<int64_t> &left) {
    for (int spins = 0; left.load(std::memory_order_acquire) > 0; spins++) {
        if (spins > 4096) {
            std::this_thread::yield();
        } else {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
    }
}

void work(Region &region, int worker) {
    const int own = worker * region.ranges / region.workers;
    for (int phase = 0; phase < region.phases; phase++) {
        if (phase > 0) wait_for(region.progress[phase - 1].left);
        int64_t done = 0;
        for (int r = 0; r < region.ranges; r++) {
            Range &range = region.range[phase][(own + r) % region.ranges];
            for (;;) {
                // Several at a time while many are left, so that short tasks share the cost of a call; one at a time
                // towards the end, so that all workers end together.
                const int64_t left = range.end - range.next.load(std::memory_order_relaxed);
                if (left <= 0) break;
                const int64_t take = std::max<int64_t>(1, left / 16), begin = range.next.fetch_add(take),
                              end = std::min(begin + take, range.end);
                if (begin >= end) break;
                region.run(region.context, phase, worker, begin, end);
                done += end - begin;
            }
        }
        Region::Progress &progress = region.progress[phase];
        if (done && progress.left.fetch_sub(done, std::memory_order_acq_rel) == done) progress.end = Clock::now();
    }
}

int halide_worker(void *, int worker, uint8_t *region) {
    work(*reinterpret_cast<Region *>(region), worker);
    return 0;
}

void custom_worker(void *region, int64_t worker) {
    work(*static_cast<Region *>(region), int(worker));
}

} // namespace

void parallel_phases(int threads, std::span<const int64_t> tasks, TaskRange run, void *context,
                     std::span<double> seconds) {
    static const int once = pthread_atfork(nullptr, nullptr, [] { forked = true; });
    (void)once;
    const int workers = int(std::min<int64_t>(threads, std::ranges::max(tasks)));
    Clock::time_point begin = Clock::now();
    const auto stamp = [&](size_t phase, Clock::time_point end) {
        if (phase < seconds.size()) seconds[phase] = std::chrono::duration<double>(end - begin).count();
        begin = end;
    };
    if (workers <= 1 || forked) {
        for (size_t i = 0; i < tasks.size(); i++) {
            if (tasks[i]) run(context, int(i), 0, 0, tasks[i]);
            if (!seconds.empty()) stamp(i, Clock::now());
        }
        return;
    }
    Region region{run, context, int(tasks.size()), workers, std::min(workers, kMaxRanges), {}, {}};
    for (size_t i = 0; i < tasks.size(); i++) {
        for (int r = 0; r < region.ranges; r++) {
            region.range[i][size_t(r)].next = tasks[i] * r / region.ranges;
            region.range[i][size_t(r)].end = tasks[i] * (r + 1) / region.ranges;
        }
        region.progress[i].left = tasks[i];
        region.progress[i].end = begin;
    }
    if (attune_parallel_for_fn f = custom_parallel_for) {
        f(custom_context, workers, custom_worker, &region);
    } else {
        // The pool keeps as many threads as the largest request so far: fewer workers than threads leave the rest
        // asleep.
        if (halide_get_num_threads() < workers) halide_set_num_threads(workers);
        halide_do_par_for(nullptr, halide_worker, 0, workers, reinterpret_cast<uint8_t *>(&region));
    }
    for (size_t i = 0; i < tasks.size(); i++) stamp(i, std::max(begin, region.progress[i].end));
}

void limit_own_threads(int threads) {
    halide_set_num_threads(forked ? 1 : threads);
}

} // namespace attune::rt

using namespace attune::rt;

extern "C" attune_status attune_set_num_threads(int threads) {
    if (threads < 0 || threads > 1024)
        return fail(ATTUNE_INVALID_ARGUMENT, "threads is {}: expected 0 (all cores) to 1024", threads);
    num_threads = threads;
    return ATTUNE_OK;
}

extern "C" int attune_get_num_threads(void) {
    const int n = num_threads;
    return n ? n : default_threads();
}

extern "C" void attune_set_parallel_for(attune_parallel_for_fn parallel_for, void *context) {
    custom_context = context;
    custom_parallel_for = parallel_for;
}
