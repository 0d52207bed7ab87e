"""PyTorch's scaled_dot_product_attention by attune: the same signature and semantics, for inference on the CPU."""

from __future__ import annotations

from typing import Optional

import torch

from . import Unsupported, _core, attention

__all__ = ["scaled_dot_product_attention"]

_SIXTEEN = {torch.float16: "f16", torch.bfloat16: "bf16"}


def scaled_dot_product_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                                 attn_mask: Optional[torch.Tensor] = None, dropout_p: float = 0.0, is_causal: bool = False,
                                 scale: Optional[float] = None, enable_gqa: bool = False) -> torch.Tensor:
    """As torch.nn.functional.scaled_dot_product_attention.

    query [..., Hq, L, E], key [..., H, S, E], value [..., H, S, Ev] -> [..., Hq, L, Ev]; the leading dimensions are
    broadcast. attn_mask, bool (true: attend) or added to the scores, is broadcast to [..., Hq, L, S]. is_causal: row i
    sees the keys 0 to i. float32; float16 and bfloat16 by a kernel where this build has one, otherwise through float32.

    Raises Unsupported (a NotImplementedError) for dropout, for tensors that want a gradient, and for float64; RuntimeError
    as PyTorch does for shapes that do not fit.
    """
    if dropout_p:
        raise Unsupported(f"dropout_p is {dropout_p}: expected 0, since this is for inference")
    if attn_mask is not None and is_causal:
        raise RuntimeError("attn_mask is given and is_causal is True: expected one of them")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, key, value, attn_mask)):
        raise Unsupported("an argument requires grad, and attune has no backward pass: expected torch.no_grad() or .detach()")
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}: expected one dtype")
    if query.dtype is not torch.float32 and query.dtype not in _SIXTEEN:
        raise Unsupported(f"query.dtype is {query.dtype}: expected float32, float16 or bfloat16")
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError(f"query, key and value have {query.dim()}, {key.dim()} and {value.dim()} dimensions: expected 2 or more")
    query, key, value = query.detach(), key.detach(), value.detach()

    rank = max(query.dim(), key.dim(), value.dim(), 3)
    q, k, v = (x.reshape((1,) * (rank - x.dim()) + tuple(x.shape)) for x in (query, key, value))
    if enable_gqa:
        if q.shape[-3] % k.shape[-3] or q.shape[-3] % v.shape[-3]:
            raise RuntimeError(f"enable_gqa with {q.shape[-3]} query heads, {k.shape[-3]} key heads and {v.shape[-3]} value "
                               "heads: expected divisors of the query heads")
        if k.shape[-3] != v.shape[-3]:  # as PyTorch does it: each on its own
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
        heads = q.shape[-3], k.shape[-3]
    else:
        *batch, hq = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
        heads = hq, hq
    batch = tuple(batch)

    def four(x: torch.Tensor, h: int) -> torch.Tensor:
        """[B, h, rows, features]; strides of 0 where it is broadcast."""
        x = x.expand(*batch, h, *x.shape[-2:])
        return x if len(batch) == 1 else x.reshape(-1, *x.shape[-3:])

    q, k, v = four(q, heads[0]), four(k, heads[1]), four(v, heads[1])
    mask = bias = None
    if attn_mask is not None:
        m = attn_mask.detach().expand(*batch, heads[0], q.shape[2], k.shape[2])
        m = m if len(batch) == 1 else m.reshape(-1, *m.shape[-3:])
        if m.dtype is torch.bool:
            mask = m
        else:
            bias = m.float()
    if query.dtype in _SIXTEEN and _SIXTEEN[query.dtype] not in _core.dtypes():
        q, k, v = q.float(), k.float(), v.float()
    out = attention(q, k, v, causal=is_causal, scale=scale, mask=mask, bias=bias).to(query.dtype)
    lead = torch.broadcast_shapes(query.shape[:-3] if query.dim() > 2 else (), key.shape[:-3], value.shape[:-3])
    shape = tuple(lead) + ((heads[0],) if rank > 2 and max(query.dim(), key.dim(), value.dim()) > 2 else ())
    return out.reshape(*shape, *out.shape[-2:])
