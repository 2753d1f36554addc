"""encode: centre, balance, rotate, quantise and pack in one pass over x. A program takes runs of whole blocks of 32 tokens of
one head, on the grid of blocks of the store, so that a word of values is written by one program.

The rotation is a product with a dense matrix in float32, of which tensor cores multiply two parts in bfloat16: together they
have 16 bits, which moves fewer than one code in 10,000. Keys are turned as ``[tokens, coordinates]``, values as
``[coordinates, tokens]``: along the last axis lie the bits of a word, of which a thread has eight and its neighbours the rest.

Codes come by arithmetic. A bit is a float, 0 or 1, of one saturated multiply-add; a level, an edge and a place in a word are
products with it. Comparisons and selections run at half the rate, and the compiler stores 64 predicates a thread at that.
"""

import torch
import triton
import triton.language as tl

from ...layout import BLOCK_LEN
from ...ops.schemas import SCALE_RULES
from . import checks, plan
from .checks import Dense
from .planes import HAS_ASSEMBLY
from .stores import Store, store_of
from .tiles import dot_exact, word_strides

_NORM, _MATCHED, _UNBIASED, _MSE = (tl.constexpr(SCALE_RULES.index(name)) for name in ("norm", "matched", "unbiased", "mse"))

# Slopes that take what is not zero to 1 and more: a difference from an edge, a coordinate of a vector of unit variance.
_STEEP, _STEEPEST = tl.constexpr(2.0**100), tl.constexpr(2.0**120)

_OTHER_MEMORY = 2048  # bytes of shared memory besides the matrix and vectors


@triton.jit
def _vectors(x, packed, batch, head, token, inside, chunk, DIM: tl.constexpr):
    """Tokens ``token [N]`` of ``x`` at coordinates ``chunk [C]``: ``[N, C]``, zero outside. In float32 less the centre."""
    start = x.data + batch * x.batch + head * x.head + token.to(tl.int64) * x.token
    mask = inside[:, None] & (chunk < DIM)[None, :]
    part = tl.load(start[:, None] + chunk[None, :], mask, 0.0)
    if part.dtype != tl.bfloat16:
        part = part.to(tl.float32)
        if packed.centre is not None:
            part = tl.where(mask, part - _centre(packed, batch, head, chunk, DIM)[None, :], 0.0)
    return part


@triton.jit
def _centre(packed, batch, head, chunk, DIM: tl.constexpr):
    return tl.load(packed.centre + batch * packed.centre_batch + head * packed.centre_head + chunk, chunk < DIM, 0.0)


