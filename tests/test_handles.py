"""Handles: attention's own steps are answered from packed data; anything else sees the dense tensor, and is counted."""

import copy
import io
import pickle
import warnings

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from oracle import forced_logits, oracle_cache, relative_error
from transformers import LlamaConfig

from torch_kvq import IsoQuantCache
from torch_kvq._requirements import cache_keyword

pytestmark = pytest.mark.versions

PACKED = dict(window_len=32, flush_len=16)
HEADS, GROUPS, DIM, TOKENS = 2, 3, 32, 120


def handles(batch=2, dtype=torch.float32):
    """(cache, keys, values, dense keys, dense values) of a packed layer."""
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=HEADS, head_dim=DIM, hidden_size=192)
    cache = IsoQuantCache(config, **PACKED)
    generator = torch.Generator().manual_seed(0)
    for tokens in (TOKENS - 1, 1):
        states = torch.randn(2, batch, HEADS, tokens, DIM, generator=generator).to(dtype)
        keys, values = cache.update(*states, 0)
        F.scaled_dot_product_attention(states[0], keys, values)
    pieces = cache.layers[0].pieces()
    dense = pieces.rebuilt("k"), pieces.rebuilt("v")
    cache.stats.clear()
    return cache, keys, values, *dense


def queries(tokens=1, batch=2, dtype=torch.float32):
    return torch.randn(batch, HEADS * GROUPS, tokens, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


def repeat_kv(x, groups=GROUPS):
    batch, heads, tokens, dim = x.shape
    return x[:, :, None, :, :].expand(batch, heads, groups, tokens, dim).reshape(batch, heads * groups, tokens, dim)


def repeat_other(x):
    return x[:, :, None].expand(-1, -1, GROUPS, -1, -1).reshape(x.shape[0], -1, TOKENS, DIM)


MASK = torch.rand(2, 1, 5, TOKENS, generator=torch.Generator().manual_seed(2)) > 0.3
PER_HEAD = torch.randn(2, 6, 5, TOKENS, generator=torch.Generator().manual_seed(3))

ANSWERED = {
    "sdpa_gqa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    "sdpa_repeat": lambda q, k, v: F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v)),
    "sdpa_positional": lambda q, k, v: F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), MASK, 0.0, False),
    "sdpa_keywords": lambda q, k, v: F.scaled_dot_product_attention(
        query=q, key=repeat_kv(k), value=repeat_kv(v), attn_mask=MASK, dropout_p=0.0, scale=0.3, is_causal=False
    ),
    "sdpa_mask_of_heads": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, PER_HEAD, enable_gqa=True),
    "sdpa_causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    "sdpa_bf16_mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, MASK.float().log().float(), enable_gqa=True),
    "sdpa_packed_queries": lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :1].unflatten(1, (2, 3)).squeeze(3), k, v),
    "eager": lambda q, k, v: torch.matmul(torch.matmul(q, repeat_kv(k).transpose(2, 3)).softmax(-1), repeat_kv(v)),
    "at": lambda q, k, v: (q @ repeat_other(k).transpose(-1, -2)).softmax(-1) @ repeat_other(v),
    "method": lambda q, k, v: q.matmul(torch.transpose(repeat_kv(k), -2, -1)).softmax(-1).matmul(repeat_kv(v)),
    "after_to": lambda q, k, v: F.scaled_dot_product_attention(
        q,
        k.to(q.dtype).contiguous().detach(),
        v.to(q.device).to("cpu").to(q.device, q.dtype, non_blocking=True),
        enable_gqa=True,
    ),
    "swapped_twice": lambda q, k, v: q @ repeat_kv(k).transpose(2, 3).transpose(-1, -2).transpose(3, 2) @ repeat_kv(v),
}


@pytest.mark.parametrize("name", ANSWERED)
@pytest.mark.parametrize("tokens", [1, 5])
def test_answered_from_packed_data(name, tokens):
    if tokens == 1 and name in ("sdpa_positional", "sdpa_keywords", "sdpa_mask_of_heads", "sdpa_bf16_mask"):
        tokens = 5
    cache, keys, values, dense_keys, dense_values = handles()
    function, q = ANSWERED[name], queries(tokens)
    got, wanted = function(q, keys, values), function(q, dense_keys, dense_values)
    assert type(got) is torch.Tensor and got.shape == wanted.shape and got.dtype == wanted.dtype
    assert relative_error(got, wanted) <= 1e-5
    assert cache.stats.decompress_calls == 0 and cache.stats.fallback_calls == 0, cache.stats.fallback_reasons


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["sdpa_gqa", "sdpa_positional", "eager"])
def test_answered_in_half_precision(name, dtype):
    cache, keys, values, dense_keys, dense_values = handles(dtype=dtype)
    got = ANSWERED[name](queries(5, dtype=dtype), keys, values)
    wanted = ANSWERED[name](queries(5, dtype=dtype).float(), dense_keys.float(), dense_values.float())
    assert got.dtype == dtype and relative_error(got.float(), wanted) <= 1e-2
    assert cache.stats.decompress_calls == 0


