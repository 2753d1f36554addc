"""Lloyd-Max codebooks: published numbers, and the two conditions of optimality by independent quadrature."""

import math

import pytest
import torch

from torch_kvq.codecs.codebook import check_bits, grid_levels, lloyd_max

# Levels and mean squared error for N(0, 1): Max (1960), table I, to more digits.
GAUSSIAN = {
    1: ([0.797885], 0.363380),
    2: ([0.452780, 1.510418], 0.117482),
    3: ([0.245094, 0.756005, 1.343909, 2.151946], 0.034548),
    4: ([0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590], 0.009501),
}
DIMS = (4, 64, 80, 128, 512)


def simpson(f, low: float, high: float, steps: int = 1200) -> float:
    h = (high - low) / steps
    inner = sum((4 if i % 2 else 2) * f(low + i * h) for i in range(1, steps))
    return (f(low) + inner + f(high)) * h / 3


def normal(t: float) -> float:
    return math.exp(-t * t / 2) / math.sqrt(2 * math.pi)


def boundaries(levels: list[float]) -> list[float]:
    return [0.0, *((a + b) / 2 for a, b in zip(levels, levels[1:]))]


def sphere_integral(f, low: float, high: float, dim: int) -> float:
    """Integral of ``f(t)`` over ``low .. high`` against the law of ``t = sqrt(D) u_1``, ``u`` uniform on the sphere.

    The angle ``a`` of ``u_1 = sin a`` has density proportional to ``cos(a)^(D - 2)``, the area of a slice.
    """
    root = math.sqrt(dim)
    angles = [math.asin(min(edge / root, 1.0)) for edge in (low, high)]
    norm = math.exp(math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2)) / math.sqrt(math.pi)
    return simpson(lambda a: f(root * math.sin(a)) * math.cos(a) ** (dim - 2) * norm, *angles)


@pytest.mark.parametrize("bits", GAUSSIAN)
def test_gaussian_levels_and_error(bits):
    expected, mse = GAUSSIAN[bits]
    levels = list(lloyd_max(bits))
    assert levels == pytest.approx(expected, abs=1e-5)
    edges = [*boundaries(levels), 12.0]
    cells = zip(edges, edges[1:], levels)
    error = 2 * sum(simpson(lambda t, c=c: (t - c) ** 2 * normal(t), a, b) for a, b, c in cells)
    assert error == pytest.approx(mse, abs=1e-4)


def test_three_bit_boundaries():
    assert boundaries(list(lloyd_max(3))) == pytest.approx([0, 0.500550, 1.049957, 1.747928], abs=1e-5)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", DIMS)
def test_levels_are_the_means_of_their_cells(dim, bits):
    levels = list(lloyd_max(bits, dim))
    assert levels == sorted(levels) and len(levels) == 2 ** (bits - 1) and levels[0] > 0
    edges = [*boundaries(levels), math.sqrt(dim)]
    masses = [sphere_integral(lambda t: 1.0, a, b, dim) for a, b in zip(edges, edges[1:])]
    moments = [sphere_integral(lambda t: t, a, b, dim) for a, b in zip(edges, edges[1:])]
    assert sum(masses) == pytest.approx(0.5, abs=1e-6)
    assert levels == pytest.approx([m / p for m, p in zip(moments, masses)], abs=1e-5)


@pytest.mark.parametrize("dim", [64, 128, 512])
def test_error_on_the_sphere_is_a_little_below_the_gaussian(dim):
    levels = list(lloyd_max(3, dim))
    edges = [*boundaries(levels), math.sqrt(dim)]
    cells = zip(edges, edges[1:], levels)
    error = 2 * sum(sphere_integral(lambda t, c=c: (t - c) ** 2, a, b, dim) for a, b, c in cells)
    assert 0.0325 < error < GAUSSIAN[3][1]
    if dim == 128:
        assert error == pytest.approx(0.0341, abs=2e-4)


def test_no_small_step_of_a_level_lowers_the_error():
    def error(levels):
        return sum(
            sphere_integral(lambda t, c=c: (t - c) ** 2, a, b, 64)
            for a, b, c in zip(boundaries(levels), [*boundaries(levels)[1:], 8.0], levels)
        )

    best = list(lloyd_max(3, 64))
    for i in range(len(best)):
        for step in (-0.01, 0.01):
            assert error([c + step * (j == i) for j, c in enumerate(best)]) > error(best)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_converges_to_the_gaussian_like_one_over_d(bits):
    gaps = [max(abs(a - b) for a, b in zip(lloyd_max(bits, d), lloyd_max(bits))) for d in (32, 64, 128, 256, 512)]
    assert gaps[-1] < 0.012
    for larger, smaller in zip(gaps, gaps[1:]):
        assert 1.8 < larger / smaller < 2.3


def test_semicircle_in_four_dimensions():
    # D = 4: u_1 has the semicircle law, so E|2 u_1| = 8 / (3 pi), the one-bit level.
    assert lloyd_max(1, 4)[0] == pytest.approx(8 / (3 * math.pi), abs=1e-6)


@pytest.mark.parametrize("dim", [64, 128, 512])
@pytest.mark.parametrize("bits, growth", [(2, 3e-4), (3, 1e-3), (4, 6e-3)])
def test_grid_levels_are_eight_bit_integers_at_next_to_no_cost(bits, growth, dim):
    def error(levels):
        edges = [*boundaries(levels), math.sqrt(dim)]
        cells = zip(edges, edges[1:], levels)
        return 2 * sum(sphere_integral(lambda t, c=c: (t - c) ** 2, a, b, dim) for a, b, c in cells)

    levels = grid_levels(bits, dim)
    whole = [level / levels[-1] * 126.5 - 0.5 for level in levels]
    assert whole == pytest.approx([round(n) for n in whole], abs=1e-9) and whole[-1] == pytest.approx(126)
    assert error(levels) < (1 + growth) * error(lloyd_max(bits, dim))


@pytest.mark.parametrize("dim", [None, 4, 12, 64, 80, 128, 512])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_grid_is_exact_in_the_numbers_kernels_hold(bits, dim):
    levels = torch.tensor(grid_levels(bits, dim), dtype=torch.float32)  # as a store holds them
    steps = levels / (levels[-1] / 126.5)
    assert (steps - steps.floor() - 0.5).abs().max() < 1e-3  # an 8-bit integer and half a step, however the quotient rounds
    halves = steps.to(torch.float16).double()
    assert torch.equal(halves, halves.floor() + 0.5) and halves.diff().min() >= 1


@pytest.mark.parametrize("value", [1, 5, 0, -3, 3.0, "3", None, True])
def test_bits_out_of_range(value):
    with pytest.raises(ValueError, match=r"k_bits must be an integer from 2 to 4, got ") as error:
        check_bits("k_bits", value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("value", [2, 3, 4])
def test_bits_in_range(value):
    check_bits("k_bits", value)
