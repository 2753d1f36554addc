"""The operators of sparse attention against what they are defined to be, computed another way."""

import functools
import math

import pytest
import torch
from op_cases import check_fences, fenced, make_store, relative_error
from sparse_cases import SPARSE_CASES, SparseCase, calls, code_of, coded, index_of, selected_problem

from torch_kvq import ops
from torch_kvq.attention.compose import attend_exact, merge
from torch_kvq.backends import native
from torch_kvq.ops import reference, sparse_reference
from torch_kvq.ops.schemas import FUSED_NAMES, SPARSE_NAMES

native.load()
cases = pytest.mark.parametrize("case", SPARSE_CASES, ids=lambda case: case.name)


@pytest.fixture(params=(*native.available_isas(), native.REFERENCE), autouse=True)
def isa(request, monkeypatch):
    """Every test with every instruction set of the machine, and with the reference."""
    if request.param == native.REFERENCE:
        for name in SPARSE_NAMES:
            monkeypatch.setattr(ops, name, getattr(sparse_reference, name))
        for name in ("attend", "merge"):
            monkeypatch.setattr(ops, name, getattr(reference, name))
        for name in FUSED_NAMES:
            monkeypatch.setattr(ops, name, functools.partial(getattr(ops.fused, name), parts=ops))
        yield request.param
    else:
        before = native.set_cpu_isa(request.param)
        yield request.param
        native.set_cpu_isa(before)


@cases
def test_a_query_is_coded_to_half_a_step(case):
    index = index_of(case)
    planes, terms, wholes = coded(index, 0.25, ops.quantise_query)
    check_fences(*wholes)
    query_centre, centre, balance, *rotation = index.transform
    for b, h, m in ((0, 0, 0), (case.batch - 1, case.query_heads - 1, case.queries - 1)):
        of = b, h // case.group
        raw = index.q[b, h, m].double()
        y = raw - query_centre[of].double() if case.centred else raw
        y = reference.rotated((y if case.plain else y * balance[of]).float(), *rotation)
        codes = torch.tensor(code_of(planes[b, h, m], case.dim))
        delta, low, total, base = (terms[b, h, m] / torch.tensor([0.25, 0.25, 1, 0.25])).tolist()
        assert math.isclose(15 * delta, y.max() - y.min(), rel_tol=1e-5) and math.isclose(low, y.min(), rel_tol=1e-5)
        assert codes.min() == 0 and codes.max() == 15 and codes.sum() == total
        assert ((low + delta * codes - y).abs() <= 0.5001 * delta).all()
        assert math.isclose(base, 0 if case.plain else raw @ centre[of].double(), rel_tol=1e-4, abs_tol=1e-4)
    if case.dim % 32:
        assert (planes[..., -1] >> case.dim % 32 == 0).all()


def test_a_constant_query_and_one_that_is_not_finite():
    case = SparseCase("odd", plain=True, kind="none", batch=4)
    q = torch.randn(4, 6, 1, 64)
    q[1], q[2, :, :, 7], q[3, :, :, 9] = 2.5, torch.nan, torch.inf
    planes, terms, _ = coded(index_of(case, q), 2.0, ops.quantise_query)
    assert (planes[1:] == 0).all() and terms[2:].isnan().all()
    assert torch.equal(terms[1], torch.tensor([0, 5.0, 0, 0]).expand(6, 1, 4))


