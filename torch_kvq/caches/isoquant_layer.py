"""A layer with packed keys and values."""

import torch

from ..attention import mla  # noqa: F401  registers the handlers of latent attention
from ..attention.pieces import Pieces
from ..codecs.statistics import channel_balance, masked_mean, second_moment
from ..store import PackedStore
from .layer import CompressedLayer
from .settings import IsoQuantSettings
from .stats import CacheStats


class IsoQuantLayer(CompressedLayer):
    """A cache layer with packed keys and values.

    Args:
        settings, stats: shared by the layers of a cache.
        index: place in the model, for messages.
        latent_rank: ``kv_lora_rank`` of a model with latent attention (MLA); its "keys" are then the latent, which is key
            and value at once, and its "values" the rope key.
    """

    def __init__(self, settings: IsoQuantSettings, stats: CacheStats, index: int = 0, latent_rank: int | None = None) -> None:
        self.latent_rank = latent_rank
        super().__init__(settings, stats, index)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        rank = self.latent_rank
        self.is_latent = rank is not None and key_states.shape[1] == 1 and key_states.shape[-1] == rank
        if self.is_latent:
            self.moments = None

    def pieces_with_body(self, exact: tuple[torch.Tensor, torch.Tensor]) -> Pieces:
        keys, values = self.keys_store, self.values_store
        return Pieces(*exact, keys.tensors(), values.tensors(), keys.length, self.settings.num_sinks, self.order, self)

    def open_stores(self, keys: torch.Tensor, values: torch.Tensor, valid: torch.Tensor | None, capacity: int) -> None:
        settings = self.settings
        query_moment = self.moments.mean() if self.moments is not None else None
        balance = settings.balance and not self.is_latent
        self.keys_store = self._open(keys, valid, query_moment, settings.center, balance, True, capacity)
        if self.is_latent:
            self.values_store = self._open(values, valid, None, settings.center, settings.balance, True, capacity)
        else:
            self.values_store = self._open(values, valid, None, False, False, False, capacity)

    def _open(self, x, valid, query_moment, center, balance, is_key, capacity) -> PackedStore:
        centre = masked_mean(x, valid) if center else None
        balance = channel_balance(second_moment(x, centre, valid), query_moment) if balance else None
        codec = self.settings.key_codec if is_key else self.settings.value_codec
        batch, heads, _, dim = x.shape
        return PackedStore(codec, not is_key, batch, heads, dim, x.device, centre, balance, capacity)

    def reason(self) -> str:
        if not self.is_initialized:
            return "full attention, empty"
        bits = f"K{self.settings.k_bits} V{self.settings.v_bits}"
        if self.is_latent:
            bits = f"latent and rope key K{self.settings.k_bits}"
        if self.keys_store is None:
            return f"full attention, {bits}, nothing older than the window yet"
        return f"full attention, {bits}"
