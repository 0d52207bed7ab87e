"""The stages of attention for one block of query rows and a range of keys, as linalg on tensors. They say what is
computed; loops, registers and vectors come from the schedules. An operation that a schedule looks for carries a tag.

Index names: i a query row of the block, d a feature of Q and K, c a feature of V, key = p * W + j (panel p, lane j).
Scores are in units of 1/unit: S = scale * q.k, the weight of a score s is 2^((s - m) * unit).

Invisible scores are -inf, while a row's maximum starts at the lowest float: -inf minus it is -inf, and 2^-inf is
exactly 0 (see exp2). So there is no difference between a key that is invisible and one that is not there, no finite
bias is as low as an invisible key, and a row that sees nothing ends with l = 0.
"""
from ir import Value, tensor

CONSTANTS = {  # f32
    "zero": "0.0", "one": "1.0", "invisible": "0xFF800000", "lowest": "0xFF7FFFFF",
    # exp2: clamp, 1.5 * 2^23, and the polynomial of 2^f on [-0.5, 0.5] (relative error 2e-7)
    "lo": "-127.0", "magic": "12582912.0",
    "minus_2log2e": "-2.88539008", "quarter": "0.25", "t3": "-0.333333333", "t5": "0.133333333", "t7": "-0.0539682540", "t9": "0.0218694885",
    "e5": "1.32647278e-3", "e4": "9.67151619e-3", "e3": "5.55073377e-2", "e2": "2.40222420e-1", "e1": "6.93146978e-1",
}

# Multiply and add become one FMA only where both say so: without the flags the kernels lose 22 %.
MULTIPLY_ADD = """
^bb0(%x: f32, %y: f32, %o: f32):
%t = arith.mulf %x, %y fastmath<contract> : f32
%u = arith.addf %o, %t fastmath<contract> : f32
linalg.yield %u : f32
"""
MAXIMUM = """
^bb0(%x: f32, %o: f32):
%y = arith.maximumf %x, %o fastmath<nnan, nsz> : f32
linalg.yield %y : f32
"""
TIMES_ROW = """
^bb0(%x: f32, %o: f32):
%y = arith.mulf %x, %o : f32
linalg.yield %y : f32
"""


def exp2(x, result):
    """2^x for x <= 0. Adding 1.5 * 2^23 rounds to the nearest integer n, which then sits in the low bits; a polynomial
    gives 2^(x - n), and n is added to its exponent. At the clamp, n = -127 meets 2^0 = 1.0, whose exponent is 127: the
    result has no bits at all, so that everything from -127 down is exactly 0."""
    r = result
    return f"""
{r}t = arith.maximumf {x}, %lo fastmath<nnan, nsz> : f32
{r}b = arith.addf {r}t, %magic : f32
{r}n = arith.subf {r}b, %magic : f32
{r}f = arith.subf {r}t, {r}n : f32
{r}p4 = math.fma {r}f, %e5, %e4 : f32
{r}p3 = math.fma {r}p4, {r}f, %e3 : f32
{r}p2 = math.fma {r}p3, {r}f, %e2 : f32
{r}p1 = math.fma {r}p2, {r}f, %e1 : f32
{r}p0 = math.fma {r}p1, {r}f, %one : f32
{r}bi = arith.bitcast {r}b : f32 to i32
{r}sh = arith.shli {r}bi, %c23 : i32
{r}pi = arith.bitcast {r}p0 : f32 to i32
{r}ri = arith.addi {r}pi, {r}sh : i32
{r} = arith.bitcast {r}ri : i32 to f32"""


