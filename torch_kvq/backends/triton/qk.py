"""qk: unscaled scores of every token, by the first half of attend's tiles. A program writes one block of rows for one split
of the packed tokens, or of the exact ones."""

import torch
import triton
import triton.language as tl

from . import checks, plan
from .checks import Dense
from .planes import code_table
from .prepare import prepare
from .stores import Store, store_of
from .tiles import exact_scores, key_codes, key_scores, load_query, positions, row_block, token_scales


@triton.jit
def _store(out, rows, inside, columns, reached, scores):
    place = rows[None, :] + columns.to(tl.int64)[:, None]
    tl.store(place, scores.to(out.data.dtype.element_ty), reached[:, None] & inside[None, :])


# Sizes that are not worth a compilation of their own.
_SIZES = "all_rows heads group queries blocks length exact_len num_sinks split_len packed_splits exact_split_len".split()


@triton.jit(do_not_specialize=_SIZES)
def _qk(
    q, query, biases, keys, exact_keys, out, all_rows, heads, group, queries, blocks, length, exact_len, num_sinks, split_len,
    packed_splits, exact_split_len, DIM: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    batch, head, inside, index, query_head, token = row_block(tl.program_id(0), group, queries, heads, blocks, ROWS)
    rows = out.data + batch * out.batch + query_head * out.head + token.to(tl.int64) * out.token
    split = tl.program_id(1)
    if split < packed_splits:
        words, factor, addend = load_query(query, keys.levels, index, inside, 1.0, WIDTH, BITS, PARTS)
        bias = tl.load(biases + index, inside, 0.0)
        table = code_table(keys.levels, BITS)
        first = split * split_len
        for now in tl.range(first, min(first + split_len, length), TOKENS, num_stages=STAGES):
            tokens = positions(now, TOKENS)
            codes, signs = key_codes(keys, batch, head, tokens, length, BITS, WORDS, WIDTH)
            scales = token_scales(keys, batch, head, tokens, length)
            scores = key_scores(codes, signs, scales, table, words, factor, addend, bias, BITS, PARTS)
            _store(out, rows, inside, num_sinks + tokens, tokens < length, scores)
    else:
        first = (split - packed_splits) * exact_split_len
        for now in tl.range(first, min(first + exact_split_len, exact_len), EXACT, num_stages=1):
            tokens = now + tl.arange(0, EXACT)
            scores = exact_scores(exact_keys, q, batch, head, tokens, exact_len, query_head, token, inside, DIM, WIDTH)
            _store(out, rows, inside, tl.where(tokens < num_sinks, tokens, tokens + length), tokens < exact_len, scores)


def qk(q, keys, exact_keys, length, num_sinks, out) -> None:
    """Launches ``torch_kvq::qk`` (``ops/schemas.py``)."""
    checks.require_dims("q", q, 4)
    checks.require_dims("exact_keys", exact_keys, 4)
    batch, query_heads, queries, dim = q.shape
    heads, exact_len = exact_keys.shape[1:3]
    checks.require_heads("q", q, heads)
    checks.require_tokens(length, num_sinks, exact_len)
    dense_q = checks.dense_of("q", q, tuple(q.shape), q.device)
    dense_keys = checks.dense_of("exact_keys", exact_keys, (batch, heads, exact_len, dim), q.device)
    store = store_of("keys", keys, False, (batch, heads, length, dim), q.device)
    dense_out = checks.dense_of("out", out, (batch, query_heads, queries, length + exact_len), q.device)
    if not out.numel():
        return
    with plan.on_device(q):
        for part in plan.parts(queries, batch * query_heads):
            _qk_part(dense_q.part(part), store, dense_keys, length, num_sinks, dense_out.part(part))


def _qk_part(q: Dense, keys: Store, exact_keys: Dense, length: int, num_sinks: int, out: Dense) -> None:
    batch, query_heads, queries, dim = q.data.shape
    heads, exact_len = exact_keys.data.shape[1:3]
    group, width = query_heads // heads, plan.padded(dim)
    precise = q.data.dtype == torch.float32
    kind = plan.kind(q.data.device, precise, False, False, width)
    cut = plan.cut(q.data.device, batch * heads, group * queries, width, kind, length, exact_len)
    query, biases = prepare(q, keys, heads, 1.0)
    _qk[(batch * heads * cut.blocks, cut.packed_splits + cut.exact_splits)](
        q, query, biases, keys.packed, exact_keys, out, query.shape[0], heads, group, queries, cut.blocks, length, exact_len,
        num_sinks, cut.split_len, cut.packed_splits, cut.exact_split_len,
        DIM=dim, WORDS=plan.num_words(dim), WIDTH=width, BITS=keys.bits, PARTS=plan.digits(precise),
        ROWS=cut.config.rows, TOKENS=cut.config.tokens, EXACT=cut.config.exact, STAGES=cut.config.stages,
        **cut.config.options(),
    )  # fmt: skip
