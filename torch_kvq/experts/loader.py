"""How experts come out of a store into slots in host memory."""

from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from .store import ExpertStore

Places = list[tuple[int, dict[str, torch.Tensor]]]


class Load(ABC):
    """Experts on their way."""

    @abstractmethod
    def wait(self) -> int:
        """Returns the bytes fetched once the slots may be read by what is run next on the device.

        Raises:
            OSError: the first of the experts that could not be read; no thread writes into a slot any more.
        """


class Loader(ABC):
    """Moves experts of ``store`` into slots on ``device``."""

    def __init__(self, store: ExpertStore, device: torch.device) -> None:
        self.store, self.device = store, device

    @abstractmethod
    def start(self, layer: str, places: Places) -> Load:
        """Begin to load (expert, slot tensors) pairs; what was run on the device before may still read the slots."""

    @abstractmethod
    def close(self) -> None:
        """Give back threads."""


class DoneLoad(Load):
    """Everything was copied at once."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def wait(self) -> int:
        return self._num_bytes


class ThreadLoad(Load):
    """Reads that run in threads."""

    def __init__(self, reads: list[Future]) -> None:
        self._reads = reads

    def wait(self) -> int:
        wait(self._reads)
        return sum(read.result() for read in self._reads)


class HostLoader(Loader):
    """Slots in host memory: reads go straight into them, ``threads`` at a time; with 0 threads they run in the caller."""

    def __init__(self, store: ExpertStore, threads: int) -> None:
        super().__init__(store, torch.device("cpu"))
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvq-experts") if threads else None

    def start(self, layer: str, places: Places) -> Load:
        if self._threads is None:
            return DoneLoad(sum(self.store.read(layer, expert, into) for expert, into in places))
        return ThreadLoad([self._threads.submit(self.store.read, layer, expert, into) for expert, into in places])

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
