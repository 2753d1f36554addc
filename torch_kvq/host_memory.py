"""Host memory that the kernels of a CUDA device read and write where it is, over the bus."""

import contextlib
import math
import sys

import torch

PAGE_BYTES = 4096
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

    __slots__ = "device", "bytes_on_host", "_address"  # no __dict__, so that bytes are counted on the device's side alone

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device, self._address = device, 0
        whole = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        room = torch.empty(whole + PAGE_BYTES, dtype=torch.uint8)
        start = -room.data_ptr() % PAGE_BYTES
        self.bytes_on_host = room[start : start + num_bytes]
        with torch.cuda.device(device):
            error = torch.cuda.cudart().cudaHostRegister(room.data_ptr() + start, whole, PORTABLE | MAPPED)
            if int(error):
                with contextlib.suppress(RuntimeError):  # the next launch would report this error as its own
                    torch.ones(1, device=device)
                torch.cuda.check_error(int(error))
        self._address = room.data_ptr() + start

    @property
    def __cuda_array_interface__(self) -> dict:
        shape = (self.bytes_on_host.numel(),)
        return dict(shape=shape, typestr="|u1", data=(self._address, False), strides=None, version=3)

    def on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """All of it as a tensor on the CPU, which does not keep it alive."""
        return self.bytes_on_host.view(dtype).view(shape)

    def on_device(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """All of it as a tensor on the device, which keeps it alive."""
        return torch.as_tensor(self, device=self.device).view(dtype).view(shape)

    def __del__(self) -> None:
        if self._address and not sys.is_finalizing():
            torch.cuda.synchronize(self.device)
            torch.cuda.cudart().cudaHostUnregister(self._address)


def host_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> HostMemory:
    """Memory for a tensor of ``shape``, none of whose dims is 0."""
    return HostMemory(math.prod(shape) * dtype.itemsize, device)
