"""Byte ranges of files, read straight into tensors, by several threads at a time."""

import mmap
import os
import threading
from abc import ABC, abstractmethod

import numpy
import torch

from ..checks import check_choice

PAGE = 4096
MOST_COPIED = 1 << 22  # bytes that one read brings into a buffer


class FileChanged(OSError):
    """A file of weights is not the one that was opened."""


class WeightFile(ABC):
    """One open file of weights, never written to. To add a way of reading, subclass and name it in ``READERS``."""

    flags = os.O_RDONLY
    alignment = 1  # places whose address equals the offset modulo this are read into without a copy

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, self.flags)
        self._stat = os.fstat(self._fd)
        self.num_bytes = self._stat.st_size

    def read(self, offset: int, *into: torch.Tensor) -> int:
        """Fill tensors (contiguous, on the CPU) one after the other with the bytes from ``offset`` on; returns how many.

        Raises:
            FileChanged: the file is not what it was when it was opened. OSError: it could not be read, or ended early.
        """
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self._stat.st_size, self._stat.st_mtime_ns):
            raise FileChanged(
                f"{self.path} changed since it was opened: {self._stat.st_size:,} bytes then, {now.st_size:,} now; "
                "load the model again, and give each model an offload folder of its own"
            )
        places = [tensor.view(torch.uint8).view(-1).numpy() for tensor in into]
        end = offset + sum(map(len, places))
        if end > self.num_bytes:
            raise OSError(f"{self.path} ends at {self.num_bytes:,} bytes, needed {end:,}: it is truncated")
        self._read(offset, end, places)
        return end - offset

    @abstractmethod
    def _read(self, offset: int, end: int, places: list[numpy.ndarray]) -> None:
        """Fill arrays of bytes, which are ``end - offset`` together."""

    def _fill(self, views: list[numpy.ndarray], offset: int, end: int) -> None:
        """Read into ``views`` up to ``end``, which may lie within the last of them."""
        while offset < end:
            count = os.preadv(self._fd, views, offset)
            if count == 0:
                raise OSError(f"{self.path} ended at {offset:,} bytes, needed {end:,}")
            offset += count
            while views and count >= len(views[0]):
                count -= len(views[0])
                views = views[1:]
            if count:
                views = [views[0][count:], *views[1:]]

    def __reduce__(self):
        raise TypeError(
            f"{self.path} is open for offloaded experts, which cannot be copied or pickled: call handle.remove() before"
        )

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


class BufferedFile(WeightFile):
    """``preadv`` through the page cache."""

    def _read(self, offset: int, end: int, places: list[numpy.ndarray]) -> None:
        self._fill(places, offset, end)


class DirectFile(WeightFile):
    """``O_DIRECT``: past the page cache, in whole pages.

    Pages that lie within one place whose address equals the offset modulo a page are read right into it; all others, of such
    a place its first and last one, into a buffer of each thread and copied from there.
    """

    flags = os.O_RDONLY | getattr(os, "O_DIRECT", 0)
    alignment = PAGE
    _own = threading.local()  # a buffer of each thread, for all files

    def __init__(self, path: str) -> None:
        if not hasattr(os, "O_DIRECT"):
            raise ValueError("io must be pread or mmap on a system without O_DIRECT, got 'direct'")
        try:
            super().__init__(path)
        except OSError as error:
            if os.path.exists(path):
                raise ValueError(f"io must be pread or mmap: the file system of {path} has no O_DIRECT ({error})") from error
            raise

    def _read(self, offset: int, end: int, places: list[numpy.ndarray]) -> None:
        begin, first, spans = offset // PAGE * PAGE, offset, []
        copied = -(-end // PAGE) * PAGE - begin
        for place in places:
            low, high = whole_pages(place, first)
            spans.append((place, first, low, high))
            copied -= high - low
            first += len(place)
        if copied > MOST_COPIED + PAGE:
            return self._read_in_pieces(offset, places)
        buffer = self._buffer(copied)
        views, copies, used, at = [], [], 0, begin  # byte x of the file, from ``at`` on, comes to ``used + x - at``
        for place, first, low, high in spans:
            if low == high:
                copies.append((place, used + first - at))
                continue
            head = used + low - at
            copies += (place[: low - first], head - (low - first)), (place[high - first :], head)
            views += buffer[used:head], place[low - first : high - first]
            used, at = head, high
        views.append(buffer[used:copied])
        self._fill([view for view in views if len(view)], begin, end)
        for place, position in copies:
            place[:] = buffer[position : position + len(place)]

    def _read_in_pieces(self, offset: int, places: list[numpy.ndarray]) -> None:
        """One read for at most ``MOST_COPIED`` bytes of a place, up to a page's end."""
        for place in places:
            while len(place):
                size = min(len(place), (offset + MOST_COPIED) // PAGE * PAGE - offset)
                self._read(offset, offset + size, [place[:size]])
                place, offset = place[size:], offset + size

    def _buffer(self, size: int) -> numpy.ndarray:
        """At least ``size`` bytes from a page's beginning on, of this thread."""
        buffer = getattr(self._own, "bytes", None)
        if buffer is None or len(buffer) < size:
            buffer = self._own.bytes = numpy.frombuffer(private_memory(max(size, PAGE)), dtype=numpy.uint8)
        return buffer


def private_memory(size: int) -> mmap.mmap:
    """Zeroed whole pages that a forked process has a copy of its own of."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def whole_pages(place: numpy.ndarray, offset: int) -> tuple[int, int]:
    """The offsets between which ``place``, for the bytes from ``offset`` on, can be read into page by page."""
    low, high = -(-offset // PAGE) * PAGE, (offset + len(place)) // PAGE * PAGE
    return (low, high) if low < high and (place.ctypes.data - offset) % PAGE == 0 else (low, low)


class MappedFile(WeightFile):
    """A shared read-only map: pages stay in the page cache and count as this process's file memory."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        self._bytes = numpy.frombuffer(self._map, dtype=numpy.uint8)

    def _read(self, offset: int, end: int, places: list[numpy.ndarray]) -> None:
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_WILLNEED, begin, end - begin)
        for place in places:
            place[:] = self._bytes[offset : offset + len(place)]
            offset += len(place)


READERS: dict[str, type[WeightFile]] = {"pread": BufferedFile, "direct": DirectFile, "mmap": MappedFile}


class WeightFiles:
    """Files opened on first use, all read in one way: ``pread``, ``direct`` or ``mmap``.

    Raises:
        ValueError: another ``io``.
    """

    def __init__(self, io: str) -> None:
        check_choice("io", io, READERS)
        self.io, self.alignment = io, READERS[io].alignment
        self._files: dict[str, WeightFile] = {}

    def __getitem__(self, path: str) -> WeightFile:
        if path not in self._files:
            self._files[path] = READERS[self.io](path)
        return self._files[path]

    def close(self) -> None:
        for file in self._files.values():
            file.close()
