"""attune.MultiHeadAttention over NumPy arrays, against float64."""
import json
import os
import tempfile
import unittest

import numpy as np
import reference

import attune

RNG = np.random.default_rng(11)


def normal(*shape):
    return (RNG.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def weights(d_model=24, d_kv=24, d_out=24, heads=4, kv_heads=4, d=6, biases=True):
    w = {"wq": normal(d_model, heads * d), "wk": normal(d_kv, kv_heads * d), "wv": normal(d_kv, kv_heads * d), "wo": normal(heads * d, d_out)}
    if biases:
        w.update(bq=normal(heads * d), bk=normal(kv_heads * d), bv=normal(kv_heads * d), bo=normal(d_out))
    return w


class Mha(unittest.TestCase):
    def test_self_and_cross_attention(self):
        for name, sizes, options in (
            ("self", {}, {"causal": True}),
            ("cross", {"d_kv": 16, "d_out": 10}, {"kv_len": [7, 3]}),
            ("grouped", {"kv_heads": 2, "biases": False}, {"window": (2, 2)}),
        ):
            with self.subTest(name):
                w = weights(**sizes)
                x = normal(2, 5, 24)
                y = normal(2, 7, 16) if name == "cross" else None
                module = attune.MultiHeadAttention(**w, num_heads=4, num_kv_heads=sizes.get("kv_heads"))
                wanted = reference.mha(x, x if y is None else y, w, 4, sizes.get("kv_heads", 4), **options)
                np.testing.assert_allclose(module(x, y, **options), wanted, atol=2e-5)
                turned = {key: np.ascontiguousarray(value.T) for key, value in w.items()}
                module = attune.MultiHeadAttention(**turned, num_heads=4, num_kv_heads=sizes.get("kv_heads"), layout="out_in")
                np.testing.assert_allclose(module(x, y, **options), wanted, atol=2e-5)
                self.assertEqual(module.d_out, wanted.shape[-1])

    def test_no_batch_and_in_place(self):
        w = weights()
        module = attune.MultiHeadAttention(**w, num_heads=4)
        x = normal(5, 24)
        wanted = reference.mha(x[None], x[None], w, 4, 4)[0]
        np.testing.assert_allclose(module(x), wanted, atol=2e-5)
        self.assertIs(module(x, out=x), x)
        np.testing.assert_allclose(x, wanted, atol=2e-5)

    def test_weights_may_go(self):
        w = weights()
        module = attune.MultiHeadAttention(**w, num_heads=4)
        kept = {key: value.copy() for key, value in w.items()}
        for value in w.values():
            value[:] = np.nan
        x = normal(1, 3, 24)
        np.testing.assert_allclose(module(x), reference.mha(x, x, kept, 4, 4), atol=2e-5)

    def test_file(self):
        w = weights()
        header, blob = {}, b""
        for key, value in w.items():
            header["layer." + key] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [len(blob), len(blob) + value.nbytes]}
            blob += value.tobytes()
        text = json.dumps(header).encode()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "weights.safetensors")
            with open(path, "wb") as file:
                file.write(len(text).to_bytes(8, "little") + text + blob)
            names = {key: "layer." + key for key in w}
            module = attune.MultiHeadAttention.load(path, names, d_model=24, num_heads=4)
            x = normal(2, 3, 24)
            np.testing.assert_allclose(module(x), reference.mha(x, x, w, 4, 4), atol=2e-5)
            with self.assertRaisesRegex(attune.FileError, "'layer.nothing' is missing"):
                attune.MultiHeadAttention.load(path, {**names, "wq": "layer.nothing"}, d_model=24, num_heads=4)
        with self.assertRaisesRegex(OSError, "nowhere"):
            attune.MultiHeadAttention.load("nowhere.safetensors", names, d_model=24, num_heads=4)

    def test_wrong_arguments(self):
        w = weights()
        with self.assertRaisesRegex(ValueError, "wk has .* elements: expected 24 x 24"):
            attune.MultiHeadAttention(**{**w, "wk": normal(24, 20)}, num_heads=4)
        with self.assertRaisesRegex(ValueError, "wq is not contiguous"):
            attune.MultiHeadAttention(**{**w, "wq": normal(24, 48)[:, ::2]}, num_heads=4)
        with self.assertRaisesRegex(TypeError, "wq.dtype is float64: expected float32"):
            attune.MultiHeadAttention(**{**w, "wq": w["wq"].astype(float)}, num_heads=4)
        with self.assertRaisesRegex(ValueError, "layout is 'rows': expected"):
            attune.MultiHeadAttention(**w, num_heads=4, layout="rows")
        module = attune.MultiHeadAttention(**w, num_heads=4)
        with self.assertRaisesRegex(ValueError, r"stride\[3\] is 2: expected 1"):
            module(normal(1, 3, 48)[..., ::2])
        with self.assertRaisesRegex(ValueError, "expected d_model = 24"):
            module(normal(1, 3, 20))
        with self.assertRaisesRegex(TypeError, "x_q is of 16 bits: expected float32"):
            module(normal(1, 3, 24).astype(np.float16))
        with self.assertRaisesRegex(ValueError, r"out.shape is \(1, 3, 20\): expected \(1, 3, 24\)"):
            module(normal(1, 3, 24), out=normal(1, 3, 20))


if __name__ == "__main__":
    unittest.main()
