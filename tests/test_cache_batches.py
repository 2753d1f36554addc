"""A cache that is reordered, repeated, cropped, copied, saved and reused goes on as if it had always been that cache."""

import copy
import io

import pytest
import tiny_models
import torch
from oracle import forced_logits, oracle_cache, relative_error
from transformers import DynamicCache

from torch_kvq import IsoQuantCache, RaBitQSparseCache
from torch_kvq._requirements import cache_keyword
from torch_kvq.caches.isoquant_layer import IsoQuantLayer

pytestmark = pytest.mark.versions

PACKED = dict(window_len=32, flush_len=16)
MODELS = tiny_models.names("llama", "gpt_oss", "deepseek_v3")
FEW = [("llama", "sdpa"), ("llama", "eager"), ("deepseek_v3", "sdpa"), ("deepseek_v3", "eager")]
TOLERANCE = 1e-5
STATES = torch.zeros(2, 2, 1, 16)


def one_by_one(ids):
    return list(ids.split(1, 1))


def filled(model, ids, mask=None, **options):
    """A cache that holds ``ids`` but for the last eight by prompt, the last eight by decoding."""
    cache = IsoQuantCache(**{**PACKED, **options})
    forced_logits(model, cache, [ids[:, :-8], *one_by_one(ids[:, -8:])], mask)
    return cache


def goes_on(model, cache, ids, mask=None, places=None):
    """Logits of more tokens."""
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, position_ids=places, **{cache_keyword(): cache})
    return out.logits


def state_of(cache):
    """Every number of a cache, to compare bits."""
    state = []
    for layer in cache.layers:
        if isinstance(layer, IsoQuantLayer):
            state += [layer.exact.keys, layer.exact.values]
            for store in (layer.keys_store, layer.values_store):
                if store is not None:
                    state += [store.scale[:, :, : store.length], store.decode(0, store.length, torch.float32)]
    return state


def assert_same_state(ours, theirs):
    ours, theirs = state_of(ours), state_of(theirs)
    assert len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs))


# ---- rows

