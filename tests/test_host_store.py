"""Keys and values in host memory: what a store of them does with its memory, and on a GPU that kernels read them there."""

import contextlib
import copy
import io
import mmap

import pytest
import tiny_models
import torch
from oracle import forced_logits
from test_sparse_cache import sparse

from torch_kvq import RaBitQSparseCache, sparse_store, store
from torch_kvq.host_memory import HostMemory, pages
from torch_kvq.sparse_store import HOST_GROWTH_SHARE, SIDE_LEN, RowStore


class Memory:
    """What ``HostMemory`` is, on the CPU alone; it begins as NaN."""

    made = 0

    def __init__(self, shape, dtype, device):
        self.bytes = torch.full(shape, torch.nan, dtype=dtype).view(torch.uint8)
        Memory.made += 1

    def on_host(self, shape, dtype):
        return self.bytes.view(dtype).view(shape)

    on_device = on_host


@pytest.fixture
def mapped(monkeypatch):
    """Makes stores on the CPU that hold their rows in a ``Memory``."""
    monkeypatch.setattr(sparse_store, "host_memory", Memory)
    monkeypatch.setattr(Memory, "made", 0)

    def make(batch, heads, dim):
        store = RowStore(torch.float32, batch, heads, dim, torch.device("cpu"), True)
        store._is_mapped = True
        return store

    return make


def parts_of(x, sizes):
    return x.split([*sizes, x.shape[2] - sum(sizes)], 2)


