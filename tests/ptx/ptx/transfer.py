"""Loads, stores, conversions of addresses, and cp.async."""
import numpy as np

from .decode import PACKED, TYPES, handler, width
from .errors import PtxError
from .memory import LOCAL_WINDOW, SHARED_WINDOW, UINTS
from .parser import Immediate

WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "global": 0}


def split_window(addresses):
    """The space that generic addresses lie in, and the addresses within it."""
    lowest, highest = int(addresses.min()), int(addresses.max())
    space = "local" if lowest >= LOCAL_WINDOW else "shared" if lowest >= SHARED_WINDOW and highest < LOCAL_WINDOW else "global"
    if space == "global" and highest >= SHARED_WINDOW:
        raise PtxError("unsupported", "one generic access in several spaces")
    return space, addresses - WINDOWS[space]


def take_space(r):
    space = r.take("global", "shared", "local", "param")
    for cache in ("nc", "volatile", "relaxed", "weak", "L1:evict_last", "L1:no_allocate", "L1:evict_first"):
        if cache != "nc" and r.take(cache) and cache in ("volatile", "relaxed"):
            r.unsupported(f"'{r.instruction.text}': .{cache}")
    return space


def vector_count(r):
    count = r.take("v2", "v4", "v8")
    return int(count[1:]) if count else 1


@handler("ld")
def load(r):
    type, space = r.type(), take_space(r)
    count, constant = vector_count(r), r.take("nc") is not None
    if space == "param":
        return load_parameter(r, type, count)
    address, size = r.address(r.operands[1]), width(type)
    dtype = TYPES[PACKED.get(type, type)]
    targets = [r.extending_target(p, type) for p in r.parts(r.operands[0])]
    r.finish(2)
    if len(targets) != count:
        r.unsupported(f"'{r.instruction.text}': {len(targets)} results")
    origin = f"{r.entry.name}, line {r.instruction.line}: {r.instruction.text}"

    def step(m):
        lanes, where = m.active_lanes(), m.at_active(address(m))
        kind, where = (space, where) if space else split_window(where)
        if kind == "global":
            values = m.memory.load(where, size, count, m.ids[lanes], constant)
        elif kind == "shared":
            values = m.shared.load(where, size, count, lanes, origin)
        else:
            values = m.local.load(where, size, count, lanes)
        for (name, extend), value in zip(targets, values):
            m.set_active(name, extend(value.view(dtype)))
    return step


def load_parameter(r, type, count):
    address, size = r.operands[1], width(type)
    names = [r.extending_target(p, type) for p in r.parts(r.operands[0])]
    offsets, offset = {}, 0
    for p in r.entry.parameters:
        offset = -(-offset // p.align) * p.align
        offsets[p.name] = offset
        offset += p.bytes
    if address.base.name not in offsets:
        r.unsupported(f"parameter {address.base.name}")
    first = offsets[address.base.name] + address.offset
    r.finish(2)
    dtype = np.dtype(TYPES[PACKED.get(type, type)])

    def step(m):
        for k, (name, extend) in enumerate(names):
            value = np.frombuffer(m.parameters, dtype, 1, first + k * size)
            m.set(name, np.broadcast_to(extend(value), m.lanes.size).copy())
    return step


@handler("st")
def store(r):
    type, space = r.type(), take_space(r)
    count = vector_count(r)
    address, size = r.address(r.operands[0]), width(type)
    parts = r.parts(r.operands[1])
    sources = [store_source(r, p, type) for p in parts]
    r.finish(2)
    if len(parts) != count:
        r.unsupported(f"'{r.instruction.text}': {len(parts)} values")
    bits = UINTS[size]

    def step(m):
        lanes, where = m.active_lanes(), m.at_active(address(m))
        values = [m.at_active(s(m).view(bits)) for s in sources]
        kind, where = (space, where) if space else split_window(where)
        if kind == "global":
            m.memory.store(where, size, values, m.ids[lanes])
        elif kind == "shared":
            m.shared.store(where, size, values, lanes)
        else:
            m.local.store(where, size, values, lanes)
    return step


def store_source(r, operand, type):
    """Stored bytes and words may be the low part of a wider register."""
    if isinstance(operand, Immediate):
        return r.source(operand, f"u{8 * width(type)}")
    have = r.register_type(operand)
    wide = r.source(operand, have)
    if width(have) == width(type):
        return wide
    bits = UINTS[width(type)]
    return lambda m: m.registers[operand.name].view(UINTS[width(have)]).astype(bits)


@handler("cvta")
def convert_address(r):
    type, to = r.type(), r.take("to")
    window = WINDOWS[r.require("global", "shared", "local")]
    a, name = r.source(r.operands[1], type), r.target(r.operands[0], type)
    r.finish(2)
    shift = np.uint64(window)
    return lambda m: m.set(name, a(m) - shift if to else a(m) + shift)


@handler("cp")
def copy_async(r):
    r.require("async")
    if r.take("commit_group"):
        r.finish(0)
        return lambda m: m.commit_copies()
    if r.take("wait_group"):
        r.finish(1)
        keep = r.operands[0].bits
        return lambda m: m.wait_for_copies(keep)
    if r.take("wait_all"):
        r.finish(0)

        def wait_all(m):
            m.commit_copies()
            m.wait_for_copies(0)
        return wait_all
    cache = r.require("cg", "ca")
    r.require("shared")
    r.take("cta")
    r.require("global")
    r.take("L2:128B")
    to, source, size = r.address(r.operands[0]), r.address(r.operands[1]), r.operands[2].bits
    given = r.source(r.operands[3], "u32") if len(r.operands) > 3 else None
    r.finish()
    if size not in (4, 8, 16) or (cache == "cg" and size != 16):
        r.unsupported(f"'{r.instruction.text}': {size} bytes")

    def step(m):
        lanes, targets, sources = m.active_lanes(), m.at_active(to(m)), m.at_active(source(m))
        counts = m.at_active(given(m)).astype(np.int64) if given else np.full(lanes.size, size)
        data = np.zeros((lanes.size, size), np.uint8)
        some = counts > 0
        if ((counts != 0) & (counts != size)).any():
            raise PtxError("unsupported", "cp.async that copies a part and fills the rest")
        if some.any():
            word = min(size, 8)
            values = m.memory.load(sources[some], word, size // word, m.ids[lanes[some]], False)
            data[some] = np.ascontiguousarray(np.stack(values, 1)).view(np.uint8)
        m.issue_copy(lanes, targets, size, data)
    return step
