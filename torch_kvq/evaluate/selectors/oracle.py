"""The best selection of a given size: by the true logits."""

import torch

from ..capture import LayerStates
from .base import Selector


class Oracle(Selector):
    """Reads every key to choose; no selection of as many tokens keeps more mass (mean over the group)."""

    name = "oracle"

    def estimate(self, states: LayerStates) -> torch.Tensor:
        return states.logits()

    def scan_bytes(self, states: LayerStates) -> float:
        return 2 * states.key.shape[-1]
