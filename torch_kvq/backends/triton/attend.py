"""attend: softmax attention over packed and exact tokens in one launch, between ``prepare`` and ``finish``.

A program takes one block of rows of one key head and one split of the packed tokens, or of the exact ones; packed splits
come first. Logits are in base 2. The token scale of keys multiplies the scores, that of values the probabilities, which are
cut into digits then. With few rows a program is one warp: nothing waits for another, and a multiprocessor has a dozen of them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import checks, plan
from .checks import Dense, Mask
from .finish import finish
from .planes import code_table
from .prepare import prepare
from .stores import Store, store_of
from .tiles import (
    LOG2E,
    add_exact,
    add_values,
    coordinates,
    exact_scores,
    key_codes,
    key_scores,
    load_query,
    load_tokens,
    positions,
    row_block,
    sum_of_values,
    token_scales,
    value_codes,
)


@triton.jit
def _masked(x, capped, mask, mask_rows, columns, reached, inside):
    """Logits ``x [N, rows]`` capped at ``capped``, masked, and -inf for tokens that are not ``reached``."""
    if capped is not None:
        x = capped * (1 - 2 / (tl.exp2(x * (2 * LOG2E)) + 1))
    if mask is not None:
        place = mask_rows[None, :] + (columns.to(tl.int64) * mask.column)[:, None]
        added = tl.load(place, reached[:, None] & inside[None, :], 0)
        x = tl.where(added != 0, x, float("-inf")) if added.dtype == tl.uint8 else x + added * LOG2E
    return tl.where(reached[:, None], x, float("-inf"))


@triton.jit
def _softmax(x, peak, total):
    """One step of the running softmax over logits ``x [N, rows]``.

    Returns the probabilities, the factor of what was summed before, and the new exponents and sums of probabilities.
    """
    new = tl.maximum(peak, tl.max(x, 0))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p, kept = tl.exp2(x - safe[None, :]), tl.exp2(peak - safe)
    return p, kept, new, total * kept + tl.sum(p, 0)


@triton.jit
def _packed(
    keys, values, query, factor, addend, bias, capped, mask, mask_rows, inside, batch, head, first, stop, start, length,
    num_sinks, WORDS: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, SHARED: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum, exponents and probabilities of packed tokens ``first .. stop`` of which those from ``start`` on are reached."""
    key_table = code_table(keys.levels, KEY_BITS)
    value_table = code_table(values.levels, VALUE_BITS)
    acc = tl.zeros((VALUE_WIDTH, ROWS), tl.float32)
    peak, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    mass, unit, most = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for now in tl.range(first, stop, TOKENS, num_stages=STAGES):
        tokens = positions(now, TOKENS)
        codes, signs = key_codes(keys, batch, head, tokens, length, KEY_BITS, WORDS, WIDTH)
        scales = token_scales(keys, batch, head, tokens, length)
        x = key_scores(codes, signs, scales, key_table, query, factor, addend, bias, KEY_BITS, PARTS)
        reached = (tokens >= start) & (tokens < length)
        x = _masked(x, capped, mask, mask_rows, num_sinks + tokens, reached, inside)
        p, kept, peak, total = _softmax(x, peak, total)
        if not SHARED:
            codes, signs = value_codes(values, batch, head, now, length, VALUE_BITS, VALUE_DIM, VALUE_WIDTH, TOKENS)
            scales = token_scales(values, batch, head, tokens, length)
        acc, mass, unit, most = add_values(
            acc, mass, unit, kept, most, p * scales[:, None], tokens, codes, signs, value_table, VALUE_BITS, SHARED, PARTS
        )
    return sum_of_values(acc, mass, unit, values.levels, VALUE_BITS), peak, total


