"""Attention recall: the share of softmax mass that a selection of tokens keeps, at equal budgets."""

from collections.abc import Iterable, Sequence

import torch

from ..checks import check_count, check_type
from .capture import LayerStates, Places, capture
from .checks import check_inputs
from .recall_report import Recall, RecallReport
from .selectors import Selector, default_selectors
from .selectors.quest import PAGE_LEN


def attention_recall(
    model,
    input_ids: torch.Tensor,
    selectors: Iterable[Selector] | None = None,
    prefix_len: int = 1536,
    budgets: Sequence[float] = (0.05, 0.1, 0.2),
    num_queries: int = 32,
    num_sinks: int = 4,
    window_len: int = 128,
) -> RecallReport:
    """How much attention a model's queries would keep if they read only what each selector chooses.

    The model runs once on each sequence, exactly; nothing it computes depends on a selection. The query heads of a kv head read
    the same tokens, which count once. A selector reads as many tokens for every query or, if it is adaptive, as many in all.

    Args:
        model: a causal language model in eval mode whose attention goes through ``AttentionInterface``.
        input_ids: ``[B, T]``, no padding.
        selectors: those of ``evaluate.selectors`` by default.
        prefix_len: tokens before the first that is scored, and from which statistics are learnt.
        budgets: shares of the tokens that can be selected, rounded to whole pages of 16 tokens (one at least).
        num_queries: tokens of each sequence that are scored, evenly spaced behind the prefix.
        num_sinks, window_len: first and last tokens that are read in any case.

    Raises:
        ValueError, TypeError: input_ids not ``[B, T]``, an argument out of range, a model in training mode or without a
            layer of full attention.
    """
    _check(model, input_ids, prefix_len, budgets, num_queries, num_sinks, window_len)
    total = input_ids.shape[1]
    positions = torch.linspace(prefix_len, total - 1, min(num_queries, total - prefix_len)).long().to(input_ids.device)
    states = capture(model, input_ids, Places(positions, total, num_sinks, window_len, prefix_len))
    if not states:
        raise ValueError("model must have a layer of full attention that goes through transformers' AttentionInterface")
    return measure(states, default_selectors() if selectors is None else tuple(selectors), budgets)


@torch.inference_mode()
def measure(states: Sequence[LayerStates], selectors: Sequence[Selector], budgets: Sequence[float]) -> RecallReport:
    """:func:`attention_recall` on states that were captured, or made up."""
    rows = [row for selector in selectors for row in _rows(selector, states, budgets)]
    exact = sum((each.shares() * each.places.exact).sum(-1).mean().item() for each in states) / len(states)
    num_queries = states[0].query.shape[0] * states[0].query.shape[2]
    return RecallReport(tuple(rows), tuple(each.layer for each in states), num_queries, exact)


def num_selected(places: Places, budget: float) -> torch.Tensor:
    """Tokens that each query may read, ``[M]``: whole pages, so that a selector of pages loses nothing by rounding."""
    selectable = places.selectable.sum(-1)
    pages = (selectable * budget / PAGE_LEN).round().clamp_min(1).long()
    return torch.minimum(pages * PAGE_LEN, selectable)


def _rows(selector: Selector, states: Sequence[LayerStates], budgets: Sequence[float]) -> list[Recall]:
    """What stays is allocated before what is large and goes: allocators may be unable to use the space between again."""
    counts = {budget: num_selected(states[0].places, budget) for budget in budgets}
    read, kept = ([[torch.empty(heads) for heads in each] for _ in budgets] for each in zip(*map(_heads, states)))
    limits: dict[float, float] = {}
    if selector.is_adaptive:
        priorities = [torch.empty(each.key.shape[:2] + each.places.visible.shape, device=each.key.device) for each in states]
        for each, priority in zip(states, priorities):
            priority.copy_(_priority(selector, each))
        limits = _thresholds(priorities, counts)
    for at, each in enumerate(states):
        if selector.is_adaptive:
            chosen = [priorities[at] >= limits[budget] for budget in budgets]
        else:
            rank = _priority(selector, each).argsort(dim=-1, descending=True, stable=True).argsort(-1)
            chosen = [rank < counts[budget][:, None] for budget in budgets]
        for number, found in enumerate(_read(each, chosen)):
            read[number][at].copy_(found[0])
            kept[number][at].copy_(found[1])
    scan_bytes = sum(selector.scan_bytes(each) for each in states) / len(states)
    rows = []
    for budget, budget_read, budget_kept in zip(budgets, read, kept):
        top_p = 1 - limits[budget] if selector.is_adaptive else None
        rows.append(Recall(selector.name, budget, tuple(budget_read), tuple(budget_kept), top_p, scan_bytes))
    return rows


def _heads(states: LayerStates) -> tuple[int, int]:
    return states.key.shape[1], states.query.shape[1]


def _priority(selector: Selector, states: LayerStates) -> torch.Tensor:
    return selector.priority(states).masked_fill(~states.places.selectable, -torch.inf)


def _thresholds(priorities: list[torch.Tensor], counts: dict[float, torch.Tensor]) -> dict[float, float]:
    """The priority from which on as many tokens of all queries, heads and layers are read as with ``counts [M]`` a query."""
    ordered = torch.cat([priority[priority > -torch.inf] for priority in priorities]).sort(descending=True).values
    num_rows = sum(priority.shape[0] * priority.shape[1] for priority in priorities)
    return {budget: ordered[num_rows * int(count.sum()) - 1].item() for budget, count in counts.items()}


def _read(states: LayerStates, chosen: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each of ``chosen [B, H, M, T]``: the share of tokens read ``[H]`` and of true mass kept ``[G * H]``."""
    places, shares, found = states.places, states.grouped(states.shares()), []
    for tokens in chosen:
        kept = (shares * (tokens | places.exact).unsqueeze(2)).sum(-1)
        found.append((tokens.sum((0, 2, 3)) / (places.selectable.sum() * len(tokens)), kept.mean((0, 3)).flatten()))
    return found


def _check(model, input_ids, prefix_len, budgets, num_queries, num_sinks, window_len) -> None:
    check_inputs(model, input_ids)
    for name, value, least in (("num_queries", num_queries, 1), ("num_sinks", num_sinks, 0), ("window_len", window_len, 1)):
        check_count(name, value, least)
    least, total = num_sinks + window_len + PAGE_LEN, input_ids.shape[1]
    if total <= least:
        raise ValueError(f"input_ids must have more than {least} tokens (sinks, window and a page), got {total}")
    if not isinstance(prefix_len, int) or not least <= prefix_len < total:
        raise ValueError(
            f"prefix_len must be from {least} (sinks, window and a page) to {total - 1} for {total} tokens, got {prefix_len}"
        )
    check_type("budgets", budgets, Sequence, "a sequence of shares")
    for budget in budgets:
        if not isinstance(budget, int | float) or not 0 < budget < 1:
            raise ValueError(f"budgets must be between 0 and 1, shares of the tokens, got {budget!r}")