def test_layers_keys_and_values_are_handles_too():
    """Read apart from each other, as models do that share keys and values between layers."""
    cache, _, _, dense_keys, dense_values = handles()
    layer, q = cache.layers[0], queries()
    got = F.scaled_dot_product_attention(q, layer.keys, layer.values, enable_gqa=True)
    assert relative_error(got, F.scaled_dot_product_attention(q, dense_keys, dense_values, enable_gqa=True)) <= 1e-5
    assert cache.stats.decompress_calls == 0
    assert layer.keys.shape == dense_keys.shape and layer.values.dtype == dense_values.dtype


FALLBACKS = {
    "add": (lambda k, v: k + 1, "add"),
    "radd": (lambda k, v: 1 + k, "add"),
    "neg": (lambda k, v: -v, "neg"),
    "sum": (lambda k, v: k.sum(-1), "sum"),
    "index": (lambda k, v: k[0], "getitem"),
    "slice": (lambda k, v: k[:, :, 10:50], "getitem"),
    "mask_index": (lambda k, v: k[k > 0], "gt"),
    "permute": (lambda k, v: k.permute(0, 2, 1, 3), "permute"),
    "transpose_12": (lambda k, v: k.transpose(1, 2), "transpose"),
    "mT": (lambda k, v: k.mT, "get"),
    "to_dtype": (lambda k, v: k.to(torch.float64), "to"),
    "float": (lambda k, v: k.double(), "double"),
    "cat": (lambda k, v: torch.cat([k, v], -1), "cat"),
    "stack": (lambda k, v: torch.stack([k, k]), "stack"),
    "chunk": (lambda k, v: torch.chunk(k, 2, -1)[1], "chunk"),
    "pad": (lambda k, v: F.pad(k, (0, 3)), "pad"),
    "einsum": (lambda k, v: torch.einsum("bhtd,bhtd->bht", k, v), "einsum"),
    "bmm": (lambda k, v: torch.bmm(k.reshape(4, TOKENS, DIM), v.reshape(4, TOKENS, DIM).mT), "reshape"),
    "repeat_interleave": (lambda k, v: k.repeat_interleave(3, 1), "repeat_interleave"),
    "reshape_keyword": (lambda k, v: k.reshape(shape=(2, -1)), "reshape"),
    "matmul_left": (lambda k, v: torch.matmul(k, torch.ones(DIM, 2)), "matmul"),
    "matmul_keywords": (lambda k, v: torch.matmul(input=torch.ones(2, 2, 1, TOKENS), other=v), "matmul"),
    "matmul_two": (lambda k, v: k.transpose(2, 3) @ v, "matmul"),
    "matmul_plain_keys": (lambda k, v: torch.ones(2, 2, 1, TOKENS) @ k, "matmul"),
    "matmul_values_transposed": (lambda k, v: torch.ones(2, 2, 1, DIM) @ v.transpose(2, 3), "matmul"),
    "linear": (lambda k, v: F.linear(k, torch.ones(5, DIM)), "linear"),
    "split": (lambda k, v: k.split(40, 2)[1], "split"),
    "view": (lambda k, v: v.view(2, HEADS, -1), "view"),
    "expand_as": (lambda k, v: k.expand_as(k), "expand_as"),
    "numpy": (lambda k, v: torch.from_numpy(k.numpy()), "numpy"),
    "tolist": (lambda k, v: torch.tensor(k[0, 0, 0].tolist()), "getitem"),
    "deepcopy": (lambda k, v: copy.deepcopy(k), "deepcopy"),
    "pickle": (lambda k, v: pickle.loads(pickle.dumps(v)), "pickle"),
    "swapped_roles": (lambda k, v: F.scaled_dot_product_attention(k[:, :, :1], v, k), "scaled_dot_product_attention"),
    "isfinite": (lambda k, v: torch.isfinite(k), "isfinite"),
    "norm": (lambda k, v: k.norm(), "norm"),
    "clone": (lambda k, v: k.clone(), "clone"),
}


@pytest.mark.parametrize("name", FALLBACKS)
@pytest.mark.filterwarnings("ignore:IsoQuantCache rebuilds")
def test_anything_else_sees_the_dense_tensor(name):
    cache, keys, values, dense_keys, dense_values = handles()
    function, reason = FALLBACKS[name]
    got, wanted = function(keys, values), function(dense_keys, dense_values)
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, wanted)
    assert cache.stats.fallback_calls > 0 and cache.stats.decompress_calls == cache.stats.fallback_calls
    assert any(reason in each for each in cache.stats.fallback_reasons), cache.stats.fallback_reasons


