"""quantise_query and index_keys: a program turns 16 vectors and packs codes or signs, 32 coordinates a word."""

import torch
import triton
import triton.language as tl

from ...layout import num_words
from ...ops.sparse_reference import QUERY_BITS
from . import checks, plan, stores
from .rotation import CHUNK, add_product, options

_ROWS = 16
_HALF_MAX = tl.constexpr(65504.0)
_HALF_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken off again, it rounds half to even
_TOP_CODE = tl.constexpr(2.0**QUERY_BITS - 1)


@triton.jit
def _part(vectors, at, chunk, inside, DIM: tl.constexpr):
    """Coordinates ``chunk`` of the head's vector at ``at [ROWS]``."""
    return tl.load(vectors + at[:, None] + chunk[None, :], inside[:, None] & (chunk < DIM)[None, :], 0.0)


@triton.jit
def _packed(bits, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Words ``[ROWS, WIDTH / 32]`` of bits ``[ROWS, WIDTH]`` int32."""
    apart = tl.reshape(bits, (ROWS, WIDTH // 32, 32))
    return tl.sum(apart << tl.arange(0, 32)[None, None, :], 2)


@triton.jit(do_not_specialize=["heads", "queries", "group", "total"])
def _quantise_query(
    q, query_centre, centre, balance, vector_batch, vector_head, matrix, scale, planes, plane_strides, terms, heads, queries,
    group, total, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = index < total
    batch, head, token = index // queries // heads, index // queries % heads, index % queries
    start = batch * q.batch + head * q.head + token * q.token
    at = batch * vector_batch + head // group * vector_head
    columns = tl.arange(0, WIDTH)
    y, base = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS,), tl.float32)
    for first in range(0, DIM, CHUNK):
        chunk = first + tl.arange(0, CHUNK)
        x = _part(q.data, start, chunk, inside, DIM).to(tl.float32)
        if centre is not None:
            base += tl.sum(x * _part(centre, at, chunk, inside, DIM), 1)
        if query_centre is not None:
            x -= _part(query_centre, at, chunk, inside, DIM)
        if balance is not None:
            x *= _part(balance, at, chunk, inside, DIM)
        y = add_product(y, x, matrix, chunk, columns, DIM, False)
    there = (columns < DIM)[None, :]
    low, high = tl.min(tl.where(there, y, float("inf")), 1), tl.max(tl.where(there, y, float("-inf")), 1)
    odd = tl.sum((~(tl.abs(y) < float("inf"))).to(tl.int32), 1)
    finite = (odd == 0) & (tl.abs(base) < float("inf"))
    delta = tl.div_rn(high - low, _TOP_CODE)
    step = tl.where((delta > 0) & finite, delta, 1.0)
    above = tl.where(there & finite[:, None], y - low[:, None], 0.0)
    steps = tl.div_rn(above, step[:, None] + tl.zeros((ROWS, WIDTH), tl.float32))
    codes = (tl.minimum(steps + _HALF_EVEN - _HALF_EVEN, _TOP_CODE)).to(tl.int32)
    codes = tl.where((delta > 0)[:, None] & finite[:, None] & there, codes, 0)
    words = tl.arange(0, WIDTH // 32)
    place = planes + batch * plane_strides[0] + head * plane_strides[1] + token * plane_strides[2]
    for j in tl.static_range(4):
        packed = _packed((codes >> j) & 1, ROWS, WIDTH)
        where = place[:, None] + j * plane_strides[3] + words[None, :]
        tl.store(where, packed, inside[:, None] & (words * 32 < DIM)[None, :])
    to = terms.data + batch * terms.batch + head * terms.head + token * terms.token
    nothing = float("nan")
    tl.store(to, tl.where(finite, scale * delta, nothing), inside)
    tl.store(to + 1, tl.where(finite, scale * low, nothing), inside)
    tl.store(to + 2, tl.where(finite, tl.sum(codes, 1).to(tl.float32), nothing), inside)
    tl.store(to + 3, tl.where(finite, scale * base, nothing), inside)


@triton.jit(do_not_specialize=["heads", "tokens", "start", "total"])
def _index_keys(
    x, query_centre, centre, balance, vector_batch, vector_head, matrix, sign, factor, bias, heads, tokens, start, total,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = index < total
    batch, head, token = index // tokens // heads, index // tokens % heads, index % tokens
    at = batch * vector_batch + head * vector_head
    columns = tl.arange(0, WIDTH)
    y, product = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS,), tl.float32)
    for first in range(0, DIM, CHUNK):
        chunk = first + tl.arange(0, CHUNK)
        part = _part(x.data, batch * x.batch + head * x.head + token * x.token, chunk, inside, DIM).to(tl.float32)
        if centre is not None:
            part -= _part(centre, at, chunk, inside, DIM)
        if query_centre is not None:
            product += tl.sum(part * _part(query_centre, at, chunk, inside, DIM), 1)
        if balance is not None:
            by = tl.load(balance + at[:, None] + chunk[None, :], inside[:, None] & (chunk < DIM)[None, :], 1.0)
            part = tl.div_rn(part, by)
        y = add_product(y, part, matrix, chunk, columns, DIM, False)
    token += start
    total_size, square = tl.sum(tl.abs(y), 1), tl.sum(y * y, 1)
    ratio = tl.where(total_size > 0, square / tl.where(total_size > 0, total_size, 1.0), 0.0)
    ratio = tl.where(ratio > _HALF_MAX, _HALF_MAX, ratio)
    tl.store(factor.data + batch * factor.batch + head * factor.head + token * factor.token, ratio.to(tl.float16), inside)
    if bias is not None:
        product = tl.where(product > _HALF_MAX, _HALF_MAX, tl.where(product < -_HALF_MAX, -_HALF_MAX, product))
        tl.store(bias.data + batch * bias.batch + head * bias.head + token * bias.token, product.to(tl.float16), inside)
    if sign is not None:
        words = tl.arange(0, WIDTH // 32)
        place = sign.data + batch * sign.batch + head * sign.head + token * sign.token
        packed = _packed((y < 0).to(tl.int32), ROWS, WIDTH)
        tl.store(place[:, None] + words[None, :], packed, inside[:, None] & (words * 32 < DIM)[None, :])


def _vectors(named: dict[str, torch.Tensor], batch: int, device: torch.device, heads: int = 0):
    """Vectors ``[B, H, D]`` of equal strides, ``None`` where empty; the strides, and ``H`` (``heads`` if none has its own)."""
    given = {name: x for name, x in named.items() if x.numel()}
    heads = heads or max((x.shape[-2] for x in given.values() if x.dim() > 1), default=1)
    whole = {}
    for name, x in given.items():
        checks.require(x.dtype == torch.float32 and x.device == device, name, f"be float32 on {device}", x)
        try:
            whole[name] = x.expand(batch, heads, x.shape[-1]).contiguous()
        except RuntimeError:
            checks.require(False, name, f"broadcast to [{batch}, {heads}, *]", x)
    dim = next(iter(given.values())).shape[-1] if given else 0
    return [whole.get(name) for name in named], heads, (heads * dim, dim)


def quantise_query(q, query_centre, centre, balance, signs, blocks, matrix, scale, planes, terms) -> None:
    """Launches ``torch_kvq::quantise_query`` (``ops/schemas.py``)."""
    checks.require_dims("q", q, 4)
    batch, query_heads, queries, dim = q.shape
    dense = checks.dense_of("q", q, tuple(q.shape), q.device)
    vectors, heads, strides = _vectors(dict(query_centre=query_centre, centre=centre, balance=balance), batch, q.device)
    checks.require_heads("q", q, heads)
    rotation = stores.dense((signs, blocks, matrix), dim, q.device)
    checks.require_whole("planes", planes, torch.int32, (*q.shape[:3], QUERY_BITS, num_words(dim)), 1, q.device)
    checks.require_whole("terms", terms, torch.float32, (*q.shape[:3], 4), 1, q.device)
    total, width = batch * query_heads * queries, plan.padded(dim)
    if not total:
        return
    with plan.on_device(q):
        _quantise_query[(triton.cdiv(total, _ROWS),)](
            dense, *vectors, *strides, rotation, scale, planes, planes.stride()[:4], checks.Dense(terms, *terms.stride()[:3]),
            query_heads, queries, query_heads // heads, total, DIM=dim, WIDTH=width, ROWS=_ROWS, **options(width),
        )  # fmt: skip


def index_keys(x, query_centre, centre, balance, signs, blocks, matrix, start, sign, factor, bias) -> None:
    """Launches ``torch_kvq::index_keys`` (``ops/schemas.py``)."""
    checks.require_dims("x", x, 4)
    batch, heads, tokens, dim = x.shape
    dense = checks.dense_of("x", x, tuple(x.shape), x.device)
    vectors, _, strides = _vectors(dict(query_centre=query_centre, centre=centre, balance=balance), batch, x.device, heads)
    rotation = stores.dense((signs, blocks, matrix), dim, x.device)
    capacity = factor.shape[-1]
    checks.require(0 <= start <= capacity - tokens, "start", f"leave room in a capacity of {capacity}", start)
    checks.require_whole("factor", factor, torch.float16, (batch, heads, capacity), 1, x.device)
    if sign.numel():
        checks.require_whole("sign", sign, torch.int32, (batch, heads, capacity, num_words(dim)), 1, x.device)
    if query_centre.numel():
        checks.require_whole("bias", bias, torch.float16, (batch, heads, capacity), 1, x.device)
    total, width = batch * heads * tokens, plan.padded(dim)
    if not total:
        return
    with plan.on_device(x):
        _index_keys[(triton.cdiv(total, _ROWS),)](
            dense, *vectors, *strides, rotation, checks.Dense(sign, *sign.stride()[:3]) if sign.numel() else None,
            checks.Dense(factor, *factor.stride()), checks.Dense(bias, *bias.stride()) if query_centre.numel() else None,
            heads, tokens, start, total, DIM=dim, WIDTH=width, ROWS=_ROWS, **options(width),
        )  # fmt: skip
