"""What needs no GPU of the CUDA backend: which kernels are chosen and what is said, and the library as it was built."""

import re
import subprocess
import warnings

import pytest
import torch
from test_kernels_build import ROOT, build, symbols  # noqa: F401

from torch_kvq import backends
from torch_kvq.backends import cuda
from torch_kvq.ops.schemas import FUSED_NAMES, NAMES

# Undefined symbols the library may have: torch's C shims, and the C and C++ run-time libraries.
SHIMS = re.compile(r"(aoti_torch|torch)_\w+")
TORCH_SYMBOLS = re.compile(r"_ZNK?(2at|3c10|5torch)|^cuda|^cu[A-Z]")

needs_library = pytest.mark.skipif(not cuda.LIBRARY.exists(), reason="the CUDA library was not built: no nvcc")


@pytest.fixture
def choose(monkeypatch):
    """``load()`` as if nothing was loaded, on a machine with a CUDA device, with these answers of the two kernels."""

    def run(native="", triton="", wanted=None, available=True):
        registered = []

        def answer(name, reason):
            return lambda: reason if reason else registered.append(name) or ""

        monkeypatch.setattr(cuda, "_state", cuda._State())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(cuda, "load_native", answer("native", native))
        monkeypatch.setattr(cuda, "_register_triton", answer("triton", triton))
        monkeypatch.delenv(cuda.VARIABLE, raising=False)
        if wanted is not None:
            monkeypatch.setenv(cuda.VARIABLE, wanted)
        name = cuda.load()
        assert name == cuda.served_by() == cuda.load()
        assert registered == ([] if name == cuda.REFERENCE else [name]), "two kernels for one key: the later wins in silence"
        return name

    return run


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_compiled_kernels_come_first(choose, silent):
    assert choose() == "native" and cuda.skipped() == {}


def test_without_a_device_nothing_is_loaded_or_said(choose, silent):
    assert choose(available=False) == "reference" and cuda.skipped() == {}


@pytest.mark.parametrize("wanted", ["native", "triton"])
def test_kernels_that_are_asked_for_without_a_device_are_an_error(choose, silent, wanted):
    with pytest.raises(
        RuntimeError, match=f"KVQ_CUDA={wanted} cannot be: (no CUDA device is visible|this torch is without CUDA)"
    ):
        choose(available=False, wanted=wanted)
    assert choose(available=False, wanted="reference") == "reference"


def test_triton_serves_where_no_library_was_built(choose):
    with pytest.warns(UserWarning, match="runs its triton kernels .native: no library.. Reinstall where nvcc is found"):
        assert choose(native="no library") == "triton"
    assert cuda.skipped() == {"native": "no library"}


def test_the_reference_serves_where_nothing_else_does(choose):
    message = "reference kernels, which is slow .native: no library; triton: not installed."
    with pytest.warns(UserWarning, match=message):
        assert choose(native="no library", triton="not installed") == "reference"


@pytest.mark.parametrize("wanted, skipped", [
    ("native", {}),
    ("triton", {"native": "KVQ_CUDA=triton"}),
    ("reference", {"native": "KVQ_CUDA=reference", "triton": "KVQ_CUDA=reference"}),
])  # fmt: skip
def test_the_kernels_can_be_asked_for(choose, silent, wanted, skipped):
    assert choose(wanted=wanted) == wanted and cuda.skipped() == skipped


def test_kernels_that_cannot_serve_are_an_error_if_asked_for(choose):
    with pytest.raises(RuntimeError, match="KVQ_CUDA=native cannot be: no library"):
        choose(native="no library", wanted="native")
    with pytest.raises(ValueError, match="KVQ_CUDA must be one of native, triton, reference, got 'fast'"):
        choose(wanted="fast")


def test_the_report_names_what_serves_each_operator(choose):
    with pytest.warns(UserWarning):
        choose(native="no library", triton="not installed")
    report = backends.report()
    assert [row.op for row in report.rows if row.device == "cuda"] == [*NAMES, *FUSED_NAMES]
    assert report["attend", "cuda"].served_by == "reference" and report["attend"].device == "cpu"
    assert "not installed" in str(report)


