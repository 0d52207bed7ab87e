"""ldmatrix and mma.sync: what the 32 threads of a warp do together."""
import numpy as np

from .arithmetic import from_bf16
from .control import require_all
from .decode import handler
from .errors import PtxError
from .memory import describe

U16, U32 = np.uint16, np.uint32


@handler("ldmatrix")
def load_matrices(r):
    for word in ("sync", "aligned", "m8n8", "shared", "b16"):
        r.require(word)
    count, transpose = int(r.require("x1", "x2", "x4")[1:]), r.take("trans") is not None
    address, names = r.address(r.operands[1]), [r.target(p, "b32") for p in r.parts(r.operands[0])]
    r.finish(2)
    if len(names) != count:
        r.unsupported(f"'{r.instruction.text}': {len(names)} results")
    origin = f"{r.entry.name}, line {r.instruction.line}: {r.instruction.text}"

    def step(m):
        require_all(r, m, "ldmatrix")
        # Threads 8 i to 8 i + 7 of a warp give the rows of matrix i.
        used = np.arange(32) < 8 * count
        chosen = np.tile(used, m.lanes.size // 32) if m.mask is None else m.mask & np.tile(used, m.lanes.size // 32)
        lanes, where = m.lanes[chosen], address(m)[chosen]
        if (where % 16).any():
            raise PtxError("alignment", f"ldmatrix rows at {describe(lanes, where)}")
        m.shared.before_read(where, 16, lanes, origin)
        rows = where.reshape(-1, 8)
        banks = np.sort(rows // 16 % 8, axis=1)
        m.count("ldmatrix phases", rows.shape[0])
        m.count("ldmatrix conflicts", int((banks[:, 1:] == banks[:, :-1]).sum()))
        data = m.shared.quads[(m.shared.start[lanes] + where) // 16].reshape(-1, count, 8, 4)
        if transpose:
            data = np.ascontiguousarray(np.ascontiguousarray(data).view(U16).reshape(-1, count, 8, 8).transpose(0, 1, 3, 2)).view(U32)
        for i, name in enumerate(names):
            m.set_warps(name, np.ascontiguousarray(data[:, i]).reshape(-1, 32))
    return step


def elements(register, type):
    """[warps, 8, 8] numbers: thread 4 g + t holds row g, columns 2 t and 2 t + 1."""
    bits = np.ascontiguousarray(register).view(U16)
    values = bits.view(np.float16).astype(np.float64) if type == "f16" else from_bf16(bits).astype(np.float64)
    return values.reshape(-1, 8, 8)


@handler("mma")
def multiply(r):
    for word in ("sync", "aligned", "m16n8k16", "row", "col"):
        r.require(word)
    types = tuple(r.left)
    if types not in (("f32", "f16", "f16", "f32"), ("f32", "bf16", "bf16", "f32")):
        r.unsupported(f"'{r.instruction.text}'")
    r.left.clear()
    type = types[1]
    d, a, b, c = (r.parts(o) for o in r.operands)
    if [len(x) for x in (d, a, b, c)] != [4, 4, 2, 4]:
        r.unsupported(f"'{r.instruction.text}'")
    names = [r.target(p, "f32") for p in d]
    a, b, c = ([r.source(p, t) for p in parts] for parts, t in ((a, "b32"), (b, "b32"), (c, "f32")))

    def matrix_a(m):
        """Operands are used by many instructions: kept by the identity of their arrays, which never change."""
        registers = [s(m) for s in a]
        key = tuple(x.__array_interface__["data"][0] for x in registers)
        if key not in m.operands:
            if len(m.operands) > 64:
                m.operands.clear()
            value = np.empty((m.lanes.size // 32, 16, 16))
            for q, x in enumerate(registers):
                value[:, 8 * (q % 2):8 * (q % 2) + 8, 8 * (q // 2):8 * (q // 2) + 8] = elements(x, type)
            m.operands[key] = (value, registers)
        return m.operands[key][0]

    def step(m):
        require_all(r, m, "mma")
        m.count("mma", 1)
        bm = np.concatenate([elements(s(m), type).transpose(0, 2, 1) for s in b], 1)
        product = np.matmul(matrix_a(m), bm)
        for q, name in enumerate(names):
            half = product[:, 8 * (q // 2):8 * (q // 2) + 8, q % 2::2].reshape(-1)
            m.set(name, (half + c[q](m)).astype(np.float32))
    return step
