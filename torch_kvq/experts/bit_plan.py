"""``plan_bits``: bits of each weight by its role, raised where activations have heavy tails."""

import reprlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..checks import check_number, check_type
from .budget import Budget
from .codec import FIELDS, ExpertCodec
from .families import expert_tensors
from .roles import Moments, roles_of

if TYPE_CHECKING:
    from .apply_plan import AppliedPlan

BASE = {"dense": 4, "routed": 2, "shared": 8}
LADDER = (2, 4, 8)
Batch = torch.Tensor | Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class PlanRow:
    """One module: ``kurtosis`` is the excess kurtosis of its outputs, ``error`` the relative error of its weights once
    applied, ``note`` why its bits are not those of its role."""

    name: str
    role: str
    bits: int
    kurtosis: float
    num_weights: int
    num_bytes: int
    error: float | None = None
    note: str = ""


@dataclass
class BitPlan:
    """Rows by module and the bytes of everything that is kept; ``str()`` is a table by role."""

    model: nn.Module
    rows: dict[str, PlanRow]
    kept_bytes: int
    batches: list[Batch] = field(default_factory=list, repr=False)

    def bytes(self) -> dict[str, int]:
        """Bytes by role."""
        sums = dict.fromkeys(("dense", "shared", "routed"), 0)
        for row in self.rows.values():
            sums[row.role] += row.num_bytes
        return {**sums, "keep": self.kept_bytes}

    def bits(self, role: str) -> dict[str, int]:
        """Bits of the modules of a role by name."""
        return {name: row.bits for name, row in self.rows.items() if row.role == role}

    def applied(self, name: str, bits: int, error: float, note: str = "", num_bytes: int | None = None) -> None:
        """Note what became of a module."""
        row = self.rows[name]
        size = weight_bytes(bits, row.num_weights) if num_bytes is None else num_bytes
        self.rows[name] = replace(row, bits=bits, num_bytes=size, note=note or row.note, error=error)

    def skipped(self, name: str) -> None:
        """Note that a module was left as it is."""
        role, row = self.rows[name].role, self.rows[name]
        tensor = weights_of(role, self.model.get_submodule(name))[0]
        bits = 8 * tensor.element_size()
        self.rows[name] = replace(row, bits=bits, num_bytes=row.num_weights * tensor.element_size(), note="left as it was")

    def apply(self, budget: Budget = 1.0, **options) -> "AppliedPlan":
        """Quantise the model as planned; see :func:`torch_kvq.experts.apply_plan.apply_plan`."""
        from .apply_plan import apply_plan

        return apply_plan(self, budget, **options)

    def __str__(self) -> str:
        lines = [f"{'role':8} {'bits':>5} {'modules':>8} {'MB':>10} {'error':>8} {'kurtosis':>22}  note"]
        groups: dict[tuple, list[PlanRow]] = defaultdict(list)
        for row in self.rows.values():
            groups[row.role, row.bits, row.note].append(row)
        for (role, bits, note), rows in sorted(groups.items()):
            errors = [row.error for row in rows if row.error is not None]
            tails = sorted(row.kurtosis for row in rows)
            lines.append(
                f"{role:8} {bits:5d} {len(rows):8d} {sum(row.num_bytes for row in rows) / 1e6:10.1f} "
                f"{f'{max(errors):.4f}' if errors else '-':>8} {f'{tails[0]:.2f} to {tails[-1]:.2f}':>22}  {note}"
            )
        lines.append(
            f"{'keep':8} {'-':>5} {'':8} {self.kept_bytes / 1e6:10.1f} {'-':>8} {'':22}  router, embeddings, head, norms"
        )
        lines.append(f"{'all':8} {'':5} {'':8} {sum(self.bytes().values()) / 1e6:10.1f}")
        return "\n".join(line.rstrip() for line in lines)


