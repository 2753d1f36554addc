"""Misuse and corners that were once answered wrongly: each test failed when it was written."""

import copy
import io
import os
import pathlib
import subprocess
import sys

import demo
import op_cases
import pytest
import tiny_models
import torch
import torch.nn.functional as F
from oracle import forced_logits, oracle_cache, relative_error
from transformers import DynamicCache, EncoderDecoderCache, FalconConfig, FalconForCausalLM, LlamaConfig

from torch_kvq import IsoQuantCache, RaBitQSparseCache, backends
from torch_kvq._requirements import cache_keyword
from torch_kvq.codecs.codebook import lloyd_max
from torch_kvq.codecs.rotation import KINDS, make_rotation
from torch_kvq.evaluate import fidelity

pytestmark = [pytest.mark.versions, pytest.mark.filterwarnings("ignore:IsoQuantCache rebuilds")]

OPS = torch.ops.torch_kvq
LAST = 2**63 - 1
PACKED = dict(window_len=32, flush_len=16)
ONE_LAYER = LlamaConfig(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32, hidden_size=64)

# ---- operators


@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize("start", [LAST, LAST - 31])
def test_a_start_near_the_end_of_int64_is_refused(along_tokens, start):
    """``start`` and the tokens overflowed to a negative number, which every capacity holds."""
    x = torch.randn(1, 2, 40, 32)
    store = op_cases.make_store(x, 3, along_tokens)
    named = f"start must .*{start}" if backends.native.loaded() else f"scale must have a capacity of at least {start + 40}"
    with pytest.raises(RuntimeError, match=named):
        OPS.decode(store, along_tokens, start, torch.empty_like(x))
    with pytest.raises(RuntimeError, match=named):
        OPS.encode(x, *store[3:], 0, along_tokens, start, *store[:3])


@pytest.mark.parametrize("place", ["query", "exact_key", "mask", "scale"])
def test_nan_is_not_taken_for_a_masked_token(place):
    """It came out as zeros, or as the attention of the other tokens."""
    arguments, _, _, _ = op_cases.problem(op_cases.Case("nan", queries=2))
    q, keys, values, exact_keys, exact_values, mask, sinks, start, length, num_sinks, scale, softcap = arguments
    q, exact_keys = q.clone(), exact_keys.clone()
    if place == "query":
        q[:, 0, 1] = torch.nan
    elif place == "exact_key":
        exact_keys[:, 0, 3] = torch.nan
    elif place == "mask":
        mask = torch.zeros(*q.shape[:3], length + exact_keys.shape[2])
        mask[:, 0, 1, 9] = torch.nan
    else:
        scale = torch.nan
    out, lse = torch.zeros(*q.shape[:3], exact_values.shape[-1]), torch.zeros(q.shape[:3])
    OPS.attend(
        q, keys, values, exact_keys, exact_values, mask, sinks, start, length, num_sinks, scale, softcap, out, lse
    )  # fmt: skip
    assert out[:, 0, 1].isnan().all() and lse[:, 0, 1].isnan().all()
    assert place == "scale" or out[:, -1].isfinite().all()


# ---- the window


@pytest.mark.parametrize("drafts", [2, 21, 32])
def test_rejected_drafts_do_not_use_up_the_window(drafts):
    """Drafts were packed together with the window in front of them, then taken back."""
    model = tiny_models.build("llama")
    cache = IsoQuantCache(model.config, **PACKED)
    cache.activate_past_recording()
    for step in range(20):
        forced_logits(model, cache, [tiny_models.prompt(1, (150 if step == 0 else 1) + drafts, seed=step)])
        cache.crop(-drafts)
        for layer in cache.layers:
            assert layer.exact.length - layer.num_sinks >= PACKED["window_len"]
    assert cache.stats.attend_calls > 0 and cache.stats.tokens_compressed > 0


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_assisted_decoding_equals_a_dense_twin(attn):
    """Logits, not tokens only: the twin packs at the next update, so both must pack the same tokens."""
    model, assistant = tiny_models.build("llama", attn), tiny_models.build("llama", num_hidden_layers=1)
    options = dict(assistant_model=assistant, max_new_tokens=40, output_logits=True, return_dict_in_generate=True)
    caches = IsoQuantCache(**PACKED), oracle_cache(model.config, **PACKED)
    got, wanted = (model.generate(tiny_models.prompt(1, 120), past_key_values=cache, **options) for cache in caches)
    assert relative_error(torch.cat(got.logits), torch.cat(wanted.logits)) <= 1e-5


