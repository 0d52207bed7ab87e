"""The counting of inner_loops.py, on assembly written here."""
import unittest

from inner_loops import differences, figures_of, innermost_loops

HEAD = "kernel:\n\tpushq\t%rbx\n"


def loop(label, body):
    return f"{label}:                     # =>This Inner Loop\n" + "".join(f"\t{line}\n" for line in body) + f"\tjne\t{label}\n"


FMA = "vfmadd231ps\t%zmm1, %zmm2, %zmm3"
FMA_FROM_MEMORY = "vfmadd231ps\t(%rsi){1to16}, %zmm2, %zmm3"
MATMUL = ["vmovups\t64(%rdi), %zmm0", FMA_FROM_MEMORY, *[FMA] * 9, "addq\t$64, %rdi"]


class Counting(unittest.TestCase):
    def test_loads_and_multiply_adds(self):
        figures, loops = figures_of(HEAD + loop(".LBB0_1", MATMUL), "avx512")
        self.assertEqual(loops, [dict(fma=10, loads=2, spills=0, half=0, instructions=13)])
        self.assertEqual((figures["loops"], figures["fma_per_load"], figures["fma_share"]), (1, 5.0, round(10 / 13, 3)))

    def test_only_innermost_loops(self):
        outer = ".LBB0_1:\n\tvmovaps\t%zmm0, %zmm1\n" + loop(".LBB0_2", MATMUL) + f"\t{FMA}\n\tjb\t.LBB0_1\n"
        self.assertEqual(len(innermost_loops(HEAD + outer)), 1)
        self.assertEqual(figures_of(HEAD + outer, "avx512")[1][0]["fma"], 10)

    def test_a_jump_forward_is_no_loop(self):
        self.assertEqual(innermost_loops(HEAD + "\tje\t.LBB0_9\n\tnop\n.LBB0_9:\n\tretq\n"), [])

    def test_stores_are_no_loads(self):
        body = [*MATMUL, "vmovups\t%zmm0, (%rdx)", "vmovups\t%zmm0, 64(%rdx) {%k1}"]
        self.assertEqual(figures_of(HEAD + loop(".LBB0_1", body), "avx512")[1][0]["loads"], 2)

    def test_spills(self):
        spilled = [*MATMUL, "vmovups\t%zmm9, 128(%rsp)                # 64-byte Spill",
                   "vfmadd231ps\t192(%rsp), %zmm2, %zmm3  # 64-byte Folded Reload",
                   "movq\t%rax, 8(%rsp)                      # 8-byte Spill"]  # no vector
        figures, _ = figures_of(HEAD + loop(".LBB0_1", spilled), "avx512")
        self.assertEqual(figures["spills"], 2)
        clean, _ = figures_of(HEAD + loop(".LBB0_1", MATMUL), "avx512")
        self.assertEqual(differences("k", clean, figures, 0.2), ["k: spills 2; expected at most 0"])
        self.assertEqual(differences("k", figures, clean, 0.2), [])

    def test_half_width(self):
        body = [*MATMUL, "vaddps\t%ymm1, %ymm2, %ymm3", "vaddss\t%xmm1, %xmm2, %xmm3", "vextractf64x4\t$1, %zmm1, %ymm2"]
        self.assertEqual(figures_of(HEAD + loop(".LBB0_1", body), "avx512")[0]["half"], 1)
        narrow = [*(line.replace("zmm", "ymm") for line in MATMUL), "vaddps\t%xmm1, %xmm2, %xmm3"]
        self.assertEqual(figures_of(HEAD + loop(".LBB0_1", narrow), "avx2")[0]["half"], 1)

    def test_softmax_loops_are_apart(self):
        body = [*[FMA] * 8, *["vmaxps\t%zmm1, %zmm2, %zmm3"] * 20, "vmovups\t%zmm9, 128(%rsp)    # 64-byte Spill"]
        figures, _ = figures_of(HEAD + loop(".LBB0_1", body) + loop(".LBB0_2", MATMUL), "avx512")
        self.assertEqual((figures["loops"], figures["spills"], figures["softmax_spills"]), (1, 0, 1))

    def test_worse_than_the_table(self):
        good, _ = figures_of(HEAD + loop(".LBB0_1", MATMUL), "avx512")
        more_loads, _ = figures_of(HEAD + loop(".LBB0_1", [*MATMUL, "vmovups\t128(%rdi), %zmm0"]), "avx512")
        self.assertEqual([line.split()[1] for line in differences("k", good, more_loads, 0.05)], ["fma_per_load", "fma_share"])
        none, _ = figures_of(HEAD, "avx512")
        self.assertEqual(differences("k", good, none, 0.05), ["k: no loop of multiply-adds; expected 1"])


if __name__ == "__main__":
    unittest.main()
