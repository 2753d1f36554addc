"""What offloading refuses: by name, and with the model left as it was."""

import copy
import gc
import pickle

import pytest
import tiny_moe
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module, remove_hook_from_submodules

from torch_kvq import ExpertOffloadHook, load_with_expert_offload, offload_experts
from torch_kvq.experts.budget import make_slabs, parse_bytes, slots_for
from torch_kvq.experts.file_store import FileStore

pytestmark = pytest.mark.versions


LAYERS = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


@pytest.mark.parametrize("name, reason", [("llama4", "Llama4TextExperts.*every token"), ("dbrx", "DbrxExperts.*flat")])
def test_families_that_cannot_be_offloaded(name, reason):
    model = tiny_moe.build(name)
    with pytest.raises(NotImplementedError, match=reason):
        offload_experts(model, 3)
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(budget=0), ValueError, "budget must hold at least one expert of 18,432 bytes, got 0"),
        (dict(budget="18431 B"), ValueError, "at least one expert of 18,432 bytes"),
        (dict(budget=1.5), ValueError, r"share in \(0, 1\]"),
        (dict(budget="much"), ValueError, "size such as '8GiB'"),
        (dict(budget=None), TypeError, "budget must be bytes"),
        (dict(budget=True), TypeError, "budget must be bytes"),
        (dict(budget=3, pin={"model.layers.0.mlp.experts": [8]}), ValueError, "has experts 0 to 7"),
        (dict(budget=3, policy="fifo"), ValueError, "policy must be one of"),
        (dict(budget=3, predictor=lambda model: None), ValueError, "num_guesses must be at least 1"),
        (dict(budget=3, num_guesses=-1), ValueError, "num_guesses must be an integer of at least 0, got -1"),
        (dict(budget=3, num_guesses=2.5), ValueError, "num_guesses must be an integer of at least 0, got 2.5"),
        (dict(budget=3, threads=None), ValueError, "threads must be an integer of at least 0, got None"),
        (
            dict(budget=3, policy=3),
            ValueError,
            "policy must be one of .* a class with insert, touch, remove, victims, got 3",
        ),
        (dict(budget=3, policy=dict), ValueError, "policy must be one of .*, got <class 'dict'>"),
        (dict(budget=3, io="mail"), ValueError, "io must be one of pread, direct, mmap, got 'mail'"),
        (dict(budget=3, overlap="yes"), ValueError, "overlap must be True or False, got 'yes'"),
        (dict(budget=3, num_guesses=1, predictor=3), TypeError, "predictor must be callable, got 3"),
        (dict(budget=3, num_guesses=1, predictor=lambda model: 3), TypeError, "predictor must be callable, got 3"),
        (dict(budget=3, pin=[0]), TypeError, r"pin must be experts by layer name, got \[0\]"),
        (dict(budget=3, pin={"layers.9": [0]}), ValueError, "pin: a layer must be one of .*, got 'layers.9'"),
        (dict(budget=3, pin={"model.layers.0.mlp.experts": [0.5]}), TypeError, r"pin must have experts .* got \[0.5\]"),
        (dict(budget=3, stores=[]), TypeError, r"stores must be stores by layer name, got \[\]"),
        (dict(budget=3, stores={}), ValueError, "stores must be of the layers .*, got .."),
        (
            dict(budget=3, stores=dict.fromkeys(LAYERS, 3)),
            TypeError,
            "stores.*layers.0.mlp.experts.* an ExpertStore, got 3",
        ),
    ],
)
def test_arguments(options, error, message):
    model = tiny_moe.build("mixtral")
    wanted = model(tiny_moe.prompt()).logits
    with pytest.raises(error, match=message):
        offload_experts(model, **options)
    assert torch.equal(model(tiny_moe.prompt()).logits, wanted)
    assert not hasattr(model.model.layers[0].mlp.experts, "_hf_hook")