@pytest.mark.parametrize("window_len", [4096, 10**18])
def test_a_long_window_costs_what_it_holds(window_len):
    """Its whole length was allocated with the second call."""
    model, ids = tiny_models.build("llama"), tiny_models.prompt(1, 300)
    cache, exact = IsoQuantCache(window_len=window_len), DynamicCache(config=model.config)
    pieces = ids.split([20, *[1] * 80, 199, 1], 1)
    assert torch.equal(forced_logits(model, cache, pieces), forced_logits(model, exact, pieces))
    dense = sum(layer.keys.nbytes + layer.values.nbytes for layer in exact.layers)
    assert dense <= cache.nbytes <= 2 * dense


# ---- attention calls


def packed_layer(batch=1):
    """A cache of one layer with packed tokens, its handles of keys and values, and the same dense."""
    cache = IsoQuantCache(ONE_LAYER, **PACKED)
    for tokens in (100, 1):
        k, v = cache.update(torch.randn(batch, 2, tokens, 32), torch.randn(batch, 2, tokens, 32), 0)
        if tokens > 1:
            F.scaled_dot_product_attention(torch.randn(batch, 4, 1, 32), k, v, enable_gqa=True)
    assert k.pieces.is_packed
    return cache, k, v, k.pieces.rebuilt("k"), v.pieces.rebuilt("v")


def strided(*shape):
    return torch.randn(*shape, 2)[..., 0]


CALLS = {
    "scores_3d": lambda k, v, x: x(2, 1, 32) @ k.transpose(2, 3),
    "scores_1d": lambda k, v, x: x(32) @ k.transpose(2, 3),
    "scores_more_sequences": lambda k, v, x: x(3, 2, 1, 32) @ k.transpose(2, 3),
    "scores_one_head_for_all": lambda k, v, x: x(1, 1, 1, 32) @ k.transpose(2, 3),
    "values_one_head_for_all": lambda k, v, x: x(1, 1, 1, 101) @ v,
    "scores": lambda k, v, x: x(1, 2, 1, 32) @ k.transpose(2, 3),
    "values": lambda k, v, x: x(1, 2, 1, 101) @ v,
    "sdpa": lambda k, v, x: F.scaled_dot_product_attention(x(1, 2, 1, 32), k, v),
    "sdpa_more_sequences": lambda k, v, x: F.scaled_dot_product_attention(x(3, 2, 1, 32), k, v),
    "sdpa_3d": lambda k, v, x: F.scaled_dot_product_attention(x(2, 1, 32), k, v),
}


@pytest.mark.parametrize("draw", [torch.randn, strided])
@pytest.mark.parametrize("name", CALLS)
def test_queries_of_other_shapes_and_strides(name, draw):
    """Shapes that torch broadcasts, and queries whose last dim is not contiguous, ended in an error of the kernel."""
    _, k, v, dense_k, dense_v = packed_layer()
    torch.manual_seed(1)
    got = CALLS[name](k, v, draw)
    torch.manual_seed(1)
    torch.testing.assert_close(got, CALLS[name](dense_k, dense_v, draw), atol=1e-4, rtol=1e-4)


def test_eager_attention_that_broadcasts_one_key_head_stays_packed():
    config = FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=257, eos_token_id=None)
    model, cache = FalconForCausalLM._from_config(config, attn_implementation="eager").eval(), IsoQuantCache(**PACKED)
    pieces = tiny_models.prompt(2, 120).split([100, *[1] * 20], 1)
    wanted = forced_logits(model, oracle_cache(config, **PACKED), pieces)
    assert relative_error(forced_logits(model, cache, pieces), wanted) <= 1e-5
    assert cache.stats.attend_calls > 0 and cache.stats.fallback_calls == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_a_mask_of_integers_is_refused(dtype):
    """It was added to the logits: 1 for a token, 0 for padding."""
    _, k, v, _, _ = packed_layer()
    with pytest.raises(ValueError, match=f"attn_mask must be bool .* or float .*{dtype}"):
        F.scaled_dot_product_attention(torch.randn(1, 2, 1, 32), k, v, torch.ones(1, 1, 1, 101, dtype=dtype))


