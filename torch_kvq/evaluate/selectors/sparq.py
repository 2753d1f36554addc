"""SparQ (arXiv 2312.04985): logits estimated from the largest components of the query."""

import torch

from ..capture import LayerStates
from .base import Selector


class SparQ(Selector):
    """Reads only the components whose magnitudes, summed over a kv head's query heads, are largest.

    Args:
        fraction: of the head dim, default an eighth, whose bytes are closest to those of a 1-bit index.
    """

    def __init__(self, fraction: float = 0.125) -> None:
        self.fraction, self.name = fraction, f"SparQ r={fraction:g}D"

    def estimate(self, states: LayerStates) -> torch.Tensor:
        """``scale * q[top] . k[top]`` over the root of the share of ``|q|_1`` that these components have, as in the paper."""
        query, key = states.grouped(states.query.float()), states.key.float().unsqueeze(2)  # [B, H, G, M, D], [B, H, 1, T, D]
        largest = query.abs().sum(2, keepdim=True).topk(self._rank(states), -1).indices.expand(*query.shape[:-1], -1)
        kept = torch.zeros_like(query).scatter(-1, largest, query.gather(-1, largest))
        covered = (kept.abs().sum(-1) / query.abs().sum(-1)).sqrt().unsqueeze(-1)
        return (states.scale * (kept @ key.transpose(-1, -2)) / covered).flatten(1, 2)

    def _rank(self, states: LayerStates) -> int:
        return max(1, round(self.fraction * states.key.shape[-1]))

    def scan_bytes(self, states: LayerStates) -> float:
        return 2 * self._rank(states)
