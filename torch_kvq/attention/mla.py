"""Latent attention (MLA) on the packed latent.

DeepSeek-style models cache the latent ``c [B, 1, T, R]`` as keys and the shared rope key ``[B, 1, T, r]`` as values, and
expand them before attention: ``kv_b_proj(c)`` is viewed per head and split into ``k_nope`` and ``v``; ``k_nope`` and the
rope key are copied into one key tensor. The handles below follow these steps without data. Attention then runs in the
absorbed form: with ``W_uk``, ``W_uv`` the two parts of the projection, ``q.k = (q_nope W_uk).c + q_rope.k_rope`` and
``out = (sum_t p_t c_t) W_uv``, so the latent is key and value at once and is read packed.
"""

import dataclasses

import torch
import torch.nn.functional as F

from .handle import KVHandle, LazyTensor, handles, is_handle
from .pieces import Pieces, upper_left_causal

_MAX_BIAS_NUMEL = 1 << 24


class Projected(LazyTensor):
    """``F.linear(latent, weight)``, then ``view`` and ``transpose`` steps: at last ``[B, heads, T, nope + v]``."""

    pieces: Pieces
    weight: torch.Tensor
    steps: list

    @staticmethod
    def make(shape, pieces: Pieces, weight: torch.Tensor, steps: list) -> "Projected":
        node = Projected.of_shape(shape, pieces.exact_keys)
        node.pieces, node.weight, node.steps = pieces, weight, steps
        return node

    def dense(self, reason: str) -> torch.Tensor:
        x = F.linear(self.pieces.dense("k", reason), self.weight)
        for name, args in self.steps:
            x = getattr(x, name)(*args)
        return x


class Part(LazyTensor):
    """Channels ``low .. high`` of a projection, perhaps transposed."""

    source: Projected
    low: int
    high: int

    @staticmethod
    def make(source: Projected, low: int, high: int) -> "Part":
        part = Part.of_shape((*source.shape[:-1], high - low), source)
        part.source, part.low, part.high = source, low, high
        return part

    def dense(self, reason: str) -> torch.Tensor:
        return self.source.dense(reason)[..., self.low : self.high]


class RopeKeys(LazyTensor):
    """The rope key expanded over the heads, ``[B, heads, T, r]``."""

    pieces: Pieces

    @staticmethod
    def make(pieces: Pieces, heads: int) -> "RopeKeys":
        batch, _, _, dim = pieces.exact_values.shape
        keys = RopeKeys.of_shape((batch, heads, pieces.num_tokens, dim), pieces.exact_values)
        keys.pieces = pieces
        return keys

    def dense(self, reason: str) -> torch.Tensor:
        return self.pieces.dense("v", reason).expand(self.shape)


class Assembled(LazyTensor):
    """A new tensor filled by slices of its last dim, ``{low: part}``; perhaps transposed."""

    parts: dict
    transposed: bool

    @staticmethod
    def make(shape, like: torch.Tensor, parts: dict, transposed: bool = False) -> "Assembled":
        node = Assembled.of_shape(shape, like)
        node.parts, node.transposed = parts, transposed
        return node

    def dense(self, reason: str) -> torch.Tensor:
        x = torch.cat([self.parts[low].dense(reason) for low in sorted(self.parts)], -1)
        return x.transpose(-1, -2) if self.transposed else x


class Slot(LazyTensor):
    """``assembled[..., low:high]`` before something is copied into it."""

    buffer: Assembled
    low: int


@handles(F.linear)
def _linear(x, weight, bias=None):
    if not (is_handle(x, "k") and x.repeat == 1 and x.pieces.layer.is_latent and bias is None):
        return NotImplemented
    if isinstance(weight, LazyTensor):
        return NotImplemented
    batch, _, tokens, _ = x.shape
    return Projected.make((batch, 1, tokens, weight.shape[0]), x.pieces, weight, [])


