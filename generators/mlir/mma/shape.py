"""The knobs of a tensor core kernel and what follows from them."""
import re
from dataclasses import dataclass, fields


class ShapeError(Exception):
    pass


@dataclass(frozen=True)
class Shape:
    type: str = "f16"  # f16 or bf16: of Q, K, V and P; sums are f32
    dk: int = 64       # features that K's tile in shared memory has; smaller ones are filled with zeros
    dv: int = 64
    mt: int = 1        # tiles of 16 rows for each warp
    warps: int = 4
    k: int = 64        # keys of a block
    stages: int = 1    # 1: one tile of K and one of V, two barriers for each key block; 2: two of each and one barrier
    qreg: int = 1      # 1: Q's fragments stay in registers; 0: they are read again from shared memory for each key block
    lazy: int = 0      # above 0: O and l are rescaled only where the maximum of a row of the warp grew by more than 2^lazy
    split: int = 0     # 1: query heads of a group are rows of one tile, keys are split over blocks, partial results

    @property
    def q(self):  # rows of a block
        return 16 * self.mt * self.warps

    @property
    def threads(self):
        return 32 * self.warps

    # Rows are padded by 16 bytes: the eight rows that an ldmatrix reads then lie in different banks.
    @property
    def k_row(self):
        return self.dk + 8

    @property
    def v_row(self):
        return self.dv + 8

    @property
    def k_bytes(self):
        return 2 * self.stages * self.k * self.k_row

    @property
    def v_bytes(self):
        return 2 * self.stages * self.k * self.v_row

    @property
    def shared_bytes(self):
        return self.k_bytes + self.v_bytes + (0 if self.qreg else 2 * self.q * self.k_row)

    @property
    def dynamic_bytes(self):
        """Shared memory that the launch has to ask for: static memory ends at 48 KiB."""
        return self.shared_bytes if self.shared_bytes > 48 << 10 else 0


def parse(parameters):
    """Shape from ["type=f16", ...]."""
    known = {f.name: f.type for f in fields(Shape)}
    values = {}
    for text in parameters:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            raise ShapeError(f"parameter '{text}': expected one of {', '.join(f'{n}=…' for n in known)}")
        if name != "type" and not value.isdigit():
            raise ShapeError(f"parameter '{text}': expected a number")
        values[name] = value if name == "type" else int(value)
    shape = Shape(**values)
    check(shape)
    return shape


def tiles(entry):
    """[(size, parameters)] of an entry of the catalogue: a knob named d64 or d192x128 holds those of that tile only, the
    others are for all tiles."""
    shared = {k: v for k, v in entry["params"].items() if not is_size(k) and k != "split_keys"}
    result = []
    for size, text in entry["params"].items():
        if is_size(size):
            dk, _, dv = size[1:].partition("x")
            own = dict(part.split("=") for part in text.split())
            knobs = {"type": entry["dtypes"]["kv"], "dk": dk, "dv": dv or dk, **shared, **own}
            result.append((size, [f"{k}={v}" for k, v in knobs.items()]))
    return result


def is_size(name):
    return re.fullmatch(r"d\d+(x\d+)?", name) is not None


def check(s):
    def expect(condition, message):
        if not condition:
            raise ShapeError(message)
    expect(s.type in ("f16", "bf16"), f"type={s.type}: expected f16 or bf16")
    for name in ("dk", "dv", "k"):
        expect(getattr(s, name) > 0 and getattr(s, name) % 16 == 0, f"{name}={getattr(s, name)}: expected a multiple of 16")
    expect(s.mt > 0 and 0 < s.warps <= 16, f"mt={s.mt} warps={s.warps}: expected at least one tile and 1 to 16 warps")
    expect(s.stages in (1, 2), f"stages={s.stages}: expected 1 or 2")
    for name, features in (("dk", s.dk), ("dv", s.dv)):
        chunks = features // 8  # of 16 bytes, one copied by each thread at a time
        expect(s.threads % chunks == 0 and s.k % (s.threads // chunks) == 0,
               f"{name}={features}, {s.threads} threads, k={s.k}: expected threads that copy whole rows, and rows that divide k")
    if not s.qreg:
        expect(s.q % (s.threads // (s.dk // 8)) == 0, f"q={s.q}: expected a multiple of the {s.threads // (s.dk // 8)} rows copied at a time")
    expect(s.shared_bytes <= 163 << 10, f"{s.shared_bytes} bytes of shared memory: expected at most {163 << 10}")
