#!/usr/bin/env python3
"""Makes libraries of kernels from catalogues, outside of the build but with its programs: `attune build`, and the
candidates of `attune tune`.

  kernel_set.py --toolchain FILE -o DIR [--score-mod FILE.cpp ...] [--mask-mod FILE.cpp ...] CATALOGUE.json ...
  kernel_set.py --toolchain FILE --serve

-o writes DIR/lib/libattune_NAME.a (the runtime and these kernels), DIR/lib/libattune_NAME.so (a plug-in for
attune_load_kernels), headers and a CMake package; NAME is DIR's last part. --serve answers questions, one JSON object a line:

  {"op": "build", "entry": TEXT, "objects": DIR, "library": FILE}      a plug-in of the kernel that TEXT describes (JSON; a text,
                                                                            so that nobody sorts its phases)

with {"ok": true, "seconds": S} or {"error": TEXT}. Objects stay in `objects` under their function's name.

FILE is what the build left of its own programs and flags (build/kernels/toolchain.json).
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import catalogue  # noqa: E402
import compile_mod  # noqa: E402


def run(what, command):
    # stdin: in --serve it is the conversation.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        lines = (done.stderr + done.stdout).strip().splitlines()
        raise catalogue.CatalogueError(f"{what}: {Path(command[0]).name} ended with {how}" + "".join(f"\n  {line}" for line in lines[-12:]))


class Toolchain:
    def __init__(self, path):
        self.path = path
        t = catalogue.read(path)
        try:
            self.generator, self.mlir_generator, self.autoschedulers = t["generator"], t["mlir_generator"], t["autoschedulers"]
            self.cxx, self.flags, self.include, self.runtime, self.core = t["cxx"], t["flags"], Path(t["include"]), t["runtime"], t["core"]
            self.halide = t["halide"]
        except (KeyError, TypeError) as error:
            raise catalogue.CatalogueError(f"{path}: {error} is missing: expected what the build writes") from error
        self.programs = {"halide": [self.generator], "mlir": [sys.executable, self.mlir_generator]}

    def check(self, entry):
        where = entry["_where"]
        catalogue.check(entry["backend"] != "mlir" or self.mlir_generator, f"{where}: MLIR's tools are not installed: expected mlir-22-tools and llvm-22")
        catalogue.check(not catalogue.is_device(entry), f"{where}: device is '{entry['device']}': expected cpu")

    def objects(self, functions, folder):
        """Objects and their notes on memory, each made once."""
        folder.mkdir(parents=True, exist_ok=True)
        for function, (made_by, command) in functions.items():
            result, note = folder / f"{function}.o", folder / f"{function}.scratch.inc"
            if result.exists() and note.exists():
                continue
            # Another process may make the same one: files get their names when they are whole.
            with tempfile.TemporaryDirectory(dir=folder, prefix=".") as own:
                made = [Path(own) / "o", Path(own) / "inc"]
                run(function, self.programs[made_by] + command + ["--object", str(made[0]), "--scratch", str(made[1])])
                made[0].replace(result)
                made[1].replace(note)
        return [str(folder / f"{function}.o") for function in functions]

    def user_functions(self, kernels, folder):
        """Plug-ins of the generator, and the lists of their parameters."""
        folder.mkdir(parents=True, exist_ok=True)
        for source, plugin in dict.fromkeys((f.source, f.plugin) for f in catalogue.user_functions):
            try:
                compile_mod.compile_mod(self.cxx, self.halide, source, plugin)
            except compile_mod.UserFunctionError as error:
                raise catalogue.CatalogueError(str(error)) from error
        for name, arguments in catalogue.user_params(kernels).items():
            run(name, [self.generator, "--describe", str(folder / name), *arguments])

    def compile(self, text, folder, work, name):
        source, result = work / f"{name}.cpp", work / f"{name}.o"
        source.write_text(text)
        run(name, [*self.cxx, *self.flags, f"-I{folder}", f"-I{self.include}", f"-I{self.runtime}", "-c", str(source), "-o", str(result)])
        return str(result)

    def plugin(self, objects, work, library):
        script = work / "exports.map"
        script.write_text("{ global: attune_plugin; local: *; };\n")
        made = work / "plugin.so"
        run(library.name, [*self.cxx, "-shared", "-o", str(made), *objects, self.core, "-pthread", "-ldl", f"-Wl,--version-script={script}", "-Wl,--gc-sections",
                           "-Wl,-z,defs", "-s"])
        replace(made, library)

    def plugin_of(self, kernels, objects_folder, library):
        for entry in kernels:
            self.check(entry)
        library.parent.mkdir(parents=True, exist_ok=True)
        text, functions, _ = catalogue.describe(kernels, self.programs, self.autoschedulers, objects_folder)
        objects = self.objects(functions, objects_folder)
        with tempfile.TemporaryDirectory(prefix="attune-") as work:
            work = Path(work)
            compiled = self.compile(text + catalogue.PLUGIN % len(kernels), objects_folder, work, "plugin")
            self.plugin([compiled, *objects], work, library)


def replace(made, wanted):
    """In one step, across file systems."""
    beside = wanted.with_name(f".{wanted.name}.{os.getpid()}")
    shutil.copyfile(made, beside)
    os.chmod(beside, 0o755)
    beside.replace(wanted)


CMAKE = """# Made by attune build: the target attune::attune_@NAME@ (static), and ATTUNE_@UPPER@_PLUGIN, the path of the plug-in.
get_filename_component(_attune_root "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
include(CMakeFindDependencyMacro)
find_dependency(Threads)
if(NOT TARGET attune::attune_@NAME@)
  add_library(attune::attune_@NAME@ STATIC IMPORTED)
  set_target_properties(attune::attune_@NAME@ PROPERTIES IMPORTED_LOCATION "${_attune_root}/lib/libattune_@NAME@.a"
    INTERFACE_INCLUDE_DIRECTORIES "${_attune_root}/include" INTERFACE_LINK_LIBRARIES "stdc++;m;Threads::Threads;${CMAKE_DL_LIBS}")
endif()
set(ATTUNE_@UPPER@_PLUGIN "${_attune_root}/lib/libattune_@NAME@.so")
"""


def export(toolchain, out, paths, score_mods=(), mask_mods=()):
    name = re.sub(r"[^a-z0-9_]+", "_", out.resolve().name.lower())
    lib, include, package = out / "lib", out / "include" / "attune", out / "lib" / "cmake" / f"attune_{name}"
    archive, library = lib / f"libattune_{name}.a", lib / f"libattune_{name}.so"
    with tempfile.TemporaryDirectory(prefix="attune-") as work:
        work = Path(work)
        folder = work / "objects"
        catalogue.take_user_functions(score_mods, mask_mods, folder)
        kernels = catalogue.load(paths)
        catalogue.check(kernels, f"{', '.join(paths)}: has no kernel: expected one at least")
        for entry in kernels:
            toolchain.check(entry)
        for made in (lib, include, package):
            made.mkdir(parents=True, exist_ok=True)
        toolchain.user_functions(kernels, folder)
        text, functions, _ = catalogue.describe(kernels, toolchain.programs, toolchain.autoschedulers, folder)
        objects = toolchain.objects(functions, folder)
        made = work / "archive.a"
        shutil.copyfile(toolchain.core, made)
        run(archive.name, ["ar", "rs", str(made), toolchain.compile(text, folder, work, "kernels"), *objects])
        run(archive.name, ["strip", "--strip-debug", str(made)])
        replace(made, archive)
        toolchain.plugin([toolchain.compile(text + catalogue.PLUGIN % len(kernels), folder, work, "plugin"), *objects], work, library)
    for header in (toolchain.include / "attune").glob("*.h*"):
        shutil.copyfile(header, include / header.name)
    lines = "".join(f"    /* {k['why']} */\n    X({k['name']})\n".replace("\n", " \\\n") for k in kernels)
    (include / f"attune_{name}.h").write_text(
        f"/* Made by attune build: the kernels of libattune_{name}. */\n#ifndef ATTUNE_SET_{name.upper()}_H\n#define ATTUNE_SET_{name.upper()}_H\n#include \"attune/kernel.h\"\n\n"
        f"#define ATTUNE_{name.upper()}_KERNELS(X) \\\n{lines}\n#endif\n")
    (package / f"attune_{name}-config.cmake").write_text(CMAKE.replace("@NAME@", name).replace("@UPPER@", name.upper()))
    for path in (archive, library, include / f"attune_{name}.h", package / f"attune_{name}-config.cmake"):
        print(f"{str(path):<60} {path.stat().st_size / 2**20:6.1f} MiB")
    print(f"{len(kernels)} kernels; link with: cc main.c -I{out}/include {archive} -lstdc++ -lm -pthread -ldl")


def serve(toolchain):
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        begin = time.monotonic()
        try:
            question = json.loads(line)
            if question["op"] == "quit":
                return
            kernels = catalogue.checked([("candidate", [json.loads(question["entry"])])])
            toolchain.plugin_of(kernels, Path(question["objects"]), Path(question["library"]))
            answer = {"ok": True, "seconds": time.monotonic() - begin}
        except (catalogue.CatalogueError, OSError, KeyError, ValueError) as error:
            answer = {"error": str(error) or type(error).__name__}
        answers.write(json.dumps(answer) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--toolchain", required=True)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--score-mod", action="append", default=[])
    parser.add_argument("--mask-mod", action="append", default=[])
    parser.add_argument("catalogues", nargs="*")
    args = parser.parse_args()
    toolchain = Toolchain(args.toolchain)
    if args.serve:
        serve(toolchain)
    else:
        catalogue.check(args.output and args.catalogues, "expected -o DIR and a catalogue, or --serve")
        export(toolchain, args.output, args.catalogues, args.score_mod, args.mask_mod)


if __name__ == "__main__":
    try:
        main()
    except (catalogue.CatalogueError, OSError) as error:
        sys.exit(f"attune: {error}")
