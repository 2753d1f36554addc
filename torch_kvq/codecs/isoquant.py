"""IsoQuant: rotate, scale, Lloyd-Max code (RotaryQuant, algorithm 1), for keys or for values."""

import dataclasses
import functools

import torch

from ..checks import check_choice
from ..ops.schemas import SCALE_RULES
from .codebook import check_bits, grid_levels
from .rotation import Rotation, check_kind, make_rotation


@functools.cache
def _levels(bits: int, head_dim: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(grid_levels(bits, head_dim), dtype=torch.float32, device=device)


@dataclasses.dataclass(frozen=True)
class IsoQuantConfig:
    """How vectors become codes.

    Args:
        bits: 2, 3 (default) or 4 a coordinate.
        rotation: a key of ``rotation.KINDS``.
        scale: how the one scale of a vector is chosen (``reference.quantise``): norm, matched, unbiased or mse.
        seed: of the rotation.
    """

    bits: int = 3
    rotation: str = "isoquant"
    scale: str = "unbiased"
    seed: int = 0

    def __post_init__(self) -> None:
        check_bits("bits", self.bits)
        check_kind("rotation", self.rotation)
        check_choice("scale", self.scale, SCALE_RULES)

    @property
    def rule(self) -> int:
        """Index of ``scale`` as the ``encode`` operator takes it."""
        return SCALE_RULES.index(self.scale)

    def levels(self, head_dim: int, device: torch.device) -> torch.Tensor:
        """Positive codebook levels ``[2 ** (bits - 1)]`` float32, for unit variance and the exact marginal of ``head_dim``."""
        return _levels(self.bits, head_dim, device)

    def make_rotation(self, head_dim: int, device: torch.device) -> Rotation:
        return make_rotation(self.rotation, head_dim, self.seed, device)
