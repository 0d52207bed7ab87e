"""Partial results of split keys into one: O = sum_s w_s O_s / sum_s w_s with w_s = exp(lse_s - max lse). A warp for each row."""
from dataclasses import replace

from common import LN_2, LOG2_E, store_f32
from ir import GLOBAL, Kernel

WARPS = 4


def merge(s):
    """parts: [batch, head, split, row, dv] f32, part_lse: the same without dv, both dense."""
    pointer = lambda type: f"memref<1x{type}, {GLOBAL}>"  # noqa: E731
    strides = [f"{x}_{y}" for x in ("o", "lse") for y in ("row", "head", "batch")] + ["o_feature"]
    whole = replace(s, split=0)  # O is of the kernel's type
    k = Kernel("merge", [("parts", pointer("f32")), ("part_lse", pointer("f32")), ("o", pointer("f16")), ("lse", pointer("f32")),
                         ("rows", "i32"), ("splits", "i32"), ("dv", "i32")] + [(n, "index") for n in strides], 32 * WARPS, few_blocks=True)
    tid = k.thread()
    lane, row = tid & 31, k.block("x") * WARPS + (tid >> 5)
    head, batch = k.block("y"), k.block("z")

    def one_row():
        rows, splits = k.rows.index(), k.splits.index()
        first = (batch * k.blocks("y") + head).index() * splits * rows + row.index()
        lses = k.view(k.part_lse, first, [splits], [rows], "f32")
        parts = k.view(k.parts, first * k.dv.index(), [splits, s.dv], [rows * k.dv.index(), 1], "f32")
        nothing, zero = k.constant("-inf", "f32"), k.constant(0.0, "f32")
        begin = k.constant(0, "i32")
        maximum = k.for_(begin, k.splits, 1, lambda i, m: [m.max(k.load(lses, [i], "f32"))], [nothing])[0]
        reference = maximum.equals(nothing).select(zero, maximum)
        columns = [lane + 32 * i for i in range(-(-s.dv // 32))]

        def add(i, total, *out):
            weight = k.exp2((k.load(lses, [i], "f32") - reference) * LOG2_E)
            return [total + weight] + [k.fma(weight, k.load(parts, [i, (column < k.dv).select(column, 0)], "f32"), o) for column, o in zip(columns, out)]
        total, *out = k.for_(begin, k.splits, 1, add, [zero] * (1 + len(columns)))
        empty = total.equals(0.0)
        inverse = k.reciprocal(empty.select(1.0, total))
        at = batch.index() * k.o_batch + head.index() * k.o_head + row.index() * k.o_row
        view = k.view(k.o, at, [s.dv], [k.o_feature], "f16")
        for column, x in zip(columns, out):
            k.if_(column < k.dv, lambda: store_f32(k, whole, x * inverse, view, [column]))

        def store_lse():
            at = batch.index() * k.lse_batch + head.index() * k.lse_head + row.index() * k.lse_row
            k.store(empty.select(nothing, reference + k.log2(total) * LN_2), k.view(k.lse, at, [1], [1], "f32"), [0])
        k.if_(lane.equals(0) & k.address(k.lse).differs(0), store_lse)
    k.if_(row < k.rows, one_row)
    return k.text()
