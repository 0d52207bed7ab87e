"""Arithmetic, comparisons, conversions and moves."""
import numpy as np

from .decode import PACKED, TYPES, handler, width
from .parser import Vector

F16, F32, F64 = np.float16, np.float32, np.float64
U16, U32, U64, I64 = np.uint16, np.uint32, np.uint64, np.int64
SMALLEST_NORMAL = F32(2.0 ** -126)


def flush(x, smallest=SMALLEST_NORMAL):
    """.ftz: subnormal numbers become zeros of their sign."""
    small = np.abs(x) < smallest
    return np.where(small, np.copysign(F32(0), x), x) if small.any() else x


def simple(r, function, type, result=None, operands=None, flushed=False, clamp=None):
    """A step: registers of one type in, one result out."""
    count = len(r.operands) if operands is None else operands
    sources = [r.source(o, type) for o in r.operands[1:count]]
    name = r.target(r.operands[0], result or type)
    r.finish(count)
    inner = function
    if flushed:
        def function(*v):
            return flush(inner(*[flush(x) for x in v]))
    if clamp:
        unclamped = function

        def function(*v):
            return clamp(unclamped(*v))
    if len(sources) == 1:
        a, = sources
        return lambda m: m.set(name, function(a(m)))
    if len(sources) == 2:
        a, b = sources
        return lambda m: m.set(name, function(a(m), b(m)))
    return lambda m: m.set(name, function(*[s(m) for s in sources]))


def fused(a, b, c):
    """a * b + c rounded once: the product of two floats is exact in double."""
    return (a.astype(F64) * b + c).astype(a.dtype)


def to_bf16(x):
    """The bits of f32 values rounded to bf16, to nearest even."""
    bits = np.ascontiguousarray(x).view(U32)
    rounded = ((bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)).astype(U16)
    return np.where(np.isnan(x), U16(0x7FFF), rounded)


def from_bf16(bits):
    return (bits.astype(U32) << U32(16)).view(F32)


def halves(x, type):
    """Two f32 arrays from a packed register."""
    pair = np.ascontiguousarray(x).view(U16).reshape(-1, 2)
    convert = (lambda v: np.ascontiguousarray(v).view(F16).astype(F32)) if type == "f16x2" else from_bf16
    return convert(pair[:, 0]), convert(pair[:, 1])


def pack(low, high, type):
    with np.errstate(all="ignore"):
        parts = [v.astype(F16).view(U16) if type == "f16x2" else to_bf16(v) for v in (low, high)]
    return np.ascontiguousarray(np.stack(parts, 1)).view(U32).reshape(-1)


def packed(r, function, type):
    """The same on both halves of a register; each result is rounded once (f32 holds what add, mul and fma need of f16)."""
    r.take("rn")
    flushed = r.take("ftz") is not None
    if flushed and type != "f16x2":
        r.unsupported(f"'{r.instruction.text}': .ftz")
    sources = [r.source(o, type) for o in r.operands[1:]]
    name = r.target(r.operands[0], type)
    r.finish()
    tidy = (lambda v: flush(v.astype(F16).astype(F32), F32(2.0 ** -14))) if flushed else (lambda v: v)

    def step(m):
        values = [[tidy(h) for h in halves(s(m), type)] for s in sources]
        low, high_ = (tidy(function(*[v[i] for v in values])) for i in (0, 1))
        m.set(name, pack(low, high_, type))
    return step


def integer_divide(a, b):
    if a.dtype.kind == "u":
        return np.where(b == 0, np.iinfo(a.dtype).max, a // np.where(b == 0, 1, b))
    safe = np.where(b == 0, 1, b).astype(I64)
    quotient = np.abs(a.astype(I64)) // np.abs(safe)  # towards zero
    return np.where((a < 0) != (safe < 0), -quotient, quotient).astype(a.dtype)


def integer_remainder(a, b):
    return (a - integer_divide(a, b) * b).astype(a.dtype)


FLOAT = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": fused, "min": np.fmin, "max": np.fmax, "div": np.divide,
         "neg": np.negative, "abs": np.abs, "rcp": lambda x: (1 / x.astype(F64)).astype(F32), "sqrt": np.sqrt,
         "rsqrt": lambda x: (1 / np.sqrt(x.astype(F64))).astype(F32), "ex2": lambda x: np.exp2(x.astype(F64)).astype(F32),
         "lg2": lambda x: np.log2(x.astype(F64)).astype(F32), "tanh": lambda x: np.tanh(x.astype(F64)).astype(F32)}
FLOAT["mad"] = fused
INTEGER = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": lambda a, b, c: a * b + c, "min": np.minimum, "max": np.maximum,
           "div": integer_divide, "rem": integer_remainder, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
           "not": np.invert, "neg": np.negative, "abs": np.abs}
