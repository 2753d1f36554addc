"""Sparse attention step by step: select tokens by their estimated share of attention, score them, attend to them.

The estimates come from ``codecs/rabitq.py``. ``keys`` and ``values`` that are selected from are one tensor ``[B, H, C, D]`` in
a list, or the nine tensors of a packed store, both packed along ``D``.
"""

import dataclasses

import torch

from .. import ops
from ..codecs.rabitq import CodedQuery, RaBitQIndex
from ..store import no_tokens
from .compose import Answer


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """``indices [B, K, S]`` int32, ascending, of which ``count [B, K]`` int32 are valid, on the device; the rest is junk.

    ``K`` is the number of kv heads (one selection for all their query heads) or of query heads.
    """

    indices: torch.Tensor
    count: torch.Tensor

    @property
    def valid(self) -> torch.Tensor:
        """``[B, K, S]`` bool."""
        return torch.arange(self.indices.shape[-1], device=self.count.device) < self.count.unsqueeze(-1)

    def columns(self, query_heads: int, otherwise: int) -> torch.Tensor:
        """Token of each place of a query head, ``[B, Hq, 1, S]`` int64, ``otherwise`` where it is not valid."""
        places = torch.where(self.valid, self.indices, otherwise).long()
        return places.repeat_interleave(query_heads // places.shape[1], 1).unsqueeze(2)


def select_tokens(
    scores: torch.Tensor,
    exact_lse: torch.Tensor,
    top_p: float,
    num_selections: int,
    max_selected: int | None = None,
    mask: torch.Tensor | None = None,
    candidates: Selection | None = None,
) -> Selection:
    """The fewest tokens of each head whose share of attention, with what is attended anyway, reaches ``top_p``.

    Args:
        scores: logits ``[B, Hq, M, L]`` float32 or float16, estimated or exact.
        exact_lse: ``[B, Hq, M]`` float32, log-sum-exp of the logits of tokens that are attended anyway; they count.
        top_p: share, 0 to 1; 1 selects every visible token.
        num_selections: ``K``, kv heads or query heads; a selection is the union of what its heads keep.
        max_selected: room of a selection, ``L`` by default; the largest shares stay where it is not enough.
        mask: ``[B, Hq, M, L]`` bool (True = may be selected) or float32 (added).
        candidates: what the columns of ``scores`` stand for; the mask is that of all tokens all the same.
    """
    selection = _room_for(scores, num_selections, max_selected)
    columns = None if candidates is None else candidates.indices
    ops.top_p_select(scores, exact_lse, mask, columns, top_p, selection.indices, selection.count)
    return selection


def attend_and_select(
    query: torch.Tensor,
    exact: tuple[torch.Tensor, torch.Tensor],
    index: RaBitQIndex,
    length: int,
    scale: float,
    near: Answer,
    top_p: float,
    num_selections: int,
    max_selected: int | None = None,
    sink_logits: torch.Tensor | None = None,
) -> tuple[CodedQuery, Selection]:
    """Attention to the ``exact`` keys and values, to ``near``, and ``select_tokens`` of the first ``length`` tokens by
    ``index.scores`` and its log-sum-exp, none of them hidden, in one operator.

    Args:
        index: without later centres.
    """
    coded = index.room_for(query, scale)
    dtype = torch.float32 if query.is_cpu else torch.float16
    scores = query.new_empty((*query.shape[:3], length), dtype=dtype)
    selection = _room_for(scores, num_selections, max_selected)
    nothing, signs = no_tokens_beside(*exact), (index.sign, index.factor, index.bias)
    to = *near, coded.planes, coded.terms, scores, selection.indices, selection.count
    ops.attend_top_p_select(query, *nothing, *exact, sink_logits, *index.transform, *signs, scale, top_p, *to)
    return coded, selection


def no_tokens_beside(keys: torch.Tensor, values: torch.Tensor) -> list[list[torch.Tensor]]:
    """Stores of keys and values for operators that shall read these exact ones alone."""
    batch, heads, _, dim = keys.shape
    return [no_tokens(batch, heads, d, along, keys.device) for d, along in ((dim, False), (values.shape[-1], True))]


def _room_for(scores: torch.Tensor, num_selections: int, max_selected: int | None) -> Selection:
    length = scores.shape[-1]
    shape = (scores.shape[0], num_selections, length if max_selected is None else min(max_selected, length))
    indices = torch.empty(shape, dtype=torch.int32, device=scores.device)
    return Selection(indices, torch.empty(shape[:2], dtype=torch.int32, device=scores.device))


def score_selected(query: torch.Tensor, keys: list[torch.Tensor], selection: Selection, scale: float) -> torch.Tensor:
    """``scale * q . k`` of the selected keys, ``[B, Hq, M, S]`` float32, -inf where the selection is not valid."""
    out = query.new_empty((*query.shape[:3], selection.indices.shape[-1]), dtype=torch.float32)
    ops.qk_selected(query, keys, selection.indices, selection.count, scale, out)
    return out


def attend_selected(
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    selection: Selection,
    scale: float,
    value_dim: int | None = None,
    mask: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> Answer:
    """Attention of ``query [B, G * H, M, D]`` over the selected tokens; only they are read.

    Args:
        value_dim: ``Dv``, default ``D``.
        mask: ``[B, Hq, M, L]`` bool or float32, over all tokens.

    Returns:
        ``out [B, Hq, M, Dv]`` and ``lse [B, Hq, M]`` float32, to be merged (``compose.merge``).
    """
    out = query.new_empty((*query.shape[:3], query.shape[-1] if value_dim is None else value_dim))
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    ops.attend_selected(query, keys, values, selection.indices, selection.count, mask, scale, softcap, out, lse)
    return out, lse
