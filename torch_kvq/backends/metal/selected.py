"""qk_selected, attend_selected, gather_selected: tokens of a selection alone are read."""

from typing import NamedTuple

import torch

from . import Unserved, library, plan
from .attention import Rows, Splits, finish, prepare_queries, rows_of
from .checks import (
    Store,
    require,
    require_dense,
    require_queries,
    require_served,
    require_typed,
    rotation_of,
    statistics_of,
    store_of,
)
from .library import NUM_THREADS
from .plan import ceil_div
from .select import masked, require_selection

_SCORES = ("softmax.metal", "scores.metal", "scores_exact.metal")


class Source(NamedTuple):
    """Rows that are selected from: a tensor ``[B, H, C, D]``, or a packed store; what is not there has two bits."""

    dense: torch.Tensor | None
    store: Store
    packed: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dense is None else self.dense.dtype

    def named(self, name: str) -> tuple[dict, dict]:
        """Tensors and strides for a kernel, ``name`` being key or value."""
        if self.packed:
            tensors, sizes = self.store.named(f"{name}_")
            return tensors | {f"{name}s": None}, sizes | {f"{name}s": (0, 0, 0)}
        parts = {f"{name}_{part}": None for part in ("sign", "mag", "scale", "levels")}
        sizes = {f"{name}_sign": (0, 0, 0), f"{name}_mag": (0, 0, 0, 0), f"{name}_scale": (0, 0)}
        return parts | {f"{name}s": self.dense}, sizes | {f"{name}s": self.dense.stride()[:3]}


def _heads_of(name: str, source: list[torch.Tensor]) -> int:
    require(bool(source) and source[0].dim() == 4, name, "be one tensor of 4 dims or nine of a store", len(source))
    return source[0].shape[1]


def _source(name: str, source: list[torch.Tensor], shape: tuple[int, int, int], device: torch.device) -> Source:
    """Checks what has to hold vectors of ``shape [B, H, D]``."""
    batch, heads, dim = shape
    require_served(dim)
    if len(source) == 1:
        require_dense(name, source[0], (batch, heads, source[0].shape[2], dim), device)
        none = torch.empty(0, device=device)
        parts = statistics_of("", none, none, shape, device), rotation_of("", (none, none, none), dim, device)
        return Source(source[0], Store({}, {}, none, *parts, 2), False)
    return Source(None, store_of(f"{name}.", source, False, (batch, heads, 0, dim), device), True)


def _chosen(indices: torch.Tensor, count: torch.Tensor) -> tuple[dict, dict]:
    return dict(indices=indices, count=count), dict(indices=indices.stride()[:2], count=count.stride())


def _queries(q, keys: Source, heads: int, selections: int, dim: int, scale: float) -> tuple[Rows, torch.Tensor, torch.Tensor]:
    """Rows of the selections, their queries as the keys are scored, and what every key adds."""
    plain, rotated, bias = prepare_queries(q, keys.store, rows_of(q, heads, dim), scale)
    return rows_of(q, selections, dim), rotated if keys.packed else plain, bias


def qk_selected(q, keys, indices, count, scale, out) -> None:
    heads, device = _heads_of("keys", keys), q.device
    require_queries("q", q, keys[0].shape[0], heads)
    batch, query_heads, _, dim = q.shape
    source = _source("keys", keys, (batch, heads, dim), device)
    require_selection(indices, count, batch, query_heads, device)
    require_typed("out", out, torch.float32, (*q.shape[:3], indices.shape[2]), device)
    require_dense("out", out, tuple(out.shape), device)
    rows, vectors, bias = _queries(q, source, heads, indices.shape[1], dim, scale)
    config = dict(Exact=source.dtype, Table=torch.float32, kTable=0, kRows=rows.count, kDim=dim, kPadded=plan.padded(dim))
    config |= dict(kValueDim=dim, kKeyBits=source.store.bits, kPackedKeys=int(source.packed))
    tensors, sizes = source.named("key")
    chosen, strides = _chosen(indices, count)
    sizes |= rows.sizes | strides | dict(key_heads=heads, capacity=indices.shape[2], out=out.stride()[:3])
    groups = rows.groups(ceil_div(indices.shape[2], NUM_THREADS))
    shader = library.shaders.get("qk_selected", (*_SCORES, "selected.metal", "qk_selected.metal"), **config)
    shader.launch(groups, sizes, device, vectors=vectors, bias=bias, out=out, **tensors, **chosen)


