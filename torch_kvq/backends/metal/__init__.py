"""Serves MPS devices by the shaders of ``torch_kvq/mps``, compiled by torch when an operator first needs them.

Elsewhere nothing is imported, registered or compiled. ``KVQ_MPS=reference`` leaves MPS devices to the pure-torch reference;
``KVQ_MPS=metal`` makes it an error if the shaders cannot serve. A call that no shader answers is answered by the reference
and counted: ``fallbacks()``.
"""

import collections
import dataclasses
import importlib
import os
import warnings
from collections.abc import Callable

import torch

from ...layout import MAX_HEAD_DIM
from ...ops.schemas import NAMES, NAMESPACE, SPARSE_NAMES

VARIABLE = "KVQ_MPS"
METAL, REFERENCE = CHOICES = ("metal", "reference")
FAST_MATH = "PYTORCH_MPS_FAST_MATH"

_MODULES = dict(
    rotate="codec", encode="codec", decode="codec", attend="attention", qk="attention", pv="attention", merge="merge",
    quantise_query="index", index_keys="index", sign_scores="index", top_p_select="select", qk_selected="selected",
    attend_selected="selected", gather_selected="selected",
)  # fmt: skip


@dataclasses.dataclass
class _State:
    attempted: bool = False
    served_by: str = REFERENCE
    reason: str = "load() was not called"
    fallbacks: dict[str, collections.Counter] = dataclasses.field(default_factory=dict)


_state = _State()
_libraries: list[torch.library.Library] = []


class Unserved(Exception):
    """No shader answers this call; the message says why."""


def require_served(head_dim: int) -> None:
    """Raises ``Unserved`` for head dims that rotations do not have."""
    if head_dim % 4 or not 4 <= head_dim <= MAX_HEAD_DIM:
        raise Unserved(f"a head dim of {head_dim} is no multiple of 4 from 4 to {MAX_HEAD_DIM}")


def load() -> str:
    """Registers the shaders if there is an MPS device, once a process; returns what serves such devices.

    Raises:
        ValueError: ``KVQ_MPS`` is none of the known names.
        RuntimeError: ``KVQ_MPS=metal`` and the shaders cannot serve.
    """
    if _state.attempted:
        return _state.served_by
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", *CHOICES):
        raise ValueError(f"{VARIABLE} must be one of {', '.join(CHOICES)}, got {wanted!r}")
    _state.reason = f"{VARIABLE}={wanted}" if wanted == REFERENCE else _why_not()
    if not _state.reason:
        register()
        _state.served_by = METAL
    elif wanted == METAL:
        raise RuntimeError(f"{VARIABLE}={wanted} cannot be: {_state.reason}")
    _state.attempted = True
    return _state.served_by


def _why_not() -> str:
    if not torch.backends.mps.is_available():
        return "no MPS device"
    if os.environ.get(FAST_MATH, "0") not in ("", "0"):
        return f"{FAST_MATH} is set, which gives up the infinities of masks"
    return ""


def launcher(name: str) -> Callable[..., None]:
    """The function that answers operator ``name`` of ``ops/schemas.py``, by shaders or, counted, by the reference."""
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    reference = importlib.import_module(f"torch_kvq.ops.{'sparse_reference' if name in SPARSE_NAMES else 'reference'}")
    by_shaders, by_reference = getattr(module, name), getattr(reference, name)

    def serve(*arguments) -> None:
        try:
            by_shaders(*arguments)
        except Unserved as reason:
            _count(name, str(reason))
            by_reference(*arguments)

    return serve


def register() -> None:
    """Makes the launchers serve every operator for dispatch key ``MPS``, once a process; no device is needed for that."""
    if _libraries:
        return
    library = torch.library.Library(NAMESPACE, "IMPL")
    for name in NAMES:
        library.impl(name, launcher(name), "MPS")
    _libraries.append(library)


def _count(name: str, reason: str) -> None:
    reasons = _state.fallbacks.setdefault(name, collections.Counter())
    if not reasons[reason]:
        warnings.warn(f"torch_kvq.{name} runs its pure-torch reference, which is slow: {reason}", stacklevel=3)
    reasons[reason] += 1


def served_by() -> str:
    """What serves MPS devices: one of ``CHOICES``."""
    return _state.served_by


def fallbacks() -> dict[str, dict[str, int]]:
    """Calls that the reference answered because no shader did: operator to reason to number."""
    return {name: dict(reasons) for name, reasons in _state.fallbacks.items()}


def skipped(op: str) -> dict[str, str]:
    """Why the shaders do not answer ``op``, or did not answer some calls of it."""
    if _state.served_by == REFERENCE:
        return {METAL: _state.reason}
    reasons = fallbacks().get(op, {})
    return {METAL: ", ".join(f"{count} x {reason}" for reason, count in reasons.items())} if reasons else {}
