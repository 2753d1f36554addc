"""Shaders: sources put together for one configuration, compiled once a process, launched with arguments by name.

The signature of a kernel and the fields of its ``Sizes`` are read from the source itself, so each is written once.
"""

import functools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import Unserved

FOLDER = Path(__file__).resolve().parents[2] / "mps"
NUM_THREADS = 128  # of a threadgroup, kThreads of common.metal

_NAMES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat", torch.bool: "uchar", torch.int32: "uint"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_KERNEL = r"kernel void {}\((.*?)\)\s*\{{"
_BUFFER = re.compile(r"(?:device|constant)\s+(?:const\s+)?(\w+)\s*([*&])\s*(\w+)\s*\[\[buffer\((\d+)\)\]\]")
_SIZES = re.compile(r"struct Sizes \{(.*?)\};", re.DOTALL)
_FIELD = re.compile(r"(\w+)(?:\[(\d+)\])?\s*[,;]")


class Buffer(NamedTuple):
    """One argument of a kernel: ``dtype`` of a tensor, ``float`` of a number, ``None`` of the sizes."""

    name: str
    dtype: Any


@functools.cache
def _text(file: str) -> str:
    return (FOLDER / file).read_text()


def source(files: tuple[str, ...], config: dict[str, int | torch.dtype]) -> str:
    """``common.metal``, a prelude that declares ``config`` (dtypes as types, numbers as constants), then the other files."""
    prelude = [
        f"typedef {_NAMES[value]} {name};" if isinstance(value, torch.dtype) else f"constant constexpr uint {name} = {value};"
        for name, value in config.items()
    ]
    parts = [("common.metal", _text("common.metal")), ("prelude", "\n".join(prelude))]
    parts += [(file, _text(file)) for file in files]
    return "\n".join(f'#line 1 "{name}"\n{text}' for name, text in parts)


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)


def signature(text: str, kernel: str, config: dict[str, Any]) -> list[Buffer]:
    """Arguments of a kernel in the order of its buffers."""
    head = re.search(_KERNEL.format(kernel), _without_comments(text), re.DOTALL)[1]
    found = sorted((int(index), kind, sign, name) for kind, sign, name, index in _BUFFER.findall(head))
    buffers = []
    for _, kind, sign, name in found:
        dtype = config.get(kind, _DTYPES.get(kind))
        buffers.append(Buffer(name, dtype if sign == "*" else None if kind == "Sizes" else float))
    return buffers


def size_fields(text: str) -> list[tuple[str, int]]:
    """Fields of ``struct Sizes`` and how many numbers each holds; 0 for a number that is no array."""
    body = re.sub(r"\blong\b", "", _without_comments(_SIZES.search(text)[1]))
    return [(name, int(count or 0)) for name, count in _FIELD.findall(body)]


def flat(x: torch.Tensor) -> torch.Tensor:
    """The storage that a tensor spans as one contiguous vector: Metal sees no strides."""
    if x.is_contiguous():
        return x
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.as_strided((span,), (1,), x.storage_offset())


@functools.cache
def nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What is bound where a kernel reads nothing: Metal has no empty buffers."""
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=dtype, device=device)


class Shader:
    """One kernel of one configuration."""

    def __init__(self, function: Callable, kernel: str, text: str, config: dict[str, Any]):
        self._function, self.kernel = function, kernel
        self._buffers = signature(text, kernel, config)
        self._fields = size_fields(text)

    def _sizes(self, sizes: dict[str, Any]) -> list[int]:
        if sizes.keys() != {name for name, _ in self._fields}:
            wrong = sorted(sizes.keys() ^ {name for name, _ in self._fields})
            raise TypeError(f"{self.kernel}: sizes must be the fields of its Sizes, got or lacks {', '.join(wrong)}")
        numbers: list[int] = []
        for name, count in self._fields:
            value = sizes[name]
            if count and len(value) != count:
                raise TypeError(f"{self.kernel}: {name} must hold {count} numbers, got {value}")
            numbers.extend(map(int, value) if count else (int(value),))
        return numbers

    def _bound(self, buffer: Buffer, x: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        if x is None or not x.numel():
            return nothing(buffer.dtype, device)
        if x.dtype != buffer.dtype or x.device != device:
            wanted = f"{buffer.dtype} on {device}"
            raise TypeError(f"{self.kernel}: {buffer.name} must be {wanted}, got {x.dtype} on {x.device}")
        return flat(x)

    def launch(self, groups: tuple[int, ...], sizes: dict[str, Any], device: torch.device, **arguments: Any) -> None:
        """Runs ``groups`` threadgroups (x, y, z); nothing if there are none.

        Args:
            sizes: the fields of ``Sizes`` by name.
            arguments: the other buffers by name; a tensor that is absent or empty is ``None`` to the kernel, which must not
                read it.

        Raises:
            TypeError: names, dtypes, devices or lengths that differ from the source. torch checks none of them.
        """
        if 0 in groups:
            return
        names = {buffer.name for buffer in self._buffers} - {"sizes"}
        if arguments.keys() != names:
            raise TypeError(f"{self.kernel}: arguments must be {sorted(names)}, got {sorted(arguments)}")
        values: list[Any] = []
        for buffer in self._buffers:
            if buffer.dtype is None:
                values.append(self._sizes(sizes))
            elif buffer.dtype is float:
                values.append(float(arguments[buffer.name]))
            else:
                values.append(self._bound(buffer, arguments[buffer.name], device))
        x, y, z = (*groups, 1, 1)[:3]
        self._function(*values, threads=(x * NUM_THREADS, y, z), group_size=(NUM_THREADS, 1, 1))


class Shaders:
    """Compiled shaders by kernel and configuration.

    Args:
        compile_shader: makes a library of a source, default ``torch.mps.compile_shader``.
    """

    def __init__(self, compile_shader: Callable[[str], Any] | None = None):
        self._compile = compile_shader
        self._known: dict[tuple, Shader | str] = {}  # or why it cannot be
        self._lock = threading.Lock()  # torch keeps the kernels of a library in a map without one

    def get(self, kernel: str, files: tuple[str, ...], **config: int | torch.dtype) -> Shader:
        """The shader of ``kernel``, compiled if it is new.

        Raises:
            Unserved: it does not compile; it is not tried again.
        """
        key = (kernel, files, tuple(config.items()))
        found = self._known.get(key)
        if found is None:
            with self._lock:
                found = self._known.get(key) or self._make(kernel, files, config)
                self._known[key] = found
        if isinstance(found, str):
            raise Unserved(found)
        return found

    def _make(self, kernel: str, files: tuple[str, ...], config: dict[str, Any]) -> Shader | str:
        text = source(files, config)
        compile_shader = self._compile or torch.mps.compile_shader
        try:
            return Shader(getattr(compile_shader(text), kernel), kernel, text, config)
        except (SyntaxError, RuntimeError) as error:
            lines = str(error).strip().splitlines()
            reason = next((line.strip() for line in lines if "error:" in line), lines[0] if lines else repr(error))
            return f"{kernel} does not compile ({reason})"


shaders = Shaders()
