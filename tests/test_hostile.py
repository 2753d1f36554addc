"""Misuse and corners that were once answered wrongly: each test failed when it was written."""

import op_cases
import pytest
import torch

from torch_kvq import backends

pytestmark = pytest.mark.versions

OPS = torch.ops.torch_kvq
LAST = 2**63 - 1

# ---- operators


@pytest.mark.skipif(not backends.native.loaded(), reason="the reference indexes by Python's rules")
@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize("start", [LAST, LAST - 31])
def test_a_start_near_the_end_of_int64_is_refused(along_tokens, start):
    """``start`` and the tokens overflowed to a negative number, which every capacity holds."""
    x = torch.randn(1, 2, 40, 32)
    store = op_cases.make_store(x, 3, along_tokens)
    with pytest.raises(RuntimeError, match=f"start must .*{start}"):
        OPS.decode(store, along_tokens, start, torch.empty_like(x))
    with pytest.raises(RuntimeError, match=f"start must .*{start}"):
        OPS.encode(x, *store[3:], 0, along_tokens, start, *store[:3])


@pytest.mark.parametrize("place", ["query", "exact_key", "mask", "scale"])
def test_nan_is_not_taken_for_a_masked_token(place):
    """It came out as zeros, or as the attention of the other tokens."""
    arguments, _, _, _ = op_cases.problem(op_cases.Case("nan", queries=2))
    q, keys, values, exact_keys, exact_values, mask, sinks, start, length, num_sinks, scale, softcap = arguments
    q, exact_keys = q.clone(), exact_keys.clone()
    if place == "query":
        q[:, 0, 1] = torch.nan
    elif place == "exact_key":
        exact_keys[:, 0, 3] = torch.nan
    elif place == "mask":
        mask = torch.zeros(*q.shape[:3], length + exact_keys.shape[2])
        mask[:, 0, 1, 9] = torch.nan
    else:
        scale = torch.nan
    out, lse = torch.zeros(*q.shape[:3], exact_values.shape[-1]), torch.zeros(q.shape[:3])
    OPS.attend(
        q, keys, values, exact_keys, exact_values, mask, sinks, start, length, num_sinks, scale, softcap, out, lse
    )  # fmt: skip
    assert out[:, 0, 1].isnan().all() and lse[:, 0, 1].isnan().all()
    assert place == "scale" or out[:, -1].isfinite().all()
