"""Dense attention to measure against: every way a device has to attend to exact keys and values.

``F.scaled_dot_product_attention`` with ``enable_gqa`` and with the group of query heads folded into the query length or the
key heads repeated; on the CPU in float32 and bfloat16, on CUDA in bfloat16 by each of its backends. FlashInfer, where it is
installed, reads the same tokens from pages.
"""

import functools
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

CPU_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HALF = {"bf16": torch.bfloat16}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PAGE_LEN = 16
WORKSPACE_BYTES = 1 << 28
FEWER_BITS = ("flashinfer fp8",)  # measured, but no dense side


def decode_calls(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable]:
    """Attention of one query token, ``q [B, Hq, 1, D]`` float32 over ``k``, ``v`` ``[B, H, T, D]`` float32."""
    calls = {}
    for name, dtype in (CPU_DTYPES if q.device.type == "cpu" else HALF).items():
        x, y, z = (part.to(dtype) for part in (q, k, v))
        folded = x.view(*k.shape[:2], -1, k.shape[3])
        for backend in _backends(q):
            calls[_join(name, backend, "folded")] = _sdpa(backend, folded, y, z)
            calls[_join(name, backend, "enable_gqa")] = _sdpa(backend, x, y, z, enable_gqa=True)
        if q.is_cuda and importlib.util.find_spec("flashinfer"):
            calls[_join(name, "flashinfer")] = _flashinfer(x, y, z)
            calls[FEWER_BITS[0]] = _flashinfer(x, *(part.to(torch.float8_e4m3fn) for part in (y, z)))
    return _that_run(calls)


def prefill_calls(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable]:
    """Causal attention over a prompt, ``q [B, Hq, T, D]`` float32 over ``k``, ``v`` ``[B, H, T, D]`` float32."""
    calls = {}
    for name, dtype in (CPU_DTYPES if q.device.type == "cpu" else HALF).items():
        x, y, z = (part.to(dtype) for part in (q, k, v))
        wide = [part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (y, z)]
        for backend in _backends(q):
            calls[_join(name, backend, "repeated")] = _sdpa(backend, x, *wide, is_causal=True)
            calls[_join(name, backend, "enable_gqa")] = _sdpa(backend, x, y, z, is_causal=True, enable_gqa=True)
    return _that_run(calls)


def _backends(q: torch.Tensor) -> tuple[str, ...]:
    return tuple(BACKENDS) if q.is_cuda else ("",)


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _sdpa(backend: str, *qkv: torch.Tensor, **options) -> Callable[[], torch.Tensor]:
    if not backend:
        return lambda: F.scaled_dot_product_attention(*qkv, **options)

    def call() -> torch.Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            return F.scaled_dot_product_attention(*qkv, **options)

    return call


def _flashinfer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Paged decode of whole pages; the plan is made here, once."""
    import flashinfer

    batch, heads, tokens, dim = k.shape
    num_pages = tokens // PAGE_LEN
    pages = [x.view(batch, heads, num_pages, PAGE_LEN, dim).transpose(1, 2).reshape(-1, heads, PAGE_LEN, dim) for x in (k, v)]
    ints = dict(dtype=torch.int32, device=q.device)
    indptr = torch.arange(batch + 1, **ints) * num_pages
    indices, last = torch.arange(batch * num_pages, **ints), torch.full((batch,), PAGE_LEN, **ints)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device),
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=q.shape[1] // heads >= 4,
        paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    dtypes = dict(q_data_type=q.dtype, kv_data_type=k.dtype)
    wrapper.plan(indptr, indices, last, q.shape[1], heads, dim, PAGE_LEN, **dtypes)
    query = q.squeeze(2)
    return lambda: wrapper.run(query, tuple(pages))


def _that_run(calls: dict[str, Callable]) -> dict[str, Callable]:
    """Those that the device has: an SDPA backend refuses what it does not support."""
    usable = {}
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            _say(f"{name} does not run here: {str(error).splitlines()[0]}")
        else:
            usable[name] = call
    return usable


@functools.cache
def _say(message: str) -> None:
    """Prints a message once."""
    print(message)
