"""How experts come out of a store into slots in host memory."""

import atexit
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread

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


class SharedLoad(Load):
    """Reads that threads take on one by one, and whoever waits for them as well."""

    def __init__(self, read: Callable[[int, dict[str, torch.Tensor]], int], places: Places) -> None:
        self._read, self._count = read, len(places)
        self._todo, self._done = deque(places), SimpleQueue()

    def work(self) -> None:
        """Read until nothing is left that nobody has begun."""
        while True:
            try:
                expert, into = self._todo.popleft()
            except IndexError:
                return
            try:
                self._done.put(self._read(expert, into))
            except BaseException as error:  # for the one who waits
                self._done.put(error)

    def abandon(self) -> None:
        """Nothing more is begun; nobody may wait for it any more."""
        self._todo.clear()

    def wait(self) -> int:
        self.work()
        results = [self._done.get() for _ in range(self._count)]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return sum(results)


class HostLoader(Loader):
    """Slots in host memory: reads go straight into them.

    ``threads`` read besides the one that waits; with 0 everything is read before :meth:`start` returns.
    """

    _threads: list[Thread] = []

    def __reduce__(self):
        raise TypeError("offloaded experts cannot be copied or pickled: call handle.remove() before")

    def __init__(self, store: ExpertStore, threads: int) -> None:
        super().__init__(store, torch.device("cpu"))
        self._loads: SimpleQueue[SharedLoad | None] = SimpleQueue()
        self._begun: weakref.WeakSet[SharedLoad] = weakref.WeakSet()
        self._threads = [
            Thread(target=work_on, args=(self._loads,), name=f"kvq-experts-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        _OPEN.add(self)

    def start(self, layer: str, places: Places) -> Load:
        if not self._threads:
            return DoneLoad(sum(self.store.read(layer, expert, into) for expert, into in places))
        load = SharedLoad(partial(self.store.read, layer), places)
        self._begun.add(load)
        for _ in self._threads[: len(places)]:
            self._loads.put(load)
        return load

    def abandon(self) -> None:
        """As ``close``, but what nobody has begun to read is left out."""
        for load in list(self._begun):
            load.abandon()
        self.close()

    def close(self) -> None:
        threads = self._dismiss()
        for thread in threads:
            thread.join()

    def _dismiss(self) -> list[Thread]:
        threads, self._threads = self._threads, []
        for _ in threads:
            self._loads.put(None)
        return threads

    def __del__(self) -> None:
        self._dismiss()  # without waiting: this may run in any thread


_OPEN: weakref.WeakSet[HostLoader] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """A thread that reads while the interpreter goes away would abort the process."""
    for loader in list(_OPEN):
        loader.abandon()


def work_on(loads: SimpleQueue) -> None:
    """What a thread does until it finds ``None``."""
    while (load := loads.get()) is not None:
        load.work()
        del load  # or its store would live on until the next one
