"""``offload_experts``: a model's experts out of the way, under a budget."""

from collections.abc import Callable, Iterable, Mapping
from types import NoneType

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch import nn

from ..checks import check_choice, check_count, check_type
from .budget import Budget, divide, make_slabs
from .families import check_module, expert_tensors, find_experts
from .files import READERS
from .folder import offloaded_store
from .handle import OffloadHandle
from .hook import ExpertOffloadHook, MissingExpertsHook, Predictor, check_hook_options
from .loader import HostLoader, Loader
from .pinned_store import PinnedStore
from .policy import policy_class
from .pool import ExpertPool, experts_of
from .slots import slot_bytes
from .store import ExpertStore, HostStore

CUDA_SLOTS = 1023  # grouped_mm takes no more groups on CUDA


def offload_experts(
    model: nn.Module,
    budget: Budget,
    *,
    pin: Mapping[str, Iterable[int]] | None = None,
    policy: str | type = "lru",
    io: str = "pread",
    threads: int = 2,
    overlap: bool | None = None,
    predictor: Callable[[nn.Module], Predictor] | None = None,
    num_guesses: int = 0,
    stores: Mapping[str, ExpertStore] | None = None,
) -> OffloadHandle:
    """Let the experts of a transformers MoE model compute from a pool of slots; outputs stay bit for bit the same.

    Experts on a GPU move to pinned host memory; those that accelerate keeps on disk or in host memory are read from there,
    one at a time instead of a layer at a time.

    Args:
        model: loaded, or dispatched by accelerate. It is changed in place, until ``handle.remove()``.
        budget: bytes of experts on their device as text (``"8GiB"``), a share of them in (0, 1] as float, or their number as
            int. One expert at least.
        pin: experts that are loaded now and stay, by layer name.
        policy: which expert gives up its slot: ``lru`` (default), ``lfu``, or a class like ``policy.LRU``.
        io: how files are read: ``pread`` (default), ``direct`` (past the page cache) or ``mmap``.
        threads: that read files, besides the one that waits for them, default 2.
        overlap: compute resident experts while the others load. By default on CUDA only.
        predictor: called with the model, gives a predictor (``predictors.py``) that fetches experts ahead. None by default.
        num_guesses: slots for what the predictor fetches, in each pool, besides ``budget``.
        stores: where experts come from, by layer name, if not from the model.

    Returns:
        A handle with ``stats()``, ``report()``, ``pin()`` and ``remove()``.

    Raises:
        NotImplementedError: experts of a kind that cannot be offloaded, named. ValueError, TypeError: an argument out of range,
            named. The model is as it was in each case.
    """
    modules = find_experts(model)
    if getattr(model, "expert_offload", None) is not None:
        raise ValueError("model has its experts offloaded already: call remove() of that handle first")
    for name, module in modules.items():
        check_module(name, module)
        check_hook(name, module)
    check_options(policy, io, threads, overlap, predictor, num_guesses)
    pins = pins_of(modules, pin)
    check_stores(modules, stores)
    devices = {name: execution_device(model, module) for name, module in modules.items()}
    is_own = stores is None
    stores = stores_of(modules, devices, io) if is_own else dict(stores)
    handle = OffloadHandle(model, modules, stores, budget)
    try:
        handle.leave_device()  # before slots are made, so that both need never fit
        handle.pools = pools = make_pools(stores, devices, budget, policy, threads, num_guesses)
        guess = predictor(model) if predictor is not None else None
        check_hook_options(overlap, guess)
    except BaseException:
        handle.return_to_device(devices)
        raise
    for name, module in modules.items():
        if type(getattr(module, "_hf_hook", None)) is MissingExpertsHook:
            remove_hook_from_module(module)
        inner = getattr(module, "_hf_hook", None)
        if inner is not None:
            inner.offload, offload = False, inner.offload  # else its removal would bring every expert into memory
            remove_hook_from_module(module)
            inner.offload = offload
        hook = ExpertOffloadHook(pools[name], name, overlap=overlap, predictor=guess, pools=pools, inner=inner)
        add_hook_to_module(module, hook)
        handle.hooks[name] = hook
    handle.attach()
    try:
        for name, experts in pins.items():
            handle.pin(name, experts)
    except BaseException:
        handle.remove(load=is_own)
        raise
    return handle


def check_options(policy, io, threads, overlap, predictor, num_guesses) -> None:
    """The options of ``offload_experts`` that concern no layer."""
    policy_class(policy)
    check_choice("io", io, READERS)
    check_count("threads", threads, 0)
    check_hook_options(overlap, predictor)
    check_count("num_guesses", num_guesses, 0)
    if predictor is not None and num_guesses < 1:
        raise ValueError(f"num_guesses must be at least 1 with a predictor, got {num_guesses}")


