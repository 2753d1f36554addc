"""First phase of attend and qk: queries to the rotated space of the keys, as float16 with one factor a row.

q . (centre + balance * R^T (scale * value)) = q . centre + scale * (R (q * balance)) . value
"""

import torch
import triton
import triton.language as tl

from .checks import Dense
from .plan import padded
from .planes import TOP_STEPS, in_word
from .rotation import CHUNK, add_product, options
from .stores import Store

_ROWS = 16


# Sizes that are not worth a compilation of their own.
_SIZES = "total heads group queries".split()


@triton.jit(do_not_specialize=_SIZES)
def _prepare(
    q, keys, matrix, query, factors, multiplier, total, heads, group, queries,
    DIM: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = index < total
    token, query_head = index % queries, index // queries % (heads * group)
    batch, head = index // queries // (heads * group), query_head // group
    rows = q.data + batch * q.batch + query_head * q.head + token * q.token
    columns = in_word(tl.arange(0, WIDTH))
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    bias = tl.zeros((ROWS,), tl.float32)
    for first in range(0, DIM, CHUNK):
        chunk = first + tl.arange(0, CHUNK)
        mask = inside[:, None] & (chunk < DIM)[None, :]
        x = tl.load(rows[:, None] + chunk[None, :], mask, 0.0).to(tl.float32)
        if keys.centre is not None:
            centre = keys.centre + batch * keys.centre_batch + head * keys.centre_head
            bias += tl.sum(x * tl.load(centre[:, None] + chunk[None, :], mask, 0.0), 1)
        if keys.balance is not None:
            balance = keys.balance + batch * keys.balance_batch + head * keys.balance_head
            x *= tl.load(balance[:, None] + chunk[None, :], mask, 0.0)
        acc = add_product(acc, x, matrix, chunk, columns, DIM, False)
    largest = tl.max(tl.abs(acc), 1)
    acc /= tl.where(largest > 0, largest, 1.0)[:, None]
    place = query + index[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    rounded = acc.to(tl.float16)
    tl.store(place, rounded, inside[:, None])
    tl.store(place + total.to(tl.int64) * WIDTH, (acc - rounded.to(tl.float32)).to(tl.float16), inside[:, None])
    step = tl.load(keys.levels + LEVELS - 1) / TOP_STEPS
    tl.store(factors + 2 * index, largest * step * multiplier, inside)
    tl.store(factors + 2 * index + 1, bias * multiplier, inside)


def prepare(q: Dense, keys: Store, heads: int, multiplier: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Prepares ``q [B, G * H, M, D]``.

    Returns:
        ``query [2, B * Hq * M, WIDTH]`` float16: rows in units of their largest coordinate, and what rounding left of them,
        without which large logits would be off; ``factors [B * Hq * M, 2]`` float32: factor and addend of a row's scores.
    """
    batch, query_heads, queries, dim = q.data.shape
    total, width = batch * query_heads * queries, padded(dim)
    query = torch.empty((2, total, width), dtype=torch.float16, device=q.data.device)
    factors = torch.empty((total, 2), dtype=torch.float32, device=q.data.device)
    _prepare[(triton.cdiv(total, _ROWS),)](
        q, keys.packed, keys.matrix, query, factors, multiplier, total, heads, query_heads // heads, queries,
        DIM=dim, WIDTH=width, LEVELS=1 << (keys.bits - 1), ROWS=_ROWS, **options(width),
    )  # fmt: skip
    return query, factors
