#!/usr/bin/env python3
"""Makes a tensor core kernel for CUDA with MLIR: PTX, and what ptxas says of it.

  attune_mma_gen.py mlir_mma NAME sm_80 name=value ... --emit KIND --output FILE [--launches FILE]

Parameters are those of mma/shape.py: type, dk, dv, mt, warps, k, stages, qreg, lazy, split. --launches: a line for
attend and merge with name, threads, and bytes of dynamic shared memory. KIND, in the order of lowering:
  payload the kernel as it was written: gpu, nvgpu, nvvm, vector, scf and arith
  stmt    everything in the dialects llvm and nvvm
  llvm    LLVM IR after opt
  device  PTX
"""
import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "mma"))
import shape  # noqa: E402
from attend import Attend  # noqa: E402
from merge import WARPS, merge  # noqa: E402
from recompute import recompute  # noqa: E402

TOOLS = ["mlir-opt", "mlir-translate", "opt", "llc"]
KINDS = {"payload": "mlir", "stmt": "mlir", "llvm": "ll", "device": "ptx"}
TRIPLE = "nvptx64-nvidia-cuda"
# convert-math-to-llvm and convert-arith-to-llvm come before convert-gpu-to-nvvm, which would make calls of libdevice of them.
TO_NVVM = """builtin.module(gpu.module(
  convert-nvgpu-to-nvvm,canonicalize,cse,convert-vector-to-scf,convert-scf-to-cf,convert-math-to-llvm,convert-arith-to-llvm,
  convert-gpu-to-nvvm{use-bare-ptr-memref-call-conv=true},convert-vector-to-llvm,convert-index-to-llvm,convert-ub-to-llvm,
  reconcile-unrealized-casts,canonicalize,cse))"""


class GeneratorError(Exception):
    pass


def kernels(s):
    """The text of the module: attend, recompute, and merge where keys are split."""
    parts = [Attend(s).text(), recompute(s)] + ([merge(s)] if s.split else [])
    head = f"// {s}: {s.q} x {s.k} per block, {s.threads} threads, {s.shared_bytes} bytes of {'dynamic' if s.dynamic_bytes else 'static'} shared memory\n"
    return head + "gpu.module @attention {\n" + "\n".join(parts) + "\n}\n"


class Lowering:
    """The steps to PTX, each run when its result is first asked for."""

    def __init__(self, folder, s, arch, tools):
        self.folder, self.shape, self.arch, self.tools = Path(folder), s, arch, tools

    def get(self, kind):
        path = self.folder / f"{kind}.{KINDS.get(kind, 'll')}"
        if not path.exists():
            getattr(self, f"make_{kind}")(path)
        return path

    def run(self, what, tool, *arguments):
        command = [self.tools[tool]] + [str(a) for a in arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise GeneratorError(f"{what} failed ({self.shape})\n{done.stderr}\n  {' '.join(command)}")

    def make_payload(self, out):
        out.write_text(kernels(self.shape))

    def make_stmt(self, out):
        self.run("the lowering to NVVM", "mlir-opt", self.get("payload"), f"--pass-pipeline={TO_NVVM}", "-o", out)

    def make_ir(self, out):
        # mlir-translate looks at the top level only: the gpu.module has to be the module. Dynamic shared memory is
        # external; an internal variable of 0 bytes gets a byte of static memory from LLVM.
        lines = self.get("stmt").read_text().splitlines()
        inner = [line for line in lines[1:] if not line.startswith("}")]
        text = "\n".join(inner).replace("  gpu.module @attention", "module @attention", 1).replace("internal @__dynamic_shmem__", "external @__dynamic_shmem__")
        module = self.folder / "module.mlir"
        module.write_text(text + "\n")
        self.run("the translation to LLVM IR", "mlir-translate", "--mlir-to-llvmir", module, "-o", out)

    def make_llvm(self, out):
        self.run("opt", "opt", "-O3", f"-mtriple={TRIPLE}", f"-mcpu={self.arch}", self.get("ir"), "-S", "-o", out)

    def make_device(self, out):
        # Without loop strength reduction: 2 to 12 registers fewer.
        self.run("llc", "llc", "-O3", "-disable-lsr", f"-mtriple={TRIPLE}", f"-mcpu={self.arch}", "-mattr=+ptx80", "--denormal-fp-math-f32=preserve-sign",
                 self.get("llvm"), "-o", out)
        # Its text lies in the library: comments and margins are a twelfth of it.
        lines = (line.split("//")[0].strip() for line in out.read_text().splitlines())
        out.write_text("".join(line + "\n" for line in lines if line))


def main():
    parser = argparse.ArgumentParser(description="Makes a tensor core kernel for CUDA with MLIR.")
    parser.add_argument("generator", choices=["mlir_mma"])
    parser.add_argument("name", help="the kernel's; its functions are attend, recompute and merge")
    parser.add_argument("arch", help="sm_80 or later")
    parser.add_argument("params", nargs="*")
    parser.add_argument("--emit", default="device")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--launches", type=Path)
    parser.add_argument("--tools", default="{}-22", help="how the tools are called, with {} for " + ", ".join(TOOLS))
    args = parser.parse_args()
    if args.emit not in KINDS:
        raise GeneratorError(f"--emit {args.emit}: a tensor core kernel has no such step: expected one of {', '.join(KINDS)}")
    s = shape.parse(args.params)
    with tempfile.TemporaryDirectory(prefix="attune-mma-") as folder:
        lowering = Lowering(folder, s, args.arch, {t: args.tools.format(t) for t in TOOLS})
        args.output.write_bytes(lowering.get(args.emit).read_bytes())
    if args.launches:
        lines = [f"attend {s.threads} {s.dynamic_bytes}"] + [f"merge {32 * WARPS} 0"] * s.split
        args.launches.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    try:
        main()
    except (GeneratorError, shape.ShapeError) as error:
        sys.exit(f"attune_mma_gen: {error}")
