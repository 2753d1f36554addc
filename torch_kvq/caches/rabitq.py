"""``RaBitQSparseCache``: a 1-bit index of the keys, and attention over the tokens that matter (RaBitQCache)."""

import warnings

from transformers.configuration_utils import PreTrainedConfig

from .base import CompressedCache
from .hybrid import RaBitQHybridLayer
from .rabitq_layer import RaBitQLayer
from .settings import RaBitQSettings
from .sparse_stats import SparseStats

_CHECKED_STEP = 32  # of decoding, at which a selection of nearly everything is said


class RaBitQSparseCache(CompressedCache):
    """A drop-in cache for ``model.generate(..., past_key_values=RaBitQSparseCache())`` that reads only what attention needs.

    Full-attention layers keep first and last tokens apart and give every token between one bit a dimension. A decode step
    estimates all logits from these bits and attends to the fewest tokens that hold ``top_p`` of the attention of each head,
    sinks and window counted. Prompts attend to everything; so do queries of more than 16 tokens later on. Layers with latent
    attention (MLA) and those that are no full attention stay what ``DynamicCache(config)`` makes them.

    Args:
        config: of the model. Left out, the cache looks at the calling frames for the model that uses it.
        top_p: share of attention that selected tokens, sinks and window shall hold, by the estimates; default .95.
        num_sinks: first real tokens of each sequence that are always attended, default 4.
        window_len: last tokens that are always attended, default 128; at least ``flush_len``.
        flush_len: tokens indexed at a time, default 16.
        min_dense_len: a context shorter than this is not indexed, and attended as it is; default 1,024.
        store: where older keys and values are. exact (default): as they came, on the device. isoquant: packed, with the signs
            of the packed keys as the index. host: as they came, in host memory, page-locked for a GPU, whose kernels fetch
            selected ones from there; the device holds the index, sinks and window.
        selection: group (default), the query heads of a kv head share the union of what they select, or head, each its own.
        max_selected: tokens selected at most, none by default; those with the largest shares stay.
        refine: select from the signs with a margin, then cut by the scores of the keys themselves. Default: for packed keys.
        widening: correct the estimates for their noise, so that the true share reaches ``top_p`` (``posterior_scores``); off.
        audit: count the true share that was kept (``stats.kept_mass``), by reading every key; off.
        k_bits, v_bits: of ``store="isoquant"``, 2, 3 (default) or 4.
        rotation: of keys, hadamard2 (default) or another of ``codecs/rotation.py``.
        balance: balance the key channels, learnt from the first keys and queries (default).
        center: subtract the mean key and the mean query of each kv head (default). Later keys that are off the mean key by
            half their spread or more get one of their own, up to eight times (``drift.py``); packed keys do not.
        seed: of the rotation.
        prefill, defer_limit: as of ``IsoQuantCache``.

    Raises:
        ValueError: an option out of range, named. TypeError: ``config`` is no config.
    """

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        top_p: float = 0.95,
        num_sinks: int = 4,
        window_len: int = 128,
        flush_len: int = 16,
        min_dense_len: int = 1024,
        store: str = "exact",
        selection: str = "group",
        max_selected: int | None = None,
        refine: bool | None = None,
        widening: bool = False,
        audit: bool = False,
        k_bits: int = 3,
        v_bits: int = 3,
        rotation: str = "hadamard2",
        balance: bool = True,
        center: bool = True,
        seed: int = 0,
        prefill: str = "auto",
        defer_limit: int = 32768,
    ) -> None:
        settings = RaBitQSettings(
            num_sinks, window_len, flush_len, rotation, balance, center, seed, prefill, defer_limit,
            top_p, min_dense_len, store, selection, max_selected, store == "isoquant" if refine is None else refine, widening,
            audit, k_bits, v_bits,
        )  # fmt: skip
        super().__init__(config, settings, SparseStats())
        self._steps = 0  # of decoding since the last prompt
        if top_p == 1:
            warnings.warn("top_p of 1 selects every token: attention reads the whole cache, and the index on top", stacklevel=2)

    def full_layer(self, index: int, latent_rank: int | None) -> RaBitQLayer | None:
        return RaBitQLayer(self.settings, self.stats, index) if latent_rank is None else None

    def hybrid_layer(self, index: int, number_of_states: int) -> RaBitQHybridLayer:
        return RaBitQHybridLayer(self.settings, self.stats, index, number_of_states)

    def _begin_forward(self, fresh: int) -> None:
        self._steps = 0 if fresh > 1 else self._steps + 1
        if self._steps in (0, _CHECKED_STEP):  # not at each: counts are read from the device
            self.stats.warn_of_everything()
        super()._begin_forward(fresh)

    @property
    def host_nbytes(self) -> int:
        """Bytes of older keys and values with ``store="host"``; they are part of ``nbytes``."""
        if self.settings.store != "host":
            return 0
        layers = [layer for layer in self._packed_layers() if layer.keys_store is not None]
        return sum(layer.keys_store.store.nbytes + layer.values_store.nbytes for layer in layers)
