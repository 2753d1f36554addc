"""Odd call orders, masks, models and dtypes."""

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from oracle import oracle_cache, relative_error
from transformers import DynamicCache, LlamaConfig

from torch_kvq import IsoQuantCache
from torch_kvq._requirements import cache_keyword

pytestmark = pytest.mark.versions

PACKED = dict(window_len=32, flush_len=16)
SOME = [("llama", "sdpa"), ("llama", "eager"), ("gpt_oss", "eager"), ("gemma3", "sdpa"), ("deepseek_v3", "sdpa")]


def logits_of(model, cache, steps):
    """Logits of ``steps``, each a dict of arguments of the model."""
    with torch.no_grad():
        return torch.cat([model(**step, **{cache_keyword(): cache}).logits for step in steps], 1)


def compare(model, steps, tolerance=1e-5, real=None, **options):
    options = {**PACKED, **options}
    cache, twin = IsoQuantCache(**options), oracle_cache(model.config, **options)
    got, wanted = logits_of(model, cache, steps), logits_of(model, twin, steps)
    assert got.isfinite().all()
    if real is not None:
        got, wanted = got[real], wanted[real]
    assert relative_error(got, wanted) <= tolerance
    assert cache.stats.attend_calls > 0 and cache.stats.decompress_calls == 0
    return cache


def steps_of(ids, lengths):
    return [{"input_ids": part} for part in ids.split(lengths, 1)]


# ---- orders

LENGTHS = {
    "three_at_first": [3, 90, *[1] * 30],
    "one_then_all": [1, 100, *[1] * 20],
    "one_by_one": [1] * 130,
    "two_prompts": [90, 80, *[1] * 20],
    "four_prompts": [50, 50, 50, 50, *[1] * 10],
    "threes": [100, *[3] * 20],
    "window_at_a_time": [32] * 6,
    "long_second_turn": [80, 1, 400, 1, 1],
    "block_at_a_time": [100, *[16] * 6, 1],
    "many_blocks_after_decode": [100, 1, 1, 17, 1, 33, 1, 49, 1],
}


@pytest.mark.parametrize("family, attn", SOME)
@pytest.mark.parametrize("name", LENGTHS)
def test_orders(family, attn, name):
    lengths = LENGTHS[name]
    compare(tiny_models.build(family, attn), steps_of(tiny_models.prompt(1, sum(lengths)), lengths))


class Attention(torch.nn.Module):
    """Nothing but what the cache sees of one."""

    def forward(self, cache, keys, layer):
        return cache.update(keys, keys, layer)


BY_HAND = {
    "backwards": lambda steps, layers: [(step, layer) for step in range(steps) for layer in reversed(range(layers))],
    "shuffled": lambda steps, layers: [(step, layer) for step in range(steps) for layer in (1, 2, 0)],
    "layer_by_layer": lambda steps, layers: [(step, layer) for layer in range(layers) for step in range(steps)],
    "last_layer_first": lambda steps, layers: [(step, layer) for layer in reversed(range(layers)) for step in range(steps)],
}


@pytest.mark.parametrize("order, in_modules", [*((each, False) for each in BY_HAND), ("backwards", True), ("shuffled", True)])
def test_layers_filled_in_any_order(order, in_modules):
    """Calls that did not go up through the layers were taken for a forward that had failed, and tokens were dropped."""
    config = LlamaConfig(num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, head_dim=32, hidden_size=64)
    cache, dense = IsoQuantCache(config, window_len=512), DynamicCache(config=config)
    states = [torch.randn(3, 1, 2, tokens, 32) for tokens in (20, 1, 1, 7, 1)]
    modules = [Attention() for _ in range(3)]
    for step, layer in BY_HAND[order](len(states), 3):
        keys = states[step][layer]
        held, _ = modules[layer](cache, keys, layer) if in_modules else cache.update(keys, keys, layer)
        wanted, _ = dense.update(keys, keys, layer)
        assert torch.equal(held * 1, wanted)
    assert cache.get_seq_length() == 30


