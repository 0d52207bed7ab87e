"""The two strategies, from the stages of one block of query rows.

  rowblock  M = max_j S, P = 2^(S - M), L = sum_j P, O = P V / L over all visible keys at once: no loop in the payload. The
            strip of scores lies in memory of the caller's.
  flash     the same over blocks of `panels` panels of keys, one after the other, with a running (M, L, O):
                M' = max(M, max_j S),  a = 2^(M - M'),  L' = a L + sum_j P,  O' = a O + P V
            O(tile) memory.

A kernel is the block function for one number of rows; the function that the runtime calls takes the smallest one that
holds its rows, so that a short block is not padded to the longest.
"""
from ir import Function, Value, memref, parts
from stages import Stages

CAPTION = {
    "flash": "one pass over key blocks with a running maximum, sum and output",
    "rowblock": "all scores of the rows, then their softmax, then the matmul",
}


def block_arguments(rows, dk, dv, panel):
    """The arguments of a function for `rows` rows (AttendFn in runtime/mlir/phases.h)."""
    dense = lambda *shape, **kw: memref(*shape, **kw)[:-1] + f", strided<[{', '.join(str(x) for x in _dense(shape))}]>>"
    values = [
        Value("%query", dense(rows, dk)),                                # scaled; rows that are not there are zero
        Value("%keys", memref("?", dk, panel)),                          # panels of K, transposed, zeros behind the last key
        Value("%values", memref("?", dv, strides=("?", 1))),
        Value("%lows", dense(rows, element="i32")), Value("%highs", dense(rows, element="i32")),  # row i sees keys [low, high)
        Value("%positions", dense(rows, element="i32")), Value("%slopes", dense(rows)),  # of ALiBi
        Value("%mask", memref("?", element="i8", strides=("?",))), Value("%mask_rows", dense(rows, element="index")),
        Value("%bias", memref("?", element="i32", strides=("?",))), Value("%bias_rows", dense(rows, element="index")),  # where each row starts
        Value("%out", dense(rows, dv)), Value("%row_max", dense(rows)), Value("%row_sum", dense(rows)),
    ]
    values.append(Value("%strip", memref("?")))  # rowblock keeps the scores of its rows there
    for name in ("begin", "end", "full_begin", "full_end", "use_softcap", "use_alibi", "use_bias", "use_mask"):
        values.append(Value(f"%{name}", "index"))  # keys that some row sees; keys that all rows see
    values += [Value("%softcap", "f32"), Value("%unit", "f32")]
    return values


def _dense(shape):
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return strides


