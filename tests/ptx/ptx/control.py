"""Branches, barriers and what the threads of a warp do together apart from matrices. Branches, barriers and the end are
tuples that the machine acts on."""
import numpy as np

from .decode import handler
from .errors import PtxError
from .parser import Immediate, Symbol

ALL = 0xFFFFFFFF


@handler("bra")
def branch(r):
    r.take("uni")
    r.finish(1)
    label = r.operands[0]
    if not isinstance(label, Symbol) or label.name not in r.entry.labels:
        r.unsupported(f"label {label}")
    return ("bra", r.entry.labels[label.name])


@handler("ret", "exit")
def end(r):
    r.take("uni")
    r.finish(0)
    return ("exit",)


@handler("bar", "barrier")
def barrier(r):
    if r.take("warp"):
        r.unsupported("bar.warp")
    r.require("sync")
    r.take("aligned")
    r.finish(1)
    if r.operands[0] != Immediate(0):
        r.unsupported(f"'{r.instruction.text}': expected barrier 0 of all threads")
    return ("bar",)


def require_all(r, m, what):
    """Instructions of a whole warp: all its 32 threads have to be there."""
    if m.mask is not None:
        warps = m.mask.reshape(-1, 32)
        if (warps.any(1) & ~warps.all(1)).any():
            raise PtxError("lanes", f"{what} with part of a warp")


def member_mask(r, operand):
    if not isinstance(operand, Immediate) or operand.bits & ALL != ALL:
        r.unsupported(f"'{r.instruction.text}': expected the member mask of a whole warp")


@handler("shfl")
def shuffle(r):
    r.require("sync")
    mode = r.require("bfly", "idx", "up", "down")
    type = r.type()
    to, value, by, limits, members = r.operands
    member_mask(r, members)
    a, b, c, name = r.source(value, type), r.source(by, "u32"), r.source(limits, "u32"), r.target(to, type)
    r.finish(5)

    def step(m):
        require_all(r, m, "shfl")
        value, by, limits = (x.reshape(-1, 32) for x in (a(m), b(m).astype(np.int64) & 31, c(m).astype(np.int64)))
        lane = np.arange(32)
        segment = (limits >> 8) & 31
        highest = (lane & segment) | (limits & 31 & ~segment)
        lowest = lane & segment
        other = {"bfly": lane ^ by, "idx": lowest | (by & ~segment), "up": lane - by, "down": lane + by}[mode]
        inside = other >= highest if mode == "up" else other <= highest
        m.set(name, np.take_along_axis(value, np.where(inside, other, lane), 1).reshape(-1))
    return step


@handler("vote")
def vote(r):
    r.require("sync")
    mode = r.require("any", "all", "ballot")
    type = r.type()
    to, predicate, members = r.operands
    member_mask(r, members)
    a, name = r.source(predicate, "pred"), r.target(to, type)
    r.finish(3)

    def step(m):
        require_all(r, m, "vote")
        value = a(m).reshape(-1, 32)
        if mode == "ballot":
            result = (value.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)
        else:
            result = value.any(1) if mode == "any" else value.all(1)
        m.set(name, np.repeat(result, 32))
    return step
