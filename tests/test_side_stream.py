"""Work beside the model: whatever reads, replaces or frees what it touches waits for it. A GPU is needed by the last part."""

import contextlib
import copy
import io
import queue

import pytest
import tiny_models
import torch
from oracle import forced_logits
from test_drift import DIM, FIRST, stream
from test_host_store import Memory
from test_sparse_cache import sparse
from torch.utils._python_dispatch import TorchDispatchMode

from torch_kvq import RaBitQSparseCache, side_stream, sparse_store
from torch_kvq.codecs.rabitq import RaBitQConfig
from torch_kvq.experts import loader_cuda
from torch_kvq.experts.pinned_store import PinnedStore
from torch_kvq.side_stream import SideStream
from torch_kvq.sparse_store import IndexedKeys, RowStore

COPY = torch.ops.aten.copy_.default


class Postponed(TorchDispatchMode):
    """Operators that write are noted instead of run; what they touch must stay allocated: it is kept, or memory of the host."""

    def __init__(self, noted, kept):
        super().__init__()
        self.noted, self.kept = noted, {x.untyped_storage().data_ptr() for x in kept}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function._schema.is_mutable:
            return function(*args, **(kwargs or {}))
        for x in args[1:] if function is COPY else args:
            if isinstance(x, torch.Tensor) and x.numel():
                assert x.untyped_storage().data_ptr() in self.kept, f"{function} touches what may be freed"
        self.noted.append((function, args))
        return args[0] if function is COPY else None


class LateStream:
    """What ``SideStream`` is, on the CPU; nothing begins before it is waited for."""

    works = 0

    def __init__(self, device):
        self.noted = []

    def __getstate__(self):
        return {"noted": []}

    @contextlib.contextmanager
    def work(self, tensors):
        LateStream.works += 1
        with Postponed(self.noted, tensors):
            yield

    def wait(self):
        noted, self.noted = self.noted, []
        for function, args in noted:
            function(*args)


def life_of_a_model(options):
    """Logits of tokens after turns that were indexed beside, and right after them cropped, reordered, copied or repeated."""
    model = tiny_models.build("llama", "sdpa")
    cache, ids, found = sparse(model.config, audit=True, **options), tiny_models.prompt(2, 600), []

    def go_on(cache, tokens, rows=2):
        start = cache.get_seq_length()
        found.append(forced_logits(model, cache, list(ids[:rows, start : start + sum(tokens)].split(tokens, 1))))

    go_on(cache, [100, *[1] * 20, 80])
    cache.crop(-60)
    go_on(cache, [1, 3, 79])
    cache.reorder_cache(torch.tensor([1, 0]))
    go_on(cache, [*[1] * 5, 65])
    kept = io.BytesIO()
    torch.save(cache, kept)
    kept.seek(0)
    go_on(torch.load(kept, weights_only=False), [1, 30])
    go_on(cache, [65])
    go_on(copy.deepcopy(cache), [1, 30])
    go_on(cache, [60])
    cache.batch_select_indices([1])
    go_on(cache, [1, 1], rows=1)
    return found


