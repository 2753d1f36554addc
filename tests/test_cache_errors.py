"""Bad input: an error that names the argument, the rule and the value, before anything changed; the cache stays usable."""

import copy
import functools
import re

import pytest
import tiny_models
import torch
from oracle import forced_logits, relative_error

from torch_kvq import IsoQuantCache, RaBitQSparseCache
from torch_kvq._requirements import cache_keyword

pytestmark = pytest.mark.versions

PACKED = dict(window_len=32, flush_len=16)
KINDS = {
    "isoquant": functools.partial(IsoQuantCache, **PACKED),
    "sparse": functools.partial(RaBitQSparseCache, min_dense_len=0, top_p=0.9, **PACKED),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def one_by_one(ids):
    return list(ids.split(1, 1))


# ---- options

OPTIONS = [
    (dict(k_bits=1), "k_bits", "1"),
    (dict(v_bits=5), "v_bits", "5"),
    (dict(k_bits=2.5), "k_bits", "2.5"),
    (dict(v_bits=True), "v_bits", "True"),
    (dict(k_bits="3"), "k_bits", "'3'"),
    (dict(k_bits=None), "k_bits", "None"),
    (dict(num_sinks=-1), "num_sinks", "-1"),
    (dict(num_sinks=1.0), "num_sinks", "1.0"),
    (dict(window_len=-128), "window_len", "-128"),
    (dict(window_len=8), "window_len", "8"),
    (dict(window_len=15, flush_len=16), "window_len", "15"),
    (dict(flush_len=0), "flush_len", "0"),
    (dict(flush_len=-16), "flush_len", "-16"),
    (dict(defer_limit=-1), "defer_limit", "-1"),
    (dict(seed=-1), "seed", "-1"),
    (dict(seed=0.5), "seed", "0.5"),
    (dict(rotation="givens"), "rotation", "'givens'"),
    (dict(rotation=None), "rotation", "None"),
    (dict(k_scale="max"), "k_scale", "'max'"),
    (dict(v_scale=""), "v_scale", "''"),
    (dict(prefill="chunked"), "prefill", "'chunked'"),
    (dict(balance="yes"), "balance", "'yes'"),
    (dict(center=2), "center", "2"),
]


@pytest.mark.parametrize("options, name, value", OPTIONS, ids=[f"{name}={value}" for _, name, value in OPTIONS])
def test_options(options, name, value):
    with pytest.raises(ValueError, match=rf"{name} must .*{re.escape(value)}"):
        IsoQuantCache(**options)


@pytest.mark.parametrize("config", [{}, "llama", 3, torch.nn.Linear(1, 1)])
def test_config_of_a_wrong_type(config):
    with pytest.raises(TypeError, match=f"config must be a transformers config, got {type(config).__name__}"):
        IsoQuantCache(config)


def test_config_of_another_model():
    model = tiny_models.build("llama", "sdpa", num_hidden_layers=4)
    cache = IsoQuantCache(tiny_models.build("llama", "sdpa").config)
    with pytest.raises(ValueError, match="config must be that of the model: it has 2 layers, got layer_idx 2"):
        forced_logits(model, cache, [tiny_models.prompt(1, 5)])


# ---- states


def states(batch=2, heads=2, tokens=1, dim=32, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(batch, heads, tokens, dim, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dim", [6, 30, 514, 516, 1024])
@pytest.mark.parametrize("role", ["key_states", "value_states"])
def test_head_dim(dim, role):
    cache = IsoQuantCache(tiny_models.build("llama", "sdpa").config)
    good, bad = states(tokens=9), states(tokens=9, dim=dim)
    with pytest.raises(ValueError, match=rf"{role} .*{dim}"):
        cache.update(*((bad, good) if role == "key_states" else (good, bad)), 0)
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    cache.update(good, good, 0)


def with_value(x, value, place=(0, 1, -1, 3)):
    x = x.clone()
    x[place] = value
    return x


BAD_STATES = {
    "nan": (
        lambda: (with_value(states(), torch.nan), states()),
        r"key_states must be finite, got inf or nan in layer 0",
    ),
    "inf": (
        lambda: (states(), with_value(states(), torch.inf)),
        r"value_states must be finite, got inf or nan in layer 0",
    ),
    "both_infs": (
        lambda: (with_value(with_value(states(), torch.inf), -torch.inf, (0, 0, 0, 0)), states()),
        r"key_states must be finite",
    ),
    "batch": (lambda: (states(batch=3), states(batch=3)), r"key_states must keep batch.*\(2, 2, 32\).*\(3, 2, 32\)"),
    "heads": (lambda: (states(heads=4), states(heads=4)), r"key_states must keep batch.*\(2, 4, 32\)"),
    "head_dim": (lambda: (states(dim=64), states(dim=64)), r"key_states must keep batch.*\(2, 2, 64\)"),
    "value_dim": (lambda: (states(), states(dim=64)), r"value_states must keep batch.*\(2, 2, 64\)"),
    "dtype": (lambda: (states(dtype=torch.bfloat16),) * 2, r"key_states must keep dtype torch.float32.*torch.bfloat16"),
    "value_dtype": (lambda: (states(), states(dtype=torch.float16)), r"value_states must keep dtype.*torch.float16"),
    "device": (lambda: (states(device="meta"),) * 2, r"key_states must stay on cpu.*meta"),
    "value_device": (lambda: (states(), states(device="meta")), r"value_states must stay on cpu.*meta"),
    "lengths": (lambda: (states(tokens=2), states(tokens=3)), r"value_states must have.*\(2, 2, 2\).*\(2, 2, 3\)"),
    "no_tokens": (lambda: (states(tokens=0),) * 2, r"key_states must hold at least one token, got 0"),
    "three_dims": (
        lambda: (states()[0],) * 2,
        r"key_states must be \[batch, heads, tokens, head_dim\], got shape \(2, 1, 32\)",
    ),
    "gradients": (lambda: (states().requires_grad_(), states()), r"key_states must not require gradients"),
}


@kinds
@pytest.mark.parametrize("held", [9, 60, 120])
@pytest.mark.parametrize("name", BAD_STATES)
def test_bad_states_change_nothing(name, held, kind):
    """A cache that refused them goes on bit for bit like one that never saw them."""
    make, message = BAD_STATES[name]
    cache = KINDS[kind](tiny_models.build("llama", "sdpa").config)

    def feed(cache, tokens):
        outs = []
        for layer in range(2):
            k, v = states(tokens=tokens), states(tokens=tokens).flip(-1)
            outs.append(torch.nn.functional.scaled_dot_product_attention(k[:, :, -1:], *cache.update(k, v, layer)))
        return torch.stack(outs)

    feed(cache, held)
    twin = copy.deepcopy(cache)
    before = cache.nbytes, cache.get_seq_length(), copy.deepcopy(cache.stats)
    with pytest.raises(ValueError, match=message):
        cache.update(*make(), 0)
    assert before == (cache.nbytes, cache.get_seq_length(), cache.stats)
    for _ in range(20):
        assert torch.equal(feed(cache, 1), feed(twin, 1))


def test_the_form_of_states_follows_the_rows():
    """After the rows were repeated the states of before have the wrong batch, although they were the last that fitted."""
    cache = IsoQuantCache(tiny_models.build("llama", "sdpa").config)
    cache.update(states(), states(), 0)
    cache.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match=r"key_states must keep batch.*\(4, 2, 32\).*\(2, 2, 32\)"):
        cache.update(states(), states(), 0)
    cache.update(states(batch=4), states(batch=4), 0)
    assert cache.get_seq_length(0) == 0 and cache.layers[0].get_seq_length() == 2


def test_a_first_call_on_two_devices():
    cache = IsoQuantCache(tiny_models.build("llama", "sdpa").config)
    with pytest.raises(ValueError, match="value_states must be on cpu as key_states, got meta"):
        cache.update(states(), states(device="meta"), 0)
    with pytest.raises(ValueError, match="key_states must be float32, bfloat16 or float16, got torch.float64"):
        cache.update(states(dtype=torch.float64), states(dtype=torch.float64), 0)


# ---- a forward that fails midway


class Poison:
    """Makes the key projection of one layer give nan while it is entered."""

    def __init__(self, model, layer):
        attention = model.model.layers[layer].self_attn
        self.module = getattr(attention, "k_proj", None) or attention.kv_a_proj_with_mqa

    def __enter__(self):
        self.hook = self.module.register_forward_hook(lambda module, args, out: out * torch.nan)

    def __exit__(self, *error):
        self.hook.remove()


@kinds
@pytest.mark.parametrize(
    "family, layers",
    [("llama", (0, 1, 3)), ("deepseek_v3", (0, 2)), ("gemma3", (3,)), ("qwen3_next", (3,)), ("lfm2", (1, 3))],
)
def test_first_forward_fails(family, layers, kind):
    """In any layer, also behind layers that are not packed: the next generate is that of a new cache."""
    if kind == "sparse" and family == "deepseek_v3":
        pytest.skip("latent attention is left to the library")
    model, ids = tiny_models.build(family, "sdpa", num_hidden_layers=4), tiny_models.prompt(1, 100)
    wanted = model.generate(ids, past_key_values=KINDS[kind](), max_new_tokens=20).tolist()
    for layer in layers:
        for given in (model.config, None):
            cache = KINDS[kind](given)
            with (
                Poison(model, layer),
                pytest.raises(ValueError, match=f"must be finite, got inf or nan in layer {layer}"),
            ):
                model.generate(ids, past_key_values=cache, max_new_tokens=20)
            assert cache.get_seq_length() == 0
            assert model.generate(ids, past_key_values=cache, max_new_tokens=20).tolist() == wanted


@kinds
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("bad_tokens", [1, 5, 10])
def test_later_forward_fails(family, layer, bad_tokens, kind):
    """A decode step or a second prompt: its tokens are forgotten in every layer."""
    if kind == "sparse" and family == "deepseek_v3":
        pytest.skip("latent attention is left to the library")
    model, ids = tiny_models.build(family, "sdpa", num_hidden_layers=4), tiny_models.prompt(1, 130)
    cache = KINDS[kind]()
    forced_logits(model, cache, [ids[:, :100], *one_by_one(ids[:, 100:102])])
    twin = copy.deepcopy(cache)
    with Poison(model, layer), pytest.raises(ValueError, match="must be finite"):
        forced_logits(model, cache, [ids[:, 102 : 102 + bad_tokens]])
    assert cache.get_seq_length() == 102 and cache.get_mask_sizes(1, 0) == (103, 0)
    got, wanted = (forced_logits(model, each, one_by_one(ids[:, 102:])) for each in (cache, twin))
    assert torch.equal(got, wanted)


@kinds
@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "lfm2"])
def test_later_forward_fails_behind_layers_that_forget(family, kind):
    """Windows and states cannot take tokens back: the cache says so instead of going on wrongly, and reset() frees it."""
    model, ids = tiny_models.build(family, "sdpa"), tiny_models.prompt(1, 110)
    pieces = [ids[:, :100], *one_by_one(ids[:, 100:])]
    cache = KINDS[kind]()
    forced_logits(model, cache, pieces)
    with Poison(model, 3), pytest.raises(ValueError, match="must be finite"):
        forced_logits(model, cache, [ids[:, :1]])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"failed midway.*call reset\(\)"):
            forced_logits(model, cache, [ids[:, :1]])
    cache.reset()
    assert torch.equal(forced_logits(model, cache, pieces), forced_logits(model, KINDS[kind](), pieces))


