"""Backends: loaders of compiled kernels, and the report of what serves each operator."""

import contextlib
import dataclasses
import sys
from pathlib import Path

import torch

from ..ops.fused import PARTS
from ..ops.schemas import NAMES, NAMESPACE
from . import cuda, metal, native
from .native import cpu_isa

__all__ = ["Report", "Row", "cpu_isa", "cuda", "doctor_reports", "metal", "native", "refused", "report"]
_COMMANDS = ("torch-kvq", "torch_kvq", "torch_kvq.cli", "cli.py")  # a script, or a module behind -m

refused: list[str] = []  # what a backend raised in a process that is the doctor's, whose import goes on to report it


@contextlib.contextmanager
def doctor_reports():
    """Around what raises where a backend that was asked for cannot serve: ``torch-kvq doctor`` says so instead."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        words = [Path(word).name for word in sys.orig_argv]
        if "doctor" not in words or words[words.index("doctor") - 1] not in _COMMANDS:
            raise
        refused.append(str(error))


@dataclasses.dataclass(frozen=True)
class Row:
    """One operator on one device. ``served_by`` on the CPU an instruction set, that of 16-bit queries too where it is another,
    on CUDA ``native`` or ``triton``, on MPS ``metal``, or ``reference`` on each; or, of an operator that is several others in
    one, these others. ``skipped`` name to reason."""

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


_MISSING = {"compiled kernels": "the library does not hold this operator"}


def _has_kernel(op: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{op}", key)


def _cpu_row(op: str) -> Row:
    if native.loaded() and not _has_kernel(op, "CPU"):
        return Row(op, "cpu", native.REFERENCE, _MISSING)
    full, half = cpu_isa(torch.float32), cpu_isa(torch.bfloat16)
    differs = op == "attend" and half != full
    return Row(op, "cpu", f"{full}, {half} for bfloat16 and float16" if differs else full, native.skipped(op))


def _cuda_row(op: str) -> Row:
    if cuda.served_by() != cuda.REFERENCE and not _has_kernel(op, "CUDA"):
        return Row(op, "cuda", cuda.REFERENCE, _MISSING)
    return Row(op, "cuda", cuda.served_by(), cuda.skipped())


def _mps_row(op: str) -> Row:
    return Row(op, "mps", metal.served_by(), metal.skipped(op))


def report() -> Report:
    """What serves each operator on the CPU, and on CUDA and MPS devices if there are any, and why nothing faster does."""
    devices = [(_cpu_row, "CPU")]
    devices += [(_cuda_row, "CUDA")] if torch.cuda.is_available() else []
    devices += [(_mps_row, "MPS")] if torch.backends.mps.is_available() else []
    rows = []
    for row, key in devices:
        rows += map(row, NAMES)
        for op, parts in PARTS.items():
            rows.append(row(op) if _has_kernel(op, key) else Row(op, key.lower(), " + ".join(parts), {}))
    return Report(tuple(rows))
