"""Which modules hold experts, and which of them can be offloaded.

transformers (5.17 and later) keeps the experts of a layer in one module of fused parameters ``[num_experts, ...]`` whose
``forward(hidden_states, top_k_index, top_k_weights)`` is dispatched by ``config._experts_implementation``. Everything here
relies on that contract and on no family's name; the families that break it are refused by name.
"""

import torch
from torch import nn

from ..checks import check_type
from .spec import ExpertSpec

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
REFUSED = {
    "Llama4TextExperts": "Llama 4 multiplies every token with every expert, so none of them may be absent",
    "DbrxExperts": "DBRX keeps its experts in flat two-dimensional parameters, not in one row an expert",
}


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Qualified name to module of all fused experts of ``model``.

    Raises:
        NotImplementedError: a family whose experts cannot be offloaded, named. ValueError: there are no experts.
        TypeError: no model.
    """
    check_type("model", model, nn.Module, "a transformers model")
    found = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in REFUSED:
            raise NotImplementedError(f"model: the experts of {name} ({kind}) cannot be offloaded: {REFUSED[kind]}")
        if is_fused(module):
            found[name] = module
        elif kind.endswith("Experts") and any(p.dim() == 3 for p in module.parameters(recurse=False)):
            raise NotImplementedError(
                f"model: the experts of {name} ({kind}) are not of transformers' common kind (use_experts_implementation)"
            )
    if not found:
        raise ValueError(f"model must have fused experts of transformers >= 5.17, {type(model).__name__} has none")
    return found


def is_fused(module: nn.Module) -> bool:
    """Whether ``module`` is an experts module of transformers' common kind."""
    return all(hasattr(module, name) for name in ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate"))


def expert_tensors(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters with one row an expert; what else the module has (a norm, say) stays where it is."""
    rows = module.num_experts
    return {name: p for name, p in module._parameters.items() if p is not None and p.dim() > 1 and p.shape[0] == rows}


def check_module(name: str, module: nn.Module) -> ExpertSpec:
    """The spec of an experts module that can be offloaded.

    Raises:
        NotImplementedError: expert parallelism, or parameters that are not plain floating-point tensors.
    """
    if getattr(module, "_is_expert_parallel", False):
        raise NotImplementedError(f"model: {name} is sharded by expert parallelism; offload on one process only")
    tensors = expert_tensors(module)
    for key, tensor in tensors.items():
        if type(tensor) not in (nn.Parameter, torch.Tensor) or not tensor.is_floating_point():
            raise NotImplementedError(
                f"model: {name}.{key} must be a plain floating-point parameter, got {type(tensor).__name__} of {tensor.dtype}"
            )
    return ExpertSpec.of(tensors)


def implementation(module: nn.Module) -> str:
    """The experts implementation in force for the next call of ``module``: ``generate`` may switch it between calls.

    Raises:
        NotImplementedError: one that reads expert parameters in a way not known here.
    """
    name = getattr(getattr(module, "config", None), "_experts_implementation", None) or "eager"
    if name not in IMPLEMENTATIONS:
        raise NotImplementedError(f"experts_implementation must be one of {IMPLEMENTATIONS} under offload, got {name!r}")
    return name
