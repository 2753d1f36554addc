"""Buffers of one layer: packed tokens and exact tokens. They grow, shrink, follow beams and know their bytes.

Buffers are written in place beyond their length and replaced when they grow, so a view of the first ``length`` tokens
that was taken earlier stays valid.
"""

import functools
from collections.abc import Callable

import torch

from . import ops
from .codecs.isoquant import IsoQuantConfig
from .layout import PACKED_FIELDS, key_shapes, round_up, value_shapes

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


def optional(x: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """``x`` for an operator, in which an empty vector stands for a part that is absent."""
    return empty((0,), torch.float32, device) if x is None else normal(x.contiguous())


@functools.cache
def no_tokens(batch: int, heads: int, head_dim: int, along_tokens: bool, device: torch.device) -> list[torch.Tensor]:
    """The nine tensors of a store without tokens, for operators that shall read exact tokens alone."""
    return PackedStore(IsoQuantConfig(rotation="none"), along_tokens, batch, heads, head_dim, device).tensors()


class TokenBuffers:
    """Tensors ``[B, H, C, ...]`` with the same capacity of ``C`` tokens (or ``C / 32`` rows), of which ``length`` are in use.

    Subclasses say in ``token_tensors`` which there are, by name, with shape and dtype, and name in ``per_sequence`` others that
    have a batch dim.
    """

    per_sequence: tuple[str, ...] = ()

    def __init__(self, batch: int, heads: int, device: torch.device, capacity: int) -> None:
        self.length, self.capacity, self.device = 0, round_up(capacity), device
        for name, (shape, dtype) in self.token_tensors(batch, heads, self.capacity).items():
            setattr(self, name, self.make(shape, dtype))

    def token_tensors(self, batch: int, heads: int, capacity: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        raise NotImplementedError

    def grown(self, tokens: int) -> int:
        """Capacity to allocate for ``tokens``."""
        return grown(tokens)

    def make(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor of this store."""
        return empty(shape, dtype, self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of tokens, unused capacity included."""
        return sum(getattr(self, name).nbytes for name in self.token_tensors(1, 1, 0))

    def reserve(self, tokens: int) -> None:
        """Makes room for ``tokens`` in all, one buffer at a time."""
        if tokens <= self.capacity:
            return
        self.changed()  # what a subclass remembers would keep the old buffers
        used, capacity = round_up(self.length), self.grown(tokens)
        batch, heads = getattr(self, next(iter(self.token_tensors(1, 1, 0)))).shape[:2]
        for name, (shape, dtype) in self.token_tensors(batch, heads, capacity).items():
            new, old = self.make(shape, dtype), getattr(self, name)
            rows = used * shape[2] // capacity
            new[:, :, :rows] = old[:, :, :rows]
            setattr(self, name, new)
        self.capacity = capacity

    def drop_last(self, tokens: int) -> None:
        """Forgets the last ``tokens``."""
        self.length -= tokens

    def changed(self) -> None:
        """Called before tensors are replaced."""

    def __setstate__(self, state: dict) -> None:
        """Of a copy, or from a file: in inference mode, too, its tensors become such as may be written to outside of it."""
        self.__dict__.update(state)
        self.changed()
        for name in self.token_tensors(1, 1, 0):
            setattr(self, name, normal(getattr(self, name)))

    def map_batch(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor with a batch dim by ``function`` of it (reorder, repeat, select)."""
        self.changed()
        for name in (*self.token_tensors(1, 1, 0), *self.per_sequence):
            tensor = getattr(self, name)
            if tensor.ndim > 1:  # an absent part is an empty vector; a store without a token yet has a batch too
                setattr(self, name, self.own(function(tensor)))

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` as one that this store may write to."""
        return normal(tensor)


class PackedStore(TokenBuffers):
    """Packed vectors ``[B, H, length, D]`` of one codec in the format of ``layout.py``.

    Args:
        config: the codec.
        along_tokens: packed along ``T`` (values) or along ``D`` (keys).
        batch, heads, head_dim, device: shape and place.
        centre, balance: ``[B, H, D]`` float32 or ``None``, frozen for the life of the store.
        capacity: tokens to make room for at once.
    """

    per_sequence = ("centre", "balance")

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
        self.config, self.along_tokens, self.head_dim = config, along_tokens, head_dim
        self.centre, self.balance = (optional(x, device) for x in (centre, balance))
        self.levels = config.levels(head_dim, device)
        self.signs, self.blocks, self.matrix = config.make_rotation(head_dim, device).tensors()
        self._tensors: list[torch.Tensor] | None = None
        super().__init__(batch, heads, device, capacity)

    def token_tensors(self, batch: int, heads: int, capacity: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        shapes = (value_shapes if self.along_tokens else key_shapes)(batch, heads, capacity, self.head_dim, self.config.bits)
        return {name: (shape, torch.float16 if name == "scale" else torch.int32) for name, shape in shapes.items()}

    def tensors(self) -> list[torch.Tensor]:
        """The nine tensors an operator takes, in the order of ``layout.PACKED_FIELDS``; the same list until one is replaced."""
        if self._tensors is None:
            self._tensors = [getattr(self, name) for name in PACKED_FIELDS]
        return self._tensors

    def changed(self) -> None:
        self._tensors = None

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


def append_kv(keys_store: TokenBuffers, values_store: TokenBuffers, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Stores ``keys [B, H, N, D]`` and ``values [B, H, N, Dv]`` behind the last token: at once, as a GPU does faster, if both
    stores are packed as attention reads them, else one after the other."""
    stores = keys_store, values_store
    packed = all(isinstance(store, PackedStore) for store in stores) and keys_store.length == values_store.length
    if not packed or keys_store.along_tokens or not values_store.along_tokens:
        keys_store.append(keys)
        values_store.append(values)
        return
    for store, x in zip(stores, (keys, values)):
        store.reserve(store.length + x.shape[2])
    packed_keys, packed_values = (store.tensors() for store in stores)
    codecs, rules = (packed_keys[3:], packed_values[3:]), [store.config.rule for store in stores]
    ops.encode_kv(keys, values, *codecs, *rules, keys_store.length, *packed_keys[:3], *packed_values[:3])
    for store, x in zip(stores, (keys, values)):
        store.length += x.shape[2]


def _room_for(tokens: int, room: int) -> int:
    """Capacity for ``tokens`` exact ones: at most double until ``room``, the end of a window, is reached."""
    if tokens > 2 * room:
        return tokens + tokens // 4
    return max(tokens, min(room, max(2 * tokens, _LEAST_ROOM)))


def _buffers(keys: torch.Tensor, values: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Uninitialised ones of ``capacity`` tokens for such keys and values, and the tensor whose halves they are, if any."""
    shapes = [(*x.shape[:2], capacity, x.shape[3]) for x in (keys, values)]
    if shapes[0] != shapes[1] or keys.dtype != values.dtype:
        return *(empty(shape, x.dtype, x.device) for shape, x in zip(shapes, (keys, values))), None
    batch, *rest = shapes[0]
    with torch.inference_mode(False):
        both = torch.empty((2 * batch, *rest), dtype=keys.dtype, device=keys.device)
        return both[:batch], both[batch:], both


def _in_large_elements(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Views of tensors of one dtype whose elements are of 8 bytes if the rows of all allow that: a thread of a GPU moves one
    element, whatever its size."""
    size, by = torch.int64.itemsize, torch.int64.itemsize // tensors[0].itemsize
    places = [n for x in tensors for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])]
    # A model's own tensors may begin anywhere, as those of another library do.
    if by < 2 or any(x.stride(-1) != 1 or x.data_ptr() % size for x in tensors) or any(n % by for n in places):
        return list(tensors)
    return [x.view(torch.int64) for x in tensors]


class ExactStore:
    """Keys and values as the model gave them, ``[B, H, length, D]`` and ``[B, H, length, Dv]``: sinks, then recent tokens.

    Buffers of its own are the halves of one tensor ``[2 B, H, C, D]`` where ``D`` is ``Dv``, so that one kernel moves both.
    """

    def __init__(self) -> None:
        self.key_buffer: torch.Tensor | None = None
        self.value_buffer: torch.Tensor | None = None
        self.length = 0
        self._owned = False
        self._both: torch.Tensor | None = None

    def __setstate__(self, state: dict) -> None:
        """As that of :class:`TokenBuffers`."""
        self.__dict__.update(state)
        if self.key_buffer is not None and self.key_buffer.is_inference():
            self.hold(normal(self.key_buffer), normal(self.value_buffer))

    def hold(self, keys: torch.Tensor, values: torch.Tensor, both: torch.Tensor | None = None) -> None:
        """Takes ``keys`` and ``values``, the halves of ``both`` if that is given, for its buffers."""
        self.key_buffer, self.value_buffer, self._both = keys, values, both

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
        """Adds tokens. The very first ones are held as they are if an operator can read them, with elements of a row side by
        side; later ones are copied into a buffer that grows to ``room``."""
        if self.key_buffer is None:
            self.hold(*(x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values)))
            self.length = keys.shape[2]
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
        """Holds copies of ``keys`` and ``values`` instead, in buffers of ``capacity`` tokens. What raises changes nothing."""
        length = keys.shape[2]
        new = _buffers(keys, values, max(capacity, length))
        new[0][:, :, :length], new[1][:, :, :length] = keys, values
        self.hold(*new)
        self.length, self._owned = length, True

    def drop(self, start: int, stop: int, capacity: int) -> None:
        """Forgets the tokens ``start .. stop``: copies the others into buffers of ``capacity`` tokens, as :meth:`keep` does."""
        kept = self.length - (stop - start)
        old, new = (self.key_buffer, self.value_buffer), _buffers(self.key_buffer, self.value_buffer, max(capacity, kept))
        at_once = self._both is not None and new[2] is not None
        for source, place in [(self._both, new[2])] if at_once else zip(old, new):
            source, place = _in_large_elements(source, place)
            torch.cat((source[:, :, :start], source[:, :, stop : self.length]), 2, out=place[:, :, :kept])  # one kernel
        self.hold(*new)
        self.length, self._owned = kept, True

    def map_batch(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces keys and values by ``function`` of them (reorder, repeat, select)."""
        self.hold(normal(function(self.key_buffer)), normal(function(self.value_buffer)))