@triton.jit
def _exact(
    exact_keys, exact_values, q, query_head, query, multiplier, capped, mask, mask_rows, inside, batch, head, first, stop,
    count, length, num_sinks, DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Sum, exponents and probabilities of exact tokens ``first .. stop``."""
    acc = tl.zeros((VALUE_WIDTH, ROWS), tl.float32)
    peak, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    for now in tl.range(first, stop, TOKENS, num_stages=1):
        tokens = now + tl.arange(0, TOKENS)
        x = exact_scores(exact_keys, q, batch, head, tokens, count, query_head, query, inside, DIM, WIDTH) * multiplier
        columns = tl.where(tokens < num_sinks, tokens, tokens + length)
        x = _masked(x, capped, mask, mask_rows, columns, tokens < count, inside)
        p, kept, peak, total = _softmax(x, peak, total)
        value = load_tokens(exact_values, batch, head, tokens, count, tl.arange(0, VALUE_WIDTH), VALUE_DIM)
        acc = add_exact(acc * kept[None, :], tl.trans(value), p)
    return acc, peak, total


# Sizes that are not worth a compilation of their own.
_SIZES = "all_rows heads group queries blocks start length exact_len num_sinks split_len packed_splits exact_split_len".split()


@triton.jit(do_not_specialize=_SIZES)
def _attend(
    q, query, biases, keys, values, exact_keys, exact_values, mask, partial, state, multiplier, capped, all_rows,
    heads, group, queries, blocks, start, length, exact_len, num_sinks, split_len, packed_splits, exact_split_len,
    DIM: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, SHARED: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    batch, head, inside, index, query_head, token = row_block(tl.program_id(0), group, queries, heads, blocks, ROWS)
    split = tl.program_id(1)
    mask_rows = None
    if mask is not None:
        mask_rows = mask.data + batch * mask.batch + query_head * mask.head + token.to(tl.int64) * mask.query
    if split < packed_splits:
        first = start // 32 * 32 + split * split_len
        words, factor, addend = load_query(query, keys.levels, index, inside, multiplier, WIDTH, KEY_BITS, PARTS)
        bias = tl.load(biases + index, inside, 0.0)
        acc, peak, total = _packed(
            keys, values, words, factor, addend, bias, capped, mask, mask_rows, inside, batch, head, first,
            min(first + split_len, length), start, length, num_sinks, WORDS, WIDTH, VALUE_DIM, VALUE_WIDTH, KEY_BITS,
            VALUE_BITS, SHARED, PARTS, ROWS, TOKENS, STAGES,
        )  # fmt: skip
        column = coordinates(VALUE_WIDTH, SHARED)
    else:
        column = tl.arange(0, VALUE_WIDTH)
        first = (split - packed_splits) * exact_split_len
        acc, peak, total = _exact(
            exact_keys, exact_values, q, query_head, token, multiplier, capped, mask, mask_rows, inside, batch, head, first,
            min(first + exact_split_len, exact_len), exact_len, length, num_sinks, DIM, WIDTH, VALUE_DIM, VALUE_WIDTH, ROWS,
            EXACT,
        )  # fmt: skip
    place = split.to(tl.int64) * all_rows + index
    tl.store(partial + place[None, :] * VALUE_WIDTH + column[:, None], acc, inside[None, :])
    tl.store(state + 2 * place, peak, inside)
    tl.store(state + 2 * place + 1, total, inside)


def attend(
    q, keys, values, exact_keys, exact_values, mask, sink_logits, start, length, num_sinks, scale, softcap, out, lse
) -> None:
    """Launches ``torch_kvq::attend`` (``ops/schemas.py``); a long prompt goes in parts, which bounds the scratch."""
    checks.require_dims("q", q, 4)
    checks.require_dims("exact_keys", exact_keys, 4)
    batch, query_heads, queries, dim = q.shape
    heads, exact_len = exact_keys.shape[1:3]
    checks.require_heads("q", q, heads)
    checks.require_tokens(length, num_sinks, exact_len)
    checks.require(0 <= start <= length, "start", "be from 0 to length", start)
    shape, device = (batch, query_heads, queries), q.device
    dense_q = checks.dense_of("q", q, (*shape, dim), device)
    dense_keys = dense_values = checks.dense_of("exact_keys", exact_keys, (batch, heads, exact_len, dim), device)
    key_store = value_store = store_of("keys", keys, False, (batch, heads, length, dim), device)
    if values:
        checks.require_dims("exact_values", exact_values, 4)
        value_dim = exact_values.shape[3]
        dense_values = checks.dense_of("exact_values", exact_values, (batch, heads, exact_len, value_dim), device)
        value_store = store_of("values", values, True, (batch, heads, length, value_dim), device)
    tokens = _Tokens(key_store, value_store, dense_keys, dense_values, start, length, num_sinks)
    dense_out = checks.dense_of("out", out, (*shape, value_store.dim), device)
    plain_lse = checks.plain_of("lse", lse, shape, device)
    checked_mask = checks.mask_of(mask, (*shape, length + exact_len), device)
    if sink_logits is not None:
        checks.require_whole("sink_logits", sink_logits, torch.float32, (query_heads,), 1, device)
    if not out.numel():
        return
    with plan.on_device(q):
        for part in plan.parts(queries, batch * query_heads):
            part_mask = None if mask is None else checked_mask.part(part)
            _attend_part(
                dense_q.part(part), tokens, part_mask, sink_logits, scale, softcap, dense_out.part(part), plain_lse.part(part)
            )


class _Tokens(NamedTuple):
    """Everything that is attended to, checked; equal stores: the keys are the values."""

    keys: Store
    values: Store
    exact_keys: Dense
    exact_values: Dense
    start: int
    length: int
    num_sinks: int


def _attend_part(
    q: Dense, tokens: _Tokens, mask: Mask | None, sinks: torch.Tensor | None, scale: float, softcap: float, out: Dense,
    lse: Dense,
) -> None:  # fmt: skip
    keys, values, exact_keys, exact_values, start, length, num_sinks = tokens
    batch, query_heads, queries, dim = q.data.shape
    heads, exact_len = exact_keys.data.shape[1:3]
    group, shared, device = query_heads // heads, values is keys, q.data.device
    precise = torch.float32 in (q.data.dtype, out.data.dtype)
    width, value_width = plan.padded(dim), plan.padded(values.dim)
    kind = plan.kind(device, precise, mask is not None, shared, max(width, value_width))
    packed_len = length - start // 32 * 32
    cut = plan.cut(device, batch * heads, group * queries, max(width, value_width), kind, packed_len, exact_len)
    multiplier, capped = (scale / softcap, softcap * LOG2E.value) if softcap else (scale * LOG2E.value, None)
    query, biases = prepare(q, keys, heads, multiplier)
    total = query.shape[0]
    partial, state = plan.scratch(cut, total, value_width, device)
    if partial.numel():
        _attend[(batch * heads * cut.blocks, partial.shape[0])](
            q, query, biases, keys.packed, values.packed, exact_keys, exact_values, mask, partial, state,
            multiplier, capped, total, heads, group, queries, cut.blocks, start, length, exact_len, num_sinks,
            cut.split_len, cut.packed_splits, cut.exact_split_len,
            DIM=dim, WORDS=plan.num_words(dim), WIDTH=width, VALUE_DIM=values.dim, VALUE_WIDTH=value_width,
            KEY_BITS=keys.bits, VALUE_BITS=values.bits, SHARED=shared, PARTS=plan.digits(precise), ROWS=cut.config.rows,
            TOKENS=cut.config.tokens, EXACT=cut.config.exact, STAGES=cut.config.stages, **cut.config.options(),
        )  # fmt: skip
    finish(partial, state, cut.packed_splits, values, heads, sinks, out, lse)
