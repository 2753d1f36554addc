"""Builds the kernels of ``csrc`` into ``torch_kvq/_lib`` next to the pure-Python package: a library for the CPU and, where
nvcc is found, one for CUDA.

A library needs g++ (or ``$CXX``) and ninja and the headers of the installed torch; it holds no Python and is loaded
with ``torch.ops.load_library``, so one file serves every Python and every torch from 2.11 on. Without a compiler the
package installs all the same and runs its pure-torch reference. ``KVQ_NO_BUILD=1`` skips the build, ``KVQ_NO_CUDA=1`` that
of the CUDA library, ``KVQ_REQUIRE_BUILD=1`` makes a failure fatal. ``KVQ_CUDA_ARCHS`` names the GPUs (``80,90+ptx``).
"""

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
LIBRARY, CUDA_LIBRARY = "libkvq_cpu.so", "libkvq_cuda.so"
TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # 2.11, the oldest torch the libraries run on

COMMON_FLAGS = "-std=c++17 -O3 -fPIC -fvisibility=hidden -fno-math-errno -Wall -Wno-unknown-pragmas".split()
AVX512_FLAGS = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512".split()
BODY_FLAGS = {  # of the bodies of each architecture, beside the scalar one
    "x86_64": {
        "body_avx2.cpp": "-mavx2 -mfma -mf16c".split(),
        "body_avx512.cpp": AVX512_FLAGS,
        "body_avx512vnni.cpp": [*AVX512_FLAGS, "-mavx512vnni"],
    },
    "aarch64": {"body_neon.cpp": []},
}
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}  # other names of the same


