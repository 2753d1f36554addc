"""quantise_query, index_keys, sign_scores: codes of queries, signs of keys, and the logits that both estimate."""

import torch

from ...layout import WORD_BITS, num_words
from ...ops.sparse_reference import QUERY_BITS
from . import Unserved, library, plan
from .checks import (
    per_head,
    require,
    require_dense,
    require_last,
    require_queries,
    require_served,
    require_typed,
    rotation_of,
    statistics_of,
)
from .codec import ROTATION, dims
from .library import NUM_THREADS
from .plan import NUM_SIMDS, ceil_div


def _transform(
    query_centre, centre, balance, parts: tuple[torch.Tensor, ...], shape: tuple[int, int, int], device: torch.device
) -> tuple[dict, dict]:
    """Tensors and sizes of what is done to a vector, ``shape [B, H, D]``."""
    query_centre, strides = per_head("query_centre", query_centre, shape, device)
    statistics = statistics_of("", centre, balance, shape, device)
    rotation = rotation_of("", parts, shape[-1], device)
    sizes = dict(query_centre=strides, has_query_centre=query_centre is not None)
    tensors = dict(query_centre=query_centre, **statistics.tensors, **rotation.tensors)
    return tensors, sizes | statistics.sizes | rotation.sizes


def _heads_of(query_heads: int, *vectors: torch.Tensor) -> int:
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
        require_typed("sign", sign, torch.int32, (*shape, sign.shape[-1]), device)
        require_last("sign", sign)


def _strides(x: torch.Tensor, count: int) -> tuple[int, ...]:
    return x.stride()[:count] if x.numel() else (0,) * count


def quantise_query(q, query_centre, centre, balance, signs, blocks, matrix, scale, planes, terms) -> None:
    require(q.dim() == 4, "q", "have 4 dims", q)
    batch, query_heads, _, dim = q.shape
    heads, device = _heads_of(query_heads, query_centre, centre, balance), q.device
    require_queries("q", q, batch, heads)
    tensors, sizes = _transform(query_centre, centre, balance, (signs, blocks, matrix), (batch, heads, dim), device)
    _require_coded(planes, terms, tuple(q.shape[:3]), dim, device)
    require_served(dim)
    rows = q.shape[:3].numel()
    shader = library.shaders.get("quantise_query", (*ROTATION, "quantise_query.metal"), In=q.dtype, **dims(dim))
    sizes |= dict(rows=rows, size=q.shape[:3], q=q.stride()[:3], planes=planes.stride()[:4], terms=terms.stride()[:3])
    sizes |= dict(group=query_heads // heads)
    shader.launch((ceil_div(rows, NUM_SIMDS),), sizes, device, q=q, scale=scale, planes=planes, terms=terms, **tensors)


def index_keys(x, query_centre, centre, balance, signs, blocks, matrix, start, sign, factor, bias) -> None:
    require(x.dim() == 4, "x", "have 4 dims", x)
    require_dense("x", x, tuple(x.shape), x.device)
    batch, heads, tokens, dim = x.shape
    device = x.device
    require(start >= 0, "start", "be at least 0", start)
    tensors, sizes = _transform(query_centre, centre, balance, (signs, blocks, matrix), (batch, heads, dim), device)
    _require_index(sign, factor, bias, start + tokens, device)
    require(factor.shape[:2] == x.shape[:2], "factor", f"have the shape {[batch, heads, factor.shape[2]]}", factor)
    require(not sign.numel() or sign.shape[-1] == num_words(dim), "sign", f"have {num_words(dim)} words", sign)
    require(not query_centre.numel() or bias.numel() or not factor.numel(), "bias", "be there with query_centre", bias)
    require_served(dim)
    shader = library.shaders.get("index_keys", (*ROTATION, "index_keys.metal"), In=x.dtype, **dims(dim))
    sizes |= dict(heads=heads, tokens=tokens, start=start, x=x.stride()[:3], has_sign=bool(sign.numel()))
    sizes |= dict(sign=_strides(sign, 3), factor=factor.stride()[:2], bias=_strides(bias, 2))
    groups = (ceil_div(tokens, NUM_SIMDS), heads, batch)
    shader.launch(groups, sizes, device, x=x, sign=sign, factor=factor, bias=bias, **tensors)


def sign_scores(planes, terms, sign, factor, bias, head_dim, scale, start, out) -> None:
    require(out.dim() == 4, "out", "have 4 dims", out)
    require_dense("out", out, tuple(out.shape), out.device)
    batch, query_heads, queries, tokens = out.shape
    device = out.device
    require(start >= 0, "start", "be at least 0", start)
    _require_coded(planes, terms, (batch, query_heads, queries), head_dim, device)
    _require_index(sign, factor, bias, start + tokens, device)
    heads = factor.shape[1]
    require(factor.shape[0] == batch, "factor", f"have a batch of {batch}", factor)
    require(heads > 0 and query_heads % heads == 0, "planes", f"have a multiple of {heads} heads", planes)
    require(sign.shape[-1] == num_words(head_dim), "sign", f"have {num_words(head_dim)} words", sign)
    if out.dtype == torch.bfloat16:
        raise Unserved("scores in bfloat16")
    group = query_heads // heads
    rows = group * queries
    count, width = plan.rows_of_group(max(1, rows), head_dim), num_words(head_dim) * WORD_BITS
    shader = library.shaders.get("sign_scores", ("sign_scores.metal",), Out=out.dtype, kRows=count, kPadded=width)
    sizes = dict(heads=heads, group=group, queries=queries, rows=rows, tokens=tokens, start=start, head_dim=head_dim)
    sizes |= dict(has_bias=bool(bias.numel()), planes=planes.stride()[:4], terms=terms.stride()[:3], out=out.stride()[:3])
    sizes |= dict(sign=_strides(sign, 3), factor=factor.stride()[:2], bias=_strides(bias, 2))
    groups = (ceil_div(tokens, NUM_THREADS), ceil_div(rows, count), batch * heads)
    tensors = dict(planes=planes, terms=terms, sign=sign, factor=factor, bias=bias)
    shader.launch(groups, sizes, device, out=out, scale=scale, **tensors)
