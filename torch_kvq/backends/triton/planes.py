"""Bit planes to tiles of float16, the left operand of a tensor-core product, without a detour through memory.

A tile of words ``[X, W]`` becomes ``[X, 32 * W]``. Its columns stand in the order of :func:`in_word`: column ``8a + 2c + h``
of a word is bit ``8a + 4h + c``. So a thread that holds a column pair ``c`` of a tensor-core fragment shifts a word right
by ``c`` and finds its eight codes at the lowest bits of the nibbles; planes are merged to one code a nibble, and a nibble
is what PRMT takes as an index: one instruction looks up one byte of four codes. 4 PRMT and 4 shifts and masks for 4
codes of 3 bits, measured in the compiled code. Keys are unpacked along ``D``, values along ``T``: the other operand has its
rows in the same order.

Values of codes are in steps of ``levels[-1] / TOP_STEPS``, exact in float16 for levels on the format's grid.
"""

import torch
import triton
import triton.language as tl

from ...layout import TOP_LEVEL

# Inline assembly exists on NVIDIA GPUs only, not in the interpreter; elsewhere the same permutation in shifts and masks.
_HAS_PRMT = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)

TOP_STEPS = tl.constexpr(TOP_LEVEL)
_NIBBLES = tl.constexpr(0x11111111)
_SIGN_BYTES = tl.constexpr(0x8000)  # high bytes of a float16 with the sign off and on


@triton.jit
def in_word(column):
    """The bit, counted through all words, that column ``column`` of an unpacked tile was read from."""
    return (column & ~7) | ((column & 1) << 2) | ((column >> 1) & 3)


@triton.jit
def byte_permute(low, high, selector):
    """Four bytes of the eight of ``low`` and ``high``, named by the four low nibbles of ``selector`` (0 to 7). int32."""
    if _HAS_PRMT:
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
def code_table(levels, BITS: tl.constexpr):
    """The float16 values of codes 0 .. 7 as bytes: low bytes of codes 0-3, of 4-7, high bytes of 0-3, of 4-7.

    A code is ``sign << (BITS - 1) | magnitude``, or the magnitude alone for 4 bits.
    """
    HALF: tl.constexpr = 1 << (BITS - 1)
    step = tl.load(levels + HALF - 1) / TOP_STEPS
    low_0, low_4, high_0, high_4 = 0, 0, 0, 0
    for code in tl.static_range(8):
        value = (tl.load(levels + code % HALF) / step).to(tl.float16)
        word = value.to(tl.int16, bitcast=True).to(tl.int32)
        if BITS < 4 and code // HALF % 2 == 1:
            word |= _SIGN_BYTES
        low, high = (word & 255) << (code % 4 * 8), ((word >> 8) & 255) << (code % 4 * 8)
        if code < 4:
            low_0, high_0 = low_0 | low, high_0 | high
        else:
            low_4, high_4 = low_4 | low, high_4 | high
    return low_0, low_4, high_0, high_4


@triton.jit
def load_codes(sign, mag, plane, inside, BITS: tl.constexpr):
    """Codes of the words that the pointers ``sign [X, W]`` and ``mag [X, W]`` (lowest plane) name, zero outside.

    Returns ``[X, W, 4]`` int32 twice: a code a nibble (for 4 bits its magnitude), and a sign a nibble.
    """
    shift = tl.arange(0, 4)[None, None, :]
    signs = (tl.load(sign, inside, 0)[:, :, None] >> shift) & _NIBBLES
    codes = (tl.load(mag, inside, 0)[:, :, None] >> shift) & _NIBBLES
    for p in tl.static_range(1, BITS - 1):
        codes |= ((tl.load(mag + p * plane, inside, 0)[:, :, None] >> shift) & _NIBBLES) << p
    if BITS < 4:
        codes |= signs << (BITS - 1)
    return codes, signs


@triton.jit
def code_values(codes, signs, table, BITS: tl.constexpr):
    """Values in steps, float16 ``[X, 32 * W]`` in the order of :func:`in_word`, of the codes of :func:`load_codes`."""
    low_0, low_4, high_0, high_4 = table
    selector = tl.join(codes, codes >> 16)
    low, high = byte_permute(low_0, low_4, selector), byte_permute(high_0, high_4, selector)
    if BITS == 4:
        high |= byte_permute(_SIGN_BYTES, 0, tl.join(signs, signs >> 16))
    pairs = tl.join(byte_permute(low, high, 0x5140), byte_permute(low, high, 0x7362))
    first, second = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    values = tl.join(first.to(tl.float16, bitcast=True), second.to(tl.float16, bitcast=True))
    values = tl.permute(values, (0, 1, 3, 4, 2, 5))  # [X, W, 2, 2, 4, 2]
    return tl.reshape(values, (codes.shape[0], codes.shape[1] * 32))
