"""``attend_top_p_select`` by the kernels for CUDA devices: bit for bit what its parts give one after another, whether window,
queries and cleared memory are one launch (``csrc/cuda/sparse_near.cu``) or the parts' own."""

import dataclasses

import pytest
import test_sparse_cuda
import torch
from cuda_host.attend_checks import moved
from op_cases import check_fences, fenced
from sparse_cases import SparseCase, draws, index_of
from test_sparse_cuda import BF16, FLOAT, HALF, is_native, on_gpu
from test_sparse_item_cuda import check_replays

from torch_kvq import layout, ops
from torch_kvq.ops import fused, reference, sparse_reference
from torch_kvq.store import no_tokens

kernels = test_sparse_cuda.kernels
CASE = SparseCase("near", dim=128, tokens=700, group=4, batch=2, heads=2, centred=True, dtype=BF16, exact=132)
OUTPUTS = "out", "lse", "planes", "terms", "scores", "indices", "count"


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """The kernels of few rows answer in the emulator, too."""
    monkeypatch.setenv("KVQ_EMULATE_FEW_ROWS", "1")


def of_case(case, top_p=0.7, edit=None, sinks=False):
    """Arguments up to ``top_p``, which ``edit`` may change by name."""
    index, draw, shape = index_of(case), draws(case, 11), (case.batch, case.heads, case.exact, case.dim)
    named = dict(q=index.q)
    named |= {name: no_tokens(*shape[:2], case.dim, name == "values", torch.device("cpu")) for name in ("keys", "values")}
    named |= {name: draw(*shape).to(case.dtype) for name in ("exact_keys", "exact_values")}
    named["sink_logits"] = draw(case.query_heads) if sinks else None
    named |= zip(("query_centre", "centre", "balance", "signs", "blocks", "matrix"), index.transform)
    named |= dict(sign=index.sign, factor=index.factor, bias=index.bias, scale=case.dim**-0.5, top_p=top_p)
    if edit:
        edit(named)
    return list(named.values())


def room_for(case, q, score_dtype=HALF, capacity=None):
    rows, selections = q.shape[:3], (case.batch, case.selections)
    shapes = q.shape, rows, (*rows, 4, layout.num_words(case.dim)), (*rows, 4)
    shapes = *shapes, (*rows, case.tokens), (*selections, capacity or case.tokens), selections
    dtypes = q.dtype, FLOAT, torch.int32, FLOAT, score_dtype, torch.int32, torch.int32
    rooms = [fenced(shape, dtype) for shape, dtype in zip(shapes, dtypes)]
    return [room for room, _ in rooms], [whole for _, whole in rooms]


def check_same(ours, theirs):
    """All outputs but the junk behind a selection."""
    ours, theirs = dict(zip(OUTPUTS, ours)), dict(zip(OUTPUTS, theirs))
    for outputs in (ours, theirs):
        indices, count = outputs["indices"], outputs["count"]
        indices[torch.arange(indices.shape[-1], device=count.device) >= count.unsqueeze(-1)] = -1
    for name in OUTPUTS:
        message = f"{name} differs"
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0, equal_nan=True, msg=message)


def check(kernels, arguments, case=CASE, **room):
    (ours, wholes), (theirs, _) = room_for(case, arguments[0], **room), room_for(case, arguments[0], **room)
    kernels.attend_top_p_select(*arguments, *ours)
    check_fences(*wholes)
    fused.attend_top_p_select(*arguments, *theirs, parts=kernels)
    check_same(ours, theirs)
    return ours


def varied(**changes):
    return dataclasses.replace(CASE, name=", ".join(f"{k} {v}" for k, v in changes.items()), **changes)