ROWS = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "select_two": (lambda cache: cache.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
    "select_uint8": (lambda cache: cache.batch_select_indices(torch.tensor([0, 2, 1], dtype=torch.uint8)), [0, 2, 1]),
    "reorder_uint8": (lambda cache: cache.reorder_cache(torch.tensor([0, 2, 1], dtype=torch.uint8)), [0, 2, 1]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@pytest.mark.parametrize("family, attn", [("llama", "sdpa"), ("gpt_oss", "eager"), ("deepseek_v3", "sdpa")])
@pytest.mark.parametrize("length", [40, 110])
@pytest.mark.parametrize("name", ROWS)
def test_rows_equal_a_rebuilt_cache(family, attn, length, name):
    model, (change, rows) = tiny_models.build(family, attn), ROWS[name]
    ids, more = tiny_models.prompt(3, length, seed=2), tiny_models.prompt(6, 24, seed=3)[: len(rows)]
    cache = filled(model, ids)
    change(cache)
    rebuilt = filled(model, ids[rows])
    got, wanted = (forced_logits(model, each, one_by_one(more)) for each in (cache, rebuilt))
    assert relative_error(got, wanted) <= 1e-4  # the batch size changes the rounding before codes are chosen
    assert cache.stats.decompress_calls == 0


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_padded_batch(name):
    model, (change, rows) = tiny_models.build("llama", "sdpa"), ROWS[name]
    batch = tiny_models.left_padded([110, 60, 90])
    more = tiny_models.prompt(6, 24, seed=3)[: len(rows)]
    cache, rebuilt = IsoQuantCache(**PACKED), IsoQuantCache(**PACKED)
    forced_logits(model, cache, [batch["input_ids"]], batch["attention_mask"])
    change(cache)
    forced_logits(model, rebuilt, [batch["input_ids"][rows]], batch["attention_mask"][rows])
    mask = torch.cat([batch["attention_mask"][rows], torch.ones_like(more)], 1)
    places = mask.cumsum(1)[:, 110:] - 1
    for step in range(24):
        args = (more[:, step : step + 1], mask[:, : 111 + step], places[:, step : step + 1])
        assert relative_error(goes_on(model, cache, *args), goes_on(model, rebuilt, *args)) <= 1e-4


@pytest.mark.parametrize("family", ["falcon_h1", "lfm2", "gemma3"])
def test_reorder_reaches_every_kind_of_layer(family):
    model = tiny_models.build(family, "sdpa")
    ids, more = tiny_models.prompt(2, 110, seed=2), tiny_models.prompt(2, 20, seed=3)
    cache, rebuilt = filled(model, ids), filled(model, ids[[1, 1]])
    cache.reorder_cache(torch.tensor([1, 1]))
    got, wanted = (forced_logits(model, each, one_by_one(more)) for each in (cache, rebuilt))
    assert relative_error(got, wanted) <= 1e-4


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda cache: cache.reorder_cache([True, False]), r"beam_idx must be a vector of integers.*got torch.bool \[2\]"),
        (lambda cache: cache.reorder_cache([0, "1"]), r"beam_idx must be a vector of integers, one a sequence, got \[0, '1'\]"),
        (lambda cache: cache.reorder_cache(torch.ones(2)), r"beam_idx must be a vector.*got torch.float32 \[2\]"),
        (lambda cache: cache.reorder_cache([True, False]), r"beam_idx must be a vector.*got torch.bool \[2\]"),
        (lambda cache: cache.reorder_cache(torch.tensor([0, 2])), "beam_idx must be from 0 to 1, got 2"),
        (lambda cache: cache.reorder_cache([-1, 0]), "beam_idx must be from 0 to 1, got -1"),
        (lambda cache: cache.batch_select_indices([1, 2]), "indices must be from -2 to 1, got 2"),
        (lambda cache: cache.batch_select_indices([-3]), "indices must be from -2 to 1, got -3"),
        (lambda cache: cache.batch_select_indices([True] * 3), "indices must have a bool for each of the 2 sequences, got 3"),
        (lambda cache: cache.batch_select_indices(0), "indices must be a vector of integers, one a sequence, got 0"),
        (lambda cache: cache.batch_select_indices(torch.tensor(-1)), r"indices must be a vector.*got torch.int64 \[\]"),
        (lambda cache: cache.batch_repeat_interleave(0), "repeats must be an integer of at least 1, got 0"),
        (lambda cache: cache.update(STATES, STATES, -1), "layer_idx must be the index of a layer, got -1"),
        (lambda cache: cache.update(STATES, STATES, None), "layer_idx must be the index of a layer, got None"),
        (lambda cache: cache.update([[1.0]], STATES, 0), r"key_states must be a tensor, got \[\[1.0\]\]"),
        (lambda cache: cache.update(STATES, None, 0), "value_states must be a tensor, got None"),
        (lambda cache: cache.get_seq_length("x"), "layer_idx must be the index of a layer, got 'x'"),
        (lambda cache: cache.get_mask_sizes(1, None), "layer_idx must be the index of a layer, got None"),
    ],
)
@pytest.mark.parametrize("kind", [IsoQuantCache, RaBitQSparseCache])
def test_what_is_no_choice_of_rows_or_layers_changes_nothing(kind, change, message):
    model, ids = tiny_models.build("llama"), tiny_models.prompt(2, 150)
    cache = kind(model.config, **(dict(min_dense_len=0) if kind is RaBitQSparseCache else {}), window_len=32)
    forced_logits(model, cache, [ids])
    held = cache.nbytes, cache.get_seq_length()
    with pytest.raises((ValueError, TypeError), match=message):
        change(cache)
    assert (cache.nbytes, cache.get_seq_length()) == held
    assert forced_logits(model, cache, [ids[:, :1]]).shape[0] == 2


