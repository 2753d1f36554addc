"""The Triton twin of every operator: on a GPU as it is compiled there, elsewhere by Triton's interpreter, which has to be
chosen before triton is imported and so runs in processes of its own.

The checks are those of the CUDA operators, of which the interpreter takes the small ones. ``KVQ_CUDA=triton`` makes
``test_ops_cuda.py`` run all of them through the dispatcher.
"""

import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import types
import zlib
from pathlib import Path

import numpy
import pytest
import torch
from cuda_host import attend_checks, codec_checks
from cuda_host.attend_checks import in_dtype, moved
from op_cases import CASES, Case, problem

from torch_kvq.backends import triton as backend
from torch_kvq.codecs.rotation import make_rotation
from torch_kvq.ops import reference
from torch_kvq.ops.schemas import NAMES, SCALE_RULES

triton, tl = pytest.importorskip("triton"), pytest.importorskip("triton.language")
planes = pytest.importorskip("torch_kvq.backends.triton.planes")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
ROOT = Path(__file__).resolve().parents[1]
FLOAT, BF16, HALF = torch.float32, torch.bfloat16, torch.float16


def of_operators(test):
    """Runs where something runs the kernels."""
    return test if INTERPRETED else pytest.mark.gpu(test)


def not_interpreted(test):
    return pytest.mark.skipif(INTERPRETED, reason="the kernels are interpreted")(test)


def taken(cases, few):
    """All cases on a GPU, a few of them for the interpreter."""
    return [case for case in cases if case.name in few.split()] if INTERPRETED else cases


@pytest.fixture(autouse=True)
def half_is_interpreted(request):
    """The interpreter is slow: it runs one test in two, the same ones every time, unless ``KVQ_EMULATE=all``."""
    if INTERPRETED and os.environ.get("KVQ_EMULATE") != "all" and zlib.crc32(request.node.name.encode()) % 2:
        pytest.skip("one test in two is interpreted; KVQ_EMULATE=all interprets every one")


@pytest.fixture(autouse=True)
def truncated_sums(monkeypatch):
    """Tensor cores truncate what they add up, which float32 queries with large logits feel; the interpreter rounds."""
    if not INTERPRETED:
        monkeypatch.setitem(attend_checks.TOLERANCE, FLOAT, 1e-4)


@functools.cache
def launchers():
    return types.SimpleNamespace(**{name: backend.launcher(name) for name in NAMES})


@pytest.fixture
def ops():
    return launchers()


EVERY_DTYPE = "T0 T33 D80 D128 D80-48 G3 bits24 bits42 mask-bool mask-float start softcap sink-logits only-exact strided"
ONE_DTYPE = f"""{EVERY_DTYPE} T1 T128 D4 D12 D192 D256 G1 G16 M3 few22 few44 mask-heads mask-row mask-column mask-dead
    start-all sink-logits-dead no-sinks only-sinks no-exact nothing long-exact rotation-dense rotation-none plain latent-start
    latent-plain"""
LARGE = [
    Case("large", batch=2, heads=4, group=4, dim=128, tokens=9000, exact=132),
    Case("large-rows", heads=4, group=4, dim=128, tokens=3000, queries=100, exact=132),
    Case("large-splits", dim=256, group=8, tokens=20000, bits=(4, 2)),
]
ATTEND = [(case, FLOAT) for case in taken(CASES + LARGE, ONE_DTYPE)]
ATTEND += [(case, dtype) for case in taken(CASES + LARGE, EVERY_DTYPE) for dtype in (BF16, HALF)]
ids = functools.partial(pytest.mark.parametrize, ids=lambda value: getattr(value, "name", None) or str(value))


@of_operators
@ids("case, dtype", ATTEND)
def test_attend(ops, case, dtype):
    attend_checks.check_attend(ops, DEVICE, in_dtype(case, dtype))


@of_operators
@pytest.mark.parametrize("case, make_mask", attend_checks.LONG_CASES[-1:] if INTERPRETED else attend_checks.LONG_CASES)
def test_attend_of_many_query_tokens(ops, case, make_mask):
    attend_checks.check_long(ops, DEVICE, in_dtype(case, BF16), make_mask)


@of_operators
@pytest.mark.parametrize("dtype", [FLOAT, BF16, HALF])
@ids("case", taken(attend_checks.LATENT_CASES + attend_checks.EXTREME_CASES, "mla-ragged logits tiny"))
def test_attend_of_latents_and_extremes(ops, case, dtype):
    attend_checks.check_attend(ops, DEVICE, in_dtype(case, dtype))


@of_operators
@pytest.mark.parametrize("size, dtype", [(1e-4, BF16), (1.0, HALF), (1e4, FLOAT)])
def test_attend_to_values_of_any_magnitude(ops, size, dtype):
    attend_checks.check_values_of_any_magnitude(ops, DEVICE, size, dtype)


