"""The state of everything that decides what a kernel of a given catalogue entry is: sources of the generators, adapters, and the
versions of Halide and LLVM. Results of `attune tune` count only for the state that they were measured with.

  sources_hash.py OUT.inc MLIR_OPT FILE...

writes a C string of 16 hexadecimal digits.
"""
import hashlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path


def main():
    out, mlir_opt, files = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    state = hashlib.sha256(f"halide {version('halide')}\n".encode())
    if mlir_opt:
        state.update(subprocess.run([mlir_opt, "--version"], capture_output=True, check=True).stdout)
    for file in sorted(files):
        state.update(f"{Path(file).name}\n".encode() + Path(file).read_bytes())
    text = f'"{state.hexdigest()[:16]}"\n'
    if not out.exists() or out.read_text() != text:
        out.write_text(text)


if __name__ == "__main__":
    main()
