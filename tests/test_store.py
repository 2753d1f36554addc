"""Stores: pieces against the whole, growth, shrinking, batches, and tensors that belong to somebody else."""

import contextlib
import copy

import pytest
import torch

from torch_kvq import ops
from torch_kvq.codecs.isoquant import IsoQuantConfig
from torch_kvq.layout import PACKED_FIELDS
from torch_kvq.ops import reference
from torch_kvq.store import ExactStore, PackedStore, _in_large_elements, append_kv, grown

CPU = torch.device("cpu")
DIM = 20
PIECES = (1, 5, 31, 32, 33, 2, 64, 1, 1, 90)

both_kinds = pytest.mark.parametrize("along_tokens", [False, True], ids=["keys", "values"])


def make_store(along_tokens: bool, batch: int = 2, capacity: int = 0, seed: int = 0) -> PackedStore:
    made = torch.Generator().manual_seed(seed)
    centre, log_balance = torch.randn(2, batch, 3, DIM, generator=made).unbind(0)
    return PackedStore(IsoQuantConfig(3), along_tokens, batch, 3, DIM, CPU, centre, (log_balance / 4).exp(), capacity)


def vectors(tokens: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, tokens, DIM)


def codes(store: PackedStore) -> torch.Tensor:
    """The codes in use, ``[B, H, length, D]``."""
    if store.along_tokens:
        return reference.unpack_values(store.sign, store.mag)[:, :, : store.length]
    return reference.unpack_keys(store.sign, store.mag, DIM)[:, :, : store.length]


def assert_same(a: PackedStore, b: PackedStore) -> None:
    assert a.length == b.length
    assert torch.equal(codes(a), codes(b))
    assert torch.equal(a.scale[:, :, : a.length], b.scale[:, :, : b.length])
    assert torch.equal(a.decode(0, a.length, torch.float32), b.decode(0, b.length, torch.float32))


@both_kinds
@pytest.mark.parametrize("capacity", [0, 40, 1000])
def test_many_ragged_pieces_are_one(along_tokens, capacity):
    x = vectors(sum(PIECES))
    whole, parts = make_store(along_tokens), make_store(along_tokens, capacity=capacity)
    whole.append(x)
    for piece in x.split(PIECES, 2):
        parts.append(piece)
    assert_same(parts, whole)
    relative = (whole.decode(0, whole.length, torch.float32) - x).square().sum() / x.square().sum()
    assert relative < 0.1


def test_keys_and_values_are_appended_at_once(monkeypatch):
    calls, encode_kv = [], ops.encode_kv
    monkeypatch.setattr(ops, "encode_kv", lambda *args: calls.append(args) or encode_kv(*args))
    keys, values = vectors(sum(PIECES)), vectors(sum(PIECES))
    apart, at_once = ([make_store(along_tokens) for along_tokens in (False, True)] for _ in range(2))
    for pair in zip(keys.split(PIECES, 2), values.split(PIECES, 2)):
        append_kv(*at_once, *pair)
        for store, x in zip(apart, pair):
            store.append(x)
    assert len(calls) == len(PIECES)
    for ours, theirs in zip(at_once, apart):
        assert_same(ours, theirs)


def test_other_stores_are_appended_to_one_after_the_other(monkeypatch):
    """Both packed along D, as latents are, the other way round, or of different lengths."""
    monkeypatch.setattr(ops, "encode_kv", None)
    x, y = vectors(40), vectors(40)
    for ways, first in (((False, False), 0), ((True, False), 0), ((False, True), 7)):
        stores, wanted = ([make_store(along_tokens) for along_tokens in ways] for _ in range(2))
        for pair in (stores, wanted):
            pair[1].append(y[:, :, :first])
        append_kv(*stores, x, y)
        for store, theirs, each in zip(stores, wanted, (x, y)):
            theirs.append(each)
            assert_same(store, theirs)


@both_kinds
def test_decode_of_a_range_is_that_part(along_tokens):
    store = make_store(along_tokens)
    store.append(vectors(130))
    everything = store.decode(0, 130, torch.float32)
    for start, stop in ((0, 1), (3, 4), (31, 33), (32, 64), (5, 130), (129, 130), (64, 64)):
        assert torch.equal(store.decode(start, stop, torch.float32), everything[:, :, start:stop])
    assert torch.equal(store.decode(7, 99, torch.bfloat16), everything[:, :, 7:99].bfloat16())


@both_kinds
def test_growth_keeps_the_slack_small(along_tokens):
    store, replaced, buffer = make_store(along_tokens), 0, None
    for tokens in range(64, 20_000, 64):
        store.reserve(tokens)
        store.length = tokens
        assert tokens <= store.capacity <= tokens + tokens / 128 + 32
        assert store.capacity % 32 == 0
        replaced, buffer = replaced + (store.scale is not buffer), store.scale
    assert grown(20_000) - 20_000 <= 20_000 / 128 + 32
    assert replaced < 200  # of 312 flushes; fewer and fewer as the slack exceeds one of them


