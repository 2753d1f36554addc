"""Builds the CUDA library for the emulator: every op of it registered for the CPU, as namespace ``torch_kvq_emulated``.

Sources are copied to a build folder with seven changes: launches ``kernel<<<..>>>(..)`` call the emulator, ``extern
__shared__`` arrays point into its memory, ops are registered for the CPU, scratch is limited to 512 KB, so that small
problems are done in parts too, ``encode`` has room for eight blocks of threads only, so that its warps have several blocks of
tokens, and the kernels of attend for few rows answer only where ``KVQ_EMULATE_FEW_ROWS`` is set, else the tiles, and, where
``KVQ_EMULATE_FEW_PARTS`` is set, only problems without much scratch. A header that lies next to this file takes the place of
the one of the same name in ``csrc/cuda``.
"""

import fcntl
import functools
import os
import re
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest
import torch

from torch_kvq.ops.schemas import SCHEMAS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAMESPACE = "torch_kvq_emulated"
TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"
FLAGS = "-std=c++17 -fPIC -fvisibility=hidden -fno-threadsafe-statics -w".split()
CUDA_INCLUDE = Path("/usr/local/cuda/include")
FOLDER = ROOT / "build" / "kvq_emulated"

OPS = "attend qk pv prepare finish rotate encode encode_64 encode_128 encode_256 decode merge".split()
OPS += "decode_attend decode_near decode_64 decode_80 decode_96 decode_128 decode_192 decode_256".split()  # for few rows
PREFIXES = ("tiles", "sparse")

FEW_ROWS = "bool decode_fits(const Attention &a) {"

_LAUNCH = re.compile(r"([A-Za-z_]\w*(?:<[^;{}()]*?>)?)<<<([^;]*?)>>>\(")
_SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")


SHARE = 1 if os.environ.get("KVQ_EMULATE") == "all" else 16  # one test of so many runs in the emulator, which is slow


def skip_if_left_out(name: str) -> None:
    """Skips a test that the emulator leaves out; which ones does not change from run to run."""
    if zlib.crc32(name.encode()) % SHARE:
        pytest.skip(f"one test in {SHARE} is emulated; KVQ_EMULATE=all emulates every one")


def is_possible() -> bool:
    """Whether a C++ compiler and the headers of CUDA are here."""
    return shutil.which("g++") is not None and (CUDA_INCLUDE / "cuda_fp16.h").exists()


def translated(text: str) -> str:
    text = _LAUNCH.sub(r"emulated::Launch(\2).of(\1)(", text)
    text = _SHARED.sub(r"\1 *\2 = (\1 *)emulated::block.shared;", text)
    text = text.replace("SCRATCH_BYTES = 512 << 20", "SCRATCH_BYTES = 512 << 10")
    text = text.replace(FEW_ROWS, FEW_ROWS + '\n  if (!getenv("KVQ_EMULATE_FEW_ROWS")) return false;')
    text = text.replace("<= MAX_PART_BYTES", '<= (getenv("KVQ_EMULATE_FEW_PARTS") ? 1024 : MAX_PART_BYTES)')
    text = text.replace("CTAS<DIM> * num_multiprocessors", "8")
    return text.replace("STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CUDA, m)", f"STABLE_TORCH_LIBRARY_IMPL({NAMESPACE}, CPU, m)")


def write_sources(folder: Path) -> list[Path]:
    """The translated sources in ``folder``; only what changed is written. Returns those to compile."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {path.name: path for path in HERE.iterdir() if path.suffix in (".h", ".cuh", ".cpp")}
    sources = {path.name: path for path in (ROOT / "csrc" / "cuda").iterdir() if path.suffix in (".h", ".cuh", ".cpp", ".cu")}
    sources |= {path.name: path for path in (ROOT / "csrc" / "common").iterdir()}
    compiled = []
    for name, path in (sources | own).items():
        text, target = translated(path.read_text()), folder / name
        if not target.exists() or target.read_text() != text:
            target.write_text(text)
        chosen = path.stem in OPS or name.startswith(PREFIXES) or path.parent.name in ("common", "cuda_host")
        if path.suffix in (".cpp", ".cu") and chosen:
            compiled.append(target)
    return compiled


def level_of(path: Path) -> str:
    """How a source is optimised: what is compiled for many shapes, and run for few of them, takes half as long with -Og."""
    return "-Og" if re.match(r"decode_(\d|near)", path.name) else "-O1"


def build(folder: Path, jobs: int = 2) -> Path:
    """The library, built in ``folder`` by ninja."""
    compiled = write_sources(folder)
    torch_root = Path(torch.__file__).parent
    flags = " ".join([*FLAGS, TARGET, f"-I{folder}", f"-I{ROOT / 'csrc' / 'include'}", f"-isystem {torch_root / 'include'}"])
    flags += f" -isystem {CUDA_INCLUDE} -include emulator.h"
    output = folder / "libkvq_emulated.so"
    lines = [
        "rule compile",
        f"  command = g++ -MMD -MF $out.d {flags} $level -x c++ -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = g++ -shared $in -o $out -L{torch_root / 'lib'} -Wl,--no-as-needed -ltorch_cpu -l:libstdc++.so.6"
        " -Wl,-z,defs",
        *(f"build {path.name}.o: compile {path}\n  level = {level_of(path)}" for path in compiled),
        f"build {output.name}: link {' '.join(path.name + '.o' for path in compiled)}",
    ]
    (folder / "build.ninja").write_text("\n".join([*lines, ""]))
    done = subprocess.run(["ninja", "-C", str(folder), "-j", str(jobs), "-k", "0"], capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line or "undefined" in line]
        raise RuntimeError("the emulated library was not built:\n" + "\n".join(errors[:40]))
    return output


@functools.cache
def load():
    """The operators, ``torch.ops.torch_kvq_emulated``; one process builds at a time."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = build(FOLDER)
    library = torch.library.Library(NAMESPACE, "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    torch.ops.load_library(built)
    ops = getattr(torch.ops, NAMESPACE)
    ops.library = library  # keeps the definitions alive
    return ops
