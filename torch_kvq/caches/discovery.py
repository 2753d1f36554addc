"""How a cache that was built without arguments finds the model that uses it, and turns its config into layers."""

import sys
import weakref

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer
from transformers.configuration_utils import PreTrainedConfig

from .layer import IsoQuantLayer
from .settings import IsoQuantSettings
from .stats import CacheStats

_MAX_FRAMES = 24


class IsoQuantHybridLayer(LinearAttentionLayer, IsoQuantLayer):
    """A layer with a linear-attention state and packed keys and values (Falcon-H1 and the like)."""

    is_compileable = False
    is_croppable = False

    def __init__(self, settings, stats, index=0, number_of_states=1) -> None:
        IsoQuantLayer.__init__(self, settings, stats, index)
        _init_linear(self, number_of_states)
        self.is_initialized = False

    def lazy_initialization(self, *args, **kwargs) -> None:
        if len(args) == 2 and not kwargs:
            IsoQuantLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        IsoQuantLayer.reset(self)

    def reorder_cache(self, beam_idx) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        IsoQuantLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        IsoQuantLayer.crop(self, tokens_to_remove)

    def activate_past_recording(self) -> None:
        LinearAttentionLayer.activate_past_recording(self)
        IsoQuantLayer.activate_past_recording(self)


def _init_linear(layer, number_of_states: int) -> None:
    keep = dict(layer.__dict__)
    try:
        LinearAttentionLayer.__init__(layer, number_of_states=number_of_states)
    except TypeError:  # transformers 5.17 has one state
        LinearAttentionLayer.__init__(layer)
    layer.__dict__.update({name: value for name, value in keep.items() if name != "is_initialized"})


def make_layers(config: PreTrainedConfig, settings: IsoQuantSettings, stats: CacheStats) -> list:
    """The layers that ``DynamicCache(config)`` has, with full attention packed and every other kind left as it is."""
    decoder = config.get_text_config(decoder=True)
    rank = getattr(decoder, "kv_lora_rank", None)
    layers = []
    for index, layer in enumerate(DynamicCache(config=decoder).layers):
        if type(layer) is DynamicLayer:
            layer = IsoQuantLayer(settings, stats, index, rank)
        elif type(layer) is LinearAttentionAndFullAttentionLayer:
            layer = IsoQuantHybridLayer(settings, stats, index, getattr(layer, "number_of_states", 1))
        layers.append(layer)
    return layers


def config_of_caller(depth: int = 2) -> PreTrainedConfig | None:
    """The config of the nearest model among the calling frames: ``self`` of a module, or ``config`` inside transformers."""
    for frame in _frames(depth + 1):
        module, config = frame.f_locals.get("self"), frame.f_locals.get("config")
        if isinstance(module, torch.nn.Module) and isinstance(getattr(module, "config", None), PreTrainedConfig):
            return module.config
        if isinstance(config, PreTrainedConfig) and frame.f_globals.get("__name__", "").startswith("transformers"):
            return config
    return None


def prompt_is_chunked(depth: int = 2) -> bool:
    """Whether a calling ``generate`` was told to feed the prompt in chunks (``prefill_chunk_size``)."""
    for frame in _frames(depth + 1):
        options = frame.f_locals.get("generation_config")
        if getattr(options, "prefill_chunk_size", None):
            return True
    return False


def module_of_caller(depth: int = 2) -> weakref.ref | None:
    """The attention module that called ``update``, or ``None`` where it cannot be told."""
    for frame in _frames(depth + 1, 2):
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            return weakref.ref(module)
    return None


def _frames(depth: int, most: int = _MAX_FRAMES):
    if torch.compiler.is_compiling():
        return
    frame = sys._getframe(depth)
    for _ in range(most):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
