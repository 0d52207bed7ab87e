// Timing, counting allocations, peak memory.
#include "bench.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <sys/resource.h>

// Sanitizers bring their own malloc.
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define ATTUNE_COUNT_ALLOCATIONS 1
#else
#define ATTUNE_COUNT_ALLOCATIONS 0
#endif

namespace {

std::atomic<bool> counting{false};
std::atomic<int64_t> allocations{0};

} // namespace

#if ATTUNE_COUNT_ALLOCATIONS
// glibc keeps its allocator under these names for exactly this use. free() stays glibc's: it takes any of these
// pointers.
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming,readability-inconsistent-declaration-parameter-name)
extern "C" {
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

static inline void count_one() {
    if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
}

void *malloc(size_t size) {
    count_one();
    return __libc_malloc(size);
}
void *calloc(size_t count, size_t size) {
    count_one();
    return __libc_calloc(count, size);
}
void *realloc(void *pointer, size_t size) {
    count_one();
    return __libc_realloc(pointer, size);
}
void *memalign(size_t alignment, size_t size) {
    count_one();
    return __libc_memalign(alignment, size);
}
void *aligned_alloc(size_t alignment, size_t size) {
    count_one();
    return __libc_memalign(alignment, size);
}
int posix_memalign(void **result, size_t alignment, size_t size) {
    if (alignment % sizeof(void *) != 0 || (alignment & (alignment - 1)) != 0 || alignment == 0) return EINVAL;
    count_one();
    void *pointer = __libc_memalign(alignment, size);
    if (!pointer) return ENOMEM;
    *result = pointer;
    return 0;
}
}
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming,readability-inconsistent-declaration-parameter-name)
#endif

namespace attune::tools {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point a, Clock::time_point b) {
    return std::chrono::duration<double>(b - a).count();
}

} // namespace

Statistics statistics(std::vector<double> samples) {
    if (samples.empty()) return {};
    std::sort(samples.begin(), samples.end());
    const auto quantile = [&samples](double q) {
        const double rank = q * double(samples.size() - 1);
        const size_t low = size_t(rank);
        const size_t high = std::min(low + 1, samples.size() - 1);
        return samples[low] + (rank - double(low)) * (samples[high] - samples[low]);
    };
    return {quantile(0.5), samples.front(), quantile(0.9)};
}

double median(std::vector<double> samples) {
    return statistics(std::move(samples)).median;
}

AllocationCounter::AllocationCounter() {
    allocations = 0;
    counting = true;
}
AllocationCounter::~AllocationCounter() {
    counting = false;
}
int64_t AllocationCounter::count() const {
    return allocations;
}
bool AllocationCounter::available() {
    return ATTUNE_COUNT_ALLOCATIONS != 0;
}

void reset_peak_rss() {
    std::ofstream file("/proc/self/clear_refs");
    file << "5";
}

int64_t peak_rss() {
    std::ifstream file("/proc/self/status");
    for (std::string word; file >> word;)
        if (word == "VmHWM:") {
            int64_t kib = 0;
            if (file >> kib) return kib * 1024;
        }
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return int64_t(usage.ru_maxrss) * 1024;
}

std::vector<Measurement> measure_interleaved(const std::vector<Contestant> &contestants, const BenchOptions &options) {
    const size_t count = contestants.size();
    std::vector<Measurement> results(count);
    std::vector<double> spent(count, 0.0), estimate(count, 0.0);
    std::vector<bool> finished(count, false);
    for (auto &r : results) r.samples.reserve(size_t(options.rounds) + 1);

    const auto report = [&](double done, size_t index) {
        if (options.progress) options.progress(done, contestants[index].name);
    };
    for (size_t k = 0; k < count; ++k) {
        report(0.2 * double(k) / double(count), k);
        const Contestant &c = contestants[k];
        double call = 0;
        for (int warm = 0; warm < 2; ++warm) {
            const auto start = Clock::now();
            if (!c.run()) {
                results[k].failed = finished[k] = true;
                break;
            }
            call = seconds_between(start, Clock::now());
            spent[k] += call;
            if (call > options.hard_limit) {
                // So slow that the one call has to be the sample.
                results[k].samples.push_back(call);
                if (c.after_sample) c.after_sample();
                finished[k] = true;
                break;
            }
        }
        estimate[k] = call;
        results[k].calls_per_sample =
            std::max(1, int(std::ceil(std::min(options.sample_seconds / std::max(call, 1e-9), 1e6))));
        spent[k] = 0;
    }
    if (options.before_samples) options.before_samples();
    for (int round = 0; round < options.rounds; ++round) {
        bool any = false;
        for (size_t k = 0; k < count; ++k) {
            if (finished[k]) continue;
            Measurement &m = results[k];
            const double next = estimate[k] * m.calls_per_sample;
            const size_t taken = m.samples.size();
            if ((taken >= 3 && spent[k] + next > options.time_limit) ||
                (taken >= 1 && spent[k] + next > options.hard_limit)) {
                finished[k] = true;
                continue;
            }
            report(0.2 + 0.8 * (round + double(k) / double(count)) / options.rounds, k);
            const Contestant &c = contestants[k];
            bool ok = true;
            const auto start = Clock::now();
            for (int call = 0; call < m.calls_per_sample; ++call) ok = c.run() && ok;
            const double seconds = seconds_between(start, Clock::now());
            if (!ok) {
                m.failed = finished[k] = true;
                continue;
            }
            if (c.after_sample) c.after_sample();
            m.samples.push_back(seconds / m.calls_per_sample);
            spent[k] += seconds;
            any = true;
        }
        if (!any) break;
    }
    return results;
}

} // namespace attune::tools
