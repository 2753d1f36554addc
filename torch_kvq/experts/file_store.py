"""Experts as byte ranges of files on disk."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .files import WeightFile, WeightFiles
from .safetensors_header import StoredTensor
from .spec import ExpertSpec
from .store import ExpertStore

Pieces = Callable[[int], list[StoredTensor]]
LEAST_BYTES = 1 << 18  # of a parameter, for slots to be spaced for its sake: by two pages at most


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


@dataclass(frozen=True)
class Run:
    """Parts that follow one another in a file, so that one read fetches them: each a parameter's name, rows, dtype."""

    file: WeightFile
    offset: int
    segments: list[tuple[str, slice, torch.dtype]]


def is_harmless(residue: int, dtype: torch.dtype) -> bool:
    """Whether products with weights that begin there are the same to the last bit.

    MKL's of a float32 matrix and one row add in an order that depends on the address modulo 16; 64 is on the safe side.
    """
    return residue % (64 if dtype.itemsize > 2 else dtype.itemsize) == 0


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
        self._runs: dict[tuple[str, int], list[Run]] = {}
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

    def residues(self, layer: str) -> dict[str, int]:
        """Those of most of the layer's experts; the others are copied, as is what is small."""
        if self.files.alignment == 1:
            return {}
        found = {}
        for name, shape, dtype in self._specs[layer].params:
            counts: Counter[int] = Counter()
            for expert in range(self._counts[layer]):
                begin = 0
                for part in self._pieces[layer][name](expert):
                    counts[(part.offset - begin) % self.files.alignment if part.dtype == dtype else -1] += part.nbytes
                    begin += part.nbytes
            ((residue, _),) = counts.most_common(1)
            if residue >= 0 and is_harmless(residue, dtype) and math.prod(shape) * dtype.itemsize >= LEAST_BYTES:
                found[name] = residue
        return found

    def _runs_of(self, layer: str, expert: int) -> list[Run]:
        if (runs := self._runs.get((layer, expert))) is None:
            runs = self._runs[layer, expert] = self._make_runs(layer, expert)
        return runs

    def _make_runs(self, layer: str, expert: int) -> list[Run]:
        parts = []
        for name, _, _ in self._specs[layer].params:
            row = 0
            for part in self._pieces[layer][name](expert):
                parts.append((part, name, row))
                row += part.shape[0]
        runs: list[Run] = []
        path, end = None, -1
        for part, name, row in sorted(parts, key=lambda item: (item[0].path, item[0].offset)):
            if (path, end) != (part.path, part.offset):
                runs.append(Run(self.files[part.path], part.offset, []))
            segments, rows = runs[-1].segments, slice(row, row + part.shape[0])
            if segments and segments[-1] == (name, slice(segments[-1][1].start, row), part.dtype):
                rows = slice(segments.pop()[1].start, rows.stop)
            segments.append((name, rows, part.dtype))
            path, end = part.path, part.offset + part.nbytes
        return runs

    def read(self, layer: str, expert: int, into: dict[str, torch.Tensor]) -> int:
        count = 0
        for run in self._runs_of(layer, expert):
            places, converted = [], []
            for name, rows, dtype in run.segments:
                place = into[name]
                if rows.stop - rows.start != len(place):
                    place = place[rows]
                if dtype != place.dtype:
                    converted.append((place, place := torch.empty(place.shape, dtype=dtype)))
                places.append(place)
            count += run.file.read(run.offset, *places)
            for place, fetched in converted:
                place.copy_(fetched)
        return count

    def close(self) -> None:
        self.files.close()
