"""Byte ranges of files, read straight into tensors, by several threads at a time."""

import mmap
import os
import threading
from abc import ABC, abstractmethod

import torch

PAGE = 4096


class FileChanged(OSError):
    """A file of weights is not the one that was opened."""


class WeightFile(ABC):
    """One open file of weights, never written to. To add a way of reading, subclass and name it in ``READERS``."""

    flags = os.O_RDONLY

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, self.flags)
        self._stat = os.fstat(self._fd)
        self.num_bytes = self._stat.st_size

    def read(self, offset: int, into: torch.Tensor) -> int:
        """Fill ``into`` (contiguous, on the CPU) with the bytes at ``offset``; returns how many.

        Raises:
            FileChanged: the file is not what it was when it was opened. OSError: it could not be read, or ended early.
        """
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self._stat.st_size, self._stat.st_mtime_ns):
            raise FileChanged(
                f"{self.path} changed since it was opened: {self._stat.st_size:,} bytes then, {now.st_size:,} now; "
                "load the model again, and give each model an offload folder of its own"
            )
        if offset + into.nbytes > self.num_bytes:
            raise OSError(f"{self.path} ends at {self.num_bytes:,} bytes, needed {offset + into.nbytes:,}: it is truncated")
        self._read(offset, into.view(-1).view(torch.uint8))
        return into.nbytes

    @abstractmethod
    def _read(self, offset: int, into: torch.Tensor) -> None: ...

    def _fill(self, view: memoryview, offset: int, needed: int) -> None:
        done = 0
        while done < needed:
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                raise OSError(f"{self.path} ended at {offset + done:,} bytes, needed {offset + needed:,}")
            done += count

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


class BufferedFile(WeightFile):
    """``preadv`` through the page cache."""

    def _read(self, offset: int, into: torch.Tensor) -> None:
        self._fill(memoryview(into.numpy()), offset, len(into))


class DirectFile(WeightFile):
    """``O_DIRECT``: past the page cache, whole pages into a buffer of each thread and from there to the place."""

    flags = os.O_RDONLY | getattr(os, "O_DIRECT", 0)

    def __init__(self, path: str) -> None:
        if not hasattr(os, "O_DIRECT"):
            raise ValueError("io must be pread or mmap on a system without O_DIRECT, got 'direct'")
        try:
            super().__init__(path)
        except OSError as error:
            if os.path.exists(path):
                raise ValueError(f"io must be pread or mmap: the file system of {path} has no O_DIRECT ({error})") from error
            raise
        self._own = threading.local()

    def _read(self, offset: int, into: torch.Tensor) -> None:
        begin = offset // PAGE * PAGE
        needed = offset + len(into) - begin
        room = -(-needed // PAGE) * PAGE
        buffer = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < room:
            buffer = self._own.buffer = mmap.mmap(-1, room)  # anonymous maps begin at a page
        self._fill(memoryview(buffer)[:room], begin, needed)
        into.copy_(torch.frombuffer(buffer, dtype=torch.uint8, count=len(into), offset=offset - begin))


class MappedFile(WeightFile):
    """A shared read-only map: pages stay in the page cache and count as this process's file memory."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY)  # of which torch makes a tensor without complaint
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def _read(self, offset: int, into: torch.Tensor) -> None:
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_WILLNEED, begin, offset + len(into) - begin)
        into.copy_(self._bytes[offset : offset + len(into)])


READERS: dict[str, type[WeightFile]] = {"pread": BufferedFile, "direct": DirectFile, "mmap": MappedFile}


class WeightFiles:
    """Files opened on first use, all read in one way: ``pread``, ``direct`` or ``mmap``.

    Raises:
        ValueError: another ``io``.
    """

    def __init__(self, io: str) -> None:
        if io not in READERS:
            raise ValueError(f"io must be one of {list(READERS)}, got {io!r}")
        self.io, self._files = io, {}

    def __getitem__(self, path: str) -> WeightFile:
        if path not in self._files:
            self._files[path] = READERS[self.io](path)
        return self._files[path]

    def close(self) -> None:
        for file in self._files.values():
            file.close()