@of_operators
def test_attend_to_stores_with_gaps(ops):
    case = Case("gaps", dim=80, tokens=100, queries=2, dtype=BF16)
    attend_checks.check_stores_with_gaps(ops, DEVICE, case)


@of_operators
@pytest.mark.parametrize("dtype", [FLOAT, BF16])
def test_attend_leaves_nan_in_its_row(ops, dtype):
    attend_checks.check_nan_stays_in_its_row(ops, DEVICE, dtype)


@of_operators
@pytest.mark.parametrize("group", [4, 8])
def test_flat_tail(ops, group):
    attend_checks.check_flat_tail(ops, DEVICE, 1, group, 700)


@of_operators
@pytest.mark.parametrize("num_multiprocessors", [1, 5, 132])
def test_attend_does_not_depend_on_the_device_it_is_cut_for(ops, num_multiprocessors, monkeypatch):
    from torch_kvq.backends.triton import plan

    monkeypatch.setattr(plan, "num_multiprocessors", lambda device: num_multiprocessors)
    plan.cut.cache_clear()
    for tokens in (1, 700):
        attend_checks.check_attend(ops, DEVICE, Case("cut", tokens=tokens, exact=150, start=tokens // 3))
    plan.cut.cache_clear()


@of_operators
@pytest.mark.parametrize("mask", ["bool", "row", ""])
def test_a_long_prompt_in_parts_is_the_same(ops, mask, monkeypatch):
    from torch_kvq.backends.triton import plan

    monkeypatch.setattr(plan, "MAX_PART_ROWS", 12)
    case = Case("parts", queries=7, tokens=70, mask=mask, strided=True)
    attend_checks.check_attend(ops, DEVICE, case)
    if not mask:
        attend_checks.check_scores_and_sums(ops, DEVICE, case)


SCORES = "T0 T128 D4 D80-48 D256 G3 M5 bits24 bits42 only-exact nothing no-exact bf16 fp16 strided rotation-dense plain"


@of_operators
@ids("case", taken(attend_checks.SCORE_CASES, SCORES))
def test_scores_and_sums(ops, case):
    attend_checks.check_scores_and_sums(ops, DEVICE, case)


CODECS = [(4, "none"), (12, "isoquant"), (80, "hadamard2"), (128, "isoquant")] if INTERPRETED else codec_checks.CODECS


@of_operators
@pytest.mark.parametrize("dtype", [FLOAT, BF16])
@pytest.mark.parametrize("dim, kind", [*CODECS, (96, "dense")])
def test_rotate(ops, dim, kind, dtype):
    codec_checks.check_rotate(ops, DEVICE, dim, kind, dtype)


@of_operators
def test_rotate_of_any_strides(ops):
    x = torch.randn(2, 3, 2, 3, 2, 16).permute(4, 1, 2, 3, 0, 5)
    parts, out = make_rotation("dense", 16).tensors(), torch.full(x.shape, torch.nan, device=DEVICE)
    ops.rotate(*moved((x, *parts), DEVICE), False, out)
    assert torch.allclose(out.cpu(), reference.rotated(x, *parts), atol=1e-5)


@of_operators
@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize("dim, kind", CODECS)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_encode_and_decode(ops, dim, kind, bits, along_tokens):
    rule, dtype = SCALE_RULES[(dim // 4 + bits) % 4], (FLOAT, BF16, HALF)[bits - 2]
    plain = dim == 12
    codec_checks.check_encode(ops, DEVICE, dim, kind, bits, along_tokens, rule, dtype, plain, exact=True)
    codec_checks.check_decode(ops, DEVICE, dim, kind, bits, along_tokens, dtype, plain)


@of_operators
@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("along_tokens", [False, True])
def test_encode_of_odd_vectors(ops, along_tokens, rule):
    dtype = HALF if INTERPRETED else BF16  # the interpreter does not convert denormal bfloat16
    codec_checks.check_encode_of_odd_vectors(ops, DEVICE, 64, along_tokens, rule, dtype, exact=True)


@of_operators
@pytest.mark.parametrize("dim, dtype", [(64, FLOAT), (128, BF16), (80, HALF)])
def test_encode_beside_a_large_centre(ops, dim, dtype):
    codec_checks.check_encode_beside_a_large_centre(ops, DEVICE, dim, dtype)


@of_operators
@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT, BF16])
def test_encode_of_any_magnitude(ops, along_tokens, dtype):
    codec_checks.check_encode_of_any_magnitude(ops, DEVICE, 128, along_tokens, dtype, exact=True)


@of_operators
@pytest.mark.parametrize("dtype", [FLOAT, BF16])
def test_merge(ops, dtype):
    codec_checks.check_merge(ops, DEVICE, dtype)


BAD = [
    ("q must have 4 dims, got float32 [4, 1, 64]", "q", lambda a: a["q"][0]),
    (
        "exact_keys must have the shape [1, 2, 20, 64], got float32 [1, 2, 20, 60]",
        "exact_keys",
        lambda a: a["exact_keys"][..., :60],
    ),
    ("q must be float32, bfloat16 or float16, got float64", "q", lambda a: a["q"].double()),
    ("q must have a contiguous last dim, got strides", "q", lambda a: a["q"].repeat(1, 1, 1, 2)[..., ::2]),
    ("q must have a multiple of 2 heads", "q", lambda a: a["q"][:, :3]),
    ("keys must be nine tensors, got 8", "keys", lambda a: a["keys"][:8]),
    ("keys.sign must be int32, got int64", "keys", lambda a: [a["keys"][0].long(), *a["keys"][1:]]),
    ("keys.levels must be float32", "keys", lambda a: [*a["keys"][:3], a["keys"][3].half(), *a["keys"][4:]]),
    ("signs must have the shape [1, 64]", "keys", lambda a: [*a["keys"][:6], torch.ones(1, 60), *a["keys"][7:]]),
    ("keys.scale must have a capacity of at least 5000", "length", lambda a: 5000),
    ("start must be from 0 to length, got 200", "start", lambda a: 200),
    ("num_sinks must be from 0 to the number of exact tokens, got 21", "num_sinks", lambda a: 21),
    ("mask must be bool or float32, got int32", "mask", lambda a: torch.zeros(1, 4, 1, 148, dtype=torch.int32)),
    ("mask must be on", "mask", lambda a: torch.ones(1, 4, 1, 148, dtype=torch.bool)),
    ("with the shape [1, 4, 1, 148], got bool [1, 4, 1, 147]", "mask", lambda a: torch.ones(1, 4, 1, 147, dtype=torch.bool)),
    ("out must have the shape [1, 4, 1, 64]", "out", lambda a: a["out"][:, :3]),
    ("lse must be float32, got float64", "lse", lambda a: a["lse"].double()),
    ("out must be on", "out", lambda a: a["out"]),
    ("exact_keys must be on", "exact_keys", lambda a: a["exact_keys"]),
]
ARGUMENTS = "q keys values exact_keys exact_values mask sink_logits start length num_sinks scale softcap out lse".split()


@of_operators
@pytest.mark.parametrize("message, name, change", BAD, ids=[bad[0] for bad in BAD])
def test_attend_names_the_argument_and_the_rule(ops, message, name, change):
    arguments, _, out, lse = problem(Case("errors"))
    arguments = dict(zip(ARGUMENTS, moved((*arguments, torch.full_like(out, 7), lse), DEVICE)))
    before = arguments["out"]
    arguments[name] = moved([change(arguments)], DEVICE)[0] if "must be on" not in message else change(arguments).to("meta")
    with pytest.raises(RuntimeError, match=re.escape(message)):
        ops.attend(*arguments.values())
    assert (before == 7).all()


@triton.jit
def permute(low, high, selector, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, planes.byte_permute(tl.load(low + i), tl.load(high + i), tl.load(selector + i)))


@of_operators
def test_bytes_are_permuted_as_the_instruction_does():
    """The interpreter has shifts and masks instead of the instruction; both are held to the same definition."""
    generator = torch.Generator().manual_seed(0)
    low, high, noise = torch.randint(-(2**31), 2**31, (3, 64), generator=generator).int()
    selector = noise & 0x7777
    eight = torch.cat([low.view(torch.uint8).view(64, 4), high.view(torch.uint8).view(64, 4)], 1)
    index = torch.stack([selector >> shift & 7 for shift in (0, 4, 8, 12)], 1).long()
    expected = eight.gather(1, index).view(torch.int32)[:, 0]
    out = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    permute[(1,)](*moved((low, high, selector), DEVICE), out, SIZE=64)
    assert torch.equal(out.cpu(), expected)


def run_python(*arguments, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON"))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment | variables, capture_output=True, text=True)


def interpreter_problem():
    version = tuple(map(int, importlib.metadata.version("triton").split(".")[:2]))
    if version < (3, 7) and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
        return "the interpreter of triton 3.6 needs numpy < 2.4"
    return ""


@not_interpreted
@pytest.mark.skipif(bool(interpreter_problem()), reason=interpreter_problem() or "-")
@pytest.mark.parametrize("group", ["attend", "not attend"])
def test_the_interpreter_gives_what_the_reference_gives(group):
    result = run_python("-m", "pytest", __file__, "-q", "-k", group, "-p", "no:cacheprovider", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 20
