#!/usr/bin/env python3
"""The machine code of Halide's CUDA kernels: they assemble for each architecture, nothing spills, and the inner loops of
gpu_block have enough multiply-adds for each load from shared memory.

  halide_code_test.py --kernels BUILD/kernels

ptxas and nvdisasm come from a CUDA toolkit, or from the Python packages (tests/ptx/sass.py).
"""
import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "ptx"), str(HERE.parent.parent / "cmake")]
import device_code  # noqa: E402
import sass  # noqa: E402

# Multiply-adds for each load from shared memory, at least, in each of the two inner loops, by features.
LEAST_RATIO = {64: 10.0, 128: 8.0}


def inner_loops(cubin, function):
    """[(FFMA, LDS)] of the loops that hold no other and multiply."""
    code, labels = sass.instructions(cubin, function)
    loops = []
    for at, (opcode, operands, _) in enumerate(code):
        target = re.search(r"\.L_x_\d+", operands) if opcode.startswith("BRA") else None
        if target and labels.get(target[0], at + 1) <= at:
            loops.append((labels[target[0]], at))
    result = []
    for begin, end in loops:
        if any(b >= begin and e <= end and (b, e) != (begin, end) for b, e in loops):
            continue
        kinds = [opcode.split(".")[0] for opcode, _, _ in code[begin:end + 1]]
        if kinds.count("FFMA") >= 32:
            result.append((kinds.count("FFMA"), kinds.count("LDS")))
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kernels", required=True, type=Path)
    args = parser.parse_args()
    manifest = json.loads((args.kernels / "manifest.json").read_text())
    functions = sorted({phase["function"] for phases in manifest.values() for phase in phases
                        if any("-cuda-" in str(a) for a in phase["command"])})
    failures = [] if functions else ["no CUDA kernel is in the manifest"]
    looked_at = set()
    with tempfile.TemporaryDirectory() as folder:
        for function in functions:
            ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
            ptx.write_bytes(device_code.ptx_of(args.kernels / f"{function}.o"))
            for arch in device_code.ARCHS:
                for name, figures in sass.assemble(ptx, arch, cubin).items():
                    print(f"{function} {arch}: {figures['registers']} registers, {figures['spills']} bytes spilled")
                    if figures["spills"] or figures["stack"]:
                        failures.append(f"{function} {arch}: {figures['spills']} bytes spilled, {figures['stack']} of stack: expected 0")
                    found = re.search(r"gpu_block_f32_d(\d+)_", function)
                    if not found or int(found[1]) not in LEAST_RATIO:
                        continue
                    least, loops = LEAST_RATIO[int(found[1])], inner_loops(cubin, name)
                    print(f"  inner loops: {', '.join(f'{f} FFMA for {l} LDS' for f, l in loops)}")
                    looked_at.add(int(found[1]))
                    if len(loops) < 2:
                        failures.append(f"{function} {arch}: {len(loops)} inner loops that multiply: expected 2")
                    failures += [f"{function} {arch}: an inner loop has {f} FFMA for {l} loads from shared memory: expected {least} for each"
                                 for f, l in loops if f < least * l]
    failures += [f"no loop of attn_gpu_block_f32_d{d} was looked at" for d in LEAST_RATIO if functions and d not in looked_at]
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
