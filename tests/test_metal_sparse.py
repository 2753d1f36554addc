"""Operators of sparse attention by the shaders of ``torch_kvq/mps``: tests of ``test_sparse_ops``, the reference, a model."""

import metalsim
import pytest
import test_sparse_ops
import torch
from metal_shaders import DEVICE, needs_emulator, needs_shaders, run, shaders  # noqa: F401
from sparse_cases import SPARSE_CASES, SparseCase, coded, index_of, selected_problem
from test_metal_backend import on_cpu  # noqa: F401
from test_sparse_cuda import OnDevice

from torch_kvq import RaBitQSparseCache
from torch_kvq.backends import metal
from torch_kvq.backends.metal import library, plan
from torch_kvq.ops import reference, sparse_reference
from torch_kvq.ops.schemas import DENSE_NAMES, NAMES, SPARSE_NAMES

pytestmark = [needs_shaders, pytest.mark.usefixtures("shaders")]
FLOAT, HALF, INT = torch.float32, torch.float16, torch.int32


class Launchers(OnDevice):
    """The launchers of the shaders without the dispatcher."""

    def operator(self, name):
        return metal.launcher(name)


@pytest.fixture(autouse=True)
def operators(monkeypatch):
    """The launchers take the place of ``ops`` in the tests of the table."""
    monkeypatch.setattr(test_sparse_ops, "ops", Launchers(DEVICE))


def with_cases(names, *more):
    """A part of the table: every head dim, dtype and mask is a kernel that the emulator compiles."""
    cases = [case for case in SPARSE_CASES if case.name in names.split()]
    assert len(cases) == len(names.split())
    return pytest.mark.parametrize("case", [*cases, *more], ids=lambda case: case.name)


@with_cases("T33 D12 D80 D512 batch centred plain rotation-dense rotation-isoquant")
def test_codes_and_signs(case):
    test_sparse_ops.test_a_query_is_coded_to_half_a_step(case)
    test_sparse_ops.test_keys_are_indexed_by_their_signs(case)


def test_odd_queries_and_keys():
    test_sparse_ops.test_a_constant_query_and_one_that_is_not_finite()
    test_sparse_ops.test_a_zero_key_and_a_huge_one()
    test_sparse_ops.test_the_index_of_packed_keys_is_their_sign_plane()


@with_cases("T1 T33 T1025 D12 D80 D512 M5 batch centred plain", SparseCase("G16", group=16, queries=3, centred=True))
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_scores_are_those_of_the_reference_to_the_last_bit(case, dtype):
    index = index_of(case)
    planes, terms, _ = coded(index, 0.1)
    start = case.tokens // 3
    shape = (*planes.shape[:3], case.tokens - start)
    arguments = planes, terms, index.sign, index.factor, index.bias, case.dim, 0.1, start
    expected = torch.empty(shape, dtype=dtype)
    sparse_reference.sign_scores(*arguments, expected)
    (out,) = run("sign_scores", arguments, (shape, dtype))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", test_sparse_ops.SCORES)
def test_each_head_keeps_the_fewest_that_reach_p(name):
    for lse, top_p, dtype in (
        (0.0, 0.0, FLOAT), (-torch.inf, 0.5, HALF), (0.0, 0.95, FLOAT), (4.0, 0.95, FLOAT), (4.0, 0.95, HALF), (0.0, 1.0, HALF)
    ):  # fmt: skip
        test_sparse_ops.test_each_head_keeps_the_fewest_that_reach_p(name, lse, top_p, dtype)


def test_selections():
    test_sparse_ops.test_a_group_and_its_query_tokens_share_one_selection()
    test_sparse_ops.test_hidden_tokens_are_not_selected("bool")
    test_sparse_ops.test_hidden_tokens_are_not_selected("float")
    test_sparse_ops.test_candidates_give_their_names_to_columns()
    for capacity in (0, 1, 7, 25):
        test_sparse_ops.test_a_full_selection_holds_the_largest_shares(capacity)
    test_sparse_ops.test_of_equal_shares_the_earlier_tokens_stay()
    test_sparse_ops.test_a_score_that_is_no_number_is_kept()
    test_sparse_ops.test_nothing_to_select_from()


@pytest.mark.parametrize("capacity, top_p", [(2000, 0.9), (150, 0.97)])
def test_long_selections_are_those_of_the_reference(capacity, top_p):
    scores, lse = 2 * torch.randn(1, 4, 2, 2000), torch.randn(1, 4, 2)
    scores.index_fill_(-1, torch.tensor([5, 900]), torch.nan)
    mask = torch.rand(1, 1, 2, 2000) < 0.7
    shape, arguments = (1, 2, capacity), (scores, lse, mask, None, top_p)
    indices, count = torch.empty(shape, dtype=INT), torch.empty(shape[:2], dtype=INT)
    sparse_reference.top_p_select(*arguments, indices, count)
    ours, our_count = run("top_p_select", arguments, (shape, INT), (shape[:2], INT))
    assert torch.equal(our_count, count) and count.min() > 128
    for k in range(2):
        assert torch.equal(ours[0, k, : count[0, k]], indices[0, k, : count[0, k]])


