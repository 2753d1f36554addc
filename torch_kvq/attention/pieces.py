"""What a layer holds at one moment, and how it answers a query: exact sinks and recent tokens, and a packed body.

Attention is a sum of pieces: each answers with ``(out, lse)`` and ``merge`` adds them exactly. The ``attend`` operator
answers for all pieces of a layer in one call; ``compose.py`` does it piece by piece.
"""

import dataclasses
from typing import Any

import torch

from .. import ops
from .order import TokenOrder


@dataclasses.dataclass(slots=True)
class Pieces:
    """A snapshot of one layer; it stays valid while the layer goes on.

    Args:
        exact_keys, exact_values: ``[B, H, E, D]``, ``[B, H, E, Dv]``: sinks, then recent tokens.
        keys, values: tensors of the packed stores (``layout.PACKED_FIELDS``), empty lists if nothing is packed. Keys without
            values are both (latents).
        length: packed tokens.
        num_sinks: exact tokens in front of the packed ones.
        order: where the stored tokens stand in the sequence; ``None`` if in sequence order.
        layer: is told of queries, masks and the end of an attention call; its ``stats`` count.
    """

    exact_keys: torch.Tensor
    exact_values: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    length: int
    num_sinks: int
    order: TokenOrder | None
    layer: Any

    @property
    def is_packed(self) -> bool:
        return self.length > 0

    @property
    def num_tokens(self) -> int:
        return self.exact_keys.shape[2] + self.length

    def same_as(self, other: "Pieces") -> bool:
        """Whether both are snapshots of one layer at one moment."""
        return self is other or (
            self.layer is other.layer
            and self.num_tokens == other.num_tokens
            and self.exact_keys.shape == other.exact_keys.shape
            and self.exact_keys.data_ptr() == other.exact_keys.data_ptr()
        )

    def dense(self, role: str, reason: str) -> torch.Tensor:
        """Keys (role ``k``) or values (``v``) in sequence order, for a function without a packed form, named by ``reason``."""
        if self.is_packed:
            self.layer.stats.count_fallback(reason)
        return self.rebuilt(role)

    def rebuilt(self, role: str) -> torch.Tensor:
        """Keys or values in sequence order; packed tokens are decoded, and counted."""
        exact = self.exact_keys if role == "k" else self.exact_values
        if not self.is_packed:
            return exact
        stored = torch.cat([exact[:, :, : self.num_sinks], self.body(role), exact[:, :, self.num_sinks :]], 2)
        return stored if self.order is None else self.order.to_sequence(stored, 2)

    def body(self, role: str) -> torch.Tensor:
        """Keys or values that are not in ``exact_keys`` and ``exact_values``, dense, ``[B, H, length, D]``."""
        along_tokens = role == "v" and not self.layer.is_latent  # a latent's rope keys are packed as keys
        return self.decoded(role, along_tokens, 0, self.length)

    def decoded(self, role: str, along_tokens: bool, start: int, stop: int) -> torch.Tensor:
        """Packed keys or values ``start .. stop``, rebuilt and counted."""
        like = self.exact_keys if role == "k" else self.exact_values
        self.layer.stats.count_decompress(stop - start)
        out = torch.empty((*like.shape[:2], stop - start, like.shape[3]), dtype=like.dtype, device=like.device)
        ops.decode(self.keys if role == "k" else self.values, along_tokens, start, out)
        return out

    def attend(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        softcap: float = 0.0,
        sink_logits: torch.Tensor | None = None,
        start: int = 0,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax attention over every token.

        Args:
            query: ``[B, G * H, M, D]``; heads and query tokens may be folded into each other as ``pack_gqa`` does.
            mask: ``[B, 1 or Hq, 1 or M, T]`` in sequence order, bool (True = attend) or float (added).
            scale: factor of ``q . k``.
            softcap: ``c`` of ``c * tanh(x / c)``; 0 is off.
            sink_logits: ``[Hq]``, logits that join the denominator only (gpt-oss).
            start: packed tokens before it are out of reach (sliding window).
            lse: to be filled and returned, a new one by default.

        Returns:
            ``out [B, Hq, M, Dv]`` in the dtype of ``query`` and ``lse [B, Hq, M]`` float32.
        """
        query = operand("query", query)
        batch, heads, tokens = query.shape[:3]
        values = self.exact_values if self.values else self.exact_keys
        value_dim = values.shape[-1]
        out = torch.empty_like(query) if value_dim == query.shape[-1] else query.new_empty((batch, heads, tokens, value_dim))
        lse = query.new_empty((batch, heads, tokens), dtype=torch.float32) if lse is None else lse
        if mask is not None:
            mask = self.stored_mask(mask, (batch, heads, tokens, self.num_tokens))
        ops.attend(
            query, self.keys, self.values, self.exact_keys, values, mask, sink_logits,
            start, self.length, self.num_sinks, scale, softcap, out, lse,
        )  # fmt: skip
        return out, lse

    def stored_mask(self, mask: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """``mask`` in stored order, bool or float32, expanded to ``shape [B, Hq, M, T]``."""
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(f"attn_mask must be bool (True = attend) or float (added), got {mask.dtype}")
        if mask.dtype not in (torch.bool, torch.float32):
            mask = mask.float()
        if self.order is not None:
            mask = self.order.to_stored(mask.expand(shape[0], *mask.shape[1:]), 3)
        return (mask if mask.stride(-1) == 1 else mask.contiguous()).expand(shape)

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        """``query @ keys^T`` in sequence order, ``[B, Hq, M, T]`` in the dtype of ``query``."""
        query = operand("query", query)
        out = torch.empty((*query.shape[:3], self.num_tokens), dtype=query.dtype, device=query.device)
        ops.qk(query, self.keys, self.exact_keys, self.length, self.num_sinks, out)
        return out if self.order is None else self.order.to_sequence(out, 3)

    def weighted_values(self, weights: torch.Tensor) -> torch.Tensor:
        """``weights @ values`` for ``weights [B, Hq, M, T]`` in sequence order: ``[B, Hq, M, Dv]``."""
        weights = operand("attention weights", weights)
        if self.order is not None:
            weights = self.order.to_stored(weights, 3)
        out = torch.empty((*weights.shape[:3], self.exact_values.shape[-1]), dtype=weights.dtype, device=weights.device)
        ops.pv(weights, self.values, self.exact_values, self.length, self.num_sinks, out)
        return out


def operand(name: str, x: torch.Tensor) -> torch.Tensor:
    """``x`` with a contiguous last dim, refused where a gradient would have to flow back through an operator."""
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} must not require gradients: a packed cache cannot be trained through; use no_grad")
    return x if x.stride(-1) == 1 else x.contiguous()


def upper_left_causal(query: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The mask that ``is_causal`` of ``F.scaled_dot_product_attention`` stands for: ``[1, 1, M, T]`` bool."""
    return torch.ones((query.shape[2], num_tokens), dtype=torch.bool, device=query.device).tril()[None, None]
