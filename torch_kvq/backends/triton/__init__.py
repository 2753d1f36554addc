"""Triton kernels: the twin of every operator for GPUs without compiled kernels. Nothing here imports triton by itself.

One file an operator, with its launcher: ``rotate encode decode attend qk pv merge``; those of sparse attention are in
``sparse_query`` (queries and keys to codes and signs), ``sparse_scan``, ``sparse_select`` and ``sparse_attend``. ``checks``
and ``stores`` know the arguments, ``plan`` how the work is cut and the launch configurations, ``planes`` how words become
operands of tensor cores, ``digits`` how factors become 8-bit ones, ``rotation`` the product with a rotation, ``tiles`` what
attend, qk and pv do to a tile, ``prepare`` and ``finish`` their first and last phase.
"""

import collections
import importlib
import importlib.util

import torch

from ...ops.schemas import NAMES, NAMESPACE

OLDEST_CAPABILITY = (8, 0)

fallbacks: collections.Counter = collections.Counter()
"""Calls that the reference answered, by operator and reason."""

_MODULES = {
    "quantise_query": "sparse_query",
    "index_keys": "sparse_query",
    "sign_scores": "sparse_scan",
    "top_p_select": "sparse_select",
    "qk_selected": "sparse_attend",
    "attend_selected": "sparse_attend",
    "gather_selected": "sparse_attend",
}
_libraries: list[torch.library.Library] = []


def available() -> tuple[bool, str]:
    """Whether the kernels can run here and, if not, why not."""
    if importlib.util.find_spec("triton") is None:
        return False, "triton is not installed"
    if not torch.cuda.is_available():
        return False, "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if torch.version.hip is None and capability < OLDEST_CAPABILITY:
        return False, "compute capability {}.{} is below {}.{}".format(*capability, *OLDEST_CAPABILITY)
    return True, ""


def launcher(name: str):
    """The function that launches operator ``name`` of ``ops/schemas.py``, with its arguments; imports triton."""
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, name)}"), name)


def register() -> None:
    """Makes these kernels serve every operator on CUDA devices, once a process."""
    if _libraries:
        return
    launchers = {name: launcher(name) for name in NAMES}
    library = torch.library.Library(NAMESPACE, "IMPL")
    for name, function in launchers.items():
        library.impl(name, function, "CUDA")
    _libraries.append(library)
