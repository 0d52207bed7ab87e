#!/usr/bin/env python3
"""Every tensor core kernel of the catalogue on the PTX interpreter, against float64.

  mma_test.py --kernels FOLDER [--all]

FOLDER holds NAME.ptx. Without --all each kernel does a few problems.
"""
import argparse
import sys
import unittest

import catalogue
import numpy as np
from attention import Problem, check, inputs, run
from ptx import parse

options = argparse.ArgumentParser()
options.add_argument("--kernels", required=True)
options.add_argument("--all", action="store_true")
options.add_argument("--only", default="", help="kernels whose name has this in it")


def nan_that_some_rows_see(q, k, v):
    v[..., 20, 0] = np.nan
    k[..., 25, 1] = np.inf


def nan_that_no_row_sees(q, k, v):
    k[..., 30:, :] = np.nan
    v[..., 30:, :] = -np.inf


def problems(s):
    """(what, problem, options of the run); those of every test run first."""
    d = {"dk": s.dk, "dv": s.dv}
    some = {"dk": s.dk - 8, "dv": s.dv - 16}
    quick = [
        ("causal, ragged, groups", Problem(65, 130, heads=4, group=2, high=65, padding=8, **d), {}),
        ("window, kv_len and offset of each batch", Problem(70, 170, low=-20, high=10, batch=2, lengths=[100, 0], offsets=[50, -30], **d), {}),
        ("fewer features, no LSE", Problem(33, 70, heads=4, group=2, batch=2, lse=False, **some), {}),
        ("random order of warps, scale below 0", Problem(40, 64, high=-2, scale=-0.3, **d), {"order": 1}),
        ("no key", Problem(5, 0, **d), {}),
        ("strides that cp.async cannot take", Problem(9, 20, heads=2, padding=3, **d), {}),
    ]
    more = [
        ("dense", Problem(96, 96, **d), {}),
        ("copies that land at once", Problem(96, 96, high=0, **d), {"late": False}),
        ("rows that see no key", Problem(100, 33, high=-40, heads=2, **d), {}),
        ("one row, one key", Problem(1, 1, **d), {}),
        ("decode", Problem(1, 300, high=299, heads=8, group=8, batch=2, lengths=[300, 77], rows_outside=True, **d), {}),
        ("few rows of a long group", Problem(3, 200, high=197, heads=12, group=6, **d), {}),
        ("rows outside heads", Problem(7, 200, high=193, heads=2, rows_outside=True, **d), {}),
        ("window only", Problem(150, 150, low=-31, high=40, **d), {}),
        ("scale 0", Problem(64, 128, scale=0.0, **d), {}),
        ("large scores", Problem(70, 150, amplitude=5.0, high=3, seed=4, **d), {}),
        ("NaN that some rows see", Problem(40, 40, high=0, edit=nan_that_some_rows_see, **d), {}),
        ("NaN that no row sees", Problem(20, 40, high=9, edit=nan_that_no_row_sees, **d), {}),
        ("NaN behind the last key", Problem(20, 40, lengths=[30], edit=nan_that_no_row_sees, **d), {}),
        ("features with a stride", Problem(9, 40, dk=s.dk - 3, dv=s.dv - 7, feature=2, high=31), {}),
        ("offsets far outside", Problem(20, 40, low=-(1 << 40), high=1 << 40, offsets=[-(1 << 50)], **d), {}),
    ]
    return quick, more


class Kernels(unittest.TestCase):
    def test_against_float64(self):
        worst = {}
        for name, s in catalogue.kernels():
            if args.only not in name:
                continue
            quick, more = problems(s)
            # The code for bf16 differs from the other in a few instructions.
            chosen = quick + more if args.all else quick[:{"f16": 6, "bf16": 1}[s.type]]
            entries = parse(catalogue.ptx(args.kernels, name)).entries
            for what, p, how in chosen:
                how = dict(how)
                if "order" in how:
                    how["order"] = np.random.default_rng(how["order"])
                if s.split:
                    how["splits"] = 3
                with self.subTest(kernel=name, problem=what):
                    error, statistics, _ = check(entries, s, p, how)
                    worst[s.type] = max(worst.get(s.type, 0.0), float(error))
                    for count in ("ldmatrix conflicts", "copies never waited for"):
                        self.assertEqual(statistics.get("attend", {}).get(count, 0), 0, count)
        print("worst error / bound:", {t: round(e, 3) for t, e in worst.items()})
        self.assertGreater(len(worst), 0)

    def test_what_is_not_finite_is_done_again(self):
        name, s = catalogue.kernels()[1]
        entries = parse(catalogue.ptx(args.kernels, name)).entries
        *_, none = run(entries, s, Problem(40, 40, high=0, dk=s.dk, dv=s.dv))
        *_, some = run(entries, s, Problem(130, 130, high=0, dk=s.dk, dv=s.dv, edit=nan_that_some_rows_see))
        self.assertEqual(none, 0)
        # The rows from 20 on see it, and those before it stand in blocks with it: the first 64 rows, or all.
        self.assertGreater(some, 0)

    def test_bits_do_not_depend_on_the_batch(self):
        for name, s in catalogue.kernels()[:2] + [k for k in catalogue.kernels() if k[1].split][:1]:
            entries = parse(catalogue.ptx(args.kernels, name)).entries
            how = {"splits": 3} if s.split else {}
            both = Problem(50, 100, heads=4, group=2, batch=2, high=50, dk=s.dk, dv=s.dv)
            o, lse, *_ = run(entries, s, both, dict(how))
            q, k, v = inputs(both, s.type)

            def second(q1, k1, v1):
                q1[:], k1[:], v1[:] = q[1:], k[1:], v[1:]
            one = Problem(50, 100, heads=4, group=2, high=50, dk=s.dk, dv=s.dv, edit=second)
            o1, lse1, *_ = run(entries, s, one, dict(how))
            with self.subTest(kernel=name):
                np.testing.assert_array_equal(o[1:].view(np.uint16), o1.view(np.uint16))
                np.testing.assert_array_equal(lse[1:], lse1)


if __name__ == "__main__":
    args, rest = options.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=1)
