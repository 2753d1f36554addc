"""The packed format: shapes and bit order, the same on every device and in saved files.

A code of ``bits`` bits (2, 3 or 4) is one sign bit and ``bits - 1`` magnitude bits. The codebook is symmetric, so the
value of a code is ``(-1) ** sign * levels[magnitude]`` with ``levels`` ascending and positive. Codes are stored as bit
planes: plane 0 is the sign (1 = negative), plane ``p >= 1`` is magnitude bit ``p - 1`` (least significant first). Bit
``b`` of an int32 word is ``(word >> b) & 1``; a word with bit 31 set is negative in torch.

Keys are packed along ``D``, the axis that ``q . k`` contracts; a token's word ``w`` holds coordinates 32w .. 32w+31::

    sign  [B, H, C, W]          W = ceil(D / 32), bits at and beyond D are zero
    mag   [B, H, C, bits-1, W]
                      bit  31 30 29 ...                     2  1  0
    sign[b, h, t, w]     | i=32w+31 ...              i=32w+1 i=32w |   one token t

Values are packed along ``T``, the axis that ``p . v`` contracts; a word holds one coordinate of 32 tokens::

    sign  [B, H, C/32, D]
    mag   [B, H, C/32, bits-1, D]
                      bit  31 30 29 ...                     2  1  0
    sign[b, h, n, i]     | t=32n+31 ...              t=32n+1 t=32n |   one coordinate i

Levels are ``(n + 1/2)`` steps, ``n`` an integer, the largest ``TOP_LEVEL`` steps, so that a kernel may hold them as 8-bit
integers; levels off that grid are rounded to it where a kernel does so.

``C`` is the capacity in tokens, a multiple of 32, of which the first ``length`` are in use. Both kinds have one float16
scale a token, ``scale [B, H, C]``. The sign plane of centred, rotated keys is also the 1-bit index of RaBitQ.
"""

VERSION = 1
WORD_BITS = 32
BLOCK_LEN = 32
MIN_BITS, MAX_BITS = 2, 4
MAX_HEAD_DIM = 512
TOP_LEVEL = 126.5

# Order of the tensors that describe one packed store wherever an op takes ``Tensor[] keys`` or ``Tensor[] values``.
PACKED_FIELDS = ("sign", "mag", "scale", "levels", "centre", "balance", "signs", "blocks", "matrix")


def num_words(head_dim: int) -> int:
    """Words of one plane of one packed key."""
    return -(-head_dim // WORD_BITS)


def round_up(tokens: int) -> int:
    """The next capacity that holds ``tokens``: a multiple of the block."""
    return -(-tokens // BLOCK_LEN) * BLOCK_LEN


def key_shapes(batch: int, heads: int, capacity: int, head_dim: int, bits: int) -> dict[str, tuple[int, ...]]:
    """Shapes of ``sign``, ``mag`` (int32) and ``scale`` (float16) of keys, packed along ``D``."""
    words = num_words(head_dim)
    return {
        "sign": (batch, heads, capacity, words),
        "mag": (batch, heads, capacity, bits - 1, words),
        "scale": (batch, heads, capacity),
    }


def value_shapes(batch: int, heads: int, capacity: int, head_dim: int, bits: int) -> dict[str, tuple[int, ...]]:
    """Shapes of ``sign``, ``mag`` (int32) and ``scale`` (float16) of values, packed along ``T``."""
    blocks = capacity // BLOCK_LEN
    return {
        "sign": (batch, heads, blocks, head_dim),
        "mag": (batch, heads, blocks, bits - 1, head_dim),
        "scale": (batch, heads, capacity),
    }


def token_bytes(head_dim: int, bits: int, along_tokens: bool) -> float:
    """Bytes of one packed vector with its scale; 50 for 3 bits and a head dim of 128."""
    width = head_dim if along_tokens else num_words(head_dim) * WORD_BITS
    return width * bits / 8 + 2