@triton.jit
def _two(x):
    """Float32 ``x`` in two parts of bfloat16, both rounded: what is left of it is 2^-18 of it at most."""
    first = x.to(tl.bfloat16)
    return first, (x - first.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _matrix(matrix, packed, batch, head, chunk, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Columns ``chunk [C]`` of the rotation over the balance, in two parts ``[WIDTH, C]``, zero outside."""
    row = tl.arange(0, WIDTH)[:, None]
    columns = tl.load(matrix + row * DIM + chunk[None, :], (row < DIM) & (chunk < DIM)[None, :], 0.0)
    if packed.balance is not None:
        balance = packed.balance + batch * packed.balance_batch + head * packed.balance_head
        columns *= (1 / tl.load(balance + chunk, chunk < DIM, 1.0))[None, :]
    return _two(columns)


@triton.jit
def _turned_centre(matrix, packed, batch, head, DIM: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """The centre turned ``[WIDTH]`` by the same two parts as vectors are: what they round cancels."""
    turned = tl.zeros((WIDTH,), tl.float32)
    for low in range(0, DIM, CHUNK):
        chunk = low + tl.arange(0, CHUNK)
        first, second = _matrix(matrix, packed, batch, head, chunk, DIM, WIDTH)
        columns = first.to(tl.float32) + second.to(tl.float32)
        turned += tl.sum(columns * _centre(packed, batch, head, chunk, DIM)[None, :], 1)
    return turned


@triton.jit
def _add(acc, part, matrix, ALONG_TOKENS: tl.constexpr):
    """``acc`` plus ``part [N, C]`` turned by its columns of the rotation: ``[N, WIDTH]``, or transposed."""
    high, low = matrix
    if part.dtype == tl.bfloat16:
        acc = _product(acc, part, low, ALONG_TOKENS)
        acc = _product(acc, part, high, ALONG_TOKENS)
    else:
        first, second = _two(part)
        acc = _product(acc, second, high, ALONG_TOKENS)
        acc = _product(acc, first, low, ALONG_TOKENS)
        acc = _product(acc, first, high, ALONG_TOKENS)
    return acc


@triton.jit
def _product(acc, part, matrix, ALONG_TOKENS: tl.constexpr):
    return dot_exact(matrix, tl.trans(part), acc) if ALONG_TOKENS else dot_exact(part, tl.trans(matrix), acc)


@triton.jit
def _loaded(levels, COUNT: tl.constexpr):
    """All levels."""
    loaded = ()
    for i in tl.static_range(COUNT):
        loaded = loaded + (tl.load(levels + i),)
    return loaded


@triton.jit
def _step(x, slope: tl.constexpr, addend):
    """1.0 where ``x * slope + addend`` is above zero, by far if at all, and 0.0 elsewhere, also for NaN."""
    if HAS_ASSEMBLY:
        out = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, slope, addend], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        out = tl.where(x * slope + addend > 0, 1.0, 0.0)
    return out


@triton.jit
def _chosen(table, bits, COUNT: tl.constexpr):
    """The entry of ``table`` (``2 ** COUNT`` of them) whose index has the first ``COUNT`` of ``bits``, the highest first."""
    for n in tl.static_range(COUNT):
        half = ()
        for i in tl.static_range(1 << (COUNT - 1 - n)):
            half = half + (table[i] + bits[n] * (table[i + (1 << (COUNT - 1 - n))] - table[i]),)
        table = half
    return table[0]


@triton.jit
def _indices(size, levels, PLANES: tl.constexpr):
    """Bits of the index of the level nearest to ``size``, the highest first, by bisection."""
    bits = ()
    for n in tl.static_range(PLANES):
        edges = ()
        for i in tl.static_range(1 << n):
            edges = edges + (_edge(levels, (2 * i + 1) << (PLANES - 1 - n)) * -_STEEP,)
        bits = bits + (_step(size, _STEEP, _chosen(edges, bits, n)),)
    return bits


@triton.jit
def _edge(levels, i: tl.constexpr):
    """What is nearer to level ``i`` than to the one below is larger than this."""
    return (levels[i - 1] + levels[i]) / 2


@triton.jit
def _scales(square, unit, size, bits, levels, AXIS: tl.constexpr, DIM: tl.constexpr, PLANES: tl.constexpr, RULE: tl.constexpr):
    """Scales as ``reference.quantise``: ``square`` of vectors along ``AXIS``, and ``size``: coordinates times ``unit``."""
    if RULE == _NORM:
        scale = tl.sqrt(square / DIM)
    else:
        value = _chosen(levels, bits, PLANES)
        if DIM < size.shape[AXIS]:
            value = tl.where(tl.expand_dims(tl.arange(0, size.shape[AXIS]) < DIM, 1 - AXIS), value, 0.0)
        if RULE == _MATCHED:
            scale = tl.sqrt(square / tl.sum(value * value, AXIS))
        else:
            dot = tl.sum(size * value, AXIS)
            if RULE == _UNBIASED:
                scale = square * unit / tl.maximum(dot, 1e-30)
            else:
                scale = dot / (tl.sum(value * value, AXIS) * unit)
    return tl.where(square > 0, tl.where(scale < 65504.0, scale, 65504.0), 0.0)  # never NaN


@triton.jit
def _packed(y, bits, PLANES: tl.constexpr):
    """Signs of ``y [X, Y]`` and ``bits`` of the codes, as 8 columns ``2c, 2c + 1, 2c + 8 ..`` of a word share an integer:
    ``[X, Y / 32, 4]``. Those of a thread do; floats hold half of it, for a bit costs a multiplication and addition then."""
    X: tl.constexpr = y.shape[0]
    Y: tl.constexpr = y.shape[1]
    column = tl.arange(0, Y)[None, :]
    bit = (1 << (column // 8 % 2 * 8 + column % 2)).to(tl.float32)
    fields = _step(y, -_STEEPEST, 0.0) * bit
    for p in tl.static_range(PLANES):
        fields += bits[PLANES - 1 - p] * (bit * (4 << (2 * p)))
    halves = tl.sum(tl.sum(tl.reshape(fields, (X, Y // 32, 2, 2, 4, 2)), 5), 3).to(tl.int32)
    return tl.sum(halves << (16 * tl.arange(0, 2))[None, None, :, None], 2)


@triton.jit
def _words(packed, field: tl.constexpr):
    """Words ``[X, W]`` of one field of what :func:`_packed` returned: 0 the signs, ``p + 1`` plane ``p``."""
    shift = 2 * tl.arange(0, 4)[None, None, :]
    return tl.sum(((packed >> (2 * field)) & 0x03030303) << shift, 2)


@triton.jit
def _store_keys(place, words, token, inside, unit, WORDS: tl.constexpr):
    """Words ``[N, W]`` of one plane; from a token to the next it is ``unit`` words."""
    word = tl.arange(0, words.shape[1])[None, :]
    tl.store(place + token[:, None] * unit + word, words, inside[:, None] & (word < WORDS))


@triton.jit
def _store_values(place, words, first, start, stop, unit, DIM: tl.constexpr):
    """Words ``[WIDTH, N / 32]`` of one plane, of tokens from ``first`` on; tokens before ``start`` keep theirs."""
    block = first // 32 + tl.arange(0, words.shape[1])[None, :]
    column = tl.arange(0, words.shape[0])[:, None]
    place += block * unit + column
    mask = (block * 32 < stop) & (column < DIM)
    if first < start:
        begun = (block * 32 < start) & mask
        words |= tl.load(place, begun, 0) & ((1 << tl.where(begun, start % 32, 0)) - 1)
    tl.store(place, words, mask)


# Sizes that are not worth a compilation of their own.
_SIZES = "heads start stop tiles".split()


@triton.jit(do_not_specialize=_SIZES)
def _encode(
    x, packed, matrix, heads, start, stop, tiles, DIM: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, BITS: tl.constexpr, RULE: tl.constexpr, ALONG_TOKENS: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    COUNT: tl.constexpr = 1 << (BITS - 1)
    AXIS: tl.constexpr = 0 if ALONG_TOKENS else 1
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    sign = packed.sign + batch * packed.sign_batch + head * packed.sign_head
    mag = packed.mag + batch * packed.mag_batch + head * packed.mag_head
    sign_unit, mag_unit, plane = word_strides(packed, DIM if ALONG_TOKENS else WORDS, BITS)
    levels = _loaded(packed.levels, COUNT)
    begin = start // 32 * 32 + tl.program_id(0) * tiles * TOKENS
    whole = _matrix(matrix, packed, batch, head, tl.arange(0, CHUNK), DIM, WIDTH)
    TURNED: tl.constexpr = packed.centre is not None and x.data.dtype.element_ty == tl.bfloat16
    if TURNED:
        centre = tl.expand_dims(_turned_centre(matrix, packed, batch, head, DIM, WIDTH, CHUNK), 1 - AXIS)
    for first in tl.range(begin, min(begin + tiles * TOKENS, stop), TOKENS, num_stages=STAGES):
        token = first + tl.arange(0, TOKENS)
        inside = (token >= start) & (token < stop)
        y = tl.zeros((WIDTH, TOKENS) if ALONG_TOKENS else (TOKENS, WIDTH), tl.float32)
        if CHUNK == WIDTH:
            part = _vectors(x, packed, batch, head, token - start, inside, tl.arange(0, CHUNK), DIM)
            y = _add(y, part, whole, ALONG_TOKENS)
        else:
            for low in range(0, DIM, CHUNK):
                chunk = low + tl.arange(0, CHUNK)
                part = _vectors(x, packed, batch, head, token - start, inside, chunk, DIM)
                y = _add(y, part, _matrix(matrix, packed, batch, head, chunk, DIM, WIDTH), ALONG_TOKENS)
        if TURNED:
            y -= centre * tl.expand_dims(inside.to(tl.float32), AXIS)  # nothing where there is no token
        square = tl.sum(y * y, AXIS)
        unit = tl.rsqrt(tl.maximum(square / DIM, 1e-37))
        y *= tl.expand_dims(unit, AXIS)
        size = tl.abs(y)
        bits = _indices(size, levels, BITS - 1)
        # Coordinates beyond the head dim are zero and no edge is below it, so they have no bits.
        fields = _packed(y, bits, BITS - 1)
        scale = _scales(square, unit, size, bits, levels, AXIS, DIM, BITS - 1, RULE)
        place = packed.scale + batch * packed.scale_batch + head * packed.scale_head + token
        tl.store(place, scale.to(tl.float16), inside)
        words = _words(fields, 0)
        if ALONG_TOKENS:
            _store_values(sign, words, first, start, stop, sign_unit, DIM)
        else:
            _store_keys(sign, words, token, inside, sign_unit, WORDS)
        for p in tl.static_range(BITS - 1):
            words = _words(fields, p + 1)
            if ALONG_TOKENS:
                _store_values(mag + p * plane, words, first, start, stop, mag_unit, DIM)
            else:
                _store_keys(mag + p * plane, words, token, inside, mag_unit, WORDS)


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
    size = 32 if span <= 32 or width > 256 else 64
    tiles = triton.cdiv(span, size)
    programs = max(1, plan.slots(x.data.device, 2 if width <= 128 else 1) // (batch * heads))
    each = triton.cdiv(tiles, programs)
    with plan.on_device(x.data):
        _encode[(triton.cdiv(tiles, each), batch * heads)](
            x, store.packed, store.matrix, heads, start, start + tokens, each,
            DIM=dim, WORDS=plan.num_words(dim), WIDTH=width, CHUNK=width if width <= 128 else 8192 // width,
            BITS=store.bits, RULE=rule, ALONG_TOKENS=along_tokens, TOKENS=size,
            STAGES=_stages(x.data, size, width), num_warps=4 if width <= 128 else 8,
        )  # fmt: skip


def _stages(x: torch.Tensor, tokens: int, width: int) -> int:
    """Tiles of ``tokens`` vectors on the way at once: up to three, beside the parts of the matrix and of vectors."""
    if width > 128:
        return 2
    parts = 2 * width * (2 * width + (0 if x.dtype == torch.bfloat16 else tokens))
    room = plan.shared_memory(x.device) - _OTHER_MEMORY - parts
    return max(1, min(3, room // (tokens * width * x.element_size())))
