"""Rotations against explicit matrices, quaternion algebra, SplitMix64 in plain integers and measured fixtures."""

import math

import pytest
import torch

from torch_kvq import ops
from torch_kvq.codecs import rotation
from torch_kvq.codecs.rotation import KINDS, Rotation, make_rotation

DIMS = (4, 12, 64, 80, 96, 112, 128, 192, 256, 512)
MIXED = ("isoquant", "hadamard", "hadamard2")
# kind: (numbers that define it, multiply-adds a vector) at D = 128
COSTS = {
    "isoquant": (256 + 128, 896 + 512),
    "hadamard": (128, 896),
    "hadamard2": (256, 1792),
    "dense": (16384, 16384),
    "so4": (256, 512),
    "so3": (128, 512),
    "none": (0, 0),
}


def apply(r: Rotation, x: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    out = torch.full_like(x, torch.nan)
    ops.rotate(x, *r.tensors(), inverse, out)
    return out


def sylvester(size: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), h)
    return h / math.sqrt(size)


def as_matrix(r: Rotation) -> torch.Tensor:
    """``R`` as a product of matrices: rounds of windows ``H . signs``, then the blocks, or the dense matrix."""
    dim, power = r.head_dim, 2 ** int(math.log2(r.head_dim))
    product = torch.eye(dim, dtype=torch.float64)
    for sign in r.signs.double():
        for first in [0] if power == dim else [0, dim - power]:
            window, step = slice(first, first + power), torch.eye(dim, dtype=torch.float64)
            step[window, window] = sylvester(power) @ torch.diag(sign[window])
            product = step @ product
    if r.blocks.numel():
        product = torch.block_diag(*r.blocks.double()) @ product
    return r.matrix.double() @ product if r.matrix.numel() else product


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kind", KINDS)
def test_is_an_orthogonal_map_and_the_documented_product(kind, dim):
    r = make_rotation(kind, dim, 3)
    columns = apply(r, torch.eye(dim)).T.double()  # row i of the output is R e_i
    assert (columns.T @ columns - torch.eye(dim)).abs().max() <= 1e-5
    assert (columns - as_matrix(r)).abs().max() <= 1e-5
    x, y = torch.randn(2, 7, dim)
    assert (apply(r, apply(r, x), inverse=True) - x).abs().max() <= 1e-5
    assert (apply(r, apply(r, x, inverse=True)) - x).abs().max() <= 1e-5
    drift = ((apply(r, x) * apply(r, y)).sum(-1) - (x * y).sum(-1)).abs()
    assert (drift / (x.norm(dim=-1) * y.norm(dim=-1))).max() <= 1e-5


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "none"])
def test_skipping_or_swapping_the_inverse_is_wrong(kind):
    r, x = make_rotation(kind, 128), torch.randn(16, 128)
    assert (apply(r, x) - x).norm() / x.norm() > 1
    if kind == "isoquant":  # R = SO4 . H: undoing H first is the mistake of a public kernel
        power = sylvester(128) @ torch.diag(r.signs[0].double())
        swapped = torch.block_diag(*r.blocks.double()).T @ power.T @ apply(r, x).double().T
        assert (swapped.T - x).norm() / x.norm() > 1


@pytest.mark.parametrize("kind, cost", COSTS.items())
def test_parameters_and_multiply_adds(kind, cost):
    r = make_rotation(kind, 128)
    assert (r.num_parameters, r.num_fma) == cost
    if kind == "hadamard":  # two windows of 64
        assert make_rotation(kind, 80).num_fma == 2 * 64 * 6


# ---- quaternions


def hamilton(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """``(a, u)(b, v) = (ab - u.v, av + bu + u x v)``."""
    a, u, b, v = p[..., :1], p[..., 1:], q[..., :1], q[..., 1:]
    return torch.cat([a * b - (u * v).sum(-1, keepdim=True), a * v + b * u + torch.linalg.cross(u, v)], -1)


def conjugate(q: torch.Tensor) -> torch.Tensor:
    return q * torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=q.dtype)


