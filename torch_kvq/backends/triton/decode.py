"""decode: rebuilds tokens of a store. A program takes 32 tokens of one head, 32 coordinates of the codes at a time."""

import triton
import triton.language as tl

from ...layout import BLOCK_LEN
from . import checks, plan, stores
from .rotation import CHUNK, add_product, options
from .tiles import word_strides


@triton.jit
def _bits(words, token, inside, chunk, unit, DIM: tl.constexpr, ALONG_TOKENS: tl.constexpr):
    """Bits ``[N, CHUNK]`` of one plane for tokens ``token`` and coordinates ``chunk``."""
    if ALONG_TOKENS:
        place = words + (token // 32)[:, None] * unit + chunk[None, :]
        shift = (token % 32)[:, None]
    else:
        place = words + token[:, None] * unit + (chunk // 32)[None, :]
        shift = (chunk % 32)[None, :]
    return (tl.load(place, inside[:, None] & (chunk < DIM)[None, :], 0) >> shift) & 1


# Sizes that are not worth a compilation of their own.
_SIZES = "heads start stop".split()


@triton.jit(do_not_specialize=_SIZES)
def _decode(
    out, packed, matrix, heads, start, stop, DIM: tl.constexpr, LAST: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, ALONG_TOKENS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    token = start // 32 * 32 + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = (token >= start) & (token < stop)
    sign = packed.sign + batch * packed.sign_batch + head * packed.sign_head
    mag = packed.mag + batch * packed.mag_batch + head * packed.mag_head
    sign_unit, mag_unit, plane = word_strides(packed, LAST, BITS)
    columns = tl.arange(0, WIDTH)
    acc = tl.zeros((TOKENS, WIDTH), tl.float32)
    for first in range(0, DIM, CHUNK):
        chunk = first + tl.arange(0, CHUNK)
        magnitude = tl.zeros((TOKENS, CHUNK), tl.int32)
        for p in tl.static_range(BITS - 1):
            magnitude |= _bits(mag + p * plane, token, inside, chunk, mag_unit, DIM, ALONG_TOKENS) << p
        level = tl.load(packed.levels + magnitude)
        value = tl.where(_bits(sign, token, inside, chunk, sign_unit, DIM, ALONG_TOKENS) == 1, -level, level)
        acc = add_product(acc, value, matrix, chunk, columns, DIM, True)
    scale = packed.scale + batch * packed.scale_batch + head * packed.scale_head
    acc *= tl.load(scale + token, inside, 0.0).to(tl.float32)[:, None]
    if packed.balance is not None:
        balance = packed.balance + batch * packed.balance_batch + head * packed.balance_head
        acc *= tl.load(balance + columns, columns < DIM, 0.0)[None, :]
    if packed.centre is not None:
        centre = packed.centre + batch * packed.centre_batch + head * packed.centre_head
        acc += tl.load(centre + columns, columns < DIM, 0.0)[None, :]
    place = out.data + batch * out.batch + head * out.head + (token - start).to(tl.int64) * out.token
    mask = inside[:, None] & (columns < DIM)[None, :]
    tl.store(place[:, None] + columns[None, :], acc.to(out.data.dtype.element_ty), mask)


def decode(packed, along_tokens, start, out) -> None:
    """Launches ``torch_kvq::decode`` (``ops/schemas.py``)."""
    checks.require_dims("out", out, 4)
    batch, heads, tokens, dim = out.shape
    checks.require(start >= 0, "start", "be at least 0", start)
    dense_out = checks.dense_of("out", out, tuple(out.shape), out.device)
    store = stores.store_of("packed", packed, along_tokens, (batch, heads, start + tokens, dim), out.device)
    if not out.numel():
        return
    span, width = start % BLOCK_LEN + tokens, plan.padded(dim)
    with plan.on_device(out):
        _decode[(triton.cdiv(span, BLOCK_LEN), batch * heads)](
            dense_out, store.packed, store.matrix, heads, start, start + tokens,
            DIM=dim, LAST=dim if along_tokens else plan.num_words(dim), WIDTH=width, BITS=store.bits,
            ALONG_TOKENS=along_tokens, TOKENS=BLOCK_LEN, **options(width),
        )  # fmt: skip
