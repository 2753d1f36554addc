"""What part a module plays in a model, and what its activations look like."""

import re

import torch
from torch import nn

from .families import find_experts

ROLES = ("dense", "shared", "routed", "keep")
KEPT = re.compile(r"(^|\.)(gate|router|shared_expert_gate|lm_head|embed_out)(\.|$)")


def roles_of(model: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """Name to (role, module) of every experts module (``routed``) and every ``nn.Linear``: ``shared`` if it runs for every
    token beside the routed experts, ``keep`` for routers, gates and the head, else ``dense``."""
    experts = find_experts(model)
    blocks = {name.rpartition(".")[0] for name in experts}
    roles: dict[str, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        if name in experts:
            roles[name] = "routed", module
        elif isinstance(module, nn.Linear):
            roles[name] = linear_role(name, blocks), module
    return roles


def linear_role(name: str, blocks: set[str]) -> str:
    """``blocks`` are the modules that hold experts; in some families a decoder layer does, with a shared ``mlp`` beside."""
    if KEPT.search(name):
        return "keep"
    block = next((block for block in blocks if name.startswith(block + ".")), None)
    if block is not None and re.match(r"(shared|mlp\.)", name[len(block) + 1 :]):
        return "shared"
    return "dense"


class Moments:
    """Streaming raw moments in float64."""

    def __init__(self) -> None:
        self.count = 0
        self._sums = torch.zeros(4, dtype=torch.float64)

    def add(self, x: torch.Tensor) -> None:
        x = x.detach().double().flatten()
        self.count += x.numel()
        self._sums += torch.stack([x.pow(power).sum() for power in range(1, 5)]).cpu()

    def kurtosis(self) -> float:
        """Excess kurtosis, 0 for a Gaussian; nan before the first value."""
        if not self.count:
            return float("nan")
        m1, m2, m3, m4 = (self._sums / self.count).tolist()
        variance = m2 - m1**2
        if variance <= 0:
            return 0.0
        return (m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4) / variance**2 - 3
