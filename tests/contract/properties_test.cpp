// What must hold whatever the numbers are: relations between results, each of which is also checked against float64.
#include "bed.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <fmt/format.h>
#include <limits>
#include <numeric>

namespace attune::contract {
namespace {

using namespace tools;

using Contract_properties = ContractTest;

// max|O of a - O of b|, infinite where only one is finite.
double distance(const Array &a, const Array &b) {
    double most = 0;
    a.each([&](int64_t i, int64_t j, int64_t k, int64_t l) {
        const double x = a.get(i, j, k, l), y = b.get(i, j, k, l);
        const double d = x == y ? 0 : std::abs(x - y);
        most = std::isnan(d) ? std::numeric_limits<double>::infinity() : std::max(most, d);
    });
    return most;
}

// Both are right, and no further apart than two right results can be.
void expect_same(const attune_kernel &k, Bed &a, Bed &b, const std::string &what) {
    const Reference of_a = a.reference(), of_b = b.reference();
    if (!run_and_check(k, a, of_a) || !run_and_check(k, b, of_b)) return;
    EXPECT_LE(distance(a.o, b.o), of_a.o_bound + of_b.o_bound) << k.name << ": " << what << ", " << a.text();
    EXPECT_LE(distance(a.lse, b.lse), 2 * of_a.lse_bound(0) + 2 * of_b.lse_bound(0) + 1e-5) << k.name << ": " << what;
}

// The order of the keys (with their values, mask and bias) does not matter.
TEST_F(Contract_properties, key_permutation) {
    for (const char *text :
         {"f32:b1:h2:n5:m70:d64", "f32:b1:h4/2:n30:m500:d40:mask=bool:mask=bias", "f32:b1:h2:n1:m2100:d64"})
        for (const Group &group : groups(parse_case(text))) {
            Bed plain(group.c, 1), permuted(group.c, 1);
            std::vector<int64_t> to(size_t(plain.p.M));
            std::iota(to.begin(), to.end(), 0);
            Random random(7);
            for (int64_t j = plain.p.M - 1; j > 0; j--) std::swap(to[size_t(j)], to[size_t(random.between(0, j))]);
            for (const auto &[from_array, to_array] : {std::pair{&plain.k, &permuted.k}, {&plain.v, &permuted.v}})
                from_array->each([&, from = from_array, into = to_array](int64_t b, int64_t h, int64_t j, int64_t d) {
                    into->set(b, h, to[size_t(j)], d, from->get(b, h, j, d));
                });
            for (const auto &[from_array, to_array] :
                 {std::pair{&plain.mask, &permuted.mask}, {&plain.bias, &permuted.bias}})
                from_array->each([&, from = from_array, into = to_array](int64_t b, int64_t h, int64_t i, int64_t j) {
                    into->set(b, h, i, to[size_t(j)], from->get(b, h, i, j));
                });
            for (const attune_kernel *k : group.kernels) expect_same(*k, plain, permuted, "keys permuted");
        }
}

// The same number added to all scores of a row changes only its LSE, by that number.
TEST_F(Contract_properties, score_shift) {
    for (const char *text : {"f32:b1:h2:n5:m70:d64:mask=bias", "f32:b1:h4/2:n30:m300:d40:mask=bias:causal-br"})
        for (float shift : {1.0f, -30.0f, 1e4f})
            for (const Group &group : groups(parse_case(text))) {
                Bed plain(group.c, 1), shifted(group.c, 1);
                // Integers, so that adding the shift to the bias rounds nothing.
                plain.bias.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                    const float x = std::nearbyint(2 * plain.bias.get(b, h, i, j));
                    plain.bias.set(b, h, i, j, x);
                    shifted.bias.set(b, h, i, j, x + shift);
                });
                const Reference of_plain = plain.reference(), of_shifted = shifted.reference();
                for (const attune_kernel *k : group.kernels) {
                    if (!run_and_check(*k, plain, of_plain) || !run_and_check(*k, shifted, of_shifted)) continue;
                    EXPECT_LE(distance(plain.o, shifted.o), of_plain.o_bound + of_shifted.o_bound) << k->name;
                    double worst = 0;
                    plain.lse.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                        worst = std::max(worst, std::abs(double(shifted.lse.get(b, h, i, d)) - shift -
                                                         double(plain.lse.get(b, h, i, d))));
                    });
                    EXPECT_LE(worst, 1e-5 + 4 * 0x1p-23 * std::abs(shift)) << k->name << " shift " << shift;
                }
            }
}

