"""From a catalogue to programs outside of the tree: attune build, then a C program with the archive, and one that loads the
plug-in into a program of its own.

  export_test.py ATTUNE SOURCE_DIR
"""
import json
import os
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


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