def load_build_cuda():
    """``csrc/build_cuda.py`` as a module; a build backend does not put this folder on the path."""
    spec = importlib.util.spec_from_file_location("kvq_build_cuda", ROOT / "csrc" / "build_cuda.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_cuda = load_build_cuda()


class BuildError(RuntimeError):
    """The library cannot be built here; the message says why."""


def torch_root() -> Path:
    """The installed torch package, found without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("torch is not installed")
    return Path(list(spec.submodule_search_locations)[0])


def find_compiler() -> str:
    """``$CXX``, or the first of g++ and clang++ on the path."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    for name in names:
        if shutil.which(shlex.split(name)[0]):
            return name
    raise BuildError(f"no C++ compiler, looked for {', '.join(names)}")


def find_ninja() -> str:
    """ninja on the path or of the Python package."""
    found = shutil.which("ninja")
    if found:
        return found
    spec = importlib.util.find_spec("ninja")
    if spec is not None:
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    raise BuildError("no ninja")


def ninja_text(root: Path, output: Path, compiler: str) -> str:
    """A build.ninja to be run in ``root``: one object a source, each body with the flags of its instruction set."""
    torch = torch_root()
    machine = platform.machine().lower()
    body_flags = {"body_scalar.cpp": []} | BODY_FLAGS.get(MACHINES.get(machine, machine), {})
    mac = sys.platform == "darwin"
    # libstdc++ by its file name: a compiler with only the static one would put a second C++ runtime into the library, and
    # an error thrown here would not be caught in torch.
    linux = f"-L{torch / 'lib'} -Wl,--no-as-needed -ltorch_cpu -l:libstdc++.so.6 -Wl,-z,defs"
    link = "-undefined dynamic_lookup" if mac else linux
    lines = [
        "ninja_required_version = 1.5",
        "builddir = build/kvq",
        f"cxx = {compiler}",
        f"flags = {' '.join(COMMON_FLAGS)} {TARGET} -Icsrc/include -Icsrc/common -Icsrc/cpu",
        f"torch = -isystem {torch / 'include'}",
        "rule compile",
        "  command = $cxx -MMD -MF $out.d $flags $isa -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = $cxx -shared $in -o $out {link}",
    ]
    objects = []
    for source in sorted([*(root / "csrc" / "common").glob("*.cpp"), *(root / "csrc" / "cpu").glob("*.cpp")]):
        body = source.name.startswith("body_")
        if body and source.name not in body_flags:
            continue
        objects.append(f"build/kvq/{source.stem}.o")
        lines.append(f"build {objects[-1]}: compile {source.relative_to(root)}")
        lines.append(f"  isa = {' '.join(body_flags[source.name]) if body else '$torch'}")
    lines.append(f"build {output}: link {' '.join(objects)}")
    return "\n".join([*lines, f"default {output}", ""])


def run_ninja(root: Path, name: str, text: str) -> None:
    """Runs ``build/<name>/build.ninja`` in ``root`` with this text; raises ``BuildError``."""
    ninja = find_ninja()
    build_file = root / "build" / name / "build.ninja"
    build_file.parent.mkdir(parents=True, exist_ok=True)
    (root / "torch_kvq" / "_lib").mkdir(parents=True, exist_ok=True)
    if not build_file.exists() or build_file.read_text() != text:
        build_file.write_text(text)
    jobs = os.environ.get("MAX_JOBS") or str(max(1, min(8, os.cpu_count() or 1)))
    done = subprocess.run([ninja, "-f", str(build_file), "-j", jobs], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise BuildError("the compiler failed:\n" + (done.stdout + done.stderr)[-4000:])


def build_library(root: Path = ROOT) -> Path:
    """Builds or updates ``torch_kvq/_lib/libkvq_cpu.so`` under ``root`` and returns its path; raises ``BuildError``."""
    output = Path("torch_kvq") / "_lib" / LIBRARY
    run_ninja(root, "kvq", ninja_text(root, output, find_compiler()))
    return root / output


def build_cuda_library(root: Path = ROOT) -> Path:
    """The same for ``torch_kvq/_lib/libkvq_cuda.so``. No GPU is needed."""
    output = Path("torch_kvq") / "_lib" / CUDA_LIBRARY
    nvcc = build_cuda.find_nvcc()
    if nvcc is None:
        raise BuildError("no nvcc")
    flags = f"{' '.join(COMMON_FLAGS)} {TARGET}"
    run_ninja(root, "kvq_cuda", build_cuda.ninja_text(root, output, nvcc, find_compiler(), flags, torch_root()))
    return root / output


def is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def attempt(build, root: Path, what: str, instead: str) -> Path | None:
    """``build(root)``, or a warning that names what is missing and what will run instead."""
    try:
        return build(root)
    except (BuildError, OSError, ValueError) as error:
        if is_set("KVQ_REQUIRE_BUILD"):
            raise
        print(f"WARNING: torch_kvq: {what} kernels were not built ({error}). {instead} will run.", file=sys.stderr)
        return None


def try_build(root: Path = ROOT) -> list[Path]:
    """Builds what can be built here, says what cannot, and returns the libraries."""
    if is_set("KVQ_NO_BUILD"):
        return []
    built = [attempt(build_library, root, "CPU", "The pure-torch reference")]
    if is_set("KVQ_NO_CUDA") or build_cuda.find_nvcc() is None:
        reason = "KVQ_NO_CUDA is set" if is_set("KVQ_NO_CUDA") else "no nvcc in $CUDA_HOME, /usr/local/cuda or the path"
        print(f"torch_kvq: CUDA kernels are left out: {reason}", file=sys.stderr)
    else:
        built.append(attempt(build_cuda_library, root, "CUDA", "On a GPU Triton kernels or the reference"))
    return [path for path in built if path]


class BuildWithKernels(build_py):
    """Python files as usual, after the library was built into the source tree, where an editable install finds it."""

    def run(self):
        libraries = try_build()
        super().run()
        for library in [] if self.editable_mode else libraries:
            target = Path(self.build_lib) / "torch_kvq" / "_lib" / library.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(library, target)


class PlatformWheel(bdist_wheel):
    """A wheel for this platform and any Python 3 if it holds the library."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = is_set("KVQ_NO_BUILD")

    def get_tag(self):
        built = (ROOT / "torch_kvq" / "_lib" / LIBRARY).exists() and not self.root_is_pure
        return "py3", "none", super().get_tag()[2] if built else "any"


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
