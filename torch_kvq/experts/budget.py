"""A memory budget turned into slots."""

import re
from dataclasses import dataclass

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
Budget = str | float | int


@dataclass(frozen=True)
class Slab:
    """Layers that share slots."""

    layers: tuple[str, ...]
    num_slots: int


def parse_bytes(name: str, text: str) -> int:
    """Bytes of a size such as ``"8GiB"`` or ``"512 MB"``.

    Raises:
        ValueError: another text; ``name`` is the argument's.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text) if isinstance(text, str) else None
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"{name} must be a size such as '8GiB' or '500MB', got {text!r}")
    return int(float(match[1]) * UNITS[match[2].upper()])


def slots_for(budget: Budget, layers: dict[str, int], expert_bytes: int) -> int:
    """Experts that may be resident, of all ``layers`` (name to number of experts).

    Args:
        budget: bytes as text, a share of the experts in (0, 1] as float, or a number of experts as int.

    Raises:
        TypeError, ValueError: another type or value, or room for less than one expert; the message has the bytes needed.
    """
    total = sum(layers.values())
    if isinstance(budget, bool) or not isinstance(budget, str | float | int):
        raise TypeError(f"budget must be bytes ('8GiB'), a share (0.25) or a number of experts (96), got {budget!r}")
    if isinstance(budget, str):
        slots = parse_bytes("budget", budget) // expert_bytes
    elif isinstance(budget, int):
        slots = budget
    elif 0 < budget <= 1:
        slots = max(1, int(budget * total))
    else:
        raise ValueError(f"budget must be a share in (0, 1] when it is a float, got {budget}")
    if slots < 1:
        raise ValueError(f"budget must hold at least one expert of {expert_bytes:,} bytes, got {budget!r}")
    return min(slots, total)


def make_slabs(layers: dict[str, int], num_slots: int, max_slots: int) -> list[Slab]:
    """Divide ``num_slots`` slots over groups of neighbouring layers, none with more than ``max_slots``.

    The experts implementations do work for every slot they are shown, so a slab is not made larger than one layer's experts;
    it is not made smaller either as long as layers are left to share it, so that few slots serve all.
    """
    names, largest = list(layers), min(max(layers.values()), max_slots)
    for count in range(max(1, -(-num_slots // largest)), len(names) + 1):
        edges = [index * len(names) // count for index in range(count + 1)]
        slots = [num_slots * high // len(names) - num_slots * low // len(names) for low, high in zip(edges, edges[1:])]
        if max(slots) <= largest:
            break
    return [Slab(tuple(names[low:high]), min(own, largest)) for low, high, own in zip(edges, edges[1:], slots)]


def divide(budget: Budget, sizes: list[tuple[dict[str, int], int]]) -> list[int]:
    """Slots of each group of (layers, bytes of one expert): every group gets the same share of its experts.

    Raises:
        TypeError, ValueError: as :func:`slots_for`, also when a group would be left without a slot.
    """
    counts = [sum(layers.values()) for layers, _ in sizes]
    total_bytes = sum(count * each for count, (_, each) in zip(counts, sizes))
    slots = []
    for count, (layers, each) in zip(counts, sizes):
        share = budget
        if len(sizes) > 1 and isinstance(budget, str):
            share = f"{parse_bytes('budget', budget) * count * each // total_bytes}B"
        elif len(sizes) > 1 and isinstance(budget, int):
            share = budget * count // sum(counts)
        slots.append(slots_for(share, layers, each))
    return slots
