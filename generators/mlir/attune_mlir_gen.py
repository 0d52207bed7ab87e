#!/usr/bin/env python3
"""The MLIR counterpart of attune-halide-gen: makes one phase of a kernel.

  attune_mlir_gen.py GENERATOR FUNCTION ISA name=value ... --object FILE.o --scratch FILE.inc
  attune_mlir_gen.py GENERATOR FUNCTION ISA name=value ... --emit KIND --output FILE
  attune_mlir_gen.py --space dk=64 dv=64 rows=1024 keys=1024 lanes=16 registers=32 l1=32768 l2=1048576

GENERATOR: mlir_flash, mlir_rowblock (the main phase) or mlir_pack. Parameters: dk, dv, panel, k (keys of a block), and for
each number of query rows in `blocks`, a list like the others, the register tiles score_rows, matmul_rows, matmul_cols and
fold_rows: lists joined by + as in blocks=4+8+24, or one number: for each block the largest divisor of its rows (of dv for
matmul_cols) that is not more. --space prints what `attune tune` may try (spaces.py).

KIND, in the order of lowering:
  payload    linalg on tensors: what is computed
  transform  the schedule, knobs filled in
  schedule   what the schedule made of the payload: loops and vectors on tensors
  buffers    tensors became memory
  stmt       vectors of one dimension
  llvm       LLVM IR after opt
  asm        assembly
The text goes to FILE. Errors name the file and line of the schedule, and the knobs.
"""
import argparse
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "payload")]
import spaces  # noqa: E402
import strategies  # noqa: E402

TRIPLE = "x86_64-unknown-linux-gnu"  # without one, LLVM knows no memcpy or memset and writes byte loops: 101 -> 65 GFLOP/s
# The processor sets the cost model, the features what may be used: those of the ISA token and no more.
CPUS = {
    "avx2": ["-mcpu=x86-64", "-mattr=+avx,+avx2,+fma,+f16c,+bmi,+bmi2"],
    "avx512": ["-mcpu=x86-64", "-mattr=+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd,-prefer-256-bit"],
}
TOOLS = ["mlir-opt", "mlir-translate", "opt", "llc", "llvm-mc"]
BLOCK_KNOBS = ["score_rows", "matmul_rows", "matmul_cols", "fold_rows"]

BUFFERISE = """builtin.module(
  eliminate-empty-tensors,
  one-shot-bufferize{bufferize-function-boundaries=true function-boundary-type-conversion=identity-layout-map},
  canonicalize,cse,
  func.func(scf-forall-to-for,buffer-loop-hoisting,buffer-hoisting,promote-buffers-to-stack{max-alloc-size-in-bytes=262144}),
  canonicalize,cse,
  ownership-based-buffer-deallocation,canonicalize,buffer-deallocation-simplification,bufferization-lower-deallocations,
  canonicalize,cse)"""
TO_LLVM = """builtin.module(
  convert-linalg-to-loops,fold-memref-alias-ops,expand-strided-metadata,canonicalize,cse,
  convert-vector-to-scf,lower-affine,canonicalize,cse,convert-scf-to-cf,
  convert-vector-to-llvm{reassociate-fp-reductions=true},convert-math-to-llvm,convert-arith-to-llvm,
  finalize-memref-to-llvm,convert-func-to-llvm,convert-index-to-llvm,convert-cf-to-llvm,convert-ub-to-llvm,
  reconcile-unrealized-casts)"""


class GeneratorError(Exception):
    pass


def numbers(params, name, wholes=None):
    """The list `name`; with `wholes`, a number for each of them, which it has to divide."""
    if name not in params:
        raise GeneratorError(f"parameter {name} is missing: expected {name}=NUMBER or {name}=NUMBER+NUMBER+…")
    text = params[name]
    values = text.split("+")
    if not all(v.isdigit() and int(v) > 0 for v in values):
        raise GeneratorError(f"{name}={text}: expected positive numbers joined by +")
    values = [int(v) for v in values]
    if not wholes:
        return values
    if len(values) == 1 and len(wholes) > 1:
        return [max(n for n in range(1, whole + 1) if whole % n == 0 and n <= values[0]) for whole in wholes]
    if len(values) != len(wholes):
        raise GeneratorError(f"{name}={text}: expected {len(wholes)} numbers, one for each of blocks={params.get('blocks')}, or one for all")
    return values


def number(params, name):
    values = numbers(params, name)
    if len(values) != 1:
        raise GeneratorError(f"{name}={params[name]}: expected one number")
    return values[0]


