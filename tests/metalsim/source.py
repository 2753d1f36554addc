"""What the emulator reads in a Metal source: kernels with their parameters, and threadgroup variables."""

import re
from dataclasses import dataclass

from .errors import MetalError

POSITIONS = frozenset(
    "thread_position_in_grid thread_position_in_threadgroup threadgroup_position_in_grid threads_per_grid "
    "threads_per_threadgroup dispatch_threads_per_threadgroup threadgroups_per_grid thread_index_in_threadgroup "
    "thread_index_in_simdgroup simdgroup_index_in_threadgroup simdgroups_per_threadgroup threads_per_simdgroup".split()
)
MAX_THREADS, MAX_BUFFERS = 1024, 31

_ATTRIBUTE = r"\[\[[^\]]*\]\]"
_KERNEL = re.compile(rf"(template\s*<[^{{;]*?>\s*)?((?:{_ATTRIBUTE}\s*)*)\bkernel\s+((?:{_ATTRIBUTE}\s*)*)void\s+(\w+)\s*\(")
_VARIABLE = re.compile(r"(?<=[;{}\n])(\s*)threadgroup\s+(\w+)\s+(\w+)\s*((?:\[[^\]]*\]\s*)*);")
_VARIABLE_LEFT = re.compile(r"[^\n]*\bthreadgroup\s+\w+\s+\w+\s*(?:\[[^\]]*\]\s*)*[;=,][^\n]*")


@dataclass(frozen=True)
class Parameter:
    """``attribute`` is ``buffer`` with an ``index``, or a thread position with index -1."""

    attribute: str
    index: int
    text: str


@dataclass(frozen=True)
class Kernel:
    """A kernel as the host sees it."""

    name: str
    parameters: list[Parameter]
    max_threads: int


def closing(text: str, opening: int) -> int:
    """Index of the bracket that closes the one at ``opening``."""
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i
    raise MetalError("a bracket is not closed")


def _split(text: str) -> list[str]:
    """Parts between the commas that are in no bracket."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "(<[{") - (c in ")>]}")
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts if part.strip()]


def _parameters(kernel: str, text: str) -> list[Parameter]:
    found, following = [], 0
    for part in _split(text):
        attribute = re.search(r"\[\[\s*(\w+)\s*(?:\(\s*(\d+)\s*\))?\s*\]\]", part)
        if attribute is None or attribute[1] == "buffer":
            index = int(attribute[2]) if attribute else following
            following = index + 1
            found.append(Parameter("buffer", index, part))
        elif attribute[1] in POSITIONS:
            found.append(Parameter(attribute[1], -1, part))
        else:
            raise MetalError(f"{kernel}: unknown attribute in `{part}`")
    if following > MAX_BUFFERS:
        raise MetalError(f"{kernel}: {following} buffers, the limit is {MAX_BUFFERS}")
    return found


def find_kernels(text: str) -> list[Kernel]:
    """The kernels of a preprocessed source.

    Raises:
        MetalError: a kernel is a template, has an attribute that is not known, or too many buffers.
    """
    kernels = []
    for found in _KERNEL.finditer(text):
        name = found[4]
        if found[1]:
            raise MetalError(f"{name}: kernels that are templates are not emulated")
        limit = re.search(r"max_total_threads_per_threadgroup\s*\(\s*(\d+)", found[2] + found[3])
        parameters = _parameters(name, text[found.end() : closing(text, found.end() - 1)])
        kernels.append(Kernel(name, parameters, int(limit[1]) if limit else MAX_THREADS))
    return kernels


def check_buffers(name: str, kernels: list[Kernel]) -> None:
    """Buffers need an address space, which clang does not ask for where spaces are erased."""
    for kernel in kernels:
        for parameter in kernel.parameters:
            if parameter.attribute == "buffer" and not re.search(r"\b(device|constant)\b", parameter.text):
                raise MetalError(f"{name}: {kernel.name}: `{parameter.text}` needs `device` or `constant`")


def static_variables(text: str) -> str:
    """Threadgroup variables as static ones, which alone may have an address space in clang."""
    return _VARIABLE.sub(r"\1static threadgroup \2 \3 \4;", text)


def group_variables(text: str) -> str:
    """Threadgroup variables as references to memory that the runtime gives each threadgroup."""

    def reference(found: re.Match) -> str:
        space, kind, name, sizes = found.groups()
        made = f"*(msl_type_{name}*)msl_rt_tg_var(&msl_key_{name}, sizeof(msl_type_{name}), __builtin_LINE())"
        return f"{space}static char msl_key_{name}; typedef {kind} msl_type_{name} {sizes}; msl_type_{name}& {name} = {made};"

    text = _VARIABLE.sub(reference, text)
    left = _VARIABLE_LEFT.search(text)
    if left:
        raise MetalError(f"threadgroup variable not understood, one a line without initialiser: {left[0].strip()}")
    return text
