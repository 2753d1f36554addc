"""Operators that are several others in one, by those: what answers on devices without a kernel for it all.

What the first of them does not check itself is checked before it writes, unless it writes what is of no use by itself.
"""

import torch

from . import problems
from .checks import require
from .schemas import NAMESPACE

_ops = getattr(torch.ops, NAMESPACE)

PARTS = {
    "encode_kv": ("encode",),
    "sign_top_p_select": ("sign_scores", "top_p_select"),
    "attend_top_p_select": ("quantise_query", "attend", "sign_top_p_select"),
    "merge_selected": ("attend_selected", "merge"),
}


def encode_kv(keys, values, key_codec, value_codec, key_rule, value_rule, start, *planes, parts=_ops) -> None:
    """``parts`` has the other operators by name. ``planes``: sign, mag and scale of the keys, then of the values."""
    problems.encode_kv(keys, values, key_codec, value_codec, key_rule, value_rule, start, *planes)
    parts.encode(keys, *key_codec, key_rule, False, start, *planes[:3])
    parts.encode(values, *value_codec, value_rule, True, start, *planes[3:])


def sign_top_p_select(
    planes, terms, sign, factor, bias, head_dim, scale, start, exact_lse, top_p, scores, indices, count, parts=_ops
) -> None:
    """``parts`` has the other operators by name."""
    problems.top_p_select(scores, exact_lse, None, None, top_p, indices, count)
    parts.sign_scores(planes, terms, sign, factor, bias, head_dim, scale, start, scores)
    parts.top_p_select(scores, exact_lse, None, None, top_p, indices, count)


def attend_top_p_select(
    q, keys, values, exact_keys, exact_values, sink_logits,
    query_centre, centre, balance, signs, blocks, matrix, sign, factor, bias,
    scale, top_p, out, lse, planes, terms, scores, indices, count, parts=_ops,
) -> None:  # fmt: skip
    """``parts`` has the other operators by name. Each checks its arguments: nothing is lost by what those before it wrote."""
    require(scores.dim() == 4, "scores", "have 4 dims", scores)
    rows = list(q.shape[:3])
    require(q.dim() != 4 or list(scores.shape[:3]) == rows, "scores", f"have {rows} rows", scores)
    near = q, keys, values, exact_keys, exact_values, None, sink_logits, 0, 0, 0, scale, 0.0, out, lse
    parts.quantise_query(q, query_centre, centre, balance, signs, blocks, matrix, scale, planes, terms)
    parts.attend(*near)
    scan = planes, terms, sign, factor, bias, q.shape[-1], scale, 0
    parts.sign_top_p_select(*scan, lse, top_p, scores, indices, count)


def merge_selected(q, keys, values, indices, count, mask, scale, softcap, outs, lses, out, lse, parts=_ops) -> None:
    """``parts`` has the other operators by name."""
    rows = list(q.shape[:3])
    require(outs.dim() == 5 and outs.shape[0] == 2, "outs", "have two pieces", outs)
    require(q.dim() != 4 or list(outs.shape[1:4]) == rows, "outs", f"have two pieces of {rows} rows", outs)
    problems.merge(outs, lses, out, lse)
    parts.attend_selected(q, keys, values, indices, count, mask, scale, softcap, outs[1], lses[1])
    parts.merge(outs, lses, out, lse)
