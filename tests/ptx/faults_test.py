#!/usr/bin/env python3
"""Faults put into the kernels on purpose, which the interpreter or the comparison with float64 has to find.

  faults_test.py --kernels FOLDER
"""
import argparse
import re
import sys
import unittest

import catalogue
import numpy as np
from attention import Problem, check
from ptx import PtxError

options = argparse.ArgumentParser()
options.add_argument("--kernels", required=True)


def without(pattern):
    """Texts that each lack one line of attend that has the pattern."""
    def make(text):
        begin, end = text.index(".entry attend("), text.index("\n}", text.index(".entry attend("))
        for match in re.compile(rf"^.*{pattern}.*\n", re.M).finditer(text, begin, end):
            yield match[0].strip(), text[:match.start()] + text[match.end():]
    return make


def changed(pattern, replacement, count=1):
    """One text in which the first matches of the pattern in attend are replaced."""
    def make(text):
        begin = text.index(".entry attend(")
        new, n = re.subn(pattern, replacement, text[begin:], count=count)
        if n:
            yield f"{pattern} -> {replacement}", text[:begin] + new
    return make


# (what, texts, kinds of error; "wrong": the results differ)
FAULTS = [
    ("a barrier left out", without(r"bar\.sync"), "race in-flight uninitialised barrier"),
    ("a wait left out", without(r"cp\.async\.wait_group(?=.*\n.*bar)"), "in-flight"),
    ("V not transposed", changed(r"x4\.trans", "x4", 0), "wrong"),
    ("K transposed", changed(r"x4\.shared", "x4.trans.shared"), "wrong"),
    ("a shuffle over other threads", changed(r"(shfl\.sync\.bfly\.b32.*), 2, 31", r"\1, 4, 31"), "wrong"),
    ("a shuffle that changes nothing", changed(r"(shfl\.sync\.bfly\.b32.*), 1, 31", r"\1, 0, 31"), "wrong"),
    ("a copy of other bytes", changed(r"(cp\.async\.cg\.shared\.global \[%\w+)\+(\d+)\]", lambda m: f"{m[1]}+{int(m[2]) + 16}]"), "wrong uninitialised race in-flight bounds"),
    ("a store of fewer rows", changed(r"(\n\s*@.*bra[^\n]*\n[^\n]*\n(?:[^\n]*\n){0,40}?)\s*st\.global\.b32 ", r"\1//"), "wrong uninitialised"),
    ("exponentials of other numbers", changed(r"ex2\.approx\.ftz\.f32 \t(%\w+), (%\w+);", r"ex2.approx.ftz.f32 \t\1, 0f00000000;"), "wrong"),
    ("an unknown modifier", changed(r"mma\.sync\.aligned", "mma.sp.sync.aligned"), "unsupported"),
]


class Faults(unittest.TestCase):
    PROBLEMS = [lambda d: Problem(100, 150, heads=2, high=50, **d)]

    def outcome(self, text, s, seed=None):
        """ok, wrong, or the kind of error."""
        how = {"splits": 2} if s.split else {}
        if seed is not None:
            how["order"] = np.random.default_rng(seed)
        try:
            for p in self.PROBLEMS:
                check(text, s, p({"dk": s.dk, "dv": s.dv}), dict(how))
        except PtxError as error:
            return error.kind
        except AssertionError:
            return "wrong"
        return "ok"

    def faults_of(self, name, s):
        text = catalogue.ptx(args.kernels, name)
        self.assertEqual(self.outcome(text, s), "ok")
        for what, texts, kinds in FAULTS:
            found = 0
            for where, faulty in texts(text):
                found += 1
                with self.subTest(kernel=name, fault=what, where=where):
                    self.assertIn(self.outcome(faulty, s), kinds.split())
            with self.subTest(kernel=name, fault=what):
                self.assertGreater(found, 0, "nothing to change")

    def test_one_stage(self):
        self.faults_of(*next(k for k in catalogue.kernels() if k[1].dk == 64 and not k[1].split))

    def test_query_in_shared_memory(self):
        self.faults_of(*next(k for k in catalogue.kernels() if not k[1].qreg and not k[1].split))


if __name__ == "__main__":
    args, rest = options.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=1)
