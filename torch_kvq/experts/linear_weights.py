"""Dense and shared linear layers at 4 or 8 bits, by torchao."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class QuantisedLinear:
    """What became of a linear layer: its bits, stored bytes, relative error of its weights and why the bits differ, if so."""

    bits: int
    num_bytes: int
    error: float
    note: str


def check_torchao() -> None:
    """Raises ImportError with the remedy if torchao is missing."""
    if importlib.util.find_spec("torchao") is None:
        raise ImportError(
            "the plan has linear layers, which torchao quantises, and it is not installed: pip install '.[weights]', "
            "or apply the plan with roles=('routed',)"
        )


def quantise_linears(model: nn.Module, bits: Mapping[str, int]) -> dict[str, QuantisedLinear]:
    """Replace the weights of the linear layers named by torchao's, in place.

    4 bits need CUDA and an input width that is a multiple of 128; where they are not to be had a layer gets 8 bits and a note.

    Raises:
        ImportError: torchao is missing. ValueError: bits other than 4 and 8. RuntimeError: torchao left a layer as it was.
    """
    check_torchao()
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    if wrong := {name: count for name, count in bits.items() if count not in (4, 8)}:
        raise ValueError(f"bits of linear layers must be 4 or 8, got {wrong}")
    results = {}
    for name, wanted in bits.items():
        module = model.get_submodule(name)
        note = "" if wanted == 8 else why_not_four(module)
        used = 8 if note else wanted
        before = module.weight.detach()
        config = Int8WeightOnlyConfig() if used == 8 else Int4WeightOnlyConfig(group_size=128)
        quantize_(module, config, filter_fn=lambda found, _, module=module: found is module)
        if module.weight.data is before or type(module.weight.data) is torch.Tensor:
            raise RuntimeError(f"torchao left {name} ({tuple(before.shape)}) as it was")
        after = module.weight.dequantize().to(before.dtype)
        error = ((after - before).float().norm() / before.float().norm().clamp_min(1e-30)).item()
        results[name] = QuantisedLinear(used, stored_bytes(module.weight), error, note)
    return results


def why_not_four(module: nn.Linear) -> str:
    """Empty where 4 bits are possible."""
    if module.weight.device.type != "cuda":
        return "8 bits: 4 need CUDA"
    return "" if module.in_features % 128 == 0 else "8 bits: width is no multiple of 128"


def stored_bytes(weight: torch.Tensor) -> int:
    """Bytes of the tensors inside a torchao tensor, which itself reports those of the dtype it stands for."""
    names, _ = weight.__tensor_flatten__()
    return sum(getattr(weight, name).nbytes for name in names)
