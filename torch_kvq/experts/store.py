"""Where experts live while they are in no slot. To add a store, subclass ``ExpertStore``."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch

from .spec import ExpertSpec


class ExpertStore(ABC):
    """Read-only experts of some layers, by layer name and expert index."""

    kind: str = "store"
    is_packed: bool = False  # whether decode() does more than copy

    @abstractmethod
    def layers(self) -> list[str]:
        """Names of the layers it holds."""

    @abstractmethod
    def spec(self, layer: str) -> ExpertSpec:
        """What :meth:`read` fills: one expert in the dtype the model computes in."""

    @abstractmethod
    def num_experts(self, layer: str) -> int: ...

    @abstractmethod
    def read(self, layer: str, expert: int, into: dict[str, torch.Tensor]) -> int:
        """Fill CPU tensors ``[*shape]`` with one expert; returns the bytes fetched. Threads call it concurrently.

        Raises:
            OSError: the expert could not be read; what is in ``into`` is undefined.
        """

    def residues(self, layer: str) -> Mapping[str, int]:
        """By parameter name: the address modulo a page of places that :meth:`read` fills without a copy. Default: any."""
        return {}

    def expert_bytes(self, layer: str) -> int:
        """Bytes that one :meth:`read` fetches."""
        return self.spec(layer).nbytes

    def host_tensors(self, layer: str, expert: int) -> dict[str, torch.Tensor] | None:
        """The expert as it lies in host memory, for a copy to another device; ``None`` if it must be read."""
        return None

    def decode(self, layer: str, stored: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        """Turn what :meth:`host_tensors` gave, on any device, into an expert on that device."""
        for name, tensor in into.items():
            tensor.copy_(stored[name], non_blocking=True)

    def whole(self, layer: str, name: str) -> torch.Tensor:
        """One fused parameter ``[num_experts, *shape]`` on the CPU."""
        rows = self.spec(layer).empty(self.num_experts(layer))
        for expert in range(self.num_experts(layer)):
            self.read(layer, expert, {key: tensor[expert] for key, tensor in rows.items()})
        return rows[name]

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the store itself occupies."""
        return 0

    def close(self) -> None:  # noqa: B027 - nothing to do for most
        """Give back files."""


class HostStore(ExpertStore):
    """Fused tensors ``[num_experts, ...]`` in host memory: ``tensors`` by layer and parameter name."""

    kind = "host memory"

    def __init__(self, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
        self._tensors = tensors

    def layers(self) -> list[str]:
        return list(self._tensors)

    def spec(self, layer: str) -> ExpertSpec:
        return ExpertSpec.of(self._tensors[layer])

    def num_experts(self, layer: str) -> int:
        return len(next(iter(self._tensors[layer].values())))

    def read(self, layer: str, expert: int, into: dict[str, torch.Tensor]) -> int:
        for name, tensor in into.items():
            tensor.copy_(self._tensors[layer][name][expert])
        return self.expert_bytes(layer)

    def host_tensors(self, layer: str, expert: int) -> dict[str, torch.Tensor]:
        return {name: tensor[expert] for name, tensor in self._tensors[layer].items()}

    def whole(self, layer: str, name: str) -> torch.Tensor:
        return self._tensors[layer][name]

    @property
    def host_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self._tensors.values() for tensor in layer.values())


class StoredWeights(Mapping):
    """The fused parameters of one layer by name, read from the store when asked for: accelerate's ``weights_map``."""

    def __init__(self, store: ExpertStore, layer: str) -> None:
        self._store, self._layer = store, layer

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._store.spec(self._layer).names:
            raise KeyError(name)
        return self._store.whole(self._layer, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.spec(self._layer).names)

    def __len__(self) -> int:
        return len(self._store.spec(self._layer).params)
