"""Loads the compiled CPU kernels and chooses their instruction set.

Precision follows the dtype of the query: float32 is answered in float32 by the best set of the machine. Attention of
bfloat16 and float16 queries is answered by ``avx512vnni`` where the machine has it: products of 16-bit integers, twice as
fast and exact to about 5e-4. ``KVQ_CPU_ISA`` names one set for every dtype: ``avx512vnni``, ``avx512vpopcnt`` (``avx512``
that counts the signs of an index by words), ``avx512``, ``avx2``, ``neon``, ``scalar``, or ``reference`` to load nothing
and run the pure-torch reference.
"""

import dataclasses
import os
import warnings
from pathlib import Path

import torch

LIBRARY = Path(__file__).resolve().parents[1] / "_lib" / "libkvq_cpu.so"
VARIABLE = "KVQ_CPU_ISA"
REFERENCE = "reference"
AUTO = "auto"  # precision follows the dtype of the query
INTEGER = "avx512vnni"
ISAS = (INTEGER, "avx512vpopcnt", "avx512", "avx2", "neon", "scalar")  # fastest first
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of queries


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
        if wanted not in available_isas():
            raise RuntimeError(f"{VARIABLE} must be one of this machine, {', '.join(available_isas())}, got {wanted!r}")
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


def cpu_isa(dtype: torch.dtype = torch.float32) -> str:
    """What answers attention queries of ``dtype``: one of ``ISAS`` or ``reference``. All other work is served as float32 is.

    Raises:
        ValueError: dtype is not float32, bfloat16 or float16.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    return torch.ops.torch_kvq._cpu_isa.default(dtype != torch.float32) if _state.loaded else REFERENCE


def set_cpu_isa(name: str) -> str:
    """Chooses the kernels of all calls from now on, for tests and measurements; returns the choice before.

    Args:
        name: one of ``available_isas()`` for every dtype of query, or ``auto``.

    Raises:
        RuntimeError: the machine does not have it, or the kernels are not loaded.
    """
    if not _state.loaded:
        raise RuntimeError(f"name must be {REFERENCE} while the kernels are not loaded ({_state.reason}), got {name!r}")
    return torch.ops.torch_kvq._cpu_choice.default(name)


def available_isas() -> tuple[str, ...]:
    """The instruction sets of this machine that the loaded library holds, fastest first."""
    return tuple(torch.ops.torch_kvq._cpu_isas.default().split(",")) if _state.loaded else ()


def skipped(op: str = "attend") -> dict[str, str]:
    """What is faster for ``op`` than what answers float32, and why each does not; ``INTEGER`` is one of attend."""
    if not _state.loaded:
        return {"compiled kernels": _state.reason}
    used, choice = cpu_isa(), torch.ops.torch_kvq._cpu_choice.default("")
    reasons = {}
    for name in ISAS[: ISAS.index(used)]:
        if name not in available_isas():
            reasons[name] = "not on this machine"
        elif choice != AUTO:
            reasons[name] = f"{choice} was asked for"
        elif op == "attend":
            reasons[name] = f"16-bit integers, for float32 only if {VARIABLE}={name}"
    return reasons
