// Public bug reports of other attention libraries, as tests over every kernel: masks, NaN, causality (rows A, B and C
// of the table in docs/contract.md, which says where each was reported). The shapes are those of the reports.
#include "bed.h"

#include <cmath>
#include <fmt/format.h>
#include <limits>

namespace attune::contract {
namespace {

using namespace tools;

using Reported = ContractTest;

constexpr float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();

// Sets the bool mask of all heads and batch elements from a function of row and key.
template <typename F> void set_mask(Bed &bed, F attend) {
    bed.mask.each([&](int64_t b, int64_t h, int64_t i, int64_t j) { bed.mask.set(b, h, i, j, attend(i, j) ? 1 : 0); });
}

// Rows for which `empty` holds: zero, and an LSE of -inf. Others: something else.
template <typename F> auto zero_rows(F empty) {
    return [empty](Bed &bed, const attune_kernel &k) {
        bed.lse.each([&](int64_t b, int64_t h, int64_t i, int64_t) {
            const bool zero = bed.lse.get(b, h, i, 0) == -kInf;
            EXPECT_EQ(zero, empty(b, h, i)) << k.name << " b " << b << " h " << h << " i " << i;
            for (int64_t d = 0; zero && d < bed.p.dv; d++) EXPECT_EQ(bed.o.get(b, h, i, d), 0) << k.name;
        });
    };
}

// With scale 0 every visible key counts alike: exp(LSE) is their number.
void expect_counts(const std::string &text, const std::function<int64_t(int64_t)> &count) {
    expect_right(text, {.after =
                            [&](Bed &bed, const attune_kernel &k) {
                                bed.lse.each([&](int64_t b, int64_t h, int64_t i, int64_t) {
                                    EXPECT_NEAR(std::exp(bed.lse.get(b, h, i, 0)), double(count(i)), 1e-4)
                                        << k.name << " row " << i;
                                });
                            },
                        .fit = Fit::features});
}

TEST_F(Reported, A1_rows_that_are_all_false) {
    expect_right("f32:b1:h1:n8:d8:mask=bool",
                 {.edit = [](Bed &bed) { set_mask(bed, [](int64_t i, int64_t) { return i < 4; }); },
                  .after = zero_rows([](int64_t, int64_t, int64_t i) { return i >= 4; }),
                  .fit = Fit::features});
}

TEST_F(Reported, A2_first_tile_wholly_masked) {
    expect_right("f32:b1:h1:n600:d2:mask=bias", {.edit =
                                                     [](Bed &bed) {
                                                         bed.bias.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                                                             const bool band = j <= i && j > i - 10;
                                                             bed.bias.set(b, h, i, j, band ? 0 : -kInf);
                                                         });
                                                     },
                                                 .guards = {Guard::end}});
    expect_right("f32:b1:h1:n3:m700:d2:mask=bool",
                 {.edit = [](Bed &bed) { set_mask(bed, [](int64_t, int64_t j) { return j >= 515 && j < 576; }); }});
}

TEST_F(Reported, A4_weights_asked_for_or_not) {
    const auto hide_head_2 = [](Bed &bed) {
        bed.mask.each([&](int64_t b, int64_t h, int64_t i, int64_t j) { bed.mask.set(b, h, i, j, h < 2 ? 1 : 0); });
    };
    int done = 0;
    for (const Group &group : groups(parse_case("f32:b1:h3:n5:d1:mask=bool"))) {
        Bed plain(group.c, 1), weights(group.c, 1);
        hide_head_2(plain);
        hide_head_2(weights);
        weights.ask_for_scores(ATTUNE_SCORES_PROBABILITIES);
        for (const attune_kernel *k : group.kernels) {
            if (attune_kernel_refuses(k, &weights.p) || !run(*k, plain) || !run(*k, weights)) continue;
            done++;
            plain.o.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                EXPECT_EQ(plain.o.get(b, h, i, d), weights.o.get(b, h, i, d)) << k->name;
            });
            for (int64_t i = 0; i < group.c.N; i++)
                for (int64_t j = 0; j < group.c.M; j++) EXPECT_EQ(weights.scores.get(0, 2, i, j), 0) << k->name;
        }
    }
    EXPECT_GT(done, 0);
}