def test_generate_with_more_tokens_cached_than_given():
    """The library slices wrongly then, with any cache; ours must hold a consistent number of tokens whatever it is fed."""
    model, cache = tiny_models.build("llama", "sdpa"), IsoQuantCache(**PACKED)
    model.generate(tiny_models.prompt(1, 100), past_key_values=cache, max_new_tokens=10)
    try:
        model.generate(tiny_models.prompt(1, 30), past_key_values=cache, max_new_tokens=3)
    except (ValueError, RuntimeError, IndexError):
        pass
    assert len({layer.get_seq_length() for layer in cache.layers}) == 1


def test_prompt_of_one_token():
    model, cache = tiny_models.build("gemma3", "sdpa"), IsoQuantCache(**PACKED)
    ids = tiny_models.prompt(1, 1)
    wanted = model.generate(ids, past_key_values=DynamicCache(config=model.config), max_new_tokens=40)
    assert model.generate(ids, past_key_values=cache, max_new_tokens=40).tolist() == wanted.tolist()
    model.generate(ids, past_key_values=IsoQuantCache(**PACKED), max_new_tokens=120)


# ---- masks


def masked_steps(ids, mask, lengths, positions=True):
    places, steps, start = (mask.cumsum(1) - 1).clamp_min(0), [], 0
    for length in lengths:
        stop = start + length
        step = {"input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop]}
        steps.append({**step, "position_ids": places[:, start:stop]} if positions else step)
        start = stop
    return steps


def holes(batch, length):
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, 20:40] = 0
    mask[-1, 70:90] = 0
    mask[-1, 5] = 0
    return mask


def right_padded(batch, length):
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, 60:100] = 0
    return mask


def both_sides(batch, length):
    mask = holes(batch, length)
    mask[0, :10] = 0
    mask[1, :50] = 0
    return mask


