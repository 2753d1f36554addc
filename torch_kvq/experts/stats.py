"""What offloading did, counted."""

import dataclasses
from dataclasses import dataclass, field


@dataclass
class LayerStats:
    """Counters of one layer. An expert counts once a call, however many tokens go to it.

    ``hits`` and ``misses``: experts that were resident, or not, when a call came to need them. ``evictions``: experts of this
    layer that gave up their slot. ``stall_seconds``: time that calls waited for experts. ``full_calls``: calls whose ids
    were not read back because every expert was resident; they count in nothing else but ``calls``. ``guesses``,
    ``useful_guesses``: experts that a predictor fetched, and those of them that were then needed (a hit).
    """

    calls: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_read: int = 0
    stall_seconds: float = 0.0
    waves: int = 0
    full_calls: int = 0
    guesses: int = 0
    useful_guesses: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of hits, 1.0 before the first use."""
        uses = self.hits + self.misses
        return self.hits / uses if uses else 1.0


COUNTERS = [counter.name for counter in dataclasses.fields(LayerStats)]


@dataclass
class OffloadStats(LayerStats):
    """Sums over all layers, with ``layers`` by name, bytes of slots and of the store in host memory."""

    resident_bytes: int = 0
    host_bytes: int = 0
    num_slots: int = 0
    num_experts: int = 0
    layers: dict[str, LayerStats] = field(default_factory=dict)

    @classmethod
    def of(cls, layers: dict[str, LayerStats], **sizes: int) -> "OffloadStats":
        sums = {name: sum(getattr(layer, name) for layer in layers.values()) for name in COUNTERS}
        return cls(**sums, **sizes, layers={name: dataclasses.replace(layer) for name, layer in layers.items()})
