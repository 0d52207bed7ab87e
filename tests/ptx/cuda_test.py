#!/usr/bin/env python3
"""Every CUDA kernel of the registry, Halide's and MLIR's, through `attune verify --device cuda` on the driver that runs on
the PTX interpreter: host code, launches and device code, against float64.

  cuda_test.py right|all|errors --attune PROGRAM --driver LIBRARY

right: a few cases, in which every kernel takes part; all: many more, and random ones; errors: what is said when the
driver fails.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

CASES = [
    "f32:b1:h4/2:n37:m70:d64:causal-br",
    "f32:b1:h2:n33:m70:d20/32:causal:offset=-20:scale=-0.3",
    "f32:b2:h4/2:n5:m90:d128:kvlen=0,77:window=20,5:offset=60,-10:layout=bshd",
    "f32:b1:h2:n3:m0:d64",
    "f32:b1:h2:n20:m40:d64:mask=bool:mask=bias:softcap=5:alibi:sink",
    "f16:b1:h4/2:n70:m130:d64:causal-br",
    "f16:b2:h8/2:n1:m200:d128:kvlen=200,33:layout=bshd",
    "f16:b1:h2:n30:m50:d32:window=-1,3:scale=0",
    "f16:b1:h1:n9:m33:d40/48:layout=col",
    "f16:b1:h2:n5:m20:d192/128",
    "bf16:b2:h4/2:n40:m100:d64:kvlen=70,0:window=30,2:offset=5,40",
    "bf16:b1:h2:n3:m150:d128:causal-br",
    "bf16:b1:h2:n17:m40:d24/32:causal",
]
MORE = [
    "f32:b1:h2:n130:m257:d64:causal-br", "f32:b1:h2:n64:m64:d128", "f32:b1:h8/1:n1:m500:d64", "f32:b1:h2:n20:m300:d64:window=15,15:offset=100",
    "f16:b1:h2:n200:m200:d128:causal", "f16:b1:h2:n129:m100:d96:causal:offset=-40", "f16:b1:h2:n50:m120:d256:causal-br", "f16:b3:h2:n20:m60:d80:kvlen=60,1,0",
    "f16:b1:h12/2:n4:m300:d256:causal-br", "f16:b1:h2:n1:m1:d8", "bf16:b1:h2:n200:m200:d128:window=50,0", "bf16:b1:h2:n65:m65:d256",
    "bf16:b1:h16/2:n1:m700:d64", "bf16:b1:h4/2:n33:m90:d192/128:causal-br:scale=0", "bf16:b2:h2:n30:m60:d64:layout=col",
]

options = argparse.ArgumentParser()
options.add_argument("group", choices=["right", "all", "errors"])
options.add_argument("--attune", required=True)
options.add_argument("--driver", required=True)


def attune(*arguments, **environment):
    # Halide lets all threads of a row write its LSE.
    env = {**os.environ, "ATTUNE_CUDA_LIBRARY": args.driver, "ATTUNE_PTX_SAME_WRITES": "1", **environment}
    return subprocess.run([args.attune, *arguments], capture_output=True, text=True, env=env)


def cuda_kernels():
    with tempfile.TemporaryDirectory() as folder:
        done = attune("info", "--json", f"{folder}/info.json")
        if done.returncode:
            raise RuntimeError(done.stderr)
        registry = json.loads(Path(f"{folder}/info.json").read_text())
    return {k["name"] for k in registry["kernels"] if k["device"] == "cuda"}


class Right(unittest.TestCase):
    def verify(self, arguments, **environment):
        """The kernels that ran."""
        with tempfile.TemporaryDirectory() as folder:
            done = attune("verify", "--device", "cuda", "--threads", "1", "--json", f"{folder}/rows.json", *arguments, **environment)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            rows = json.loads(Path(f"{folder}/rows.json").read_text())["rows"]
        for row in rows:
            self.assertTrue(row["ok"], row)
        return {row["kernel"] for row in rows}

    def test_every_kernel(self):
        cases = CASES + (MORE if args.group == "all" else [])
        ran = self.verify([a for case in cases for a in ("--case", case)])
        self.assertEqual(ran, cuda_kernels())

    def test_random_order_of_warps(self):
        for seed in ("1", "2", "3") if args.group == "all" else ("1",):
            with self.subTest(seed=seed):
                self.assertTrue(self.verify(["--case", "f16:b1:h1:n40:m70:d64:causal-br", "--strategy", "mlir_mma,gpu_block"], ATTUNE_PTX_ORDER=seed))

    def test_random_cases(self):
        if args.group == "all":
            self.assertTrue(self.verify(["--random", "60"]))


class Errors(unittest.TestCase):
    def fails(self, words, *arguments, **environment):
        done = attune("verify", "--device", "cuda", *arguments, **environment)
        self.assertNotEqual(done.returncode, 0, done.stdout)
        for word in words:
            self.assertIn(word, done.stdout + done.stderr)

    CASE = ("--case", "f16:b1:h2:n40:m40:d64", "--kernel", "attn_mlir_mma_f16_big_sm_80")

    def test_no_device(self):
        self.fails(["CUDA_ERROR_NO_DEVICE"], *self.CASE, ATTUNE_PTX_NO_DEVICE="1")

    def test_no_driver(self):
        self.fails(["there is no CUDA driver", "/no/such/driver"], *self.CASE, ATTUNE_CUDA_LIBRARY="/no/such/driver")

    def test_an_old_device(self):
        self.fails(["is sm_75, and it is built for sm_80"], *self.CASE, ATTUNE_PTX_CAPABILITY="75")

    def test_out_of_memory(self):
        self.fails(["could not be allocated", "CUDA_ERROR_OUT_OF_MEMORY"], *self.CASE, ATTUNE_PTX_MEMORY="20000")

    def test_a_launch_that_fails(self):
        self.fails(["attn_mlir_mma_f16_big_sm_80, phase main", "CUDA_ERROR_LAUNCH_FAILED"], *self.CASE, ATTUNE_PTX_FAIL_LAUNCH="1")

    def test_what_a_kernel_cannot_do(self):
        for case, reason in (("f16:b1:h2:n4:m40:d60", "it takes dk in multiples of 8"), ("f16:b1:h2:n4:m40:d64:mask=bias", "it has no bias"),
                             ("f16:b1:h2:n4:m40:d64/44", "it takes dv in multiples of 8"), ("f16:b1:h2:n4:m40:d64:alibi", "it has no alibi")):
            with self.subTest(case=case):
                done = attune("verify", "--device", "cuda", "--verbose", "--case", case, "--strategy", "mlir_mma,mlir_mma_split")
                self.assertIn(reason, done.stdout + done.stderr)
                self.assertNotIn("right;", done.stdout)


if __name__ == "__main__":
    args, rest = options.parse_known_args()
    unittest.main(argv=[sys.argv[0], "Errors" if args.group == "errors" else "Right", *rest], verbosity=1)
