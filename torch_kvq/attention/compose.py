"""Attention as a sum of pieces, for those who compose their own: each piece answers ``(out, lse)``, ``merge`` adds them.

``out [B, Hq, M, Dv]`` is softmax attention over the piece's own tokens and ``lse [B, Hq, M]`` float32 the log-sum-exp of
its logits. Merging is exact for any disjoint pieces: sinks and windows, prefixes shared by sequences, tokens selected
by a score, parts of a sequence on other devices.
"""

import torch

from .. import ops
from ..store import PackedStore

Answer = tuple[torch.Tensor, torch.Tensor]


def attend_packed(
    query: torch.Tensor,
    keys: PackedStore,
    values: PackedStore,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    softcap: float = 0.0,
    start: int = 0,
) -> Answer:
    """Attention of ``query [B, G * H, M, D]`` over packed tokens ``start .. length``, read as they are.

    Args:
        keys, values: stores of equal length, keys packed along ``D``, values along ``T``.
        scale: of ``q . k``, default ``D ** -0.5``.
        mask: ``[B, 1 or Hq, 1 or M, T]``, bool (True = attend) or float (added).
        softcap: ``c`` of ``c * tanh(x / c)``, 0 is off.

    Raises:
        ValueError: stores of different lengths.
    """
    if keys.length != values.length:
        raise ValueError(f"values must hold the {keys.length} tokens of keys, got {values.length}")
    batch, heads, tokens, dim = query.shape
    exact_keys = query.new_empty((batch, keys.scale.shape[1], 0, dim))
    exact_values = query.new_empty((batch, keys.scale.shape[1], 0, values.head_dim))
    out = query.new_empty((batch, heads, tokens, values.head_dim))
    lse = query.new_empty((batch, heads, tokens), dtype=torch.float32)
    if mask is not None:
        mask = (mask if mask.dtype == torch.bool else mask.float()).expand(batch, heads, tokens, keys.length)
    scale = dim**-0.5 if scale is None else scale
    ops.attend(
        query, keys.tensors(), values.tensors(), exact_keys, exact_values, mask, None,
        start, keys.length, 0, scale, softcap, out, lse,
    )  # fmt: skip
    return out, lse


def attend_exact(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> Answer:
    """Attention of ``query [B, G * H, M, D]`` over dense ``keys [B, H, T, D]`` and ``values [B, H, T, Dv]``, in float32."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    grouped = query.float().unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("bhgmd,bhtd->bhgmt", grouped, keys.float()).flatten(1, 2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0, lse).unsqueeze(-1))
    out = torch.einsum("bhgmt,bhtd->bhgmd", weights.unflatten(1, (keys.shape[1], -1)), values.float())
    return out.flatten(1, 2).to(query.dtype), lse


def merge(parts: list[Answer]) -> Answer:
    """Attention over the union of the token sets of ``parts``."""
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    ops.merge(outs, lses, out, lse)
    return out, lse
