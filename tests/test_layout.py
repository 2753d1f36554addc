"""The packed format against its diagram: every code at every place, by plain integer loops."""

import pathlib
import re

import pytest
import torch

from torch_kvq import layout, ops
from torch_kvq.codecs.isoquant import IsoQuantConfig
from torch_kvq.ops import reference

BITS = (2, 3, 4)
DIMS = (4, 12, 64, 80, 96, 128, 512)
HEADER = pathlib.Path(__file__).parents[1] / "csrc/include/kvq/layout.h"


def bit(word: int, place: int) -> int:
    """Bit ``place`` of a signed 32-bit word: two's complement, bit 31 has weight -2^31."""
    return (word + (1 << 32) if word < 0 else word) >> place & 1


def code_at(planes: list[int], place: int) -> int:
    """The code that ``planes`` (sign, then magnitude from the least bit) hold at a place: sign above magnitude."""
    code = bit(planes[0], place) << (len(planes) - 1)
    for p, plane in enumerate(planes[1:]):
        code += bit(plane, place) << p
    return code


def key_code(sign, mag, token: int, i: int) -> int:
    w = i // 32
    return code_at([int(sign[0, 0, token, w]), *(int(x) for x in mag[0, 0, token, :, w])], i % 32)


def value_code(sign, mag, token: int, i: int) -> int:
    n = token // 32
    return code_at([int(sign[0, 0, n, i]), *(int(x) for x in mag[0, 0, n, :, i])], token % 32)


@pytest.mark.parametrize("background", ["zeros", "ones"])
@pytest.mark.parametrize("bits", BITS)
def test_every_code_at_every_bit_of_a_key_word(bits, background):
    rest = 0 if background == "zeros" else 2**bits - 1
    cases = [(code, place) for code in range(2**bits) for place in range(32)]
    codes = torch.full((1, 1, len(cases), 64), rest)
    for t, (code, place) in enumerate(cases):
        codes[0, 0, t, 32 * (t % 2) + place] = code
    sign, mag = reference.pack_keys(codes, bits)
    full = -1 if rest else 0
    for t, (code, place) in enumerate(cases):
        w = t % 2
        words = [int(sign[0, 0, t, w]), *(int(x) for x in mag[0, 0, t, :, w])]
        assert code_at(words, place) == code
        assert all(code_at(words, other) == rest for other in range(32) if other != place)
        assert int(sign[0, 0, t, 1 - w]) == full and (mag[0, 0, t, :, 1 - w] == full).all()
    assert torch.equal(reference.unpack_keys(sign, mag, 64), codes)


@pytest.mark.parametrize("background", ["zeros", "ones"])
@pytest.mark.parametrize("bits", BITS)
def test_every_code_at_every_bit_of_a_value_word(bits, background):
    rest = 0 if background == "zeros" else 2**bits - 1
    codes = torch.full((1, 1, 32 * 32, 2**bits), rest)  # block n has every code, one a coordinate, at its token n
    for place in range(32):
        codes[0, 0, 32 * place + place] = torch.arange(2**bits)
    sign, mag = reference.pack_values(codes, bits)
    for place in range(32):
        for code in range(2**bits):
            words = [int(sign[0, 0, place, code]), *(int(x) for x in mag[0, 0, place, :, code])]
            assert [code_at(words, other) for other in range(32)] == [rest] * place + [code] + [rest] * (31 - place)
    assert torch.equal(reference.unpack_values(sign, mag), codes)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", BITS)
def test_random_codes_lie_where_the_diagram_says(bits, dim):
    codes = torch.randint(0, 2**bits, (1, 1, 64, dim))
    key_planes, value_planes = reference.pack_keys(codes, bits), reference.pack_values(codes, bits)
    for t in (0, 1, 31, 32, 63):
        for i in range(dim):
            assert key_code(*key_planes, t, i) == value_code(*value_planes, t, i) == int(codes[0, 0, t, i])
    assert torch.equal(reference.unpack_keys(*key_planes, dim), codes)
    assert torch.equal(reference.unpack_values(*value_planes), codes)
    for planes, shapes in ((key_planes, layout.key_shapes), (value_planes, layout.value_shapes)):
        shape = shapes(1, 1, 64, dim, bits)
        assert [tuple(p.shape) for p in planes] == [shape["sign"], shape["mag"]]