def expand(path, knobs, blocks):
    """A schedule with its includes, its repeated part, and $name replaced: [(line, file, number of the line in it)]."""
    def fill(text, values, where):
        def value(match):
            if match.group(1) not in values:
                raise GeneratorError(f"{where}: the schedule wants a knob ${match.group(1)}: expected one of {', '.join(values)}")
            return str(values[match.group(1)])
        return re.sub(r"\$([a-z_]+)", value, text)

    def plain(text, values, path, i):
        line = text if text.lstrip().startswith("//") else fill(text, values, f"{path}:{i}")
        lines = [(line, path, i)]
        if line.rstrip().endswith("// attune: some"):
            handle = re.match(r"\s*(%\w+) = ", line).group(1)
            lines += [(check, path, i) for check in (
                f"  {handle}_n = transform.num_associations {handle} : (!transform.any_op) -> !transform.param<i64>",
                f"  {handle}_1 = transform.param.constant 1 : i64 -> !transform.param<i64>",
                f"  transform.match.param.cmpi ge {handle}_n, {handle}_1 : !transform.param<i64>")]
        return lines

    result, repeated = [], None
    for i, line in enumerate(path.read_text().splitlines(), 1):
        directive = re.match(r"\s*// attune: (include|each-block|end)\s*(\S*)", line)
        if directive and directive.group(1) == "include":
            result += expand(path.parent / directive.group(2), knobs, blocks)
        elif directive and directive.group(1) == "each-block":
            repeated = []
        elif directive and directive.group(1) == "end":
            for block in blocks:
                for text, n in repeated:
                    result += plain(text, {**knobs, **block}, path, n)
            repeated = None
        elif repeated is not None:
            repeated.append((line, i))
        else:
            result += plain(line, knobs, path, i)
    return result