@pytest.mark.parametrize(
    "answer, error, message",
    [
        (None, TypeError, "answer of predictor must be experts by layer name, got None"),
        ({"layers.9": [0]}, ValueError, "predictor: a layer must be one of .*, got 'layers.9'"),
        ({LAYERS[1]: [8]}, ValueError, r"predictor: model.layers.1.mlp.experts has experts 0 to 7, got \[8\]"),
        ({LAYERS[1]: 0.5}, TypeError, "predictor must have experts of model.layers.1.mlp.experts as integers, got 0.5"),
    ],
)
def test_answers_of_a_predictor(answer, error, message):
    model = tiny_moe.build("mixtral")
    handle = offload_experts(model, 3, num_guesses=1, predictor=lambda model: lambda layer, hidden_states: answer)
    with torch.no_grad(), pytest.raises(error, match=message):
        model(tiny_moe.prompt())
    assert handle.stats().guesses == 0


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(pool=3), TypeError, "pool must be an ExpertPool, got 3"),
        (dict(layer="layers.9"), ValueError, "layer must be one of .*, got 'layers.9'"),
        (dict(overlap=1), ValueError, "overlap must be True or False, got 1"),
        (dict(predictor=3), TypeError, "predictor must be callable, got 3"),
        (dict(pools=[3]), TypeError, r"pools must be ExpertPools by layer name, got \[3\]"),
        (dict(pools={"layers.1": 3}), TypeError, r"pools\['layers.1'\] must be an ExpertPool, got 3"),
    ],
)
def test_arguments_of_the_hook(change, error, message):
    pool = offload_experts(tiny_moe.build("mixtral"), 3).pools[LAYERS[0]]
    with pytest.raises(error, match=message):
        ExpertOffloadHook(**{**dict(pool=pool, layer=LAYERS[0]), **change})


def test_dense_model():
    from tiny_models import build

    with pytest.raises(TypeError, match="model must be a transformers model, got 'gpt2'"):
        offload_experts("gpt2", 3)
    with pytest.raises(ValueError, match="model must have fused experts.*LlamaForCausalLM has none"):
        offload_experts(build("llama"), 3)


def test_twice():
    model = tiny_moe.build("mixtral")
    offload_experts(model, 3)
    with pytest.raises(ValueError, match="offloaded already"):
        offload_experts(model, 3)


@pytest.mark.parametrize("io", ["pread", "mmap"])
def test_a_copy_is_refused_and_leaves_the_original_as_it_is(io, tmp_path):
    tiny_moe.build("qwen3_moe").save_pretrained(tmp_path)
    model = load_with_expert_offload(tmp_path, 2, io=io)
    with torch.no_grad():
        wanted = model(tiny_moe.prompt()).logits
        for copied in (copy.deepcopy, lambda model: copy.deepcopy(model.expert_offload), pickle.dumps):
            with pytest.raises((TypeError, AttributeError), match="offloaded experts|pickle"):
                copied(model)
            gc.collect()
            with open(tmp_path / "other", "w") as other:  # would get the number of a file that was closed
                assert torch.equal(model(tiny_moe.prompt()).logits, wanted)
                other.write("still open")


@pytest.mark.parametrize("after", [0, 1, 3])
def test_removal_that_cannot_read_can_be_tried_again(after, tmp_path, monkeypatch):
    tiny_moe.build("qwen3_moe").save_pretrained(tmp_path)
    model = load_with_expert_offload(tmp_path, 2)
    handle, ids = model.expert_offload, tiny_moe.prompt()
    with torch.no_grad():
        wanted = model(ids).logits
        whole, calls = FileStore.whole, []

        def failing(self, *args):
            calls.append(args)
            if len(calls) == after + 1:
                raise OSError("injected")
            return whole(self, *args)

        monkeypatch.setattr(FileStore, "whole", failing)
        with pytest.raises(OSError, match="injected"):
            handle.remove()
        assert model.expert_offload is handle and torch.equal(model(ids).logits, wanted)
        handle.remove()
        assert torch.equal(model(ids).logits, wanted)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_experts_that_were_not_loaded_refuse_to_run(implementation):
    model, ids = tiny_moe.build("qwen3_moe"), tiny_moe.prompt()
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        wanted = model(ids).logits
        handle = offload_experts(model, 3)
        stores = handle.stores
        handle.remove(load=False, close=False)
        with pytest.raises(RuntimeError, match="model.layers.0.mlp.experts must have its experts loaded"):
            model(ids)
        again = offload_experts(model, 3, stores=stores)
        assert torch.equal(model(ids).logits, wanted)
        again.remove()
        assert torch.equal(model(ids).logits, wanted)
        assert not hasattr(model.model.layers[0].mlp.experts, "_hf_hook")


