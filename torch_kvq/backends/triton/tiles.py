"""Steps of attend, qk and pv on one tile of tokens. Scores stand as ``[tokens, rows]``, sums as ``[coordinates, rows]``, so
that the unpacked tile is always the left operand, which tensor cores take from registers. Rows of a tile of scores are tokens
in the order of :func:`positions`: a thread has four that are neighbours where they are summed, and packs them into one word.
"""

import triton
import triton.language as tl

from .digits import BASE, TOP_DIGIT, digit_words, dot_digits
from .planes import TOP_STEPS, code_values, in_word, load_codes, spread

LOG2E = tl.constexpr(1.4426950408889634)

_FLOOR = tl.constexpr(2.0**-10)

# The interpreter would multiply the bit patterns of bfloat16.
_WIDENED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def row_block(block, group, queries, heads, blocks, ROWS: tl.constexpr):
    """Where rows of program ``block`` lie: sequence, key head, and of each row whether it exists, its index among all rows
    of the call, its query head and its query token."""
    rows = group * queries
    row = block % blocks * ROWS + tl.arange(0, ROWS)
    pair = (block // blocks).to(tl.int64)
    head = pair % heads
    return pair // heads, head, row < rows, pair * rows + row, head * group + row // queries, row % queries


@triton.jit
def word_strides(packed, LAST: tl.constexpr, BITS: tl.constexpr):
    """Words from a unit of a store to the next in ``sign`` and in ``mag``, and from a plane to the next."""
    sign = LAST if packed.sign_unit is None else packed.sign_unit
    mag = (BITS - 1) * LAST if packed.mag_unit is None else packed.mag_unit
    plane = LAST if packed.mag_plane is None else packed.mag_plane
    return sign, mag, plane


@triton.jit
def key_codes(keys, batch, head, tokens, length, BITS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr):
    """Codes of keys ``tokens [N]``, as ``load_codes`` returns them: ``[N, WIDTH / 32, 4]``."""
    word = tl.arange(0, WIDTH // 32)[None, :]
    token = tokens[:, None]
    sign = keys.sign + batch * keys.sign_batch + head * keys.sign_head
    mag = keys.mag + batch * keys.mag_batch + head * keys.mag_head
    inside = (token < length) & (word < WORDS)
    sign_unit, mag_unit, plane = word_strides(keys, WORDS, BITS)
    return load_codes(sign + token * sign_unit + word, mag + token * mag_unit + word, plane, inside, BITS, False)


@triton.jit
def value_codes(
    values, batch, head, first, length, BITS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr
):
    """Codes of values ``first .. first + TOKENS``, coordinate ``spread(x)`` at ``x``: ``[WIDTH, TOKENS / 32, 4]``."""
    coordinate = tl.arange(0, WIDTH)[:, None]
    block = first // 32 + tl.arange(0, TOKENS // 32)[None, :]
    sign = values.sign + batch * values.sign_batch + head * values.sign_head
    mag = values.mag + batch * values.mag_batch + head * values.mag_head
    inside = (block * 32 < length) & (coordinate < DIM)
    sign_unit, mag_unit, plane = word_strides(values, DIM, BITS)
    sign, mag = sign + block * sign_unit + coordinate, mag + block * mag_unit + coordinate
    return load_codes(sign, mag, plane, inside, BITS, True)


@triton.jit
def token_scales(store, batch, head, tokens, length):
    """Scales of ``tokens [N]``, float32, zero beyond the length."""
    scale = store.scale + batch * store.scale_batch + head * store.scale_head
    return tl.load(scale + tokens, tokens < length, 0.0).to(tl.float32)


@triton.jit
def load_query(query, levels, index, inside, multiplier, WIDTH: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr):
    """Digits of rotated queries ``[total, WIDTH]`` as a right operand, and the factor and the addend of a row's products."""
    column = in_word(4 * tl.arange(0, WIDTH // 4)[:, None] + tl.arange(0, 4)[None, :])
    x = tl.load(query + index[None, None, :] * WIDTH + column[:, :, None], inside[None, None, :], 0.0)
    largest = tl.max(tl.max(tl.abs(x), 1), 0)
    unit = tl.where(largest > 0, largest, 1.0) / TOP_DIGIT
    x *= (1 / unit)[None, None, :]
    factor = unit * (tl.load(levels + (1 << (BITS - 1)) - 1) / TOP_STEPS * multiplier)
    return digit_words(x, PARTS), factor / BASE, factor / 2 * tl.sum(tl.sum(x, 1), 0)


@triton.jit
def key_scores(codes, signs, scales, table, query, factor, addend, bias, BITS: tl.constexpr, PARTS: tl.constexpr):
    """Logits ``[N, rows]`` of unpacked keys."""
    dots = dot_digits(code_values(codes, signs, table, BITS), query, PARTS)
    return (dots * factor[None, :] + addend[None, :]) * scales[:, None] + bias[None, :]


@triton.jit
def add_values(
    acc, mass, unit, kept, most, weights, tokens, codes, signs, table, BITS: tl.constexpr, SHARED: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Adds unpacked values times ``weights [N, rows]`` of ``tokens`` to ``acc [WIDTH, rows]``, the weights to ``mass``.

    ``acc`` is in units of ``unit``, ``most`` is the largest weight so far; ``kept`` multiplies all that was before. The unit
    follows the largest weight of a tile, so that digits do not run out, but for so little that it is lost beside ``most``.

    Returns:
        The new ``acc``, ``mass``, ``unit`` and ``most``.
    """
    N: tl.constexpr = weights.shape[0]
    ROWS: tl.constexpr = weights.shape[1]
    largest = tl.max(tl.abs(weights), 0)
    most = tl.maximum(most * kept, largest)
    new = tl.maximum(tl.maximum(largest, most * _FLOOR), 1e-30) / TOP_DIGIT
    scaled = weights * (1 / new)[None, :] + (_fractions(tokens) * (1 / BASE ** (PARTS - 1)))[:, None]
    by_four = tl.permute(tl.reshape(scaled, (N // 32, 4, 8, ROWS)), (0, 2, 1, 3))
    words = digit_words(tl.reshape(by_four, (N // 4, 4, ROWS)), PARTS)
    left = code_values(codes, signs, table, BITS)
    if SHARED:
        WIDTH: tl.constexpr = left.shape[1]
        left = tl.permute(tl.reshape(left, (N // 32, 4, 8, WIDTH)), (3, 0, 2, 1))
        left = tl.reshape(left, (WIDTH, N))
    acc = acc * (unit * kept / new)[None, :] + dot_digits(left, words, PARTS)
    return acc, mass * kept + tl.sum(weights, 0), new, most


@triton.jit
def _fractions(tokens):
    """Spread evenly between -1/2 and 1/2 over any run of tokens, by multiples of the golden ratio: what the last digit of a
    weight rounds off goes up in some tokens and down in others, so that many weights too small for it count together."""
    return (tokens * -1640531527).to(tl.float32) * (0.998 / 2**32)


@triton.jit
def sum_of_values(acc, mass, unit, levels, BITS: tl.constexpr):
    """What :func:`add_values` summed, with the half steps, in the units of the values."""
    step = tl.load(levels + (1 << (BITS - 1)) - 1) / TOP_STEPS
    return (acc * (unit / BASE)[None, :] + mass[None, :] / 2) * step


@triton.jit
def coordinates(WIDTH: tl.constexpr, SHARED: tl.constexpr):
    """Coordinates of the rows of a sum of packed values."""
    return in_word(tl.arange(0, WIDTH)) if SHARED else spread(tl.arange(0, WIDTH))


@triton.jit
def load_tokens(exact, batch, head, tokens, count, columns, DIM: tl.constexpr):
    """Exact vectors ``tokens [N]`` at coordinates ``columns [X]``: ``[N, X]``, in the dtype of the model."""
    start = exact.data + batch * exact.batch + head * exact.head + tokens.to(tl.int64) * exact.token
    return tl.load(start[:, None] + columns[None, :], (tokens < count)[:, None] & (columns < DIM)[None, :], 0.0)


@triton.jit
def load_rows(x, batch, head, token, inside, columns, DIM: tl.constexpr):
    """Vectors of ``x`` at ``head [rows]`` and ``token [rows]``, coordinates ``columns [X]``: ``[X, rows]``."""
    start = x.data + batch * x.batch + head * x.head + token.to(tl.int64) * x.token
    return tl.load(start[None, :] + columns[:, None], inside[None, :] & (columns < DIM)[:, None], 0.0)


@triton.jit
def dot_exact(left, right, acc):
    """``acc + left @ right`` of two operands of one dtype, float32 in three TF32 passes."""
    if _WIDENED and left.dtype == tl.bfloat16:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="tf32x3" if left.dtype == tl.float32 else None)


@triton.jit
def exact_scores(
    exact, q, batch, head, tokens, count, query_head, query, inside, DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """``q . k [N, rows]`` of exact keys ``tokens [N]``, a stretch of coordinates at a time for the sake of registers."""
    STEP: tl.constexpr = min(WIDTH, 64 if q.data.dtype.element_ty == tl.float32 else 128)
    acc = tl.zeros((tokens.shape[0], query.shape[0]), tl.float32)
    for first in range(0, DIM, STEP):
        columns = first + tl.arange(0, STEP)
        key = load_tokens(exact, batch, head, tokens, count, columns, DIM)
        rows = load_rows(q, batch, query_head, query, inside, columns, DIM)
        if key.dtype != rows.dtype:
            key, rows = key.to(tl.float32), rows.to(tl.float32)
        acc = dot_exact(key, rows, acc)
    return acc


@triton.jit
def add_exact(acc, value, weights):
    """``acc`` plus exact values ``[WIDTH, N]`` times float32 ``weights [N, rows]``, in two passes for 16-bit values."""
    rounded = weights.to(value.dtype)
    acc = dot_exact(value, rounded, acc)
    if value.dtype != tl.float32:
        acc = dot_exact(value, (weights - rounded.to(tl.float32)).to(value.dtype), acc)
    return acc


@triton.jit
def positions(first, TOKENS: tl.constexpr):
    """Tokens of an unpacked tile in the order of its rows."""
    return first + in_word(spread(tl.arange(0, TOKENS)))
