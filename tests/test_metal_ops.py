"""Every operator by the shaders of ``torch_kvq/mps`` against its naive twin: on a Mac, else emulated in four orders."""

import pytest
import torch
from metal_shaders import moved, needs_shaders, run, shaders  # noqa: F401
from op_cases import CASES as ALL_CASES
from op_cases import Case, codes_of, encode, make_store, problem, relative_error

from torch_kvq.backends import metal
from torch_kvq.backends.metal import plan
from torch_kvq.codecs.rotation import make_rotation
from torch_kvq.ops import reference
from torch_kvq.ops.schemas import SCALE_RULES

pytestmark = [needs_shaders, pytest.mark.usefixtures("shaders")]
TOLERANCE = 1e-5
FLOAT, HALF = torch.float32, (torch.bfloat16, torch.float16)

CASES = [
    *(case for case in ALL_CASES if not case.name.startswith("rows")),  # 9,600 rows take the emulator half a minute
    Case("rows", dim=12, group=16, queries=20, tokens=40, mask="bool", batch=2),
    Case("T513", tokens=513),
    Case("T512", tokens=512),
    Case("T511", tokens=511),
    Case("T513-start", tokens=900, start=301, mask="float"),
    Case("T513-mask", tokens=513, mask="bool", batch=2, queries=3),
    Case("T513-latent", tokens=513, shared=True, heads=1, group=16, dim=96),
    *(
        Case(f"{str(dtype)[6:]}-D{dim}", dim=dim, tokens=513, group=4, dtype=dtype)
        for dtype in HALF
        for dim in (64, 80, 96, 128, 192, 256)
    ),
]


def check_close(out, expected, dtype):
    """float32 within the tolerance; 16-bit results are those of float32 rounded once, which alone is up to 4e-3 in bfloat16."""
    assert out.dtype == dtype
    if dtype == FLOAT:
        assert relative_error(out, expected) <= TOLERANCE
        return
    unit = 2.0 ** torch.floor(torch.log2(expected.abs())) * torch.finfo(dtype).eps
    assert ((out.float() - expected).abs() <= 0.51 * unit + 1e-5 * expected.abs().max()).all()
    assert (out != expected.to(dtype)).float().mean() < 0.03


