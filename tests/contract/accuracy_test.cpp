// Contract 3.17: the accuracy bound, on data made to break it. (Every other test checks the bound too.)
#include "bed.h"

#include <bit>
#include <cmath>
#include <fmt/format.h>
#include <limits>

namespace attune::contract {
namespace {

using namespace tools;

using Contract_3_17 = ContractTest;

// Keys long enough for several tiles of every kernel.
const char *const kShapes[] = {"f32:b1:h2:n5:m70:d64", "f32:b1:h2:n30:m700:d40", "f32:b1:h4/2:n1:m2200:d64"};

void expect_on_shapes(const std::function<void(Bed &)> &edit, const std::string &more = "",
                      const std::function<void(Bed &, const attune_kernel &)> &after = {}) {
    for (const char *shape : kShapes)
        expect_right(shape + more, {.edit = edit, .after = after, .guards = {Guard::end}});
}

// No test is worth anything if the bound lets everything pass: it must be small beside the values, and a result that is
// off by a little more must fail.
TEST_F(Contract_3_17, bound_is_tight) {
    for (const char *shape : kShapes)
        for (const Group &group : groups(parse_case(shape), Fit::features)) {
            Bed bed(group.c, 1);
            const Reference reference = bed.reference(64'000'000); // all rows: one of them is changed
            EXPECT_LT(reference.o_bound, 1e-4 * type_coarseness()) << shape;
            const attune_kernel *k = group.kernels[0];
            ASSERT_TRUE(run_and_check(*k, bed, reference));
            const float right = bed.o.get(0, 1, 0, 3);
            bed.o.set(0, 1, 0, 3, right + 2.5f * float(reference.o_bound));
            EXPECT_FALSE(check_outputs(reference, bed.tensors()).ok) << shape;
            bed.o.set(0, 1, 0, 3, right);
            EXPECT_TRUE(check_outputs(reference, bed.tensors()).ok) << shape;
            const auto row = size_t(bed.p.N); // of head 1
            bed.lse.set(0, 1, 0, 0, bed.lse.get(0, 1, 0, 0) + 2.5f * float(reference.lse_bound(row)));
            EXPECT_FALSE(check_outputs(reference, bed.tensors()).ok) << shape;
        }
}

// The maximum of a first block in which nothing is visible must not count.
TEST_F(Contract_3_17, first_tile_wholly_masked) {
    for (int64_t hidden : {1, 31, 32, 33, 96, 192, 193, 600})
        expect_on_shapes(
            [hidden](Bed &bed) {
                bed.mask.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                    bed.mask.set(b, h, i, j, j < std::min(hidden, bed.p.M - 1) ? 0.0f : 1.0f);
                });
            },
            ":mask=bool");
    // The same by a window, which skips whole blocks, and by what makes the hidden scores the largest ones.
    expect_right("f32:b1:h2:n30:m700:d40:window=40,-1:offset=650");
    expect_on_shapes(
        [](Bed &bed) {
            bed.mask.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                bed.mask.set(b, h, i, j, j < bed.p.M / 2 ? 0.0f : 1.0f);
            });
            bed.k.each([&](int64_t b, int64_t h, int64_t j, int64_t d) {
                if (j < bed.p.M / 2) bed.k.set(b, h, j, d, 1e3f * bed.k.get(b, h, j, d));
            });
        },
        ":mask=bool");
}

TEST_F(Contract_3_17, only_one_key_visible) {
    for (int which = 0; which < 5; which++)
        expect_on_shapes(
            [which](Bed &bed) {
                const int64_t M = bed.p.M, keys[] = {0, M - 1, M / 2, std::min<int64_t>(M - 1, 32), M / 3};
                bed.mask.fill(0);
                bed.mask.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                    if (j == keys[which]) bed.mask.set(b, h, i, j, 1);
                });
            },
            ":mask=bool",
            [which](Bed &bed, const attune_kernel &k) {
                const int64_t M = bed.p.M, keys[] = {0, M - 1, M / 2, std::min<int64_t>(M - 1, 32), M / 3};
                const float v = bed.v.get(0, 0, keys[which], 0);
                EXPECT_NEAR(bed.o.get(0, 0, 0, 0), v, 2e-6f * std::abs(v)) << k.name;
            });
}

