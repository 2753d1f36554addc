"""The operators of sparse attention by the kernels for CUDA devices: the table of ``test_sparse_ops``, run on a GPU and, without
one, by the emulator of ``cuda_host``."""

import functools

import pytest
import test_sparse_ops
import torch
from cuda_host import emulated_library
from test_sparse_ops import *  # noqa: F403  every test of the table

from torch_kvq import ops


def whole_on(x: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` on ``device`` with all of its storage, fences too, and that storage."""
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset()), whole


class OnDevice:
    """The operators for arguments on the CPU: they are moved to ``device`` and what it wrote comes back."""

    def __init__(self, device: str):
        self.device = device

    def __getattr__(self, name):
        return functools.partial(self.call, getattr(ops, name))

    def call(self, operator, *arguments):
        moved, back = [], []
        for argument, declared in zip(arguments, operator._schema.arguments):
            if isinstance(argument, list):
                moved.append([whole_on(x, self.device)[0] for x in argument])
            elif isinstance(argument, torch.Tensor) and declared.alias_info is not None:
                on_device, whole = whole_on(argument, self.device)
                moved.append(on_device)
                back.append((argument, whole))
            else:
                moved.append(whole_on(argument, self.device)[0] if isinstance(argument, torch.Tensor) else argument)
        operator(*moved)
        for argument, whole in back:
            torch.empty(0, dtype=argument.dtype).set_(argument.untyped_storage()).copy_(whole)


def emulated():
    if not emulated_library.is_possible():
        pytest.skip("needs g++ and the headers of CUDA")
    return emulated_library.load()


MAKERS = {"emulated": emulated, "cuda": lambda: OnDevice("cuda")}


@pytest.fixture(
    autouse=True, params=[pytest.param("emulated", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def operators(request, monkeypatch):
    """Takes the place of ``ops`` in the tests."""
    monkeypatch.setattr(test_sparse_ops, "ops", MAKERS[request.param]())
    return request.param


@pytest.fixture
def isa():
    """No instruction set of the CPU."""


@functools.cache
def operators_of(device):
    return MAKERS[device]()
