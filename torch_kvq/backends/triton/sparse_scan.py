"""sign_scores: a program scores 128 tokens for 16 rows of a kv head. Bits become float16, whose products are exact."""

import torch
import triton
import triton.language as tl

from ...layout import num_words
from ...ops.sparse_reference import QUERY_BITS
from . import checks, plan

_ROWS, _TOKENS = 16, 128


@triton.jit(do_not_specialize=["heads", "group", "queries", "tokens", "start"])
def _sign_scores(
    planes, plane_strides, terms, sign, factor, bias, out, scale, heads, group, queries, tokens, start,
    DIM: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    used = row < group * queries
    query_head, query = head * group + row // queries, row % queries
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
    inside = token < tokens
    lane = tl.arange(0, 32)
    codes_at = planes + batch * plane_strides[0] + query_head * plane_strides[1] + query * plane_strides[2]
    signs_at = sign.data + batch * sign.batch + head * sign.head + (start + token) * sign.token
    inner, negative = tl.zeros((ROWS, TOKENS), tl.float32), tl.zeros((TOKENS,), tl.int32)
    for word in range(0, (DIM + 31) // 32):
        bits = (tl.load(signs_at + word, inside, 0)[None, :] >> lane[:, None]) & 1
        codes = tl.zeros((ROWS, 32), tl.int32)
        for j in tl.static_range(4):
            plane = tl.load(codes_at + j * plane_strides[3] + word, used, 0)
            codes += ((plane[:, None] >> lane[None, :]) & 1) << j
        inner = tl.dot(codes.to(tl.float16), bits.to(tl.float16), inner)
        negative += tl.sum(bits, 0)
    at = terms.data + batch * terms.batch + query_head * terms.head + query * terms.token
    delta, low = tl.load(at, used, 0.0)[:, None], tl.load(at + 1, used, 0.0)[:, None]
    total, base = tl.load(at + 2, used, 0.0)[:, None], tl.load(at + 3, used, 0.0)[:, None]
    by = tl.load(factor.data + batch * factor.batch + head * factor.head + (start + token) * factor.token, inside, 0.0)
    score = (low * (DIM - 2 * negative).to(tl.float32)[None, :] + delta * (total - 2 * inner)) * by.to(tl.float32)[None, :]
    if bias is not None:
        add = tl.load(bias.data + batch * bias.batch + head * bias.head + (start + token) * bias.token, inside, 0.0)
        score += (scale * add.to(tl.float32))[None, :]
    score += base
    place = out.data + batch * out.batch + query_head * out.head + query * out.token
    tl.store(place[:, None] + token[None, :], score.to(out.data.dtype.element_ty), used[:, None] & inside[None, :])


def sign_scores(planes, terms, sign, factor, bias, head_dim, scale, start, out) -> None:
    """Launches ``torch_kvq::sign_scores`` (``ops/schemas.py``)."""
    checks.require_dims("out", out, 4)
    checks.require_dims("sign", sign, 4)
    (batch, query_heads, queries, tokens), device, words = out.shape, out.device, num_words(head_dim)
    heads, capacity = sign.shape[1:3]
    checks.require_heads("out", out, heads)
    checks.require(out.dtype in (torch.float32, torch.float16), "out", "be float32 or float16", out)
    checks.require(0 <= start <= capacity - tokens, "start", f"leave the tokens of out in a capacity of {capacity}", start)
    checks.require_whole("planes", planes, torch.int32, (*out.shape[:3], QUERY_BITS, words), 1, device)
    checks.require_whole("terms", terms, torch.float32, (*out.shape[:3], 4), 1, device)
    checks.require_whole("sign", sign, torch.int32, (batch, heads, capacity, words), 1, device)
    checks.require_whole("factor", factor, torch.float16, (batch, heads, factor.shape[-1]), 1, device)
    if bias.numel():
        checks.require_whole("bias", bias, torch.float16, (batch, heads, bias.shape[-1]), 1, device)
    dense = checks.dense_of("out", out, tuple(out.shape), device)
    if not out.numel():
        return
    group = query_heads // heads
    with plan.on_device(out):
        _sign_scores[(triton.cdiv(tokens, _TOKENS), batch * heads, triton.cdiv(group * queries, _ROWS))](
            planes, planes.stride()[:4], checks.Dense(terms, *terms.stride()[:3]), checks.Dense(sign, *sign.stride()[:3]),
            checks.Dense(factor, *factor.stride()), checks.Dense(bias, *bias.stride()) if bias.numel() else None, dense, scale,
            heads, group, queries, tokens, start, DIM=head_dim, ROWS=_ROWS, TOKENS=_TOKENS, num_warps=4,
            enable_fp_fusion=False,  # the order of rounding is part of the definition
        )  # fmt: skip