def check_attend(case, dtype=FLOAT):
    arguments, _, expected, expected_lse = problem(case)
    out, lse = run("attend", arguments, (expected.shape, dtype), (expected_lse.shape, FLOAT))
    check_close(out, expected, dtype)
    finite = expected_lse.isfinite()
    assert torch.equal(lse[~finite], expected_lse[~finite])
    assert torch.allclose(lse[finite], expected_lse[finite], rtol=1e-5, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attend(case):
    check_attend(case)
    if case.mask == "dead" and not case.sink_logits:
        arguments, _, expected, lse = problem(case)
        out, lse = run("attend", arguments, (expected.shape, FLOAT), (lse.shape, FLOAT))
        assert (lse[:, :, 0] == -torch.inf).all() and (out[:, :, 0] == 0).all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", [Case("short", queries=5, dim=80), Case("long", tokens=513, dim=128)], ids=lambda c: c.name)
def test_attend_into_half_precision(case, dtype):
    check_attend(case, dtype)


@pytest.mark.parametrize("tokens, mask", [(100, "bool"), (700, "float"), (700, "dead")])
@pytest.mark.parametrize("dim", [32, 64, 80])
def test_few_threadgroups_take_many_blocks_each(monkeypatch, tokens, mask, dim):
    monkeypatch.setattr(plan, "TARGET_GROUPS", 1)
    case = Case("wide", tokens=tokens, exact=150, dim=dim, queries=3, mask=mask, batch=2)
    arguments = problem(case)[0]
    assert plan.split_packed(0, tokens, 8, arguments[4].shape[-1]).blocks >= 4
    check_attend(case)


def test_nan_stays_in_its_row():
    arguments, _, expected, expected_lse = problem(Case("nan", tokens=600, queries=3))
    q = arguments[0].clone()
    q[:, 1, 2] = torch.nan
    out, lse = run("attend", (q, *arguments[1:]), (expected.shape, FLOAT), (expected_lse.shape, FLOAT))
    hit = torch.zeros_like(expected_lse, dtype=torch.bool)
    hit[:, 1, 2] = True
    assert out[hit].isnan().all() and torch.equal(lse.isnan(), hit)
    assert relative_error(out[~hit], expected[~hit]) <= TOLERANCE


PLAIN = dict(shared=False, mask="", softcap=0.0, sink_logits=False, start=0)
SCORE_CASES = [case for case in CASES if all(getattr(case, name) == value for name, value in PLAIN.items())]


@pytest.mark.parametrize("case", SCORE_CASES, ids=lambda case: case.name)
def test_qk_and_pv(case):
    (q, keys, _, exact_keys, exact_values, *_), values, out, _ = problem(case)
    shape, tokens = (*q.shape[:3], case.tokens + case.exact), (case.tokens, case.num_sinks)
    expected = torch.empty(shape)
    reference.qk(q, keys, exact_keys, *tokens, expected)
    (scores,) = run("qk", (q, keys, exact_keys, *tokens), (shape, FLOAT))
    assert relative_error(scores, expected) <= TOLERANCE
    p = (expected * case.dim**-0.5).softmax(-1).to(case.dtype)
    expected = torch.empty(out.shape)
    reference.pv(p, values, exact_values, *tokens, expected)
    (out,) = run("pv", (p, values, exact_values, *tokens), (out.shape, FLOAT))
    assert relative_error(out, expected) <= TOLERANCE


KINDS = ["isoquant", "hadamard2", "dense", "so3", "none"]


@pytest.mark.parametrize("dim", [4, 12, 80, 128, 512])
def test_rotate(dim):
    x = torch.randn(3, dim, 37).transpose(1, 2).contiguous()[:, 1:]
    for kind in KINDS:
        parts = make_rotation(kind, dim).tensors()
        for inverse in (False, True):
            (out,) = run("rotate", (x, *parts, inverse), (x.shape, FLOAT))
            assert relative_error(out, reference.rotated(x, *parts, inverse)) <= TOLERANCE, (kind, inverse)
        back = moved(out.clone())
        metal.launcher("rotate")(back, *moved(parts), False, back)  # in place
        assert relative_error(back.cpu(), x) <= TOLERANCE


def test_rotate_with_every_part_at_once():
    x, parts = torch.randn(5, 80), [*make_rotation("isoquant", 80).tensors()[:2], make_rotation("dense", 80).matrix]
    for inverse in (False, True):
        (out,) = run("rotate", (x, *parts, inverse), (x.shape, FLOAT))
        assert relative_error(out, reference.rotated(x, *parts, inverse)) <= TOLERANCE


@pytest.mark.parametrize("dtype", HALF)
def test_rotate_in_half_precision(dtype):
    x, parts = torch.randn(2, 7, 96).to(dtype), make_rotation("isoquant", 96).tensors()
    (out,) = run("rotate", (x, *parts, False), (x.shape, dtype))
    check_close(out, reference.rotated(x, *parts), dtype)


def encoded_in_pieces(x, store, along_tokens, rule, pieces):
    """The store after its tokens were encoded by shaders, piece by piece."""
    there = moved(store)
    for first, last in pieces:
        piece = moved(x)[:, :, first:last].transpose(1, 2).contiguous().transpose(1, 2)
        encode(metal.launcher("encode"), piece, there, along_tokens, first, rule)
    for mine, part in zip(store, there):
        mine.copy_(part)


PIECES = ((0, 1), (1, 33), (33, 64), (64, 64), (64, 101))
CODECS = [(64, 2, "norm"), (80, 3, "matched"), (128, 3, "unbiased"), (96, 4, "mse"), (256, 3, "unbiased"), (12, 2, "mse")]


@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize("dim, bits, rule", [*CODECS, (192, 4, "norm"), (512, 3, "matched")])
def test_encode_and_decode_in_ragged_pieces(dim, bits, rule, along_tokens):
    x = torch.randn(2, 3, 101, dim)
    store = make_store(x, bits, along_tokens, fill=False)
    expected = [part.clone() for part in store]
    encoded_in_pieces(x, store, along_tokens, rule, PIECES)
    for first, last in PIECES:
        encode(reference.encode, x[:, :, first:last], expected, along_tokens, first, rule)
    assert (codes_of(store, along_tokens, 128) != codes_of(expected, along_tokens, 128)).sum() <= 1
    assert torch.equal(store[2].isnan(), expected[2].isnan())
    scales = (part[2][:, :, :101].view(torch.int16).int() for part in (store, expected))
    assert (next(scales) - next(scales)).abs().max() <= 1
    for first, last in ((0, 101), (37, 70), (5, 5), (100, 101)):
        (out,) = run("decode", (expected, along_tokens, first), ((2, 3, last - first, dim), FLOAT))
        assert relative_error(out, reference.decoded(expected, along_tokens, first, last, dim)) <= TOLERANCE


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("along_tokens", [False, True])
def test_encode_and_decode_in_half_precision(along_tokens, dtype):
    x = torch.randn(1, 2, 45, 64).to(dtype)
    store, expected = (make_store(x, 3, along_tokens, centre=False, fill=False) for _ in range(2))
    encoded_in_pieces(x, store, along_tokens, "unbiased", [(0, 45)])
    encode(reference.encode, x, expected, along_tokens, 0, "unbiased")
    assert (store[0] != expected[0]).sum() + (store[1] != expected[1]).sum() <= 1
    (out,) = run("decode", (expected, along_tokens, 0), (x.shape, dtype))
    check_close(out, reference.decoded(expected, along_tokens, 0, 45, 64), dtype)


EXTREMES = {
    "zeros": lambda x: x * 0,
    "denormal": lambda x: x * 1e-40,
    "large": lambda x: x * 1e4,
    "largest": lambda x: x / x.norm(dim=-1, keepdim=True) * 65504 * x.shape[-1] ** 0.5,
    "one coordinate": lambda x: torch.nn.functional.one_hot(torch.tensor(3), x.shape[-1]) * x,
}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("along_tokens", [False, True])
def test_extreme_vectors(name, along_tokens):
    x = EXTREMES[name](torch.randn(1, 1, 70, 64))
    for rule in SCALE_RULES:
        store = make_store(x, 3, along_tokens, centre=False, balance=False, fill=False)
        encoded_in_pieces(x, store, along_tokens, rule, [(0, 70)])
        expected = make_store(x, 3, along_tokens, centre=False, balance=False, rule=rule)
        (out,) = run("decode", (store, along_tokens, 0), (x.shape, FLOAT))
        assert relative_error(out, reference.decoded(expected, along_tokens, 0, 70, 64)) <= 1e-3


def gapped(x):
    """The same values where every dim but the last has room between its steps."""
    wide = torch.full((*(2 * n for n in x.shape[:-1]), x.shape[-1]), -1 if not x.is_floating_point() else torch.nan)
    wide = wide.to(x.dtype)
    view = wide[tuple(slice(0, None, 2) for _ in x.shape[:-1])]
    return view.copy_(x)


@pytest.mark.parametrize("tokens", [100, 600])
def test_stores_with_gaps(tokens):
    arguments, values, expected, lse = problem(Case("gaps", tokens=tokens, dim=80, queries=2))
    q, keys, _, *rest = arguments
    stores = [
        [*map(gapped, store[:2]), store[2].clone(), store[3], *map(gapped, store[4:6]), *store[6:]] for store in (keys, values)
    ]
    for store in stores:
        store[2] = gapped(store[2].unsqueeze(-1).expand(*store[2].shape, 2).contiguous())[..., 0].contiguous()
    out, _ = run("attend", (q, *stores, *rest), (expected.shape, FLOAT), (lse.shape, FLOAT))
    assert relative_error(out, expected) <= TOLERANCE


@pytest.mark.parametrize("dtype", [FLOAT, *HALF])
def test_merge(dtype):
    outs, lses = torch.randn(3, 2, 4, 5, 80).to(dtype), 5 * torch.randn(3, 2, 4, 5)
    lses[0, 0], lses[:, 1, 1] = -torch.inf, -torch.inf
    expected, expected_lse = torch.empty(2, 4, 5, 80), torch.empty(2, 4, 5)
    reference.merge(outs, lses, expected, expected_lse)
    outs[0, 0], outs[:, 1, 1] = torch.nan, torch.nan  # without a share
    out, lse = run("merge", (outs, lses), (expected.shape, dtype), (expected_lse.shape, FLOAT))
    check_close(out, expected, dtype)
    assert torch.allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)
