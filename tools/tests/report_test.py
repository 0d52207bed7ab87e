"""attune report on results made up here: python report_test.py"""
import html.parser
import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

REPORT = pathlib.Path(__file__).parents[1] / "report" / "main.py"
sys.path.insert(0, str(REPORT.parent))


def row(case, impl, threads=1, median=None, **more):
    fields = {"case": case, "impl": impl, "kernel": "attn_flash" if impl.startswith("attune") else "", "strategy": "", "dtype": "f32",
              "threads": threads, "ok": median is not None, "why_not": "", "chosen": False, "median_s": median, "min_s": median,
              "p90_s": median, "gflops": None, "gbps": None, "pct_peak": None, "max_err": None, "err_bound": None}
    if median:
        fields |= {"gflops": 1 / median, "gbps": 0.1 / median, "pct_peak": 1 / median, "max_err": 1e-7, "err_bound": 1e-5}
    if median and impl == "attune":
        fields["workspace_bytes"] = 65536
    return fields | more


def results():
    rows = []
    for heads in (1, 2, 4, 8):
        case = f"f32:b1:h{heads}:n512:d{512 // heads}"
        for threads in (1, 2):
            rows += [row(case, "attune", threads, 0.0125 / threads), row(case, "attune_again", threads, 0.01265 / threads),
                     row(case, "torch_sdpa", threads, 0.02 / threads, version="2.15.0"), row(case, "openvino", threads, 0.025),
                     row(case, "ort_gqa", threads, why_not="it <cannot> & will not")]
    decode = "f32:b1:h32/8:n1:m4096:d128"
    rows += [row(decode, "attune", 1, 0.005, read_gbps=25.0), row(decode, "torch_sdpa", 1, 0.004, read_gbps=25.0),
             row(decode, "openvino", 1, 0.001, ok=False, read_gbps=25.0, why_not="wrong numbers")]
    return {"date": "2026-11-30T12:00:00Z", "version": "0.1.0", "rows": rows,
            "machine": {"cpu": "A <CPU>", "isa": "avx512", "cores": 2, "peak_gflops_f32": 236.0, "read_gbps": 40.0}}