@torch.no_grad()
def plan_bits(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    base: Mapping[str, int] | None = None,
    threshold: float = 3.0,
) -> BitPlan:
    """Propose bits for every weight of a MoE model from its role and the tails of its outputs. Nothing is changed.

    Dense projections get 4 bits, routed experts 2, shared experts 8 (RotaryQuant); a module whose outputs have an excess
    kurtosis above ``threshold`` goes one rung up, 2 to 4 to 8. Router, embeddings and head are kept.

    Args:
        model: in eval mode, resident or with offloaded experts.
        batches: token ids ``[B, T]``, or keyword arguments of the model; they are kept in the plan for its gate.
        base: bits by role, replacing those above.
        threshold: default 3.0.

    Raises:
        ValueError, TypeError: no batches, one that is not in a list, or bits that are not 2, 3, 4 or 8; named.
    """
    check_type("base", base, (Mapping, NoneType), "bits by role")
    check_number("threshold", threshold)
    base = {**BASE, **(base or {})}
    for role, bits in base.items():
        if role not in BASE or not isinstance(bits, int) or bits not in FIELDS:
            raise ValueError(f"base must have bits among {list(FIELDS)} for roles among {list(BASE)}, got {role!r}: {bits!r}")
    batches = checked_batches(batches)
    roles = roles_of(model)
    moments = measure(model, {name: module for name, (role, module) in roles.items() if role != "keep"}, batches)
    rows = {}
    for name, (role, module) in roles.items():
        if role == "keep":
            continue
        tail = moments[name].kurtosis()
        bits = base[role]
        note = ""
        if tail > threshold and bits < LADDER[-1]:
            bits = next(rung for rung in LADDER if rung > bits)
            note = "promoted: heavy tails"
        weights = num_weights(role, module)
        rows[name] = PlanRow(name, role, bits, tail, weights, weight_bytes(bits, weights), note=note)
    planned = {id(parameter) for name in rows for parameter in weights_of(*roles[name])}
    kept = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in planned)
    return BitPlan(model, rows, kept, batches)


def checked_batches(batches: Iterable[Batch]) -> list[Batch]:
    """Batches that a model can be run on, as a list.

    Raises:
        TypeError, ValueError: no batches, or not of token ids.
    """
    if isinstance(batches, torch.Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise TypeError(f"batches must be a list, as [input_ids], got {reprlib.repr(batches)}")
    batches = list(batches)
    if not batches:
        raise ValueError("batches must hold at least one batch of token ids, got none")
    for index, batch in enumerate(batches):
        check_type(f"batches[{index}]", batch, (torch.Tensor, Mapping), "token ids [B, T] or keyword arguments of the model")
        tensors = batch if isinstance(batch, Mapping) else {"input_ids": batch}
        for name, x in tensors.items():
            check_type(f"batches[{index}], {name},", x, torch.Tensor, "a tensor")
        ids = tensors.get("input_ids")
        if ids is not None and (ids.dim() != 2 or ids.is_floating_point() or not ids.numel()):
            raise ValueError(f"batches[{index}] must have token ids [B, T], got {ids.dtype} {list(ids.shape)}")
    return batches


def weights_of(role: str, module: nn.Module) -> list[torch.Tensor]:
    """What is quantised of a module: matrices, not biases."""
    if role == "routed":
        return [tensor for tensor in expert_tensors(module).values() if tensor.dim() > 2]
    return [module.weight]


def num_weights(role: str, module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in weights_of(role, module))


def weight_bytes(bits: int, weights: int) -> int:
    """Packed bytes; for linear layers too, as an estimate of what torchao will take."""
    return ExpertCodec(bits).num_bytes(weights)


def measure(model: nn.Module, modules: dict[str, nn.Module], batches: list[Batch]) -> dict[str, Moments]:
    """Moments of the outputs of ``modules`` over the batches."""
    moments = {name: Moments() for name in modules}
    hooks = [
        module.register_forward_hook(lambda _, args, output, own=moments[name]: own.add(output))
        for name, module in modules.items()
    ]
    try:
        for batch in batches:
            run(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return moments


def run(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Logits ``[B, T, V]`` of a batch."""
    device = next(parameter.device for parameter in model.parameters() if not parameter.is_meta)
    if isinstance(batch, torch.Tensor):
        batch = {"input_ids": batch}
    return model(**{name: tensor.to(device) for name, tensor in batch.items()}, use_cache=False).logits
