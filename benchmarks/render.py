"""Markdown that the benchmarks print and the documents hold: tables, bars, and the conditions of a result."""

import dataclasses
from collections.abc import Iterable

Cells = list[str]


def table(header: Cells, rows: Iterable[Cells]) -> str:
    """A Markdown table with aligned columns."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    aligned = ([cell.ljust(width) for cell, width in zip(line, widths)] for line in (header, rule, *lines[1:]))
    return "\n".join(f"| {' | '.join(line)} |" for line in aligned)


@dataclasses.dataclass(frozen=True)
class Bar:
    """A figure (a ratio, a share or a count) that must reach ``limit`` or, with ``at_most``, not pass it.

    Args:
        value: ``None`` if it was not measured.
        unit: ``x``, ``us``, ``%`` (value and limit are shares) or nothing.
    """

    what: str
    value: float | None
    limit: float
    unit: str = "x"
    at_most: bool = False

    @property
    def is_held(self) -> bool:
        """Whether it was measured and holds."""
        if self.value is None:
            return False
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def cells(self) -> Cells:
        scale, digits = {"%": (100, 1), "x": (1, 2), "us": (1, 2), "": (1, 0)}[self.unit]
        unit = f" {self.unit}" if self.unit == "us" else self.unit
        limit = f"{'<=' if self.at_most else '>='} {scale * self.limit:g}{unit}"
        if self.value is None:
            return [self.what, limit, "", "not measured"]
        return [self.what, limit, f"{scale * self.value:.{digits}f}{unit}", "held" if self.is_held else "MISSED"]


def bars(rows: list[Bar]) -> str:
    """A table of bars with verdicts."""
    return table(["", "bar", "measured", "verdict"], [row.cells() for row in rows]) if rows else "No bar is set for these."


def conditions(result: dict) -> str:
    """One sentence on processor, kernels, threads, versions and date."""
    found = result["conditions"]
    parts = [f"{found['processor']} ({', '.join(found['features']) or found['machine']})"]
    if found["device"] == "cpu":
        parts += [f"attention by {found['kernels']}", f"{found['threads']} thread{'s' * (found['threads'] > 1)}"]
    parts += [f"{name} {version}" for name, version in found["versions"].items()]
    return ", ".join([*parts, found["date"]])


def three_digits(x: float) -> str:
    """``x`` with three significant digits, never in powers of ten: 1,230, 12.3, .0123."""
    if x >= 100:
        return f"{float(f'{x:.3g}'):,.0f}"
    return f"{x:#.3g}".rstrip(".").removeprefix("0") if x >= 1e-4 else f"{x:.6f}".removeprefix("0")
