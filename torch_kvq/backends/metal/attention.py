"""attend, qk and pv: queries to the rotated space, splits of packed and of exact tokens, then all splits put together."""

from typing import NamedTuple

import torch

from ...ops import problems
from ...ops.checks import Store
from . import Unserved, library, plan, require_served
from .codec import ROTATION, dims
from .library import NUM_THREADS
from .plan import NUM_SIMDS, ceil_div

NO_TABLE, KEEP, ADD, WEIGHTS = range(4)  # what softmax.metal makes of the table


class Rows(NamedTuple):
    """Rows of a call and how they are cut: ``R = group * queries`` a head, ``count`` of which share a threadgroup."""

    batch: int
    heads: int
    group: int
    queries: int
    count: int

    @property
    def num_blocks(self) -> int:
        return ceil_div(self.group * self.queries, self.count)

    @property
    def others(self) -> int:
        """Threadgroups of one split."""
        return max(1, self.batch * self.heads * self.num_blocks)

    @property
    def flat(self) -> int:
        return self.batch * self.heads * self.group * self.queries

    @property
    def sizes(self) -> dict[str, int]:
        return dict(heads=self.heads, group=self.group, queries=self.queries, rows=self.group * self.queries)

    def groups(self, x: int) -> tuple[int, int, int]:
        return x, self.num_blocks, self.batch * self.heads


class Table(NamedTuple):
    """A mask, or the weights of pv, with what it means."""

    data: torch.Tensor | None
    strides: tuple[int, ...]
    kind: int

    @property
    def config(self) -> dict:
        return dict(Table=torch.float32 if self.data is None else self.data.dtype, kTable=self.kind)


def table_of(masked: problems.Masked) -> Table:
    mask = masked.mask
    return Table(mask, masked.strides, NO_TABLE if mask is None else KEEP if mask.dtype == torch.bool else ADD)


class Splits(NamedTuple):
    """What splits leave: sums ``[rows, splits, Dv]`` and states ``[rows, splits, 2]``; packed splits come first."""

    packed: plan.Split
    exact: plan.Split
    sums: torch.Tensor
    state: torch.Tensor

    @property
    def count(self) -> int:
        return self.packed.splits + self.exact.splits


def rows_of(x: torch.Tensor, heads: int, dim: int) -> Rows:
    batch, query_heads, queries, _ = x.shape
    group = query_heads // heads
    return Rows(batch, heads, group, queries, plan.rows_of_group(max(1, group * queries), dim))


def _splits(rows: Rows, start: int, length: int, exact_len: int, value_dim: int, device: torch.device) -> Splits:
    packed = plan.split_packed(start, length, rows.others, value_dim)
    exact = plan.split_words(0, exact_len, rows.others)
    count = packed.splits + exact.splits
    floats = dict(dtype=torch.float32, device=device)
    return Splits(packed, exact, torch.empty(rows.flat, count, value_dim, **floats), torch.empty(rows.flat, count, 2, **floats))


