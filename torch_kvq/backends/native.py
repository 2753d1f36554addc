"""Loads the compiled CPU kernels and chooses their instruction set.

``KVQ_CPU_ISA`` overrides the choice: ``avx512vnni``, ``avx512``, ``avx2``, ``scalar``, or ``reference`` to load nothing
and run the pure-torch reference. Without it the best set of the machine that computes in float32 is used; ``avx512vnni``
multiplies 16-bit integers, twice as fast and exact to about 1e-3, and has to be asked for.
"""

import dataclasses
import os
import warnings
from pathlib import Path

import torch

LIBRARY = Path(__file__).resolve().parents[1] / "_lib" / "libkvq_cpu.so"
VARIABLE = "KVQ_CPU_ISA"
REFERENCE = "reference"
INTEGER = "avx512vnni"
ISAS = (INTEGER, "avx512", "avx2", "scalar")  # fastest first


@dataclasses.dataclass
class _State:
    attempted: bool = False
    loaded: bool = False
    reason: str = "load() was not called"


_state = _State()


def load(library: Path | None = None) -> bool:
    """Loads the kernels once a process and returns whether they serve the CPU.

    Args:
        library: the file to load, default ``torch_kvq/_lib/libkvq_cpu.so``.

    Raises:
        ValueError: ``KVQ_CPU_ISA`` is none of the known names.
        RuntimeError: ``KVQ_CPU_ISA`` asks for an instruction set that this machine or installation does not have.

    Without a usable library it warns once that the reference runs, and why.
    """
    if _state.attempted:
        return _state.loaded
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", REFERENCE, *ISAS):
        raise ValueError(f"{VARIABLE} must be one of {', '.join((*ISAS, REFERENCE))}, got {wanted!r}")
    if wanted == REFERENCE:
        _state.reason = f"{VARIABLE}={REFERENCE}"
    else:
        _load_library(LIBRARY if library is None else Path(library))
    if _state.loaded and wanted:
        set_cpu_isa(wanted)
    elif wanted in ISAS:
        raise RuntimeError(f"{VARIABLE}={wanted} needs the compiled kernels: {_state.reason}")
    elif not _state.loaded and wanted != REFERENCE:
        warnings.warn(
            f"torch_kvq runs its pure-torch reference, which is slow: {_state.reason}. Reinstall with g++ and ninja, "
            f"or set {VARIABLE}={REFERENCE} to silence this.",
            stacklevel=2,
        )
    _state.attempted = True
    return _state.loaded


def _load_library(library: Path) -> None:
    if not library.exists():
        _state.reason = f"the kernels were not built ({library.name} is missing)"
        return
    try:
        torch.ops.load_library(library)
    except OSError as error:
        _state.reason = f"{library.name} cannot be loaded ({error})"
        return
    _state.loaded, _state.reason = True, ""


def loaded() -> bool:
    """Whether the compiled kernels are loaded."""
    return _state.loaded


def cpu_isa() -> str:
    """The instruction set that serves the CPU: one of ``ISAS`` or ``reference``."""
    return torch.ops.torch_kvq._cpu_isa.default("") if _state.loaded else REFERENCE


def set_cpu_isa(name: str) -> str:
    """Chooses the instruction set of all calls from now on, for tests and measurements; returns the one used before.

    Raises:
        RuntimeError: the machine does not have it, or the kernels are not loaded.
    """
    if not _state.loaded:
        raise RuntimeError(f"name must be {REFERENCE} while the kernels are not loaded ({_state.reason}), got {name!r}")
    before = cpu_isa()
    torch.ops.torch_kvq._cpu_isa.default(name)
    return before


def available_isas() -> tuple[str, ...]:
    """The instruction sets of this machine that the loaded library holds, fastest first."""
    return tuple(torch.ops.torch_kvq._cpu_isas.default().split(",")) if _state.loaded else ()


def skipped() -> dict[str, str]:
    """Faster implementations than the one in use, and why each does not run."""
    if not _state.loaded:
        return {"compiled kernels": _state.reason}
    used, available = cpu_isa(), available_isas()
    asked = bool(os.environ.get(VARIABLE))
    reasons = {}
    for name in ISAS[: ISAS.index(used)]:
        if name not in available:
            reasons[name] = "not on this machine"
        elif name == INTEGER and not asked:
            reasons[name] = f"16-bit integers, for {VARIABLE}={INTEGER} only"
        else:
            reasons[name] = f"{used} was asked for"
    return reasons
