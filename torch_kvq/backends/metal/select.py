"""top_p_select: the cut of every row, the largest share of every column, then the columns of every selection."""

import torch

from . import library
from .attention import ADD, KEEP, NO_TABLE, Table
from .checks import mask_of, require, require_last, require_typed
from .library import NUM_THREADS
from .plan import ceil_div

_FILES = ("top_p_select.metal",)


def require_selection(indices: torch.Tensor, count: torch.Tensor, batch: int, query_heads: int, device: torch.device) -> None:
    """``indices [B, K, S]`` and ``count [B, K]`` int32, of which every query head has one of ``K``."""
    require(indices.dim() == 3, "indices", "have 3 dims", indices)
    selections = indices.shape[1]
    require_typed("indices", indices, torch.int32, (batch, *indices.shape[1:]), device)
    require_last("indices", indices)
    good = selections > 0 and query_heads % selections == 0
    require(good, "indices", f"have a number of selections that divides {query_heads} heads", indices)
    require_typed("count", count, torch.int32, (batch, selections), device)


def masked(mask: torch.Tensor | None, shape: tuple[int, int, int], device: torch.device) -> tuple[Table, int]:
    """A mask over all tokens for rows ``shape [B, Hq, M]``, and how many columns it has."""
    columns = 1 if mask is None or mask.dim() != 4 else mask.shape[-1]
    mask, strides = mask_of(mask, (*shape, columns), device)
    return Table(mask, strides, NO_TABLE if mask is None else KEEP if mask.dtype == torch.bool else ADD), columns


def top_p_select(scores, exact_lse, mask, candidates, top_p, indices, count) -> None:
    require(scores.dim() == 4, "scores", "have 4 dims", scores)
    require(scores.dtype in (torch.float32, torch.float16), "scores", "be float32 or float16", scores)
    require_last("scores", scores)
    batch, heads, queries, columns = scores.shape
    device = scores.device
    require_typed("exact_lse", exact_lse, torch.float32, (batch, heads, queries), device)
    require_selection(indices, count, batch, heads, device)
    selections, capacity = indices.shape[1:]
    table, mask_columns = masked(mask, (batch, heads, queries), device)
    if candidates is not None:
        require_typed("candidates", candidates, torch.int32, (batch, selections, columns), device)
        require_last("candidates", candidates)
    else:
        require(mask is None or mask_columns in (1, columns), "mask", f"have {columns} columns", mask)
    if not columns:
        count.zero_()
        return
    sizes = dict(heads=heads, queries=queries, columns=columns, mask_columns=mask_columns, selections=selections)
    sizes |= dict(capacity=capacity, has_candidates=candidates is not None, scores=scores.stride()[:3], table=table.strides)
    sizes |= dict(exact_lse=exact_lse.stride(), candidates=(0, 0) if candidates is None else candidates.stride()[:2])
    sizes |= dict(indices=indices.stride()[:2], count=count.stride())
    find, mark, write = (
        library.shaders.get(name, _FILES, In=scores.dtype, **table.config)
        for name in ("find_cuts", "mark_columns", "write_selection")
    )
    cuts = torch.empty(batch, heads, queries, 3, dtype=torch.float32, device=device)
    codes = torch.empty(batch, selections, columns, dtype=torch.int32, device=device)
    rows = dict(scores=scores, table=table.data, candidates=candidates)
    find.launch((queries, heads, batch), sizes, device, exact_lse=exact_lse, top_p=top_p, cuts=cuts, **rows)
    mark.launch((ceil_div(columns, NUM_THREADS), selections, batch), sizes, device, cuts=cuts, codes=codes, **rows)
    chosen = dict(candidates=candidates, indices=indices, count=count)
    write.launch((selections, batch), sizes, device, codes=codes, **chosen)
