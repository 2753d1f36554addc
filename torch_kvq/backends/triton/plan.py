"""How the work is cut: rows and tokens of a program, splits of the tokens, parts of a long prompt.

A program is a block of rows of one key head (a row is one query token of one query head) and one split of the tokens.
Splits fill the multiprocessors in whole waves: with half a wave too much the last programs run alone.
"""

import contextlib
import functools
from typing import NamedTuple

import torch
import triton
from triton.runtime import driver

from ...layout import num_words

MAX_PART_ROWS = 16384  # rows of one launch, which bounds the scratch
MIN_EXACT_LEN = 64
_MAX_WAVES = 4
_WIDE_MEMORY = 200 * 1024  # bytes of shared memory that a program of the wide configurations takes


class Config(NamedTuple):
    """Rows, packed and exact tokens of one tile, warps, stages of the loop over tiles, programs that share an SM, and the
    registers a thread may have for that, 0 for as many as it likes."""

    rows: int
    tokens: int
    exact: int
    warps: int
    stages: int
    shared: int
    registers: int = 0

    def options(self) -> dict[str, int]:
        """Options of a launch."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, **limit}


def padded(dim: int) -> int:
    """Columns of a tile of vectors: whole words, a power of two."""
    return 32 * triton.next_power_of_2(num_words(dim))


# Padded head dim -> kind -> configurations for up to so many rows of a key head; the last one also serves more. That of four
# rows and 128 columns was the fastest of 20 measured on an H200: a warp a program, next to no spilt registers, the fewest
# instructions a code. With 64 columns there is room for twelve such programs, which was faster than eight. The others follow
# the rule in the code compiled for sm_90.
_CONFIGS = {
    64: {
        "plain": (
            Config(4, 128, 32, 1, 2, 12, 168),
            Config(16, 128, 32, 4, 2, 4),
            Config(32, 128, 32, 4, 2, 3),
            Config(64, 64, 32, 4, 2, 2),
        ),
        "masked": (Config(16, 128, 32, 4, 2, 2), Config(32, 64, 16, 4, 2, 2)),
        "frugal": (Config(16, 64, 16, 4, 2, 3),),
    },
    128: {
        "plain": (
            Config(4, 128, 32, 1, 2, 8),
            Config(8, 128, 32, 1, 2, 8),
            Config(32, 128, 32, 8, 2, 1),
        ),
        "masked": (Config(16, 128, 32, 4, 2, 2), Config(32, 128, 16, 8, 2, 1)),
        "frugal": (Config(16, 64, 16, 8, 2, 1),),
    },
    256: {
        "plain": (Config(4, 64, 16, 1, 2, 8), Config(16, 64, 16, 4, 2, 2), Config(32, 128, 16, 8, 2, 1)),
        "masked": (Config(16, 64, 16, 4, 2, 2), Config(32, 128, 16, 8, 2, 1)),
        "frugal": (Config(16, 64, 16, 8, 2, 1),),
    },
    512: {
        "plain": (Config(16, 32, 16, 8, 2, 1),),
        "masked": (Config(16, 64, 16, 8, 2, 1),),
        "frugal": (Config(16, 32, 16, 8, 1, 1),),
        "shared": (Config(16, 32, 16, 8, 2, 1), Config(32, 32, 16, 8, 2, 1)),
    },
}


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have: 99 KB to 227 KB."""
    if device.type != "cuda":
        return 227 * 1024
    return driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def kind(device: torch.device, precise: bool, masked: bool, shared: bool, width: int) -> str:
    """What decides registers and shared memory: float32 queries or results, a mask, wide shared stores, the device."""
    if precise:
        return "frugal"
    if shared and width == 512:
        return "shared"
    if width >= 256 and shared_memory(device) < _WIDE_MEMORY:
        return "frugal"
    return "masked" if masked else "plain"


def config(rows: int, width: int, kind: str) -> Config:
    """The configuration for ``rows`` rows of a key head and tiles ``width`` coordinates wide."""
    table = next(kinds for limit, kinds in _CONFIGS.items() if width <= limit)[kind]
    return next((entry for entry in table if rows <= entry.rows), table[-1])


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def digits(precise: bool) -> int:
    """Digits of queries and weights: two are as good as 16-bit queries and results, four as float32."""
    return 4 if precise else 2


def slots(device: torch.device, shared: int) -> int:
    """Programs that run at once."""
    return num_multiprocessors(device) * shared


@functools.lru_cache(maxsize=4096)
def splits(tiles: int, blocks: int, slots: int) -> tuple[int, int]:
    """Number of splits of ``tiles`` tiles for ``blocks`` blocks of rows, and tiles of one split."""
    best, best_use = (0, 1), 0.0
    for waves in range(1, _MAX_WAVES + 1):
        count = max(1, min(tiles, waves * slots // blocks))
        length = -(-tiles // count) if tiles else 1
        count = -(-tiles // length)
        passes = -(-blocks * count // slots)
        use = tiles * blocks / max(1, passes * slots * length)
        if waves == 1 or use > best_use + 0.05:
            best, best_use = (count, length), use
    return best


class Cut(NamedTuple):
    """One launch: blocks of rows of a key head, splits of packed and of exact tokens and their lengths in tokens."""

    config: Config
    blocks: int
    packed_splits: int
    split_len: int
    exact_splits: int
    exact_split_len: int


@functools.lru_cache(maxsize=4096)
def cut(device: torch.device, pairs: int, rows: int, width: int, kind: str, packed_len: int, exact_len: int) -> Cut:
    """How ``rows`` rows of each of ``pairs`` key heads of all sequences meet so many tokens."""
    chosen = config(rows, width, kind)
    blocks = triton.cdiv(rows, chosen.rows)
    room = slots(device, chosen.shared)
    packed_splits, tiles = splits(triton.cdiv(packed_len, chosen.tokens), pairs * blocks, room)
    exact_tiles = triton.cdiv(exact_len, MIN_EXACT_LEN)
    exact_splits, exact_units = splits(exact_tiles, pairs * blocks, room)
    return Cut(chosen, blocks, packed_splits, tiles * chosen.tokens, exact_splits, exact_units * MIN_EXACT_LEN)


def scratch(cut: Cut, total: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sums ``[splits, rows, WIDTH]``, and their exponent and sum of probabilities ``[splits, rows, 2]``. float32."""
    splits = cut.packed_splits + cut.exact_splits
    partial = torch.empty((splits, total, width), dtype=torch.float32, device=device)
    return partial, torch.empty((splits, total, 2), dtype=torch.float32, device=device)


def parts(queries: int, batch_heads: int) -> list[slice]:
    """Runs of query tokens of one launch each, for ``batch_heads`` query heads of all sequences."""
    step = max(1, MAX_PART_ROWS // batch_heads)
    return [slice(first, min(first + step, queries)) for first in range(0, queries, step)]


def on_device(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """Launches go to the device of ``x``."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
