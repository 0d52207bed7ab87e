// Public bug reports of other attention libraries, as tests over every kernel: shapes, strides, overflow, accuracy, LSE
// and sinks (rows D to J of the table in docs/contract.md). The shapes are those of the reports.
#include "bed.h"

#include <cmath>
#include <fmt/format.h>
#include <limits>

namespace attune::contract {
namespace {

using namespace tools;

using Reported = ContractTest;

// The same numbers in two places: the same bits.
void expect_same_bits(const std::string &text, const Places &places, Guard guard = Guard::end) {
    bool fused = false;
    for (const Group &group : groups(parse_case(text), Fit::features)) {
        Bed moved(group.c, 1, places, guard), plain(group.c, 1);
        plain.copy_inputs(moved); // what a stride of 0 repeats is repeated
        for (const attune_kernel *k : group.kernels) {
            if (!run(*k, plain) || !run(*k, moved)) continue;
            EXPECT_EQ(moved.bits_differ(plain), "") << k->name << " on " << moved.text();
            fused = fused || is_fused(*k);
        }
    }
    EXPECT_TRUE(fused);
}

void expect_cases(std::initializer_list<const char *> texts, Fit fit = Fit::features) {
    uint64_t seed = 0;
    for (const char *text : texts) expect_case(parse_case(text), fit, ++seed);
}

TEST_F(Reported, D1_dimensions_of_0) {
    for (const char *text : {"f32:b7:h9:n0:m5:d7", "f32:b0:h2:n3:d7", "f32:b1:h2:n3:d7/0", "f32:b1:h0/1:n3:d7"})
        for (const attune_kernel *k : kernels_under_test()) {
            const Case c = adapt(parse_case(text), *k);
            if (c.N > 3) continue; // stretched
            Bed bed(c, 1);
            if (attune_kernel_refuses(k, &bed.p)) continue;
            run(*k, bed);
            EXPECT_TRUE(bed.o.all_pattern()) << k->name << " on " << text;
        }
    expect_right("f32:b1:h2:n3:m0:d7");
}

TEST_F(Reported, D3_no_keys) {
    expect_right("f32:b1:h1:n3:m0:d8:causal");
    expect_right("f32:b1:h1:n1:m0:d8");
}

TEST_F(Reported, D4_packed_with_empty_sequences) {
    expect_cases({"f32:h4/2:d64:varlen=0,1,0,1:varlenk=0,5,3,0", "f32:h8/2:d128:varlen=0,0,1,0,1:causal-br",
                  "f32:h2:d64:varlen=1,1,0,1:varlenk=0,0,0,0"});
}

TEST_F(Reported, D5_more_values_than_keys) {
    Bed bed(parse_case("f32:b1:h1:n3:m5:d8"), 1), more(parse_case("f32:b1:h1:n3:m6:d8"), 1);
    std::string why;
    const Plan plan = make_plan(bed.p, "", "", 1, why);
    ASSERT_TRUE(plan) << why;
    const Buffer workspace(attune_plan_workspace(plan.get()), Guard::none);
    attune_tensors t = bed.tensors();
    t.v = more.v.t;
    EXPECT_EQ(attune_run(plan.get(), &t, workspace.data(), workspace.size()), ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find("tensors.v.shape is [1, 1, 6, 8]: expected [1, 1, 5, 8]"),
              std::string::npos)
        << attune_last_error();
}

TEST_F(Reported, D7_keys_broadcast_over_heads) {
    Places places;
    places.k.broadcast = places.v.broadcast = {false, true, false, false};
    for (const char *text : {"f32:b1:h4:n5:m33:d512", "f32:b2:h4:n30:m65:d64"}) expect_same_bits(text, places);
    places.k.broadcast[2] = true; // and over keys
    expect_same_bits("f32:b1:h2:n5:m33:d64", places);
}

TEST_F(Reported, D8_tails_with_a_mask) {
    expect_cases({"f32:b1:h8:n63:m64:d64:mask=bool", "f32:b1:h8:n64:m50:d64:mask=bool",
                  "f32:b1:h4:n100:m77:d64:mask=bool:mask=bias", "f32:b1:h8/2:n1:m96:d128:kvlen=65",
                  "f32:b1:h8/2:n1:m96:d128"});
}

TEST_F(Reported, D9_rows_far_before_and_behind_the_keys) {
    expect_cases({"f32:b1:h1:n300:m4100:d64:causal-br", "f32:b1:h1:n1300:m1300:d64:causal:offset=-1000",
                  "f32:b1:h1:n1030:m520:d64:causal-br", "f32:b1:h1:n40:m4100:d64:causal"});
}

TEST_F(Reported, D11_more_splits_than_keys) {
    // Most parts of a split key axis see nothing.
    expect_cases({"f32:b1:h1:n1:m3:d64", "f32:b1:h2:n3:m2100:d64:causal", "f32:b1:h2:n2:m4200:d40:kvlen=5",
                  "f32:b1:h8/2:n1:m4200:d128:window=10,0:offset=4000"});
}

TEST_F(Reported, D12_any_group_size) {
    for (const char *heads : {"40/8", "24/4", "28/4", "5/1", "6/1", "7/1", "16/1", "9/3"})
        for (int64_t n : {1, 5})
            expect_case(parse_case(fmt::format("f32:b1:h{}:n{}:m70:d64:causal-br", heads, n)), Fit::features,
                        uint64_t(n));
}

TEST_F(Reported, D13_any_head_size) {
    uint64_t seed = 0;
    for (int64_t d : {1, 3, 40, 46, 72, 80, 96, 112, 192, 256, 512, 576})
        expect_case(parse_case(fmt::format("f32:b1:h2:n5:m35:d{}", d)), Fit::stated, ++seed);
}

TEST_F(Reported, D15_bias_rows_of_any_stride) {
    for (const char *text :
         {"f32:b1:h2:n43:d64:mask=bias", "f32:b1:h2:n77:d64:mask=bias", "f32:b1:h2:n7:m700:d64:mask=bias:mask=bool"})
        for (int64_t pad : {0, 1, 3}) {
            Places places;
            places.bias.pad = places.mask.pad = {0, pad, 0, pad};
            places.bias.lead = places.mask.lead = pad;
            expect_right(text, {.places = places, .fit = Fit::features, .guards = {Guard::end}});
        }
}

TEST_F(Reported, D16_mask_with_causal_and_decode_of_two) {
    constexpr bool kMask[] = {false, true, true, false, false, true, false};
    expect_right("f32:b1:h13:n7:d37:mask=bool:causal", {.edit = [&](Bed &bed) {
                     bed.mask.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                         bed.mask.set(b, h, i, j, kMask[j % 7] ? 1 : 0);
                     });
                 }});
    expect_cases({"f32:b2:h8/2:n1:m64:d64:kvlen=9,40:causal:offset=8,39"});
}

