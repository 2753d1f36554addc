"""Precision follows the dtype of the query: who answers which dtype, and how far from float32, on real data too."""

import pytest
import real_texts
import torch
import torch.nn.functional as F
from op_cases import Case, check_fences, fenced, problem, relative_error
from oracle import forced_logits

from torch_kvq import IsoQuantCache, backends, ops
from torch_kvq.backends import native
from torch_kvq.ops import reference

native.load()
pytestmark = pytest.mark.skipif(not native.loaded(), reason=f"no CPU kernels: {native._state.reason}")
FLOAT_BAR, INTEGER_BAR = 1e-5, 3e-3
FEW = Case("few rows", tokens=1100, dim=128, group=4)
MANY = Case("many rows", tokens=70, dim=128, group=4, queries=5)


@pytest.fixture(autouse=True)
def auto():
    before = native.set_cpu_isa(native.AUTO)
    yield
    native.set_cpu_isa(before)


def expected_isa(dtype):
    exact = [name for name in native.available_isas() if name != native.INTEGER]
    integer = dtype != torch.float32 and native.INTEGER in native.available_isas()
    return native.INTEGER if integer else exact[0]


def answers(arguments, expected, isa=native.AUTO):
    """``out`` in float32 and ``lse`` of one call, with the kernels of ``isa``."""
    before = native.set_cpu_isa(isa)
    (out, whole), (lse, whole_lse) = fenced(expected.shape), fenced(expected.shape[:-1])
    ops.attend(*arguments, out, lse)
    native.set_cpu_isa(before)
    check_fences(whole, whole_lse)
    return torch.cat([out, lse.unsqueeze(-1)], -1)


@pytest.mark.parametrize("case", [FEW, MANY], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", native.DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_the_dtype_of_the_query_chooses_the_kernels(dtype, case):
    (q, *rest), _, expected, _ = problem(case)
    q = q.to(dtype)
    chosen = backends.cpu_isa(dtype)
    assert chosen == expected_isa(dtype)
    ours = answers((q, *rest), expected)
    assert torch.equal(ours, answers((q, *rest), expected, chosen))
    for other in set(native.available_isas()) - {chosen}:
        twins = {"avx512", "avx512vpopcnt"} | ({native.INTEGER} if case is MANY else set())  # many rows take no integers
        assert torch.equal(ours, answers((q, *rest), expected, other)) == ({chosen, other} <= twins), other


def test_a_choice_by_name_holds_for_every_dtype():
    for isa in native.available_isas():
        assert native.set_cpu_isa(isa) != isa
        assert [backends.cpu_isa(dtype) for dtype in native.DTYPES] == 3 * [isa]
    assert native.set_cpu_isa(native.AUTO) == isa
    with pytest.raises(ValueError, match="dtype must be float32, bfloat16 or float16, got torch.int8"):
        backends.cpu_isa(torch.int8)
    with pytest.raises(RuntimeError, match="name must be a choice of this machine among auto,.*scalar, got sse9"):
        native.set_cpu_isa("sse9")


def in_float64(q, keys, values, exact_keys, exact_values, mask, sink_logits, start, length, num_sinks, scale, softcap):
    assert mask is None and sink_logits is None and start == 0 and softcap == 0
    every_key = reference._all_keys(keys, exact_keys, length, num_sinks).double()
    every_value = reference._all_values(values, exact_values, length, num_sinks).double()
    return F.scaled_dot_product_attention(q.double(), every_key, every_value, scale=scale, enable_gqa=True)


def test_on_queries_and_keys_of_smollm2(smollm2, monkeypatch, capsys):
    """Each attention call of real decoding again in every precision; the operator's output is float32, so that it shows."""
    model, tokenizer = smollm2
    ids = torch.tensor([tokenizer(text).input_ids[:772] for text in list(real_texts.texts().values())[:2]])
    sides = [(native.AUTO, dtype) for dtype in native.DTYPES]
    if native.INTEGER in native.available_isas():
        sides.append((native.INTEGER, torch.float32))
    errors, attend = {side: [] for side in sides}, ops.attend

    def compared(q, *rest):
        monkeypatch.setattr(ops, "attend", attend)
        attend(q, *rest)
        for isa, dtype in sides:
            arguments = (q.to(dtype), *rest[:-2])
            expected = in_float64(*arguments)
            errors[isa, dtype].append(relative_error(answers(arguments, expected, isa)[..., :-1], expected))
        monkeypatch.setattr(ops, "attend", compared)

    monkeypatch.setattr(ops, "attend", compared)
    forced_logits(model, IsoQuantCache(), [ids[:, :768], *ids[:, 768:].split(1, 1)])
    for (isa, dtype), found in errors.items():
        found = torch.tensor(found)
        with capsys.disabled():
            print(f"\n{isa} {dtype}: median {found.median():.1e}, worst {found.max():.1e}")
        assert len(found) == 4 * model.config.num_hidden_layers
        integer = native.INTEGER in (isa, backends.cpu_isa(dtype))
        assert found.max() <= (INTEGER_BAR if integer else FLOAT_BAR)
        assert integer == (found.max() > FLOAT_BAR), "other kernels answered"
