"""Last phase of attend and pv: adds the partial sums of the splits, turns packed ones back, once a row."""

import torch
import triton
import triton.language as tl

from . import plan
from .checks import Dense
from .rotation import add_product, rows_of
from .stores import Store
from .tiles import LOG2E

_FEW_COLUMNS = 32
_LOADED = 8192  # floats of partial sums that a program of one row loads at once


@triton.jit
def _weights(state, split, stop, total, index, inside, peak):
    """Weights ``[S, rows]`` of the splits, and their sums of probabilities, in units of ``2 ** peak``."""
    mask = (split < stop)[:, None] & inside[None, :]
    place = state + 2 * (split.to(tl.int64)[:, None] * total + index[None, :])
    weights = tl.exp2(tl.load(place, mask, float("-inf")) - peak[None, :])
    return weights, tl.load(place + 1, mask, 0.0) * weights


@triton.jit
def _peak(state, splits, total, index, inside, sinks, query_head, SPLITS: tl.constexpr):
    """Largest exponent of a row, -inf without a token."""
    peak = tl.full((index.shape[0],), float("-inf"), tl.float32)
    if sinks is not None:
        peak = tl.load(sinks + query_head, inside, 0.0) * LOG2E
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        place = state + 2 * (split.to(tl.int64)[:, None] * total + index[None, :])
        found = tl.load(place, (split < splits)[:, None] & inside[None, :], float("-inf"))
        peak = tl.maximum(peak, tl.max(found, 0))
    return peak


@triton.jit
def _sum(partial, state, first, stop, total, index, inside, columns, peak, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """Partial sums ``[rows, columns]`` of splits ``first .. stop``, weighted, and their probabilities ``[rows]``."""
    acc = tl.zeros((index.shape[0], columns.shape[0]), tl.float32)
    mass = tl.zeros((index.shape[0],), tl.float32)
    for now in range(first, stop, SPLITS):
        split = now + tl.arange(0, SPLITS)
        weights, masses = _weights(state, split, stop, total, index, inside, peak)
        place = partial + (split.to(tl.int64)[:, None] * total + index[None, :]) * WIDTH
        mask = (split < stop)[:, None, None] & inside[None, :, None]
        parts = tl.load(place[:, :, None] + columns[None, None, :], mask, 0.0)
        acc += tl.sum(parts * weights[:, :, None], 0)
        mass += tl.sum(masses, 0)
    return acc, mass


# Sizes that are not worth a compilation of their own.
_SIZES = "total heads group queries packed_splits splits".split()


@triton.jit(do_not_specialize=_SIZES)
def _finish(
    partial, state, values, matrix, sinks, out, lse, total, heads, group, queries, packed_splits, splits,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, EXACT: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = index < total
    token, query_head = index % queries, index // queries % (heads * group)
    batch, head = index // queries // (heads * group), query_head // group
    mask = inside[:, None] & (columns < DIM)[None, :]

    top = _peak(state, splits, total, index, inside, sinks, query_head, STATES)
    peak = tl.where(top == float("-inf"), 0.0, top)
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    for first in range(0, DIM, CHUNK):
        chunk = first + tl.arange(0, CHUNK)
        part, mass = _sum(partial, state, 0, packed_splits, total, index, inside, chunk, peak, WIDTH, SPLITS)
        y = add_product(y, part, matrix, chunk, columns, DIM, True)
    if values.balance is not None:
        balance = values.balance + batch * values.balance_batch + head * values.balance_head
        y *= tl.load(balance[:, None] + columns[None, :], mask, 0.0)
    if values.centre is not None:
        centre = values.centre + batch * values.centre_batch + head * values.centre_head
        y += mass[:, None] * tl.load(centre[:, None] + columns[None, :], mask, 0.0)
    exact, exact_mass = _sum(partial, state, packed_splits, splits, total, index, inside, columns, peak, WIDTH, EXACT)
    y += exact

    if lse is not None:
        sum_of_all = mass + exact_mass
        if sinks is not None:
            sum_of_all += tl.exp2(tl.load(sinks + query_head, inside, 0.0) * LOG2E - peak)
        sum_of_all = tl.where(sum_of_all == 0, 1.0, sum_of_all)  # nothing reached: 0 and -inf
        y /= sum_of_all[:, None]
        if tl.program_id(1) == 0:
            place = lse.data + batch * lse.batch + query_head * lse.head + token * lse.token
            tl.store(place, (top + tl.log2(sum_of_all)) / LOG2E, inside)
    place = out.data + batch * out.batch + query_head * out.head + token * out.token
    tl.store(place[:, None] + columns[None, :], y.to(out.data.dtype.element_ty), mask)


def finish(
    partial: torch.Tensor, state: torch.Tensor, packed_splits: int, values: Store, heads: int, sinks: torch.Tensor | None,
    out: Dense, lse: Dense | None,
) -> None:  # fmt: skip
    """Adds ``partial [splits, B * Hq * M, WIDTH]``, the first ``packed_splits`` of them in rotated space, into ``out``.

    Args:
        state: ``[splits, B * Hq * M, 2]``: base-2 exponent of a partial sum, and its sum of probabilities.
        lse: ``None`` for a plain sum, which nothing divides.
    """
    batch, query_heads, queries, dim = out.data.shape
    total, width = batch * query_heads * queries, partial.shape[2]
    launch = options(total, width, plan.num_multiprocessors(partial.device))
    _finish[(triton.cdiv(total, launch["ROWS"]), triton.cdiv(dim, launch["COLUMNS"]))](
        partial, state, values.packed, values.matrix, sinks, out, lse,
        total, heads, query_heads // heads, queries, packed_splits, partial.shape[0], DIM=dim, WIDTH=width, **launch,
    )  # fmt: skip


def options(total: int, width: int, multiprocessors: int) -> dict[str, int]:
    """Rows and columns of a program and what it loads at once: with one row, all states, and as many splits as it can.

    A program loads all partial sums of its rows whatever its columns, so a row is cut no finer than multiprocessors are idle:
    with few rows the matrix takes longer to come.
    """
    launch = rows_of(total, width)
    if launch["ROWS"] > 1:
        return dict(COLUMNS=32, SPLITS=4, EXACT=4, STATES=4, **launch)
    columns = min(width, _FEW_COLUMNS)
    while columns < width and total * triton.cdiv(width, columns) > multiprocessors:
        columns *= 2
    if columns == _FEW_COLUMNS:
        launch["num_warps"] = 4
    return dict(COLUMNS=columns, SPLITS=_LOADED // launch["CHUNK"], EXACT=4, STATES=256, **launch)
