"""Packed experts, and bits by role with a gate."""

import importlib.util

import pytest
import tiny_moe
import torch

from torch_kvq import load_with_expert_offload, offload_experts, plan_bits
from torch_kvq.experts import Gate
from torch_kvq.experts.bit_plan import run
from torch_kvq.experts.codec import FIELDS, ExpertCodec
from torch_kvq.experts.families import IMPLEMENTATIONS, expert_tensors, find_experts
from torch_kvq.experts.packed_store import PackedStore
from torch_kvq.experts.roles import Moments, roles_of
from torch_kvq.experts.store import HostStore

LOOSE = Gate(max_error=10.0, max_delta_nll=10.0)


def naive_decode(codec: ExpertCodec, packed: dict, num_weights: int) -> torch.Tensor:
    """The format of ``codec.py`` bit by bit."""
    codes, values = packed["codes"].tolist(), []
    total = len(packed["scale"]) * codec.group_len
    for index in range(num_weights):
        code = begin = shift = 0
        for width in FIELDS[codec.bits]:
            length = total * width // 8
            byte = codes[begin + index % length]
            code |= (byte >> (index // length * width) & (2**width - 1)) << shift
            begin, shift = begin + length, shift + width
        group = index // codec.group_len
        values.append(code * packed["scale"][group].item() + packed["zero"][group].item())
    return torch.tensor(values)


@pytest.mark.parametrize("bits", FIELDS)
@pytest.mark.parametrize("shape", [(32, 48), (7, 9), (1, 64), (3,)])
def test_format(bits, shape):
    codec = ExpertCodec(bits)
    weights = torch.randn(shape)
    packed = codec.encode(weights)
    assert sum(part.nbytes for part in packed.values()) == codec.num_bytes(weights.numel())
    fence = torch.full((weights.numel() + 16,), torch.nan)
    codec.decode(**packed, out=fence[8:-8].view(shape))
    assert fence[:8].isnan().all() and fence[-8:].isnan().all()
    torch.testing.assert_close(fence[8:-8], naive_decode(codec, packed, weights.numel()))


@pytest.mark.parametrize("bits, bound", [(2, 0.345), (3, 0.185), (4, 0.09), (8, 0.0075)])
def test_error_and_size_of_gaussian_weights(bits, bound):
    codec, weights = ExpertCodec(bits), torch.randn(256, 512).bfloat16()
    packed, out = codec.encode(weights), torch.full_like(weights, torch.nan)
    codec.decode(**packed, out=out)
    assert ((out - weights).float().norm() / weights.float().norm()).item() < bound
    assert 8 * codec.num_bytes(weights.numel()) / weights.numel() == bits + 0.5


@pytest.mark.parametrize("bits", FIELDS)
def test_constant_and_zero_groups_are_exact(bits):
    weights = torch.tensor([0.0, 1.5, -3.0]).repeat_interleave(64)
    out = torch.full_like(weights, torch.nan)
    codec = ExpertCodec(bits)
    codec.decode(**codec.encode(weights), out=out)
    assert torch.equal(out, weights)


def test_codec_arguments():
    with pytest.raises(ValueError, match=r"bits must be one of \[2, 3, 4, 8\], got 5"):
        ExpertCodec(5)
    with pytest.raises(ValueError, match="group_len must be a multiple of 8, got 12"):
        ExpertCodec(4, 12)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "nemotron_h"])
def test_packed_experts_compute_as_their_decoded_weights(name):
    model = tiny_moe.build(name)
    modules = find_experts(model)
    tensors = {key: {k: t.detach().clone() for k, t in expert_tensors(module).items()} for key, module in modules.items()}
    bits = dict(zip(modules, (4, 3)))
    packed = PackedStore(dict.fromkeys(modules, HostStore(tensors)), bits)
    for key, module in modules.items():
        for k, parameter in expert_tensors(module).items():
            parameter.copy_(packed.whole(key, k))
            off = (parameter.double() - tensors[key][k].double()).norm() / tensors[key][k].double().norm()
            assert off < 0.25 and (off > 0.01 or parameter.dim() == 2)
    for implementation in IMPLEMENTATIONS:
        model.set_experts_implementation(implementation)
        wanted = tiny_moe.answers(model)
        handle = offload_experts(model, 3, stores=dict.fromkeys(modules, packed))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(tiny_moe.answers(model), wanted))
        assert handle.stats().bytes_read < handle.stats().misses * handle.pools[next(iter(modules))].spec.nbytes / 2
        handle.remove()


# ---- the plan


