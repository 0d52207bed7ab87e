#!/usr/bin/env python3
"""Counts what the innermost loops of the main kernels are made of, in the assembly that their generators emit, and compares it
with generators/catalogue/inner_loops.json. A clock on a busy machine cannot tell whether a change of a schedule, or another
compiler, made an accumulator live in memory; this can.

  inner_loops.py BUILD_DIR [--kernel NAME] [--loops] [--update] [--set KEY=VALUE]

--loops shows each loop. --update writes the table anew: look at the difference before committing it. --set changes a parameter
of the generator's command, for trying a schedule, and for the test that the check can fail.

A matmul loop is one of which at least 40 % of the instructions are multiply-adds; what remains with eight or more is a softmax
loop. For the matmul loops of a kernel together:
  fma_per_load   multiply-adds (fused; below AVX2 multiplications; vdpbf16ps) for each vector instruction that reads memory. On
                 AVX-512 and AVX2 two loads and two multiply-adds start in a cycle, so above 1 the units are what limits
  fma_share      multiply-adds of all instructions
  spills         vector registers stored to, or reloaded from, the stack, by the compiler's notes in the assembly
  half           vector instructions narrower than the kernel's registers
and for the softmax loops spills and half. Worse than the table by more than its tolerance, or one spill more, fails.
"""
import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TABLE = Path(__file__).resolve().parents[2] / "generators" / "catalogue" / "inner_loops.json"
REGISTERS = {"sse41": "xmm", "avx2": "ymm", "avx512": "zmm", "avx512_bf16": "zmm"}
FMA = re.compile(r"vfn?m(add|sub)\w+ps|vdpbf16ps")
# Without FMA instructions, multiplications are counted in their place.
MULTIPLY = re.compile(r"v?mulps")
NARROWER = {"xmm": None, "ymm": re.compile(r"%xmm"), "zmm": re.compile(r"%[xy]mm")}
# Half as wide by nature: conversions between types, scalars on their way to a broadcast, masks.
SCALAR = re.compile(r"\w+(ss|sd)\b|v?mov[dq]\b|vpbroadcast|vbroadcast|v?insert|v?extract|vcvt|vpmov|k\w+")


def instructions(assembly):
    """(label, mnemonic, operands, comment) of each line that is a label or an instruction."""
    for line in assembly.splitlines():
        code, _, comment = line.partition("#")
        code = code.strip()
        if found := re.fullmatch(r"([.\w$]+):", code):
            yield found[1], None, None, comment
        elif code and not code.startswith("."):
            mnemonic, _, operands = code.partition("\t")
            yield None, mnemonic.strip(), operands.strip(), comment


def innermost_loops(assembly):
    """Lists of (mnemonic, operands, comment): from a label to the last jump back to it, with no such loop inside."""
    lines = list(instructions(assembly))
    where = {label: i for i, (label, *_rest) in enumerate(lines) if label}
    ends = {}
    for i, (_, mnemonic, operands, _) in enumerate(lines):
        if mnemonic and mnemonic.startswith("j") and where.get(operands, i) < i:
            ends[where[operands]] = i
    loops = []
    for begin, end in sorted(ends.items()):
        if not any(begin < other and ends[other] <= end for other in ends):
            loops.append([line[1:] for line in lines[begin:end + 1] if line[1]])
    return loops


def count(loop, isa):
    register = REGISTERS[isa]
    multiply_add = MULTIPLY if isa == "sse41" else FMA
    figures = dict(fma=0, loads=0, spills=0, half=0, instructions=len(loop))
    for mnemonic, operands, comment in loop:
        if "Spill" in comment or "Reload" in comment:
            figures["spills"] += "mm" in operands
        elif register in operands and "(" in operands and not re.search(r"\)(\s*\{%k\d\})?$", operands):
            figures["loads"] += 1
        figures["fma"] += bool(multiply_add.fullmatch(mnemonic))
        narrower = NARROWER[register]
        figures["half"] += bool(narrower and narrower.search(operands) and f"%{register}" not in operands
                                and not SCALAR.match(mnemonic))
    return figures


