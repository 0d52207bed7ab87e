"""Scaled dot-product and multi-head attention from generated kernels.

    import numpy as np, attune
    q = np.random.rand(1, 8, 128, 64).astype(np.float32)
    out = attune.attention(q, q, q, causal=True)

Arrays are whatever offers DLPack or the buffer protocol (NumPy, PyTorch, memoryview, ...), on the CPU. Nothing is copied:
any strides are right, those of a transposed or broadcast view too. The interpreter's lock is released while a kernel
runs. `attune.torch` stands in for PyTorch's own function, `attune.transformers` registers with Hugging Face's library.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence, Union

import numpy as _np

from . import _core
from ._core import (
    DeviceError,
    Error,
    FileError,
    InvalidArgument,
    KernelFailed,
    OutOfMemory,
    Unsupported,
    dtypes,
    get_num_threads,
    isa,
    kernels,
    set_num_threads,
)

__version__ = _core.version()
__all__ = [
    "attention", "explain", "MultiHeadAttention", "Explanation", "dtypes", "get_num_threads", "isa", "kernels", "set_num_threads",
    "DeviceError", "Error", "FileError", "InvalidArgument", "KernelFailed", "OutOfMemory", "Unsupported",
]

Array = Any  # offers DLPack or the buffer protocol
Window = Sequence[Optional[int]]


def _empty(like: Array, shape: Sequence[int], dtype: Any = None) -> Array:
    """A new array of the kind of `like`."""
    if hasattr(like, "new_empty"):  # PyTorch
        return like.new_empty(shape) if dtype is None else like.new_empty(shape, dtype=dtype)
    return _np.empty(shape, like.dtype if dtype is None and hasattr(like, "dtype") else dtype or _np.float32)


def _shape(array: Array, name: str, least: int, most: int) -> tuple[int, ...]:
    shape = getattr(array, "shape", None)
    if shape is None:
        raise TypeError(f"{name} is of type {type(array).__name__}: expected an array that offers DLPack or the buffer protocol, with a shape")
    if not least <= len(shape) <= most:
        raise InvalidArgument(f"{name}.shape is {tuple(shape)}: expected {least} to {most} dimensions")
    return tuple(shape)


def _vector(values: Any, dtype: Any) -> Any:
    """One number for each batch entry or head: from a list, too."""
    return None if values is None else _np.ascontiguousarray(values, dtype)


def _options(causal, offset, window, mask, bias, scale, softcap, alibi_slopes, sinks, kv_len, deterministic) -> dict[str, Any]:
    if not isinstance(offset, int):
        offset = _vector(offset, _np.int64)
    return dict(causal=causal, offset=offset, window=window, mask=mask, bias=bias, scale=scale, softcap=softcap,
                alibi_slopes=_vector(alibi_slopes, _np.float32), sinks=_vector(sinks, _np.float32),
                kv_len=_vector(kv_len, _np.int64), deterministic=deterministic)


def attention(q: Array, k: Array, v: Array, *, causal: bool = False, offset: Union[int, Sequence[int]] = 0,
              window: Optional[Window] = None, mask: Optional[Array] = None, bias: Optional[Array] = None,
              scale: Optional[float] = None, softcap: Optional[float] = None, alibi_slopes: Optional[Sequence[float]] = None,
              sinks: Optional[Sequence[float]] = None, kv_len: Optional[Sequence[int]] = None, out: Optional[Array] = None,
              return_lse: bool = False, deterministic: bool = False, kernel: Optional[str] = None, strategy: Optional[str] = None,
              threads: int = 0) -> Any:
    """softmax(scale * q k^T + ...) v, for each batch entry and head.

    Shapes (leading ones of size 1 may be left out of q, k, v together: [H, N, d] or [N, d]):
      q [B, Hq, N, dk], k [B, Hkv, M, dk], v [B, Hkv, M, dv] -> [B, Hq, N, dv]
    with Hq a multiple of Hkv: query head h uses key head h // (Hq // Hkv). float32, float16 or bfloat16 (see `dtypes`).

    Order: scale * q.k -> softcap -> ALiBi -> bias -> masks -> softmax -> times v.

    causal         key j is visible to row i if j <= i + offset
    offset         where row 0 stands among the keys: a number, or one for each batch entry. M - N lets the last row see
                   the last key; with past keys it is their number
    window         (left, right): keys from i + offset - left to i + offset + right are visible; None or -1: no limit
    mask           bool or uint8, broadcast to [B, Hq, N, M]; true: attend
    bias           float32, broadcast to [B, Hq, N, M], added to the scores; -inf masks
    scale          of the scores; None: 1 / sqrt(dk)
    softcap        scores become softcap * tanh(score / softcap)
    alibi_slopes   [Hq]: adds -slope * |i + offset - j|
    sinks          [Hq]: one more logit in each row's denominator
    kv_len         [B]: keys from kv_len[b] on do not exist
    out            written in place of a new array: q's type, [B, Hq, N, dv], any strides
    return_lse     return (out, lse), lse float32 [B, Hq, N]: the logarithm of the sum of exp(score) over the visible keys
    deterministic  the choice of a kernel depends neither on the number of threads nor on B
    kernel, strategy, threads   take this kernel, one of this strategy, so many threads; 0: get_num_threads()

    A row that sees no key gives zeros, and an lse of -inf. What a row cannot see has no influence on it, NaN included.

    Raises TypeError (no array, wrong dtype), InvalidArgument (a ValueError: shapes, devices, values), Unsupported (a
    NotImplementedError: no kernel of this build does it; the message says why for each).
    """
    rank = len(_shape(q, "q", 2, 4))
    if len(_shape(k, "k", 2, 4)) != rank or len(_shape(v, "v", 2, 4)) != rank:
        raise InvalidArgument(f"k.shape is {tuple(k.shape)} and v.shape {tuple(v.shape)}: expected {rank} dimensions, as in q.shape {tuple(q.shape)}")
    shape = tuple(q.shape[:-1]) + (v.shape[-1],)
    options = _options(causal, offset, window, mask, bias, scale, softcap, alibi_slopes, sinks, kv_len, deterministic)
    if out is None:
        out = _empty(q, shape)
    elif tuple(_shape(out, "out", 2, 4)) != shape:
        raise InvalidArgument(f"out.shape is {tuple(out.shape)}: expected {shape}")
    lse = None
    if return_lse:
        f32 = _float32(q)
        lse = _empty(q, shape[:-1], f32)
        options["lse"] = lse[..., None]
    _core.attention(q, k, v, out, **options, kernel=kernel, strategy=strategy, threads=threads)
    return (out, lse) if return_lse else out


def _float32(like: Array) -> Any:
    if hasattr(like, "new_empty"):
        import torch

        return torch.float32
    return _np.float32


class Explanation:
    """What `explain` returns: the kernel that `attention` would run, why, and the bytes of its workspace."""

    def __init__(self, kernel: str, reasons: str, workspace_bytes: int):
        self.kernel, self.reasons, self.workspace_bytes = kernel, reasons, workspace_bytes

    def __str__(self) -> str:
        return self.reasons

    def __repr__(self) -> str:
        return f"Explanation(kernel={self.kernel!r}, workspace_bytes={self.workspace_bytes})"


def explain(q: Array, k: Array, v: Array, *, causal: bool = False, offset: Union[int, Sequence[int]] = 0,
            window: Optional[Window] = None, mask: Optional[Array] = None, bias: Optional[Array] = None,
            scale: Optional[float] = None, softcap: Optional[float] = None, alibi_slopes: Optional[Sequence[float]] = None,
            sinks: Optional[Sequence[float]] = None, kv_len: Optional[Sequence[int]] = None, deterministic: bool = False,
            kernel: Optional[str] = None, strategy: Optional[str] = None, threads: int = 0) -> Explanation:
    """Which kernel `attention` would run with these arguments, and why not the others. Nothing is computed."""
    options = _options(causal, offset, window, mask, bias, scale, softcap, alibi_slopes, sinks, kv_len, deterministic)
    return Explanation(*_core.explain(q, k, v, **options, kernel=kernel, strategy=strategy, threads=threads))


class MultiHeadAttention:
    """concat_h(attention(x_q Wq_h, x_kv Wk_h, x_kv Wv_h)) Wo, each product with an optional bias. float32.

    Weights, [in, out] as in y = x W, or [out, in] with layout="out_in", as PyTorch's Linear keeps them:
      wq d_model x num_heads * dk, wk d_model_kv x num_kv_heads * dk, wv d_model_kv x num_kv_heads * dv,
      wo num_heads * dv x d_out; the biases bq, bk, bv, bo are vectors of the products' sizes.
    They are packed once, so that the arrays may go afterwards.

    num_kv_heads: num_heads if None. dk, dv: d_model / num_heads if None.
    Raises TypeError and InvalidArgument, as `attention` does; FileError from `load`.
    """

    def __init__(self, wq: Array, wk: Array, wv: Array, wo: Array, *, num_heads: int, num_kv_heads: Optional[int] = None,
                 dk: Optional[int] = None, dv: Optional[int] = None, bq: Optional[Array] = None, bk: Optional[Array] = None,
                 bv: Optional[Array] = None, bo: Optional[Array] = None, layout: str = "in_out"):
        parameters = [("wq", wq), ("wk", wk), ("wv", wv), ("wo", wo), ("bq", bq), ("bk", bk), ("bv", bv), ("bo", bo)]
        self._core = _core.Mha(parameters, num_heads, num_kv_heads or 0, dk or 0, dv or 0, _out_in(layout))

    @classmethod
    def load(cls, path: str, names: dict[str, str], *, d_model: int, num_heads: int, num_kv_heads: Optional[int] = None,
             d_model_kv: Optional[int] = None, d_out: Optional[int] = None, dk: Optional[int] = None, dv: Optional[int] = None,
             layout: str = "in_out") -> "MultiHeadAttention":
        """Reads the weights from a .safetensors file. names: {"wq": name in the file, ...}; biases may be left out."""
        known = ("wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo")
        for key in names:
            if key not in known:
                raise InvalidArgument(f"names has the key {key!r}: expected some of {', '.join(known)}")
        made = cls.__new__(cls)
        made._core = _core.Mha(str(path), [names.get(key, "") for key in known], d_model, d_model_kv or 0, d_out or 0, num_heads,
                               num_kv_heads or 0, dk or 0, dv or 0, _out_in(layout))
        return made

    @property
    def d_out(self) -> int:
        """Features of the output."""
        return self._core.d_out

    def __call__(self, x_q: Array, x_kv: Optional[Array] = None, *, causal: bool = False,
                 offset: Union[int, Sequence[int]] = 0, window: Optional[Window] = None, mask: Optional[Array] = None,
                 bias: Optional[Array] = None, scale: Optional[float] = None, softcap: Optional[float] = None,
                 alibi_slopes: Optional[Sequence[float]] = None, sinks: Optional[Sequence[float]] = None,
                 kv_len: Optional[Sequence[int]] = None, out: Optional[Array] = None, deterministic: bool = False) -> Any:
        """x_q [B, N, d_model], x_kv [B, M, d_model_kv] (None: x_q) -> [B, N, d_out]; or all without B.

        The keywords are those of `attention`. `out` may be x_q.
        """
        shape = _shape(x_q, "x_q", 2, 3)[:-1] + (self.d_out,)
        options = _options(causal, offset, window, mask, bias, scale, softcap, alibi_slopes, sinks, kv_len, deterministic)
        if out is None:
            out = _empty(x_q, shape)
        elif _shape(out, "out", 2, 3) != shape:
            raise InvalidArgument(f"out.shape is {tuple(out.shape)}: expected {shape}")
        self._core.run(x_q, x_kv, out, **options)
        return out


def _out_in(layout: str) -> bool:
    if layout not in ("in_out", "out_in"):
        raise InvalidArgument(f"layout is {layout!r}: expected 'in_out' or 'out_in'")
    return layout == "out_in"