@pytest.mark.parametrize("bits", BITS)
def test_value_of_every_code(bits):
    half = 2 ** (bits - 1)
    levels = torch.arange(1, half + 1) / 7
    values = reference.code_values(torch.arange(2**bits), levels).tolist()
    for code in range(2**bits):
        assert values[code] == (-1) ** (code // half) * levels[code % half].item()


def poisoned(shapes_of, dim: int, bits: int, capacity: int, word: int) -> dict[str, torch.Tensor]:
    shapes = shapes_of(1, 2, capacity, dim, bits)
    planes = {name: torch.full(shapes[name], word, dtype=torch.int32) for name in ("sign", "mag")}
    return {**planes, "scale": torch.full(shapes["scale"], torch.nan, dtype=torch.float16)}


def encode(x: torch.Tensor, bits: int, along_tokens: bool, start: int, out: dict[str, torch.Tensor]) -> None:
    config = IsoQuantConfig(bits, "none")
    nothing = torch.empty(0)
    levels = config.levels(x.shape[-1], x.device)
    ops.encode(x, levels, *[nothing] * 5, config.rule, along_tokens, start, out["sign"], out["mag"], out["scale"])


@pytest.mark.parametrize("dim", [d for d in DIMS if d % 32])
@pytest.mark.parametrize("bits", BITS)
def test_padding_bits_of_encoded_keys_are_zero(bits, dim):
    out = poisoned(layout.key_shapes, dim, bits, 32, word=-1)
    encode(-torch.rand(1, 2, 9, dim), bits, False, 3, out)
    for plane in (out["sign"][:, :, 3:12, -1], *out["mag"][:, :, 3:12, :, -1].unbind(-1)):
        assert all(bit(word, place) == 0 for word in plane.flatten().tolist() for place in range(dim % 32, 32))
    assert (out["sign"][:, :, :3] == -1).all() and (out["mag"][:, :, 12:] == -1).all()
    assert out["scale"].isfinite().sum() == 2 * 9


@pytest.mark.parametrize("start, tokens", [(0, 1), (5, 10), (5, 27), (31, 1), (31, 2), (17, 60), (32, 33)])
@pytest.mark.parametrize("bits", BITS)
def test_ragged_values_keep_the_bits_below_and_clear_those_beyond(bits, start, tokens):
    dim, capacity, stop = 12, 128, start + tokens
    before = torch.randint(0, 2**bits, (1, 2, capacity, dim))
    x = torch.randn(1, 2, tokens, dim)
    out, alone = (poisoned(layout.value_shapes, dim, bits, capacity, word=-1) for _ in range(2))
    out["sign"], out["mag"] = (plane.contiguous() for plane in reference.pack_values(before, bits))
    encode(x, bits, True, start, out)
    encode(x, bits, True, 0, alone)
    codes = reference.unpack_values(out["sign"], out["mag"])
    assert torch.equal(codes[:, :, :start], before[:, :, :start])
    assert torch.equal(codes[:, :, start:stop], reference.unpack_values(alone["sign"], alone["mag"])[:, :, :tokens])
    end = -(-stop // 32) * 32
    assert not codes[:, :, stop:end].any()
    assert torch.equal(codes[:, :, end:], before[:, :, end:])
    assert out["scale"].isfinite().nonzero()[:, 2].unique().tolist() == list(range(start, stop))


@pytest.mark.parametrize(
    "dim, bits, keys, values",
    [(128, 3, 50, 50), (64, 3, 26, 26), (128, 4, 66, 66), (128, 2, 34, 34), (256, 3, 98, 98), (80, 3, 38, 32)],
)
def test_bytes_of_a_token(dim, bits, keys, values):
    for along_tokens, shapes_of, expected in ((False, layout.key_shapes, keys), (True, layout.value_shapes, values)):
        assert layout.token_bytes(dim, bits, along_tokens) == expected
        parts = poisoned(shapes_of, dim, bits, 96, word=0).values()
        assert sum(p.numel() * p.element_size() for p in parts) == expected * 2 * 96
    assert round(128 * 2 / layout.token_bytes(128, 3, True), 2) == 5.12


def test_capacities_are_whole_blocks():
    assert [layout.round_up(n) for n in (0, 1, 31, 32, 33, 64, 65)] == [0, 32, 32, 32, 64, 64, 96]
    assert [layout.num_words(d) for d in (4, 32, 36, 80, 128, 512)] == [1, 1, 2, 3, 4, 16]


def enum(text: str, name: str) -> list[str]:
    """Lower-case members of a C++ enum, without the count that closes it."""
    members = re.search(rf"enum {name} {{([^}}]*)}}", text).group(1)
    return [member.strip().lower() for member in members.split(",")][:-1]


@pytest.mark.skipif(not HEADER.exists(), reason="the C++ header is not in this checkout")
def test_the_header_says_the_same():
    text = HEADER.read_text()
    constants = dict(re.findall(r"constexpr int (\w+) = (\d+);", text))
    constants["VERSION"] = constants.pop("LAYOUT_VERSION")
    for name in ("VERSION", "WORD_BITS", "BLOCK_LEN", "MIN_BITS", "MAX_BITS", "MAX_HEAD_DIM"):
        assert int(constants[name]) == getattr(layout, name), name
    assert enum(text, "PackedField") == list(layout.PACKED_FIELDS)
    assert enum(text, "ScaleRule") == list(ops.schemas.SCALE_RULES)
