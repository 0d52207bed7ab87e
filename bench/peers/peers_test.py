"""The installed peers on small cases of every kind, through attune bench: each either computes what float64 says, or is listed with
its reason. python peers_test.py BUILD/bin/attune; ATTUNE_PEERS names their environment."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ATTUNE = ""
PEERS = ["torch_sdpa", "torch_unfused", "torch_flex", "ort_attention", "ort_mha", "ort_gqa", "openvino", "openblas"]
# Which peers must be able to; of the others, a reason is expected.
DENSE = {"torch_sdpa", "torch_unfused", "ort_attention", "ort_mha", "openvino", "openblas"}
ABLE = {
    "f32:b2:h4:n33:d16": DENSE,
    "f32:b1:h4:n64:d32:causal": DENSE | {"torch_flex", "ort_gqa"},
    "f32:b1:h4:n40:m24:d24/16": DENSE,
    "f32:b1:h4:n64:d32:causal:window=16,0": DENSE | {"torch_flex", "ort_gqa"},
    "f32:b2:h4:n32:d32:mask=bool": DENSE | {"torch_flex"},
    "f32:b1:h4:n32:d32:mask=bias": DENSE | {"torch_flex"},
    "f32:b2:h8/2:n32:d32:causal": (DENSE | {"torch_flex", "ort_gqa"}) - {"ort_mha"},
    "f32:b2:h8/2:n1:m96:d32": (DENSE | {"torch_flex", "ort_gqa"}) - {"ort_mha"},
    "f32:b1:h8/2:n16:m64:d32:causal-br": (DENSE | {"torch_flex", "ort_gqa"}) - {"ort_mha"},
    "f32:b2:h2:n24:d32:kvlen=10,24": DENSE | {"torch_flex"},
    "f32:b1:h4:n24:d32:scale=0.3": DENSE,
    "f32:b1:h4:n24:d32:softcap=5": {"torch_unfused", "torch_flex", "ort_attention"},
    "f32:b1:h4:n24:d32:alibi": (DENSE | {"torch_flex"}) - {"openblas"},
}


class Peers(unittest.TestCase):
    def test_every_kind_of_case(self):
        self.assertTrue(os.environ.get("ATTUNE_PEERS"), "ATTUNE_PEERS is not set; expected the peers' environment (./attune test --tier peers)")
        with tempfile.TemporaryDirectory() as folder:
            result = pathlib.Path(folder) / "result.json"
            cases = [word for case in ABLE for word in ("--case", case)]
            done = subprocess.run([ATTUNE, "bench", "--peers", "--threads", "2", "--rounds", "1", "--attempts", "1", "--time-limit",
                                   "0.01", "--json", str(result), *cases], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            rows = {(r["case"], r["impl"]): r for r in json.loads(result.read_text())["rows"]}
        for case, able in ABLE.items():
            for peer in PEERS:
                with self.subTest(case=case, peer=peer):
                    row = rows[case, peer]
                    if peer in able:
                        self.assertTrue(row["ok"], row["why_not"])
                        self.assertLess(row["max_err"], 16 * row["err_bound"])
                        self.assertGreater(row["median_s"], 0)
                        self.assertTrue(row["version"])
                        self.assertGreaterEqual(row["allocs_per_call"], 0)
                        self.assertGreaterEqual(row["rss_growth_bytes"], 0)
                    else:
                        self.assertIsNone(row["median_s"])
                        self.assertTrue(row["why_not"])


if __name__ == "__main__":
    ATTUNE = sys.argv.pop(1)
    unittest.main()
