// Contract 3.8 to 3.10: what cannot be seen has no influence, rows that see nothing, and NaN and infinities in what can
// be seen.
#include "bed.h"

#include <bit>
#include <cmath>
#include <fmt/format.h>
#include <limits>

namespace attune::contract {
namespace {

using namespace tools;

// All rows, since the spoilt one may be any.
constexpr int64_t kAllRows = 1'000'000'000;

using Contract_3_8 = ContractTest;
using Contract_3_9 = ContractTest;
using Contract_3_10 = ContractTest;

constexpr float kInf = std::numeric_limits<float>::infinity(), kMax = std::numeric_limits<float>::max();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
const float kSignalling = std::bit_cast<float>(0x7f800001u), kNegativeNaN = std::bit_cast<float>(0xffc00000u);

bool seen_by_any(const Bed &bed, int64_t b, int64_t kv_head, int64_t j) {
    const int64_t group = bed.p.Hq / bed.p.Hkv;
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++)
        for (int64_t i = 0; i < bed.p.N; i++)
            if (bed.position_sees(b, h, i, j)) return true;
    return false;
}

// Puts `bad` at all features of the keys that no row sees.
void poison_unseen(Bed &bed, Array &a, float bad) {
    for (int64_t b = 0; b < bed.p.B; b++)
        for (int64_t h = 0; h < bed.p.Hkv; h++)
            for (int64_t j = 0; j < bed.p.M; j++)
                if (!seen_by_any(bed, b, h, j))
                    for (int64_t d = 0; d < a.t.shape[3]; d++) a.set(b, h, j, d, bad);
}

void finite(Bed &bed, const attune_kernel &k) {
    bool all = true;
    bed.o.each([&](int64_t b, int64_t h, int64_t i, int64_t d) { all = all && std::isfinite(bed.o.get(b, h, i, d)); });
    EXPECT_TRUE(all) << k.name << " on " << bed.text() << ": O is not finite";
}

// Each way of hiding a key. The masked cases hide some keys from all rows (every third column is set to 0).
const char *const kHiding[] = {
    "f32:b3:h2:n5:m70:d64:kvlen=0,33,64",
    "f32:b2:h4/2:n30:m130:d40:kvlen=1,129",
    "f32:b1:h2:n30:m70:d64:causal",
    "f32:b1:h2:n30:m130:d40:causal:offset=7",
    "f32:b2:h2:n3:m70:d64:causal:offset=2,40",
    "f32:b1:h2:n30:m200:d64:window=3,2:offset=90",
    "f32:b1:h4/2:n5:m90:d40:window=0,0:offset=40",
    "f32:b2:h2:n5:m70:d64:mask=bool",
    "f32:b1:h2:n30:m70:d40:mask=bool:causal-br",
    "f32:b2:h2:n30:m70:d64:mask=bool:mask=bias:kvlen=50,17:window=40,-1:offset=20",
};

void hide_columns(Bed &bed) {
    if (!(bed.p.flags & ATTUNE_MASK)) return;
    bed.mask.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
        if (j % 3 == 1) bed.mask.set(b, h, i, j, 0);
    });
}

TEST_F(Contract_3_8, nan_and_inf_at_keys_that_no_row_sees) {
    for (const char *text : kHiding)
        for (float bad : {kNaN, kInf, -kInf, kSignalling, kNegativeNaN})
            for (int which : {1, 2, 3})
                expect_right(text, {.edit =
                                        [&](Bed &bed) {
                                            hide_columns(bed);
                                            if (which & 1) poison_unseen(bed, bed.k, bad);
                                            if (which & 2) poison_unseen(bed, bed.v, bad);
                                        },
                                    .after = finite,
                                    .guards = {which == 3 ? Guard::start : Guard::end}});
}

