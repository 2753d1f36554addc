"""pv: weighted sum of the values of every token, by the second half of attend's tiles and its last phase."""

import torch
import triton
import triton.language as tl

from . import checks, plan
from .checks import Dense
from .finish import finish
from .planes import code_table
from .stores import Store, store_of
from .tiles import (
    add_exact,
    add_values,
    coordinates,
    load_tokens,
    positions,
    row_block,
    sum_of_values,
    token_scales,
    value_codes,
)


@triton.jit
def _load_weights(rows, columns, reached, inside):
    place = rows[None, :] + columns.to(tl.int64)[:, None]
    return tl.load(place, reached[:, None] & inside[None, :], 0.0).to(tl.float32)


# Sizes that are not worth a compilation of their own.
_SIZES = "all_rows heads group queries blocks length exact_len num_sinks split_len packed_splits exact_split_len".split()


@triton.jit(do_not_specialize=_SIZES)
def _pv(
    p, values, exact_values, partial, state, all_rows, heads, group, queries, blocks, length, exact_len, num_sinks, split_len,
    packed_splits, exact_split_len, DIM: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    batch, head, inside, index, query_head, token = row_block(tl.program_id(0), group, queries, heads, blocks, ROWS)
    rows = p.data + batch * p.batch + query_head * p.head + token.to(tl.int64) * p.token
    split = tl.program_id(1)
    acc = tl.zeros((WIDTH, ROWS), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if split < packed_splits:
        table = code_table(values.levels, BITS)
        mass, unit, most = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
        first = split * split_len
        for now in tl.range(first, min(first + split_len, length), TOKENS, num_stages=STAGES):
            tokens = positions(now, TOKENS)
            weights = _load_weights(rows, num_sinks + tokens, tokens < length, inside)
            total += tl.sum(weights, 0)
            weights *= token_scales(values, batch, head, tokens, length)[:, None]
            codes, signs = value_codes(values, batch, head, now, length, BITS, DIM, WIDTH, TOKENS)
            acc, mass, unit, most = add_values(
                acc, mass, unit, 1.0, most, weights, tokens, codes, signs, table, BITS, False, PARTS
            )
        acc = sum_of_values(acc, mass, unit, values.levels, BITS)
        column = coordinates(WIDTH, False)
    else:
        column = tl.arange(0, WIDTH)
        first = (split - packed_splits) * exact_split_len
        for now in tl.range(first, min(first + exact_split_len, exact_len), EXACT, num_stages=1):
            tokens = now + tl.arange(0, EXACT)
            columns = tl.where(tokens < num_sinks, tokens, tokens + length)
            weights = _load_weights(rows, columns, tokens < exact_len, inside)
            value = load_tokens(exact_values, batch, head, tokens, exact_len, tl.arange(0, WIDTH), DIM)
            acc = add_exact(acc, tl.trans(value), weights)
    place = split.to(tl.int64) * all_rows + index
    tl.store(partial + place[None, :] * WIDTH + column[:, None], acc, inside[None, :])
    tl.store(state + 2 * place, tl.zeros((ROWS,), tl.float32), inside)
    tl.store(state + 2 * place + 1, total, inside)


def pv(p, values, exact_values, length, num_sinks, out) -> None:
    """Launches ``torch_kvq::pv`` (``ops/schemas.py``)."""
    checks.require_dims("p", p, 4)
    checks.require_dims("exact_values", exact_values, 4)
    batch, query_heads, queries = p.shape[:3]
    heads, exact_len, dim = exact_values.shape[1:]
    checks.require_heads("p", p, heads)
    checks.require_tokens(length, num_sinks, exact_len)
    dense_p = checks.dense_of("p", p, (batch, query_heads, queries, length + exact_len), p.device)
    dense_values = checks.dense_of("exact_values", exact_values, (batch, heads, exact_len, dim), p.device)
    store = store_of("values", values, True, (batch, heads, length, dim), p.device)
    dense_out = checks.dense_of("out", out, (batch, query_heads, queries, dim), p.device)
    if not out.numel():
        return
    with plan.on_device(p):
        for part in plan.parts(queries, batch * query_heads):
            _pv_part(dense_p.part(part), store, dense_values, length, num_sinks, dense_out.part(part))


def _pv_part(p: Dense, values: Store, exact_values: Dense, length: int, num_sinks: int, out: Dense) -> None:
    batch, query_heads, queries = p.data.shape[:3]
    heads, exact_len, dim = exact_values.data.shape[1:]
    group, width, precise = query_heads // heads, plan.padded(dim), p.data.dtype == torch.float32
    kind = plan.kind(p.data.device, precise, False, False, width)
    cut = plan.cut(p.data.device, batch * heads, group * queries, width, kind, length, exact_len)
    total = batch * query_heads * queries
    partial, state = plan.scratch(cut, total, width, p.data.device)
    if partial.numel():
        _pv[(batch * heads * cut.blocks, partial.shape[0])](
            p, values.packed, exact_values, partial, state, total, heads, group, queries, cut.blocks, length, exact_len,
            num_sinks, cut.split_len, cut.packed_splits, cut.exact_split_len,
            DIM=dim, WIDTH=width, BITS=values.bits, PARTS=plan.digits(precise), ROWS=cut.config.rows, TOKENS=cut.config.tokens,
            EXACT=cut.config.exact, STAGES=cut.config.stages, **cut.config.options(),
        )  # fmt: skip
    finish(partial, state, cut.packed_splits, values, heads, None, out, None)