def prepare_queries(q: torch.Tensor, keys: Store, rows: Rows, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``plain``, ``rotated`` and ``bias`` of ``query.metal``."""
    dim, flat, device = q.shape[-1], rows.flat, q.device
    width = plan.padded(dim)
    plain, rotated = torch.empty(2, flat, width, dtype=torch.float32, device=device)
    bias = torch.empty(flat, dtype=torch.float32, device=device)
    shader = library.shaders.get("query", (*ROTATION, "query.metal"), In=q.dtype, **dims(dim), kPadded=width)
    sizes = dict(rows=flat, size=q.shape[:3], q=q.stride()[:3], group=rows.group)
    tensors = keys.statistics.tensors | keys.rotation.tensors
    outs = dict(plain=plain, rotated=rotated, bias=bias)
    groups = (ceil_div(flat, NUM_SIMDS),)
    shader.launch(groups, sizes | keys.statistics.sizes | keys.rotation.sizes, device, q=q, scale=scale, **tensors, **outs)
    return plain, rotated, bias


def _attend_packed(
    rows: Rows, rotated, bias, keys: Store | None, values: Store, dim: int, table: Table, splits: Splits, sizes: dict,
    softcap: float,
) -> None:  # fmt: skip
    """Splits over packed tokens; ``values`` may be the same store as ``keys``. Without keys the table holds the weights."""
    value_dim, cut = splits.sums.shape[-1], splits.packed
    if not cut.groups:
        return
    name = "attend_words" if cut.words else "attend_dims"
    config = dict(kRows=rows.count, kPadded=plan.padded(dim), kValueDim=value_dim, kKeyBits=(keys or values).bits)
    config |= dict(kValueBits=values.bits, kShared=int(keys is values), **table.config)
    config |= {} if cut.words else dict(kParts=plan.parts_of(value_dim))
    files = ("softmax.metal", "scores.metal", "values.metal", "tile.metal", f"{name}.metal")
    key_tensors, key_sizes = (keys or values).named("key_")
    if keys is None:
        key_tensors = dict.fromkeys(key_tensors) | dict(key_levels=values.levels)
    value_tensors, value_sizes = values.named("value_")
    sizes = sizes | rows.sizes | key_sizes | value_sizes | dict(table=table.strides, splits=splits.count)
    sizes |= dict(first_block=cut.first, split_blocks=cut.blocks, packed_splits=cut.splits)
    library.shaders.get(name, files, **config).launch(
        rows.groups(cut.groups), sizes, splits.sums.device, rotated=rotated, bias=bias, table=table.data, softcap=softcap,
        sums=splits.sums, state=splits.state, **key_tensors, **value_tensors,
    )  # fmt: skip


def _attend_exact(
    rows: Rows, plain, keys: torch.Tensor | None, values: torch.Tensor, dim: int, table: Table, splits: Splits, sizes: dict,
    softcap: float,
) -> None:  # fmt: skip
    """Splits over exact tokens ``[B, H, E, D]`` and ``[B, H, E, Dv]``."""
    if not splits.exact.groups:
        return
    config = dict(Exact=values.dtype, kRows=rows.count, kDim=dim, kPadded=plan.padded(dim), kValueDim=values.shape[-1])
    files = ("softmax.metal", "scores_exact.metal", "attend_exact.metal")
    strides = dict(keys=(0, 0, 0) if keys is None else keys.stride()[:3], values=values.stride()[:3], table=table.strides)
    cut = dict(split_blocks=splits.exact.blocks, packed_splits=splits.packed.splits, splits=splits.count)
    library.shaders.get("attend_exact", files, **config, **table.config).launch(
        rows.groups(splits.exact.groups), sizes | rows.sizes | strides | cut | dict(exact_len=values.shape[2]), values.device,
        plain=plain, keys=keys, values=values, table=table.data, softcap=softcap, sums=splits.sums, state=splits.state,
    )  # fmt: skip


def finish(rows: Rows, splits: Splits, values: Store, sink_logits, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Writes ``out`` and, of a softmax, ``lse``."""
    dim = splits.sums.shape[-1]
    shader = library.shaders.get("finish", (*ROTATION, "finish.metal"), Out=out.dtype, **dims(dim))
    sizes = dict(rows=rows.flat, size=out.shape[:3], out=out.stride()[:3], group=rows.group, splits=splits.count)
    sizes |= dict(lse=(0, 0, 0) if lse is None else lse.stride(), packed_splits=splits.packed.splits)
    sizes |= dict(normalise=lse is not None, has_sinks=sink_logits is not None)
    shader.launch(
        (ceil_div(rows.flat, NUM_SIMDS),), sizes | values.statistics.sizes | values.rotation.sizes, out.device,
        sums=splits.sums, state=splits.state, sink_logits=sink_logits, out=out, lse=lse,
        **values.statistics.tensors, **values.rotation.tensors,
    )  # fmt: skip


def attend(
    q, keys, values, exact_keys, exact_values, mask, sink_logits, start, length, num_sinks, scale, softcap, out, lse
) -> None:
    problem = problems.attend(
        q, keys, values, exact_keys, exact_values, mask, sink_logits, start, length, num_sinks, scale, softcap, out, lse
    )
    _, heads, exact_len, dim = exact_keys.shape
    exact_values, device, value_dim = problem.exact_values, q.device, out.shape[-1]
    for each in (dim, value_dim):
        require_served(each)
    if exact_keys.dtype != exact_values.dtype:
        raise Unserved(f"exact keys in {exact_keys.dtype} with exact values in {exact_values.dtype}")
    rows = rows_of(q, heads, max(dim, value_dim))
    table = table_of(problem.masked)
    splits = _splits(rows, start, length, exact_len, value_dim, device)
    tokens = dict(length=length, num_sinks=num_sinks)
    plain, rotated, bias = prepare_queries(q, problem.keys, rows, scale)
    _attend_packed(rows, rotated, bias, problem.keys, problem.values, dim, table, splits, tokens | dict(start=start), softcap)
    _attend_exact(rows, plain, exact_keys, exact_values, dim, table, splits, tokens, softcap)
    finish(rows, splits, problem.values, sink_logits, out, lse)


def qk(q, keys, exact_keys, length, num_sinks, out) -> None:
    store, device = problems.qk(q, keys, exact_keys, length, num_sinks, out), q.device
    _, heads, exact_len, dim = exact_keys.shape
    require_served(dim)
    rows = rows_of(q, heads, dim)
    plain, rotated, bias = prepare_queries(q, store, rows, 1.0)
    config = dict(kRows=rows.count, kPadded=plan.padded(dim), Out=out.dtype, kDim=dim, kKeyBits=store.bits)
    config |= dict(Exact=exact_keys.dtype, **Table(None, (), NO_TABLE).config, kValueDim=dim)
    files = ("softmax.metal", "scores.metal", "scores_exact.metal", "qk.metal")
    tensors, sizes = store.named("key_")
    sizes |= rows.sizes | dict(length=length, num_sinks=num_sinks, exact_len=exact_len)
    sizes |= dict(keys=exact_keys.stride()[:3], out=out.stride())
    groups = rows.groups(ceil_div(length, NUM_THREADS))
    packed, exact = (library.shaders.get(name, files, **config) for name in ("qk_packed", "qk_exact"))
    packed.launch(groups, sizes, device, rotated=rotated, bias=bias, out=out, **tensors)
    exact.launch(rows.groups(ceil_div(exact_len, NUM_THREADS)), sizes, device, plain=plain, keys=exact_keys, out=out)


def pv(p, values, exact_values, length, num_sinks, out) -> None:
    store, device = problems.pv(p, values, exact_values, length, num_sinks, out), p.device
    _, heads, exact_len, dim = exact_values.shape
    require_served(dim)
    rows = rows_of(p, heads, dim)
    table = Table(p, p.stride(), WEIGHTS)
    splits = _splits(rows, 0, length, exact_len, dim, device)
    tokens = dict(length=length, num_sinks=num_sinks)
    _attend_packed(rows, None, None, None, store, 4, table, splits, tokens | dict(start=0), 0.0)
    _attend_exact(rows, None, None, exact_values, 4, table, splits, tokens, 0.0)
    finish(rows, splits, store, None, out, None)