// A key that some rows see and others do not: those that see it get what its NaN gives, the others nothing.
TEST_F(Contract_3_8, nan_at_keys_that_some_rows_see) {
    for (const char *text : {"f32:b1:h2:n30:m70:d64:causal-br", "f32:b2:h2:n26:m26:d40:causal",
                             "f32:b1:h4/2:n30:m90:d64:window=4,3:offset=30", "f32:b1:h2:n5:m40:d40:mask=bool"})
        for (float bad : {kNaN, kInf, -kInf})
            for (bool in_keys : {false, true})
                expect_right(text, {.edit =
                                        [&](Bed &bed) {
                                            const int64_t j = bed.p.M / 2 + 3;
                                            Array &a = in_keys ? bed.k : bed.v;
                                            a.set(bed.p.B - 1, bed.p.Hkv - 1, j, 0, bad);
                                        },
                                    .after =
                                        [&](Bed &bed, const attune_kernel &k) {
                                            int64_t touched = 0;
                                            bed.o.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                                                touched += b == bed.p.B - 1 &&
                                                           !bed.position_sees(b, h, i, bed.p.M / 2 + 3) &&
                                                           !std::isfinite(bed.o.get(b, h, i, d));
                                            });
                                            EXPECT_EQ(touched, 0) << k.name << " on " << bed.text();
                                        },
                                    .budget = kAllRows,
                                    .guards = {Guard::end}});
}

// The mask comes after the bias: whatever a bias holds at a masked or invisible key, it is not seen.
TEST_F(Contract_3_8, nan_in_the_bias_at_invisible_keys) {
    for (const char *text :
         {"f32:b1:h2:n5:m70:d64:mask=bool:mask=bias", "f32:b1:h2:n30:m70:d40:causal-br:mask=bias",
          "f32:b2:h2:n5:m70:d64:kvlen=33,64:mask=bias", "f32:b1:h2:n30:m90:d64:window=4,3:offset=30:mask=bias"})
        for (float bad : {kNaN, kInf})
            expect_right(text, {.edit =
                                    [&](Bed &bed) {
                                        bed.bias.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                                            if (!bed.position_sees(b, h, i, j)) bed.bias.set(b, h, i, j, bad);
                                        });
                                    },
                                .after = finite});
}

// NaN in a query makes that row NaN; where the row sees no key, it has nothing to multiply with.
TEST_F(Contract_3_8, nan_in_a_query_that_sees_no_key) {
    expect_right("f32:b1:h2:n30:m20:d64:causal:offset=-9",
                 {.edit = [](Bed &bed) { bed.q.set(0, 1, 3, 0, kNaN); }, .after = finite});
}

constexpr float kLowest = -kMax;

// A finite bias, however low, is a number: on all visible keys of a row it changes nothing but the LSE.
TEST_F(Contract_3_8, lowest_bias_on_a_whole_row_is_a_number) {
    for (const char *text : {"f32:b1:h2:n5:m70:d64:mask=bias", "f32:b1:h2:n30:m40:d40:mask=bias",
                             "f32:b1:h4/2:n3:m50:d64:mask=bias:causal-br", "f32:b1:h2:n3:m50:d64:mask=bias:kvlen=17",
                             "f32:b1:h2:n5:m300:d64:mask=bias:mask=bool"})
        for (float low : {kLowest, -1e38f, -3e30f})
            expect_right(text,
                         {.edit =
                              [&](Bed &bed) {
                                  bed.bias.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                                      if (i % 2 == 0) bed.bias.set(b, h, i, j, low);
                                  });
                              },
                          .after =
                              [&](Bed &bed, const attune_kernel &k) {
                                  for (int64_t h = 0; h < bed.p.Hq; h++) {
                                      const int64_t kv = h / (bed.p.Hq / bed.p.Hkv);
                                      double mean = 0, keys = 0;
                                      for (int64_t j = 0; j < bed.p.M; j++)
                                          if (bed.position_sees(0, h, 0, j)) mean += bed.v.get(0, kv, j, 0), keys++;
                                      if (keys == 0) continue;
                                      EXPECT_NEAR(bed.o.get(0, h, 0, 0), mean / keys, 1e-5 + rounding_of(mean / keys))
                                          << k.name << " on " << bed.text() << ": not the mean, bias " << low;
                                      EXPECT_FLOAT_EQ(bed.lse.get(0, h, 0, 0), low) << k.name;
                                  }
                              }});
}

