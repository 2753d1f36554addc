"""What a layer with an index answers: short queries from sinks, window and selected tokens, longer ones from all tokens."""

import dataclasses
import math
import sys

import torch

from .. import ops
from ..codecs.rabitq import CodedQuery, RaBitQIndex, posterior_scores
from ..store import no_tokens
from .compose import Answer
from .pieces import HIDDEN, Pieces, operand
from .select import Selection, attend_and_select, attend_selected, no_tokens_beside, score_selected, select_tokens

MAX_SELECTING_LEN = 16
_CHUNK_LEN = 2048
_MAX_FRAMES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class SparseOptions:
    """How tokens are selected; :class:`torch_kvq.RaBitQSparseCache` says what the options mean."""

    top_p: float
    per_head: bool
    max_selected: int | None
    refine: bool
    widening: bool
    audit: bool
    on_host: bool


@dataclasses.dataclass(slots=True)
class SparsePieces(Pieces):
    """Pieces whose body has an index. ``keys`` and ``values`` are one tensor each or packed along ``D``."""

    index: RaBitQIndex
    options: SparseOptions
    selection: Selection | None = None

    # ---- the body, dense

    def body(self, role: str) -> torch.Tensor:
        return self._rows(role, 0, self.length)

    def _rows(self, role: str, start: int, stop: int) -> torch.Tensor:
        tensors = self.keys if role == "k" else self.values
        if len(tensors) > 1:
            return self.decoded(role, False, start, stop)
        rows = tensors[0][:, :, start:stop]
        return rows.clone() if self.options.on_host and rows.is_cuda else rows  # read once over the bus, whatever reads it then

    def _chunks(self) -> list[slice]:
        """The whole body where it is dense on the device, else parts of it, one of which is dense there at a time."""
        step = self.length if len(self.keys) == 1 and not self.options.on_host else _CHUNK_LEN
        return [slice(start, min(start + step, self.length)) for start in range(0, self.length, step)]

    @property
    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of sinks and window."""
        return self.exact_keys, self.exact_values

    # ---- attention

    def attend(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        softcap: float = 0.0,
        sink_logits: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> Answer:
        """As ``Pieces.attend``, over sinks, window and the tokens that are selected; over all tokens for long queries."""
        query = operand("query", query)
        if self.options.per_head and self._is_folded(query):
            out, lse = self.attend(*self._unfolded(query, mask), scale, softcap, sink_logits)
            return out.reshape(*query.shape[:3], -1), lse.reshape(query.shape[:3])
        near_mask, far_mask = self._split(mask, query)
        selects = self._selects(query)
        chunks = [] if selects else self._chunks()
        outs, lses = self._answers(query, 2 if selects else 1 + len(chunks))
        out, lse = torch.empty_like(outs[0]), lses.new_empty(lses.shape[1:]) if lse is None else lse
        near = outs[0], lses[0]
        if selects:
            chosen = self._attend_and_select(query, near_mask, far_mask, scale, softcap, near, sink_logits)
            where, to = (chosen.indices, chosen.count, far_mask), (outs, lses, out, lse)
            ops.merge_selected(query, self.keys, self.values, *where, scale, softcap, *to)
            return out, lse
        self._attend_rows(query, *self.exact, near_mask, scale, softcap, near, sink_logits)
        for place, part in enumerate(chunks, 1):
            rows = self._rows("k", part.start, part.stop), self._rows("v", part.start, part.stop)
            seen = None if far_mask is None else far_mask[..., part]
            self._attend_rows(query, *rows, seen, scale, softcap, (outs[place], lses[place]))
        ops.merge(outs, lses, out, lse)
        return out, lse

    def _answers(self, query: torch.Tensor, number: int) -> Answer:
        """Room for that many answers, ``[number, B, Hq, M, Dv]`` and ``[number, B, Hq, M]``."""
        shape = (number, *query.shape[:3])
        return query.new_empty((*shape, self.exact_values.shape[-1])), query.new_empty(shape, dtype=torch.float32)

    def _is_folded(self, query: torch.Tensor) -> bool:
        """Whether the query heads of a kv head are in the place of tokens (``pack_gqa``)."""
        return self.layer.fresh_len == 1 and query.shape[1] == self.exact_keys.shape[1] and query.shape[2] > 1

    @staticmethod
    def _unfolded(query: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if mask is not None and mask.shape[2] > 1:
            mask = mask.flatten(1, 2).unsqueeze(2)
        return query.flatten(1, 2).unsqueeze(2), mask

    def _selects(self, query: torch.Tensor) -> bool:
        return query.shape[2] <= MAX_SELECTING_LEN or self._is_folded(query)

    def _split(self, mask: torch.Tensor | None, query: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Masks of the exact tokens and of the body, ``[B, Hq, M, E]`` and ``[B, Hq, M, length]``."""
        if mask is None:
            return None, None
        near, far = self._split_stored(self.stored_mask(mask, (*query.shape[:3], self.num_tokens)))
        if far.dtype != torch.bool:  # the low numbers that stand for hidden tokens must not be selected by p = 1
            far = far.masked_fill(far <= HIDDEN, -torch.inf)
        return near, far

    def _split_stored(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``x [..., T]`` in stored order, of the exact tokens and of the body."""
        first, last = self.num_sinks, self.num_sinks + self.length
        return torch.cat([x[..., :first], x[..., last:]], -1), x[..., first:last]

    @staticmethod
    def _attend_rows(query, keys, values, mask, scale, softcap, answer: Answer, sink_logits=None) -> None:
        rest = mask, sink_logits, 0, 0, 0, scale, softcap
        ops.attend(query, *no_tokens_beside(keys, values), keys, values, *rest, *answer)

    # ---- selection

    def _attend_and_select(self, query, near_mask, mask, scale, softcap, near: Answer, sink_logits=None) -> Selection:
        """Attention over sinks and window, to ``near``, and what is selected besides; ``mask`` is that of the body."""
        options, near_lse = self.options, near[1]
        num_selections = query.shape[1] if options.per_head else self.exact_keys.shape[1]
        first_p, last_p = refined_shares(options.top_p) if options.refine else (options.top_p, 0.0)
        room = None if options.refine else options.max_selected
        if mask is None and not softcap and not options.widening and not self.index.later:
            where, to = (self.exact, self.index, self.length, scale, near), (num_selections, room, sink_logits)
            coded, selection = attend_and_select(query, *where, first_p, *to)
            self._check_finite(coded)
        else:
            self._attend_rows(query, *self.exact, near_mask, scale, softcap, near, sink_logits)
            coded = self.index.code(query, scale)
            self._check_finite(coded)
            scores = self._estimates(coded, query, scale, softcap)
            selection = select_tokens(scores, near_lse, first_p, num_selections, room, mask)
        stats, candidates = self.layer.stats, None
        if options.refine:
            candidates = selection
            scores = score_selected(query, self.keys, candidates, scale)
            scores = torch.where(scores > -torch.inf, torch.tanh(scores / softcap) * softcap, scores) if softcap else scores
            selection = select_tokens(scores, near_lse, last_p, num_selections, options.max_selected, mask, candidates)
        stats.count_selection(self, selection, candidates)
        if options.audit:
            stats.count_kept_mass(self._kept_mass(query, mask, scale, softcap, near_lse, selection))
        return selection

    def _check_finite(self, coded: CodedQuery) -> None:
        if coded.terms.is_cpu and not math.isfinite(coded.terms.sum()):  # elsewhere it would wait for the device
            raise ValueError(f"query must be finite, got inf or nan in layer {self.layer.index}")

    def _estimates(self, coded, query, scale, softcap) -> torch.Tensor:
        """Estimated logits of the body, ``[B, Hq, M, length]``."""
        scores = self.index.scores(coded, 0, self.length, torch.float32 if query.is_cpu else torch.float16)
        if self.options.widening:
            scores = posterior_scores(scores.float(), self.index, query, scale)
        return torch.tanh(scores / softcap) * softcap if softcap else scores

    def _kept_mass(self, query, mask, scale, softcap, near_lse, selection: Selection) -> torch.Tensor:
        """The true share of attention that sinks, window and ``selection`` hold, ``[B, Hq, M]``; every key is read for it."""
        groups = query.float().unflatten(1, (self.exact_keys.shape[1], -1))
        scores = groups @ self.body("k").float().unsqueeze(2).transpose(-1, -2) * scale
        scores = scores.flatten(1, 2)
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        kept = torch.zeros((*scores.shape[:2], 1, self.length + 1), dtype=torch.bool, device=scores.device)
        kept.scatter_(-1, selection.columns(query.shape[1], self.length), True)
        total = torch.logaddexp(scores.logsumexp(-1), near_lse)
        held = torch.logaddexp(scores.masked_fill(~kept[..., :-1], -torch.inf).logsumexp(-1), near_lse)
        return torch.exp(held - total).nan_to_num(1.0)

    # ---- the eager pair

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        """As ``Pieces.scores``, -inf for tokens that are not selected; of all tokens where scale and mask cannot be seen."""
        call = eager_call(query) if self._selects(query) else None
        self.selection = None
        query = operand("query", query)
        if call is None:
            repeats = query.shape[1] // self.exact_keys.shape[1]
            return query @ self.rebuilt("k").repeat_interleave(repeats, 1).transpose(-1, -2)
        scale, mask = call
        near_mask, far_mask = self._split(None if mask is None else mask[..., : self.num_tokens], query)
        outs, lses = self._answers(query, 1)
        self.selection = self._attend_and_select(query, near_mask, far_mask, scale, 0.0, (outs[0], lses[0]))
        return self._sparse_scores(query)

    def _sparse_scores(self, query: torch.Tensor) -> torch.Tensor:
        first, last, exact = self.num_sinks, self.num_sinks + self.length, self.exact_keys
        near = query.new_empty((*query.shape[:3], exact.shape[2]))
        ops.qk(query, no_tokens(*exact.shape[:2], exact.shape[3], False, query.device), exact, 0, 0, near)
        out = query.new_full((*query.shape[:3], self.num_tokens + 1), -torch.inf)  # the last column takes what is not valid
        out[..., :first], out[..., last:-1] = near[..., :first], near[..., first:]
        far = score_selected(query, self.keys, self.selection, 1.0).to(out.dtype)
        columns = self.selection.columns(query.shape[1], self.num_tokens - first) + first
        out.scatter_(-1, columns.expand_as(far), far)
        out = out[..., :-1]
        return out if self.order is None else self.order.to_sequence(out, 3)

    def weighted_values(self, weights: torch.Tensor) -> torch.Tensor:
        """As ``Pieces.weighted_values``; of the selected tokens alone where ``scores`` selected."""
        if self.selection is None:
            repeats = weights.shape[1] // self.exact_values.shape[1]
            return operand("attention weights", weights) @ self.rebuilt("v").repeat_interleave(repeats, 1)
        weights = operand("attention weights", weights)
        weights = weights if self.order is None else self.order.to_stored(weights, 3)
        near_weights, far_weights = self._split_stored(weights)
        exact = self.exact_values
        near = weights.new_empty((*weights.shape[:3], exact.shape[-1]))
        ops.pv(near_weights, no_tokens(*exact.shape[:2], exact.shape[3], True, weights.device), exact, 0, 0, near)
        query = weights.new_zeros((*weights.shape[:3], self.exact_keys.shape[-1]))
        stores, value_dim = (self.keys, self.values), exact.shape[-1]
        far, lse = attend_selected(query, *stores, self.selection, 1.0, value_dim, far_weights.float().log())
        return near + far * torch.exp(lse).unsqueeze(-1).to(far.dtype)


def refined_shares(top_p: float) -> tuple[float, float]:
    """Share by which candidates are taken from the signs, and share of theirs that the cut by their scores keeps."""
    wide = 1 - (1 - top_p) / 4
    return wide, min(1.0, top_p / wide) if top_p < 1 else 1.0


def eager_call(query: torch.Tensor) -> tuple[float, torch.Tensor | None] | None:
    """Scale and mask of the eager attention function that multiplies ``query`` by keys now.

    ``None`` if it is not to be seen, or caps its logits: then what is not selected would get a weight.
    """
    if torch.compiler.is_compiling():
        return None
    frame = sys._getframe(2)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        local = frame.f_locals
        if local.get("query") is query and isinstance(local.get("scaling"), float) and "attention_mask" in local:
            return None if local.get("softcap") else (local["scaling"], local["attention_mask"])
        frame = frame.f_back
    return None
