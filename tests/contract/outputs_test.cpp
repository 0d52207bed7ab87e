// Contract 3.11: the log-sum-exp, sinks, and the scores output.
#include "bed.h"

#include <cmath>
#include <fmt/format.h>
#include <limits>

namespace attune::contract {
namespace {

using namespace tools;

using Contract_3_11 = ContractTest;

constexpr float kInf = std::numeric_limits<float>::infinity();

// Natural log, of the visible scores: n equal scores s give s + ln n.
TEST_F(Contract_3_11, lse_by_hand) {
    for (float s : {0.0f, 2.5f, -7.0f, 500.0f})
        for (const char *text : {"f32:b1:h2:n5:m70:d64:scale=1", "f32:b1:h4/2:n30:m230:d40:scale=1:kvlen=100"})
            expect_right(text, {.edit =
                                    [s](Bed &bed) {
                                        bed.q.fill(0);
                                        bed.k.fill(0);
                                        bed.q.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
                                            if (d == 0) bed.q.set(b, h, i, d, 1);
                                        });
                                        bed.k.each([&](int64_t b, int64_t h, int64_t j, int64_t d) {
                                            if (d == 0) bed.k.set(b, h, j, d, s);
                                        });
                                    },
                                .after =
                                    [s](Bed &bed, const attune_kernel &k) {
                                        const double n = bed.kv_len.empty() ? double(bed.p.M) : double(bed.kv_len[0]);
                                        for (int64_t h = 0; h < bed.p.Hq; h++)
                                            EXPECT_NEAR(bed.lse.get(0, h, bed.p.N - 1, 0), s + std::log(n),
                                                        1e-6 * std::max(8.0f, std::abs(s)))
                                                << k.name;
                                    }});
}

// LSE is optional: without it the bits of O are the same.
TEST_F(Contract_3_11, without_lse) {
    for (const char *text :
         {"f32:b2:h4/2:n30:m70:d64:causal-br", "f32:b1:h2:n2:m1100:d40", "f32:b1:h2:n5:m70:d64:sink"})
        for (const Group &group : groups(parse_case(text)))
            for (const attune_kernel *k : group.kernels) {
                Bed with(group.c, 1), without(group.c, 1);
                without.with_lse = false;
                if (!run(*k, with) || !run(*k, without)) continue;
                with.with_lse = false; // compare O only
                EXPECT_EQ(without.bits_differ(with), "") << k->name << " on " << with.text();
            }
}

TEST_F(Contract_3_11, sinks) {
    for (const char *text :
         {"f32:b2:h4/2:n5:m70:d64:sink", "f32:b1:h2:n30:m130:d40:sink:causal-br", "f32:b1:h2:n1:m2100:d64:sink",
          "f32:b1:h2:n30:m70:d64:sink:mask=bias:mask=bool:kvlen=51", "f32:b1:h2:n9:m40:d64:sink:scale=-0.5"})
        for (float sink : {0.0f, -3.0f, 4.0f, 30.0f, -200.0f, 1e4f, -1e4f})
            expect_right(text, {.edit = [sink](Bed &bed) {
                             for (size_t h = 0; h < bed.sinks.size(); h++) bed.sinks[h] = sink + float(h);
                         }});
    // Drawn at random, and with caps, which do not touch a sink.
    for (const char *text : {"f32:b2:h6/2:n30:m70:d64:sink", "f32:b1:h4:n3:m50:d64:sink:softcap=0.5:alibi"})
        expect_right(text);
}

// A sink of -inf is none.
TEST_F(Contract_3_11, sink_of_minus_infinity) {
    for (const char *text : {"f32:b1:h2:n30:m70:d64:sink", "f32:b2:h2:n2:m1100:d40:sink:kvlen=0,1030"}) {
        Case plain = parse_case(text);
        plain.sink = false;
        expect_right(text, {.edit = [](Bed &bed) { std::fill(bed.sinks.begin(), bed.sinks.end(), -kInf); },
                            .after =
                                [](Bed &bed, const attune_kernel &k) {
                                    if (!bed.kv_len.empty()) {
                                        EXPECT_EQ(bed.lse.get(0, 0, 0, 0), -kInf) << k.name;
                                    }
                                }});
    }
}

constexpr attune_scores_stage kStages[] = {ATTUNE_SCORES_RAW, ATTUNE_SCORES_CAPPED, ATTUNE_SCORES_BIASED,
                                           ATTUNE_SCORES_PROBABILITIES};

// Only kernels that keep all scores can give them; O and LSE come as ever.
void expect_scores(const std::string &text, const Places &places = {}) {
    for (attune_scores_stage stage : kStages) {
        const int done = expect_right(
            text, {.places = places, .edit = [stage](Bed &bed) { bed.ask_for_scores(stage); }, .need_fused = false});
        EXPECT_GT(done, 0) << text << ": no kernel of " << isa_under_test() << " gives scores";
    }
}

TEST_F(Contract_3_11, scores_at_four_stages) {
    for (const char *text :
         {"f32:b1:h1:n1:m1:d64", "f32:b2:h4/2:n5:m40:d64", "f32:b1:h2:n30:m70:d40:causal-br",
          "f32:b1:h2:n26:m33:d128:mask=bool", "f32:b2:h4/2:n3:m50:d64:mask=bias:kvlen=50,17:window=20,3:offset=25",
          "f32:b1:h4/2:n9:m64:d57/64:softcap=1.5:alibi",
          "f32:b1:h2:n9:m64:d64:softcap=1.5:alibi:mask=bias:mask=bool:causal:offset=40:sink", "f32:b1:h2:n5:m0:d64",
          "f32:b2:h2:n5:m20:d64:kvlen=0,20:sink"})
        expect_scores(text);
}

TEST_F(Contract_3_11, scores_anywhere_in_memory) {
    Places places;
    places.scores.order = {2, 0, 3, 1};
    expect_scores("f32:b2:h4/2:n5:m40:d64:mask=bool", places);
    places = {};
    places.scores.pad[3] = 3;
    places.scores.lead = 1;
    expect_scores("f32:b1:h2:n30:m33:d64:causal", places);
    places = {};
    places.scores.reverse = {true, true, true, true};
    expect_scores("f32:b2:h2:n30:m33:d64", places);
}

// Probabilities of a row that sees nothing are 0, of the others sum to 1 (less what a sink takes).
TEST_F(Contract_3_11, probabilities_sum_to_one) {
    for (const char *text : {"f32:b1:h2:n30:m70:d64:causal:offset=-3", "f32:b1:h4/2:n5:m40:d64:sink"})
        expect_right(text, {.edit = [](Bed &bed) { bed.ask_for_scores(ATTUNE_SCORES_PROBABILITIES); },
                            .after =
                                [](Bed &bed, const attune_kernel &k) {
                                    for (int64_t h = 0; h < bed.p.Hq; h++)
                                        for (int64_t i = 0; i < bed.p.N; i++) {
                                            double sum = 0;
                                            for (int64_t j = 0; j < bed.p.M; j++) sum += bed.scores.get(0, h, i, j);
                                            const double lse = bed.lse.get(0, h, i, 0);
                                            const double expected = std::isinf(lse) ? 0
                                                                    : bed.sinks.empty()
                                                                        ? 1
                                                                        : 1 - std::exp(bed.sinks[size_t(h)] - lse);
                                            EXPECT_NEAR(sum, expected, 1e-5) << k.name << " row " << i;
                                        }
                                },
                            .need_fused = false});
}

} // namespace
} // namespace attune::contract
