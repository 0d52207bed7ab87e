// Contract 3.1 to 3.3: shapes and the two conventions, strides, features and grouped heads.
#include "bed.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <fmt/format.h>

namespace attune::contract {
namespace {

using namespace tools;

using Contract_3_1 = ContractTest;
using Contract_3_2 = ContractTest;
using Contract_3_3 = ContractTest;

TEST_F(Contract_3_1, shapes_and_conventions) {
    for (const char *shape : {"b1:h1:n1:m1:d64", "b1:h1:n7:m1:d40", "b1:h1:n1:m9:d40", "b2:h3:n5:m7:d64",
                              "b3:h2:n40:m30:d40", "b2:h4/2:n26:m200:d57/64", "b1:h2:n100:m100:d128"})
        for (Layout layout : {Layout::bhsd, Layout::bshd, Layout::col})
            for (uint64_t seed : {1, 2}) {
                Case c = parse_case(std::string("f32:") + shape);
                c.layout = layout;
                expect_case(c, Fit::sizes_twice, seed);
            }
}

// q = (1, 0), keys (1,0), (0,1), (1,1), values 10, 20, 40. Computed by hand: weights (0.401, 0.198, 0.401), output
// 24.0; with logits of 8 instead, (0.49992, 0.00017, 0.49992). Kernels for wider heads get zeros beyond two features.
TEST_F(Contract_3_1, three_keys_by_hand) {
    constexpr float kKeys[3][2] = {{1, 0}, {0, 1}, {1, 1}}, kValues[3] = {10, 20, 40};
    for (bool sharp : {false, true}) {
        Case c = parse_case("f32:b1:h1:n1:m3:d2/1:kvlen=3");
        c.scale = sharp ? 8.0f : 1 / std::sqrt(2.0f);
        const double expected = sharp ? 0.49992 * 10 + 0.00017 * 20 + 0.49992 * 40 : 24.0, close = sharp ? 2e-3 : 0.02;
        expect_right(c,
                     {.edit =
                          [&](Bed &bed) {
                              for (Array *a : {&bed.q, &bed.k, &bed.v})
                                  a->each([a](int64_t b, int64_t h, int64_t i, int64_t d) { a->set(b, h, i, d, 0); });
                              bed.q.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                                  if (d == 0) bed.q.set(b, h, i, d, 1);
                              });
                              bed.k.each([&](int64_t b, int64_t h, int64_t j, int64_t d) {
                                  if (j < 3 && d < 2) bed.k.set(b, h, j, d, kKeys[j][d]);
                              });
                              bed.v.each([&](int64_t b, int64_t h, int64_t j, int64_t d) {
                                  if (j < 3 && d == 0) bed.v.set(b, h, j, d, kValues[j]);
                              });
                          },
                      .after =
                          [&](Bed &bed, const attune_kernel &k) {
                              EXPECT_NEAR(bed.o.get(0, 0, 0, 0), expected, close + rounding_of(expected)) << k.name;
                              const double e = std::exp(sharp ? 8.0 : std::sqrt(0.5));
                              EXPECT_NEAR(bed.lse.get(0, 0, 0, 0), std::log(2 * e + 1), 1e-6 * 10) << k.name;
                          }});
    }
}

// The column convention (Q in d x n, O = V softmax(K^T Q / sqrt d)) is the row convention with other strides: arrays
// filled as columns and handed over with the feature stride of a column matrix.
TEST_F(Contract_3_1, columns_are_rows_with_other_strides) {
    for (const char *text : {"f32:b1:h1:n30:m50:d64", "f32:b2:h4/2:n25:m33:d40/57:causal"}) {
        for (const Group &group : groups(parse_case(text))) {
            Bed rows(group.c, 3), columns(group.c, 3, all_in(Layout::col));
            columns.p.flags |= ATTUNE_STRIDED_V;
            ASSERT_EQ(columns.q.t.stride[2], 1);
            const Reference reference = rows.reference();
            for (const attune_kernel *k : group.kernels) {
                run_and_check(*k, rows, reference);
                const uint64_t before = attune_strict_tiles();
                run_and_check(*k, columns, reference);
                // Kernels that pack K in panels pack a V by columns as well: it is no slow case.
                if (knob(*k, "panel", 0) > 0) {
                    EXPECT_EQ(attune_strict_tiles(), before) << k->name << " on " << columns.text();
                }
            }
        }
    }
}

