"""The CPU kernels of sparse attention: long rows, hard distributions, threads, errors before anything is written."""

import re

import pytest
import torch
from op_cases import check_fences, fenced, relative_error
from sparse_cases import SparseCase, coded, index_of, selected_problem
from test_sparse_ops import masses, select

from torch_kvq import ops
from torch_kvq.attention.compose import attend_exact
from torch_kvq.backends import native
from torch_kvq.ops import sparse_reference

native.load()
pytestmark = pytest.mark.skipif(not native.loaded(), reason="no CPU kernels")


@pytest.fixture(params=native.available_isas(), autouse=True)
def isa(request):
    before, threads = native.set_cpu_isa(request.param), torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.param
    native.set_cpu_isa(before)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim, centred", [(32, True), (64, False), (80, True), (128, True), (512, False)])
def test_every_score_is_the_reference_to_the_last_bit(dim, centred, dtype):
    case = SparseCase("long", tokens=2100, dim=dim, centred=centred, queries=2)
    index = index_of(case)
    planes, terms, _ = coded(index, 0.3)
    (out, whole), expected = fenced((1, 6, 2, 2093), dtype), torch.empty(1, 6, 2, 2093, dtype=dtype)
    arguments = (planes, terms, index.sign, index.factor, index.bias, dim, 0.3, 7)
    ops.sign_scores(*arguments, out)
    sparse_reference.sign_scores(*arguments, expected)
    check_fences(whole)
    assert torch.equal(out, expected)


LONG = {
    "normal": lambda n: 2 * torch.randn(n),
    "heavy tails": lambda n: torch.randn(n) / torch.rand(n),
    "few values": lambda n: torch.randint(-3, 3, (n,)).float(),
    "powers": lambda n: -(2.0 ** torch.randint(-140, 120, (n,))),
    "neighbours": lambda n: (
        torch.ones(n).view(torch.int32).add(torch.randint(0, 9, (n,), dtype=torch.int32)).view(torch.float32)
    ),
    "denormal": lambda n: torch.randint(-99, 99, (n,), dtype=torch.int32).abs().view(torch.float32),
    "extremes": lambda n: torch.where(torch.rand(n) < 0.5, 3.4e38, -3.4e38),
    "hidden": lambda n: torch.randn(n).masked_fill(torch.rand(n) < 0.9, -torch.inf),
    "ascending": lambda n: torch.arange(n) / 500,
}


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("name", LONG)
def test_the_fewest_of_long_rows_reach_p(name, top_p):
    scores, lse = LONG[name](2 * 9001).reshape(1, 2, 1, 9001), torch.tensor([-torch.inf, 0.5]).reshape(1, 2, 1)
    share, exact = masses(scores, lse)
    for h, kept in enumerate(select(scores, lse, top_p, per_head=True)[0]):
        row, mask = scores[0, h, 0], torch.zeros(9001, dtype=torch.bool)
        if exact[0, h, 0] >= top_p:
            assert not kept
            continue
        mask[sorted(kept)] = True
        least = row[mask].min()
        assert torch.equal(mask, row >= least)
        assert exact[0, h, 0] + share[0, h, 0, mask].sum() >= top_p - 1e-5
        assert exact[0, h, 0] + share[0, h, 0, row > least].sum() < top_p + 1e-5


def test_a_long_row_with_a_limit_holds_the_largest():
    scores, lse = 2 * torch.randn(1, 4, 2, 9001), torch.randn(1, 4, 2)
    share, _ = masses(scores, lse)
    best = share.unflatten(1, (2, 2)).amax((2, 3))
    for k, kept in enumerate(select(scores, lse, 0.999, capacity=700)[0]):
        assert kept == set(best[0, k].topk(700).indices.tolist())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("queries", [1, 31, 37, 64])
def test_many_query_tokens_of_heads_that_select_for_themselves(queries, packed):
    case = SparseCase("many", tokens=150, queries=queries, per_head=True, packed=packed, mask="float")
    arguments, keys, values = selected_problem(case)
    q, _, _, indices, count, mask, scale, softcap = arguments
    (out, whole), lse = fenced(q.shape), torch.empty(q.shape[:3])
    ops.attend_selected(*arguments, out, lse)
    check_fences(whole)
    kept = torch.zeros(1, 6, 1, 150, dtype=torch.bool)
    for h in range(6):
        kept[0, h, 0, indices[0, h, : count[0, h]].long()] = True
    theirs, their_lse = attend_exact(q, keys, values, scale, mask.masked_fill(~kept, -torch.inf), softcap)
    assert relative_error(out, theirs) <= 1e-5 and torch.allclose(lse, their_lse, rtol=1e-5, atol=1e-5)