# Windows of no, one, a few and as many tokens as the kernel takes, and one more.
CASES = [varied(exact=n) for n in (0, 1, 16, 17, 144, 145, 320, 321)]
CASES += [varied(group=g, queries=m) for g, m in ((1, 1), (2, 1), (3, 1), (2, 2), (1, 4), (5, 1), (8, 1), (16, 1), (2, 3))]
CASES += [varied(dim=d) for d in (64, 80, 96, 100, 112, 256)]
CASES += [varied(kind=kind) for kind in ("isoquant", "hadamard", "dense", "none")]
CASES += [varied(dtype=HALF), varied(dtype=FLOAT), varied(plain=True), varied(centred=False), varied(plain=True, centred=False)]
CASES += [varied(batch=3, heads=7, tokens=130), varied(tokens=1), varied(tokens=5600, batch=1)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_operator_is_its_parts(case, kernels):
    check(kernels, of_case(case), case)


@pytest.mark.parametrize("top_p", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_shares_and_sinks(top_p, sinks, kernels):
    check(kernels, of_case(CASE, top_p, sinks=sinks))


@pytest.mark.parametrize("score_dtype", [HALF, FLOAT])
def test_selections_of_each_query_head(score_dtype, kernels):
    case = varied(per_head=True)
    check(kernels, of_case(case), case, score_dtype=score_dtype)


@pytest.mark.parametrize("capacity", [1, 100])
def test_a_selection_is_cut_to_its_capacity(capacity, kernels):
    check(kernels, of_case(CASE, 0.9), capacity=capacity)


def not_finite(named):
    named["q"][0, 1, 0, 5], named["q"][1, 4, 0, 0] = torch.nan, torch.inf


def of_long_rotation(named):
    generator = torch.Generator().manual_seed(2)
    named["signs"] = torch.randint(0, 2, (5, 128), generator=generator) * 2.0 - 1


def constant(named):
    for name in ("q", "centre", "query_centre"):
        named[name] = torch.zeros_like(named[name])


def in_buffers(named):
    """As a cache has them: tokens of a longer buffer, heads of a projection side by side."""
    for name in ("exact_keys", "exact_values"):
        x = named[name]
        whole = torch.full((*x.shape[:2], 200, x.shape[3]), torch.nan, dtype=x.dtype)
        whole[:, :, 3 : 3 + x.shape[2]] = x
        named[name] = whole[:, :, 3 : 3 + x.shape[2]]
    named["q"] = named["q"].transpose(1, 2).contiguous().transpose(1, 2)


def shared_by_heads(named):
    for name in ("query_centre", "centre", "balance"):
        named[name] = named[name][0, 0]


def shifted(name):
    """A tensor that is not aligned: nothing is loaded in units of 16 bytes."""

    def edit(named):
        x = named[name]
        named[name] = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)

    edit.__name__ = f"shifted {name}"
    return edit


EDITS = [not_finite, of_long_rotation, constant, in_buffers, shared_by_heads]
EDITS += [shifted(name) for name in ("q", "exact_values", "centre", "sign")]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_odd_arguments(edit, kernels):
    check(kernels, of_case(CASE, edit=edit))


def test_it_is_what_the_reference_gives(kernels):
    """But for rounding, which moves a code by a step at most: a share of all of them is selected whatever they are."""
    arguments = of_case(CASE, 1.0)
    ours = dict(zip(OUTPUTS, check(kernels, arguments)))
    outputs, _ = room_for(CASE, arguments[0])
    parts = type("Parts", (), dict(attend=staticmethod(reference.attend), sign_top_p_select=staticmethod(select_by_reference)))
    parts.quantise_query = staticmethod(sparse_reference.quantise_query)
    fused.attend_top_p_select(*arguments, *outputs, parts=parts)
    expected = dict(zip(OUTPUTS, outputs))
    torch.testing.assert_close(ours["out"], expected["out"], rtol=1e-2, atol=1e-2)
    for name in ("lse", "terms"):
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-3, atol=1e-3)
    assert (ours["planes"] != expected["planes"]).float().mean() < 0.01
    assert torch.equal(ours["count"], expected["count"]) and torch.equal(ours["indices"], expected["indices"])


def select_by_reference(*arguments):
    parts = type("Parts", (), {name: staticmethod(getattr(sparse_reference, name)) for name in ("sign_scores", "top_p_select")})
    fused.sign_top_p_select(*arguments, parts=parts)