@pytest.mark.parametrize("content, reason", [(None, "missing"), (b"not a library", "cannot be loaded")])
def test_a_missing_or_broken_library_is_a_reason(tmp_path, content, reason):
    path = tmp_path / "libkvq_cuda.so"
    if content is not None:
        path.write_bytes(content)
    assert reason in cuda.load_native(path)


def test_an_old_gpu_is_a_reason(monkeypatch, tmp_path):
    (tmp_path / "libkvq_cuda.so").write_bytes(b"")
    monkeypatch.setattr(cuda, "least_capability", lambda: (7, 5))
    assert cuda.load_native(tmp_path / "libkvq_cuda.so") == "compute capability 7.5 is below 8.0"


@needs_library
def test_a_torch_without_cuda_refuses_the_library():
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    assert re.search(r"libkvq_cuda.so cannot be loaded .*libtorch_cuda", cuda.load_native())


@needs_library
def test_the_library_takes_stable_symbols_and_gives_none_of_its_own():
    undefined = {name.split("@")[0] for kind, name in symbols(cuda.LIBRARY, "-D", "--undefined-only")}
    assert "aoti_torch_get_current_cuda_stream" in undefined
    assert [name for name in undefined if TORCH_SYMBOLS.search(name)] == [], "bound to one torch, or to another CUDA runtime"
    assert [name for name in undefined if "kvq" in name] == [], "a launcher is missing"
    defined = [name for kind, name in symbols(cuda.LIBRARY, "-D", "--defined-only")]
    assert [name for name in defined if "kvq" in name or SHIMS.match(name) or name.startswith("cuda")] == []


@needs_library
def test_the_library_names_what_it_needs():
    done = subprocess.run(["readelf", "-d", str(cuda.LIBRARY)], check=True, capture_output=True, text=True)
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", done.stdout))
    assert {"libtorch_cpu.so", "libtorch_cuda.so", "libstdc++.so.6"} <= needed
    assert not [name for name in needed if "cudart" in name or "c10" in name]


@needs_library
def test_the_library_says_what_it_was_built_for():
    assert re.fullmatch(r"libkvq_cuda.so was built with KVQ_CUDA_ARCHS=\d+[af]?(\+ptx)?(,\d+[af]?(\+ptx)?)*", cuda.build())


@needs_library
def test_every_operator_is_registered():
    """The names that the op files pass to torch are in the file."""
    content = cuda.LIBRARY.read_bytes()
    sources = "".join(path.read_text() for path in (ROOT / "csrc" / "cuda").glob("*.cpp"))
    assert set(re.findall(r'm\.impl\("(\w+)"', sources)) == {*NAMES, *FUSED_NAMES}
    assert all(name.encode() in content for name in NAMES)


def test_architectures_are_checked(build):  # noqa: F811
    flags = build.build_cuda.arch_flags
    assert flags("90") == "-gencode=arch=compute_90,code=sm_90"
    assert flags("80,90+ptx").endswith("-gencode=arch=compute_90,code=[sm_90,compute_90]")
    for wrong in ("", "9.0", "sm_90", "90+cubin"):
        with pytest.raises(ValueError, match="KVQ_CUDA_ARCHS must be like 80,90.ptx, got"):
            flags(wrong)


@pytest.mark.parametrize("variable, value, reason", [
    ("CUDA_HOME", "/nonexistent", "no nvcc in"),
    ("KVQ_NO_CUDA", "1", "KVQ_NO_CUDA is set"),
])  # fmt: skip
def test_the_cuda_library_is_left_out_with_a_reason(build, monkeypatch, capsys, tmp_path, variable, value, reason):  # noqa: F811
    monkeypatch.setenv(variable, value)
    monkeypatch.delenv("KVQ_NO_BUILD", raising=False)
    monkeypatch.setattr(build, "build_library", lambda root: root / "libkvq_cpu.so")
    assert build.try_build(tmp_path) == [tmp_path / "libkvq_cpu.so"]
    assert f"CUDA kernels are left out: {reason}" in capsys.readouterr().err
