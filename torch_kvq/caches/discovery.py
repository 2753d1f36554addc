"""How a cache that was built without arguments finds the model that uses it, and turns its config into layers."""

import sys
import weakref
from collections.abc import Callable

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer
from transformers.configuration_utils import PreTrainedConfig

_MAX_FRAMES = 48


def make_layers(config: PreTrainedConfig, full: Callable, hybrid: Callable) -> list:
    """The layers that ``DynamicCache(config)`` has, of which other ones take the place of full attention.

    Args:
        config: of the model or of its text part.
        full: makes the layer ``full(index, latent_rank)``, ``None`` to leave it as it is.
        hybrid: makes the layer ``hybrid(index, number_of_states)`` for full attention beside linear attention.
    """
    decoder = config.get_text_config(decoder=True)
    rank, crossed = getattr(decoder, "kv_lora_rank", None), getattr(decoder, "cross_attention_layers", None) or ()
    layers = []
    for index, layer in enumerate(DynamicCache(config=decoder).layers):
        if type(layer) is DynamicLayer and index not in crossed:  # those hold an image, not the text
            layer = full(index, rank) or layer
        elif type(layer) is LinearAttentionAndFullAttentionLayer:
            layer = hybrid(index, layer.number_of_states)
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