TEST_F(Reported, D17_decode_is_prefill) {
    for (const Group &group : groups(parse_case("f32:b1:h2:n5:d16:causal"), Fit::features)) {
        Bed whole(group.c, 3);
        const Reference reference = whole.reference();
        for (const attune_kernel *k : group.kernels) {
            if (!run_and_check(*k, whole, reference)) continue;
            for (int64_t i = 0; i < group.c.N; i++) {
                Case step = group.c;
                step.N = 1;
                step.M = i + 1;
                step.offset = i;
                Bed one(step, 3);
                if (attune_kernel_refuses(k, &one.p)) continue;
                one.q.each(
                    [&](int64_t b, int64_t h, int64_t, int64_t d) { one.q.set(b, h, 0, d, whole.q.get(b, h, i, d)); });
                for (auto [to, from] : {std::pair{&one.k, &whole.k}, {&one.v, &whole.v}})
                    to->each([&](int64_t b, int64_t h, int64_t j, int64_t d) {
                        to->set(b, h, j, d, from->get(b, h, j, d));
                    });
                if (!run(*k, one)) continue;
                one.o.each([&](int64_t b, int64_t h, int64_t, int64_t d) {
                    EXPECT_NEAR(one.o.get(b, h, 0, d), whole.o.get(b, h, i, d), 2 * reference.o_bound) << k->name;
                });
            }
        }
    }
}

