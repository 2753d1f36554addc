"""merge: attention over the union of pieces from their outputs and log-sum-exps. A program takes one row."""

import torch
import triton
import triton.language as tl

from . import checks, plan
from .tiles import LOG2E

# Sizes that are not worth a compilation of their own.
_SIZES = "pieces heads queries".split()


@triton.jit(do_not_specialize=_SIZES)
def _merge(
    outs, outs_piece, lses, lses_piece, out, lse, pieces, heads, queries, DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, head, token = row // queries // heads, row // queries % heads, row % queries
    logits = lses.data + batch * lses.batch + head * lses.head + token * lses.token
    parts = outs.data + batch * outs.batch + head * outs.head + token * outs.token
    column = tl.arange(0, WIDTH)
    largest = tl.load(logits)
    for piece in range(1, pieces):
        largest = tl.maximum(largest, tl.load(logits + tl.cast(piece, tl.int64) * lses_piece))
    acc = tl.zeros((WIDTH,), tl.float32)
    total = 0.0
    for piece in range(0, pieces):
        logit = tl.load(logits + tl.cast(piece, tl.int64) * lses_piece)
        weight = tl.exp2((logit - tl.where(largest == float("-inf"), 0.0, largest)) * LOG2E)
        part = tl.load(parts + tl.cast(piece, tl.int64) * outs_piece + column, column < DIM, 0.0)
        acc += tl.where(weight == 0, 0.0, part.to(tl.float32) * weight)
        total += weight
    total = tl.where(total == 0, 1.0, total)  # nothing reached: 0 and -inf
    acc /= total
    place = out.data + batch * out.batch + head * out.head + token * out.token
    tl.store(place + column, acc.to(out.data.dtype.element_ty), column < DIM)
    tl.store(lse.data + batch * lse.batch + head * lse.head + token * lse.token, largest + tl.log2(total) / LOG2E)


def merge(outs, lses, out, lse) -> None:
    """Launches ``torch_kvq::merge`` (``ops/schemas.py``)."""
    checks.require_dims("outs", outs, 5)
    pieces, batch, heads, queries, dim = outs.shape
    device = outs.device
    checks.require(pieces > 0, "outs", "hold at least one piece", outs)
    checks.require_whole("lses", lses, torch.float32, (pieces, batch, heads, queries), 0, device)
    dense_outs = checks.dense_of("outs", outs[0], (batch, heads, queries, dim), device)
    dense_out = checks.dense_of("out", out, (batch, heads, queries, dim), device)
    plain_lse = checks.plain_of("lse", lse, (batch, heads, queries), device)
    if not lse.numel():
        return
    with plan.on_device(outs):
        _merge[(batch * heads * queries,)](
            dense_outs, outs.stride(0), checks.Dense(lses[0], *lses.stride()[1:]), lses.stride(0), dense_out, plain_lse,
            pieces, heads, queries, DIM=dim, WIDTH=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