def life_of_keys_that_move(options):
    """Answers while later tokens get centres of their own, once with what was indexed last taken back."""
    keys, query, found = stream(3.0), torch.randn(1, 4, 1, DIM), []
    cache = sparse(tiny_models.build("llama", "sdpa", head_dim=DIM).config, **options)
    for number, part in enumerate(keys.split(FIRST // 2, 2)):
        cache.update(part, part, 0)
        if number == 3:
            cache.layers[0].crop(-200)
        if number % 2:
            found.append(cache.layers[0].pieces().attend(query, None, DIM**-0.5)[0])
    return found


def life_of_a_store(options):
    """Rows and index after a part that was written beside was taken back, and a short one took its place."""
    x = torch.randn(1, 2, 60, 32)
    config = tiny_models.build("llama", "sdpa").config
    layer = sparse(config, **options).layers[0]
    layer.open_stores(x, x, None, 100)
    store, found = layer.keys_store, []
    for size in (40, 9, 50, 3):
        store.append(x[:, :, -size:])
        store.drop_last(size // 2)
        store.append(x[:, :, : size // 3])
        index, length = store.index(), store.length
        found += [store.decode(0, length, x.dtype), index.factor[:, :, :length].clone()]
    return found


@pytest.mark.parametrize("life", [life_of_a_model, life_of_keys_that_move, life_of_a_store])
@pytest.mark.parametrize("store", ["exact", "host", "isoquant"])
def test_whoever_touches_it_waits(life, store, monkeypatch):
    options = dict(store=store, top_p=0.8)
    wanted = life(options)
    torch.manual_seed(0)
    monkeypatch.setattr(sparse_store, "SideStream", LateStream)
    monkeypatch.setattr(sparse_store, "SIDE_LEN", 16)
    monkeypatch.setattr(sparse_store, "host_memory", Memory)
    monkeypatch.setattr(LateStream, "works", 0)
    if store == "host":
        monkeypatch.setattr(RowStore, "_is_mapped", property(lambda self: True, lambda self, value: None), raising=False)
    found = life(options)
    assert LateStream.works > 2 and all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted))


# ---- a device that notes what is asked of it


class Device:
    """In the place of ``torch.cuda``: streams by name, and what each was asked for, in order."""

    def __init__(self, monkeypatch):
        self.asked, self.names = [], ["current"]
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(self, "current"))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "stream", self.made_current)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self, "side"))
        monkeypatch.setattr(side_stream, "_stream", lambda device: Stream(self, "side"))

    @contextlib.contextmanager
    def made_current(self, chosen):
        self.names.append(chosen.name)
        yield
        self.names.pop()

    def run(self, what):
        self.asked.append(f"{self.names[-1]} runs {what}")


class Stream:
    def __init__(self, device, name):
        self.device, self.name = device, name

    def wait_stream(self, other):
        self.device.asked.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.device.asked.append(f"{self.name} waits for {event}")

    def record_event(self):
        self.device.asked.append(f"event on {self.name}")
        return "event"


class OnDevice:
    """A tensor on it."""

    is_cuda = True

    def __init__(self, device, name, fails=False):
        self.device, self.name, self.fails = device, name, fails

    def record_stream(self, stream):
        self.device.asked.append(f"{self.name} kept for {stream.name}")

    def copy_(self, source, non_blocking=False):
        if self.fails:
            raise RuntimeError("injected")
        self.device.run(f"copy to {self.name}")


@pytest.mark.parametrize("fails", [False, True])
def test_what_runs_beside_keeps_what_it_touches(fails, monkeypatch):
    """After an error, too: what was queued before it still runs, and a second attempt must not overtake it."""
    device = Device(monkeypatch)
    side, x = SideStream(torch.device("cuda", 0)), OnDevice(device, "x")
    with pytest.raises(RuntimeError, match="injected") if fails else contextlib.nullcontext():
        with side.work((x, torch.zeros(1))):
            device.run("work")
            if fails:
                raise RuntimeError("injected")
    if not fails:
        side.wait()
    side.wait()
    assert device.asked == [
        *("side waits for current", "side runs work", "event on side", "x kept for side"),
        "current waits for event",
    ]


@pytest.mark.parametrize("read", [False, True])
def test_slots_are_kept_while_experts_come(read, monkeypatch):
    """A copy that fails is behind others of the same expert, from a buffer that the next one gets."""
    device, store = Device(monkeypatch), PinnedStore({"layer": {n: torch.zeros(2, 3) for n in "ab"}}, pin_memory=False)
    loader = loader_cuda.CudaLoader(store, torch.device("cuda", 0), 1)
    into = {"a": OnDevice(device, "a"), "b": OnDevice(device, "b", fails=True)}
    begun = ["side waits for current", "a kept for side", "b kept for side", "side runs copy to a"]
    if not read:
        with pytest.raises(RuntimeError, match="injected"):
            loader.start("layer", [(1, into)])
        assert device.asked == begun
        return
    monkeypatch.setattr(store, "host_tensors", lambda layer, expert: None)
    loader._ring = queue.Queue()
    loader._ring.put((store.spec("layer").empty(), None))
    with pytest.raises(RuntimeError, match="injected"):
        loader.start("layer", [(1, into)]).wait()
    assert device.asked == [*begun, "event on side"] and loader._ring.get()[1] == "event"


