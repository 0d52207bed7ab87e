"""attune bench with peers that are slow, wrong, crash or hang: python bench_peers_test.py BUILD/bin/attune"""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ATTUNE = ""
FAKE = pathlib.Path(__file__).parent / "fake_peers" / "fake_peer.py"
CASE = "f32:b1:h4/2:n8:d4:causal"


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


class Bench(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.peers = self.folder / "peers"
        self.peers.mkdir()
        self.json = self.folder / "result.json"
        self.pids = self.folder / "pids"
        self.environment = os.environ | {"ATTUNE_PEERS_TEST": str(self.peers), "FAKE_PEER_PIDS": str(self.pids)}

    def command(self, modes, *arguments):
        for mode in modes:
            (self.peers / mode).symlink_to(FAKE)
        return [ATTUNE, "bench", "--peers", "--threads", "1", "--rounds", "2", "--attempts", "1", "--time-limit", "0.1",
                "--json", str(self.json), *arguments]

    def run_bench(self, modes, *arguments):
        done = subprocess.run(self.command(modes, "--case", CASE, *arguments), env=self.environment, capture_output=True,
                              text=True, timeout=100)
        self.output = done.stdout + done.stderr
        self.assert_no_orphans()
        rows = json.loads(self.json.read_text())["rows"]
        return done.returncode, {row["impl"]: row for row in rows}

    def assert_no_orphans(self):
        for pid in self.pids.read_text().split():
            deadline = time.monotonic() + 5
            while not gone(pid) and time.monotonic() < deadline:
                time.sleep(0.02)
            self.assertTrue(gone(pid), f"process {pid} is still there")

    def test_a_good_and_a_slow_peer_are_measured(self):
        status, rows = self.run_bench(["good", "slow"])
        self.assertEqual(status, 0, self.output)
        for name in ("attune", "attune_again", "good", "slow"):
            row = rows[name]
            self.assertTrue(row["ok"], row)
            self.assertEqual((row["case"], row["threads"]), (CASE, 1))
            self.assertLessEqual(row["min_s"], row["median_s"])
            self.assertLessEqual(row["median_s"], row["p90_s"])
            self.assertLess(row["max_err"], row["err_bound"])
            self.assertGreater(row["pct_peak"], 0)
        self.assertAlmostEqual(rows["good"]["median_s"], 0.002)
        self.assertAlmostEqual(rows["slow"]["median_s"], 0.3)
        self.assertEqual(rows["good"]["allocs_per_call"], 7)
        self.assertEqual(rows["good"]["rss_growth_bytes"], 1 << 20)
        self.assertEqual(rows["good"]["how"], "by hand")
        self.assertEqual(rows["good"]["version"], "1.0 fake")
        self.assertEqual(rows["attune"]["allocs_per_call"], 0)
        self.assertTrue(rows["attune"]["kernel"].startswith("attn_"))
        self.assertEqual(rows["attune"]["kernel"], rows["attune_again"]["kernel"])

    def test_peers_that_misbehave_are_listed_and_the_others_measured(self):
        modes = ["babbles", "complains", "crashes", "dies", "good", "hangs", "refuses", "wrong"]
        status, rows = self.run_bench(modes, "--peer-limit", "3")
        self.assertEqual(status, 0, self.output)  # peers' failures are not attune's
        reasons = {"babbles": "answered 'Loading weights...'", "complains": "out of cheese", "crashes": "signal 11",
                   "dies": "status 3; its last line: no such library", "hangs": "did not answer 'run' within",
                   "refuses": "not on a Monday", "wrong": "expected"}
        for mode, reason in reasons.items():
            self.assertFalse(rows[mode]["ok"], mode)
            self.assertIn(reason, rows[mode]["why_not"])
            self.assertIn(reason, self.output)
            self.assertEqual(rows[mode]["median_s"] is None, mode != "wrong")
        self.assertTrue(rows["good"]["ok"])
        self.assertIn("WRONG", self.output)

    def test_a_peer_that_crashed_is_started_again_for_the_next_case(self):
        status, _ = self.run_bench(["crashes", "good"], "--case", "f32:b1:h2:n4:d4")
        self.assertEqual(status, 0, self.output)
        rows = json.loads(self.json.read_text())["rows"]
        crashed = [r["why_not"] for r in rows if r["impl"] == "crashes"]
        self.assertEqual(len(crashed), 2)
        self.assertTrue(all("signal 11" in why for why in crashed), crashed)

    def test_interrupted_keeps_what_is_known(self):
        cases = sum((["--case", f"f32:b1:h2:n{n}:d4"] for n in range(3, 43)), [])
        process = subprocess.Popen(self.command(["good", "slow"], *cases), env=self.environment, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True)
        deadline = time.monotonic() + 60
        while not self.json.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=30)[0]
        self.assertEqual(process.returncode, 130, output)
        rows = json.loads(self.json.read_text())["rows"]
        self.assertGreaterEqual(len(rows), 4)
        self.assertLess(len(rows), 40 * 4)
        self.assertEqual(len(rows) % 4, 0)  # whole cases
        self.assertIn("interrupted after", output)
        self.assertEqual([p.name for p in self.folder.iterdir() if p.name.endswith("tmp")], [])
        self.assert_no_orphans()

    def test_killed_leaves_no_orphans(self):
        process = subprocess.Popen(self.command(["good", "hangs"], "--case", CASE), env=self.environment,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (self.pids.exists() and len(self.pids.read_text().split()) == 2):
            time.sleep(0.02)
        process.kill()
        process.wait()
        self.assert_no_orphans()

    def test_questions_that_are_wrong(self):
        for arguments, message in ((["--suite", "nonesuch"], "expected one of: cpu-bf16, cpu-f32, heads"),
                                   (["--case", CASE, "--rounds", "0"], "--rounds=0: expected at least 1"),
                                   (["--case", CASE, "--peers", "--peer", "numpy"], "--peer=numpy: unknown; expected some of: good"),
                                   (["--case", CASE, "--strategy", "flash"], "planner's own choice")):
            if not (self.peers / "good").exists():
                (self.peers / "good").symlink_to(FAKE)
            done = subprocess.run([ATTUNE, "bench", *arguments], env=self.environment, capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 2, arguments)
            self.assertIn(message, done.stderr)


if __name__ == "__main__":
    ATTUNE = sys.argv.pop(1)
    unittest.main()