PREDICATE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}


@handler(*sorted(set(FLOAT) | set(INTEGER)))
def arithmetic(r):
    opcode, type = r.instruction.opcode, r.type()
    if type in PACKED:
        return packed(r, FLOAT[opcode], type if type != "bf16" else r.unsupported("bf16"))
    if type == "pred":
        return simple(r, PREDICATE[opcode], type)
    if type[0] == "f":
        flushed = r.take("ftz") is not None
        rounding = r.take("rn", "approx", "full")
        if opcode in ("ex2", "lg2", "tanh", "rsqrt") and rounding != "approx":
            r.unsupported(f"'{r.instruction.text}': expected .approx")
        function = FLOAT[opcode]
        if opcode in ("min", "max") and r.take("NaN"):
            function = {"min": np.minimum, "max": np.maximum}[opcode]
        saturate = (lambda v: np.fmin(np.fmax(v, F32(0)), F32(1))) if r.take("sat") else None  # NaN becomes 0
        return simple(r, function, type, flushed=flushed and type == "f32", clamp=saturate)
    if opcode in ("mul", "mad"):
        part = r.take("lo", "hi", "wide")
        if part == "wide":
            return wide(r, opcode, type)
        if part == "hi":
            return high(r, opcode, type)
    relu = (lambda v: np.maximum(v, v.dtype.type(0))) if opcode in ("min", "max") and r.take("relu") else None
    return simple(r, INTEGER[opcode], type, clamp=relu)


def wide(r, opcode, type):
    to = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}[type]
    sources = [r.source(o, type) for o in r.operands[1:3]] + [r.source(o, to) for o in r.operands[3:]]
    name = r.target(r.operands[0], to)
    r.finish(4 if opcode == "mad" else 3)
    dtype = TYPES[to]

    def step(m):
        a, b, *c = [s(m) for s in sources]
        product = a.astype(dtype) * b.astype(dtype)
        m.set(name, product + c[0] if c else product)
    return step


def high(r, opcode, type):
    if opcode == "mad" or width(type) != 4:
        r.unsupported(f"'{r.instruction.text}'")
    dtype, double = (np.int32, I64) if type == "s32" else (U32, U64)
    return simple(r, lambda a, b: ((a.astype(double) * b.astype(double)) >> double(32)).astype(dtype), type)


@handler("shl", "shr")
def shift(r):
    opcode, type = r.instruction.opcode, r.type()
    value, amount, name = r.source(r.operands[1], type), r.source(r.operands[2], "u32"), r.target(r.operands[0], type)
    r.finish(3)
    dtype, bits = TYPES[type], 8 * width(type)

    def step(m):
        v, n = value(m), amount(m)
        if opcode == "shr" and type[0] == "s":
            m.set(name, v >> np.minimum(n, U32(bits - 1)).astype(dtype))
        else:
            moved = (v << n.astype(dtype)) if opcode == "shl" else (v >> n.astype(dtype))
            m.set(name, np.where(n >= bits, dtype(0), moved))
    return step


@handler("bfe")
def extract_bits(r):
    type = r.type()
    if type != "u32":
        r.unsupported(f"'{r.instruction.text}'")

    def function(a, position, length):
        position, length = position & U32(255), length & U32(255)
        moved = np.where(position > 31, U32(0), a >> np.minimum(position, U32(31)))
        return np.where(length > 31, moved, moved & ((U32(1) << np.minimum(length, U32(31))) - U32(1)))
    return simple(r, function, type)


@handler("bfi")
def insert_bits(r):
    type = r.type()
    if type != "b32":
        r.unsupported(f"'{r.instruction.text}'")

    def function(a, b, position, length):
        mask = (((U64(1) << np.minimum(length & U32(255), U32(32)).astype(U64)) - U64(1)) << (position & U32(255)).astype(U64)).astype(U32)
        return (b & ~mask) | ((a.astype(U64) << (position & U32(255)).astype(U64)).astype(U32) & mask)
    return simple(r, function, type)


@handler("prmt")
def permute_bytes(r):
    type = r.type()

    def function(a, b, control):
        bytes_ = np.ascontiguousarray(np.stack([a, b], 1)).view(np.uint8).reshape(-1, 8)
        if (control & U32(0x8888)).any():
            r.unsupported("prmt with sign replication")
        picked = [bytes_[np.arange(a.size), (control >> U32(4 * k)) & U32(7)] for k in range(4)]
        return np.ascontiguousarray(np.stack(picked, 1)).view(U32).reshape(-1)
    return simple(r, function, type)


ORDERED = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
           "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}