@torch.no_grad()
def test_a_hook_that_was_taken_away():
    """Nothing runs on the meta device then, and the handle still gives the experts back."""
    model, ids = tiny_moe.build("qwen3_moe"), tiny_moe.prompt()
    wanted = model(ids).logits
    handle = offload_experts(model, 3)
    remove_hook_from_submodules(model)
    with pytest.raises(RuntimeError, match=f"{LAYERS[0]} must have its experts loaded or offloaded to run"):
        model(ids)
    for name, pool in handle.pools.items():
        add_hook_to_module(model.get_submodule(name), ExpertOffloadHook(pool, name))
    assert torch.equal(model(ids).logits, wanted)
    remove_hook_from_submodules(model)
    handle.remove()
    assert torch.equal(model(ids).logits, wanted)
    assert isinstance(pickle.dumps(model), bytes)


@torch.no_grad()
@pytest.mark.parametrize("append", [False, True])
def test_a_second_hook_on_a_module(append):
    """It would number the slots of slots."""
    model, ids = tiny_moe.build("mixtral"), tiny_moe.prompt()
    wanted = model(ids).logits
    handle = offload_experts(model, 3)
    with pytest.raises(ValueError, match=f"module must have one ExpertOffloadHook, {LAYERS[0]} has one already"):
        add_hook_to_module(model.get_submodule(LAYERS[0]), ExpertOffloadHook(handle.pools[LAYERS[0]], LAYERS[0]), append=append)
    handle.remove()
    assert torch.equal(model(ids).logits, wanted)


@torch.no_grad()
def test_another_hook_beside_that_of_the_experts():
    model, ids = tiny_moe.build("mixtral"), tiny_moe.prompt()
    wanted = model(ids).logits
    handle = offload_experts(model, 3)
    add_hook_to_module(model.get_submodule(LAYERS[1]), ModelHook(), append=True)
    with pytest.raises(RuntimeError, match=f"{LAYERS[1]} must have no other hook than .*, got SequentialHook"):
        handle.remove()
    assert model.expert_offload is handle and torch.equal(model(ids).logits, wanted)
    remove_hook_from_module(model.get_submodule(LAYERS[1]))
    handle.remove()
    assert torch.equal(model(ids).logits, wanted)


@pytest.mark.parametrize("method", ["stats", "reset_stats", "report", "pin"])
def test_a_handle_of_experts_that_were_removed(method):
    handle = offload_experts(tiny_moe.build("mixtral"), 3)
    handle.remove()
    with pytest.raises(RuntimeError, match="handle must be that of offloaded experts"):
        getattr(handle, method)(*([LAYERS[0], [0]] if method == "pin" else []))


def test_a_handle_is_removed_once():
    model = tiny_moe.build("mixtral")
    with torch.no_grad():
        wanted = model(tiny_moe.prompt()).logits
        first = offload_experts(model, 3)
        first.remove()
        second = offload_experts(model, 2)
        with pytest.raises(RuntimeError, match="called once"):
            first.remove()
        assert model.expert_offload is second and torch.equal(model(tiny_moe.prompt()).logits, wanted)
        second.remove()


def test_moving_the_model():
    model = tiny_moe.build("mixtral")
    handle = offload_experts(model, 3)
    wanted = {name: parameter.dtype for name, parameter in model.named_parameters()}
    block = model.model.layers[1].mlp
    parts = (model, model.model, model.model.layers, block, block.experts)
    for move in (lambda: model.to("meta"), *(each for part in parts for each in (part.half, part.double))):
        with pytest.raises(RuntimeError, match="call handle.remove"):
            move()
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == wanted
    model.model.layers[0].self_attn.to(model.dtype)  # holds no experts
    handle.remove()
    model.model.double()
    assert block.experts.down_proj.dtype == torch.float64
    model.float()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("part", ["", "model", "model.layers.1.mlp.experts"])
