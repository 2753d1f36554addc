"""Mixture-of-experts models whose experts do not fit: slots, stores, bits by role."""

from .hook import ExpertOffloadHook
from .loading import expert_device_map, load_with_expert_offload
from .offload import offload_experts

__all__ = ["ExpertOffloadHook", "expert_device_map", "load_with_expert_offload", "offload_experts"]