@handler("setp")
def compare(r):
    type = r.type()
    flushed = r.take("ftz") is not None
    relation = r.require(*ORDERED, *UNORDERED, "num", "nan")
    combine = r.take(*PREDICATE)
    a, b, name = r.source(r.operands[1], type), r.source(r.operands[2], type), r.target(r.operands[0], "pred")
    c = r.source(r.operands[3], "pred") if combine else None
    r.finish(4 if combine else 3)
    real = type[0] == "f"

    def step(m):
        x, y = a(m), b(m)
        if flushed:
            x, y = flush(x), flush(y)
        if not real:
            value = ORDERED[relation](x, y)
        else:
            nan = np.isnan(x) | np.isnan(y)
            if relation in ("num", "nan"):
                value = nan if relation == "nan" else ~nan
            elif relation in UNORDERED:
                value = ORDERED[UNORDERED[relation]](x, y) | nan
            else:
                value = ORDERED[relation](x, y) & ~nan
        m.set(name, PREDICATE[combine](value, c(m)) if c else value)
    return step


@handler("selp")
def select(r):
    type = r.type()
    a, b, p, name = r.source(r.operands[1], type), r.source(r.operands[2], type), r.source(r.operands[3], "pred"), r.target(r.operands[0], type)
    r.finish(4)
    return lambda m: m.set(name, np.where(p(m), a(m), b(m)))


@handler("mov")
def move(r):
    type = r.type()
    to, source = r.operands
    if isinstance(to, Vector) or isinstance(source, Vector):
        return move_parts(r, type, to, source)
    a, name = r.source(source, type), r.target(to, type)
    r.finish(2)
    return lambda m: m.set(name, a(m))


def move_parts(r, type, to, source):
    """One register as several, or several as one."""
    count = len((to if isinstance(to, Vector) else source).parts)
    part = f"b{8 * width(type) // count}"
    r.finish(2)
    dtype, small = TYPES[type], TYPES[part]
    if isinstance(to, Vector):
        a = r.source(source, type)
        names = [r.target(p, part) for p in to.parts]

        def step(m):
            values = np.ascontiguousarray(a(m)).view(small).reshape(-1, count)
            for i, name in enumerate(names):
                if name != "%_":
                    m.set(name, np.ascontiguousarray(values[:, i]))
        return step
    sources, name = [r.source(p, part) for p in source.parts], r.target(to, type)
    return lambda m: m.set(name, np.ascontiguousarray(np.stack([s(m) for s in sources], 1)).view(dtype).reshape(-1))


@handler("cvt")
def convert(r):
    source = r.left.pop() if r.left else None
    type = r.left.pop() if r.left else None
    if type is None or source is None:
        r.unsupported(f"'{r.instruction.text}'")
    flushed, saturate = r.take("ftz"), r.take("sat")
    rounding = r.take("rn", "rni", "rzi", "rmi", "rpi", "rz")
    known = set(TYPES) | set(PACKED)
    if type not in known or source not in known or saturate:
        r.unsupported(f"'{r.instruction.text}'")
    if type in ("f16x2", "bf16x2"):
        if source != "f32" or rounding != "rn":
            r.unsupported(f"'{r.instruction.text}'")
        relu = r.take("relu")
        high_, low, name = r.source(r.operands[1], "f32"), r.source(r.operands[2], "f32"), r.target(r.operands[0], type)
        r.finish(3)
        prepare = (lambda x: np.maximum(x, F32(0))) if relu else (lambda x: x)
        return lambda m: m.set(name, pack(prepare(low(m)), prepare(high_(m)), type))
    a = r.source(r.operands[1], source)
    name, extend = r.extending_target(r.operands[0], type)
    r.finish(2)
    function = conversion(r, type, source, rounding)
    return (lambda m: m.set(name, extend(function(flush(a(m)))))) if flushed and source == "f32" else (lambda m: m.set(name, extend(function(a(m)))))


def conversion(r, type, source, rounding):
    if source == "bf16":
        if type != "f32":
            r.unsupported(f"'{r.instruction.text}'")
        return from_bf16
    if type == "bf16":
        if source != "f32" or rounding != "rn":
            r.unsupported(f"'{r.instruction.text}'")
        return to_bf16
    dtype = TYPES[type]
    whole = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    if source[0] == "f" and type[0] != "f":
        if rounding not in whole:
            r.unsupported(f"'{r.instruction.text}': rounding")
        limits = np.iinfo(dtype)
        return lambda x: np.clip(np.nan_to_num(whole[rounding](x.astype(F64)), nan=0.0), float(limits.min), float(limits.max)).astype(dtype)
    if source[0] == "f" and rounding in whole:
        return lambda x: whole[rounding](x).astype(dtype)
    if rounding == "rz":
        r.unsupported(f"'{r.instruction.text}': rounding")
    return lambda x: x.astype(dtype)
