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
