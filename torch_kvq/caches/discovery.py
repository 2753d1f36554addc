"""How a cache that was built without arguments finds the model that uses it, and turns its config into layers."""

import sys
import weakref

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer
from transformers.configuration_utils import PreTrainedConfig

from .hybrid import IsoQuantHybridLayer
from .layer import IsoQuantLayer
from .settings import IsoQuantSettings
from .stats import CacheStats

_MAX_FRAMES = 48


def make_layers(config: PreTrainedConfig, settings: IsoQuantSettings, stats: CacheStats) -> list:
    """The layers that ``DynamicCache(config)`` has, with full attention packed and every other kind left as it is."""
    decoder = config.get_text_config(decoder=True)
    rank, crossed = getattr(decoder, "kv_lora_rank", None), getattr(decoder, "cross_attention_layers", None) or ()
    layers = []
    for index, layer in enumerate(DynamicCache(config=decoder).layers):
        if type(layer) is DynamicLayer and index not in crossed:  # those hold an image, not the text
            layer = IsoQuantLayer(settings, stats, index, rank)
        elif type(layer) is LinearAttentionAndFullAttentionLayer:
            layer = IsoQuantHybridLayer(settings, stats, index, layer.number_of_states)
        layers.append(layer)
    return layers


@torch.compiler.disable  # breaks the graph: what dynamo traces has no frames
def config_of_caller(kind: type = torch.nn.Module, depth: int = 2) -> PreTrainedConfig | None:
    """The config of the nearest model among the calling frames: ``self`` of a ``kind``, or ``config`` inside transformers."""
    for frame in _frames(depth + 1):
        module, config = frame.f_locals.get("self"), frame.f_locals.get("config")
        if isinstance(module, kind) and isinstance(getattr(module, "config", None), PreTrainedConfig):
            return module.config
        if isinstance(config, PreTrainedConfig) and frame.f_globals.get("__name__", "").startswith("transformers"):
            return config
    return None


@torch.compiler.disable
def generation_options(depth: int = 2) -> GenerationConfig | None:
    """The options of the nearest ``generate`` among the calling frames."""
    for frame in _frames(depth + 1):
        options = frame.f_locals.get("generation_config")
        if isinstance(options, GenerationConfig):
            return options
    return None


def module_of_caller(depth: int = 2) -> weakref.ref | None:
    """The module two frames around ``depth``, that is the attention that called ``update``; ``None`` if it cannot be told."""
    if torch.compiler.is_compiling():
        return None
    for frame in _frames(depth + 1, 2):
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            return weakref.ref(module)
    return None


def is_in_a_model() -> bool:
    """Whether any of the calling frames is a module's; taken for granted where ``torch.compile`` hides them."""
    if torch.compiler.is_compiling():
        return True
    return any(isinstance(frame.f_locals.get("self"), torch.nn.Module) for frame in _frames(2))


def _frames(depth: int, most: int = _MAX_FRAMES):
    frame = sys._getframe(depth)
    for _ in range(most):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
