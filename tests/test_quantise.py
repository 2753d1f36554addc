"""Encode and decode: measured errors of the scale rules, hand quantisation, extreme inputs, the 1-bit index."""

import pytest
import torch

from torch_kvq import layout, ops
from torch_kvq.codecs.isoquant import IsoQuantConfig
from torch_kvq.codecs.rotation import KINDS
from torch_kvq.ops.schemas import SCALE_RULES

CPU = torch.device("cpu")


def encoded(x, config, along_tokens=False, centre=None, balance=None) -> list[torch.Tensor]:
    """The nine tensors of a store that holds ``x [B, H, N, D]``, from poisoned buffers."""
    batch, heads, tokens, dim = x.shape
    shapes_of = layout.value_shapes if along_tokens else layout.key_shapes
    shapes = shapes_of(batch, heads, layout.round_up(tokens), dim, config.bits)
    sign, mag = (torch.full(shapes[name], -1, dtype=torch.int32) for name in ("sign", "mag"))
    scale = torch.full(shapes["scale"], torch.nan, dtype=torch.float16)
    centre, balance = (torch.empty(0) if part is None else part for part in (centre, balance))
    codec = [config.levels(dim, CPU), centre, balance, *config.make_rotation(dim, CPU).tensors()]
    ops.encode(x, *codec, config.rule, along_tokens, 0, sign, mag, scale)
    return [sign, mag, scale, *codec]


def round_trip(x, config, along_tokens=False, centre=None, balance=None) -> torch.Tensor:
    out = torch.full(x.shape, torch.nan)
    ops.decode(encoded(x, config, along_tokens, centre, balance), along_tokens, 0, out)
    return out


def relative_error(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x - y).square().sum(-1) / x.square().sum(-1)


def slope(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sum(-1) / x.square().sum(-1)


@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize(
    "rule, mse, gain",
    [("norm", 0.0341, 0.967), ("matched", 0.0339, None), ("mse", 0.0336, None), ("unbiased", 0.0348, 1)],
)
def test_error_and_slope_of_a_scale_rule(rule, mse, gain, along_tokens):
    x = torch.randn(1, 1, 8192, 128)
    y = round_trip(x, IsoQuantConfig(3, scale=rule), along_tokens)
    assert relative_error(x, y).mean().item() == pytest.approx(mse, abs=0.0006)
    if gain is not None:
        assert slope(x, y).mean().item() == pytest.approx(gain, abs=0.003)
    if rule == "unbiased":  # of every vector, not only on average
        assert (slope(x, y) - 1).abs().max() <= 2**-10
    if rule == "matched":
        assert (y.norm(dim=-1) / x.norm(dim=-1) - 1).abs().max() <= 2**-10
    if rule == "mse":  # the residual of a projection
        assert ((x - y) * y).sum(-1).abs().max() <= 2**-10 * x.square().sum(-1).max()


@pytest.mark.parametrize("bits, mse", [(2, 0.117482), (3, 0.034548), (4, 0.009501)])
def test_error_falls_with_bits(bits, mse):
    x = torch.randn(1, 1, 4096, 256)
    error = relative_error(x, round_trip(x, IsoQuantConfig(bits, scale="norm"))).mean().item()
    assert error == pytest.approx(mse, rel=0.02)


def test_score_error_meets_the_bound():
    """``E|q . (k - k^)|^2 = sigma^2 |q|^2``, sigma^2 the noise of a coordinate (RotaryQuant, equation 10)."""
    q, k = torch.randn(2, 1, 1, 10_000, 128)
    noise = k - round_trip(k, IsoQuantConfig(3))
    bound = 0.0348 * k.square().sum(-1) / 128 * q.square().sum(-1)
    assert 0.9 <= (q * noise).sum(-1).square().mean() / bound.mean() <= 1.05
    # A query along the key is the worst case of a biased scale and the best of an unbiased one.
    biased = k - round_trip(k, IsoQuantConfig(3, scale="norm"))
    assert (k * noise).sum(-1).square().mean() < 0.01 * bound.mean() < 0.1 * (k * biased).sum(-1).square().mean()


def by_hand(x, config, centre, balance) -> torch.Tensor:
    """Quantises in float64, by search over all signed levels."""
    dim = x.shape[-1]
    matrix = torch.empty(dim, dim)
    ops.rotate(torch.eye(dim), *config.make_rotation(dim, CPU).tensors(), False, matrix)  # row i is R e_i
    centre, balance = centre.double().unsqueeze(-2), balance.double().unsqueeze(-2)
    y = (x.double() - centre) / balance @ matrix.double()
    levels = config.levels(dim, CPU).double()
    levels = torch.cat([levels, -levels])
    norm = y.norm(dim=-1, keepdim=True)
    code = levels[(y.unsqueeze(-1) * dim**0.5 / norm.unsqueeze(-1) - levels).abs().argmin(-1)]
    dot, square = (y * code).sum(-1, keepdim=True), code.square().sum(-1, keepdim=True)
    scale = {"norm": norm / dim**0.5, "matched": norm / square**0.5, "unbiased": norm**2 / dot, "mse": dot / square}
    return centre + balance * (scale[config.scale].half().double() * code @ matrix.double().T)


@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize("bits, kind, dim", [(3, "isoquant", 64), (2, "hadamard2", 80), (4, "dense", 12), (3, "none", 36)])
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_round_trip_is_quantisation_by_hand(rule, bits, kind, dim, along_tokens):
    config = IsoQuantConfig(bits, kind, rule, seed=11)
    x, centre = torch.randn(2, 3, 33, dim) * 2 + 1, torch.randn(2, 3, dim)
    balance = torch.exp(torch.randn(2, 3, dim) / 2)
    error = relative_error(by_hand(x, config, centre, balance), round_trip(x, config, along_tokens, centre, balance))
    assert error.max() <= 1e-6  # one step of a float16 scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_strided_inputs_give_the_same_codes(dtype):
    x = torch.randn(2, 40, 3, 64).to(dtype).transpose(1, 2)
    for along_tokens in (False, True):
        for a, b in zip(*(encoded(v, IsoQuantConfig(3), along_tokens)[:3] for v in (x, x.float().contiguous()))):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())


