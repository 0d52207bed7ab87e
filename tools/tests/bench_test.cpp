// Statistics, interleaving, counting allocations.
#include "lib/bench.h"

#include <chrono>
#include <cstdlib>
#include <gtest/gtest.h>
#include <memory>
#include <thread>
#include <vector>

namespace attune::tools {
namespace {

TEST(Statistics, KnownValues) {
    const Statistics s = statistics({5, 1, 4, 2, 3});
    EXPECT_DOUBLE_EQ(s.median, 3);
    EXPECT_DOUBLE_EQ(s.min, 1);
    EXPECT_DOUBLE_EQ(s.p90, 4.6); // rank 3.6 of 0..4
    EXPECT_DOUBLE_EQ(median({1, 2, 3, 10}), 2.5);
    EXPECT_DOUBLE_EQ(median({7}), 7);
    EXPECT_DOUBLE_EQ(statistics({7}).p90, 7);
    EXPECT_DOUBLE_EQ(median({}), 0);
}

TEST(Interleaving, RoundsAlternateAfterTheWarmCalls) {
    std::string order;
    const auto contestant = [&order](char name) {
        return Contestant{std::string(1, name),
                          [&order, name] {
                              order += name;
                              return true;
                          },
                          {}};
    };
    BenchOptions options;
    options.rounds = 3;
    options.sample_seconds = 0; // one call a sample
    const auto results = measure_interleaved({contestant('a'), contestant('b')}, options);
    EXPECT_EQ(order, "aabbababab");
    EXPECT_EQ(results[0].samples.size(), 3u);
}

TEST(Interleaving, AFailingContestantIsDroppedAndTheOthersGoOn) {
    int calls = 0;
    BenchOptions options;
    options.rounds = 4;
    options.sample_seconds = 0;
    const auto results = measure_interleaved(
        {{"bad", [&calls] { return ++calls < 4; }, {}}, {"good", [] { return true; }, {}}}, options);
    EXPECT_TRUE(results[0].failed);
    EXPECT_EQ(calls, 4); // two warm calls, one sample, the failure
    EXPECT_FALSE(results[1].failed);
    EXPECT_EQ(results[1].samples.size(), 4u);
}

TEST(Interleaving, ShortCallsAreRepeatedAndSlowOnesCutShort) {
    using namespace std::chrono_literals;
    const auto sleep = [](auto time) {
        return [time] {
            std::this_thread::sleep_for(time);
            return true;
        };
    };
    BenchOptions options;
    options.rounds = 50;
    options.time_limit = 0.05;
    options.hard_limit = 0.5;
    options.sample_seconds = 0.005;
    const auto results = measure_interleaved(
        {{"short", sleep(1ms), {}}, {"slow", sleep(40ms), {}}, {"over", sleep(600ms), {}}}, options);
    EXPECT_GE(results[0].calls_per_sample, 2);
    EXPECT_NEAR(statistics(results[0].samples).min, 1e-3, 1e-3);
    EXPECT_EQ(results[1].samples.size(), 3u); // three in any case, though one is the limit
    EXPECT_EQ(results[2].samples.size(), 1u); // its warm call is the sample
}

TEST(Interleaving, OneThatTimesItselfIsAskedForCalls) {
    std::vector<int> asked;
    BenchOptions options;
    options.rounds = 3;
    options.sample_seconds = 0.01;
    options.calls_multiple = 4;
    Contestant c{"elsewhere", {}, {}, [&asked](int calls) {
                     asked.push_back(calls);
                     return std::optional(calls * 1e-3);
                 }};
    const auto results = measure_interleaved({c}, options);
    EXPECT_EQ(asked, (std::vector<int>{1, 12, 12, 12})); // 10 calls fill the sample; 12 are three times all copies
    ASSERT_EQ(results[0].samples.size(), 3u);
    EXPECT_NEAR(results[0].samples[0], 1e-3, 1e-12);

    c.timed = [](int) { return std::optional<double>(); };
    EXPECT_TRUE(measure_interleaved({c}, options)[0].failed);
}

TEST(Allocations, AreCountedWhoeverMakesThem) {
    if (!AllocationCounter::available()) GTEST_SKIP() << "a sanitizer or another C library";
    const AllocationCounter counter;
    EXPECT_EQ(counter.count(), 0);
    auto owned = std::make_unique<std::vector<int>>(1000); // two: the vector and its array
    EXPECT_EQ(counter.count(), 2);
    void *volatile block = std::malloc(100);
    std::free(block);
    EXPECT_EQ(counter.count(), 3);
    void *aligned = nullptr;
    ASSERT_EQ(posix_memalign(&aligned, 4096, 100), 0);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(aligned) % 4096, 0u);
    std::free(aligned);
    EXPECT_EQ(counter.count(), 4);
    std::thread([] { std::free(std::calloc(3, 5)); }).join();
    EXPECT_GE(counter.count(), 5); // and those of starting a thread
}

TEST(Memory, PeakGrowsWithWhatIsTouched) {
    reset_peak_rss();
    const int64_t before = peak_rss();
    EXPECT_GT(before, 0);
    constexpr size_t kBytes = 64 << 20;
    {
        std::vector<char> block(kBytes, 1);
        EXPECT_EQ(block[kBytes / 2], 1);
    }
    EXPECT_GE(peak_rss(), before + int64_t(kBytes) / 2);
}

} // namespace
} // namespace attune::tools