def attend_selected(q, keys, values, indices, count, mask, scale, softcap, out, lse) -> None:
    heads, device = _heads_of("keys", keys), q.device
    require_queries("q", q, keys[0].shape[0], heads)
    batch, query_heads, queries, dim = q.shape
    require(out.dim() == 4, "out", "have 4 dims", out)
    value_dim = out.shape[-1]
    require_dense("out", out, (batch, query_heads, queries, value_dim), device)
    require_typed("lse", lse, torch.float32, (batch, query_heads, queries), device)
    _heads_of("values", values)
    sources = dict(key=_source("keys", keys, (batch, heads, dim), device))
    sources["value"] = _source("values", values, (batch, heads, value_dim), device)
    require_selection(indices, count, batch, query_heads, device)
    table, mask_columns = masked(mask, (batch, query_heads, queries), device)
    selections, capacity = indices.shape[1:]
    widest = max(dim, value_dim)
    rows, vectors, bias = _queries(q, sources["key"], heads, selections, widest, scale)
    splits = _splits(rows, capacity, value_dim, sources["value"].packed, device)
    config = dict(Exact=sources["key"].dtype, Value=sources["value"].dtype, kRows=rows.count, kDim=dim, kShared=0)
    config |= dict(kPadded=plan.padded(dim), kValueDim=value_dim, kKeyBits=sources["key"].store.bits, **table.config)
    config |= dict(kValueBits=sources["value"].store.bits, kPackedKeys=int(sources["key"].packed))
    config |= dict(kPackedValues=int(sources["value"].packed))
    tensors, sizes = _chosen(indices, count)
    for name, source in sources.items():
        more_tensors, more_sizes = source.named(name)
        tensors, sizes = tensors | more_tensors, sizes | more_sizes
    cut = splits.packed if sources["value"].packed else splits.exact
    sizes |= rows.sizes | dict(key_heads=heads, mask_columns=mask_columns, table=table.strides)
    sizes |= dict(split_blocks=cut.blocks, splits=splits.count)
    files = (*_SCORES, "values.metal", "selected.metal", "attend_selected.metal")
    library.shaders.get("attend_selected", files, **config).launch(
        rows.groups(cut.groups), sizes, device, vectors=vectors, bias=bias, table=table.data, softcap=softcap,
        sums=splits.sums, state=splits.state, **tensors,
    )  # fmt: skip
    finish(rows_of(q, heads, widest), splits, sources["value"].store, None, out, lse)


def _splits(rows: Rows, capacity: int, value_dim: int, packed: bool, device: torch.device) -> Splits:
    """Splits of the places of a selection; those of packed values are rotated back."""
    cut, none = plan.split_words(0, capacity, rows.others), plan.split_words(0, 0, rows.others)
    sums, state = (torch.empty(rows.flat, cut.splits, n, dtype=torch.float32, device=device) for n in (value_dim, 2))
    return Splits(*((cut, none) if packed else (none, cut)), sums, state)


def gather_selected(x, indices, count, out) -> None:
    require(x.dim() == 4, "x", "have 4 dims", x)
    batch, heads, _, dim = x.shape
    device = indices.device
    if x.device != device:
        raise Unserved(f"rows on {x.device}")
    require_dense("x", x, tuple(x.shape), device)
    require(indices.dim() == 3, "indices", "have 3 dims", indices)
    selections, capacity = indices.shape[1:]
    require(selections > 0 and selections % heads == 0, "indices", f"have a multiple of {heads} selections", indices)
    require_selection(indices, count, batch, selections, device)
    require(out.dtype == x.dtype, "out", f"be {x.dtype}", out)
    require_dense("out", out, (batch, selections, capacity, dim), device)
    shader = library.shaders.get("gather_selected", ("gather_selected.metal",), In=x.dtype)
    chosen, sizes = _chosen(indices, count)
    sizes |= dict(heads=selections, key_heads=heads, capacity=capacity, dim=dim, x=x.stride()[:3], out=out.stride()[:3])
    shader.launch((ceil_div(capacity * dim, NUM_THREADS), selections, batch), sizes, device, x=x, out=out, **chosen)