class Outline(html.parser.HTMLParser):
    """Every tag that is opened is closed, in order; collects addresses."""

    VOID = {"meta", "br", "wbr", "link", "img", "input"}

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.count, self.ids = [], [], {}, []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.addresses += [v for k, v in attributes if k in ("href", "src", "xlink:href") and v]
        self.ids += [v for k, v in attributes if k == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()


class Report(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def report(self, content, *arguments, status=0):
        path = self.folder / "result.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        done = subprocess.run([sys.executable, str(REPORT), str(path), *arguments], capture_output=True, text=True)
        self.assertEqual(done.returncode, status, done.stderr)
        return done.stdout if status == 0 else done.stderr

    def test_page_of_bench(self):
        self.report(results(), "-o", str(self.folder / "page.html"))
        text = (self.folder / "page.html").read_text()
        outline = Outline(text)
        self.assertEqual([a for a in outline.addresses if not a.startswith("#")], [])  # self-contained
        self.assertEqual(len(outline.ids), len(set(outline.ids)))
        self.assertEqual(outline.count["h3"], 5)  # a case each
        self.assertEqual(outline.count["svg"], 2 + 2 + 9 + 2)  # overviews, head sweeps, cases with their threads, roofline, memory
        for heading in ("All cases, 1 thread", "Roofline", "Memory", "The same width, more heads", "Table", "Case by case"):
            self.assertEqual(text.count(f"<h2>{heading}</h2>"), 1, heading)
        self.assertIn("read loop 40.0 GB/s", text)
        self.assertIn("A &lt;CPU&gt;", text)
        self.assertIn("it &lt;cannot&gt; &amp; will not", text)
        self.assertIn("PyTorch 2.15.0", text)
        self.assertIn("1.60×", text)  # 0.02 / 0.0125
        self.assertIn('<span class="behind">0.80×</span>', text)  # the wrong peer is not the best
        self.assertEqual(sorted(p.name for p in self.folder.iterdir()), ["page.html", "result.json"])

    def test_same_input_same_page(self):
        for name in ("a.html", "b.html"):
            self.report(results(), "-o", str(self.folder / name))
        self.assertEqual((self.folder / "a.html").read_text(), (self.folder / "b.html").read_text())

    def test_page_of_compare(self):
        case = "f32:b1:h8:n64:d64"
        kernels = [row(case, "attune", 1, t, kernel=k, strategy=k, chosen=c) for k, t, c in
                   (("attn_flash", 0.02, True), ("attn_rowstrip", 0.015, False))]
        kernels[0]["phases"] = [{"name": "pack", "median_s": 0.005}, {"name": "main", "median_s": 0.015}]
        content = results() | {"rows": [*kernels, row(case, "attune", 1, kernel="", strategy="split_kv", why_not="needs n 1")]}
        self.report(content)
        text = (self.folder / "result.html").read_text()
        outline = Outline(text)
        self.assertEqual(outline.count["svg"], 4)  # bars, phases, roofline, memory
        for expected in ("attn_rowstrip", "split_kv: needs n 1", "pack"):
            self.assertIn(expected, text)

    def test_page_of_tune(self):
        def trial(i, status="right", gain=0.0, **more):
            return {"name": f"attn_flash_q{i}", "strategy": "flash", "knobs": f"q={8 * (i % 3)} k={64 + i}", "status": status, "why": "", "origin": "sampled",
                    "short_gain": gain, "gain": gain, "at": float(i), "entry": "", "library": ""} | more
        trials = [trial(0, gain=1.0, origin="linked", knobs='{"q": 24}'), *(trial(i, gain=0.8 + i / 20) for i in range(1, 9)),
                  trial(9, "not built", why="the <compiler> crashed: signal 6"), trial(10, "wrong", why="O[0] is nan"), trial(11, "slow")]
        tuned = {"case": "f32:h2:n64:d24", "threads": 1, "default": "attn_flash_q0", "trials": trials, "flops": 1e9, "peak_gflops": 100.0,
                 "done": {"budget": 8, "kernel": "attn_flash_q8", "library": "", "gain": 1.2, "error": 0.002, "seconds": 8.0, "default_s": 0.02, "best_s": 0.0167}}
        interrupted = {k: tuned[k] for k in ("case", "threads", "default", "trials")}
        race = {"case": "f32:h2:n64:d24", "threads": 1, "searchers": [{"name": n, "about": "", "budget": 8.0, "trials": trials} for n in ("random", "attune")]}
        self.report(results() | {"rows": [], "tuned": [tuned, interrupted], "searchers": [race]})
        text = (self.folder / "result.html").read_text()
        outline = Outline(text)
        self.assertEqual(outline.count["svg"], 6)  # two curves, the share of one, two sensitivities, a race
        for expected in ("1.200 × the default (attn_flash_q0)", "the &lt;compiler&gt; crashed: signal 6", "O[0] is nan", "the search was interrupted",
                         "60.0 %", "9 right, 1 not built, 1 wrong, 1 slow"):  # 1e9 / (0.02 / 1.2) of 100 GFLOP/s
            self.assertIn(expected, text)
        self.assertIn("a tuned case lacks trials", self.report(results() | {"tuned": [{"case": "", "threads": 1, "default": ""}]}, status=2))

    def test_lengths(self):
        rows = []
        for n in (128, 256, 512):
            for kernel, power in (("flash", 2), ("stagewise", 2)):
                rows.append(row(f"f32:b1:h8:n{n}:d64", "attune", 1, 1e-6 * n**power, strategy=kernel, workspace_bytes=65536))
        rows += [row(f"f32:b1:h8:n{n}:d64:causal", "attune", 1, 1e-4) for n in (128, 256)]  # two are no series
        self.report(results() | {"rows": rows})
        text = (self.folder / "result.html").read_text()
        self.assertEqual(text.count("<h2>Over n</h2>"), 1)
        for expected in ("f32:b1:h8:n:d64, 1 thread: time", "f32:b1:h8:n:d64, 1 thread: memory", ">stagewise<", "scores in f32, n²"):
            self.assertIn(expected, text)
        self.assertNotIn("n:d64:causal", text)

    def weights(self, change=0.0, lengths=(3, 4), name="layer0.weights"):
        p = [[[[1 / n if j < n else 0.0 for j in range(4)] for _ in range(4)] for _ in range(5)] for n in lengths]
        p[0][0][0][0] += change
        flat = [x for b in p for h in b for i in h for x in i]
        data = struct.pack(f"<{len(flat)}f", *flat) + struct.pack(f"<{len(lengths)}q", *lengths)
        header = json.dumps({name: {"dtype": "F32", "shape": [len(lengths), 5, 4, 4], "data_offsets": [0, 4 * len(flat)]},
                             "lengths": {"dtype": "I64", "shape": [len(lengths)], "data_offsets": [4 * len(flat), len(data)]}}).encode()
        path = self.folder / "weights.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + data)
        return "--weights", str(path)

    def test_weights(self):
        self.report(results() | {"rows": []}, *self.weights())
        text = (self.folder / "result.html").read_text()
        outline = Outline(text)
        self.assertIn("<h2>Attention weights</h2>", text)
        self.assertIn("layer 0, 3 tokens", text)
        self.assertEqual(outline.count["image"], 5)  # a head each
        self.assertEqual([a[:22] for a in outline.addresses if not a.startswith("#")], ["data:image/png;base64,"] * 5)
        self.report(results() | {"rows": []}, *self.weights(), "--sentence", "1")
        self.assertIn("layer 0, 4 tokens", (self.folder / "result.html").read_text())

    def test_files_that_are_no_weights(self):
        def said(arguments, *more):
            return self.report(results() | {"rows": []}, *arguments, *more, status=2)
        self.assertIn("adds up to 1.25", said(self.weights(change=0.25)))
        self.assertIn("--sentence 2", said(self.weights(), "--sentence", "2"))
        self.assertIn("has no layer0.weights", said(self.weights(name="layer0.q")))
        self.assertIn("of shape [2, 5, 4, 4]", said(self.weights(lengths=(9, 4))))
        path = self.folder / "weights.safetensors"
        path.write_bytes(path.read_bytes()[:40])
        self.assertIn("is no .safetensors file", said(("--weights", str(path))))
        self.assertIn("No such file", said(("--weights", str(self.folder / "none"))))

    def test_markdown(self):
        text = self.report(results(), "--markdown")
        self.assertIn("| `b1:h8:n512:d64` | 80.0 | 80 % | 1.60× | 1.012 | **50.0** | 40.0 |", text)
        self.assertIn("| `b1:h32/8:n1:m4096:d128` | 20.0 GB/s | 80 % | 0.80× | – | **25.0** | 100.0 (wrong) |", text)
        self.assertIn("0.80× at least", text)
        self.assertIn("- ORT GroupQueryAttention, 4 cases: it <cannot> & will not", text)

    def test_markdown_of_several(self):
        other = results()
        for r in other["rows"]:
            r["case"] = r["case"].replace("f32:", "bf16:")
        other["machine"]["peak_gflops_bf16"] = 471.0
        path = self.folder / "bf16.json"
        path.write_text(json.dumps(other))
        text = self.report(results(), str(path), "--markdown")
        headings = [line for line in text.splitlines() if line.startswith("###")]
        self.assertEqual(headings, ["### f32, 1 thread", "### f32, 2 threads", "### bf16, 1 thread", "### bf16, 2 threads"])
        self.assertEqual(text.count("| `b1:h8:n512:d64` | 80.0 |"), 2)
        self.assertIn("bf16 peak 471 GFLOP/s", text)
        self.assertIn("f32 peak 236 GFLOP/s", text)
        self.assertIn("a second result; expected one for a page", self.report(results(), str(path), status=2))

    def test_markdown_into_a_document(self):
        document = self.folder / "page.md"
        document.write_text("before\n<!-- attune report: begin -->\nold\n<!-- attune report: end -->\nafter\n")
        self.report(results(), "--markdown", "-o", str(document))
        text = document.read_text()
        self.assertTrue(text.startswith("before\n<!-- attune report: begin -->\n2026-11-30: A <CPU>"))
        self.assertTrue(text.endswith("<!-- attune report: end -->\nafter\n"))
        self.assertNotIn("old", text)
        document.write_text("no marks\n")
        self.assertIn("lacks the lines", self.report(results(), "--markdown", "-o", str(document), status=2))
        self.assertEqual(document.read_text(), "no marks\n")

    def test_files_that_are_no_results(self):
        self.assertIn("is no JSON", self.report("{", status=2))
        self.assertIn("has no machine and rows", self.report([], status=2))
        broken = results()
        del broken["rows"][3]["kernel"]
        self.assertIn("row 3 lacks kernel", self.report(broken, status=2))
        for value in ("fast", None, -1.0):
            broken = results()
            broken["rows"][0]["gflops"] = value
            self.assertIn(f"row 0: gflops is {value!r}", self.report(broken, status=2))
        self.assertIn("row 0 is int", self.report(results() | {"rows": [7]}, status=2))
        self.assertIn("machine lacks cores, isa", self.report(results() | {"machine": {"cpu": ""}}, status=2))
        tuned = {"case": "f32:h2:n64:d24", "threads": 1, "default": "", "trials": [{"name": "attn_flash"}]}
        race = {"case": "f32:h2:n64:d24", "threads": 1, "searchers": [{"name": "random", "budget": 8.0}]}
        self.assertIn("a search of f32:h2:n64:d24 lacks trials", self.report(results() | {"searchers": [race]}, status=2))
        self.assertIn("a trial of f32:h2:n64:d24 lacks at,", self.report(results() | {"tuned": [tuned]}, status=2))


unittest.main()
