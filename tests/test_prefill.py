"""Prompts are attended exactly, in one piece or in chunks, and cost what equation 12 of RotaryQuant says or one layer of it."""

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from oracle import forced_logits, relative_error
from transformers import DynamicCache, LlamaConfig

from torch_kvq import IsoQuantCache, RaBitQSparseCache
from torch_kvq._requirements import cache_keyword
from torch_kvq.store import TokenBuffers

pytestmark = pytest.mark.versions

PACKED = dict(window_len=32, flush_len=16)
MODELS = tiny_models.names("llama", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1")
FEW = tiny_models.names("llama", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("family, attn", MODELS)
def test_prefill_logits_are_those_of_dynamic_cache(family, attn):
    model, ids = tiny_models.build(family, attn), tiny_models.prompt(2, 150)
    cache = IsoQuantCache(**PACKED)
    got = forced_logits(model, cache, [ids])
    assert torch.equal(got, forced_logits(model, DynamicCache(config=model.config), [ids]))
    packed = [row for row in cache.report().rows if row.num_packed]
    assert packed and all(row.num_packed == 150 - 4 - 32 for row in packed)  # at once, before any decoding
    assert cache.stats.transient_bytes == 0 and cache.stats.attend_calls == 0


@pytest.mark.parametrize("family, attn", FEW)
def test_padded_prefill_logits_are_those_of_dynamic_cache(family, attn):
    model, batch = tiny_models.build(family, attn), tiny_models.left_padded([150, 20, 90])
    logits = [
        forced_logits(model, cache, [batch["input_ids"]], batch["attention_mask"])
        for cache in (IsoQuantCache(**PACKED), DynamicCache(config=model.config))
    ]
    assert torch.equal(*logits)


@pytest.mark.parametrize("kind", [IsoQuantCache, RaBitQSparseCache])
@pytest.mark.parametrize("padding", [0, 20])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_stores_that_cannot_be_opened_are_opened_later(error, padding, kind, monkeypatch):
    """No memory for the values of the last layer: the prompt is taken in, and its next update packs it."""
    model, ids = tiny_models.build("llama", "sdpa"), tiny_models.prompt(2, 130)
    mask = torch.arange(130) >= torch.tensor([0, padding])[:, None]
    options = PACKED if kind is IsoQuantCache else dict(PACKED, min_dense_len=0)
    wanted = forced_logits(model, kind(**options), [ids[:, :100], *ids[:, 100:].split(1, 1)], mask)
    cache = kind(model.config, **options)
    last, begin = cache.layers[-1], TokenBuffers.__init__

    def refuse(self, *args):
        if last.keys_store is not None:
            raise error("no memory")
        begin(self, *args)

    with monkeypatch.context() as patch, pytest.raises(error, match="no memory"):
        patch.setattr(TokenBuffers, "__init__", refuse)
        forced_logits(model, cache, [ids[:, :100]], mask)
    assert cache.get_seq_length() == 100
    for seen in range(100, 130):
        place = mask[:, : seen + 1].long().sum(1, keepdim=True) - 1
        one = dict(input_ids=ids[:, seen : seen + 1], attention_mask=mask[:, : seen + 1], position_ids=place)
        with torch.no_grad():
            assert torch.equal(model(**one, **{cache_keyword(): cache}).logits, wanted[:, seen : seen + 1])


# ---- the transient


def deferred_config(layers):
    return LlamaConfig(num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8, head_dim=128, hidden_size=1024)


@pytest.mark.parametrize("mode, layers_held", [("deferred", 28), ("layerwise", 1)])
def test_transient_of_a_prompt(mode, layers_held):
    """28 layers, 8 heads, d 128, 2,048 tokens in bf16: 2 * 28 * 8 * 128 * 2048 * 2 bytes, or a 28th of it."""
    layers = 28
    cache = IsoQuantCache(deferred_config(layers), prefill=mode)
    keys, values = torch.randn(2, 1, 8, 2048, 128, dtype=torch.bfloat16).unbind(0)
    query = torch.randn(1, 8, 1, 128, dtype=torch.bfloat16)
    for layer in range(layers):
        # Not packed here, which takes seconds a layer on the reference: the layers before wait or have been packed.
        handles = cache.update(keys, values, layer)
        if mode == "deferred":
            F.scaled_dot_product_attention(query, *handles)
        elif layer < 2:
            F.scaled_dot_product_attention(query, *handles)
        else:
            break
    assert cache.stats.peak_transient_bytes == 234_881_024 // 28 * layers_held
    assert (cache.stats.tokens_compressed > 0) == (mode == "layerwise")


def test_transient_ends_with_decoding():
    model, ids = tiny_models.build("llama", "sdpa"), tiny_models.prompt(1, 200)
    cache = IsoQuantCache(prefill="deferred", **PACKED)
    for chunk in ids.split(50, 1):
        forced_logits(model, cache, [chunk])
    whole = 2 * 2 * 2 * 32 * 200 * 4
    assert cache.stats.transient_bytes == cache.stats.peak_transient_bytes == whole
    forced_logits(model, cache, [ids[:, :1]])
    assert cache.stats.transient_bytes == 0
    assert all(row.num_packed == 201 - 4 - 32 for row in cache.report().rows)
    cache.reset()
    assert cache.stats.transient_bytes == 0


# ---- chunks


@pytest.mark.parametrize("family, attn", FEW)
@pytest.mark.parametrize("length", [144, 150, 145])  # the last chunk full, partial, and one token
@pytest.mark.parametrize("by_hand", [True, False])
def test_chunks_are_exact(family, attn, length, by_hand):
    model, ids = tiny_models.build(family, attn), tiny_models.prompt(1, length)
    exact = forced_logits(model, DynamicCache(config=model.config), [ids])[:, -1]
    if by_hand:
        cache = IsoQuantCache(prefill="deferred", **PACKED)
        got = forced_logits(model, cache, ids.split(48, 1))[:, -1]
    else:
        cache = IsoQuantCache(**PACKED)
        out = model.generate(
            ids,
            past_key_values=cache,
            prefill_chunk_size=48,
            max_new_tokens=1,
            output_logits=True,
            return_dict_in_generate=True,
        )
        got = out.logits[0]
    assert relative_error(got, exact) <= 1e-5
    forced_logits(model, cache, ids[:, :2].split(1, 1))
    rows = [row for row in cache.report().rows if row.kind == "IsoQuantLayer"]
    assert all(row.num_packed > 0 and row.num_exact <= 4 + 32 + 16 for row in rows)


@pytest.mark.parametrize("given", [True, False])
def test_chunked_generation_is_noticed(given):
    """Also by a cache that was told its config, and not from then on by one whose next prompt comes whole."""
    model, ids = tiny_models.build("llama", "sdpa"), tiny_models.prompt(1, 200)
    cache = IsoQuantCache(model.config if given else None, **PACKED)
    model.generate(ids, past_key_values=cache, prefill_chunk_size=64, max_new_tokens=4)
    assert cache.stats.peak_transient_bytes == 2 * 2 * 2 * 32 * 200 * 4
    assert all(row.num_packed > 0 for row in cache.report().rows)
    cache.reset()
    cache.stats.clear()
    model.generate(ids, past_key_values=cache, max_new_tokens=4)
    assert cache.stats.peak_transient_bytes == 2 * 2 * 32 * 200 * 4


def test_chunked_second_turn():
    """Its chunks attend each other exactly; the first turn stays packed."""
    model, ids = tiny_models.build("llama", "sdpa"), tiny_models.prompt(1, 300)
    whole, chunked = IsoQuantCache(prefill="deferred", **PACKED), IsoQuantCache(prefill="deferred", **PACKED)
    for cache in (whole, chunked):
        forced_logits(model, cache, [ids[:, :100], *ids[:, 100:104].split(1, 1)])
    wanted = forced_logits(model, whole, [ids[:, 104:]])
    got = forced_logits(model, chunked, ids[:, 104:].split(50, 1))
    assert relative_error(got, wanted) <= 1e-5
    forced_logits(model, chunked, [ids[:, :1]])
    assert all(row.num_exact <= 4 + 32 + 16 for row in chunked.report().rows)
    assert chunked.stats.decompress_calls == 0


def test_defer_limit():
    model, ids = tiny_models.build("llama", "sdpa"), tiny_models.prompt(1, 240)
    cache = IsoQuantCache(prefill="deferred", defer_limit=100, **PACKED)
    held = []
    for chunk in ids.split(40, 1):
        forced_logits(model, cache, [chunk])
        held.append(cache.report().rows[0].num_exact)
    assert max(held) <= 100 and cache.report().rows[0].num_packed > 0
    assert cache.stats.peak_transient_bytes <= 2 * 2 * 2 * 32 * (100 + 40) * 4


def test_layerwise_by_name_packs_every_chunk():
    model, ids = tiny_models.build("llama", "sdpa"), tiny_models.prompt(1, 200)
    cache = IsoQuantCache(prefill="layerwise", **PACKED)
    model.generate(ids, past_key_values=cache, prefill_chunk_size=80, max_new_tokens=2)
    assert cache.stats.peak_transient_bytes < 2 * 2 * 32 * (80 + 32 + 4 + 1) * 4 * 2


@pytest.mark.parametrize("length", [1, 2, 3, 40, 52, 53, 67, 68, 69])
def test_prompts_about_the_first_block(length):
    """Nothing is packed before 64 tokens are there to learn from; every length goes on well."""
    model = tiny_models.build("llama", "sdpa")
    ids, more = tiny_models.prompt(2, length), tiny_models.prompt(2, 80, seed=2)
    cache = IsoQuantCache(**PACKED)
    got = forced_logits(model, cache, [ids, *more.split(1, 1)])
    exact = forced_logits(model, DynamicCache(config=model.config), [ids, *more.split(1, 1)])
    still = max(0, 68 - length)
    assert relative_error(got[:, : length + still], exact[:, : length + still]) <= 1e-6
    assert cache.stats.tokens_compressed > 0 and got.isfinite().all()