@pytest.mark.parametrize("kind, streams", [("so4", (1, 2)), ("so3", (1, 1)), ("isoquant", (1, 2))])
def test_blocks_are_quaternion_products(kind, streams):
    dim, seed = 128, 5
    left, right = (torch.tensor(normals(seed, s, dim), dtype=torch.float64).reshape(-1, 4) for s in streams)
    left, right = left / left.norm(dim=-1, keepdim=True), right / right.norm(dim=-1, keepdim=True)
    v = torch.randn(dim // 4, 4, dtype=torch.float64)
    expected = hamilton(hamilton(left, v), conjugate(right))
    blocks = make_rotation(kind, dim, seed).blocks.double()
    assert (torch.einsum("nij,nj->ni", blocks, v) - expected).abs().max() <= 1e-5
    assert (torch.linalg.det(blocks) - 1).abs().max() <= 1e-5
    negated = rotation.left_multiplication(-left) @ rotation.right_multiplication(-right)
    assert (negated - blocks).abs().max() <= 1e-5
    one_negated = rotation.left_multiplication(-left) @ rotation.right_multiplication(right)
    assert (one_negated + blocks).abs().max() <= 1e-5


def test_pairs_reach_all_of_so4_and_single_quaternions_do_not():
    for kind, span in (("so4", 16), ("so3", 1 + 9)):  # all 4 x 4 matrices; a fixed axis and all 3 x 3 matrices
        assert torch.linalg.matrix_rank(make_rotation(kind, 512).blocks.reshape(-1, 16), atol=1e-3) == span
    x = torch.randn(9, 128)
    assert (apply(make_rotation("so3", 128), x) - x)[:, ::4].abs().max() <= 1e-5
    for kind in ("so4", "isoquant"):
        assert ((apply(make_rotation(kind, 128), x) - x)[:, ::4].abs().mean(0) > 0.01).all()


# ---- the seed rule


def splitmix64(counter: int) -> int:
    """Output of SplitMix64 for its ``counter``-th step from state 0."""
    mask = 2**64 - 1
    z = counter * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


def words(seed: int, stream: int, count: int) -> list[int]:
    return [splitmix64((seed << 32) + (stream << 28) + n + 1) for n in range(count)]


def normals(seed: int, stream: int, count: int) -> list[float]:
    half = (count + 1) // 2
    u = [((w >> 11) + 0.5) / 2**53 for w in words(seed, stream, 2 * half)]
    pairs = [(math.sqrt(-2 * math.log(a)), 2 * math.pi * b) for a, b in zip(u[:half], u[half:])]
    return [*(r * math.cos(t) for r, t in pairs), *(r * math.sin(t) for r, t in pairs)][:count]


def test_splitmix64_of_this_file_is_the_published_one():
    assert [splitmix64(n) for n in (1, 2, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("seed", [0, 1, 42, 2**31 - 1])
def test_seed_rule(seed):
    for stream in range(4):
        assert [w % 2**64 for w in rotation.random_words(seed, stream, 33).tolist()] == words(seed, stream, 33)
        assert rotation.random_normals(seed, stream, 33).tolist() == pytest.approx(normals(seed, stream, 33), abs=1e-12)
    signs = [-1.0 if w >> 63 else 1.0 for w in words(seed, 0, 160)]
    assert make_rotation("hadamard2", 80, seed).signs.flatten().tolist() == signs
    assert make_rotation("isoquant", 80, seed).signs.flatten().tolist() == signs[:80]


def test_dense_is_the_positive_qr_of_the_normals():
    matrix = make_rotation("dense", 12, 7).matrix.double()
    gaussian = torch.tensor(normals(7, 3, 144), dtype=torch.float64).reshape(12, 12)
    upper = matrix.T @ gaussian
    assert upper.tril(-1).abs().max() <= 1e-5 and (upper.diagonal() > 0).all()


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "none"])
def test_same_for_a_seed_and_different_between_seeds(kind):
    first, other = make_rotation(kind, 64, 1), make_rotation(kind, 64, 2)
    with torch.inference_mode():
        again = make_rotation.__wrapped__(kind, 64, 1)
    for a, b, c in zip(first.tensors(), again.tensors(), other.tensors()):
        assert torch.equal(a, b) and not b.is_inference() and a.dtype == torch.float32
        assert a.numel() == 0 or not torch.equal(a, c)


@pytest.mark.parametrize(
    "arguments, rule",
    [
        (("haar", 64), "kind must be one of isoquant, hadamard, .* got 'haar'"),
        *((("isoquant", d), f"head_dim must .* multiple of 4 and at most 512, got {d}$") for d in (0, -4, 6, 514, 516)),
        *((("isoquant", 64, s), rf"seed must be from 0 to 2\*\*31 - 1, got {s}$") for s in (-1, 2**31)),
    ],
)
def test_errors(arguments, rule):
    with pytest.raises(ValueError, match=rule):
        make_rotation(*arguments)


# ---- what rotations are for: the relative error of a three-bit code

LEVELS = torch.tensor([0.245094, 0.756005, 1.343909, 2.151946])


def relative_mse(y: torch.Tensor, unbiased: bool = False) -> torch.Tensor:
    """``|y - y^|^2 / |y|^2`` of each row, three bits; scale ``|y|`` or ``|y|^2 / <y, Q>``."""
    rms = y.square().mean(-1, keepdim=True).sqrt()
    nearest = LEVELS[(y.abs().unsqueeze(-1) / rms.unsqueeze(-1) - LEVELS).abs().argmin(-1)]
    nearest = torch.where(y < 0, -nearest, nearest)
    scale = y.square().sum(-1, keepdim=True) / (y * nearest).sum(-1, keepdim=True) if unbiased else rms
    return (y - scale * nearest).square().sum(-1) / y.square().sum(-1)


def outliers(noise: torch.Tensor) -> torch.Tensor:
    """Four channels of ``noise`` times 20."""
    noise = noise.clone()
    noise[:, torch.randperm(noise.shape[-1])[:4]] *= 20
    return noise


def constant(noise: torch.Tensor) -> torch.Tensor:
    return 1 + 0.1 * noise


def hadamard_row(noise: torch.Tensor) -> torch.Tensor:
    return torch.tensor([(-1.0) ** (i & 37).bit_count() for i in range(noise.shape[-1])]) + 0.1 * noise


def mean_mse(kind: str, dim: int, fixture, unsigned: bool = False, seeds: int = 24) -> float:
    total = 0.0
    for seed in range(seeds):
        r = make_rotation(kind, dim, seed)
        if unsigned:
            r = Rotation(kind, dim, torch.ones_like(r.signs), r.blocks, r.matrix)
        total += relative_mse(apply(r, fixture(torch.randn(64, dim)))).mean().item()
    return total / seeds


@pytest.mark.parametrize(
    "kind, expected",
    [("none", 0.459), ("so3", 0.368), ("so4", 0.278), ("hadamard", 0.0305), ("isoquant", 0.0301), ("dense", 0.0339)],
)
def test_outlier_channels(kind, expected):
    assert mean_mse(kind, 128, outliers) == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize("fixture", [outliers, constant, hadamard_row])
@pytest.mark.parametrize("kind", [*MIXED, "dense"])
def test_signed_rotations_are_safe(kind, fixture):
    assert mean_mse(kind, 128, fixture) <= 0.036


@pytest.mark.parametrize("kind", ["hadamard", "isoquant"])
def test_a_hadamard_transform_without_signs_is_not(kind):
    assert mean_mse(kind, 128, constant, unsigned=True) >= 0.3
    assert mean_mse(kind, 128, hadamard_row, unsigned=True) >= 0.3


@pytest.mark.parametrize("dim, bar", [(80, 0.045), (96, 0.045), (112, 0.05), (192, 0.045), (320, 0.045)])
@pytest.mark.parametrize("kind", MIXED)
def test_no_coordinate_is_left_unmixed_or_unsigned(kind, dim, bar):
    """One outlier at any place, and the vectors that an unsigned window would gather in one coordinate."""
    single = torch.stack([relative_mse(apply(make_rotation(kind, dim, s), torch.eye(dim)), True) for s in range(16)])
    assert single.mean(0).max() <= bar
    for fixture in (constant, hadamard_row):
        assert mean_mse(kind, dim, fixture) <= 0.045


def test_a_compiled_model_makes_the_same_rotations():
    """By torch's own compiler, and of a seed that no other test has made."""
    made = torch.compile(lambda: make_rotation("isoquant", 24, seed=987).signs + 0)()
    torch._dynamo.reset()
    assert torch.equal(made, make_rotation.__wrapped__("isoquant", 24, seed=987).signs)
