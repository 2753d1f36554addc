"""Experts that stay in a checkpoint or in accelerate's offload folder: loads that read none, saves, failures."""

import os
import pathlib
import shutil

import pytest
import tiny_moe
import torch
from safetensors.torch import load_file
from test_experts_identity import assert_equal
from transformers import AutoModelForCausalLM

from torch_kvq import load_with_expert_offload, offload_experts
from torch_kvq.experts import expert_device_map
from torch_kvq.experts.files import READERS, FileChanged, WeightFile
from torch_kvq.experts.safetensors_header import read_header

pytestmark = pytest.mark.versions
QUIET = dict(attn_implementation="eager")


@pytest.fixture
def mixtral(tmp_path):
    """(folder of a checkpoint, its answers)"""
    model = tiny_moe.build("mixtral")
    model.save_pretrained(tmp_path / "mixtral")
    return tmp_path / "mixtral", tiny_moe.answers(model)


def contents(folder: pathlib.Path) -> dict:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", tiny_moe.NAMES)
def test_every_family_is_read_in_place(name, tmp_path):
    model = tiny_moe.build(name)
    wanted = tiny_moe.answers(model)
    model.save_pretrained(tmp_path / "saved")
    before = contents(tmp_path / "saved")
    loaded = load_with_expert_offload(tmp_path / "saved", 3, **QUIET)
    assert type(loaded) is type(model) and not loaded.training
    assert loaded.expert_offload.stats().bytes_read == 0
    assert_equal(tiny_moe.answers(loaded), wanted)
    loaded.save_pretrained(tmp_path / "again")
    assert contents(tmp_path / "saved") == before
    first, second = (load_file(tmp_path / folder / "model.safetensors") for folder in ("saved", "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_no_expert_is_touched_at_load(mixtral, monkeypatch):
    """Neither by this package nor by transformers, whose slices of a file are counted by name."""
    import safetensors
    import transformers.modeling_utils

    folder, _ = mixtral
    read = []

    class Slice:
        def __init__(self, name, inner):
            self.name, self.inner = name, inner

        def __getitem__(self, at):
            read.append(self.name)
            return self.inner[at]

        def __getattr__(self, name):
            return getattr(self.inner, name)

    class File:
        def __init__(self, *args, **kwargs):
            self.inner = safetensors.safe_open(*args, **kwargs)

        def get_slice(self, name):
            return Slice(name, self.inner.get_slice(name))

        def get_tensor(self, name):
            read.append(name)
            return self.inner.get_tensor(name)

        def __enter__(self):
            return self

        def __exit__(self, *args):
            pass

        def __getattr__(self, name):
            return getattr(self.inner, name)

    monkeypatch.setattr(transformers.modeling_utils, "safe_open", File)
    monkeypatch.setattr(WeightFile, "read", lambda self, *args: pytest.fail("an expert was read"))
    load_with_expert_offload(folder, 3, **QUIET)
    assert any("self_attn" in name for name in read)
    assert not [name for name in read if "experts" in name]


@pytest.mark.parametrize("io", READERS)
@pytest.mark.parametrize("sharded", [False, True])
def test_ways_of_reading(io, sharded, tmp_path):
    model = tiny_moe.build("qwen3_moe")
    model.save_pretrained(tmp_path, max_shard_size="100KB" if sharded else "1GB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3 or not sharded
    try:
        loaded = load_with_expert_offload(tmp_path, 5, io=io, offload=dict(threads=3), **QUIET)
    except ValueError as error:
        pytest.skip(str(error))  # a file system without O_DIRECT
    assert_equal(tiny_moe.answers(loaded), tiny_moe.answers(model))
    stats = loaded.expert_offload.stats()
    each = loaded.expert_offload.pools["model.layers.0.mlp.experts"].spec.nbytes
    assert stats.bytes_read == stats.misses * each > 0


def test_converts_to_the_dtype_asked_for(mixtral):
    folder, _ = mixtral
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **QUIET).eval()
    loaded = load_with_expert_offload(folder, 3, dtype=torch.float32, **QUIET)
    assert_equal(tiny_moe.answers(loaded), tiny_moe.answers(wanted))


def test_remove_loads_the_experts(mixtral):
    folder, wanted = mixtral
    model = load_with_expert_offload(folder, 3, **QUIET)
    model.expert_offload.remove()
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert_equal(tiny_moe.answers(model), wanted)


# ---- accelerate's folder


def dispatched(folder, offload_folder):
    with torch.device("meta"):
        places = expert_device_map(AutoModelForCausalLM.from_config(tiny_moe.config("mixtral")))
    return AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=offload_folder, **QUIET).eval()


@pytest.mark.parametrize("device", [None, "gpu", [0]])
def test_places_of_experts_are_devices(device):
    with pytest.raises(ValueError, match=r"device must be one of torch, as 'cpu' or 'cuda:0', got (None|'gpu'|\[0\])"):
        expert_device_map(tiny_moe.build("mixtral"), device)


def test_accelerate_folder(mixtral, tmp_path):
    folder, wanted = mixtral
    model = dispatched(folder, tmp_path / "offload")
    assert model.model.layers[0].mlp.experts._hf_hook.offload
    handle = offload_experts(model, 3)
    assert_equal(tiny_moe.answers(model), wanted)
    assert "accelerate's offload folder" in str(handle.report())
    model.save_pretrained(tmp_path / "again")
    first, second = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    handle.remove()
    assert model.model.layers[0].mlp.experts._hf_hook.offload
    assert_equal(tiny_moe.answers(model), wanted)


def test_two_models_that_share_an_offload_folder(mixtral, tmp_path):
    folder, wanted = mixtral
    model = dispatched(folder, tmp_path / "offload")
    offload_experts(model, 3)
    other = tiny_moe.build("mixtral", seed=1)
    other.save_pretrained(tmp_path / "other")
    second = dispatched(tmp_path / "other", tmp_path / "offload")
    offload_experts(second, 3)
    assert_equal(tiny_moe.answers(second), tiny_moe.answers(other))
    try:
        assert_equal(tiny_moe.answers(model), wanted)  # the files were replaced, and the old ones are still open
    except FileChanged as error:
        assert "an offload folder of its own" in str(error)


def test_two_models_on_one_checkpoint(mixtral):
    folder, wanted = mixtral
    before = contents(folder)
    models = [load_with_expert_offload(folder, budget, **QUIET) for budget in (1, 5)]
    for model in models:
        assert_equal(tiny_moe.answers(model), wanted)
    models[0].expert_offload.remove()
    assert_equal(tiny_moe.answers(models[1]), wanted)
    assert contents(folder) == before


# ---- failures


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [2, 0.5])
def test_read_error(mixtral, monkeypatch, implementation, overlap, budget):
    folder, wanted = mixtral
    model = load_with_expert_offload(folder, budget, offload=dict(overlap=overlap), **QUIET)
    model.set_experts_implementation(implementation)
    wanted = tiny_moe.answers(model)
    read, count = WeightFile.read, iter(range(10**6))

    def fails_sometimes(self, offset, *into):
        if next(count) % 7 == 5:
            for place in into:
                place.fill_(torch.nan)
            raise OSError(5, "injected", self.path)
        return read(self, offset, *into)

    for _ in range(3):
        monkeypatch.setattr(WeightFile, "read", fails_sometimes)
        with pytest.raises(OSError, match="injected"):
            for seed in range(20):
                with torch.no_grad():
                    model(tiny_moe.prompt(seed=seed))
        monkeypatch.setattr(WeightFile, "read", read)
        assert_equal(tiny_moe.answers(model), wanted)


