"""Buffers that tokens are selected from: rows that can be read one by one, and the index of the keys beside them."""

import torch

from .codecs.rabitq import RaBitQConfig, RaBitQIndex
from .layout import num_words
from .store import PackedStore, TokenBuffers, optional


class RowStore(TokenBuffers):
    """Exact vectors ``[B, H, length, D]``, on the device or in host memory (page-locked where the device is a GPU).

    Raises:
        RuntimeError: page-locked memory was refused.
    """

    def __init__(
        self, dtype: torch.dtype, batch: int, heads: int, head_dim: int, device: torch.device, on_host: bool, capacity: int = 0
    ) -> None:
        self.dtype, self.head_dim, self.on_host = dtype, head_dim, on_host
        self._pinned = on_host and device.type != "cpu"
        super().__init__(batch, heads, device, capacity)

    def token_tensors(self, batch: int, heads: int, capacity: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"rows": ((batch, heads, capacity, self.head_dim), self.dtype)}

    def make(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if not self._pinned:
            return super().make(shape, dtype)
        torch.cuda.current_stream(self.device).synchronize()  # copies to the old buffer may be on their way
        with torch.inference_mode(False):
            try:
                return torch.empty(shape, dtype=dtype, pin_memory=True)
            except RuntimeError as error:
                raise RuntimeError(f"store must be able to lock memory for {shape} {dtype}, was refused: {error}") from error

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.make(tensor.shape, tensor.dtype).copy_(tensor) if self._pinned else super().own(tensor)

    def tensors(self) -> list[torch.Tensor]:
        """The one tensor that an operator takes."""
        return [self.rows]

    def append(self, x: torch.Tensor) -> None:
        """Copies ``x [B, H, N, D]`` behind the last token."""
        self.reserve(self.length + x.shape[2])
        self.rows[:, :, self.length : self.length + x.shape[2]].copy_(x, non_blocking=True)
        self.length += x.shape[2]

    def decode(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Tokens ``start .. stop`` on the device, ``[B, H, N, D]``."""
        return self.rows[:, :, start:stop].to(self.device, dtype)


class IndexedKeys(TokenBuffers):
    """A store of keys and their 1-bit index (RaBitQCache, algorithm 1). Packed keys hold the signs of the index already.

    Args:
        config: of the index; unused for packed keys, whose rotation it shares.
        store: an empty store of keys, packed along ``D`` or of rows.
        batch, heads: shape.
        centre, balance, query_centre: ``[B, H, D]`` float32 or ``None``, frozen; the first two are the store's if it is packed.
    """

    per_sequence = ("query_centre", "own_centre", "own_balance")

    def __init__(
        self,
        config: RaBitQConfig,
        store: PackedStore | RowStore,
        batch: int,
        heads: int,
        centre: torch.Tensor | None = None,
        balance: torch.Tensor | None = None,
        query_centre: torch.Tensor | None = None,
    ) -> None:
        self.store, self.is_packed, device = store, isinstance(store, PackedStore), store.device
        self.own_centre, self.own_balance = (optional(None if self.is_packed else x, device) for x in (centre, balance))
        self.query_centre = optional(query_centre, device)
        if self.is_packed:
            self.rotation = store.signs, store.blocks, store.matrix
        else:
            self.rotation = config.make_rotation(store.head_dim, device).tensors()
        self._index: RaBitQIndex | None = None
        super().__init__(batch, heads, device, store.capacity)

    def token_tensors(self, batch: int, heads: int, capacity: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        signs = {"own_sign": ((batch, heads, capacity, num_words(self.store.head_dim)), torch.int32)}
        bias = {"own_bias": ((batch, heads, capacity), torch.float16)}
        factor = {"factor": ((batch, heads, capacity), torch.float16)}
        return factor | ({} if self.is_packed else signs) | (bias if self.query_centre.numel() else {})

    def index(self) -> RaBitQIndex:
        """The tensors of the index; the same object until one is replaced."""
        if self._index is None:
            centre, balance = (self.store.centre, self.store.balance) if self.is_packed else (self.own_centre, self.own_balance)
            sign = self.store.sign if self.is_packed else self.own_sign
            bias = self.own_bias if self.query_centre.numel() else self.query_centre
            transform = self.query_centre, centre, balance, *self.rotation
            self._index = RaBitQIndex(self.store.head_dim, sign, self.factor, bias, transform)
        return self._index

    def tensors(self) -> list[torch.Tensor]:
        """Those of the keys."""
        return self.store.tensors()

    def append(self, x: torch.Tensor) -> None:
        """Stores and indexes ``x [B, H, N, D]`` behind the last token."""
        self.store.append(x)
        self.reserve(self.store.length)
        self._index = None  # the store may have replaced its sign plane
        index = self.index()
        index.write(x, self.length, signs=not self.is_packed)
        self.length = self.store.length

    def decode(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Keys ``start .. stop``, ``[B, H, N, D]``."""
        return self.store.decode(start, stop, dtype)

    def drop_last(self, tokens: int) -> None:
        super().drop_last(tokens)
        self.store.drop_last(tokens)

    def changed(self) -> None:
        self._index = None

    def map_batch(self, function) -> None:
        super().map_batch(function)
        self.store.map_batch(function)
