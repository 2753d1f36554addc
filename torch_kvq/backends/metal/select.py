"""top_p_select: the cut of every row, the largest share of every column, then the columns of every selection."""

import torch

from ...ops import problems
from . import library
from .attention import table_of
from .library import NUM_THREADS
from .plan import ceil_div

_FILES = ("top_p_select.metal",)


def top_p_select(scores, exact_lse, mask, candidates, top_p, indices, count) -> None:
    masked = problems.top_p_select(scores, exact_lse, mask, candidates, top_p, indices, count)
    (batch, heads, queries, columns), device = scores.shape, scores.device
    (selections, capacity), table = indices.shape[1:], table_of(masked)
    if not columns:
        count.zero_()
        return
    sizes = dict(heads=heads, queries=queries, columns=columns, mask_columns=masked.columns, selections=selections)
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
