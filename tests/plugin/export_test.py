"""From a catalogue to programs outside of the tree: attune build, then a C program with the archive, and one that loads the
plug-in into a program of its own.

  export_test.py ATTUNE SOURCE_DIR
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ATTUNE, SOURCE = sys.argv[1], Path(sys.argv[2])
LIBRARIES = ["-lstdc++", "-lm", "-pthread", "-ldl"]
# 20 lines: one attention, against the hand-checked values (tests of the contract).
PROGRAM = r"""
#include "attune/attune_small.h"
#include <math.h>
#include <stdio.h>
int main(int argc, char **argv) {
    float q[2] = {1, 0}, k[6] = {1, 0, 0, 1, 1, 1}, v[3] = {10, 20, 40}, o[1];
    for (int i = 1; i < argc; i++)
        if (attune_load_kernels(argv[i]) != ATTUNE_OK) return printf("%s\n", attune_last_error()), 3;
    attune_problem p;
    attune_problem_init(&p);
    p.Hq = p.Hkv = p.N = 1, p.M = 3, p.dk = 2, p.dv = 1;
    attune_plan *plan;
    if (attune_plan_create(&p, NULL, &plan) != ATTUNE_OK) return printf("%s\n", attune_last_error()), 1;
    attune_tensors t;
    attune_tensors_init(&t);
    t.q = (attune_tensor){q, ATTUNE_F32, ATTUNE_CPU, {1, 1, 1, 2}, {2, 2, 2, 1}};
    t.k = (attune_tensor){k, ATTUNE_F32, ATTUNE_CPU, {1, 1, 3, 2}, {6, 6, 2, 1}};
    t.v = (attune_tensor){v, ATTUNE_F32, ATTUNE_CPU, {1, 1, 3, 1}, {3, 3, 1, 1}};
    t.o = (attune_tensor){o, ATTUNE_F32, ATTUNE_CPU, {1, 1, 1, 1}, {1, 1, 1, 1}};
    static char workspace[1 << 22];
    if (attune_run(plan, &t, workspace, sizeof workspace) != ATTUNE_OK) return printf("%s\n", attune_last_error()), 1;
    printf("%s %d kernels %.3f\n", attune_plan_kernel(plan), (int)attune_num_kernels(), o[0]);
    return fabs(o[0] - 24.011f) < 1e-3 ? 0 : 2;
}
"""


def run(*command, expected=0, **options):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    assert done.returncode == expected, f"{command}: status {done.returncode}, expected {expected}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


class Export(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        root = cls.root = Path(cls.folder.name)
        entries = json.loads((SOURCE / "generators/catalogue/cpu.json").read_text())
        by_name = {e["name"]: e for e in entries}
        (root / "small.json").write_text(json.dumps([by_name["attn_flash_f32_dbig_sse41"]]))
        other = dict(by_name["attn_rowstrip_f32_dbig_sse41"])
        (root / "other.json").write_text(json.dumps([other]))
        cls.said = run(ATTUNE, "build", root / "small.json", "-o", root / "small")
        run(ATTUNE, "build", root / "other.json", "-o", root / "other")
        (root / "main.c").write_text(PROGRAM)
        run("cc", "-std=c99", "-Wall", "-Werror", "main.c", "-Ismall/include", "small/lib/libattune_small.a", *LIBRARIES, "-o", "main", cwd=root)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_the_archive_has_the_kernels_of_the_catalogue_and_no_other(self):
        self.assertIn("attn_flash_f32_dbig_sse41 1 kernels 24.011", run(self.root / "main"))
        self.assertIn("1 kernels; link with: cc main.c", self.said)
        self.assertLess((self.root / "small/lib/libattune_small.a").stat().st_size, 8 << 20)

    def test_a_plugin_joins_them(self):
        plugin = self.root / "other/lib/libattune_other.so"
        self.assertIn("2 kernels 24.011", run(self.root / "main", plugin))
        self.assertIn("2 kernels 24.011", run(self.root / "main", plugin, plugin))  # once
        self.assertIn("is registered already", run(self.root / "main", self.root / "small/lib/libattune_small.so", expected=3))
        exported = run("nm", "-D", "--defined-only", plugin).split()
        self.assertEqual([s for s in exported if not s.isupper() and not s.isalnum()], ["attune_plugin"])

    def test_the_cmake_package(self):
        project = self.root / "project"
        project.mkdir()
        (project / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.20)\nproject(p LANGUAGES C)\nfind_package(attune_small REQUIRED)\n"
                                                "add_executable(p ../main.c)\ntarget_link_libraries(p PRIVATE attune::attune_small)\n")
        cmake = os.environ.get("CMAKE", "cmake")
        run(cmake, "-S", project, "-B", project / "b", f"-DCMAKE_PREFIX_PATH={self.root / 'small'}")
        run(cmake, "--build", project / "b")
        self.assertIn("1 kernels 24.011", run(project / "b" / "p"))

    def test_bad_input(self):
        bad = self.root / "bad.json"
        for text, message in (("", "bad.json: "), ("{}", "expected a list of kernels"), ("[]", "has no kernel"), ("[{}]", "'schema' is missing")):
            bad.write_text(text)
            self.assertIn(message, run(ATTUNE, "build", bad, "-o", self.root / "bad", expected=2))
        self.assertIn("FILE=none.json: not there", run(ATTUNE, "build", "none.json", "-o", self.root / "bad", expected=2))
        entries = json.loads((self.root / "small.json").read_text())
        entries[0]["params"]["rwos"] = 6  # the generator knows no such knob
        bad.write_text(json.dumps(entries))
        self.assertIn("rwos", run(ATTUNE, "build", bad, "-o", self.root / "bad", expected=2))

    def test_user_functions(self):
        out = self.root / "alibi"
        run(ATTUNE, "build", self.root / "small.json", "-o", out, "--score-mod", SOURCE / "examples/mods/alibi.cpp")
        self.assertIn("X(attn_flash_f32_dbig_sse41_alibi)", (out / "include/attune/attune_alibi.h").read_text())
        # The same program, whose problem asks for no user functions, has its own kernel still.
        self.assertIn("attn_flash_f32_dbig_sse41 2 kernels 24.011", run(self.root / "main", out / "lib/libattune_alibi.so"))

    def test_wrong_user_functions(self):
        """Each is said with the place in the user's file; nothing is made."""
        head = "#include <attune/mods.h>\n"
        for line, option, body, message in (
            (2, "mask", "ATTUNE_MASK_MOD() { return q - k; }", "the function returns int32: expected a condition (uint1)"),
            (2, "score", "ATTUNE_SCORE_MOD() { return Expr(); }", "the function returns an Expr without a value"),
            (2, "score", "ATTUNE_SCORE_MOD(float slope) { return score; }", "a parameter of a user function is a Scalar<T> or a Buffer<T, rank>"),
            (3, "score", "ATTUNE_SCORE_MOD() {\n    return slope * score;\n}", "slope"),
            (3, "mask", "ATTUNE_MASK_MOD(Scalar<int32_t> x) { return k < x; }\nATTUNE_BLOCK_MOD(Scalar<float> x) { return {.none = x < 0.0f}; }",
             "the parameter x has another type in another user function"),
            (2, "mask", "ATTUNE_MASK_MOD() { return Halide::reinterpret<int64_t>(q) < 1; }", "Error: "),
        ):
            with self.subTest(body):
                source = self.root / "wrong.cpp"
                source.write_text(head + body + "\n")
                said = run(ATTUNE, "build", self.root / "small.json", "-o", self.root / "bad", f"--{option}-mod", source, expected=2)
                self.assertRegex(said, rf"{source}:{line}:.*{re.escape(message)}")
                self.assertNotIn("mods.h", said)
        source.write_text(head + "ATTUNE_MASK_MOD() { return (cast<float>(q) & 3.0f) < 1; }\n")  # Halide says it while it makes the kernel
        self.assertIn(f"with the user functions of {source}", run(ATTUNE, "build", self.root / "small.json", "-o", self.root / "bad", "--mask-mod", source, expected=2))
        source.write_text(head + "ATTUNE_MASK_MOD() { return k < q; }\n")
        self.assertIn("has no ATTUNE_SCORE_MOD: expected one, since it is given as SCORE_MOD",
                      run(ATTUNE, "build", self.root / "small.json", "-o", self.root / "bad", "--score-mod", source, expected=2))
        for file, message in (("nowhere.cpp", "there is no such file"), (SOURCE / "examples/mods/../../tests/mods/mods_test.cpp", "small letters and digits")):
            self.assertIn(message, run(ATTUNE, "build", self.root / "small.json", "-o", self.root / "bad", "--mask-mod", file, expected=2))
        entries = json.loads((self.root / "small.json").read_text())
        for change, message in (({"strategy": "rowlanes", "name": "attn_rowlanes_f32_dbig_sse41"}, "expected one of flash, rowstrip"),
                                ({"mods": ["other"], "name": entries[0]["name"] + "_other"}, "mods has 'other': expected one of wrong"),):
            (self.root / "bad.json").write_text(json.dumps([{**entries[0], **change}]))
            self.assertIn(message, run(ATTUNE, "build", self.root / "bad.json", "-o", self.root / "bad", "--mask-mod", source, expected=2))
        (self.root / "bad.json").write_text(json.dumps([{**entries[0], "mods": ["other"], "name": entries[0]["name"] + "_other"}]))
        self.assertIn("expected a file other.cpp as SCORE_MOD or MASK_MOD", run(ATTUNE, "build", self.root / "bad.json", "-o", self.root / "bad", expected=2))
        self.assertFalse((self.root / "bad/lib/libattune_bad.so").exists())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
