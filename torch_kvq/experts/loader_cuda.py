"""How experts come out of a store into slots on a CUDA device.

Everything goes over one copy stream. It first waits for what was queued on the compute stream, whose kernels may still read
the slots that are overwritten; the compute stream waits for the copies' events before it reads them, and slots that go away
stay allocated until nothing is copied into them. The host waits for the disk only, never for the device.

Experts in page-locked memory are copied from where they are; packed ones are decoded on the copy stream. Files are read by
threads into a ring of page-locked buffers, each used again once its copy is done.
"""

import queue
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from .loader import Load, Loader, Places
from .store import ExpertStore

RING_LEN = 8


class CopyLoad(Load):
    """Copies that were queued; ``reads`` are still queueing theirs."""

    def __init__(self, device: torch.device, event: torch.cuda.Event | None, num_bytes: int, reads: list[Future]) -> None:
        self._device, self._event, self._num_bytes, self._reads = device, event, num_bytes, reads

    def wait(self) -> int:
        wait(self._reads)
        stream = torch.cuda.current_stream(self._device)
        if self._event is not None:
            stream.wait_event(self._event)
        total = self._num_bytes
        for read in self._reads:
            num_bytes, event = read.result()
            stream.wait_event(event)
            total += num_bytes
        return total


class CudaLoader(Loader):
    """Slots on a CUDA device; ``threads`` read files."""

    def __init__(self, store: ExpertStore, device: torch.device, threads: int) -> None:
        super().__init__(store, device)
        self._stream = torch.cuda.Stream(device)
        self._threads = ThreadPoolExecutor(max(1, threads), thread_name_prefix="kvq-experts")
        self._ring: queue.Queue | None = None

    def start(self, layer: str, places: Places) -> Load:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        for _, into in places:
            for tensor in into.values():
                tensor.record_stream(self._stream)
        if self.store.host_tensors(layer, places[0][0]) is None:
            if self._ring is None:
                self._ring = self._make_ring(layer)
            return CopyLoad(self.device, None, 0, [self._threads.submit(self._read, layer, *place) for place in places])
        with torch.cuda.stream(self._stream):
            for expert, into in places:
                self._copy(layer, self.store.host_tensors(layer, expert), into)
            event = self._stream.record_event()
        return CopyLoad(self.device, event, len(places) * self.store.expert_bytes(layer), [])

    def _copy(self, layer: str, stored: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        """Queue one expert on the copy stream, which must be current."""
        if self.store.is_packed:
            stored = {key: part.to(self.device, non_blocking=True) for key, part in stored.items()}
        self.store.decode(layer, stored, into)

    def _make_ring(self, layer: str) -> queue.Queue:
        ring: queue.Queue = queue.Queue()
        for _ in range(max(RING_LEN, self._threads._max_workers)):
            ring.put((self.store.spec(layer).empty(pin_memory=True), None))
        return ring

    def _read(self, layer: str, expert: int, into: dict[str, torch.Tensor]) -> tuple[int, torch.cuda.Event]:
        """In a thread: the bytes read and the event after which they are in the slot."""
        buffers, event = self._ring.get()
        try:
            if event is not None:
                event.synchronize()
            num_bytes = self.store.read(layer, expert, buffers)
            try:
                with torch.cuda.stream(self._stream):
                    for name, buffer in buffers.items():
                        into[name].copy_(buffer, non_blocking=True)
            finally:  # some of them may be on their way
                event = self._stream.record_event()
            return num_bytes, event
        finally:
            self._ring.put((buffers, event))

    def close(self) -> None:
        self._threads.shutdown()
        self._stream.synchronize()
