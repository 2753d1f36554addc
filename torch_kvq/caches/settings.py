"""The options of the caches, checked once."""

import dataclasses
import functools

from ..attention.sparse import SparseOptions
from ..checks import check_choice, check_count, check_flag
from ..codecs.codebook import check_bits
from ..codecs.isoquant import IsoQuantConfig
from ..codecs.rabitq import RaBitQConfig
from ..codecs.rotation import MAX_SEED, check_kind
from ..ops.schemas import SCALE_RULES

PREFILL_MODES = ("auto", "layerwise", "deferred")
STORES = ("exact", "isoquant", "host")
SELECTIONS = ("group", "head")
MIN_STATISTICS_LEN = 64


@dataclasses.dataclass(frozen=True)
class LayerSettings:
    """The options that all compressed caches share; see :class:`torch_kvq.IsoQuantCache` for what each means."""

    num_sinks: int
    window_len: int
    flush_len: int
    rotation: str
    balance: bool
    center: bool
    seed: int
    prefill: str
    defer_limit: int

    def __post_init__(self) -> None:
        check_count("num_sinks", self.num_sinks, 0)
        check_count("flush_len", self.flush_len, 1)
        check_count("window_len", self.window_len, 0)
        check_count("defer_limit", self.defer_limit, 0)
        check_count("seed", self.seed, 0)
        if self.seed > MAX_SEED:
            raise ValueError(f"seed must be at most 2**31 - 1, got {self.seed}")
        for name in ("balance", "center"):
            check_flag(name, getattr(self, name))
        if self.window_len < self.flush_len:
            raise ValueError(
                f"window_len must be at least flush_len ({self.flush_len}), one flush block, got {self.window_len}"
            )
        check_choice("prefill", self.prefill, PREFILL_MODES)
        check_kind("rotation", self.rotation)

    @functools.cached_property
    def exact_len(self) -> int:
        """Exact tokens a layer holds at most once it is packed: sinks, window and one block that waits."""
        return self.num_sinks + self.window_len + self.flush_len

    @property
    def least_len(self) -> int:
        """Tokens behind the sinks without which nothing is packed."""
        return max(self.window_len + self.flush_len, MIN_STATISTICS_LEN)


@dataclasses.dataclass(frozen=True)
class IsoQuantSettings(LayerSettings):
    """See :class:`torch_kvq.IsoQuantCache` for what each option means."""

    k_bits: int
    v_bits: int
    k_scale: str
    v_scale: str

    def __post_init__(self) -> None:
        check_bits("k_bits", self.k_bits)
        check_bits("v_bits", self.v_bits)
        super().__post_init__()
        for name in ("k_scale", "v_scale"):
            check_choice(name, getattr(self, name), SCALE_RULES)

    @property
    def key_codec(self) -> IsoQuantConfig:
        return IsoQuantConfig(self.k_bits, self.rotation, self.k_scale, self.seed)

    @property
    def value_codec(self) -> IsoQuantConfig:
        return IsoQuantConfig(self.v_bits, self.rotation, self.v_scale, self.seed)


@dataclasses.dataclass(frozen=True)
class RaBitQSettings(LayerSettings):
    """See :class:`torch_kvq.RaBitQSparseCache` for what each option means."""

    top_p: float
    min_dense_len: int
    store: str
    selection: str
    max_selected: int | None
    refine: bool
    widening: bool
    audit: bool
    k_bits: int
    v_bits: int

    def __post_init__(self) -> None:
        check_bits("k_bits", self.k_bits)
        check_bits("v_bits", self.v_bits)
        super().__post_init__()
        if isinstance(self.top_p, bool) or not isinstance(self.top_p, (int, float)) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, a share of attention, got {self.top_p!r}")
        check_count("min_dense_len", self.min_dense_len, 0)
        check_choice("store", self.store, STORES)
        check_choice("selection", self.selection, SELECTIONS)
        if self.max_selected is not None:
            check_count("max_selected", self.max_selected, 1)
        for name in ("refine", "widening", "audit"):
            check_flag(name, getattr(self, name))
        if self.refine and self.store == "host":
            raise ValueError("refine must be False with store='host', whose keys are fetched once they are selected, got True")

    @property
    def least_len(self) -> int:
        return max(super().least_len, self.min_dense_len - self.num_sinks)

    @functools.cached_property
    def sparse_options(self) -> SparseOptions:
        """What an attention call needs to know of them."""
        per_head, on_host = self.selection == "head", self.store == "host"
        return SparseOptions(self.top_p, per_head, self.max_selected, self.refine, self.widening, self.audit, on_host)

    @property
    def index_config(self) -> RaBitQConfig:
        return RaBitQConfig(self.rotation, self.seed)

    @property
    def key_codec(self) -> IsoQuantConfig:
        return IsoQuantConfig(self.k_bits, self.rotation, "unbiased", self.seed)

    @property
    def value_codec(self) -> IsoQuantConfig:
        return IsoQuantConfig(self.v_bits, self.rotation, "mse", self.seed)
