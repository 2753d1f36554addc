"""Buffers that tokens are selected from: rows that can be read one by one, and the index of the keys beside them."""

import contextlib
import itertools

import torch

from .codecs.rabitq import RaBitQConfig, RaBitQIndex
from .drift import LOOK_LEN, MAX_CENTRES, DriftWatch
from .host_memory import HostMemory, host_memory
from .layout import num_words, round_up
from .side_stream import SideStream
from .store import PackedStore, TokenBuffers, normal, optional

SIDE_LEN = 1024  # tokens from which indexing is worth a stream of its own
HOST_GROWTH_SHARE = 8


class RowStore(TokenBuffers):
    """Exact vectors ``[B, H, length, D]``, on the device or in host memory.

    Host memory of a CUDA device is page-locked and ``rows`` a tensor of the device all the same: kernels fetch over the bus
    what they read, and nothing is staged.

    Raises:
        RuntimeError: page-locked memory was refused.
    """

    def __init__(
        self, dtype: torch.dtype, batch: int, heads: int, head_dim: int, device: torch.device, on_host: bool, capacity: int = 0
    ) -> None:
        self.dtype, self.head_dim, self._is_mapped = dtype, head_dim, on_host and device.type == "cuda"
        self._memory: HostMemory | None = None
        self._side = SideStream(device)
        super().__init__(batch, heads, device, self.grown(capacity) if self._is_mapped else capacity)

    def grown(self, tokens: int) -> int:
        """Locking pages takes longer than copying them, and there are more of them: it is done seldom."""
        return round_up(tokens + tokens // HOST_GROWTH_SHARE) if self._is_mapped else super().grown(tokens)

    def token_tensors(self, batch: int, heads: int, capacity: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"rows": ((batch, heads, capacity, self.head_dim), self.dtype)}

    def make(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if not self._is_mapped or 0 in shape:
            return super().make(shape, dtype)
        with torch.inference_mode(False):
            try:
                self._memory = host_memory(shape, dtype, self.device)
            except RuntimeError as error:
                raise RuntimeError(f"store must be able to lock memory for {shape} {dtype}, was refused: {error}") from error
            return self._memory.on_device(shape, dtype)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.make(tensor.shape, tensor.dtype).copy_(tensor) if self._is_mapped else super().own(tensor)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "rows": self.tensors()[0].cpu(), "_memory": None} if self._is_mapped else self.__dict__

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        if self._is_mapped:
            self.rows = self.own(self.rows)

    def tensors(self) -> list[torch.Tensor]:
        """The one tensor that an operator takes, once it is written."""
        self._side.wait()
        return [self.rows]

    def append(self, x: torch.Tensor) -> None:
        """Copies ``x [B, H, N, D]`` behind the last token; a prompt to host memory beside what the model does meanwhile."""
        place = slice(self.length, self.length + x.shape[2])
        self.reserve(place.stop)
        if self._memory is not None and x.shape[2] >= SIDE_LEN:
            self._copy_beside(x, place)
        else:
            self.rows[:, :, place] = x
        self.length = place.stop

    def drop_last(self, tokens: int) -> None:
        self._side.wait()  # what is dropped may be on its way
        super().drop_last(tokens)

    def _copy_beside(self, x: torch.Tensor, place: slice) -> None:
        """Head by head: only what lies in one piece is copied without the processor."""
        there = self._memory.on_host(self.rows.shape, self.dtype)
        with self._side.work((x,)):
            for b, h in itertools.product(*map(range, x.shape[:2])):
                there[b, h, place].copy_(x[b, h], non_blocking=True)

    def changed(self) -> None:
        self._side.wait()

    def decode(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Tokens ``start .. stop`` on the device, ``[B, H, N, D]``."""
        return self.tensors()[0][:, :, start:stop].to(dtype)


class IndexedKeys(TokenBuffers):
    """A store of keys and their 1-bit index (RaBitQCache, algorithm 1). Packed keys hold the signs of the index already.

    Where later keys are off the centre by more than ``drift.DRIFT`` of their spread, they get one of their own, up to
    ``drift.MAX_CENTRES`` times; packed keys keep that of their codec.

    Args:
        config: of the index; unused for packed keys, whose rotation it shares.
        store: an empty store of keys, packed along ``D`` or of rows.
        batch, heads: shape.
        centre, balance, query_centre: ``[B, H, D]`` float32 or ``None``; the first two are the store's if it is packed.
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
        self._later: list[tuple[int, torch.Tensor]] = []
        self._watch = DriftWatch(self.own_balance) if self.own_centre.numel() else None
        self._side = SideStream(device)
        super().__init__(batch, heads, device, store.capacity)

    def token_tensors(self, batch: int, heads: int, capacity: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        signs = {"own_sign": ((batch, heads, capacity, num_words(self.store.head_dim)), torch.int32)}
        bias = {"own_bias": ((batch, heads, capacity), torch.float16)}
        factor = {"factor": ((batch, heads, capacity), torch.float16)}
        return factor | ({} if self.is_packed else signs) | (bias if self.query_centre.numel() else {})

    def index(self) -> RaBitQIndex:
        """The tensors of the index, once they are written; the same object until one is replaced."""
        self._side.wait()
        return self._tensors_of_index()

    def _tensors_of_index(self) -> RaBitQIndex:
        if self._index is None:
            centre, balance = (self.store.centre, self.store.balance) if self.is_packed else (self.own_centre, self.own_balance)
            sign = self.store.sign if self.is_packed else self.own_sign
            bias = self.own_bias if self.query_centre.numel() else self.query_centre
            transform = self.query_centre, centre, balance, *self.rotation
            self._index = RaBitQIndex(self.store.head_dim, sign, self.factor, bias, transform, tuple(self._later))
        return self._index

    def tensors(self) -> list[torch.Tensor]:
        """Those of the keys."""
        return self.store.tensors()

    def append(self, x: torch.Tensor) -> None:
        """Stores ``x [B, H, N, D]`` behind the last token and indexes it; a prompt beside what the model does meanwhile."""
        self._follow_drift()
        self.store.append(x)
        try:
            self._index_last(x)
        except BaseException:  # no memory, or interrupted: the tokens are not stored
            self.store.drop_last(x.shape[2])
            raise
        first, self.length = self.length, self.store.length
        try:
            self._watch_drift(x, first)
        except RuntimeError:  # no memory to look: the centre stays
            self._watch.forget(self.length)
            self._watch.seen = self.length

    def _index_last(self, x: torch.Tensor) -> None:
        self.reserve(self.store.length)
        self._index = None  # the store may have replaced its sign plane
        index = self._tensors_of_index()
        beside = x.shape[2] >= SIDE_LEN
        if not beside:
            self._side.wait()
        with self._side.work((x, *index.tensors())) if beside else contextlib.nullcontext():
            index.write(x, self.length, signs=not self.is_packed)

    def _watch_drift(self, x: torch.Tensor, first: int) -> None:
        """Looks at ``x``, tokens from ``first`` on that are indexed now, or at all since the last look if ``x`` is a few."""
        watch = self._watch
        if watch is None or len(self._later) == MAX_CENTRES or not watch.is_due(self.length):
            return
        if first == 0:
            watch.seen = self.length  # the centre is theirs
            return
        if x.shape[2] < LOOK_LEN:
            x, first = self.store.decode(watch.seen, self.length, x.dtype), watch.seen
        start = round_up(first)  # scans from there on are aligned
        watch.look(x[:, :, start - first :], start, self._later[-1][1] if self._later else self.own_centre)

    def _follow_drift(self) -> None:
        """Indexes tokens once more, around their own mean, where the last look found them off their centre."""
        moved = None if self._watch is None else self._watch.moved()
        if moved is None:
            return
        first, centre = moved
        self.changed()
        names = self.token_tensors(1, 1, 0)
        before = {"_later": [*self._later], **{name: getattr(self, name) for name in names}}
        try:
            for name in names:  # snapshots keep the index they know
                setattr(self, name, self.own(before[name].clone()))
            self._later.append((first, normal(centre)))
            self._tensors_of_index().write(self.store.decode(first, self.length, self.store.dtype), first)
        except BaseException as error:  # no memory, or interrupted: the index stays as it was
            self.__dict__.update(before, _index=None)
            if not isinstance(error, RuntimeError):
                raise

    def decode(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Keys ``start .. stop``, ``[B, H, N, D]``."""
        return self.store.decode(start, stop, dtype)

    def drop_last(self, tokens: int) -> None:
        super().drop_last(tokens)
        self.store.drop_last(tokens)
        self._later = [(first, centre) for first, centre in self._later if first < self.length]
        self._index = None
        if self._watch is not None:
            self._watch.forget(self.length)

    def __getstate__(self) -> dict:
        self._side.wait()
        return self.__dict__

    def changed(self) -> None:
        self._side.wait()
        self._index = None

    def map_batch(self, function) -> None:
        super().map_batch(function)
        self.store.map_batch(function)
        self._later = [(first, normal(function(centre))) for first, centre in self._later]
        if self._watch is not None:
            self._watch.balance = self.own_balance
            self._watch.forget(self.length)