struct NamedPlaces {
    const char *name;
    std::function<void(Places &)> change;
};

// Every way of lying in memory that the contract names. Outputs too, less the ones that only inputs may have.
const NamedPlaces kPlaces[] = {
    {"bshd", [](Places &p) { p = all_in(Layout::bshd); }},
    {"columns", [](Places &p) { p = all_in(Layout::col); }},
    {"columns, Q and K only", [](Places &p) { p.q = p.k = spec_of(Layout::col); }},
    {"columns, V only", [](Places &p) { p.v = spec_of(Layout::col); }},
    {"columns, O only", [](Places &p) { p.o = spec_of(Layout::col); }},
    {"sequence outermost",
     [](Places &p) {
         p.q.order = p.k.order = p.v.order = p.o.order = {2, 0, 1, 3};
     }},
    {"batch innermost",
     [](Places &p) {
         p.q.order = p.k.order = p.v.order = p.o.order = {1, 2, 3, 0};
     }},
    {"padded rows", [](Places &p) { p.q.pad[3] = 1, p.k.pad[3] = 3, p.v.pad[3] = 5, p.o.pad[3] = 7; }},
    {"rows of a packed QKV projection",
     [](Places &p) {
         p = all_in(Layout::bshd);
         p.q.pad[1] = p.k.pad[1] = p.v.pad[1] = 2 * 3 * 40;
     }},
    {"every second row of K", [](Places &p) { p.k.step[2] = 2; }},
    {"every third row of V", [](Places &p) { p.v.step[2] = 3; }},
    {"every second row of all", [](Places &p) { p.q.step[2] = p.k.step[2] = p.v.step[2] = p.o.step[2] = 2; }},
    {"strides of K are not those of V",
     [](Places &p) {
         p.k.pad = {9, 5, 3, 2}, p.v.order = {2, 1, 0, 3};
     }},
    {"every second feature of Q", [](Places &p) { p.q.step[3] = 2; }},
    {"every second feature of K", [](Places &p) { p.k.step[3] = 2; }},
    {"every second feature of V", [](Places &p) { p.v.step[3] = 2; }},
    {"every second feature of O", [](Places &p) { p.o.step[3] = 2; }},
    {"one K and V for all batches", [](Places &p) { p.k.broadcast[0] = p.v.broadcast[0] = true; }},
    {"one K and V for all heads", [](Places &p) { p.k.broadcast[1] = p.v.broadcast[1] = true; }},
    {"one row of K for all keys", [](Places &p) { p.k.broadcast[2] = true; }},
    {"one row of V for all keys", [](Places &p) { p.v.broadcast[2] = true; }},
    {"one number for all features of K", [](Places &p) { p.k.broadcast[3] = true; }},
    {"one number for all features of V", [](Places &p) { p.v.broadcast[3] = true; }},
    {"one row of Q for all queries", [](Places &p) { p.q.broadcast[2] = true; }},
    {"Q all broadcast",
     [](Places &p) {
         p.q.broadcast = {true, true, true, true};
     }},
    {"mask over keys only",
     [](Places &p) {
         p.mask.broadcast = {false, true, true, false};
     }},
    {"mask over rows only",
     [](Places &p) {
         p.mask.broadcast = {true, true, false, true};
     }},
    {"mask for all batches and heads",
     [](Places &p) {
         p.mask.broadcast = {true, true, false, false};
     }},
    {"bias over keys only",
     [](Places &p) {
         p.bias.broadcast = {false, true, true, false};
     }},
    {"bias per head",
     [](Places &p) {
         p.bias.broadcast = {true, false, true, true};
     }},
    {"bias for all batches",
     [](Places &p) {
         p.bias.broadcast = {true, false, false, false};
     }},
    {"one bias for all",
     [](Places &p) {
         p.bias.broadcast = {true, true, true, true};
     }},
    {"mask and bias transposed",
     [](Places &p) {
         p.mask.order = p.bias.order = {0, 1, 3, 2};
     }},
    {"mask and bias with heads inside",
     [](Places &p) {
         p.mask.order = p.bias.order = {0, 2, 3, 1};
     }},
    {"mask and bias padded", [](Places &p) { p.mask.pad[3] = 3, p.bias.pad[3] = 1, p.bias.pad[2] = 7; }},
    {"every second key of mask and bias", [](Places &p) { p.mask.step[3] = p.bias.step[3] = 2; }},
    {"rows of Q backwards", [](Places &p) { p.q.reverse[2] = true; }},
    {"rows of K backwards", [](Places &p) { p.k.reverse[2] = true; }},
    {"rows of V backwards", [](Places &p) { p.v.reverse[2] = true; }},
    {"features backwards", [](Places &p) { p.q.reverse[3] = p.k.reverse[3] = p.v.reverse[3] = p.o.reverse[3] = true; }},
    {"heads and batches backwards",
     [](Places &p) {
         for (Spec *s : {&p.q, &p.k, &p.v, &p.o, &p.lse, &p.mask, &p.bias}) s->reverse[0] = s->reverse[1] = true;
     }},
    {"rows of O and LSE backwards", [](Places &p) { p.o.reverse[2] = p.lse.reverse[2] = true; }},
    {"rows of mask and bias backwards", [](Places &p) { p.mask.reverse[2] = p.bias.reverse[2] = true; }},
    {"keys of mask and bias backwards", [](Places &p) { p.mask.reverse[3] = p.bias.reverse[3] = true; }},
    {"bases off by one element",
     [](Places &p) {
         for (Spec *s : {&p.q, &p.k, &p.v, &p.o, &p.lse, &p.mask, &p.bias}) s->lead = 1;
     }},
    {"bases off by three elements",
     [](Places &p) {
         for (Spec *s : {&p.q, &p.k, &p.v, &p.o, &p.lse, &p.mask, &p.bias}) s->lead = 3;
     }},
    {"LSE transposed and padded",
     [](Places &p) {
         p.lse.order = {2, 1, 0, 3}, p.lse.pad[3] = 2;
     }},
};

