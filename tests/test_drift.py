"""Keys that move away from their centre get another one: estimates stay those of the theory, with less noise."""

import copy
import io

import pytest
import tiny_models
import torch
from test_sparse_cache import sparse

from torch_kvq import sparse_store
from torch_kvq.attention.compose import attend_exact
from torch_kvq.attention.select import select_tokens
from torch_kvq.codecs.rabitq import RaBitQConfig, RaBitQIndex
from torch_kvq.drift import DRIFT, LOOK_LEN, MAX_CENTRES
from torch_kvq.sparse_store import IndexedKeys, RowStore

DIM, FIRST, LATER, BLOCK = 64, 1500, 2600, 50
START = 1504  # where the first whole block of 32 begins


def stream(shift, tokens=LATER):
    """Keys ``[1, 2, FIRST + tokens, DIM]`` of spread 1 a channel; the later ones lie off the first by ``shift`` of that."""
    keys, there = torch.randn(1, 2, FIRST + tokens, DIM), torch.randn(1, 2, 1, DIM)
    keys[:, :, FIRST:] += shift**0.5 * there * DIM**0.5 / there.norm(dim=-1, keepdim=True)
    return keys


def indexed(keys, seed=0, first=FIRST, block=BLOCK):
    """An index of ``keys`` that came as a prompt and then in blocks."""
    store = RowStore(torch.float32, *keys.shape[:2], keys.shape[3], keys.device, False)
    config, centre = RaBitQConfig("hadamard2", seed), keys[:, :, :first].mean(2)
    index = IndexedKeys(config, store, *keys.shape[:2], centre, query_centre=torch.full_like(centre, 0.1))
    for part in (keys[:, :, :first], *keys[:, :, first:].split(block, 2)):
        index.append(part)
    return index


def scores_of(index: RaBitQIndex, queries, tokens):
    return index.scores(index.code(queries, 0.5), 0, tokens)


def test_later_centres_are_those_of_indices_of_their_own():
    keys, queries = torch.randn(2, 2, 200, DIM), torch.randn(2, 4, 3, DIM)
    centres = [torch.randn(2, 2, DIM) for _ in range(3)]
    query_centre = torch.randn(2, 2, DIM)
    places = ((0, 70), (70, 75), (75, 200))
    parts = [RaBitQIndex.of(keys[:, :, a:b], None, c, None, query_centre) for (a, b), c in zip(places, centres)]
    wanted = torch.cat([scores_of(part, queries, size) for part, size in zip(parts, (70, 5, 125))], -1)
    whole = RaBitQIndex.of(torch.full_like(keys, torch.nan), None, centres[0], None, query_centre)
    whole = RaBitQIndex(DIM, whole.sign, whole.factor, whole.bias, whole.transform, ((70, centres[1]), (75, centres[2])))
    for start, stop in places:
        whole.write(keys[:, :, start:stop], start)
    assert torch.allclose(scores_of(whole, queries, 200), wanted, atol=1e-4)
    for start, stop in ((0, 60), (60, 72), (71, 73), (72, 180), (90, 91)):
        part = whole.scores(whole.code(queries, 0.5), start, stop)
        assert torch.allclose(part, wanted[..., start:stop], atol=1e-4)


def test_noise_is_that_of_keys_at_their_own_centre(monkeypatch):
    """Off by twice the spread there is three times the variance; without bias in both."""
    queries = torch.randn(1, 4, 2, DIM)
    errors = {True: [], False: []}
    for follows, found in errors.items():
        monkeypatch.setattr(sparse_store, "MAX_CENTRES", MAX_CENTRES if follows else 0)
        for seed in range(48):
            torch.manual_seed(seed)
            keys = stream(2.0)
            index = indexed(keys, seed)
            assert bool(index._later) == follows
            logits = 0.5 * queries @ keys.repeat_interleave(2, 1).transpose(-1, -2)
            found.append((scores_of(index.index(), queries, keys.shape[2]) - logits)[..., FIRST + LOOK_LEN :])
    variance = {}
    for follows, found in errors.items():
        each = torch.stack([error.mean() for error in found])
        assert abs(each.mean()) <= 4 * each.std() / len(each) ** 0.5
        variance[follows] = torch.stack(found).square().mean()
    assert variance[True].item() == pytest.approx(variance[False].item() / 3, rel=0.15)


