#!/usr/bin/env python3
"""A peer for tests, whose name says how it behaves: good, slow, wrong, refuses, crashes (in a run), dies (at the start), hangs,
babbles (answers no JSON), complains (answers an error). It speaks bench/peers/peer.py's protocol with nothing but Python."""
import array
import json
import math
import os
import sys
import time

MODE = os.path.basename(sys.argv[0])


def attention(p, arrays):
    q, k, v = (array.array("f", open(arrays[n], "rb").read()) for n in "qkv")
    out = array.array("f")
    for b in range(p["B"]):
        for h in range(p["Hq"]):
            kv = b * p["Hkv"] + h // (p["Hq"] // p["Hkv"])
            for i in range(p["N"]):
                row = ((b * p["Hq"] + h) * p["N"] + i) * p["dk"]
                keys = [j for j in range(p["M"]) if not p["causal"] or j <= i + p["offset"][b]]
                s = [p["scale"] * sum(q[row + d] * k[(kv * p["M"] + j) * p["dk"] + d] for d in range(p["dk"])) for j in keys]
                top = max(s)
                weights = [math.exp(x - top) for x in s]
                total = sum(weights)
                for d in range(p["dv"]):
                    out.append(sum(w * v[(kv * p["M"] + j) * p["dv"] + d] for w, j in zip(weights, keys)) / total)
    return out


def answer(message, state):
    op = message["op"]
    if op == "hello":
        if MODE == "dies":
            print("no such library", file=sys.stderr, flush=True)
            os._exit(3)
        return {"version": "1.0 fake"}
    if op == "prepare":
        if MODE == "refuses":
            return {"cannot": "not on a Monday"}
        state["result"] = attention(message["problem"], message["arrays"])
        return {"ok": True, "how": "by hand", "peak": 9 << 20, "growth": 1 << 20}
    if op == "check":
        result = state["result"]
        if MODE == "wrong":
            result[len(result) // 2] += 0.5
        with open(message["output"], "r+b") as file:
            file.write(result.tobytes())
        return {"ok": True}
    if op == "allocations":
        return {"count": 7 * message["calls"]}
    if op == "run":
        if MODE == "crashes":
            os.kill(os.getpid(), 11)
        if MODE == "hangs":
            time.sleep(1000)
        if MODE == "complains":
            return {"error": "out of cheese"}
        call = 0.3 if MODE == "slow" else 0.002
        time.sleep(0.01)
        return {"seconds": call * message["calls"]}
    return {"error": f"op {op}"}


def main():
    if marker := os.environ.get("FAKE_PEER_PIDS"):
        with open(marker, "a") as file:
            file.write(f"{os.getpid()}\n")
    state = {}
    for line in sys.stdin:
        message = json.loads(line)
        if MODE == "babbles" and message["op"] == "run":
            print("Loading weights...", flush=True)
        else:
            print(json.dumps(answer(message, state)), flush=True)


main()
