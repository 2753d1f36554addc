"""Which experts were routed to: recorded, kept, replayed and simulated."""

import contextlib
import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from .budget import Slab
from .families import find_experts
from .handle import OffloadHandle
from .stats import OffloadStats
from .waves import make_waves, run_waves


@dataclass
class RoutingTrace:
    """``calls``: for each call of an experts module its layer and the distinct experts routed to, ascending."""

    calls: list[tuple[str, list[int]]] = field(default_factory=list)

    def save(self, path: str | os.PathLike) -> None:
        """One JSON line a call."""
        with open(path, "w") as file:
            file.writelines(json.dumps(call) + "\n" for call in self.calls)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "RoutingTrace":
        with open(path) as file:
            return cls([(layer, experts) for layer, experts in map(json.loads, file)])

    def repeats(self) -> float:
        """Share of the experts of a call that the call before on the same layer had too."""
        last: dict[str, set[int]] = {}
        again = total = 0
        for layer, experts in self.calls:
            if layer in last:
                again, total = again + len(last[layer] & set(experts)), total + len(experts)
            last[layer] = set(experts)
        return again / total if total else 0.0


@contextlib.contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingTrace]:
    """Records every call of the model's experts, offloaded or not, inside a ``with`` block."""
    trace = RoutingTrace()
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: trace.calls.append((name, args[1].unique().tolist())))
        for name, module in find_experts(model).items()
    ]
    try:
        yield trace
    finally:
        for hook in hooks:
            hook.remove()


def replay(trace: RoutingTrace, handle: OffloadHandle) -> OffloadStats:
    """Bring in the experts of each call as ``grouped_mm`` would, without computing; returns the handle's counters.

    Raises:
        ValueError: a layer that the model does not have.
    """
    for layer, experts in trace.calls:
        if layer not in handle.pools:
            raise ValueError(f"trace must be of this model: it has no layer {layer!r}")
        pool = handle.pools[layer]
        with pool.lock:
            pool.stats[layer].calls += 1
            run_waves(pool, layer, make_waves(pool, layer, experts, overlap=False), lambda experts, slots: None)
    return handle.stats()


def simulate(trace: RoutingTrace, slabs: list[Slab], policy: str = "lru") -> dict[str, tuple[int, int]]:
    """Hits and misses by layer if ``slabs`` served the trace, from empty: the plain model that the pool is tested against.

    Raises:
        ValueError: a policy other than lru and lfu.
    """
    if policy not in ("lru", "lfu"):
        raise ValueError(f"policy must be lru or lfu, got {policy!r}")
    resident: dict[Slab, list[tuple[str, int]]] = {slab: [] for slab in slabs}  # least recent first
    of = {layer: slab for slab in slabs for layer in slab.layers}
    uses: Counter = Counter()
    hits, misses = Counter(dict.fromkeys(of, 0)), Counter(dict.fromkeys(of, 0))
    for layer, experts in trace.calls:
        slab = of[layer]
        slots = resident[slab]
        here = [(layer, expert) for expert in experts if (layer, expert) in slots]
        gone = [(layer, expert) for expert in experts if (layer, expert) not in slots]
        hits[layer] += len(here)
        misses[layer] += len(gone)
        for key in here:
            slots.remove(key)
            slots.append(key)
            uses[key] += 1
        together = here + gone if len(here) + len(gone) <= slab.num_slots else []
        for at, key in enumerate(gone):
            if len(slots) == slab.num_slots:
                wave = together or gone[at // slab.num_slots * slab.num_slots :][: slab.num_slots]
                may_go = [other for other in slots if other not in wave]
                slots.remove(min(may_go, key=lambda other: uses[other] if policy == "lfu" else 0))
            slots.append(key)
            uses[key] += 1
    return {layer: (hits[layer], misses[layer]) for layer in of}


def slabs_of(handle: OffloadHandle) -> list[Slab]:
    """The slots of a handle as :func:`simulate` takes them."""
    pools = {id(pool): pool for pool in handle.pools.values()}.values()
    return [Slab(tuple(pool.layers), pool.num_slots) for pool in pools]


def synthetic_trace(
    layers: Mapping[str, int], top_k: int, num_tokens: int, again: float = 0.27, recent: float = 0.65, seed: int = 0
) -> RoutingTrace:
    """A decode of ``num_tokens`` tokens over ``layers`` (name to number of experts) with the locality of real models.

    Each of a token's ``top_k`` experts is one of the last token's with probability ``again``, else one of the last eight
    tokens' with probability ``recent``, else any. The defaults give what was published for Qwen3-30B-A3B: 45 % of choices
    repeat at the next token, 80 % within eight.
    """
    draw = random.Random(seed)
    past: dict[str, list[list[int]]] = {layer: [] for layer in layers}
    trace = RoutingTrace()
    for _ in range(num_tokens):
        for layer, num_experts in layers.items():
            last = past[layer][-1] if past[layer] else []
            window = [expert for token in past[layer] for expert in token]
            chosen: set[int] = set()
            while len(chosen) < min(top_k, num_experts):
                source = last if draw.random() < again else window if draw.random() < recent else range(num_experts)
                free = [expert for expert in source if expert not in chosen] or range(num_experts)
                chosen.add(draw.choice(free))
            past[layer] = [*past[layer][-7:], sorted(chosen)]
            trace.calls.append((layer, sorted(chosen)))
    return trace