@pytest.mark.parametrize("shift, moves", [(0.0, False), (DRIFT / 1.5, False), (DRIFT * 1.5, True)])
def test_keys_move_once_they_are_off_by_half_their_spread(shift, moves):
    assert bool(indexed(stream(shift))._later) == moves


def test_the_new_centre_is_the_mean_of_what_was_seen():
    keys = stream(1.0)
    index = indexed(keys)
    ((first, centre),) = index._later
    seen = -(-LOOK_LEN // BLOCK) * BLOCK
    assert first == START and torch.allclose(centre, keys[:, :, START : FIRST + seen].mean(2), atol=1e-5)


def test_a_long_turn_has_a_centre_of_its_own():
    keys = stream(1.0)
    index = indexed(keys, block=LATER // 2)
    assert [first for first, _ in index._later] == [START]
    assert torch.allclose(index._later[0][1], keys[:, :, START : FIRST + LATER // 2].mean(2), atol=1e-5)


def test_centres_are_few():
    keys = torch.randn(1, 1, FIRST + 14 * LOOK_LEN, DIM) + torch.arange(FIRST + 14 * LOOK_LEN)[:, None] / LOOK_LEN
    index = indexed(keys, block=LOOK_LEN)
    assert len(index._later) == MAX_CENTRES
    assert scores_of(index.index(), torch.randn(1, 1, 1, DIM), index.length).isfinite().all()


def test_a_snapshot_stays_as_it_is():
    keys, queries = stream(1.0), torch.randn(1, 4, 1, DIM)
    index = indexed(keys[:, :, : FIRST + 1050])
    snapshot, length = index.index(), index.length
    before = scores_of(snapshot, queries, length)
    index.append(keys[:, :, length : length + BLOCK])
    assert index._later and torch.equal(scores_of(snapshot, queries, length), before)
    assert not torch.equal(scores_of(index.index(), queries, length), before)


def test_what_is_taken_back_takes_its_centre_along():
    keys, queries = stream(1.0), torch.randn(1, 4, 1, DIM)
    index = indexed(keys)
    index.drop_last(index.length - FIRST)
    assert not index._later
    index.append(keys[:, :, FIRST : FIRST + 20])
    plain = indexed(keys[:, :, : FIRST + 20])
    assert torch.equal(*(scores_of(each.index(), queries, FIRST + 20) for each in (index, plain)))


def test_copies_and_beams_keep_the_centres():
    keys = torch.cat([stream(1.0), stream(1.0)])
    queries = torch.randn(2, 4, 1, DIM)
    index = indexed(keys)
    wanted = scores_of(index.index(), queries, index.length)
    kept = io.BytesIO()
    torch.save(index, kept)
    kept.seek(0)
    for twin in (copy.deepcopy(index), torch.load(kept, weights_only=False)):
        assert torch.equal(scores_of(twin.index(), queries, index.length), wanted)
        twin.append(keys[:, :, :BLOCK])
    order = torch.tensor([1, 0])
    index.map_batch(lambda x: x[order])
    assert torch.equal(scores_of(index.index(), queries[order], index.length), wanted[order])


def test_keys_that_are_not_centred_or_packed_are_not_looked_at():
    config = tiny_models.build("llama", "sdpa", head_dim=DIM).config
    for options in (dict(center=False), dict(store="isoquant")):
        cache = sparse(config, **options)
        for part in stream(3.0).split(500, 2):
            cache.update(part, part, 0)
        assert cache.layers[0].keys_store._later == []


@pytest.mark.parametrize("store", ["exact", "host"])
def test_attention_goes_on_around_another_centre(store):
    """The whole cache: what is selected by p = 1 is everything, and by less it is what the estimates say."""
    keys, values = stream(3.0), torch.randn(1, 2, FIRST + LATER, DIM)
    config = tiny_models.build("llama", "sdpa", head_dim=DIM).config
    query = 2 * torch.randn(1, 4, 1, DIM)
    wanted = attend_exact(query, keys, values)[0]
    errors = []
    for top_p in (1.0, 0.98):
        cache = sparse(config, top_p=top_p, store=store, audit=True)
        for part in zip(keys.split(500, 2), values.split(500, 2)):
            cache.update(*part, 0)
        pieces = cache.layers[0].pieces()
        assert cache.layers[0].keys_store._later
        errors.append((pieces.attend(query, None, DIM**-0.5)[0] - wanted).norm() / wanted.norm())
    assert errors[0] < 1e-5 < errors[1] < 0.3 and cache.stats.kept_mass > 0.9


def test_selections_are_those_of_the_scores_around_every_centre():
    keys, config = stream(3.0), tiny_models.build("llama", "sdpa", head_dim=DIM).config
    cache, query = sparse(config, top_p=0.9), torch.randn(1, 4, 1, DIM)
    for part in keys.split(500, 2):
        cache.update(part, part, 0)
    pieces = cache.layers[0].pieces()
    assert pieces.index.later
    near = torch.empty_like(query), torch.empty(1, 4, 1)
    scores = scores_of(pieces.index, query, pieces.length)
    found = pieces._attend_and_select(query, None, None, 0.5, 0.0, near)
    wanted = select_tokens(scores, near[1], 0.9, 2, None)
    assert torch.equal(found.count, wanted.count)
    for head, count in enumerate(found.count[0]):
        assert torch.equal(found.indices[0, head, :count], wanted.indices[0, head, :count])


def no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("injected")


@pytest.mark.parametrize("what", ["look", "write", "reserve"])
def test_without_memory_nothing_is_lost(what, monkeypatch):
    """To look, to index again around another centre, to grow: the first two are done without, the last says so."""
    keys, queries = stream(3.0), torch.randn(1, 4, 1, DIM)
    index = indexed(keys[:, :, : FIRST + LOOK_LEN + BLOCK])
    before, length, centres = scores_of(index.index(), queries, index.length), index.length, len(index._later)
    part, rest = keys[:, :, length : length + BLOCK], keys[:, :, length + BLOCK :]
    if what == "reserve":
        monkeypatch.setattr(index, "reserve", no_memory)
        with pytest.raises(RuntimeError, match="injected"):
            index.append(part)
        assert index.length == index.store.length == length
        assert torch.equal(scores_of(index.index(), queries, length), before)
    elif what == "write":
        monkeypatch.setattr(index._watch, "moved", lambda: (START, keys[:, :, START:length].mean(2)))
        monkeypatch.setattr(index.store, "decode", no_memory)
        index.append(part)
        assert len(index._later) == centres
        assert torch.equal(scores_of(index.index(), queries, length), before)
    else:
        monkeypatch.setattr(index._watch, "is_due", lambda length: True)
        monkeypatch.setattr(index._watch, "look", no_memory)
        index.append(part)
    monkeypatch.undo()
    for more in (part, rest) if what == "reserve" else (rest,):
        index.append(more)
    assert index.length == index.store.length == keys.shape[2]
    assert torch.equal(index.store.tensors()[0][:, :, : index.length], keys)


@pytest.mark.gpu
def test_a_gpu_finds_the_same_centres():
    keys, queries = stream(1.0), torch.randn(1, 4, 1, DIM)
    here, there = indexed(keys), indexed(keys.cuda())
    assert [first for first, _ in here._later] == [first for first, _ in there._later]
    ours, theirs = (scores_of(each.index(), q, FIRST + LATER) for each, q in ((there, queries.cuda()), (here, queries)))
    assert torch.allclose(ours.cpu(), theirs, atol=2e-2)