TEST_F(Reported, A5_padding_and_band) {
    const auto empty = zero_rows([](int64_t, int64_t, int64_t i) { return i >= 8; });
    expect_right("f32:b1:h2:n16:d8:window=4,4:kvlen=4", {.after = empty, .fit = Fit::features});
    expect_right(
        "f32:b1:h2:n16:d8:mask=bool",
        {.edit = [](Bed &bed) { set_mask(bed, [](int64_t i, int64_t j) { return j < 4 && std::abs(i - j) <= 4; }); },
         .after = empty,
         .fit = Fit::features});
}

TEST_F(Reported, A6_masked_is_no_finite_number) {
    expect_right("f32:b1:h1:n1:m2:d8:mask=bool", {.edit = [](Bed &bed) { bed.mask.fill(0); },
                                                  .after = zero_rows([](int64_t, int64_t, int64_t) { return true; }),
                                                  .fit = Fit::features});
}

TEST_F(Reported, A7_and_A8_every_way_to_see_nothing) {
    const auto all = zero_rows([](int64_t, int64_t, int64_t) { return true; });
    for (const char *text : {"f32:b1:h2:n9:m40:d64:kvlen=0", "f32:b1:h2:n9:m40:d64:causal:offset=-9",
                             "f32:b1:h2:n9:m40:d64:window=3,3:offset=60", "f32:b1:h2:n9:m0:d64"})
        expect_right(text, {.after = all, .fit = Fit::features});
    expect_right("f32:b1:h2:n9:m40:d64:mask=bias",
                 {.edit = [](Bed &bed) { bed.bias.fill(-kInf); }, .after = all, .fit = Fit::features});
    expect_right("f32:b1:h2:n9:m40:d64:mask=bool:mask=bias:causal",
                 {.edit = [](Bed &bed) { bed.mask.fill(0); }, .after = all, .fit = Fit::features});
}

TEST_F(Reported, A9_logits_below_any_sentinel) {
    expect_right("f32:b1:h2:n5:m70:d64", {.edit =
                                              [](Bed &bed) {
                                                  const double size = std::sqrt(2.45e5 * std::sqrt(double(bed.p.dk)));
                                                  bed.q.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                                                      bed.q.set(b, h, i, d, d == 0 ? float(-size) : 0.0f);
                                                  });
                                                  bed.k.each([&](int64_t b, int64_t h, int64_t j, int64_t d) {
                                                      if (d == 0)
                                                          bed.k.set(b, h, j, d, float(size) + float(j % 7) * 0.01f);
                                                  });
                                              },
                                          .after = zero_rows([](int64_t, int64_t, int64_t) { return false; }),
                                          .fit = Fit::features});
}

TEST_F(Reported, A10_merging_two_empty_states) {
    float o[2] = {kNaN, kNaN}, lse[2] = {-kInf, -kInf};
    const auto tensor = [](float *data) {
        return attune_tensor{data, ATTUNE_F32, ATTUNE_CPU, {1, 1, 1, 1}, {1, 1, 1, 1}};
    };
    const attune_partial parts[] = {{tensor(o), tensor(lse)}, {tensor(o + 1), tensor(lse + 1)}};
    float merged = 7, merged_lse = 7;
    const attune_tensor to = tensor(&merged), to_lse = tensor(&merged_lse);
    ASSERT_EQ(attune_merge(parts, 2, nullptr, &to, &to_lse), ATTUNE_OK);
    EXPECT_EQ(merged, 0);
    EXPECT_EQ(merged_lse, -kInf);
}

TEST_F(Reported, B1_nan_in_a_masked_key) {
    expect_right("f32:b1:h1:n2:d4:mask=bool", {.edit =
                                                   [](Bed &bed) {
                                                       set_mask(bed, [](int64_t, int64_t j) { return j == 0; });
                                                       bed.k.set(0, 0, 1, 0, kNaN);
                                                       bed.v.set(0, 0, 1, 0, kNaN);
                                                   },
                                               .after = zero_rows([](int64_t, int64_t, int64_t) { return false; }),
                                               .fit = Fit::features});
}