def test_rows_of_an_empty_cache():
    model = tiny_models.build("llama", "sdpa")
    cache = IsoQuantCache(model.config, **PACKED)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0]))
    cache.crop(0)
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    assert forced_logits(model, cache, [tiny_models.prompt(1, 9)]).isfinite().all()


# ---- crop

LENGTH = 140  # 4 sinks, a body, 32 to 47 recent tokens


@pytest.mark.parametrize("family, attn", FEW)
@pytest.mark.parametrize("kept", [139, 120, 90, 6, 5, 4, 1])
def test_crop_then_more_tokens(family, attn, kept):
    """Cropped into window, body and sinks: what follows equals a dense twin that was cropped too."""
    model = tiny_models.build(family, attn)
    ids, more = tiny_models.prompt(2, LENGTH, seed=2), tiny_models.prompt(2, 40, seed=3)
    logits = []
    for cache in (IsoQuantCache(**PACKED), oracle_cache(model.config, **PACKED)):
        forced_logits(model, cache, [ids[:, :-8], *one_by_one(ids[:, -8:])])
        cache.crop(kept - LENGTH)
        assert cache.get_seq_length() == kept
        if not logits:
            assert cache.stats.fallback_calls == 0  # a crop that unpacks is counted, not warned of
        logits.append(forced_logits(model, cache, [more[:, :20], *one_by_one(more[:, 20:])]))
        assert cache.get_seq_length() == kept + 40
    assert relative_error(*logits) <= TOLERANCE


def test_crop_within_the_window_is_as_if_never_appended():
    model = tiny_models.build("llama", "sdpa")
    ids, more = tiny_models.prompt(1, 132, seed=2), tiny_models.prompt(1, 30, seed=3)
    cache, plain = filled(model, ids), filled(model, ids)
    forced_logits(model, cache, one_by_one(more[:, :5]))
    cache.crop(-5)
    assert_same_state(cache, plain)
    got, wanted = (forced_logits(model, each, one_by_one(more)) for each in (cache, plain))
    assert torch.equal(got, wanted)
    assert_same_state(cache, plain)


def test_crop_to_nothing_is_a_fresh_cache():
    model, ids = tiny_models.build("llama", "sdpa"), tiny_models.prompt(2, LENGTH, seed=2)
    cache = filled(model, ids)
    cache.crop(-LENGTH)
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    other = tiny_models.prompt(3, 120, seed=5)  # another batch size is fine now
    got = forced_logits(model, cache, [other[:, :100], *one_by_one(other[:, 100:])])
    assert torch.equal(got, forced_logits(model, IsoQuantCache(**PACKED), [other[:, :100], *one_by_one(other[:, 100:])]))


@pytest.mark.parametrize("kept", [100, 55, 30, 12, 5])
def test_crop_a_padded_batch(kept):
    """Down to where a row is padding only."""
    model, batch = tiny_models.build("llama", "sdpa"), tiny_models.left_padded([120, 70, 100])
    more = tiny_models.prompt(3, 50, seed=3)
    mask = torch.cat([batch["attention_mask"][:, :kept], torch.ones_like(more)], 1)
    places = (mask.cumsum(1) - 1).clamp_min(0)
    logits = []
    for cache in (IsoQuantCache(**PACKED), oracle_cache(model.config, **PACKED)):
        forced_logits(model, cache, [batch["input_ids"]], batch["attention_mask"])
        cache.crop(kept - 120)
        steps = [slice(0, 20), *(slice(at, at + 1) for at in range(20, 50))]
        each = [goes_on(model, cache, more[:, at], mask[:, : kept + at.stop], places[:, kept:][:, at]) for at in steps]
        logits.append(torch.cat(each, 1))
    assert logits[0].isfinite().all()
    assert relative_error(*logits) <= TOLERANCE


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "falcon_h1"])
def test_crop_that_a_layer_cannot_do_changes_nothing(family):
    """Sliding windows and recurrent states forget; the library refuses, and packed layers must not have been cropped."""
    model, ids = tiny_models.build(family, "sdpa"), tiny_models.prompt(1, 120, seed=2)
    cache, more = filled(model, ids), tiny_models.prompt(1, 20, seed=3)
    before = copy.deepcopy(cache)
    with pytest.raises(RuntimeError):
        cache.crop(-3)
    assert cache.get_seq_length() == 120
    assert torch.equal(*(forced_logits(model, each, one_by_one(more)) for each in (cache, before)))


