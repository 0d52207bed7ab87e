// The case syntax: what is read, what is written, and the exact messages.
#include "lib/case.h"
#include "lib/error.h"
#include "lib/inputs.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

namespace attune::tools {
namespace {

std::string error_of(std::string_view text) {
    try {
        parse_case(text);
    } catch (const Error &e) {
        return e.what();
    }
    return "no error";
}

TEST(Case, DefaultsFillWhatIsLeftOut) {
    const Case c = parse_case("f32:n7:d3");
    EXPECT_EQ(c.B, 1);
    EXPECT_EQ(c.Hq, 1);
    EXPECT_EQ(c.Hkv, 1);
    EXPECT_EQ(c.N, 7);
    EXPECT_EQ(c.M, 7);
    EXPECT_EQ(c.dk, 3);
    EXPECT_EQ(c.dv, 3);
    EXPECT_EQ(to_string(c), "f32:b1:h1:n7:d3");
}

TEST(Case, EveryPart) {
    const Case c =
        parse_case("bf16:b2:h8/4:n10:m20:d64/128:causal:offset=3,-4:window=5,0:mask=bool:mask=bias:kvlen=20,0:"
                   "softcap=30.5:alibi:sink:scale=-0.25:layout=col:kv=f16");
    EXPECT_EQ(c.dtype, ATTUNE_BF16);
    EXPECT_EQ(c.kv_dtype, ATTUNE_F16);
    EXPECT_EQ(c.Hq, 8);
    EXPECT_EQ(c.Hkv, 4);
    EXPECT_EQ(c.dv, 128);
    EXPECT_EQ(c.causal, Causal::top_left);
    EXPECT_EQ(c.offsets, (std::vector<int64_t>{3, -4}));
    EXPECT_EQ(c.window_left, 5);
    EXPECT_EQ(c.window_right, 0);
    EXPECT_TRUE(c.mask && c.bias && c.alibi && c.sink);
    EXPECT_EQ(c.kv_len, (std::vector<int64_t>{20, 0}));
    EXPECT_EQ(c.softcap, 30.5f);
    EXPECT_EQ(c.scale, -0.25f);
    EXPECT_EQ(c.layout, Layout::col);

    const attune_problem p = to_problem(c);
    EXPECT_EQ(p.flags, uint32_t(ATTUNE_SCALE | ATTUNE_CAUSAL | ATTUNE_MASK | ATTUNE_BIAS | ATTUNE_KV_LEN |
                                ATTUNE_OFFSETS | ATTUNE_SOFTCAP | ATTUNE_ALIBI | ATTUNE_SINK | ATTUNE_STRIDED_V));
    EXPECT_EQ(p.q_dtype, ATTUNE_BF16);
    EXPECT_EQ(p.o_dtype, ATTUNE_BF16);
    EXPECT_EQ(p.kv_dtype, ATTUNE_F16);
    EXPECT_EQ(p.window_left, 5);
    EXPECT_EQ(p.scale, -0.25f);
}

TEST(Case, PartsInAnyOrder) {
    EXPECT_EQ(parse_case("f32:causal:d8:m4:n2:h2:b3"), parse_case("f32:b3:h2:n2:m4:d8:causal"));
}

TEST(Case, BottomRightSetsTheOffset) {
    const Case c = parse_case("f32:n10:m25:d8:causal-br");
    EXPECT_EQ(to_problem(c).offset, 15);
    EXPECT_EQ(offset_of(c, 0), 15);
    EXPECT_TRUE(to_problem(c).flags & ATTUNE_CAUSAL);
}

TEST(Case, OneLengthStandsForAllBatches) {
    EXPECT_EQ(parse_case("f32:b3:n4:d8:kvlen=2").kv_len, (std::vector<int64_t>{2, 2, 2}));
}

TEST(Case, ListOfOneOffset) {
    const Case c = parse_case("f32:n4:d8:causal:offset=3,");
    EXPECT_EQ(c.offsets, std::vector<int64_t>{3});
    EXPECT_TRUE(to_problem(c).flags & ATTUNE_OFFSETS);
    EXPECT_EQ(to_string(c), "f32:b1:h1:n4:d8:causal:offset=3,");
}

TEST(Case, Messages) {
    EXPECT_EQ(error_of("f32:n4:d0"), "case 'f32:n4:d0': d=0; expected at least 1 (and at most 2^40)");
    EXPECT_EQ(error_of("f32:h8/3:n4:d64"), "case 'f32:h8/3:n4:d64': h8/3; expected query heads (8) to be a multiple of "
                                           "key-value heads (3)");
    EXPECT_EQ(error_of("f32:n4:d8:mask=boool"),
              "case 'f32:n4:d8:mask=boool': mask=boool; expected mask=bool or mask=bias (both may be given)");
    EXPECT_EQ(error_of("f32:d8"), "case 'f32:d8': n is missing; expected the number of queries, as in "
                                  "f32:b1:h8/2:n1024:m4096:d64/64:causal");
    EXPECT_EQ(error_of("f32:n4:d8:n5"), "case 'f32:n4:d8:n5': 'n' is given twice; expected each part at most once");
    EXPECT_EQ(error_of("f32:n4x:d8"), "case 'f32:n4x:d8': n=4x; expected a whole number");
    EXPECT_EQ(error_of("f32:n-4:d8"), "case 'f32:n-4:d8': n=-4; expected at least 0 (and at most 2^40)");
    EXPECT_EQ(error_of("f32:n99999999999999999999:d8"),
              "case 'f32:n99999999999999999999:d8': n=99999999999999999999; expected at least 0 (and at most 2^40)");
    EXPECT_EQ(error_of("f32:n4:d8:window=3"), "case 'f32:n4:d8:window=3': window=3; expected two numbers, left and "
                                              "right, as in window=256,0 (-1: unbounded)");
    EXPECT_EQ(error_of("f32:n4:d8:kvlen=5"),
              "case 'f32:n4:d8:kvlen=5': kvlen=5; expected at most the number of keys (m=4)");
    EXPECT_EQ(error_of("f32:b2:n4:d8:offset=1,2,3"),
              "case 'f32:b2:n4:d8:offset=1,2,3': offset= has 3 numbers; expected one for each batch (b=2)");
    EXPECT_EQ(error_of("f32:n4:d8:softcap=0"), "case 'f32:n4:d8:softcap=0': softcap=0; expected a number above 0");
    EXPECT_EQ(error_of("f32:n4:d8:scale=inf"), "case 'f32:n4:d8:scale=inf': scale=inf; expected a finite number");
    EXPECT_EQ(error_of("f32:n4:d8:layout=row"), "case 'f32:n4:d8:layout=row': layout=row; expected bhsd, bshd or col");
    EXPECT_EQ(error_of("n4:d8"), "case 'n4:d8': it begins with 'n4'; expected a type first (f32, bf16 or f16), as in "
                                 "f32:b1:h8/2:n1024:m4096:d64/64:causal");
    EXPECT_EQ(error_of("f32:n=4:d8"), "case 'f32:n=4:d8': 'n=4'; expected n4 (sizes are written without '=')");
    EXPECT_NE(error_of("").find("is empty"), std::string::npos);
    EXPECT_NE(error_of("f32:n4:d8:causal-br:offset=2").find("both causal-br and offset="), std::string::npos);
    EXPECT_NE(error_of("f32:n4:d8:").find("'' is not a part of a case"), std::string::npos);
}

TEST(Case, UnknownPartListsTheKnown) {
    const std::string message = error_of("f32:n4:d8:casual");
    EXPECT_NE(message.find("'casual' is not a part of a case; expected one of: "), std::string::npos) << message;
    for (const char *known : {"causal-br", "window=L,R", "mask=bool", "kvlen=", "alibi", "sink", "layout=L", "kv=T"})
        EXPECT_NE(message.find(known), std::string::npos) << known;
}

TEST(Case, EveryBrokenTextIsAnErrorAndNeverACrash) {
    rc::check("any text", [](const std::string &text) { error_of(text); });
    rc::check("a case with one character changed", [] {
        std::string text = to_string(random_case(*rc::gen::arbitrary<uint64_t>(), CaseSpace{}));
        text[*rc::gen::inRange<size_t>(0, text.size())] = *rc::gen::arbitrary<char>();
        error_of(text);
    });
}

TEST(Case, RoundTrip) {
    rc::check("parse(to_string(c)) == c", [](uint64_t seed) {
        CaseSpace space;
        space.dtypes = {
            {ATTUNE_F32, ATTUNE_F32}, {ATTUNE_F32, ATTUNE_BF16}, {ATTUNE_BF16, ATTUNE_BF16}, {ATTUNE_F16, ATTUNE_F16}};
        const Case c = random_case(seed, space);
        RC_ASSERT(parse_case(to_string(c)) == c);
    });
    rc::check("floats survive", [](float x) {
        RC_PRE(std::isfinite(x));
        Case c = parse_case("f32:n4:d8");
        c.scale = x;
        RC_ASSERT(parse_case(to_string(c)) == c);
    });
}

TEST(Case, RandomCasesStayWithinBoundsAndReachTheSpace) {
    CaseSpace space;
    int causal = 0, windows = 0, grouped = 0, unequal = 0, layouts = 0, lists = 0, empty = 0, large_d = 0, packed = 0,
        special = 0;
    space.sizes = {{57, 64, 57, 64}, {129, 192, 97, 128}};
    for (uint64_t seed = 0; seed < 2000; ++seed) {
        const Case c = random_case(seed, space);
        ASSERT_LE(c.B * c.Hq * c.N * c.M * c.dk, space.most) << to_string(c);
        ASSERT_EQ(c.Hq % c.Hkv, 0);
        ASSERT_GE(c.N, 1);
        causal += c.causal != Causal::none;
        windows += c.window_left >= 0 || c.window_right >= 0;
        grouped += c.Hq != c.Hkv;
        unequal += c.dk != c.dv;
        layouts += c.layout != Layout::bhsd;
        lists += !c.offsets.empty();
        empty += c.M == 0;
        large_d += c.dk > 256;
        packed += !c.q_lens.empty();
        special += (c.dk == 64 && c.dv == 64) || (c.dk == 192 && c.dv == 128);
    }
    for (int count : {causal, windows, grouped, unequal, layouts}) EXPECT_GT(count, 200);
    EXPECT_GT(special, 300);
    for (int count : {lists, empty, large_d, packed}) EXPECT_GT(count, 10);
}

TEST(Case, RandomCasesKeepToTheFlags) {
    CaseSpace space;
    space.flags = ATTUNE_CAUSAL;
    space.window = space.gqa = false;
    for (uint64_t seed = 0; seed < 300; ++seed) {
        const Case c = random_case(seed, space);
        ASSERT_EQ(to_problem(c).flags & ~uint32_t(ATTUNE_CAUSAL | ATTUNE_STRIDED_V), 0u) << to_string(c);
        ASSERT_EQ(c.window_left, -1);
        ASSERT_EQ(c.Hq, c.Hkv);
    }
}

TEST(Case, PackedSequences) {
    const Case c = parse_case("f32:h2:d64:varlen=3,17,0:varlenk=40,0,9:causal-br");
    EXPECT_EQ(c.B, 3);
    EXPECT_EQ(c.N, 17);
    EXPECT_EQ(c.M, 40);
    EXPECT_EQ(total_rows(c), 20);
    EXPECT_EQ(total_keys(c), 49);
    EXPECT_EQ(offset_of(c, 0), 37);
    EXPECT_EQ(offset_of(c, 1), -17);
    EXPECT_EQ(visible_pairs(c), 38 + 39 + 40);
    EXPECT_EQ(to_string(c), "f32:b3:h2:d64:causal-br:varlen=3,17,0:varlenk=40,0,9");
    const attune_problem p = to_problem(c);
    EXPECT_EQ(p.flags, uint32_t(ATTUNE_CAUSAL | ATTUNE_VARLEN | ATTUNE_OFFSETS));
    EXPECT_EQ(p.N, 17);
    EXPECT_EQ(p.M, 40);
    EXPECT_EQ(to_string(parse_case("f32:d64:varlen=7:n9:m30")), "f32:b1:h1:n9:m30:d64:varlen=7");
    EXPECT_EQ(parse_case("f32:d64:varlen=7,8").k_lens, (std::vector<int64_t>{7, 8}));

    EXPECT_EQ(error_of("f32:d8:varlenk=3"),
              "case 'f32:d8:varlenk=3': varlenk= is given without varlen=; expected both, or varlen= alone");
    EXPECT_EQ(error_of("f32:d8:varlen=3,4:varlenk=3"),
              "case 'f32:d8:varlen=3,4:varlenk=3': varlenk= has 1 numbers; expected as many as varlen= (2)");
    EXPECT_EQ(error_of("f32:d8:varlen=3,4:b3"),
              "case 'f32:d8:varlen=3,4:b3': b3; expected the number of sequences of varlen= (2), or none");
    EXPECT_EQ(error_of("f32:d8:varlen=3,4:n3"),
              "case 'f32:d8:varlen=3,4:n3': n3; expected at least the longest sequence (4), or none");
    EXPECT_EQ(error_of("f32:d8:varlen=3,4:kvlen=3,5"),
              "case 'f32:d8:varlen=3,4:kvlen=3,5': kvlen=5; expected at most the number of keys (4)");
    EXPECT_EQ(error_of("f32:d8:varlen="), "case 'f32:d8:varlen=': varlen=; expected a whole number");
}

// Useful work, against counting one by one.
TEST(Case, VisiblePairsAgainstCounting) {
    rc::check("pairs", [](uint64_t seed) {
        CaseSpace space;
        space.most = 100'000;
        const Case c = random_case(seed, space);
        int64_t pairs = 0;
        for (int64_t b = 0; b < c.B; ++b)
            for (int64_t i = 0; i < rows_of(c, b); ++i)
                for (int64_t j = 0; j < keys_of(c, b); ++j) {
                    const int64_t position = i + offset_of(c, b);
                    if (!c.kv_len.empty() && j >= c.kv_len[size_t(b)]) continue;
                    if (c.causal != Causal::none && j > position) continue;
                    if (c.window_left >= 0 && j < position - c.window_left) continue;
                    if (c.window_right >= 0 && j > position + c.window_right) continue;
                    ++pairs;
                }
        RC_ASSERT(visible_pairs(c) == pairs);
    });
    EXPECT_EQ(visible_pairs(parse_case("f32:n4:d8:causal")), 10);
    EXPECT_EQ(useful_flops(parse_case("f32:b2:h3:n4:d8/16")), 2.0 * 24 * 2 * 3 * 16);
}

TEST(Case, HugeOffsetsDoNotOverflow) {
    EXPECT_EQ(visible_pairs(parse_case("f32:n4:d8:causal:offset=9223372036854775807")), 16);
    EXPECT_EQ(visible_pairs(parse_case("f32:n4:d8:causal:offset=-9223372036854775808")), 0);
}

} // namespace
} // namespace attune::tools
