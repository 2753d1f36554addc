"""The host side: libraries and kernels that are called as those of ``torch.mps.compile_shader``, with tensors of the CPU.

Where a Mac would silently misread an argument, a call raises.
"""

import ctypes
import functools
import os
import re
import shutil
import struct
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import torch

from .build import PROGRAMS, build, build_runtime
from .errors import MetalError, MetalValueError

ORDERS = (0, 1, 2, 3)  # of threads: ascending, descending, two shuffles
_TYPES = {
    torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat", torch.uint8: "uchar", torch.int8: "char",
    torch.int16: "short", torch.int32: "int", torch.int64: "long", torch.bool: "bool",
}  # fmt: skip
_CASTS = {"int32": "i", "int16": "h", "int8": "b", "uint8": "B", "fp16": "e"}
_SANITIZER_OPTIONS = "detect_leaks=0:detect_stack_use_after_return=0:halt_on_error=1:report_atomic_races=0"
_running = threading.Lock()  # the runtime has one state


class Parameter(NamedTuple):
    """A line of ``msl_describe``; ``kind`` p pointer, r reference, v position."""

    attribute: str
    index: int
    kind: str
    is_const: bool
    type: str
    size: int
    align: int


def _dims(name: str, value) -> list[int] | None:
    if value is None:
        return None
    sizes = [value] if isinstance(value, int) else list(value)
    if not 0 < len(sizes) < 4:
        raise MetalError(f"{name} must have 1 to 3 dims, got {value}")
    return sizes


