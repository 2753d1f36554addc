"""Tensors of the operators to what kernels take, with errors that name the argument, the rule and the value.

Launching from Python is slow enough: each check compares everything at once and only then looks for the rule that fails.
"""

from typing import Any, NamedTuple

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Dense(NamedTuple):
    """A tensor ``[B, H, N, D]`` with a contiguous last dim, or ``[B, H, N]``: data, and strides of batch, head and token."""

    data: torch.Tensor
    batch: int
    head: int
    token: int

    def part(self, tokens: slice) -> "Dense":
        """The same with these tokens alone."""
        whole = tokens.stop - tokens.start == self.data.shape[2]
        return self if whole else self._replace(data=self.data[:, :, tokens])


class Mask(NamedTuple):
    """A mask ``[B, Hq, M, T]``, bool as bytes: its data and strides, 0 where it is broadcast."""

    data: torch.Tensor
    batch: int
    head: int
    query: int
    column: int

    def part(self, queries: slice) -> "Mask":
        """The same with these query tokens alone."""
        return self._replace(data=self.data[:, :, queries]) if self.query else self


def require(good: bool, name: str, rule: str, got: Any) -> None:
    """Raises ``RuntimeError``, as the compiled kernels do, unless ``good``."""
    if not good:
        raise RuntimeError(f"{name} must {rule}, got {_text(got) if isinstance(got, torch.Tensor) else got}")


def _text(x: torch.Tensor) -> str:
    return f"{_dtype_text(x.dtype)} {list(x.shape)} on {x.device}"


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def require_shape(name: str, x: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    require(x.shape == shape, name, f"have the shape {list(shape)}", x)
    require(x.device == device, name, f"be on {device}", x)


def require_floats(name: str, x: torch.Tensor) -> None:
    require(x.dtype in FLOATS, name, "be float32, bfloat16 or float16", x)


def require_inner(name: str, x: torch.Tensor, dims: int) -> None:
    """The last ``dims`` dims must be contiguous."""
    step = 1
    inner = slice(x.dim() - dims, None)
    for size, stride in zip(reversed(x.shape[inner]), reversed(x.stride()[inner])):
        rule = "have a contiguous last dim" if dims == 1 else f"be contiguous in its last {dims} dims"
        require(stride == step or size == 1 or not x.numel(), name, rule, f"strides {x.stride()}")
        step *= size


def require_whole(name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], inner: int, device) -> None:
    """A tensor of this dtype and shape whose last ``inner`` dims are contiguous."""
    require(x.dtype == dtype, name, f"be {_dtype_text(dtype)}", x)
    require_shape(name, x, shape, device)
    require_inner(name, x, inner)


def require_dims(name: str, x: torch.Tensor, dims: int) -> None:
    require(x.dim() == dims, name, f"have {dims} dims", x)


def require_heads(name: str, x: torch.Tensor, heads: int) -> None:
    """``x [B, G * H, M, *]`` for ``H`` key heads."""
    require(heads > 0 and x.shape[1] % heads == 0, name, f"have a multiple of {heads} heads", x)


def require_tokens(length: int, num_sinks: int, exact_len: int) -> None:
    require(length >= 0, "length", "be at least 0", length)
    require(0 <= num_sinks <= exact_len, "num_sinks", "be from 0 to the number of exact tokens", num_sinks)


def dense_of(name: str, x: torch.Tensor, shape: tuple[int, int, int, int], device: torch.device) -> Dense:
    """Floats ``[B, H, N, D]`` with a contiguous last dim."""
    strides = x.stride()
    if x.shape != shape or x.dtype not in FLOATS or x.device != device or strides[3] != 1:
        require_floats(name, x)
        require_shape(name, x, shape, device)
        require_inner(name, x, 1)
    return Dense(x, *strides[:3])


def plain_of(name: str, x: torch.Tensor, shape: tuple[int, int, int], device: torch.device) -> Dense:
    """A float32 tensor ``[B, H, N]`` of any strides."""
    require_whole(name, x, torch.float32, shape, 0, device)
    return Dense(x, *x.stride())


def mask_of(mask: torch.Tensor | None, shape: tuple[int, int, int, int], device: torch.device) -> Mask | None:
    """A mask that broadcasts to ``shape``, bool or float32."""
    if mask is None:
        return None
    require(mask.dtype in (torch.bool, torch.float32), "mask", "be bool or float32", mask)
    fits = mask.dim() == 4 and mask.device == device and all(have in (1, size) for have, size in zip(mask.shape, shape))
    require(fits, "mask", f"be on {device} with the shape {list(shape)}", mask)
    strides = [0 if have == 1 else stride for have, stride in zip(mask.shape, mask.stride())]
    return Mask(mask.view(torch.uint8) if mask.dtype == torch.bool else mask, *strides)
