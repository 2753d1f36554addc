"""The attention function ``"kvq"`` for ``model.set_attn_implementation("kvq")``: optional.

``sdpa`` and ``eager`` models need nothing. This one hands the packed data to the operator without the detour over
``F.scaled_dot_product_attention``, and gives soft-capped models and models with attention sinks the one-pass operator
instead of the eager pair. Exact calls run what the library would run: sdpa, or the model's own eager function where
soft-cap or sinks ask for it.
"""

import sys

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .handle import KVHandle, is_handle
from .pieces import upper_left_causal

NAME = "kvq"


def kvq_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention of ``query [B, Hq, M, D]``; returns ``([B, M, Hq, Dv], None)`` as every attention function does."""
    packed = is_handle(key, "k") and is_handle(value, "v") and key.pieces.is_packed and not dropout
    if not packed:
        exact = _exact_eager if softcap or s_aux is not None else sdpa_attention_forward
        extra = {"softcap": softcap, "s_aux": s_aux} if exact is _exact_eager else {}
        out, _ = exact(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **extra, **kwargs)
        return out, None
    layer = key.pieces.layer
    layer.saw_queries(query)
    layer.saw_mask(attention_mask)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out, _ = key.pieces.attend(query, attention_mask, scaling, softcap or 0.0, s_aux, lse=layer.unread_lse(query))
    layer.answered(True)
    return out.transpose(1, 2).contiguous(), None


def _exact_eager(module, query, key, value, attention_mask, softcap=None, s_aux=None, **kwargs):
    """The eager function of the model's own file, with the boolean mask made additive."""
    if attention_mask is None and query.shape[2] > 1:
        attention_mask = upper_left_causal(query, key.shape[2])
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        low = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, low)
    if isinstance(key, KVHandle):
        key.pieces.layer.saw_mask(attention_mask)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    extra = {name: x for name, x in (("softcap", softcap), ("s_aux", s_aux)) if x is not None}
    return eager(module, query, key, value, attention_mask, **extra, **kwargs)


def register() -> None:
    """Makes ``"kvq"`` known to transformers, with the masks of sdpa."""
    AttentionInterface.register(NAME, kvq_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
