"""The cache on a CUDA device, whatever serves the operators there: same logits as a dense twin, nothing rebuilt."""

import accelerate
import pytest
import tiny_models
import torch
from oracle import forced_logits, oracle_cache, relative_error

from torch_kvq import IsoQuantCache, RaBitQSparseCache
from torch_kvq.store import PackedStore

pytestmark = pytest.mark.gpu

PACKED = dict(window_len=32, flush_len=16)


@pytest.mark.parametrize("family, attn", tiny_models.names("llama", "gemma3", "gpt_oss", "deepseek_v3", "falcon_h1"))
def test_logits_equal_a_dense_twin(family, attn):
    model = tiny_models.build(family, attn).cuda()
    ids = tiny_models.prompt(2, 130, seed=3).cuda()
    pieces = [ids[:, :90], *ids[:, 90:].split(1, 1)]
    ours = IsoQuantCache(**PACKED)
    got = forced_logits(model, ours, pieces)
    wanted = forced_logits(model, oracle_cache(model.config, **PACKED), pieces)
    assert relative_error(got, wanted) <= 1e-4
    assert ours.stats.attend_calls > 0 and ours.stats.decompress_calls == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_generate_in_half_precision(dtype):
    model = tiny_models.build("llama", "sdpa", dtype).cuda()
    cache = IsoQuantCache(**PACKED)
    out = model.generate(tiny_models.prompt(2, 100).cuda(), past_key_values=cache, max_new_tokens=40, do_sample=False)
    assert out.shape == (2, 140) and cache.stats.decompress_calls == 0
    assert all(store.sign.is_cuda for store in (cache.layers[0].keys_store, cache.layers[0].values_store))


@pytest.mark.parametrize("along_tokens", [False, True])
def test_codes_do_not_depend_on_the_device(along_tokens):
    from torch_kvq.codecs.isoquant import IsoQuantConfig

    x = torch.randn(2, 3, 200, 128)
    stores = [PackedStore(IsoQuantConfig(), along_tokens, 2, 3, 128, torch.device(d)) for d in ("cpu", "cuda")]
    for store in stores:
        store.append(x.to(store.sign.device))
    here, there = (store.decode(0, 200, torch.float32).cpu() for store in stores)
    assert ((here - there).abs() > 1e-3).float().mean() < 1e-4


SPARSE = dict(window_len=32, min_dense_len=32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: IsoQuantCache(**PACKED),
        lambda: RaBitQSparseCache(**SPARSE),
        lambda: RaBitQSparseCache(store="isoquant", **SPARSE),
        lambda: RaBitQSparseCache(store="host", **SPARSE),
    ],
    ids=["isoquant", "sparse", "sparse-isoquant", "sparse-host"],
)
def test_layers_on_two_devices(make):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = tiny_models.build("llama", "sdpa").cuda()
    ids = tiny_models.prompt(2, 130, seed=3).cuda()
    pieces = [ids[:, :90], *ids[:, 90:].split(1, 1)]
    wanted = forced_logits(model, make(), pieces)
    layers = {f"model.layers.{i}": i % 2 for i in range(len(model.model.layers))}
    parts = {"model.embed_tokens": 0, "model.norm": 1, "model.rotary_emb": 0, "lm_head": 1}
    cache = make()
    got = forced_logits(accelerate.dispatch_model(model, layers | parts), cache, pieces)
    assert relative_error(got.to(wanted.device), wanted) <= 1e-4
    assert [layer.device.index for layer in cache.layers] == [i % 2 for i in range(len(cache.layers))]
