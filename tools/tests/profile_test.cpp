// Loops in a disassembly, and samples of a function that is known.
#include "lib/profile.h"

#include <chrono>
#include <gtest/gtest.h>

// By C's rules, so that its symbol is its name; nothing else calls it, nothing inlines it.
extern "C" __attribute__((noinline, visibility("default"))) double attune_profile_test_work(const double *x,
                                                                                            int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += x[i]; // a chain of additions: some time in a small loop
    return sum;
}

namespace attune::tools {
namespace {

constexpr const char *kDisassembly = R"(
kernel:     file format elf64-x86-64

0000000000001000 <kernel>:
    1000:	push   %rbp
    1001:	vmovups (%rsi),%zmm0
    1005:	vmovups 0x40(%rsi),%zmm1
    100a:	vfmadd231ps (%rdi){1to16},%zmm0,%zmm2
    1010:	vfmadd231ps %zmm1,%zmm4,%zmm3
    1015:	vmovups %zmm2,(%rdx)
    101a:	jne    1005 <kernel+0x5>
    1020:	vmaxps %zmm1,%zmm2,%zmm2
    1026:	vcvttps2dq %zmm2,%zmm3
    102b:	vaddps %zmm1,%zmm1,%zmm1
    1030:	jb     1020 <kernel+0x20>
    1035:	jae    1001 <kernel+0x1>
    103b:	je     1060 <kernel+0x60>
    1040:	mov    (%rax),%rcx
    1044:	mov    %rcx,(%rdx)
    1048:	jne    1040 <kernel+0x40>
    1060:	ret
)";

TEST(Loops, AreInnermostAndToldApart) {
    const auto loops = find_loops(kDisassembly);
    ASSERT_EQ(loops.size(), 3u); // the one from 1001 holds two of them
    EXPECT_EQ(loops[0].begin, 0x1005u);
    EXPECT_EQ(loops[0].end, 0x101au);
    EXPECT_EQ(loops[0].instructions, 5);
    EXPECT_EQ(loops[0].fma, 2);
    EXPECT_EQ(loops[0].loads, 2); // not the store
    EXPECT_EQ(loops[0].kind, LoopKind::matmul);
    EXPECT_EQ(loops[1].kind, LoopKind::softmax);
    EXPECT_EQ(loops[2].kind, LoopKind::moving);
    EXPECT_TRUE(find_loops("").empty());
}

TEST(Profile, FindsTheFunctionThatRuns) {
    const std::vector<double> x(10000, 1.0);
    volatile double out = 0;
    const Profile profile = profile_calls([&] { out = attune_profile_test_work(x.data(), int64_t(x.size())); },
                                          {"attune_profile_test_work"}, 0.2);
    if (!profile.missing.empty()) GTEST_SKIP() << profile.missing;
    EXPECT_EQ(out, 10000);
    EXPECT_GT(profile.samples, 20);
    double total = 0, around = 1;
    for (const auto &part : profile.parts) {
        total += part.share;
        if (part.name == "around") around = part.share;
    }
    EXPECT_NEAR(total, 1, 1e-9);
    EXPECT_LT(around, 0.2);
#ifdef __OPTIMIZE__
    ASSERT_FALSE(profile.loops.empty());
    EXPECT_GT(profile.loops[0].share, 0.5);
#endif
}

} // namespace
} // namespace attune::tools
