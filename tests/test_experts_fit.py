"""``fit``: what goes into a memory, against what really lies in it."""

import pytest
import tiny_models
import tiny_moe
import torch
import transformers
from transformers import DynamicCache

from torch_kvq import IsoQuantCache, fit, plan_bits
from torch_kvq.experts.families import expert_tensors, find_experts
from torch_kvq.experts.kv_bytes import kv_bytes

QWEN3_30B = dict(
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    vocab_size=151936,
)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mixtral", "mistral", "deepseek_v3", "gemma3", "gpt_oss"])
def test_kv_bytes_against_caches(name):
    model = tiny_models.build(name, dtype=torch.bfloat16, **({} if name == "deepseek_v3" else {"head_dim": 64}))
    held, expected = [], []
    for length in (500, 2500):
        ids = tiny_models.prompt(2, length)
        packed, dense = IsoQuantCache(), DynamicCache(config=model.config)
        for cache in (packed, dense):
            model(ids, past_key_values=cache)
            model(ids[:, :1], past_key_values=cache)
        held.append((packed.nbytes, sum(layer.keys.nbytes + layer.values.nbytes for layer in dense.layers)))
        expected.append(kv_bytes(model.config, length + 1, 2, 3, 3))
        assert expected[-1][1] == held[-1][1]
    if name != "mistral":  # of which every layer is a window
        grown = held[1][0] - held[0][0]
        assert abs((expected[1][0] - expected[0][0]) / grown - 1) < 0.03
    assert expected[0][2] == "IsoQuantCache k3 v3"
    assert kv_bytes(model.config, 1501, 2, None, 3)[0] == kv_bytes(model.config, 1501, 2, 3, 3)[1]


def test_a_model_of_thirty_billion():
    config = transformers.Qwen3MoeConfig(**QWEN3_30B)
    whole = fit(config, "80GiB", 32768, verbose=False)
    assert whole.num_experts == 48 * 128 and whole.expert_bytes == 3 * 2048 * 768 * 4  # float32 unless the config says
    config.dtype = torch.bfloat16
    whole = fit(config, "80GiB", 32768, verbose=False)
    assert whole.fits and not whole.needs_offload and whole.slots == 48 * 128
    assert "offloading is not needed" in str(whole)
    part = fit(config, "24GiB", 32768, verbose=False)
    assert part.needs_offload and 0.3 < part.slots / part.num_experts < 0.5 and 0.6 < part.hit_rate < 0.95
    assert sum(part.weights.values()) + part.kv + part.reserve + part.slots * part.expert_bytes <= part.total
    exact = fit(config, "24GiB", 32768, k_bits=None, verbose=False)
    assert exact.slots < part.slots and exact.kv == exact.dense_kv
    less = fit(config, "24GiB", 32768, bits={"dense": 4, "routed": 2}, verbose=False)
    assert less.slots > part.slots and "4 bits" in str(less) and 0 < less.packed_host_bytes < 48 * 128 * less.expert_bytes / 6
    none = fit(config, "2GiB", 32768, verbose=False)
    assert not none.fits and "does not fit: one expert needs 9,437,184 bytes" in str(none)


def test_prints_in_order(capsys):
    model = tiny_moe.build("qwen2_moe")
    result = fit(model, "2MB", 512, reserve="0MB")
    printed = capsys.readouterr().out
    places = [printed.index(word) for word in ("Q_W", "C_KV", "O_E")]
    assert places == sorted(places) and printed.strip() == str(result)


def test_weights_add_up_and_the_budget_works():
    from torch_kvq import offload_experts

    model = tiny_moe.build("qwen2_moe")
    result = fit(model, "300KB", 64, reserve="0MB", verbose=False)
    routed = sum(tensor.nbytes for module in find_experts(model).values() for tensor in expert_tensors(module).values())
    assert sum(result.weights.values()) == sum(parameter.nbytes for parameter in model.parameters()) - routed
    assert result.needs_offload
    handle = offload_experts(model, result.budget)
    assert handle.stats().num_slots == result.slots
    with_plan = fit(model, "300KB", 64, reserve="0MB", bits=plan_bits(model, [tiny_moe.prompt()]), verbose=False)
    assert with_plan.slots > result.slots and with_plan.weights["shared"] < result.weights["shared"]


def test_arguments():
    model = tiny_moe.build("mixtral")
    with pytest.raises(ValueError, match="total must be a size"):
        fit(model, "much", 10)
    with pytest.raises(ValueError, match="context must be an integer of at least 1, got 0"):
        fit(model, "1GiB", 0)
    with pytest.raises(ValueError, match=r"bits must be by role.*'router'"):
        fit(model, "1GiB", 10, bits={"router": 4})


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(model_or_config="gpt2"), TypeError, "model_or_config must be a model or its config, got 'gpt2'"),
        (dict(context=float("nan")), ValueError, "context must be an integer of at least 1, got nan"),
        (dict(batch=1.5), ValueError, "batch must be an integer of at least 1, got 1.5"),
        (dict(bits=4), TypeError, "bits must be bits by role or a plan, got 4"),
        (dict(k_bits=0), ValueError, "k_bits must be an integer from 2 to 4, got 0"),
        (dict(k_bits=None, v_bits=8), ValueError, "v_bits must be an integer from 2 to 4, got 8"),
        (dict(trace=[]), TypeError, r"trace must be a RoutingTrace, got \[\]"),
    ],
)
def test_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        fit(**{**dict(model_or_config=tiny_moe.build("mixtral"), total="1GiB", context=10, verbose=False), **options})