EXTREMES = {
    "zeros": lambda x: x * 0,
    "denormal": lambda x: x * 1e-39,
    "tiny": lambda x: x * 1e-6,
    "large": lambda x: x * 1e4,
    "norm of 65504": lambda x: 65504 * x / x.norm(dim=-1, keepdim=True),
    "one of 65504": lambda x: 65504.0 * torch.eye(x.shape[-1]).expand_as(x[..., :1, :].repeat(1, 1, x.shape[-1], 1)),
    "one token": lambda x: x[:, :, :1],
    "one zero among others": lambda x: x * (torch.arange(x.shape[2]) != 3)[:, None],
}


@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_extreme_inputs_stay_finite(rule, case):
    x = EXTREMES[case](torch.randn(1, 2, 9, 64))
    for kind in KINDS:
        for along_tokens in (False, True):
            y = round_trip(x, IsoQuantConfig(3, kind, rule), along_tokens)
            assert y.isfinite().all()
            assert not y[x.norm(dim=-1) == 0].any()
            if case in ("large", "norm of 65504", "one token"):
                assert relative_error(x, y).max() < 0.15
            if case in ("denormal", "tiny"):
                assert y.abs().max() <= 2 * x.abs().max()


def test_zeros_become_the_centre():
    centre = torch.randn(1, 2, 64)
    x = centre.unsqueeze(2).expand(1, 2, 5, 64)
    assert torch.equal(round_trip(x, IsoQuantConfig(3), centre=centre), x)


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e4])
def test_scale_is_stored_within_float16(size):
    x = size * torch.randn(1, 2, 64, 128)
    scale = encoded(x, IsoQuantConfig(3, scale="norm"))[2].double()
    exact = x.double().square().mean(-1).sqrt()
    assert (scale / exact - 1).abs().max() <= 2**-10


@pytest.mark.parametrize("dim, mean, deviation", [(64, 0.8004, 0.026), (128, 0.7994, 0.0187), (256, 0.7986, 0.0133)])
def test_sign_plane_is_the_one_bit_index(dim, mean, deviation):
    """RaBitQ: ``c = sign(R (k - centre)) / sqrt(D)`` and ``alpha = <c, R k / |k|>``."""
    config, centre = IsoQuantConfig(3), torch.randn(1, 1, dim)
    x = torch.randn(1, 1, 8192, dim) * 3 + centre
    sign = encoded(x, config, centre=centre)[0]
    negative = (sign.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32) & 1).flatten(-2) == 1
    y = torch.empty_like(x)
    ops.rotate(x - centre, *config.make_rotation(dim, CPU).tensors(), False, y)
    clear = y.abs() > 1e-5  # nearer to zero the sign is a matter of rounding
    assert torch.equal(negative[clear], (y < 0)[clear])
    alpha = torch.where(negative, -y, y).sum(-1) / dim**0.5 / y.norm(dim=-1)
    assert alpha.mean().item() == pytest.approx(mean, abs=0.002)
    assert alpha.std().item() == pytest.approx(deviation, rel=0.1)
