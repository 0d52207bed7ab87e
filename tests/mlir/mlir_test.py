#!/usr/bin/env python3
"""Tests of the kernels that MLIR makes, on what comes out of the tools.

  mlir_test.py emitted    on the built objects: no heap, no libm, no copies through the MLIR runtime, no stack that grows
                          with the problem, FMAs in the inner loops without spills
  mlir_test.py schedules  a schedule that does not apply is an error that names its file and line, and the knobs
"""
import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ALLOWED_IMPORTS = {"memset", "memcpy", "memmove"}
LANES = {"avx512": 16, "avx2": 8}

parser = argparse.ArgumentParser()
parser.add_argument("group", choices=["emitted", "schedules"])
parser.add_argument("--kernels", type=Path, required=True)
parser.add_argument("--generator", type=Path, required=True)
options = None


def run(*command):
    return subprocess.run([str(c) for c in command], capture_output=True, text=True)


def mlir_phases():
    """Kernels of the manifest that MLIR made for CPUs: (kernel, phase)."""
    manifest = json.loads((options.kernels / "manifest.json").read_text())
    return [(name, phase) for name, phases in manifest.items() for phase in phases if phase["generator"].startswith("mlir_")
            and phase["generator"] != "mlir_mma"]


def functions_of(disassembly):
    """{name: [instruction, ...]} of objdump's output; an instruction is (address, mnemonic, operands)."""
    result, current = {}, None
    for line in disassembly.splitlines():
        if head := re.match(r"[0-9a-f]+ <(.+)>:", line):
            current = result.setdefault(head.group(1), [])
        elif part := re.match(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*)", line):
            current.append((int(part.group(1), 16), part.group(2), part.group(3)))
    return result


def loops_of(instructions):
    """Innermost loops: from the target of a backward jump to the jump, no other jump inside."""
    at = {address: i for i, (address, _, _) in enumerate(instructions)}
    for i, (address, mnemonic, operands) in enumerate(instructions):
        target = re.match(r"([0-9a-f]+)", operands)
        if not mnemonic.startswith("j") or not target or int(target.group(1), 16) >= address:
            continue
        body = instructions[at[int(target.group(1), 16)]:i]
        if not any(m.startswith("j") for _, m, _ in body):
            yield body


