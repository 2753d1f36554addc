"""What a decode step makes ahead of its tokens, and what it uses again: never stale, never shared with what it gave out."""

import copy

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from oracle import forced_logits
from transformers import LlamaConfig

from torch_kvq import IsoQuantCache

pytestmark = pytest.mark.versions

PACKED = dict(window_len=32, flush_len=16)
CONFIG = LlamaConfig(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32, hidden_size=128)


class Failure(Exception):
    pass


def fail_in(model, layer, cache, ids):
    """A decode step that fails in the MLP of a layer: the layers behind it were made ready for a token that never came."""

    def fail(*args):
        raise Failure

    hook = model.model.layers[layer].mlp.register_forward_hook(fail)
    with pytest.raises(Failure):
        forced_logits(model, cache, [ids])
    hook.remove()
    assert cache.layers[layer + 1]._step is not None


CHANGES = {
    "nothing": lambda cache: cache,
    "crop": lambda cache: cache.crop(-5),
    "crop_into_the_body": lambda cache: cache.crop(-50),
    "crop_into_the_sinks": lambda cache: cache.crop(-107),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "reset": lambda cache: cache.reset(),
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("new_tokens", [1, 7])
@pytest.mark.parametrize("name", CHANGES)
def test_what_was_made_ready_is_not_used_after_a_change(name, new_tokens):
    model, ids = tiny_models.build("llama", "sdpa", num_hidden_layers=4), tiny_models.prompt(2, 110)
    caches = [IsoQuantCache(**PACKED) for _ in range(2)]
    for cache in caches:
        forced_logits(model, cache, [ids[:, :109], ids[:, 109:]])
    fail_in(model, 1, caches[0], ids[:, :1])
    logits = []
    for cache in caches:
        cache = CHANGES[name](cache) or cache
        more = tiny_models.prompt(2, 40, seed=2)
        more = {"select": more[1:], "repeat": more.repeat_interleave(2, 0)}.get(name, more)
        logits.append(forced_logits(model, cache, [more[:, :new_tokens], *more[:, new_tokens:].split(1, 1)]))
    if name == "nothing":  # the tokens of the failed step are given back first
        assert caches[0].get_seq_length() == 150
    assert logits[0].isfinite().all() and torch.equal(*logits)


def decoded(cache, steps, keep):
    """``keep`` of every decode step and layer."""
    kept, generator = [], torch.Generator().manual_seed(0)
    for step in range(-1, steps):
        for layer in range(3):
            states = torch.randn(2, 1, 2, 100 if step < 0 else 1, 32, generator=generator)
            query = torch.randn(1, 4, 1, 32, generator=generator)
            handles = cache.update(*states, layer)
            out = F.scaled_dot_product_attention(query, *handles, enable_gqa=True)
            if step >= 0:
                kept.append(keep(cache, layer, handles, query, out))
    return kept


def test_every_layer_behind_the_first_is_made_ready():
    """But in a step that packs: its tokens are moved first. The prompt leaves 4 sinks and a window, and 16 more fit."""
    cache = IsoQuantCache(CONFIG, **PACKED)
    ready = decoded(cache, 17, lambda cache, *_: [layer._step is not None for layer in cache.layers])
    assert ready[0::3] == [[False, True, True]] * 16 + [[False, False, False]]


def test_answers_are_not_used_again():
    """Every step has its outputs to itself, and a log-sum-exp that was asked for too."""
    cache, kept = IsoQuantCache(CONFIG, **PACKED), []

    def keep(cache, layer, handles, query, out):
        again, lse = handles[0].pieces.attend(query, None, 32**-0.5)
        kept.append((out, out.clone(), lse, lse.clone()))
        return torch.equal(again, out)

    assert all(decoded(cache, 20, keep))
    assert all(torch.equal(out, was) and torch.equal(lse, then) for out, was, lse, then in kept)


def test_one_list_of_tensors_until_one_is_replaced():
    cache, lists = IsoQuantCache(CONFIG, **PACKED), []

    def keep(cache, layer, handles, *_):
        store, held = cache.layers[layer].keys_store, handles[0].pieces.keys
        lists.append(held)
        return held is store.tensors() and all(a is b for a, b in zip(held, [store.sign, store.mag, store.scale]))

    assert all(decoded(cache, 200, keep))
    assert 1 < len({id(each) for each in lists[::3]}) < 10


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_metadata_of_every_lazy_tensor_is_that_of_the_shell(family):
    """``shape``, ``dtype`` and ``device`` are held beside the shell that torch made: they must agree."""
    seen = []

    class Recorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(x for x in (*args, out) if hasattr(x, "dense"))
            return out

    model, cache = tiny_models.build(family, "eager"), IsoQuantCache(**PACKED)
    forced_logits(model, cache, [tiny_models.prompt(2, 100)])
    with Recorder():
        forced_logits(model, cache, [tiny_models.prompt(2, 1)])
    assert {type(x).__name__ for x in seen} >= ({"KVHandle"} if family == "llama" else {"KVHandle", "Projected", "Part"})
    for x in seen:
        for name in ("shape", "dtype", "device"):
            assert getattr(x, name) == getattr(torch.Tensor, name).__get__(x)