// The contract's fast path: unit strides of features (and of a mask's keys), rows that go forward and whose offsets fit
// 32 bits. There the bits are those of the contiguous copy; elsewhere another code may serve, within the bound.
bool on_fast_path(const Bed &bed, const attune_kernel &kernel) {
    const auto unit = [](const attune_tensor &t) { return t.stride[3] == 1 || t.shape[3] <= 1; };
    const auto near = [](const attune_tensor &t, int dim) {
        return t.shape[dim] <= 1 || std::abs(t.stride[dim]) < (int64_t(1) << 28) / t.shape[dim];
    };
    const auto forward = [&](const attune_tensor &t) {
        return (t.stride[2] >= 0 || t.shape[2] <= 1) && near(t, 1) && near(t, 2);
    };
    bool fast = unit(bed.q.t) && unit(bed.k.t) && unit(bed.v.t) && forward(bed.k.t) && forward(bed.v.t);
    if (kernel.traits & ATTUNE_TRAIT_OWN_THREADS) fast = fast && forward(bed.q.t);
    for (const auto &[flag, t] : {std::pair{ATTUNE_MASK, &bed.mask.t}, {ATTUNE_BIAS, &bed.bias.t}})
        if (bed.p.flags & flag) fast = fast && unit(*t) && near(*t, 1) && near(*t, 2);
    return fast;
}

