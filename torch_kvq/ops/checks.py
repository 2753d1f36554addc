"""Parts of what operators are given, checked: errors name the argument, the rule and the value, before anything is written."""

from typing import Any, NamedTuple

import torch

from ..layout import BLOCK_LEN, MAX_BITS, MIN_BITS, PACKED_FIELDS, num_words

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def require(good: bool, name: str, rule: str, got: Any) -> None:
    """Raises ``RuntimeError``, as the compiled kernels do, unless ``good``."""
    if good:
        return
    if isinstance(got, torch.Tensor):
        got = f"{_short(got.dtype)} {list(got.shape)} on {got.device}"
    raise RuntimeError(f"{name} must {rule}, got {got}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def require_shape(name: str, x: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    require(x.shape == shape, name, f"have the shape {list(shape)}", x)
    require(x.device == device, name, f"be on {device}", x)


def require_last(name: str, x: torch.Tensor) -> None:
    good = x.dim() == 0 or x.stride(-1) == 1 or x.shape[-1] == 1 or not x.numel()
    require(good, name, "have a contiguous last dim", f"strides {x.stride()}")


def require_dense(name: str, x: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Floats of this shape with a contiguous last dim."""
    require(x.dtype in FLOATS, name, "be float32, bfloat16 or float16", x)
    require_shape(name, x, shape, device)
    require_last(name, x)


def require_typed(name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    require(x.dtype == dtype, name, f"be {_short(dtype)}", x)
    require_shape(name, x, shape, device)


def require_queries(name: str, x: torch.Tensor, batch: int, heads: int) -> None:
    """``x [B, G * H, M, *]`` for ``H`` key heads."""
    require(x.dim() == 4, name, "have 4 dims", x)
    require(x.dtype in FLOATS, name, "be float32, bfloat16 or float16", x)
    require(x.shape[0] == batch, name, f"have a batch of {batch}", x)
    require(heads > 0 and x.shape[1] % heads == 0, name, f"have a multiple of {heads} heads", x)
    require_last(name, x)


def require_tokens(start: int, length: int, num_sinks: int, exact_len: int) -> None:
    require(0 <= start <= length, "start", "be from 0 to length", start)
    require(0 <= num_sinks <= exact_len, "num_sinks", "be from 0 to the number of exact tokens", num_sinks)


class Rotation(NamedTuple):
    """The parts of a rotation as a shader takes them: tensors and sizes by name."""

    tensors: dict[str, torch.Tensor]
    sizes: dict[str, int]


def rotation_of(name: str, parts: tuple[torch.Tensor, ...], dim: int, device: torch.device) -> Rotation:
    """Checks ``signs [rounds, D]``, ``blocks [D/4, 4, 4]`` and ``matrix [D, D]``, each of which may be empty."""
    tensors = dict(zip(PACKED_FIELDS[6:], parts))
    rounds = parts[0].shape[0] if parts[0].numel() else 0
    for (key, x), shape in zip(tensors.items(), ((rounds, dim), (dim // 4, 4, 4), (dim, dim))):
        if x.numel():
            require_typed(f"{name}{key}", x, torch.float32, shape, device)
            require(x.is_contiguous(), f"{name}{key}", "be contiguous", f"strides {x.stride()}")
    sizes = dict(rounds=rounds, has_blocks=bool(parts[1].numel()), has_matrix=bool(parts[2].numel()))
    return Rotation(tensors, sizes)


def per_head(name: str, x: torch.Tensor, shape: tuple[int, int, int], device: torch.device):
    """A float32 vector a head, broadcast from fewer or shorter leading dims, and its strides; ``None`` and zeros if empty."""
    if not x.numel():
        return None, (0, 0)
    require(x.dtype == torch.float32, name, "be float32", x)
    fits = 1 <= x.dim() <= 3 and x.shape[-1] == shape[-1] and x.device == device
    fits = fits and all(have in (1, size) for have, size in zip(x.shape[-2::-1], shape[-2::-1]))
    require(fits, name, f"be on {device} with the shape {list(shape)}", x)
    require_last(name, x)
    return x, x.expand(shape).stride()[:2]


class Statistics(NamedTuple):
    """Centre and balance of a store as a shader takes them."""

    tensors: dict[str, torch.Tensor | None]
    sizes: dict[str, Any]


def statistics_of(
    name: str, centre: torch.Tensor, balance: torch.Tensor, shape: tuple[int, int, int], device: torch.device
) -> Statistics:
    """Checks two vectors ``[B, H, D]``, each of which may be empty."""
    tensors, sizes = {}, {}
    for key, x in (("centre", centre), ("balance", balance)):
        tensors[key], sizes[key] = per_head(f"{name}{key}", x, shape, device)
        sizes[f"has_{key}"] = tensors[key] is not None
    return Statistics(tensors, sizes)


class Store(NamedTuple):
    """A checked store: its words, scales and levels, their strides, statistics, rotation, and bits of a code."""

    tensors: dict[str, torch.Tensor]
    sizes: dict[str, tuple[int, ...]]
    levels: torch.Tensor
    statistics: Statistics
    rotation: Rotation
    bits: int

    def named(self, prefix: str) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, ...]]]:
        """Tensors and strides with names that begin with ``prefix``."""
        tensors = {f"{prefix}{key}": x for key, x in self.tensors.items()} | {f"{prefix}levels": self.levels}
        return tensors, {f"{prefix}{key}": strides for key, strides in self.sizes.items()}


def store_of(
    name: str, packed: list[torch.Tensor], along_tokens: bool, shape: tuple[int, int, int, int], device: torch.device
) -> Store:
    """Checks the nine tensors of a store that has to hold tokens of ``shape [B, H, N, D]``.

    Args:
        name: what errors call the store, with a dot behind it, or empty.
    """
    require(len(packed) == len(PACKED_FIELDS), name.rstrip("."), "be nine tensors", len(packed))
    sign, mag, scale, levels, centre, balance, *rotation = packed
    batch, heads, tokens, dim = shape
    bits = mag.shape[3] + 1 if mag.dim() == 5 else 0
    require(MIN_BITS <= bits <= MAX_BITS, f"{name}mag", "have 1 to 3 planes in dim 3", mag)
    capacity = scale.shape[-1] if scale.dim() else 0
    require(capacity % BLOCK_LEN == 0, f"{name}scale", f"have a capacity that is a multiple of {BLOCK_LEN}", scale)
    require(tokens <= capacity, f"{name}scale", f"have a capacity of at least {tokens}", scale)
    units, last = (capacity // BLOCK_LEN, dim) if along_tokens else (capacity, num_words(dim))
    require_typed(f"{name}sign", sign, torch.int32, (batch, heads, units, last), device)
    require_typed(f"{name}mag", mag, torch.int32, (batch, heads, units, bits - 1, last), device)
    require_typed(f"{name}scale", scale, torch.float16, (batch, heads, capacity), device)
    require_typed(f"{name}levels", levels, torch.float32, (1 << (bits - 1),), device)
    for key, x in (("sign", sign), ("mag", mag), ("scale", scale), ("levels", levels)):
        require_last(f"{name}{key}", x)
    return Store(
        dict(sign=sign, mag=mag, scale=scale),
        dict(sign=sign.stride()[:3], mag=mag.stride()[:4], scale=scale.stride()[:2]),
        levels,
        statistics_of(name, centre, balance, (batch, heads, dim), device),
        rotation_of(name, tuple(rotation), dim, device),
        bits,
    )


def mask_of(mask: torch.Tensor | None, shape: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor | None, tuple]:
    """A bool or float32 mask that broadcasts to ``shape``, and its strides."""
    if mask is None:
        return None, (0, 0, 0, 0)
    require(mask.dtype in (torch.bool, torch.float32), "mask", "be bool or float32", mask)
    fits = mask.dim() == 4 and mask.device == device and all(have in (1, size) for have, size in zip(mask.shape, shape))
    require(fits, "mask", f"be on {device} with the shape {list(shape)}", mask)
    return mask, mask.expand(shape).stride()