@handles(torch.Tensor.view)
def _view(x, *shape):
    shape = shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape
    if not isinstance(x, Projected) or not all(isinstance(size, int) for size in shape):
        return NotImplemented
    known = 1
    for size in shape:
        known *= size if size != -1 else 1
    full = tuple(x.numel() // known if size == -1 else size for size in shape)
    return Projected.make(full, x.pieces, x.weight, [*x.steps, ("view", full)])


@handles(torch.Tensor.transpose, torch.transpose)
def _transpose(x, dim0, dim1):
    if isinstance(x, Projected):
        shape = list(x.shape)
        shape[dim0], shape[dim1] = shape[dim1], shape[dim0]
        return Projected.make(shape, x.pieces, x.weight, [*x.steps, ("transpose", (dim0, dim1))])
    if isinstance(x, Assembled) and {dim0 % 4, dim1 % 4} == {2, 3}:
        return Assembled.make((*x.shape[:2], x.shape[3], x.shape[2]), x, x.parts, not x.transposed)
    return NotImplemented


@handles(torch.split, torch.Tensor.split)
def _split(x, sizes, dim=0):
    if not (isinstance(x, Projected) and dim in (-1, x.dim() - 1) and isinstance(sizes, (list, tuple))):
        return NotImplemented
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return tuple(Part.make(x, low, high) for low, high in zip(edges, edges[1:]))


@handles(torch.Tensor.expand)
def _expand(x, *shape):
    if not (is_handle(x, "v") and x.pieces.layer.is_latent and len(shape) == 4 and shape[0] == shape[2] == shape[3] == -1):
        return NotImplemented
    return RopeKeys.make(x.pieces, shape[1])


@handles(torch.Tensor.new_empty)
def _new_empty(x, *shape, **kwargs):
    if not isinstance(x, Projected) or kwargs:
        return NotImplemented
    return Assembled.make(shape[0] if len(shape) == 1 else shape, x, {})


@handles(torch.Tensor.__getitem__)
def _getitem(x, index):
    last = isinstance(x, Assembled) and isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis
    if not last or not isinstance(index[1], slice):
        return NotImplemented
    low, high, _ = index[1].indices(x.shape[-1])
    slot = Slot.of_shape((*x.shape[:-1], high - low), x)
    slot.buffer, slot.low = x, low
    return slot


@handles(torch.Tensor.copy_)
def _copy(target, source, non_blocking=False):
    if not isinstance(target, Slot) or not isinstance(source, (Part, RopeKeys)):
        return NotImplemented
    target.buffer.parts[target.low] = source
    return target


@dataclasses.dataclass(frozen=True)
class Absorbed:
    """The parts of absorbed attention found behind expanded keys and values."""

    pieces: Pieces
    rope: Pieces
    up_key: torch.Tensor  # W_uk [heads, nope, R]
    up_value: torch.Tensor  # W_uv [heads, v, R]

    def query(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``query [B, heads, M, nope + r]`` as ``[B, heads, M, R]`` against the latent, and its rope part."""
        nope = self.up_key.shape[1]
        return torch.einsum("bhmd,hdr->bhmr", query[..., :nope], self.up_key), query[..., nope:].contiguous()

    def output(self, latent: torch.Tensor) -> torch.Tensor:
        """``[B, heads, M, R]`` sums of latents as values ``[B, heads, M, v]``."""
        return torch.einsum("bhmr,hvr->bhmv", latent, self.up_value)

    def attend(self, query: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
        """Softmax attention ``[B, heads, M, v]``; the rope scores enter as an additive mask, for some queries at a time."""
        batch, heads, tokens, _ = query.shape
        rows = max(1, _MAX_BIAS_NUMEL // (batch * heads * self.pieces.num_tokens))
        outs = []
        for start in range(0, tokens, rows):
            part = slice(start, start + rows)
            absorbed, rope = self.query(query[:, :, part])
            bias = self.rope.scores(rope.float()) * scale
            if mask is not None:
                seen = mask if mask.shape[2] == 1 else mask[:, :, part]
                bias = bias.masked_fill(~seen, -torch.inf) if mask.dtype == torch.bool else bias + seen
            outs.append(self.output(self.pieces.attend(absorbed, bias, scale)[0]))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        absorbed, rope = self.query(query)
        return self.pieces.scores(absorbed) + self.rope.scores(rope)

    def weighted_values(self, weights: torch.Tensor) -> torch.Tensor:
        """``weights @ values``, as attention of a zero query whose mask is the logarithm of the weights."""
        query = weights.new_zeros((*weights.shape[:3], self.pieces.exact_keys.shape[-1]))
        latent, lse = self.pieces.attend(query, weights.float().log(), 1.0)
        return self.output(latent * torch.exp(lse).unsqueeze(-1).to(latent.dtype))


def _absorb(source: Projected, nope: int, low: int) -> Absorbed:
    """``nope`` channels of ``k_nope`` come first in a head's projection, the values from ``low`` on."""
    heads = source.shape[1]
    weight = source.weight.unflatten(0, (heads, -1))
    pieces = source.pieces
    rope = dataclasses.replace(pieces, exact_keys=pieces.exact_values, keys=pieces.values)
    latent = dataclasses.replace(pieces, values=[])
    return Absorbed(latent, rope, weight[:, :nope], weight[:, low:])


def _key_parts(key) -> tuple[Part, RopeKeys] | None:
    if not isinstance(key, Assembled) or len(key.parts) != 2:
        return None
    nope, rope = (key.parts[low] for low in sorted(key.parts))
    known = isinstance(nope, Part) and isinstance(rope, RopeKeys) and nope.low == 0 and nope.source.dim() == 4
    return (nope, rope) if known and nope.source.pieces.same_as(rope.pieces) else None


@handles(F.scaled_dot_product_attention)
def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    parts = _key_parts(key)
    if parts is None or not isinstance(value, Part) or value.source is not parts[0].source or enable_gqa:
        return NotImplemented
    nope, pieces = parts[0], parts[0].source.pieces
    if pieces.is_packed and (dropout_p or isinstance(query, LazyTensor)):
        return NotImplemented
    pieces.layer.saw_mask(attn_mask)
    if pieces.is_packed:
        mask = upper_left_causal(query, pieces.num_tokens) if is_causal else attn_mask
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        out = _absorb(nope.source, nope.high, value.low).attend(query, mask, scale)
    else:
        dense = (key.dense("sdpa"), value.dense("sdpa"))
        out = F.scaled_dot_product_attention(query, *dense, attn_mask, dropout_p, is_causal, scale=scale)
    pieces.layer.answered(pieces.is_packed)
    return out


@handles(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
def _matmul(left, right):
    if isinstance(left, LazyTensor) or isinstance(right, KVHandle):
        return NotImplemented
    parts = _key_parts(right)
    if parts is not None and right.transposed:
        source = parts[0].source
        if not source.pieces.is_packed:
            return left @ right.dense("matmul")
        return _absorb(source, parts[0].high, parts[0].high).scores(left)
    if isinstance(right, Part):
        pieces = right.source.pieces
        pieces.layer.saw_weights(left)
        packed = pieces.is_packed
        out = _absorb(right.source, right.low, right.low).weighted_values(left) if packed else left @ right.dense("matmul")
        pieces.layer.answered(pieces.is_packed)
        return out
    return NotImplemented
