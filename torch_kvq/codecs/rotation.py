"""Rotations that make the coordinates of a vector alike, so that one scalar codebook fits them all.

A rotation is ``R = matrix . blocks . mix ... mix``: rounds of random signs and a Walsh-Hadamard transform, then one SO(4)
map for every four coordinates, or a dense matrix instead. Parts that are absent are empty. A head dim that is no power of
two is mixed in two overlapping windows (``ops/reference.py: mix``), so a round spreads every coordinate over more than half
of them.

Seed rule: word ``n`` of stream ``s`` for seed ``z`` is SplitMix64 of ``(z * 2**32 + s * 2**28 + n) + 1`` times the golden
constant; signs take the top bit, normals are Box-Muller pairs of 53-bit uniforms. It uses integers and float64 only, so
it gives the same rotation on every device and torch version.
"""

import dataclasses
import functools
import math

import torch

from ..checks import check_choice
from ..layout import MAX_HEAD_DIM
from ..ops.reference import largest_power_of_two

MAX_SEED = 2**31 - 1
_GOLDEN, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685
_SIGN_STREAM, _LEFT_STREAM, _RIGHT_STREAM, _DENSE_STREAM = range(4)


def _shift_right(x: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift of int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def random_words(seed: int, stream: int, count: int) -> torch.Tensor:
    """``count`` pseudo-random int64 words of the seed rule above."""
    x = torch.arange(count, dtype=torch.int64, device="cpu") + (seed * 2**32 + stream * 2**28 + 1)
    x = x * _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def random_normals(seed: int, stream: int, count: int) -> torch.Tensor:
    """``count`` standard normals in float64 by the seed rule above."""
    pairs = -(-count // 2)
    uniform = (_shift_right(random_words(seed, stream, 2 * pairs), 11).double() + 0.5) * 2.0**-53
    radius, angle = torch.sqrt(-2 * torch.log(uniform[:pairs])), 2 * math.pi * uniform[pairs:]
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[:count]


def left_multiplication(q: torch.Tensor) -> torch.Tensor:
    """Matrices ``[n, 4, 4]`` of ``v -> q v`` for quaternions ``q [n, 4]`` (w, x, y, z)."""
    w, x, y, z = q.unbind(-1)
    rows = [(w, -x, -y, -z), (x, w, -z, y), (y, z, w, -x), (z, -y, x, w)]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def right_multiplication(q: torch.Tensor) -> torch.Tensor:
    """Matrices ``[n, 4, 4]`` of ``v -> v conj(q)`` for quaternions ``q [n, 4]`` (w, x, y, z)."""
    w, x, y, z = q.unbind(-1)
    rows = [(w, x, y, z), (-x, w, -z, y), (-y, z, w, -x), (-z, -y, x, w)]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def _unit_quaternions(seed: int, stream: int, count: int) -> torch.Tensor:
    q = random_normals(seed, stream, 4 * count).reshape(count, 4)
    return q / q.norm(dim=-1, keepdim=True)


def so4_blocks(seed: int, head_dim: int) -> torch.Tensor:
    """``v -> qL v conj(qR)`` for ``D / 4`` random pairs of unit quaternions: all of SO(4) (RotaryQuant, equation 4)."""
    count = head_dim // 4
    left, right = _unit_quaternions(seed, _LEFT_STREAM, count), _unit_quaternions(seed, _RIGHT_STREAM, count)
    return left_multiplication(left) @ right_multiplication(right)


def so3_blocks(seed: int, head_dim: int) -> torch.Tensor:
    """``v -> q v conj(q)``: only SO(3), the first coordinate of each block stays put (RotaryQuant's failed v1)."""
    q = _unit_quaternions(seed, _LEFT_STREAM, head_dim // 4)
    return left_multiplication(q) @ right_multiplication(q)


def random_signs(seed: int, head_dim: int, rounds: int) -> torch.Tensor:
    """``[rounds, D]`` of +1 and -1."""
    words = random_words(seed, _SIGN_STREAM, rounds * head_dim)
    return torch.where(words < 0, -1.0, 1.0).double().reshape(rounds, head_dim)


def haar_matrix(seed: int, head_dim: int) -> torch.Tensor:
    """Haar-random rotation ``[D, D]``: QR of a Gaussian matrix with the signs of R's diagonal taken out."""
    q, r = torch.linalg.qr(random_normals(seed, _DENSE_STREAM, head_dim * head_dim).reshape(head_dim, head_dim))
    return q * r.diagonal().sign()


# kind: (rounds of signs and mixing, block function, dense)
KINDS = {
    "isoquant": (1, so4_blocks, False),
    "hadamard": (1, None, False),
    "hadamard2": (2, None, False),
    "dense": (0, None, True),
    "so4": (0, so4_blocks, False),
    "so3": (0, so3_blocks, False),
    "none": (0, None, False),
}


@dataclasses.dataclass(frozen=True)
class Rotation:
    """One rotation of ``R^D``; ``signs [rounds, D]``, ``blocks [D/4, 4, 4]``, ``matrix [D, D]``, float32, empty if absent."""

    kind: str
    head_dim: int
    signs: torch.Tensor
    blocks: torch.Tensor
    matrix: torch.Tensor

    @property
    def num_parameters(self) -> int:
        """Numbers that define the rotation: ``D`` a round of signs, 8 a pair of quaternions, ``D ** 2`` if dense."""
        quaternions = {"isoquant": 8, "so4": 8, "so3": 4}.get(self.kind, 0) * self.head_dim // 4
        return self.signs.numel() + quaternions + self.matrix.numel()

    @property
    def num_fma(self) -> int:
        """Multiply-adds to rotate one vector: ``D log2 D`` a round (``2 P log2 P`` off powers of two), ``4 D`` for blocks."""
        power = largest_power_of_two(self.head_dim)
        windows = 1 if power == self.head_dim else 2
        mixing = self.signs.shape[0] * windows * power * (power.bit_length() - 1)
        return mixing + (4 * self.head_dim if self.blocks.numel() else 0) + self.matrix.numel()

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``signs``, ``blocks``, ``matrix`` in the order of ``layout.PACKED_FIELDS``."""
        return self.signs, self.blocks, self.matrix


def check_head_dim(name: str, head_dim: int) -> None:
    """Raises ``ValueError`` unless ``head_dim`` is a multiple of 4 from 4 to 512."""
    if head_dim % 4 or not 4 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"{name} must have a head dim that is a multiple of 4 and at most {MAX_HEAD_DIM}, got {head_dim}")


def check_kind(name: str, kind: str) -> None:
    """Raises ``ValueError`` unless ``kind`` is a key of ``KINDS``."""
    check_choice(name, kind, KINDS)


@functools.cache
@torch.compiler.disable  # a compiler would take the wrapping integers of the seed rule for numbers without end
def make_rotation(kind: str, head_dim: int, seed: int = 0, device: torch.device | str = "cpu") -> Rotation:
    """The rotation of a kind, made once a process, device and seed.

    Args:
        kind: a key of ``KINDS``. isoquant (default of the caches): signs, WHT, SO(4). hadamard: signs, WHT. hadamard2: two
            such rounds. dense: Haar (TurboQuant). so4, so3: blocks alone. none: identity.
        head_dim: multiple of 4, at most 512.
        seed: 0 to 2**31 - 1, of the seed rule above.

    Raises:
        ValueError: unknown kind, head dim or seed out of range.
    """
    check_kind("kind", kind)
    check_head_dim("head_dim", head_dim)
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed must be from 0 to 2**31 - 1, got {seed}")
    rounds, block_function, dense = KINDS[kind]
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=torch.float64, device="cpu")
        signs = random_signs(seed, head_dim, rounds)
        blocks = block_function(seed, head_dim) if block_function else empty
        matrix = haar_matrix(seed, head_dim) if dense else empty
        parts = [part.float().contiguous().to(device) for part in (signs, blocks, matrix)]
    return Rotation(kind, head_dim, *parts)
