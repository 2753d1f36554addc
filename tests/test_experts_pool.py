"""The slots: counts against a simulator, traces, guesses of predictors."""

import pytest
import tiny_moe
import torch

from torch_kvq import offload_experts
from torch_kvq.experts.budget import Slab
from torch_kvq.experts.handle import OffloadHandle
from torch_kvq.experts.loader import HostLoader
from torch_kvq.experts.pool import MIN_GUESSES, ExpertPool
from torch_kvq.experts.predictors import PREDICTORS, AttentionResidual, attention_blocks, router_of
from torch_kvq.experts.store import HostStore
from torch_kvq.experts.trace import RoutingTrace, record_routing, replay, simulate, slabs_of, synthetic_trace

pytestmark = pytest.mark.versions


def counts(stats) -> dict[str, tuple[int, int]]:
    return {name: (layer.hits, layer.misses) for name, layer in stats.layers.items()}


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("budget", [1, 2, 5, 0.25, 0.5, 1.0])
def test_generation_and_its_replay_count_as_the_simulator(policy, budget):
    model = tiny_moe.build("qwen3_moe", implementation="grouped_mm")
    handle = offload_experts(model, budget, policy=policy)
    options = dict(max_new_tokens=24, do_sample=False, pad_token_id=0)
    with record_routing(model) as trace:
        model.generate(tiny_moe.prompt(1, 12), **options)
    assert len(trace.calls) == 2 * 24
    wanted = simulate(trace, slabs_of(handle), policy)
    assert counts(handle.stats()) == wanted
    handle.remove()
    handle = offload_experts(model, budget, policy=policy)
    assert counts(replay(trace, handle)) == wanted


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("slots", [3, 8, 20, 64])
def test_synthetic_traces_count_as_the_simulator(policy, slots):
    layers = {f"layer{index}": 16 for index in range(4)}
    trace = synthetic_trace(layers, top_k=4, num_tokens=60)
    store = HostStore({name: {"weight": torch.arange(16.0)[:, None].expand(16, 2)} for name in layers})
    pool = ExpertPool(store, HostLoader(store, 0), list(layers), slots, policy)
    handle = OffloadHandle(torch.nn.Module(), {}, {}, slots)
    handle.pools = dict.fromkeys(layers, pool)
    replay(trace, handle)
    got = {name: (stats.hits, stats.misses) for name, stats in pool.stats.items()}
    assert got == simulate(trace, [Slab(tuple(layers), slots)], policy)
    for name in layers:
        for expert, slot in zip(*pool.places(name)):
            assert pool.slots.of(pool.layers[0])["weight"][slot].tolist() == [expert, expert]
    resident = sum(len(pool.places(name)[0]) for name in layers)
    assert resident == min(slots, sum(misses for _, misses in got.values()))
    evicted = sum(stats.evictions for stats in pool.stats.values())
    assert evicted == sum(misses for _, misses in got.values()) - resident


def test_lru_order_by_hand():
    store = HostStore({"a": {"weight": torch.zeros(6, 1)}})
    pool = ExpertPool(store, HostLoader(store, 0), ["a"], 3)
    for experts in ([0, 1], [2], [0], [3]):  # 1 is the oldest when 3 comes
        pool.request("a", experts).wait()
    assert sorted(pool.places("a")[0]) == [0, 2, 3]
    pool.request("a", [4], keep=[2]).wait()  # 2 is the oldest but in use
    assert sorted(pool.places("a")[0]) == [2, 3, 4]
    pool.request("a", [5], later=[2, 3]).wait()
    assert sorted(pool.places("a")[0]) == [2, 3, 5]


def test_synthetic_trace_is_as_local_as_published():
    trace = synthetic_trace({str(layer): 128 for layer in range(4)}, top_k=8, num_tokens=300)
    assert 0.43 < trace.repeats() < 0.5
    again = total = 0
    for layer in "0123":
        tokens = [experts for name, experts in trace.calls if name == layer]
        for at in range(8, len(tokens)):
            window = {expert for token in tokens[at - 8 : at] for expert in token}
            again, total = again + len(window & set(tokens[at])), total + 8
    assert 0.77 < again / total < 0.84
    assert all(experts == sorted(set(experts)) and len(experts) == 8 for _, experts in trace.calls)


def test_trace_file(tmp_path):
    trace = synthetic_trace({"a": 8}, 2, 5)
    trace.save(tmp_path / "trace")
    assert RoutingTrace.load(tmp_path / "trace") == trace


def test_trace_of_another_model():
    handle = offload_experts(tiny_moe.build("mixtral"), 3)
    with pytest.raises(ValueError, match="trace must be of this model"):
        replay(RoutingTrace([("elsewhere", [0])]), handle)


# ---- predictors


@pytest.mark.parametrize("predictor", PREDICTORS.values())
@pytest.mark.parametrize("name", tiny_moe.NAMES)
def test_predictors_change_nothing(name, predictor):
    model = tiny_moe.build(name)
    wanted = tiny_moe.answers(model)
    handle = offload_experts(model, 4, predictor=predictor, num_guesses=4)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tiny_moe.answers(model), wanted))
    assert handle.stats().guesses > 0
    handle.remove()
    assert not any(block._forward_hooks for block in attention_blocks(model))


class Oracle:
    """Knows the next layer's experts from a trace."""

    def __init__(self, calls):
        self.calls, self.index = calls, 0

    def __call__(self, layer, hidden_states):
        assert self.calls[self.index][0] == layer
        self.index += 1
        return dict([self.calls[self.index]]) if self.index < len(self.calls) else {}


