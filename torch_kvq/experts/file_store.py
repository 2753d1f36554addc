"""Experts as byte ranges of files on disk."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .files import WeightFiles
from .safetensors_header import StoredTensor
from .spec import ExpertSpec
from .store import ExpertStore

Pieces = Callable[[int], list[StoredTensor]]


@dataclass(frozen=True)
class FusedTensor:
    """One stored tensor ``[num_experts, ...]``."""

    tensor: StoredTensor

    def __call__(self, expert: int) -> list[StoredTensor]:
        shape = self.tensor.shape[1:]
        each = self.tensor.nbytes // self.tensor.shape[0]
        return [StoredTensor(self.tensor.path, self.tensor.offset + expert * each, shape, self.tensor.dtype)]


@dataclass(frozen=True)
class SplitTensors:
    """Stored tensors by expert, each expert's joined along their first dim."""

    experts: list[list[StoredTensor]]

    def __call__(self, expert: int) -> list[StoredTensor]:
        return self.experts[expert]


class FileStore(ExpertStore):
    """Experts read from files whenever they are needed.

    Args:
        kind: what the files are, for reports.
        pieces: by layer and parameter name, a function of the expert that gives its parts in the file.
        specs: by layer, what the model computes with; parts of another dtype are converted as they are read.
        counts: experts by layer.
        io: ``pread``, ``direct`` or ``mmap``.

    Raises:
        ValueError: parts that do not add up to the spec, or files that are too short.
    """

    def __init__(
        self,
        kind: str,
        pieces: dict[str, dict[str, Pieces]],
        specs: dict[str, ExpertSpec],
        counts: dict[str, int],
        io: str = "pread",
    ) -> None:
        self.kind, self.files = f"{kind} ({io})", WeightFiles(io)
        self._pieces, self._specs, self._counts = pieces, specs, counts
        for layer, spec in specs.items():
            for name, shape, _ in spec.params:
                self._check(layer, name, shape)

    def _check(self, layer: str, name: str, shape: tuple[int, ...]) -> None:
        """Also opens every file, so that a later change of any is noticed."""
        for expert in range(self._counts[layer]):
            parts = self._pieces[layer][name](expert)
            joined = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
            if joined != shape:
                raise ValueError(f"{parts[0].path}: {layer}.{name} must be {shape} an expert, got {joined}")
            for part in parts:
                if part.offset + part.nbytes > self.files[part.path].num_bytes:
                    raise ValueError(f"{part.path} is truncated: {layer}.{name} needs {part.offset + part.nbytes:,} bytes")

    def layers(self) -> list[str]:
        return list(self._specs)

    def spec(self, layer: str) -> ExpertSpec:
        return self._specs[layer]

    def num_experts(self, layer: str) -> int:
        return self._counts[layer]

    def expert_bytes(self, layer: str) -> int:
        return sum(part.nbytes for pieces in self._pieces[layer].values() for part in pieces(0))

    def read(self, layer: str, expert: int, into: dict[str, torch.Tensor]) -> int:
        count = 0
        for name, tensor in into.items():
            row = 0
            for part in self._pieces[layer][name](expert):
                place = tensor[row : row + part.shape[0]]
                row += part.shape[0]
                same = part.dtype == place.dtype
                target = place if same else torch.empty(part.shape, dtype=part.dtype)
                count += self.files[part.path].read(part.offset, target)
                if not same:
                    place.copy_(target)
        return count

    def close(self) -> None:
        self.files.close()
