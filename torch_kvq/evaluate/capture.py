"""Queries and keys of a model's full-attention layers, as its attention function gets them: after rope and norms."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ..attention.interface import kvq_attention_forward

NAME = "kvq_capture"
_record: ContextVar[Callable | None] = ContextVar("record", default=None)


@dataclasses.dataclass(frozen=True)
class Places:
    """Which of ``num_tokens`` tokens the queries at ``positions [M]`` see, which are exact, and which can be selected.

    Args:
        num_sinks, window_len: first and last tokens that a query reads in any case; the window ends with its own token.
        prefix_len: tokens from which statistics are learnt.
    """

    positions: torch.Tensor
    num_tokens: int
    num_sinks: int
    window_len: int
    prefix_len: int

    @functools.cached_property
    def visible(self) -> torch.Tensor:
        """``[M, T]`` bool."""
        return torch.arange(self.num_tokens, device=self.positions.device) <= self.positions[:, None]

    @functools.cached_property
    def selectable(self) -> torch.Tensor:
        """``[M, T]`` bool: seen, but neither sinks nor window."""
        tokens = torch.arange(self.num_tokens, device=self.positions.device)
        return (tokens >= self.num_sinks) & (tokens <= self.positions[:, None] - self.window_len)

    @functools.cached_property
    def exact(self) -> torch.Tensor:
        """``[M, T]`` bool: sinks and window."""
        return self.visible & ~self.selectable

    @property
    def indexed(self) -> slice:
        """The tokens of the prefix that lie between its sinks and its window."""
        return slice(self.num_sinks, self.prefix_len - self.window_len)


@dataclasses.dataclass(frozen=True)
class LayerStates:
    """One layer: what a selector may look at.

    Attributes:
        layer: index in the model.
        query: ``[B, G * H, M, D]``, of the scored tokens.
        key: ``[B, H, T, D]``, of all tokens.
        query_mean, query_moment: ``[B, H, D]`` float32, of a kv head's query heads over the prefix: mean and second moment.
        scale, softcap: logits are ``scale * q . k``, then ``softcap * tanh(logits / softcap)`` unless softcap is 0.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    query_mean: torch.Tensor
    query_moment: torch.Tensor
    scale: float
    softcap: float
    places: Places

    @property
    def group(self) -> int:
        """Query heads a kv head."""
        return self.query.shape[1] // self.key.shape[1]

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, G * H, ...]`` as ``[B, H, G, ...]``."""
        return x.unflatten(1, (self.key.shape[1], self.group))

    def logits(self, key: torch.Tensor | None = None) -> torch.Tensor:
        """Logits before the softcap, ``[B, G * H, M, T]`` float32, of tokens not yet written too.

        Args:
            key: ``[B, H, T, D]`` in place of the true keys.
        """
        key = (self.key if key is None else key).float().transpose(-1, -2).unsqueeze(2)
        return self.scale * (self.grouped(self.query.float()) @ key).flatten(1, 2)

    def log_shares(self, estimate: torch.Tensor | None = None) -> torch.Tensor:
        """Logarithm of the softmax over the tokens that each query sees, ``[B, G * H, M, T]``; -inf for others.

        Args:
            estimate: logits ``[B, G * H, M, T]`` in place of the true ones of tokens that can be selected.
        """
        logits = self.logits()
        if estimate is not None:
            logits = torch.where(self.places.selectable, estimate, logits)
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits.masked_fill(~self.places.visible, -torch.inf).log_softmax(-1)

    def shares(self, estimate: torch.Tensor | None = None) -> torch.Tensor:
        """``exp`` of :meth:`log_shares`."""
        return self.log_shares(estimate).exp()


def capturing_attention_forward(module, query, key, value, attention_mask, **kwargs):
    """What the model computes anyhow; queries and keys of full-attention layers are shown to ``_record``."""
    record = _record.get()
    if record is not None and not kwargs.get("sliding_window") and not _is_chunked(module):
        record(module, query, key, kwargs)
    return kvq_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _is_chunked(module) -> bool:
    """Whether the mask of a layer ends at its chunk, which its arguments do not tell."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    return "chunked_attention" in kinds and kinds[module.layer_idx] == "chunked_attention"


AttentionInterface.register(NAME, capturing_attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextlib.contextmanager
def _captured_by(model, record: Callable) -> Iterator[None]:
    before, token = model.config._attn_implementation, _record.set(record)
    try:
        model.set_attn_implementation(NAME)
        yield
    finally:
        _record.reset(token)
        model.set_attn_implementation(before)


@torch.inference_mode()
def capture(model, input_ids: torch.Tensor, places: Places) -> list[LayerStates]:
    """What the model's full-attention layers are given for ``input_ids [B, T]``, in their order; one forward a sequence."""
    sequences: list[list[LayerStates]] = []

    def record(module, query: torch.Tensor, key: torch.Tensor, options: dict) -> None:
        prefix = query[:, :, : places.prefix_len].float().unflatten(1, (key.shape[1], -1))
        states = LayerStates(
            layer=getattr(module, "layer_idx", len(sequences[-1])),
            query=query[:, :, places.positions],
            key=key.clone(),
            query_mean=prefix.mean((2, 3)),
            query_moment=prefix.square().mean((2, 3)),
            scale=options.get("scaling") or query.shape[-1] ** -0.5,
            softcap=options.get("softcap") or 0.0,
            places=places,
        )
        sequences[-1].append(states)

    with _captured_by(model, record):
        for ids in input_ids.split(1):
            sequences.append([])
            model.base_model(input_ids=ids, use_cache=False)
    return [_joined(layers) for layers in zip(*sequences)]


def _joined(states: tuple[LayerStates, ...]) -> LayerStates:
    """One layer's states of several sequences side by side."""
    names = ("query", "key", "query_mean", "query_moment")
    return dataclasses.replace(states[0], **{name: torch.cat([getattr(each, name) for each in states]) for name in names})
