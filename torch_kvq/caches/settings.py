"""The options of a compressed cache, checked once."""

import dataclasses
import functools

from ..codecs.codebook import check_bits
from ..codecs.isoquant import IsoQuantConfig
from ..codecs.rotation import MAX_SEED

PREFILL_MODES = ("auto", "layerwise", "deferred")


def check_count(name: str, value: int, least: int) -> None:
    """Raises ``ValueError`` unless ``value`` is an integer of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


@dataclasses.dataclass(frozen=True)
class IsoQuantSettings:
    """See :class:`torch_kvq.IsoQuantCache` for what each option means."""

    k_bits: int
    v_bits: int
    num_sinks: int
    window_len: int
    flush_len: int
    rotation: str
    balance: bool
    center: bool
    k_scale: str
    v_scale: str
    seed: int
    prefill: str
    defer_limit: int

    def __post_init__(self) -> None:
        check_bits("k_bits", self.k_bits)
        check_bits("v_bits", self.v_bits)
        check_count("num_sinks", self.num_sinks, 0)
        check_count("flush_len", self.flush_len, 1)
        check_count("window_len", self.window_len, 0)
        check_count("defer_limit", self.defer_limit, 0)
        check_count("seed", self.seed, 0)
        if self.seed > MAX_SEED:
            raise ValueError(f"seed must be at most 2**31 - 1, got {self.seed}")
        for name in ("balance", "center"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.window_len < self.flush_len:
            raise ValueError(
                f"window_len must be at least flush_len ({self.flush_len}), one flush block, got {self.window_len}"
            )
        if self.prefill not in PREFILL_MODES:
            raise ValueError(f"prefill must be one of {', '.join(PREFILL_MODES)}, got {self.prefill!r}")
        self.key_codec, self.value_codec  # noqa: B018  checks rotation and scales

    @property
    def key_codec(self) -> IsoQuantConfig:
        return IsoQuantConfig(self.k_bits, self.rotation, self.k_scale, self.seed)

    @property
    def value_codec(self) -> IsoQuantConfig:
        return IsoQuantConfig(self.v_bits, self.rotation, self.v_scale, self.seed)

    @functools.cached_property
    def exact_len(self) -> int:
        """Exact tokens a layer holds at most once it is packed: sinks, window and one block that waits."""
        return self.num_sinks + self.window_len + self.flush_len