def figures_of(assembly, isa):
    """(the kernel's figures as in the table, its loops)"""
    loops = [c for c in (count(loop, isa) for loop in innermost_loops(assembly)) if c["fma"] >= 8]
    matmul = [c for c in loops if c["fma"] >= 0.4 * c["instructions"]]
    softmax = [c for c in loops if c not in matmul]
    total = lambda name, part: sum(c[name] for c in part)  # noqa: E731
    return {
        "loops": len(matmul),
        "fma_per_load": round(total("fma", matmul) / max(total("loads", matmul), 1), 2),
        "fma_share": round(total("fma", matmul) / max(total("instructions", matmul), 1), 3),
        "spills": total("spills", matmul),
        "half": total("half", matmul),
        "softmax_spills": total("spills", softmax),
        "softmax_half": total("half", softmax),
    }, loops


def emit(command, changes):
    command = [next((f"{k}={v}" for k, v in changes.items() if word.startswith(f"{k}=")), word) for word in command]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.s")
        done = subprocess.run([*command, "--emit", "asm", "--output", path], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"inner_loops: {' '.join(command)}: status {done.returncode}\n{done.stderr}")
        return Path(path).read_text()


def differences(name, wanted, found, tolerance):
    """What is worse than the table, a line each."""
    if found["loops"] == 0 and wanted["loops"] > 0:
        return [f"{name}: no loop of multiply-adds; expected {wanted['loops']}"]
    out = [f"{name}: {figure} {found[figure]}; expected at least {wanted[figure]} - {100 * tolerance:.0f} %"
           for figure in ("fma_per_load", "fma_share") if found[figure] < (1 - tolerance) * wanted[figure]]
    return out + [f"{name}: {figure} {found[figure]}; expected at most {wanted[figure]}"
                  for figure in ("spills", "half", "softmax_spills", "softmax_half") if found[figure] > wanted[figure]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--kernel", action="append", help="only this one")
    parser.add_argument("--loops", action="store_true")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--table", type=Path, default=TABLE)
    arguments = parser.parse_args()
    manifest = json.loads((Path(arguments.build) / "kernels" / "manifest.json").read_text())
    table = json.loads(arguments.table.read_text())
    changes = dict(word.split("=", 1) for word in arguments.set)
    names = arguments.kernel or list(table["kernels"])
    for name in names:
        if name not in table["kernels"]:
            parser.error(f"--kernel={name}: expected one of {', '.join(table['kernels'])}")
    # Kernels of MLIR are not built everywhere.
    present = [name for name in names if name in manifest]
    jobs = {name: next(p["command"] for p in manifest[name] if p["phase"] == "main") for name in present}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = dict(zip(jobs, pool.map(lambda command: emit(command, changes), jobs.values())))
    wrong = []
    for name in present:
        isa = next(token for token in sorted(REGISTERS, key=len, reverse=True) if name.endswith("_" + token) or f"_{token}_" in name)
        found, loops = figures_of(texts[name], isa)
        print(f"{name}: " + ", ".join(f"{figure} {value}" for figure, value in found.items()))
        for loop in loops if arguments.loops else []:
            print("  " + ", ".join(f"{figure} {value}" for figure, value in loop.items()))
        if arguments.update:
            table["kernels"][name] = found
        else:
            wrong += differences(name, table["kernels"][name], found, table["tolerance"])
    if arguments.update:
        lines = [f"  {json.dumps(name)}: {json.dumps(figures)}" for name, figures in table["kernels"].items()]
        arguments.table.write_text('{\n "about": %s,\n "tolerance": %s,\n "kernels": {\n%s\n }\n}\n' %
                                   (json.dumps(table["about"]), json.dumps(table["tolerance"]), ",\n".join(lines)))
        return 0
    for line in wrong:
        print(f"inner_loops: {line}", file=sys.stderr)
    if wrong:
        print("inner_loops: where this is meant and was measured: tests/build/inner_loops.py BUILD_DIR --update", file=sys.stderr)
    print(f"inner loops: {len(present)}/{len(names)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
