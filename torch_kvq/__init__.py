"""Compressed KV caches for Hugging Face transformers, with attention computed on the packed data."""

from ._requirements import check_requirements

check_requirements()

from . import backends, ops  # noqa: E402
from .attention import interface  # noqa: E402
from .caches.isoquant import IsoQuantCache  # noqa: E402
from .caches.rabitq import RaBitQSparseCache  # noqa: E402
from .experts import ExpertOffloadHook, fit, load_with_expert_offload, offload_experts, plan_bits  # noqa: E402

for _backend in (backends.native, backends.cuda, backends.metal):
    with backends.doctor_reports():
        _backend.load()
interface.register()

__version__ = "0.1.0"
__all__ = [
    "ExpertOffloadHook",
    "IsoQuantCache",
    "RaBitQSparseCache",
    "backends",
    "fit",
    "load_with_expert_offload",
    "offload_experts",
    "ops",
    "plan_bits",
]
