"""Checks and shapes for tracing. Every operator writes to ``out`` and returns nothing, so a fake only checks."""

import torch

from .schemas import FUSED_NAMES, NAMES, NAMESPACE


def _no_return(*args) -> None:
    return None


for _name in NAMES + FUSED_NAMES:
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _no_return)
