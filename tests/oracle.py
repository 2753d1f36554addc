"""The dense twin of a compressed cache: the same codes and the same life of a layer, but attention sees dense tensors.

What a model computes with :func:`oracle_cache` differs from the real thing only in where attention reads its keys and
values from, so logits must agree to rounding.
"""

from functools import partial

import torch
from transformers import Cache

from torch_kvq import IsoQuantCache
from torch_kvq._requirements import cache_keyword
from torch_kvq.attention.handle import KVHandle
from torch_kvq.caches.isoquant_layer import IsoQuantLayer


def _dense_update(layer: IsoQuantLayer, *args, **kwargs):
    keys, values = type(layer).update(layer, *args, **kwargs)
    if not isinstance(keys, KVHandle) or not keys.pieces.is_packed:
        return keys, values
    return keys.pieces.rebuilt("k"), keys.pieces.rebuilt("v")


def oracle_cache(config, **options) -> IsoQuantCache:
    """An ``IsoQuantCache`` whose packed layers hand out dense tensors."""
    cache = IsoQuantCache(config, **options)
    for layer in cache.layers:
        if isinstance(layer, IsoQuantLayer):
            layer.update = partial(_dense_update, layer)
    return cache


@torch.no_grad()
def forced_logits(model, cache: Cache, pieces: list[torch.Tensor], attention_mask=None) -> torch.Tensor:
    """Logits of every piece of ``input_ids [B, N]`` fed in turn, joined: ``[B, sum N, vocabulary]``."""
    logits, seen = [], 0
    for piece in pieces:
        seen += piece.shape[1]
        extra = {}
        if attention_mask is not None:
            extra["attention_mask"] = attention_mask[:, :seen]
            places = attention_mask.long().cumsum(1) - 1
            extra["position_ids"] = places[:, seen - piece.shape[1] : seen].clamp_min(0)
        logits.append(model(input_ids=piece, use_cache=True, **{cache_keyword(): cache}, **extra).logits)
    return torch.cat(logits, 1)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).double().norm() / theirs.double().norm()).item()
