"""Type checks and builds of Metal sources by clang 19, kept in ``build/metalsim`` by the hash of all that goes in."""

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from .errors import MetalError, MetalSyntaxError
from .lint import lint
from .source import Kernel, check_buffers, find_kernels, group_variables, static_variables

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / "build" / "metalsim"
VERSIONS = ((310, "c++14"), (400, "c++17"))  # of Metal, on macOS 14 and 26, and the C++ each is
FLAGS = (
    f"-x c++ -nostdinc -isystem {HERE / 'include'} -fno-exceptions -fno-rtti -fsigned-char -ffp-contract=off "
    "-Xclang -ffloat16-excess-precision=none -Xclang -cl-single-precision-constant "
    "-Wno-unknown-attributes -Wno-duplicate-decl-specifier -Wno-user-defined-literals"
).split()
STRICT = (
    "-Wall -Wextra -Werror -Wdouble-promotion -Wno-unused-parameter -Wno-unused-function -Wno-unused-const-variable "
    "-Wno-unused-variable"
).split()
BUILDS = {  # how the kernels are instrumented, and what the runtime is told of it
    None: ([], []),
    "loads": (["-fsanitize-coverage=func,trace-loads", "-fno-builtin"], []),
    "thread": (["-fsanitize=thread"], ["-DMSL_TSAN"]),
    "address": (["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"], ["-DMSL_ASAN"]),
}
PROGRAMS = ("thread", "address")  # sanitizers, which cannot be loaded into a process that runs already


@functools.cache
def compiler() -> str | None:
    """clang 19 or later, which has arithmetic on bfloat, with its sanitizers; ``None`` if there is none."""
    name = os.environ.get("METALSIM_CLANG", "clang++-19")
    if shutil.which(name) is None:
        return None
    linked = [name, "-x", "c++", "-fsanitize=thread", "-", "-o", os.devnull]
    return name if subprocess.run(linked, input="int main() {}", capture_output=True, text=True).returncode == 0 else None


def _clang(arguments: list, text: str | None = None) -> str:
    done = subprocess.run([compiler(), *map(str, arguments)], input=text, capture_output=True, text=True)
    if done.returncode:
        raise MetalSyntaxError(done.stderr)
    return done.stdout


def preprocess(source: str, name: str, version: int) -> str:
    """Macros of the source applied; types and functions of Metal stay as they are written."""
    source = re.sub(r"^[ \t]*#\s*include\s*<metal_stdlib>[^\n]*", "", source, flags=re.MULTILINE)
    defines = ["-D__METAL__=1", f"-D__METAL_VERSION__={version}"]
    return _clang(["-E", "-x", "c++", "-nostdinc", *defines, "-"], f'#line 1 "{name}"\n{source}')


def check(source: str, name: str = "shader.metal") -> list[str]:
    """Lints, then checks types with real address spaces, for the oldest and newest Metal; returns the names of the kernels.

    Raises:
        MetalError: with what is wrong and where.
    """
    found = lint(source)
    if found:
        raise MetalError("\n".join(f"{name}:{each}" for each in found))
    for version, standard in VERSIONS:
        text = preprocess(source, name, version)
        kernels = find_kernels(text)
        check_buffers(name, kernels)
        uses = "".join(f"static const auto msl_use_{i} = &{kernel.name};\n" for i, kernel in enumerate(kernels))
        old = ["-Werror=c++17-extensions"] if standard == "c++14" else []
        flags = [*FLAGS, f"-std={standard}", "-DMSL_CHECK", *STRICT, *old, "-fsyntax-only", "-"]
        _clang(flags, f"#include <metal_stdlib>\n{static_variables(text)}\n{uses}")
    return [kernel.name for kernel in kernels]


def _glue(kernels: list[Kernel]) -> str:
    """Entry points of a build: ``msl_describe`` and ``msl_run``."""
    lines, entries = ["#include <msl_glue.h>"], []
    for i, kernel in enumerate(kernels):
        parameters = ", ".join(f'{{"{p.attribute}", {p.index}}}' for p in kernel.parameters)
        lines.append(f"MSL_KERNEL({i}, ({kernel.name}), {parameters})")
        entries.append(f'MSL_ENTRY({i}, "{kernel.name}", {kernel.max_threads})')
    lines.append(f"static const msl::entry msl_entries[] = {{{', '.join(entries)}}};")
    lines.append("#include <msl_entries.h>")
    return "\n".join(lines)


def _hash(*parts) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


@functools.cache
def _tool() -> str:
    return _hash(*(path.read_text() for path in sorted([*HERE.glob("*.[ch]*"), *HERE.glob("include/*")])))


def _once(output: Path, make) -> Path:
    """``output``, made by ``make(folder, path)`` in a folder of its own unless it is there; processes may race."""
    if not output.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            made = Path(folder) / "made"
            make(Path(folder), made)
            os.replace(made, output)
    return output


def _object(kind: str | None, file: str) -> Path:
    flags = ["-std=c++17", "-O2", "-fPIC", "-fno-builtin", *BUILDS[kind][1]]
    output = CACHE / f"{_hash(_tool(), compiler(), flags, file)}.o"
    return _once(output, lambda _, made: _clang([*flags, "-c", HERE / file, "-o", made]))


def build_runtime() -> Path:
    """The library that all libraries of kernels share."""
    parts = [_object(None, "runtime.cpp"), "-lm", "-lstdc++"]
    return _once(CACHE / f"{_hash(_tool(), compiler())}.so", lambda _, made: _clang(["-shared", *parts, "-o", made]))


def build(source: str, name: str = "shader.metal", kind: str | None = None) -> Path:
    """A shared library that holds the kernels of ``source``; of the kinds ``PROGRAMS`` a program that runs them.

    Raises:
        MetalSyntaxError: clang rejects it.
    """
    version, standard = VERSIONS[0]
    text = preprocess(source, name, version)
    kernels = find_kernels(text)
    unit = f"#include <metal_stdlib>\n{group_variables(text)}\n{_glue(kernels)}\n"
    instrumented = BUILDS[kind][0]
    flags = [*FLAGS, "-Wno-c++17-extensions", f"-std={standard}", "-w", "-O1", "-gline-tables-only", "-fPIC", *instrumented]
    program = kind in PROGRAMS

    def make(folder: Path, made: Path) -> None:
        _clang([*flags, "-c", "-o", folder / "kernels.o", "-"], unit)
        parts = [_object(kind, file) for file in ("runtime.cpp", "runner.cpp")] if program else []
        link = [*instrumented, "-lstdc++"] if program else ["-shared"]
        _clang([folder / "kernels.o", *parts, "-o", made, *link, "-lm"])

    return _once(CACHE / f"{_hash(unit, _tool(), compiler(), flags)}{'' if program else '.so'}", make)
