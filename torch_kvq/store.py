"""Buffers of one layer: packed tokens and exact tokens. They grow, shrink, follow beams and know their bytes.

Buffers are written in place beyond their length and replaced when they grow, so a view of the first ``length`` tokens
that was taken earlier stays valid.
"""

from collections.abc import Callable

import torch

from . import ops
from .codecs.isoquant import IsoQuantConfig
from .layout import PACKED_FIELDS, key_shapes, round_up, value_shapes

_PER_TOKEN = ("sign", "mag", "scale")
_PER_SEQUENCE = ("centre", "balance")
_GROWTH_SHARE = 128
_LEAST_ROOM = 256


def grown(tokens: int) -> int:
    """Capacity to allocate for ``tokens``: slack of 1/128, so that re-allocation moves under 2 % of what attention reads."""
    return round_up(tokens + tokens // _GROWTH_SHARE)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor that may be written to inside and outside of inference mode."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def normal(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy of it if it is an inference tensor."""
    return empty(x.shape, x.dtype, x.device).copy_(x) if x.is_inference() else x


class PackedStore:
    """Packed vectors ``[B, H, length, D]`` of one codec in the format of ``layout.py``.

    Args:
        config: the codec.
        along_tokens: packed along ``T`` (values) or along ``D`` (keys).
        batch, heads, head_dim, device: shape and place.
        centre, balance: ``[B, H, D]`` float32 or ``None``, frozen for the life of the store.
        capacity: tokens to make room for at once.
    """

    def __init__(
        self,
        config: IsoQuantConfig,
        along_tokens: bool,
        batch: int,
        heads: int,
        head_dim: int,
        device: torch.device,
        centre: torch.Tensor | None = None,
        balance: torch.Tensor | None = None,
        capacity: int = 0,
    ) -> None:
        self.config, self.along_tokens, self.head_dim, self.length = config, along_tokens, head_dim, 0
        nothing = empty((0,), torch.float32, device)
        self.centre = nothing if centre is None else normal(centre.contiguous())
        self.balance = nothing if balance is None else normal(balance.contiguous())
        self.levels = config.levels(head_dim, device)
        self.signs, self.blocks, self.matrix = config.make_rotation(head_dim, device).tensors()
        self._shapes = value_shapes if along_tokens else key_shapes
        for name, shape in self._shapes(batch, heads, round_up(capacity), head_dim, config.bits).items():
            setattr(self, name, empty(shape, torch.float16 if name == "scale" else torch.int32, device))
        self._tensors: list[torch.Tensor] | None = None

    def tensors(self) -> list[torch.Tensor]:
        """The nine tensors an operator takes, in the order of ``layout.PACKED_FIELDS``; the same list until one is replaced."""
        if self._tensors is None:
            self._tensors = [getattr(self, name) for name in PACKED_FIELDS]
        return self._tensors

    @property
    def capacity(self) -> int:
        return self.scale.shape[2]

    def reserve(self, tokens: int) -> None:
        """Makes room for ``tokens`` in all, one buffer at a time."""
        if tokens <= self.capacity:
            return
        self._tensors = None  # it would keep the old buffers
        batch, heads = self.scale.shape[:2]
        used = round_up(self.length)
        shapes = self._shapes(batch, heads, grown(tokens), self.head_dim, self.config.bits)
        for name, shape in shapes.items():
            old = getattr(self, name)
            new = empty(shape, old.dtype, old.device)
            rows = used * new.shape[2] // shapes["scale"][2]
            new[:, :, :rows] = old[:, :, :rows]
            setattr(self, name, new)

    def append(self, x: torch.Tensor) -> None:
        """Encodes ``x [B, H, N, D]`` behind the last token."""
        self.reserve(self.length + x.shape[2])
        codec = (self.levels, self.centre, self.balance, self.signs, self.blocks, self.matrix)
        rule = self.config.rule
        ops.encode(x, *codec, rule, self.along_tokens, self.length, self.sign, self.mag, self.scale)
        self.length += x.shape[2]

    def decode(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Tokens ``start .. stop`` rebuilt, ``[B, H, N, D]``."""
        batch, heads = self.scale.shape[:2]
        out = torch.empty((batch, heads, stop - start, self.head_dim), dtype=dtype, device=self.scale.device)
        ops.decode(self.tensors(), self.along_tokens, start, out)
        return out

    def map_batch(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor with a batch dim by ``function`` of it (reorder, repeat, select)."""
        self._tensors = None
        for name in _PER_TOKEN + _PER_SEQUENCE:
            tensor = getattr(self, name)
            if tensor.ndim > 1:  # an absent part is an empty vector; a store without a token yet has a batch too
                setattr(self, name, normal(function(tensor)))


def _room_for(tokens: int, room: int) -> int:
    """Capacity for ``tokens`` exact ones: at most double until ``room``, the end of a window, is reached."""
    if tokens > 2 * room:
        return tokens + tokens // 4
    return max(tokens, min(room, max(2 * tokens, _LEAST_ROOM)))


class ExactStore:
    """Keys and values as the model gave them, ``[B, H, length, D]`` and ``[B, H, length, Dv]``: sinks, then recent tokens."""

    def __init__(self) -> None:
        self.key_buffer: torch.Tensor | None = None
        self.value_buffer: torch.Tensor | None = None
        self.length = 0
        self._owned = False

    @property
    def keys(self) -> torch.Tensor:
        return self.key_buffer.narrow(2, 0, self.length)

    @property
    def values(self) -> torch.Tensor:
        return self.value_buffer.narrow(2, 0, self.length)

    def keys_and_values(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first ``length`` tokens."""
        return self.key_buffer.narrow(2, 0, length), self.value_buffer.narrow(2, 0, length)

    def has_room(self, num_tokens: int) -> bool:
        """Whether ``num_tokens`` more can be written where the buffers are."""
        return self._owned and self.length + num_tokens <= self.key_buffer.shape[2]

    def place(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of both buffers behind the last token, where ``num_tokens`` more go."""
        return self.key_buffer.narrow(2, self.length, num_tokens), self.value_buffer.narrow(2, self.length, num_tokens)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of all sequences and heads."""
        buffers = (self.key_buffer, self.value_buffer)
        return sum(b.shape[0] * b.shape[1] * b.shape[3] * b.element_size() for b in buffers)

    def append(self, keys: torch.Tensor, values: torch.Tensor, room: int) -> None:
        """Adds tokens. The very first ones are held as they are; later ones are copied into a buffer that grows to ``room``."""
        if self.key_buffer is None:
            self.key_buffer, self.value_buffer, self.length = keys, values, keys.shape[2]
            return
        fresh = keys.shape[2]
        if not self.has_room(fresh):
            self.keep(self.keys, self.values, _room_for(self.length + fresh, room))
        self.fill(self.place(fresh), keys, values)

    def fill(self, place: tuple[torch.Tensor, torch.Tensor], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the next tokens into their :meth:`place`."""
        place[0].copy_(keys)
        place[1].copy_(values)
        self.length += keys.shape[2]

    def keep(self, keys: torch.Tensor, values: torch.Tensor, capacity: int) -> None:
        """Holds copies of ``keys`` and ``values`` instead, in buffers of ``capacity`` tokens."""
        self.length, self._owned = keys.shape[2], True
        self.key_buffer, self.value_buffer = (self._copy(x, max(capacity, self.length)) for x in (keys, values))

    def drop(self, start: int, stop: int, capacity: int) -> None:
        """Forgets the tokens ``start .. stop``: copies the others, keys first, into buffers of ``capacity`` tokens."""
        kept = self.length - (stop - start)
        for name in ("key_buffer", "value_buffer"):
            old = getattr(self, name)
            new = empty((*old.shape[:2], max(capacity, kept), old.shape[3]), old.dtype, old.device)
            new[:, :, :start] = old[:, :, :start]
            new[:, :, start:kept] = old[:, :, stop : self.length]
            setattr(self, name, new)
        self.length, self._owned = kept, True

    @staticmethod
    def _copy(x: torch.Tensor, capacity: int) -> torch.Tensor:
        new = empty((*x.shape[:2], capacity, x.shape[3]), x.dtype, x.device)
        new[:, :, : x.shape[2]] = x
        return new

    def map_batch(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces keys and values by ``function`` of them (reorder, repeat, select)."""
        self.key_buffer, self.value_buffer = normal(function(self.key_buffer)), normal(function(self.value_buffer))