TEST_F(Reported, B2_nan_beyond_the_length) {
    for (const char *text : {"f32:b2:h1:n1:m3:d64:kvlen=1,3", "f32:b4:h2:n1:m128:d64:kvlen=32,64,96,48"})
        expect_right(text, {.edit = [](Bed &bed) {
                         bed.q.fill(0.5f);
                         for (Array *x : {&bed.k, &bed.v})
                             x->each([&](int64_t b, int64_t h, int64_t j, int64_t d) {
                                 if (j >= bed.kv_len[size_t(b)]) x->set(b, h, j, d, kNaN);
                             });
                     }});
}

TEST_F(Reported, B3_nan_in_a_query) {
    expect_right("f32:b2:h4:n16:d8",
                 {.edit = [](Bed &bed) { bed.q.set(1, 2, 7, 3, kNaN); },
                  .after =
                      [](Bed &bed, const attune_kernel &k) {
                          bed.o.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                              EXPECT_EQ(std::isnan(bed.o.get(b, h, i, d)), b == 1 && h == 2 && i == 7) << k.name;
                          });
                      },
                  .fit = Fit::features});
}

TEST_F(Reported, B5_scale_not_given) {
    constexpr float kWanted[3][2] = {{1, 2}, {2.049f, 3.049f}, {3.207f, 4.207f}};
    for (const attune_kernel *k : kernels_under_test()) {
        Bed bed(parse_case("f32:b1:h1:n3:d2:causal"), 1);
        if (attune_kernel_refuses(k, &bed.p)) continue;
        bed.v.each([&](int64_t, int64_t, int64_t j, int64_t d) {
            const float x = float(1 + 2 * j + d);
            bed.v.set(0, 0, j, d, x);
            bed.q.set(0, 0, j, d, x / 10);
            bed.k.set(0, 0, j, d, x / 10);
        });
        if (!run(*k, bed)) continue;
        for (int64_t i = 0; i < 3; i++)
            for (int64_t d = 0; d < 2; d++) EXPECT_NEAR(bed.o.get(0, 0, i, d), kWanted[i][d], 1e-3) << k->name;
    }
}

TEST_F(Reported, B6_rows_of_length_0_are_written) {
    expect_right("f32:b2:h2:n3:m5:d64:kvlen=0,5",
                 {.after = zero_rows([](int64_t b, int64_t, int64_t) { return b == 0; }), .fit = Fit::features});
}

TEST_F(Reported, B7_logits_that_rise_from_tile_to_tile) {
    for (bool rising : {true, false})
        expect_right("f32:b1:h1:n5:m400:d64:scale=1", {.edit = [rising](Bed &bed) {
                         bed.q.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                             bed.q.set(b, h, i, d, d == 0 ? 1.0f : 0.0f);
                         });
                         bed.k.each([&](int64_t b, int64_t h, int64_t j, int64_t d) {
                             const int64_t tile = (rising ? j : bed.p.M - 1 - j) / 16;
                             if (d == 0) bed.k.set(b, h, j, d, float(20 * tile) + float(j % 5));
                         });
                     }});
}

TEST_F(Reported, C2_one_rule_for_one_query) {
    expect_counts("f32:b1:h2:n1:m6:d8:causal:scale=0", [](int64_t) { return 1; });
    expect_counts("f32:b1:h2:n1:m6:d8:causal-br:scale=0", [](int64_t) { return 6; });
}

TEST_F(Reported, C3_bottom_right_of_each_length) {
    expect_counts("f32:b1:h2:n2:m4:d8:causal:offset=2:kvlen=4:scale=0", [](int64_t i) { return i + 3; });
    expect_right(
        "f32:b2:h2:n4:m4:d8:causal:offset=0,-2:kvlen=4,2",
        {.after = zero_rows([](int64_t b, int64_t, int64_t i) { return b == 1 && i < 2; }), .fit = Fit::features});
}

