"""One contestant of `attune bench --peers` in a process of its own: reads commands, a JSON object a line, from standard
input and answers each with one on standard output. tools/lib/remote.cpp is the other side.

    {"op": "hello"}                             -> {"version": …}
    {"op": "prepare", "problem": {…}, "arrays": {"q": PATH, …}, "threads": 2, "copies": 1}
                                                -> {"ok": true, "how": …, "peak": …, "growth": …} or {"cannot": REASON}
        how: which of several ways to call it was the fastest; peak: resident bytes at most while it was called; growth: of
        these, beyond what the process held before the first call
    {"op": "check", "output": PATH}             -> {"ok": true}           O as dense f32 [B, Hq, N, dv]
    {"op": "run", "calls": 5, "warm": 2}        -> {"seconds": …}         of the calls together, the warm ones left out
    {"op": "allocations", "calls": 5}           -> {"count": …}           of malloc and its relatives, all threads
    {"op": "quit"}

A failure that is not the process's end is {"error": TEXT}. What a library prints goes to standard error.
"""
import ctypes
import json
import mmap
import os
import sys
import time

import numpy as np

DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(np.uint16), "f16": np.dtype(np.float16)}


class Cannot(Exception):
    """The contestant has no way to compute this problem; the text says why."""


class Problem:
    """The attributes are those of tools/lib/remote.cpp's problem_json: dtype (of Q and O), kv_dtype, B, Hq, Hkv, N, M, dk, dv, scale, default_scale,
    softcap, causal, offset (a list, one a batch), window (left, right; -1 unbounded), kv_len (a list or None), sink."""

    def __init__(self, fields, arrays):
        self.__dict__.update(fields)
        self.group = self.Hq // self.Hkv
        self.paths = arrays
        self._visible = None

    def load(self, name, *shape):
        return np.fromfile(self.paths[name], dtype=DTYPES[self.kv_dtype if name in "kv" else self.dtype]).reshape(shape)

    def mask(self):  # bool [B, 1, 1, M] as the case syntax defines it
        return np.fromfile(self.paths["mask"], dtype=np.uint8).reshape(self.B, 1, 1, self.M) != 0

    def bias(self):  # f32 [1, Hq, N, M]
        return np.fromfile(self.paths["bias"], dtype=np.float32).reshape(1, self.Hq, self.N, self.M)

    @property
    def has_mask(self):
        return "mask" in self.paths

    @property
    def has_bias(self):
        return "bias" in self.paths

    @property
    def has_alibi(self):
        return "slopes" in self.paths

    @property
    def windowed(self):
        return self.window[0] >= 0 or self.window[1] >= 0

    @property
    def plainly_causal(self):
        """Causal from the top left corner, and nothing else that would need a mask: what every library has a flag for."""
        return (self.causal and not self.windowed and not self.kv_len and not any(self.offset) and not self.has_mask
                and not self.has_bias and not self.has_alibi)

    def visible(self):
        """Causal, window and kv_len as a bool array [B or 1, 1, N, M], or None where everything is visible."""
        if not self.causal and not self.windowed and not self.kv_len:
            return None
        if self._visible is None:
            rows, keys = np.arange(self.N)[:, None], np.arange(self.M)[None, :]
            batches = self.B if self.kv_len or len(set(self.offset)) > 1 else 1
            seen = np.ones((batches, 1, self.N, self.M), bool)
            for b in range(batches):
                position = rows + self.offset[b]
                if self.causal:
                    seen[b, 0] &= keys <= position
                if self.window[0] >= 0:
                    seen[b, 0] &= keys >= position - self.window[0]
                if self.window[1] >= 0:
                    seen[b, 0] &= keys <= position + self.window[1]
                if self.kv_len:
                    seen[b, 0] &= keys < self.kv_len[b]
            self._visible = seen
        return self._visible

    def bool_mask(self):
        """All that hides keys, as one array broadcastable to [B, Hq, N, M], or None."""
        seen = self.visible()
        if not self.has_mask:
            return seen
        return self.mask() if seen is None else self.mask() & seen

    def added(self):
        """ALiBi and bias together, f32 broadcastable to [B, Hq, N, M], or None."""
        total = self.bias() if self.has_bias else None
        if self.has_alibi:
            slopes = np.fromfile(self.paths["slopes"], dtype=np.float32).reshape(1, self.Hq, 1, 1)
            offset = np.asarray(self.offset).reshape(-1, 1, 1, 1)
            position = np.arange(self.N).reshape(1, 1, -1, 1) + (offset if len(set(self.offset)) > 1 else offset[:1])
            alibi = -slopes * np.abs(position - np.arange(self.M)).astype(np.float32)
            total = alibi if total is None else total + alibi
        return total

    def attention_mask(self):
        """What the mask argument of most libraries takes: bool (true: attend), or f32 to be added, or None."""
        seen, added = self.bool_mask(), self.added()
        if added is None:
            return seen
        return added if seen is None else np.where(seen, added, np.float32(-np.inf)).astype(np.float32)


