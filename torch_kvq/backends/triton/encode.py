"""encode: centre, balance, rotate, quantise and pack in one pass over x. A program takes a run of whole blocks of 32
tokens of one head, on the grid of blocks of the store, so that a word of values is written by one program."""

import triton
import triton.language as tl

from ...layout import BLOCK_LEN
from ...ops.schemas import SCALE_RULES
from . import checks, plan
from .checks import Dense
from .rotation import CHUNK, add_product, options
from .stores import Store, store_of
from .tiles import word_strides

_NORM, _MATCHED, _UNBIASED, _MSE = (tl.constexpr(SCALE_RULES.index(name)) for name in ("norm", "matched", "unbiased", "mse"))


@triton.jit
def _rotated(
    x, packed, matrix, batch, head, token, inside, DIM: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """``R ((x - centre) / balance)`` of tokens ``token [TOKENS]`` of ``x``: ``[TOKENS, WIDTH]``, zero outside."""
    start = x.data + batch * x.batch + head * x.head + token.to(tl.int64) * x.token
    columns = tl.arange(0, WIDTH)
    acc = tl.zeros((TOKENS, WIDTH), tl.float32)
    for first in range(0, DIM, CHUNK):
        chunk = first + tl.arange(0, CHUNK)
        mask = inside[:, None] & (chunk < DIM)[None, :]
        part = tl.load(start[:, None] + chunk[None, :], mask, 0.0).to(tl.float32)
        if packed.centre is not None:
            centre = packed.centre + batch * packed.centre_batch + head * packed.centre_head
            part -= tl.load(centre + chunk, chunk < DIM, 0.0)[None, :]
        if packed.balance is not None:
            balance = packed.balance + batch * packed.balance_batch + head * packed.balance_head
            part /= tl.load(balance + chunk, chunk < DIM, 1.0)[None, :]
        acc = add_product(acc, tl.where(mask, part, 0.0), matrix, chunk, columns, DIM, False)
    return acc


@triton.jit
def _quantised(x, levels, DIM: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, RULE: tl.constexpr):
    """Magnitudes and signs ``[N, WIDTH]`` of ``x`` normed to unit variance, and the scales ``[N]`` (``reference.quantise``)."""
    norm = tl.sqrt(tl.sum(x * x, 1))
    rms = norm * (DIM**-0.5)
    unit = x / tl.maximum(rms, 1e-30)[:, None]
    size = tl.abs(unit)
    below = tl.load(levels)
    magnitude, value = tl.zeros(x.shape, tl.int32), tl.zeros(x.shape, tl.float32) + below
    for i in tl.static_range(1, 1 << (BITS - 1)):
        above = tl.load(levels + i)
        larger = size > (below + above) / 2
        magnitude += larger.to(tl.int32)
        value = tl.where(larger, above, value)
        below = above
    real = (tl.arange(0, WIDTH) < DIM)[None, :]
    value = tl.where(real, value, 0.0)
    dot = tl.sum(size * value, 1) * rms
    square = tl.sum(value * value, 1)
    if RULE == _NORM:
        scale = rms
    elif RULE == _MATCHED:
        scale = norm / tl.sqrt(square)
    elif RULE == _UNBIASED:
        scale = norm * norm / tl.where(dot > 1e-30, dot, 1e-30)
    else:
        scale = dot / square
    scale = tl.where(norm > 0, tl.where(scale < 65504.0, scale, 65504.0), 0.0)  # never NaN
    return tl.where(real, magnitude, 0), (unit < 0).to(tl.int32), scale


@triton.jit
def _store_keys(words, bits, token, inside, unit, WORDS: tl.constexpr, WIDTH: tl.constexpr):
    """Bits ``[N, WIDTH]`` of one plane as words of 32 coordinates; from a token to the next it is ``unit`` words."""
    shift = tl.arange(0, 32)[None, None, :]
    packed = tl.sum(tl.reshape(bits, (bits.shape[0], WIDTH // 32, 32)) << shift, 2)
    word = tl.arange(0, WIDTH // 32)[None, :]
    tl.store(words + token[:, None] * unit + word, packed, inside[:, None] & (word < WORDS))


@triton.jit
def _store_values(words, bits, first, start, stop, unit, DIM: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr):
    """Bits ``[N, WIDTH]`` of one plane as words of 32 tokens from ``first`` on; tokens before ``start`` keep theirs."""
    shift = tl.arange(0, 32)[None, :, None]
    packed = tl.sum(tl.reshape(bits, (TOKENS // 32, 32, WIDTH)) << shift, 1)
    block = first // 32 + tl.arange(0, TOKENS // 32)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    place = words + block * unit + column
    mask = (block * 32 < stop) & (column < DIM)
    begun = (block * 32 < start) & mask
    kept = tl.load(place, begun, 0) & ((1 << tl.where(begun, start % 32, 0)) - 1)
    tl.store(place, packed | kept, mask)


# Sizes that are not worth a compilation of their own.
_SIZES = "heads start stop".split()


@triton.jit(do_not_specialize=_SIZES)
def _encode(
    x, packed, matrix, heads, start, stop, DIM: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, RULE: tl.constexpr, ALONG_TOKENS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    first = start // 32 * 32 + tl.program_id(0) * TOKENS
    token = first + tl.arange(0, TOKENS)
    inside = (token >= start) & (token < stop)
    acc = _rotated(x, packed, matrix, batch, head, token - start, inside, DIM, WIDTH, TOKENS)
    magnitude, negative, scale = _quantised(acc, packed.levels, DIM, WIDTH, BITS, RULE)
    place = packed.scale + batch * packed.scale_batch + head * packed.scale_head + token
    tl.store(place, scale.to(tl.float16), inside)
    sign = packed.sign + batch * packed.sign_batch + head * packed.sign_head
    mag = packed.mag + batch * packed.mag_batch + head * packed.mag_head
    sign_unit, mag_unit, plane = word_strides(packed, DIM if ALONG_TOKENS else WORDS, BITS)
    if ALONG_TOKENS:
        _store_values(sign, negative, first, start, stop, sign_unit, DIM, WIDTH, TOKENS)
        for p in tl.static_range(BITS - 1):
            bits = tl.where(inside[:, None], (magnitude >> p) & 1, 0)
            _store_values(mag + p * plane, bits, first, start, stop, mag_unit, DIM, WIDTH, TOKENS)
    else:
        _store_keys(sign, negative, token, inside, sign_unit, WORDS, WIDTH)
        for p in tl.static_range(BITS - 1):
            _store_keys(mag + p * plane, (magnitude >> p) & 1, token, inside, mag_unit, WORDS, WIDTH)


def encode(x, levels, centre, balance, signs, blocks, matrix, rule, along_tokens, start, sign, mag, scale) -> None:
    """Launches ``torch_kvq::encode`` (``ops/schemas.py``)."""
    checks.require_dims("x", x, 4)
    batch, heads, tokens, dim = x.shape
    checks.require(start >= 0, "start", "be at least 0", start)
    checks.require(0 <= rule < len(SCALE_RULES), "rule", "be an index of SCALE_RULES", rule)
    dense_x = checks.dense_of("x", x, tuple(x.shape), x.device)
    packed = [sign, mag, scale, levels, centre, balance, signs, blocks, matrix]
    store = store_of("store", packed, along_tokens, (batch, heads, start + tokens, dim), x.device)
    if x.numel():
        _launch(dense_x, store, rule, along_tokens, start)


def _launch(x: Dense, store: Store, rule: int, along_tokens: bool, start: int) -> None:
    batch, heads, tokens, dim = x.data.shape
    span, width = start % BLOCK_LEN + tokens, plan.padded(dim)
    size = 32 if span <= 32 or width > 128 else 64
    with plan.on_device(x.data):
        _encode[(triton.cdiv(span, size), batch * heads)](
            x, store.packed, store.matrix, heads, start, start + tokens,
            DIM=dim, WORDS=plan.num_words(dim), WIDTH=width, BITS=store.bits, RULE=rule,
            ALONG_TOKENS=along_tokens, TOKENS=size, **(options(width) | {"num_warps": 4 if size * width <= 4096 else 8}),
        )  # fmt: skip