def test_rows_come_back_whatever_way_they_took(mapped):
    """A long part takes the copy engine's way, short ones that of a kernel; both lie behind each other."""
    x = torch.randn(2, 3, 3 * SIDE_LEN, 8)
    store = mapped(2, 3, 8)
    for part in parts_of(x, [5, SIDE_LEN, 16, SIDE_LEN + 3]):
        store.append(part.transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(store.tensors()[0][:, :, : store.length], x)
    assert torch.equal(store.decode(7, 2000, torch.float32), x[:, :, 7:2000])


def test_memory_is_locked_seldom(mapped):
    store, tokens = mapped(1, 1, 4), 4096
    store.append(torch.zeros(1, 1, tokens, 4))
    assert Memory.made == 1 and store.capacity >= tokens * (1 + 1 / HOST_GROWTH_SHARE)
    for _ in range(tokens // HOST_GROWTH_SHARE // 16):
        store.append(torch.zeros(1, 1, 16, 4))
    assert Memory.made == 1 and store.nbytes == store.capacity * 4 * 4
    store.append(torch.zeros(1, 1, 64, 4))
    assert Memory.made == 2


def test_copies_and_reordered_rows_have_memory_of_their_own(mapped):
    x = torch.randn(2, 1, 40, 4)
    store = mapped(2, 1, 4)
    store.append(x)
    kept = io.BytesIO()
    torch.save(store, kept)
    kept.seek(0)
    copies = [copy.deepcopy(store), torch.load(kept, weights_only=False)]
    store.map_batch(lambda rows: rows[[1, 1, 0]])
    assert Memory.made == 4
    store.append(torch.zeros(3, 1, 8, 4))
    assert torch.equal(store.tensors()[0][:, :, :40], x[[1, 1, 0]])
    for each in copies:
        each.append(torch.ones(2, 1, 3, 4))
        assert torch.equal(each.tensors()[0][:, :, :43], torch.cat([x, torch.ones(2, 1, 3, 4)], 2))


def test_memory_that_is_refused_has_a_name_and_loses_nothing(mapped, monkeypatch):
    store, x = mapped(1, 2, 32), torch.randn(1, 2, 300, 32)
    store.append(x[:, :, :100])
    with monkeypatch.context() as patch:

        def refuse(*args):
            raise RuntimeError("out of memory")

        patch.setattr(sparse_store, "host_memory", refuse)
        with pytest.raises(RuntimeError, match=r"store must be able to lock memory for \(1, 2, .*, 32\) .*out of memory"):
            store.append(x[:, :, 100:])
    assert store.length == 100
    store.append(x[:, :, 100:])
    assert torch.equal(store.tensors()[0][:, :, :300], x)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["values", "buffers", "copy"])
def test_tokens_that_are_not_packed_stay_exact(where, error, monkeypatch):
    """No memory, or Ctrl-C: the values are stored as the keys are, the buffers of what stays exact made, that copied."""
    model = tiny_models.build("llama", "sdpa")
    ids = tiny_models.prompt(1, 200)
    pieces = [ids[:, :100], *ids[:, 100:].split(1, 1)]
    wanted, cache = forced_logits(model, sparse(store="host"), pieces), sparse(store="host")
    got, refused = [], 0
    forced_logits(model, cache, pieces[:1])
    layer = cache.layers[0]
    owner, name = {"values": (RowStore, "append"), "buffers": (store, "_buffers"), "copy": (torch, "cat")}[where]
    done = getattr(owner, name)

    def fail(*args, **kwargs):
        answer = done(*args, **kwargs)
        full = {"values": layer.values_store, "buffers": layer.exact.key_buffer}
        if (args[0] is full[where]) if where in full else ("out" in kwargs):
            raise error("no memory")
        return answer

    for piece in pieces[1:]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            try:
                got.append(forced_logits(model, cache, [piece]))
                continue
            except error as raised:
                assert "no memory" in str(raised)
                refused += 1
        got.append(forced_logits(model, cache, [piece]))
    assert refused == (200 - 100) // 16 and cache.get_seq_length() == 200
    assert torch.allclose(torch.cat(got, 1), wanted[:, -100:], atol=1e-5)


def test_pages_are_zero_and_of_no_one_else():
    first, second = pages(5000), pages(1)
    first.fill_(7)
    assert (
        len(first) == 5000 and not second.any() and first.data_ptr() % mmap.PAGESIZE == second.data_ptr() % mmap.PAGESIZE == 0
    )
    with pytest.raises(RuntimeError, match="4611686018427387904 bytes of host memory"):
        pages(1 << 62)


class Runtime:
    """A CUDA runtime that notes what is asked of it."""

    def __init__(self, asked):
        self.asked = asked

    def cudaHostRegister(self, address, num_bytes, flags):
        self.asked.append(("lock", address, num_bytes))
        return 0

    def cudaHostUnregister(self, address):
        self.asked.append(("unlock", address))
        return 0


def test_memory_is_locked_by_whole_pages_until_the_device_is_done(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(asked))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append(("wait", device)))
    device = torch.device("cuda", 0)
    memory = HostMemory(3 * 1000 * 2, device)
    rows, shown = memory.on_host((3, 1000), torch.bfloat16), memory.__cuda_array_interface__
    address = rows.data_ptr()
    assert shown["data"] == (address, False) and shown["shape"] == (6000,) and shown["typestr"] == "|u1"
    pages_len = -(-6000 // mmap.PAGESIZE) * mmap.PAGESIZE
    assert asked == [("lock", address, pages_len)]
    del memory
    assert asked[1:] == [("wait", device), ("unlock", address)] and not rows.any()


# ---- on a GPU


@pytest.mark.gpu
def test_host_and_device_see_the_same_memory():
    device = torch.device("cuda", torch.cuda.current_device())
    memory = HostMemory(4 * 5000, device)
    there, here = memory.on_device((5, 1000), torch.float32), memory.on_host((5, 1000), torch.float32)
    there.copy_(torch.arange(5000.0, device=device).view(5, 1000))
    torch.cuda.synchronize()
    assert torch.equal(here, torch.arange(5000.0).view(5, 1000))
    here[2] = -1.0
    assert torch.equal(there[1:4].sum(1).cpu(), here[1:4].sum(1))
    x = torch.randn(5, 1000, device=device)
    here.copy_(x, non_blocking=True)
    assert torch.equal(there, x)
    del memory, there
    assert int(torch.cuda.cudart().cudaHostRegister(here.data_ptr(), here.nbytes, 0)) == 0  # it was locked no longer
    assert int(torch.cuda.cudart().cudaHostUnregister(here.data_ptr())) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("store", ["host", "exact"])
def test_bytes_on_the_device(store):
    """The rows of the host's store are in no memory of the device, not even for the moment of a step."""
    tokens, heads, dim = 20000, 8, 128
    config = tiny_models.build("llama", "sdpa", head_dim=dim).config
    cache = RaBitQSparseCache(config, store=store)
    before = torch.cuda.memory_allocated()
    with torch.inference_mode():
        for index in range(2):
            for size in (tokens, 1):
                keys, values = (torch.randn(1, heads, size, dim, dtype=torch.bfloat16, device="cuda") for _ in "kv")
                keys, values = cache.update(keys, values, index)
                query = torch.randn(1, heads, 1, dim, dtype=torch.bfloat16, device="cuda")
                if size == 1:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                torch.nn.functional.scaled_dot_product_attention(query, keys, values)
        del keys, values
    rows = 2 * 2 * heads * tokens * dim * 2
    allocated, peak = (x() - before for x in (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated))
    assert allocated >= cache.nbytes - cache.host_nbytes
    if store == "host":
        assert rows <= cache.host_nbytes <= 1.2 * rows and peak <= 0.12 * rows
    else:
        assert cache.host_nbytes == 0 and allocated >= rows


def logits_of(model, cache, ids):
    """Of a prompt, single tokens, a turn, tokens again after some were taken back, and of a copy."""
    pieces = [ids[:, :1400], *ids[:, 1400:1440].split(1, 1), ids[:, 1440:1540], *ids[:, 1540:1545].split(1, 1)]
    found = [forced_logits(model, cache, pieces)]
    cache.crop(-30)
    cache.reorder_cache(torch.tensor([1, 0], device=ids.device))
    twin = copy.deepcopy(cache)
    found += [forced_logits(model, each, list(ids[:, 1545:1580].split(1, 1))) for each in (cache, twin)]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_hosts_store_gives_what_the_devices_gives(dtype):
    model = tiny_models.build("llama", "sdpa", dtype, head_dim=64).cuda()
    ids = tiny_models.prompt(2, 1580).cuda()
    caches = [sparse(model.config, store=store, top_p=0.8) for store in ("exact", "host")]
    for theirs, ours in zip(*(logits_of(model, cache, ids) for cache in caches)):
        assert torch.equal(theirs, ours)
    assert caches[1].stats.select_calls > 0 and caches[1].stats.selected_tokens == caches[0].stats.selected_tokens