// Beside a bias of 0 a key with the lowest one weighs nothing; alone it weighs 1.
TEST_F(Contract_3_8, lowest_bias_beside_zero) {
    for (const char *text : {"f32:b1:h2:n5:m70:d64:mask=bias", "f32:b1:h2:n30:m230:d40:mask=bias"})
        expect_right(text, {.edit =
                                [](Bed &bed) {
                                    bed.bias.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                                        bed.bias.set(b, h, i, j, j % 7 == i % 7 ? 0.0f : kLowest);
                                    });
                                },
                            .after = finite});
    expect_right("f32:b1:h2:n5:m230:d64:mask=bias",
                 {.edit =
                      [](Bed &bed) {
                          bed.bias.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                              bed.bias.set(b, h, i, j, j == 200 - i && bed.p.M > 200 ? kLowest : -kInf);
                          });
                      },
                  .after =
                      [](Bed &bed, const attune_kernel &k) {
                          EXPECT_FLOAT_EQ(bed.o.get(0, 0, 0, 0), bed.v.get(0, 0, 200, 0)) << k.name;
                      }});
}

// The lowest bias on what is visible, while the rest is hidden by a mask: hidden stays hidden.
TEST_F(Contract_3_8, lowest_bias_where_the_rest_is_masked) {
    expect_right("f32:b1:h2:n27:m70:d64:mask=bias:mask=bool",
                 {.edit =
                      [](Bed &bed) {
                          bed.bias.fill(kLowest);
                          bed.mask.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                              bed.mask.set(b, h, i, j, (i + j) % 5 == 0 ? 1.0f : 0.0f);
                          });
                      },
                  .after = finite});
}

TEST_F(Contract_3_8, minus_infinity_in_a_bias_masks) {
    for (const char *text : {"f32:b1:h2:n5:m70:d64:mask=bias", "f32:b2:h2:n30:m130:d40:mask=bias:causal-br"})
        for (bool poisoned : {false, true})
            expect_right(text, {.edit =
                                    [&](Bed &bed) {
                                        bed.bias.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                                            if (j % 3 == 1 || i == 2) bed.bias.set(b, h, i, j, -kInf);
                                        });
                                        if (poisoned) poison_unseen(bed, bed.v, kNaN), poison_unseen(bed, bed.k, kInf);
                                    },
                                .after =
                                    [&](Bed &bed, const attune_kernel &k) {
                                        finite(bed, k);
                                        EXPECT_EQ(bed.o.get(0, 1, 2, 0), 0.0f) << k.name;
                                        EXPECT_EQ(bed.lse.get(0, 1, 2, 0), -kInf) << k.name;
                                    }});
}

