#!/usr/bin/env python3
"""Installs the build, moves the prefix, and uses it as others would: the files, the symbols, the headers by themselves, and
projects outside the tree by find_package and by pkg-config, with each compiler there is, Debug and Release, static and shared.

  package_test.py --build DIR --cmake PROGRAM --ninja PROGRAM --version X.Y.Z --cc PROGRAM --cxx PROGRAM
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
options = None
# What a C++ program has anyway.
ALLOWED_LIBRARIES = r"lib(stdc\+\+|m|gcc_s|c|dl|pthread|rt)\.so\.\d+|ld-linux.*|linux-vdso.*"


def run(*command, env=None):
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, env={**os.environ, **(env or {})})
    if result.returncode:
        raise AssertionError(f"{' '.join(map(str, command))}: status {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


def compilers():
    """(C, C++) of the build, and Clang's where it is another."""
    found = [(options.cc, options.cxx)]
    others = (shutil.which("clang"), shutil.which("clang++"))
    if all(others) and "clang" not in run(options.cxx, "--version").lower():
        found.append(others)
    return found


class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="attune package ")  # a space: paths have them
        cls.root = Path(cls.folder.name)
        cls.first = cls.root / "first"
        run(options.cmake, "--install", options.build, "--prefix", cls.first)
        cls.prefix = cls.root / "moved here"
        cls.first.rename(cls.prefix)
        cls.lib = next(p.parent for p in cls.prefix.rglob("libattune.a"))

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_files(self):
        for name in ("include/attune/attune.h", "include/attune/attune.hpp", "share/doc/attune/LICENSE", "share/doc/attune/THIRD-PARTY.txt"):
            self.assertTrue((self.prefix / name).is_file(), name)
        shared = self.lib / f"libattune.so.{options.version}"
        self.assertEqual((self.lib / "libattune.so").resolve(), shared.resolve())
        self.assertEqual((self.lib / f"libattune.so.{options.version.split('.')[0]}").resolve(), shared.resolve())
        for path in self.prefix.rglob("*"):  # nothing remembers where it was
            if path.suffix in (".cmake", ".pc"):
                for old in (str(self.first), str(options.build)):
                    self.assertNotIn(old, path.read_text(), path)

    def test_header_says_the_version(self):
        text = (self.prefix / "include/attune/attune.h").read_text()
        found = [re.search(rf"ATTUNE_VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH")]
        self.assertEqual(".".join(found), options.version)

    def test_symbols(self):
        shared = self.lib / "libattune.so"
        names = [line.split()[-1].split("@")[0] for line in run("nm", "-D", "--defined-only", shared).splitlines()]
        self.assertIn("attune_run", names)
        self.assertEqual([n for n in names if not n.startswith("attune_")], [])
        declared = "\n".join(p.read_text() for p in (self.prefix / "include/attune").glob("*.h"))
        self.assertEqual([n for n in names if not re.search(rf"\b{n}\(", declared)], [], "exported, but in no header")

    def test_needs_no_other_library(self):
        dynamic = run("readelf", "-d", self.lib / "libattune.so")
        self.assertIn(f"[libattune.so.{options.version.split('.')[0]}]", dynamic)
        self.assertNotIn("RUNPATH", dynamic)
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
        self.assertEqual([n for n in needed if not re.fullmatch(ALLOWED_LIBRARIES, n)], [])

    def test_headers_alone(self):
        flags = ["-I", self.prefix / "include", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
        for c, cxx in compilers():
            for header in ("attune/attune.h", "attune/kernel.h", "attune/device.h"):
                path = self.prefix / "include" / header
                run(c, "-std=c11", "-x", "c", *flags, path)
                run(cxx, "-std=c++17", "-x", "c++", *flags, path)
            run(cxx, "-std=c++20", "-x", "c++", *flags, self.prefix / "include/attune/attune.hpp")

    def configure(self, source, build, c, cxx, *more):
        run(options.cmake, "-S", HERE / source, "-B", build, "-G", "Ninja Multi-Config", f"-DCMAKE_MAKE_PROGRAM={options.ninja}",
            f"-DCMAKE_PREFIX_PATH={self.prefix}", f"-DCMAKE_C_COMPILER={c}", f"-DCMAKE_CXX_COMPILER={cxx}", *more)

    def test_find_package(self):
        for number, (c, cxx) in enumerate(compilers()):
            build = self.root / f"consumer{number}"
            self.configure("consumer", build, c, cxx, f"-DEXPECT_VERSION={options.version}")
            for config in ("Debug", "Release"):
                run(options.cmake, "--build", build, "--config", config)
                for program in ("c_static", "c_shared", "cpp_static", "cpp_shared"):
                    self.assertIn("24.01", run(build / config / program))
                plugins = [build / config / f"libplugin_{name}.so" for name in ("one", "two")]
                run(build / config / "two_plugins", *plugins)
                for plugin in plugins:
                    names = run("nm", "-D", "--defined-only", plugin).split()
                    self.assertEqual([n for n in names if n.startswith(("attune_", "attn_", "halide_"))], [])

    def test_find_package_in_c_alone(self):
        build = self.root / "consumer_c"
        self.configure("consumer_c", build, options.cc, options.cxx)
        run(options.cmake, "--build", build, "--config", "Release")
        self.assertIn("24.01", run(build / "Release" / "main"))

    def test_one_library_only(self):
        """A prefix with the shared library alone: attune::attune is that one, and asking for the other is an error."""
        prefix = self.root / "shared only"
        for component in ("shared", "headers"):
            run(options.cmake, "--install", options.build, "--prefix", prefix, "--component", component)
        self.assertEqual(list(prefix.rglob("*.a")), [])
        build = self.root / "consumer_shared"
        run(options.cmake, "-S", HERE / "consumer_c", "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={options.ninja}",
            f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_C_COMPILER={options.cc}")
        run(options.cmake, "--build", build)
        self.assertIn("24.01", run(build / "main"))
        self.assertIn("libattune.so", run("readelf", "-d", build / "main"))
        with self.assertRaisesRegex(AssertionError, "the component static is\\s+not installed"):
            self.configure("consumer", self.root / "refused", options.cc, options.cxx, f"-DCMAKE_PREFIX_PATH={prefix}")

    def test_getting_started(self):
        """The project of docs/getting-started-link.md, word by word."""
        text = (HERE.parents[1] / "docs/getting-started-link.md").read_text()
        source = self.root / "engine"
        source.mkdir()
        for language, name in (("cmake", "CMakeLists.txt"), ("cpp", "main.cpp")):
            (source / name).write_text(re.search(rf"```{language}\n(.*?)```", text, re.S)[1])
        run(options.cmake, "-S", source, "-B", source / "build", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={options.ninja}",
            f"-DCMAKE_PREFIX_PATH={self.prefix}", f"-DCMAKE_CXX_COMPILER={options.cxx}")
        run(options.cmake, "--build", source / "build")
        self.assertRegex(run(source / "build/engine"), r"^attn_\w+: 3\n$")

    def test_examples_on_their_own(self):
        build = self.root / "examples"
        run(options.cmake, "-S", EXAMPLES, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={options.ninja}", "-DCMAKE_BUILD_TYPE=Debug",
            f"-DCMAKE_PREFIX_PATH={self.prefix}", f"-DCMAKE_C_COMPILER={options.cc}", f"-DCMAKE_CXX_COMPILER={options.cxx}")
        run(options.cmake, "--build", build, "--target", "example_decoder")
        self.assertIn("largest difference", run(build / "bin/examples/decoder"))

    def kernels(self, build, *more, example="own_kernels"):
        run(options.cmake, "-S", EXAMPLES / example, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={options.ninja}",
            f"-DCMAKE_PREFIX_PATH={self.prefix}", f"-DCMAKE_CXX_COMPILER={options.cxx}", "-DCMAKE_BUILD_TYPE=Release",
            f"-DATTUNE_PYTHON={sys.executable}", *more)

    def test_add_kernels(self):
        """Exactly the kernels that are asked for, in an executable and in a static library; no compiler is left in it."""
        build = self.root / "consumer_kernels"
        self.kernels(build)
        run(options.cmake, "--build", build)
        for program in ("engine", "engine_static"):
            out = run(build / program)
            self.assertEqual(re.findall(r"kernel (\w+)", out), ["attn_flash_f32_dbig_sse41"])
            self.assertIn("attn_flash_f32_dbig_sse41: 24.01", out)
            needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", build / program))
            self.assertEqual([n for n in needed if not re.fullmatch(ALLOWED_LIBRARIES, n)], [])
            self.assertLess((build / program).stat().st_size, 4 << 20)

    def test_add_kernels_wrongly(self):
        build = self.root / "wrong_kernels"
        default = {"CATALOGUE": "kernels.json", "ISAS": "sse41", "ATTUNE_PYTHON": sys.executable}
        for wrong, message in (
            ({"CATALOGUE": "nowhere.json"}, "CATALOGUE is .*nowhere.json: there is no such file"),
            ({"ISAS": "avx512"}, "no kernel is left of ISAs avx512"),
            ({"ISAS": "mmx"}, "--isa is 'mmx': expected one of sse41"),
            ({"ATTUNE_PYTHON": "/usr/bin/false"}, "ATTUNE_PYTHON is /usr/bin/false .*expected a Python"),
        ):
            with self.assertRaisesRegex(AssertionError, r"(?s)" + message.replace(" ", r"\s+")):
                self.kernels(build, *(f"-D{key}={value}" for key, value in {**default, **wrong}.items()))
        catalogue = self.root / "newer.json"
        catalogue.write_text((EXAMPLES / "own_kernels/kernels.json").read_text().replace('"schema": 1', '"schema": 2'))
        with self.assertRaisesRegex(AssertionError, r"schema is 2:\s+expected 1"):
            self.kernels(build, f"-DCATALOGUE={catalogue}", "-DISAS=sse41")

    def test_user_functions(self):
        """The functions of docs/kernels.md, word by word, in an engine outside of the tree."""
        functions = re.findall(r"```cpp\n(#include <attune/mods.h>.*?)```", (HERE.parents[1] / "docs/kernels.md").read_text(), re.S)
        for name, text in zip(("alibi", "document"), functions, strict=True):
            (self.root / f"{name}.cpp").write_text(text)
        build = self.root / "user_function"
        self.kernels(build, "-DISAS=sse41", f"-DSCORE_MOD={self.root}/alibi.cpp", f"-DMASK_MOD={self.root}/document.cpp", example="user_function")
        run(options.cmake, "--build", build)
        out = run(build / "engine")
        self.assertRegex(out, r"attn_flash_f32_dbig_sse41_alibi_document: largest difference \d")
        self.assertIn("tensors.params lacks document: expected i32 of rank 2 (user functions alibi,document)", out)
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", build / "engine"))
        self.assertEqual([n for n in needed if not re.fullmatch(ALLOWED_LIBRARIES, n)], [])

    def test_user_functions_that_do_not_compile(self):
        """The place in the user's file is said, and nothing of a header's templates."""
        source = self.root / "wrong.cpp"
        source.write_text("#include <attune/mods.h>\n\nATTUNE_SCORE_MOD(Buffer<float, 1> slopes) {\n    return score - slopes(h, q);\n}\n")
        build = self.root / "wrong_function"
        self.kernels(build, "-DISAS=sse41", f"-DSCORE_MOD={source}", example="user_function")
        with self.assertRaisesRegex(AssertionError, re.escape(f"{source}:4: error: a Buffer<T, rank> takes as many indices as its rank")) as raised:
            run(options.cmake, "--build", build)
        self.assertNotIn("mods.h", str(raised.exception))
        with self.assertRaisesRegex(AssertionError, r"(?s)SCORE_MOD\s+is\s+.*nowhere.cpp: there\s+is\s+no\s+such\s+file"):
            self.kernels(build, "-DSCORE_MOD=nowhere.cpp", example="user_function")

    @unittest.skipUnless(shutil.which("pkg-config"), "no pkg-config")
    def test_pkg_config(self):
        env = {"PKG_CONFIG_PATH": str(self.lib / "pkgconfig")}
        self.assertEqual(run("pkg-config", "--modversion", "attune", env=env).strip(), options.version)
        for name in ("attune", "attune-static"):
            flags = run("pkg-config", "--cflags", "--libs", name, env=env).strip()
            program = self.root / f"by {name}"
            subprocess.run(f"'{options.cc}' -std=c11 -O1 '{EXAMPLES}/c_interface/main.c' -o '{program}' {flags} -lm", shell=True, check=True)
            self.assertIn("24.01", run(program, env={"LD_LIBRARY_PATH": str(self.lib)}))
            self.assertEqual("libattune.so" in run("readelf", "-d", program), name == "attune")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("build", "cmake", "ninja", "version", "cc", "cxx"):
        parser.add_argument(f"--{name}", required=True)
    options, rest = parser.parse_known_args()
    unittest.main(argv=sys.argv[:1] + rest)
