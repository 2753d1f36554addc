"""What all caches of this package have in common: whose tokens they hold, and transformers' ``Cache`` interface."""

import warnings

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from ..checks import check_count
from .checks import as_rows, check_layer, check_query_length, check_tensors
from .discovery import config_of_caller, generation_options, make_layers
from .layer import CompressedLayer, check_crop, is_plain
from .owner import Ownership
from .report import CacheReport, resident_bytes
from .settings import LayerSettings
from .stats import CacheStats


class CompressedCache(Cache):
    """A cache with compressed layers where the model has full attention. Subclasses name their layers.

    Args:
        config: of the model, or ``None`` to look for it among the callers.
        settings, stats: of all layers.

    Raises:
        TypeError: ``config`` is no config.
    """

    def __init__(self, config: PreTrainedConfig | None, settings: LayerSettings, stats: CacheStats) -> None:
        if config is not None and not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be a transformers config, got {type(config).__name__}")
        self.settings, self.stats = settings, stats
        self._has_config, self._config, self._ownership = config is not None, config, self._nobody()
        self._is_bound, self._is_guess, self._deferred = False, False, settings.prefill == "deferred"
        super().__init__(layer_class_to_replicate=self._new_layer)
        if config is not None:
            self._bind(config)

    def full_layer(self, index: int, latent_rank: int | None) -> CompressedLayer | None:
        """The layer of full attention ``index``; ``None`` leaves it to the library. ``latent_rank``: see ``IsoQuantLayer``."""
        raise NotImplementedError

    def hybrid_layer(self, index: int, number_of_states: int) -> CompressedLayer:
        """The layer ``index`` of full attention beside linear attention."""
        raise NotImplementedError

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
        packed = [index for index, layer in enumerate(layers) if isinstance(layer, CompressedLayer)]
        self._layers, self._first, self._last = layers, *((packed[0], packed[-1]) if packed else (0, -1))

    def _make_layers(self, config: PreTrainedConfig) -> list:
        return make_layers(config, self.full_layer, self.hybrid_layer)

    def _nobody(self) -> Ownership:
        return Ownership(type(self).__name__)

    def _bind(self, config: PreTrainedConfig) -> None:
        layers = self._make_layers(config)
        self._is_bound, self._config = True, config
        if layers:
            self.layers, self.layer_class_to_replicate = layers, None

    def _confirm(self) -> None:
        """Before the first tokens: the model that asked first may have been a user's module with a config of its own."""
        self._is_guess = False
        config = config_of_caller(PreTrainedModel)
        if config is None or config is self._config:
            return
        kinds = [type(layer) for layer in self._make_layers(config)]
        if kinds != [type(layer) for layer in self._layers]:
            self._config = config
            self._start_over()

    def _new_layer(self) -> CompressedLayer:
        """The next layer of a cache that knows no config."""
        layer = self.full_layer(len(self._layers), None)
        layer.deferred = self._deferred
        return layer

    def _packed_layers(self) -> list[CompressedLayer]:
        return [layer for layer in self._layers if isinstance(layer, CompressedLayer)]

    def _num_sequences(self) -> int | None:
        """Sequences of the batch; ``None`` while no packed layer holds a token."""
        buffers = (layer.exact.key_buffer for layer in self._packed_layers())
        return next((buffer.shape[0] for buffer in buffers if buffer is not None), None)

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
        self.layers, self.layer_class_to_replicate, self._ownership = [], self._new_layer, self._nobody()
        if self._is_bound:
            self._bind(self._config)
            if recorded:
                self.activate_past_recording()

    # ---- transformers' interface

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Adds keys ``[B, H, N, D]`` and values ``[B, H, N, Dv]`` of a layer; returns handles of all of them.

        Raises:
            ValueError: see ``CompressedLayer.update``; also a second model on a cache that is not empty.
            TypeError: no tensors.
        """
        if not (isinstance(key_states, torch.Tensor) and isinstance(value_states, torch.Tensor)):
            check_tensors(key_states, value_states)
        layers = self.layers
        if self._is_guess:
            self._confirm()
            layers = self._layers
        if not self._is_bound and not layers:
            warnings.warn(
                f"{type(self).__name__} found no model config among the callers: every layer is taken for full attention and a "
                f"sliding window, if the model has one, keeps all tokens. Pass {type(self).__name__}(config=model.config).",
                stacklevel=2,
            )
        self._ownership.check_whole()
        check_layer(layer_idx, 0)
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
        """Tokens that the first and the last packed layer hold; those of a forward that failed midway do not count.

        Raises:
            ValueError: ``layer_idx`` is no index.
        """
        check_layer(layer_idx)
        layers = self._layers
        if layer_idx == 0 and layers and isinstance(layers[self._first], CompressedLayer):
            return min(layers[self._first].get_seq_length(), layers[self._last].get_seq_length())
        return super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask for ``layer_idx`` covers.

        Raises:
            ValueError: ``layer_idx`` is no index, or a forward without a token, which is how ``generate`` calls the model when
                its prompt is not longer than what the cache holds.
        """
        check_layer(layer_idx)
        check_query_length(query_length, self.get_seq_length())
        layers = self.layers
        if layer_idx < len(layers) and isinstance(layers[layer_idx], CompressedLayer):
            return self.get_seq_length() + query_length, 0
        return super().get_mask_sizes(query_length, layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens.

        Raises:
            ValueError: a positive number, or more tokens than there are; nothing was changed.
        """
        for index, layer in enumerate(self.layers):
            if isinstance(layer, CompressedLayer):
                check_crop(tokens_to_remove, layer.get_seq_length(), index)
        for layer in sorted(self.layers, key=is_plain):  # others may refuse
            layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Sequence ``beam_idx[i]`` takes place ``i``.

        Raises:
            ValueError: ``beam_idx`` is no vector of integers, or one is out of range; nothing was changed. On another device
                than the CPU the values are not looked at, for which it would have to be waited for.
        """
        super().reorder_cache(as_rows("beam_idx", beam_idx, self._num_sequences(), masks=False))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times, one after another.

        Raises:
            ValueError: ``repeats`` is no integer of at least 1; nothing was changed.
        """
        check_count("repeats", repeats, 1)
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps these sequences, in this order; a list and a mask of bools are taken, too.

        Raises:
            ValueError: ``indices`` is no vector of integers or bools, or one is out of range, as in ``reorder_cache``; negative
                ones count from the end; nothing was changed.
        """
        super().batch_select_indices(as_rows("indices", indices, self._num_sequences(), masks=True))

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
