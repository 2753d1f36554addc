"""attend, qk, pv, rotate and merge of the CUDA library on the CPU, by the emulator of this folder."""

import fcntl

import emulated_library
import pytest
import torch
from cuda_host import attend_checks as checks
from op_cases import CASES, fenced, relative_error

from torch_kvq.codecs.rotation import make_rotation
from torch_kvq.ops import reference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not emulated_library.is_possible(), reason="needs g++ and the headers of CUDA"),
]
HUGE = ("rows", "rows-masked")  # an hour of emulation
SMALL_CASES = [case for case in CASES if case.name not in HUGE]


@pytest.fixture(scope="module")
def ops():
    folder = emulated_library.ROOT / "build" / "kvq_emulated"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return emulated_library.load(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", SMALL_CASES, ids=checks.named)
def test_attend(ops, case, dtype):
    checks.check_attend(ops, "cpu", checks.in_dtype(case, dtype))


@pytest.mark.parametrize("case", [case for case in checks.SCORE_CASES if case in SMALL_CASES], ids=checks.named)
def test_scores_and_sums(ops, case):
    checks.check_scores_and_sums(ops, "cpu", case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case, make_mask", checks.LONG_CASES)
def test_many_query_tokens(ops, case, make_mask, dtype):
    checks.check_long(ops, "cpu", checks.in_dtype(case, dtype), make_mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", checks.LATENT_CASES + checks.EXTREME_CASES, ids=checks.named)
def test_latents_and_extremes(ops, case, dtype):
    checks.check_attend(ops, "cpu", checks.in_dtype(case, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_values_of_any_magnitude(ops, size, dtype):
    checks.check_values_of_any_magnitude(ops, "cpu", size, dtype)


@pytest.mark.parametrize("dim", [80, 128])
def test_stores_with_gaps(ops, dim):
    checks.check_stores_with_gaps(ops, "cpu", checks.Case("gaps", dim=dim, tokens=100, queries=2, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_stays_in_its_row(ops, dtype):
    checks.check_nan_stays_in_its_row(ops, "cpu", dtype)


@pytest.mark.parametrize("dtype", checks.HALF)
def test_output_rounds_once(ops, dtype):
    checks.check_output_rounds_once(ops, "cpu", dtype)


@pytest.mark.parametrize("kind", ["isoquant", "hadamard2", "dense"])
@pytest.mark.parametrize("dim", [4, 80, 128, 512])
def test_rotate(ops, dim, kind):
    x, parts = torch.randn(3, 5, dim), make_rotation(kind, dim).tensors()
    for inverse in (False, True):
        out, _ = fenced(x.shape)
        ops.rotate(x, *parts, inverse, out)
        assert relative_error(out, reference.rotated(x, *parts, inverse)) <= 1e-5


def test_merge(ops):
    outs, lses = torch.randn(3, 2, 4, 5, 80), 5 * torch.randn(3, 2, 4, 5)
    lses[0, 0], lses[:, 1, 1] = -torch.inf, -torch.inf
    expected, expected_lse = torch.empty(2, 4, 5, 80), torch.empty(2, 4, 5)
    reference.merge(outs, lses, expected, expected_lse)
    (out, _), (lse, _) = fenced(expected.shape), fenced(expected_lse.shape)
    ops.merge(outs, lses, out, lse)
    assert relative_error(out, expected) <= 1e-5 and torch.allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)
