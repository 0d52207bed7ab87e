"""The tensor core kernels of the catalogue: their shapes and their PTX."""
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "generators/mlir/mma"))
from shape import Shape  # noqa: E402

ARCHITECTURES = ["sm_80", "sm_90"]


def shape_of(entry):
    knobs = {k: v for k, v in entry["params"].items() if k != "q"}
    return Shape(type=entry["dtypes"]["q"], dk=entry["dk"], dv=entry["dv"], **knobs)


def kernels():
    """[(name, shape)]"""
    entries = json.loads((ROOT / "generators/catalogue/mma.json").read_text())
    return [(e["name"], shape_of(e)) for e in entries]


def ptx(folder, name, architecture):
    return (Path(folder) / f"{name}.{architecture}.ptx").read_text()
