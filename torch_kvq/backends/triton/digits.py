"""Products of tiles of 8-bit integers with floats, which are cut into digits of base 254: signed bytes, two for a float with
15 bits after its largest neighbour's first one, four for all of float32. Digits of a float are neighbouring columns of the
right operand, so a product costs tensor cores no more than one of float16, and its integers are exact."""

import triton
import triton.language as tl

from .planes import bytes_of

BASE = tl.constexpr(254)
TOP_DIGIT = tl.constexpr(127.0)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken off again, it rounds to an integer, which its bits end in


@triton.jit
def _digit(x):
    """The integer next to ``x`` in the low byte, and ``BASE`` times what it leaves."""
    shifted = x + _ROUND
    return shifted.to(tl.int32, bitcast=True) & 255, (x - (shifted - _ROUND)) * BASE


@triton.jit
def digit_words(x, PARTS: tl.constexpr):
    """Digits of ``x [K / 4, 4, R]``, which ``TOP_DIGIT`` bounds: words of four, ``[K / 4, R * PARTS]`` int32."""
    part = tl.arange(0, PARTS)[None, None, :]
    digit, rest = _digit(x)
    words = _word(digit)[:, :, None]
    for p in tl.static_range(1, PARTS):
        digit, rest = _digit(rest)
        words = tl.where(part == p, _word(digit)[:, :, None], words)
    return tl.reshape(words, (x.shape[0], x.shape[2] * PARTS))


@triton.jit
def _word(digit):
    """Four bytes ``[K / 4, 4, R]`` to words ``[K / 4, R]``."""
    return tl.sum(digit << (8 * tl.arange(0, 4))[None, :, None], 1)


@triton.jit
def dot_digits(left, words, PARTS: tl.constexpr):
    """``BASE * left @ x``, float32 ``[X, R]``, of ``left [X, K]`` int8 and ``x`` as :func:`digit_words` returned it."""
    X: tl.constexpr = left.shape[0]
    K: tl.constexpr = left.shape[1]
    COLUMNS: tl.constexpr = words.shape[1]
    right = tl.reshape(tl.permute(bytes_of(words), (0, 2, 3, 1)), (K, COLUMNS))
    dots = tl.dot(left, right, out_dtype=tl.int32)
    if PARTS == 2:
        high, low = tl.split(tl.reshape(dots, (X, COLUMNS // 2, 2)))
        out = (high * BASE + low).to(tl.float32)
    else:
        even, odd = tl.split(tl.reshape(dots, (X, COLUMNS // 4, 2, 2)))
        high, low = tl.split((even * BASE + odd).to(tl.float32))
        out = high + low * (1.0 / (BASE * BASE))
    return out
