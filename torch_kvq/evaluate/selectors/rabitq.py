"""RaBitQ: logits estimated from the signs of rotated, centred, balanced keys and a 4-bit query (RaBitQCache)."""

import torch

from ...codecs.rabitq import RaBitQConfig, RaBitQIndex
from ...codecs.statistics import channel_balance, second_moment
from ..capture import LayerStates
from .base import Selector


class RaBitQ(Selector):
    """The index of the sparse cache.

    Args:
        config: rotation and seed.
        balance, center: learn a balance of the channels; subtract mean keys and queries. Both default to true.
    """

    name = "RaBitQ"

    def __init__(self, config: RaBitQConfig | None = None, balance: bool = True, center: bool = True) -> None:
        self.config, self.balance, self.center = config or RaBitQConfig(), balance, center

    def statistics(self, states: LayerStates) -> tuple[torch.Tensor | None, ...]:
        """Centre and balance of the keys and centre of the queries, ``[B, H, D]`` or ``None``, learnt from the prefix."""
        keys = states.key[:, :, states.places.indexed]
        centre, query_centre = (keys.float().mean(-2), states.query_mean) if self.center else (None, None)
        if not self.balance:
            return centre, None, query_centre
        query_moment = states.query_moment - query_centre.square() if self.center else states.query_moment
        return centre, channel_balance(second_moment(keys, centre, None), query_moment), query_centre

    def estimate(self, states: LayerStates) -> torch.Tensor:
        index = RaBitQIndex.of(states.key, self.config, *self.statistics(states))
        return index.scores(index.code(states.query, states.scale), 0, states.key.shape[2])

    def scan_bytes(self, states: LayerStates) -> float:
        """A bit a channel, a factor and, with centred queries, a bias."""
        return states.key.shape[-1] / 8 + (4 if self.center else 2)
