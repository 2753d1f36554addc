"""A cache without arguments finds the model that uses it, and makes the layers that ``DynamicCache(config)`` would."""

import warnings

import pytest
import tiny_models
import torch
from oracle import forced_logits, relative_error
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer

from torch_kvq import IsoQuantCache
from torch_kvq._requirements import cache_keyword
from torch_kvq.caches.hybrid import IsoQuantHybridLayer
from torch_kvq.caches.isoquant_layer import IsoQuantLayer

pytestmark = pytest.mark.versions

PACKED = dict(window_len=32, flush_len=16)
REPLACED = {DynamicLayer: IsoQuantLayer, LinearAttentionAndFullAttentionLayer: IsoQuantHybridLayer}
ALL = [(name, attentions[0]) for name, attentions in ((name, each.attentions) for name, each in tiny_models.FAMILIES.items())]


def wanted_kinds(config):
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    return [REPLACED.get(type(layer), type(layer)).__name__ for layer in layers]


def kinds(cache):
    return [row.kind for row in cache.report().rows]


@pytest.mark.parametrize("family, attn", ALL)
def test_layers_of_every_family(family, attn):
    """By generate, by a call of the model, and by the config: the same layers."""
    model, ids = tiny_models.build(family, attn), tiny_models.prompt(1, 8)
    wanted = wanted_kinds(model.config)
    by_generate, by_call, given = IsoQuantCache(), IsoQuantCache(), IsoQuantCache(model.config)
    model.generate(ids, past_key_values=by_generate, max_new_tokens=2)
    forced_logits(model, by_call, [ids])
    assert kinds(by_generate) == kinds(by_call) == kinds(given) == wanted
    if family != "mistral":
        assert "IsoQuantLayer" in wanted or "IsoQuantHybridLayer" in wanted


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gemma3_vlm", "mistral", "gpt_oss", "llama4"])
@pytest.mark.parametrize("mode", [{}, dict(num_beams=2), dict(prefill_chunk_size=16)])
def test_sliding_layers_hold_their_window(family, mode):
    """However the cache was first met, 4 windows later."""
    model, window = tiny_models.build(family), tiny_models.SLIDING_LEN
    cache = IsoQuantCache(**PACKED)
    model.generate(tiny_models.prompt(1, 3 * window), past_key_values=cache, max_new_tokens=window + 1, **mode)
    rows = [row for row in cache.report().rows if "Sliding" in row.kind]
    assert rows and all(row.num_exact <= window and row.num_tokens == 4 * window for row in rows)


# ---- decoys


class Wrapper(torch.nn.Module):
    """A user's module around a model, with a config of its own."""

    def __init__(self, model, config):
        super().__init__()
        self.model, self.config = model, config

    def forward(self, ids, cache):
        return self.model(input_ids=ids, **{cache_keyword(): cache}).logits

    def generate(self, ids, cache):
        return self.model.generate(ids, past_key_values=cache, max_new_tokens=3)


@pytest.mark.parametrize("config", [{"num_hidden_layers": 7}, None, 3, PreTrainedConfig(), tiny_models.build("gemma3").config])
@pytest.mark.parametrize("call", ["forward", "generate"])
def test_a_wrapper_with_another_config(config, call):
    model, cache = tiny_models.build("llama"), IsoQuantCache()
    with torch.no_grad():
        getattr(Wrapper(model, config), call)(tiny_models.prompt(1, 8), cache)
    assert kinds(cache) == ["IsoQuantLayer"] * 2


def test_config_variables_of_the_user_are_not_looked_at():
    config = self = tiny_models.build("gemma3").config  # noqa: F841
    model, cache = tiny_models.build("llama"), IsoQuantCache()
    assert cache.get_seq_length() == 0 and len(cache) == 0
    with torch.no_grad():
        model(input_ids=tiny_models.prompt(1, 8), **{cache_keyword(): cache})
    assert kinds(cache) == ["IsoQuantLayer"] * 2


class Trainer:
    """A user's class that is no module, with a dict called config."""

    config = {"hidden_size": 1}

    def run(self, model, cache):
        return model.generate(tiny_models.prompt(1, 8), past_key_values=cache, max_new_tokens=3)


def test_a_class_with_a_dict_called_config():
    cache = IsoQuantCache()
    Trainer().run(tiny_models.build("gemma3"), cache)
    assert kinds(cache) == ["DynamicSlidingWindowLayer"] * 3 + ["IsoQuantLayer"]


