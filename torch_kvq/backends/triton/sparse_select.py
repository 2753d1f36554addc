"""top_p_select: the cut of a row is found bit by bit of its code, in an order of integers; then a program a selection writes
the indices. Correct before fast: 33 reads of the scores."""

import torch
import triton
import triton.language as tl

from . import checks, plan
from .tiles import LOG2E

_BLOCK = 1024
_LEAST = tl.constexpr(-3.402823466e38)
_SIZES = "query_heads queries columns mask_columns selections capacity".split()


@triton.jit
def _code(x):
    """Integers from 0 to 2^32 - 1 in the order of float32."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _scores(scores, mask, candidates, batch, head, query, selection, column, columns, mask_columns):
    """What counts of a row: -inf where hidden or behind the end, never -0."""
    inside = column < columns
    x = tl.load(scores.data + batch * scores.batch + head * scores.head + query * scores.token + column, inside, float("-inf"))
    x = x.to(tl.float32) + 0.0
    if mask is not None:
        token = column
        if candidates is not None:
            token = tl.load(candidates.data + batch * candidates.batch + selection * candidates.head + column, inside, 0)
            token = tl.minimum(tl.maximum(token, 0), mask_columns - 1).to(tl.int64)
        at = mask.data + batch * mask.batch + head * mask.head + query * mask.query + token * mask.column
        if mask.data.dtype.element_ty == tl.uint8:
            x = tl.where(tl.load(at, inside, 0) != 0, x, float("-inf"))
        else:
            x += tl.load(at, inside, 0.0)
            x += 0.0
    return x


@triton.jit(do_not_specialize=_SIZES)
def _find_cuts(
    scores, exact_lse, mask, candidates, top_p, cuts, totals, query_heads, queries, columns, mask_columns, selections,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, head, query = row // queries // query_heads, row // queries % query_heads, row % queries
    selection = head // (query_heads // selections)
    exact = tl.load(exact_lse.data + batch * exact_lse.batch + head * exact_lse.head + query * exact_lse.token)
    base = exact
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK).to(tl.int64)
        x = _scores(scores, mask, candidates, batch, head, query, selection, column, columns, mask_columns)
        base = tl.maximum(base, tl.max(tl.where(x < float("inf"), x, float("-inf")), 0))
    shift = tl.where(base == float("-inf"), 0.0, base)
    mass = 0.0
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK).to(tl.int64)
        x = _scores(scores, mask, candidates, batch, head, query, selection, column, columns, mask_columns)
        mass += tl.sum(tl.exp2((tl.where(x < float("inf"), x, float("-inf")) - shift) * LOG2E), 0)
    before = tl.exp2((exact - shift) * LOG2E)
    total = mass + before
    need = top_p * total - before
    code = tl.zeros((), tl.int64)
    for bit in range(0, 32):
        tried = code + (tl.full((), 1, tl.int64) << (31 - bit))
        above = 0.0
        for first in range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK).to(tl.int64)
            x = _scores(scores, mask, candidates, batch, head, query, selection, column, columns, mask_columns)
            share = tl.exp2((tl.where(x < float("inf"), x, float("-inf")) - shift) * LOG2E)
            above += tl.sum(tl.where(_code(x) >= tried, share, 0.0), 0)
        code = tl.where(above >= need, tried, code)
    bits = (code - 2147483648).to(tl.int32)
    cut = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    cut = tl.where(cut >= _LEAST, cut, _LEAST)  # more was needed than there is
    some = (before < top_p * total) & (total > 0)
    cut = tl.where(top_p >= 1, _LEAST, tl.where(some, cut, float("inf")))
    tl.store(cuts + row, cut)
    tl.store(totals + row, shift + tl.log2(total) / LOG2E)


@triton.jit
def _kept(
    scores, mask, candidates, cuts, totals, batch, selection, column, query_heads, queries, columns, mask_columns, selections,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Whether any row keeps these columns, and the codes of their largest shares."""
    group = query_heads // selections
    kept, most = tl.zeros((BLOCK,), tl.int32), tl.full((BLOCK,), float("-inf"), tl.float32)
    for i in range(0, group * queries):
        head, query = selection * group + i // queries, i % queries
        x = _scores(scores, mask, candidates, batch, head, query, selection, column, columns, mask_columns)
        row = (batch * query_heads + head) * queries + query
        unknown = ~(x < float("inf"))
        kept = kept | (unknown | (x >= tl.load(cuts + row))).to(tl.int32)
        share = tl.where(x > float("-inf"), x - tl.load(totals + row), float("-inf"))
        most = tl.maximum(most, tl.where(unknown, float("inf"), share))
    return kept, _code(most + 0.0)