METADATA = {
    "shape": lambda x: x.shape,
    "size": lambda x: (x.size(), x.size(-1), x.dim(), x.ndim, len(x), x.numel(), x.stride(-1) > 0),
    "dtype": lambda x: (x.dtype, x.device, x.is_cuda, x.is_floating_point(), torch.is_tensor(x), x.element_size()),
    "grad": lambda x: (x.requires_grad, x.is_leaf, x.grad),
    "isinstance": lambda x: isinstance(x, torch.Tensor),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_costs_nothing(name):
    cache, keys, values, dense_keys, dense_values = handles()
    for handle, dense in (
        (keys, dense_keys),
        (values, dense_values),
        (keys.transpose(2, 3), dense_keys.transpose(2, 3)),
    ):
        assert METADATA[name](handle) == METADATA[name](dense)
    assert cache.stats.decompress_calls == 0


def test_printing_costs_nothing():
    cache, keys, values, *_ = handles()
    assert repr(keys) == str(keys) == "KVHandle(shape=(2, 2, 120, 32), dtype=torch.float32, device=cpu)"
    assert f"{values}".startswith("KVHandle(") and cache.stats.decompress_calls == 0


@pytest.mark.filterwarnings("ignore:IsoQuantCache rebuilds")
def test_saving_a_handle_saves_its_numbers():
    _, keys, _, dense_keys, _ = handles()
    file = io.BytesIO()
    torch.save({"keys": keys}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["keys"], dense_keys)


def test_an_old_handle_keeps_its_tokens():
    """A handle is a snapshot: the cache goes on under it, past a flush and past growth."""
    cache, keys, values, dense_keys, dense_values = handles()
    q = queries()
    for _ in range(60):
        k, v = cache.update(torch.randn(2, HEADS, 1, DIM), torch.randn(2, HEADS, 1, DIM), 0)
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    got = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
    wanted = F.scaled_dot_product_attention(q, dense_keys, dense_values, enable_gqa=True)
    assert relative_error(got, wanted) <= 1e-5


# ---- warnings


def test_one_warning_a_cache_names_the_function():
    cache, keys, values, *_ = handles()
    with pytest.warns(UserWarning, match=r"rebuilds packed tokens for repeat_interleave\(\).*sdpa, eager or kvq") as seen:
        keys.repeat_interleave(2, 1)
        values.repeat_interleave(2, 1)
        keys + 1
    assert len(seen) == 1 and cache.stats.fallback_calls == 3
    cache.stats.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keys + 1


def test_no_warning_for_a_crop_or_an_exact_cache():
    model = tiny_models.build("llama", "sdpa")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        cache = IsoQuantCache(**PACKED)
        forced_logits(model, cache, [tiny_models.prompt(1, 100)])
        cache.crop(-97)
        assert cache.stats.decompress_calls == 2 * 2 and cache.stats.fallback_calls == 0
        cache.layers[0].keys + 1  # three exact tokens
    assert cache.stats.fallback_calls == 0


# ---- models that do more with keys than attend


@pytest.mark.parametrize("family, attn", tiny_models.names("gemma3n", "gemma4"))
def test_layers_that_share_keys(family, attn):
    model, ids = tiny_models.build(family, attn), tiny_models.prompt(1, 120)
    pieces = [ids[:, :100], *ids[:, 100:].split(1, 1)]
    cache = IsoQuantCache(**PACKED)
    got = forced_logits(model, cache, pieces)
    assert relative_error(got, forced_logits(model, oracle_cache(model.config, **PACKED), pieces)) <= 1e-5
    packed = sum(row.num_packed > 0 for row in cache.report().rows)
    assert cache.stats.attend_calls > packed * 20  # the sharing layers ask too
    assert cache.stats.decompress_calls == 0


@pytest.mark.filterwarnings("ignore:IsoQuantCache rebuilds")
def test_flex_attention_falls_back():
    model = tiny_models.build("llama", "sdpa", num_hidden_layers=1)
    ids = tiny_models.prompt(1, 110)
    pieces = [ids[:, :100], ids[:, 100:101]]
    wanted = forced_logits(model, oracle_cache(model.config, **PACKED), pieces)
    model.set_attn_implementation("flex_attention")
    cache = IsoQuantCache(**PACKED)
    got = forced_logits(model, cache, pieces)
    # No balance from queries here: flex never shows them. The codes differ a little.
    assert relative_error(got, wanted) <= 0.1
    assert cache.stats.fallback_calls > 0 and cache.stats.decompress_calls == cache.stats.fallback_calls


def test_a_mask_that_requires_dropout_is_dense():
    cache, keys, values, dense_keys, dense_values = handles()
    with pytest.warns(UserWarning, match="scaled_dot_product_attention"):
        out = F.scaled_dot_product_attention(queries(), keys, values, dropout_p=1.0, enable_gqa=True)
    assert not out.any() and cache.stats.fallback_reasons == {"scaled_dot_product_attention": 2}


def test_keyword_of_forward():
    model, cache = tiny_models.build("llama", "sdpa"), IsoQuantCache(**PACKED)
    with torch.no_grad():
        out = model(input_ids=tiny_models.prompt(1, 100), **{cache_keyword(): cache})
    assert getattr(out, cache_keyword()) is cache