TEST_F(Contract_3_17, all_false) {
    expect_on_shapes([](Bed &bed) { bed.mask.fill(0); }, ":mask=bool",
                     [](Bed &bed, const attune_kernel &k) {
                         EXPECT_EQ(bed.o.get(0, 0, 0, 0), 0.0f) << k.name;
                         EXPECT_EQ(bed.lse.get(0, 0, 0, 0), -std::numeric_limits<float>::infinity()) << k.name;
                     });
}

// Scores of one feature: s[j] exactly, whatever the scale of the rest.
void set_scores(Bed &bed, const std::function<float(int64_t i, int64_t j)> &score) {
    bed.q.fill(0);
    bed.k.fill(0);
    for (int64_t b = 0; b < bed.p.B; b++) {
        for (int64_t h = 0; h < bed.p.Hq; h++)
            for (int64_t i = 0; i < bed.p.N; i++) bed.q.set(b, h, i, 0, 1);
        for (int64_t h = 0; h < bed.p.Hkv; h++)
            for (int64_t j = 0; j < bed.p.M; j++) bed.k.set(b, h, j, 0, score(0, j));
    }
}

// Logits of +-2.5e5: the one largest takes all.
TEST_F(Contract_3_17, huge_logits) {
    for (float size : {100.0f, 6e4f, 2.5e5f, 1e30f}) {
        if (type_under_test() == ATTUNE_F16 && size > 65504) continue;
        expect_on_shapes(
            [size](Bed &bed) {
                set_scores(bed, [&](int64_t, int64_t j) { return j == bed.p.M / 2 ? size : j % 2 ? -size : size / 2; });
            },
            ":scale=1",
            [](Bed &bed, const attune_kernel &k) {
                const float v = bed.v.get(0, 0, bed.p.M / 2, 0);
                EXPECT_NEAR(bed.o.get(0, 0, 0, 0), v, 2e-6f * std::abs(v)) << k.name;
            });
    }
    // Drawn at random, far apart.
    expect_on_shapes([](Bed &bed) {
        bed.q.each(
            [&](int64_t b, int64_t h, int64_t i, int64_t d) { bed.q.set(b, h, i, d, 1e5f * bed.q.get(b, h, i, d)); });
    });
}

// A maximum that moves with every block, upwards and downwards, or jumps in the last one.
TEST_F(Contract_3_17, moving_maximum) {
    for (float step : {0.05f, 1.0f, -0.05f, -1.0f})
        expect_on_shapes([step](Bed &bed) { set_scores(bed, [&](int64_t, int64_t j) { return step * float(j); }); },
                         ":scale=1");
    for (float jump : {80.0f, 90.0f, 200.0f, -90.0f})
        expect_on_shapes(
            [jump](Bed &bed) { set_scores(bed, [&](int64_t, int64_t j) { return j == bed.p.M - 1 ? jump : 0.0f; }); },
            ":scale=1");
}

// Weights so small that they leave the range of f32: exp of -87, -104, -150.
TEST_F(Contract_3_17, vanishing_weights) {
    for (float low : {-86.0f, -87.5f, -88.0f, -103.0f, -104.0f, -126.0f, -150.0f, -1e4f})
        expect_on_shapes([low](Bed &bed) { set_scores(bed, [&](int64_t, int64_t j) { return j % 3 ? low : 0.0f; }); },
                         ":scale=1");
}

TEST_F(Contract_3_17, constant_rows) {
    expect_on_shapes([](Bed &bed) { bed.k.fill(0.75f); });
    expect_on_shapes(
        [](Bed &bed) { bed.v.fill(-2.5f); }, "",
        [](Bed &bed, const attune_kernel &k) { EXPECT_NEAR(bed.o.get(0, 0, 0, 0), -2.5f, 1e-5) << k.name; });
    expect_on_shapes([](Bed &bed) { bed.q.fill(0); });
    expect_on_shapes([](Bed &bed) { bed.v.fill(0); });
}

