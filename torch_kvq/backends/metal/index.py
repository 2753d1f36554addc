"""quantise_query, index_keys, sign_scores: codes of queries, signs of keys, and the logits that both estimate."""

import torch

from ...layout import WORD_BITS, num_words
from ...ops import problems
from . import Unserved, library, plan, require_served
from .codec import ROTATION, dims
from .library import NUM_THREADS
from .plan import NUM_SIMDS, ceil_div


def _named(transform: problems.Transform) -> tuple[dict, dict]:
    """Tensors and sizes of what is done to a vector, by the names of shaders."""
    query_centre, strides, statistics, rotation = transform
    sizes = dict(query_centre=strides, has_query_centre=query_centre is not None)
    tensors = dict(query_centre=query_centre, **statistics.tensors, **rotation.tensors)
    return tensors, sizes | statistics.sizes | rotation.sizes


def _strides(x: torch.Tensor, count: int) -> tuple[int, ...]:
    return x.stride()[:count] if x.numel() else (0,) * count


def quantise_query(q, query_centre, centre, balance, signs, blocks, matrix, scale, planes, terms) -> None:
    tensors, sizes = _named(
        problems.quantise_query(q, query_centre, centre, balance, signs, blocks, matrix, scale, planes, terms)
    )
    _, query_heads, _, dim = q.shape
    heads, device = problems.heads_of(query_heads, query_centre, centre, balance), q.device
    require_served(dim)
    rows = q.shape[:3].numel()
    shader = library.shaders.get("quantise_query", (*ROTATION, "quantise_query.metal"), In=q.dtype, **dims(dim))
    sizes |= dict(rows=rows, size=q.shape[:3], q=q.stride()[:3], planes=planes.stride()[:4], terms=terms.stride()[:3])
    sizes |= dict(group=query_heads // heads)
    shader.launch((ceil_div(rows, NUM_SIMDS),), sizes, device, q=q, scale=scale, planes=planes, terms=terms, **tensors)


def index_keys(x, query_centre, centre, balance, signs, blocks, matrix, start, sign, factor, bias) -> None:
    tensors, sizes = _named(
        problems.index_keys(x, query_centre, centre, balance, signs, blocks, matrix, start, sign, factor, bias)
    )
    (batch, heads, tokens, dim), device = x.shape, x.device
    require_served(dim)
    shader = library.shaders.get("index_keys", (*ROTATION, "index_keys.metal"), In=x.dtype, **dims(dim))
    sizes |= dict(heads=heads, tokens=tokens, start=start, x=x.stride()[:3], has_sign=bool(sign.numel()))
    sizes |= dict(sign=_strides(sign, 3), factor=factor.stride()[:2], bias=_strides(bias, 2))
    groups = (ceil_div(tokens, NUM_SIMDS), heads, batch)
    shader.launch(groups, sizes, device, x=x, sign=sign, factor=factor, bias=bias, **tensors)


def sign_scores(planes, terms, sign, factor, bias, head_dim, scale, start, out) -> None:
    problems.sign_scores(planes, terms, sign, factor, bias, head_dim, scale, start, out)
    (batch, query_heads, queries, tokens), heads, device = out.shape, factor.shape[1], out.device
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
