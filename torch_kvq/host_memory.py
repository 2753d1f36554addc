"""Host memory that the kernels of a CUDA device read and write where it is, over the bus."""

import contextlib
import math
import mmap
import os
import sys

import torch

PORTABLE, MAPPED = 1, 2  # flags of cudaHostRegister: page-locked for every device, and in their address space


class HostMemory:
    """Page-locked memory of its own pages, given back when the last tensor on the device that shows it is gone.

    Torch's own page-locked memory is handed out in powers of two and may be handed out again while a kernel still reads it:
    the device is waited for here before it is given back.

    Args:
        num_bytes: at least 1.
        device: a CUDA device.

    Raises:
        RuntimeError: the memory was refused.
    """

    __slots__ = (
        "device",
        "bytes_on_host",
        "_address",
        "_process",
    )  # no __dict__, so that bytes are counted on the device's side alone

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device, self._address, self._process = device, 0, os.getpid()
        self.bytes_on_host = pages(num_bytes)
        address, whole = self.bytes_on_host.data_ptr(), -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with torch.cuda.device(device):
            error = torch.cuda.cudart().cudaHostRegister(address, whole, PORTABLE | MAPPED)
            if int(error):
                with contextlib.suppress(RuntimeError):  # the next launch would report this error as its own
                    torch.ones(1, device=device)
                torch.cuda.check_error(int(error))
        self._address = address

    @property
    def __cuda_array_interface__(self) -> dict:
        shape = (self.bytes_on_host.numel(),)
        return dict(shape=shape, typestr="|u1", data=(self._address, False), strides=None, version=3)

    def on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """All of it as a tensor on the CPU, which does not keep it page-locked."""
        return self.bytes_on_host.view(dtype).view(shape)

    def on_device(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """All of it as a tensor on the device, which keeps it alive."""
        return torch.as_tensor(self, device=self.device).view(dtype).view(shape)

    def __del__(self) -> None:
        if self._address and self._process == os.getpid() and not sys.is_finalizing():  # not in a forked child
            torch.cuda.synchronize(self.device)
            torch.cuda.cudart().cudaHostUnregister(self._address)


def host_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> HostMemory:
    """Memory for a tensor of ``shape``, none of whose dims is 0."""
    return HostMemory(math.prod(shape) * dtype.itemsize, device)


def pages(num_bytes: int) -> torch.Tensor:
    """Bytes on the CPU that share no page with others, zero; of large pages where there are, which takes a quarter of the time.

    Raises:
        RuntimeError: the memory was refused.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise RuntimeError(f"{num_bytes} bytes of host memory: {error}") from error
    with contextlib.suppress(AttributeError, OSError):  # not on this system
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
