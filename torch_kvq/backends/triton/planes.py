"""Bit planes to tiles of 8-bit integers, the left operand of a tensor-core product, without a detour through memory.

A level is ``n + 1/2`` steps of ``levels[-1] / TOP_STEPS``, so a code stands for ``m + 1/2`` steps with an 8-bit ``m``: ``n``
or, negative, ``~n``. Products are of ``m``; the half steps are added once a row.

A tile of words ``[X, W]`` becomes ``[X, 32 * W]``. Its columns stand in the order of :func:`in_word`: column ``16h + 4c + i``
of a word is bit ``16h + 4i + c``. So thread ``c`` of the four that hold a row of a tensor-core fragment shifts a word right by
``c`` and finds its eight codes at the lowest bits of the nibbles; planes are merged to one code a nibble, and a nibble is what
PRMT takes as an index: one instruction looks up four codes, which are a register of the fragment. Keys are unpacked along
``D``, values along ``T``: the other operand has its rows in the same order.
"""

import torch
import triton
import triton.language as tl

from ...layout import TOP_LEVEL

# Inline assembly exists on NVIDIA GPUs only, not in the interpreter; elsewhere the same permutation in shifts and masks.
HAS_ASSEMBLY = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)

TOP_STEPS = tl.constexpr(TOP_LEVEL)
_NIBBLES = tl.constexpr(0x11111111)


@triton.jit
def in_word(column):
    """The bit, counted through all words, that column ``column`` of an unpacked tile was read from; its own inverse."""
    return spread(column)


@triton.jit
def spread(row):
    """Row ``8e + g`` of 32 to ``4g + e``: the four rows of a thread of a fragment to neighbours in memory."""
    return (row & ~31) | ((row & 7) << 2) | ((row >> 3) & 3)


@triton.jit
def byte_permute(low, high, selector):
    """Four bytes of the eight of ``low`` and ``high``, named by the four low nibbles of ``selector`` (0 to 7). int32."""
    if HAS_ASSEMBLY:
        out = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        out = selector * 0
        for i in tl.static_range(4):
            index = (selector >> (4 * i)) & 7
            word = tl.where(index < 4, low, high)
            out |= ((word >> ((index & 3) * 8)) & 255) << (8 * i)
    return out


@triton.jit
def bytes_of(words):
    """The four bytes of int32 ``words``, the lowest first: int8 ``[*, 2, 2]``."""
    return tl.join(tl.join(words, words >> 16), tl.join(words >> 8, words >> 24)).to(tl.int8)


@triton.jit
def code_table(levels, BITS: tl.constexpr):
    """Bytes ``m`` of codes 0-3 and of codes 4-7.

    A code is ``sign << (BITS - 1) | magnitude``, or the magnitude alone for 4 bits.
    """
    HALF: tl.constexpr = 1 << (BITS - 1)
    step = tl.load(levels + HALF - 1) / TOP_STEPS
    code = tl.arange(0, 8)
    byte = (tl.load(levels + code % HALF) / step).to(tl.int32)
    if BITS < 4:
        byte = tl.where(code // HALF % 2 == 1, ~byte, byte)
    byte = (byte & 255) << (code % 4 * 8)
    return tl.sum(tl.where(code < 4, byte, 0), 0), tl.sum(tl.where(code < 4, 0, byte), 0)


@triton.jit
def _words(place, inside, SPREAD: tl.constexpr):
    """Words ``[X, W]``, with ``SPREAD`` those of row ``spread(x)`` at ``x``."""
    words = tl.load(place, inside, 0)
    if SPREAD:
        X: tl.constexpr = words.shape[0]
        W: tl.constexpr = words.shape[1]
        words = tl.reshape(tl.permute(tl.reshape(words, (X // 32, 8, 4, W)), (0, 2, 1, 3)), (X, W))
    return words


@triton.jit
def _turned(words, by):
    """``words`` turned left by ``by`` bits, which may be negative."""
    if HAS_ASSEMBLY:
        words = tl.inline_asm_elementwise(
            "shf.l.wrap.b32 $0, $1, $1, $2;", "=r,r,r", [words, by], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        unsigned, by = words.to(tl.uint32, bitcast=True), by.to(tl.uint32, bitcast=True)
        words = ((unsigned << (by & 31)) | (unsigned >> ((32 - by) & 31))).to(tl.int32, bitcast=True)
    return words


@triton.jit
def load_codes(sign, mag, plane, inside, BITS: tl.constexpr, SPREAD: tl.constexpr):
    """Codes of the words that the pointers ``sign [X, W]`` and ``mag [X, W]`` (lowest plane) name, zero outside.

    Returns ``[X, W, 4]`` int32 twice: a code a nibble (for 4 bits its magnitude), and a sign a nibble.
    """
    shift = tl.arange(0, 4)[None, None, :]
    codes = _turned(_words(mag, inside, SPREAD)[:, :, None], 0 - shift) & _NIBBLES
    for p in tl.static_range(1, BITS - 1):
        codes |= _turned(_words(mag + p * plane, inside, SPREAD)[:, :, None], p - shift) & (_NIBBLES << p)
    AT: tl.constexpr = BITS - 1 if BITS < 4 else 0
    signs = _turned(_words(sign, inside, SPREAD)[:, :, None], AT - shift) & (_NIBBLES << AT)
    return (codes | signs if BITS < 4 else codes), signs


@triton.jit
def code_values(codes, signs, table, BITS: tl.constexpr):
    """``m`` of the codes of :func:`load_codes`, int8 ``[X, 32 * W]`` in the order of :func:`in_word`."""
    low, high = table
    words = byte_permute(low, high, tl.join(codes, codes >> 16))
    if BITS == 4:
        words ^= byte_permute(0xFF00, 0, tl.join(signs, signs >> 16))
    values = tl.permute(bytes_of(words), (0, 1, 2, 3, 4, 5))  # [X, W, 2, 4, 2, 2]
    return tl.reshape(values, (codes.shape[0], codes.shape[1] * 32))
