"""attend on a CUDA device where problems are large: a turn's prefill on a packed cache, and calls done in parts."""

import pytest
import torch
from cuda_host.attend_checks import Case, attend64, causal_mask, moved, with_mask
from op_cases import relative_error

from torch_kvq import ops

pytestmark = pytest.mark.gpu
TURN = Case("turn", tokens=8192, exact=2180, queries=2048, heads=2, group=4, dim=128, dtype=torch.bfloat16)
PARTS = Case("parts", tokens=64, exact=40, queries=5000, heads=1, group=64, dim=128, dtype=torch.bfloat16)
SCRATCH_BYTES = 512 << 20


def run(case, mask=None):
    """Arguments, out and lse on the device, and the bytes that the call allocated besides."""
    arguments = moved(with_mask(case, mask), "cuda")
    shape = (case.batch, case.heads * case.group, case.queries)
    out, lse = torch.full((*shape, case.dim), torch.nan, device="cuda"), torch.full(shape, torch.nan, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.attend(*arguments, out, lse)
    return arguments, out, lse, torch.cuda.max_memory_allocated() - before


def check(case, mask=None):
    arguments, out, lse, used = run(case, mask)
    expected, expected_lse = attend64(*arguments)
    assert relative_error(out, expected) <= 1e-3
    assert (lse - expected_lse).abs().max() <= 1e-3
    assert used <= SCRATCH_BYTES


@pytest.mark.parametrize("causal", [False, True])
def test_prefill_of_a_turn(causal):
    check(TURN, causal_mask(TURN) if causal else None)


@pytest.mark.parametrize("masked", [False, True])
def test_long_calls_are_done_in_parts(masked):
    mask = torch.rand(PARTS.queries, PARTS.tokens + PARTS.exact) > 0.3
    check(PARTS, mask.expand(1, PARTS.group, -1, -1) if masked else None)


def test_scratch_does_not_grow_with_the_query():
    case = Case("many", tokens=64, exact=40, queries=20000, heads=1, group=64, dim=128, dtype=torch.bfloat16)
    *_, out, lse, used = run(case)
    assert used <= SCRATCH_BYTES and out.isfinite().all() and lse.isfinite().all()