def bf16_to_f32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def huge(array):
    """A copy in memory that asks for huge pages, a cache line off their start: all contestants' arrays lie like this, as reading
    them is what decode is (Buffer in tools/lib/inputs.h)."""
    page = 2 << 20
    pages = mmap.mmap(-1, (array.nbytes + 64 + 2 * page - 1) // page * page)
    pages.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % page + 64
    out = np.frombuffer(pages, dtype=array.dtype, count=array.size, offset=start).reshape(array.shape)
    out[...] = array
    return out


class Contestant:
    """A library's attention. `version` says which; `prepare` gives the ways to call it, of which the fastest is kept."""

    version = ""

    def prepare(self, problem, copies, threads):
        """Returns {label: [a function without arguments for each copy of the arrays]}; such a function returns something that
        output() understands. Raises Cannot."""
        raise NotImplementedError

    def output(self, result):
        """f32 [B, Hq, N, dv], or what can be reshaped to it."""
        return np.asarray(result)

    def release(self):
        """Before the next problem."""


def status(name):
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return 0


class Server:
    def __init__(self, contestant):
        self.contestant = contestant
        self.ways = []
        self.next = 0
        try:
            counter = ctypes.CDLL(None)
            self.begin, self.end = counter.attune_count_begin, counter.attune_count_end
            self.end.restype = ctypes.c_int64
        except AttributeError:  # not preloaded
            self.begin = self.end = None

    def call(self, calls):
        ways, count = self.ways, len(self.ways)
        result = None
        for index in range(self.next, self.next + calls):
            result = ways[index % count]()
        self.next = (self.next + calls) % count
        return result

    def hello(self, _):
        return {"version": self.contestant.version}

    def prepare(self, m):
        self.ways = []
        self.contestant.release()
        try:
            self.problem = Problem(m["problem"], m["arrays"])
            candidates = self.contestant.prepare(self.problem, m["copies"], m["threads"])
        except Cannot as reason:
            return {"cannot": str(reason)}
        best, failures = None, []
        for label, ways in candidates.items():
            before = status("VmRSS")
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # the peak starts again
            try:
                times = []
                limit = time.perf_counter() + 0.3
                while len(times) < 3 or (time.perf_counter() < limit and len(times) < 50):
                    begin = time.perf_counter()
                    ways[len(times) % len(ways)]()
                    times.append(time.perf_counter() - begin)
                    if times[-1] > 1 and len(candidates) == 1:
                        break
            except Exception as error:  # a library's own refusal
                failures.append(f"{label}: {first_line(error)}" if label else first_line(error))
                continue
            if best is None or min(times) < best:
                peak = status("VmHWM")
                best, self.ways = min(times), ways
                answer = {"ok": True, "how": label, "peak": peak, "growth": max(peak - before, 0)}
        return {"cannot": "; ".join(failures)} if best is None else answer

    def check(self, m):
        self.next = 0
        p = self.problem
        result = self.contestant.output(self.call(1))
        out = np.ascontiguousarray(result, dtype=np.float32).reshape(p.B, p.Hq, p.N, p.dv)
        with open(m["output"], "r+b") as file:
            file.write(out.tobytes())
        return {"ok": True}

    def run(self, m):
        # Two warm calls at least, and two milliseconds of them: the process has just been stopped.
        begin = time.perf_counter()
        done = 0
        while done < m.get("warm", 2) or (time.perf_counter() - begin < 2e-3 and done < 1000):
            self.call(1)
            done += 1
        begin = time.perf_counter()
        self.call(m["calls"])
        return {"seconds": time.perf_counter() - begin}

    def allocations(self, m):
        if not self.begin:
            return {"count": None}
        self.begin()
        self.call(m["calls"])
        return {"count": self.end()}

    def serve(self):
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        for line in sys.stdin:
            message = json.loads(line)
            if message["op"] == "quit":
                break
            try:
                answer = getattr(self, message["op"])(message)
            except Exception as error:
                import traceback

                traceback.print_exc()
                answer = {"error": first_line(error)}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def first_line(error):
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def main(contestants):
    """contestants: {name: class}. The name is the program's argument."""
    if len(sys.argv) != 2 or sys.argv[1] not in contestants:
        sys.exit(f"{sys.argv[0]}: expected one argument of {', '.join(contestants)}")
    Server(contestants[sys.argv[1]]()).serve()