@with_cases("T1 T33 T1025 none all softcap D12 D80-48 M5 mask-float mask-dead per-head bf16 fp16 packed24 packed42 packed "
            "packed-per-head")  # fmt: skip
def test_attending_to_a_selection(case):
    test_sparse_ops.test_attending_to_a_selection(case)


@with_cases("T1025 D80-48 M5 bf16 packed packed-per-head", SparseCase("heads", per_head=True, group=4, queries=2))
def test_scores_and_copies_of_a_selection(case):
    (q, keys, _, indices, count, *_), dense, _ = selected_problem(case)
    shape = (*q.shape[:3], indices.shape[-1])
    expected = torch.empty(shape)
    sparse_reference.qk_selected(q, keys, indices, count, 0.3, expected)
    (out,) = run("qk_selected", (q, keys, indices, count, 0.3), (shape, FLOAT))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    shape = (*indices.shape, case.dim)
    expected = torch.full(shape, torch.nan, dtype=dense.dtype)
    sparse_reference.gather_selected(dense, indices, count, expected)
    (out,) = run("gather_selected", (dense, indices, count), (shape, dense.dtype))
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_exact_keys_with_packed_values_in_long_splits(monkeypatch):
    """And the other way round, each split of several blocks."""
    monkeypatch.setattr(plan, "TARGET_GROUPS", 1)
    case = SparseCase("mixed", packed=True, tokens=700, share=0.8, mask="float", queries=2)
    (q, packed_keys, packed_values, *rest), keys, values = selected_problem(case)
    wanted, lse = torch.empty(q.shape), torch.empty(q.shape[:3])
    for sources in ([keys], packed_values), (packed_keys, [values]):
        sparse_reference.attend_selected(q, *sources, *rest, wanted, lse)
        out, our_lse = run("attend_selected", (q, *sources, *rest), (q.shape, FLOAT), (lse.shape, FLOAT))
        assert torch.allclose(out, wanted, rtol=1e-4, atol=1e-5) and torch.allclose(our_lse, lse, rtol=1e-5, atol=1e-5)


def launches_of(monkeypatch, case, **options):
    """Launches of attend_selected by kernel, and its arguments."""
    made = []

    def compile_shader(source):
        made.append(metalsim.compile_shader(source, orders=(0,), **options))
        return made[-1]

    monkeypatch.setattr(library, "shaders", library.Shaders(compile_shader))
    arguments, *_ = selected_problem(case)
    q = arguments[0]
    run("attend_selected", arguments, (q.shape, FLOAT), (q.shape[:3], FLOAT))
    return {launch.kernel: launch for each in made for launch in each.launches}, arguments


@needs_emulator
def test_threadgroups_stay_within_the_limits(monkeypatch):
    launches, _ = launches_of(monkeypatch, SparseCase("widest", dim=128, group=16, packed=True))
    assert all(launch.group == [128, 1, 1] for launch in launches.values())
    assert launches["attend_selected"].group_bytes <= 17 * 1024


@needs_emulator
def test_selected_tokens_alone_are_read_once_a_group_of_heads(monkeypatch):
    launches, (*_, count, _, _, _) = launches_of(monkeypatch, SparseCase("reads", group=4), kind="loads")
    loaded = launches["attend_selected"].loaded
    assert loaded[2] == loaded[7] == count.sum() * 64 * 4  # keys, values


def test_a_call_without_a_shader_is_answered_by_the_reference_and_counted(monkeypatch):
    case = SparseCase("bf16")
    index = index_of(case)
    planes, terms, _ = coded(index, 0.1)
    arguments = planes, terms, index.sign, index.factor, index.bias, case.dim, 0.1, 0
    shape = (*planes.shape[:3], case.tokens)
    expected = torch.empty(shape, dtype=torch.bfloat16)
    sparse_reference.sign_scores(*arguments, expected)
    with pytest.warns(UserWarning, match="sign_scores runs its pure-torch reference, which is slow: scores in bfloat16"):
        (out,) = run("sign_scores", arguments, (shape, torch.bfloat16))
    assert torch.equal(out, expected) and metal.fallbacks() == {"sign_scores": {"scores in bfloat16": 1}}
    monkeypatch.setattr(metal, "_state", metal._State())


