"""The Triton twins of the operators of sparse attention: a part of the table of ``test_sparse_ops`` by Triton's interpreter, in
processes of their own, and all of it on a GPU."""

import itertools
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import test_sparse_ops
import torch
from sparse_cases import SparseCase
from test_sparse_cuda import OnDevice
from test_triton import interpreter_problem
from test_triton_build import compiled, resources  # noqa: F401  a fixture

from torch_kvq.backends import triton as backend
from torch_kvq.ops.schemas import SPARSE_NAMES

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).resolve().parents[1]


class Launchers(OnDevice):
    """The launchers without the dispatcher."""

    def operator(self, name):
        return backend.launcher(name)


@pytest.fixture(autouse=True)
def operators(monkeypatch):
    """The launchers take the place of ``ops`` in the tests."""
    if INTERPRETED:
        kernels = types.SimpleNamespace(**{name: backend.launcher(name) for name in SPARSE_NAMES})
    else:
        kernels = Launchers("cuda")
    monkeypatch.setattr(test_sparse_ops, "ops", kernels)


def of_operators(test):
    return test if INTERPRETED else pytest.mark.gpu(test)


def taken(names):
    cases = test_sparse_ops.SPARSE_CASES
    return [case for case in cases if case.name in names.split()] if INTERPRETED else cases


def with_cases(names):
    return pytest.mark.parametrize("case", taken(names), ids=lambda case: case.name)


@of_operators
@with_cases("T33 D4 D80 M2 centred plain bf16 rotation-dense")
def test_codes_and_signs(case):
    test_sparse_ops.test_a_query_is_coded_to_half_a_step(case)
    test_sparse_ops.test_keys_are_indexed_by_their_signs(case)


@of_operators
def test_odd_queries_and_keys():
    test_sparse_ops.test_a_constant_query_and_one_that_is_not_finite()
    test_sparse_ops.test_a_zero_key_and_a_huge_one()
    test_sparse_ops.test_the_index_of_packed_keys_is_their_sign_plane()


@of_operators
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@with_cases("T1 D4 D80 D128 G16 M2 batch centred")
def test_scores(case, dtype):
    test_sparse_ops.test_scores_are_the_integer_formula_to_the_last_bit(case, dtype)


def is_interpreted(name, top_p, dtype):
    """Nearly a second each: the ends of p, at which scores matter only if they are hidden, in one dtype."""
    return top_p == 0.95 or (name in ("random", "hidden", "all hidden", "signed zero") and dtype == torch.float32)


SELECTIONS = [
    (name, top_p, dtype)
    for name, top_p, dtype in itertools.product(test_sparse_ops.SCORES, (0.0, 0.95, 1.0), (torch.float32, torch.float16))
    if not INTERPRETED or is_interpreted(name, top_p, dtype)
]


@of_operators
@pytest.mark.parametrize("name, top_p, dtype", SELECTIONS)
def test_selection(name, top_p, dtype):
    test_sparse_ops.test_each_head_keeps_the_fewest_that_reach_p(name, 0.0, top_p, dtype)


@of_operators
def test_selections_of_groups_masks_candidates_and_odd_scores():
    test_sparse_ops.test_a_group_and_its_query_tokens_share_one_selection()
    test_sparse_ops.test_hidden_tokens_are_not_selected("bool")
    test_sparse_ops.test_hidden_tokens_are_not_selected("float")
    test_sparse_ops.test_candidates_give_their_names_to_columns()
    test_sparse_ops.test_a_score_that_is_no_number_is_kept()
    test_sparse_ops.test_nothing_to_select_from()


@of_operators
@pytest.mark.parametrize("capacity", [0, 7])
def test_full_selections(capacity):
    test_sparse_ops.test_a_full_selection_holds_the_largest_shares(capacity)
    test_sparse_ops.test_of_equal_shares_the_earlier_tokens_stay()


@of_operators
@with_cases("T33 D12 D80-48 G16 M5 batch mask-float mask-dead softcap none all per-head bf16 fp16 packed33")
def test_attention(case):
    test_sparse_ops.test_attending_to_a_selection(case)
    test_sparse_ops.test_scores_of_a_selection(case)
    test_sparse_ops.test_gathering_a_selection(case)


@of_operators
def test_many_parts():
    test_sparse_ops.test_attending_to_a_selection(SparseCase("parts", tokens=600, share=0.8, queries=2))
    test_sparse_ops.test_a_selection_and_the_rest_are_everything()


@pytest.mark.skipif(INTERPRETED, reason="the kernels are interpreted")
@pytest.mark.parametrize("dim, dtype", [(80, torch.float32), (128, torch.bfloat16), (256, torch.float16)])
def test_they_compile(compiled, dim, dtype):  # noqa: F811
    case = SparseCase("compile", dim=dim, dtype=dtype, centred=True, kind="isoquant")
    for mask, capacity in ((None, 200), (torch.ones(1, 6, 1, 130, dtype=torch.bool), 100)):
        index = test_sparse_ops.index_of(case)
        planes, terms, _ = test_sparse_ops.coded(index, 0.1)
        (q, keys, values, *_), *_ = test_sparse_ops.selected_problem(case)
        scores, lse, out = torch.zeros(1, 6, 1, 130, dtype=torch.float16), torch.zeros(1, 6, 1), torch.zeros_like(q)
        indices, count = torch.zeros(1, 2, capacity, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
        calls = {
            "quantise_query": (index.q, *index.transform, 0.1, planes, terms),
            "index_keys": (index.keys, *index.transform, 0, index.sign, index.factor, index.bias),
            "sign_scores": (planes, terms, index.sign, index.factor, index.bias, dim, 0.1, 0, scores),
            "top_p_select": (scores, lse, mask, None, 0.9, indices, count),
            "qk_selected": (q, keys, indices, count, 0.1, torch.zeros(1, 6, 1, capacity)),
            "attend_selected": (q, keys, values, indices, count, mask, 0.1, 0.0, out, lse),
            "gather_selected": (keys[0], indices, count, torch.zeros(1, 2, capacity, dim, dtype=dtype)),
        }
        for name in SPARSE_NAMES:
            backend.launcher(name)(*calls[name])
        for kernel in compiled.values():
            assert resources(kernel)[1] <= 256 and kernel.metadata.shared <= 99 * 1024


@pytest.mark.skipif(INTERPRETED or bool(interpreter_problem()), reason=interpreter_problem() or "the kernels are interpreted")
def test_the_interpreter_gives_what_the_reference_gives():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON"))}
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider"]
    variables = environment | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 50
