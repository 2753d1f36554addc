"""Packed stores as kernels take them, and the rotation of a store as one matrix, made once and kept."""

from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...layout import BLOCK_LEN, MAX_BITS, MAX_HEAD_DIM, MIN_BITS, PACKED_FIELDS, num_words
from ...ops.reference import rotated
from .checks import require, require_whole

Rotation = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Packed(NamedTuple):
    """What kernels read of a store: data, and strides of batch and head. Absent parts are ``None``.

    A unit is a token of keys or 32 tokens of values; strides of units and planes are ``None`` if the words are contiguous,
    so that a kernel knows them when it is compiled.
    """

    sign: torch.Tensor
    mag: torch.Tensor
    scale: torch.Tensor
    levels: torch.Tensor
    centre: torch.Tensor | None
    balance: torch.Tensor | None
    sign_batch: int
    sign_head: int
    mag_batch: int
    mag_head: int
    scale_batch: int
    scale_head: int
    centre_batch: int
    centre_head: int
    balance_batch: int
    balance_head: int
    sign_unit: int | None
    mag_unit: int | None
    mag_plane: int | None


class Store(NamedTuple):
    """A checked store: tensors for kernels, bits of a code, head dim, and ``R [D, D]`` float32."""

    packed: Packed
    bits: int
    dim: int
    matrix: torch.Tensor


def store_of(
    name: str, packed: list[torch.Tensor], along_tokens: bool, shape: tuple[int, int, int, int], device: torch.device
) -> Store:
    """Checks a store of ``layout.PACKED_FIELDS`` that has to hold vectors of ``shape [B, H, N, D]``."""
    batch, heads, tokens, dim = shape
    require(len(packed) == len(PACKED_FIELDS), name, "be nine tensors", len(packed))
    sign, mag, scale, levels, centre, balance, *rotation = packed
    bits = mag.shape[3] + 1 if mag.dim() == 5 else 0
    require(MIN_BITS <= bits <= MAX_BITS, f"{name}.mag", "have 1 to 3 planes in dim 3", mag)
    capacity = scale.shape[-1] if scale.dim() else -1
    if capacity % BLOCK_LEN or tokens > capacity:
        require(capacity % BLOCK_LEN == 0, f"{name}.scale", f"have a capacity that is a multiple of {BLOCK_LEN}", scale)
        require(tokens <= capacity, f"{name}.scale", f"have a capacity of at least {tokens}", scale)
    units, last = (capacity // BLOCK_LEN, dim) if along_tokens else (capacity, num_words(dim))
    planes = bits - 1
    _require_part(f"{name}.sign", sign, torch.int32, (batch, heads, units, last), device)
    _require_part(f"{name}.mag", mag, torch.int32, (batch, heads, units, planes, last), device)
    _require_part(f"{name}.scale", scale, torch.float16, (batch, heads, capacity), device)
    _require_part(f"{name}.levels", levels, torch.float32, (1 << planes,), device)
    centre, *centre_strides = _per_head(f"{name}.centre", centre, (batch, heads, dim), device)
    balance, *balance_strides = _per_head(f"{name}.balance", balance, (batch, heads, dim), device)
    sign_strides, mag_strides = sign.stride(), mag.stride()
    gaps = (sign_strides[2], *mag_strides[2:4])
    if gaps == (last, planes * last, last):
        gaps = (None, None, None)
    strides = (*sign_strides[:2], *mag_strides[:2], *scale.stride()[:2], *centre_strides, *balance_strides, *gaps)
    return Store(Packed(sign, mag, scale, levels, centre, balance, *strides), bits, dim, dense(rotation, dim, device))


def _require_part(name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if x.dtype != dtype or x.shape != shape or x.device != device or x.stride(-1) != 1:
        require_whole(name, x, dtype, shape, 1, device)


def _per_head(name: str, x: torch.Tensor, shape: tuple[int, int, int], device: torch.device):
    """A vector a head, broadcast from fewer or shorter leading dims; ``None`` if empty. With its strides."""
    if x.shape == shape and x.dtype == torch.float32 and x.device == device and x.stride(2) == 1:
        return x, *x.stride()[:2]
    if not x.numel():
        return None, 0, 0
    require(x.dtype == torch.float32, name, "be float32", x)
    fits = 1 <= x.dim() <= 3 and x.shape[-1] == shape[-1] and x.stride(-1) == 1 and x.device == device
    fits = fits and all(have in (1, size) for have, size in zip(x.shape[-2::-1], shape[-2::-1]))
    require(fits, name, f"be on {device}, contiguous in the last dim, of shape {list(shape)}", x)
    return x, *x.expand(shape).stride()[:2]


_matrices: dict[tuple, tuple[list[StorageWeakRef], torch.Tensor]] = {}


def dense(rotation: Rotation, dim: int, device: torch.device) -> torch.Tensor:
    """``R [D, D]`` float32 of ``signs``, ``blocks`` and ``matrix``, checked and made on the CPU the first time they are seen.

    Raises:
        RuntimeError: a part of another dtype or shape, or the first call is inside the capture of a CUDA graph, where
            nothing can be computed yet.
    """
    key = (dim, device, *((x.data_ptr(), x.shape, None if x.is_inference() else x._version) for x in rotation))
    known = _matrices.get(key)
    if known is not None and not any(reference.expired() for reference in known[0]):
        return known[1]
    require(4 <= dim <= MAX_HEAD_DIM and dim % 4 == 0, "head dim", f"be a multiple of 4 from 4 to {MAX_HEAD_DIM}", dim)
    rounds = rotation[0].shape[0] if rotation[0].dim() else 0
    for name, x, shape in zip(PACKED_FIELDS[6:], rotation, ((rounds, dim), (dim // 4, 4, 4), (dim, dim))):
        if x.numel():
            require_whole(name, x, torch.float32, shape, len(shape), device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a rotation must be used once before a CUDA graph is captured, got its first use in the capture")
    for old in [old for old, (references, _) in _matrices.items() if any(r.expired() for r in references)]:
        del _matrices[old]
    with torch.inference_mode(False), torch.no_grad():
        columns = rotated(torch.eye(dim, device="cpu"), *(x.detach().cpu() for x in rotation))
        made = columns.T.contiguous().to(device)
    _matrices[key] = [StorageWeakRef(x.untyped_storage()) for x in rotation if x.numel()], made
    return made
