"""What ``offload_experts`` returns: counters, a table, pinning and the way back."""

import dataclasses
from collections.abc import Iterable, Mapping
from itertools import accumulate, chain

import torch
from accelerate.hooks import add_hook_to_module
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..checks import check_choice
from .budget import Budget
from .families import expert_tensors
from .hook import ExpertOffloadHook, MissingExpertsHook
from .pinned_store import PinnedStore
from .pool import ExpertPool
from .stats import OffloadStats
from .store import ExpertStore, HostStore

_MOVED = "the experts of this model are offloaded: move or convert it before offload_experts, or call handle.remove() first"

_LOADED = (
    "state_dict must be without the experts of this model, which are offloaded: call handle.remove(), load it and offload "
    "them again, got {}"
)


class OffloadHandle:
    """The offloaded experts of one model."""

    def __init__(
        self,
        model: nn.Module,
        modules: dict[str, nn.Module],
        stores: Mapping[str, ExpertStore],
        budget: Budget,
    ) -> None:
        self.model, self.modules, self.stores, self.budget = model, modules, stores, budget
        self.pools: dict[str, ExpertPool] = {}
        self.hooks: dict[str, ExpertOffloadHook] = {}
        self._hooks: list[RemovableHandle] = []
        self._trainable = {name: next(iter(expert_tensors(module).values())).requires_grad for name, module in modules.items()}
        self._device_map = getattr(model, "hf_device_map", None)

    def leave_device(self) -> None:
        """Drop tensors on a GPU that page-locked memory has copies of."""
        for name, module in self.modules.items():
            if isinstance(self.stores[name], PinnedStore):
                for key, tensor in expert_tensors(module).items():
                    module._parameters[key] = nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False)

    def return_to_device(self, devices: Mapping[str, torch.device]) -> None:
        """Undo :meth:`leave_device`, except where accelerate keeps the experts."""
        for name, module in self.modules.items():
            if isinstance(self.stores[name], PinnedStore) and not getattr(getattr(module, "_hf_hook", None), "offload", False):
                module._parameters.update(self._at_home(name, devices[name]))

    def attach(self) -> None:
        """Tell the model, transformers' ``save_pretrained`` and whoever would move, convert or load into it."""
        main = next((p.device for p in self.model.parameters() if not p.is_meta), torch.device("cpu"))
        self.model.hf_device_map = {**(self._device_map or {"": str(main)}), **dict.fromkeys(self.modules, "disk")}
        for module in self._enclosing():
            module.__dict__["_apply"] = refuse_move
            self._hooks.append(module.register_load_state_dict_pre_hook(self._refuse_experts))
        self.model.expert_offload = self

    def _enclosing(self) -> list[nn.Module]:
        """The model, the modules with experts and all between: what happens to one of them happens to experts."""
        paths = (accumulate(name.split("."), "{}.{}".format) for name in self.modules)
        return [self.model.get_submodule(name) for name in dict.fromkeys(["", *chain(*paths)])]

    def _refuse_experts(self, module: nn.Module, state_dict: Mapping[str, torch.Tensor], prefix: str, *rest) -> None:
        """Before ``module`` or anything in it is loaded from ``state_dict``, where it is called ``prefix``."""
        for name, inner in module.named_modules(prefix=prefix.rstrip(".")):
            if inner in self.modules.values():
                found = [key for key in (f"{name}.{own}".lstrip(".") for own in expert_tensors(inner)) if key in state_dict]
                if found:
                    raise RuntimeError(_LOADED.format(found[0]))

    def _check_attached(self) -> None:
        if not self.pools:
            raise RuntimeError("handle must be that of offloaded experts: they were removed, so ask it before remove()")

    def stats(self) -> OffloadStats:
        """Counters since the beginning or :meth:`reset_stats`, in all and by layer.

        Raises:
            RuntimeError: the experts were removed, as of all methods.
        """
        self._check_attached()
        layers = {name: self.pools[name].stats[name] for name in self.modules}
        pools = {id(pool): pool for pool in self.pools.values()}.values()
        return OffloadStats.of(
            layers,
            resident_bytes=sum(pool.nbytes for pool in pools),
            host_bytes=sum(store.host_bytes for store in set(self.stores.values())),
            num_slots=sum(pool.num_slots for pool in pools),
            num_experts=sum(pool.num_experts for pool in pools),
        )

    def reset_stats(self) -> None:
        """Zero the counters; what is resident stays."""
        self._check_attached()
        for name in self.modules:
            stats = self.pools[name].stats[name]
            stats.__init__()

    def report(self) -> "OffloadReport":
        """A table for reading: ``print(handle.report())``."""
        kinds = {name: store.kind for name, store in self.stores.items()}
        devices = {name: str(pool.loader.device) for name, pool in self.pools.items()}
        return OffloadReport(self.stats(), kinds, devices)

    def pin(self, layer: str, experts: Iterable[int]) -> None:
        """Load experts of a layer and keep them resident.

        Raises:
            ValueError: no such layer or expert, or its pool would be left without a free slot. TypeError: no integers.
        """
        self._check_attached()
        check_choice("layer", layer, self.pools)
        self.pools[layer].pin(layer, experts)

    def remove(self, load: bool = True, close: bool = True) -> None:
        """Give the model back as it was: its own tensors, or accelerate's hook, and no slots.

        A model whose experts were never loaded (``load_with_expert_offload``) gets them loaded, unless ``load`` is False: then
        they stay on the meta device and the model cannot run until experts are offloaded again or set. ``close`` ends the
        stores, too.

        Raises:
            RuntimeError: they were removed before, or another hook was added to theirs.
            OSError: experts could not be read; they stay offloaded, and this can be tried again.
        """
        if not self.pools:
            raise RuntimeError("handle.remove() must be called once, the experts were removed before")
        hooks = self.hooks
        for name, hook in hooks.items():
            if (held := getattr(self.modules[name], "_hf_hook", hook)) is not hook:
                raise RuntimeError(f"{name} must have no other hook than that of offload_experts, got {type(held).__name__}")
        loaded = {name: self._at_home(name, hook.device) for name, hook in hooks.items() if load and hook.inner is None}
        for name, hook in hooks.items():
            module = self.modules[name]
            hook.give_back(module)
            if hasattr(hook.predictor, "close"):
                hook.predictor.close()
            if hook.inner is not None:
                add_hook_to_module(module, hook.inner)
            elif not load:
                add_hook_to_module(module, MissingExpertsHook(name))
            module._parameters.update(loaded.pop(name, {}))
        for module in self._enclosing():
            module.__dict__.pop("_apply", None)
        for hook in self._hooks:
            hook.remove()
        for attribute in ("expert_offload", "hf_device_map"):
            self.model.__dict__.pop(attribute, None)
        if self._device_map is not None:
            self.model.hf_device_map = self._device_map
        for store, loader in {(self.stores[name], self.pools[name].loader) for name in self.modules}:
            loader.close()
            if close:
                store.close()
        self.pools.clear()
        self.hooks.clear()

    def _at_home(self, name: str, device: torch.device) -> dict[str, nn.Parameter]:
        """All experts of a layer, as its module had them."""
        store, trains = self.stores[name], self._trainable[name]
        return {key: nn.Parameter(store.whole(name, key).to(device), requires_grad=trains) for key in store.spec(name).names}


