"""Experts that accelerate's ``dispatch_model`` put on disk or into host memory."""

import os

import torch
from torch import nn

from .families import expert_tensors
from .file_store import FileStore, FusedTensor
from .pinned_store import PinnedStore
from .safetensors_header import StoredTensor, read_header
from .spec import ExpertSpec
from .store import ExpertStore, HostStore


def offloaded_store(modules: dict[str, nn.Module], devices: dict[str, torch.device], io: str) -> dict[str, ExpertStore]:
    """Stores, by layer, of modules whose fused parameters are on meta and in accelerate's ``weights_map``.

    Raises:
        ValueError: a parameter on meta that accelerate does not know.
    """
    pieces: dict[str, dict] = {}
    held: dict[str, dict[str, torch.Tensor]] = {}
    headers: dict[str, dict[str, StoredTensor]] = {}
    for name, module in modules.items():
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        for key, tensor in expert_tensors(module).items():
            value = find(weights, key, headers)
            if value is None:
                raise ValueError(f"model: {name}.{key} is on the meta device and accelerate did not offload it")
            if isinstance(value, torch.Tensor):
                held.setdefault(name, {})[key] = value
            else:
                pieces.setdefault(name, {})[key] = FusedTensor(value)
                if value.shape != tuple(tensor.shape):
                    raise ValueError(f"{value.path}: {name}.{key} must be {tuple(tensor.shape)}, got {value.shape}")
    stores: dict[str, ExpertStore] = {}
    if pieces:
        specs = {name: ExpertSpec.of(expert_tensors(modules[name])) for name in pieces}
        counts = {name: modules[name].num_experts for name in pieces}
        stores.update(dict.fromkeys(pieces, FileStore("accelerate's offload folder", pieces, specs, counts, io)))
    if held:
        on_gpu = any(devices[name].type == "cuda" for name in held)
        stores.update(dict.fromkeys(held, PinnedStore(held) if on_gpu else HostStore(held)))
    return stores


def find(weights, key: str, headers: dict[str, dict[str, StoredTensor]]) -> StoredTensor | torch.Tensor | None:
    """The offloaded tensor ``key`` of a module, or where it lies, without reading it."""
    loader = getattr(weights, "dataset", None)
    if loader is None:
        return weights.get(key) if isinstance(weights, dict) else None
    full = weights.prefix + key
    if full in loader.state_dict:
        return loader.state_dict[full]
    entry = loader.index.get(full)
    if entry is None:
        return None
    if (path := entry.get("safetensors_file")) is not None:
        if path not in headers:
            headers[path] = read_header(path)
        return headers[path][entry["weight_name"]]
    path = os.path.join(loader.save_folder, f"{full}.dat")
    return StoredTensor(path, 0, tuple(entry["shape"]), getattr(torch, entry["dtype"]))
