#!/usr/bin/env python3
"""The limits on what the default build makes: kernels, time to generate them, size of the stripped archive.

  limits.py BUILD_DIR

Prints each figure beside its limit; exits with 1 if one is passed.
"""
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_KERNELS = 120
MAX_MINUTES = 4.0  # on two cores
MAX_MIB = 20.0


def generation_minutes(build):
    """Time that the generator ran for the objects of the last build, over two cores, from ninja's log."""
    log = build / ".ninja_log"
    if not log.exists():
        return None
    last = {}
    for line in log.read_text().splitlines()[1:]:
        start, end, _, output, _ = line.split("\t")
        if "/kernels/" in "/" + output and output.endswith(".o") and "attune_kernels" not in output:
            last[Path(output).name] = int(end) - int(start)
    return sum(last.values()) / 1000 / 60 / 2


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
    minutes = generation_minutes(build)
    if minutes is not None:
        figures.append(("generating them on 2 cores, minutes", minutes, MAX_MINUTES, "{:.1f}"))
    failed = False
    for name, value, limit, form in figures:
        ok = value <= limit
        failed = failed or not ok
        print(f"{name}: {form.format(value)} of {limit:g}{'' if ok else '  TOO MUCH'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
