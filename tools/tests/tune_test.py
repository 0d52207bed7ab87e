"""attune tune from outside: a search, one that is interrupted, killed, or meets compilers that crash, hang and lie.

  tune_test.py ATTUNE TOOLCHAIN.json Tune|Slow

The search is the real one, on a tiny problem. Faults are injected by a toolchain whose generator is a script: it calls the real one
unless the candidate is one of those that it spoils.
"""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ATTUNE, TOOLCHAIN = sys.argv[1], Path(sys.argv[2])
CASE = "f32:h2:n64:d24"
SPOILT = """#!/usr/bin/env python3
import os, subprocess, sys, time
arguments = sys.argv[1:]
text = " ".join(arguments)
if "_attend" in arguments[0] and "--object" in arguments:
    if "qk_rows=4" in arguments:
        os.abort()
    if "pv_rows=12" in arguments and "pv_vectors=1" in arguments and "k=192" in arguments:
        time.sleep(1000)
    if "panel=48" in arguments:  # an object that does nothing: no numbers at all
        function = arguments[1]
        source = arguments[arguments.index("--object") + 1] + ".c"
        open(source, "w").write(f"int {function}(void) {{ return 0; }}")
        subprocess.run(["cc", "-c", "-fPIC", source, "-o", source[:-2]], check=True)
        open(arguments[arguments.index("--scratch") + 1], "w").write("{1024, 0, 0, 0}\\n")
        sys.exit(0)
os.execv("@GENERATOR@", ["@GENERATOR@", *arguments])
"""


class Base(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(self.root / "cache")}
        self.environment.pop("ATTUNE_TUNING", None)

    def tearDown(self):
        self.folder.cleanup()

    def start(self, *arguments, **more):
        return subprocess.Popen([ATTUNE, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**self.environment, **more})

    def run_tool(self, *arguments, expected=0, **more):
        child = self.start(*arguments, **more)
        output = child.communicate()[0]
        self.assertEqual(child.returncode, expected, output)
        return output

    def stores(self):
        return [p for p in (self.root / "cache/attune/tuning").glob("*.tsv")]


