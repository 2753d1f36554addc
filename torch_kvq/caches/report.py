"""What a cache holds, layer by layer, and how many bytes of it."""

import dataclasses
from collections import Counter

import torch

from .layer import CompressedLayer

_REASONS = {
    "DynamicLayer": "full attention, exact",
    "DynamicSlidingWindowLayer": "keeps its window only",
    "LinearAttentionLayer": "recurrent state, no tokens",
    "LinearAttentionAndSlidingWindowAttentionLayer": "recurrent state and window",
    "DynamicIndexedLayer": "sparse attention of the model's own",
    "DummyLayer": "holds no tokens",
}


def resident_bytes(*roots) -> int:
    """Bytes of the distinct storages of all tensors reachable from ``roots`` through attributes, lists and dicts."""
    return sum(_storages(*roots).values())


def _storages(*roots) -> dict[tuple[torch.device, int], int]:
    """Bytes of each of those storages by place."""
    storages, seen, waiting = {}, set(), list(roots)
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            if type(item) is torch.Tensor:
                storage = item.untyped_storage()
                storages[(item.device, storage.data_ptr())] = storage.nbytes()
            continue
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple, set)):
            waiting.extend(item)
        elif hasattr(item, "__dict__") and not isinstance(item, type):
            waiting.extend(vars(item).values())
    return storages


@dataclasses.dataclass(frozen=True)
class LayerRow:
    """One layer: class name, what it does, tokens in all, those packed or indexed, exact ones, bytes that no other layer uses."""

    index: int
    kind: str
    reason: str
    num_tokens: int
    num_packed: int
    num_exact: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class CacheReport:
    """Rows of a cache; ``str()`` joins neighbours that are alike.

    ``num_shared_bytes`` are those of the rotations and codebooks that several layers use; with the bytes of all rows they make
    the ``nbytes`` of the cache.
    """

    rows: list[LayerRow]
    num_shared_bytes: int

    @classmethod
    def of(cls, layers: list) -> "CacheReport":
        held = [_storages(vars(layer)) for layer in layers]
        uses = Counter(place for storages in held for place in storages)
        own = [sum(size for place, size in storages.items() if uses[place] == 1) for storages in held]
        shared = {place: size for storages in held for place, size in storages.items() if uses[place] > 1}
        return cls([_row(index, layer, own[index]) for index, layer in enumerate(layers)], sum(shared.values()))

    def __str__(self) -> str:
        lines = [f"{'layers':>9} {'kind':34} {'tokens':>8} {'packed':>8} {'exact':>6} {'bytes':>12}  why"]
        groups: list[list[LayerRow]] = []
        for row in self.rows:
            if groups and dataclasses.replace(row, index=groups[-1][-1].index) == groups[-1][-1]:
                groups[-1].append(row)
            else:
                groups.append([row])
        for group in groups:
            row, span = group[0], f"{group[0].index}-{group[-1].index}" if len(group) > 1 else f"{group[0].index}"
            total = sum(each.num_bytes for each in group)
            lines.append(
                f"{span:>9} {row.kind:34} {row.num_tokens:8,} {row.num_packed:8,} {row.num_exact:6,} {total:12,}  {row.reason}"
            )
        if self.num_shared_bytes:
            lines.append(f"{'shared':>9} {'':34} {'':8} {'':8} {'':6} {self.num_shared_bytes:12,}  rotations, codebooks")
        return "\n".join(lines)


def _row(index: int, layer, num_bytes: int) -> LayerRow:
    kind = type(layer).__name__
    if isinstance(layer, CompressedLayer):
        exact = layer.exact.length
        total = layer.get_seq_length()
        return LayerRow(index, kind, layer.reason(), total, total - exact, exact, num_bytes)
    length = getattr(layer, "get_seq_length", None)
    total = length() if length is not None and getattr(layer, "is_initialized", False) else 0
    keys = getattr(layer, "keys", None)
    exact = keys.shape[-2] if isinstance(keys, torch.Tensor) and keys.dim() == 4 else 0
    return LayerRow(index, kind, _REASONS.get(kind, "the model's own"), total, 0, exact, num_bytes)
