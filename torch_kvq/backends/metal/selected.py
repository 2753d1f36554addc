"""qk_selected, attend_selected, gather_selected: tokens of a selection alone are read."""

from typing import NamedTuple

import torch

from ...ops import problems
from ...ops.checks import Store, rotation_of, statistics_of
from . import Unserved, library, plan, require_served
from .attention import Rows, Splits, finish, prepare_queries, rows_of, table_of
from .library import NUM_THREADS
from .plan import ceil_div

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


def _source(source: problems.Source, shape: tuple[int, int, int], device: torch.device) -> Source:
    """What holds vectors of ``shape [B, H, D]``."""
    require_served(shape[-1])
    if source.dense is None:
        return Source(None, source.store, True)
    none = torch.empty(0, device=device)
    parts = statistics_of("", none, none, shape, device), rotation_of("", (none, none, none), shape[-1], device)
    return Source(source.dense, Store({}, {}, none, *parts, 2), False)


def _chosen(indices: torch.Tensor, count: torch.Tensor) -> tuple[dict, dict]:
    return dict(indices=indices, count=count), dict(indices=indices.stride()[:2], count=count.stride())


def _queries(q, keys: Source, heads: int, selections: int, dim: int, scale: float) -> tuple[Rows, torch.Tensor, torch.Tensor]:
    """Rows of the selections, their queries as the keys are scored, and what every key adds."""
    plain, rotated, bias = prepare_queries(q, keys.store, rows_of(q, heads, dim), scale)
    return rows_of(q, selections, dim), rotated if keys.packed else plain, bias


def qk_selected(q, keys, indices, count, scale, out) -> None:
    problem = problems.qk_selected(q, keys, indices, count, scale, out)
    heads, device = keys[0].shape[1], q.device
    batch, _, _, dim = q.shape
    source = _source(problem, (batch, heads, dim), device)
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
    problem = problems.attend_selected(q, keys, values, indices, count, mask, scale, softcap, out, lse)
    heads, device = keys[0].shape[1], q.device
    (batch, _, _, dim), value_dim = q.shape, out.shape[-1]
    sources = dict(key=_source(problem.keys, (batch, heads, dim), device))
    sources["value"] = _source(problem.values, (batch, heads, value_dim), device)
    table = table_of(problem.masked)
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
    sizes |= rows.sizes | dict(key_heads=heads, mask_columns=problem.masked.columns, table=table.strides)
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
    problems.gather_selected(x, indices, count, out)
    device = indices.device
    if x.device != device:
        raise Unserved(f"rows on {x.device}")
    (batch, heads, _, dim), (selections, capacity) = x.shape, indices.shape[1:]
    shader = library.shaders.get("gather_selected", ("gather_selected.metal",), In=x.dtype)
    chosen, sizes = _chosen(indices, count)
    sizes |= dict(heads=selections, key_heads=heads, capacity=capacity, dim=dim, x=x.stride()[:3], out=out.stride()[:3])
    shader.launch((ceil_div(capacity * dim, NUM_THREADS), selections, batch), sizes, device, x=x, out=out, **chosen)