// Denormal values are values.
TEST_F(Contract_3_17, denormal_values) {
    expect_on_shapes([](Bed &bed) {
        bed.v.each(
            [&](int64_t b, int64_t h, int64_t j, int64_t d) { bed.v.set(b, h, j, d, 1e-40f * bed.v.get(b, h, j, d)); });
    });
    // All alike: the mean of one value is that value, not zero.
    expect_on_shapes([](Bed &bed) { bed.v.fill(1e-40f); }, "",
                     [](Bed &bed, const attune_kernel &k) {
                         const float v = bed.v.get(0, 0, 0, 0); // 1e-40 as the type has it
                         EXPECT_NEAR(bed.o.get(0, 0, 0, 0), v, 0.1 * v) << k.name;
                     });
    // Denormal queries and keys.
    expect_on_shapes([](Bed &bed) {
        for (Array *a : {&bed.q, &bed.k})
            a->each(
                [a](int64_t b, int64_t h, int64_t i, int64_t d) { a->set(b, h, i, d, 1e-41f * a->get(b, h, i, d)); });
    });
}

// Values near the largest: their weighted mean is a number, though their sum is not.
TEST_F(Contract_3_17, values_near_the_largest) {
    const bool f16 = type_under_test() == ATTUNE_F16;
    const float large = f16 ? 6e4f : 1e38f, larger = f16 ? 65504.0f : 3e38f;
    expect_on_shapes([large](Bed &bed) { bed.v.fill(large); }, "",
                     [](Bed &bed, const attune_kernel &k) {
                         EXPECT_NEAR(bed.o.get(0, 0, 0, 0) / bed.v.get(0, 0, 0, 0), 1.0, 1e-5) << k.name;
                     });
    expect_on_shapes([larger](Bed &bed) {
        bed.v.each(
            [&](int64_t b, int64_t h, int64_t j, int64_t d) { bed.v.set(b, h, j, d, j % 2 ? larger : -larger); });
    });
}

// Hundreds of key tiles, one after the other: what a merge gets wrong by one rounding must not add up.
TEST_F(Contract_3_17, long_rows) {
    expect_right("f32:b1:h1:n1:m30000:d16", {.fit = Fit::stated, .guards = {Guard::end}});
    // One visible key in the first tile, whose weight every later merge touches.
    expect_right("f32:b1:h1:n1:m6000:d40:mask=bool", {.edit =
                                                          [](Bed &bed) {
                                                              bed.mask.fill(0);
                                                              bed.mask.set(0, 0, 0, 3, 1);
                                                          },
                                                      .fit = Fit::features,
                                                      .guards = {Guard::end}});
}

// With d_k = 512 and unit-variance keys: unscaled, one key takes nearly all; scaled, none does.
TEST_F(Contract_3_17, why_the_scale) {
    for (bool scaled : {false, true}) {
        Case c = parse_case("f32:b1:h1:n1:m10:d512/16");
        if (!scaled) c.scale = 1.0f;
        for (const Group &group : groups(c, Fit::stated))
            for (const attune_kernel *k : group.kernels) {
                Bed bed(group.c, 4);
                // The values are the unit vectors, so that O shows the weights.
                bed.v.each(
                    [&](int64_t b, int64_t h, int64_t j, int64_t d) { bed.v.set(b, h, j, d, j == d ? 1.0f : 0.0f); });
                ASSERT_TRUE(run_and_check(*k, bed, bed.reference()));
                float largest = 0;
                for (int64_t d = 0; d < 10; d++) largest = std::max(largest, bed.o.get(0, 0, 0, d));
                if (scaled) {
                    EXPECT_LT(largest, 0.7f) << k->name;
                } else {
                    EXPECT_GT(largest, 0.99f) << k->name;
                }
            }
    }
}

} // namespace
} // namespace attune::contract
