"""``IsoQuantCache``: keys and values at 2 to 4 bits, attention on the packed data (RotaryQuant)."""

from transformers.configuration_utils import PreTrainedConfig

from .base import CompressedCache
from .hybrid import IsoQuantHybridLayer
from .isoquant_layer import IsoQuantLayer
from .settings import IsoQuantSettings
from .stats import CacheStats


class IsoQuantCache(CompressedCache):
    """A drop-in cache for ``model.generate(..., past_key_values=IsoQuantCache())``.

    Full-attention layers keep ``num_sinks`` first and at least ``window_len`` last tokens exact and everything between packed.
    Prompts are attended exactly and packed layer by layer. Sliding-window, linear-attention and other special layers stay
    what ``DynamicCache(config)`` makes them; :meth:`report` says which and why.

    Args:
        config: of the model. Left out, the cache looks at the calling frames for the model that uses it; give it where
            those cannot be seen (``torch.compile`` of the first call).
        k_bits, v_bits: 2, 3 (default) or 4 bits a coordinate of keys and values.
        num_sinks: first real tokens of each sequence kept exact, default 4.
        window_len: last tokens kept exact, default 128; at least ``flush_len``.
        flush_len: tokens packed at a time, default 16.
        rotation: isoquant (default), hadamard, hadamard2, dense, so4, so3 or none (``codecs/rotation.py``).
        balance: learn a channel balance of keys from the first keys and queries (default). It is what keeps models with
            outlier channels, such as Qwen2.5, usable.
        center: subtract the mean key of each kv head (default).
        k_scale, v_scale: scale rule, unbiased and mse by default (``reference.quantise``).
        seed: of the rotations.
        prefill: ``layerwise`` packs each layer once its attention has been answered, ``deferred`` waits for decoding (for
            prompts fed in chunks), ``auto`` (default) defers if ``generate`` was given a ``prefill_chunk_size``.
        defer_limit: exact tokens after which deferral ends, default 32,768.

    Raises:
        ValueError: an option out of range, named. TypeError: ``config`` is no config.
    """

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        k_bits: int = 3,
        v_bits: int = 3,
        num_sinks: int = 4,
        window_len: int = 128,
        flush_len: int = 16,
        rotation: str = "isoquant",
        balance: bool = True,
        center: bool = True,
        k_scale: str = "unbiased",
        v_scale: str = "mse",
        seed: int = 0,
        prefill: str = "auto",
        defer_limit: int = 32768,
    ) -> None:
        settings = IsoQuantSettings(
            num_sinks, window_len, flush_len, rotation, balance, center, seed, prefill, defer_limit,
            k_bits, v_bits, k_scale, v_scale,
        )  # fmt: skip
        super().__init__(config, settings, CacheStats())

    def full_layer(self, index: int, latent_rank: int | None) -> IsoQuantLayer:
        return IsoQuantLayer(self.settings, self.stats, index, latent_rank)

    def hybrid_layer(self, index: int, number_of_states: int) -> IsoQuantHybridLayer:
        return IsoQuantHybridLayer(self.settings, self.stats, index, number_of_states)