def results() -> list[torch.Tensor]:
    """Outputs of all operators on a problem of several tasks each."""
    case = SparseCase("threads", tokens=2500, batch=2, queries=2, centred=True)
    index, found = index_of(case), []
    planes, terms, _ = coded(index, 0.125, ops.quantise_query)
    sign, factor, bias = (torch.zeros_like(x) for x in (index.sign, index.factor, index.bias))
    ops.index_keys(index.keys, *index.transform, 0, sign, factor, bias)
    scores, lse = torch.empty(2, 6, 2, 2500), torch.zeros(2, 6, 2)
    ops.sign_scores(planes, terms, index.sign, index.factor, index.bias, 64, 0.125, 0, scores)
    selected, number = torch.zeros(2, 2, 2500, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    ops.top_p_select(scores, lse, None, None, 0.9, selected, number)
    for packed in (False, True):
        case = SparseCase("threads", tokens=2500, batch=2, queries=2, packed=packed, share=0.8)
        arguments, keys, _ = selected_problem(case)
        q, stores, _, indices, count, _, scale, _ = arguments
        out, part, products = torch.empty(q.shape), torch.empty(q.shape[:3]), torch.empty(*q.shape[:3], indices.shape[-1])
        ops.attend_selected(*arguments, out, part)
        ops.qk_selected(q, stores, indices, count, scale, products)
        found += [out, part, products]
    gathered = torch.zeros(*indices.shape, 64)
    ops.gather_selected(keys, indices, count, gathered)
    return [*found, planes, terms, sign, factor, bias, scores, selected, number, gathered]


def test_results_do_not_depend_on_the_number_of_threads():
    one = results()
    torch.set_num_threads(2)
    for ours, theirs in zip(results(), one):
        assert torch.equal(ours, theirs)


ARGUMENTS = "q keys values indices count mask scale softcap out lse".split()
BAD = [
    ("q must have the shape [*, *, *, *]", "q", lambda a: a["q"][0]),
    ("q must have a multiple of 2 heads", "q", lambda a: a["q"][:, :3]),
    ("keys must be one tensor or nine", "keys", lambda a: a["keys"] * 2),
    ("keys must be one tensor or nine, got none", "keys", lambda a: []),
    ("values must have the shape [1, 2, 135, 64]", "values", lambda a: [a["values"][0][..., :60]]),
    ("indices must be int32", "indices", lambda a: a["indices"].long()),
    (
        "indices must have a selection for each of 2 key heads or each of 6 query heads",
        "indices",
        lambda a: a["indices"][:, :1],
    ),
    ("indices must be from 0 to 134, got 135", "indices", lambda a: a["indices"].clone().index_fill_(2, torch.tensor(2), 135)),
    ("indices must be from 0 to 134, got -1", "indices", lambda a: a["indices"].clone().index_fill_(2, torch.tensor(2), -1)),
    ("indices must be from 0 to 99", "mask", lambda a: torch.ones(1, 6, 1, 100, dtype=torch.bool)),
    ("count must be from 0 to 133, got 134", "count", lambda a: torch.full_like(a["count"], 134)),
    ("count must be from 0 to 133, got -1", "count", lambda a: torch.full_like(a["count"], -1)),
    ("mask must be bool or float32", "mask", lambda a: torch.ones(1, 6, 1, 130)[..., :130].half()),
    ("out must have the shape [1, 6, 1, 64]", "out", lambda a: a["out"][:, :3]),
    ("lse must be float32", "lse", lambda a: a["lse"].double()),
]


@pytest.mark.parametrize("message, name, change", BAD, ids=[bad[0] for bad in BAD])
def test_an_error_names_the_argument_before_anything_is_written(message, name, change):
    arguments, _, _ = selected_problem(SparseCase("errors", share=0.9))
    out, lse = torch.full((1, 6, 1, 64), 7.0), torch.full((1, 6, 1), 7.0)
    named = dict(zip(ARGUMENTS, (*arguments, out, lse)))
    named[name] = change(named)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        ops.attend_selected(*named.values())
    assert (out == 7).all() and (lse == 7).all()


def test_errors_of_the_index_and_of_the_selection():
    index = index_of(SparseCase("errors", centred=True))
    planes, terms, _ = coded(index, 0.125)
    scores = torch.empty(1, 6, 1, 130)
    parts = (index.sign, index.factor, index.bias)
    with pytest.raises(RuntimeError, match=r"sign must have a capacity of at least 230"):
        ops.sign_scores(planes, terms, *parts, 64, 0.125, 100, scores)
    with pytest.raises(RuntimeError, match="out must be float32 or float16, got bfloat16"):
        ops.sign_scores(planes, terms, *parts, 64, 0.125, 0, scores.bfloat16())
    with pytest.raises(RuntimeError, match="start must be at least 0"):
        ops.sign_scores(planes, terms, *parts, 64, 0.125, -1, scores)
    with pytest.raises(RuntimeError, match="bias must hold a value a token where there is a query_centre"):
        ops.index_keys(index.keys, *index.transform, 0, index.sign, index.factor, index.bias[:0])
    indices, count = torch.zeros(1, 2, 130, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="top_p must be at least 0, got nan"):
        ops.top_p_select(scores, terms[..., 0], None, None, torch.nan, indices, count)
    with pytest.raises(RuntimeError, match="indices must have a divisor of 6 selections"):
        ops.top_p_select(scores, terms[..., 0], None, None, 0.5, indices[:, :1].expand(1, 4, 130), count)
    with pytest.raises(RuntimeError, match="out must have the dtype of x"):
        ops.gather_selected(index.keys, indices, count, torch.empty(1, 2, 130, 64, dtype=torch.float16))


@pytest.mark.parametrize("signs", [(1, 2, 0, 2), (0, 2, 128, 2), (0,)])
def test_an_index_without_signs_is_not_scored(signs):
    planes, terms = torch.zeros(1, 2, 1, 4, 2, dtype=torch.int32), torch.zeros(1, 2, 1, 4)
    index = torch.zeros(signs, dtype=torch.int32), torch.zeros(1, 2, 128, dtype=torch.float16), torch.empty(0)
    with pytest.raises(RuntimeError, match="sign must have"):
        ops.sign_scores(planes, terms, *index, 64, 1.0, 0, torch.empty(1, 2, 1, 100))
