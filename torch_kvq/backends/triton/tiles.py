"""Steps of attend, qk and pv on one tile of tokens. Scores stand as ``[tokens, rows]``, sums as ``[coordinates, rows]``, so
that the unpacked tile is always the left operand, which tensor cores take from registers.
"""

import triton
import triton.language as tl

from .planes import code_values, in_word, load_codes

LOG2E = tl.constexpr(1.4426950408889634)

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
def dot_codes(codes, signs, table, right, rest, acc, BITS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """``acc`` plus unpacked codes times ``right + rest``, float16 both; ``rest`` is ``None`` where 11 bits suffice."""
    left = code_values(codes, signs, table, BITS)
    if TRANSPOSED:
        left = tl.trans(left)
    acc = tl.dot(left, right, acc)
    if rest is not None:
        acc = tl.dot(left, rest, acc)
    return acc


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
    return load_codes(sign + token * sign_unit + word, mag + token * mag_unit + word, plane, inside, BITS)


@triton.jit
def value_codes(
    values, batch, head, first, length, BITS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr
):
    """Codes of coordinates of values ``first .. first + TOKENS``: ``[WIDTH, TOKENS / 32, 4]``."""
    coordinate = tl.arange(0, WIDTH)[:, None]
    block = first // 32 + tl.arange(0, TOKENS // 32)[None, :]
    sign = values.sign + batch * values.sign_batch + head * values.sign_head
    mag = values.mag + batch * values.mag_batch + head * values.mag_head
    inside = (block * 32 < length) & (coordinate < DIM)
    sign_unit, mag_unit, plane = word_strides(values, DIM, BITS)
    return load_codes(sign + block * sign_unit + coordinate, mag + block * mag_unit + coordinate, plane, inside, BITS)


@triton.jit
def token_scales(store, batch, head, tokens, length):
    """Scales of ``tokens [N]``, float32, zero beyond the length."""
    scale = store.scale + batch * store.scale_batch + head * store.scale_head
    return tl.load(scale + tokens, tokens < length, 0.0).to(tl.float32)


@triton.jit
def load_query(query, total, index, inside, WIDTH: tl.constexpr):
    """Both parts of prepared queries ``[2, total, WIDTH]`` as ``[WIDTH, rows]``."""
    place = query + index[None, :] * WIDTH + tl.arange(0, WIDTH)[:, None]
    rest = place + total.to(tl.int64) * WIDTH
    return tl.load(place, inside[None, :], 0.0), tl.load(rest, inside[None, :], 0.0)


@triton.jit
def key_scores(codes, signs, scales, table, query, rest, factor, bias, BITS: tl.constexpr):
    """Logits ``[N, rows]`` of unpacked keys."""
    acc = tl.zeros((codes.shape[0], query.shape[1]), tl.float32)
    dots = dot_codes(codes, signs, table, query, rest, acc, BITS, False)
    return dots * scales[:, None] * factor[None, :] + bias[None, :]


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
    return first + in_word(tl.arange(0, TOKENS))