TEST_F(Reported, E2_strides_of_keys_are_not_those_of_values) {
    Places transposed, halves;
    transposed.v.order = {0, 2, 1, 3};
    halves.k.step = {1, 1, 2, 1};
    expect_same_bits("f32:b1:h16:n6:m62:d128", transposed);
    expect_same_bits("f32:b1:h2:n6:m62:d128", halves);
    expect_same_bits("f32:b2:h4/2:n30:m70:d40", halves);
}

TEST_F(Reported, E3_strides_of_dimensions_of_1) {
    Places places;
    for (Spec *spec : {&places.q, &places.k, &places.v, &places.o}) spec->lone = {12345, -7, 99999, 3};
    expect_same_bits("f32:b1:h1:n1:m1:d64", places);
    for (const char *text : {"f32:b1:h1:n7:m9:d1", "f32:b1:h1:n1:m9:d64"})
        expect_right(text, {.places = places, .fit = Fit::stated});
}

TEST_F(Reported, E4_caller_says_where_the_output_lies) {
    for (Layout layout : {Layout::bshd, Layout::col}) {
        Places places;
        places.o = spec_of(layout);
        places.o.pad = {0, 3, 5, 0};
        expect_same_bits("f32:b2:h2:n49:d32", places);
    }
}

TEST_F(Reported, E6_row_pitch_of_no_vector) {
    Places places;
    for (Spec *spec : {&places.q, &places.k, &places.v, &places.o}) spec->pad = {0, 0, 0, 1};
    expect_same_bits("f32:b1:h2:n9:m50:d46", places);
}

TEST_F(Reported, E7_bases_aligned_to_elements_only) {
    for (int64_t lead : {1, 3}) {
        Places places;
        for (Spec *spec : {&places.q, &places.k, &places.v, &places.o, &places.lse, &places.mask, &places.bias})
            spec->lead = lead;
        for (const char *text : {"f32:b1:h2:n30:m70:d64:mask=bool:mask=bias", "f32:b1:h2:n1:m1100:d40"})
            for (Guard guard : {Guard::end, Guard::start}) expect_same_bits(text, places, guard);
    }
}

TEST_F(Reported, E8_and_I5_who_runs_and_why_not_the_others) {
    const attune_problem p = to_problem(parse_case("f32:b1:h4/2:n8:d16"));
    std::string why;
    const Plan plan = make_plan(p, "", "", 1, why);
    ASSERT_TRUE(plan) << why;
    EXPECT_NE(attune_find_kernel(attune_plan_kernel(plan.get())), nullptr);
    const std::string explained = attune_plan_explain(plan.get());
    for (const attune_kernel *k : all_kernels()) EXPECT_NE(explained.find(k->name), std::string::npos) << k->name;
}

TEST_F(Reported, F2_mask_of_more_than_2_31_elements) {
    Places places;
    places.mask.at_least = {0, 0, (int64_t(1) << 31) + 3, 0}; // of a row: row 1 begins beyond 2^31
    expect_right("f32:b1:h1:n3:m40:d64:mask=bool", {.places = places, .fit = Fit::features, .guards = {Guard::end}});
}

TEST_F(Reported, F3_batches_apart_and_batches_of_many) {
    Places places;
    places.k.at_least = places.v.at_least = {int64_t(1) << 31, 0, 0, 0};
    expect_right("f32:b2:h1:n3:m40:d64", {.places = places, .fit = Fit::features, .guards = {Guard::end}});
    expect_cases({"f32:b70000:h1:n1:d8"}, Fit::stated);
}

TEST_F(Reported, G1_and_G3_error_of_long_rows) {
    expect_cases({"f32:b1:h1:n256:m1024:d64", "f32:b1:h2:n256:m77:d64", "f32:b1:h1:n30:m4096:d64"});
}

TEST_F(Reported, G4_large_keys_and_large_biases) {
    expect_right("f32:b1:h2:n9:m70:d128:mask=bias", {.edit = [](Bed &bed) {
                     bed.k.each([&](int64_t b, int64_t h, int64_t j, int64_t d) {
                         bed.k.set(b, h, j, d, 300 * bed.k.get(b, h, j, d));
                     });
                     bed.bias.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                         bed.bias.set(b, h, i, j, 6e4f + 100 * bed.bias.get(b, h, i, j));
                     });
                 }});
}