class Emitted(unittest.TestCase):
    def setUp(self):
        self.phases = mlir_phases()
        self.assertTrue(self.phases, "no kernel made by MLIR is in the manifest")

    def test_imports(self):
        for kernel, phase in self.phases:
            names = run("nm", "-u", options.kernels / f"{phase['function']}.o").stdout.split()
            imports = {n for n in names if n != "U"}
            with self.subTest(kernel=kernel, phase=phase["phase"]):
                self.assertLessEqual(imports, ALLOWED_IMPORTS)

    def test_stack_is_constant(self):
        # Frames are `sub $number, %rsp` and aligning; a register subtracted from %rsp would be an alloca in a loop.
        for kernel, phase in self.phases:
            functions = functions_of(run("objdump", "-d", "--no-show-raw-insn", options.kernels / f"{phase['function']}.o").stdout)
            self.assertTrue(functions)
            for name, code in functions.items():
                with self.subTest(kernel=kernel, function=name):
                    grows = [f"{m} {o}" for _, m, o in code if re.match(r"(sub|lea|mov)", m) and o.endswith(",%rsp") and "$" not in o
                             and not re.match(r"-?0x[0-9a-f]+\(%rbp\),%rsp", o) and not o.startswith("%rbp")]
                    self.assertEqual(grows, [])
                    frames = [int(o.split(",")[0].lstrip("$"), 16) for _, m, o in code if m.startswith("sub") and re.match(r"\$0x[0-9a-f]+,%rsp", o)]
                    self.assertLess(sum(frames), 64 << 10)

    def test_inner_loops(self):
        # Of the longest block: score and matmul each have a loop with the accumulators that the knobs say, all in registers.
        for kernel, phase in self.phases:
            if phase["phase"] != "main":
                continue
            isa = phase["command"][4]
            knobs = {n: int(v.split("+")[-1]) for n, v in (a.split("=") for a in phase["command"][5:])}
            # Fewer columns than lanes are a shorter vector each.
            tiles = [knobs[f"{stage}_rows"] * -(-knobs[columns] // LANES[isa]) for stage, columns in (("score", "panel"), ("matmul", "matmul_cols"))]
            code = functions_of(run("objdump", "-d", "--no-show-raw-insn", options.kernels / f"{phase['function']}.o").stdout)
            found = []
            for body in loops_of(code[f"{phase['function']}_{knobs['blocks']}"]):
                accumulators = {o.split(",")[-1] for _, m, o in body if m.startswith("vfmadd")}
                if not any(re.search(r"\(%r[sb]p\)", o) and "mm" in o for _, _, o in body):
                    found.append(len(accumulators))
            with self.subTest(kernel=kernel):
                for tile in tiles:
                    self.assertIn(tile, found)
                    found.remove(tile)


class Schedules(unittest.TestCase):
    COMMAND = ["mlir_flash", "t", "avx2", "dk=32", "dv=32", "panel=16", "k=64", "blocks=4", "score_rows=4", "matmul_rows=4", "matmul_cols=16",
               "fold_rows=4"]

    def generate(self, *change, schedules=None):
        command = list(self.COMMAND)
        for c in change:
            name = c.split("=")[0] + "="
            command = [c if a.startswith(name) else a for a in command]
        with tempfile.TemporaryDirectory() as folder:
            return run(sys.executable, options.generator, *command, *(["--schedules", schedules] if schedules else []), "--emit", "schedule",
                       "--output", f"{folder}/out")

    def edited(self, folder, file, old, new):
        """A copy of the schedules with one text replaced."""
        shutil.copytree(options.generator.parent / "schedules", folder, dirs_exist_ok=True)
        text = (Path(folder) / file).read_text()
        self.assertIn(old, text)
        (Path(folder) / file).write_text(text.replace(old, new))
        return (text[:text.index(old)].count("\n") + 1)

    def test_applies(self):
        done = self.generate()
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_match_that_finds_nothing(self):
        for file, tag in (("stages.mlir", "score"), ("stages.mlir", "matmul_rest"), ("stages.mlir", "row")):
            with self.subTest(tag=tag), tempfile.TemporaryDirectory() as folder:
                line = self.edited(folder, file, f'tag = "{tag}"', 'tag = "none"')
                done = self.generate(schedules=folder)
                self.assertEqual(done.returncode, 1)
                self.assertIn("flash.mlir: the schedule failed", done.stderr)
                self.assertIn("score_rows=4", done.stderr)
                self.assertIn(f"{folder}/{file}:{line}: error: this match finds nothing", done.stderr)

    def test_a_block_without_functions(self):
        with tempfile.TemporaryDirectory() as folder:
            line = self.edited(folder, "flash.mlir", "attributes {rows = $rows : i64}", "attributes {rows = 5 : i64}")
            done = self.generate(schedules=folder)
            self.assertEqual(done.returncode, 1)
            self.assertIn(f"{folder}/flash.mlir:{line}: error: this match finds nothing", done.stderr)

    def test_a_knob_outside_its_options(self):
        with tempfile.TemporaryDirectory() as folder:
            self.edited(folder, "flash.mlir", "$score_rows from options = [1, 2, 4,", "$score_rows from options = [1, 2,")
            done = self.generate(schedules=folder)
            self.assertEqual(done.returncode, 1)
            self.assertIn("knob<\"score_rows\"> = 4", done.stderr)
            self.assertRegex(done.stderr, re.escape(f"{folder}/flash.mlir:") + r"\d+:")

    def test_knobs_that_do_not_fit(self):
        for change, message in (("score_rows=3", "score_rows=3 for blocks of 4 rows: expected a divisor of 4"),
                                ("matmul_cols=64", "matmul_cols=64 for blocks of 4 rows: expected a divisor of 32"),
                                ("k=40", "k=40: expected a multiple of panel=16"), ("fold_rows=4+8", "fold_rows=4+8: expected 1 numbers"),
                                ("matmul_rows=x", "matmul_rows=x: expected positive numbers")):
            with self.subTest(change=change):
                done = self.generate(change)
                self.assertEqual(done.returncode, 1)
                self.assertIn(message, done.stderr)


if __name__ == "__main__":
    options, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], options.group.capitalize(), *rest], verbosity=2)
