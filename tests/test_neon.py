"""The bodies without torch: those of AArch64, built by a cross compiler and run in an emulator, and those of this machine.

Both by one program, ``csrc/tests/compare_bodies.cpp``, which compares every body with the scalar one.
"""

import platform
import shutil
import subprocess

import pytest
from test_kernels_build import OBJECTS, ROOT, build, symbols  # noqa: F401

from torch_kvq.backends import native

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
DRIVER = "csrc/tests/compare_bodies.cpp"
FUNCTIONS = ("convert", "rotate", "encode", "decode", "attend", "qk", "pv", "merge")
INCLUDE = ("-Icsrc/include", "-Icsrc/common", "-Icsrc/cpu")


@pytest.fixture(scope="module")
def cross():
    """The cross compiler."""
    for tool, package in ((COMPILER, "g++-aarch64-linux-gnu"), (EMULATOR, "qemu-user")):
        if not shutil.which(tool):
            pytest.skip(f"no {tool}: Debian's {package} has it")
    return COMPILER


@pytest.fixture(scope="module")
def bodies(build, cross, tmp_path_factory):  # noqa: F811
    """Objects of the scalar and NEON bodies for AArch64, with the flags of the real build."""
    folder = tmp_path_factory.mktemp("aarch64")
    sources = {"body_scalar.cpp": []} | build.BODY_FLAGS["aarch64"]
    objects = [folder / source.replace(".cpp", ".o") for source in sources]
    commands = [
        [cross, *build.COMMON_FLAGS, *INCLUDE, *flags, "-c", f"csrc/cpu/{source}", "-o", str(path)]
        for (source, flags), path in zip(sources.items(), objects)
    ]
    run_all(commands)
    return objects


def run_all(commands):
    """Runs commands side by side and shows what a failed one printed."""
    started = [subprocess.Popen(c, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    for process, printed in [(process, process.communicate()[0]) for process in started]:
        assert process.returncode == 0 and "warning" not in printed, printed


def compare(compiler, objects, program, *run):
    """Links the comparison, runs it and returns what it printed, by (body, function)."""
    options = ("-std=c++17", "-O2", "-Wall", "-Wno-unknown-pragmas", *INCLUDE)
    run_all([[compiler, *options, "-static", DRIVER, *map(str, objects), "-o", str(program)]])
    done = subprocess.run([*run, str(program)], capture_output=True, text=True)
    assert done.returncode == 0 and "all agree with scalar" in done.stdout, done.stdout + done.stderr
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()[:-1]]
    return {(body, function): rest for body, function, rest in lines}


@pytest.mark.slow
def test_neon_agrees_with_scalar_and_exports_its_table_only(bodies, cross, tmp_path, capsys):
    found = symbols(bodies[1], nm=COMPILER.replace("g++", "nm"))
    assert [name for kind, name in found if kind in "WVuiw"] == []
    assert [name for kind, name in found if kind in "TDRB"] == ["_ZN3kvq12neon_kernelsE"]
    results = compare(cross, bodies, tmp_path / "compare_bodies", EMULATOR)
    with capsys.disabled():
        print("", *(f"{' '.join(key)} {rest}" for key, rest in results.items()), sep="\n")
    assert list(results) == [("neon", function) for function in FUNCTIONS]


@pytest.mark.slow
def test_the_operators_compile_for_aarch64(build, cross):  # noqa: F811
    sources = [*(ROOT / "csrc" / "common").glob("*.cpp"), *(ROOT / "csrc" / "cpu").glob("*.cpp")]
    sources = [path for path in sources if not path.name.startswith("body_")]
    options = (*build.COMMON_FLAGS, build.TARGET, *INCLUDE, "-isystem", str(build.torch_root() / "include"), "-fsyntax-only")
    assert len(sources) > 5
    run_all([[cross, *options, str(path)] for path in sources])


def test_bodies_of_this_machine_agree_with_scalar(build, tmp_path):  # noqa: F811
    if not native.LIBRARY.exists() or not (OBJECTS / "body_scalar.o").exists():
        pytest.skip("the kernels were not built here")
    machine = platform.machine().lower()
    sources = ["body_scalar.cpp", *build.BODY_FLAGS.get(build.MACHINES.get(machine, machine), {})]
    objects = [OBJECTS / source.replace(".cpp", ".o") for source in sources]
    results = compare(build.find_compiler(), objects, tmp_path / "compare_bodies")
    expected = [isa for isa in native.available_isas() if isa != "scalar"]
    assert list(results) == [(isa, function) for isa in expected for function in FUNCTIONS]
