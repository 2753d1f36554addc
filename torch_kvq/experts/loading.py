"""``load_with_expert_offload``: a model whose experts are never read at load."""

import os
import reprlib
from collections.abc import Mapping
from types import NoneType
from typing import Any

import torch
import transformers
from torch import nn

from ..checks import check_choice, check_type
from .budget import Budget, divide
from .checkpoint import checkpoint_store, checkpoint_tensors
from .families import check_module, expert_tensors, find_experts
from .files import READERS
from .offload import offload_experts
from .spec import ExpertSpec

DOWNLOAD = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def load_with_expert_offload(
    path: str | os.PathLike,
    budget: Budget,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    model_class: type | None = None,
    io: str = "pread",
    offload: dict[str, Any] | None = None,
    **kwargs,
) -> nn.Module:
    """A model in eval mode on ``device`` whose experts stay in the safetensors files of ``path`` until they are routed to.

    Nothing is converted and nothing is written. The handle of ``offload_experts`` is ``model.expert_offload``.

    Args:
        path: folder of a checkpoint, or the name of one on the Hub.
        budget, io: as ``offload_experts``; ``offload`` are further arguments for it.
        device: one device for everything, default the CPU.
        dtype: as ``from_pretrained``, default that of the checkpoint.
        model_class: transformers class, default the first of the config's ``architectures``.
        kwargs: go to ``from_pretrained``.

    Raises:
        NotImplementedError: experts that cannot be offloaded or read in place, named. ValueError, TypeError: an argument out of
            range, a file that is truncated. FileNotFoundError: no safetensors checkpoint.
    """
    check_type("path", path, (str, os.PathLike), "a folder or a name on the Hub")
    check_type("model_class", model_class, (type, NoneType), "a transformers class")
    check_type("offload", offload, (Mapping, NoneType), "arguments of offload_experts by name")
    check_choice("io", io, READERS)
    device = checked_device(device)
    folder = local_folder(path)
    stored = checkpoint_tensors(folder)
    config = kwargs.pop("config", None) or transformers.AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise NotImplementedError("path: the experts of a quantised checkpoint cannot be read in place")
    model_class = model_class or class_of(config)
    specs: dict[str, ExpertSpec] = {}
    counts: dict[str, int] = {}

    def strip(model: nn.Module) -> None:
        for name, module in find_experts(model).items():
            specs[name], counts[name] = check_module(name, module), module.num_experts
        divide(budget, [({name: counts[name]}, specs[name].nbytes) for name in specs][:1])
        for module in find_experts(model).values():
            for key in expert_tensors(module):
                module._parameters[key] = None  # transformers materialises parameters only
            module._is_hf_initialized = True

    stripped = without_experts(model_class, strip)
    model = stripped.from_pretrained(folder, config=config, dtype=dtype, device_map={"": device}, **kwargs).eval()
    model.__class__ = model_class
    store = checkpoint_store(model, stored, specs, counts, io)
    modules = dict(model.named_modules())
    for name, spec in specs.items():
        for key, tensor in spec.empty(counts[name], device="meta").items():
            modules[name]._parameters[key] = nn.Parameter(tensor, requires_grad=False)
    offload_experts(model, budget, stores=dict.fromkeys(specs, store), **(offload or {}))
    return model


def checked_device(device: str | torch.device) -> torch.device:
    """Raises ``ValueError`` for what is no device."""
    try:
        return torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"device must be one of torch, as 'cpu' or 'cuda:0', got {reprlib.repr(device)}") from error


def local_folder(path: str | os.PathLike) -> str:
    """The checkpoint's folder, downloaded if ``path`` is the name of one on the Hub."""
    if os.path.isdir(path):
        return os.fspath(path)
    from huggingface_hub import snapshot_download

    return snapshot_download(os.fspath(path), allow_patterns=DOWNLOAD)


def class_of(config: transformers.PreTrainedConfig) -> type:
    """The transformers class that the checkpoint was saved from.

    Raises:
        ValueError: the config names none.
    """
    names = getattr(config, "architectures", None) or [None]
    found = getattr(transformers, names[0], None) if names[0] else None
    if found is None:
        raise ValueError(f"model_class must be given: the config's architectures are {names}")
    return found


def without_experts(model_class: type, strip) -> type:
    """A subclass that calls ``strip(model)`` once its modules are made, before any weight is."""

    def __init__(self, *args, **kwargs) -> None:
        model_class.__init__(self, *args, **kwargs)
        strip(self)

    ignored = [*(getattr(model_class, "_keys_to_ignore_on_load_unexpected", None) or []), r"\.experts\."]
    members = {"__init__": __init__, "__module__": model_class.__module__, "_keys_to_ignore_on_load_unexpected": ignored}
    return type(model_class.__name__, (model_class,), members)


def expert_device_map(model: nn.Module, device: str | int = "cpu") -> dict[str, str | int]:
    """A ``device_map`` for ``from_pretrained`` that puts the experts on disk and everything else on ``device``.

    Args:
        model: of the same config, on the meta device for instance. (Every module is named, for accelerate lets a map with a
            root entry bring the experts in, too.)
        device: as in a ``device_map``, default the CPU.

    Raises:
        TypeError, ValueError, NotImplementedError: no model whose experts can be offloaded, or no device, named.
    """
    experts = find_experts(model)
    if device != "disk":
        checked_device(device)
    places: dict[str, str | int] = {}

    def visit(module: nn.Module, name: str) -> None:
        if name in experts:
            places[name] = "disk"
        elif name and not any(expert.startswith(name + ".") for expert in experts):
            places[name] = device
        else:
            prefix = f"{name}." if name else ""
            for child, submodule in module.named_children():
                visit(submodule, prefix + child)
            places.update(dict.fromkeys([prefix + own for own in (*module._parameters, *module._buffers)], device))

    visit(model, "")
    return places
