"""What one expert is made of."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ExpertSpec:
    """Parameters of one expert: ``params`` holds (name, shape without the experts' dim, dtype), in the module's order."""

    params: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor]) -> "ExpertSpec":
        """Of fused tensors ``[num_experts, ...]``, which may be on meta."""
        return cls(tuple((name, tuple(t.shape[1:]), t.dtype) for name, t in tensors.items()))

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.params]

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in self.params)

    def empty(self, *leading: int, device: torch.device | str = "cpu", pin_memory: bool = False) -> dict[str, torch.Tensor]:
        """Uninitialised tensors ``[*leading, *shape]`` of every parameter."""
        return {
            name: torch.empty((*leading, *shape), dtype=dtype, device=device, pin_memory=pin_memory)
            for name, shape, dtype in self.params
        }