@pytest.mark.parametrize("empty", [dict(tokens=0), dict(queries=0)], ids=str)
def test_nothing_to_select_from_or_to_ask(empty, kernels):
    case = varied(**empty)
    arguments = of_case(CASE)
    if not case.queries:
        arguments[0] = arguments[0][:, :, :0]
    ours, _ = room_for(case, arguments[0])
    kernels.attend_top_p_select(*arguments, *ours)
    assert not ours[-1].any()
    if case.queries:
        theirs, _ = room_for(case, arguments[0])
        fused.attend_top_p_select(*arguments, *theirs, parts=kernels)
        check_same(ours, theirs)


WRONG = {
    "exact_keys must have the shape": ("exact_keys", lambda x: x[..., :64]),
    "sink_logits must have the shape": ("sink_logits", lambda x: torch.ones(3)),
    "signs must": ("signs", lambda x: x[:, :4]),
    "factor must have a capacity of at least 700": ("factor", lambda x: x[:, :, :699]),
    "top_p must be at least 0": ("top_p", lambda x: -1.0),
}


@pytest.mark.parametrize("message", WRONG)
def test_all_is_checked_before_anything_is_written(message, kernels):
    if not is_native(kernels):
        pytest.skip("Triton's parts check their own arguments")
    name, change = WRONG[message]
    arguments = of_case(CASE, edit=lambda named: named.__setitem__(name, change(named[name])))
    outputs, _ = room_for(CASE, arguments[0])
    before = [x.clone() for x in outputs]
    with pytest.raises(RuntimeError, match=f"{message}.*, got "):
        kernels.attend_top_p_select(*arguments, *outputs)
    torch.testing.assert_close(outputs, before, rtol=0, atol=0, equal_nan=True)


@on_gpu
def test_opcheck():
    arguments = of_case(CASE)
    outputs, _ = room_for(CASE, arguments[0])
    torch.library.opcheck(ops.attend_top_p_select, tuple(moved((*arguments, *outputs), "cuda")))


def launches_of(case):
    arguments = of_case(case)
    outputs, _ = room_for(case, arguments[0])
    arguments, outputs = moved(arguments, "cuda"), moved(outputs, "cuda")
    ops.attend_top_p_select(*arguments, *outputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ops.attend_top_p_select(*arguments, *outputs)
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if "kvq::" in event.name]


@on_gpu
def test_a_usual_step_is_two_launches(kernels):
    if not is_native(kernels):
        pytest.skip("Triton launches its parts")
    names = launches_of(CASE)
    if not names:
        pytest.skip("the profiler sees no kernels here")
    assert len(names) == 2 and any("near_and_queries" in name for name in names), names
    assert len(launches_of(varied(group=8))) > 2


@on_gpu
@pytest.mark.parametrize("tokens", [700, 50000])
def test_a_graph_scans_anew(tokens):
    """Replayed twice behind kernels that change queries, index and window: the scan begins early, and reads none too early."""
    case = varied(tokens=tokens)
    arguments = moved(of_case(case, 0.8), "cuda")
    outputs = moved(room_for(case, arguments[0])[0], "cuda")
    q, exact_keys, factor = arguments[0], arguments[3], arguments[13]
    base = factor.clone()

    def step():
        factor.copy_(base).mul_(1.5)  # what the scan reads is written by the kernel ahead
        ops.attend_top_p_select(*arguments, *outputs)

    def turn():
        q.copy_(q.roll(1, 1) * 1.02), exact_keys.copy_(exact_keys.roll(1, 2))

    check_replays(step, 20 * [turn], outputs[-1], outputs[-2])


@on_gpu
def test_it_follows_its_parts_under_compile():
    arguments = moved(of_case(CASE, 0.8), "cuda")
    outputs, expected = (moved(room_for(CASE, arguments[0])[0], "cuda") for _ in range(2))
    compiled = torch.compile(lambda *x: ops.attend_top_p_select(*x), fullgraph=True, backend="aot_eager")
    compiled(*arguments, *outputs)
    fused.attend_top_p_select(*arguments, *expected)
    check_same(outputs, expected)