# ---- the exact tokens


@pytest.mark.parametrize("lengths", [(120, 120), (120, 50), (120, 3)])
def test_window_and_sinks_stay_bit_exact(lengths):
    """In every row, at every step; a row that had fewer real tokens than sinks when it was packed has those."""
    config, batch = tiny_models.build("llama", "sdpa").config, tiny_models.left_padded(list(lengths))
    cache, dense = IsoQuantCache(config, **PACKED), DynamicCache(config=config)
    generator = torch.Generator().manual_seed(1)

    def feed(tokens, seen):
        mask = batch["attention_mask"].bool()
        mask = torch.nn.functional.pad(mask, (0, seen - 120), value=True)[:, None, None]
        for layer in range(2):
            keys, values, query = (torch.randn(2, 2, tokens, 32, generator=generator) for _ in range(3))
            dense.update(keys, values, layer)
            torch.nn.functional.scaled_dot_product_attention(query, *cache.update(keys, values, layer), mask)

    feed(120, 120)
    for step in range(90):
        feed(1, 121 + step)
        for ours, theirs in zip(cache.layers, dense.layers):
            for role, exact in (("k", theirs.keys), ("v", theirs.values)):
                mine = ours.pieces().rebuilt(role)
                assert torch.equal(mine[:, :, -32:], exact[:, :, -32:])
                for row, length in enumerate(lengths):
                    sinks = slice(120 - length, 120 - length + min(4, length))
                    assert torch.equal(mine[row, :, sinks], exact[row, :, sinks])
                assert not torch.equal(mine, exact)
            assert ours.exact.length <= 4 + 32 + 16


# ---- copies and files


