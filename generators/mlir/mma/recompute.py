"""The rows in whose results a NaN or an infinity took part, again and with care: attend's products multiply what a row
does not see by 0, which is NaN if it is not finite, and its scores may overflow where f32 does not. A warp looks at its
flag, and does its rows one after the other with ordinary f32 arithmetic, in which a key that a row does not see takes no
part. Slow; what it costs when nothing is wrong is a launch. It takes any strides, and without flags does all rows: for
memory that attend cannot read.
"""
from common import LN_2, head_and_query, load_f32, new_kernel, offset, place, score_scale, store_f32


def recompute(s):
    k = new_kernel("recompute", s, few_blocks=True)
    tid = k.thread()
    lane, warp = tid & 31, tid >> 5
    at = place(k, s)
    one = k.constant(1, "i32")
    flag = k.if_(k.address(k.flags).differs(0), lambda: [k.load(k.view(k.flags, 0, [1 << 30], [1], "i32"), [at.flag + warp], "i32")],
                 lambda: [one], ["i32"])[0]
    first = at.first + warp * (16 * s.mt)
    last = (first + 16 * s.mt).min(at.total)

    def rows():
        k.for_(first, last, 1, lambda row: one_row(k, s, at, lane, row))
    k.if_(flag.differs(0), rows)
    return k.text()


def one_row(k, s, at, lane, row):
    head, query = head_and_query(k, s, at, row)
    begin, end = (query + at.low).max(0), at.keys.min(query + at.high + 1)
    if s.split:
        begin, end = begin.max(at.split * k.chunk), end.min((at.split + 1) * k.chunk)
    q_row = k.view(k.q, offset(k, "q", ("batch", at.batch), ("head", head), ("row", query)), [s.dk], [k.q_feature], "f16")
    at_head = [("batch", at.batch), ("head", at.kv_head)]
    keys = k.view(k.k, offset(k, "k", *at_head), [at.keys.index(), s.dk], [k.k_row, k.k_feature], "f16")
    values = k.view(k.v, offset(k, "v", *at_head), [at.keys.index(), s.dv], [k.v_row, k.v_feature], "f16")
    c = score_scale(k)
    columns = [lane + 32 * i for i in range(-(-s.dv // 32))]  # of O that a thread has
    nothing, zero = k.constant("-inf", "f32"), k.constant(0.0, "f32")

    def over_warp(value, combine):
        for distance in (1, 2, 4, 8, 16):
            value = combine(value, k.shuffle("xor", value, distance))
        return value

    def block(j0, maximum, total, *out):
        key = j0 + lane  # a key for each thread
        seen = key < end
        safe = key.min(end - 1)

        def product(f, sum):
            return [k.fma(load_f32(k, s, q_row, [f]), load_f32(k, s, keys, [safe, f]), sum)]
        score = k.for_(k.constant(0, "i32"), k.dk, 1, product, [zero])[0] * c
        score = seen.select(score, nothing)
        new = maximum.max(over_warp(score, lambda a, b: a.max(b)))
        reference = new.equals(nothing).select(zero, new)
        factor = k.exp2(maximum - reference)
        weight = seen.select(k.exp2(score - reference), zero)

        def add(y, *out):
            p = k.shuffle("idx", weight, y)
            return [k.fma(p, load_f32(k, s, values, [j0 + y, (column < k.dv).select(column, 0)]), o) for column, o in zip(columns, out)]
        out = k.for_(k.constant(0, "i32"), (end - j0).min(32), 1, add, [x * factor for x in out])
        return [new, total * factor + weight, *out]
    maximum, total, *out = k.for_(begin, end, 32, block, [nothing, zero] + [zero] * len(columns))
    total = over_warp(total, lambda a, b: a + b)
    empty = total.equals(0.0)
    inverse = k.reciprocal(empty.select(1.0, total))
    steps = [("batch", at.batch), ("head", head), ("row", query)] + ([("split", at.split)] if s.split else [])
    view = k.view(k.o, offset(k, "o", *steps), [s.dv], [k.o_feature], "f32" if s.split else "f16")
    for column, x in zip(columns, out):
        k.if_(column < k.dv, lambda: store_f32(k, s, x * inverse, view, [column]))
    wants_lse = k.address(k.lse).differs(0)

    def store_lse():
        value = empty.select(nothing, (maximum + k.log2(total)) * LN_2)
        k.store(value, k.view(k.lse, offset(k, "lse", *steps), [1], [1], "f32"), [0])
    k.if_(lane.equals(0) & wants_lse, store_lse)
    return []
