"""``RaBitQSparseCache``: with p = 1 it is ``DynamicCache`` in every use; with less it attends to what it says it selected."""

import copy
import io

import pytest
import tiny_models
import torch
from oracle import forced_logits, relative_error
from test_generate import MODES, ROLLBACK, generate, inputs_for, padded, repetitive
from transformers import DynamicCache

from torch_kvq import RaBitQSparseCache
from torch_kvq.attention.compose import attend_exact
from torch_kvq.attention.select import select_tokens

pytestmark = [pytest.mark.versions, pytest.mark.filterwarnings("ignore:top_p of 1")]

INDEXED = dict(window_len=32, flush_len=16, min_dense_len=0)
FAMILIES = tiny_models.names(
    *("llama", "qwen2", "gemma3", "mistral_full", "mixtral", "gpt_oss", "qwen3_next", "falcon_h1", "nemotron_h", "lfm2")
)
FEW = [("llama", "sdpa"), ("llama", "eager"), ("gpt_oss", "eager")]
STORES = ("exact", "host")
EXACT = 1e-6


def sparse(config=None, **options):
    return RaBitQSparseCache(config, **{**INDEXED, **options})


def steps_of(ids, prompt):
    """A prompt, then token by token, a turn of 20 and one of 3 tokens among them."""
    sizes = [prompt, *[1] * 20, 20, *[1] * 4, 3, *[1] * 40]
    return list(ids.split([*sizes, ids.shape[1] - sum(sizes)] if sum(sizes) < ids.shape[1] else sizes, 1))


# ---- p = 1


@pytest.mark.parametrize("family, attn", FAMILIES)
def test_everything_selected_is_dense_attention(family, attn):
    model = tiny_models.build(family, attn)
    pieces = steps_of(tiny_models.prompt(2, 110 + 87), 110)
    theirs = forced_logits(model, DynamicCache(config=model.config), pieces)
    for store in STORES:
        cache = sparse(model.config, top_p=1.0, store=store)
        assert relative_error(forced_logits(model, cache, pieces), theirs) <= EXACT
        stats = cache.stats
        assert stats.select_calls and stats.selected_tokens == stats.scanned_tokens
        assert stats.decompress_calls == stats.fallback_calls == 0, stats.fallback_reasons


@pytest.mark.parametrize("family, attn", FEW)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_generate(family, attn, mode):
    model = tiny_models.build(family, attn)
    inputs = repetitive(100) if mode in ROLLBACK else padded(1 if mode == "guidance" else 2, 100)
    cache = sparse(top_p=1.0)
    wanted, got = (generate(model, each, inputs, mode, new_tokens=24) for each in (DynamicCache(config=model.config), cache))
    assert got.tolist() == wanted.tolist()
    assert cache.stats.select_calls > 0 and cache.stats.fallback_calls == 0


@pytest.mark.parametrize("mode", ["greedy", "beams_3", "chunked"])
def test_short_contexts_are_not_indexed(mode):
    model, cache = tiny_models.build("llama", "sdpa"), RaBitQSparseCache(top_p=0.5)
    wanted, got = (generate(model, each, inputs_for(mode), mode) for each in (DynamicCache(config=model.config), cache))
    assert got.tolist() == wanted.tolist()
    assert cache.stats.scanned_tokens == cache.stats.attend_calls == 0


@pytest.mark.parametrize("store, packs", [("exact", False), ("host", False), ("isoquant", True)])
def test_exact_tokens_do_not_count_as_compressed(store, packs):
    model = tiny_models.build("llama", "sdpa")
    cache = sparse(model.config, store=store)
    forced_logits(model, cache, tiny_models.prompt(2, 150).split([110, *[1] * 40], 1))
    layer = cache.layers[0]
    indexed = len(cache.layers) * layer.keys_store.length
    assert cache.stats.tokens_indexed == indexed > 0
    assert cache.stats.tokens_compressed == packs * indexed and (cache.stats.compress_calls > 0) == packs


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("selection", ["group", "head"])
def test_left_padding(attn, selection):
    model, batch = tiny_models.build("llama", attn), tiny_models.left_padded([140, 60, 101])
    more = tiny_models.prompt(3, 30, seed=3)
    ids, mask = torch.cat([batch["input_ids"], more], 1), torch.cat([batch["attention_mask"], torch.ones_like(more)], 1)
    pieces = [ids[:, :140], *ids[:, 140:].split(1, 1)]
    cache = sparse(top_p=1.0, selection=selection)
    ours, theirs = (forced_logits(model, each, pieces, mask)[:, 140:] for each in (cache, DynamicCache(config=model.config)))
    assert relative_error(ours, theirs) <= EXACT and cache.stats.select_calls
    assert cache.stats.selected_tokens < cache.stats.scanned_tokens  # padding is scanned and never selected


