"""Makes PyPI's PyTorch for Linux importable without the 2 GB of CUDA libraries that it links.

The package index has no CPU build of PyTorch: its wheel lists cuBLAS, cuDNN, NCCL and others as needed, and the dynamic
linker refuses to load it without them, though nothing on a CPU ever calls them. For each such library that is not
there, this writes a small one of the same name beside PyTorch's own, in which every function that PyTorch refers to
returns an error. The CUDA runtime is not among them: it comes from its own small package, since PyTorch's static constructors
call it. PyTorch then sees no GPU, and its CPU code is what it always is.

    python torch_without_cuda.py        in the environment that has torch; needs a C compiler and binutils
"""
import collections
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile

REAL = {"libcudart.so.13", "libcuda.so.1"}  # the package nvidia-cuda-runtime, and the driver, which no import loads
NVIDIA = re.compile(r"lib(cu|nv|nccl)[^/]*\.so\.\d+$")
PREFIXES = {"libcufile": "cuFile", "libcusparseLt": "cusparseLt", "libnccl": "nccl", "libnvshmem_host": "nvshmem"}


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main():
    lib = pathlib.Path(importlib.util.find_spec("torch").origin).parent / "lib"
    own = {path.name for path in lib.iterdir()}
    needed = set()
    symbols = collections.defaultdict(set)  # of a version's name, or of a prefix
    versions = {}  # the library that a version belongs to
    for path in sorted(lib.glob("*.so")):
        dynamic = output("readelf", "-W", "-d", path)
        needed |= {n for n in re.findall(r"NEEDED.*\[(.*)\]", dynamic) if NVIDIA.match(n)} - REAL
        file = None
        for line in output("readelf", "-W", "-V", path).splitlines():
            if found := re.search(r"Version: \d+\s+File: (\S+)", line):
                file = found[1]
            elif file and (found := re.search(r"Name: (\S+)\s+Flags", line)):
                versions[found[1]] = file
        for line in output("nm", "-D", "--undefined-only", "--with-symbol-versions", path).splitlines():
            name, _, version = line.split()[-1].partition("@")
            symbols[version.lstrip("@")].add(name)
    made = []
    for name in sorted(needed - own):
        stem = name.partition(".so")[0]
        parts = {v: symbols[v] for v, file in versions.items() if file == name}
        if prefix := PREFIXES.get(stem):
            parts.setdefault("", set()).update(s for s in symbols[""] if s.startswith(prefix))
        build(lib, name, parts)
        made.append(name)
    print(f"torch: {len(made)} CUDA libraries replaced by empty ones: {' '.join(made)}" if made else "torch: nothing to do")


def build(lib, name, parts):
    source, script = [], []
    for version, names in parts.items():
        # 999: cudaErrorUnknown, and an error to every other of these libraries.
        source += [f"int {symbol}(void) {{ return 999; }}" for symbol in sorted(names) if symbol.isidentifier()]
        if version:
            script.append(f"{version} {{ global: {' '.join(s + ';' for s in sorted(names))} }};")
    with tempfile.TemporaryDirectory() as folder:
        c, v, so = (os.path.join(folder, n) for n in ("stub.c", "stub.map", name))
        pathlib.Path(c).write_text("\n".join(source) + "\nint attune_empty_library;\n")
        pathlib.Path(v).write_text("\n".join(script))
        subprocess.run([*os.environ.get("CC", "cc").split(), "-shared", "-fPIC", "-nostdlib", "-w", "-fno-builtin",
                        f"-Wl,-soname,{name}", *([f"-Wl,--version-script,{v}"] if script else []), c, "-o", so], check=True)
        temporary = lib / f"{name}.new"
        temporary.write_bytes(pathlib.Path(so).read_bytes())
        temporary.rename(lib / name)


if __name__ == "__main__":
    sys.exit(main())
