"""First phase of attend and qk: queries to the rotated space of the keys.

q . (centre + balance * R^T (scale * value)) = q . centre + scale * (R (q * balance)) . value
"""

import torch
import triton
import triton.language as tl

from .checks import Dense
from .plan import padded
from .rotation import add_product, rows_of
from .stores import Store

# Sizes that are not worth a compilation of their own.
_SIZES = "total heads group queries".split()


@triton.jit(do_not_specialize=_SIZES)
def _prepare(
    q, keys, matrix, query, biases, multiplier, total, heads, group, queries,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = index < total
    token, query_head = index % queries, index // queries % (heads * group)
    batch, head = index // queries // (heads * group), query_head // group
    rows = q.data + batch * q.batch + query_head * q.head + token * q.token
    columns = tl.arange(0, WIDTH)
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
    tl.store(query + index[:, None] * WIDTH + columns[None, :], acc, inside[:, None])
    tl.store(biases + index, bias * multiplier, inside)


def prepare(q: Dense, keys: Store, heads: int, multiplier: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Prepares ``q [B, G * H, M, D]``.

    Returns:
        ``query [B * Hq * M, WIDTH]`` float32 rotated; ``biases [B * Hq * M]`` float32:
        ``multiplier`` times ``q . centre``.
    """
    batch, query_heads, queries, dim = q.data.shape
    total, width = batch * query_heads * queries, padded(dim)
    query = torch.empty((total, width), dtype=torch.float32, device=q.data.device)
    biases = torch.empty((total,), dtype=torch.float32, device=q.data.device)
    launch = rows_of(total, width)
    _prepare[(triton.cdiv(total, launch["ROWS"]),)](
        q, keys.packed, keys.matrix, query, biases, multiplier, total, heads, query_heads // heads, queries,
        DIM=dim, WIDTH=width, **launch,
    )  # fmt: skip
    return query, biases
