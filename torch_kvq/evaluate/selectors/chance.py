"""Tokens drawn at random: what any method must beat."""

import torch

from ..capture import LayerStates
from .base import Selector


class Chance(Selector):
    """Every token that can be selected is as likely as another; ``seed`` fixes the draw, default 0."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def priority(self, states: LayerStates) -> torch.Tensor:
        shape = (*states.key.shape[:2], *states.places.selectable.shape)
        generator = torch.Generator().manual_seed(self.seed + states.layer)
        return torch.rand(shape, generator=generator).to(states.key.device)

    def scan_bytes(self, states: LayerStates) -> float:
        return 0
