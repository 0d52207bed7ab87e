"""Attention weights as heat maps, from the .safetensors file of examples/sentence_encoder --dump-weights."""
import json
import pathlib
import re
import struct

import numpy as np
from matplotlib.colors import PowerNorm

import plots
from results import ResultError

EXPECTED = "expected what examples/sentence_encoder --dump-weights writes"


def read(path):
    """{name: array} of a .safetensors file of F32 and I64."""
    try:
        data = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ResultError(f"--weights {path}: {error.strerror}") from error
    try:
        (size,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8:8 + size])
        tensors, arrays = {}, memoryview(data)[8 + size:]  # no copies: eight sentences are 135 MB
        for name, t in header.items():
            if name != "__metadata__":
                begin, end = t["data_offsets"]
                tensors[name] = np.frombuffer(arrays[begin:end], {"F32": "<f4", "I64": "<i8"}[t["dtype"]]).reshape(t["shape"])
        return tensors
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultError(f"--weights {path}: is no .safetensors file of F32 and I64 ({error}); {EXPECTED}") from error


def layers(path, sentence):
    """[(layer, weights [H, n, n])] of one sentence, without its padding."""
    tensors = read(path)
    names = sorted((int(found[1]), name) for name in tensors if (found := re.fullmatch(r"layer(\d+)\.weights", name)))
    lengths = tensors.get("lengths")
    if not names or lengths is None or lengths.ndim != 1:
        raise ResultError(f"--weights {path}: has no layer0.weights and lengths; {EXPECTED}")
    if not 0 <= sentence < len(lengths):
        raise ResultError(f"--sentence {sentence}: {path} has {len(lengths)} sentences; expected 0 to {len(lengths) - 1}")
    n, found = int(lengths[sentence]), []
    for layer, name in names:
        shape = tensors[name].shape
        if len(shape) != 4 or shape[0] != len(lengths) or not 1 <= n <= min(shape[2:]):
            raise ResultError(f"--weights {path}: {name} is of shape {list(shape)}; expected [{len(lengths)}, heads, {n} or more, {n} or more]")
        p = tensors[name][sentence, :, :n, :n]
        sums = p.sum(axis=-1)
        if not np.allclose(sums, 1, atol=1e-3):
            raise ResultError(f"--weights {path}: a row of {name} adds up to {sums.flat[np.argmax(abs(sums - 1))]:.4g}; expected weights, which add up to 1")
        found.append((layer, p))
    return found


def heat_map(p):
    """A panel a head; darker is more, on a scale of square roots, since most weights are small."""
    columns = min(4, len(p))
    rows = -(-len(p) // columns)
    figure, panels = plots.plt.subplots(rows, columns, figsize=(1.25 * columns, 1.4 * rows), squeeze=False, layout="constrained")
    for head, axes in enumerate(panels.flat):
        axes.set_xticks([])
        axes.set_yticks([])
        if head >= len(p):
            axes.set_axis_off()
            continue
        axes.imshow(p[head], cmap="magma_r", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
        axes.set_title(f"head {head}", fontsize=8, pad=3)
    return plots.to_svg(figure)


def pictures(path, sentence):
    return [{"caption": f"layer {layer}, {p.shape[-1]} tokens", "svg": heat_map(p)} for layer, p in layers(path, sentence)]