@triton.jit(do_not_specialize=_SIZES)
def _write_indices(
    scores, mask, candidates, cuts, totals, indices, index_batch, index_head, count, count_batch, query_heads, queries, columns,
    mask_columns, selections, capacity, BLOCK: tl.constexpr,
):  # fmt: skip
    batch, selection = (tl.program_id(0) // selections).to(tl.int64), (tl.program_id(0) % selections).to(tl.int64)
    total = 0
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK).to(tl.int64)
        kept, _ = _kept(
            scores, mask, candidates, cuts, totals, batch, selection, column, query_heads, queries, columns, mask_columns,
            selections, BLOCK,
        )  # fmt: skip
        total += tl.sum(kept, 0)
    code, room = tl.full((), -1, tl.int64), 0
    if total > capacity:  # the code of the last share that stays, and how many of it
        code, room = tl.zeros((), tl.int64), capacity
        for bit in range(0, 32):
            tried = code + (tl.full((), 1, tl.int64) << (31 - bit))
            above = 0
            for first in range(0, columns, BLOCK):
                column = first + tl.arange(0, BLOCK).to(tl.int64)
                kept, share = _kept(
                    scores, mask, candidates, cuts, totals, batch, selection, column, query_heads, queries, columns,
                    mask_columns, selections, BLOCK,
                )  # fmt: skip
                above += tl.sum(kept * (share >= tried).to(tl.int32), 0)
            code = tl.where(above >= capacity, tried, code)
        for first in range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK).to(tl.int64)
            kept, share = _kept(
                scores, mask, candidates, cuts, totals, batch, selection, column, query_heads, queries, columns, mask_columns,
                selections, BLOCK,
            )  # fmt: skip
            room -= tl.sum(kept * (share > code).to(tl.int32), 0)
    written, ties = 0, 0
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK).to(tl.int64)
        kept, share = _kept(
            scores, mask, candidates, cuts, totals, batch, selection, column, query_heads, queries, columns, mask_columns,
            selections, BLOCK,
        )  # fmt: skip
        tie = kept * (share == code).to(tl.int32)
        rank = ties + tl.cumsum(tie, 0)
        ties += tl.sum(tie, 0)
        kept = kept * ((share > code) | ((tie == 1) & (rank <= room))).to(tl.int32)
        place = written + tl.cumsum(kept, 0) - 1
        written += tl.sum(kept, 0)
        token = column.to(tl.int32)
        if candidates is not None:
            token = tl.load(
                candidates.data + batch * candidates.batch + selection * candidates.head + column, column < columns, 0
            )
        tl.store(indices + batch * index_batch + selection * index_head + place, token, (kept == 1) & (place < capacity))
    tl.store(count + batch * count_batch + selection, tl.minimum(written, capacity))


def top_p_select(scores, exact_lse, mask, candidates, top_p, indices, count) -> None:
    """Launches ``torch_kvq::top_p_select`` (``ops/schemas.py``)."""
    checks.require_dims("scores", scores, 4)
    checks.require_dims("indices", indices, 3)
    (batch, query_heads, queries, columns), device = scores.shape, scores.device
    selections, capacity = indices.shape[1:]
    checks.require_heads("scores", scores, selections)
    checks.require(scores.dtype in (torch.float32, torch.float16), "scores", "be float32 or float16", scores)
    checks.require(top_p >= 0, "top_p", "be at least 0", top_p)
    dense = checks.dense_of("scores", scores, tuple(scores.shape), device)
    lse = checks.plain_of("exact_lse", exact_lse, (batch, query_heads, queries), device)
    checks.require_whole("indices", indices, torch.int32, (batch, selections, capacity), 1, device)
    checks.require_whole("count", count, torch.int32, (batch, selections), 1, device)
    names, mask_columns = None, columns
    if candidates is not None:
        checks.require_whole("candidates", candidates, torch.int32, (batch, selections, columns), 1, device)
        names = checks.Dense(candidates, candidates.stride(0), candidates.stride(1), 1)
        mask_columns = mask.shape[-1] if mask is not None else columns
    hidden = checks.mask_of(mask, (batch, query_heads, queries, mask_columns), device)
    rows = batch * query_heads * queries
    if not columns or not rows:
        count.zero_()
        return
    cuts, totals = torch.empty(2, rows, device=device).unbind(0)
    sizes = query_heads, queries, columns, mask_columns, selections
    with plan.on_device(scores):
        _find_cuts[(rows,)](dense, lse, hidden, names, top_p, cuts, totals, *sizes, BLOCK=_BLOCK, num_warps=4)
        _write_indices[(batch * selections,)](
            dense, hidden, names, cuts, totals, indices, indices.stride(0), indices.stride(1), count, count.stride(0), *sizes,
            capacity, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