def pins_of(modules: Mapping[str, nn.Module], pin: Mapping[str, Iterable[int]] | None) -> dict[str, list[int]]:
    """``pin`` of ``offload_experts``, checked."""
    check_type("pin", pin, (Mapping, NoneType), "experts by layer name")
    for name in pin or ():
        check_choice("pin: a layer", name, modules)
    return {name: experts_of("pin", name, experts, modules[name].num_experts) for name, experts in (pin or {}).items()}


def check_stores(modules: Mapping[str, nn.Module], stores: Mapping[str, ExpertStore] | None) -> None:
    """Raises unless ``stores`` is ``None`` or has a store for every layer and no other."""
    check_type("stores", stores, (Mapping, NoneType), "stores by layer name")
    if stores is not None and set(stores) != set(modules):
        raise ValueError(f"stores must be of the layers {list(modules)}, got {list(stores)}")
    for name, store in (stores or {}).items():
        check_type(f"stores[{name!r}]", store, ExpertStore, "an ExpertStore")


def check_hook(name: str, module: nn.Module) -> None:
    """Refuses hooks whose work would be lost."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None and type(hook) not in (AlignDevicesHook, MissingExpertsHook):
        raise ValueError(f"model: {name} has a {type(hook).__name__}, which offloading would replace: remove it first")


def execution_device(model: nn.Module, module: nn.Module) -> torch.device:
    """Where the experts compute: as their hook says, or where they are, or else where the rest of the model is."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if device is None:
        tensors = [*expert_tensors(module).values(), *model.parameters()]
        device = next((tensor.device for tensor in tensors if not tensor.is_meta), "cpu")
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def stores_of(modules: dict[str, nn.Module], devices: dict[str, torch.device], io: str) -> dict[str, ExpertStore]:
    """A store for each layer: accelerate's offloaded weights where there are any, else the module's tensors."""
    dispatched = {name: module for name, module in modules.items() if any(t.is_meta for t in expert_tensors(module).values())}
    stores = offloaded_store(dispatched, devices, io) if dispatched else {}
    for on_gpu in (False, True):
        held = {
            name: {key: tensor.detach() for key, tensor in expert_tensors(module).items()}
            for name, module in modules.items()
            if name not in dispatched and (devices[name].type == "cuda") == on_gpu
        }
        if held:
            stores.update(dict.fromkeys(held, PinnedStore(held) if on_gpu else HostStore(held)))
    return stores


def make_loader(store: ExpertStore, device: torch.device, threads: int) -> Loader:
    """What moves experts of ``store`` to ``device``.

    Raises:
        NotImplementedError: neither a CPU nor a CUDA device.
    """
    if device.type == "cpu":
        return HostLoader(store, 0 if store.host_bytes else threads)
    if device.type == "cuda":
        from .loader_cuda import CudaLoader

        return CudaLoader(store, device, threads)
    raise NotImplementedError(f"model: experts must compute on the CPU or on CUDA to be offloaded, got {device}")


def make_pools(
    stores: Mapping[str, ExpertStore],
    devices: Mapping[str, torch.device],
    budget: Budget,
    policy: str | type,
    threads: int,
    num_guesses: int,
) -> dict[str, ExpertPool]:
    """The pool of each layer; layers share one where spec, device and store are equal."""
    groups: dict = {}
    for layer, store in stores.items():
        groups.setdefault((store.spec(layer), devices[layer], store), {})[layer] = store.num_experts(layer)
    residues = {layer: store.residues(layer) if devices[layer].type == "cpu" else {} for layer, store in stores.items()}
    sizes = [slot_bytes(spec, {layer: residues[layer] for layer in layers}) for (spec, _, _), layers in groups.items()]
    pools: dict[str, ExpertPool] = {}
    for ((_, device, store), layers), num_slots in zip(groups.items(), divide(budget, list(zip(groups.values(), sizes)))):
        loader = make_loader(store, device, threads)
        max_slots = CUDA_SLOTS - num_guesses if device.type == "cuda" else num_slots
        for slab in make_slabs(layers, num_slots, max_slots):
            own = {layer: residues[layer] for layer in slab.layers}
            pool = ExpertPool(store, loader, list(slab.layers), slab.num_slots, policy, num_guesses, own)
            pools.update(dict.fromkeys(slab.layers, pool))
    return {layer: pools[layer] for layer in stores}