def test_loading_experts_of_another_model(part, strict, assign):
    model, other = tiny_moe.build("mixtral"), tiny_moe.build("mixtral")
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    state, ids = other.get_submodule(part).state_dict(), tiny_moe.prompt()
    with torch.no_grad():
        wanted, handle = model(ids).logits, offload_experts(model, 3)
        layer = 1 if part.endswith("experts") else 0
        name = f"model.layers.{layer}.mlp.experts.gate_up_proj".removeprefix(part).lstrip(".")
        with pytest.raises(RuntimeError, match=f"state_dict must be without the experts of this model.* got {name}$"):
            model.get_submodule(part).load_state_dict(state, strict=strict, assign=assign)
        assert torch.equal(model(ids).logits, wanted)
        handle.remove()
        model.load_state_dict(other.state_dict(), assign=assign)
        assert torch.equal(model(ids).logits, other(ids).logits)


def test_loading_all_but_experts():
    model, other, ids = tiny_moe.build("mixtral"), tiny_moe.build("mixtral"), tiny_moe.prompt()
    other.lm_head.weight.data.mul_(2)
    state = {name: tensor for name, tensor in other.state_dict().items() if ".experts." not in name}
    with torch.no_grad():
        offload_experts(model, 3)
        assert all(".experts." in name for name in model.load_state_dict(state, strict=False).missing_keys)
        assert torch.equal(model(ids).logits, other(ids).logits)


def test_gradients():
    model = tiny_moe.build("mixtral", torch.float32)
    offload_experts(model, 3)
    with pytest.raises(ValueError, match="hidden_states must not require gradients"):
        model(tiny_moe.prompt())


def test_unknown_implementation():
    model = tiny_moe.build("mixtral")
    offload_experts(model, 3)
    model.config._experts_implementation = "sonicmoe"
    with torch.no_grad(), pytest.raises(NotImplementedError, match="experts_implementation must be one of.*'sonicmoe'"):
        model(tiny_moe.prompt())


def test_expert_parallelism():
    model = tiny_moe.build("mixtral")
    model.model.layers[1].mlp.experts._is_expert_parallel = True
    with pytest.raises(NotImplementedError, match="layers.1.mlp.experts is sharded"):
        offload_experts(model, 3)


def test_integer_experts():
    model = tiny_moe.build("mixtral")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj.to(torch.int8), requires_grad=False)
    with pytest.raises(
        NotImplementedError, match="down_proj must be a plain floating-point parameter, got Parameter of torch.int8"
    ):
        offload_experts(model, 3)


def test_foreign_hook():
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = tiny_moe.build("mixtral")
    add_hook_to_module(model.model.layers[0].mlp.experts, ModelHook())
    with pytest.raises(ValueError, match="layers.0.mlp.experts has a ModelHook"):
        offload_experts(model, 3)


def test_pins():
    model = tiny_moe.build("mixtral")
    handle = offload_experts(model, 3)
    name = "model.layers.0.mlp.experts"
    with pytest.raises(ValueError, match=f"layer must be one of {', '.join(LAYERS)}, got .model.layers.9"):
        handle.pin("model.layers.9.mlp.experts", [0])
    with pytest.raises(ValueError, match="has experts 0 to 7, got .8."):
        handle.pin(name, [8])
    handle.pin(name, [0, 1])
    with pytest.raises(ValueError, match="pin must leave one of the 3 slots free, got 3 experts"):
        handle.pin(name, [2])


def test_sizes():
    assert parse_bytes("budget", "1.5 GiB") == 3 * 2**29 and parse_bytes("budget", "20MB") == 20_000_000
    layers = {"a": 8, "b": 8}
    assert slots_for(0.25, layers, 100) == 4 and slots_for("999B", layers, 100) == 9 and slots_for(99, layers, 100) == 16


@pytest.mark.parametrize("slots", range(1, 41))
def test_slabs_use_every_slot_and_stay_small(slots):
    layers = {str(index): 8 for index in range(5)}
    slabs = make_slabs(layers, slots, 1023)
    assert [name for slab in slabs for name in slab.layers] == list(layers)
    assert sum(slab.num_slots for slab in slabs) == slots
    assert all(1 <= slab.num_slots <= 8 for slab in slabs)
