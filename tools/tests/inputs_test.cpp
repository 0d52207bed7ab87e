// Inputs: the same everywhere, distributed as promised, guarded, poisoned only where nobody looks.
#include "lib/error.h"
#include "lib/inputs.h"
#include "lib/machine.h"
#include "lib/numbers.h"
#include "lib/verifier.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <map>

namespace attune::tools {
namespace {

float element(const attune_tensor &t, int64_t b, int64_t h, int64_t s, int64_t d) {
    return load_element(t.data, t.dtype, b * t.stride[0] + h * t.stride[1] + s * t.stride[2] + d * t.stride[3]);
}

TEST(Random, KnownSequence) {
    // Fixed numbers: a change of the generator would silently change what every printed seed means.
    Random random(1, 2);
    EXPECT_EQ(random.bits(), 0x4e89ce87363cf7fcu);
    EXPECT_EQ(random.bits(), 0x7f0c0e1fa2d68d13u);
}

TEST(Random, NormalHasTheRightMoments) {
    Random random(3);
    double sum = 0, squares = 0, fourth = 0;
    constexpr int kCount = 200'000;
    for (int i = 0; i < kCount; ++i) {
        const double x = random.normal();
        sum += x;
        squares += x * x;
        fourth += x * x * x * x;
    }
    EXPECT_NEAR(sum / kCount, 0, 0.01);
    EXPECT_NEAR(squares / kCount, 1, 0.02);
    EXPECT_NEAR(fourth / kCount, 3, 0.1);
}

TEST(Numbers, HalfConversionsAreExactForEveryPattern) {
    for (uint32_t h = 0; h < 0x10000; ++h) {
        const float b = bf16_to_float(uint16_t(h)), f = f16_to_float(uint16_t(h));
        if (std::isnan(b))
            EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(b))));
        else
            ASSERT_EQ(float_to_bf16(b), h);
        if (std::isnan(f))
            EXPECT_TRUE(std::isnan(f16_to_float(float_to_f16(f))));
        else
            ASSERT_EQ(float_to_f16(f), h);
    }
}

TEST(Numbers, RoundsToNearestEven) {
    EXPECT_EQ(bf16_to_float(float_to_bf16(1.0f + 0x1p-8f)), 1.0f);               // a tie: to even
    EXPECT_EQ(bf16_to_float(float_to_bf16(1.0f + 3 * 0x1p-8f)), 1.0f + 0x1p-6f); // a tie: to even
    EXPECT_EQ(f16_to_float(float_to_f16(1.0f + 0x1p-11f)), 1.0f);
    EXPECT_EQ(f16_to_float(float_to_f16(65519.0f)), 65504.0f);
    EXPECT_TRUE(std::isinf(f16_to_float(float_to_f16(65520.0f))));
    EXPECT_EQ(f16_to_float(float_to_f16(0x1p-25f)), 0.0f); // half of the smallest: to even
    EXPECT_EQ(f16_to_float(float_to_f16(0x1.8p-25f)), 0x1p-24f);
}

TEST(Inputs, SameSeedSameNumbersInEveryLayout) {
    const InputOptions options{5, Guard::none, false};
    const Inputs rows(parse_case("f32:b2:h4/2:n5:m7:d3/6"), options);
    for (const char *layout : {"bshd", "col"}) {
        const Inputs other(parse_case(std::string("f32:b2:h4/2:n5:m7:d3/6:mask=bool:layout=") + layout), options);
        for (int64_t b = 0; b < 2; ++b)
            for (int64_t h = 0; h < 2; ++h)
                for (int64_t j = 0; j < 7; ++j)
                    for (int64_t d = 0; d < 6; ++d)
                        ASSERT_EQ(element(rows.tensors().v, b, h, j, d), element(other.tensors().v, b, h, j, d));
    }
    const Inputs another(parse_case("f32:b2:h4/2:n5:m7:d3/6"), {6, Guard::none, false});
    EXPECT_NE(element(rows.tensors().q, 0, 0, 0, 0), element(another.tensors().q, 0, 0, 0, 0));
}

TEST(Inputs, ColumnLayoutHasUnitStrideAlongRows) {
    const Inputs inputs(parse_case("f32:h2:n5:d3:layout=col"), {});
    EXPECT_EQ(inputs.tensors().q.stride[2], 1);
    EXPECT_EQ(inputs.tensors().q.stride[3], 5);
    EXPECT_EQ(inputs.tensors().o.stride[2], 1);
}

