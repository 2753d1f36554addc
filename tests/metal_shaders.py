"""Where the shaders of ``torch_kvq/mps`` run in tests: on an MPS device if there is one, else in ``tests/metalsim``."""

import metalsim
import pytest
import torch
from op_cases import FENCE, check_fences, fenced

from torch_kvq.backends import metal
from torch_kvq.backends.metal import library

REAL = torch.backends.mps.is_available()
DEVICE = "mps" if REAL else "cpu"
_WHY = "needs clang++-19 and its sanitizers (Debian: clang-19 libclang-rt-19-dev)"
needs_emulator = pytest.mark.skipif(metalsim.compiler() is None, reason=_WHY)
needs_shaders = pytest.mark.skipif(not REAL and metalsim.compiler() is None, reason=f"needs an MPS device, or {_WHY[6:]}")


def emulated(**options) -> library.Shaders:
    """Shaders that the emulator compiles and runs; ``options`` of ``metalsim.compile_shader``."""
    return library.Shaders(lambda source: metalsim.compile_shader(source, **options))


shared = library.Shaders() if REAL else emulated()


@pytest.fixture
def shaders(monkeypatch):
    """Launches go to the device or the emulator; a call that the reference answered is an error."""
    monkeypatch.setattr(library, "shaders", shared)
    monkeypatch.setattr(metal, "_state", metal._State())
    yield shared
    assert metal.fallbacks() == {}


def moved(value):
    """Tensors, also in lists, on the device; other values as they are."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    return [moved(each) for each in value] if isinstance(value, list | tuple) else value


def run(name: str, arguments, *outs: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
    """Outputs of an operator by shaders, on the CPU: filled with NaN and fenced before, fences checked after."""
    wholes, views = [], []
    for shape, dtype in outs:
        whole = fenced(shape, dtype)[1].to(DEVICE)
        wholes.append(whole)
        views.append(whole[FENCE : whole.numel() - FENCE].view(shape))
    metal.launcher(name)(*moved(arguments), *views)
    check_fences(*(whole.cpu() for whole in wholes))
    return [view.cpu() for view in views]
