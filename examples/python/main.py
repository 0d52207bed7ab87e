#!/usr/bin/env python3
"""attune from Python: grouped heads, a causal mask with past keys, and the same through numpy.

Needs the package (pip install . in the checkout) and NumPy. Checks its own output.
"""
import numpy as np

import attune

rng = np.random.default_rng(1)
past, rows, heads, kv_heads, d = 100, 28, 8, 2, 64
q = rng.standard_normal((1, heads, rows, d), np.float32)
k = rng.standard_normal((1, kv_heads, past + rows, d), np.float32)
v = rng.standard_normal((1, kv_heads, past + rows, d), np.float32)

out, lse = attune.attention(q, k, v, causal=True, offset=past, return_lse=True)

scores = q.astype(np.float64) @ np.repeat(k, heads // kv_heads, 1).swapaxes(2, 3) / np.sqrt(d)
scores[..., np.arange(past + rows) > past + np.arange(rows)[:, None]] = -np.inf
weights = np.exp(scores - scores.max(3, keepdims=True))
wanted = weights / weights.sum(3, keepdims=True) @ np.repeat(v, heads // kv_heads, 1)
error = np.abs(out - wanted).max()
print(f"{attune.explain(q, k, v, causal=True, offset=past).kernel} on {attune.isa()}: largest error {error:.1e}")
assert error < 1e-5
