"""Chooses what serves CUDA devices: the compiled kernels, else their Triton twin, else the pure-torch reference.

``KVQ_CUDA`` overrides the choice: ``native``, ``triton`` or ``reference``. One of them is registered and no more, because of
two kernels for one dispatch key the later wins in silence. To ask for kernels where there is no CUDA device is an error.
"""

import ctypes
import dataclasses
import mmap
import os
import re
import warnings
from pathlib import Path

import torch

LIBRARY = Path(__file__).resolve().parents[1] / "_lib" / "libkvq_cuda.so"
VARIABLE = "KVQ_CUDA"
NOT_BUILT = f"the kernels were not built ({LIBRARY.name} is missing)"
NATIVE, TRITON, REFERENCE = CHOICES = ("native", "triton", "reference")  # fastest first
LEAST_CAPABILITY = (8, 0)
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


@dataclasses.dataclass
class _State:
    attempted: bool = False
    served_by: str = REFERENCE
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)


_state = _State()


def load() -> str:
    """Registers the fastest kernels that can serve the CUDA devices here, once a process, and returns their name.

    Raises:
        ValueError: ``KVQ_CUDA`` is none of the known names.
        RuntimeError: ``KVQ_CUDA`` asks for kernels that cannot serve.

    If there is a CUDA device but no compiled kernels for it, it warns once what runs instead, and why.
    """
    if _state.attempted:
        return _state.served_by
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", *CHOICES):
        raise ValueError(f"{VARIABLE} must be one of {', '.join(CHOICES)}, got {wanted!r}")
    if not (missing := no_device()):
        _state.attempted = True
        _choose(wanted)
    elif wanted in (NATIVE, TRITON):
        raise RuntimeError(f"{VARIABLE}={wanted} cannot be: {missing}")
    _state.attempted = True
    return _state.served_by


def no_device() -> str:
    """Why there is no CUDA device to serve, or an empty string."""
    if torch.cuda.is_available():
        return ""
    return "no CUDA device is visible" if torch.backends.cuda.is_built() else "this torch is without CUDA"


def build() -> str:
    """What was built for CUDA devices, in words; the library need not be one that loads here."""
    if not LIBRARY.exists():
        return NOT_BUILT
    if not LIBRARY.stat().st_size:
        return f"{LIBRARY.name} is empty"
    with LIBRARY.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        archs = re.search(rb"KVQ_CUDA_ARCHS=([\w,+]+)\0", content)
        return f"{LIBRARY.name} was built {f'with {archs[0][:-1].decode()}' if archs else 'for GPUs that it does not name'}"


def _choose(wanted: str) -> None:
    for name, register in ((NATIVE, load_native), (TRITON, _register_triton)):
        reason = f"{VARIABLE}={wanted}" if wanted not in ("", name) else register()
        if not reason:
            _state.served_by = name
            break
        _state.skipped[name] = reason
    if wanted and wanted != _state.served_by:
        raise RuntimeError(f"{VARIABLE}={wanted} cannot be: {_state.skipped[wanted]}")
    if not wanted and _state.served_by != NATIVE:
        slow = ", which is slow" if _state.served_by == REFERENCE else ""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in _state.skipped.items())
        warnings.warn(
            f"On CUDA devices torch_kvq runs its {_state.served_by} kernels{slow} ({reasons}). Reinstall where nvcc is found, "
            f"or set {VARIABLE}={_state.served_by} to silence this.",
            stacklevel=4,
        )


def least_capability() -> tuple[int, int] | None:
    """The lowest compute capability of the CUDA devices, asked of the driver so that torch does not initialise CUDA yet."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, found = ctypes.c_int(), []
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return None
    for index in range(count.value):
        values = ctypes.c_int(), ctypes.c_int()
        for value, attribute in zip(values, (_MAJOR, _MINOR)):
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, index)
        found.append((values[0].value, values[1].value))
    return min(found, default=None)


def load_native(library: Path | None = None) -> str:
    """Loads the compiled kernels, which registers them; returns why that cannot be, or an empty string.

    Args:
        library: the file to load, default ``torch_kvq/_lib/libkvq_cuda.so``.
    """
    library = LIBRARY if library is None else library
    if torch.version.hip is not None:
        return "this torch is for ROCm"
    if not library.exists():
        return NOT_BUILT
    capability = least_capability()
    if capability is not None and capability < LEAST_CAPABILITY:
        return "compute capability {}.{} is below {}.{}".format(*capability, *LEAST_CAPABILITY)
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return f"{library.name} cannot be loaded ({error.__cause__ or error})"
    return ""


def _register_triton() -> str:
    """The same for the Triton kernels."""
    try:
        from . import triton

        usable, reason = triton.available()
        if usable:
            triton.register()
        return reason
    except (ImportError, AttributeError) as error:
        return str(error)


def served_by() -> str:
    """What serves CUDA devices: one of ``CHOICES``."""
    return _state.served_by


def skipped() -> dict[str, str]:
    """Faster implementations than the one in use, and why each does not run."""
    return dict(_state.skipped)
