"""A layer whose older tokens have a 1-bit index, by which those are selected that a query attends to."""

import torch

from ..attention.pieces import Pieces
from ..attention.sparse import SparsePieces
from ..codecs.isoquant import IsoQuantConfig
from ..codecs.statistics import channel_balance, masked_mean, second_moment
from ..sparse_store import IndexedKeys, RowStore
from ..store import PackedStore
from .layer import CompressedLayer


class RaBitQLayer(CompressedLayer):
    """A cache layer with an index; see ``RaBitQSparseCache``."""

    @property
    def learns_queries(self) -> bool:
        return self.settings.balance or self.settings.center

    def pieces_with_body(self, exact: tuple[torch.Tensor, torch.Tensor]) -> Pieces:
        settings, keys, values = self.settings, self.keys_store, self.values_store
        body = keys.tensors(), values.tensors(), keys.length, settings.num_sinks, self.order, self
        return SparsePieces(*exact, *body, keys.index(), settings.sparse_options)

    def open_stores(self, keys: torch.Tensor, values: torch.Tensor, valid: torch.Tensor | None, capacity: int) -> None:
        settings, moments = self.settings, self.moments
        centre = masked_mean(keys, valid) if settings.center else None
        query_centre = moments.centre() if settings.center and moments is not None else None
        balance = None
        if settings.balance:
            query_moment = moments.mean() if moments is not None else None
            if query_moment is not None and query_centre is not None:
                query_moment = query_moment - query_centre.square()
            balance = channel_balance(second_moment(keys, centre, valid), query_moment)
        batch, heads = keys.shape[:2]
        store = self._rows(keys, settings.key_codec, capacity, centre, balance)
        self.keys_store = IndexedKeys(settings.index_config, store, batch, heads, centre, balance, query_centre)
        self.values_store = self._rows(values, settings.value_codec, capacity)

    def _rows(self, x: torch.Tensor, codec: IsoQuantConfig, capacity: int, centre=None, balance=None) -> RowStore | PackedStore:
        """An empty store for ``x``, whose tokens can be read one by one."""
        batch, heads, _, dim = x.shape
        if self.settings.store == "isoquant":
            return PackedStore(codec, False, batch, heads, dim, x.device, centre, balance, capacity)
        return RowStore(x.dtype, batch, heads, dim, x.device, self.settings.store == "host", capacity)

    def count_packed(self, tokens: int) -> None:
        self.stats.tokens_indexed += tokens
        if self.settings.store == "isoquant":
            super().count_packed(tokens)

    def reason(self) -> str:
        settings = self.settings
        kind = f"K{settings.k_bits} V{settings.v_bits}" if settings.store == "isoquant" else settings.store
        what = f"full attention, {kind}, top-p {settings.top_p:g}"
        if not self.is_initialized:
            return f"{what}, empty"
        return what if self.keys_store is not None else f"{what}, too short to be indexed yet"