def test_roles():
    wanted = {
        "model.layers.1.mlp.experts": "routed",
        "model.layers.1.mlp.shared_experts.up_proj": "shared",
        "model.layers.0.mlp.up_proj": "dense",
        "model.layers.1.self_attn.o_proj": "dense",
        "lm_head": "keep",
    }
    roles = {name: role for name, (role, _) in roles_of(tiny_moe.build("deepseek_v3")).items()}
    assert {name: roles[name] for name in wanted} == wanted
    roles = {name: role for name, (role, _) in roles_of(tiny_moe.build("gemma4")).items()}
    assert roles["model.layers.0.mlp.up_proj"] == "shared" and roles["model.layers.0.experts"] == "routed"
    assert not [name for name, role in roles.items() if "router" in name and role != "keep"]
    roles = {name: role for name, (role, _) in roles_of(tiny_moe.build("qwen2_moe")).items()}
    assert roles["model.layers.0.mlp.shared_expert_gate"] == "keep"
    assert roles["model.layers.0.mlp.shared_expert.gate_proj"] == "shared"


def test_kurtosis():
    torch.manual_seed(0)
    for x, wanted in ((torch.randn(200_000), 0.0), (torch.rand(200_000) + 7, -1.2), (torch.randn(200_000).exp() * 0 + 2, 0.0)):
        moments = Moments()
        for part in x.split(1000):
            moments.add(part)
        assert abs(moments.kurtosis() - wanted) < 0.05


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3", "nemotron_h"])
def test_plan_by_role_and_tails(name):
    model = tiny_moe.build(name, torch.float32)
    shared = "shared_expert"
    for key, parameter in model.named_parameters():
        if shared in key and key.endswith("up_proj.weight"):
            parameter[:2] *= 12  # the outlier channels that the paper reports of shared experts
    ids = tiny_moe.prompt(2, 64)
    before = model(ids).logits
    plan = plan_bits(model, [ids])
    assert torch.equal(model(ids).logits, before)
    tails = {role: [row.kurtosis for row in plan.rows.values() if row.role == role] for role in ("routed", "shared")}
    assert max(tails["routed"]) < 3 < max(tails["shared"])
    assert set(plan.bits("routed").values()) == {2} and set(plan.bits("shared").values()) == {8}
    assert {4, 8} >= set(plan.bits("dense").values()) >= {4}
    routed = sum(tensor.numel() for module in find_experts(model).values() for tensor in expert_tensors(module).values())
    assert plan.bytes()["routed"] == routed * 2.5 / 8
    assert "promoted" not in str(plan_bits(model, [ids], threshold=1e9))
    promoted = plan_bits(model, [ids], threshold=-9.0)
    assert set(promoted.bits("routed").values()) == {4} and set(promoted.bits("dense").values()) == {8}


def test_plan_arguments():
    model = tiny_moe.build("mixtral")
    with pytest.raises(ValueError, match="batches must hold at least one"):
        plan_bits(model, [])
    with pytest.raises(ValueError, match="base must have bits among.*'routed': 5"):
        plan_bits(model, [tiny_moe.prompt()], base={"routed": 5})
    with pytest.raises(ValueError, match="base must have bits among.*'dense': 4.0"):
        plan_bits(model, [tiny_moe.prompt()], base={"dense": 4.0})
    with pytest.raises(TypeError, match="base must be bits by role, got 4"):
        plan_bits(model, [tiny_moe.prompt()], base=4)
    with pytest.raises(ValueError, match="threshold must be a number, got 'low'"):
        plan_bits(model, [tiny_moe.prompt()], threshold="low")


@pytest.mark.parametrize(
    "batches, error, message",
    [
        (tiny_moe.prompt(), TypeError, r"batches must be a list, as \[input_ids\], got tensor"),
        (dict(input_ids=tiny_moe.prompt()), TypeError, "batches must be a list.*got {'input_ids'"),
        (None, TypeError, "batches must be a list.*got None"),
        ("text", TypeError, "batches must be a list.*got 'text'"),
        ([3], TypeError, r"batches\[0\] must be token ids \[B, T\] or keyword arguments of the model, got 3"),
        ([tiny_moe.prompt()[0]], ValueError, r"batches\[0\] must have token ids \[B, T\], got torch.int64 \[\d+\]"),
        ([tiny_moe.prompt().float()], ValueError, r"batches\[0\] must have token ids \[B, T\], got torch.float32"),
        ([dict(input_ids=[[1, 2]])], TypeError, r"batches\[0\], input_ids, must be a tensor, got \[\[1, 2\]\]"),
    ],
)
def test_batches_that_are_none(batches, error, message):
    with pytest.raises(error, match=message):
        plan_bits(tiny_moe.build("mixtral"), batches)


@pytest.fixture
def planned():
    model = tiny_moe.build("mixtral")
    return model, plan_bits(model, [tiny_moe.prompt(2, 48)], base={"routed": 2})


def test_two_bits_need_a_gate(planned):
    model, plan = planned
    wanted = tiny_moe.answers(model)
    with pytest.raises(ValueError, match="gate must be given where routed experts get 2 bits"):
        plan.apply(roles=("routed",))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tiny_moe.answers(model), wanted))


