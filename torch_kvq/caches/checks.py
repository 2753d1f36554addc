"""What ``update`` refuses, before anything is changed."""

import math
import reprlib

import torch

from ..checks import check_type
from ..codecs.rotation import check_head_dim

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_states(layer, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
    """Raises ``ValueError`` for states that ``layer`` cannot take; see ``CompressedLayer.update``.

    States of the form that it took last, as in every decode step, are looked at for gradients and numbers only.
    """
    form = (key_states.shape, key_states.dtype, key_states.device, value_states.shape, value_states.dtype, value_states.device)
    if form != layer.accepted_form:
        _check_form(layer, key_states, value_states)
    if torch.is_grad_enabled():
        for name, x in (("key_states", key_states), ("value_states", value_states)):
            if x.requires_grad:
                raise ValueError(f"{name} must not require gradients: a packed cache cannot be trained through; use no_grad")
    if key_states.is_cpu or key_states.shape[2] > 1:  # elsewhere a decode step would wait for the device
        for name, x in (("key_states", key_states), ("value_states", value_states)):
            if not is_finite(x):
                raise ValueError(f"{name} must be finite, got inf or nan in layer {layer.index}")
    layer.accepted_form = form


def _check_form(layer, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
    """Shape, dtype and device: fit to be packed, and those of the tokens that the layer holds."""
    for name, x in (("key_states", key_states), ("value_states", value_states)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be [batch, heads, tokens, head_dim], got shape {tuple(x.shape)}")
    if key_states.shape[:3] != value_states.shape[:3]:
        raise ValueError(
            "value_states must have the batch, heads and tokens of key_states "
            f"{tuple(key_states.shape[:3])}, got {tuple(value_states.shape[:3])}"
        )
    if key_states.shape[2] == 0:
        raise ValueError("key_states must hold at least one token, got 0")
    if layer.exact.key_buffer is None:
        _check_first(key_states, value_states)
    else:
        _check_same(layer, "key_states", layer.exact.key_buffer, key_states)
        _check_same(layer, "value_states", layer.exact.value_buffer, value_states)


def _check_first(key_states: torch.Tensor, value_states: torch.Tensor) -> None:
    check_head_dim("key_states", key_states.shape[-1])
    check_head_dim("value_states", value_states.shape[-1])
    for name, x in (("key_states", key_states), ("value_states", value_states)):
        if x.dtype not in _DTYPES:
            raise ValueError(f"{name} must be float32, bfloat16 or float16, got {x.dtype}")
    if value_states.device != key_states.device:
        raise ValueError(f"value_states must be on {key_states.device} as key_states, got {value_states.device}")


def _check_same(layer, name: str, held: torch.Tensor, x: torch.Tensor) -> None:
    if (x.shape[0], x.shape[1], x.shape[3]) != (held.shape[0], held.shape[1], held.shape[3]):
        raise ValueError(
            f"{name} must keep batch, heads and head dim {(held.shape[0], held.shape[1], held.shape[3])} of layer "
            f"{layer.index}, got {(x.shape[0], x.shape[1], x.shape[3])}; for other sequences call reset() or take a new cache"
        )
    if x.dtype != held.dtype:
        raise ValueError(f"{name} must keep dtype {held.dtype} of layer {layer.index}, got {x.dtype}")
    if x.device != held.device:
        raise ValueError(f"{name} must stay on {held.device} with layer {layer.index}, got {x.device}")


def check_tensors(key_states, value_states) -> None:
    """Raises ``TypeError`` unless both are tensors."""
    check_type("key_states", key_states, torch.Tensor, "a tensor")
    check_type("value_states", value_states, torch.Tensor, "a tensor")


def check_layer(layer_idx: int, least: int | None = None) -> None:
    """Raises ``ValueError`` unless ``layer_idx`` is an integer, of at least ``least``."""
    if not isinstance(layer_idx, int) or (least is not None and layer_idx < least):
        raise ValueError(f"layer_idx must be the index of a layer, got {layer_idx!r}")


def check_query_length(query_length: int, held: int) -> None:
    """Raises ``ValueError`` for a forward without a token on a cache that holds ``held``."""
    if isinstance(query_length, int) and query_length == 0:
        raise ValueError(
            f"input_ids must go on behind the {held} tokens that the cache holds, got no more than these; "
            "for another text call reset() or take a new cache"
        )


def as_rows(name: str, x: torch.Tensor | list | tuple, count: int | None, masks: bool) -> torch.Tensor:
    """A vector of int64, or of bools if ``masks`` are taken, by which sequences of a batch of ``count`` are chosen.

    Raises:
        ValueError: ``x`` is something else, or, where it is known, chooses a sequence that is not there.
    """
    if isinstance(x, list | tuple) and all(isinstance(each, int) for each in x):
        x = torch.tensor(x, dtype=None if x else torch.long)
    good = isinstance(x, torch.Tensor) and x.dim() == 1 and not x.is_floating_point() and not x.is_complex()
    if not good or (x.dtype == torch.bool and not masks):
        got = f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else reprlib.repr(x)
        raise ValueError(f"{name} must be a vector of integers, one a sequence, got {got}")
    if x.dtype == torch.bool:
        if count not in (None, len(x)):
            raise ValueError(f"{name} must have a bool for each of the {count} sequences, got {len(x)}")
        return x
    x = x.long()  # torch would take uint8 for a mask
    if count is not None and x.is_cpu and len(x):
        (least, most), first = (bound.item() for bound in x.aminmax()), -count if masks else 0
        if least < first or most >= count:
            got = least if least < first else most
            raise ValueError(f"{name} must be from {first} to {count - 1}, got {got}")
    return x


def is_finite(x: torch.Tensor) -> bool:
    """Whether all of ``x`` is finite: its sum is, or else, since sums overflow, each element."""
    return math.isfinite(x.sum().item()) or bool(torch.isfinite(x).all())