def test_file_changed_under_us(mixtral):
    folder, wanted = mixtral
    model = load_with_expert_offload(folder, 3, **QUIET)
    path = folder / "model.safetensors"
    stat = path.stat()
    tensor = next(tensor for name, tensor in read_header(str(path)).items() if "experts" in name)
    with path.open("r+b") as file:
        file.seek(tensor.offset)
        before = file.read(16)
        file.seek(tensor.offset)
        file.write(bytes(16))
    with torch.no_grad(), pytest.raises(FileChanged, match="model.safetensors changed since it was opened"):
        model(tiny_moe.prompt())
    with path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(before)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert_equal(tiny_moe.answers(model), wanted)


@pytest.mark.parametrize("io", READERS)
def test_file_cut_off_under_us(io, tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 64)
    try:
        file = READERS[io](str(path))
    except ValueError as error:
        pytest.skip(str(error))
    place = torch.zeros(300, dtype=torch.uint8)
    assert file.read(4090, place) == 300
    assert bytes(place.tolist()) == (bytes(range(256)) * 64)[4090:4390]
    with pytest.raises(OSError, match="weights ends at 16,384 bytes, needed 16,400: it is truncated"):
        file.read(16_100, place)
    os.truncate(path, 5000)
    with pytest.raises(FileChanged, match="16,384 bytes then, 5,000 now"):
        file.read(4090, place)


def test_file_replaced_under_us(mixtral, tmp_path):
    folder, wanted = mixtral
    model = load_with_expert_offload(folder, 3, **QUIET)
    tiny_moe.build("mixtral", seed=1).save_pretrained(tmp_path / "new")
    os.replace(tmp_path / "new" / "model.safetensors", folder / "model.safetensors")
    assert_equal(tiny_moe.answers(model), wanted)  # the old file is still open


@pytest.mark.parametrize("keep", [4, 60, 0.5, 0.99])
def test_truncated_file(mixtral, keep, tmp_path):
    folder, _ = mixtral
    path = folder / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, keep if isinstance(keep, int) else int(size * keep))
    with pytest.raises(ValueError, match="model.safetensors.*truncated"):
        read_header(str(path))
    with pytest.raises(ValueError, match="model.safetensors.*truncated"):
        load_with_expert_offload(folder, 3, **QUIET)


def test_missing_shard(tmp_path):
    tiny_moe.build("mixtral").save_pretrained(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[2]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"{shard.name} is missing"):
        load_with_expert_offload(tmp_path, 3, **QUIET)


def test_budget_below_one_expert(mixtral):
    with pytest.raises(ValueError, match="budget must hold at least one expert of 18,432 bytes, got '10 KB'"):
        load_with_expert_offload(mixtral[0], "10 KB", **QUIET)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(path=None), TypeError, "path must be a folder or a name on the Hub, got None"),
        (dict(io="fast"), ValueError, "io must be one of pread, direct, mmap, got 'fast'"),
        (dict(device=None), ValueError, "device must be one of torch, as 'cpu' or 'cuda:0', got None"),
        (dict(device="gpu"), ValueError, "device must be one of torch, as 'cpu' or 'cuda:0', got 'gpu'"),
        (dict(model_class="Mixtral"), TypeError, "model_class must be a transformers class, got 'Mixtral'"),
        (dict(offload=[1]), TypeError, r"offload must be arguments of offload_experts by name, got \[1\]"),
    ],
)
def test_arguments(mixtral, change, error, message):
    with pytest.raises(error, match=message):
        load_with_expert_offload(**{**dict(path=mixtral[0], budget=3), **change}, **QUIET)


def test_checkpoint_without_safetensors(mixtral, tmp_path):
    shutil.copy(mixtral[0] / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match="path must hold a safetensors checkpoint"):
        load_with_expert_offload(tmp_path, 3)
