"""Carry out a plan of bits: linear layers by torchao, routed experts packed and decoded into slots."""

from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType

from ..checks import check_type
from .bit_plan import BitPlan
from .budget import Budget
from .codec import FIELDS
from .families import check_module, find_experts
from .gate import ExpertOutputs, Gate, GateReport, mean_nll
from .handle import OffloadHandle
from .linear_weights import check_torchao, quantise_linears
from .offload import execution_device, offload_experts, stores_of
from .packed_store import PackedStore

RUNGS = sorted(FIELDS)


@dataclass
class AppliedPlan:
    """The handle of the packed experts (``None`` without role ``routed``), the plan as applied and what the gate measured."""

    handle: OffloadHandle | None
    plan: BitPlan
    gate: GateReport | None

    def __str__(self) -> str:
        return "\n".join(str(part) for part in (self.plan, self.gate) if part is not None)


def apply_plan(
    plan: BitPlan,
    budget: Budget = 1.0,
    *,
    gate: Gate | None = None,
    roles: Iterable[str] = ("dense", "shared", "routed"),
    verbose: bool = True,
    **options,
) -> AppliedPlan:
    """Quantise the plan's model in place and say what was done.

    Routed experts are packed in host memory and decoded into slots under ``budget`` when they are routed to; if the model's
    experts were offloaded already, that handle is replaced. Linear layers go to torchao.

    Args:
        budget: of decoded experts, as ``offload_experts``, which also gets ``options``. Default: room for all of them.
        gate: required where the plan has 2 bits; layers that fail it are promoted.
        roles: which roles to quantise.
        verbose: print the table and the gate's measurements.

    Raises:
        ValueError: 2 bits without a gate, a gate that fails at 8 bits, or an unknown role. ImportError: linear layers without
            torchao. In each case the experts are as they were.
    """
    check_type("gate", gate, (Gate, NoneType), "a Gate")
    check_type("roles", roles, Iterable, "roles in a list")
    roles = set(roles)
    if unknown := roles - {"dense", "shared", "routed"}:
        raise ValueError(f"roles must be among dense, shared and routed, got {sorted(unknown)}")
    routed = plan.bits("routed") if "routed" in roles else {}
    linear = {name: bits for role in ("dense", "shared") if role in roles for name, bits in plan.bits(role).items()}
    if 2 in routed.values() and gate is None:
        raise ValueError("gate must be given where routed experts get 2 bits: pass Gate(max_error=..., max_delta_nll=...)")
    if linear:
        check_torchao()
    handle, report = pack_experts(plan, routed, budget, gate, options) if routed else (None, None)
    for name, done in quantise_linears(plan.model, linear).items() if linear else ():
        plan.applied(name, done.bits, done.error, done.note, done.num_bytes)
    for name in [name for name, row in plan.rows.items() if row.role not in roles]:
        plan.skipped(name)
    applied = AppliedPlan(handle, plan, report)
    if verbose:
        print(applied)
    return applied


def pack_experts(
    plan: BitPlan, bits: dict[str, int], budget: Budget, gate: Gate | None, options: dict
) -> tuple[OffloadHandle, GateReport | None]:
    """Packed experts in place of the model's, at the bits of the plan or as many as the gate wants."""
    model, modules = plan.model, find_experts(plan.model)
    for name, module in modules.items():
        check_module(name, module)
    report = GateReport(gate, mean_nll(model, plan.batches)) if gate is not None else None
    outputs = ExpertOutputs(model, modules, plan.batches[0]) if gate is not None else None
    old = getattr(model, "expert_offload", None)
    devices = {name: execution_device(model, module) for name, module in modules.items()}
    sources = dict(old.stores) if old is not None else stores_of(modules, devices, "pread")
    on_gpu = any(device.type == "cuda" for device in devices.values())
    packed = PackedStore(sources, bits, pin_memory=on_gpu)
    if old is not None:
        old.remove(load=False, close=False)
    handle = None
    try:
        handle = offload_experts(model, budget, stores=dict.fromkeys(bits, packed), **options)
        if gate is not None:
            climb(plan, handle, packed, sources, gate, outputs, report)
    except BaseException:
        if handle is not None:
            handle.remove(load=False)
        back = offload_experts(model, 1.0 if old is None else old.budget, stores=sources)
        if old is None:
            back.remove()
        raise
    for name in bits:
        note = "" if packed.bits(name) == bits[name] else "promoted by the gate"
        plan.applied(name, packed.bits(name), packed.errors[name], note)
    for store in set(sources.values()):
        store.close()
    handle.reset_stats()
    return handle, report


def climb(plan, handle, packed, sources, gate: Gate, outputs: ExpertOutputs, report: GateReport) -> None:
    """Promote layers until the gate passes: those whose error is too large, or the worst half if only the NLL is."""
    while True:
        errors = outputs.errors(handle.modules)
        delta = mean_nll(plan.model, plan.batches) - report.nll
        bits = {name: packed.bits(name) for name in errors}
        report.trials.append((bits, errors, delta))
        wrong = [name for name, error in errors.items() if error > gate.max_error]
        if not wrong and delta <= gate.max_delta_nll:
            return
        candidates = wrong or sorted(errors, key=errors.__getitem__)[len(errors) // 2 :]
        candidates = [name for name in candidates if bits[name] < RUNGS[-1]] or [n for n in errors if bits[n] < RUNGS[-1]]
        if not candidates or any(bits[name] == RUNGS[-1] for name in wrong):
            raise ValueError(f"gate cannot be passed with 8 bits:\n{report}")
        for name in candidates:
            packed.pack(name, sources[name], RUNGS[RUNGS.index(bits[name]) + 1])
            handle.pools[name].forget(name, range(packed.num_experts(name)))
