// §3.12: types of Q, K, V and O; whatever they are, scores, softmax and sums are f32. Over the kernels of all types.
#include "bed.h"

#include <cmath>
#include <fmt/format.h>

namespace attune::contract {
namespace {

using namespace tools;

using Contract_3_12 = ContractTest;

// Half the distance of 1 to the next number of the type.
double half_ulp(attune_dtype type) {
    return type == ATTUNE_F32 ? 0x1p-24 : type == ATTUNE_F16 ? 0x1p-11 : 0x1p-8;
}

// Calls f(kernel, bed) for the kernels that take the case with their own types.
template <typename F> void for_each_kernel(const char *text, F f) {
    for (const attune_kernel *k : kernels_of_all_types()) {
        Case c = adapt(parse_case(text), *k);
        c.dtype = k->q_dtype;
        c.kv_dtype = k->kv_dtype;
        Bed bed(c, 1);
        if (!attune_kernel_refuses(k, &bed.p)) f(*k, bed);
    }
}

TEST_F(Contract_3_12, every_kernel_in_its_own_types) {
    std::set<const attune_kernel *> ran;
    for (const char *text : {"f32:b1:h4/2:n37:m70:d64:causal-br", "f32:b2:h4/1:n2:m300:d128", "f32:b1:h2:n20:m40:d32",
                             "f32:b2:h2:n5:m90:d192/128:kvlen=90,33:causal"})
        for_each_kernel(text, [&](const attune_kernel &k, Bed &bed) {
            run_and_check(k, bed, bed.reference());
            ran.insert(&k);
        });
    for (const attune_kernel *k : kernels_of_all_types()) EXPECT_TRUE(ran.count(k)) << k->name << " took no case";
}

// 5000 equal weights: a sum in f16 would stop at 2048, one in bf16 at 256.
TEST_F(Contract_3_12, softmax_and_its_sum_are_f32) {
    for_each_kernel("f32:b1:h1:n1:m5000:d64", [](const attune_kernel &k, Bed &bed) {
        bed.k.fill(0);
        bed.v.fill(1);
        if (!run(k, bed)) return;
        EXPECT_NEAR(bed.o_at(0, 0, 0, 0), 1, 2 * half_ulp(k.o_dtype)) << k.name;
        EXPECT_NEAR(bed.lse.get(0, 0, 0, 0), std::log(5000.0), 1e-5) << k.name;
    });
}

// Scores of 102400 before the scale, and their differences: f16 ends at 65504, and bf16 does not know 12800 from 12832.
TEST_F(Contract_3_12, scores_are_f32) {
    for_each_kernel("f32:b1:h1:n3:m70:d64", [](const attune_kernel &k, Bed &bed) {
        const double d = double(bed.c.dk);
        bed.q.fill(40);
        bed.k.fill(40);
        // One key stands out by 40 * 0.25 / sqrt(d), which f16 and bf16 hold in K alone.
        bed.k.set(0, 0, 7, 0, 40.25f);
        bed.v.fill(0);
        for (int64_t c = 0; c < bed.c.dv; c++) bed.v.set(0, 0, 7, c, 1);
        if (!run(k, bed)) return;
        const double extra = std::exp(10 / std::sqrt(d)), keys = double(bed.c.M - 1);
        const double score = 1600 * std::sqrt(d);
        for (int64_t i = 0; i < bed.c.N; i++) {
            EXPECT_NEAR(bed.o_at(0, 0, i, 0), extra / (extra + keys), 5e-3) << k.name;
            EXPECT_NEAR(bed.lse.get(0, 0, i, 0), score + std::log(extra + keys), 1e-6 * score) << k.name;
        }
    });
}

// Products with V add up in f32: 0.25 + 4000 terms of 2^-14, each of which would vanish beside 0.25 in 16 bits.
TEST_F(Contract_3_12, sums_over_values_are_f32) {
    for_each_kernel("f32:b1:h1:n1:m4096:d64", [](const attune_kernel &k, Bed &bed) {
        bed.k.fill(0);
        bed.v.fill(0.25f);
        bed.v.each([&](int64_t b, int64_t h, int64_t j, int64_t c) {
            if (j == 0) bed.v.set(b, h, j, c, 1024);
        });
        if (!run(k, bed)) return;
        const double expected = (1024 + 0.25 * double(bed.c.M - 1)) / double(bed.c.M);
        EXPECT_NEAR(bed.o_at(0, 0, 0, 0), expected, 2 * half_ulp(k.o_dtype)) << k.name;
    });
}

TEST_F(Contract_3_12, types_that_no_kernel_has) {
    attune_problem p = to_problem(parse_case("f32:b1:h2:n20:m40:d64"));
    p.device = device_under_test();
    p.q_dtype = ATTUNE_F16;
    p.kv_dtype = ATTUNE_BF16;
    p.o_dtype = ATTUNE_F32;
    constexpr uint32_t kAny = ATTUNE_TRAIT_ANY_Q | ATTUNE_TRAIT_ANY_KV | ATTUNE_TRAIT_ANY_O;
    for (const attune_kernel *k : kernels_of_all_types()) {
        const char *reason = attune_kernel_refuses(k, &p);
        const bool types = reason && std::string(reason).starts_with("it is built for q, kv, o of ");
        EXPECT_EQ(types, (k->traits & kAny) != kAny) << k->name << ": " << (reason ? reason : "");
        if (!types) continue;
        attune_plan_options options;
        attune_plan_options_init(&options);
        options.kernel = k->name;
        attune_plan *plan = nullptr;
        EXPECT_EQ(attune_plan_create(&p, &options, &plan), ATTUNE_UNSUPPORTED);
        EXPECT_EQ(plan, nullptr);
        const std::string message = attune_last_error();
        EXPECT_NE(message.find(fmt::format("{}: it is built for q, kv, o of ", k->name)), std::string::npos) << message;
    }
}

} // namespace
} // namespace attune::contract
