// Contract 3.4 to 3.7: the scale, the order of what happens to a score, causal offsets, windows, lengths, masks and
// biases, and all of them together.
#include "bed.h"

#include <cmath>
#include <fmt/format.h>
#include <limits>

namespace attune::contract {
namespace {

using namespace tools;

using Contract_3_4 = ContractTest;
using Contract_3_5 = ContractTest;
using Contract_3_6 = ContractTest;
using Contract_3_7 = ContractTest;

TEST_F(Contract_3_4, scale) {
    for (const char *shape : {"f32:b1:h2:n27:m70:d64", "f32:b2:h4/2:n2:m45:d40:causal-br:mask=bias"})
        for (std::optional<float> scale :
             {std::optional<float>(), {1.0f}, {0.0f}, {-0.0f}, {-0.125f}, {-1.5f}, {20.0f}, {1e-30f}, {0.3f}}) {
            Case c = parse_case(shape);
            c.scale = scale;
            expect_case(c, Fit::sizes_twice, 11);
        }
}

// With scale 0 all scores are 0, with or without a bias of the same for all: the row is the mean of the values.
TEST_F(Contract_3_4, scale_zero_is_the_mean) {
    for (const char *text : {"f32:b1:h1:n3:m50:d64:scale=0", "f32:b1:h2:n26:m33:d40:scale=-0"})
        expect_right(text, {.after = [](Bed &bed, const attune_kernel &k) {
                         double mean = 0;
                         for (int64_t j = 0; j < bed.p.M; j++) mean += bed.v.get(0, 0, j, 0) / double(bed.p.M);
                         EXPECT_NEAR(bed.o.get(0, 0, bed.p.N - 1, 0), mean, 1e-5 + rounding_of(mean)) << k.name;
                         EXPECT_NEAR(bed.lse.get(0, 0, 0, 0), std::log(double(bed.p.M)), 1e-5) << k.name;
                     }});
}

// Without the flag, the field is not looked at.
TEST_F(Contract_3_4, scale_that_is_not_asked_for) {
    const std::string text = "f32:b1:h2:n27:m70:d64";
    for (const Group &group : groups(parse_case(text)))
        for (const attune_kernel *k : group.kernels) {
            Bed bed(group.c, 1), other(group.c, 1);
            other.p.scale = std::numeric_limits<float>::quiet_NaN();
            if (!run(*k, bed) || !run(*k, other)) continue;
            EXPECT_EQ(other.bits_differ(bed), "") << k->name;
        }
}

// Every subset of what can happen to a score, with a cap and biases that bite: in another order the numbers are others.
TEST_F(Contract_3_5, order_of_stages) {
    uint64_t seed = 0;
    for (const char *shape : {"f32:b2:h6/3:n5:m40:d64", "f32:b1:h2:n30:m70:d40"})
        for (int subset = 0; subset < 16; subset++) {
            Case c = parse_case(shape);
            if (subset & 1) c.softcap = 0.75f;
            if (subset & 2) c.alibi = true, c.offset = subset & 4 ? 13 : 0;
            if (subset & 4) c.bias = true;
            if (subset & 8) c.mask = true;
            c.scale = 1.0f;
            expect_right(c, {.seed = ++seed});
        }
}

// ALiBi looks at the distance from the row's position: offsets, one for all or one per batch.
TEST_F(Contract_3_5, alibi_with_offsets) {
    for (const char *text : {"f32:b2:h8:n9:m70:d64:alibi", "f32:b2:h6/2:n9:m70:d40:alibi:offset=61:causal",
                             "f32:b2:h8:n30:m33:d64:alibi:offset=-40,90", "f32:b1:h4:n3:m50:d64:alibi:offset=1000",
                             "f32:b1:h4:n3:m50:d64:alibi:window=9,3:offset=40:mask=bias:softcap=2"})
        expect_right(text);
}

// Huge and tiny caps, scores far beyond the cap.
TEST_F(Contract_3_5, softcap) {
    for (float cap : {1e-3f, 0.5f, 30.0f, 1e6f})
        for (float scale : {0.125f, 4.0f}) {
            Case c = parse_case("f32:b1:h2:n28:m75:d64:causal-br");
            c.softcap = cap;
            c.scale = scale;
            expect_right(c);
        }
}

TEST_F(Contract_3_6, causal_offsets) {
    constexpr int64_t kFar = int64_t(1) << 60;
    uint64_t seed = 0;
    for (const auto &[n, m] : {std::pair<int64_t, int64_t>{1, 1}, {7, 7}, {25, 60}, {60, 25}, {49, 200}, {1, 90}})
        for (int64_t offset :
             {int64_t(0), m - n, m - n - 1, m - n + 1, int64_t(-1), -n, 1 - n, -n - 3, m, m - 1, m + 5, int64_t(3),
              int64_t(1) << 31, -(int64_t(1) << 31), (int64_t(1) << 32) + 2, kFar, -kFar}) {
            Case c = parse_case("f32:b1:h2:n1:d40:causal");
            c.N = n;
            c.M = m;
            c.offset = offset;
            seed++;
            expect_case(c, seed % 5 ? Fit::stated : Fit::sizes_twice, seed);
        }
}

TEST_F(Contract_3_6, causal_offset_per_batch) {
    for (const char *text :
         {"f32:b4:h2:n26:m50:d64:causal:offset=0,24,-30,70", "f32:b3:h4/2:n1:m90:d40:causal:offset=0,89,44",
          "f32:b3:h2:n100:m90:d64:causal:offset=-99,-100,3",
          "f32:b2:h1:n5:m5:d64:causal:offset=-1152921504606846976,"
          "1152921504606846976"})
        expect_case(parse_case(text), Fit::sizes_twice, 4);
    // The scalar is not looked at where each batch has its own.
    expect_right("f32:b2:h2:n9:m30:d64:causal:offset=4,21", {.edit = [](Bed &bed) { bed.p.offset = -1000; }});
}

// Top-left and bottom-right are offsets 0 and M - N.
TEST_F(Contract_3_6, helpers_are_offsets) {
    EXPECT_EQ(offset_of(parse_case("f32:n30:m70:d8:causal-br"), 0), 40);
    EXPECT_EQ(offset_of(parse_case("f32:n30:m70:d8:causal"), 0), 0);
    expect_case(parse_case("f32:h2:n30:m70:d64:causal-br"), Fit::sizes_twice, 1);
    expect_case(parse_case("f32:h2:n70:m30:d64:causal-br"), Fit::sizes_twice, 2);
}

constexpr std::pair<int64_t, int64_t> kWindows[] = {{-1, -1}, {0, 0},     {2, -1}, {-1, 2}, {3, 1},
                                                    {20, 11}, {100, 100}, {0, -1}, {-1, 0}, {INT64_MAX, INT64_MAX}};

TEST_F(Contract_3_7, window_and_causal) {
    uint64_t seed = 0;
    for (const auto &[left, right] : kWindows)
        for (Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right})
            for (const auto &[n, m] : {std::pair<int64_t, int64_t>{30, 30}, {27, 130}, {60, 20}}) {
                Case c = parse_case("f32:b1:h2:n1:d40");
                c.N = n;
                c.M = m;
                c.causal = causal;
                c.window_left = left;
                c.window_right = right;
                if (causal == Causal::none) c.offset = n == 60 ? -35 : m - n;
                seed++;
                expect_case(c, seed % 7 ? Fit::stated : Fit::sizes_twice, seed);
            }
}

TEST_F(Contract_3_7, lengths_per_batch) {
    for (const char *text :
         {"f32:b5:h2:n5:m70:d64:kvlen=0,70,1,69,33", "f32:b3:h4/2:n30:m130:d40:kvlen=130,0,65",
          "f32:b3:h4/2:n30:m130:d40:kvlen=128,129,127:causal-br", "f32:b2:h2:n1:m1500:d64:kvlen=1025,7",
          "f32:b4:h2:n40:m40:d64:kvlen=40,3,0,39:causal:window=5,-1"})
        for (uint64_t seed : {1, 2}) expect_case(parse_case(text), Fit::sizes_twice, seed);
}

// A length that is only known at the run: one plan, one capacity, every length in turn.
TEST_F(Contract_3_7, one_plan_for_every_length) {
    const Case c = parse_case("f32:b1:h2:n1:m40:d64:kvlen=40");
    for (const Group &group : groups(c))
        for (const attune_kernel *k : group.kernels) {
            Bed bed(group.c, 2);
            std::string why;
            const Plan plan = make_plan(bed.p, k->name, "", 1, why);
            ASSERT_TRUE(plan) << why;
            const Workspace workspace(device_under_test(), attune_plan_workspace(plan.get()), Guard::end);
            for (int64_t length = 0; length <= bed.p.M; length += bed.p.M > 40 ? 16 : 1) {
                bed.kv_len[0] = length;
                bed.reset_outputs();
                const attune_tensors t = bed.tensors();
                ASSERT_EQ(attune_run(plan.get(), &t, workspace.data(), workspace.size()), ATTUNE_OK)
                    << attune_last_error();
                const Verdict verdict = check_outputs(bed.reference(1'000'000), t);
                EXPECT_TRUE(verdict.ok) << k->name << " length " << length << ": " << verdict.why;
            }
        }
}

// Everything that hides keys at once, in every combination.
void compositions(const std::string &shape, Fit fit, int every) {
    int number = 0;
    for (const auto &[left, right] : kWindows)
        for (int where = 0; where < 4; where++)
            for (bool lengths : {false, true})
                for (int masks = 0; masks < 4; masks++) {
                    if (number++ % every) continue;
                    Case c = parse_case(shape);
                    c.window_left = left;
                    c.window_right = right;
                    if (where == 1) c.causal = Causal::top_left;
                    if (where == 2) c.causal = Causal::bottom_right;
                    if (where == 3) {
                        c.causal = Causal::top_left;
                        for (int64_t b = 0; b < c.B; b++) c.offsets.push_back(b * 17 - 5);
                    }
                    if (lengths)
                        for (int64_t b = 0; b < c.B; b++) c.kv_len.push_back(b == 0 ? c.M : b == 1 ? 0 : c.M / 2 + 1);
                    c.mask = masks & 1;
                    c.bias = masks & 2;
                    expect_case(c, fit, uint64_t(number));
                    // The same with a mask and a bias that differ for each row and head.
                    if (masks) expect_right(c, {.fit = fit, .guards = {Guard::end}, .seed = uint64_t(number)});
                }
}

TEST_F(Contract_3_7, all_composed) {
    compositions("f32:b3:h4/2:n9:m47:d40", Fit::stated, 3);
    compositions("f32:b3:h2:n29:m70:d64", Fit::features, 17);
}

TEST_F(Contract_3_7, slow_all_composed) {
    compositions("f32:b3:h4/2:n9:m47:d40", Fit::stated, 1);
    compositions("f32:b3:h2:n50:m230:d64", Fit::features, 5);
    compositions("f32:b3:h6/3:n1:m1100:d64", Fit::features, 7);
}

// Any nonzero byte of a mask attends.
TEST_F(Contract_3_7, any_nonzero_byte_attends) {
    for (int value : {1, 2, 128, 255})
        expect_right("f32:b1:h2:n25:m70:d64:mask=bool", {.edit = [value](Bed &bed) {
                         bed.mask.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
                             bed.mask.set(b, h, i, j, (i + j) % 3 ? float(value) : 0.0f);
                         });
                     }});
}

} // namespace
} // namespace attune::contract
