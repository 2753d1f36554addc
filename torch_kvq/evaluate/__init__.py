"""Measures of what a cache costs in quality, taken with the context really packed."""

from .fidelity import Fidelity, fidelity

__all__ = ["Fidelity", "fidelity"]