class Stages:
    """The stages of a function `f` for `rows` query rows, panels of `panel` keys. extras: soft cap, ALiBi, bias and
    bool mask, and with them scores in natural units."""

    def __init__(self, f, rows, dk, dv, panel, extras):
        self.f, self.rows, self.dk, self.dv, self.panel, self.extras = f, rows, dk, dv, panel, extras
        self.ahead = {}

    def constants(self):
        f = self.f
        for i in (0, 1):
            f.constant(f"%c{i}", i)
        f.constant("%W", self.panel)
        f.constant("%R", self.rows)
        for name, value in CONSTANTS.items():
            f.constant(f"%{name}", value, "f32")
        f.constant("%c23", 23, "i32")
        f.constant("%zero8", 0, "i8")
        for name, value in (("magnitude", "0x7fffffff"), ("inf", "0x7f800000"), ("minus_inf", "0xff800000")):
            f.constant(f"%{name}", value, "i32")

    def take_ahead(self, *buffers):
        """Buffers that are filled behind a loop. Taken there, they would be dynamic allocas to LLVM; buffers inside the loop
        over key blocks are hoisted by MLIR."""
        for name, *shape in buffers:
            self.ahead[name] = self.f.buffer(name, *shape)

    def buffer(self, name, *shape):
        return self.ahead.get(name) or self.f.buffer(name, *shape)

    def scaled_score(self, q, k, s):
        """S(p,i,j) = sum_d Q(i,d) K(p,d,j); Q comes scaled. K lies in panels of W keys, transposed, so that lanes are keys."""
        f = self.f
        s0 = f.fill("%s_zero", "%zero", s)
        return f.generic(["%s_raw"], "pijd", ("id", "pdj", "pij"), "pppr", [q, k], [s0], MULTIPLY_ADD, tag="score")[0]

    def change(self, s, name, used, ins, maps, body):
        """An operation on every score, if `used` is not 0."""
        f, r, w = self.f, self.rows, self.panel
        f(f"%{name}_wanted = arith.cmpi ne, {used}, %c0 : index")
        f(f"%{name}_panels = arith.select %{name}_wanted, %np, %c0 : index")
        part = f.slice(f"%{name}_in", s, [0, 0, 0], [f"%{name}_panels", r, w], "?", r, w)
        out = f.generic([f"%{name}_out"], "pij", (*maps, "pij"), "ppp", ins, [part], body, tag="change")[0]
        return f.insert(f"%{name}", out, s, [0, 0, 0], [f"%{name}_panels", r, w])

    def soft_cap(self, s):
        """c tanh(s / c). tanh by its series near 0, where (1 - t) / (1 + t) loses digits, t = e^(-2|x|)."""
        return self.change(s, "capped", "%use_softcap", [], (), f"""
            ^bb0(%s: f32):
            %x = arith.divf %s, %softcap : f32
            %a = math.absf %x : f32
            %d = arith.mulf %a, %minus_2log2e : f32
            {exp2("%d", "%e")}
            %below = arith.subf %one, %e : f32
            %above = arith.addf %one, %e : f32
            %ratio = arith.divf %below, %above : f32
            %far = math.copysign %ratio, %x : f32
            %x2 = arith.mulf %x, %x : f32
            %n3 = math.fma %x2, %t9, %t7 : f32
            %n2 = math.fma %x2, %n3, %t5 : f32
            %n1 = math.fma %x2, %n2, %t3 : f32
            %n0 = math.fma %x2, %n1, %one : f32
            %near = arith.mulf %x, %n0 : f32
            %is_near = arith.cmpf olt, %a, %quarter : f32
            %tanh = arith.select %is_near, %near, %far : f32
            %y = arith.mulf %tanh, %softcap : f32
            linalg.yield %y : f32""")

    def alibi(self, s):
        """s - slope(i) |position(i) - key|"""
        return self.change(s, "sloped", "%use_alibi", [self.position, self.slope], ("i", "i"), """
            ^bb0(%at: i32, %by: f32, %s: f32):
            %p = linalg.index 0 : index
            %j = linalg.index 2 : index
            %pk = arith.muli %p, %W : index
            %ki = arith.addi %key, %pk : index
            %k32 = arith.index_cast %ki : index to i32
            %j32 = arith.index_cast %j : index to i32
            %key32 = arith.addi %k32, %j32 : i32
            %d = arith.subi %at, %key32 : i32
            %f = arith.sitofp %d : i32 to f32
            %distance = math.absf %f : f32
            %less = arith.mulf %by, %distance : f32
            %y = arith.subf %s, %less : f32
            linalg.yield %y : f32""")

    def optional(self, s, which):
        """s += bias, or s = -inf where the bool mask is 0: `which` is "bias" or "mask". Where keys are dense, whole panels go
        by vectors, row by row; what is left (the ragged panel, or all with strided keys) goes key by key."""
        f, w, r = self.f, self.panel, self.rows
        if which == "bias":
            # As bits: the code generator is told that no float is NaN. A NaN becomes +inf, which no maximum drops; the runtime
            # finds it in the row's state. Only -inf hides: a finite sum stays a number.
            element, body = "i32", """
            ^bb0(%b: i32, %x: f32):
            %size = arith.andi %b, %magnitude : i32
            %nan = arith.cmpi ugt, %size, %inf : i32
            %bits = arith.select %nan, %inf, %b : i32
            %add = arith.bitcast %bits : i32 to f32
            %sum = arith.addf %x, %add : f32
            %number = arith.maximumf %sum, %lowest fastmath<nnan, nsz> : f32
            %none = arith.cmpi eq, %b, %minus_inf : i32
            %y = arith.select %none, %invisible, %number : f32
            linalg.yield %y : f32"""
        else:
            element, body = "i8", """
            ^bb0(%b: i8, %x: f32):
            %seen = arith.cmpi ne, %b, %zero8 : i8
            %y = arith.select %seen, %x, %invisible : f32
            linalg.yield %y : f32"""
        n = f"%{which}"
        f(f"{n}_panels = arith.select {n}_given, %np, %c0 : index")
        f(f"{n}_whole = arith.select {n}_given, %nv, %c0 : index")
        f(f"{n}_dense = arith.select {n}_unit, {n}_whole, %c0 : index")
        f.index(f"{n}_rest", f"subi {n}_panels, {n}_dense")
        for part, first, count in (("dense", "%c0", f"{n}_dense"), ("slow", f"{n}_dense", f"{n}_rest")):
            source = Value(f"{n}_{part}_t", tensor("?", element=element))
            f(f"{n}_{part}_s = scf.forall (%px, %i) in ({count}, %R) shared_outs(%sa = {s.name}) -> ({s.type}) {{")
            f.index("%p", f"addi %px, {first}")
            f.index("%in_block", "muli %p, %W")
            f.index("%j0", "addi %key, %in_block")
            f(f"%row = memref.load {n}_rows[%i] : memref<{r}xindex, strided<[1]>>")
            size = w
            if part == "dense":
                f.index("%at", "addi %row, %j0")
            else:
                f.index("%ahead", f"muli %j0, {n}_stride")
                f.index("%at", "addi %row, %ahead")
                f.index("%left", "subi %kc, %in_block")
                f.index("%cnt", "minsi %left, %W")
                size = "%cnt"
            shape = "?" if part == "slow" else w
            # The source of the slow part is strided memory: its slice has the memory's own stride.
            stride = f"{n}_stride" if part == "slow" else "1"
            b = Value("%added", tensor(shape, element=element))
            f(f"%added = tensor.extract_slice {source.name}[%at] [{size}] [{stride}] : {source.type} to {b.type}")
            x = f.slice("%from", Value("%sa", s.type), ["%p", "%i", 0], [1, 1, size], shape)
            y = f.generic(["%to"], "j", ("j", "j"), "p", [b], [x], body, tag=f"{part}_optional")[0]
            f("scf.forall.in_parallel {")
            f(f"tensor.parallel_insert_slice {y.name} into %sa[%p, %i, 0] [1, 1, {size}] [1, 1, 1] : {y.type} into {s.type}")
            f("}")
            f("}")
            s = Value(f"{n}_{part}_s", s.type)
        return s

    def hide(self, s, name, first, count):
        """-inf for the keys that row i may not see: those outside lo(i) <= key < hi(i), in `count` panels from `first` on.
        Causality, window, kv_len and the zeros behind the last key are all in this one interval."""
        f, w = self.f, self.panel
        part = f.slice(f"%{name}_in", s, [first, 0, 0], [count, self.rows, w], "?", self.rows, w)
        f.index(f"%{name}_p", f"muli {first}, %W")
        f.index(f"%{name}_key", f"addi %key, %{name}_p")
        out = f.generic([f"%{name}_out"], "pij", ("i", "i", "pij"), "ppp", [self.lo, self.hi], [part], f"""
            ^bb0(%l: i32, %h: i32, %x: f32):
            %p = linalg.index 0 : index
            %j = linalg.index 2 : index
            %pk = arith.muli %p, %W : index
            %ki = arith.addi %{name}_key, %pk : index
            %k32 = arith.index_cast %ki : index to i32
            %from = arith.subi %l, %k32 : i32
            %to = arith.subi %h, %k32 : i32
            %j32 = arith.index_cast %j : index to i32
            %ok1 = arith.cmpi sge, %j32, %from : i32
            %ok2 = arith.cmpi slt, %j32, %to : i32
            %ok = arith.andi %ok1, %ok2 : i1
            %y = arith.select %ok, %x, %invisible : f32
            linalg.yield %y : f32""", tag="change")[0]
        return f.insert(f"%{name}", out, s, [first, 0, 0], [count, self.rows, w])

    def block_maximum(self, s):
        """M(i) = max over the keys, lane by lane first: one horizontal reduction a row, not one a vector."""
        f, r, w = self.f, self.rows, self.panel
        lanes = f.fill("%max_lanes_0", "%lowest", self.buffer("%max_lanes_b", r, w))
        lanes = f.generic(["%max_lanes"], "ipj", ("pij", "ij"), "prp", [s], [lanes], MAXIMUM, tag="lane_max")[0]
        m = f.fill("%max_0", "%lowest", self.buffer("%max_b", r))
        return f.generic(["%block_max"], "ij", ("ij", "i"), "pr", [lanes], [m], MAXIMUM, tag="fold")[0]

    def weigh(self, s, m, lane_sum):
        """P = 2^((S - M) unit), and its sums, lane by lane."""
        times = "%dd = arith.mulf %d, %unit : f32" if self.extras else ""
        return self.f.generic(["%weight", "%lane_sum"], "ipj", ("i", "pij", "ij"), "prp", [m], [s, lane_sum], f"""
            ^bb0(%x: f32, %sv: f32, %lv: f32):
            %d = arith.subf %sv, %x : f32
            {times}
            {exp2("%dd" if self.extras else "%d", "%e")}
            %ln = arith.addf %e, %lv : f32
            linalg.yield %e, %ln : f32, f32""", tag="weigh")

    def merge(self, block_max, state):
        """The new maximum, and the factor 2^((old - new) unit) that what has been added up so far shrinks by."""
        f, r = self.f, self.rows
        m, l, o = state
        times = "%dd = arith.mulf %d, %unit : f32" if self.extras else ""
        # One operation with two results: the old maximum is updated in place.
        m1, keep = f.generic(["%m1", "%keep"], "i", ("i", "i", "i"), "p", [block_max], [m, f.buffer("%keep_b", r)], f"""
            ^bb0(%x: f32, %mo: f32, %unused: f32):
            %mn = arith.maximumf %x, %mo fastmath<nnan, nsz> : f32
            %d = arith.subf %mo, %mn : f32
            {times}
            {exp2("%dd" if self.extras else "%d", "%a")}
            linalg.yield %mn, %a : f32, f32""")
        l = f.generic(["%l_kept"], "ij", ("i", "ij"), "pp", [keep], [l], TIMES_ROW, tag="row")[0]
        o = f.generic(["%o_kept"], "ij", ("i", "ij"), "pp", [keep], [o], TIMES_ROW, tag="row")[0]
        return m1, l, o

    def matmul(self, weight, value, o):
        """O(i,c) += sum_key P(i,key) V(key,c): whole panels, then the keys that are left over (V is not padded)."""
        f, r, w, dv = self.f, self.rows, self.panel, self.dv
        v = f.slice("%v", value, ["%key", 0], ["%keyv", dv], "?", dv)
        panels = Value("%v_panels", tensor("?", w, dv))
        f(f"{panels.name} = tensor.expand_shape {v.name} [[0, 1], [2]] output_shape [%nv, {w}, {dv}] : {v.type} into {panels.type}")
        p = f.slice("%p_whole", weight, [0, 0, 0], ["%nv", r, w], "?", r, w)
        whole = f.generic(["%o_whole"], "icpj", ("pij", "pjc", "ic"), "pprr", [p, panels], [o], MULTIPLY_ADD, tag="matmul")[0]
        f(f"%o_new = scf.for %t = %c0 to %nt step %c1 iter_args(%o_at = {whole.name}) -> ({whole.type}) {{")
        f.index("%key_rest", "addi %key, %keyv")
        p = f.slice("%p_rest", weight, ["%nv", 0, 0], [1, r, "%pc"], r, "?")
        v = f.slice("%v_rest", value, ["%key_rest", 0], ["%pc", dv], "?", dv)
        f(f'%o_rest = linalg.matmul {{tag = "matmul_rest"}} ins({p.name}, {v.name} : {p.type}, {v.type}) outs(%o_at : {o.type}) -> {o.type}')
        f(f"scf.yield %o_rest : {o.type}")
        f("}")
        return Value("%o_new", o.type)

    def key_range(self, first, last):
        """Extents of the keys [first, last), where first is at a panel's start."""
        f = self.f
        f.index("%kc", f"subi {last}, {first}")
        f.index("%np", "ceildivui %kc, %W")  # panels
        f.index("%nv", "divui %kc, %W")  # whole panels
        f.index("%nt", "subi %np, %nv")  # is there a ragged one?
        f.index("%keyv", "muli %nv, %W")
        f.index("%pc", "subi %kc, %keyv")  # keys of the ragged one
        # Panels that some row does not see whole: `front` of them, and from `back` on.
        for name, limit, how in (("front", "%full_begin", "ceildivui"), ("seen", "%full_end", "divui")):
            f.index(f"%{name}_k", f"subi {limit}, {first}")
            f.index(f"%{name}_k0", f"maxsi %{name}_k, %c0")
            f.index(f"%{name}_p", f"{how} %{name}_k0, %W")
            f.index(f"%{name}_panels", f"minsi %{name}_p, %np")
        f.index("%back", "maxsi %seen_panels, %front_panels")
        f.index("%back_panels", "subi %np, %back")

    def masked_score(self, q, keys, s):
        """S with everything that adds to it or hides it; `keys` are all packed keys, %key is the first of this range."""
        f = self.f
        f.index("%panel", "divui %key, %W")
        k = f.slice("%k", keys, ["%panel", 0, 0], ["%np", self.dk, self.panel], "?", self.dk, self.panel)
        s = self.scaled_score(q, k, s)
        if self.extras:
            s = self.alibi(self.soft_cap(s))
            s = self.optional(self.optional(s, "bias"), "mask")
        s = self.hide(s, "hidden_front", "%c0", "%front_panels")
        return self.hide(s, "hidden_back", "%back", "%back_panels")

    def finish(self, state, out, row_max, row_sum):
        """O / L, M and L to where the caller wants them. Rows that see nothing: O = 0."""
        f, r, dv = self.f, self.rows, self.dv
        m, lane_sum, o = state
        l = f.fill("%sum_0", "%zero", f.read("%sum_t", row_sum, r, writable=True))
        l = f.generic(["%sum"], "ij", ("ij", "i"), "pr", [lane_sum], [l], """
            ^bb0(%x: f32, %o: f32):
            %y = arith.addf %x, %o : f32
            linalg.yield %y : f32""", tag="fold")[0]
        f.store(l, row_sum)
        inverse = f.generic(["%inverse"], "i", ("i", "i"), "p", [l], [self.buffer("%inverse_b", r)], """
            ^bb0(%x: f32, %unused: f32):
            %z = arith.divf %one, %x : f32
            %none = arith.cmpf oeq, %x, %zero : f32
            %y = arith.select %none, %zero, %z : f32
            linalg.yield %y : f32""")[0]
        result = f.generic(["%result"], "ij", ("ij", "i", "ij"), "pp", [o, inverse], [f.read("%out_t", out, r, dv, writable=True)], """
            ^bb0(%x: f32, %y: f32, %unused: f32):
            %z = arith.mulf %x, %y : f32
            linalg.yield %z : f32""", tag="row")[0]
        f.store(result, out)
        copy = f.read("%max_t", row_max, r, writable=True)
        copied = f.generic(["%max_copy"], "i", ("i", "i"), "p", [m], [copy], """
            ^bb0(%x: f32, %unused: f32):
            linalg.yield %x : f32""")[0]
        f.store(copied, row_max)