class Tune(Base):
    def test_a_case(self):
        result = self.root / "result.json"
        said = self.run_tool("tune", CASE, "--threads", 1, "--budget", 5, "--strategy", "flash,rowstrip", "--json", result)
        (tuned,) = json.loads(result.read_text())["tuned"]
        origins = {t["origin"] for t in tuned["trials"]}
        self.assertTrue({"linked", "sampled"} <= origins, origins)
        self.assertTrue(all(t["status"] in ("right", "slow") for t in tuned["trials"]), tuned["trials"])
        self.assertTrue(any(t["gain"] > 0 for t in tuned["trials"]))
        self.assertEqual(tuned["trials"][0]["name"], tuned["default"])
        (store,) = self.stores()
        self.assertIn(str(store), said)
        # The planner takes what was found, if it is better than what it would have taken; explain says so.
        explained = self.run_tool("explain", CASE, "--threads", 1, "--seconds", 0.1)
        self.assertIn(f"kernel     {tuned['done']['kernel']} ", explained)
        self.assertIn("tuning store: chose it", explained)
        off = self.run_tool("explain", CASE, "--threads", 1, "--seconds", 0.1, ATTUNE_TUNING="off")
        self.assertNotIn("tuning store", off)
        self.assertIn(f"kernel     {tuned['default']} ", off)
        # Without its plug-in, the store is passed over, aloud.
        if tuned["done"]["library"]:
            os.rename(tuned["done"]["library"], self.root / "away.so")
            gone = self.run_tool("explain", CASE, "--threads", 1, "--seconds", 0.1)
            self.assertIn("which is neither linked nor loaded", gone)
            self.assertIn(f"kernel     {tuned['default']} ", gone)
            os.rename(self.root / "away.so", tuned["done"]["library"])
        catalogue = self.root / "catalogue.json"
        self.run_tool("tune", "--export", catalogue)
        (entry,) = json.loads(catalogue.read_text())
        self.assertEqual(entry["name"], tuned["done"]["kernel"])

    def test_the_second_call_answers_at_once(self):
        first = self.run_tool("tune", CASE, "--threads", 1, "--budget", 4)
        self.assertIn("tried", first)
        begin = time.monotonic()
        second = self.run_tool("tune", CASE, "--threads", 1, "--budget", 4)
        self.assertLess(time.monotonic() - begin, 1)
        self.assertIn("--again searches anew", second)
        self.assertNotIn("tried", second)

    def test_faults_cost_one_candidate_each(self):
        script = self.root / "generator"
        toolchain = json.loads(TOOLCHAIN.read_text())
        script.write_text(SPOILT.replace("@GENERATOR@", toolchain["generator"]))
        script.chmod(0o755)
        (self.root / "toolchain.json").write_text(json.dumps({**toolchain, "generator": str(script), "mlir_generator": ""}))
        result = self.root / "result.json"
        self.run_tool("tune", CASE, "--threads", 1, "--budget", 13, "--build-limit", 4, "--strategy", "flash,rowstrip", "--json", result,
                      ATTUNE_TOOLCHAIN=str(self.root / "toolchain.json"))
        (tuned,) = json.loads(result.read_text())["tuned"]
        trials = [t for t in tuned["trials"] if t["origin"] != "linked"]
        seen = set()
        for trial in trials:
            words, shown = trial["knobs"].split(), (trial["knobs"], trial["status"], trial["why"])
            if "qk_rows=4" in words:
                self.assertEqual(trial["status"], "not built", shown)
                self.assertIn("signal 6", trial["why"])
                seen.add("crash")
            elif {"pv_rows=12", "pv_vectors=1", "k=192"} <= set(words):
                self.assertEqual(trial["status"], "not built", shown)
                self.assertIn("did not answer 'build' within 4 s", trial["why"])
                seen.add("hang")
            elif "panel=48" in words:
                self.assertEqual(trial["status"], "wrong", shown)
                seen.add("lie")
            else:
                self.assertIn(trial["status"], ("right", "slow"), shown)
                seen.add("right")
        self.assertEqual(seen, {"crash", "hang", "lie", "right"}, trials)
        self.assertNotIn("p48", tuned["done"]["kernel"])

    def test_ctrl_c_keeps_what_is_known(self):
        child = self.start("tune", CASE, "--threads", 1, "--budget", 60)
        trials = self.root / "cache/attune/trials"
        deadline = time.monotonic() + 40
        while time.monotonic() < deadline and not list(trials.glob("*/*.json")):
            time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        said = child.communicate()[0]
        self.assertEqual(child.returncode, 130, said)
        self.assertIn("the same command goes on from here", said)
        (kept,) = trials.glob("*/*.json")
        known = [t["name"] for t in json.loads(kept.read_text())["trials"] if t["origin"] != "linked"]
        self.assertTrue(known)
        self.run_tool("tune", CASE, "--threads", 1, "--budget", 3)
        again = [t["name"] for t in json.loads(kept.read_text())["trials"]]
        self.assertTrue(set(known) <= set(again))
        self.assertEqual(len(again), len(set(again)))

    def test_killed_at_any_moment_nothing_is_broken(self):
        for delay in (0.3, 1.7, 2.9):
            child = self.start("tune", CASE, "--threads", 1, "--budget", 4)
            time.sleep(delay)
            child.kill()
            child.communicate()
            for path in self.root.glob("cache/attune/trials/*/*.json"):
                json.loads(path.read_text())
        self.run_tool("tune", CASE, "--threads", 1, "--budget", 3)
        self.assertEqual(len(self.stores()), 1)
        explained = self.run_tool("explain", CASE, "--threads", 1, "--seconds", 0.1)
        self.assertIn("tuning store: chose it", explained)
        self.assertNotIn("damaged", explained)

    def test_dry_run(self):
        said = self.run_tool("tune", "f32:h8:n1024:d64", "--dry-run", "--seed", 3)
        self.assertEqual(said, self.run_tool("tune", "f32:h8:n1024:d64", "--dry-run", "--seed", 3))
        self.assertNotEqual(said, self.run_tool("tune", "f32:h8:n1024:d64", "--dry-run", "--seed", 4))
        self.assertIn("accumulators of Q K^T: 8 to 3/4 of the registers", said)
        number = lambda line: int(line.split()[0].replace(",", ""))
        for block in said.split("\n\n")[0].split(" points\n")[1:]:
            lines = [x for x in block.splitlines() if x.startswith(" ")]
            total = int(said.split(block)[0].rsplit(": ", 1)[1].split()[0].replace(",", ""))
            self.assertEqual(sum(map(number, lines)), total)
        self.assertFalse((self.root / "cache").exists())

    def test_bad_input(self):
        for arguments, message in ((["tune"], "no CASE is given"), (["tune", "f32:n4"], "f32:n4"), (["tune", "bf16:n4:d8", "--dry-run"], "expected f32"),
                                   (["tune", CASE, "--effort", "heroic"], "--effort=heroic: unknown; expected quick or full"),
                                   (["tune", CASE, "--budget", "-1"], "--budget=-1: expected"), (["tune", CASE, "--strategy", "magic", "--dry-run"], "--strategy=magic: has no tuning space"),
                                   (["tune", CASE, "--device", "cuda"], "--device=cuda: expected cpu"),
                                   (["tune", "f32:h8:n1024:d64", "--strategy", "split_kv", "--dry-run"], "emptied by 'few rows for a kv head"),
                                   (["tune", "--export", self.root / "x.json"], "nothing of this state of the generators is stored")):
            with self.subTest(arguments=arguments):
                self.assertIn(message, self.run_tool(*arguments, expected=2))
        self.assertIn("/proc/none", self.run_tool("tune", CASE, expected=2, ATTUNE_TUNING="/proc/none/x.tsv"))
        self.assertIn("expected a store", self.run_tool("tune", CASE, expected=2, ATTUNE_TUNING="off"))