def _scalar(index: int, value, cast: str | None) -> tuple[bytes, str]:
    """Bytes that torch would pass for a number or list, and their code of ``struct``. bool is an int, as in torch."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    kinds = {int if isinstance(v, int) else type(v) for v in values}
    if kinds not in ({int}, {float}):
        raise MetalError(f"argument {index}: unsupported {value!r}")
    code = _CASTS[cast] if cast else "q" if kinds == {int} else "f"
    if code not in "fe" and kinds == {float}:
        raise MetalError(f"argument {index}: {value!r} would be truncated by arg_casts={cast!r}: name it in a dict")
    return struct.pack(f"<{len(values)}{code}", *values), code


def _run(command: list, symbols: bool = False) -> subprocess.CompletedProcess:
    """Runs an instrumented program; to start the tool that names source lines takes longer than most runs."""
    tool = shutil.which("addr2line") if symbols else None
    options = f"{_SANITIZER_OPTIONS}:external_symbolizer_path={tool or ''}"
    environment = os.environ | {"ASAN_OPTIONS": options, "TSAN_OPTIONS": options}
    return subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)


class Launch(NamedTuple):
    """One call of a kernel; ``loaded``: bytes loaded from each buffer, of libraries that count them."""

    kernel: str
    grid: list[int]
    group: list[int]
    group_bytes: int  # of threadgroup memory
    loaded: list[int]


class Kernel:
    """A kernel of a library. Every call runs once in each order, and all orders must give the same bits."""

    thread_execution_width = 32

    def __init__(self, library: "Library", index: int, name: str, max_threads: int):
        self._library, self._index, self.name, self.max_threads_per_threadgroup = library, index, name, max_threads
        self.parameters: list[Parameter] = []

    @property
    def written(self) -> list[int]:
        """Indices of the buffers that are not const."""
        return [p.index for p in self.parameters if not p.is_const]

    def _where(self, parameter: Parameter) -> str:
        return f"{self.name}: buffer({parameter.index}) `{parameter.type}{'*' if parameter.kind == 'p' else '&'}`"

    def _check_tensor(self, parameter: Parameter, x: torch.Tensor) -> None:
        where, base = self._where(parameter), re.sub(r"\d$", "", parameter.type)
        same = {_TYPES[x.dtype], "u" + _TYPES[x.dtype]} | ({"uchar"} if x.dtype == torch.bool else set())
        if base not in same and parameter.type != "struct":
            raise MetalError(f"{where} bound to a {x.dtype} tensor")
        if not x.is_contiguous():
            raise MetalError(f"{where} bound to a tensor that is not contiguous: Metal sees only its storage")
        if x.data_ptr() % parameter.align:
            raise MetalError(f"{where} bound to a tensor that is not {parameter.align}-byte aligned")
        if not x.numel():
            raise MetalError(f"{where} bound to an empty tensor, which has no buffer")

    def _scalar_bytes(self, parameter: Parameter, value, cast: str | None) -> bytes:
        raw, code = _scalar(parameter.index, value, cast)
        floats, wanted = code in "fe", re.sub(r"\d$", "", parameter.type) in ("float", "half", "bfloat")
        fits = parameter.kind == "p" or len(raw) == parameter.size
        if not fits or (parameter.type != "struct" and floats != wanted):
            got = f"{len(raw)} bytes of {'float' if floats else 'int'}"
            raise MetalError(
                f"{self._where(parameter)} ({parameter.size} bytes) bound to {value!r}, which is {got} without arg_casts"
            )
        if not parameter.is_const:
            raise MetalError(f"{self._where(parameter)} is writable but bound to a number")
        if len(raw) > 4096:
            raise MetalError(f"{self._where(parameter)} bound to {len(raw)} bytes, the limit is 4096")
        return raw

    def _grid(self, tensors: list, threads, group_size) -> tuple[list[int], list[int]]:
        threads, group = _dims("threads", threads), _dims("group_size", group_size)
        threads = threads or [tensors[0].numel()]
        limit = self.max_threads_per_threadgroup
        group = group or [min(threads[0], limit) if len(threads) == 1 else limit] + [1] * (len(threads) - 1)
        if len(group) != len(threads):
            raise MetalError(f"group_size must have as many dims as threads, got {group} for {threads}")
        threads, group = ((sizes + [1, 1])[:3] for sizes in (threads, group))
        if group[0] * group[1] * group[2] > limit:
            raise MetalValueError(f"Threadgroup size exceeds {limit} limit")
        if min(threads + group) <= 0:
            raise MetalError(f"{self.name}: empty grid {threads}, which Metal rejects: return early")
        return threads, group

    def __call__(self, *args, threads=None, group_size=None, arg_casts=None):
        buffers = {p.index: p for p in self.parameters if p.index >= 0}
        if sorted(buffers) != list(range(len(args))):
            raise MetalError(f"{self.name}: {len(args)} arguments given, the kernel has buffers {sorted(buffers)}")
        bound = []
        for i, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                self._check_tensor(buffers[i], value)
                bound.append(value)
            else:
                cast = arg_casts if isinstance(arg_casts, str) else (arg_casts or {}).get(i)
                bound.append(self._scalar_bytes(buffers[i], value, cast))
        grid, group = self._grid([x for x in bound if isinstance(x, torch.Tensor)], threads, group_size)
        with _running:
            self._run_orders(bound, grid, group)
            self._library.note(self, grid, group, len(bound))

    def _run_orders(self, bound: list, grid: list[int], group: list[int]) -> None:
        written, first = self.written, None
        before = {i: bound[i].clone() for i in written}
        for order in self._library.orders:
            for i in written:
                bound[i].copy_(before[i])
            self._library.run(self, bound, grid, group, order)
            now = {i: bound[i].clone() for i in written}
            first = first or now
            for i in written:
                differ = (first[i].view(torch.uint8) != now[i].view(torch.uint8)).sum().item()
                if differ:
                    raise MetalError(
                        f"{self.name}: buffer({i}) depends on the order of threads ({differ} bytes): a barrier is missing"
                    )


@functools.cache
def _shared_runtime() -> ctypes.CDLL:
    """The runtime, once a process: each has stacks for a threadgroup, and a process only so many mappings."""
    runtime = ctypes.CDLL(str(build_runtime()), ctypes.RTLD_GLOBAL)
    runtime.msl_rt_error.restype = ctypes.c_char_p
    runtime.msl_rt_tg_bytes.restype = runtime.msl_rt_loaded.restype = ctypes.c_size_t
    return runtime


class Library:
    """Kernels as attributes. ``launches`` lists every call."""

    def __init__(self, path: Path, kind: str | None, orders: tuple[int, ...]):
        self.path, self.kind, self.orders = path, kind, orders
        self.launches: list[Launch] = []
        if kind in PROGRAMS:
            self._loaded = None
            text = subprocess.run([path], capture_output=True, text=True, check=True).stdout
        else:
            self._runtime = _shared_runtime()
            self._loaded = ctypes.CDLL(str(path))
            self._loaded.msl_describe.restype = ctypes.c_char_p
            text = self._loaded.msl_describe().decode()
        self._kernels: dict[str, Kernel] = {}
        for line in text.splitlines():
            name, *fields = line.split()
            if not line.startswith(" "):
                kernel = self._kernels[name] = Kernel(self, len(self._kernels), name, int(fields[0]))
                continue
            index, kind, is_const, kind_of, size, align = fields
            kernel.parameters.append(Parameter(name, int(index), kind, is_const == "1", kind_of, int(size), int(align)))

    def __getattr__(self, name: str) -> Kernel:
        try:
            return self.__dict__["_kernels"][name]
        except KeyError:
            raise MetalError(f"Failed to create function state object for: {name}") from None

    def __dir__(self):
        return sorted(self._kernels)

    def run(self, kernel: Kernel, bound: list, grid: list[int], group: list[int], order: int) -> None:
        """One run in one order; ``bound`` holds tensors and bytes."""
        if self._loaded is None:
            return self._run_program(kernel, bound, grid, group, order)
        kept = [None if isinstance(x, torch.Tensor) else ctypes.create_string_buffer(x, len(x)) for x in bound]
        addresses = [x.data_ptr() if k is None else ctypes.addressof(k) for x, k in zip(bound, kept)]
        pointers = (ctypes.c_void_p * len(bound))(*addresses)
        sizes = [x.nbytes if isinstance(x, torch.Tensor) else len(x) for x in bound]
        self._runtime.msl_rt_watch(len(bound), pointers, (ctypes.c_size_t * len(bound))(*sizes))
        if self._loaded.msl_run(kernel._index, pointers, (ctypes.c_uint32 * 3)(*grid), (ctypes.c_uint32 * 3)(*group), order):
            raise MetalError(f"{kernel.name}: {self._runtime.msl_rt_error().decode()}")

    def note(self, kernel: Kernel, grid: list[int], group: list[int], num_buffers: int) -> None:
        """Lists a call that has run."""
        counted = self._loaded is not None
        group_bytes = self._runtime.msl_rt_tg_bytes() if counted else 0
        loaded = [self._runtime.msl_rt_loaded(i) for i in range(num_buffers)] if counted else []
        self.launches.append(Launch(kernel.name, grid, group, group_bytes, loaded))

    def _run_program(self, kernel: Kernel, bound: list, grid: list[int], group: list[int], order: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / str(i) for i in range(len(bound))]
            for file, x in zip(files, bound):
                file.write_bytes(ctypes.string_at(x.data_ptr(), x.nbytes) if isinstance(x, torch.Tensor) else x)
            command = [self.path, *map(str, (kernel._index, *grid, *group, order)), *files]
            if _run(command).returncode:
                raise MetalError(f"{kernel.name}: {_run(command, symbols=True).stderr[:4000]}")
            for i in kernel.written:
                raw = files[i].read_bytes()
                ctypes.memmove(bound[i].data_ptr(), raw, len(raw))


def compile_shader(source: str, *, name="shader.metal", kind: str | None = None, orders=ORDERS) -> Library:
    """As ``torch.mps.compile_shader``.

    Args:
        name: of the file, for messages.
        kind: ``thread`` or ``address``: each launch runs in a program instrumented by that sanitizer, which fails at the first
            finding. ``loads``: bytes that kernels load are counted.
        orders: of threads, each of which is run; 0 ascending, 1 descending, more are shuffles.

    Raises:
        MetalSyntaxError: clang rejects the source.
    """
    return Library(build(source, name, kind), kind, tuple(orders))