// Rows that see no key: O = 0, LSE = -inf; with a sink, the sink.
TEST_F(Contract_3_9, rows_that_see_no_key) {
    const char *const kEmpty[] = {"f32:b1:h2:n30:m70:d64:causal:offset=-12",
                                  "f32:b3:h4/2:n5:m70:d40:kvlen=0,70,0",
                                  "f32:b1:h2:n30:m20:d64:window=2,2:offset=10",
                                  "f32:b2:h2:n3:m50:d40:causal:offset=-3,5",
                                  "f32:b1:h2:n30:m70:d64:mask=bool",
                                  "f32:b1:h2:n30:m70:d40:mask=bias",
                                  "f32:b2:h2:n5:m1100:d64:kvlen=0,1:mask=bool",
                                  "f32:b1:h2:n1:m1:d64:mask=bool"};
    for (const char *text : kEmpty)
        for (bool sink : {false, true}) {
            Case c = parse_case(text);
            c.sink = sink;
            int64_t empty = 0;
            const int done = expect_right(
                c, {.edit =
                        [](Bed &bed) {
                            // Every fourth row of the masked ones sees nothing.
                            if (bed.p.flags & ATTUNE_MASK)
                                bed.mask.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                                    if (i % 4 == 0) bed.mask.set(b, h, i, j, 0);
                                });
                            if (bed.p.flags & ATTUNE_BIAS)
                                bed.bias.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                                    if (i % 4 == 0) bed.bias.set(b, h, i, j, -kInf);
                                });
                        },
                    .after =
                        [&](Bed &bed, const attune_kernel &k) {
                            for (int64_t b = 0; b < bed.p.B; b++)
                                for (int64_t h = 0; h < bed.p.Hq; h++)
                                    for (int64_t i = 0; i < bed.p.N; i++) {
                                        bool any = false;
                                        for (int64_t j = 0; j < bed.p.M && !any; j++)
                                            any = bed.position_sees(b, h, i, j);
                                        if (any) continue;
                                        empty++;
                                        for (int64_t d = 0; d < bed.p.dv; d++)
                                            ASSERT_EQ(bed.o.get(b, h, i, d), 0.0f) << k.name << " on " << bed.text();
                                        const float lse = sink ? bed.sinks[size_t(h)] : -kInf;
                                        ASSERT_FLOAT_EQ(bed.lse.get(b, h, i, 0), lse) << k.name << " on " << bed.text();
                                    }
                        }});
            EXPECT_GT(done, 0);
            EXPECT_GT(empty, 0) << text << ": meant to have rows that see nothing";
        }
}

TEST_F(Contract_3_9, no_keys) {
    for (const char *text :
         {"f32:b2:h2:n5:m0:d64", "f32:b1:h4/2:n30:m0:d40:causal", "f32:b1:h1:n1:m0:d64:mask=bool:mask=bias:sink",
          "f32:b2:h2:n5:m0:d64:kvlen=0", "f32:b1:h2:n3:m0:d128:window=3,3"})
        expect_right(text, {.after = [](Bed &bed, const attune_kernel &k) {
                         bed.o.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                             ASSERT_EQ(bed.o.get(b, h, i, d), 0.0f) << k.name;
                         });
                     }});
}

// No batch, head, row or value feature: success, and nothing is written, not even the LSE of rows without features.
TEST_F(Contract_3_9, nothing_to_do) {
    for (const char *text :
         {"f32:b0:h2:n5:m7:d64", "f32:b2:h0:n5:m7:d64", "f32:b2:h2:n0:m7:d64", "f32:b2:h2:n5:m7:d64/0",
          "f32:b2:h2:n5:m7:d40/0:mask=bool:mask=bias", "f32:b0:h2:n0:m0:d64", "f32:b2:h2:n5:m0:d64/0"}) {
        const Case c = parse_case(text);
        Bed bed(c, 1);
        // The planner's own choice, and every kernel that does not refuse.
        std::vector<std::string> names = {""};
        for (const attune_kernel *k : kernels_under_test())
            if (!attune_kernel_refuses(k, &bed.p)) names.push_back(k->name);
        for (const std::string &name : names) {
            std::string why;
            const Plan plan = make_plan(bed.p, name, "", 2, why);
            ASSERT_TRUE(plan) << text << " by '" << name << "': " << why;
            bed.reset_outputs();
            const Workspace workspace(device_under_test(), attune_plan_workspace(plan.get()), Guard::end);
            const attune_tensors t = bed.tensors();
            EXPECT_EQ(attune_run(plan.get(), &t, workspace.data(), workspace.size()), ATTUNE_OK)
                << text << " by '" << name << "': " << attune_last_error();
            EXPECT_TRUE(bed.o.all_pattern() && bed.lse.all_pattern()) << text << " by '" << name << "': it wrote";
        }
    }
}

