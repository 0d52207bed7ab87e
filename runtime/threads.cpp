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
#include <mutex>
#include <pthread.h>
#include <thread>

namespace attune::rt {

namespace {

std::atomic<int> num_threads{0};
std::atomic<attune_parallel_for_fn> custom_parallel_for{nullptr};
std::atomic<void *> custom_context{nullptr};
// Halide's pool does not survive a fork: its threads exist in the parent only, and its lock is held for ever where one
// of them held it. Kernels with parallel loops of their own come to it by Halide's hook.
std::atomic<bool> forked{false};

int run_serially(void *user_context, halide_task_t task, int begin, int count, uint8_t *closure) {
    for (int i = begin; i < begin + count; i++)
        if (const int error = halide_do_task(user_context, task, i, closure)) return error;
    return 0;
}

void after_fork() {
    forked = true;
    halide_set_custom_do_par_for(run_serially);
}

int default_threads() {
    if (const char *text = std::getenv("ATTUNE_NUM_THREADS")) {
        int n = 0;
        const char *last = text + std::strlen(text);
        if (auto [end, error] = std::from_chars(text, last, n); error == std::errc() && end == last && n > 0) return n;
    }
    return std::max(1u, std::thread::hardware_concurrency());
}

using Clock = std::chrono::steady_clock;

constexpr int kMaxSlots = 64;

// Where a slot has got to. Its groups come one after the other, and so do their phases; within a phase, tasks are taken
// from both ends.
struct alignas(64) Slot {
    std::mutex mutex;
    int64_t group, last_group; // groups [group, last_group) are not done
    int64_t begin, end;        // tasks of the phase that nobody has taken
    int phase;
    int busy; // workers at this phase
};

// A run. One region for all groups and phases wakes the pool's threads once: a region for each phase cost 15 us more, 8
// % at n 128, d 64 on two threads.
//
// A worker starts with a slot that is its own by number, the same groups in every run, and helps with the others'
// afterwards. So what it packs, it reads, and the lines that it writes are still in its own cache from the run before.
// (One counter for all tasks dealt out heads and rows anew each time: 4 to 9 % slower at n 1024, d 64 on two threads,
// whose cores may lie far apart.) And since groups follow each other in the same memory, what they pack stays in L2:
// with memory for all at once, packed K went to main memory and back, 1.5 % at n 1024, d 64.
struct Region {
    RunPart run;
    void *context;
    std::span<const int64_t> tasks;
    int workers, slots;
    bool timed;
    std::array<Slot, kMaxSlots> slot;
    std::array<std::atomic<int64_t>, kMaxPhases> nanoseconds;
};

enum class Claim { taken, wait, done };

Claim claim(const Region &region, Slot &slot, bool from_end, Part &part) {
    std::lock_guard lock(slot.mutex);
    while (slot.begin == slot.end) {
        if (slot.group == slot.last_group) return Claim::done;
        if (slot.busy) return Claim::wait;
        if (++slot.phase == int(region.tasks.size())) {
            slot.phase = 0;
            if (++slot.group == slot.last_group) return Claim::done;
        }
        slot.begin = 0;
        slot.end = region.tasks[size_t(slot.phase)];
    }
    // Several at a time, so that short tasks share the cost of a call; few at a time in the last group, so that all
    // workers end together.
    const int64_t left = slot.end - slot.begin,
                  take = std::max<int64_t>(1, left / (slot.group + 1 == slot.last_group ? 32 : 4));
    part.group = slot.group;
    part.phase = slot.phase;
    part.begin = from_end ? slot.end - take : slot.begin;
    part.end = part.begin + take;
    (from_end ? slot.end : slot.begin) += from_end ? -take : take;
    slot.busy++;
    return Claim::taken;
}

void run_timed(Region &region, const Part &part) {
    if (!region.timed) return region.run(region.context, part);
    const auto start = Clock::now();
    region.run(region.context, part);
    region.nanoseconds[size_t(part.phase)] += std::chrono::nanoseconds(Clock::now() - start).count();
}

void work(Region &region, int worker) {
    const int own = worker * region.slots / region.workers;
    // Of the workers that share a slot, every other one takes its tasks from the end, and so do those who help: each
    // has its part of the rows.
    const bool odd = (worker - (own * region.workers + region.slots - 1) / region.slots) % 2 != 0;
    for (int idle = 0;;) {
        Claim best = Claim::done;
        for (int i = 0; i < region.slots && best != Claim::taken; i++) {
            Part part{0, 0, (own + i) % region.slots, worker, 0, 0};
            Slot &slot = region.slot[size_t(part.slot)];
            const Claim c = claim(region, slot, i > 0 || odd, part);
            if (c == Claim::taken) {
                run_timed(region, part);
                std::lock_guard lock(slot.mutex);
                slot.busy--;
            }
            if (c != Claim::done) best = c;
        }
        if (best == Claim::done) return;
        idle = best == Claim::taken ? 0 : idle + 1;
        // Others are in the midst of a phase's last tasks: a short wait, but a thread without a core gives way.
        if (idle > 1000) {
            std::this_thread::yield();
        } else if (idle) {
#if defined(__x86_64__)
            for (int k = 0; k < 16; k++) __builtin_ia32_pause();
#endif
        }
    }
}

int halide_worker(void *, int worker, uint8_t *region) {
    work(*reinterpret_cast<Region *>(region), worker);
    return 0;
}

void custom_worker(void *region, int64_t worker) {
    work(*static_cast<Region *>(region), int(worker));
}

void run_alone(int64_t groups, std::span<const int64_t> tasks, RunPart run, void *context, std::span<double> seconds) {
    std::ranges::fill(seconds, 0.0);
    for (int64_t group = 0; group < groups; group++)
        for (size_t i = 0; i < tasks.size(); i++) {
            if (!tasks[i]) continue;
            const auto start = seconds.empty() ? Clock::time_point() : Clock::now();
            run(context, {group, int(i), 0, 0, 0, tasks[i]});
            if (i < seconds.size()) seconds[i] += std::chrono::duration<double>(Clock::now() - start).count();
        }
}

} // namespace

int slots(int threads, int64_t groups) {
    return int(std::min<int64_t>({threads, groups, kMaxSlots}));
}

void parallel_groups(int threads, int64_t groups, std::span<const int64_t> tasks, RunPart run, void *context,
                     std::span<double> seconds) {
    static const int once = pthread_atfork(nullptr, nullptr, after_fork);
    (void)once;
    const int workers = int(std::min<int64_t>(threads, groups * std::ranges::max(tasks)));
    if (workers <= 1 || forked) return run_alone(groups, tasks, run, context, seconds);

    Region region;
    region.run = run;
    region.context = context;
    region.tasks = tasks;
    region.workers = workers;
    region.slots = slots(workers, groups);
    region.timed = !seconds.empty();
    for (int s = 0; s < region.slots; s++) {
        Slot &slot = region.slot[size_t(s)];
        slot.group = groups * s / region.slots;
        slot.last_group = groups * (s + 1) / region.slots;
        slot.begin = slot.phase = slot.busy = 0;
        slot.end = tasks[0];
    }
    for (auto &t : region.nanoseconds) t = 0;
    if (attune_parallel_for_fn f = custom_parallel_for) {
        f(custom_context, workers, custom_worker, &region);
    } else {
        // The pool keeps as many threads as the largest request so far: fewer workers than threads leave the rest
        // asleep.
        if (halide_get_num_threads() < workers) halide_set_num_threads(workers);
        halide_do_par_for(nullptr, halide_worker, 0, workers, reinterpret_cast<uint8_t *>(&region));
    }
    for (size_t i = 0; i < seconds.size(); i++) seconds[i] = double(region.nanoseconds[i]) * 1e-9 / workers;
}

void limit_own_threads(int threads) {
    if (!forked) halide_set_num_threads(threads);
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
