"""``torch-kvq doctor`` says what runs and fails when an operator is wrong."""

import pytest
import torch

from torch_kvq import backends, cli
from torch_kvq.backends import native
from torch_kvq.ops.schemas import NAMES


def test_doctor_names_every_operator_and_its_backend(capsys):
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed for name in NAMES)
    assert backends.cpu_isa() in printed and torch.__version__ in printed


def test_doctor_names_the_kernels_of_each_dtype_of_query(capsys):
    if not native.loaded():
        pytest.skip("no CPU kernels")
    before = native.set_cpu_isa(native.AUTO)
    cli.main(["doctor"])
    printed, (full, half) = capsys.readouterr().out, map(backends.cpu_isa, (torch.float32, torch.bfloat16))
    lines = {line.split()[0]: line for line in printed.splitlines() if line.split()[1:2] == ["cpu"]}
    assert set(lines) == set(NAMES)
    assert all(f" {full}" in line for line in lines.values())
    assert [name for name, line in lines.items() if f"{half} for bfloat16 and float16" in line] == ["attend"] * (half != full)
    native.set_cpu_isa("scalar")
    cli.main(["doctor"])
    assert f"{full}: scalar was asked for" in capsys.readouterr().out
    native.set_cpu_isa(before)


def test_selftest_passes(capsys):
    assert cli.main(["doctor", "--selftest"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" ok\n") == 18 * (1 + torch.cuda.is_available() + torch.backends.mps.is_available())
    assert all(f"\n{name}" in printed.split("self-test")[1] for name in NAMES)


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
