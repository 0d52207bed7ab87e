"""Runs the kernels of generators/mlir/mma on the interpreter, and what they should give in float64.

The arguments are those of generators/mlir/mma/common.py; runtime/mlir/mma.cpp passes the same.
"""
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from ptx import GlobalMemory, launch, parse

BASE = 1 << 33
UNBOUNDED = 1 << 30
DTYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
UNIT = {"f16": 2.0 ** -11, "bf16": 2.0 ** -8}


@dataclass
class Problem:
    n: int
    m: int
    dk: int
    dv: int
    batch: int = 1
    heads: int = 1
    group: int = 1
    low: int = -UNBOUNDED        # key j is visible to row i if i + low <= j <= i + high
    high: int = UNBOUNDED
    lengths: list | None = None  # keys of each batch
    offsets: list | None = None  # added to low and high of each batch
    scale: float | None = None
    amplitude: float = 1.0
    padding: int = 0             # elements between rows
    feature: int = 1             # stride of features
    rows_outside: bool = False   # [batch, row, head, feature] in place of [batch, head, row, feature]
    lse: bool = True
    seed: int = 0
    edit: object = field(default=None, repr=False)  # a function of (q, k, v)


class Device:
    """Device memory with arrays in it, each with a gap behind."""

    def __init__(self, size=1 << 24):
        self.arena, self.next = np.full(size, 0xFF, np.uint8), 0
        self.memory = GlobalMemory(self.arena, BASE)

    def put(self, array, written=True):
        """(address, view) of a copy."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at, self.next = self.next, -(-(self.next + raw.size) // 256) * 256 + 256
        if self.next > self.arena.size:
            raise MemoryError("device memory of the test")
        self.arena[at:at + raw.size] = raw
        if raw.size:
            self.memory.allocate(BASE + at, raw.size, written)
        return BASE + at, self.arena[at:at + raw.size].view(array.dtype).reshape(array.shape)


def inputs(p, type):
    rng = np.random.default_rng(p.seed)

    def array(heads, rows, features):
        return (rng.standard_normal((p.batch, heads, rows, features)) * p.amplitude).astype(DTYPES[type])
    q, k, v = array(p.heads, p.n, p.dk), array(p.heads // p.group, p.m, p.dk), array(p.heads // p.group, p.m, p.dv)
    if p.edit:
        p.edit(q, k, v)
    return q, k, v


def visible(p, b):
    """[n, m] booleans."""
    i, j = np.arange(p.n)[:, None], np.arange(p.m)[None]
    offset = p.offsets[b] if p.offsets else 0
    length = p.lengths[b] if p.lengths else p.m
    return (j >= i + p.low + offset) & (j <= i + p.high + offset) & (j < length)


def reference(p, q, k, v):
    """O, LSE, and the largest absolute score, in float64."""
    scale = p.dk ** -0.5 if p.scale is None else p.scale
    out, lse = np.zeros((p.batch, p.heads, p.n, p.dv)), np.full((p.batch, p.heads, p.n), -np.inf)
    largest = 0.0
    for b in range(p.batch):
        seen = visible(p, b)
        for h in range(p.heads):
            with np.errstate(all="ignore"):
                s = scale * (q[b, h].astype(float) @ k[b, h // p.group].astype(float).T)
            for i in range(p.n):
                keys = np.flatnonzero(seen[i])
                if keys.size:
                    with np.errstate(all="ignore"):
                        row = s[i, keys]
                        top = row.max()
                        w = np.exp(row - top)
                        out[b, h, i] = w @ v[b, h // p.group][keys].astype(float) / w.sum()
                        lse[b, h, i] = top + np.log(w.sum())
                        largest = max(largest, np.abs(row).max())
    return out, lse, largest


def with_rows_outside(p, x):
    return x.transpose(0, 2, 1, 3) if p.rows_outside else x


def place(device, p, x, written=True):
    """(address, view as [batch, head, row, feature], strides of row, head, batch and feature in elements)"""
    padded = np.full(x.shape[:3] + (x.shape[3] * p.feature + p.padding,), np.nan).astype(x.dtype)
    padded[..., :x.shape[3] * p.feature:p.feature] = x
    stored = np.ascontiguousarray(with_rows_outside(p, padded))
    address, raw = device.put(stored, written)
    view = with_rows_outside(p, raw)
    strides = [view.strides[i] // x.dtype.itemsize for i in (2, 1, 0)]
    return address, view, strides + [p.feature]


def split_padding(p, view, features):
    """The features, and whether what lies between them is as it was."""
    inside = np.arange(view.shape[3]) % p.feature == 0
    inside[features * p.feature:] = False
    return view[..., inside], np.isnan(view[..., ~inside].astype(np.float32)).all()


def aligned(shape, p, strides):
    """Whether attend can read the memory."""
    return p.feature == 1 and p.dk % 8 == 0 and p.dv % 8 == 0 and all(x % 8 == 0 for s in strides for x in s[:3])


def run(module, shape, p, options=None):
    """Runs the kernel of `shape` (generators/mlir/mma/shape.py) on p. Returns (O, LSE, launches' statistics, what ran)."""
    options = options or {}
    entries = parse(module).entries if isinstance(module, str) else module
    device = Device()
    q, k, v = inputs(p, shape.type)
    (q_at, _, q_strides), (k_at, _, k_strides), (v_at, _, v_strides) = (place(device, p, x) for x in (q, k, v))
    o_at, o, o_strides = place(device, p, np.full((p.batch, p.heads, p.n, p.dv), np.nan).astype(DTYPES[shape.type]), False)
    lse_at, lse = device.put(np.full((p.batch, p.heads, p.n), np.nan, np.float32), False)
    kv_heads = p.heads // p.group
    table = np.array([[p.lengths[b] if p.lengths else p.m, clamp(p.low + (p.offsets[b] if p.offsets else 0)),
                       clamp(p.high + (p.offsets[b] if p.offsets else 0))] for b in range(p.batch)], np.int32)
    ranges = device.put(table)[0] if p.lengths or p.offsets else 0
    splits = options.pop("splits", 1) if shape.split else 1
    chunk = -(-p.m // (splits * shape.k)) * shape.k
    rows = p.n * p.group if shape.split else p.n
    grid = (-(-rows // shape.q) * splits, kv_heads if shape.split else p.heads, p.batch)
    flags, flag_words = device.put(np.zeros(grid[0] * grid[1] * grid[2] * shape.warps, np.int32), False)
    scale = p.dk ** -0.5 if p.scale is None else p.scale
    lse_strides = [1, p.n, p.heads * p.n, 0]
    if shape.split:
        parts = device.put(np.full((p.batch, p.heads, splits, p.n, p.dv), np.nan, np.float32), False)[0]
        part_lse = device.put(np.full((p.batch, p.heads, splits, p.n), np.nan, np.float32), False)[0]
        to, to_strides = parts, [p.dv, splits * p.n * p.dv, p.heads * splits * p.n * p.dv, p.n * p.dv, 1]
        to_lse, to_lse_strides = part_lse, [1, splits * p.n, p.heads * splits * p.n, p.n]
    else:
        to, to_strides, to_lse, to_lse_strides = o_at, o_strides[:3] + [0, o_strides[3]], lse_at if p.lse else 0, lse_strides
    values = [q_at, k_at, v_at, to, to_lse, ranges, flags, p.n, p.m, clamp(p.low), clamp(p.high), p.group, p.dk, p.dv, chunk, splits,
              float(np.float32(scale)), *q_strides, *k_strides, *v_strides, *to_strides[:4], *to_lse_strides, to_strides[4]]
    statistics = {}
    if aligned(shape, p, (q_strides, k_strides, v_strides, o_strides)):
        statistics["attend"] = launch(entries["attend"], device.memory, grid, (shape.threads, 1, 1), values, shape.dynamic_bytes,
                                      allowed_shared=shape.shared_bytes, **options)
    else:
        values[6] = 0
    statistics["recompute"] = launch(entries["recompute"], device.memory, grid, (shape.threads, 1, 1), values, **options)
    if shape.split:
        values = [parts, part_lse, o_at, lse_at if p.lse else 0, p.n, splits, p.dv, *o_strides[:3], *lse_strides[:3], o_strides[3]]
        statistics["merge"] = launch(entries["merge"], device.memory, (-(-p.n // 4), p.heads, p.batch), (128, 1, 1), values, **options)
    o, untouched = split_padding(p, o, p.dv)
    if not untouched:
        raise AssertionError("the kernel wrote between the rows of O")
    if not p.lse and not np.isnan(lse).all():
        raise AssertionError("the kernel wrote an LSE that nobody asked for")
    return o, lse, statistics, int(flag_words.sum()) if "attend" in statistics else -1


def clamp(x):
    return max(-UNBOUNDED, min(UNBOUNDED, x))


def check(module, shape, p, options=None):
    """Raises AssertionError where O or LSE differ from float64. Returns (error / bound, statistics, warps recomputed)."""
    o, lse, statistics, again = run(module, shape, p, dict(options or {}))
    q, k, v = inputs(p, shape.type)
    expected, expected_lse, largest = reference(p, q, k, v)
    # P and O are rounded to the type: an error of about two units of the largest V; and the rounding of the scores.
    finite = np.abs(v.astype(np.float32))[np.isfinite(v.astype(np.float32))]
    bound = UNIT[shape.type] * (4 + 1e-4 * largest) * (finite.max() if finite.size else 1.0)
    got = o.astype(np.float64)
    same = (np.isnan(got) & np.isnan(expected)) | (got == expected)
    with np.errstate(all="ignore"):
        error = np.where(same, 0.0, np.abs(got - expected))
    worst = error.max(initial=0.0)
    if not worst <= bound:
        where = np.unravel_index(np.nanargmax(np.where(np.isnan(error), np.inf, error)), error.shape)
        raise AssertionError(f"O{list(map(int, where))} is {got[where]}: expected {expected[where]} within {bound:.2g} ({p})")
    if p.lse:
        same = (np.isnan(lse) & np.isnan(expected_lse)) | (lse == expected_lse)
        with np.errstate(all="ignore"):
            lse_error = np.where(same, 0.0, np.abs(lse - expected_lse))
        # The row sum is that of the rounded P.
        lse_bound = UNIT[shape.type] + 1e-5 + 2e-6 * largest
        if not lse_error.max(initial=0.0) <= lse_bound:
            raise AssertionError(f"LSE is off by {lse_error.max():.2g}: expected {lse_bound:.2g} ({p})")
    return worst / bound, statistics, again