TEST(Inputs, OptionalTensorsAreThereIfAskedFor) {
    const Inputs plain(parse_case("f32:n4:d8"), {});
    EXPECT_EQ(plain.tensors().mask, nullptr);
    EXPECT_EQ(plain.tensors().bias, nullptr);
    EXPECT_EQ(plain.tensors().kv_len, nullptr);
    EXPECT_EQ(plain.tensors().sinks, nullptr);
    const Inputs all(parse_case("f32:b2:h2:n4:m500:d8:mask=bool:mask=bias:kvlen=1,2:causal:offset=7,8:alibi:sink"), {});
    const attune_tensors &t = all.tensors();
    EXPECT_EQ(t.kv_len[1], 2);
    EXPECT_EQ(t.offsets[0], 7);
    EXPECT_FLOAT_EQ(t.alibi_slopes[0], 0x1p-4f);
    EXPECT_FLOAT_EQ(t.alibi_slopes[1], 0x1p-8f);
    EXPECT_NE(t.sinks, nullptr);
    EXPECT_EQ(t.mask->stride[1], 0);
    EXPECT_EQ(t.bias->stride[0], 0);
    double visible = 0;
    for (int64_t i = 0; i < 1000; ++i) visible += static_cast<const uint8_t *>(t.mask->data)[i];
    EXPECT_NEAR(visible / 1000, 0.8, 0.05);
}

TEST(Inputs, AlibiSlopesOfTwelveHeads) {
    const auto slopes = alibi_slopes(12); // eight of 8 heads, then every other one of 16
    ASSERT_EQ(slopes.size(), 12u);
    EXPECT_FLOAT_EQ(slopes[0], 0.5f);
    EXPECT_FLOAT_EQ(slopes[7], 0x1p-8f);
    EXPECT_FLOAT_EQ(slopes[8], std::exp2(-0.5f));
    EXPECT_FLOAT_EQ(slopes[11], std::exp2(-3.5f));
}

TEST(Inputs, OutputsBeginAsNaN) {
    const Inputs inputs(parse_case("bf16:n4:d8"), {});
    for (int64_t i = 0; i < 4; ++i) {
        EXPECT_TRUE(std::isnan(element(inputs.tensors().o, 0, 0, i, 7)));
        EXPECT_TRUE(std::isnan(element(*inputs.tensors().lse, 0, 0, i, 0)));
    }
}

TEST(Inputs, PoisonOnlyWhereNoRowLooks) {
    // Positions 2..5, window 1 to the left and 2 to the right: keys 1..7; causal cuts at 5, the length at 5.
    const Inputs inputs(parse_case("f32:n4:m10:d8:causal:offset=2:window=1,2:kvlen=5"), {0, Guard::none, true});
    for (int64_t j = 0; j < 10; ++j) {
        const bool seen = j >= 1 && j <= 4;
        EXPECT_EQ(std::isfinite(element(inputs.tensors().k, 0, 0, j, 3)), seen) << j;
        EXPECT_EQ(std::isfinite(element(inputs.tensors().v, 0, 0, j, 3)), seen) << j;
    }
}

// What no random case reaches, `verify --random` would call right without having looked.
TEST(Inputs, RandomCasesReachEveryKernel) {
    std::string unclaimed;
    const CaseSpace space = claimed_space(KernelFilter{}, unclaimed);
    std::map<std::string, int> reached;
    const std::vector<std::string> isas = detect_machine().isas;
    for (const attune_kernel *k : all_kernels())
        if (k->device == ATTUNE_CPU && std::find(isas.begin(), isas.end(), k->isa) != isas.end()) reached[k->name] = 0;
    ASSERT_FALSE(reached.empty());
    for (uint64_t seed = 0; seed < 6000; ++seed) {
        const attune_problem p = to_problem(random_case(seed, space));
        for (auto &[name, times] : reached) times += !attune_kernel_refuses(attune_find_kernel(name.c_str()), &p);
    }
    for (const auto &[name, times] : reached) EXPECT_GE(times, 3) << name << ": too few of 6000 random cases";
}

TEST(Inputs, TooLargeForThisMachineIsAMessage) {
    try {
        const Inputs inputs(parse_case("f32:n1000000:d1000000000"), {});
        FAIL() << "no error";
    } catch (const Error &e) {
        EXPECT_NE(std::string(e.what()).find("80 % of this machine's memory"), std::string::npos) << e.what();
    }
}

using GuardDeathTest = ::testing::Test;

TEST(GuardDeathTest, ReadingPastEitherSideEndsTheProcess) {
    testing::FLAGS_gtest_death_test_style = "threadsafe";
    const Buffer end(100, Guard::end), start(100, Guard::start);
    EXPECT_DEATH({ [[maybe_unused]] volatile char c = end.as<volatile char>()[100]; }, "");
    EXPECT_DEATH({ [[maybe_unused]] volatile char c = start.as<volatile char>()[-1]; }, "");
}

TEST(Guard, WritesOnTheOtherSideAreSeen) {
    const Buffer end(100, Guard::end), start(100, Guard::start);
    EXPECT_TRUE(end.slack_intact() && start.slack_intact());
    end.as<char>()[-1] = 1;
    start.as<char>()[100] = 1;
    EXPECT_FALSE(end.slack_intact());
    EXPECT_FALSE(start.slack_intact());
}

} // namespace
} // namespace attune::tools
