// Calibration: numbers that a CPU can have.
#include "lib/machine.h"

#include <gtest/gtest.h>

namespace attune::tools {
namespace {

TEST(Machine, IsDescribed) {
    const Machine m = detect_machine();
    EXPECT_FALSE(m.cpu.empty());
    EXPECT_GE(m.cores, 1);
    EXPECT_GT(m.memory, 0);
}

TEST(Peak, EveryIsaThatIsThereIsMeasuredAndNoOther) {
    const Machine m = detect_machine();
    if (m.isas.empty()) GTEST_SKIP() << "no ISA that the peak loops know";
    for (const std::string &isa : m.isas) {
        const double gflops = measure_peak_gflops(isa, 1, 0.005);
        EXPECT_GT(gflops, 1) << isa;
        EXPECT_LT(gflops, 2000) << isa;
    }
    EXPECT_EQ(measure_peak_gflops("neon9", 1), 0);
}

TEST(Peak, WiderIsNotSlower) {
    const Machine m = detect_machine();
    if (m.isas.size() < 2) GTEST_SKIP() << "one ISA only";
    // 0.8: neighbours on a shared machine.
    EXPECT_GT(measure_peak_gflops(m, ATTUNE_F32, 1), 0.8 * measure_peak_gflops("sse41", 1));
    EXPECT_GT(measure_peak_gflops(m, ATTUNE_BF16, 1), 0.8 * measure_peak_gflops(m, ATTUNE_F32, 1));
}

TEST(Bandwidth, IsPlausible) {
    const double gbps = measure_read_gbps(detect_machine(), 1, 0.02);
    EXPECT_GT(gbps, 0.3);
    EXPECT_LT(gbps, 2000);
}

TEST(Bandwidth, OfGivenArraysIsPlausible) {
    const std::vector<std::byte> small(5000), large(size_t(8) << 20);
    const double gbps = measure_read_gbps(detect_machine(), 2, {large, large}, 0.03);
    EXPECT_GT(gbps, 0.3);
    EXPECT_LT(gbps, 4000);
    EXPECT_GE(measure_read_gbps(detect_machine(), 1, {small}, 0.03),
              0); // ends, though there is less than a piece a stream
    EXPECT_EQ(measure_read_gbps(detect_machine(), 1, {}, 0.03), 0);
}

} // namespace
} // namespace attune::tools
