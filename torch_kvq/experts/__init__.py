"""Mixture-of-experts models whose experts do not fit: slots, stores, bits by role."""

from .hook import ExpertOffloadHook
from .offload import offload_experts

__all__ = ["ExpertOffloadHook", "offload_experts"]
