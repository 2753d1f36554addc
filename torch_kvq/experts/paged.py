"""What stands in for an expert parameter while the experts implementation runs."""

from collections.abc import Callable
from typing import Any

import torch


class PagedParameter:
    """For the eager loop, which asks for one expert at a time: ``weight[expert]`` brings that expert into a slot."""

    def __init__(self, name: str, full: torch.Tensor, fetch: Callable[[int], dict[str, torch.Tensor]]) -> None:
        self._name, self._full, self._fetch = name, full, fetch

    def __getitem__(self, expert: int | torch.Tensor) -> torch.Tensor:
        return self._fetch(int(expert))[self._name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._full, name)  # shape, dtype and the like


class GatheredParameter:
    """For ``batched_mm``, which asks once for ``weight[expert_ids]``: one row for each of these ids, gathered before."""

    def __init__(self, full: torch.Tensor, rows: torch.Tensor) -> None:
        self._full, self._rows = full, rows

    def __getitem__(self, expert_ids: torch.Tensor) -> torch.Tensor:
        rows, self._rows = self._rows, None
        if rows is None or len(rows) != len(expert_ids):
            raise RuntimeError("batched_mm must read each expert parameter once, with all of its expert ids")
        return rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._full, name)


class GroupedParameter:
    """For ``grouped_mm`` on a CPU, which goes through all slots of ``[num_rows, out, in]``: here only those that have rows
    are multiplied, each by the product that it would be there."""

    def __init__(self, slots: torch.Tensor) -> None:
        self._slots = slots

    def transpose(self, first: int, second: int) -> "GroupedParameter":
        return GroupedParameter(self._slots.transpose(first, second))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slots, name)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if value is not None}
        if func in _GROUPED_MM and len(args) == 2 and kwargs.keys() == {"offs"} and isinstance(args[1], cls):
            return args[1]._multiplied(args[0], kwargs["offs"].tolist())
        return func(*(arg._slots if isinstance(arg, cls) else arg for arg in args), **kwargs)

    def _multiplied(self, rows: torch.Tensor, stops: list[int]) -> torch.Tensor:
        out, start = rows.new_empty(len(rows), self._slots.shape[-1]), 0
        for slot, stop in enumerate(stops):
            if stop > start:
                torch.mm(rows[start:stop], self._slots[slot], out=out[start:stop])
            start = stop
        return out


_GROUPED_MM = {torch._grouped_mm, torch.nn.functional.grouped_mm}