def block_function(name, strategy, rows, dk, dv, panel, panels, extras):
    f = Function()
    s = Stages(f, rows, dk, dv, panel, extras)
    arguments = block_arguments(rows, dk, dv, panel)
    a = {v.name: v for v in arguments}
    s.constants()
    q = f.read("%q", a["%query"], rows, dk)
    keys = f.read("%k_all", a["%keys"], "?", dk, panel)
    values = f.read("%v_all", a["%values"], "?", dv)
    s.lo, s.hi = f.read("%lo_t", a["%lows"], rows), f.read("%hi_t", a["%highs"], rows)
    if extras:
        s.position, s.slope = f.read("%position_t", a["%positions"], rows), f.read("%slope_t", a["%slopes"], rows)
        for which, element in (("mask", "i8"), ("bias", "i32")):
            n = f"%{which}"
            strided, dense = a[n].type, memref("?", element=element, strides=(1,))
            f(f"{n}_base, {n}_offset, {n}_size, {n}_stride = memref.extract_strided_metadata {n} : {strided} -> memref<{element}>, index, index, index")
            f(f"{n}_unit = arith.cmpi eq, {n}_stride, %c1 : index")
            f(f"{n}_given = arith.cmpi ne, %use_{which}, %c0 : index")
            # The same memory with dense keys (for vectors), and as a whole (a slice brings its own stride).
            f(f"{n}_flat = memref.reinterpret_cast {n}_base to offset: [{n}_offset], sizes: [{n}_size], strides: [1] : memref<{element}> to {dense}")
            f.read(f"{n}_dense_t", Value(f"{n}_flat", dense), "?")
            f.read(f"{n}_slow_t", Value(f"{n}_flat", dense), "?")
    s.take_ahead(("%inverse_b", rows), *((("%max_lanes_b", rows, panel), ("%max_b", rows)) if strategy == "rowblock" else ()))
    m = f.fill("%m_0", "%lowest", f.buffer("%m_b", rows))
    l = f.fill("%l_0", "%zero", f.buffer("%l_b", rows, panel), tag="row")
    o = f.fill("%o_0", "%zero", f.buffer("%o_b", rows, dv), tag="row")
    # The first key, at the start of a panel.
    f.index("%begin_panel", "divui %begin, %W")
    f.index("%start", "muli %begin_panel, %W")
    state_type = f"{m.type}, {l.type}, {o.type}"
    if strategy == "flash":
        strip = f.buffer("%score_b", panels, rows, panel)
        f.constant("%K", panels * panel)
        f.index("%extent", "subi %end, %start")
        f.index("%all", "maxsi %extent, %c0")
        f.index("%blocks", "ceildivui %all, %K")
        f(f"%state:3 = scf.for %block = %c0 to %blocks step %c1 iter_args(%m_it = {m.name}, %l_it = {l.name}, %o_it = {o.name}) -> ({state_type}) {{")
        f.index("%behind", "muli %block, %K")
        f.index("%key", "addi %start, %behind")
        f.index("%rest", "subi %end, %key")
        f.index("%here", "minsi %rest, %K")
        f.index("%last", "addi %key, %here")
        s.key_range("%key", "%last")
        score = s.masked_score(q, keys, f.slice("%score", strip, [0, 0, 0], ["%np", rows, panel], "?", rows, panel))
        m1, l1, o1 = s.merge(s.block_maximum(score), (Value("%m_it", m.type), Value("%l_it", l.type), Value("%o_it", o.type)))
        weight, l2 = s.weigh(score, m1, l1)
        o2 = s.matmul(weight, values, o1)
        f(f"scf.yield {m1.name}, {l2.name}, {o2.name} : {state_type}")
        f("}")
        state = [Value(f"%state#{i}", t) for i, t in enumerate((m.type, l.type, o.type))]
    else:
        f("%key = arith.addi %start, %c0 : index")
        s.key_range("%key", "%end")
        f.constant("%panel_floats", rows * panel)
        f.index("%floats", "muli %np, %panel_floats")
        shaped = memref("?", rows, panel, strides=None)
        f(f"%strip_panels = memref.reinterpret_cast %strip to offset: [0], sizes: [%np, {rows}, {panel}], strides: [{rows * panel}, {panel}, 1] : "
          f"{a['%strip'].type} to {shaped}")
        score = s.masked_score(q, keys, f.read("%score", Value("%strip_panels", shaped), "?", rows, panel, writable=True))
        block_max = s.block_maximum(score)
        weight, l1 = s.weigh(score, block_max, l)
        state = (block_max, l1, s.matmul(weight, values, o))
    s.finish(state, a["%out"], a["%row_max"], a["%row_sum"])
    f("return")
    signature = ", ".join(f"{v.name}: {v.type}" for v in arguments)
    kind = "with" if extras else "without"
    return (f"// {rows} query rows, {kind} soft cap, ALiBi, bias and bool mask: {CAPTION[strategy]}\n"
            f"func.func private @{name}({signature}) attributes {{rows = {rows} : i64}} {{\n{f.text()}}}\n")


def entry_function(name, blocks, dk, dv, panel):
    """Takes the block function that fits."""
    f = Function()
    arguments = block_arguments(blocks[-1], dk, dv, panel)

    def call(rows, extras):
        own = block_arguments(rows, dk, dv, panel)
        passed = []
        for whole, part in zip(arguments, own):
            if whole.type == part.type:
                passed.append(whole.name)
                continue
            shape = parts(part.type)[0]
            zeros, ones = ", ".join("0" for _ in shape), ", ".join("1" for _ in shape)
            f(f"{whole.name}_{rows} = memref.subview {whole.name}[{zeros}] [{', '.join(shape)}] [{ones}] : {whole.type} to {part.type}")
            passed.append(f"{whole.name}_{rows}")
        f(f"func.call @{name}_{rows}{'_extras' * extras}({', '.join(passed)}) : ({', '.join(v.type for v in own)}) -> ()")

    f.constant("%c0", 0)
    f.index("%uses_a", "addi %use_softcap, %use_alibi")
    f.index("%uses_b", "addi %use_bias, %use_mask")
    f.index("%uses", "addi %uses_a, %uses_b")
    f("%extras = arith.cmpi ne, %uses, %c0 : index")
    for extras in (True, False):
        f("scf.if %extras {" if extras else "} else {")
        for rows in blocks[:-1]:
            f.constant(f"%max_{rows}", rows)
            f(f"%is_{rows} = arith.cmpi ule, %rows, %max_{rows} : index")
            f(f"scf.if %is_{rows} {{")
            call(rows, extras)
            f("} else {")
        call(blocks[-1], extras)
        for _ in blocks[:-1]:
            f("}")
    f("}")
    f("return")
    signature = ", ".join(f"{v.name}: {v.type}" for v in arguments + [Value("%rows", "index")])
    return f"// what the runtime calls\nfunc.func @{name}({signature}) attributes {{llvm.emit_c_interface}} {{\n{f.text()}}}\n"


def attend(name, strategy, blocks, dk, dv, panel, panels):
    """The module of a main phase."""
    functions = [block_function(f"{name}_{rows}{'_extras' * extras}", strategy, rows, dk, dv, panel, panels, extras)
                 for rows in blocks for extras in (False, True)]
    return "module {\n" + "\n".join(functions + [entry_function(name, blocks, dk, dv, panel)]) + "}\n"


