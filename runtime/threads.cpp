#include "threads.h"

#include "attune/attune.h"
#include "status.h"

#include "HalideRuntime.h"

#include <algorithm>
#include <atomic>
#include <charconv>
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

struct Loop {
    void (*task)(void *, int, int64_t);
    void *context;
    int64_t n;
    alignas(64) std::atomic<int64_t> next{0};
};

void work(Loop &loop, int worker) {
    for (int64_t i; (i = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.n;)
        loop.task(loop.context, worker, i);
}

int halide_worker(void *, int worker, uint8_t *loop) {
    work(*reinterpret_cast<Loop *>(loop), worker);
    return 0;
}

void custom_worker(void *loop, int64_t worker) {
    work(*static_cast<Loop *>(loop), int(worker));
}

} // namespace

void parallel_tasks(int threads, int64_t n, void (*task)(void *, int, int64_t), void *context) {
    static const int once = pthread_atfork(nullptr, nullptr, [] { forked = true; });
    (void)once;
    const int workers = int(std::min<int64_t>(threads, n));
    Loop loop{task, context, n};
    if (workers <= 1 || forked) return work(loop, 0);
    if (attune_parallel_for_fn f = custom_parallel_for) return f(custom_context, workers, custom_worker, &loop);
    // The pool keeps as many threads as the largest request so far: fewer workers than threads leave the rest asleep.
    if (halide_get_num_threads() < workers) halide_set_num_threads(workers);
    halide_do_par_for(nullptr, halide_worker, 0, workers, reinterpret_cast<uint8_t *>(&loop));
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
