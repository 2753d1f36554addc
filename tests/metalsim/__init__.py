"""Runs Metal compute kernels on a CPU, through the call interface of ``torch.mps.compile_shader``. See README.md."""

from .build import PROGRAMS, check, compiler
from .errors import MetalError, MetalSyntaxError, MetalValueError
from .library import ORDERS, Library, compile_shader
from .lint import lint

__all__ = [
    "ORDERS",
    "PROGRAMS",
    "Library",
    "MetalError",
    "MetalSyntaxError",
    "MetalValueError",
    "check",
    "compile_shader",
    "compiler",
    "lint",
]