# ---- on a GPU


def delay(stream):
    """What is queued on ``stream`` next begins long after what is queued elsewhere."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)


def delay_beside(device):
    if device.type == "cuda":
        delay(side_stream._stream(device))


@pytest.mark.gpu
def test_an_index_made_beside_the_prompt_is_the_same():
    """The prompt's keys are freed at once and their memory is taken again before the index is begun."""
    centre = torch.randn(2, 8, 128, device="cuda")
    keys = centre.unsqueeze(2) + torch.randn(2, 8, 16384, 128, device="cuda")  # later ones shall get no other
    indices = []
    for length in (16384, 512):  # at once on the side stream, and in parts on the current one
        indexed = IndexedKeys(RaBitQConfig(), RowStore(torch.float32, 2, 8, 128, keys.device, False), 2, 8, centre)
        for start in range(0, 16384, length):
            part = keys[:, :, start : start + length].clone()
            delay_beside(keys.device)
            indexed.append(part)
            del part
            [torch.full((2, 8, length, 128), torch.nan, device="cuda") for _ in range(4)]
        index = indexed.index()
        indices.append([x[:, :, :16384].clone() for x in (index.sign, index.factor)])
        assert not index.later
    for ours, theirs in zip(*indices):
        assert torch.equal(ours, theirs), f"{(ours != theirs).sum()} of {ours.numel()} differ"


@pytest.mark.gpu
@pytest.mark.parametrize("store", ["exact", "host", "isoquant"])
def test_what_is_made_beside_the_model_is_what_the_processor_makes(store):
    """Prompts one behind the other, whose memory is taken again before index and copies are begun."""
    wanted, found = [], []
    for device, into in (("cpu", wanted), ("cuda", found)):
        torch.manual_seed(1)
        for number in range(3):
            config = tiny_models.build("llama", "sdpa", head_dim=64).config
            cache = RaBitQSparseCache(config, store=store, center=False, balance=False)
            with torch.inference_mode():
                for index in range(2):
                    keys, values, query = (torch.randn(1, 2, t, 64).to(device) for t in (3000 + number, 3000 + number, 1))
                    delay_beside(keys.device)
                    keys, values = cache.update(keys, values, index)
                    torch.nn.functional.scaled_dot_product_attention(query, keys, values)
                    del keys, values
                    torch.full((1, 2, 3000 + number, 64), torch.nan, device=device)
            for layer in cache.layers:
                length, index = layer.keys_store.length, layer.keys_store.index()
                held = [index.sign[:, :, :length], index.factor[:, :, :length]]
                held += [x.decode(0, length, torch.float32) for x in (layer.keys_store, layer.values_store)]
                into.append([x.cpu() for x in held])
    for theirs, ours in zip(wanted, found):
        assert (theirs[0] != ours[0]).float().mean() < 1e-3  # a component about 0
        assert torch.allclose(theirs[1].float(), ours[1].float(), rtol=2e-3)
        if store == "isoquant":
            assert all(((a - b).abs() > 1e-2).float().mean() < 1e-3 for a, b in zip(theirs[2:], ours[2:]))
        else:
            assert all(torch.equal(a, b) for a, b in zip(theirs[2:], ours[2:]))


@pytest.mark.gpu
def test_memory_of_slots_is_not_taken_before_experts_have_come():
    device = torch.device("cuda", torch.cuda.current_device())
    store = PinnedStore({"layer": {"w": torch.zeros(2, 512, 512)}})
    loader, into = loader_cuda.CudaLoader(store, device, 1), {"w": torch.ones(512, 512, device=device)}
    delay(loader._stream)
    loader.start("layer", [(1, into)])
    del into
    taken = [torch.ones(512, 512, device=device) for _ in range(4)]
    torch.cuda.synchronize()
    assert all(x.all() for x in taken)