class Slow(Base):
    def test_searchers_side_by_side(self):
        result = self.root / "result.json"
        said = self.run_tool("tune", "f32:h8:n128:d32", "--compare-searchers", "--threads", 1, "--budget", 12, "--json", result)
        (race,) = json.loads(result.read_text())["searchers"]
        self.assertEqual([s["name"] for s in race["searchers"]], ["random", "attune", "autoschedulers"])
        for searcher in race["searchers"]:
            self.assertIn(searcher["name"], said)
            tried = [t for t in searcher["trials"][1:] if t["status"] in ("right", "slow")]
            self.assertTrue(tried, searcher)
        self.assertTrue(all(t["strategy"].startswith("auto_") for t in race["searchers"][2]["trials"][1:]))
        self.assertEqual({t["origin"] for t in race["searchers"][0]["trials"][1:]}, {"sampled"})
        self.assertEqual(self.stores(), [])

    def test_cases_of_a_file_share_the_time(self):
        cases = self.root / "cases"
        cases.write_text("f32:h2:n64:d24 3\nf32:h2:n32:d16\n")
        result = self.root / "result.json"
        self.run_tool("tune", "--cases", cases, "--threads", 1, "--budget", 6, "--json", result)
        first, second = json.loads(result.read_text())["tuned"]
        self.assertGreater(first["done"]["budget"], second["done"]["budget"])
        catalogue = self.root / "catalogue.json"
        self.run_tool("tune", "--export", catalogue)
        self.assertEqual({e["name"] for e in json.loads(catalogue.read_text())}, {first["done"]["kernel"], second["done"]["kernel"]})
        self.run_tool("build", catalogue, "-o", self.root / "tuned")
        self.assertTrue((self.root / "tuned/lib/libattune_tuned.so").exists())

    def test_the_ranking_is_a_ranking_of_the_same_strategies(self):
        ranking = self.root / "ranking.json"
        before = {"about": "x", "rules": [{"rows_max": 8, "strategies": ["gpu_block", "stagewise", "split_kv", "flash"]}, {"strategies": ["gpu_block", "split_kv", "stagewise", "flash"]}]}
        ranking.write_text(json.dumps(before))
        self.run_tool("tune", "f32:h4:n300:d64", "f32:h4:n1:m2000:d64", "--threads", 1, "--defaults", ranking)
        after = json.loads(ranking.read_text())
        for old, new in zip(before["rules"], after["rules"]):
            self.assertEqual(new["strategies"][0], "gpu_block")
            self.assertLessEqual(set(old["strategies"]), set(new["strategies"]))
        self.assertLess(after["rules"][1]["strategies"].index("flash"), after["rules"][1]["strategies"].index("split_kv"))  # 300 rows


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
