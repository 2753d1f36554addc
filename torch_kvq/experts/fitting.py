"""``fit``: what of a MoE model, its KV cache and its experts goes into a given memory, in that order."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType

import torch
import transformers
from torch import nn

from ..checks import check_count, check_type
from ..codecs.codebook import check_bits
from .bit_plan import BitPlan, num_weights, weight_bytes, weights_of
from .budget import make_slabs, parse_bytes
from .families import check_module, find_experts
from .kv_bytes import kv_bytes
from .roles import roles_of
from .trace import RoutingTrace, simulate, synthetic_trace

WARM_TOKENS, TOKENS = 64, 192
MAX_SLOTS = 1023


@dataclass(frozen=True)
class Fit:
    """Bytes of everything, in the order in which memory is given away.

    ``weights`` by role without routed experts; ``kv`` as configured, ``dense_kv`` with transformers' own cache; ``slots`` of
    ``num_experts`` experts resident; ``hit_rate`` expected then. ``expert_bytes`` are those of one expert in a slot.
    """

    total: int
    weights: Mapping[str, int]
    bits: Mapping[str, str]
    kv: int
    dense_kv: int
    kv_note: str
    reserve: int
    expert_bytes: int
    slots: int
    num_experts: int
    hit_rate: float
    hit_source: str
    packed_host_bytes: int

    @property
    def fits(self) -> bool:
        """Whether one expert at least can be resident."""
        return self.slots >= 1

    @property
    def needs_offload(self) -> bool:
        """Whether some experts must stay away."""
        return self.slots < self.num_experts

    @property
    def budget(self) -> int:
        """What to pass as ``budget`` to ``offload_experts``: the number of experts."""
        return self.slots

    def __str__(self) -> str:
        lines = [f"{'memory':28} {self.total / 2**30:9.2f} GiB"]
        for role, size in self.weights.items():
            lines.append(f"{'Q_W  ' + role:28} {size / 2**30:9.2f} GiB  {self.bits[role]}")
        lines.append(f"{'C_KV cache':28} {self.kv / 2**30:9.2f} GiB  {self.kv_note}, DynamicCache {self.dense_kv / 2**30:.2f}")
        lines.append(f"{'reserve':28} {self.reserve / 2**30:9.2f} GiB  activations, allocator")
        left = self.total - sum(self.weights.values()) - self.kv - self.reserve
        share = self.slots / self.num_experts
        held = f"{self.slots} of {self.num_experts} experts resident ({share:.0%})"
        lines.append(f"{'O_E  experts':28} {self.slots * self.expert_bytes / 2**30:9.2f} GiB  {held}")
        if self.packed_host_bytes:
            packed = f"{self.packed_host_bytes / 2**30:9.2f} GiB  {self.bits['routed']}"
            lines.append(f"{'     packed, in host memory':28} {packed}")
        if not self.fits:
            lines.append(f"does not fit: one expert needs {self.expert_bytes:,} bytes, {left:,} are left")
        elif not self.needs_offload:
            lines.append(f"offloading is not needed: {(left - self.slots * self.expert_bytes) / 2**30:.2f} GiB stay free")
        else:
            lines.append(f"expected hit rate {self.hit_rate:.2f} ({self.hit_source})")
        return "\n".join(lines)


def fit(
    model_or_config: nn.Module | transformers.PreTrainedConfig,
    total: str,
    context: int,
    *,
    batch: int = 1,
    bits: Mapping[str, int] | BitPlan | None = None,
    k_bits: int | None = 3,
    v_bits: int = 3,
    reserve: str = "512MiB",
    trace: RoutingTrace | None = None,
    verbose: bool = True,
) -> Fit:
    """Divide ``total`` bytes of the computing device: weights by role, then the KV cache, then experts with what is left.

    Args:
        model_or_config: a model, loaded or not, or a config (nothing is allocated for it).
        total: such as ``"16GiB"``.
        context: tokens of each of ``batch`` sequences.
        bits: of the weights, by role (``dense``, ``shared``, ``routed``) or a plan; by default as they are. Routed experts
            are decoded into slots, so their bits make the store smaller, not the slots.
        k_bits, v_bits: of an ``IsoQuantCache``; ``k_bits=None`` for transformers' own cache.
        reserve: for activations and the allocator.
        trace: of routing (``trace.record_routing``), for the expected hit rate; by default a synthetic one with the locality
            published for a real model, so take the rate as a guess.
        verbose: print the table.

    Raises:
        ValueError, TypeError: an argument out of range, named. NotImplementedError: experts that cannot be offloaded.
    """
    check_type("model_or_config", model_or_config, (nn.Module, transformers.PreTrainedConfig), "a model or its config")
    check_count("context", context, 1)
    check_count("batch", batch, 1)
    check_type("bits", bits, (Mapping, BitPlan, NoneType), "bits by role or a plan")
    check_type("trace", trace, (RoutingTrace, NoneType), "a RoutingTrace")
    if k_bits is not None:
        check_bits("k_bits", k_bits)
    check_bits("v_bits", v_bits)
    size, kept_free = parse_bytes("total", total), parse_bytes("reserve", reserve)
    model = model_or_config if isinstance(model_or_config, nn.Module) else on_meta(model_or_config)
    weights, names, packed = weights_by_role(model, bits)
    kv, dense_kv, note = kv_bytes(model.config, context, batch, k_bits, v_bits)
    experts = find_experts(model)
    counts = {name: module.num_experts for name, module in experts.items()}
    each = max(check_module(name, module).nbytes for name, module in experts.items())
    left = size - sum(weights.values()) - kv - kept_free
    slots = max(0, min(sum(counts.values()), left // each))
    rate, source = expected_hits(counts, slots, top_k_of(model.config), trace)
    result = Fit(
        size, weights, names, kv, dense_kv, note, kept_free, each, slots, sum(counts.values()), rate, source, packed
    )  # fmt: skip
    if verbose:
        print(result)
    return result


def on_meta(config: transformers.PreTrainedConfig) -> nn.Module:
    """The causal model of a config without memory for its weights."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def weights_by_role(model: nn.Module, bits: Mapping[str, int] | BitPlan | None) -> tuple[dict[str, int], dict[str, str], int]:
    """Bytes and a description of the bits by role, without routed experts, and bytes of packed routed experts.

    Raises:
        ValueError: a role that does not exist.
    """
    if isinstance(bits, BitPlan):
        by_name = {name: row.bits for name, row in bits.rows.items()}
    else:
        by_role = dict(bits or {})
        if unknown := set(by_role) - {"dense", "shared", "routed"}:
            raise ValueError(f"bits must be by role (dense, shared, routed), got {sorted(unknown)}")
        by_name = {name: by_role[role] for name, (role, _) in roles_of(model).items() if role in by_role}
    sizes, used, planned, packed = {"dense": 0, "shared": 0, "keep": 0}, {}, set(), 0
    for name, (role, module) in roles_of(model).items():
        tensors = weights_of(role, module)
        if role == "keep":
            continue
        planned |= {id(tensor) for tensor in tensors}
        exact = sum(tensor.nbytes for tensor in tensors)
        stored = weight_bytes(by_name[name], num_weights(role, module)) if name in by_name else exact
        used.setdefault(role, set()).add(by_name.get(name, 8 * tensors[0].element_size()))
        if role == "routed":
            packed += stored if name in by_name else 0
        else:
            sizes[role] += stored
    sizes["keep"] = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in planned)
    names = {role: f"{' and '.join(map(str, sorted(found)))} bits" for role, found in used.items()}
    return sizes, {"dense": "none", "shared": "none", "keep": "router, embeddings, head, norms", **names}, packed


