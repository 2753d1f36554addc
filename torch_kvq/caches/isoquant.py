"""``IsoQuantCache``: keys and values at 2 to 4 bits, attention on the packed data (RotaryQuant)."""

import warnings

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from .discovery import config_of_caller, generation_options, make_layers
from .layer import IsoQuantLayer, check_crop
from .owner import Ownership
from .report import CacheReport, resident_bytes
from .settings import IsoQuantSettings
from .stats import CacheStats


class IsoQuantCache(Cache):
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
        if config is not None and not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be a transformers config, got {type(config).__name__}")
        self.settings = IsoQuantSettings(
            k_bits, v_bits, num_sinks, window_len, flush_len, rotation, balance, center, k_scale, v_scale, seed,
            prefill, defer_limit,
        )  # fmt: skip
        self.stats = CacheStats()
        self._has_config, self._config, self._ownership = config is not None, config, Ownership()
        self._is_bound, self._is_guess, self._deferred = False, False, prefill == "deferred"
        super().__init__(layer_class_to_replicate=self._new_layer)
        if config is not None:
            self._bind(config)

    # ---- which model is it for

    @property
    def layers(self) -> list:
        """The layers; on first use the model is looked for among the callers."""
        if not self._is_bound and not self._layers:
            config = config_of_caller()
            if config is not None:
                self._bind(config)
                self._is_guess = True
        return self._layers

    @layers.setter
    def layers(self, layers: list) -> None:
        packed = [index for index, layer in enumerate(layers) if isinstance(layer, IsoQuantLayer)]
        self._layers, self._first, self._last = layers, *((packed[0], packed[-1]) if packed else (0, -1))

    def _bind(self, config: PreTrainedConfig) -> None:
        layers = make_layers(config, self.settings, self.stats)
        self._is_bound, self._config = True, config
        if layers:
            self.layers, self.layer_class_to_replicate = layers, None

    def _confirm(self) -> None:
        """Before the first tokens: the model that asked first may have been a user's module with a config of its own."""
        self._is_guess = False
        config = config_of_caller(PreTrainedModel)
        if config is None or config is self._config:
            return
        kinds = [type(layer) for layer in make_layers(config, self.settings, self.stats)]
        if kinds != [type(layer) for layer in self._layers]:
            self._config = config
            self._start_over()

    def _new_layer(self) -> IsoQuantLayer:
        """The next layer of a cache that knows no config."""
        layer = IsoQuantLayer(self.settings, self.stats, len(self._layers))
        layer.deferred = self._deferred
        return layer

    def _packed_layers(self) -> list[IsoQuantLayer]:
        return [layer for layer in self._layers if isinstance(layer, IsoQuantLayer)]

    def _begin_forward(self, fresh: int) -> None:
        """Called before the first packed layer of a forward takes its ``fresh`` tokens."""
        self.stats.warn_of_fallback()
        self._ownership.undo_failed_forward(self._layers, self._first, self.get_seq_length(), fresh)
        options = generation_options(3) if fresh > 1 else None
        if options is not None and options.use_cache is False:
            raise ValueError(
                "use_cache must be True with past_key_values: without it generate feeds every token at every step, got False"
            )
        if fresh == 1:
            for layer in self._packed_layers():
                layer.make_ready()
        elif self.settings.prefill == "auto":
            self._deferred = bool(getattr(options, "prefill_chunk_size", None))
            for layer in self._packed_layers():
                layer.deferred = self._deferred

    def _start_over(self) -> None:
        """New layers. Those of the library are not all empty after their ``reset``."""
        recorded = any(getattr(layer, "record_past", False) for layer in self._layers)
        for layer in self._packed_layers():
            layer.reset()
        self.layers, self.layer_class_to_replicate, self._ownership = [], self._new_layer, Ownership()
        if self._is_bound:
            self._bind(self._config)
            if recorded:
                self.activate_past_recording()

    # ---- transformers' interface

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Adds keys ``[B, H, N, D]`` and values ``[B, H, N, Dv]`` of a layer; returns handles of all of them.

        Raises:
            ValueError: see ``IsoQuantLayer.update``; also a second model on a cache that is not empty.
        """
        layers = self.layers
        if self._is_guess:
            self._confirm()
            layers = self._layers
        if not self._is_bound and not layers:
            warnings.warn(
                "IsoQuantCache found no model config among the callers: every layer is taken for full attention and a sliding "
                "window, if the model has one, keeps all tokens. Pass IsoQuantCache(config=model.config).",
                stacklevel=2,
            )
        self._ownership.check_whole()
        if self._is_bound and layer_idx >= len(layers) > 0:
            raise ValueError(f"config must be that of the model: it has {len(layers)} layers, got layer_idx {layer_idx}")
        try:
            self._ownership.check(layers, layer_idx)
            if layer_idx == self._first:
                self._begin_forward(key_states.shape[-2])
            if layer_idx < len(layers):
                return layers[layer_idx].update(key_states, value_states, *args, **kwargs)
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except ValueError:
            length = self.get_seq_length()
            if self._ownership.breaks(layers, layer_idx, length) and not length:
                self._start_over()
            raise

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that the first and the last packed layer hold; those of a forward that failed midway do not count."""
        layers = self._layers
        if layer_idx == 0 and layers and isinstance(layers[self._first], IsoQuantLayer):
            return min(layers[self._first].get_seq_length(), layers[self._last].get_seq_length())
        return super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask for ``layer_idx`` covers."""
        layers = self.layers
        if layer_idx < len(layers) and isinstance(layers[layer_idx], IsoQuantLayer):
            return self.get_seq_length() + query_length, 0
        return super().get_mask_sizes(query_length, layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens.

        Raises:
            ValueError: a positive number, or more tokens than there are; nothing was changed.
        """
        for index, layer in enumerate(self.layers):
            if isinstance(layer, IsoQuantLayer):
                check_crop(tokens_to_remove, layer.get_seq_length(), index)
        for layer in sorted(self.layers, key=lambda layer: type(layer) is IsoQuantLayer):  # others may refuse
            layer.crop(tokens_to_remove)

    def reset(self) -> None:
        """Forgets all tokens. The next call may come from another model, unless ``config`` was given."""
        self._is_bound = self._has_config
        self._start_over()

    def __iter__(self):
        """Keys, values and ``None`` (or the window of a sliding layer) of every layer, as ``DynamicCache`` gives them."""
        for layer in self.layers:
            yield layer.keys, layer.values, getattr(layer, "_sliding_window_tensor", None)

    # ---- what it holds

    @property
    def nbytes(self) -> int:
        """Every resident byte: packed and exact buffers with their slack, statistics, rotations, states of other layers."""
        return resident_bytes(self._layers)

    def report(self) -> CacheReport:
        """A table with one row a layer: kind, why it is kept so, tokens, bytes. ``str()`` of it is for reading."""
        return CacheReport.of(self._layers)