// Grouped heads are heads whose K and V are copies: the same bits.
TEST_F(Contract_properties, grouped_heads_are_expanded_heads) {
    for (const char *text :
         {"f32:b1:h8/2:n30:m70:d64", "f32:b2:h6/2:n1:m300:d40", "f32:b1:h8/1:n5:m2100:d64",
          "f32:b1:h4/2:n50:m130:d64:causal-br", "f32:b2:h9/3:n7:m90:d40:causal:offset=40:mask=bool:mask=bias",
          "f32:b2:h4/2:n9:m70:d64:kvlen=70,11:window=20,-1:offset=30"})
        for (const Group &group : groups(parse_case(text))) {
            Case expanded_case = group.c;
            expanded_case.Hkv = expanded_case.Hq;
            Bed grouped(group.c, 1), expanded(expanded_case, 1);
            const int64_t size = group.c.Hq / group.c.Hkv;
            for (Array Bed::*a : {&Bed::k, &Bed::v})
                (expanded.*a).each([&](int64_t b, int64_t h, int64_t j, int64_t d) {
                    (expanded.*a).set(b, h, j, d, (grouped.*a).get(b, h / size, j, d));
                });
            for (const attune_kernel *k : group.kernels) {
                if (attune_kernel_refuses(k, &expanded.p) || !run(*k, grouped) || !run(*k, expanded)) continue;
                EXPECT_EQ(grouped.bits_differ(expanded), "") << k->name << " on " << grouped.text();
            }
        }
}

// All rows at once, or one after the other with the past growing.
TEST_F(Contract_properties, prefill_is_decode_step_by_step) {
    for (const char *text :
         {"f32:b1:h2:n30:d64:causal", "f32:b1:h4/2:n9:m200:d40:causal-br", "f32:b1:h2:n5:m1030:d64:causal-br"})
        for (const Group &group : groups(parse_case(text))) {
            Bed all(group.c, 1);
            const Reference of_all = all.reference();
            for (const attune_kernel *k : group.kernels) {
                Case step = group.c;
                step.N = 1;
                step.causal = Causal::top_left;
                const attune_problem p = to_problem(step);
                if (attune_kernel_refuses(k, &p) || !run_and_check(*k, all, of_all)) continue;
                for (int64_t i = 0; i < group.c.N; i++) {
                    step.offset = i + offset_of(group.c, 0);
                    Bed one(step, 1);
                    one.q.each([&](int64_t b, int64_t h, int64_t, int64_t d) {
                        one.q.set(b, h, 0, d, all.q.get(b, h, i, d));
                    });
                    one.k.each([&](int64_t b, int64_t h, int64_t j, int64_t d) {
                        one.k.set(b, h, j, d, all.k.get(b, h, j, d));
                        if (d < one.p.dv) one.v.set(b, h, j, d, all.v.get(b, h, j, d));
                    });
                    const Reference of_one = one.reference();
                    if (!run_and_check(*k, one, of_one)) continue;
                    double most = 0;
                    one.o.each([&](int64_t b, int64_t h, int64_t, int64_t d) {
                        most = std::max(most, std::abs(double(one.o.get(b, h, 0, d)) - double(all.o.get(b, h, i, d))));
                    });
                    EXPECT_LE(most, of_all.o_bound + of_one.o_bound) << k->name << " row " << i << " of " << all.text();
                }
            }
        }
}

// A causal offset, a window and lengths hide what a mask that says the same hides.
TEST_F(Contract_properties, structure_is_an_explicit_mask) {
    for (const char *text :
         {"f32:b1:h2:n30:m70:d64:causal", "f32:b2:h2:n30:m70:d40:causal:offset=-5,33",
          "f32:b1:h4/2:n9:m300:d64:window=40,3:offset=200", "f32:b3:h2:n5:m70:d64:kvlen=0,70,31",
          "f32:b2:h2:n27:m90:d64:kvlen=90,31:causal-br:window=30,-1", "f32:b1:h2:n2:m1100:d40:causal:offset=1030"})
        for (const Group &group : groups(parse_case(text))) {
            Case masked_case = parse_case(fmt::format("f32:b{}:h{}/{}:n{}:m{}:d{}/{}:mask=bool", group.c.B, group.c.Hq,
                                                      group.c.Hkv, group.c.N, group.c.M, group.c.dk, group.c.dv));
            Bed structured(group.c, 1), masked(masked_case, 1);
            masked.mask.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                masked.mask.set(b, h, i, j, structured.position_sees(b, h, i, j) ? 1.0f : 0.0f);
            });
            for (const attune_kernel *k : group.kernels)
                if (!attune_kernel_refuses(k, &masked.p)) expect_same(*k, structured, masked, "explicit mask");
        }
}

