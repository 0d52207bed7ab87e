#!/usr/bin/env python3
"""The other half of the test driver (state.h, api_*.cpp): runs launches on the PTX interpreter.

  interpreter.py MEMORY_FD BASE

Requests come on standard input, one JSON object a line (followed by `bytes` raw bytes, if it says so), answers go out on
standard output, one a line: {"ok": ...} or {"error": text, "kind": word}. MEMORY_FD is the file that holds device
memory, whose first byte has the device address BASE.
"""
import json
import mmap
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ptx import GlobalMemory, Limits, PtxError, launch, parse  # noqa: E402


class Interpreter:
    def __init__(self, fd, base):
        arena = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
        self.memory = GlobalMemory(arena, base, os.environ.get("ATTUNE_PTX_SAME_WRITES") == "1")
        self.modules, self.functions = {}, []
        # Where a launch may go wrong, the order of warps and the moment at which copies land can be chosen.
        seed = os.environ.get("ATTUNE_PTX_ORDER")
        self.order = np.random.default_rng(int(seed)) if seed else None
        self.late = os.environ.get("ATTUNE_PTX_EARLY_COPIES") is None
        self.trace = os.environ.get("ATTUNE_PTX_TRACE")

    def allocate(self, address, bytes):
        self.memory.allocate(address, bytes)

    def free(self, address):
        self.memory.free(address)

    def written(self, ranges):
        for address, size in ranges:
            self.memory.mark_written(address, size)

    def module(self, id, text):
        module = parse(text.decode().rstrip("\0"))
        self.modules[id] = module
        return {"target": module.target}

    def unload(self, id):
        del self.modules[id]

    def function(self, module, name):
        entries = self.modules[module].entries
        if name not in entries:
            return None
        entry = entries[name]
        self.functions.append(entry)
        return {"id": len(self.functions) - 1, "parameters": [p.bytes for p in entry.parameters], "shared": entry.shared_bytes,
                "threads": int(np.prod(entry.threads)) if entry.threads else Limits().threads}

    def launch(self, function, grid, block, dynamic, allowed, values):
        entry = self.functions[function]
        statistics = launch(entry, self.memory, tuple(grid), tuple(block), [bytes.fromhex(v) for v in values], dynamic,
                            allowed_shared=allowed, late=self.late, order=self.order)
        if self.trace:
            with open(self.trace, "a") as file:
                file.write(json.dumps({"function": entry.name, "grid": grid, "block": block, "shared": entry.shared_bytes + dynamic, **statistics}) + "\n")
        return statistics

    def serve(self):
        while line := sys.stdin.buffer.readline():
            request = json.loads(line)
            if "bytes_follow" in request:
                request["text"] = sys.stdin.buffer.read(request.pop("bytes_follow"))
            try:
                answer = {"ok": getattr(self, request.pop("do"))(**request)}
            except PtxError as error:
                answer = {"error": str(error), "kind": error.kind}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    Interpreter(int(sys.argv[1]), int(sys.argv[2])).serve()
