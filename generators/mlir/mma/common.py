"""What the kernels share: their arguments, the place of a thread block in the problem, the keys that rows see."""
from dataclasses import dataclass

from ir import GLOBAL, HALF2, Kernel, Value

# Strides in elements. o and lse of a split kernel are partial results with one more dimension.
STRIDES = [f"{x}_{y}" for x in "qkv" for y in ("row", "head", "batch", "feature")] + \
    [f"{x}_{y}" for x in ("o", "lse") for y in ("row", "head", "batch", "split")] + ["o_feature"]
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453


def arguments(o_type):
    """The arguments of attend and recompute; runtime/mlir/mma.cpp has them as a struct.

    Key j is visible to query i if i + low <= j <= i + high and 0 <= j < keys. ranges: {keys, low, high} of each batch, or
    null: those given. flags: a word for each warp, 1 where a result is not finite; null (for recompute): all rows.
    group: query heads of a KV head. chunk: keys of a split, a multiple of a block's. attend wants feature strides of 1,
    K, V and their strides at multiples of 16 bytes, Q and O at multiples of 4 (f32: 8), and dk and dv at multiples of 8.
    """
    pointer = lambda type: f"memref<1x{type}, {GLOBAL}>"  # noqa: E731
    return [("q", pointer("f16")), ("k", pointer("f16")), ("v", pointer("f16")), ("o", pointer(o_type)), ("lse", pointer("f32")),
            ("ranges", pointer("i32")), ("flags", pointer("i32"))] + \
        [(name, "i32") for name in ("rows", "keys", "low", "high", "group", "dk", "dv", "chunk", "splits")] + [("scale", "f32")] + \
        [(name, "index") for name in STRIDES]


@dataclass
class Place:
    """Of a thread block."""
    first: Value     # its first row
    total: Value     # rows of the problem; of a split kernel those of all heads of a group
    kv_head: Value
    batch: Value
    split: Value | None
    keys: Value      # what this batch's rows see, as in arguments()
    low: Value
    high: Value
    flag: Value      # index of warp 0's flag


def place(kernel, s):
    x, y, z = (kernel.block(axis) for axis in "xyz")
    ranges = kernel.address(kernel.ranges).differs(0)

    def of_batch():
        table = kernel.view(kernel.ranges, 0, [3 << 20], [1], "i32")
        return [kernel.load(table, [z * 3 + i], "i32") for i in range(3)]
    keys, low, high = kernel.if_(ranges, of_batch, lambda: [kernel.keys, kernel.low, kernel.high], ["i32"] * 3)
    flag = ((z * kernel.blocks("y") + y) * kernel.blocks("x") + x) * s.warps
    if s.split:
        return Place(x // kernel.splits * s.q, kernel.rows * kernel.group, y, z, x % kernel.splits, keys, low, high, flag)
    # Late rows first: with a causal mask they see most.
    return Place((kernel.blocks("x") - 1 - x) * s.q, kernel.rows, y // kernel.group, z, None, keys, low, high, flag)


def head_and_query(kernel, s, at, row):
    """The query head and the query of a row of this block."""
    if not s.split:
        return kernel.block("y"), row
    return at.kv_head * kernel.group + row // kernel.rows, row % kernel.rows


def offset(kernel, tensor, *steps):
    """Elements from a tensor's base: offset(kernel, "q", ("batch", b), ("head", h))."""
    total = None
    for name, n in steps:
        term = n.index() * getattr(kernel, f"{tensor}_{name}")
        total = term if total is None else total + term
    return total


def score_scale(kernel):
    """exp(scale s) = exp2(c s)."""
    return kernel.scale * LOG2_E


def load_f32(kernel, s, memory, indices):
    """A number of the kernel's type; memory holds its bits as f16."""
    value = kernel.bitcast(kernel.load(memory, indices, "f16"), s.type)
    return kernel.op(f"arith.extf {value} : {s.type} to f32", "f32")


def store_f32(kernel, s, value, memory, indices):
    """Of O: rounded, or f32 for partial results."""
    if not s.split:
        value = kernel.bitcast(kernel.op(f"arith.truncf {value} : f32 to {s.type}", s.type), "f16")
    kernel.store(value, memory, indices)


def round_pair(kernel, s, a, b):
    """Two f32 rounded to the kernel's type, as vector<2xf16>."""
    type = f"vector<2x{s.type}>"
    return kernel.bitcast(kernel.op(f"arith.truncf {kernel.pair(a, b)} : vector<2xf32> to {type}", type), HALF2)


def new_kernel(name, s, shared=(), few_blocks=False):
    return Kernel(name, arguments("f32" if s.split else "f16"), s.threads, shared, few_blocks)
