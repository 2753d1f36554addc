"""Two stages over packed keys: candidates from their signs, ranked by all their bits."""

import math

import torch

from ...codecs.isoquant import IsoQuantConfig
from ...store import PackedStore
from ..capture import LayerStates
from .rabitq import RaBitQ

_BEHIND = 1e4  # beyond any difference of logits


class Refined(RaBitQ):
    """The candidates that RaBitQ ranks first, then the rest in its order.

    Args:
        candidates: share of the tokens that can be selected whose packed keys are scored, default 0.3.
        bits: of the packed keys, default 3.
        options: of ``RaBitQ``.
    """

    name = "RaBitQ refined"

    def __init__(self, candidates: float = 0.3, bits: int = 3, **options) -> None:
        super().__init__(**options)
        self.candidates, self.bits = candidates, bits

    def estimate(self, states: LayerStates) -> torch.Tensor:
        coarse, selectable = super().estimate(states), states.places.selectable
        priority = states.grouped(states.log_shares(coarse)).logsumexp(2).masked_fill(~selectable, -torch.inf)
        rank = priority.argsort(dim=-1, descending=True).argsort(-1)
        is_candidate = rank < (self.candidates * selectable.sum(-1, keepdim=True)).ceil()
        fine = states.logits(self.packed(states))
        return torch.where(is_candidate.repeat_interleave(states.group, 1), fine, coarse - _BEHIND)

    def packed(self, states: LayerStates) -> torch.Tensor:
        """The keys ``[B, H, T, D]`` as packed keys stand for them."""
        batch, heads, tokens, dim = states.key.shape
        codec = IsoQuantConfig(self.bits, self.config.rotation, seed=self.config.seed)
        centre, balance, _ = self.statistics(states)
        store = PackedStore(codec, False, batch, heads, dim, states.key.device, centre, balance)
        store.append(states.key)
        return store.decode(0, tokens, torch.float32)

    def scan_bytes(self, states: LayerStates) -> float:
        """Those of the index and, of the candidates, codes and scales."""
        return super().scan_bytes(states) + self.candidates * (math.ceil(self.bits * states.key.shape[-1] / 8) + 2)
