"""The definition, in float64."""
import numpy as np


def attention(q, k, v, *, causal=False, offset=0, window=None, mask=None, bias=None, scale=None, softcap=None, alibi_slopes=None,
              sinks=None, kv_len=None):
    """(out, lse) of q [B, Hq, N, dk], k [B, Hkv, M, dk], v [B, Hkv, M, dv]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, Hq, N, dk = q.shape
    M = k.shape[2]
    k, v = (np.repeat(x, Hq // x.shape[1], 1) for x in (k, v))
    s = q @ k.swapaxes(2, 3) * (1 / np.sqrt(dk) if scale is None else scale)
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
    position = np.arange(N)[:, None] + np.asarray(offset).reshape(-1, 1, 1, 1)  # [B or 1, 1, N, 1]
    distance = np.arange(M) - position
    if alibi_slopes is not None:
        s = s - np.asarray(alibi_slopes, np.float64)[:, None, None] * np.abs(distance)
    if bias is not None:
        s = s + bias
    visible = np.broadcast_to(True, s.shape)
    if causal:
        visible = visible & (distance <= 0)
    if window is not None:
        left, right = (-1 if edge is None else edge for edge in window)
        visible = visible & ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))
    if kv_len is not None:
        visible = visible & (np.arange(M) < np.asarray(kv_len).reshape(-1, 1, 1, 1))
    if mask is not None:
        visible = visible & np.asarray(mask, bool)
    s = np.where(visible, s, -np.inf)
    if sinks is not None:
        s = np.concatenate([s, np.broadcast_to(np.asarray(sinks, np.float64)[:, None, None], (B, Hq, N, 1))], 3)
    top = s.max(3, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = e.sum(3, keepdims=True)
    weights = np.divide(e, total, out=np.zeros_like(e), where=total > 0)[..., :M]
    with np.errstate(divide="ignore"):
        lse = np.where(np.isfinite(top), top, 0) + np.log(total)
    return weights @ v, lse[..., 0]


def mha(x_q, x_kv, w, heads, kv_heads, **options):
    """w: wq, wk, wv, wo [in, out] and perhaps bq, bk, bv, bo, in a dictionary."""
    def project(x, name):
        return np.asarray(x, np.float64) @ w["w" + name] + w.get("b" + name, 0)

    def split(x, n):
        return x.reshape(*x.shape[:2], n, -1).swapaxes(1, 2)

    out, _ = attention(split(project(x_q, "q"), heads), split(project(x_kv, "k"), kv_heads), split(project(x_kv, "v"), kv_heads), **options)
    return project(out.swapaxes(1, 2).reshape(*x_q.shape[:2], -1), "o")