ROWS = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@pytest.mark.parametrize("store", ["exact", "host", "isoquant"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_equal_a_rebuilt_cache(store, name):
    model, (change, rows) = tiny_models.build("llama", "sdpa"), ROWS[name]
    ids, more = tiny_models.prompt(3, 110, seed=2), tiny_models.prompt(6, 24, seed=3)[: len(rows)]
    cache, rebuilt = sparse(top_p=0.9, store=store), sparse(top_p=0.9, store=store)
    forced_logits(model, cache, [ids])
    change(cache)
    forced_logits(model, rebuilt, [ids[rows]])
    ours, theirs = (forced_logits(model, each, more.split(1, 1)) for each in (cache, rebuilt))
    assert relative_error(ours, theirs) <= 1e-4
    assert cache.stats.selected_tokens > 0


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("kept", [139, 120, 90, 20, 6, 4, 1])
def test_crop_then_more_tokens(attn, kept):
    model, ids = tiny_models.build("llama", attn), tiny_models.prompt(2, 140, seed=2)
    more = tiny_models.prompt(2, 40, seed=3).split(1, 1)
    logits = []
    for cache in (sparse(top_p=1.0), DynamicCache(config=model.config)):
        forced_logits(model, cache, [ids])
        cache.crop(kept - 140)
        assert cache.get_seq_length() == kept
        logits.append(forced_logits(model, cache, more))
    assert relative_error(*logits) <= EXACT


@pytest.mark.parametrize("copied", ["deepcopy", "saved"])
@pytest.mark.parametrize("store", ["exact", "isoquant"])
def test_a_copy_goes_on_alone(copied, store):
    model, ids = tiny_models.build("llama", "sdpa"), tiny_models.prompt(2, 180, seed=2)
    cache = sparse(top_p=0.9, store=store)
    forced_logits(model, cache, [ids[:, :120], *ids[:, 120:130].split(1, 1)])
    if copied == "deepcopy":
        other = copy.deepcopy(cache)
    else:
        file = io.BytesIO()
        torch.save(cache, file)
        other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    rest = ids[:, 130:].split(1, 1)
    wanted = forced_logits(model, cache, rest)
    assert torch.equal(forced_logits(model, other, rest), wanted)
    assert other.stats.selected_tokens == cache.stats.selected_tokens > 0


@pytest.mark.parametrize("options", [dict(), dict(store="isoquant", audit=True)], ids=["exact", "isoquant"])
def test_a_compiled_model_counts_what_it_selects(options):
    model, ids = tiny_models.build("llama", "sdpa"), tiny_models.prompt(2, 140, seed=5)
    pieces, caches = [ids[:, :120], *ids[:, 120:].split(1, 1)], [sparse(model.config, top_p=0.7, **options) for _ in range(2)]
    wanted = forced_logits(model, caches[0], pieces)
    torch._dynamo.reset()
    got = forced_logits(torch.compile(model, backend="aot_eager"), caches[1], pieces)
    torch._dynamo.reset()
    assert relative_error(got, wanted) <= 1e-5
    assert str(caches[0].stats) == str(caches[1].stats) and caches[1].stats.selected_tokens > 0


def test_reset():
    model, ids, cache = tiny_models.build("llama", "sdpa"), tiny_models.prompt(1, 120), sparse()
    first = forced_logits(model, cache, [ids])
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    assert torch.equal(forced_logits(model, cache, [ids]), first)


def test_latent_attention_is_left_as_it_is():
    model = tiny_models.build("deepseek_v3", "sdpa")
    cache = sparse(model.config)
    wanted, got = (generate(model, each, padded(2, 100)) for each in (DynamicCache(config=model.config), cache))
    assert got.tolist() == wanted.tolist()
    assert {row.kind for row in cache.report().rows} == {"DynamicLayer"}


# ---- p < 1


@pytest.mark.parametrize("store", ["exact", "host", "isoquant"])
@pytest.mark.parametrize("selection", ["group", "head"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_all_attentions_select_alike(family, selection, store):
    """sdpa, the eager pair and "kvq" reach the layer in different ways."""
    pieces = steps_of(tiny_models.prompt(2, 110 + 87), 110)
    logits, stats = [], []
    for attn in ("sdpa", "eager", "kvq"):
        model = tiny_models.build(family, "sdpa" if attn == "kvq" else attn)
        if attn == "kvq":
            model.set_attn_implementation("kvq")
        cache = sparse(model.config, top_p=0.8, selection=selection, store=store)
        logits.append(forced_logits(model, cache, pieces))
        stats.append((cache.stats.select_calls, cache.stats.scanned_tokens, cache.stats.selected_share))
    assert stats[0][:2] == stats[1][:2] == stats[2][:2] and 0 < stats[0][2] < 1
    assert relative_error(logits[1], logits[0]) <= 2e-3 and relative_error(logits[2], logits[0]) <= 2e-3
    assert abs(stats[1][2] - stats[0][2]) <= 1e-3


def pieces_of(layer_index=0, tokens=150, group=2, heads=2, dim=32, **options):
    """The pieces of one layer that was fed random keys, and these keys and values ``[1, heads, tokens, dim]``."""
    config = tiny_models.build("llama", "sdpa").config
    cache = sparse(config, **options)
    keys, values = torch.randn(1, heads, tokens, dim), torch.randn(1, heads, tokens, dim)
    cache.update(keys[:, :, :-1], values[:, :, :-1], layer_index)
    cache.update(keys[:, :, -1:], values[:, :, -1:], layer_index)
    return cache, cache.layers[layer_index].pieces(), keys, values


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_that_of_sinks_window_and_selection(store, masked):
    cache, pieces, keys, values = pieces_of(top_p=0.7, store=store)
    query = 3 * torch.randn(1, 4, 1, 32)
    mask = (torch.rand(1, 1, 1, 150) < 0.7) if masked else None
    out, lse = pieces.attend(query, mask, 32**-0.5)
    first, last = 4, 4 + pieces.length
    scores = pieces.index.scores(pieces.index.code(query, 32**-0.5), 0, pieces.length)
    near = torch.ones(150, dtype=torch.bool)
    near[first:last] = False
    seen = torch.ones(1, 1, 1, 150, dtype=torch.bool) if mask is None else mask
    _, near_lse = attend_exact(query, keys, values, mask=seen & near)
    far = None if mask is None else mask[..., first:last].expand(1, 4, 1, -1)
    selection = select_tokens(scores, near_lse, 0.7, 2, mask=far)
    kept = near.expand(1, 2, 150).clone()
    for head in range(2):
        kept[0, head, first + selection.indices[0, head, : selection.count[0, head]].long()] = True
    assert 0 < selection.count.sum() < 2 * pieces.length
    theirs = attend_exact(query, keys, values, mask=kept.repeat_interleave(2, 1).unsqueeze(2) & seen)
    assert torch.allclose(out, theirs[0], atol=1e-5) and torch.allclose(lse, theirs[1], atol=1e-5)
    assert cache.stats.selected_tokens == selection.count.sum() and cache.stats.scanned_tokens == 2 * pieces.length


def test_a_selection_for_each_head_is_smaller():
    shares = {}
    for selection in ("group", "head"):
        torch.manual_seed(1)
        cache, pieces, *_ = pieces_of(top_p=0.7, selection=selection)
        pieces.attend(3 * torch.randn(1, 4, 1, 32), None, 32**-0.5)
        shares[selection] = cache.stats.selected_share
    assert 0 < shares["head"] < shares["group"]


def test_folded_query_heads_select_for_themselves():
    """``pack_gqa`` puts the query heads of a kv head where tokens are; the selection of each must not change."""
    cache, pieces, *_ = pieces_of(top_p=0.7, selection="head")
    query = 3 * torch.randn(1, 4, 1, 32)
    plain = pieces.attend(query, None, 32**-0.5)
    folded = pieces.attend(query.reshape(1, 2, 2, 32), None, 32**-0.5)
    assert torch.equal(plain[0].reshape(1, 2, 2, 32), folded[0]) and torch.equal(plain[1].reshape(1, 2, 2), folded[1])


@pytest.mark.parametrize("tokens, selects", [(16, True), (17, False)])
def test_long_queries_read_everything(tokens, selects):
    cache, pieces, keys, values = pieces_of(top_p=0.5)
    query = torch.randn(1, 4, tokens, 32)
    out, _ = pieces.attend(query, None, 32**-0.5)
    assert (cache.stats.select_calls > 0) == selects
    assert torch.allclose(out, attend_exact(query, keys, values)[0], atol=1e-5) != selects


def test_the_cap():
    cache, pieces, *_ = pieces_of(top_p=0.99, max_selected=5)
    pieces.attend(torch.randn(1, 4, 1, 32), None, 32**-0.5)
    assert cache.stats.selected_tokens == 2 * 5


def test_an_audit_counts_the_true_mass():
    cache, pieces, keys, values = pieces_of(top_p=0.8, audit=True)
    query = 3 * torch.randn(1, 4, 1, 32)
    _, lse = pieces.attend(query, None, 32**-0.5)
    _, total = attend_exact(query, keys, values)
    assert cache.stats.kept_mass == pytest.approx(torch.exp(lse - total).mean().item(), rel=1e-4)
    assert RaBitQSparseCache().stats.kept_mass is None


@pytest.mark.parametrize("store", ["exact", "isoquant"])
def test_a_refined_cut_keeps_more_than_signs_alone(store):
    kept = {}
    for refine in (False, True):
        torch.manual_seed(3)
        cache, pieces, *_ = pieces_of(tokens=1500, dim=128, top_p=0.9, refine=refine, audit=True, store=store)
        for _ in range(4):
            pieces.attend(1.5 * torch.randn(1, 4, 1, 128), None, 128**-0.5)
        kept[refine] = cache.stats.kept_mass
    assert kept[False] < 0.9 < kept[True]  # one bit falls short of p on random keys


# ---- what it holds and says


def test_bytes_of_the_index():
    tokens, heads, dim = 2000, 2, 128
    config = tiny_models.build("llama", "sdpa", head_dim=dim).config
    sizes = {}
    for store in ("exact", "isoquant", "host"):
        cache = RaBitQSparseCache(config, store=store)
        for index in range(2):
            cache.update(torch.randn(1, heads, tokens, dim), torch.randn(1, heads, tokens, dim), index)
            cache.update(torch.randn(1, heads, 1, dim), torch.randn(1, heads, 1, dim), index)
        layer = cache.layers[0]
        per_token = layer.keys_store.nbytes / (heads * layer.keys_store.capacity)
        sizes[store] = per_token
        assert layer.keys_store.length == tokens - 4 - 128
        held = layer.keys_store.store.nbytes + layer.values_store.nbytes
        assert (cache.host_nbytes == 2 * held) if store == "host" else (cache.host_nbytes == 0)
        assert cache.nbytes >= 2 * (held + layer.keys_store.nbytes)
    assert sizes["exact"] == sizes["host"] == 16 + 2 * 2 - 2 * 1  # signs, factor; no query was seen, so no bias
    assert sizes["isoquant"] == 2


def test_bytes_with_a_query_centre():
    model = tiny_models.build("llama", "sdpa")
    for store, most in (("exact", 4 + 4), ("isoquant", 4)):
        cache = sparse(store=store)
        forced_logits(model, cache, [tiny_models.prompt(1, 120)])
        keys = cache.layers[0].keys_store
        assert keys.nbytes == most * 2 * keys.capacity and keys.query_centre.abs().sum() > 0


def test_bytes_read_follow_the_selection():
    cache, pieces, *_ = pieces_of(top_p=0.7)
    pieces.attend(3 * torch.randn(1, 4, 1, 32), None, 32**-0.5)
    stats = cache.stats
    assert stats.bytes_read == stats.scanned_tokens * (4 + 2) + stats.selected_tokens * 2 * 32 * 4
    before = stats.scanned_tokens
    pieces.attend(torch.randn(1, 4, 1, 32), None, 32**-0.5)
    assert stats.scanned_tokens == 2 * before
    assert "selected_share" in str(stats)
    stats.clear()
    assert stats.selected_tokens == stats.scanned_tokens == stats.bytes_read == 0


def test_the_report_says_what_is_indexed():
    model, cache = tiny_models.build("gemma3", "sdpa"), sparse()
    generate(model, cache, {"input_ids": tiny_models.prompt(1, 120)})
    row = cache.report().rows[-1]
    assert row.kind == "RaBitQLayer" and row.num_packed > 0 and "top-p 0.95" in row.reason
    assert row.num_exact <= 4 + 32 + 16


def test_nothing_as_long_as_the_sequence_stays_twice():
    """Rows are in the body or exact, never in both."""
    model, cache = tiny_models.build("llama", "sdpa"), sparse()
    generate(model, cache, {"input_ids": tiny_models.prompt(1, 300)})
    layer = cache.layers[0]
    assert layer.exact.key_buffer.shape[2] <= 4 + 32 + 16
    assert layer.keys_store.length + layer.exact.length == cache.get_seq_length()
