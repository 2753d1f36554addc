"""Bytes: what is resident, against a bf16 ``DynamicCache``; what a decode step allocates; no second copy anywhere."""

import gc

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from oracle import forced_logits
from transformers import DynamicCache, LlamaConfig

from torch_kvq import IsoQuantCache, backends


def config_of(layers, heads, head_dim, groups=1):
    return LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads * groups,
        num_key_value_heads=heads,
        head_dim=head_dim,
        hidden_size=heads * groups * head_dim,
    )


class Feeder:
    """Random bf16 keys and values for a cache, and one attention call a layer, without a model."""

    def __init__(self, layers, heads, head_dim, groups=1, dtype=torch.bfloat16):
        self.config, self.dtype = config_of(layers, heads, head_dim, groups), dtype
        self.shape, self.layers, self.groups = (1, heads, head_dim), layers, groups
        self.generator = torch.Generator().manual_seed(1)

    def random(self, tokens, heads):
        shape = (self.shape[0], heads, tokens, self.shape[2])
        return torch.randn(shape, generator=self.generator, dtype=torch.float32).to(self.dtype)

    def __call__(self, *caches, tokens, attend=True):
        heads = self.shape[1]
        for layer in range(self.layers):
            keys, values = self.random(tokens, heads), self.random(tokens, heads)
            query = self.random(1, heads * self.groups)
            for cache in caches:
                handles = cache.update(keys, values, layer)
                if attend and isinstance(cache, IsoQuantCache):
                    F.scaled_dot_product_attention(query, *handles, enable_gqa=self.groups > 1)


def reachable_bytes(root) -> int:
    """Bytes of all storages that the garbage collector reaches from ``root``: an independent count."""
    storages, seen, waiting = {}, {id(root)}, [root]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor) and type(item) is torch.Tensor:
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        for other in gc.get_referents(item):
            is_code = isinstance(other, type) or type(other).__name__ in (
                "module",
                "function",
                "builtin_function_or_method",
            )
            if id(other) not in seen and not is_code:
                seen.add(id(other))
                waiting.append(other)
    return sum(storages.values())


# ---- resident


@pytest.mark.parametrize("tokens, head_dim, least", [(4096, 64, 4.2), (8192, 128, 4.7)])
def test_ratio_to_dense_bf16(tokens, head_dim, least):
    feed = Feeder(layers=2, heads=4, head_dim=head_dim)
    cache, dense = IsoQuantCache(feed.config), DynamicCache(config=feed.config)

    def check():
        dense_bytes = sum(x.nbytes for layer in dense.layers for x in (layer.keys, layer.values))
        assert dense_bytes == 2 * 2 * 4 * head_dim * 2 * cache.get_seq_length()
        assert cache.nbytes == reachable_bytes(cache._layers)
        assert dense_bytes / cache.nbytes >= least, f"{dense_bytes / cache.nbytes:.2f}x"

    feed(cache, dense, tokens=tokens)
    check()
    for step in range(1, 101):
        feed(cache, dense, tokens=1)
        if step in (1, 17, 40, 100):
            check()
    assert cache.stats.decompress_calls == 0


def test_nothing_as_long_as_the_sequence_stays_dense():
    """No tensor of two bytes a coordinate and token outlives the prompt."""
    feed = Feeder(layers=3, heads=2, head_dim=64)
    cache = IsoQuantCache(feed.config)
    before = {id(x) for x in gc.get_objects() if type(x) is torch.Tensor}
    feed(cache, tokens=2048)
    feed(cache, tokens=1)
    gc.collect()
    new = [x for x in gc.get_objects() if type(x) is torch.Tensor and id(x) not in before]
    assert max(x.untyped_storage().nbytes() for x in new) < 2048 * 2 * 64 * 2


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "falcon_h1", "lfm2"])
def test_nbytes_counts_every_reachable_tensor(family):
    model, ids = tiny_models.build(family, "sdpa"), tiny_models.prompt(2, 200)
    cache = IsoQuantCache(window_len=32)
    for length in (20, 120, 1, 1, 40):
        forced_logits(model, cache, [ids[:, :length]])
        assert cache.nbytes == reachable_bytes(cache._layers) > 0
        report = cache.report()
        assert report.num_shared_bytes == shared_bytes(cache)
        assert cache.nbytes == sum(row.num_bytes for row in report.rows) + report.num_shared_bytes


def shared_bytes(cache) -> int:
    """Bytes of the rotations and levels that more than one layer uses."""
    sizes, users = {}, {}
    for index, layer in enumerate(cache.layers):
        stores = [getattr(layer, name, None) for name in ("keys_store", "values_store")]
        for x in (x for store in stores if store for x in (store.levels, store.signs, store.blocks, store.matrix)):
            place = x.untyped_storage().data_ptr()
            sizes[place] = x.untyped_storage().nbytes()
            users.setdefault(place, set()).add(index)
    return sum(size for place, size in sizes.items() if len(users[place]) > 1)


def test_the_report_names_what_layers_share():
    cache = IsoQuantCache(window_len=32)
    forced_logits(tiny_models.build("llama", "sdpa"), cache, [tiny_models.prompt(1, 120)])
    assert shared_bytes(cache) > 0
    last = str(cache.report()).splitlines()[-1].split()
    assert last == ["shared", f"{shared_bytes(cache):,}", "rotations,", "codebooks"]


def test_a_sliding_window_is_not_packed_and_stays_short():
    """4 windows later it holds one."""
    model = tiny_models.build("gemma3", "sdpa")
    cache = IsoQuantCache(window_len=32)
    forced_logits(model, cache, [tiny_models.prompt(1, 4 * tiny_models.SLIDING_LEN)])
    rows = cache.report().rows
    assert [row.num_exact < tiny_models.SLIDING_LEN for row in rows] == [True, True, True, False]
    assert all(row.num_packed == 0 for row in rows[:3])


# ---- what a step allocates


def peak_of(function, *args) -> int:
    """Bytes that torch's CPU allocator held at most above the start, from the profiler's record of every allocation."""
    with torch.profiler.profile(profile_memory=True) as profile:
        function(*args)
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def test_a_decode_step_allocates_next_to_nothing():
    """At 32,768 tokens, d=128: under 1 % of the bf16 keys, in plain steps and in steps that pack a block.

    A step in which a store must grow holds one old and one new buffer of one layer for a moment; the growth is 1/128, so
    that is one step in 256.
    """
    if backends.cpu_isa() == "reference":
        pytest.skip("the compiled kernels are not loaded; the reference decodes what it reads")
    tokens, heads, dim = 32768, 2, 128
    feed = Feeder(layers=1, heads=heads, head_dim=dim, groups=4)
    cache = IsoQuantCache(feed.config)
    feed(cache, tokens=tokens)
    layer, key_bytes = cache.layers[0], tokens * heads * dim * 2
    plain, packing = [], []

    def step(keys, values, query):
        F.scaled_dot_product_attention(query, *cache.update(keys, values, 0), enable_gqa=True)

    growth = 0.45  # all buffers anew; the profiler does not see the old ones go, which are freed one by one
    for _ in range(40):
        keys, values, query = feed.random(1, heads), feed.random(1, heads), feed.random(1, 4 * heads)
        capacity, length = layer.keys_store.capacity, layer.keys_store.length
        share = peak_of(step, keys, values, query) / key_bytes
        if layer.keys_store.capacity > capacity:
            assert share <= growth
        else:
            (packing if layer.keys_store.length > length else plain).append(share)
    assert plain and packing
    assert max(plain) < 0.01 and max(packing) < 0.01, (max(plain), max(packing))
    assert cache.stats.decompress_calls == 0