def pack(name, dk, panel):
    """K [key][feature], any strides, whole panels -> panels [panel][feature][key in panel], and the largest magnitude among
    them as an integer (what its bits say about infinities and NaN). Dense features are transposed by squares, dense
    keys are copied, anything else goes element by element: three operations, of which two have no extent."""
    f = Function()
    key, packed, bits = Value("%key", memref("?", dk, strides=("?", "?"))), Value("%packed", memref("?", dk, panel)), Value("%bits", memref(1, element="i32"))
    f.constant("%c0", 0)
    f.constant("%c1", 1)
    f.constant("%W", panel)
    f(f"%base, %offset, %sizes:2, %strides:2 = memref.extract_strided_metadata {key.name} : {key.type} -> memref<f32>, index, index, index, index, index")
    f(f"%all = memref.dim {packed.name}, %c0 : {packed.type}")
    f("%features_dense = arith.cmpi eq, %strides#1, %c1 : index")
    f("%keys_dense = arith.cmpi eq, %strides#0, %c1 : index")
    f("%n_rows = arith.select %features_dense, %all, %c0 : index")
    f.index("%others", "subi %all, %n_rows")
    f("%n_cols = arith.select %keys_dense, %others, %c0 : index")
    f.index("%n_any", "subi %others, %n_cols")
    p = f.read("%p_all", packed, "?", dk, panel, writable=True)
    for name_, count, strides in (("rows", "%n_rows", (f"%panel_rows", "%strides#0", "1")), ("cols", "%n_cols", ("%W", "1", "%strides#1")),
                                  ("any", "%n_any", ("%panel_rows", "%strides#0", "%strides#1"))):
        if name_ == "rows":
            f.index("%panel_rows", "muli %W, %strides#0")
        layout = ["?", "?" if name_ != "cols" else 1, "?" if name_ != "rows" else 1]
        if name_ == "cols":
            layout[0] = "?"
        view = Value(f"%{name_}_view", memref("?", panel, dk, strides=layout))
        f(f"{view.name} = memref.reinterpret_cast %base to offset: [%offset], sizes: [{count}, {panel}, {dk}], "
          f"strides: [{', '.join(strides)}] : memref<f32> to {view.type}")
        source = f.read(f"%{name_}_in", view, "?", panel, dk)
        part = f.slice(f"%{name_}_out", p, [0, 0, 0], [count, dk, panel], "?", dk, panel)
        if name_ == "rows":
            f(f'%rows_done = linalg.transpose ins({source.name} : {source.type}) outs({part.name} : {part.type}) permutation = [0, 2, 1] {{tag = "transpose"}}')
            done = Value("%rows_done", part.type)
        else:
            done = f.generic([f"%{name_}_done"], "pdj", ("pjd", "pdj"), "ppp", [source], [part], """
                ^bb0(%x: f32, %unused: f32):
                linalg.yield %x : f32""", tag="copy" if name_ == "cols" else None)[0]
        p = f.insert(f"%p_{name_}", done, p, [0, 0, 0], [count, dk, panel])
    f.store(p, packed)
    f.constant("%magnitude", "0x7fffffff", "i32")
    f.constant("%none", 0, "i32")
    lanes = f.buffer("%lanes_b", panel, element="i32")
    f(f"%lanes_0 = linalg.fill ins(%none : i32) outs({lanes.name} : {lanes.type}) -> {lanes.type}")
    lanes = f.generic(["%lanes"], "pdj", ("pdj", "j"), "rrp", [p], [Value("%lanes_0", lanes.type)], """
        ^bb0(%x: f32, %o: i32):
        %b = arith.bitcast %x : f32 to i32
        %a = arith.andi %b, %magnitude : i32
        %y = arith.maxsi %a, %o : i32
        linalg.yield %y : i32""", tag="bits")[0]
    f(f"%largest_0 = bufferization.alloc_tensor() : tensor<i32>")
    f("%largest_1 = linalg.fill ins(%none : i32) outs(%largest_0 : tensor<i32>) -> tensor<i32>")
    f.generic(["%largest"], "j", ("j", ""), "r", [lanes], [Value("%largest_1", "tensor<i32>")], """
        ^bb0(%x: i32, %o: i32):
        %y = arith.maxsi %x, %o : i32
        linalg.yield %y : i32""", tag="fold_bits")
    f("%value = tensor.extract %largest[] : tensor<i32>")
    f(f"memref.store %value, {bits.name}[%c0] : {bits.type}")
    f("return")
    return (f"module {{\nfunc.func @{name}({key.name}: {key.type}, {packed.name}: {packed.type}, {bits.name}: {bits.type}) "
            f"attributes {{llvm.emit_c_interface}} {{\n{f.text()}}}\n}}\n")