TEST_F(Reported, G5_groups_of_seven) {
    expect_cases({"f32:b1:h28/4:n9:m70:d128", "f32:b2:h28/4:n1:m300:d128"});
}

TEST_F(Reported, H2_lse_of_every_query_head) {
    expect_cases({"f32:b1:h8/2:n1:m300:d128", "f32:b1:h8/2:n1:m2300:d128"});
}

TEST_F(Reported, H3_sink_counts_once) {
    for (const char *text :
         {"f32:b1:h4/2:n2:m2300:d64:sink:mask=bool", "f32:b1:h4/2:n2:m2300:d64:sink:mask=bool:softcap=2"})
        expect_right(text, {.edit =
                                [](Bed &bed) {
                                    for (float &sink : bed.sinks) sink = 1;
                                    // Nothing is visible in the first part of a split key axis.
                                    bed.mask.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                                        bed.mask.set(b, h, i, j, j >= 2000 ? 1 : 0);
                                    });
                                },
                            .fit = Fit::features});
    // By hand: scale 0, ten keys, all values 1: O = 10 / (10 + e).
    expect_right("f32:b1:h2:n3:m10:d64:sink:scale=0",
                 {.edit =
                      [](Bed &bed) {
                          for (float &sink : bed.sinks) sink = 1;
                          bed.v.fill(1);
                      },
                  .after =
                      [](Bed &bed, const attune_kernel &k) {
                          const double all = double(bed.p.M), e = std::exp(1.0);
                          EXPECT_NEAR(bed.o.get(0, 1, 2, 3), all / (all + e), 1e-5 + rounding_of(1)) << k.name;
                      },
                  .fit = Fit::features});
}

TEST_F(Reported, H6_split_keys_of_one_query) {
    expect_right("f32:b1:h4/2:n1:m5000:d64", {.after =
                                                  [](Bed &bed, const attune_kernel &k) {
                                                      double sum = 0;
                                                      bed.o.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                                                          sum += std::abs(bed.o.get(b, h, i, d));
                                                      });
                                                      EXPECT_GT(sum, 0) << k.name;
                                                  },
                                              .fit = Fit::features,
                                              .threads = {1, 2, 8}});
}

TEST_F(Reported, I6_one_to_four_threads) {
    expect_right("f32:b1:h16:n16:d16", {.fit = Fit::features, .threads = {1, 2, 3, 4}});
}

TEST_F(Reported, I8_denormal_weights_and_values) {
    expect_right("f32:b1:h1:n5:m200:d64:scale=1", {.edit = [](Bed &bed) {
                     bed.q.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                         bed.q.set(b, h, i, d, d == 0 ? 1.0f : 0.0f);
                     });
                     bed.k.each([&](int64_t b, int64_t h, int64_t j, int64_t d) {
                         if (d == 0) bed.k.set(b, h, j, d, j == 77 ? 0.0f : -95.0f - float(j % 9));
                     });
                     bed.v.each([&](int64_t b, int64_t h, int64_t j, int64_t d) {
                         if (d % 2) bed.v.set(b, h, j, d, 1e-39f);
                     });
                 }});
}

TEST_F(Reported, J_rows_beyond_the_last_packed_sequence) {
    Bed bed(parse_case("f32:h2:d64:varlen=3,4"), 1);
    std::string why;
    const Plan plan = make_plan(bed.p, "", "", 1, why);
    ASSERT_TRUE(plan) << why;
    const Buffer workspace(attune_plan_workspace(plan.get()), Guard::none);
    bed.cu_q[2] = 6; // of 7 rows
    const attune_tensors t = bed.tensors();
    EXPECT_EQ(attune_run(plan.get(), &t, workspace.data(), workspace.size()), ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find("cu_seqlens_q[2], the last, is 6"), std::string::npos);
}

TEST_F(Reported, J_lengths_known_at_the_run_only) {
    expect_cases({"f32:b3:h2:n7:m100:d64:kvlen=1,100,33", "f32:h2:d64:varlen=1,33,7:n50:m90"});
}

} // namespace
} // namespace attune::contract
