"""Operators that are several others in one, by those: what answers on devices without a kernel for it all."""

import torch

from .checks import require
from .schemas import NAMESPACE

_ops = getattr(torch.ops, NAMESPACE)

PARTS = {"sign_top_p_select": ("sign_scores", "top_p_select"), "merge_selected": ("attend_selected", "merge")}


def sign_top_p_select(
    planes, terms, sign, factor, bias, head_dim, scale, start, exact_lse, top_p, scores, indices, count, parts=_ops
) -> None:
    """``parts`` has the other operators by name."""
    parts.sign_scores(planes, terms, sign, factor, bias, head_dim, scale, start, scores)
    parts.top_p_select(scores, exact_lse, None, None, top_p, indices, count)


def merge_selected(q, keys, values, indices, count, mask, scale, softcap, outs, lses, out, lse, parts=_ops) -> None:
    """``parts`` has the other operators by name."""
    require(outs.dim() == 5 and outs.shape[0] == 2, "outs", "have two pieces", outs)
    require(lses.shape == outs.shape[:4], "lses", f"have the shape {list(outs.shape[:4])}", lses)
    parts.attend_selected(q, keys, values, indices, count, mask, scale, softcap, outs[1], lses[1])
    parts.merge(outs, lses, out, lse)
