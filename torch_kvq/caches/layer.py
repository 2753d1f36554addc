"""One full-attention layer of a compressed cache: exact tokens, then sinks, body and recent window.

Life of a layer: tokens arrive by ``update`` and are exact. When its attention call has been answered, whatever is older
than the window is packed, in blocks of at least ``flush_len`` tokens; the first time, sinks are set apart, padding found
and the statistics learnt. In deferred mode (chunked prompts) nothing is packed before decoding starts.
"""

import operator

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from ..attention.handle import KVHandle
from ..attention.order import TokenOrder, leading_padding, sinks_first
from ..attention.pieces import HIDDEN, Pieces
from ..codecs.statistics import QueryMoments
from ..store import ExactStore, TokenBuffers, append_kv, empty
from .checks import check_states
from .settings import LayerSettings
from .stats import CacheStats

SHORT_QUERY_LEN = 32


class CompressedLayer(CacheLayerMixin):
    """A cache layer whose older tokens are in a body: stores of keys and of values that a subclass opens and answers from.

    Args:
        settings, stats: shared by the layers of a cache.
        index: place in the model, for messages.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, settings: LayerSettings, stats: CacheStats, index: int = 0) -> None:
        self.settings, self.stats, self.index = settings, stats, index
        self.deferred = settings.prefill == "deferred"
        self.record_past = False
        self._transient = 0
        self._clear()

    def _clear(self) -> None:
        self.is_initialized, self.is_latent, self.decoding = False, False, False
        self.exact = ExactStore()
        self.keys_store: TokenBuffers | None = None
        self.values_store: TokenBuffers | None = None
        self.order: TokenOrder | None = None
        self.moments: QueryMoments | None = QueryMoments() if self.learns_queries else None
        self._pending_query: torch.Tensor | None = None
        self._visible: torch.Tensor | None = None
        self.fresh_len = 0
        self.accepted_form: tuple | None = None
        self._step: tuple | None = None
        self._lse: torch.Tensor | None = None
        self._account()

    # ---- transformers' interface

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Adds tokens and returns handles of all keys and values.

        Args:
            key_states: ``[B, H, N, D]``, fp32, bf16 or fp16. value_states: ``[B, H, N, Dv]``.

        Raises:
            ValueError: shape, dtype, device, head dim, gradients or values that are not finite; nothing was changed.
        """
        check_states(self, key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        fresh, step, self._step = key_states.shape[2], self._step, None
        if step is not None and fresh == 1:
            place, handles = step
            self.exact.fill(place, key_states, value_states)
            self.decoding, self.fresh_len = True, 1
            return handles
        if self.exact.length and self._is_due():  # a block is full, or an attention call was never answered
            self._pack()
        short = fresh == 1 or (self.record_past and fresh <= SHORT_QUERY_LEN)
        self.decoding = short and self.exact.length > 0
        self.exact.append(key_states, value_states, self.settings.exact_len)
        self.fresh_len = fresh
        if not self.decoding:
            self._account()
        pieces = self.pieces()
        if self.moments is None and not pieces.is_packed and not self._is_due():
            return pieces.exact_keys, pieces.exact_values
        return self.handles(pieces)

    def make_ready(self) -> None:
        """Makes what the update of a decode step needs, but for its token: where it goes, and the handles.

        A cache lets all its layers do so in one loop at the beginning of the step: what runs there is in the processor's caches
        from the second layer on, and between the attention calls, which read all weights, it is not.
        """
        if self._step is None and self.keys_store is not None and self.exact.has_room(1) and not self._is_due():
            self._step = self.exact.place(1), self.handles(self.pieces(fresh=1))

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_step": None, "_lse": None}  # a copied handle is dense, and scratch is made anew

    def handles(self, pieces: Pieces) -> tuple[torch.Tensor, torch.Tensor]:
        return KVHandle.make(pieces, "k"), KVHandle.make(pieces, "v")

    def pieces(self, fresh: int = 0) -> Pieces:
        """A snapshot that can answer queries, ``fresh`` exact tokens included that are yet to be written."""
        exact = self.exact.keys_and_values(self.exact.length + fresh)
        return Pieces(*exact, [], [], 0, 0, None, self) if self.keys_store is None else self.pieces_with_body(exact)

    # ---- what a subclass defines

    @property
    def learns_queries(self) -> bool:
        """Whether the body needs statistics of the queries."""
        return self.settings.balance

    def pieces_with_body(self, exact: tuple[torch.Tensor, torch.Tensor]) -> Pieces:
        """A snapshot with these exact keys and values."""
        raise NotImplementedError

    def open_stores(self, keys: torch.Tensor, values: torch.Tensor, valid: torch.Tensor | None, capacity: int) -> None:
        """Sets ``keys_store`` and ``values_store``, with room for ``capacity`` tokens, and learns from exact tokens without the
        sinks: ``keys [B, H, N, D]``, ``values [B, H, N, Dv]``, which count where ``valid [B, N]`` (all if ``None``)."""
        raise NotImplementedError

    def count_packed(self, tokens: int) -> None:
        """That many tokens a sequence went from the exact ones into the body."""
        self.stats.compress_calls += 1
        self.stats.tokens_compressed += tokens

    def reason(self) -> str:
        """What the layer does, for the report."""
        raise NotImplementedError

    # ---- state

    @property
    def num_sinks(self) -> int:
        """Exact tokens in front of the packed ones."""
        return self.settings.num_sinks if self.keys_store is not None else 0

    @property
    def keys(self) -> torch.Tensor | None:
        return self.handles(self.pieces())[0] if self.get_seq_length() else None

    @property
    def values(self) -> torch.Tensor | None:
        return self.handles(self.pieces())[1] if self.get_seq_length() else None

    def get_seq_length(self, *args) -> int:
        return self.exact.length + (self.keys_store.length if self.keys_store is not None else 0)

    def get_mask_sizes(self, query_length: int, *args) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        self.record_past = True

    def reset(self) -> None:
        self._clear()

    # ---- what attention tells us

    def saw_queries(self, query: torch.Tensor) -> None:
        """Queries of the call in progress, ``[B, G * H, M, D]``."""
        if self.moments is not None:
            self._pending_query = query

    def saw_mask(self, mask: torch.Tensor | None) -> None:
        """Its mask ``[B, 1 or Hq, M, T]``: what the last query may see tells padding from tokens."""
        if mask is None or self.keys_store is not None or not (mask.dtype == torch.bool or mask.is_floating_point()):
            return
        row = mask[(None,) * (4 - mask.dim())][:, :, -1]
        row = row if row.dtype == torch.bool else row > max(torch.finfo(row.dtype).min / 2, HIDDEN)
        self._visible = row.any(1).expand(self.exact.keys.shape[0], -1)

    def saw_weights(self, weights: torch.Tensor) -> None:
        """Its softmax weights ``[B, Hq, M, T]`` where the mask was never shown (eager): padding has weight zero."""
        if self.keys_store is None and (weights.shape[2] > 1 or self._visible is None):
            visible = (weights[:, :, -1] > 0).any(1)
            self._visible = leading_padding(visible)[:, None] <= torch.arange(visible.shape[1], device=visible.device)

    def unread_lse(self, query: torch.Tensor) -> torch.Tensor:
        """Where attention of ``query [B, Hq, M, D]`` may put a log-sum-exp that nobody reads, ``[B, Hq, M]`` float32.

        It is kept for the next decode step, as making one takes as long as all else that an answer does beside its kernel.
        """
        if query.shape[2] > SHORT_QUERY_LEN:
            return query.new_empty(query.shape[:3], dtype=torch.float32)
        if self._lse is None or self._lse.shape != query.shape[:3]:
            self._lse = empty(query.shape[:3], torch.float32, query.device)
        return self._lse

    def answered(self, packed: bool) -> None:
        """The attention call of this forward is done, from packed data or not."""
        if packed:
            self.stats.attend_calls += 1
        query, self._pending_query = self._pending_query, None
        if query is not None and self.keys_store is None and self.moments is not None:
            valid = None
            if self._visible is not None and query.shape[2] == self.fresh_len == self.exact.length:
                valid = self._visible[:, -self.fresh_len :]
            self.moments.add(query, self.exact.keys.shape[1], valid)
        spare = SHORT_QUERY_LEN if self.record_past else 0  # drafts that may be taken back: the window is what is left then
        if (not packed or self.exact.length > self.settings.exact_len + spare) and self._is_due(spare):
            self._pack(spare)  # a block of decoded tokens waits for the next update: this one's handles hold the stores

    # ---- packing

    def _is_due(self, spare: int = 0) -> bool:
        """Whether tokens would be packed now, if ``spare`` more than the window are kept."""
        if self.deferred and not self.decoding and self.exact.length <= self.settings.defer_limit:
            return False
        settings = self.settings
        if self.keys_store is not None:
            return self.exact.length >= settings.exact_len + spare
        return self.exact.length - settings.num_sinks >= settings.least_len + spare

    def _pack(self, spare: int = 0) -> None:
        """Packs all but the sinks, the window and ``spare`` tokens more."""
        self._step = None
        if self.keys_store is None:
            self._learn()
        keys, values = self.exact.keys, self.exact.values
        sinks, tokens = self.num_sinks, self.exact.length - self.num_sinks - self.settings.window_len - spare
        stop = sinks + tokens
        stores = self.keys_store, self.values_store
        lengths = [store.length for store in stores]
        try:
            append_kv(*stores, keys[:, :, sinks:stop], values[:, :, sinks:stop])
            del keys, values
            self.exact.drop(sinks, stop, self.settings.exact_len)
        except BaseException:  # no memory, or interrupted: the tokens stay exact, and this can be tried again
            for store, length in zip(stores, lengths):
                store.drop_last(store.length - length)
            raise
        self.count_packed(tokens)
        self._account()

    def _learn(self) -> None:
        """Opens the stores: finds sinks and padding, brings the exact tokens into stored order, learns from them."""
        keys, values = self.exact.keys, self.exact.values
        settings, tokens = self.settings, keys.shape[2]
        valid, order = self._visible, None
        if valid is not None:
            valid = torch.nn.functional.pad(valid, (0, tokens - valid.shape[1]), value=True)[:, :tokens]
            order = sinks_first(leading_padding(valid), settings.num_sinks, tokens)
        if order is not None:
            keys, values, valid = order.to_stored(keys, 2), order.to_stored(values, 2), order.to_stored(valid, 1)
        body = slice(settings.num_sinks, None)
        seen = None if valid is None else valid[:, body]
        try:
            self.open_stores(keys[:, :, body], values[:, :, body], seen, tokens - settings.num_sinks - settings.window_len)
        except BaseException:  # no memory, or interrupted: all is as it was
            self.keys_store = self.values_store = None
            raise
        if order is not None:
            self.exact.hold(keys, values)
        self.order, self.moments, self._visible = order, None, None

    # ---- shrinking and batches

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens; 0 does nothing.

        Raises:
            ValueError: a positive number, or more tokens than there are; nothing was changed.
        """
        remove = check_crop(tokens_to_remove, self.get_seq_length(), self.index)
        if not remove or not self.is_initialized:
            return
        self._step = None
        remaining = self.get_seq_length() - remove
        if remaining == 0:
            self._clear()
            return
        front = self.num_sinks if self.order is None else self.order.num_tokens
        if self.keys_store is not None and remaining <= front + 1:
            self._unpack(remaining)
        else:
            recent = min(remove, self.exact.length - self.num_sinks)
            self.exact.length -= recent
            if remove > recent:
                for store in (self.keys_store, self.values_store):
                    store.drop_last(remove - recent)
        self._account()

    def _unpack(self, tokens: int) -> None:
        """Back to exact tokens: the first ``tokens`` in sequence order."""
        pieces = self.pieces()
        kept = [pieces.rebuilt(role)[:, :, :tokens] for role in "kv"]
        self._clear()
        self.lazy_initialization(*kept)
        self.exact.keep(*kept, self.settings.exact_len)

    def map_batch(self, function) -> None:
        """Replaces every tensor with a batch dim by ``function`` of it."""
        if not self.is_initialized:
            return
        for part in (self.exact, self.keys_store, self.values_store, self.moments):
            if part is not None:
                part.map_batch(function)
        self.order = None if self.order is None else self.order.map_batch(function)
        self._visible = None if self._visible is None else function(self._visible)
        self.accepted_form = self._step = None
        self._account()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.map_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map_batch(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.map_batch(lambda x: x[torch.as_tensor(indices, device=x.device)])

    # ---- counting

    def _account(self) -> None:
        waiting = self.exact.length > self.settings.exact_len
        transient = self.exact.length * self.exact.token_bytes if waiting else 0
        self.stats.add_transient(transient - self._transient)
        self._transient = transient


def is_plain(layer) -> bool:
    """Whether ``layer`` is compressed and holds nothing else, so that it can give tokens back."""
    return isinstance(layer, CompressedLayer) and not isinstance(layer, LinearAttentionLayer)


def check_crop(tokens_to_remove: int, length: int, index: int) -> int:
    """The number of tokens to remove from a layer of ``length`` tokens."""
    try:
        remove = -operator.index(tokens_to_remove)
    except TypeError:
        raise ValueError(f"tokens_to_remove must be an integer, got {tokens_to_remove!r}") from None
    if remove < 0:
        raise ValueError(f"tokens_to_remove must be negative or 0 (tokens to drop), got {tokens_to_remove}")
    if remove > length:
        raise ValueError(
            f"tokens_to_remove must not drop more than the {length} tokens of layer {index}, got {tokens_to_remove}"
        )
    return remove
