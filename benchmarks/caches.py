"""The caches that ``generate.py`` compares, and what they hold."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers import DynamicCache, QuantizedCache
from transformers.cache_utils import Cache

from torch_kvq import IsoQuantCache, RaBitQSparseCache

# From a model's config; a cache whose package is missing raises ImportError. Ours is first: on a GPU the others may fill it.
CACHES: dict[str, Callable[[object], Cache]] = {
    "isoquant": IsoQuantCache,
    "dynamic": lambda config: DynamicCache(config=config),
    "quanto": lambda config: QuantizedCache("quanto", config, nbits=4),
    "hqq": lambda config: QuantizedCache("hqq", config, nbits=4),
}
PACKAGES = ("optimum-quanto", "hqq")


def resident_bytes(cache: Cache) -> int:
    """Bytes that a cache keeps: ours counts itself, the library's is the sum of the storages of its tensors."""
    if isinstance(cache, IsoQuantCache | RaBitQSparseCache):
        return cache.nbytes
    storages = {}
    for layer in cache.layers:
        for tensor in _tensors([vars(layer)]):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def _tensors(parts: list) -> list[torch.Tensor]:
    """The plain tensors in nested dicts, tuples and quantised tensors, which are subclasses that wrap others."""
    found = []
    for part in parts:
        if isinstance(part, torch.Tensor):
            wrapped = getattr(part, "__tensor_flatten__", None)
            found += _tensors([getattr(part, name) for name in wrapped()[0]]) if wrapped else [part]
        elif isinstance(part, dict):
            found += _tensors(list(part.values()))
        elif isinstance(part, (list, tuple)):
            found += _tensors(list(part))
    return found


def fill(cache: Cache, model, batch: int, tokens: int) -> None:
    """Gives ``cache`` random keys and values of ``tokens`` tokens, layer by layer, as a prompt of the model would."""
    config = model.config
    heads, dim = config.num_key_value_heads, config.head_dim
    for layer in range(config.num_hidden_layers):
        query, keys, values = (
            torch.randn(batch, h, t, dim, dtype=model.dtype, device=model.device)
            for h, t in ((config.num_attention_heads, 1), (heads, tokens), (heads, tokens))
        )
        keys, values = cache.update(keys, values, layer)
        F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)  # an answered layer packs its tokens
        del query, keys, values  # before the next layer's are made
