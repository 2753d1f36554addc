"""Lloyd-Max codebooks of one coordinate of a random unit vector."""

import functools
import math

import torch

from ..layout import MAX_BITS, MIN_BITS, TOP_LEVEL

_GRID = 1 << 16
_STEPS = 20000
_TOLERANCE = 1e-12
_MADE = dict(dtype=torch.float64, device="cpu")  # whatever torch.set_default_device says


def marginal_density(t: torch.Tensor, head_dim: int | None) -> torch.Tensor:
    """Density of ``sqrt(D) * u_i`` for ``u`` uniform on the unit sphere of ``R^D``, not normed; ``None`` is the limit N(0, 1).

    The exact marginal is a scaled Beta: ``(1 - t^2 / D) ** ((D - 3) / 2)`` on ``|t| <= sqrt(D)``.
    """
    if head_dim is None:
        return torch.exp(-t.square() / 2)
    return (1 - t.square() / head_dim).clamp_min(0) ** ((head_dim - 3) / 2)


@functools.cache
def lloyd_max(bits: int, head_dim: int | None = None) -> tuple[float, ...]:
    """Positive levels of the symmetric Lloyd-Max codebook, ascending, for unit variance.

    Args:
        bits: 1 to 4; the codebook has ``2 ** bits`` levels, of which the positive half is returned.
        head_dim: ``D`` of the exact marginal; ``None`` for N(0, 1).

    Lloyd's iteration on a midpoint grid in float64: levels are the conditional means of their cells, boundaries the
    midpoints of levels. Source: RotaryQuant, step 3.
    """
    half = 1 << (bits - 1)
    top = 8.0 if head_dim is None else min(8.0, math.sqrt(head_dim))
    t = (torch.arange(_GRID, **_MADE) + 0.5) * (top / _GRID)
    density = marginal_density(t, head_dim)
    mass, moment = torch.cumsum(density, 0), torch.cumsum(density * t, 0)
    zero = torch.zeros(1, **_MADE)
    mass, moment = torch.cat([zero, mass]), torch.cat([zero, moment])
    levels = (torch.arange(half, **_MADE) + 0.5) * (min(top, 2.5) / half)
    for _ in range(_STEPS):
        edges = torch.cat([zero, (levels[1:] + levels[:-1]) / 2, torch.tensor([top], **_MADE)])
        position = edges * (_GRID / top)
        index = position.floor().long().clamp(0, _GRID - 1)
        share = position - index
        cut_mass = torch.lerp(mass[index], mass[index + 1], share)
        cut_moment = torch.lerp(moment[index], moment[index + 1], share)
        new = cut_moment.diff() / cut_mass.diff()
        done = (new - levels).abs().max() < _TOLERANCE
        levels = new
        if done:
            break
    return tuple(levels.tolist())


def grid_levels(bits: int, head_dim: int | None = None) -> tuple[float, ...]:
    """The Lloyd-Max levels on the grid of the format: ``(n + 1/2)`` steps, ``n`` an integer, the largest at ``TOP_LEVEL``.

    A kernel can then hold them as 8-bit integers without an error of its own; the mean squared error grows by less
    than .6 % (4 bits), .1 % (3 bits), .03 % (2 bits).
    """
    exact = lloyd_max(bits, head_dim)
    step = exact[-1] / TOP_LEVEL
    return tuple((math.floor(level / step) + 0.5) * step for level in exact)


def check_bits(name: str, bits: int) -> None:
    """Raises ``ValueError`` unless ``bits`` is an integer the format holds."""
    if not isinstance(bits, int) or isinstance(bits, bool) or not MIN_BITS <= bits <= MAX_BITS:
        raise ValueError(f"{name} must be an integer from {MIN_BITS} to {MAX_BITS}, got {bits!r}")