// What the case gives at `places` and as a contiguous copy of the same numbers.
void compare_with_contiguous(const Case &c, const std::string &name, const Places &places, Fit fit = Fit::features,
                             const std::vector<Guard> &guards = {Guard::end, Guard::start}) {
    SCOPED_TRACE(name);
    bool fused = false;
    for (const Group &group : groups(c, fit)) {
        for (Guard guard : guards) {
            Bed strided(group.c, 5, places, guard), contiguous(group.c, 5, {}, guard);
            contiguous.copy_inputs(strided);
            const bool gives_flag = strided.v.t.stride[3] != 1;
            for (bool flag : {false, true}) {
                if (flag && !gives_flag) continue;
                if (flag) strided.p.flags |= ATTUNE_STRIDED_V, contiguous.p.flags |= ATTUNE_STRIDED_V;
                const Reference reference = contiguous.reference();
                for (const attune_kernel *k : group.kernels) {
                    fused = fused || is_fused(*k);
                    const uint64_t strict_before = attune_strict_tiles();
                    const bool ok = run_and_check(*k, strided, reference, {.guard = guard});
                    const uint64_t strict = attune_strict_tiles() - strict_before;
                    if (ok && on_fast_path(strided, *k) && run(*k, contiguous, {.guard = guard})) {
                        EXPECT_EQ(strict, 0u)
                            << k->name << " took the strict code on its fast path, " << strided.text();
                        EXPECT_EQ(strided.bits_differ(contiguous), "")
                            << k->name << " against the contiguous copy, " << strided.text();
                    }
                }
            }
        }
    }
    EXPECT_TRUE(fused) << to_string(c) << ": no fused kernel took it";
}

TEST_F(Contract_3_2, strides) {
    for (const auto &[name, change] : kPlaces) {
        Places places;
        change(places);
        compare_with_contiguous(parse_case("f32:b2:h4/2:n29:m53:d40:causal-br"), name, places, Fit::features,
                                {Guard::end});
        compare_with_contiguous(parse_case("f32:b2:h2:n3:m35:d64:mask=bool:mask=bias"), name, places, Fit::features,
                                {Guard::start});
    }
}

TEST_F(Contract_3_2, slow_strides_at_all_features) {
    for (const auto &[name, change] : kPlaces) {
        Places places;
        change(places);
        for (const char *text : {"f32:b1:h6/3:n1:m1100:d40/57", "f32:b2:h2:n50:m230:d32/64:window=70,3:mask=bias",
                                 "f32:b2:h6/2:n7:m90:d128:kvlen=90,31:mask=bool:causal:offset=60"})
            compare_with_contiguous(parse_case(text), name, places);
    }
}

// The kernels that take long problems only.
TEST_F(Contract_3_2, slow_strides_at_all_sizes) {
    for (const auto &[name, change] : kPlaces) {
        Places places;
        change(places);
        compare_with_contiguous(parse_case("f32:b1:h2:n3:m35:d64:causal:offset=9"), name, places, Fit::sizes);
    }
}

// A stride of a dimension of extent 1 is never used.
TEST_F(Contract_3_2, strides_of_lone_dimensions) {
    for (int64_t lone : {int64_t(-7), int64_t(1), int64_t(13), int64_t(0x123456789abc), INT64_MIN, INT64_MAX}) {
        Places places;
        for (Spec *s : {&places.q, &places.k, &places.v, &places.o, &places.lse, &places.mask, &places.bias})
            s->lone = {lone, lone, lone, lone};
        for (const char *text : {"f32:b1:h1:n1:m1:d1", "f32:b1:h1:n30:m40:d64", "f32:b1:h2:n1:m50:d40",
                                 "f32:b2:h1:n5:m1:d64:mask=bool:mask=bias", "f32:b1:h1:n1:m30:d64/1:mask=bias",
                                 "f32:b2:h2/1:n26:m30:d1/40:mask=bool"})
            compare_with_contiguous(parse_case(text), fmt::format("lone strides {}", lone), places, Fit::stated);
    }
}

// Strides whose byte offsets pass 2^31 and 2^32, in memory that is mapped but mostly never touched.
void strides_beyond_32_bits(const std::string &text, const std::vector<int64_t> &strides, Fit fit) {
    const Case plain = parse_case(text), masked = parse_case(text + ":mask=bool:mask=bias");
    for (int64_t stride : strides)
        for (size_t dim : {size_t(0), size_t(1), size_t(2)})
            for (Spec Places::*which :
                 {&Places::q, &Places::k, &Places::v, &Places::o, &Places::lse, &Places::mask, &Places::bias}) {
                Places places;
                Spec &spec = places.*which;
                spec.at_least[dim] = stride;
                // The far dimension goes outermost, so that one stride alone is large.
                std::stable_sort(spec.order.begin(), spec.order.end(),
                                 [dim](int a, int b) { return a == int(dim) && b != int(dim); });
                const bool is_mask = which == &Places::mask || which == &Places::bias;
                compare_with_contiguous(is_mask ? masked : plain, fmt::format("stride {} in dimension {}", stride, dim),
                                        places, fit);
            }
}

