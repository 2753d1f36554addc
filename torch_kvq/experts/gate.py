"""Whether experts at few bits are good enough: measured, and said."""

from dataclasses import dataclass, field

import torch
from torch import nn

from ..checks import check_number
from .bit_plan import Batch, run

MAX_TOKENS = 256


@dataclass(frozen=True)
class Gate:
    """What routed experts must keep to. A layer that does not is promoted, 2 to 3 to 4 to 8 bits.

    Args:
        max_error: relative error (Frobenius) of the output of a layer's experts on the same inputs.
        max_delta_nll: rise of the mean negative log-likelihood of the batches' own tokens, in nats a token.
    """

    max_error: float
    max_delta_nll: float

    def __post_init__(self) -> None:
        check_number("max_error", self.max_error, 0)
        check_number("max_delta_nll", self.max_delta_nll, 0)


@dataclass
class GateReport:
    """One line for each trial: bits by layer, the worst error of an output and the rise of the NLL."""

    gate: Gate
    nll: float
    trials: list[tuple[dict[str, int], dict[str, float], float]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"gate: output error <= {self.gate.max_error:g}, NLL + {self.gate.max_delta_nll:g} (exact NLL {self.nll:.4f})"]
        for bits, errors, delta in self.trials:
            counts = ", ".join(f"{list(bits.values()).count(b)} layers at {b} bits" for b in sorted(set(bits.values())))
            worst = max(errors, key=errors.__getitem__)
            passed = delta <= self.gate.max_delta_nll and errors[worst] <= self.gate.max_error
            verdict = "passed" if passed else "failed"
            lines.append(f"  {counts}: worst output error {errors[worst]:.4f} ({worst}), NLL {delta:+.4f}: {verdict}")
        return "\n".join(lines)


@torch.no_grad()
def mean_nll(model: nn.Module, batches: list[Batch]) -> float:
    """Mean negative log-likelihood of each token given those before it, in nats.

    Raises:
        ValueError: a batch without token ids, or no token has one before it.
    """
    total = count = 0.0
    for batch in batches:
        if not isinstance(batch, torch.Tensor) and "input_ids" not in batch:
            raise ValueError(f"batches must have input_ids, whose likelihood the gate measures, got {list(batch)}")
        logits = run(model, batch)
        ids = (batch if isinstance(batch, torch.Tensor) else batch["input_ids"]).to(logits.device)
        losses = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        if not isinstance(batch, torch.Tensor) and "attention_mask" in batch:
            losses = losses[batch["attention_mask"][:, 1:].flatten().bool().to(losses.device)]
        total, count = total + losses.sum().item(), count + losses.numel()
    if not count:
        raise ValueError("batches must have a token behind another, whose likelihood the gate measures, got none")
    return total / count


class ExpertOutputs:
    """What each experts module was given, on the first tokens of a batch, and answered."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, modules: dict[str, nn.Module], batch: Batch) -> None:
        inputs: dict[str, tuple[torch.Tensor, ...]] = {}

        def keep(name: str, args: tuple[torch.Tensor, ...]) -> None:
            inputs[name] = tuple(arg[:MAX_TOKENS].clone() for arg in args)

        hooks = [
            module.register_forward_pre_hook(lambda _, args, name=name: keep(name, args)) for name, module in modules.items()
        ]
        try:
            run(model, batch)
        finally:
            for hook in hooks:
                hook.remove()
        self._calls = {name: (args, modules[name](*args)) for name, args in inputs.items()}

    @torch.no_grad()
    def errors(self, modules: dict[str, nn.Module]) -> dict[str, float]:
        """Relative error of what each module answers now."""
        found = {}
        for name, module in modules.items():
            args, wanted = self._calls[name]
            off = (module(*args).float() - wanted.float()).norm()
            found[name] = (off / wanted.float().norm().clamp_min(1e-30)).item()
        return found
