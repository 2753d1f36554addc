"""What attention recall is reported as."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Recall:
    """A selector at one budget, means over sequences and scored tokens.

    Attributes:
        selector: its name.
        asked: share of the tokens that can be selected, as asked for.
        budget: by layer ``[H]``, the share that a kv head read; sinks and window are not counted.
        recall: by layer ``[G * H]``, the share of true softmax mass that a query head kept, with that of sinks and window.
        top_p: of an adaptive selector, the ``p`` that gave this budget; otherwise ``None``.
        scan_bytes: that the ranking reads for a token and kv head, of 16-bit keys, mean over layers.
    """

    selector: str
    asked: float
    budget: tuple[torch.Tensor, ...]
    recall: tuple[torch.Tensor, ...]
    top_p: float | None
    scan_bytes: float

    @property
    def mean_budget(self) -> float:
        return torch.cat(self.budget).mean().item()

    @property
    def mean_recall(self) -> float:
        return torch.cat(self.recall).mean().item()

    @property
    def worst_recall(self) -> float:
        """Of the query head that keeps the least."""
        return torch.cat(self.recall).min().item()

    def __str__(self) -> str:
        top_p = "" if self.top_p is None else f"{self.top_p:8.3f}"
        figures = f"{self.mean_budget:8.3f} {self.mean_recall:8.4f} {self.worst_recall:11.4f}"
        return f"{self.selector:18} {self.scan_bytes:7.1f} {figures}{top_p}"


@dataclasses.dataclass(frozen=True)
class RecallReport:
    """What :func:`attention_recall` found; ``print`` it.

    Attributes:
        rows: one ``Recall`` a selector and budget.
        layers: indices of the layers that were looked at.
        num_queries: scored tokens of all sequences.
        exact_mass: mean share of sinks and window alone.
    """

    rows: tuple[Recall, ...]
    layers: tuple[int, ...]
    num_queries: int
    exact_mass: float

    def of(self, selector: str, asked: float) -> Recall:
        """The row of a selector at a budget; ``KeyError`` if there is none."""
        for row in self.rows:
            if (row.selector, row.asked) == (selector, asked):
                return row
        raise KeyError(f"no row of {selector!r} at a budget of {asked}")

    def __str__(self) -> str:
        looked_at = f"{len(self.layers)} layers, {self.num_queries} queries; sinks and window alone keep {self.exact_mass:.4f}"
        header = f"{'selector':18} {'scan B':>7} {'budget':>8} {'recall':>8} {'worst head':>11} {'p':>7}"
        return "\n".join([looked_at, header, *map(str, self.rows)])

    def by_layer(self, asked: float) -> str:
        """Recall of each layer (mean of its heads, and the worst) at one budget, a line a layer, a column a selector."""
        rows = [row for row in self.rows if row.asked == asked]
        lines = ["layer  " + "  ".join(f"{row.selector:>18}" for row in rows)]
        for at, layer in enumerate(self.layers):
            cells = (f"{row.recall[at].mean():.3f} ({row.recall[at].min():.3f})" for row in rows)
            lines.append(f"{layer:5}  " + "  ".join(f"{cell:>18}" for cell in cells))
        return "\n".join(lines)
