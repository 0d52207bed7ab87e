#!/usr/bin/env python3
"""The limits on what the default build makes: kernels, time to generate them, size of the stripped archive.

  limits.py BUILD_DIR

Prints each figure beside its limit; exits with 1 if one is passed.
"""
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_KERNELS = 120
MAX_MINUTES = 4.0  # on two cores
MAX_MIB = 20.0


def generation_minutes(build):
    """CPU time that the generators took for the objects in the build folder, over two cores."""
    spent = 0.0
    for note in (build / "kernels").glob("*.scratch.inc"):
        found = re.search(r"generated in ([0-9.e+-]+) s of CPU time", note.read_text())
        spent += float(found.group(1)) if found else 0.0
    return spent / 60 / 2


def stripped_mib(archive):
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / archive.name
        shutil.copy(archive, copy)
        subprocess.run(["strip", "--strip-debug", str(copy)], check=True)
        return copy.stat().st_size / 2**20


def main():
    build = Path(sys.argv[1])
    kernels = len(json.loads((build / "kernels" / "manifest.json").read_text()))
    figures = [("kernels", kernels, MAX_KERNELS, "{:.0f}"), ("stripped archive, MiB", stripped_mib(build / "runtime" / "libattune.a"), MAX_MIB, "{:.1f}")]
    figures.append(("generating them on 2 cores, minutes", generation_minutes(build), MAX_MINUTES, "{:.1f}"))
    failed = False
    for name, value, limit, form in figures:
        ok = value <= limit
        failed = failed or not ok
        print(f"{name}: {form.format(value)} of {limit:g}{'' if ok else '  TOO MUCH'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