@both_kinds
def test_growth_keeps_old_views_valid(along_tokens):
    store = make_store(along_tokens)
    store.append(vectors(32))  # fills the buffer
    before, copies = store.tensors(), [part.clone() for part in store.tensors()]
    store.append(vectors(32))
    assert store.scale is not before[PACKED_FIELDS.index("scale")]
    assert all(torch.equal(part, copy) for part, copy in zip(before, copies))


@both_kinds
@pytest.mark.parametrize("length", [0, 1, 31, 32, 45, 64, 99])
def test_append_after_a_crop_is_a_fresh_store(along_tokens, length):
    first, second = vectors(100), vectors(50)
    cropped, fresh = make_store(along_tokens), make_store(along_tokens)
    cropped.append(first)
    cropped.length = length
    cropped.append(second)
    fresh.append(torch.cat([first[:, :, :length], second], 2))
    assert_same(cropped, fresh)


MAPS = {
    "repeat": lambda x: x.repeat_interleave(2, 0),
    "select": lambda x: x[torch.tensor([1])],
    "reorder": lambda x: x.index_select(0, torch.tensor([1, 1])),
}


@both_kinds
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("tokens", [0, 45])
def test_map_batch(along_tokens, name, tokens):
    function, x, more = MAPS[name], vectors(tokens), vectors(30)
    store = make_store(along_tokens)
    if tokens:
        store.append(x)
    store.map_batch(function)
    store.append(function(more))
    batch = function(x).shape[0]
    expected = make_store(along_tokens)
    expected.append(torch.cat([x, more], 2))
    decoded = store.decode(0, store.length, torch.float32)
    assert decoded.shape == (batch, 3, tokens + 30, DIM)
    assert torch.equal(decoded, function(expected.decode(0, expected.length, torch.float32)))


@both_kinds
def test_packed_store_across_inference_mode(along_tokens):
    x = vectors(90)
    with torch.inference_mode():
        store = make_store(along_tokens)
        store.append(x[:, :, :40] * 1)
        store.map_batch(lambda part: part * 1)
    assert not any(part.is_inference() for part in store.tensors())
    with torch.no_grad():
        store.append(x[:, :, 40:70])
    with torch.inference_mode():
        store.append(x[:, :, 70:])
    whole = make_store(along_tokens)
    whole.append(x)
    assert_same(store, whole)


def test_tensors_are_in_the_documented_order():
    store = make_store(False)
    for name, part in zip(PACKED_FIELDS, store.tensors(), strict=True):
        assert part is getattr(store, name)


# ---- exact tokens


def exact(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, tokens, DIM), torch.randn(2, 3, tokens, DIM + 4)


@pytest.mark.parametrize("room", [1, 16, 200])
def test_exact_store_is_a_concatenation(room):
    store, pieces = ExactStore(), [exact(n) for n in PIECES]
    for piece in pieces:
        store.append(*piece, room)
        capacity = store.key_buffer.shape[2]
        assert store.length <= capacity <= max(room, 5 * store.length / 4, PIECES[0])
    assert torch.equal(store.keys, torch.cat([k for k, _ in pieces], 2))
    assert torch.equal(store.values, torch.cat([v for _, v in pieces], 2))
    assert store.token_bytes == 2 * 3 * (DIM + DIM + 4) * 4


def test_the_first_tokens_are_held_without_a_copy():
    store, (keys, values) = ExactStore(), exact(9)
    store.append(keys, values, 64)
    assert store.keys.data_ptr() == keys.data_ptr() and store.values.data_ptr() == values.data_ptr()


SAME_MEMORY = {"nothing": None, "same": lambda x: x, "view": lambda x: x[:1], "copy": lambda x: x[torch.tensor([0])]}


@pytest.mark.parametrize("between", SAME_MEMORY)
def test_tensors_of_the_caller_are_never_written(between):
    store, (keys, values), (more_keys, more_values) = ExactStore(), exact(9), exact(3)
    copies, function = (keys.clone(), values.clone()), SAME_MEMORY[between]
    store.append(keys, values, 64)
    if function is not None:
        store.map_batch(function)
        more_keys, more_values = function(more_keys), function(more_values)
    store.length = 5
    store.append(more_keys, more_values, 64)
    store.length = 4
    store.append(more_keys, more_values, 64)
    assert torch.equal(keys, copies[0]) and torch.equal(values, copies[1])
    batch = store.keys.shape[0]
    assert torch.equal(store.keys, torch.cat([keys[:batch, :, :4], more_keys], 2))
    assert torch.equal(store.values, torch.cat([values[:batch, :, :4], more_values], 2))


