"""The attention function ``kvq``: the logits of sdpa or eager, masks, soft-cap and sinks included, with nothing rebuilt."""

import pytest
import tiny_models
import torch
from oracle import forced_logits, oracle_cache, relative_error
from transformers import DynamicCache

from torch_kvq import IsoQuantCache

pytestmark = pytest.mark.versions

PACKED = dict(window_len=32, flush_len=16)
MODELS = tiny_models.names("llama", "qwen3", "mistral", "mixtral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next")


def pair(family, attn, **overrides):
    """(model with its own attention, the same with kvq)."""
    plain, ours = (tiny_models.build(family, attn, **overrides) for _ in range(2))
    ours.set_attn_implementation("kvq")
    return plain, ours


def pieces_of(ids, prompt=100):
    return [ids[:, :prompt], *ids[:, prompt:].split(1, 1)]


@pytest.mark.parametrize("family, attn", MODELS)
def test_exact_logits(family, attn):
    """Without packed tokens, also with the library's cache and without any."""
    plain, ours = pair(family, attn)
    ids = tiny_models.prompt(2, 60)
    pieces = pieces_of(ids, 50)
    wanted = forced_logits(plain, DynamicCache(config=plain.config), pieces)
    for cache in (IsoQuantCache(window_len=512), DynamicCache(config=ours.config)):
        assert relative_error(forced_logits(ours, cache, pieces), wanted) <= 1e-5
    with torch.no_grad():
        assert relative_error(ours(ids, use_cache=False).logits, plain(ids, use_cache=False).logits) <= 1e-5


@pytest.mark.parametrize("family, attn", [each for each in MODELS if each[0] != "mistral"])
def test_packed_logits(family, attn):
    plain, ours = pair(family, attn)
    ids = tiny_models.prompt(2, 200)
    pieces = [*pieces_of(ids[:, :110]), *pieces_of(ids[:, 110:], 80)]  # two turns
    cache = IsoQuantCache(**PACKED)
    got = forced_logits(ours, cache, pieces)
    assert relative_error(got, forced_logits(plain, oracle_cache(plain.config, **PACKED), pieces)) <= 2e-5
    assert cache.stats.attend_calls > 0 and cache.stats.decompress_calls == 0 and cache.stats.fallback_calls == 0


@pytest.mark.parametrize("family, attn", tiny_models.names("llama", "gemma2", "gemma3", "gpt_oss", "deepseek_v3"))
def test_left_padded(family, attn):
    plain, ours = pair(family, attn)
    batch, more = tiny_models.left_padded([110, 50, 90]), tiny_models.prompt(3, 20, seed=2)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(more)], 1)
    pieces, real = [batch["input_ids"], *more.split(1, 1)], mask.bool()
    cache = IsoQuantCache(**PACKED)
    got = forced_logits(ours, cache, pieces, mask)
    wanted = forced_logits(plain, oracle_cache(plain.config, **PACKED), pieces, mask)
    assert relative_error(got[real], wanted[real]) <= 2e-5
    assert cache.stats.attend_calls > 0 and cache.stats.decompress_calls == 0


@pytest.mark.parametrize("cap", [1.0, 5.0, 50.0])
def test_soft_cap(cap):
    plain, ours = pair("gemma2", "eager", attn_logit_softcapping=cap)
    pieces = pieces_of(tiny_models.prompt(1, 120))
    got, wanted = (
        forced_logits(ours, IsoQuantCache(**PACKED), pieces),
        forced_logits(plain, oracle_cache(plain.config, **PACKED), pieces),
    )
    assert relative_error(got, wanted) <= 2e-5


def test_sinks():
    """Large learnt sinks take most of the weight; they must not be lost."""
    plain, ours = pair("gpt_oss", "eager")
    for model in (plain, ours):
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(3.0)
    pieces = pieces_of(tiny_models.prompt(1, 120))
    got, wanted = (
        forced_logits(ours, IsoQuantCache(**PACKED), pieces),
        forced_logits(plain, oracle_cache(plain.config, **PACKED), pieces),
    )
    assert relative_error(got, wanted) <= 2e-5
    without = tiny_models.build("gpt_oss", "eager")
    assert relative_error(forced_logits(without, IsoQuantCache(**PACKED), pieces), wanted) > 1e-3


@pytest.mark.parametrize("family, attn", [("llama", "sdpa"), ("gpt_oss", "eager"), ("gemma3", "sdpa"), ("deepseek_v3", "sdpa")])
@pytest.mark.parametrize("mode", [{}, dict(num_beams=2), dict(prompt_lookup_num_tokens=3)])
def test_generate(family, attn, mode):
    plain, ours = pair(family, attn)
    ids = tiny_models.prompt(1, 20, seed=2).repeat(1, 5)
    outs = [
        model.generate(ids, past_key_values=cache, max_new_tokens=30, do_sample=False, **mode).tolist()
        for model, cache in ((plain, oracle_cache(plain.config, **PACKED)), (ours, IsoQuantCache(**PACKED)))
    ]
    assert outs[0] == outs[1]