def top_k_of(config: transformers.PreTrainedConfig) -> int:
    """Experts of a token.

    Raises:
        ValueError: the config does not say.
    """
    config = config.get_text_config(decoder=True)
    for name in ("num_experts_per_tok", "top_k_experts", "moe_top_k", "num_experts_per_token"):
        if getattr(config, name, None):
            return getattr(config, name)
    raise ValueError(f"model_or_config must say how many experts a token has, {type(config).__name__} does not")


def expected_hits(counts: dict[str, int], slots: int, top_k: int, trace: RoutingTrace | None) -> tuple[float, str]:
    """Share of hits that a simulation of the slots gives, and what trace it is of; the first tokens fill the slots."""
    if slots < 1:
        return 0.0, "no slots"
    slabs = make_slabs(counts, slots, MAX_SLOTS)
    source = "of the trace given"
    if trace is None:
        slabs = slabs[:1]  # they are alike
        trace = synthetic_trace({layer: counts[layer] for layer in slabs[0].layers}, top_k, TOKENS)
        source = "for a synthetic trace as local as published ones; pass trace= for yours"
        warm = WARM_TOKENS * len(slabs[0].layers)
    else:
        warm = len(trace.calls) // 3
    first, whole = (simulate(part, slabs) for part in (RoutingTrace(trace.calls[:warm]), trace))
    hits = sum(whole[layer][0] - first[layer][0] for layer in whole)
    uses = hits + sum(whole[layer][1] - first[layer][1] for layer in whole)
    return (hits / uses if uses else 1.0), source