// Null pointers are fine for arrays without elements.
TEST_F(Contract_3_9, nothing_to_do_with_null_pointers) {
    for (const char *text : {"f32:b0:h2:n5:m7:d64", "f32:b2:h2:n0:m7:d64"}) {
        Bed bed(parse_case(text), 1);
        std::string why;
        const Plan plan = make_plan(bed.p, "", "", 1, why);
        ASSERT_TRUE(plan) << why;
        attune_tensors t = bed.tensors();
        t.q.data = t.o.data = nullptr;
        if (bed.p.B == 0) t.k.data = t.v.data = nullptr;
        attune_tensor lse = bed.lse.t;
        lse.data = nullptr;
        t.lse = &lse;
        EXPECT_EQ(attune_run(plan.get(), &t, nullptr, attune_plan_workspace(plan.get())), ATTUNE_OK)
            << text << ": " << attune_last_error();
    }
}

// NaN or +inf in a visible score makes its row NaN and no other.
TEST_F(Contract_3_10, nan_in_a_visible_score) {
    // Row 3 of head 1 of the last batch element is spoilt, through each operand.
    const std::pair<const char *, std::function<void(Bed &)>> kWays[] = {
        {"NaN in q", [](Bed &bed) { bed.q.set(bed.p.B - 1, 1, 3, 1, kNaN); }},
        {"+inf in q", [](Bed &bed) { bed.q.set(bed.p.B - 1, 1, 3, 1, kInf); }},
        {"-inf in q", [](Bed &bed) { bed.q.set(bed.p.B - 1, 1, 3, 0, -kInf); }},
        {"signalling NaN in q", [](Bed &bed) { bed.q.set(bed.p.B - 1, 1, 3, bed.p.dk - 1, kSignalling); }},
        {"a score that overflows",
         [](Bed &bed) {
             bed.q.set(bed.p.B - 1, 1, 3, 0, 3e38f);
             bed.k.set(bed.p.B - 1, 1 / (bed.p.Hq / bed.p.Hkv), 2, 0, 40.0f);
         }},
        {"NaN in the bias",
         [](Bed &bed) {
             if (bed.p.flags & ATTUNE_BIAS) bed.bias.set(bed.p.B - 1, 1, 3, 2, kNaN);
         }},
        {"+inf in the bias",
         [](Bed &bed) {
             if (bed.p.flags & ATTUNE_BIAS) bed.bias.set(bed.p.B - 1, 1, 3, 2, kInf);
         }},
        {"NaN in a key", [](Bed &bed) { bed.k.set(bed.p.B - 1, 0, 2, 0, kNaN); }},
        {"+inf in a key", [](Bed &bed) { bed.k.set(bed.p.B - 1, 0, 2, 0, kInf); }},
        {"-inf in a key", [](Bed &bed) { bed.k.set(bed.p.B - 1, 0, 2, bed.p.dk - 1, -kInf); }},
        {"-inf in all scores of a row",
         [](Bed &bed) { // inf * 0 among them is NaN
             bed.q.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                 if (i == 3 && h == 1) bed.q.set(b, h, i, d, d == 0 ? -kInf : 0.0f);
             });
             bed.k.each([&](int64_t b, int64_t h, int64_t j, int64_t d) {
                 if (d == 0) bed.k.set(b, h, j, d, 1.0f);
             });
         }},
    };
    const char *const kShapes[] = {"f32:b2:h2:n9:m70:d64",
                                   "f32:b2:h4/2:n5:m40:d64:mask=bias",
                                   "f32:b1:h2:n30:m230:d40:mask=bias",
                                   "f32:b1:h2:n30:m70:d40:causal-br",
                                   "f32:b1:h2:n4:m1100:d64",
                                   "f32:b1:h2:n30:m70:d64:sink"};
    for (const char *const &text : kShapes)
        for (const auto &[name, spoil] : kWays) {
            SCOPED_TRACE(name);
            expect_right(text, {.edit = spoil, .budget = kAllRows, .guards = {Guard::end}});
        }
}

