// Contract 3.12: 16-bit types, and K and V of another type than Q and O. (The whole suite also runs in bf16 and f16,
// see CMakeLists.txt; here is what f32 does not have.)
#include "bed.h"

#include <bit>
#include <cmath>
#include <fmt/format.h>
#include <limits>

namespace attune::contract {
namespace {

using namespace tools;

using Contract_3_12 = ContractTest;

const char *const kTypes[] = {"f32", "bf16", "f16"};

// Each type with each: K and V in panels and tails, odd d, decode, grouped heads, strides.
TEST_F(Contract_3_12, mixed_types) {
    if (device_under_test() != ATTUNE_CPU) GTEST_SKIP() << "device kernels have one type for all";
    uint64_t seed = 0;
    for (const char *q : kTypes)
        for (const char *kv : kTypes) {
            if (std::string(q) == kv) continue;
            for (const char *shape :
                 {"b2:h2:n30:m70:d64", "b1:h2:n7:m300:d33/17:causal-br:layout=bshd", "b1:h8/2:n1:m1100:d128",
                  "b1:h4/2:n2:m90:d64/128:layout=col:mask=bool", "b1:h2:n40:d80:window=9,3:softcap=4:alibi:sink"})
                // On avx512_bf16 there are kernels for bf16 alone.
                if (isa_under_test() != "avx512_bf16")
                    expect_case(parse_case(fmt::format("{}:{}:kv={}", q, shape, kv)), Fit::stated, ++seed);
        }
}

// The caller chooses O's type.
TEST_F(Contract_3_12, output_type) {
    int done = 0;
    for (const attune_kernel *k : kernels_under_test())
        for (attune_dtype o : {ATTUNE_F32, ATTUNE_BF16, ATTUNE_F16}) {
            Case c = adapt(parse_case("f32:b2:h4/2:n9:m45:d64:causal-br"), *k);
            Bed bed(c, 3);
            bed.p.o_dtype = o;
            bed.o = Array(o, {c.B, c.Hq, c.N, c.dv}, {}, Guard::end, true);
            if (attune_kernel_refuses(k, &bed.p)) continue;
            run_and_check(*k, bed, bed.reference());
            done++;
        }
    EXPECT_GT(done, 0);
}

// Weights sum to one as they are multiplied, rounded: the mean of equal values is that value, to the bit.
TEST_F(Contract_3_12, equal_values_come_back_exactly) {
    if (type_under_test() == ATTUNE_F32) GTEST_SKIP() << "f32 sums in f32";
    for (const char *shape : {"f32:b1:h2:n33:m200:d64", "f32:b1:h4/1:n1:m2300:d128", "f32:b1:h1:n70:d64:causal"})
        for (float value : {1.0f, -0.8125f, 3.015625f, 1.9921875f})
            expect_right(shape, {.edit = [value](Bed &bed) { bed.v.fill(value); },
                                 .after =
                                     [value](Bed &bed, const attune_kernel &k) {
                                         bed.o.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                                             EXPECT_EQ(bed.o.get(b, h, i, d), value) << k.name << " row " << i;
                                         });
                                     },
                                 .guards = {Guard::end}});
}

// Scores that the type holds exactly leave log-sum-exp no excuse: it is f32.
TEST_F(Contract_3_12, lse_is_f32) {
    expect_right("f32:b1:h2:n5:m300:d64:scale=1", {.edit =
                                                       [](Bed &bed) {
                                                           bed.q.fill(0), bed.k.fill(0);
                                                           bed.q.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                                                               if (d == 0) bed.q.set(b, h, i, d, 1);
                                                           });
                                                           bed.k.each([&](int64_t b, int64_t h, int64_t j, int64_t d) {
                                                               if (d == 0) bed.k.set(b, h, j, d, float(j % 37) / 16);
                                                           });
                                                       },
                                                   .after =
                                                       [](Bed &bed, const attune_kernel &k) {
                                                           double sum = 0;
                                                           for (int64_t j = 0; j < bed.p.M; j++)
                                                               sum += std::exp(double(bed.k.get(0, 0, j, 0)));
                                                           EXPECT_NEAR(bed.lse.get(0, 0, 2, 0), std::log(sum), 6e-6)
                                                               << k.name;
                                                       },
                                                   .guards = {Guard::end}});
}