def test_two_bits_that_pass(planned, capsys):
    model, plan = planned
    applied = plan.apply(0.5, gate=LOOSE, roles=("routed",))
    printed = capsys.readouterr().out
    assert "left as it was" in printed and set(plan.bits("dense").values()) == {16}
    assert "2 layers at 2 bits" in printed and "passed" in printed and "worst output error" in printed
    row = plan.rows["model.layers.0.mlp.experts"]
    assert row.bits == 2 and 0.2 < row.error < 0.5
    store = applied.handle.stores[row.name]
    assert store.bits_per_weight(row.name) == 2.5
    assert store.host_bytes == plan.bytes()["routed"]
    assert applied.handle.stats().calls == 0
    tiny_moe.answers(model)


def test_gate_promotes(planned):
    model, plan = planned
    exact = run(model, plan.batches[0]).detach()
    applied = plan.apply(3, gate=Gate(max_error=0.2, max_delta_nll=1.0), roles=("routed",), verbose=False)
    assert set(plan.bits("routed").values()) == {4}
    assert [set(bits.values()) for bits, _, _ in applied.gate.trials] == [{2}, {3}, {4}]
    assert "promoted by the gate" in str(plan)
    with torch.no_grad():
        assert 0 < ((run(model, plan.batches[0]) - exact).float().norm() / exact.float().norm()) < 0.3


@pytest.mark.parametrize("loaded", [False, True])
def test_gate_that_nothing_passes(planned, loaded, tmp_path):
    model, plan = planned
    if loaded:
        model.save_pretrained(tmp_path)
        model = load_with_expert_offload(tmp_path, 3, attn_implementation="eager")
        plan = plan_bits(model, plan.batches)
    wanted = tiny_moe.answers(model)
    with pytest.raises(ValueError, match="gate cannot be passed with 8 bits"):
        plan.apply(gate=Gate(max_error=1e-5, max_delta_nll=1.0), roles=("routed",), verbose=False)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tiny_moe.answers(model), wanted))
    assert (getattr(model, "expert_offload", None) is not None) == loaded


def test_plan_for_a_model_that_was_never_loaded(planned, tmp_path):
    resident, plan = planned
    resident.save_pretrained(tmp_path)
    model = load_with_expert_offload(tmp_path, 3, attn_implementation="eager")
    lazy = plan_bits(model, plan.batches)
    assert lazy.bits("routed") == plan.bits("routed")
    for which in (plan, lazy):
        which.apply(3, gate=LOOSE, roles=("routed",), verbose=False)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tiny_moe.answers(model), tiny_moe.answers(resident)))


def test_gate_arguments():
    with pytest.raises(ValueError, match="max_error must be a number above 0, got 0"):
        Gate(0, 1)
    with pytest.raises(ValueError, match="max_delta_nll must be a number above 0, got None"):
        Gate(1, None)


def test_what_apply_refuses(planned):
    _, plan = planned
    with pytest.raises(TypeError, match="gate must be a Gate, got 0.1"):
        plan.apply(gate=0.1)
    with pytest.raises(TypeError, match="roles must be roles in a list, got 3"):
        plan.apply(gate=LOOSE, roles=3)


@pytest.mark.parametrize(
    "embedded, message", [(True, "batches must have input_ids"), (False, "batches must have a token behind")]
)
def test_batches_without_a_likelihood(embedded, message):
    model, ids = tiny_moe.build("mixtral"), tiny_moe.prompt(2, 1)
    embeddings = model.get_input_embeddings()(ids).detach()
    wanted = model(ids).logits
    plan = plan_bits(model, [{"inputs_embeds": embeddings} if embedded else ids], base={"routed": 2})
    with pytest.raises(ValueError, match=message):
        plan.apply(gate=Gate(0.9, 9.0), roles=("routed",), verbose=False)
    assert torch.equal(model(ids).logits, wanted)


def test_linear_roles_without_torchao(planned, monkeypatch):
    model, plan = planned
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "torchao" else find(name, *args))
    wanted = tiny_moe.answers(model)
    with pytest.raises(ImportError, match=r"pip install '.\[weights\]'"):
        plan.apply(gate=LOOSE)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tiny_moe.answers(model), wanted))


def test_linear_roles_by_torchao():
    pytest.importorskip("torchao")
    model = tiny_moe.build("qwen2_moe")
    plan = plan_bits(model, [tiny_moe.prompt(2, 48)])
    before = run(model, plan.batches[0]).detach()
    plan.apply(0.5, gate=LOOSE, verbose=False)
    for role in ("dense", "shared"):
        rows = [row for row in plan.rows.values() if row.role == role]
        assert rows and all(row.bits == 8 and 0 < row.error < 0.02 for row in rows)
    assert "8 bits: 4 need CUDA" in str(plan)
    with torch.no_grad():
        assert 0 < ((run(model, plan.batches[0]) - before).float().norm() / before.float().norm()) < 1
    row = plan.rows["model.layers.0.mlp.shared_expert.up_proj"]
    assert 64 * 64 < row.num_bytes < 64 * 64 * 1.1  # and not the two bytes a weight that it stands for