class Interruption(Exception):
    pass


@kinds
@pytest.mark.parametrize("family, safe", [("llama", True), ("gemma3", False), ("gemma2", False), ("lfm2", False)])
@pytest.mark.parametrize("held", [0, 100])
def test_interruption_elsewhere(family, safe, held, kind):
    """Not an error of the cache but Ctrl-C or no memory in the MLP of the second last layer."""
    model, ids = tiny_models.build(family, None, num_hidden_layers=4), tiny_models.prompt(1, 130)

    def interrupt(*args):
        raise Interruption

    cache = KINDS[kind]()
    if held:
        forced_logits(model, cache, [ids[:, :held]])
    mlp = getattr(model.model.layers[2], "mlp", None) or model.model.layers[2].feed_forward
    hook = mlp.register_forward_hook(interrupt)
    with pytest.raises(Interruption):
        forced_logits(model, cache, [ids[:, held : held + 5]])
    hook.remove()
    assert cache.get_seq_length() == held
    pieces = [ids[:, held : held + 5], *one_by_one(ids[:, held + 5 :])]
    if not safe:
        with pytest.raises(ValueError, match=r"failed midway.*call reset\(\)"):
            forced_logits(model, cache, pieces)
        cache.reset()
        pieces = [ids[:, :held], *pieces] if held else pieces
        assert torch.equal(forced_logits(model, cache, pieces), forced_logits(model, KINDS[kind](), pieces))
        return
    twin = KINDS[kind]()
    if held:
        forced_logits(model, twin, [ids[:, :held]])
    assert relative_error(forced_logits(model, cache, pieces), forced_logits(model, twin, pieces)) <= 1e-6


