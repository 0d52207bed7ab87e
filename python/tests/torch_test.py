"""attune.torch.scaled_dot_product_attention against PyTorch's own over a grid of its arguments."""
import itertools
import unittest

import ml_dtypes
import numpy as np
import torch
from test_docs import snippets
from torch.nn.functional import scaled_dot_product_attention as theirs

import attune
from attune.torch import scaled_dot_product_attention as ours

torch.manual_seed(3)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


class SameAsPyTorch(unittest.TestCase):
    def check(self, q, k, v, **options):
        wanted, got = theirs(q, k, v, **options), ours(q, k, v, **options)
        self.assertEqual((got.shape, got.dtype), (wanted.shape, wanted.dtype))
        torch.testing.assert_close(got, wanted, atol=TOLERANCE[q.dtype], rtol=TOLERANCE[q.dtype])

    def test_grid(self):
        masks = {
            "none": lambda *s: None,
            "rows": lambda b, h, n, m: torch.rand(n, m) < 0.7,
            "whole": lambda b, h, n, m: torch.rand(b, h, n, m) < 0.7,
            "padding": lambda b, h, n, m: torch.arange(m) < torch.tensor([m, m // 2][:b]).reshape(-1, 1, 1, 1),
            "nothing": lambda b, h, n, m: torch.zeros(b, 1, 1, m, dtype=torch.bool),
            "added": lambda b, h, n, m: torch.randn(h, n, m),
            "added -inf": lambda b, h, n, m: torch.randn(1, 1, n, m).masked_fill(torch.rand(n, m) < 0.3, float("-inf")),
        }
        grid = itertools.product(TOLERANCE, ((1, 8), (9, 9), (33, 17)), (16, 64), masks, (False, True), (None, 0.2))
        for dtype, (n, m), d, mask, causal, scale in grid:
            if causal and mask != "none":
                continue
            with self.subTest(dtype=dtype, n=n, m=m, d=d, mask=mask, causal=causal, scale=scale):
                q, k, v = torch.randn(2, 4, n, d), torch.randn(2, 4, m, d), torch.randn(2, 4, m, 24)
                attn_mask = masks[mask](2, 4, n, m)
                if attn_mask is not None and attn_mask.dtype is not torch.bool:
                    attn_mask = attn_mask.to(dtype)
                self.check(q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=attn_mask, is_causal=causal, scale=scale)

    def test_ranks_and_broadcasting(self):
        for lead_q, lead_k in (((), ()), ((3,), (3,)), ((2, 3), (2, 3)), ((2, 1, 3), (2, 1, 3)), ((2, 2, 3), (2, 2, 3)), ((2, 3), (1, 3)), ((1, 3), (2, 3))):
            with self.subTest(q=lead_q, k=lead_k):
                self.check(torch.randn(*lead_q, 5, 8), torch.randn(*lead_k, 7, 8), torch.randn(*lead_k, 7, 8))

    def test_grouped_heads(self):
        for kv in (1, 2, 8):
            with self.subTest(kv=kv):
                self.check(torch.randn(2, 8, 6, 16), torch.randn(2, kv, 9, 16), torch.randn(2, kv, 9, 16), enable_gqa=True, is_causal=True)

    def test_views(self):
        """As a model has them: [B, L, H, E] transposed, slices of one projection."""
        x = torch.randn(2, 10, 3, 4, 16)
        self.check(*(x[:, :, i].transpose(1, 2) for i in range(3)), is_causal=True)

    def test_refusals(self):
        q = torch.randn(1, 2, 3, 8)
        with self.assertRaises(NotImplementedError):
            ours(q, q, q, dropout_p=0.1)
        with self.assertRaisesRegex(NotImplementedError, "no backward pass"):
            ours(q.clone().requires_grad_(), q, q)
        with torch.no_grad():
            ours(q.clone().requires_grad_(), q, q)
        with self.assertRaisesRegex(NotImplementedError, "float64"):
            ours(*(q.double(),) * 3)
        for call in (ours, theirs):
            with self.assertRaises(RuntimeError):
                call(q, q, q, attn_mask=torch.ones(3, 3, dtype=torch.bool), is_causal=True)
            with self.assertRaises(RuntimeError):
                call(q, torch.randn(1, 2, 3, 7), q)
            with self.assertRaises(RuntimeError):
                call(q, q.half(), q)


class Tensors(unittest.TestCase):
    def test_bfloat16_of_numpy(self):
        """NumPy has the type from ml_dtypes; neither DLPack nor the buffer protocol can say so."""
        x = np.random.default_rng(1).standard_normal((1, 2, 5, 16)).astype(ml_dtypes.bfloat16)
        try:
            out = attune.attention(x, x, x)
        except attune.Unsupported as error:
            self.assertIn("q, k and v are bf16", str(error))
            return
        self.assertEqual(out.dtype, x.dtype)
        t = torch.from_numpy(x.astype(np.float32))
        torch.testing.assert_close(torch.from_numpy(out.astype(np.float32)), theirs(t, t, t), atol=2e-2, rtol=2e-2)

    def test_attention_takes_tensors_and_returns_them(self):
        q = torch.randn(1, 2, 5, 16)
        out, lse = attune.attention(q, q, q, return_lse=True)
        self.assertEqual((type(out), out.dtype, lse.dtype), (torch.Tensor, torch.float32, torch.float32))
        torch.testing.assert_close(out, theirs(q, q, q), atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse, torch.logsumexp(q @ q.mT / 4, -1), atol=2e-5, rtol=2e-5)
        mine = torch.empty(1, 5, 2, 16)
        attune.attention(q, q, q, out=mine.transpose(1, 2))
        torch.testing.assert_close(mine.transpose(1, 2), out, atol=0, rtol=0)

    def test_refusals(self):
        q = torch.randn(1, 2, 5, 16)
        with self.assertRaisesRegex(ValueError, r"q requires grad.*: expected q\.detach\(\)"):
            attune.attention(q.clone().requires_grad_(), q, q)
        with self.assertRaisesRegex((TypeError, ValueError), "q is "):
            attune.attention(q.to("meta"), q, q)

    def test_snippets_of_the_docs(self):
        found = [s for s in snippets(True) if "transformers" not in s]
        self.assertTrue(found)
        for text in found:
            exec(compile(text, "docs/python.md", "exec"), {})


if __name__ == "__main__":
    unittest.main()
