"""The ninja file of the CUDA library: kernels (``*.cu``) by nvcc, op files by the C++ compiler, linked to one library.

Neither a GPU nor a torch with CUDA is needed: op files see torch's stable headers only, the CUDA runtime is linked
statically, and ``cuda/torch_cuda_stub.c`` stands in for ``libtorch_cuda.so``, which the library finds when torch loads it.
"""

import os
import shutil
from pathlib import Path

DEFAULT_ARCHS = "80,90+ptx"
KERNEL_FLAGS = "-std=c++17 -O3 --expt-relaxed-constexpr -Xcompiler=-fPIC,-fvisibility=hidden -Xptxas=-warn-spills"


def find_nvcc() -> Path | None:
    """nvcc of ``$CUDA_HOME``, of ``/usr/local/cuda`` or on the path, in this order."""
    home = os.environ.get("CUDA_HOME")
    places = [Path(home)] if home else [Path("/usr/local/cuda")]
    for place in places:
        if (place / "bin" / "nvcc").exists():
            return place / "bin" / "nvcc"
    found = None if home else shutil.which("nvcc")
    return Path(found).resolve() if found else None


def arch_flags(archs: str) -> str:
    """nvcc flags for ``KVQ_CUDA_ARCHS``: compute capabilities without the dot, ``+ptx`` behind those to embed as PTX too.

    Raises:
        ValueError: not of this form.
    """
    flags = []
    for arch in archs.split(","):
        number, _, suffix = arch.strip().partition("+")
        if not number.rstrip("af").isdigit() or suffix not in ("", "ptx"):
            raise ValueError(f"KVQ_CUDA_ARCHS must be like 80,90+ptx, got {archs!r}")
        code = f"[sm_{number},compute_{number}]" if suffix else f"sm_{number}"
        flags.append(f"-gencode=arch=compute_{number},code={code}")
    return " ".join(flags)


def ninja_text(root: Path, output: Path, nvcc: Path, compiler: str, flags: str, torch: Path) -> str:
    """A build.ninja to be run in ``root``; ``flags`` of the C++ compiler, ``torch`` the package's folder."""
    toolkit = nvcc.parent.parent
    include = "-Icsrc/include -Icsrc/common -Icsrc/cuda"
    archs = os.environ.get("KVQ_CUDA_ARCHS") or DEFAULT_ARCHS
    stub = "build/kvq_cuda/libtorch_cuda.so"
    libraries = (
        f"-L{torch / 'lib'} -L{toolkit / 'lib64'} -Wl,--no-as-needed -ltorch_cpu {stub} -l:libstdc++.so.6 -Wl,--as-needed"
        " -lcudart_static -ldl -lrt -lpthread -Wl,--exclude-libs,ALL -Wl,-z,defs"
    )
    lines = [
        "ninja_required_version = 1.5",
        "builddir = build/kvq_cuda",
        f"cxx = {compiler}",
        "rule compile",
        f"  command = $cxx -MMD -MF $out.d {flags} -DKVQ_CUDA -DUSE_CUDA {include} -isystem {torch / 'include'}"
        f" -isystem {toolkit / 'include'} -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule kernel",
        f"  command = {nvcc} -ccbin ${{cxx}} -MMD -MF $out.d {KERNEL_FLAGS} {arch_flags(archs)} {include} -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule stub",
        "  command = $cxx -shared -fPIC -x c $in -o $out -Wl,-soname,libtorch_cuda.so",
        "rule archs",
        f"  command = $cxx -x c -fPIC '-DKVQ_CUDA_ARCHS=\"{archs.replace(' ', '')}\"' -c $in -o $out",
        "rule link",
        f"  command = $cxx -shared $in -o $out {libraries}",
        f"build {stub}: stub csrc/cuda/torch_cuda_stub.c",
        "build build/kvq_cuda/archs.c.o: archs csrc/cuda/archs.c",
    ]
    objects = ["build/kvq_cuda/archs.c.o"]
    for folder, pattern, rule in (("common", "*.cpp", "compile"), ("cuda", "*.cpp", "compile"), ("cuda", "*.cu", "kernel")):
        for source in sorted((root / "csrc" / folder).glob(pattern)):
            objects.append(f"build/kvq_cuda/{source.name}.o")
            lines.append(f"build {objects[-1]}: {rule} csrc/{folder}/{source.name}")
    lines.append(f"build {output}: link {' '.join(objects)} | {stub}")
    return "\n".join([*lines, f"default {output}", ""])
