"""Measures of what a cache costs in quality, taken with the context really packed, and of what sparse attention keeps."""

from .fidelity import Fidelity, fidelity
from .recall import attention_recall
from .recall_report import Recall, RecallReport

__all__ = ["Fidelity", "Recall", "RecallReport", "attention_recall", "fidelity"]
