"""Experts on a CUDA device, from page-locked memory, from disk and packed: equal to resident ones."""

import pytest
import tiny_moe
import torch
from test_experts_identity import assert_equal

from torch_kvq import load_with_expert_offload, offload_experts, plan_bits
from torch_kvq.experts import Gate
from torch_kvq.experts.families import IMPLEMENTATIONS

pytestmark = pytest.mark.gpu


def build(name, implementation=None):
    return tiny_moe.build(name, torch.bfloat16, implementation).to("cuda")


def answers(model):
    ids = tiny_moe.prompt().to("cuda")
    common = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        return [model(ids).logits, model.generate(ids, **common), model.generate(ids[:1], num_beams=2, **common)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", tiny_moe.NAMES)
def test_from_page_locked_memory(name, implementation):
    model = build(name, implementation)
    wanted = answers(model)
    for budget in (1, 3, 0.5, 1.0):
        for overlap in (False, True):
            handle = offload_experts(model, budget, overlap=overlap)
            assert_equal(answers(model), wanted)
            handle.remove()
    assert_equal(answers(model), wanted)


@pytest.mark.parametrize("io", ["pread", "mmap"])
def test_from_disk(io, tmp_path):
    model = build("qwen3_moe")
    wanted = answers(model)
    model.save_pretrained(tmp_path)
    for budget in (1, 5, 1.0):
        loaded = load_with_expert_offload(tmp_path, budget, device="cuda", io=io, attn_implementation="eager")
        assert loaded.expert_offload.stats().bytes_read == 0
        assert_equal(answers(loaded), wanted)


def test_experts_leave_the_device():
    model = tiny_moe.build("mixtral").to("cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    handle = offload_experts(model, 2)
    stats = handle.stats()
    experts = 16 * handle.pools[next(iter(handle.pools))].spec.nbytes
    assert torch.cuda.memory_allocated() < before - experts + stats.resident_bytes + 2**16
    handle.remove()


def test_packed():
    model = build("mixtral")
    exact = answers(model)[0]
    plan = plan_bits(model, [tiny_moe.prompt(2, 48)], base={"routed": 8})
    plan.apply(3, gate=Gate(1.0, 1.0), roles=("routed",))
    got = answers(model)[0]
    assert 0 < (got.float() - exact.float()).norm() / exact.float().norm() < 0.1


def test_ids_are_not_read_back_once_all_is_resident():
    model = build("mixtral", "batched_mm")
    wanted = answers(model)
    handle = offload_experts(model, 1.0)
    for name in handle.modules:
        handle.pin(name, range(8))
    assert_equal(answers(model), wanted)
    assert handle.stats().full_calls > 0


def test_long_run_with_few_slots():
    """Copies and kernels of many steps in flight at a time."""
    model = build("qwen2_moe")
    ids = tiny_moe.prompt(4, 16).to("cuda")
    options = dict(max_new_tokens=200, do_sample=False, pad_token_id=0)
    wanted = model.generate(ids, **options)
    for budget in (1, 3, 7):
        handle = offload_experts(model, budget)
        assert torch.equal(model.generate(ids, **options), wanted)
        handle.remove()
