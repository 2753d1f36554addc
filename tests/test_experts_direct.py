"""Reads past the page cache: right into slots where addresses allow it, to the same bytes and the same answers everywhere."""

import errno
import os
import threading

import pytest
import tiny_moe
import torch
from safetensors.torch import save_file
from test_experts_identity import assert_equal

from torch_kvq import load_with_expert_offload
from torch_kvq.experts import file_store, files
from torch_kvq.experts.families import IMPLEMENTATIONS
from torch_kvq.experts.file_store import FileStore, FusedTensor
from torch_kvq.experts.files import PAGE, DirectFile
from torch_kvq.experts.safetensors_header import read_header
from torch_kvq.experts.slots import Slots
from torch_kvq.experts.spec import ExpertSpec

pytestmark = pytest.mark.versions
FENCE = 0xA5
CONTENT = torch.randint(0, 256, (20 * PAGE + 777,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(CONTENT.numpy().tobytes())
    try:
        return DirectFile(str(path))
    except ValueError as error:
        pytest.skip(str(error))  # a file system without O_DIRECT


@pytest.fixture
def reads(monkeypatch) -> list[tuple[int, list[int]]]:
    """(offset, lengths of the views) of each call of ``preadv``."""
    seen, preadv = [], os.preadv

    def spy(fd, views, offset):
        seen.append((offset, [len(view) for view in views]))
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", spy)
    return seen


def arena(num_bytes: int) -> torch.Tensor:
    """Fenced bytes that begin at a page."""
    memory = torch.full((num_bytes + PAGE,), FENCE, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE :][:num_bytes]


def check(file, offset: int, shape: list[tuple[int, int]]) -> None:
    """Read places of (residue of the address beyond that of the offset, length), one after the other, into an arena."""
    room = arena(40 * PAGE)
    wanted, places, at, begin = room.clone(), [], offset, PAGE
    for beyond, length in shape:
        begin = -(-begin // PAGE) * PAGE + (at + beyond) % PAGE
        places.append(room[begin : begin + length])
        wanted[begin : begin + length] = CONTENT[at : at + length]
        at, begin = at + length, begin + length + 1
    assert file.read(offset, *places) == at - offset
    assert torch.equal(room, wanted)


@pytest.mark.parametrize("offset", [0, 24, 511, 512, PAGE - 1, PAGE, 3 * PAGE + 232])
@pytest.mark.parametrize("length", [1, 500, 512, PAGE - 24, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 300])
@pytest.mark.parametrize("beyond", [0, 8, 512])
def test_every_byte_comes_to_its_place(file, offset, length, beyond):
    check(file, offset, [(beyond, length)])


@pytest.mark.parametrize("offset", [0, 24, PAGE - 8, 2 * PAGE])
def test_several_places_in_one_read(file, reads, offset):
    check(file, offset, [(0, 3 * PAGE), (0, 100), (0, 2 * PAGE + 50), (8, 2 * PAGE), (0, 5 * PAGE), (0, 7)])
    assert len(reads) == 1 and reads[0][0] % 512 == 0 and all(length % 512 == 0 for length in reads[0][1])


@pytest.mark.parametrize("beyond", [0, 8])
@pytest.mark.parametrize("length", [777, 776, PAGE, PAGE + 777, 6 * PAGE])
def test_the_end_of_the_file(file, beyond, length):
    check(file, len(CONTENT) - length, [(beyond, length)])
    with pytest.raises(OSError, match=f"weights ends at {len(CONTENT):,} bytes, needed {len(CONTENT) + 1:,}: it is truncated"):
        file.read(len(CONTENT) - length, torch.empty(length + 1, dtype=torch.uint8))


def test_only_the_edges_are_copied(file, reads):
    room = arena(20 * PAGE)
    into = room[24 : 24 + 10 * PAGE], room[12 * PAGE + 24 : 16 * PAGE + 24]
    file.read(PAGE + 24, *into)
    assert reads == [(PAGE, [PAGE, 9 * PAGE, PAGE, 3 * PAGE, PAGE])]
    reads.clear()
    file.read(PAGE, room[: 4 * PAGE])
    assert reads == [(PAGE, [4 * PAGE])]


@pytest.mark.parametrize("most", [512, PAGE, 3 * PAGE])
def test_reads_that_come_in_pieces(file, monkeypatch, most):
    preadv, kept = os.preadv, []

    def short(fd, views, offset):
        left = most
        for index, view in enumerate(views):
            if len(view) >= left:
                kept.append(index)
                return preadv(fd, [*views[:index], view[:left]], offset)
            left -= len(view)
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", short)
    check(file, 24, [(0, 3 * PAGE), (8, 2 * PAGE), (0, 5 * PAGE)])
    check(file, len(CONTENT) - 4 * PAGE, [(0, 4 * PAGE)])
    assert kept


@pytest.mark.parametrize("most", [PAGE, 3 * PAGE, 16 * PAGE])
def test_buffers_stay_small(file, monkeypatch, reads, most):
    monkeypatch.setattr(files, "MOST_COPIED", most)
    monkeypatch.setattr(DirectFile, "_own", threading.local())
    for offset in (0, 24, PAGE - 1):
        check(file, offset, [(8, 7 * PAGE), (0, 4 * PAGE), (16, 4 * PAGE + 5)])
        check(file, len(CONTENT) - 8 * PAGE - 3, [(8, 8 * PAGE + 3)])
        check(file, offset, [(0, 18 * PAGE)])
        assert len(file._own.bytes) <= most + PAGE
    assert sum(sum(lengths) for _, lengths in reads) < 3 * PAGE * (15 + 8 + 18 + 9)


def test_a_file_that_ends_early(file, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda *args: 0)
    with pytest.raises(OSError, match="weights ended at 4,096 bytes, needed 8,000"):
        file.read(5000, torch.empty(3000, dtype=torch.uint8))


def test_no_direct_reads(tmp_path, monkeypatch):
    path = tmp_path / "weights"
    path.write_bytes(bytes(100))
    opened = os.open

    def refuses(path, flags, *args):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *args)

    monkeypatch.setattr(os, "open", refuses)
    if hasattr(os, "O_DIRECT"):
        with pytest.raises(ValueError, match="io must be pread or mmap: the file system of .*weights has no O_DIRECT"):
            DirectFile(str(path))
        with pytest.raises(FileNotFoundError):
            monkeypatch.setattr(os, "open", opened)
            DirectFile(str(tmp_path / "elsewhere"))
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    with pytest.raises(ValueError, match="io must be pread or mmap on a system without O_DIRECT"):
        DirectFile(str(path))


# ---- slots


def direct(folder, *args, **kwargs):
    try:
        return load_with_expert_offload(folder, *args, io="direct", attn_implementation="eager", **kwargs)
    except ValueError as error:
        if "O_DIRECT" not in str(error):
            raise
        pytest.skip(str(error))


def placed(model) -> list[bool]:
    """For each part of an expert in a slot: whether it lies as in its file, modulo a page."""
    found = []
    for layer, pool in model.expert_offload.pools.items():
        store = pool.store
        for expert, slot in zip(*pool.places(layer)):
            for name, tensor in pool.slots.one(layer, slot).items():
                assert tensor.is_contiguous()
                address = tensor.data_ptr()
                for part in store._pieces[layer][name](expert):
                    found.append((address - part.offset) % PAGE == 0)
                    address += part.nbytes
    return found


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_answers_from_slots_that_lie_as_the_file(name, implementation, sharded, tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "LEAST_BYTES", 1)
    model = tiny_moe.build(name, implementation=implementation)
    model.save_pretrained(tmp_path, max_shard_size="60KB" if sharded else "1GB")
    wanted, found = tiny_moe.answers(model), []
    for budget in (1, 5, 0.5):
        loaded = direct(tmp_path, budget, offload=dict(overlap=budget == 5))
        loaded.set_experts_implementation(implementation)
        assert_equal(tiny_moe.answers(loaded), wanted)
        found += placed(loaded)
        stats = loaded.expert_offload.stats()
        pools = {id(pool): pool for pool in loaded.expert_offload.pools.values()}.values()
        assert stats.bytes_read == stats.misses * next(iter(pools)).spec.nbytes > 0
        assert stats.resident_bytes >= sum(pool.num_slots * pool.spec.nbytes for pool in pools)
    assert all(found) if name == "qwen3_moe" and not sharded else any(found)
    loaded.expert_offload.remove()
    assert_equal(tiny_moe.answers(loaded), wanted)


def test_small_experts_are_copied(tmp_path):
    tiny_moe.build("qwen3_moe").save_pretrained(tmp_path)
    handle = direct(tmp_path, 5).expert_offload
    assert handle.stats().resident_bytes == 5 * next(iter(handle.pools.values())).spec.nbytes


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_converted_experts(name, tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "LEAST_BYTES", 1)
    model = tiny_moe.build(name)
    model.save_pretrained(tmp_path)
    assert_equal(tiny_moe.answers(direct(tmp_path, 3, dtype=torch.float32)), tiny_moe.answers(model.float()))


def store_of(tensor: torch.Tensor, folder, lead: int) -> FileStore:
    """Experts behind ``lead`` other bytes."""
    save_file({"a": torch.zeros(lead // tensor.dtype.itemsize, dtype=tensor.dtype), "b": tensor}, folder / "weights")
    stored = read_header(str(folder / "weights"))["b"]
    spec = ExpertSpec((("b", tuple(tensor.shape[1:]), tensor.dtype),))
    try:
        return FileStore("a file", {"layer": {"b": FusedTensor(stored)}}, {"layer": spec}, {"layer": len(tensor)}, "direct")
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [64, 65, 67])
def test_residues_keep_every_bit(dtype, rows, tmp_path, monkeypatch):
    """A row of float32 times a matrix adds in another order at some addresses, so its weights do not go there."""
    monkeypatch.setattr(file_store, "LEAST_BYTES", 1)
    torch.manual_seed(0)
    experts = torch.randn(6, rows, 64).to(dtype)
    row = torch.randn(1, 64).to(dtype)
    seen = set()
    for lead in range(0, 600, 24):
        store = store_of(experts, tmp_path, lead)
        residues = store.residues("layer")
        seen.add(residues.get("b"))
        slots = Slots(store.spec("layer"), 6, torch.device("cpu"), {"layer": residues})
        for expert in range(6):
            into = slots.one("layer", expert)
            assert store.read("layer", expert, into) == experts[0].nbytes
            assert torch.equal(into["b"], experts[expert])
            assert torch.equal(torch.nn.functional.linear(row, into["b"]), torch.nn.functional.linear(row, experts[expert]))
        store.close()
    assert len(seen) > (1 if dtype == torch.float32 else 20)
    assert dtype != torch.float32 or all(residue is None or residue % 64 == 0 for residue in seen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 32), (96, 128), (33, 17)])
def test_half_precision_products_do_not_depend_on_the_address(dtype, shape):
    torch.manual_seed(0)
    weights, rows = torch.randn(shape).to(dtype), torch.randn(3, shape[1]).to(dtype)
    memory = arena(weights.nbytes + PAGE)
    linear, bmm = torch.nn.functional.linear, torch.bmm
    for residue in (*range(0, 256, 2), 512, 4088):
        there = memory[residue : residue + weights.nbytes].view(dtype).view(shape).copy_(weights)
        for count in (1, 3):
            assert torch.equal(linear(rows[:count], there), linear(rows[:count], weights)), residue
            column = rows[:count, :, None]
            ours, theirs = there.expand(count, *shape), weights.expand(count, *shape)
            assert torch.equal(bmm(ours, column), bmm(theirs, column)), residue


def test_layers_share_slots_without_touching_each_other():
    spec = ExpertSpec((("w", (3, 1000), torch.bfloat16), ("b", (7,), torch.bfloat16)))
    residues = {"first": {"w": 24}, "second": {"w": 4094}, "third": {}}
    slots = Slots(spec, 5, torch.device("cpu"), residues)
    layers = ["first", "second", "third", "second", "first"]
    for slot, layer in enumerate(layers):
        for tensor in slots.one(layer, slot).values():
            tensor.fill_(slot + 1)
    for slot, layer in enumerate(layers):
        for name, tensor in slots.one(layer, slot).items():
            assert tensor.is_contiguous() and bool((tensor == slot + 1).all())
            assert torch.equal(slots.of(layer)[name][slot], tensor)
        assert slots.one(layer, slot)["w"].data_ptr() % PAGE == residues[layer].get("w", 0)
    assert slots.of("first")["w"].shape == (5, 3, 1000) and slots.of("first")["b"].shape == (5, 7)
    assert slots.nbytes >= 5 * spec.nbytes


def test_budget_in_bytes_counts_the_space_between_slots(tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "LEAST_BYTES", 1)
    tiny_moe.build("mixtral").save_pretrained(tmp_path)
    for budget in (100_000, 200_000, 250_000):
        handle = direct(tmp_path, f"{budget}B").expert_offload
        pools = len({id(pool) for pool in handle.pools.values()})
        assert 0 < handle.stats().resident_bytes <= budget + 2 * PAGE * pools
        assert handle.stats().num_slots < budget // next(iter(handle.pools.values())).spec.nbytes


def test_a_forked_process_reads_into_memory_of_its_own(file):
    file.read(5, arena(100))  # the buffer of this thread
    buffer = file._own.bytes
    before, child = bytes(buffer[:8]), os.fork()
    if child == 0:
        buffer[:8] = 255 - buffer[:8]
        os._exit(0)
    os.waitpid(child, 0)
    assert bytes(buffer[:8]) == before
