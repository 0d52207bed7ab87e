"""Reads result files (docs/measuring.md, "Files") and puts their rows in the order that pages and tables want."""
import collections
import json
import pathlib
import re

TITLES = {
    "attune": "attune",
    "torch_sdpa": "PyTorch SDPA",
    "torch_unfused": "PyTorch unfused",
    "torch_flex": "FlexAttention",
    "ort_attention": "ORT Attention",
    "ort_mha": "ORT MultiHeadAttention",
    "ort_gqa": "ORT GroupQueryAttention",
    "openvino": "OpenVINO",
    "openblas": "unfused on OpenBLAS",
}
LIBRARIES = {"torch": "PyTorch", "ort": "ONNX Runtime", "openvino": "OpenVINO", "openblas": "OpenBLAS"}
AGAIN = "attune_again"  # attune against itself: the measurement's error
REQUIRED = {"case", "impl", "kernel", "threads", "ok"}
NUMBERS = ("median_s", "min_s", "p90_s", "gflops", "gbps")


class ResultError(Exception):
    """The file is not what was expected; the text names it."""


def require(fields, keys, where):
    """`fields` is an object that has `keys`."""
    if not isinstance(fields, dict):
        raise ResultError(f"{where} is {type(fields).__name__}; expected an object, as bench, compare and tune write with --json")
    if missing := set(keys) - set(fields):
        raise ResultError(f"{where} lacks {', '.join(sorted(missing))}; expected what bench, compare or tune write with --json")


class Row:
    """A row of the file, with the figures that several places need."""

    def __init__(self, fields):
        self.__dict__.update(fields)
        self.fields = fields

    def get(self, name, default=None):
        value = self.fields.get(name)
        return default if value is None else value

    @property
    def measured(self):
        return self.get("median_s") is not None

    @property
    def reads_memory(self):
        """Held against the read loop rather than the units' peak."""
        return self.get("read_gbps") is not None

    @property
    def rate(self):
        return self.get("gbps" if self.reads_memory else "gflops", 0.0)

    @property
    def unit(self):
        return "GB/s" if self.reads_memory else "GFLOP/s"

    @property
    def share(self):
        """Percent of what the machine could."""
        return 100 * self.gbps / self.read_gbps if self.reads_memory else self.get("pct_peak", 0.0)

    @property
    def is_attune(self):
        return self.impl == "attune"


class Group:
    """The rows of one case and number of threads, fastest first; without attune against itself."""

    def __init__(self, case, threads, rows):
        self.case, self.threads = case, threads
        self.again = next((r for r in rows if r.impl == AGAIN and r.measured), None)
        rows = [r for r in rows if r.impl != AGAIN]
        self.rows = sorted((r for r in rows if r.measured), key=lambda r: r.median_s)
        self.cannot = [r for r in rows if not r.measured]
        self.compares_kernels = sum(r.is_attune for r in rows) > 1

    @property
    def attune(self):
        """attune's own choice, or its fastest kernel where the file does not say which that is."""
        own = [r for r in self.rows if r.is_attune and r.ok]
        return next((r for r in own if r.get("chosen")), own[0] if own else None)

    @property
    def best_peer(self):
        return next((r for r in self.rows if not r.is_attune and r.ok), None)

    @property
    def lead(self):
        """attune's speed over the best peer's."""
        return self.best_peer.median_s / self.attune.median_s if self.attune and self.best_peer else None

    @property
    def self_ratio(self):
        return self.again.median_s / self.attune.median_s if self.again and self.attune else None

    def label(self, row):
        if not row.is_attune:
            return title(row.impl)
        return row.kernel if self.compares_kernels else "attune"

    @property
    def dtype(self):
        return self.case.partition(":")[0]

    @property
    def short_case(self):
        return self.case.removeprefix("f32:")


def title(impl):
    return TITLES.get(impl, impl)


class Results:
    def __init__(self, path):
        self.path = pathlib.Path(path)
        try:
            file = json.loads(self.path.read_text())
        except OSError as error:
            raise ResultError(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise ResultError(f"{path}: is no JSON ({error})") from error
        if not isinstance(file, dict) or not isinstance(file.get("rows"), list) or not isinstance(file.get("machine"), dict):
            raise ResultError(f"{path}: has no machine and rows; expected what bench, compare or tune write with --json")
        self.file = file
        self.machine = file["machine"]
        require(self.machine, {"cpu", "cores", "isa"}, f"{path}: machine")
        self.date = file.get("date", "")
        self.version = file.get("version", "")
        rows = []
        for index, fields in enumerate(file["rows"]):
            require(fields, REQUIRED, f"{path}: row {index}")
            if fields.get("median_s") is not None:
                for key in NUMBERS:
                    if not isinstance(value := fields.get(key), (int, float)) or not value >= 0 or (key == "median_s" and not value > 0):
                        raise ResultError(f"{path}: row {index}: {key} is {value!r}; expected a number from 0, for a row that was measured")
            rows.append(Row(fields))
        by_case = collections.defaultdict(list)
        for row in rows:
            by_case[row.case, row.threads].append(row)
        self.groups = [Group(case, threads, list(r)) for (case, threads), r in by_case.items()]
        # One a library, not one a contestant.
        self.versions = {LIBRARIES.get(r.impl.partition("_")[0], r.impl): r.version for r in rows
                         if r.get("version") and r.impl not in ("attune", AGAIN)}

    @property
    def thread_counts(self):
        return sorted({g.threads for g in self.groups})

    @property
    def dtypes(self):
        """In the file's order."""
        return list(dict.fromkeys(g.dtype for g in self.groups))

    @property
    def impls(self):
        """The peers that were measured, most often fastest first."""
        wins = collections.Counter(g.best_peer.impl for g in self.groups if g.best_peer)
        seen = {r.impl for g in self.groups for r in g.rows if not r.is_attune}
        return sorted(seen, key=lambda impl: (-wins[impl], list(TITLES).index(impl) if impl in TITLES else 99, impl))

    def cases(self):
        """[(case, [its groups])] in the file's order."""
        out = {}
        for group in self.groups:
            out.setdefault(group.case, []).append(group)
        return list(out.items())


def parse_case(text):
    """The sizes in a case: {"h": 8, "n": 1024, "d": 64, …} and the rest of its parts, as a tuple."""
    sizes, rest = {}, []
    for part in text.split(":"):
        if found := re.fullmatch(r"([bhnmd])(\d+)(/\d+)?", part):
            sizes[found[1]] = int(found[2])
        else:
            rest.append(part)
    return sizes, tuple(rest)


def head_sweeps(results):
    """Cases that split the same width into different numbers of heads: {(threads, title): [(heads, group)]}."""
    sweeps = collections.defaultdict(list)
    for group in results.groups:
        sizes, rest = parse_case(group.case)
        if {"h", "n", "d"} <= set(sizes) and "m" not in sizes:
            name = f"n {sizes['n']}, d_model {sizes['h'] * sizes['d']}" + (f", {', '.join(rest[1:])}" if rest[1:] else "")
            sweeps[group.threads, name].append((sizes["h"], group))
    return {key: sorted(points, key=lambda p: p[0]) for key, points in sweeps.items() if len({h for h, _ in points}) >= 3}


def geometric_mean(values):
    import math

    return math.exp(sum(map(math.log, values)) / len(values)) if values else None
