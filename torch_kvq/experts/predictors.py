"""Guesses which experts the next layer will need, so that they load while other things are computed. All off by default.

A predictor is made from the model and called with a layer's name and the hidden states that its experts were given; it
answers experts by layer name. To add one, write such a class; pass it as ``offload_experts(predictor=...)``. Published
measurements disagree on whether guessing pays, and on machines where the processors share one memory it does not: measure
with ``benchmarks/experts.py --predictors``.
"""

import re

import torch
from torch import nn

from .families import find_experts

MAX_TOKENS = 8  # longer inputs need most experts anyhow
ATTENTION = ("self_attn", "linear_attn", "attn", "attention", "mixer", "mamba")


class NextRouter:
    """Asks the next layer's router about this layer's hidden states, as if attention changed little."""

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self.layers = list(find_experts(model))
        self.routers = {layer: router_of(modules, layer) for layer in self.layers}

    @torch.no_grad()
    def __call__(self, layer: str, hidden_states: torch.Tensor) -> dict[str, list[int]]:
        """``hidden_states [N, H]``; nothing for the last layer and for more than ``MAX_TOKENS`` tokens."""
        index = self.layers.index(layer) + 1
        if index == len(self.layers) or len(hidden_states) > MAX_TOKENS:
            return {}
        following = self.layers[index]
        answer = self.routers[following].forward(self.features(layer, hidden_states))  # unseen by hooks that record routing
        ids = next(tensor for tensor in answer if not tensor.is_floating_point())
        return {following: ids.unique().tolist()}

    def features(self, layer: str, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the router is asked about, ``[N, H]``."""
        return hidden_states

    def close(self) -> None:
        """Leave the model; called by the handle's ``remove``."""


class AttentionResidual(NextRouter):
    """AttnRes of RotaryQuant, equation 13: the attention outputs of all layers so far, weighted by their similarity.

    ``h = sum_n softmax_n(sim(hidden, B_n)) B_n`` with the cosine as ``sim``. The paper measured no gain in hits and a loss of
    10.6 to 11.2 % in speed on unified memory.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._outputs: list[torch.Tensor] = []
        blocks = attention_blocks(model)
        self._hooks = [
            block.register_forward_hook(lambda _, args, output, index=index: self._keep(index, output))
            for index, block in enumerate(blocks)
        ]
        if not blocks:
            raise ValueError(f"model must have attention modules named one of {ATTENTION}")

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, index: int, output: torch.Tensor | tuple) -> None:
        if index == 0:
            self._outputs.clear()
        output = output if isinstance(output, torch.Tensor) else output[0]
        if output.shape[:-1].numel() <= MAX_TOKENS:
            self._outputs.append(output.detach().reshape(-1, output.shape[-1]))

    def features(self, layer: str, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self._outputs:
            return hidden_states
        blocks = torch.stack(self._outputs, dim=1)  # [N, layers, H]
        alike = nn.functional.cosine_similarity(hidden_states[:, None].float(), blocks.float(), dim=-1)
        return (alike.softmax(dim=1)[..., None].to(blocks.dtype) * blocks).sum(dim=1)


PREDICTORS = {"next_router": NextRouter, "attention_residual": AttentionResidual}


def router_of(modules: dict[str, nn.Module], layer: str) -> nn.Module:
    """The router beside an experts module.

    Raises:
        NotImplementedError: there is none under a name known here.
    """
    block = layer.rpartition(".")[0]
    for name in ("gate", "router"):
        if f"{block}.{name}" in modules:
            return modules[f"{block}.{name}"]
    raise NotImplementedError(f"model: found no router beside {layer}")


def attention_blocks(model: nn.Module) -> list[nn.Module]:
    """The attention or recurrent module of every decoder layer, in order."""
    pattern = re.compile(rf"(^|.*\.)layers\.\d+\.({'|'.join(ATTENTION)})$")
    return [module for name, module in model.named_modules() if pattern.fullmatch(name)]
