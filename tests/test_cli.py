"""``torch-kvq doctor`` says what runs and fails when an operator is wrong."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch

from torch_kvq import backends, cli
from torch_kvq.backends import native
from torch_kvq.ops.fused import PARTS
from torch_kvq.ops.schemas import FUSED_NAMES, NAMES


def test_doctor_names_every_operator_and_its_backend(capsys):
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed for name in NAMES + FUSED_NAMES)
    assert backends.cpu_isa() in printed and torch.__version__ in printed


def test_doctor_names_the_kernels_of_each_dtype_of_query(capsys):
    if not native.loaded():
        pytest.skip("no CPU kernels")
    before = native.set_cpu_isa(native.AUTO)
    cli.main(["doctor"])
    printed, (full, half) = capsys.readouterr().out, map(backends.cpu_isa, (torch.float32, torch.bfloat16))
    lines = {line.split()[0]: line for line in printed.splitlines() if line.split()[1:2] == ["cpu"]}
    assert set(lines) == {*NAMES, *FUSED_NAMES}
    for name, parts in PARTS.items():
        assert " + ".join(parts) in lines.pop(name)
    assert all(f" {full}" in line for line in lines.values())
    assert [name for name, line in lines.items() if f"{half} for bfloat16 and float16" in line] == ["attend"] * (half != full)
    native.set_cpu_isa("scalar")
    cli.main(["doctor"])
    assert f"{full}: scalar was asked for" in capsys.readouterr().out
    native.set_cpu_isa(before)


@pytest.mark.parametrize("content, said", [
    (None, "the kernels were not built (libkvq_cuda.so is missing)"),
    (b"...KVQ_CUDA_ARCHS=80,90+ptx\0...", "libkvq_cuda.so was built with KVQ_CUDA_ARCHS=80,90+ptx"),
    (b"...", "libkvq_cuda.so was built for GPUs that it does not name"),
    (b"", "libkvq_cuda.so is empty"),
])  # fmt: skip
def test_doctor_says_what_of_cuda_is_missing(content, said, capsys, monkeypatch, tmp_path):
    if content is not None:
        (tmp_path / "libkvq_cuda.so").write_bytes(content)
    monkeypatch.setattr(backends.cuda, "LIBRARY", tmp_path / "libkvq_cuda.so")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for built, missing in ((True, "no CUDA device is visible"), (False, "this torch is without CUDA")):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda built=built: built)
        cli.main(["doctor"])
        assert f"\nCUDA kernels: none in use, {missing}; {said}\n" in capsys.readouterr().out


@pytest.mark.parametrize("options, status", [("", "0"), (" --selftest", "1")])
def test_doctor_may_be_cut_short(options, status):
    """Nothing was wrong then, but a self-test that was cut has not passed."""
    command = f"{sys.executable} -m torch_kvq doctor{options} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout == f"{status}\n" and "BrokenPipe" not in done.stderr


def test_doctor_without_anything_to_print_to():
    done = subprocess.run(["bash", "-c", f"{sys.executable} -m torch_kvq doctor >&-"], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_doctor_reports_what_an_import_refuses():
    environment = {**os.environ, "KVQ_CUDA": "native", "KVQ_CPU_ISA": "best", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "torch_kvq", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "\nREFUSED: KVQ_CUDA=native cannot be: " in done.stdout and "attend_selected" in done.stdout
    assert "\nREFUSED: KVQ_CPU_ISA must be one of avx512vnni, " in done.stdout


@pytest.mark.parametrize("command, reports", [
    ("python -m torch_kvq doctor --selftest", True),
    ("python -m torch_kvq.cli doctor", True),
    ("python /usr/bin/torch-kvq doctor", True),
    ("python train.py doctor", False),
    ("python -m torch_kvq", False),
])  # fmt: skip
def test_no_one_else_goes_on_after_a_refusal(command, reports, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", command.split())
    monkeypatch.setattr(backends, "refused", [])
    with contextlib.nullcontext() if reports else pytest.raises(RuntimeError, match="cannot be"):
        with backends.doctor_reports():
            raise RuntimeError("cannot be")
    assert backends.refused == ["cannot be"] * reports


def test_selftest_passes(capsys):
    assert cli.main(["doctor", "--selftest"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" ok\n") == 22 * (1 + torch.cuda.is_available() + torch.backends.mps.is_available())
    assert all(f"\n{name}" in printed.split("self-test")[1] for name in NAMES + FUSED_NAMES)


def test_selftest_finds_a_wrong_operator(capsys, monkeypatch):
    monkeypatch.setattr(cli.reference, "attend", lambda *args: args[-2].zero_() + 1)
    assert cli.main(["doctor", "--selftest"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit):
        cli.main([])
    assert "doctor" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["nonsense", "meta", "cuda:99"])
def test_a_device_that_is_not_there_is_named(device, capsys):
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--selftest", "--device", device])
    assert f"must be a device of this machine, got '{device}'" in capsys.readouterr().err
