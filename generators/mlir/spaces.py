"""The tuning spaces of MLIR's strategies: knobs, their values, and what must hold between them. Printed by
`attune_mlir_gen.py --space` in the form of attune-halide-gen's (generators/halide/space.h), searched by `attune tune`.

Register tiles take the options that the schedules declare (schedules/flash.mlir, rowblock.mlir), each one number for all blocks of rows (attune_mlir_gen.py takes the largest divisor)."""
import itertools
import json
import re
from pathlib import Path

SETTING = ["dk", "dv", "rows", "keys", "lanes", "registers", "l1", "l2"]
# Query rows of a kernel's blocks: the last is the tile, the others take what is left at the end of a head.
BLOCKS = ["4", "8", "12", "16", "24", "32", "48", "4+8+12", "4+8+12+16", "4+8+12+16+24", "4+8+16+32", "4+8+12+24+48"]


def options(name):
    """Of a knob in the schedule, as the transform dialect's tune.knob has them."""
    text = (Path(__file__).resolve().parent / "schedules" / "flash.mlir").read_text()
    return [int(n) for n in re.search(rf"\${name} from options = \[([0-9, ]+)\]", text).group(1).split(",")]


KNOBS = [  # name, letter in the kernel's name, values, the usual one; fold_rows: 4, 8 and 12 are within 1 %
    ("blocks", "b", BLOCKS, "4+8+12+16+24"),
    ("k", "k", [128, 192, 256, 384, 512], 256),
    ("panel", "p", [8, 16, 32, 48, 64], 32),
    ("score_rows", "s", options("score_rows"), 12),
    ("matmul_rows", "m", options("matmul_rows"), 6),
    ("matmul_cols", "c", options("matmul_cols"), 64),
]


class SettingError(Exception):
    pass


def tile(x):
    return int(x["blocks"].split("+")[-1])


def fit(accumulators, s):
    """As Space::register_tiles() has it for Halide."""
    return 8 <= accumulators <= s["registers"] * 3 // 4


CONSTRAINTS = [
    ("rows of a query tile are whole register tiles", lambda x, s: all(tile(x) % x[n] == 0 for n in ("score_rows", "matmul_rows"))),
    ("no more rows than the problem has", lambda x, s: tile(x) <= max(4, s["rows"])),
    ("a panel is whole vectors", lambda x, s: x["panel"] % s["lanes"] == 0),
    # Blocks are processed in panels by vectors; other widths of P V are legalised badly (18 GFLOP/s with 96 columns).
    ("features of V are whole register tiles of whole vectors", lambda x, s: s["dv"] % x["matmul_cols"] == 0 and x["matmul_cols"] % s["lanes"] == 0),
    ("accumulators of Q K^T: 8 to 3/4 of the registers", lambda x, s: fit(x["score_rows"] * x["panel"] // s["lanes"], s)),
    ("accumulators of P V: 8 to 3/4 of the registers", lambda x, s: fit(x["matmul_rows"] * x["matmul_cols"] // s["lanes"], s)),
    ("a panel of K fits into L1", lambda x, s: 4 * s["dk"] * x["panel"] <= s["l1"]),
]
# Of each strategy: knobs that it has not, and what else must hold.
STRATEGIES = {
    "flash": ({}, [
        ("a key block is whole panels, two at least", lambda x, s: x["k"] % x["panel"] == 0 and x["k"] > x["panel"]),
        ("no longer than the keys are", lambda x, s: x["k"] <= max(s["keys"], 192)),
        ("scores of a block fit into half of L2", lambda x, s: 4 * tile(x) * x["k"] <= s["l2"] // 2),
    ]),
    "rowblock": ({"k": "panel"}, [("the strip of scores fits into L2", lambda x, s: 4 * tile(x) * (s["keys"] + x["panel"]) <= s["l2"])]),
}


def pruned(strategy, setting):
    same, more = STRATEGIES[strategy]
    knobs = [knob for knob in KNOBS if knob[0] not in same]
    constraints = CONSTRAINTS + more
    names = [name for name, _, _, _ in knobs]
    removed, points = [0] * len(constraints), []
    for indices in itertools.product(*(range(len(values)) for _, _, values, _ in knobs)):
        x = {name: knob[2][index] for name, knob, index in zip(names, knobs, indices)}
        x |= {name: x[other] for name, other in same.items()}
        broken = next((i for i, (_, holds) in enumerate(constraints) if not holds(x, setting)), None)
        if broken is None:
            points.append(indices)
        else:
            removed[broken] += 1
    return {
        "strategy": f"mlir_{strategy}", "backend": "mlir", "phases": {"pack": "mlir_pack", "main": f"mlir_{strategy}"},
        "knobs": [{"name": n, "letter": letter, "values": values, "usual": usual} for n, letter, values, usual in knobs],
        "same": same, "fixed": {"fold_rows": 12}, "exact": False, "quadratic": False, "total": len(points) + sum(removed),
        "removed": [[text, count] for (text, _), count in zip(constraints, removed)], "points": points,
    }


def as_json(arguments):
    setting = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in SETTING or not value.isdigit() or int(value) < 1:
            raise SettingError(f"--space: '{argument}': expected one of {', '.join(SETTING)}, as NAME=NUMBER")
        setting[name] = int(value)
    for name in SETTING:
        if name not in setting:
            raise SettingError(f"--space: {name}=NUMBER is missing")
    return json.dumps([pruned(strategy, setting) for strategy in STRATEGIES])
