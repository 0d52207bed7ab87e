// Timing, counting allocations, peak memory.
#include "bench.h"

#include "malloc_counter.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <sys/resource.h>

namespace attune::tools {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point a, Clock::time_point b) {
    return std::chrono::duration<double>(b - a).count();
}

// Seconds of so many calls; empty: one of them failed.
std::optional<double> take(const Contestant &c, int calls) {
    if (c.timed) return c.timed(calls);
    bool ok = true;
    const auto start = Clock::now();
    for (int call = 0; call < calls; ++call) ok = c.run() && ok;
    const double seconds = seconds_between(start, Clock::now());
    return ok ? std::optional(seconds) : std::nullopt;
}

// A line of /proc/self/status, in bytes.
std::optional<int64_t> memory_status(const char *name) {
    std::ifstream file("/proc/self/status");
    for (std::string word; file >> word;)
        if (word == name) {
            int64_t kib = 0;
            if (file >> kib) return kib * 1024;
        }
    return {};
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
    attune_count_begin();
}
AllocationCounter::~AllocationCounter() {
    attune_count_end();
}
int64_t AllocationCounter::count() const {
    return attune_count_now();
}
bool AllocationCounter::available() {
    return attune_count_available() != 0;
}

void reset_peak_rss() {
    std::ofstream file("/proc/self/clear_refs");
    file << "5";
}

int64_t peak_rss() {
    if (const auto bytes = memory_status("VmHWM:")) return *bytes;
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return int64_t(usage.ru_maxrss) * 1024;
}

int64_t resident_bytes() {
    return memory_status("VmRSS:").value_or(0);
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
        for (int warm = 0; warm < (c.timed ? 1 : 2); ++warm) {
            const auto seconds = take(c, 1);
            if (!seconds) {
                results[k].failed = finished[k] = true;
                break;
            }
            call = *seconds;
            if (call > options.hard_limit) {
                // So slow that the one call has to be the sample.
                results[k].samples.push_back(call);
                if (c.after_sample) c.after_sample();
                finished[k] = true;
                break;
            }
        }
        estimate[k] = call;
        const int calls = std::max(1, int(std::ceil(std::min(options.sample_seconds / std::max(call, 1e-9), 1e6))));
        const int multiple = calls > 1 ? options.calls_multiple : 1;
        results[k].calls_per_sample = (calls + multiple - 1) / multiple * multiple;
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
            const auto seconds = take(c, m.calls_per_sample);
            if (!seconds) {
                m.failed = finished[k] = true;
                continue;
            }
            if (c.after_sample) c.after_sample();
            m.samples.push_back(*seconds / m.calls_per_sample);
            spent[k] += *seconds;
            any = true;
        }
        if (!any) break;
    }
    return results;
}

} // namespace attune::tools
