"""Adaptive budgets: as many tokens as an estimated share ``p`` of attention takes."""

import torch

from ..capture import LayerStates
from .base import Selector


class TopP(Selector):
    """Reads what any query head of a kv head needs for a share ``p`` of its attention, as ``ops.top_p_select`` does.

    A head reads a token if those of larger shares, sinks and window have less than ``p`` together: if the rest has more than
    ``1 - p``. So one threshold on that rest stands for one ``p``, and its budget follows from the queries.
    """

    is_adaptive = True

    def __init__(self, selector: Selector) -> None:
        self.selector, self.name = selector, f"{selector.name} top-p"

    def priority(self, states: LayerStates) -> torch.Tensor:
        """The share of attention that the token and those behind it have, the largest of the group."""
        shares = states.shares(self.selector.estimate(states)).masked_fill(~states.places.selectable, 0)
        ordered, order = shares.sort(-1)
        rest = torch.zeros_like(shares).scatter(-1, order, ordered.cumsum(-1))
        return states.grouped(rest).amax(2)

    def scan_bytes(self, states: LayerStates) -> float:
        return self.selector.scan_bytes(states)
