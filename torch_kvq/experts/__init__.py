"""Mixture-of-experts models whose experts do not fit: slots, stores, bits by role."""

from .bit_plan import plan_bits
from .fitting import fit
from .gate import Gate
from .hook import ExpertOffloadHook
from .loading import expert_device_map, load_with_expert_offload
from .offload import offload_experts

__all__ = ["ExpertOffloadHook", "Gate", "expert_device_map", "fit", "load_with_expert_offload", "offload_experts", "plan_bits"]
