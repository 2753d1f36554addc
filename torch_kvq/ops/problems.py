"""The arguments of each operator, checked: one function an operator, by its name and with its arguments (``schemas.py``).

What a function returns is what the check found out, for those who launch kernels. It raises ``RuntimeError``, as the compiled
kernels do; ``csrc/common/problems.cpp`` and ``sparse_problems.cpp`` are the twins of this file for them.
"""

from typing import NamedTuple

import torch

from ..layout import num_words
from .checks import (
    Rotation,
    Statistics,
    Store,
    mask_of,
    per_head,
    require,
    require_dense,
    require_last,
    require_queries,
    require_shape,
    require_tokens,
    require_typed,
    rotation_of,
    statistics_of,
    store_of,
)
from .schemas import SCALE_RULES
from .sparse_reference import QUERY_BITS


class Masked(NamedTuple):
    """A mask that broadcasts to ``[B, Hq, M, columns]``, or ``None``, and its strides."""

    mask: torch.Tensor | None
    strides: tuple[int, ...]
    columns: int


class Attention(NamedTuple):
    """Stores of ``attend``; of latent attention the keys are the values, too."""

    keys: Store
    values: Store
    exact_values: torch.Tensor
    masked: Masked


class Transform(NamedTuple):
    """What is done to a vector before it is coded."""

    query_centre: torch.Tensor | None
    strides: tuple[int, ...]
    statistics: Statistics
    rotation: Rotation


class Source(NamedTuple):
    """Rows that are selected from: a tensor ``[B, H, C, D]`` or a packed store; the other is ``None``."""

    dense: torch.Tensor | None
    store: Store | None

    @property
    def tokens(self) -> int:
        return self.store.tensors["scale"].shape[2] if self.dense is None else self.dense.shape[2]


class Selected(NamedTuple):
    """What ``attend_selected`` reads."""

    keys: Source
    values: Source
    masked: Masked


def rotate(x, signs, blocks, matrix, inverse, out) -> Rotation:
    require(1 <= x.dim(), "x", "have at least 1 dim", x)
    require_dense("x", x, tuple(x.shape), x.device)
    require_dense("out", out, tuple(x.shape), x.device)
    return rotation_of("", (signs, blocks, matrix), x.shape[-1], x.device)


def _encoded(name, x, prefix, packed, rule, along_tokens, start, device) -> Store:
    """Vectors, and the store that they go to, whose parts have names with ``prefix``."""
    require(x.dim() == 4, name, "have 4 dims", x)
    require_dense(name, x, tuple(x.shape), device)
    batch, heads, tokens, dim = x.shape
    require(start >= 0, "start", "be at least 0", start)
    require(0 <= rule < len(SCALE_RULES), f"{prefix}rule", f"be from 0 to {len(SCALE_RULES) - 1}", rule)
    return store_of(prefix, packed, along_tokens, (batch, heads, start + tokens, dim), device)


def encode(x, levels, centre, balance, signs, blocks, matrix, rule, along_tokens, start, sign, mag, scale) -> Store:
    packed = [sign, mag, scale, levels, centre, balance, signs, blocks, matrix]
    return _encoded("x", x, "", packed, rule, along_tokens, start, x.device)


def encode_kv(keys, values, key_codec, value_codec, key_rule, value_rule, start, *planes) -> tuple[Store, Store]:
    for name, codec in (("key_codec", key_codec), ("value_codec", value_codec)):
        require(len(codec) == 6, name, "be six tensors", len(codec))
    packed = [*planes[:3], *key_codec], [*planes[3:], *value_codec]
    return (
        _encoded("keys", keys, "key_", packed[0], key_rule, False, start, keys.device),
        _encoded("values", values, "value_", packed[1], value_rule, True, start, keys.device),
    )


def decode(packed, along_tokens, start, out) -> Store:
    require(out.dim() == 4, "out", "have 4 dims", out)
    require_dense("out", out, tuple(out.shape), out.device)
    batch, heads, tokens, dim = out.shape
    require(start >= 0, "start", "be at least 0", start)
    return store_of("packed.", packed, along_tokens, (batch, heads, start + tokens, dim), out.device)


