"""How attend, qk and pv are cut into threadgroups. It depends on shapes alone, so results are the same every time."""

from typing import NamedTuple

from ...layout import BLOCK_LEN, WORD_BITS, num_words

FEW_TOKENS = 512  # below, values are summed by the word-parallel strategy (RotaryQuant, "Kernel C")
TARGET_GROUPS = 256  # threadgroups wanted of a launch; not measured
NUM_SIMDS = 4  # of a threadgroup
MAX_ROWS, ROW_FLOATS = 16, 2048  # of a threadgroup: 8 KB of threadgroup memory for queries, and sums that fit in registers


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def padded(dim: int) -> int:
    """A head dim in whole words."""
    return num_words(dim) * WORD_BITS


def rows_of_group(rows: int, dim: int) -> int:
    """Rows that share what a threadgroup unpacks: a power of two, so that few kernels are compiled."""
    limit = min(MAX_ROWS, ROW_FLOATS // padded(dim))
    return min(1 << (rows - 1).bit_length(), limit)


class Split(NamedTuple):
    """Splits of a range of blocks of 32 tokens: ``blocks`` each from ``first`` on, by ``groups`` threadgroups."""

    words: bool
    first: int
    blocks: int
    groups: int
    splits: int


def parts_of(value_dim: int) -> int:
    """Splits of a threadgroup of ``attend_dims.metal``: its threads outnumber the coordinates that many times."""
    return 4 if value_dim <= 32 else 2 if value_dim <= 64 else 1


def split_words(start: int, stop: int, others: int) -> Split:
    """Every simdgroup is a split; ``others`` threadgroups there are for one split (rows, heads, sequences)."""
    first = start // BLOCK_LEN
    blocks = ceil_div(stop, BLOCK_LEN) - first
    each = ceil_div(blocks, max(1, NUM_SIMDS * TARGET_GROUPS // others)) if blocks else 1
    splits = ceil_div(blocks, each)
    return Split(True, first, each, ceil_div(splits, NUM_SIMDS), splits)


def split_dims(start: int, stop: int, others: int, value_dim: int) -> Split:
    """Every threadgroup, or part of it, is a split of whole tiles of 128 tokens."""
    first = start // BLOCK_LEN
    blocks = ceil_div(stop, BLOCK_LEN) - first
    tiles = ceil_div(blocks, NUM_SIMDS)
    each = NUM_SIMDS * ceil_div(tiles, max(1, TARGET_GROUPS // others))
    groups = ceil_div(blocks, each)
    return Split(False, first, each, groups, groups * parts_of(value_dim))


def split_packed(start: int, stop: int, others: int, value_dim: int) -> Split:
    """The strategy is chosen by the number of tokens."""
    if start == stop:
        return Split(True, 0, 1, 0, 0)
    if stop - start < FEW_TOKENS:
        return split_words(start, stop, others)
    return split_dims(start, stop, others, value_dim)