@cases
def test_keys_are_indexed_by_their_signs(case):
    index = index_of(case)
    query_centre, centre, balance, *rotation = index.transform
    shape = index.factor.shape
    (sign, sign_whole), (factor, factor_whole) = fenced(index.sign.shape, torch.int32), fenced(shape, torch.float16)
    bias, bias_whole = fenced(shape if case.centred else (0,), torch.float16)
    for first, last in ((0, case.tokens // 2), (case.tokens // 2, case.tokens)):
        ops.index_keys(index.keys[:, :, first:last], *index.transform, first, sign, factor, bias)
    check_fences(sign_whole, factor_whole, bias_whole)
    assert torch.equal(factor.isnan(), (torch.arange(shape[2]) >= case.tokens).expand(shape))
    assert torch.equal(bias.isnan(), factor.isnan()) or not case.centred
    x = index.keys.float() if case.plain else index.keys.float() - centre.unsqueeze(-2)
    y = reference.rotated(x if case.plain else x / balance.unsqueeze(-2), *rotation)
    bits = reference._to_bits(sign).flatten(-2)[:, :, : case.tokens]
    clear = y.abs() > 1e-5
    assert torch.equal((bits[..., : case.dim] == 1)[clear], (y < 0)[clear]) and (bits[..., case.dim :] == 0).all()
    alpha = y.abs().sum(-1) / (case.dim**0.5 * y.norm(dim=-1))  # the cosine of y and its signs
    theirs = y.norm(dim=-1) / (alpha * case.dim**0.5)
    assert torch.allclose(factor[:, :, : case.tokens].float(), theirs, rtol=2e-3)
    if case.centred:
        theirs = torch.einsum("bhtd,bhd->bht", x, query_centre)
        assert torch.allclose(bias[:, :, : case.tokens].float(), theirs, rtol=2e-3, atol=2e-2)


def test_the_index_of_packed_keys_is_their_sign_plane():
    case = SparseCase("plane", dim=96)
    index = index_of(case)
    store = make_store(index.keys, 3, False, fill=False)
    store[4:] = index.transform[1:]
    reference.encode(index.keys, *store[3:], 2, False, 0, *store[:3])
    assert torch.equal(store[0][:, :, : case.tokens], index.sign[:, :, : case.tokens])
    factor = torch.empty_like(index.factor)
    ops.index_keys(index.keys, *index.transform, 0, torch.empty(0, dtype=torch.int32), factor, index.bias)
    assert torch.equal(factor[:, :, : case.tokens], index.factor[:, :, : case.tokens])


def test_a_zero_key_and_a_huge_one():
    keys = torch.zeros(1, 2, 2, 64)
    keys[:, :, 1] = 6e4
    index = index_of(SparseCase("odd", plain=True, kind="none", tokens=2), keys=keys)
    assert torch.equal(index.factor[:, :, :2], torch.tensor([0.0, 6e4], dtype=torch.float16).expand(1, 2, 2))


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scores_are_the_integer_formula_to_the_last_bit(case, dtype):
    index = index_of(case)
    planes, terms, _ = coded(index, 0.125)
    start = case.tokens // 3
    out, whole = fenced((*planes.shape[:3], case.tokens - start), dtype)
    ops.sign_scores(planes, terms, index.sign, index.factor, index.bias, case.dim, 0.125, start, out)
    check_fences(whole)

    def f32(x) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.float32)

    for b, h, m in ((0, 0, 0), (case.batch - 1, case.query_heads - 1, case.queries - 1)):
        codes, (delta, low, total, base) = code_of(planes[b, h, m], case.dim), terms[b, h, m]
        for t in (start, case.tokens - 1):
            words = [word % 2**32 for word in index.sign[b, h // case.group, t].tolist()]
            negative = [words[i // 32] >> i % 32 & 1 for i in range(case.dim)]
            inner = sum(code * bit for code, bit in zip(codes, negative))
            score = low * f32(case.dim - 2 * sum(negative)) + delta * f32(int(total) - 2 * inner)
            score = score * index.factor[b, h // case.group, t].float()
            score = score + f32(0.125) * index.bias[b, h // case.group, t].float() if case.centred else score
            assert out[b, h, m, t - start] == (score + base).to(dtype)


@cases
def test_scores_estimate_logits(case):
    index = index_of(case)
    planes, terms, _ = coded(index, 1.0)
    out = torch.empty(*planes.shape[:3], case.tokens)
    ops.sign_scores(planes, terms, index.sign, index.factor, index.bias, case.dim, 1.0, 0, out)
    keys = index.keys.float().repeat_interleave(case.group, 1)
    query_centre, centre, balance, *_ = index.transform
    error = out - index.q.float() @ keys.transpose(-1, -2)
    q = index.q.float() - (query_centre.repeat_interleave(case.group, 1).unsqueeze(2) if case.centred else 0)
    x = keys if case.plain else keys - centre.repeat_interleave(case.group, 1).unsqueeze(2)
    if not case.plain:
        lengths = balance.repeat_interleave(case.group, 1).unsqueeze(2)
        q, x = q * lengths, x / lengths
    # the spread of an estimate at cosine 0, papers/RaBitQ theorem: |q| |k| sqrt((1 - alpha^2) / alpha^2 / (D - 1))
    size = q.norm(dim=-1, keepdim=True) * x.norm(dim=-1).unsqueeze(2) * (math.pi / 2 - 1) ** 0.5 * (case.dim - 1) ** -0.5
    assert (error / size).square().mean().sqrt() < 1.5


def masses(scores, exact_lse):
    total = torch.logaddexp(scores.double().logsumexp(-1), exact_lse.double())
    return torch.exp(scores.double() - total.unsqueeze(-1)), torch.exp(exact_lse.double() - total)


def select(scores, exact_lse, top_p, capacity=None, per_head=False, heads=2, mask=None, candidates=None):
    """Sets of selected tokens, ``[B][K]``, after checking fences and order."""
    batch, query_heads, _, length = scores.shape
    shape = (batch, query_heads if per_head else heads)
    (indices, whole), (count, count_whole) = (
        fenced((*shape, length if capacity is None else capacity), torch.int32),
        fenced(shape, torch.int32),
    )
    ops.top_p_select(scores, exact_lse, mask, candidates, top_p, indices, count)
    check_fences(whole, count_whole)
    rows = [[indices[b, k, : count[b, k]].tolist() for k in range(shape[1])] for b in range(batch)]
    assert all(row == sorted(set(row)) for each in rows for row in each)
    return [[set(row) for row in each] for each in rows]


SCORES = {
    "random": lambda shape: 3 * torch.randn(shape),
    "rounded": lambda shape: (2 * torch.randn(shape)).round(),
    "uniform": lambda shape: torch.zeros(shape),
    "one-hot": lambda shape: torch.zeros(shape).index_fill_(-1, torch.tensor([17]), 50.0),
    "hidden": lambda shape: torch.randn(shape).masked_fill(torch.rand(shape) < 0.4, -torch.inf),
    "all hidden": lambda shape: torch.full(shape, -torch.inf),
    "far": lambda shape: 1e4 + torch.randn(shape),
    "low": lambda shape: -1e4 + torch.randn(shape),
    "signed zero": lambda shape: torch.where(torch.rand(shape) < 0.5, 0.0, -0.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("top_p", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("lse", [-torch.inf, 0.0, 4.0])
@pytest.mark.parametrize("name", SCORES)
def test_each_head_keeps_the_fewest_that_reach_p(name, lse, top_p, dtype):
    scores = SCORES[name]((2, 4, 1, 67)).to(dtype)
    exact_lse = torch.full((2, 4, 1), lse)
    sets = select(scores, exact_lse, top_p, per_head=True)
    share, exact = masses(scores.float(), exact_lse)
    for b in range(2):
        for h in range(4):
            row, kept = scores[b, h, 0].tolist(), sets[b][h]
            visible = {t for t, score in enumerate(row) if score > -math.inf}
            assert kept <= visible
            if top_p == 1.0 or not visible:
                assert kept == visible
                continue
            mass = exact[b, h, 0] + share[b, h, 0, sorted(kept)].sum()
            assert mass >= top_p - 1e-5 or kept == visible
            least = min((row[t] for t in kept), default=math.inf)
            assert kept == {t for t in visible if row[t] >= least}  # a threshold, ties together
            without = [t for t in kept if row[t] > least]
            assert not kept or exact[b, h, 0] + share[b, h, 0, without].sum() < top_p + 1e-5


def test_a_group_and_its_query_tokens_share_one_selection():
    scores, lse = 3 * torch.randn(2, 6, 3, 50), torch.randn(2, 6, 3)
    rows = [select(scores[:, :, m : m + 1], lse[:, :, m : m + 1], 0.9, per_head=True) for m in range(3)]
    together = select(scores, lse, 0.9)
    for b in range(2):
        for k in range(2):
            assert together[b][k] == set().union(*(rows[m][b][h] for m in range(3) for h in range(3 * k, 3 * k + 3)))


@pytest.mark.parametrize("mask", ["bool", "float"])
def test_hidden_tokens_are_not_selected(mask):
    scores, lse, seen = torch.randn(1, 4, 2, 40), torch.zeros(1, 4, 2), torch.rand(1, 1, 2, 40) < 0.5
    hidden = scores.masked_fill(~seen, -torch.inf)
    given = seen if mask == "bool" else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    assert select(scores, lse, 0.9, mask=given.expand(scores.shape)) == select(hidden, lse, 0.9)


def test_candidates_give_their_names_to_columns():
    length, lse = 60, torch.zeros(1, 4, 1)
    candidates = torch.arange(3, length, 4, dtype=torch.int32).expand(1, 2, -1).contiguous()
    scores = 2 * torch.randn(1, 4, 1, candidates.shape[-1])
    scores[..., -3:] = -torch.inf
    candidates[..., -3:] = 2**31 - 1  # beyond their count: junk
    seen = torch.rand(1, 1, 1, length) < 0.7
    columns = scores.masked_fill(~seen[..., 3::4], -torch.inf)
    plain = select(columns, lse, 0.8)
    named = select(scores, lse, 0.8, mask=seen.expand(1, 4, 1, length), candidates=candidates)
    assert named == [[{3 + 4 * c for c in row} for row in each] for each in plain]
    assert any(plain[0])


@pytest.mark.parametrize("capacity", [0, 1, 7, 25])
def test_a_full_selection_holds_the_largest_shares(capacity):
    scores, lse = torch.randn(2, 4, 2, 64), torch.randn(2, 4, 2)
    everything = select(scores, lse, 0.99)
    capped = select(scores, lse, 0.99, capacity=capacity)
    share, _ = masses(scores, lse)
    best = share.unflatten(1, (2, 2)).amax((2, 3))
    for b in range(2):
        for k in range(2):
            assert len(everything[b][k]) > 25
            ranked = sorted(everything[b][k], key=lambda t: -best[b, k, t])
            assert capped[b][k] == set(ranked[:capacity])


def test_of_equal_shares_the_earlier_tokens_stay():
    assert select(torch.zeros(1, 2, 1, 30), torch.zeros(1, 2, 1), 1.0, capacity=4) == [[{0, 1, 2, 3}] * 2]


def test_a_score_that_is_no_number_is_kept():
    scores = torch.zeros(1, 2, 1, 30)
    scores[..., 3], scores[..., 9], scores[..., 5] = torch.nan, torch.inf, 20.0
    assert select(scores, torch.zeros(1, 2, 1), 0.5) == [[{3, 5, 9}] * 2]
    assert select(scores, torch.zeros(1, 2, 1), 0.5, capacity=2) == [[{3, 9}] * 2]
    assert select(scores.fill_(torch.nan), torch.zeros(1, 2, 1), 0.5) == [[set(range(30))] * 2]


def test_nothing_to_select_from():
    assert select(torch.empty(1, 2, 1, 0), torch.zeros(1, 2, 1), 0.5) == [[set()] * 2]


def only(case, indices, count):
    """The mask of a selection, ``[B, Hq, 1, T]``."""
    kept = torch.zeros(case.batch, case.selections, case.tokens, dtype=torch.bool)
    for b in range(case.batch):
        for k in range(case.selections):
            kept[b, k, indices[b, k, : count[b, k]].long()] = True
    return kept.repeat_interleave(case.query_heads // case.selections, 1).unsqueeze(2)


@cases
def test_attending_to_a_selection(case):
    arguments, keys, values = selected_problem(case)
    q, _, _, indices, count, mask, scale, softcap = arguments
    (out, whole), (lse, lse_whole) = fenced((*q.shape[:3], values.shape[-1]), case.dtype), fenced(q.shape[:3])
    ops.attend_selected(*arguments, out, lse)
    check_fences(whole, lse_whole)
    kept = only(case, indices, count)
    if mask is not None:
        kept = kept & mask if mask.dtype == torch.bool else mask.masked_fill(~kept, -torch.inf)
    theirs, their_lse = attend_exact(q.float(), keys, values, scale, kept, softcap)
    assert relative_error(out, theirs) <= (
        2e-2 if case.dtype == torch.bfloat16 else 2e-3 if case.dtype == torch.float16 else 1e-5
    )
    assert torch.equal(lse == -torch.inf, their_lse == -torch.inf) and (out[lse == -torch.inf] == 0).all()
    assert torch.allclose(lse, their_lse, rtol=1e-5, atol=1e-5)


@cases
def test_scores_of_a_selection(case):
    (q, stores, _, indices, count, _, scale, _), keys, _ = selected_problem(case)
    out, whole = fenced((*q.shape[:3], indices.shape[-1]))
    ops.qk_selected(q, stores, indices, count, scale, out)
    check_fences(whole)
    for b, k in ((0, 0), (case.batch - 1, case.selections - 1)):
        heads = slice(k * case.query_heads // case.selections, (k + 1) * case.query_heads // case.selections)
        number, head = count[b, k], k * case.heads // case.selections
        theirs = scale * q[b, heads].float() @ keys[b, head, indices[b, k, :number].long()].float().T
        assert (out[b, heads, :, number:] == -torch.inf).all()
        assert torch.allclose(out[b, heads, :, :number], theirs, rtol=1e-4, atol=1e-4)


@cases
def test_gathering_a_selection(case):
    (_, _, _, indices, count, *_), keys, _ = selected_problem(case)
    out, whole = fenced((*indices.shape, case.dim), keys.dtype)
    ops.gather_selected(keys, indices, count, out)
    check_fences(whole)
    for b, k in ((0, 0), (case.batch - 1, case.selections - 1)):
        number = count[b, k]
        assert torch.equal(out[b, k, :number], keys[b, k * case.heads // case.selections, indices[b, k, :number].long()])
        assert out[b, k, number:].isnan().all()


def test_a_selection_and_the_rest_are_everything():
    case = SparseCase("merge", tokens=300, queries=2)
    arguments, keys, values = selected_problem(case)
    q, *stores, indices, count, mask, scale, softcap = arguments
    rest = torch.full_like(indices, -5)
    for b, k in ((0, 0), (0, 1)):
        others = sorted(set(range(case.tokens)) - set(indices[b, k, : count[b, k]].tolist()))
        rest[b, k, : len(others)] = torch.tensor(others)
    parts = []
    for part, number in ((indices, count), (rest, case.tokens - count)):
        out, lse = torch.empty(q.shape), torch.empty(q.shape[:3])
        ops.attend_selected(q, *stores, part, number, mask, scale, softcap, out, lse)
        parts.append((out, lse))
    for ours, theirs in zip(merge(parts), attend_exact(q, keys, values, scale)):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


MERGED_CASES = [
    SparseCase("dense", tokens=300, queries=2),
    SparseCase("none", tokens=300, share=0.0),
    *(SparseCase(f"half-D{d}", tokens=200, dim=d, dtype=torch.bfloat16, group=4) for d in (64, 80, 128)),
    SparseCase("half-heads", tokens=200, dim=128, dtype=torch.float16, per_head=True, mask="dead", queries=2),
    SparseCase("packed", tokens=200, packed=True, dim=128, dtype=torch.float16, batch=2),
    SparseCase("packed-float", tokens=100, packed=True, dim=96, value_dim=64),
]


@pytest.mark.parametrize("near", ["some", "none", "far"])
@pytest.mark.parametrize("case", MERGED_CASES, ids=lambda case: case.name)
def test_selected_tokens_are_merged_with_others(case, near):
    """One operator is attention over the selection and the merge; what others found may be nothing, or all that counts."""
    arguments, _, values = selected_problem(case)
    q, generator = arguments[0], torch.Generator().manual_seed(1)
    shape = (*q.shape[:3], values.shape[-1])
    (outs, outs_whole), (lses, lses_whole) = fenced((2, *shape), q.dtype), fenced((2, *shape[:3]))
    (out, out_whole), (lse, lse_whole) = fenced(shape, q.dtype), fenced(shape[:3])
    outs[0] = torch.randn(shape, generator=generator).to(q.dtype)
    lses[0] = {
        "some": 3 + torch.randn(shape[:3], generator=generator),
        "none": torch.tensor(-torch.inf),
        "far": torch.tensor(90.0),
    }[near]
    if near == "none":
        outs[0] = torch.nan  # has no weight
    first = outs[0].clone(), lses[0].clone()
    ops.merge_selected(*arguments, outs, lses, out, lse)
    check_fences(outs_whole, lses_whole, out_whole, lse_whole)
    assert all(torch.equal(ours[0].nan_to_num(), theirs.nan_to_num()) for ours, theirs in zip((outs, lses), first))
    far, far_lse = torch.empty(shape), torch.empty(shape[:3])
    sparse_reference.attend_selected(*arguments, far, far_lse)
    expected = merge([(first[0].float(), first[1]), (far, far_lse)])
    tolerance = 1e-4 if q.dtype == torch.float32 else 5e-4 + relative_error(expected[0].to(q.dtype), expected[0])
    assert relative_error(out, expected[0]) <= 2 * tolerance
    assert torch.equal(lse == -torch.inf, expected[1] == -torch.inf)
    assert torch.allclose(lse, expected[1], rtol=1e-5, atol=2e-4)


def test_there_are_two_pieces_to_merge():
    arguments, _, _ = selected_problem(SparseCase("three", tokens=20))
    out, lse = torch.zeros(arguments[0].shape), torch.zeros(arguments[0].shape[:3])
    with pytest.raises(RuntimeError, match="outs must have two pieces, got "):
        ops.merge_selected(*arguments, out[None], lse[None], out, lse)


@pytest.mark.parametrize("name", (*SPARSE_NAMES, *FUSED_NAMES))
def test_opcheck(name):
    for _, arguments in (call for call in calls() if call[0] == name):
        torch.library.opcheck(getattr(torch.ops.torch_kvq, name).default, arguments)