@pytest.mark.parametrize("shape", [(1, 100), (100, 100), (1, 100, 100), (1, 1, 1, 100)])
def test_masks_of_fewer_dims_in_a_prompt(shape):
    cache, x = IsoQuantCache(ONE_LAYER, **PACKED), torch.randn(1, 2, 100, 32)
    mask = torch.ones(shape, dtype=torch.bool).tril(100)
    out = F.scaled_dot_product_attention(x, *cache.update(x, x, 0), mask)
    assert torch.equal(out, F.scaled_dot_product_attention(x, x, x, mask))


@pytest.mark.parametrize("low", [-torch.inf, torch.finfo(torch.float32).min, -1e9])
def test_every_usual_low_number_hides_padding(low):
    """-1e9 counted as visible, so padding became sinks and entered the statistics."""
    cache, x = IsoQuantCache(ONE_LAYER, **PACKED), torch.randn(2, 2, 120, 32)
    mask = torch.zeros(2, 1, 120, 120)
    mask[1, ..., :50] = low
    F.scaled_dot_product_attention(x, *cache.update(x, x, 0), mask)
    assert cache.layers[0].order.stored[1, :4].tolist() == [50, 51, 52, 53]


@pytest.mark.parametrize("attn", ["sdpa", "eager", "kvq"])
def test_gradients_of_queries_are_refused(attn):
    """Where only the query projection is trained no key requires gradients, and the query's were lost without a word."""
    model, ids = tiny_models.build("llama", num_hidden_layers=1), tiny_models.prompt(1, 110)
    model.set_attn_implementation(attn)
    for name, weight in model.named_parameters():
        weight.requires_grad_("q_proj" in name or "lm_head" in name)
    cache = IsoQuantCache(**PACKED)
    forced_logits(model, cache, [ids[:, :100]])
    with pytest.raises(ValueError, match="query must not require gradients"):
        model(ids[:, 100:], **{cache_keyword(): cache})


# ---- the rest of the interface


def test_a_seed_out_of_range_is_refused_at_once():
    """It was refused in the middle of the first forward that packed."""
    with pytest.raises(ValueError, match=r"seed must be at most 2\*\*31 - 1, got 2147483648"):
        IsoQuantCache(seed=2**31)


@pytest.mark.parametrize("amount", [-1.5, None, "-1"])
def test_crop_by_what_is_no_integer_is_refused(amount):
    """-1.5 was taken for -1."""
    cache, *_ = packed_layer()
    with pytest.raises(ValueError, match=f"tokens_to_remove must be an integer, got {amount!r}"):
        cache.crop(amount)
    cache.crop(torch.tensor(-1))
    assert cache.get_seq_length() == 100


@pytest.mark.parametrize("rows", [[1], [True, False, True], (2, 0, 0)])
def test_rows_selected_by_a_list(rows):
    cache, *_, keys, _ = packed_layer(batch=3)
    cache.batch_select_indices(rows)
    assert torch.equal(cache.layers[0].pieces().rebuilt("k"), keys[list(rows)])


def test_iteration():
    cache, *_, keys, values = packed_layer()
    ((k, v, window),) = cache
    assert torch.equal(k * 1, keys) and torch.equal(v * 1, values) and window is None
    assert list(EncoderDecoderCache(cache, DynamicCache())) == []  # pairs of layers, and no cross-attention yet


def test_codecs_do_not_follow_the_default_device():
    lloyd_max.cache_clear(), make_rotation.cache_clear()
    with torch.device("meta"):
        made = lloyd_max(3, 20), [make_rotation(kind, 20) for kind in KINDS]
    lloyd_max.cache_clear(), make_rotation.cache_clear()
    assert made[0] == lloyd_max(3, 20)
    for ours, kind in zip(made[1], KINDS):
        assert all(map(torch.equal, ours.tensors(), make_rotation(kind, 20).tensors()))