NAMES_OF = {
    "top_p_select": "scores exact_lse mask candidates top_p indices count".split(),
    "attend_selected": "q keys values indices count mask scale softcap out lse".split(),
    "gather_selected": "x indices count out".split(),
    "sign_scores": "planes terms sign factor bias head_dim scale start out".split(),
}
OF_HEADS = "indices must have a selection for each of 2 key heads or each of 6 query heads"
BAD = [
    ("top_p_select", "scores must be float32 or float16", "scores", lambda x: x.double()),
    ("top_p_select", "exact_lse must have the shape [1, 6, 2]", "exact_lse", lambda x: x[:, :5]),
    ("top_p_select", "indices must be int32", "indices", lambda x: x.long()),
    ("top_p_select", "indices must have a number of selections that divides 6 heads", "indices", lambda x: x.repeat(1, 2, 1)),
    ("top_p_select", "mask must have 33 columns", "mask", lambda x: x[..., :30]),
    ("attend_selected", "keys must be one tensor of 4 dims or nine of a store", "keys", lambda x: []),
    ("attend_selected", OF_HEADS, "indices", lambda x: x[:, :1]),
    ("attend_selected", "count must have the shape [1, 2]", "count", lambda x: x[:, :1]),
    ("attend_selected", "values.levels must have the shape [4]", "values", lambda x: [*x[:3], x[3][:3], *x[4:]]),
    ("attend_selected", "lse must be float32", "lse", lambda x: x.double()),
    ("gather_selected", "indices must have a multiple of 0 selections", "x", lambda x: x[:, :0]),
    ("sign_scores", "factor must have a capacity of at least 73", "start", lambda x: 40),
    ("sign_scores", "planes must have the shape [1, 6, 2, 4, 3]", "head_dim", lambda x: 96),
    ("sign_scores", "sign must have 2 words", "sign", lambda x: x[..., :1]),
]  # fmt: skip


@pytest.mark.parametrize("op, message, name, change", BAD, ids=[bad[1] for bad in BAD])
def test_an_error_names_the_argument_and_comes_before_any_launch(monkeypatch, op, message, name, change):
    monkeypatch.setattr(library, "shaders", library.Shaders(lambda source: pytest.fail("compiled")))
    (arguments,) = (arguments for called, arguments in test_sparse_ops.calls() if called == op)
    named = dict(zip(NAMES_OF[op], arguments))
    named[name] = change(named[name])
    with pytest.raises(RuntimeError) as caught:
        metal.launcher(op)(*named.values())
    assert message in str(caught.value) and ", got " in str(caught.value)


@needs_emulator
@pytest.mark.parametrize("name", SPARSE_NAMES)
def test_opcheck(on_cpu, name):  # noqa: F811
    on_cpu({name: metal.launcher(name)})
    for _, arguments in (call for call in test_sparse_ops.calls() if call[0] == name):
        torch.library.opcheck(getattr(torch.ops.torch_kvq, name).default, arguments)


def generated(model, inputs, store):
    cache = RaBitQSparseCache(window_len=16, flush_len=8, min_dense_len=0, store=store)
    options = dict(max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True)
    out = model.generate(**inputs, past_key_values=cache, **options)
    return out.sequences, torch.stack(out.logits), cache


@needs_emulator
@pytest.mark.parametrize("store", ["exact", "isoquant"])
def test_a_real_model_writes_the_same_tokens(on_cpu, monkeypatch, smollm2, store):  # noqa: F811
    model, tokenizer = smollm2
    text = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid. " * 4
    inputs = tokenizer(text + "The capital of Japan is", return_tensors="pt")
    assert inputs.input_ids.shape[1] > 80, "too short to be indexed"
    on_cpu({name: getattr(reference if name in DENSE_NAMES else sparse_reference, name) for name in NAMES})
    tokens, logits, _ = generated(model, inputs, store)
    made = []

    def compile_shader(source):
        made.append(metalsim.compile_shader(source, orders=(3,)))
        return made[-1]

    monkeypatch.setattr(library, "shaders", library.Shaders(compile_shader))
    on_cpu({name: metal.launcher(name) for name in NAMES})
    ours, our_logits, cache = generated(model, inputs, store)
    assert torch.equal(ours, tokens)
    assert (our_logits - logits).abs().max() < 1e-3 * logits.abs().max()
    assert cache.stats.select_calls and 0 < cache.stats.selected_tokens < cache.stats.scanned_tokens
    counts = [launch.kernel for each in made for launch in each.launches]
    layers = model.config.num_hidden_layers
    for kernel in ("quantise_query", "sign_scores", "find_cuts", "write_selection", "attend_selected"):
        assert counts.count(kernel) >= 3 * layers
    assert counts.count("index_keys") >= layers