def refuse_move(*args, **kwargs):
    """In place of ``_apply`` of a module, through which ``to``, ``cuda``, ``half`` and the like go."""
    raise RuntimeError(_MOVED)


@dataclasses.dataclass(frozen=True)
class OffloadReport:
    """Counters with where each layer's experts come from and where they compute."""

    stats: OffloadStats
    kinds: Mapping[str, str]
    devices: Mapping[str, str]

    def __str__(self) -> str:
        stats = self.stats
        lines = [
            f"{stats.num_slots} of {stats.num_experts} experts resident at most, {stats.resident_bytes / 1e6:,.1f} MB on "
            f"{', '.join(sorted(set(self.devices.values())))}; the rest in {', '.join(sorted(set(self.kinds.values())))}"
            + (f" ({stats.host_bytes / 1e6:,.1f} MB)" if stats.host_bytes else "")
        ]
        if stats.host_bytes and set(self.devices.values()) == {"cpu"} and set(self.kinds.values()) == {HostStore.kind}:
            lines.append("nothing is saved: experts and slots are in the same memory")
        width = max(len(name) for name in [*stats.layers, "all layers"])
        lines.append(
            f"{'':{width}} {'calls':>7} {'hits':>8} {'misses':>8} {'hit rate':>8} {'evicted':>8} {'MB read':>9} {'stall s':>8}"
        )
        for name, layer in [*stats.layers.items(), ("all layers", stats)]:
            hit_rate = f"{layer.hit_rate:.3f}" if layer.hits + layer.misses else "-"
            lines.append(
                f"{name:{width}} {layer.calls:7d} {layer.hits:8d} {layer.misses:8d} {hit_rate:>8} {layer.evictions:8d} "
                f"{layer.bytes_read / 1e6:9.1f} {layer.stall_seconds:8.2f}"
            )
        return "\n".join(lines)
