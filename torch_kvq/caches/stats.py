"""Counters of one cache: what ran on packed data, what was rebuilt, and why."""

import dataclasses
import warnings

import torch


@dataclasses.dataclass
class CacheStats:
    """Counts since construction or :meth:`clear`; one call is one layer in one forward.

    Attributes:
        attend_calls: attention calls answered from packed data.
        decompress_calls, tokens_decompressed: times packed keys or values were rebuilt, and tokens a sequence.
        compress_calls, tokens_compressed: times exact tokens were packed, and tokens a sequence.
        fallback_calls, fallback_reasons: uses of a handle that no handler knew while tokens were packed, by function.
        transient_bytes, peak_transient_bytes: exact keys and values that wait to be packed, now and at most. A prompt whose
            compression is deferred costs ``2 * layers * heads * dim * tokens * itemsize`` (RotaryQuant, equation 12); packed
            layer by layer it costs one layer of that.
    """

    attend_calls: int = 0
    decompress_calls: int = 0
    tokens_decompressed: int = 0
    compress_calls: int = 0
    tokens_compressed: int = 0
    fallback_calls: int = 0
    fallback_reasons: dict[str, int] = dataclasses.field(default_factory=dict)
    transient_bytes: int = 0
    peak_transient_bytes: int = 0
    owner: str = dataclasses.field(default="IsoQuantCache", repr=False)
    _has_warned: bool = dataclasses.field(default=False, repr=False)

    def count_decompress(self, tokens: int) -> None:
        self.decompress_calls += 1
        self.tokens_decompressed += tokens

    def count_fallback(self, reason: str) -> None:
        """Counts a use of packed keys or values by a function that needs them dense."""
        self.fallback_calls += 1
        self.fallback_reasons[reason] = self.fallback_reasons.get(reason, 0) + 1
        if not torch.compiler.is_compiling():
            self.warn_of_fallback()

    def warn_of_fallback(self) -> None:
        """Warns, once, of the first function counted."""
        if self._has_warned or not self.fallback_reasons:
            return
        self._has_warned = True
        warnings.warn(
            f"{self.owner} rebuilds packed tokens for {next(iter(self.fallback_reasons))}(), which has no packed form: right, "
            "but slow. Use the attention implementation sdpa, eager or kvq; cache.stats.fallback_reasons counts such calls.",
            stacklevel=2,
        )

    def add_transient(self, change: int) -> None:
        self.transient_bytes += change
        self.peak_transient_bytes = max(self.peak_transient_bytes, self.transient_bytes)

    def clear(self) -> None:
        """Sets every count to zero; bytes that still wait stay counted."""
        waiting, warned = self.transient_bytes, self._has_warned
        self.__init__(owner=self.owner, _has_warned=warned)
        self.add_transient(waiting)

    def __str__(self) -> str:
        lines = [f"{field.name:22s} {getattr(self, field.name)}" for field in dataclasses.fields(self) if field.repr]
        return "\n".join(lines)