class Lowering:
    """The steps from a payload to an object, each run when its result is first asked for."""

    def __init__(self, folder, payload, schedule, isa, knobs, tools):
        self.folder, self.isa, self.knobs, self.tools = Path(folder), isa, knobs, tools
        self.schedule_lines = schedule
        self.write("payload", payload)
        self.write("transform", "\n".join(line for line, _, _ in schedule) + "\n")

    def file(self, kind):
        return self.folder / f"{kind}.{'ll' if kind in ('ir', 'llvm') else 's' if kind == 'asm' else 'o' if kind == 'object' else 'mlir'}"

    def write(self, kind, text):
        self.file(kind).write_text(text)

    def run(self, what, tool, *arguments):
        command = [self.tools[tool]] + [str(a) for a in arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise GeneratorError(f"{what} failed (knobs: {self.knobs})\n{self.located(done.stderr)}\n  {' '.join(command)}")

    def located(self, errors):
        """Lines of the expanded schedule, told as those of the files that they come from."""
        def place(match):
            n = int(match.group(1))
            if n > len(self.schedule_lines):
                return match.group(0)
            _, path, original = self.schedule_lines[n - 1]
            return f"{path}:{original}:"
        text = re.sub(re.escape(str(self.file("transform"))) + r":(\d+):", place, errors)
        nothing = r":\d+: error: expected parameter to be greater than or equal to 1, got 0\n.*"
        return re.sub(nothing, ": error: this match finds nothing", text, flags=re.S)

    def get(self, kind):
        path = self.file(kind)
        if not path.exists():
            getattr(self, f"make_{kind}")(path)
        return path

    def interpret(self, what, source, schedule, out):
        self.run(what, "mlir-opt", source, f"--transform-preload-library=transform-library-paths={schedule}", "--transform-interpreter", "-o", out)

    def make_schedule(self, out):
        """Tiling, fusion and vectorisation, on tensors."""
        self.interpret(f"{self.schedule_lines[0][1].name}: the schedule", self.get("payload"), self.get("transform"), out)

    def make_buffers(self, out):
        """In place, hoisted out of the loops, on the stack."""
        self.run("bufferisation", "mlir-opt", self.get("schedule"), "-o", out, f"--pass-pipeline={BUFFERISE}")

    def make_stmt(self, out):
        self.interpret("vectors.mlir", self.get("buffers"), HERE / "schedules" / "vectors.mlir", out)

    def make_dialect(self, out):
        self.run("the lowering to LLVM", "mlir-opt", self.get("stmt"), "-o", out, f"--pass-pipeline={TO_LLVM}")

    def make_ir(self, out):
        self.run("the translation to LLVM IR", "mlir-translate", "--mlir-to-llvmir", self.get("dialect"), "-o", out)

    def make_llvm(self, out):
        # -O3 makes the same loops in half as many lines again, and takes twice the time.
        self.run("opt", "opt", "-O2", f"-mtriple={TRIPLE}", *CPUS[self.isa], self.get("ir"), "-S", "-o", out)

    def make_asm(self, out):
        self.run("llc", "llc", "-O3", *CPUS[self.isa], "--enable-no-nans-fp-math", "--enable-no-signed-zeros-fp-math", "-relocation-model=pic",
                 "-filetype=asm", self.get("llvm"), "-o", out)

    def make_object(self, out):
        # From the text, since both are wanted: llc takes as long as all other steps together.
        self.run("llvm-mc", "llvm-mc", f"-triple={TRIPLE}", "-filetype=obj", self.get("asm"), "-o", out)


def stack_bytes(assembly, entry):
    """The frames of the entry and of the largest function that it calls, and what saved registers and alignment add."""
    frames, function = {}, None
    for line in assembly.splitlines():
        if label := re.match(r"([A-Za-z_]\w*):", line):
            function = label.group(1)
        elif frame := re.match(r"\s+subq\s+\$(\d+), %rsp", line):
            frames[function] = max(frames.get(function, 0), int(frame.group(1)))
    own = frames.pop(entry, 0) + frames.pop(f"_mlir_ciface_{entry}", 0)
    return own + max(frames.values(), default=0) + 1024


def prepare(generator, function, params):
    """(payload, schedule file, knobs, knobs of each block)"""
    dk, panel = number(params, "dk"), number(params, "panel")
    if generator == "mlir_pack":
        return strategies.pack(function, dk, panel), "pack.mlir", {"square": 16 if dk % 16 == 0 else 8}, []
    strategy = generator.removeprefix("mlir_")
    if strategy not in strategies.CAPTION:
        raise GeneratorError(f"generator '{generator}': expected mlir_flash, mlir_rowblock or mlir_pack")
    dv, k = number(params, "dv"), number(params, "k")
    if k % panel:
        raise GeneratorError(f"k={k}: expected a multiple of panel={panel}")
    rows = numbers(params, "blocks")
    if rows != sorted(set(rows)):
        raise GeneratorError(f"blocks={params['blocks']}: expected rising numbers of rows")
    knobs = {name: numbers(params, name, [dv] * len(rows) if name == "matmul_cols" else rows) for name in BLOCK_KNOBS}
    blocks = [{"rows": r, **{name: knobs[name][i] for name in BLOCK_KNOBS}} for i, r in enumerate(rows)]
    for b in blocks:
        for name, whole in (("score_rows", b["rows"]), ("matmul_rows", b["rows"]), ("fold_rows", b["rows"]), ("matmul_cols", dv)):
            if whole % b[name]:
                raise GeneratorError(f"{name}={b[name]} for blocks of {b['rows']} rows: expected a divisor of {whole}")
    return strategies.attend(function, strategy, rows, dk, dv, panel, k // panel), f"{strategy}.mlir", {}, blocks


def main():
    if sys.argv[1:2] == ["--space"]:
        print(spaces.as_json(sys.argv[2:]))
        return
    parser = argparse.ArgumentParser(description="Makes one phase of a kernel with MLIR.")
    parser.add_argument("generator")
    parser.add_argument("function")
    parser.add_argument("isa")
    parser.add_argument("params", nargs="*")
    parser.add_argument("--object", type=Path)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--emit", choices=["payload", "transform", "schedule", "buffers", "stmt", "llvm", "asm"])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--schedules", type=Path, default=HERE / "schedules", help="another folder of schedules")
    parser.add_argument("--tools", default="{}-22", help="how the tools are called, with {} for " + ", ".join(TOOLS))
    args = parser.parse_args()
    if args.isa not in CPUS:
        raise GeneratorError(f"isa is '{args.isa}': expected one of {', '.join(CPUS)}")
    params = {}
    for p in args.params:
        name, equals, value = p.partition("=")
        if not equals:
            raise GeneratorError(f"parameter '{p}': expected name=value")
        params[name] = value
    payload, schedule, knobs, blocks = prepare(args.generator, args.function, params)
    lines = expand(args.schedules / schedule, knobs, blocks)
    shown = ", ".join(f"{k}={v}" for k, v in params.items())
    tools = {t: args.tools.format(t) for t in TOOLS}
    with tempfile.TemporaryDirectory(prefix="attune-mlir-") as folder:
        lowering = Lowering(folder, payload, lines, args.isa, shown, tools)
        if args.emit:
            args.output.write_bytes(lowering.get(args.emit).read_bytes())
        if args.object:
            args.object.write_bytes(lowering.get("object").read_bytes())
        if args.scratch:
            spent = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
            stack = stack_bytes(lowering.get("asm").read_text(), args.function)
            args.scratch.write_text(f"// generated in {spent:.2f} s of CPU time\n{{{stack}}}\n")


if __name__ == "__main__":
    try:
        main()
    except (GeneratorError, spaces.SettingError) as error:
        sys.exit(f"attune_mlir_gen: {error}")
