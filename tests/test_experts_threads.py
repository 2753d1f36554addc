"""Threads that read experts: who waits reads too, errors come after all reads ended, processes end while experts are read."""

import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from torch_kvq.experts.loader import HostLoader
from torch_kvq.experts.store import HostStore

pytestmark = pytest.mark.versions


class Slow(HostStore):
    """Whose reads note their thread, wait for ``gate`` unless they run in the thread that made it, and fail for expert 3."""

    def __init__(self, num_experts: int = 6) -> None:
        super().__init__({"a": {"w": torch.arange(float(num_experts))[:, None]}})
        self.gate, self.maker, self.readers = threading.Event(), threading.get_ident(), {}

    def read(self, layer, expert, into):
        self.readers[expert] = threading.get_ident()
        if threading.get_ident() != self.maker:
            self.gate.wait()
        if expert == 3:
            raise OSError("injected")
        return super().read(layer, expert, into)


def places(count: int) -> list[tuple[int, dict[str, torch.Tensor]]]:
    return [(expert, {"w": torch.full((1,), torch.nan)}) for expert in range(count)]


def test_whoever_waits_reads_what_no_thread_has_begun():
    store = Slow()
    loader = HostLoader(store, 1)
    busy = loader.start("a", places(1))
    while 0 not in store.readers:
        time.sleep(0.001)
    wanted = places(3)
    assert loader.start("a", wanted).wait() == 3 * 4  # the only thread is stuck
    assert [into["w"].item() for _, into in wanted] == [0, 1, 2]
    assert store.readers[1] == store.readers[2] == store.maker
    store.gate.set()
    assert busy.wait() == 4
    loader.close()


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_an_error_comes_after_all_reads_ended(threads):
    store = Slow()
    loader = HostLoader(store, threads)
    wanted = places(6)
    load = loader.start("a", wanted)
    while not store.readers:
        time.sleep(0.001)
    threading.Timer(0.02, store.gate.set).start()
    with pytest.raises(OSError, match="injected"):
        load.wait()
    assert [into["w"].isnan().item() for _, into in wanted] == [expert == 3 for expert in range(6)]
    loader.close()


def test_threads_end_with_their_loader():
    store = HostStore({"a": {"w": torch.arange(4.0)[:, None]}})
    for close in (True, False):
        loader = HostLoader(store, 3)
        assert loader.start("a", places(4)).wait() == 16
        threads, alive = loader._threads, weakref.ref(loader)
        if close:
            loader.close()
            assert loader.start("a", places(2)).wait() == 8  # in the caller
        del loader
        assert alive() is None
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


LEAVES_READS_BEHIND = """
import sys, torch
from safetensors.torch import save_file
from torch_kvq.experts.files import READERS
from torch_kvq.experts.loader import HostLoader
from torch_kvq.experts.store import HostStore
class Files(HostStore):
    def read(self, layer, expert, into):
        file = READERS[sys.argv[1]](sys.argv[2])
        for _ in range(40):
            file.read(0, torch.empty(1 << 20, dtype=torch.uint8))
        return 1 << 20
loader = HostLoader(Files({"a": {"w": torch.zeros(8, 1)}}), 3)
loader.start("a", [(expert, {"w": torch.empty(1)}) for expert in range(8)])
raise SystemExit(3)
"""


@pytest.mark.parametrize("io", ["pread", "mmap"])
def test_a_process_ends_while_experts_are_read(io, tmp_path):
    (tmp_path / "weights").write_bytes(bytes(1 << 20))
    command = [sys.executable, "-c", LEAVES_READS_BEHIND, io, str(tmp_path / "weights")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr


def test_what_nobody_has_begun_is_left_out_at_the_end():
    store = Slow()
    loader = HostLoader(store, 1)
    loader.start("a", places(3))
    while 0 not in store.readers:
        time.sleep(0.001)
    threading.Timer(0.02, store.gate.set).start()
    loader.abandon()
    assert list(store.readers) == [0]
