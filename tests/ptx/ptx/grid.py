"""A launch: arguments to bytes, limits checked, the grid run some blocks at a time."""
import struct
from dataclasses import dataclass

import numpy as np

from .errors import PtxError
from .machine import Machine


@dataclass
class Limits:
    """Of a device. Defaults: compute capability 8.0."""
    threads: int = 1024
    grid: tuple = (2 ** 31 - 1, 65535, 65535)
    static_shared: int = 48 << 10
    shared: int = 163 << 10  # with the function's attribute raised


def pack_parameters(entry, values):
    """Parameters as bytes: each a bytes object of its size, an int, or a float (f32)."""
    if len(values) != len(entry.parameters):
        raise PtxError("launch", f"{entry.name}: {len(values)} arguments: expected {len(entry.parameters)}")
    result = bytearray()
    for p, value in zip(entry.parameters, values):
        result += bytes(-len(result) % p.align)
        if isinstance(value, float):
            value = struct.pack("<f" if p.bytes == 4 else "<d", value)
        elif not isinstance(value, bytes):
            value = (int(value) & ((1 << 8 * p.bytes) - 1)).to_bytes(p.bytes, "little")
        if len(value) != p.bytes:
            raise PtxError("launch", f"{entry.name}: argument {p.name} has {len(value)} bytes: expected {p.bytes}")
        result += value
    return bytes(result)


def launch(entry, memory, grid, block, values, dynamic=0, limits=Limits(), allowed_shared=None, late=True, order=None, lanes=8192):
    """Runs the grid; returns statistics. allowed_shared: what the function's attribute allows, by default the limit
    without one. lanes: about how many threads run at once."""
    threads = block[0] * block[1] * block[2]
    if min(*grid, *block) < 1 or threads > limits.threads or any(g > most for g, most in zip(grid, limits.grid)):
        raise PtxError("launch", f"{entry.name}: grid {grid}, block {block}: expected positive sizes within {limits.grid} and {limits.threads} threads")
    if entry.threads and (threads > np.prod(entry.threads) or (entry.exact_threads and tuple(block) != entry.threads)):
        raise PtxError("launch", f"{entry.name}: block {block}: the kernel was compiled for {entry.threads}")
    shared = entry.shared_bytes + dynamic
    allowed = limits.static_shared if allowed_shared is None else allowed_shared
    if shared > min(max(allowed, limits.static_shared), limits.shared):
        raise PtxError("launch", f"{entry.name}: {shared} bytes of shared memory: allowed are {allowed}, and {limits.shared} on the device")
    if dynamic and entry.dynamic is None and entry.shared_bytes:
        raise PtxError("launch", f"{entry.name}: {dynamic} bytes of dynamic shared memory, but the kernel has none")
    parameters = pack_parameters(entry, values)
    indices = np.stack(np.unravel_index(np.arange(np.prod(grid)), grid[::-1])[::-1], 1)
    at_once = max(1, lanes // threads)
    memory.begin_launch()
    statistics = {}
    for first in range(0, len(indices), at_once):
        machine = Machine(entry, memory, parameters, grid, block, indices[first:first + at_once], dynamic, first * threads, late, order)
        try:
            machine.run()
        except PtxError as error:
            blocks = indices[first:first + at_once].tolist()
            error.text += f" (blocks {blocks[0]} to {blocks[-1]} of grid {list(grid)}, {threads} threads each)"
            raise
        for name, n in machine.statistics.items():
            statistics[name] = statistics.get(name, 0) + n
    return statistics