TEST_F(Reported, C4_one_rule_for_all_shapes) {
    expect_counts("f32:b1:h1:n5:m3:d8:causal:scale=0", [](int64_t i) { return std::min<int64_t>(i + 1, 3); });
    expect_counts("f32:b1:h1:n3:m5:d8:causal:scale=0", [](int64_t i) { return i + 1; });
    expect_counts("f32:b1:h1:n3:m5:d8:causal-br:scale=0", [](int64_t i) { return i + 3; });
    expect_right("f32:b1:h1:n5:m3:d8:causal-br",
                 {.after = zero_rows([](int64_t, int64_t, int64_t i) { return i < 2; }), .fit = Fit::features});
}

TEST_F(Reported, C6_mask_and_causal_compose) {
    for (const char *text : {"f32:b1:h1:n4:d8:causal:mask=bias", "f32:b1:h1:n4:d8:causal:mask=bool",
                             "f32:b1:h1:n4:d8:causal:mask=bool:mask=bias"})
        expect_right(text);
}

TEST_F(Reported, C7_window_of_two_sees_three_keys) {
    expect_counts("f32:b1:h1:n6:d8:causal:window=2,-1:scale=0", [](int64_t i) { return std::min<int64_t>(i + 1, 3); });
    expect_counts("f32:b1:h1:n6:d8:window=2,0:scale=0", [](int64_t i) { return std::min<int64_t>(i + 1, 3); });
    expect_counts("f32:b1:h1:n6:d8:window=0,0:scale=0", [](int64_t) { return 1; });
}

TEST_F(Reported, C8_no_mask_is_full_attention) {
    expect_counts("f32:b1:h1:n4:d8:scale=0", [](int64_t) { return 4; });
}

TEST_F(Reported, C10_true_attends_and_other_shapes_are_refused) {
    expect_right("f32:b2:h1:n4:d8:mask=bool",
                 {.edit = [](Bed &bed) { set_mask(bed, [](int64_t i, int64_t j) { return j == (i + 1) % 4; }); },
                  .after =
                      [](Bed &bed, const attune_kernel &k) {
                          bed.o.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                              EXPECT_FLOAT_EQ(bed.o.get(b, h, i, d), bed.v.get(b, h, (i + 1) % 4, d)) << k.name;
                          });
                      },
                  .fit = Fit::features});
    Bed bed(parse_case("f32:b2:h3:n4:d8:mask=bool"), 1);
    std::string why;
    const Plan plan = make_plan(bed.p, "", "", 1, why);
    ASSERT_TRUE(plan) << why;
    const Buffer workspace(attune_plan_workspace(plan.get()), Guard::none);
    const auto refused = [&](const std::function<void(attune_tensor &)> &change, const char *word) {
        attune_tensor mask = bed.mask.t;
        change(mask);
        attune_tensors t = bed.tensors();
        t.mask = &mask;
        EXPECT_EQ(attune_run(plan.get(), &t, workspace.data(), workspace.size()), ATTUNE_INVALID_ARGUMENT);
        EXPECT_NE(std::string(attune_last_error()).find(word), std::string::npos) << attune_last_error();
    };
    refused([](attune_tensor &m) { m.shape[0] = 6, m.shape[1] = 1; }, "tensors.mask.shape is [6, 1, 4, 4]");
    refused([](attune_tensor &m) { m.dtype = ATTUNE_F32; }, "tensors.mask.dtype is f32");
}

TEST_F(Reported, C11_mask_past_key_512) {
    Places places;
    places.mask.broadcast = {false, true, true, false};
    for (const char *text : {"f32:b1:h12:n1:m513:d64:mask=bool", "f32:b1:h2:n1:m1100:d64:mask=bool"})
        expect_right(text, {.places = places, .edit = [](Bed &bed) {
                                bed.mask.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                                    bed.mask.set(b, h, i, j, j < 500 || j % 2 ? 1 : 0);
                                });
                            }});
}

} // namespace
} // namespace attune::contract