# ---- crop


@pytest.mark.parametrize("held", [9, 120])
@pytest.mark.parametrize(
    "amount, message", [(1, "negative or 0.*got 1"), (50, "negative or 0"), (-121, "not drop more than the")]
)
def test_bad_crop_changes_nothing(held, amount, message):
    model, ids, more = (
        tiny_models.build("llama", "sdpa"),
        tiny_models.prompt(1, held),
        tiny_models.prompt(1, 20, seed=2),
    )
    cache = IsoQuantCache(**PACKED)
    forced_logits(model, cache, [ids])
    twin, nbytes = copy.deepcopy(cache), cache.nbytes
    with pytest.raises(ValueError, match=f"tokens_to_remove must .*{message}"):
        cache.crop(amount)
    assert cache.get_seq_length() == held and cache.nbytes == nbytes
    assert torch.equal(*(forced_logits(model, each, one_by_one(more)) for each in (cache, twin)))


def test_crop_before_the_first_token():
    cache = IsoQuantCache(tiny_models.build("llama", "sdpa").config)
    with pytest.raises(ValueError, match="tokens_to_remove must not drop more than the 0 tokens of layer 0, got -1"):
        cache.crop(-1)
    cache.crop(0)


# ---- one cache, two models


@pytest.mark.parametrize("second", ["same", "copy", "qwen3", "gemma3"])
@pytest.mark.parametrize("delete", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_two_models(second, delete, given):
    first, ids = tiny_models.build("llama", "sdpa"), tiny_models.prompt(1, 100)
    cache = IsoQuantCache(first.config if given else None, **PACKED)
    wanted = first.generate(ids, past_key_values=IsoQuantCache(**PACKED), max_new_tokens=9).tolist()
    first.generate(ids[:, :60], past_key_values=cache, max_new_tokens=1)
    other = copy.deepcopy(first) if second == "copy" else tiny_models.build("llama" if second == "same" else second, "sdpa")
    if delete:
        del first
    with pytest.raises(ValueError, match=r"past_key_values must serve one model: layer 0 holds 60 tokens.*reset\(\)"):
        other.generate(ids, past_key_values=cache, max_new_tokens=9)
    assert cache.get_seq_length() == 60
    if not delete:
        cache.crop(0)
        first.generate(ids, past_key_values=cache, max_new_tokens=9)
    cache.reset()
    if second in ("same", "copy"):
        assert other.generate(ids, past_key_values=cache, max_new_tokens=9).tolist() == wanted
    elif not given:
        other.generate(ids, past_key_values=cache, max_new_tokens=9)
        assert len(cache.layers) == other.config.num_hidden_layers


class Attention(torch.nn.Module):
    def forward(self, cache, layer):
        return cache.update(states(), states(), layer)


def test_a_second_module_of_a_later_layer():
    """Cross-attention that only some layers have."""
    cache = IsoQuantCache(tiny_models.build("llama", "sdpa", num_hidden_layers=3).config)
    own, cross = [Attention() for _ in range(3)], Attention()
    for _ in range(2):
        for layer, attention in enumerate(own[:2]):
            attention(cache, layer)
        with pytest.raises(ValueError, match=r"must serve one model: layer 1 holds . tokens of another attention module"):
            cross(cache, 1)
        own[2](cache, 2)
    assert [layer.get_seq_length() for layer in cache.layers] == [2, 2, 2]


def test_training_is_refused():
    model, cache = tiny_models.build("llama", "sdpa").train(), IsoQuantCache(**PACKED)
    with pytest.raises(ValueError, match="key_states must not require gradients.*no_grad"):
        model(input_ids=tiny_models.prompt(1, 5), **{cache_keyword(): cache})
    assert cache.get_seq_length() == 0
    assert forced_logits(model.eval(), cache, [tiny_models.prompt(1, 100)]).isfinite().all()


# ---- odd numbers

NUMBERS = {
    "zero": lambda x: x * 0,
    "denormal": lambda x: x * 1e-40,
    "tiny": lambda x: x * 1e-12,
    "1e4": lambda x: x / x.std() * 1e4,
    "equal": lambda x: x[..., :1].expand_as(x) * 0 + 0.7,
    "one_channel": lambda x: x * (torch.arange(x.shape[-1]) == 3) * 1e4,
}


@pytest.mark.parametrize("family, attn", [("llama", "sdpa"), ("llama", "eager"), ("gpt_oss", "eager"), ("deepseek_v3", "sdpa")])
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("length, new_tokens", [(1, 80), (100, 20)])
def test_odd_numbers_stay_finite(family, attn, name, length, new_tokens):
    model = tiny_models.build(family, attn)
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in ("k_proj", "v_proj", "kv_a_layernorm"):
            if hasattr(attention, projection):
                getattr(attention, projection).register_forward_hook(lambda module, args, out: NUMBERS[name](out))
    cache = IsoQuantCache(**PACKED)
    options = dict(max_new_tokens=new_tokens, output_logits=True, return_dict_in_generate=True)
    out = model.generate(tiny_models.prompt(1, length), past_key_values=cache, **options)
    assert torch.stack(out.logits).isfinite().all()
    assert cache.stats.tokens_compressed > 0 and cache.stats.attend_calls > 0 and cache.stats.decompress_calls == 0
