"""Backends: loaders of compiled kernels, and the report of what serves each operator."""

import dataclasses

import torch

from ..ops.schemas import NAMES, NAMESPACE
from . import metal, native
from .native import cpu_isa

__all__ = ["Report", "Row", "cpu_isa", "metal", "native", "report"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One operator on one device: ``served_by`` an instruction set or ``reference``, that of 16-bit queries too where it is
    another, ``metal`` or ``reference`` on MPS; ``skipped`` name to reason."""

    op: str
    device: str
    served_by: str
    skipped: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Report:
    """Rows of all operators; prints as a table."""

    rows: tuple[Row, ...]

    def __getitem__(self, key: str | tuple[str, str]) -> Row:
        """The row of an operator on the CPU, or of ``operator, device``."""
        op, device = (key, "cpu") if isinstance(key, str) else key
        return next(row for row in self.rows if (row.op, row.device) == (op, device))

    def __str__(self) -> str:
        table = [("op", "device", "served by", "skipped")]
        for row in self.rows:
            skipped = "; ".join(f"{name}: {reason}" for name, reason in row.skipped.items())
            table.append((row.op, row.device, row.served_by, skipped or "-"))
        widths = [max(len(line[i]) for line in table) for i in range(3)]
        return "\n".join("  ".join([*(cell.ljust(w) for cell, w in zip(line, widths)), line[3]]) for line in table)

    __repr__ = __str__


def _row(op: str) -> Row:
    compiled = torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{op}", "CPU")
    if native.loaded() and not compiled:
        return Row(op, "cpu", native.REFERENCE, {"compiled kernels": "the library does not hold this operator"})
    full, half = cpu_isa(torch.float32), cpu_isa(torch.bfloat16)
    differs = op == "attend" and half != full
    return Row(op, "cpu", f"{full}, {half} for bfloat16 and float16" if differs else full, native.skipped(op))


def _mps_row(op: str) -> Row:
    return Row(op, "mps", metal.served_by(), metal.skipped(op))


def report() -> Report:
    """What serves each operator on the CPU, and on MPS devices if there are any, and why nothing faster does."""
    rows = [_row(op) for op in NAMES]
    return Report((*rows, *map(_mps_row, NAMES)) if torch.backends.mps.is_available() else tuple(rows))
