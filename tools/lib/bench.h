// Interleaved measurement: contestants A B C A B C …, so that a slow minute of the machine hits all of them alike.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace attune::tools {

// Times of calls, in seconds.
struct Statistics {
    double median = 0, min = 0, p90 = 0;
};
// p90: linear between the two nearest ranks. Empty input: all 0.
Statistics statistics(std::vector<double> samples);
double median(std::vector<double> samples);

// Calls of malloc and its relatives (operator new included) of the whole process while an object of this class lives.
// Counts by defining malloc itself, where that is possible (glibc, no sanitizer); otherwise available() is false.
class AllocationCounter {
  public:
    AllocationCounter();
    ~AllocationCounter();
    AllocationCounter(const AllocationCounter &) = delete;
    AllocationCounter &operator=(const AllocationCounter &) = delete;
    int64_t count() const;
    static bool available();
};

// Peak resident memory of this process since the last reset, in bytes. Where the system cannot reset it (it needs
// /proc/self/clear_refs), it is the peak since the start.
void reset_peak_rss();
int64_t peak_rss();
int64_t resident_bytes(); // now

struct Contestant {
    std::string name;
    std::function<bool()> run;               // one call; false: it failed, and is dropped
    std::function<void()> after_sample = {}; // may be empty: called after each sample, outside the time
    // In place of `run` for one that times itself, in another process: seconds of so many calls, after warm ones of its
    // own; empty: it failed, and is dropped.
    std::function<std::optional<double>(int)> timed = {};
};

struct BenchOptions {
    int rounds = 15;              // at most
    double time_limit = 1.5;      // seconds of measuring for each contestant; three samples are taken in any case …
    double hard_limit = 20;       // … unless one call takes longer than this
    double sample_seconds = 2e-3; // short calls are repeated until a sample lasts this long
    int calls_multiple = 1;       // of which the calls of a sample are a multiple, unless one call fills it
    std::function<void()> before_samples; // once, between the warm calls and the samples
    // Called with the share done, from 0 to 1, and who runs.
    std::function<void(double, const std::string &)> progress;
};

struct Measurement {
    std::vector<double> samples; // seconds a call
    int calls_per_sample = 1;
    bool failed = false;
};

// Two warm calls each first; they also settle how many calls make a sample.
std::vector<Measurement> measure_interleaved(const std::vector<Contestant> &contestants, const BenchOptions &options);

} // namespace attune::tools
