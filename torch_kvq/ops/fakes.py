"""What runs for tracing and on the meta device. Every operator writes to ``out`` and returns nothing, so a fake only checks."""

from collections.abc import Callable

import torch

from .schemas import FUSED_NAMES, NAMES, NAMESPACE


def _fake(name: str) -> Callable[..., None]:
    names = [argument.name for argument in getattr(getattr(torch.ops, NAMESPACE), name).default._schema.arguments]

    def fake(*args) -> None:
        """Raises ``RuntimeError`` if only some tensors are on meta: torch calls this then instead of a kernel, in silence."""
        lists = (arg if isinstance(arg, list | tuple) else [arg] for arg in args)
        tensors = [(name, x) for name, each in zip(names, lists) for x in each if isinstance(x, torch.Tensor)]
        elsewhere = next((x.device for _, x in tensors if x.device.type != "meta"), None)
        on_meta = next((name for name, x in tensors if x.device.type == "meta"), None)
        if elsewhere is not None and on_meta is not None:
            raise RuntimeError(f"{on_meta} must be on {elsewhere} like other tensors of the call, got meta")

    return fake


for _name in NAMES + FUSED_NAMES:
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake(_name))
