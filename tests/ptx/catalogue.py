"""The tensor core kernels of the catalogue: their shapes and their PTX."""
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "generators/mlir/mma"))
from shape import parse, tiles  # noqa: E402

ARCHITECTURES = ["sm_80", "sm_90"]  # whose machine code has figures


def kernels():
    """[(name, shape)] of all tiles of all kernels."""
    entries = json.loads((ROOT / "generators/catalogue/mma.json").read_text())
    return [(f"{e['name']}_{size}", parse(parameters)) for e in entries for size, parameters in tiles(e)]


def ptx(folder, name):
    return (Path(folder) / f"{name}.ptx").read_text()