TEST_F(Contract_3_2, strides_beyond_32_bits) {
    try {
        strides_beyond_32_bits("f32:b2:h4/2:n3:m4:d40",
                               {(int64_t(1) << 29) + 24, (int64_t(1) << 30) + 8, (int64_t(1) << 32) + 16}, Fit::stated);
    } catch (const std::bad_alloc &) {
        GTEST_SKIP() << "the system gives no address space of gigabytes";
    }
}

TEST_F(Contract_3_2, slow_strides_beyond_32_bits_at_all_sizes) {
    try {
        strides_beyond_32_bits("f32:b1:h2:n3:m4:d64", {(int64_t(1) << 29) + 24, (int64_t(1) << 31) + 8}, Fit::sizes);
        strides_beyond_32_bits("f32:b1:h2:n3:m4:d40", {(int64_t(1) << 24) + 16}, Fit::sizes);
    } catch (const std::bad_alloc &) {
        GTEST_SKIP() << "the system gives no address space of gigabytes";
    }
}

// Steps between features and between a mask's keys that do not fit 32 bits.
TEST_F(Contract_3_2, slow_feature_strides_beyond_32_bits) {
    for (Spec Places::*which : {&Places::q, &Places::k, &Places::v, &Places::o, &Places::mask, &Places::bias}) {
        Places places;
        (places.*which).at_least[3] = (int64_t(1) << 31) + 8;
        (places.*which).order = {3, 0, 1, 2};
        try {
            compare_with_contiguous(parse_case("f32:b1:h2:n2:m3:d8:mask=bool:mask=bias"), "features far apart", places,
                                    Fit::stated);
        } catch (const std::bad_alloc &) {
            GTEST_SKIP() << "the system gives no address space of that size";
        }
    }
}

constexpr int64_t kFeatures[] = {1, 3, 8, 13, 16, 24, 32, 40, 46, 64, 72, 80, 96, 128, 192, 256, 300};

TEST_F(Contract_3_3, features) {
    uint64_t seed = 0;
    for (int64_t dk : kFeatures)
        for (int64_t dv : kFeatures) {
            Case c = parse_case("f32:b1:h2:n5:m19:d1");
            c.dk = dk;
            c.dv = dv;
            if (dk != dv) c.causal = Causal::bottom_right;
            expect_case(c, Fit::stated, ++seed);
        }
}

// Each specialised size and both sides of its limits.
TEST_F(Contract_3_3, features_at_the_kernels_limits) {
    constexpr int64_t kMost = 4096; // "any"
    for (const attune_kernel *k : kernels_under_test()) {
        const Case least = adapt(parse_case("f32:b1:h2:n30:m70:d40"), *k);
        for (int64_t dk : {k->dk_min, (k->dk_min + k->dk_max) / 2, k->dk_max})
            for (int64_t dv : {k->dv_min, k->dv_max}) {
                if (dk < 1 || dv < 1 || dk > kMost || dv > kMost) continue;
                Case c = least;
                c.dk = dk;
                c.dv = dv;
                const attune_problem p = to_problem(c);
                ASSERT_EQ(attune_kernel_refuses(k, &p), nullptr) << k->name << " on " << to_string(c);
                Bed bed(c, 1);
                run_and_check(*k, bed, bed.reference());
            }
    }
}

TEST_F(Contract_3_3, grouped_heads) {
    constexpr std::pair<int64_t, int64_t> kHeads[] = {{1, 1}, {8, 8}, {8, 2}, {5, 1}, {28, 4}, {40, 8}, {9, 3}};
    uint64_t seed = 0;
    for (const auto &[hq, hkv] : kHeads)
        for (const char *text : {"f32:b2:n1:m37:d64", "f32:b1:n7:m70:d40:causal-br", "f32:b1:n30:m25:d64"}) {
            Case c = parse_case(text);
            c.Hq = hq;
            c.Hkv = hkv;
            expect_case(c, Fit::sizes_twice, ++seed);
        }
}

} // namespace
} // namespace attune::contract
