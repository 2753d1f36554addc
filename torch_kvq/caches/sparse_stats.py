"""Counters of a sparse cache: what was scanned, selected and read."""

import dataclasses
import warnings

import torch

from ..store import empty, normal
from .stats import CacheStats


@dataclasses.dataclass
class SparseStats(CacheStats):
    """What ``CacheStats`` counts, and what selection does. Reading a count that depends on the selection waits for the device.

    Attributes:
        tokens_indexed: tokens a sequence that the index took in; ``tokens_compressed`` counts them only where
            ``store="isoquant"`` packs them, the other stores keep them exact.
        select_calls: attention calls that selected tokens; the others among ``attend_calls`` read all.
        scanned_tokens: tokens whose signs were read, summed over calls, sequences and selections (kv heads, or query heads
            where each selects for itself).
        index_bytes_read: bytes of the index read for them, and of packed keys by a refined cut.
        kept_mass: with ``audit``, mean true share of attention that sinks, window and selected tokens held; else ``None``.
    """

    tokens_indexed: int = 0
    select_calls: int = 0
    scanned_tokens: int = 0
    index_bytes_read: int = 0
    mass_rows: int = dataclasses.field(default=0, repr=False)
    owner: str = dataclasses.field(default="RaBitQSparseCache", repr=False)
    _counts: dict = dataclasses.field(default_factory=dict, repr=False)
    _said_everything: bool = dataclasses.field(default=False, repr=False)

    def __setstate__(self, state: dict) -> None:
        """As that of ``TokenBuffers``: counts are added to in place, too."""
        self.__dict__.update(state)
        self._counts = {key: normal(count) for key, count in self._counts.items()}

    def count_selection(self, pieces, selection, candidates) -> None:
        """A call that selected ``selection`` from the body of ``pieces``, from ``candidates`` where the cut was refined."""
        index, (batch, heads) = pieces.index, pieces.exact_keys.shape[:2]
        self.select_calls += 1
        self.scanned_tokens += selection.count.numel() * pieces.length
        self.index_bytes_read += batch * heads * pieces.length * index.token_bytes
        self._add("selected", selection.count, row_bytes(pieces.keys) + row_bytes(pieces.values))
        if candidates is not None:
            self._add("candidates", candidates.count, row_bytes(pieces.keys))

    def count_kept_mass(self, mass: torch.Tensor) -> None:
        """True shares ``[B, Hq, M]`` that were kept."""
        self._add("mass", mass, 1)
        self.mass_rows += mass.numel()

    @torch.compiler.disable  # a compiler loses what is added in place to a tensor that was made in the same frame
    def _add(self, name: str, x: torch.Tensor, num_bytes: int) -> None:
        """Adds the sum of ``x`` to a count on its device, of things of that many bytes."""
        key = name, num_bytes, x.device
        if key not in self._counts:
            self._counts[key] = empty((), torch.float64, x.device).zero_()
        self._counts[key].add_(x.sum(dtype=torch.float64))

    def _sum(self, name: str, weighted: bool = False) -> float:
        return sum(x.item() * (size if weighted else 1) for (each, size, _), x in self._counts.items() if each == name)

    @property
    def selected_tokens(self) -> int:
        """Tokens attended to among those scanned."""
        return int(self._sum("selected"))

    @property
    def selected_share(self) -> float:
        """The budget: selected tokens a scanned token; 0 if none was scanned."""
        return self.selected_tokens / self.scanned_tokens if self.scanned_tokens else 0.0

    @property
    def bytes_read(self) -> int:
        """Bytes of index, candidates and selected tokens; sinks and window come on top."""
        return self.index_bytes_read + int(self._sum("selected", True) + self._sum("candidates", True))

    @property
    def kept_mass(self) -> float | None:
        return self._sum("mass") / self.mass_rows if self.mass_rows else None

    def warn_of_everything(self) -> None:
        """Warns, once, if nearly everything was selected so far."""
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if not self._said_everything and self.select_calls and not capturing and self.selected_share > 0.9:
            self._said_everything = True
            warnings.warn(
                f"{self.owner} selected {self.selected_share:.0%} of the tokens so far: it reads more than dense attention. "
                "Use a smaller top_p or max_selected, or a dense cache for this model.",
                stacklevel=2,
            )

    def clear(self) -> None:
        said = self._said_everything
        super().clear()
        self._said_everything = said

    def __str__(self) -> str:
        names = ("selected_tokens", "selected_share", "bytes_read", "kept_mass")
        return "\n".join([super().__str__(), *(f"{name:22s} {getattr(self, name)}" for name in names)])


def row_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of one token of one head, of one tensor ``[B, H, C, D]`` or of a packed store."""
    return sum(x[0, 0, 0].numel() * x.element_size() for x in tensors[:3])