// The same by hand, without the reference: exactly the spoilt row is NaN, all of it.
TEST_F(Contract_3_10, exactly_that_row_is_nan) {
    for (const char *text : {"f32:b2:h4/2:n6:m70:d64", "f32:b1:h2:n50:m300:d40:causal-br", "f32:b1:h2:n4:m2100:d64"})
        expect_right(text, {.edit = [](Bed &bed) { bed.q.set(0, 1, 3, 2, kNaN); },
                            .after =
                                [](Bed &bed, const attune_kernel &k) {
                                    int64_t wrong = 0;
                                    bed.o.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                                        wrong += std::isnan(bed.o.get(b, h, i, d)) != (b == 0 && h == 1 && i == 3);
                                    });
                                    EXPECT_EQ(wrong, 0) << k.name << " on " << bed.text();
                                    EXPECT_TRUE(std::isnan(bed.lse.get(0, 1, 3, 0))) << k.name;
                                },
                            .budget = kAllRows});
}

// A slope that makes every score of a head NaN (or +inf) makes the rows of that head NaN, and no others.
TEST_F(Contract_3_10, bad_alibi_slope) {
    for (const char *text : {"f32:b1:h4/2:n30:m100:d64:alibi", "f32:b1:h2:n3:m1100:d40:alibi"})
        for (float bad : {kNaN, -kInf})
            expect_right(text, {.edit = [&](Bed &bed) { bed.slopes[1] = bad; },
                                .after =
                                    [&](Bed &bed, const attune_kernel &k) {
                                        int64_t wrong = 0;
                                        bed.o.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                                            wrong += std::isnan(bed.o.get(b, h, i, d)) != (h == 1);
                                        });
                                        EXPECT_EQ(wrong, 0) << k.name << " on " << bed.text() << " with " << bad;
                                    },
                                .budget = kAllRows});
}

// NaN or an infinity in V touches its feature of the rows that see the key, and nothing else.
TEST_F(Contract_3_10, nan_in_v_touches_its_feature) {
    for (const char *text : {"f32:b2:h4/2:n6:m70:d64", "f32:b1:h2:n30:m230:d40", "f32:b1:h2:n2:m1100:d64"})
        for (float bad : {kNaN, kInf, -kInf})
            expect_right(text, {.edit = [&](Bed &bed) { bed.v.set(0, 0, 5, 7, bad); },
                                .after =
                                    [&](Bed &bed, const attune_kernel &k) {
                                        int64_t wrong = 0;
                                        const int64_t group = bed.p.Hq / bed.p.Hkv;
                                        bed.o.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                                            const float x = bed.o.get(b, h, i, d);
                                            const bool touched = b == 0 && h < group && d == 7;
                                            wrong += touched ? std::isnan(bad) ? !std::isnan(x) : x != bad
                                                             : !std::isfinite(x);
                                        });
                                        EXPECT_EQ(wrong, 0) << k.name << " on " << bed.text() << " with " << bad;
                                        EXPECT_TRUE(std::isfinite(bed.lse.get(0, 0, 0, 0))) << k.name;
                                    },
                                .budget = kAllRows,
                                .guards = {Guard::end}});
}

// Infinities of both signs in one feature of V give NaN there.
TEST_F(Contract_3_10, opposite_infinities_in_v) {
    expect_right("f32:b1:h2:n30:m230:d64", {.edit =
                                                [](Bed &bed) {
                                                    bed.v.set(0, 0, 5, 7, kInf);
                                                    bed.v.set(0, 0, bed.p.M - 2, 7, -kInf);
                                                },
                                            .budget = kAllRows});
}

} // namespace
} // namespace attune::contract