@pytest.mark.parametrize(
    "family, attn", [("llama", "sdpa"), ("deepseek_v3", "sdpa"), ("falcon_h1", "sdpa"), ("gemma3", "sdpa")]
)
@pytest.mark.parametrize("length", [40, 110])
@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_copy_goes_on_bit_equal(family, attn, length, how):
    model, ids, more = (
        tiny_models.build(family, attn),
        tiny_models.prompt(2, length, seed=2),
        tiny_models.prompt(2, 30, seed=3),
    )
    cache = filled(model, ids)
    if how == "deepcopy":
        other = copy.deepcopy(cache)
    else:
        file = io.BytesIO()
        torch.save(cache, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert other.stats is not cache.stats and all(
        layer.stats is other.stats for layer in other.layers if isinstance(layer, IsoQuantLayer)
    )
    got = forced_logits(model, other, one_by_one(more))
    assert cache.get_seq_length() == length and other.get_seq_length() == length + 30
    assert torch.equal(got, forced_logits(model, cache, one_by_one(more)))
    assert other.stats.attend_calls == cache.stats.attend_calls


def test_copy_of_a_cache_that_knows_no_config():
    cache = IsoQuantCache(**PACKED)
    with pytest.warns(UserWarning, match="no model config"):
        cache.update(torch.randn(1, 2, 5, 32), torch.randn(1, 2, 5, 32), 0)
    other = copy.deepcopy(cache)
    other.update(torch.randn(1, 2, 5, 32), torch.randn(1, 2, 5, 32), 1)
    assert len(cache.layers) == 1 and len(other.layers) == 2 and other.layers[1].stats is other.stats


# ---- reuse


def test_reset_then_anything():
    """Another batch size, dtype and model, on both a cache that finds its model and one that was told."""
    model, ids = tiny_models.build("llama", "sdpa"), tiny_models.prompt(2, 110, seed=2)
    cache = filled(model, ids)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0 and cache.stats.transient_bytes == 0
    others = (
        ("llama", torch.bfloat16),
        ("gemma3", torch.float32),
        ("qwen3_next", torch.float32),
        ("deepseek_v3", torch.float32),
    )
    for family, dtype in others:
        other = tiny_models.build(family, "sdpa", dtype=dtype)
        more = tiny_models.prompt(3, 120, seed=5)
        pieces = [more[:, :100], *one_by_one(more[:, 100:])]
        assert torch.equal(forced_logits(other, cache, pieces), forced_logits(other, IsoQuantCache(**PACKED), pieces))
        cache.reset()
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1", "lfm2"])
def test_reset_with_a_given_config(family):
    model, ids = tiny_models.build(family, "sdpa"), tiny_models.prompt(1, 110, seed=2)
    cache = IsoQuantCache(model.config, **PACKED)
    pieces = [ids[:, :100], *one_by_one(ids[:, 100:])]
    first = forced_logits(model, cache, pieces)
    cache.reset()
    assert [row.num_tokens for row in cache.report().rows] == [0] * len(cache.layers)
    assert torch.equal(forced_logits(model, cache, pieces), first)


@pytest.mark.parametrize("length", [40, 110])
@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_inference_mode_and_no_grad_on_one_cache(length, first):
    model, ids, more = (
        tiny_models.build("llama", "sdpa"),
        tiny_models.prompt(2, length),
        tiny_models.prompt(2, 40, seed=3),
    )
    second = torch.no_grad if first is torch.inference_mode else torch.inference_mode
    cache, keyword = IsoQuantCache(**PACKED), cache_keyword()
    got = []
    with first():
        model(input_ids=ids, **{keyword: cache})
    for step, tokens in enumerate(one_by_one(more)):
        with (first, second)[step // 3 % 2]():
            got.append(model(input_ids=tokens, **{keyword: cache}).logits)
            cache.reorder_cache(torch.tensor([0, 1]))
    plain = IsoQuantCache(**PACKED)
    wanted = forced_logits(model, plain, [ids, *one_by_one(more)])[:, length:]
    assert torch.equal(torch.cat(got, 1), wanted)


def test_autocast():
    model, ids = tiny_models.build("llama", "sdpa"), tiny_models.prompt(1, 130)
    pieces = [ids[:, :100], *one_by_one(ids[:, 100:])]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = IsoQuantCache(**PACKED)
        got = forced_logits(model, cache, pieces)
        wanted = forced_logits(model, oracle_cache(model.config, **PACKED), pieces)
    assert relative_error(got.float(), wanted.float()) <= 2e-2
    assert cache.stats.attend_calls > 0 and cache.stats.decompress_calls == 0


@pytest.mark.parametrize("family, attn", MODELS)
def test_three_turns(family, attn):
    """A chat: long prompts, answers in between; as a dense twin has it, and each turn reads the packed history."""
    model, ids = tiny_models.build(family, attn), tiny_models.prompt(1, 300, seed=7)
    pieces = []
    for turn in range(3):
        start = 100 * turn
        pieces += [ids[:, start : start + 85], *one_by_one(ids[:, start + 85 : start + 100])]
    cache = IsoQuantCache(**PACKED)
    got = forced_logits(model, cache, pieces)
    assert relative_error(got, forced_logits(model, oracle_cache(model.config, **PACKED), pieces)) <= TOLERANCE
    assert cache.stats.decompress_calls == 0
    again = IsoQuantCache(**PACKED)
    assert torch.equal(got, forced_logits(model, again, pieces))
