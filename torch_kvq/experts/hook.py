"""``ExpertOffloadHook``: an accelerate hook that lets an experts module compute from a pool of slots."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.hooks import ModelHook, remove_hook_from_module
from accelerate.utils import send_to_device
from torch import nn

from ..checks import check_callable, check_choice, check_flag, check_type
from .families import check_module, expert_tensors, implementation
from .paged import GatheredParameter, GroupedParameter, PagedParameter
from .pool import ExpertPool, experts_of
from .store import StoredWeights
from .waves import Remap, Routing, make_waves, run_waves, weighted_sum

Predictor = Callable[[str, torch.Tensor], Mapping[str, list[int]]]


def check_hook_options(overlap: bool | None, predictor: Callable | None) -> None:
    """Raises for an ``overlap`` that is no bool, and a ``predictor`` that cannot be called, where they are given."""
    if overlap is not None:
        check_flag("overlap", overlap)
    if predictor is not None:
        check_callable("predictor", predictor, "callable")


def check_there(layer: str, module: nn.Module) -> None:
    """Raises ``RuntimeError`` if the experts of ``module`` are nowhere: products with the meta device would give anything."""
    if any(tensor.is_meta for tensor in expert_tensors(module).values()):
        raise RuntimeError(f"{layer} must have its experts loaded or offloaded to run: they were removed, or their hook was")


class MissingExpertsHook(ModelHook):
    """Refuses calls of an experts module whose experts are nowhere."""

    def __init__(self, layer: str) -> None:
        self.layer = layer

    def pre_forward(self, module: nn.Module, *args, **kwargs) -> tuple[tuple, dict]:
        check_there(self.layer, module)
        return args, kwargs


class DetachedForward:
    """The forward of a module whose ``ExpertOffloadHook`` was taken away: ``own``, once its experts are there."""

    def __init__(self, layer: str, module: nn.Module, own: Callable[..., torch.Tensor]) -> None:
        self.layer, self.module, self.own = layer, module, own

    def __call__(self, *args, **kwargs) -> torch.Tensor:
        check_there(self.layer, self.module)
        return self.own(*args, **kwargs)


class ExpertOffloadHook(ModelHook):
    """Makes one experts module read its experts from ``pool``; attach with accelerate's ``add_hook_to_module``.

    Between calls the module's fused parameters are on the meta device, in their full shape; ``weights_map`` (accelerate's
    protocol) reads them from the store, which is how ``save_pretrained`` finds them.

    Args:
        pool: whose ``layers`` contain ``layer``.
        layer: qualified name of the module in its model.
        overlap: compute resident experts while the others load. By default on CUDA only.
        predictor: called with ``layer`` and the hidden states ``[N, H]`` of each call; gives experts by layer name that
            later calls may need. Off by default. Its pool must have slots for guesses.
        pools: of all layers, for the predictor's answers.
        inner: the accelerate hook that was there; its device handling is kept.

    Raises:
        TypeError, ValueError: an argument of another kind, named; attached to a module that has one already.
    """

    def __init__(
        self,
        pool: ExpertPool,
        layer: str,
        *,
        overlap: bool | None = None,
        predictor: Predictor | None = None,
        pools: Mapping[str, ExpertPool] | None = None,
        inner: ModelHook | None = None,
    ) -> None:
        check_type("pool", pool, ExpertPool, "an ExpertPool")
        check_choice("layer", layer, pool.layers)
        check_hook_options(overlap, predictor)
        if pools is not None:
            check_type("pools", pools, Mapping, "ExpertPools by layer name")
            for name, each in pools.items():
                check_type(f"pools[{name!r}]", each, ExpertPool, "an ExpertPool")
        self.pool, self.layer, self.predictor, self.inner = pool, layer, predictor, inner
        self.device = pool.loader.device
        self.overlap = self.device.type == "cuda" if overlap is None else overlap
        self.pools = {layer: pool} if pools is None else pools
        self.weights_map = StoredWeights(pool.store, layer)
        self._remap = Remap(pool.store.num_experts(layer), self.device)
        self.skips_read_back = self.device.type == "cuda"  # where every expert is resident, the host need not wait
        self._version = -1  # of the pool when the table was last complete
        self._experts: Any = None
        self._input_device: torch.device | None = None

    # ---- accelerate's protocol

    @property
    def no_grad(self) -> bool:
        """Whether accelerate must turn gradients off for a call."""
        return torch.is_grad_enabled()

    def init_hook(self, module: nn.Module) -> nn.Module:
        forward = module._old_forward
        if getattr(getattr(forward, "func", None), "__func__", None) is ExpertOffloadHook._forward:
            raise ValueError(f"module must have one ExpertOffloadHook, {self.layer} has one already: remove it first")
        spec = check_module(self.layer, module)
        if spec != self.pool.spec:
            raise ValueError(f"pool must hold experts of {spec}, which {self.layer} has, got {self.pool.spec}")
        for name, tensor in expert_tensors(module).items():
            module._parameters[name] = nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False)
        # accelerate looks this attribute up at every call; a hook's pre_forward could not run the module in waves.
        self._experts = forward.own if isinstance(forward, DetachedForward) else forward
        module._old_forward = functools.partial(self._forward, module)
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        module._old_forward = DetachedForward(self.layer, module, self._experts)
        return module

    def give_back(self, module: nn.Module) -> None:
        """Detaches this hook for good, from a module that gets its own tensors back."""
        remove_hook_from_module(module)
        module.forward = self._experts

    def pre_forward(self, module: nn.Module, *args, **kwargs) -> tuple[tuple, dict]:
        if getattr(self.inner, "io_same_device", False):
            self._input_device = args[0].device
        if not kwargs and all(getattr(value, "device", None) == self.device for value in args):
            return args, kwargs
        return send_to_device(args, self.device), send_to_device(kwargs, self.device)

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output if self._input_device is None else send_to_device(output, self._input_device)

    # ---- one call

    def _forward(
        self, module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if hidden_states.requires_grad:
            raise ValueError(
                "hidden_states must not require gradients: run a model with offloaded experts under torch.no_grad()"
            )
        run = self._eager if implementation(module) == "eager" else self._remapped
        with self.pool.lock:
            self.pool.stats[self.layer].calls += 1
            try:
                output = run(module, hidden_states, top_k_index, top_k_weights)
            finally:
                for name in self.pool.spec.names:
                    vars(module).pop(name, None)
                vars(module)["num_experts"] = self.pool.store.num_experts(self.layer)
        if self.predictor is not None:
            self._guess(hidden_states)
        return output

    def _stand_in(self, module: nn.Module, tensors: Mapping[str, Any]) -> None:
        """Attributes in ``vars`` are found before parameters, so the meta parameters may stay where they are."""
        vars(module).update(tensors)

    def _eager(self, module, hidden_states, top_k_index, top_k_weights):
        """The loop visits experts in ascending order: chunks of that order are brought in as it comes to them."""
        pool, layer, needed = self.pool, self.layer, Routing(top_k_index, module.num_experts).experts
        size = len(needed) if pool.fits(layer, needed) else max(1, pool.room)
        slots: dict[int, int] = {}

        def fetch(expert: int) -> dict[str, torch.Tensor]:
            if expert not in slots:
                at = needed.index(expert)
                chunk, later = needed[at : at + size], needed[at + size :]
                slots.clear()
                slots.update(zip(chunk, pool.request(layer, chunk, later=later).wait()))
                pool.stats[layer].waves += 1
            return pool.slots.one(layer, slots[expert])

        stand_ins = {name: PagedParameter(name, full, fetch) for name, full in expert_tensors(module).items()}
        self._stand_in(module, stand_ins)
        return self._experts(hidden_states, top_k_index, top_k_weights)

    def _remapped(self, module, hidden_states, top_k_index, top_k_weights):
        """Slots in place of expert ids where all experts of the call fit and nothing is gained by waves."""
        pool, layer = self.pool, self.layer
        if self.skips_read_back and self._version == pool.version and pool.is_complete:
            pool.stats[layer].full_calls += 1
            return self._from_slots(module, hidden_states, self._remap.known(top_k_index), top_k_weights)
        routing = Routing(top_k_index, module.num_experts)
        needed = routing.experts
        waves = make_waves(pool, layer, needed, self.overlap)
        if len(waves) > 1:
            in_waves = self._batched if implementation(module) == "batched_mm" else self._grouped
            return in_waves(module, hidden_states, routing, top_k_weights, waves)
        slots = self._remap(top_k_index, needed, pool.request(layer, needed).wait())
        pool.stats[layer].waves += 1
        if pool.is_complete and self._version != pool.version:
            self._remap.learn(*pool.places(layer))
            self._version = pool.version
        return self._from_slots(module, hidden_states, slots, top_k_weights)

    def _batched(self, module, hidden_states, routing, top_k_weights, waves):
        """The rows that ``batched_mm`` would gather are gathered in waves; its product is then the very same call."""
        flat = routing.flat
        rows = self.pool.spec.empty(len(flat), device=self.device)

        def gather(wave: list[int], slots: list[int]) -> None:
            pairs = routing.pairs(wave)
            wanted = self._remap(flat[pairs], wave, slots)
            for name, buffer in self.pool.slots.of(self.layer).items():
                rows[name][pairs] = buffer[wanted]

        run_waves(self.pool, self.layer, waves, gather)
        full = expert_tensors(module)
        self._stand_in(module, {name: GatheredParameter(full[name], rows.pop(name)) for name in list(rows)})
        return self._experts(hidden_states, routing.ids, top_k_weights)

    def _grouped(self, module, hidden_states, routing, top_k_weights, waves):
        """Each token-expert pair becomes a row of its own with weight 1; weighted and summed at the end."""
        flat = routing.flat
        products: list[torch.Tensor] = []

        def multiply(wave: list[int], slots: list[int]) -> None:
            pairs = routing.pairs(wave)
            ids = self._remap(flat[pairs], wave, slots)[:, None]
            rows = hidden_states[pairs // routing.ids.shape[1]]
            out = self._from_slots(module, rows, ids, rows.new_ones(len(pairs), 1))
            if not products:
                products.append(out.new_empty(len(flat), out.shape[-1]))
            products[0][pairs] = out

        run_waves(self.pool, self.layer, waves, multiply)
        return weighted_sum(products[0], top_k_weights, hidden_states.dtype)

    def _from_slots(self, module, hidden_states, slots, weights) -> torch.Tensor:
        """The module's own computation on the slots, as if they were its experts."""
        tensors = self.pool.slots.of(self.layer)
        if self.device.type == "cpu" and implementation(module) == "grouped_mm":
            tensors = {name: GroupedParameter(rows) if rows.ndim == 3 else rows for name, rows in tensors.items()}
        self._stand_in(module, tensors)
        vars(module)["num_experts"] = self.pool.num_rows
        return self._experts(hidden_states, slots, weights)

    def _guess(self, hidden_states: torch.Tensor) -> None:
        answer = self.predictor(self.layer, hidden_states)
        check_type("answer of predictor", answer, Mapping, "experts by layer name")
        for layer, experts in answer.items():
            check_choice("predictor: a layer", layer, self.pools)
            pool = self.pools[layer]
            experts = experts_of("predictor", layer, experts, pool.store.num_experts(layer))
            with pool.lock:
                pool.guess(layer, experts)