def test_fidelity_of_a_model_in_training_mode_is_refused():
    model = tiny_models.build("llama").train()
    with pytest.raises(ValueError, match="model must be in eval mode"):
        fidelity(model, tiny_models.prompt(1, 120), IsoQuantCache, 100)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", [IsoQuantCache, RaBitQSparseCache])
def test_a_prompt_that_the_cache_is_past_is_named(kind, attn):
    """``generate`` takes what a cache holds for the beginning of the prompt, and nothing is left of a shorter one."""
    model, ids, cache = tiny_models.build("llama", attn), tiny_models.prompt(1, 60), kind()
    options = {cache_keyword(): cache, "max_new_tokens": 4, "do_sample": False}
    first = model.generate(ids, **options)
    with pytest.raises(ValueError, match=r"input_ids must go on behind the 63 tokens .* call reset\(\) or take a new cache"):
        model.generate(ids[:, :20], **options)
    again = model.generate(first, **options)
    assert torch.equal(again[:, :64], first) and again.shape[1] == 68
    cache.reset()
    assert model.generate(ids[:, :20], **options).shape[1] == 24


@pytest.mark.parametrize("option, value", [("--prompt-len", "0"), ("--new-tokens", "1")])
def test_demo_refuses_lengths_it_cannot_show(option, value, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo.py", option, value])
    with pytest.raises(SystemExit, match="2"):
        demo.main()
    assert f"{option} must be at least {int(value) + 1}, got {value}" in capsys.readouterr().err


@pytest.mark.parametrize("roles", ["k", "v", "kv"])
def test_prompts_whose_coordinates_are_apart_in_memory(roles):
    """Exact tokens are held as they came, but operators take rows with elements side by side only."""
    caches, (query, *plain) = [IsoQuantCache(ONE_LAYER, **PACKED) for _ in range(2)], torch.randn(3, 2, 2, 100, 32)
    apart = [x.mT.contiguous().mT if role in roles else x for role, x in zip("kv", plain)]
    outs = [F.scaled_dot_product_attention(query, *cache.update(*x, 0)) for cache, x in zip(caches, (plain, apart))]
    assert torch.allclose(*outs, atol=1e-5)
    for role in "kv":
        ours, theirs = (cache.layers[0].pieces() for cache in caches)
        assert ours.is_packed and torch.equal(ours.rebuilt(role), theirs.rebuilt(role))


def through_a_file(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("length", [40, 110])
@pytest.mark.parametrize("how", [copy.deepcopy, through_a_file])
@pytest.mark.parametrize("kind", ["packed", "rows"])
def test_a_copy_made_in_inference_mode_is_used_outside(length, how, kind):
    model, more = tiny_models.build("llama", "sdpa"), tiny_models.prompt(2, 30, seed=3).split(1, 1)
    cache = IsoQuantCache(**PACKED) if kind == "packed" else RaBitQSparseCache(**PACKED, store="exact", min_dense_len=64)
    forced_logits(model, cache, [tiny_models.prompt(2, length), *more])
    with torch.inference_mode():
        other = how(cache)
    got = forced_logits(model, other, more)
    assert torch.equal(got, forced_logits(model, cache, more))


@pytest.mark.skipif(sys.platform != "linux", reason="the script is for GPU machines")
def test_no_sanitizer_is_given_all_tests_for_none(tmp_path):
    """pytest takes an empty file of tests for the whole suite."""
    stub = tmp_path / "compute-sanitizer"
    stub.write_text(f'#!/usr/bin/env bash\nlast="${{!#}}"\nwc -l <"${{last#@}}" >>{tmp_path}/sizes\necho 1 passed SUMMARY\n')
    stub.chmod(0o755)
    script, path = pathlib.Path(__file__).with_name("sanitize_gpu.sh"), f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", script, sys.executable, "-k", "test_merge and dtype0"]
    subprocess.run(command, env=os.environ | dict(PATH=path, SHARDS="3"), check=True, capture_output=True)
    assert set(map(int, (tmp_path / "sizes").read_text().split())) == {1}
