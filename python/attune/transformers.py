"""attune as an attention implementation of Hugging Face's transformers:

    import attune.transformers
    attune.transformers.register()
    model = AutoModel.from_pretrained(..., attn_implementation="attune")
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from . import Unsupported, _core, attention

__all__ = ["register", "attention_forward"]

_SIXTEEN = {torch.float16: "f16", torch.bfloat16: "bf16"}


def attention_forward(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                      attention_mask: Optional[torch.Tensor], dropout: float = 0.0, scaling: Optional[float] = None,
                      is_causal: Optional[bool] = None, softcap: Optional[float] = None, s_aux: Optional[torch.Tensor] = None,
                      position_bias: Optional[torch.Tensor] = None, **unused: Any) -> tuple[torch.Tensor, None]:
    """query [B, Hq, L, E], key and value [B, Hkv, S, E] -> ([B, L, Hq, E], None).

    Masks are those of "sdpa": bool or additive [B, 1 or Hq, L, S], or None where the whole batch is plainly causal (by
    the module's is_causal) or sees everything. Windows are in the mask. s_aux are the sinks of models that have them.
    """
    if dropout and module.training:
        raise Unsupported(f"dropout is {dropout}: expected a model in eval mode, since attune is for inference")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise Unsupported("attune has no backward pass: expected the model to run under torch.no_grad() or inference_mode()")
    rows = query.shape[2]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = bool(causal) and rows > 1 and attention_mask is None
    mask = bias = None
    if attention_mask is not None:
        cut = attention_mask[..., : key.shape[2]]
        if cut.dtype is torch.bool:
            mask = cut
        else:
            bias = cut.float()
    if position_bias is not None:
        bias = position_bias.float() if bias is None else bias + position_bias.float()
    dtype = query.dtype
    if dtype in _SIXTEEN and _SIXTEEN[dtype] not in _core.dtypes():
        query, key, value = query.float(), key.float(), value.float()
    # Written as the projection after it reads it: [B, L, Hq, E].
    out = query.new_empty(query.shape[0], rows, query.shape[1], value.shape[3])
    attention(query.detach(), key.detach(), value.detach(), causal=causal, mask=mask, bias=bias, scale=scaling, softcap=softcap,
              sinks=None if s_aux is None else s_aux.detach().float().numpy(), out=out.transpose(1, 2))
    return out.to(dtype), None


def register(name: str = "attune") -> None:
    """Makes attn_implementation=name known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)