def test_keep_copies():
    store, (keys, values) = ExactStore(), exact(9)
    store.keep(keys, values, 32)
    keys.zero_()
    assert store.key_buffer.shape[2] == 32 and store.length == 9 and store.keys.any()
    store.keep(store.keys[:, :, 2:], store.values[:, :, 2:], 0)
    assert store.key_buffer.shape[2] == store.length == 7


@pytest.mark.parametrize("value_dim, kernels", [(DIM, [2, 1, 1, 2, 1]), (DIM + 4, [2] * 5)])
def test_tokens_in_the_middle_are_dropped(value_dim, kernels, monkeypatch):
    """By one kernel for keys and values, once they are halves of one tensor; beams and copies take them apart or along."""
    store, keys, values = ExactStore(), torch.randn(2, 3, 60, DIM), torch.randn(2, 3, 60, value_dim)
    calls, cat, seen = [], torch.cat, []
    store.append(keys, values, 12)
    for number in range(5):
        if number == 2:
            store = copy.deepcopy(store)
        if number == 3:
            store.map_batch(lambda x: x[[1, 0]])
            keys, values = keys[[1, 0]], values[[1, 0]]
        before = store.keys, store.values, store.keys.clone(), store.values.clone()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "cat", lambda *args, **kwargs: calls.append(number) or cat(*args, **kwargs))  # noqa: B023
            store.drop(4, 9, 64)
        keys, values = (cat((x[:, :, :4], x[:, :, 9:]), 2) for x in (keys, values))
        assert torch.equal(store.keys, keys) and torch.equal(store.values, values)
        assert torch.equal(before[0], before[2]) and torch.equal(before[1], before[3])  # snapshots stay
        more = torch.randn(2, 3, 1, DIM), torch.randn(2, 3, 1, value_dim)
        store.append(*more, 64)
        keys, values = cat((keys, more[0]), 2), cat((values, more[1]), 2)
        seen.append(store.key_buffer.shape[2])
    assert [calls.count(number) for number in range(5)] == kernels and seen == [64] * 5


LAYOUTS = {
    "dense": lambda x: x,
    "tokens_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "one_for_all": lambda x: x[:1].expand(2, -1, -1, -1),
    "odd_start": lambda x: torch.nn.functional.pad(x, (1, 3))[..., 1:-3],
    "odd_stride": lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1],
    "coordinates_apart": lambda x: x.mT.contiguous().mT,
    "foreign": lambda x: torch.frombuffer(b"ab" + x.numpy().tobytes(), dtype=x.dtype, offset=2).view(x.shape),
}


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [20, 21, 22])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_dropped_from_any_layout(layout, dim, dtype):
    """In elements of 8 bytes where rows consist of such, and begin where a device can read one."""
    store, pair = ExactStore(), [LAYOUTS[layout](torch.randn(2, 3, 30, dim).to(dtype)) for _ in range(2)]
    moved = _in_large_elements(pair[0])[0]
    fits = dim * dtype.itemsize % 8 == 0 and layout in ("dense", "tokens_first", "one_for_all")
    assert (moved.dtype == torch.int64) == fits
    store.append(*pair, 12)
    for _ in range(2):
        store.drop(4, 9, 12)
        pair = [torch.cat((x[:, :, :4], x[:, :, 9:]), 2) for x in pair]
        assert torch.equal(store.keys, pair[0]) and torch.equal(store.values, pair[1])


@pytest.mark.parametrize("name", MAPS)
def test_exact_map_batch(name):
    store, pieces = ExactStore(), [exact(n) for n in (9, 3)]
    store.append(*pieces[0], 64)
    store.map_batch(MAPS[name])
    store.append(*(MAPS[name](x) for x in pieces[1]), 64)
    assert torch.equal(store.keys, MAPS[name](torch.cat([k for k, _ in pieces], 2)))


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad, contextlib.nullcontext])
@pytest.mark.parametrize("then", [torch.inference_mode, torch.no_grad, contextlib.nullcontext])
def test_exact_store_across_inference_mode(first, then):
    pieces = [exact(n) for n in (9, 1, 1, 3, 1)]
    store = ExactStore()
    for index, piece in enumerate(pieces):
        with first() if index % 2 == 0 else then():
            store.append(*(x * 1 for x in piece), 12)
        if index == 2:
            with then():
                store.map_batch(lambda x: x.index_select(0, torch.tensor([1, 0])))
    expected = torch.cat([*(k[[1, 0]] for k, _ in pieces[:3]), *(k for k, _ in pieces[3:])], 2)
    assert torch.equal(store.keys, expected)
