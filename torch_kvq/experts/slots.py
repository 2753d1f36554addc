"""The memory that experts are resident in."""

import math
import mmap
from collections.abc import Iterable, Mapping

import torch

from .files import PAGE, private_memory
from .spec import ExpertSpec

Residues = Mapping[str, int]  # by parameter name: an address modulo PAGE


class Slots:
    """``num_rows`` slots for experts of one spec.

    Files read past the page cache come without a copy into places whose address has a certain residue modulo a page, which
    differs between layers. So each layer sees the slots through views of its own: its parameters begin at its residue in every
    slot, and slots are so far apart that no layer's reach into the next. What a view shows of a slot that another layer's
    expert is in has no meaning. Such slots are made of huge pages where the system has some, which cost the least to read into.

    Args:
        residues: by layer; parameters that are not named may lie anywhere.
    """

    def __init__(self, spec: ExpertSpec, num_rows: int, device: torch.device, residues: Mapping[str, Residues]) -> None:
        self.num_rows, self.nbytes = num_rows, 0
        self._views: dict[str, dict[str, torch.Tensor]] = {layer: {} for layer in residues}
        for name, shape, dtype in spec.params:
            wanted = {layer: own.get(name) for layer, own in residues.items()}
            if all(residue is None for residue in wanted.values()):
                views = dict.fromkeys(wanted, torch.empty((num_rows, *shape), dtype=dtype, device=device))
                self.nbytes += num_rows * math.prod(shape) * dtype.itemsize
            else:
                views = self._place(shape, dtype, {layer: residue or 0 for layer, residue in wanted.items()})
            for layer, view in views.items():
                self._views[layer][name] = view

    def _place(self, shape: tuple[int, ...], dtype: torch.dtype, residues: Residues) -> dict[str, torch.Tensor]:
        """Views ``[num_rows, *shape]`` by layer, whose rows begin at addresses of the layer's residue."""
        stride = distance(math.prod(shape) * dtype.itemsize, residues.values())
        size = max(residues.values()) + self.num_rows * stride
        memory = private_memory(size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes += size
        strides = (stride // dtype.itemsize, *torch.empty(shape, device="meta").stride())
        return {
            layer: torch.frombuffer(
                memory, dtype=dtype, offset=residue, count=self.num_rows * stride // dtype.itemsize
            ).as_strided((self.num_rows, *shape), strides)
            for layer, residue in residues.items()
        }

    def of(self, layer: str) -> dict[str, torch.Tensor]:
        """Parameters ``[num_rows, *shape]`` of a layer's experts."""
        return self._views[layer]

    def one(self, layer: str, slot: int) -> dict[str, torch.Tensor]:
        """Parameters ``[*shape]``, contiguous, of a layer's expert in a slot."""
        return {name: rows[slot] for name, rows in self._views[layer].items()}


def distance(num_bytes: int, residues: Iterable[int]) -> int:
    """Bytes from one row of ``num_bytes`` to the next, if it may begin at any of ``residues``: whole pages."""
    residues = list(residues)
    return -(-(num_bytes + max(residues) - min(residues)) // PAGE) * PAGE


def slot_bytes(spec: ExpertSpec, residues: Mapping[str, Residues]) -> int:
    """Bytes of a slot, as :class:`Slots` makes them for these layers."""
    total = 0
    for name, shape, dtype in spec.params:
        wanted = [own.get(name) for own in residues.values()]
        num_bytes = math.prod(shape) * dtype.itemsize
        is_free = all(residue is None for residue in wanted)
        total += num_bytes if is_free else distance(num_bytes, [residue or 0 for residue in wanted])
    return total