def _scored(q, keys, exact_keys, start: int, length: int, num_sinks: int) -> Store:
    """Queries, and the keys they meet."""
    require(exact_keys.dim() == 4, "exact_keys", "have 4 dims", exact_keys)
    batch, heads, exact_len, dim = exact_keys.shape
    require_queries("q", q, batch, heads)
    require_shape("q", q, (*q.shape[:3], dim), q.device)
    require_dense("exact_keys", exact_keys, (batch, heads, exact_len, dim), q.device)
    require_tokens(start, length, num_sinks, exact_len)
    return store_of("keys.", keys, False, (batch, heads, length, dim), q.device)


def attend(
    q, keys, values, exact_keys, exact_values, mask, sink_logits, start, length, num_sinks, scale, softcap, out, lse
) -> Attention:
    key_store, device = _scored(q, keys, exact_keys, start, length, num_sinks), q.device
    batch, heads, exact_len, dim = exact_keys.shape
    value_store, value_dim = key_store, dim
    if values:
        require(exact_values.dim() == 4, "exact_values", "have 4 dims", exact_values)
        value_dim = exact_values.shape[3]
        require_dense("exact_values", exact_values, (batch, heads, exact_len, value_dim), device)
        value_store = store_of("values.", values, True, (batch, heads, length, value_dim), device)
    masked = Masked(*mask_of(mask, (*q.shape[:3], length + exact_len), device), length + exact_len)
    if sink_logits is not None:
        require_typed("sink_logits", sink_logits, torch.float32, (q.shape[1],), device)
        require(sink_logits.is_contiguous(), "sink_logits", "be contiguous", f"strides {sink_logits.stride()}")
    require_dense("out", out, (*q.shape[:3], value_dim), device)
    require_typed("lse", lse, torch.float32, tuple(q.shape[:3]), device)
    return Attention(key_store, value_store, exact_values if values else exact_keys, masked)


def qk(q, keys, exact_keys, length, num_sinks, out) -> Store:
    store = _scored(q, keys, exact_keys, 0, length, num_sinks)
    require_dense("out", out, (*q.shape[:3], length + exact_keys.shape[2]), q.device)
    return store


def pv(p, values, exact_values, length, num_sinks, out) -> Store:
    require(exact_values.dim() == 4, "exact_values", "have 4 dims", exact_values)
    batch, heads, exact_len, dim = exact_values.shape
    device = p.device
    require_queries("p", p, batch, heads)
    require_shape("p", p, (*p.shape[:3], length + exact_len), device)
    require_dense("exact_values", exact_values, (batch, heads, exact_len, dim), device)
    require_tokens(0, length, num_sinks, exact_len)
    store = store_of("values.", values, True, (batch, heads, length, dim), device)
    require_dense("out", out, (*p.shape[:3], dim), device)
    return store


def merge(outs, lses, out, lse) -> None:
    require(outs.dim() == 5, "outs", "have 5 dims", outs)
    device = outs.device
    require_dense("outs", outs, tuple(outs.shape), device)
    require_typed("lses", lses, torch.float32, tuple(outs.shape[:4]), device)
    require_dense("out", out, tuple(outs.shape[1:]), device)
    require_typed("lse", lse, torch.float32, tuple(outs.shape[1:4]), device)


def _transform(
    query_centre, centre, balance, parts: tuple[torch.Tensor, ...], shape: tuple[int, int, int], device
) -> Transform:
    """Of vectors ``shape [B, H, D]``."""
    query_centre, strides = per_head("query_centre", query_centre, shape, device)
    statistics = statistics_of("", centre, balance, shape, device)
    return Transform(query_centre, strides, statistics, rotation_of("", parts, shape[-1], device))


def heads_of(query_heads: int, *vectors: torch.Tensor) -> int:
    """How many key heads there are, as far as vectors ``[.., H, D]`` tell."""
    return max((x.shape[-2] for x in vectors if x.dim() > 1 and x.numel()), default=query_heads)


def _require_coded(planes: torch.Tensor, terms: torch.Tensor, shape: tuple[int, ...], dim: int, device: torch.device) -> None:
    """Codes of queries ``shape [B, Hq, M]``."""
    require_typed("planes", planes, torch.int32, (*shape, QUERY_BITS, num_words(dim)), device)
    require_last("planes", planes)
    require_typed("terms", terms, torch.float32, (*shape, 4), device)
    require_last("terms", terms)