// Two keys alike: their mean lies halfway between two numbers of the type, and goes to the even one.
TEST_F(Contract_3_12, ties_go_to_even) {
    if (type_under_test() == ATTUNE_F32) GTEST_SKIP() << "a mean of two f32 is one";
    const float ulp = type_under_test() == ATTUNE_BF16 ? 0x1p-7f : 0x1p-10f;
    const auto mean_of = [&](float a, float b, float expected) {
        expect_right(
            "f32:b1:h1:n3:m2:d64",
            {.edit =
                 [=](Bed &bed) {
                     bed.q.fill(0);
                     bed.v.each([&](int64_t, int64_t, int64_t j, int64_t d) { bed.v.set(0, 0, j, d, j ? b : a); });
                 },
             .after = [=](Bed &bed, const attune_kernel &k) { EXPECT_EQ(bed.o.get(0, 0, 1, 5), expected) << k.name; },
             .guards = {Guard::end}});
    };
    mean_of(1, 1 + ulp, 1);
    mean_of(1 + ulp, 1 + 2 * ulp, 1 + 2 * ulp);
    mean_of(-1 - ulp, -1 - 2 * ulp, -1 - 2 * ulp);
}

// Denormals, the least and the largest numbers of the type, alone and beside ordinary ones.
TEST_F(Contract_3_12, ends_of_the_range) {
    const bool f16 = type_under_test() == ATTUNE_F16;
    const float denormal = f16 ? 0x1p-24f : 0x1p-133f, least = f16 ? 0x1p-14f : 0x1p-126f,
                most = f16 ? 65504.0f : 0x1.fep127f;
    // With this scale there are scores that are finite, and not so in units of log2.
    for (const char *shape : {"f32:b1:h2:n30:m100:d64:scale=0.35", "f32:b1:h4/2:n1:m1100:d128:scale=0.35"})
        for (float value : {denormal, 3 * denormal, least, 0x1p-70f, most}) {
            const auto signed_value = [value](int64_t j) { return j % 3 == 0 ? -value : value; };
            const auto edit_v = [=](Bed &bed) {
                bed.v.each([&](int64_t b, int64_t h, int64_t j, int64_t d) { bed.v.set(b, h, j, d, signed_value(j)); });
            };
            expect_right(shape, {.edit = edit_v, .guards = {Guard::end}});
            expect_right(shape, {.edit =
                                     [=](Bed &bed) {
                                         bed.k.set(0, 0, 7, 3, value);
                                         bed.q.set(0, 0, 0, 3, value);
                                         bed.v.set(0, 0, 7, 3, value);
                                     },
                                 .guards = {Guard::end}});
        }
    // A denormal times a large number is a score.
    expect_right("f32:b1:h1:n4:m40:d64:scale=1", {.edit =
                                                      [=](Bed &bed) {
                                                          for (int64_t i = 0; i < 4; i++)
                                                              bed.q.set(0, 0, i, 3, 0), bed.q.set(0, 0, i, 5, 0);
                                                          for (int64_t j = 0; j < 40; j++)
                                                              bed.k.set(0, 0, j, 3, 0), bed.k.set(0, 0, j, 5, 0);
                                                          bed.q.set(0, 0, 0, 3, denormal);
                                                          bed.k.set(0, 0, 7, 3, most);
                                                          bed.k.set(0, 0, 9, 5, denormal);
                                                          bed.q.set(0, 0, 1, 5, most);
                                                      },
                                                  .guards = {Guard::end}});
}

} // namespace
} // namespace attune::contract
