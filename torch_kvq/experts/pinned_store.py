"""Experts in page-locked host memory, which a GPU reads at the speed of its link."""

import torch

from .spec import ExpertSpec
from .store import ExpertStore

CHUNK_BYTES = 1 << 28


class PinnedStore(ExpertStore):
    """Copies of fused tensors ``[num_experts, ...]``, by layer and parameter name.

    torch rounds each page-locked allocation up to a power of two, so experts are carved out of chunks of that size.
    """

    kind = "page-locked host memory"

    def __init__(self, tensors: dict[str, dict[str, torch.Tensor]], pin_memory: bool = True) -> None:
        self._specs = {layer: ExpertSpec.of(fused) for layer, fused in tensors.items()}
        self._rows: dict[str, dict[str, list[torch.Tensor]]] = {layer: {} for layer in tensors}
        self._pin_memory, self._chunk, self._used, self._held = pin_memory, torch.empty(0, dtype=torch.uint8), 0, 0
        for layer, fused in tensors.items():
            for name, tensor in fused.items():
                self._rows[layer][name] = [self._place(row) for row in tensor.detach()]

    def _place(self, row: torch.Tensor) -> torch.Tensor:
        begin = -(-self._used // 64) * 64
        if begin + row.nbytes > len(self._chunk):
            self._chunk = torch.empty(max(CHUNK_BYTES, row.nbytes), dtype=torch.uint8, pin_memory=self._pin_memory)
            self._held += len(self._chunk)
            begin = 0
        self._used = begin + row.nbytes
        return self._chunk[begin : self._used].view(row.dtype).view(row.shape).copy_(row)

    def layers(self) -> list[str]:
        return list(self._specs)

    def spec(self, layer: str) -> ExpertSpec:
        return self._specs[layer]

    def num_experts(self, layer: str) -> int:
        return len(next(iter(self._rows[layer].values())))

    def read(self, layer: str, expert: int, into: dict[str, torch.Tensor]) -> int:
        for name, tensor in into.items():
            tensor.copy_(self._rows[layer][name][expert])
        return self.expert_bytes(layer)

    def host_tensors(self, layer: str, expert: int) -> dict[str, torch.Tensor]:
        return {name: rows[expert] for name, rows in self._rows[layer].items()}

    def whole(self, layer: str, name: str) -> torch.Tensor:
        return torch.stack(self._rows[layer][name])

    @property
    def host_bytes(self) -> int:
        return self._held