def all_padding(batch, length):
    """A row that is padding throughout its prompt."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1, :100] = 0
    return mask


def changing(batch, length):
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[:, :60] = 0
    return mask


MASKS = {each.__name__: each for each in (holes, right_padded, both_sides, all_padding, changing)}


@pytest.mark.parametrize("family, attn", SOME)
@pytest.mark.parametrize("name", MASKS)
def test_masks(family, attn, name):
    ids = tiny_models.prompt(2, 130)
    mask = MASKS[name](2, 130)
    compare(tiny_models.build(family, attn), masked_steps(ids, mask, [100, *[1] * 30]), real=mask.bool())


@pytest.mark.parametrize("family, attn", SOME)
def test_padding_with_windows_and_turns(family, attn):
    batch, more = tiny_models.left_padded([100, 20]), tiny_models.prompt(2, 80, seed=2)
    ids = torch.cat([batch["input_ids"], more], 1)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(more)], 1)
    mask[1, 110:120] = 0  # a second turn that was padded too
    compare(tiny_models.build(family, attn), masked_steps(ids, mask, [100, *[1] * 10, 50, *[1] * 20]), real=mask.bool())


def test_the_padding_of_a_single_sequence():
    """A prompt alone but padded, as a server does that keeps shapes: the logits of the prompt without padding."""
    model, ids = tiny_models.build("llama", "sdpa"), tiny_models.prompt(1, 120)
    mask = torch.cat([torch.zeros(1, 40, dtype=torch.long), torch.ones_like(ids)], 1)
    steps = masked_steps(torch.cat([ids[:, :40] * 0, ids], 1), mask, [140, *[1] * 20])
    got = logits_of(model, IsoQuantCache(**PACKED), steps)[:, 140:]
    wanted = logits_of(model, IsoQuantCache(**PACKED), steps_of(ids, [100, *[1] * 20]))[:, 100:]
    assert relative_error(got, wanted) <= 1e-4


# ---- models

SHAPES = {
    "mqa": dict(num_key_value_heads=1),
    "mha": dict(num_key_value_heads=4),
    "d80": dict(head_dim=80),
    "d96": dict(head_dim=96),
    "d128": dict(head_dim=128),
    "d256": dict(head_dim=256),
    "d4": dict(head_dim=4),
    "d20": dict(head_dim=20),
    "d512": dict(head_dim=512, num_hidden_layers=1),
    "gqa16": dict(num_attention_heads=16, num_key_value_heads=1),
    "one_layer": dict(num_hidden_layers=1),
}


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, attn):
    ids = tiny_models.prompt(2, 110)
    compare(tiny_models.build("llama", attn, **SHAPES[name]), steps_of(ids, [90, *[1] * 20]), tolerance=2e-5)


@pytest.mark.parametrize("v_head_dim, rank", [(16, 64), (64, 32), (32, 20), (48, 128)])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_latent_shapes(v_head_dim, rank, attn):
    model = tiny_models.build("deepseek_v3", attn, v_head_dim=v_head_dim, kv_lora_rank=rank)
    compare(model, steps_of(tiny_models.prompt(2, 110), [90, *[1] * 20]), tolerance=2e-5)


def test_different_head_dims_of_keys_and_values():
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64, hidden_size=256)
    cache = IsoQuantCache(config, **PACKED)
    for tokens in (100, *[1] * 40):
        keys, values, query = torch.randn(2, 2, tokens, 64), torch.randn(2, 2, tokens, 24), torch.randn(2, 4, 1, 64)
        k, v = cache.update(keys, values, 0)
        out = F.scaled_dot_product_attention(query, k, v, enable_gqa=True)
    pieces = cache.layers[0].pieces()
    wanted = F.scaled_dot_product_attention(query, pieces.rebuilt("k"), pieces.rebuilt("v"), enable_gqa=True)
    assert out.shape == (2, 4, 1, 24) and relative_error(out, wanted) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_half_precision_against_float32(dtype, groups, masked):
    """Attention of bf16 and fp16 states differs from float32 attention over the same dense numbers by rounding of ``out``."""
    config = LlamaConfig(
        num_hidden_layers=1, num_attention_heads=2 * groups, num_key_value_heads=2, head_dim=64, hidden_size=64
    )
    cache, generator = IsoQuantCache(config, **PACKED), torch.Generator().manual_seed(0)

    def random(heads, tokens):
        return torch.randn(2, heads, tokens, 64, generator=generator).to(dtype)

    for tokens in (150, *[1] * 40):
        query, (k, v) = random(2 * groups, 1), cache.update(random(2, tokens), random(2, tokens), 0)
        mask = torch.rand(2, 1, 1, k.shape[2], generator=generator) > 0.3 if masked else None
        out = F.scaled_dot_product_attention(query, k, v, mask, enable_gqa=True)
    layer = cache.layers[0]
    stores = [store.decode(0, store.length, torch.float32) for store in (layer.keys_store, layer.values_store)]
    pieces, sinks = k.pieces, layer.num_sinks
    exact = (pieces.exact_keys.float(), pieces.exact_values.float())
    length = pieces.length
    dense = [torch.cat([x[:, :, :sinks], body[:, :, :length], x[:, :, sinks:]], 2) for x, body in zip(exact, stores)]
    wanted = F.scaled_dot_product_attention(query.float(), *dense, mask, enable_gqa=True)
    assert relative_error(out.float(), wanted) <= 2e-3
    assert cache.stats.decompress_calls == 0


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 5e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("family, attn", SOME)
def test_half_precision_models(family, attn, dtype, tolerance):
    """A whole model accumulates the rounding of its layers; the dense twin has as much of it."""
    model = tiny_models.build(family, attn, dtype=dtype)
    ids = tiny_models.prompt(2, 120)
    steps = steps_of(ids, [100, *[1] * 20])
    cache = IsoQuantCache(**PACKED)
    got = logits_of(model, cache, steps).float()
    wanted = logits_of(model, oracle_cache(model.config, **PACKED), steps).float()
    assert got.isfinite().all() and relative_error(got, wanted) <= tolerance
    assert cache.stats.attend_calls > 0 and cache.stats.decompress_calls == 0


# ---- options at their ends

ENDS = [
    dict(window_len=1, flush_len=1),
    dict(window_len=16, flush_len=1),
    dict(num_sinks=0, window_len=16),
    dict(num_sinks=70),
    dict(window_len=33, flush_len=33),
    dict(k_bits=2, v_bits=4, balance=False, center=False),
    dict(window_len=32, flush_len=7),
]


@pytest.mark.parametrize("options", ENDS, ids=str)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_ends_of_options(options, attn):
    ids, mask = tiny_models.prompt(2, 180), torch.ones(2, 180, dtype=torch.long)
    mask[1, :30] = 0
    model = tiny_models.build("llama", attn)
    compare(model, masked_steps(ids, mask, [110, *[1] * 40, 10, *[1] * 20]), real=mask.bool(), **options)
    compare(model, steps_of(ids, [110, *[1] * 40, 10, *[1] * 20]), **options)