// A bias of -inf hides what a bool mask hides.
TEST_F(Contract_properties, infinite_bias_is_a_mask) {
    for (const char *text : {"f32:b1:h2:n30:m70:d64:mask=bool", "f32:b1:h2:n3:m1100:d40:mask=bool"})
        for (const Group &group : groups(parse_case(text))) {
            Case biased_case = group.c;
            biased_case.mask = false;
            biased_case.bias = true;
            Bed masked(group.c, 1), biased(biased_case, 1);
            biased.bias.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                biased.bias.set(b, h, i, j,
                                masked.mask.get(b, h, i, j) != 0 ? 0.0f : -std::numeric_limits<float>::infinity());
            });
            for (const attune_kernel *k : group.kernels)
                if (!attune_kernel_refuses(k, &biased.p)) expect_same(*k, masked, biased, "bias of -inf");
        }
}

// Every output lies between the least and the largest of the values that its row sees.
TEST_F(Contract_properties, output_lies_in_the_hull_of_visible_values) {
    for (const char *text :
         {"f32:b2:h4/2:n30:m70:d64:causal-br", "f32:b1:h2:n5:m600:d40:mask=bool:mask=bias",
          "f32:b1:h2:n2:m1100:d64:window=9,9:offset=800", "f32:b2:h2:n9:m70:d64:kvlen=70,1:softcap=3"})
        for (uint64_t seed : {1, 2, 3})
            expect_right(text, {.after =
                                    [](Bed &bed, const attune_kernel &k) {
                                        const int64_t group = bed.p.Hq / bed.p.Hkv;
                                        int64_t outside = 0;
                                        for (int64_t b = 0; b < bed.p.B; b++)
                                            for (int64_t h = 0; h < bed.p.Hq; h++)
                                                for (int64_t i = 0; i < std::min<int64_t>(bed.p.N, 30); i++)
                                                    for (int64_t d = 0; d < bed.p.dv; d += 13) {
                                                        float least = std::numeric_limits<float>::infinity(),
                                                              most = -least;
                                                        for (int64_t j = 0; j < bed.p.M; j++)
                                                            if (bed.position_sees(b, h, i, j)) {
                                                                const float v = bed.v.get(b, h / group, j, d);
                                                                least = std::min(least, v);
                                                                most = std::max(most, v);
                                                            }
                                                        if (least > most) least = most = 0;
                                                        const float x = bed.o.get(b, h, i, d), slack = 1e-5f;
                                                        outside += !(x >= least - slack && x <= most + slack);
                                                    }
                                        EXPECT_EQ(outside, 0) << k.name << " on " << bed.text();
                                    },
                                .guards = {Guard::end},
                                .seed = seed});
}

// Doubling the queries and halving the scale changes nothing, in no bit: both are exact.
TEST_F(Contract_properties, powers_of_two_move_between_query_and_scale) {
    for (const char *text : {"f32:b1:h2:n30:m70:d64:scale=0.125", "f32:b1:h2:n2:m1100:d40:scale=0.25:causal-br"})
        for (const Group &group : groups(parse_case(text))) {
            Bed plain(group.c, 1), moved(group.c, 1);
            moved.p.scale = plain.p.scale / 2;
            moved.q.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                moved.q.set(b, h, i, d, 2 * plain.q.get(b, h, i, d));
            });
            for (const attune_kernel *k : group.kernels)
                if (run(*k, plain) && run(*k, moved)) {
                    EXPECT_EQ(moved.bits_differ(plain), "") << k->name << " on " << plain.text();
                }
        }
}

// The result is linear in the values: twice the values, twice the output, in every bit.
TEST_F(Contract_properties, twice_the_values) {
    for (const char *text : {"f32:b1:h2:n30:m70:d64:causal-br", "f32:b1:h2:n2:m1100:d40"})
        for (const Group &group : groups(parse_case(text))) {
            Bed plain(group.c, 1), twice(group.c, 1);
            plain.v.each([&](int64_t b, int64_t h, int64_t j, int64_t d) { // so that no output is a denormal of f16
                plain.v.set(b, h, j, d, 1024 * plain.v.get(b, h, j, d));
            });
            twice.v.each([&](int64_t b, int64_t h, int64_t j, int64_t d) {
                twice.v.set(b, h, j, d, 2 * plain.v.get(b, h, j, d));
            });
            for (const attune_kernel *k : group.kernels) {
                if (!run(*k, plain) || !run(*k, twice)) continue;
                plain.o.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                    plain.o.set(b, h, i, d, 2 * plain.o.get(b, h, i, d));
                });
                EXPECT_EQ(twice.bits_differ(plain), "") << k->name << " on " << plain.text();
            }
        }
}

} // namespace
} // namespace attune::contract
