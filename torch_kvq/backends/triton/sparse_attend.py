"""attend_selected, qk_selected and gather_selected. A program takes 16 rows of one selection and a share of its tokens, whose
rows it reads where they lie. From packed stores the reference attends, which waits for the device."""

import torch
import triton
import triton.language as tl

from ...ops import sparse_reference
from . import checks, fallbacks, plan
from .merge import merge
from .tiles import LOG2E

_ROWS, _TOKENS = 16, 32


@triton.jit
def _tile(x, batch, head, token, there, columns, DIM: tl.constexpr):
    """Rows ``token [N]`` of a head, ``[N, WIDTH]``."""
    start = x.data + batch * x.batch + head * x.head + token.to(tl.int64) * x.token
    return tl.load(start[:, None] + columns[None, :], there[:, None] & (columns < DIM)[None, :], 0.0)


@triton.jit
def _products(q, k, PRECISE: tl.constexpr):
    """``q . k``; products of 16-bit floats are exact in TF32."""
    precision: tl.constexpr = "ieee" if PRECISE else "tf32"
    return tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision=precision)


@triton.jit(do_not_specialize=["heads", "selections", "queries", "rows", "parts"])
def _attend(
    q, keys, values, indices, count, mask, scale, softcap, outs, lses, heads, selections, queries, rows, parts,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PRECISE: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(2).to(tl.int64)
    batch, selection = (tl.program_id(0) // selections).to(tl.int64), (tl.program_id(0) % selections).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    used = row < rows
    head, query = selection * (rows // queries) + row // queries, row % queries
    columns, value_columns = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    number = tl.load(count.data + batch * count.batch + selection)
    start = q.data + batch * q.batch + head * q.head + query * q.token
    queries_tile = tl.load(start[:, None] + columns[None, :], used[:, None] & (columns < DIM)[None, :], 0.0)
    top, total = tl.full((ROWS,), -1e30, tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
    each = (number + TOKENS - 1) // TOKENS
    for tile in range((part * each // parts).to(tl.int32), ((part + 1) * each // parts).to(tl.int32)):
        at = tile * TOKENS + tl.arange(0, TOKENS)
        there = at < number
        token = tl.load(indices.data + batch * indices.batch + selection * indices.head + at, there, 0)
        k = _tile(keys, batch, selection * heads // selections, token, there, columns, DIM)
        x = _products(queries_tile, k, PRECISE) * scale
        if softcap > 0:
            x = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * x / softcap)))
        if mask is not None:
            seen = mask.data + batch * mask.batch + head[:, None] * mask.head + query[:, None] * mask.query
            seen += token.to(tl.int64)[None, :] * mask.column
            within = used[:, None] & there[None, :]
            if mask.data.dtype.element_ty == tl.uint8:
                x = tl.where(tl.load(seen, within, 0) != 0, x, float("-inf"))
            else:
                x += tl.load(seen, within, 0.0)
        x = tl.where(there[None, :], x * LOG2E, float("-inf"))
        most = tl.maximum(top, tl.max(x, 1))
        weights, keep = tl.exp2(x - most[:, None]), tl.exp2(top - most)
        v = _tile(values, batch, selection * heads // selections, token, there, value_columns, VALUE_DIM)
        total = total * keep + tl.sum(weights, 1)
        acc = acc * keep[:, None] + tl.dot(weights, v.to(tl.float32), input_precision="ieee" if PRECISE else "tf32x3")
        top = most
    acc /= tl.where(total == 0, 1.0, total)[:, None]
    lse = tl.where(total == 0, float("-inf"), (top + tl.log2(tl.where(total == 0, 1.0, total))) / LOG2E)
    place = ((part * tl.num_programs(0) // selections + batch) * selections * (rows // queries) + head) * queries + query
    to = outs + place[:, None] * VALUE_DIM + value_columns[None, :]
    tl.store(to, acc, used[:, None] & (value_columns < VALUE_DIM)[None, :])
    tl.store(lses + place, lse, used)


@triton.jit(do_not_specialize=["heads", "selections", "queries", "rows", "capacity"])
def _qk(
    q, keys, indices, count, scale, out, heads, selections, queries, rows, capacity, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PRECISE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    batch, selection = (tl.program_id(1) // selections).to(tl.int64), (tl.program_id(1) % selections).to(tl.int64)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    used = row < rows
    head, query = selection * (rows // queries) + row // queries, row % queries
    columns, at = tl.arange(0, WIDTH), tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = at < tl.load(count.data + batch * count.batch + selection)
    start = q.data + batch * q.batch + head * q.head + query * q.token
    queries_tile = tl.load(start[:, None] + columns[None, :], used[:, None] & (columns < DIM)[None, :], 0.0)
    token = tl.load(indices.data + batch * indices.batch + selection * indices.head + at, there, 0)
    k = _tile(keys, batch, selection * heads // selections, token, there, columns, DIM)
    x = tl.where(there[None, :], _products(queries_tile, k, PRECISE) * scale, float("-inf"))
    to = out.data + batch * out.batch + head * out.head + query * out.token
    tl.store(to[:, None] + at[None, :], x, used[:, None] & (at < capacity)[None, :])


@triton.jit(do_not_specialize=["heads", "selections"])
def _gather(x, indices, count, out, heads, selections, DIM: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr):
    batch, selection = (tl.program_id(1) // selections).to(tl.int64), (tl.program_id(1) % selections).to(tl.int64)
    columns, at = tl.arange(0, WIDTH), tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = at < tl.load(count.data + batch * count.batch + selection)
    token = tl.load(indices.data + batch * indices.batch + selection * indices.head + at, there, 0)
    start = x.data + batch * x.batch + selection * heads // selections * x.head + token.to(tl.int64) * x.token
    inside = there[:, None] & (columns < DIM)[None, :]
    to = out.data + batch * out.batch + selection * out.head + at.to(tl.int64) * out.token
    tl.store(to[:, None] + columns[None, :], tl.load(start[:, None] + columns[None, :], inside), inside)


def _selection(indices, count, batch: int, device) -> tuple[checks.Dense, checks.Dense]:
    checks.require_dims("indices", indices, 3)
    checks.require_whole("indices", indices, torch.int32, (batch, *indices.shape[1:]), 1, device)
    checks.require_whole("count", count, torch.int32, (batch, indices.shape[1]), 1, device)
    return checks.Dense(indices, *indices.stride()), checks.Dense(count, count.stride(0), 1, 0)


def _width(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def qk_selected(q, keys, indices, count, scale, out) -> None:
    """Launches ``torch_kvq::qk_selected`` (``ops/schemas.py``)."""
    if len(keys) != 1:
        fallbacks["qk_selected: packed keys"] += 1
        return sparse_reference.qk_selected(q, keys, indices, count, scale, out)
    checks.require_dims("q", q, 4)
    (batch, query_heads, queries, dim), device = q.shape, q.device
    chosen, number = _selection(indices, count, batch, device)
    dense = checks.dense_of("keys", keys[0], (batch, keys[0].shape[1], keys[0].shape[2], dim), device)
    checks.require_heads("q", q, indices.shape[1])
    selections, capacity = indices.shape[1:]
    checks.require_whole("out", out, torch.float32, (*q.shape[:3], capacity), 1, device)
    rows = query_heads // selections * queries
    if not out.numel():
        return
    with plan.on_device(q):
        _qk[(triton.cdiv(capacity, _TOKENS), batch * selections, triton.cdiv(rows, _ROWS))](
            checks.dense_of("q", q, tuple(q.shape), device), dense, chosen, number, scale, checks.Dense(out, *out.stride()[:3]),
            keys[0].shape[1], selections, queries, rows, capacity, DIM=dim, WIDTH=_width(dim),
            PRECISE=torch.float32 in (q.dtype, keys[0].dtype) or q.dtype != keys[0].dtype, ROWS=_ROWS, TOKENS=_TOKENS,
            num_warps=4,
        )  # fmt: skip


def attend_selected(q, keys, values, indices, count, mask, scale, softcap, out, lse) -> None:
    """Launches ``torch_kvq::attend_selected`` (``ops/schemas.py``)."""
    if len(keys) != 1 or len(values) != 1:
        fallbacks["attend_selected: a packed store"] += 1
        return sparse_reference.attend_selected(q, keys, values, indices, count, mask, scale, softcap, out, lse)
    checks.require_dims("q", q, 4)
    checks.require_dims("out", out, 4)
    (batch, query_heads, queries, dim), device, value_dim = q.shape, q.device, out.shape[-1]
    chosen, number = _selection(indices, count, batch, device)
    selections, capacity = indices.shape[1:]
    checks.require_heads("q", q, selections)
    heads, tokens = keys[0].shape[1:3]
    dense_keys = checks.dense_of("keys", keys[0], (batch, heads, tokens, dim), device)
    dense_values = checks.dense_of("values", values[0], (batch, heads, values[0].shape[2], value_dim), device)
    checks.dense_of("out", out, (*q.shape[:3], value_dim), device)
    checks.plain_of("lse", lse, tuple(q.shape[:3]), device)
    hidden = None if mask is None else checks.mask_of(mask, (*q.shape[:3], mask.shape[-1]), device)
    rows = query_heads // selections * queries
    if not lse.numel():
        return
    programs = batch * selections * triton.cdiv(rows, _ROWS)
    parts = max(1, min(triton.cdiv(capacity, _TOKENS), plan.num_multiprocessors(device) * 4 // programs))
    outs, lses = torch.empty(parts, *out.shape, device=device), torch.empty(parts, *lse.shape, device=device)
    dtypes = {q.dtype, keys[0].dtype, values[0].dtype}
    with plan.on_device(q):
        _attend[(batch * selections, triton.cdiv(rows, _ROWS), parts)](
            checks.dense_of("q", q, tuple(q.shape), device), dense_keys, dense_values, chosen, number, hidden, scale, softcap,
            outs, lses, heads, selections, queries, rows, parts, DIM=dim, VALUE_DIM=value_dim, WIDTH=_width(dim),
            VALUE_WIDTH=_width(value_dim), PRECISE=len(dtypes) > 1 or torch.float32 in dtypes, ROWS=_ROWS, TOKENS=_TOKENS,
            num_warps=4 if dim <= 128 else 8,
        )  # fmt: skip
    merge(outs, lses, out, lse)


def gather_selected(x, indices, count, out) -> None:
    """Launches ``torch_kvq::gather_selected`` (``ops/schemas.py``); ``x`` may be in pinned host memory."""
    checks.require_dims("x", x, 4)
    device, (batch, heads, _, dim) = out.device, x.shape
    chosen, number = _selection(indices, count, batch, device)
    selections, capacity = indices.shape[1:]
    checks.require(heads > 0 and selections % heads == 0, "indices", f"have a multiple of {heads} selections", indices)
    checks.require_whole("out", out, x.dtype, (batch, selections, capacity, dim), 1, device)
    checks.require_inner("x", x, 1)
    checks.require(x.device == device or x.device.type == "cpu", "x", f"be on {device} or on the CPU", x)
    checks.require(x.device == device or x.is_pinned(), "x", "be in pinned memory if it is on the CPU", x)
    if not out.numel():
        return
    with plan.on_device(out):
        _gather[(triton.cdiv(capacity, _TOKENS), batch * selections)](
            checks.Dense(x, *x.stride()[:3]), chosen, number, checks.Dense(out, *out.stride()[:3]), heads, selections,
            DIM=dim, WIDTH=_width(dim), TOKENS=_TOKENS, num_warps=4,
        )  # fmt: skip