def _require_index(sign, factor, bias, tokens: int, device: torch.device) -> None:
    """``factor [B, H, C]``; of the same shape ``bias`` and, with words behind it, ``sign``, unless empty."""
    require(factor.dim() == 3, "factor", "have 3 dims", factor)
    require(tokens <= factor.shape[-1], "factor", f"have a capacity of at least {tokens}", factor)
    shape = tuple(factor.shape)
    require_typed("factor", factor, torch.float16, shape, device)
    require_last("factor", factor)
    if bias.numel():
        require_typed("bias", bias, torch.float16, shape, device)
        require_last("bias", bias)
    if sign.numel():
        require(sign.dim() == 4, "sign", "have 4 dims", sign)
        require_typed("sign", sign, torch.int32, (*shape, sign.shape[-1]), device)
        require_last("sign", sign)


def quantise_query(q, query_centre, centre, balance, signs, blocks, matrix, scale, planes, terms) -> Transform:
    require(q.dim() == 4, "q", "have 4 dims", q)
    batch, query_heads, _, dim = q.shape
    heads = heads_of(query_heads, query_centre, centre, balance)
    require_queries("q", q, batch, heads)
    transform = _transform(query_centre, centre, balance, (signs, blocks, matrix), (batch, heads, dim), q.device)
    _require_coded(planes, terms, tuple(q.shape[:3]), dim, q.device)
    return transform


def index_keys(x, query_centre, centre, balance, signs, blocks, matrix, start, sign, factor, bias) -> Transform:
    require(x.dim() == 4, "x", "have 4 dims", x)
    require_dense("x", x, tuple(x.shape), x.device)
    batch, heads, tokens, dim = x.shape
    require(start >= 0, "start", "be at least 0", start)
    transform = _transform(query_centre, centre, balance, (signs, blocks, matrix), (batch, heads, dim), x.device)
    _require_index(sign, factor, bias, start + tokens, x.device)
    require(factor.shape[:2] == x.shape[:2], "factor", f"have the shape {[batch, heads, factor.shape[2]]}", factor)
    require(not sign.numel() or sign.shape[-1] == num_words(dim), "sign", f"have {num_words(dim)} words", sign)
    require(not query_centre.numel() or bias.numel() or not factor.numel(), "bias", "be there with query_centre", bias)
    return transform


def sign_scores(planes, terms, sign, factor, bias, head_dim, scale, start, out) -> None:
    require(out.dim() == 4, "out", "have 4 dims", out)
    require_dense("out", out, tuple(out.shape), out.device)
    batch, query_heads, _, tokens = out.shape
    require(start >= 0, "start", "be at least 0", start)
    _require_coded(planes, terms, tuple(out.shape[:3]), head_dim, out.device)
    _require_index(sign, factor, bias, start + tokens, out.device)
    heads = factor.shape[1]
    require(factor.shape[0] == batch, "factor", f"have a batch of {batch}", factor)
    require(heads > 0 and query_heads % heads == 0, "planes", f"have a multiple of {heads} heads", planes)
    words = num_words(head_dim)
    require(sign.dim() == 4 and sign.shape[-1] == words, "sign", f"have {words} words", sign)
    require_shape("sign", sign, (*factor.shape, words), out.device)


def _require_selection(
    indices: torch.Tensor, count: torch.Tensor, batch: int, query_heads: int, device: torch.device, heads: int = 0
) -> None:
    """``indices [B, K, S]`` and ``count [B, K]`` int32, where every query head has one of ``K``, and every one of ``heads``."""
    require(indices.dim() == 3, "indices", "have 3 dims", indices)
    selections = indices.shape[1]
    require_typed("indices", indices, torch.int32, (batch, *indices.shape[1:]), device)
    require_last("indices", indices)
    good = selections > 0 and query_heads % selections == 0
    require(good, "indices", f"have a number of selections that divides {query_heads} heads", indices)
    rule = f"have a selection for each of {heads} key heads or each of {query_heads} query heads"
    require(not heads or selections in (heads, query_heads), "indices", rule, indices)
    require_typed("count", count, torch.int32, (batch, selections), device)


def _require_values(indices: torch.Tensor, count: torch.Tensor, *tokens: int) -> None:
    """What a selection of sources with so many ``tokens`` holds; on another device than the CPU the host would wait for it."""
    if not indices.is_cpu or not count.numel():
        return
    (least, most), capacity = (int(x) for x in count.aminmax()), indices.shape[-1]
    require(0 <= least and most <= capacity, "count", f"be from 0 to {capacity}", least if least < 0 else most)
    chosen = indices[torch.arange(capacity) < count.unsqueeze(-1)]
    if chosen.numel():
        (least, most), last = (int(x) for x in chosen.aminmax()), min(tokens) - 1
        require(0 <= least and most <= last, "indices", f"be from 0 to {last}", least if least < 0 else most)