class Greedy(torch.nn.Module):
    """A user's decoding loop in a module with a config: it asks the cache before the model does."""

    def __init__(self, model, config):
        super().__init__()
        self.model, self.config = model, config

    def forward(self, ids, cache):
        assert cache.get_seq_length() == 0
        return forced_logits(self.model, cache, [ids])


def test_a_module_that_asks_before_the_model():
    """Its config was taken for the model's; the first call of the model corrects it."""
    cache = IsoQuantCache()
    Greedy(tiny_models.build("llama"), tiny_models.build("gemma3").config)(tiny_models.prompt(1, 8), cache)
    assert kinds(cache) == ["IsoQuantLayer"] * 2


# ---- no model at all


def test_unbound_cache_warns_once():
    cache = IsoQuantCache(**PACKED)
    with pytest.warns(UserWarning, match=r"found no model config.*Pass IsoQuantCache\(config=model.config\)") as seen:
        for _ in range(4):
            for layer in range(3):
                cache.update(torch.randn(1, 2, 30, 32), torch.randn(1, 2, 30, 32), layer)
    assert len(seen) == 1
    assert kinds(cache) == ["IsoQuantLayer"] * 3 and [layer.index for layer in cache.layers] == [0, 1, 2]
    assert all(row.num_packed > 0 for row in cache.report().rows[:2])


def test_bound_cache_does_not_warn():
    model = tiny_models.build("gemma3")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for cache in (IsoQuantCache(**PACKED), IsoQuantCache(model.config, **PACKED)):
            forced_logits(model, cache, [tiny_models.prompt(1, 100), *tiny_models.prompt(1, 20).split(1, 1)])


def test_asked_before_anything():
    cache = IsoQuantCache()
    assert cache.get_mask_sizes(7, 0) == (7, 0) and cache.get_seq_length() == 0 and len(cache) == 0
    assert cache.nbytes == 0 and cache.is_compileable is False and "why" in str(cache.report())
    cache.reset()
    cache.crop(0)
    assert forced_logits(tiny_models.build("gemma3"), cache, [tiny_models.prompt(1, 9)]).isfinite().all()


# ---- report


def test_report():
    model = tiny_models.build("gemma3")
    cache = IsoQuantCache(**PACKED)
    forced_logits(model, cache, [tiny_models.prompt(1, 100)])
    rows = cache.report().rows
    assert [row.index for row in rows] == [0, 1, 2, 3]
    assert [row.reason for row in rows] == ["keeps its window only"] * 3 + ["full attention, K3 V3"]
    assert (rows[3].num_tokens, rows[3].num_packed, rows[3].num_exact) == (100, 64, 36)
    assert all(row.num_tokens == 100 and row.num_packed == 0 and row.num_exact == 15 for row in rows[:3])
    text = str(cache.report())
    assert "0-2 DynamicSlidingWindowLayer" in text and "K3 V3" in text and len(text.splitlines()) == 3


@pytest.mark.parametrize(
    "family, reason",
    [
        ("deepseek_v3", "full attention, latent and rope key K3"),
        ("qwen3_next", "recurrent state, no tokens"),
        ("llama", "full attention, K3 V3"),
    ],
)
def test_reasons(family, reason):
    cache = IsoQuantCache(**PACKED)
    forced_logits(tiny_models.build(family), cache, [tiny_models.prompt(1, 100)])
    assert reason in {row.reason for row in cache.report().rows}


# ---- torch.compile


def test_compiled_model():
    """In default mode: the graph breaks at the cache, and the model is found all the same."""
    model = tiny_models.build("gemma3", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    pieces = [tiny_models.prompt(1, 80), *tiny_models.prompt(1, 2, seed=2).split(1, 1)]
    wanted = forced_logits(model, IsoQuantCache(**PACKED), pieces)
    cache = IsoQuantCache(**PACKED)
    got = forced_logits(torch.compile(model, backend="eager"), cache, pieces)
    torch._dynamo.reset()
    assert relative_error(got, wanted) <= 1e-5
    assert kinds(cache) == ["DynamicSlidingWindowLayer", "IsoQuantLayer"]
    assert cache.stats.decompress_calls == 0 and cache.stats.attend_calls == 2
