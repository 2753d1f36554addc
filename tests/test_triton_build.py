"""What needs no GPU of the Triton kernels: they compile for sm_90 to what was planned, and are registered when asked for."""

import importlib.util
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch
from op_cases import make_store

from torch_kvq import layout
from torch_kvq.backends import triton as backend
from torch_kvq.backends.triton import stores
from torch_kvq.codecs.rotation import make_rotation
from torch_kvq.ops import reference
from torch_kvq.ops.schemas import NAMES

triton = pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def ops():
    return types.SimpleNamespace(**{name: backend.launcher(name) for name in NAMES})


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Launches compile for sm_90 and do no more; the kernels by name."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    kernels = {}

    class Device:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)

    def launch(function, grid):
        def compile_only(*arguments, **options):
            kernels[function.__name__] = function.warmup(*arguments, grid=grid, **options)

        return compile_only

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Device())
    monkeypatch.setattr(JITFunction, "__getitem__", launch)
    return kernels


def resources(kernel) -> tuple[int, int]:
    """Registers of a thread, bytes of its stack."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return int(registers), int(stack)


def long_attention(dim=128, bits=(3, 3), group=4, queries=1, dtype=torch.bfloat16, mask=None):
    """attend over a body long enough for whole tiles, whose tensors need no content."""
    tokens, exact = 2048, 132
    keys, values = (make_store(torch.zeros(1, 2, 0, dim), b, along) for b, along in zip(bits, (False, True)))
    for store, along in ((keys, False), (values, True)):
        shapes = (layout.value_shapes if along else layout.key_shapes)(1, 2, tokens, dim, store[1].shape[3] + 1)
        store[:3] = [torch.empty(shapes[name], dtype=part.dtype) for name, part in zip(("sign", "mag", "scale"), store)]
    q, around = torch.empty(1, 2 * group, queries, dim, dtype=dtype), torch.empty(1, 2, exact, dim, dtype=dtype)
    if mask is not None:
        mask = torch.empty(1, 1, queries, tokens + exact, dtype=mask).expand(1, 2 * group, -1, -1)
    rest = (mask, None, 0, tokens, 4, dim**-0.5, 0.0)
    return q, keys, values, around, around, *rest, torch.empty_like(q), torch.empty(q.shape[:3])


DECODING = [dict(), dict(bits=(4, 4)), dict(bits=(2, 2)), dict(dim=64), dict(dim=256), dict(group=8)]


@pytest.mark.parametrize("problem", DECODING, ids=str)
def test_decode_attention_compiles_to_one_warp_and_integer_tensor_cores(ops, compiled, problem):
    """One PRMT looks up four codes, products are of bytes, and the planned programs of a warp fit an SM beside each other."""
    from torch_kvq.backends.triton import plan

    ops.attend(*long_attention(**problem))
    assert set(compiled) == {"_prepare", "_attend", "_finish"}
    attend = compiled["_attend"]
    assert attend.metadata.num_warps == 1 and resources(attend)[1] <= 640  # at most 112 with triton 3.6, 616 with 3.9
    assert "s32.s8.s8.s32" in attend.asm["ptx"] and "prmt.b32" in attend.asm["ptx"]
    config = plan.config(problem.get("group", 4), problem.get("dim", 128), "plain")
    assert config.shared * 32 * resources(attend)[0] <= 65536
    assert config.shared * (attend.metadata.shared + 1024) <= 228 * 1024


@pytest.mark.parametrize("num_multiprocessors, rows, width, columns", [
    (132, 32, 128, 32), (108, 32, 128, 64), (132, 256, 128, 128), (132, 256, 64, 64), (132, 64, 256, 128), (1, 8, 32, 32),
])  # fmt: skip
def test_a_row_is_cut_no_finer_than_multiprocessors_are_idle(num_multiprocessors, rows, width, columns):
    options = importlib.import_module("torch_kvq.backends.triton.finish").options(rows, width, num_multiprocessors)
    assert options["COLUMNS"] == columns and options["num_warps"] == (4 if columns == 32 else 8)


@pytest.mark.parametrize("num_multiprocessors", [1, 132])
@pytest.mark.parametrize("dim", [64, 128, 512])
def test_finish_spills_nothing(ops, compiled, dim, num_multiprocessors, monkeypatch):
    from torch_kvq.backends.triton import plan

    monkeypatch.setattr(plan, "num_multiprocessors", lambda device: num_multiprocessors)
    plan.cut.cache_clear()
    ops.attend(*long_attention(dim=dim))
    assert resources(compiled["_finish"])[1] == 0
    plan.cut.cache_clear()


@pytest.mark.parametrize(
    "problem",
    [
        dict(queries=64),
        dict(queries=64, mask=torch.bool),
        dict(mask=torch.float32),
        dict(dtype=torch.float32),
        dict(dim=80),
        dict(dim=512),
    ],
    ids=str,
)
def test_attend_compiles(ops, compiled, problem):
    ops.attend(*long_attention(**problem))
    assert resources(compiled["_attend"])[1] <= 256


@pytest.mark.parametrize("limit", [99, 163, 227])
@pytest.mark.parametrize("dim, dtype", [(64, torch.float32), (80, torch.float16), (128, torch.bfloat16), (128, torch.float32)])
def test_encode_has_as_many_stages_as_there_is_room_for(ops, compiled, monkeypatch, dim, dtype, limit):
    from torch_kvq.backends.triton import plan

    monkeypatch.setattr(plan, "shared_memory", lambda device: limit * 1024)
    x = torch.zeros(1, 2, 70, dim, dtype=dtype)
    for along_tokens in (False, True):
        store = make_store(x.float(), 3, along_tokens)
        ops.encode(x, *store[3:], 0, along_tokens, 0, *store[:3])
        assert compiled["_encode"].metadata.shared <= limit * 1024


@pytest.mark.parametrize("dim", [80, 128, 512])
def test_the_other_operators_compile(ops, compiled, dim, monkeypatch):
    from torch_kvq.backends.triton import plan

    monkeypatch.setattr(plan, "shared_memory", lambda device: 99 * 1024)
    x, parts = torch.zeros(1, 2, 70, dim, dtype=torch.bfloat16), make_rotation("isoquant", dim).tensors()
    for along_tokens in (False, True):
        store = make_store(x.float(), 3, along_tokens)
        ops.encode(x, *store[3:], 0, along_tokens, 0, *store[:3])
        ops.decode(store, along_tokens, 0, x)
        p, q = torch.zeros(1, 4, 1, 70), torch.zeros(1, 4, 1, dim, dtype=torch.bfloat16)
        if along_tokens:
            ops.pv(p, store, x[:, :, :0], 70, 0, q)
        else:
            ops.qk(q, store, x[:, :, :0], 70, 0, p)
    ops.rotate(x, *parts, False, x)
    ops.merge(x[None], p[None, :, :2, :, 0].expand(1, 1, 2, 70), x, torch.empty(1, 2, 70))
    assert set(compiled) == {"_encode", "_decode", "_prepare", "_qk", "_pv", "_finish", "_rotate", "_merge"}
    for kernel in compiled.values():
        assert resources(kernel)[1] <= 256 and kernel.metadata.shared <= 99 * 1024


def test_registering_serves_every_operator_on_cuda_devices():
    check = "torch._C._dispatch_has_kernel_for_dispatch_key(f'{schemas.NAMESPACE}::{name}', 'CUDA')"
    code = (
        "import sys, torch\nfrom torch_kvq.backends import triton\nfrom torch_kvq.ops import schemas\n"
        "assert not any(name.startswith('torch_kvq.backends.triton.p') for name in sys.modules)\n"
        f"print(sum({check} for name in schemas.NAMES))\ntriton.register()\ntriton.register()\n"
        f"print(sum({check} for name in schemas.NAMES))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.split() == ["0", str(len(NAMES))], result.stderr


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.available() == (False, "no CUDA device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert backend.available() == (False, "compute capability 7.5 is below 8.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert backend.available() == (True, "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert backend.available() == (False, "triton is not installed")


def test_a_rotation_is_made_once_and_again_when_it_changes():
    parts = [part.clone() for part in make_rotation("isoquant", 64).tensors()]
    once = stores.dense(parts, 64, torch.device("cpu"))
    assert stores.dense(parts, 64, torch.device("cpu")) is once
    x = torch.randn(5, 64)
    assert torch.allclose(x @ once.T, reference.rotated(x, *parts), atol=1e-5)
    parts[0].neg_()
    assert torch.allclose(stores.dense(parts, 64, torch.device("cpu")), -once)
    held = len(stores._matrices)
    del parts[:]
    stores.dense(make_rotation("dense", 64).tensors(), 64, torch.device("cpu"))
    assert len(stores._matrices) <= held - 1


@pytest.mark.parametrize(
    "tiles, blocks, slots",
    [(256, 64, 396), (64, 256, 396), (1024, 8, 396), (16, 8, 396), (1, 5, 4), (7, 1000, 4), (1, 2, 396), (0, 8, 396)],
)
def test_splits_cover_the_tokens_and_fill_the_device(tiles, blocks, slots):
    from torch_kvq.backends.triton import plan

    count, length = plan.splits(tiles, blocks, slots)
    assert count * length >= tiles and (count - 1) * length < max(tiles, 1)
    programs = blocks * count
    assert count == tiles or programs >= 0.9 * slots * -(-programs // slots)
