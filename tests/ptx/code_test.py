#!/usr/bin/env python3
"""The machine code of the tensor core kernels: registers, no spills, shared memory, and the mix of the loop.

  code_test.py --kernels FOLDER [--all]     compares with figures.json; without --all only one kernel of those that differ
                                            in nothing but f16 and bf16
  code_test.py --kernels FOLDER --record    writes it anew

HMMA and LDSM of the loop are exact: they follow from the tiles. Registers and the other instructions may differ between
versions of ptxas by what TOLERANCE says.
"""
import argparse
import json
import sys
import tempfile
import unittest
from pathlib import Path

import catalogue
import sass

FIGURES = Path(__file__).resolve().parent / "figures.json"
TOLERANCE = {"registers": 0.06, "others": 0.08}

options = argparse.ArgumentParser()
options.add_argument("--kernels", required=True)
options.add_argument("--record", action="store_true")
options.add_argument("--all", action="store_true")


def figures(name, architecture, folder):
    cubin = Path(folder) / "kernel.cubin"
    functions = sass.assemble(Path(args.kernels) / f"{name}.ptx", architecture, cubin)
    counts, branches = sass.loop_of_products(cubin)
    loop = {"HMMA": counts["HMMA"], "LDSM": counts["LDSM"], "others": sum(counts.values()) - counts["HMMA"] - counts["LDSM"]}
    return functions, loop, counts, branches


def expected_loop(s):
    """Products and loads of matrices for a block of keys and a warp."""
    row_sums = s.mt * s.k // 16
    hmma = s.mt * (s.k // 8) * (s.dk // 16) + s.mt * (s.dv // 8) * (s.k // 16) + row_sums
    ldsm = (s.k // 16) * (s.dk // 16) + (s.dv // 16) * (s.k // 16) + (0 if s.qreg else s.mt * s.dk // 16)
    return hmma, ldsm


class Code(unittest.TestCase):
    def test_figures(self):
        recorded = json.loads(FIGURES.read_text())
        with tempfile.TemporaryDirectory() as folder:
            for name, s in catalogue.kernels():
                if s.type == "bf16" and s.dk != 64 and not args.all:
                    continue
                for architecture in catalogue.ARCHITECTURES:
                    functions, loop, counts, branches = figures(name, architecture, folder)
                    with self.subTest(kernel=name, architecture=architecture):
                        self.assertEqual({f: x["spills"] + x["stack"] for f, x in functions.items()}, dict.fromkeys(functions, 0))
                        self.assertEqual(counts["spill"], 0)
                        # ptxas counts static memory only, on sm_90 also 1 KiB that is the system's.
                        self.assertIn(functions["attend"]["shared"] - (0 if s.dynamic_bytes else s.shared_bytes), (0, 1024))
                        self.assertEqual((loop["HMMA"], loop["LDSM"]), expected_loop(s))
                        self.assertEqual(sorted(branches), ["mask", "rescale"] if s.lazy else ["mask"])
                        self.assertEqual(counts["STS"] + counts["LDS"], 0, "P goes through registers")
                        registers, others = recorded[name][architecture]
                        self.assertLessEqual(functions["attend"]["registers"], min(255, round(registers * (1 + TOLERANCE["registers"]))))
                        self.assertAlmostEqual(loop["others"], others, delta=others * TOLERANCE["others"])

    def test_newer_architectures(self):
        """PTX for sm_80 is what later devices compile."""
        name, _ = catalogue.kernels()[1]
        with tempfile.TemporaryDirectory() as folder:
            for architecture in ("sm_86", "sm_89", "sm_100", "sm_120"):
                with self.subTest(architecture=architecture):
                    functions = sass.assemble(Path(args.kernels) / f"{name}.ptx", architecture, Path(folder) / "k")
                    self.assertEqual(functions["attend"]["spills"], 0)


def record():
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, _ in catalogue.kernels():
            result[name] = {}
            for architecture in catalogue.ARCHITECTURES:
                functions, loop, _, branches = figures(name, architecture, folder)
                result[name][architecture] = [functions["attend"]["registers"], loop["others"]]
                print(f"{name:44} {architecture} {functions['attend']['registers']:4} registers, loop {loop} and {branches}")
    FIGURES.write_text("{\n" + ",\n".join(f' "{n}": {json.dumps(v)}' for n, v in result.items()) + "\n}\n")


if __name__ == "__main__":
    args, rest = options.parse_known_args()
    if args.record:
        record()
    else:
        unittest.main(argv=[sys.argv[0], *rest], verbosity=1)
