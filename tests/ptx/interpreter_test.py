#!/usr/bin/env python3
"""Tests of the PTX interpreter on small kernels: what instructions give, and that each kind of mistake is found."""
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import ml_dtypes
import numpy as np
import ptx.grid
import ptx.machine
from attention import BASE, Device
from ptx import Limits, PtxError, launch, parse

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
ORDERS = [None, np.random.default_rng(1)]


def module(body, parameters=2, registers="", directives=""):
    """A kernel whose parameters are 64-bit words p_param_0 …; %tid.x is in %r0, p_param_i in %rd{i}."""
    listed = ",\n".join(f"\t.param .u64 p_param_{i}" for i in range(parameters))
    loads = "".join(f"\tld.param.b64 %rd{i}, [p_param_{i}];\n" for i in range(parameters))
    return (f"{HEAD}.visible .entry p(\n{listed}\n)\n{directives}\n{{\n\t.reg .pred %p<9>;\n\t.reg .b16 %rs<9>;\n\t.reg .b32 %r<40>;\n"
            f"\t.reg .b64 %rd<20>;\n{registers}\n{loads}\tmov.u32 %r0, %tid.x;\n{body}\n\tret;\n}}\n")


def run(text, *values, threads=32, blocks=1, device=None, dynamic=0, **options):
    device = device or Device(1 << 16)
    return launch(parse(text).entries["p"], device.memory, (blocks, 1, 1), (threads, 1, 1), list(values), dynamic, **options)


def each(line, inputs, output="b32", registers="", before=""):
    """Runs one line for 32 threads: %r10, %r11, %r12 hold the inputs, %r20 (or %rd10) the result."""
    device = Device(1 << 16)
    arrays = [np.asarray(x) for x in inputs]
    places = [device.put(a)[0] for a in arrays]
    size = 8 if output == "b64" else 4
    out_at, out = device.put(np.zeros(32, np.uint64 if size == 8 else np.uint32), False)
    body = "\tmul.wide.u32 %rd15, %r0, 4;\n" + "".join(
        f"\tadd.s64 %rd14, %rd{i}, %rd15;\n\tld.global.b32 %r{10 + i}, [%rd14];\n" for i in range(len(arrays)))
    body += f"{before}\t{line}\n\tmul.wide.u32 %rd15, %r0, {size};\n\tadd.s64 %rd14, %rd{len(arrays)}, %rd15;\n"
    body += f"\tst.global.{output} [%rd14], {'%rd10' if size == 8 else '%r20'};"
    run(module(body, len(arrays) + 1, registers), *places, out_at, device=device)
    return out