def test_right_guesses_become_hits():
    model = tiny_moe.build("mixtral", implementation="batched_mm")
    options = dict(max_new_tokens=10, do_sample=False, pad_token_id=0)
    ids = tiny_moe.prompt(1, 1)
    with record_routing(model) as trace:
        wanted = model.generate(ids, **options)
    handle = offload_experts(model, 2, predictor=lambda model: Oracle(trace.calls), num_guesses=2)
    assert torch.equal(model.generate(ids, **options), wanted)
    stats = handle.stats()
    assert stats.misses == 2  # of the very first call
    assert stats.useful_guesses == stats.guesses > 10


def test_wrong_guesses_end():
    store = HostStore({"a": {"weight": torch.arange(8.0)[:, None]}})
    pool = ExpertPool(store, HostLoader(store, 0), ["a"], 2, num_guesses=1)
    pool.request("a", [0, 1]).wait()
    for step in range(2 * MIN_GUESSES):
        pool.guess("a", [2 + step % 2])
    assert pool.stats["a"].guesses == MIN_GUESSES and pool.stats["a"].evictions == 0
    assert sorted(pool.places("a")[0]) == [0, 1]


def test_guess_that_cannot_be_read_is_read_again():
    class Failing(HostStore):
        fails = True

        def read(self, layer, expert, into):
            if self.fails:
                raise OSError("injected")
            return super().read(layer, expert, into)

    store = Failing({"a": {"weight": torch.arange(8.0)[:, None]}})
    loader = HostLoader(store, 1)
    pool = ExpertPool(store, loader, ["a"], 2, num_guesses=1)
    pool.guess("a", [5])
    loader.close()  # once it has failed
    store.fails = False
    (slot,) = pool.request("a", [5]).wait()
    assert pool.slots.of(pool.layers[0])["weight"][slot].item() == 5
    assert pool.stats["a"].misses == 1 and pool.stats["a"].useful_guesses == 0


@torch.no_grad()
def test_attention_residual_is_equation_13():
    model = tiny_moe.build("mixtral", torch.float32)
    predictor = AttentionResidual(model)
    outputs, inputs = [], {}
    for block in attention_blocks(model):
        block.register_forward_hook(lambda _, args, output: outputs.append(output[0].view(-1, 64)))
    first, second = predictor.layers
    model.get_submodule(first).register_forward_pre_hook(lambda _, args: inputs.update(hidden=args[0], seen=len(outputs)))
    router = router_of(dict(model.named_modules()), second)
    model(tiny_moe.prompt(1, 4))
    assert len(outputs) == 2 and inputs["seen"] == 1
    hidden, (block,) = inputs["hidden"], predictor._outputs[:1]
    assert torch.equal(block, outputs[0])
    predictor._outputs[:] = outputs
    got = predictor.features(first, hidden)
    for token in range(4):
        scores = [torch.cosine_similarity(hidden[token], b[token], dim=0) for b in outputs]
        alpha = torch.stack(scores).softmax(0)
        torch.testing.assert_close(got[token], alpha[0] * outputs[0][token] + alpha[1] * outputs[1][token])
    wanted = router(got)[-1].unique().tolist()
    assert predictor(first, hidden) == {second: wanted}
    assert predictor(second, hidden) == {}


def test_pinned_store_without_pinning(monkeypatch):
    from torch_kvq.experts import pinned_store

    monkeypatch.setattr(pinned_store, "CHUNK_BYTES", 1000)
    tensors = {"a": {"w": torch.randn(9, 5, 7), "b": torch.randn(9, 3).bfloat16()}, "b": {"w": torch.randn(2, 400)}}
    store = pinned_store.PinnedStore(tensors, pin_memory=False)
    for layer, fused in tensors.items():
        assert store.num_experts(layer) == len(next(iter(fused.values())))
        for expert in range(store.num_experts(layer)):
            into = store.spec(layer).empty()
            for tensor in into.values():
                tensor.fill_(torch.nan)
            assert store.read(layer, expert, into) == sum(tensor[0].nbytes for tensor in fused.values())
            assert all(torch.equal(into[name], tensor[expert]) for name, tensor in fused.items())
        assert all(torch.equal(store.whole(layer, name), tensor) for name, tensor in fused.items())
    assert sum(t.nbytes for fused in tensors.values() for t in fused.values()) < store.host_bytes < 9000


def test_experts_leave_their_device_before_slots_are_made(monkeypatch):
    """As on a GPU, with memory that is not page-locked."""
    from torch_kvq.experts import offload
    from torch_kvq.experts.pinned_store import PinnedStore

    model = tiny_moe.build("mixtral")
    wanted = tiny_moe.answers(model)
    monkeypatch.setattr(offload, "HostStore", lambda held: PinnedStore(held, pin_memory=False))
    with pytest.raises(ValueError, match="policy must be one of"):
        offload_experts(model, 3, policy="fifo")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tiny_moe.answers(model), wanted))
    make_pools = offload.make_pools

    def checks(*args):
        assert model.model.layers[0].mlp.experts.gate_up_proj.is_meta
        return make_pools(*args)

    monkeypatch.setattr(offload, "make_pools", checks)
    handle = offload_experts(model, 3)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tiny_moe.answers(model), wanted))
    handle.remove()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tiny_moe.answers(model), wanted))
