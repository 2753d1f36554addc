"""The build of the CPU kernels and their loader: symbols, a machine without a compiler, the environment's override."""

import importlib.util
import re
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

from torch_kvq.backends import native

ROOT = Path(__file__).resolve().parents[1]
OBJECTS = ROOT / "build" / "kvq"
# Undefined symbols a library may have: torch's C shims, and the C and C++ run-time libraries.
ALLOWED = re.compile(
    r"(aoti_torch|torch)_\w+|_Z.*|_Unwind_\w+|__cxa_\w+|__gxx_personality_v0|__tls_get_addr|__gmon_start__|__stack_chk_fail"
    r"|_ITM_\w+|__libc_\w+|__cpu_\w+|__popcount\w+|mem\w+|str\w+|free|malloc|aligned_alloc|abort|(exp|log|sqrt|tanh)f"
)


@pytest.fixture(scope="module")
def build():
    """``setup.py`` as a module."""
    spec = importlib.util.spec_from_file_location("kvq_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def symbols(path, *options, nm="nm"):
    """Pairs (type, name) that nm prints."""
    if not shutil.which(nm):
        pytest.skip(f"no {nm}")
    text = subprocess.run([nm, "-P", *options, str(path)], check=True, capture_output=True, text=True).stdout
    return [(line.split()[1], line.split()[0]) for line in text.splitlines()]


@pytest.mark.parametrize("isa", native.ISAS)
def test_bodies_have_no_mergeable_symbols(isa):
    path = OBJECTS / f"body_{isa}.o"
    if not path.exists():
        pytest.skip(f"{path.name} was not built here")
    found = symbols(path)
    assert [name for kind, name in found if kind in "WVuiw"] == []
    defined = [name for kind, name in found if kind in "TDRB"]
    assert defined == [f"_ZN3kvq{len(isa) + 8}{isa}_kernelsE"], "a body exports its table and nothing else"


def test_the_library_needs_only_stable_symbols():
    if not native.LIBRARY.exists():
        pytest.skip("the kernels were not built")
    names = {name.split("@")[0] for kind, name in symbols(native.LIBRARY, "-D", "--undefined-only")}
    assert any(name.startswith("aoti_torch_") for name in names)
    assert [name for name in names if not ALLOWED.fullmatch(name)] == []
    torch_names = [name for name in names if re.match(r"_ZNK?(2at|3c10|5torch)", name)]
    assert torch_names == [], "C++ symbols of torch bind the library to one version"


X86 = {"avx2", "avx512", "avx512vnni", "avx512vpopcnt", "scalar"}
ARM = {"neon", "scalar"}


@pytest.mark.parametrize(
    "machine, isas", [("x86_64", X86), ("AMD64", X86), ("aarch64", ARM), ("arm64", ARM), ("riscv64", {"scalar"})]
)
def test_each_architecture_builds_its_bodies(build, monkeypatch, machine, isas):
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    text = build.ninja_text(ROOT, Path("kernels.so"), "g++")
    assert set(re.findall(r"compile csrc/cpu/body_(\w+)\.cpp", text)) == isas <= set(native.ISAS)
    assert ("-mavx" in text) == (isas is X86)


@pytest.fixture
def tree(tmp_path):
    """A copy of what the build reads."""
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    return tmp_path


@pytest.mark.parametrize("compiler", ["/nonexistent/g++", "false"])
def test_a_machine_without_a_compiler_gets_a_warning(build, tree, monkeypatch, capsys, compiler):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.delenv("KVQ_REQUIRE_BUILD", raising=False)
    monkeypatch.delenv("KVQ_NO_BUILD", raising=False)
    assert build.try_build(tree) == []
    assert not list(tree.rglob("*.so"))
    error = capsys.readouterr().err
    assert "WARNING: torch_kvq: CPU kernels were not built" in error and "reference" in error
    monkeypatch.setenv("KVQ_REQUIRE_BUILD", "1")
    with pytest.raises(build.BuildError):
        build.try_build(tree)


def test_the_build_can_be_skipped(build, tree, monkeypatch):
    monkeypatch.setenv("KVQ_NO_BUILD", "1")
    assert build.try_build(tree) == []
    assert not (tree / "build").exists()


@pytest.fixture
def fresh(monkeypatch):
    """A loader that has not loaded anything."""
    monkeypatch.setattr(native, "_state", native._State())
    monkeypatch.delenv(native.VARIABLE, raising=False)
    return monkeypatch


def test_an_unknown_instruction_set_is_an_error(fresh):
    fresh.setenv(native.VARIABLE, "avx1024")
    with pytest.raises(ValueError, match="KVQ_CPU_ISA must be one of avx512vnni, .*, reference, got 'avx1024'"):
        native.load()


@pytest.mark.skipif(not native.LIBRARY.exists(), reason="the kernels were not built")
def test_the_instruction_set_can_be_asked_for(fresh):
    native.load()
    before = native.set_cpu_isa(native.AUTO)
    fresh.setattr(native, "_state", native._State())
    fresh.setenv(native.VARIABLE, "scalar")
    assert native.load() is True and native.cpu_isa() == "scalar"
    here = native.available_isas()
    expected = {name: "scalar was asked for" if name in here else "not on this machine" for name in native.ISAS[:-1]}
    assert native.skipped() == expected
    native.set_cpu_isa(before)


@pytest.mark.skipif(not native.LIBRARY.exists(), reason="the kernels were not built")
def test_an_instruction_set_of_other_machines_is_an_error(fresh):
    native.load()
    other = "avx2" if "neon" in native.available_isas() else "neon"
    fresh.setattr(native, "_state", native._State())
    fresh.setenv(native.VARIABLE, other)
    with pytest.raises(RuntimeError, match=f"KVQ_CPU_ISA must be one of this machine, .*scalar, got '{other}'"):
        native.load()


def test_an_instruction_set_without_kernels_is_an_error(fresh, tmp_path):
    fresh.setenv(native.VARIABLE, "scalar")
    with pytest.raises(RuntimeError, match="KVQ_CPU_ISA=scalar needs the compiled kernels: .*missing"):
        native.load(tmp_path / "none.so")


def test_the_reference_can_be_asked_for(fresh):
    fresh.setenv(native.VARIABLE, "reference")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.load() is False
    assert native.cpu_isa() == "reference" and native.skipped() == {"compiled kernels": "KVQ_CPU_ISA=reference"}
    with pytest.raises(RuntimeError, match="name must be reference"):
        native.set_cpu_isa("avx2")


@pytest.mark.parametrize("content, reason", [(None, "missing"), (b"not a library", "cannot be loaded")])
def test_a_missing_or_broken_library_warns_once(fresh, tmp_path, content, reason):
    path = tmp_path / "libkvq_cpu.so"
    if content is not None:
        path.write_bytes(content)
    with pytest.warns(UserWarning, match=f"pure-torch reference.*{reason}"):
        assert native.load(path) is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.load(path) is False
    assert reason in native.skipped()["compiled kernels"]
