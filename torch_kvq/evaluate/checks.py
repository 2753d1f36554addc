"""What measures are given, checked."""

import torch
from torch import nn

from ..checks import check_type


def check_inputs(model: nn.Module, input_ids: torch.Tensor) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless ``model`` is one in eval mode and ``input_ids`` are ``[B, T]``."""
    check_type("model", model, nn.Module, "a causal language model")
    check_type("input_ids", input_ids, torch.Tensor, "a tensor [batch, tokens]")
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must be [batch, tokens], got shape {tuple(input_ids.shape)}")
    if input_ids.is_floating_point():
        raise ValueError(f"input_ids must be integers, got {input_ids.dtype}")
    if model.training:
        raise ValueError("model must be in eval mode, its dropout would count as error: call model.eval()")
