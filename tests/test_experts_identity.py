"""Offloaded experts answer bit for bit as resident ones: ten families, three implementations, several budgets."""

import pytest
import tiny_moe
import torch

from torch_kvq import ExpertOffloadHook, IsoQuantCache, offload_experts
from torch_kvq.experts.families import IMPLEMENTATIONS

pytestmark = pytest.mark.versions
BUDGETS = (1, 3, 0.5)


def assert_equal(outputs, wanted):
    for kind, ours, theirs in zip(("logits", "greedy", "beams"), outputs, wanted, strict=True):
        assert torch.equal(ours, theirs), kind


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", tiny_moe.NAMES)
def test_bfloat16(name, implementation):
    model = tiny_moe.build(name, torch.bfloat16, implementation)
    wanted = tiny_moe.answers(model)
    for budget in BUDGETS:
        handle = offload_experts(model, budget)
        assert_equal(tiny_moe.answers(model), wanted)
        stats = handle.stats()
        assert stats.misses > 0 and stats.bytes_read == stats.misses * handle.pools[next(iter(handle.pools))].spec.nbytes
        handle.remove()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("overlap", [False, True])
def test_float32(name, implementation, overlap):
    model = tiny_moe.build(name, torch.float32, implementation)
    wanted = tiny_moe.answers(model)
    for budget in BUDGETS:
        handle = offload_experts(model, budget, overlap=overlap)
        assert_equal(tiny_moe.answers(model), wanted)
        handle.remove()


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_policies_and_pins(policy):
    model = tiny_moe.build("qwen3_moe")
    wanted = tiny_moe.answers(model)
    first, second = [name for name, m in model.named_modules() if name.endswith("experts")]
    handle = offload_experts(model, 7, policy=policy, pin={first: [2], second: [0, 11]})
    assert_equal(tiny_moe.answers(model), wanted)
    assert handle.pools[first].is_resident(first, 2) and handle.pools[second].is_resident(second, 11)


@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_longer_than_one_wave_reads_each_expert_once(overlap):
    model = tiny_moe.build("qwen2_moe")
    routed = {}
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(lambda module, args, name=name: routed.update({name: args[1]}))
    for implementation in IMPLEMENTATIONS:
        model.set_experts_implementation(implementation)
        handle = offload_experts(model, 2, overlap=overlap)
        with torch.no_grad():
            model(tiny_moe.prompt(1, 64))
        for name, layer in handle.stats().layers.items():
            assert layer.misses == len(routed[name].unique()) > 6 and layer.hits == 0, implementation
        handle.remove()


@torch.no_grad()
def test_implementation_may_change_between_calls():
    model = tiny_moe.build("mixtral")
    ids, wanted = tiny_moe.prompt(), {}
    for implementation in IMPLEMENTATIONS:
        model.set_experts_implementation(implementation)
        wanted[implementation] = model(ids).logits
    offload_experts(model, 3)
    for implementation in reversed(IMPLEMENTATIONS):
        model.set_experts_implementation(implementation)
        assert torch.equal(model(ids).logits, wanted[implementation])


def test_under_a_packed_cache():
    model = tiny_moe.build("mixtral", torch.float32)
    options = dict(max_new_tokens=60, do_sample=False, pad_token_id=0)
    cache = dict(num_sinks=2, window_len=16, flush_len=16)
    ids = tiny_moe.prompt(1, 40)
    wanted = model.generate(ids, past_key_values=IsoQuantCache(**cache), **options)
    offload_experts(model, 3)
    packed = IsoQuantCache(**cache)
    assert torch.equal(model.generate(ids, past_key_values=packed, **options), wanted)
    assert packed.stats.attend_calls > 0


def test_remove_gives_back_the_same_tensors():
    model = tiny_moe.build("olmoe")
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    wanted = tiny_moe.answers(model)
    handle = offload_experts(model, 3)
    assert any(parameter.is_meta for parameter in model.parameters())
    handle.remove()
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert not hasattr(model, "hf_device_map")
    assert_equal(tiny_moe.answers(model), wanted)
    model.to(torch.float32)


@torch.no_grad()
def test_hook_alone_through_accelerate():
    from accelerate.hooks import add_hook_to_module, remove_hook_from_module

    from torch_kvq.experts.families import expert_tensors
    from torch_kvq.experts.loader import HostLoader
    from torch_kvq.experts.pool import ExpertPool
    from torch_kvq.experts.store import HostStore

    model = tiny_moe.build("mixtral")
    ids = tiny_moe.prompt()
    wanted = model(ids).logits
    module, name = model.model.layers[1].mlp.experts, "model.layers.1.mlp.experts"
    store = HostStore({name: {key: tensor.detach() for key, tensor in expert_tensors(module).items()}})
    pool = ExpertPool(store, HostLoader(store, 0), [name], num_slots=2)
    add_hook_to_module(module, ExpertOffloadHook(pool, name))
    assert torch.equal(model(ids).logits, wanted)
    assert pool.stats[name].misses > 2
    remove_hook_from_module(module)
    assert module.gate_up_proj.is_meta


def test_two_threads_on_one_model():
    from concurrent.futures import ThreadPoolExecutor

    model = tiny_moe.build("mixtral")
    prompts = [tiny_moe.prompt(1, 12, seed) for seed in range(8)]
    with torch.no_grad():
        wanted = [model(ids).logits for ids in prompts]
    offload_experts(model, 3)
    with ThreadPoolExecutor(2) as threads:
        got = list(threads.map(lambda ids: torch.no_grad()(model)(ids).logits, prompts))
    for ours, theirs in zip(got, wanted):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_ids_are_not_read_back_once_all_is_resident(implementation, monkeypatch):
    model = tiny_moe.build("mixtral", implementation=implementation)
    wanted = tiny_moe.answers(model)
    handle = offload_experts(model, 1.0)
    for module in handle.modules.values():
        module._hf_hook.skips_read_back = True
    for name in handle.modules:
        handle.pin(name, range(8))
    assert_equal(tiny_moe.answers(model), wanted)
    calls = handle.stats().full_calls
    assert calls == handle.stats().calls - len(handle.modules)  # the first one of each layer made its table
    monkeypatch.setattr("torch_kvq.experts.hook.Routing", lambda *args: pytest.fail("ids were read back"))
    assert_equal(tiny_moe.answers(model), wanted)


def test_many_tokens_at_once():
    from torch_kvq.experts.waves import HOST_PAIRS

    ids = tiny_moe.prompt(1, 500)
    assert ids.numel() * 3 > HOST_PAIRS
    for implementation in IMPLEMENTATIONS:
        model = tiny_moe.build("qwen2_moe", implementation=implementation)
        with torch.no_grad():
            wanted = model(ids).logits
            for budget, overlap in ((3, False), (3, True), (0.5, False)):
                handle = offload_experts(model, budget, overlap=overlap)
                assert torch.equal(model(ids).logits, wanted)
                handle.remove()