def _masked(mask: torch.Tensor | None, rows: tuple[int, ...], device: torch.device) -> Masked:
    """A mask over all tokens for rows ``[B, Hq, M]``."""
    columns = 1 if mask is None or mask.dim() != 4 else mask.shape[-1]
    return Masked(*mask_of(mask, (*rows, columns), device), columns)


def top_p_select(scores, exact_lse, mask, candidates, top_p, indices, count) -> Masked:
    require(scores.dim() == 4, "scores", "have 4 dims", scores)
    require(scores.dtype in (torch.float32, torch.float16), "scores", "be float32 or float16", scores)
    require_last("scores", scores)
    (batch, heads, queries, columns), device = scores.shape, scores.device
    require_typed("exact_lse", exact_lse, torch.float32, (batch, heads, queries), device)
    require(top_p >= 0, "top_p", "be at least 0", top_p)
    _require_selection(indices, count, batch, heads, device)
    masked = _masked(mask, (batch, heads, queries), device)
    if candidates is not None:
        require_typed("candidates", candidates, torch.int32, (batch, indices.shape[1], columns), device)
        require_last("candidates", candidates)
    else:
        require(mask is None or masked.columns in (1, columns), "mask", f"have {columns} columns", mask)
    return masked


def _source(name: str, source: list[torch.Tensor], shape: tuple[int, int, int], device: torch.device) -> Source:
    """What has to hold vectors of ``shape [B, H, D]``."""
    batch, heads, dim = shape
    if len(source) != 1:
        return Source(None, store_of(f"{name}.", source, False, (batch, heads, 0, dim), device))
    require(source[0].dim() == 4, name, "have 4 dims", source[0])
    require_dense(name, source[0], (batch, heads, source[0].shape[2], dim), device)
    return Source(source[0], None)


def _selected_keys(q, keys, indices, count) -> Source:
    """Queries, and the keys they select from."""
    require(bool(keys) and keys[0].dim() == 4, "keys", "be one tensor of 4 dims or nine of a store", len(keys))
    batch, heads = keys[0].shape[:2]
    require_queries("q", q, batch, heads)
    source = _source("keys", keys, (batch, heads, q.shape[3]), q.device)
    _require_selection(indices, count, batch, q.shape[1], q.device, heads)
    return source


def qk_selected(q, keys, indices, count, scale, out) -> Source:
    source = _selected_keys(q, keys, indices, count)
    require_typed("out", out, torch.float32, (*q.shape[:3], indices.shape[2]), q.device)
    require_last("out", out)
    _require_values(indices, count, source.tokens)
    return source


def attend_selected(q, keys, values, indices, count, mask, scale, softcap, out, lse) -> Selected:
    source, rows = _selected_keys(q, keys, indices, count), tuple(q.shape[:3])
    require(out.dim() == 4, "out", "have 4 dims", out)
    require_dense("out", out, (*rows, out.shape[-1]), q.device)
    require_typed("lse", lse, torch.float32, rows, q.device)
    more = _source("values", values, (q.shape[0], keys[0].shape[1], out.shape[-1]), q.device)
    masked = _masked(mask, rows, q.device)
    columns = () if masked.columns == 1 else (masked.columns,)
    _require_values(indices, count, source.tokens, more.tokens, *columns)
    return Selected(source, more, masked)


def gather_selected(x, indices, count, out) -> None:
    require(x.dim() == 4, "x", "have 4 dims", x)
    device = indices.device
    require(x.device in (device, torch.device("cpu")), "x", f"be on the CPU or on {device}", x)
    require_dense("x", x, tuple(x.shape), x.device)
    batch, heads, _, dim = x.shape
    require(indices.dim() == 3, "indices", "have 3 dims", indices)
    selections, capacity = indices.shape[1:]
    good = heads > 0 and selections > 0 and selections % heads == 0
    require(good, "indices", f"have a multiple of {heads} selections", indices)
    _require_selection(indices, count, batch, selections, device)
    require_typed("out", out, x.dtype, (batch, selections, capacity, dim), device)
    require_last("out", out)
    _require_values(indices, count, x.shape[2])