class Instructions(unittest.TestCase):
    def setUp(self):
        rng = np.random.default_rng(0)
        self.u = [rng.integers(0, 2 ** 32, 32, dtype=np.uint32) for _ in range(3)]
        self.f = [rng.standard_normal(32).astype(np.float32) for _ in range(3)]

    def same(self, got, expected):
        expected = np.ascontiguousarray(expected)
        np.testing.assert_array_equal(got, expected.view(f"u{expected.itemsize}"))

    def test_integers(self):
        a, b, c = self.u
        signed = [x.view(np.int32) for x in self.u]
        with np.errstate(over="ignore"):
            self.same(each("mad.lo.s32 %r20, %r10, %r11, %r12;", self.u), a * b + c)
            self.same(each("mul.hi.u32 %r20, %r10, %r11;", self.u), ((a.astype(np.uint64) * b) >> np.uint64(32)).astype(np.uint32))
            self.same(each("mul.wide.s32 %rd10, %r10, %r11;", self.u, "b64"), signed[0].astype(np.int64) * signed[1])
            self.same(each("sub.s32 %r20, %r10, 7;", self.u), a - np.uint32(7))
        self.same(each("min.s32 %r20, %r10, %r11;", self.u), np.minimum(signed[0], signed[1]))
        self.same(each("min.relu.s32 %r20, %r10, %r11;", self.u), np.maximum(np.minimum(signed[0], signed[1]), 0))
        self.same(each("max.u32 %r20, %r10, %r11;", self.u), np.maximum(a, b))
        self.same(each("shr.s32 %r20, %r10, 3;", self.u), signed[0] >> 3)
        self.same(each("shl.b32 %r20, %r10, 33;", self.u), np.zeros(32, np.uint32))
        self.same(each("bfe.u32 %r20, %r10, 4, 9;", self.u), (a >> np.uint32(4)) & np.uint32(511))
        self.same(each("xor.b32 %r20, %r10, -2147450880;", self.u), a ^ np.uint32(0x80008000))
        self.same(each("div.u32 %r20, %r10, 1000;", self.u), a // np.uint32(1000))
        truncated = np.trunc(signed[0] / 1000.0).astype(np.int64)
        self.same(each("rem.s32 %r20, %r10, 1000;", self.u), (signed[0] - truncated * 1000).astype(np.int32))
        self.same(each("prmt.b32 %r20, %r10, %r11, 0x5410;", self.u), (a & np.uint32(0xFFFF)) | (b << np.uint32(16)))

    def test_floats(self):
        a, b, c = self.f
        self.same(each("fma.rn.f32 %r20, %r10, %r11, %r12;", self.f), (a.astype(np.float64) * b + c).astype(np.float32))
        self.same(each("sub.f32 %r20, %r10, 0f3F800000;", self.f), a - np.float32(1))
        self.same(each("ex2.approx.ftz.f32 %r20, %r10;", self.f), np.exp2(a.astype(np.float64)).astype(np.float32))
        self.same(each("div.rn.f32 %r20, %r10, %r11;", self.f), a / b)
        self.same(each("cvt.rzi.s32.f32 %r20, %r10;", [100 * a]), np.trunc(100 * a).astype(np.int32))
        self.same(each("cvt.rn.f32.s32 %r20, %r10;", [self.u[0]]), self.u[0].view(np.int32).astype(np.float32))

    def test_nan_and_subnormal(self):
        values = np.resize(np.array([np.nan, 1, -np.inf, 1e-40, -1e-40], np.float32), 32)
        ones = np.ones(32, np.float32)
        self.same(each("max.f32 %r20, %r10, %r11;", [values, ones]), np.where(np.isnan(values), ones, np.fmax(values, ones)))
        flushed = np.where(np.abs(values) < 1e-38, np.copysign(np.float32(0), values), values)
        self.same(each("add.rn.ftz.f32 %r20, %r10, 0f80000000;", [values]), flushed + np.float32(-0.0))
        select = "selp.b32 %r20, 1, 0, %p1;"
        for relation, expected in (("neu", values != 1), ("ne", (values != 1) & ~np.isnan(values)), ("lt", values < 1), ("geu", ~(values < 1))):
            with self.subTest(relation=relation):
                got = each(f"setp.{relation}.f32 %p1, %r10, %r11;\n\t{select}", [values, ones])
                self.same(got, np.where(expected, 1, 0).astype(np.uint32))

    def test_packing(self):
        a, b = self.f[:2]
        halves = np.stack([b, a], 1).astype(np.float16).view(np.uint32).reshape(-1)
        self.same(each("cvt.rn.f16x2.f32 %r20, %r10, %r11;", [a, b]), halves)
        bf16 = np.ascontiguousarray(np.stack([b, a], 1).astype(ml_dtypes.bfloat16)).view(np.uint32).reshape(-1)
        self.same(each("cvt.rn.bf16x2.f32 %r20, %r10, %r11;", [a, b]), bf16)
        self.same(each("mov.b32 {%rs1, %rs2}, %r10;\n\tmov.b32 %r20, {%rs2, %rs1};", [self.u[0]]),
                  (self.u[0] << np.uint32(16)) | (self.u[0] >> np.uint32(16)))

    def test_shuffles(self):
        a, lanes = self.u[0], np.arange(32)
        self.same(each("shfl.sync.bfly.b32 %r20, %r10, 5, 31, -1;", [a]), a[lanes ^ 5])
        self.same(each("shfl.sync.idx.b32 %r20, %r10, 9, 31, -1;", [a]), np.full(32, a[9]))
        self.same(each("shfl.sync.down.b32 %r20, %r10, 3, 31, -1;", [a]), a[np.where(lanes + 3 < 32, lanes + 3, lanes)])
        self.same(each("shfl.sync.up.b32 %r20, %r10, 3, 0, -1;", [a]), a[np.where(lanes >= 3, lanes - 3, lanes)])
        self.same(each("setp.eq.b32 %p1, %r0, 4;\n\tvote.sync.any.pred %p2, %p1, -1;\n\tselp.b32 %r20, 1, 0, %p2;", [a]), np.ones(32, np.uint32))

    def test_branches_and_loops(self):
        # Sum of 0 … tid by a loop whose length differs from thread to thread.
        loop = ("mov.b32 %r20, 0;\n\tmov.b32 %r5, 0;\n$L1:\n\tadd.s32 %r20, %r20, %r5;\n\tadd.s32 %r5, %r5, 1;\n"
                "\tsetp.le.u32 %p1, %r5, %r0;\n\t@%p1 bra $L1;")
        tid = np.arange(32, dtype=np.uint32)
        self.same(each(loop, [self.u[0]]), tid * (tid + 1) // 2)
        self.same(each("mov.b32 %r20, 1;\n\tsetp.lt.u32 %p1, %r0, 7;\n\t@!%p1 mov.b32 %r20, 2;", [self.u[0]]), np.where(tid < 7, 1, 2).astype(np.uint32))

    def test_a_warp_meets_again_at_a_shuffle(self):
        # Half of the warp takes a detour to the end of the code; the shuffle waits for it.
        text = ("setp.lt.u32 %p1, %r0, 16;\n\tmov.b32 %r5, %r0;\n\t@%p1 bra $L2;\n$L1:\n\tshfl.sync.bfly.b32 %r20, %r5, 31, 31, -1;\n\tbra.uni $L3;\n"
                "$L2:\n\tadd.s32 %r5, %r5, 100;\n\tbra.uni $L1;\n$L3:")
        tid = np.arange(32, dtype=np.uint32)
        self.same(each(text, [self.u[0]]), np.where(tid < 16, tid + 100, tid)[::-1])

    def test_unknown(self):
        for line, word in (("add.rz.f32 %r20, %r10, %r11;", "rz"), ("add.sat.s32 %r20, %r10, %r11;", "sat"), ("bogus.b32 %r20, %r10;", "bogus"),
                           ("mul.lo.s16 %r20, %r10, %r11;", "s16"), ("shfl.sync.bfly.b32 %r20, %r10, 1, 31, 15;", "member"),
                           ("cvt.sat.s32.f32 %r20, %r10;", "cvt"), ("ld.volatile.global.b32 %r20, [%rd0];", "volatile")):
            with self.subTest(line=line), self.assertRaisesRegex(PtxError, word) as caught:
                each(line, self.f)
            self.assertEqual(caught.exception.kind, "unsupported")
        with self.assertRaises(PtxError) as caught:
            parse(HEAD + ".visible .func f() { ret; }")
        self.assertEqual(caught.exception.kind, "parse")


class Mistakes(unittest.TestCase):
    """Each kernel is run right, and with one mistake."""

    SHARED = "\t.shared .align 16 .b8 s[1024];\n"
    # Each thread writes a word and reads that of its neighbour.
    EXCHANGE = ("\tshl.b32 %r1, %r0, 2;\n\tmov.b32 %r2, s;\n\tadd.s32 %r3, %r2, %r1;\n\tst.shared.b32 [%r3], %r0;\n{barrier}"
                "\txor.b32 %r4, %r1, {distance};\n\tadd.s32 %r4, %r2, %r4;\n\tld.shared.b32 %r5, [%r4];\n{more}")

    def fails(self, kind, text, *values, **options):
        for order in ORDERS:
            with self.subTest(order=order), self.assertRaises(PtxError) as caught:
                run(text, *values, order=order, **options)
            self.assertIn(caught.exception.kind, kind.split(), caught.exception)

    def exchange(self, barrier="\tbar.sync 0;\n", distance=128, more=""):
        return module(self.EXCHANGE.format(barrier=barrier, distance=distance, more=more), 0, self.SHARED)

    def test_read_after_write(self):
        for order in ORDERS:
            run(self.exchange(), threads=64, order=order)
        self.fails("race uninitialised", self.exchange(barrier=""), threads=64)
        self.fails("race", self.exchange(barrier="", distance=4), threads=32)  # also within a warp

    def test_write_after_read(self):
        again = "\tst.shared.b32 [%r3], %r5;\n"
        run(self.exchange(more="\tbar.sync 0;\n" + again), threads=64)
        self.fails("race", self.exchange(more=again + "\tbar.sync 0;\n"), threads=64)

    def test_write_after_write(self):
        same = "\tmov.b32 %r2, s;\n{barrier}\tst.shared.b32 [%r2{offset}], %r0;"
        run(module("\tsetp.eq.b32 %p1, %r0, 0;\n\tmov.b32 %r2, s;\n\t@%p1 st.shared.b32 [%r2], %r0;", 0, self.SHARED), threads=64)
        self.fails("race", module(same.format(barrier="", offset=""), 0, self.SHARED), threads=64)

    def test_barriers(self):
        text = "\tsetp.lt.u32 %p1, %r0, {limit};\n\t@%p1 bra $L1;\n\tbar.sync 0;\n$L1:"
        run(module(text.format(limit=0), 0), threads=64)
        self.fails("barrier", module(text.format(limit=32), 0), threads=64)
        self.fails("barrier", module(text.format(limit=7), 0), threads=64)
        two = "\tsetp.lt.u32 %p1, %r0, 32;\n\t@%p1 bra $L1;\n\tbar.sync 0;\n\tbra.uni $L2;\n$L1:\n\tbar.sync 0;\n$L2:"
        self.fails("barrier", module(two, 0), threads=64)

    def test_blocks_do_not_wait_for_each_other(self):
        # A loop over barriers, as long as the block's number.
        text = ("\tmov.u32 %r1, %ctaid.x;\n\tmov.b32 %r2, 0;\n$L1:\n\tbar.sync 0;\n\tadd.s32 %r2, %r2, 1;\n\tsetp.lt.u32 %p1, %r2, %r1;\n\t@%p1 bra $L1;")
        for order in ORDERS:
            run(module(text, 0), threads=64, blocks=5, order=order)

    def test_unwritten_shared_memory(self):
        run(module("\tmov.b32 %r1, s;\n\tst.shared.b32 [%r1], 1;\n\tld.shared.b32 %r2, [%r1];", 0, self.SHARED), threads=1)
        self.fails("uninitialised", module("\tmov.b32 %r1, s;\n\tst.shared.b32 [%r1], 1;\n\tld.shared.b32 %r2, [%r1+4];", 0, self.SHARED), threads=1)

    def test_bounds_and_alignment(self):
        text = "\tmul.wide.u32 %rd3, %r0, 4;\n\tadd.s64 %rd4, %rd0, %rd3;\n\tld.global{vector}.b32 {to}, [%rd4+{offset}];"
        for vector, to, offset, kind in (("", "%r1", 0, None), ("", "%r1", 4, "bounds"), ("", "%r1", 2, "alignment"),
                                         (".v2", "{%r1, %r2}", 0, "alignment"), ("", "%r1", -4, "bounds")):
            device = Device(1 << 16)
            device.put(np.zeros(64, np.uint8))
            at = device.put(np.zeros(32, np.uint32))[0]
            code = module(text.format(vector=vector, to=to, offset=offset), 1)
            with self.subTest(vector=vector, offset=offset):
                if kind:
                    self.fails(kind, code, at, device=device)
                else:
                    run(code, at, device=device)
        self.fails("bounds", module("\tmov.b32 %r1, s;\n\tst.shared.b32 [%r1+1024], 1;", 0, self.SHARED), threads=1)
        run(module("\tmov.b32 %r1, s;\n\tst.shared.b32 [%r1+1020], 1;", 0, self.SHARED), threads=1)

    def test_unwritten_global_memory(self):
        device = Device(1 << 16)
        at = device.put(np.zeros(4, np.uint32), False)[0]
        self.fails("uninitialised", module("\tld.global.b32 %r1, [%rd0];", 1), at, threads=1, device=device)

    def test_races_in_global_memory(self):
        def one(line):
            device = Device(1 << 16)
            run(module("\tmul.wide.u32 %rd3, %r0, 4;\n\tadd.s64 %rd4, %rd0, %rd3;\n" + line, 1), device.put(np.zeros(64, np.uint32))[0], threads=64, device=device)
        one("\tst.global.b32 [%rd4], 1;\n\tld.global.b32 %r1, [%rd4];")
        for line in ("\tst.global.b32 [%rd0], %r0;", "\tst.global.b32 [%rd4], 1;\n\tld.global.b32 %r1, [%rd0];",
                     "\tst.global.b32 [%rd4], 1;\n\tld.global.nc.b32 %r1, [%rd4];"):
            with self.subTest(line=line), self.assertRaises(PtxError) as caught:
                one(line)
            self.assertEqual(caught.exception.kind, "race")

    def test_same_writes(self):
        def one(line, same_writes=True):
            device = Device(1 << 16)
            device.memory.same_writes = same_writes
            at, words = device.put(np.full(2, 0xFFFFFFFF, np.uint32), False)
            run(module(line, 1, self.SHARED), at, threads=64, device=device)
            return words
        same, different = "\tst.global.b32 [%rd0], 7;", "\tst.global.b32 [%rd0], %r0;"
        np.testing.assert_array_equal(one(same), [7, 0xFFFFFFFF])
        np.testing.assert_array_equal(one(same + "\n\tbar.sync 0;\n" + same), [7, 0xFFFFFFFF])
        for line in (different, same + "\n\tbar.sync 0;\n" + different):
            with self.subTest(line=line), self.assertRaises(PtxError) as caught:
                one(line)
            self.assertIn("different values", str(caught.exception))
        with self.assertRaises(PtxError):
            one(same, False)

    COPY = ("\tshl.b32 %r1, %r0, 4;\n\tmov.b32 %r2, s;\n\tadd.s32 %r3, %r2, %r1;\n\tmul.wide.u32 %rd3, %r0, 16;\n\tadd.s64 %rd4, %rd0, %rd3;\n"
            "{before}\tcp.async.cg.shared.global [%r3], [%rd4], 16, {size};\n{after}")
    READ = "\tld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r3];\n"

    def copy(self, after, before="", size="16", **options):
        device = Device(1 << 16)
        data = np.arange(256, dtype=np.uint32)
        at, out = device.put(data)[0], device.put(np.zeros(256, np.uint32), False)
        store = "\tadd.s64 %rd5, %rd1, %rd3;\n\tst.global.v4.b32 [%rd5], {%r10, %r11, %r12, %r13};\n"
        text = module(self.COPY.format(before=before, size=size, after=after + store), 2, self.SHARED)
        run(text, at, out[0], threads=64, device=device, **options)
        return data, out[1]

    def test_copies(self):
        done = "\tcp.async.commit_group;\n\tcp.async.wait_group 0;\n"
        for late in (True, False):
            data, out = self.copy(done + self.READ, late=late)
            np.testing.assert_array_equal(out, data)
        data, out = self.copy(done + self.READ, size="0")
        np.testing.assert_array_equal(out, 0)
        for after in (self.READ, "\tcp.async.commit_group;\n" + self.READ, "\tcp.async.commit_group;\n\tcp.async.wait_group 1;\n" + self.READ):
            with self.subTest(after=after), self.assertRaises(PtxError) as caught:
                self.copy(after)
            self.assertEqual(caught.exception.kind, "in-flight")

    def test_copies_of_others_need_a_barrier(self):
        done = "\tcp.async.commit_group;\n\tcp.async.wait_group 0;\nHERE\txor.b32 %r4, %r1, 512;\n\tadd.s32 %r3, %r2, %r4;\n" + self.READ
        self.copy(done.replace("HERE", "\tbar.sync 0;\n"))
        with self.assertRaises(PtxError) as caught:
            self.copy(done.replace("HERE", ""))
        self.assertEqual(caught.exception.kind, "race")

    def test_missing_lanes(self):
        text = "\tsetp.lt.u32 %p1, %r0, 7;\n\t@%p1 bra $L1;\n\tshfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;\n$L1:"
        self.fails("lanes", module(text, 0))
        self.fails("lanes", module("\tsetp.lt.u32 %p1, %r0, 7;\n\t@%p1 shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;", 0))
        self.fails("lanes", module("\tshfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;", 0), threads=20)

    def test_registers(self):
        self.fails("uninitialised", module("\tadd.s32 %r1, %r2, 1;", 0))

    def test_a_loop_without_end(self):
        before, ptx.machine.LONGEST = ptx.machine.LONGEST, 1000
        try:
            self.fails("stuck", module("$L1:\n\tbra.uni $L1;", 0))
        finally:
            ptx.machine.LONGEST = before

    def test_launches(self):
        text = module("", 1)
        big = module("", 0, "\t.shared .align 16 .b8 s[50000];\n")
        fixed = module("", 0, directives=".maxntid 64, 1, 1")
        for code, values, options in ((text, [], {}), (text, [b"1234"], {}), (text, [0], {"threads": 2000}), (text, [0], {"blocks": 0}),
                                      (big, [], {}), (text, [0], {"dynamic": 60 << 10}), (text, [0], {"dynamic": 200 << 10, "allowed_shared": 200 << 10}),
                                      (fixed, [], {"threads": 128})):
            with self.subTest(options=options, values=values), self.assertRaises(PtxError) as caught:
                run(code, *values, **options)
            self.assertEqual(caught.exception.kind, "launch")
        run(text, 0, dynamic=60 << 10, allowed_shared=60 << 10)
        run(text, struct.pack("<Q", BASE), limits=Limits(threads=32))


class Fragments(unittest.TestCase):
    """ldmatrix and mma.sync against MLIR's own distribution of the fragments (vector.contract), so that a kernel and the
    interpreter do not merely share a misreading of the layout."""

    def test_contract(self):
        here = Path(__file__).resolve().parent
        sys.path.insert(0, str(here.parent.parent / "generators/mlir"))
        from attune_mma_gen import TOOLS, Lowering
        with tempfile.TemporaryDirectory() as folder:
            lowering = Lowering(folder, "contract", "sm_80", {t: f"{t}-22" for t in TOOLS})
            passes = "builtin.module(gpu.module(gpu.func(convert-vector-to-gpu{use-nvgpu},lower-affine,canonicalize,cse)))"
            done = subprocess.run(["mlir-opt-22", str(here / "contract.mlir"), f"--pass-pipeline={passes}"], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            (Path(folder) / "payload.mlir").write_text(done.stdout)
            entry = parse(lowering.get("device").read_text()).entries["contract"]
        rng = np.random.default_rng(0)
        a, b, bt = (rng.standard_normal(s).astype(np.float16) for s in ((16, 16), (8, 16), (16, 8)))
        c, d = (rng.standard_normal((16, 8)).astype(np.float32) for _ in range(2))
        expected = a.astype(float) @ b.astype(float).T + c, a.astype(float) @ bt.astype(float) + d
        device = Device(1 << 16)
        c_at, d_at = device.put(c), device.put(d)

        class Filled(ptx.machine.Machine):
            """With shared memory that is written beforehand: convert-vector-to-gpu wants to know every op."""

            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                for at, x in ((0, a), (512, b), (768, bt)):
                    self.shared.data[at:at + x.nbytes] = x.reshape(-1).view(np.uint8)
                    self.shared.tag[at // self.shared.granule:(at + x.nbytes) // self.shared.granule] = 0
        before, ptx.grid.Machine = ptx.grid.Machine, Filled
        try:
            statistics = launch(entry, device.memory, (1, 1, 1), (32, 1, 1), [0, 512, 768, c_at[0], d_at[0]], dynamic=1024)
        finally:
            ptx.grid.Machine = before
        self.assertEqual(statistics["mma"], 2)
        for got, want in zip((c_at[1], d_at[1]), expected):
            np.testing.assert_allclose(got, want, atol=1e-5)


if __name__ == "__main__":
    unittest.main(verbosity=1)
