"""The operators of sparse attention by the kernels for CUDA devices: the table of ``test_sparse_ops`` and what is special to
them, run on a GPU and, without one, by the emulator of ``cuda_host``."""

import functools

import pytest
import test_sparse_ops
import torch
from cuda_host import emulated_library
from cuda_host.attend_checks import moved
from op_cases import check_fences, fenced, relative_error
from sparse_cases import SparseCase, coded, index_of, selected_problem
from test_sparse_ops import *  # noqa: F403  every test of the table

from torch_kvq import ops
from torch_kvq.backends import cuda
from torch_kvq.ops import sparse_reference
from torch_kvq.ops.schemas import SPARSE_NAMES

BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32


def whole_on(x: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` on ``device`` with all of its storage, fences too, and that storage."""
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset()), whole


class OnDevice:
    """The operators for arguments on the CPU: they are moved to ``device`` and what it wrote comes back."""

    def __init__(self, device: str):
        self.device = device

    def __getattr__(self, name):
        return functools.partial(self.call, getattr(ops, name)._schema, self.operator(name))

    def operator(self, name):
        return getattr(ops, name)

    def call(self, schema, operator, *arguments):
        there, back = [], []
        for argument, declared in zip(arguments, schema.arguments):
            if isinstance(argument, list):
                there.append([whole_on(x, self.device)[0] for x in argument])
            elif isinstance(argument, torch.Tensor):
                on_device, whole = whole_on(argument, self.device)
                there.append(on_device)
                if declared.alias_info is not None:
                    back.append((argument, whole))
            else:
                there.append(argument)
        operator(*there)
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
def kernels(request, monkeypatch):
    """Kernels that take the place of ``ops`` in the tests."""
    if request.param == "emulated":
        emulated_library.skip_if_left_out(request.node.name)
    kernels = MAKERS[request.param]()
    monkeypatch.setattr(test_sparse_ops, "ops", kernels)
    return kernels


@pytest.fixture
def isa():
    """No instruction set of the CPU."""


def is_native(kernels) -> bool:
    """Whether the compiled kernels answer, not Triton."""
    return not isinstance(kernels, OnDevice) or cuda.served_by() == cuda.NATIVE


def on_gpu(test):
    """A test of what the emulator does not have."""
    return pytest.mark.gpu(pytest.mark.parametrize("kernels", ["cuda"], indirect=True)(test))


@on_gpu
@pytest.mark.parametrize("name", SPARSE_NAMES)
def test_opcheck(name):
    for _, arguments in (call for call in test_sparse_ops.calls() if call[0] == name):
        torch.library.opcheck(getattr(ops, name), tuple(moved(arguments, "cuda")))


# On tensor cores: 16-bit dense keys and values.
HALF_CASES = [
    *(SparseCase(f"D{d}", dim=d, tokens=300, dtype=BF16) for d in (64, 80, 96, 128, 256)),
    *(SparseCase(f"rows{g * m}", group=g, queries=m, tokens=200, dtype=HALF) for g, m in ((1, 1), (8, 1), (16, 1), (3, 5))),
    *(SparseCase(f"mask-{m}", mask=m, batch=2, queries=2, tokens=150, dtype=BF16) for m in ("bool", "float", "dead")),
    SparseCase("softcap", softcap=4.0, dtype=HALF, tokens=100),
    SparseCase("none", share=0.0, dtype=BF16, dim=128),
    SparseCase("all", share=1.0, dtype=BF16, dim=128, tokens=1025),
    SparseCase("per-head", per_head=True, queries=2, mask="bool", dtype=BF16, group=4),
    SparseCase("many", batch=5, heads=9, tokens=70, share=0.1, dtype=HALF, group=1),
]


PACKED_CASES = [
    SparseCase("group", packed=True, dim=128, tokens=300, group=4, dtype=BF16),
    SparseCase("rows", packed=True, dim=128, tokens=150, group=4, queries=5, dtype=HALF, batch=2, mask="float"),
    SparseCase("plain", packed=True, plain=True, dim=128, kind="isoquant", tokens=70, dtype=HALF, softcap=3.0),
    SparseCase("packed-per-head", packed=True, per_head=True, dim=128, group=2, dtype=HALF, mask="dead", queries=2),
    SparseCase("packed-none", packed=True, share=0.0, dim=128, dtype=HALF),
]


def check_packed(kernels, arguments):
    """16-bit outputs: the kernels in integers answer. Their weights have 15 bits, rounding of outputs comes on top."""
    q = arguments[0]
    (out, whole), (lse, lse_whole) = fenced(q.shape, q.dtype), fenced(q.shape[:3])
    kernels.attend_selected(*arguments, out, lse)
    check_fences(whole, lse_whole)
    expected, expected_lse = torch.empty(q.shape), torch.empty_like(lse)
    sparse_reference.attend_selected(*arguments, expected, expected_lse)
    assert relative_error(out, expected) <= 5e-4 + relative_error(expected.to(q.dtype), expected)
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
    assert torch.allclose(lse, expected_lse, rtol=1e-5, atol=2e-4)
    assert (out[lse == -torch.inf] == 0).all()


@pytest.mark.parametrize("case", PACKED_CASES, ids=lambda case: case.name)
def test_attending_to_three_bits_on_tensor_cores(case, kernels):
    """Rounding is that of the output alone: outputs of 32 bits are not left to the kernels in integers."""
    arguments, _, _ = selected_problem(case)
    (out, whole), (lse, lse_whole) = fenced(arguments[0].shape), fenced(arguments[0].shape[:3])
    kernels.attend_selected(*arguments, out, lse)
    check_fences(whole, lse_whole)
    expected, expected_lse = torch.empty_like(out), torch.empty_like(lse)
    sparse_reference.attend_selected(*arguments, expected, expected_lse)
    assert relative_error(out, expected) <= 1e-4
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
    assert torch.allclose(lse, expected_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("case", PACKED_CASES, ids=lambda case: case.name)
def test_attending_to_three_bits_in_integers(case, kernels):
    arguments, _, _ = selected_problem(case)
    check_packed(kernels, arguments)


@pytest.mark.parametrize("case", PACKED_CASES[:-1], ids=lambda case: case.name)
def test_integers_answer_for_three_bits(case, kernels):
    """They round otherwise than the kernel of anything, to which queries are left that are not aligned."""
    if not is_native(kernels):
        pytest.skip("Triton has one kernel for both")
    (q, *rest), _, _ = selected_problem(case)
    shifted, lses = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q), []
    for query in (q, shifted):
        lses.append(torch.empty(q.shape[:3]))
        kernels.attend_selected(query, *rest, torch.empty_like(q), lses[-1])
    assert not torch.equal(*lses)
    check_packed(kernels, [shifted, *rest])


COUNTS = {
    "edges": [0, 1, 31, 32, 33, 63, 64, 65],
    "uneven": [1400, 0, 1, 0, 0, 700, 3, 0],
    "last": [0, 0, 0, 0, 0, 0, 0, 5],
    "ring": [127, 128, 129, 511, 512, 513, 640, 641],
}


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_counts_that_differ_between_heads(packed, name, group, kernels):
    """Ends of steps, tiles and rings of copies; heads without tokens among others."""
    counts = COUNTS[name]
    case = SparseCase(name, packed=packed, dim=128, tokens=1400, heads=4, batch=2, group=group, dtype=HALF)
    (q, keys, values, indices, count, *rest), _, _ = selected_problem(case)
    generator = torch.Generator().manual_seed(3)
    for i, most in enumerate(counts):
        places = torch.randperm(case.tokens, generator=generator)[:most].sort().values
        indices[i // 4, i % 4, :most], count[i // 4, i % 4] = places.int(), most
    check_packed(kernels, [q, keys, values, indices, count, *rest])


def test_scores_that_climb(kernels):
    """Every step has a higher maximum and larger scales than those before it, and then much lower ones."""
    case = SparseCase("climb", packed=True, dim=128, tokens=900, heads=1, group=4, dtype=BF16, plain=True, share=1.0)
    (q, keys, values, *rest), _, _ = selected_problem(case)
    growth = torch.cat([torch.linspace(0.01, 3, 700), torch.full((keys[2].shape[2] - 700,), 0.02)])
    for store in (keys, values):
        store[2].copy_((store[2].float() * growth).half())
    check_packed(kernels, [q, keys, values, *rest])


@pytest.mark.parametrize("case", HALF_CASES, ids=lambda case: case.name)
def test_attending_on_tensor_cores(case):
    test_sparse_ops.test_attending_to_a_selection(case)


# Four words a token, copied as 16 bytes: any number of rows, chunks and segments; a bias or none.
WORD_CASES = [
    *(SparseCase(f"D{d}", dim=d, tokens=150, group=4) for d in (100, 124)),
    *(
        SparseCase(f"G{g}M{m}", dim=128, tokens=130, group=g, queries=m, centred=True)
        for g, m in ((1, 1), (4, 1), (6, 1), (3, 3))
    ),
    SparseCase("chunks", dim=128, tokens=1500, group=4, batch=2, heads=3, centred=True),
    SparseCase("segments", dim=128, tokens=2500, group=4, heads=1),
    SparseCase("words-per-head", dim=128, tokens=300, group=5, queries=2, per_head=True),
    SparseCase("one", dim=128, tokens=1, group=4),
    SparseCase("other-words", dim=64, tokens=300, group=4),
]


@pytest.mark.parametrize("scale", [0.1, 20.0], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("case", WORD_CASES, ids=lambda case: case.name)
def test_scores_and_their_selection_in_one(case, dtype, scale, kernels):
    """The selection of the same scores to the last bit."""
    index = index_of(case)
    planes, terms, _ = coded(index, scale)
    if case.queries > 1:
        terms[:, -1, -1] = torch.nan  # of a query that is not finite: all of its scores are kept
    coding = planes, terms, index.sign, index.factor, index.bias, case.dim, scale, 0
    shape, lse = (
        (*planes.shape[:3], case.tokens),
        torch.linspace(-1, 5, planes.shape[1])[None, :, None].expand(planes.shape[:3]),
    )
    expected, (scores, scores_whole) = torch.empty(shape, dtype=dtype), fenced(shape, dtype)
    sparse_reference.sign_scores(*coding, expected)
    selections = (case.batch, case.selections)
    (indices, indices_whole), (count, count_whole) = (fenced(s, torch.int32) for s in ((*selections, case.tokens), selections))
    kernels.sign_top_p_select(*coding, lse, 0.7, scores, indices, count)
    check_fences(scores_whole, indices_whole, count_whole)
    expected_indices, expected_count = torch.empty_like(indices), torch.empty_like(count)
    sparse_reference.top_p_select(expected, lse, None, None, 0.7, expected_indices, expected_count)
    assert torch.equal(count, expected_count)
    assert all(torch.equal(*(x[b, k, : count[b, k]] for x in (indices, expected_indices))) for b, k in count.nonzero().tolist())


def test_more_chunks_than_warps_are_scored(kernels):
    case = SparseCase("chunks", batch=50, heads=70, group=1, tokens=5, dim=128, centred=True, kind="none")
    index = index_of(case)
    planes, terms, _ = coded(index, 0.1)
    (out, whole), expected = fenced((50, 70, 1, 5), HALF), torch.empty(50, 70, 1, 5, dtype=HALF)
    arguments = planes, terms, index.sign, index.factor, index.bias, case.dim, 0.1, 0
    kernels.sign_scores(*arguments, out)
    check_fences(whole)
    sparse_reference.sign_scores(*arguments, expected)
    assert torch.equal(out, expected)


LONG = {
    "usual": lambda shape: 3 * torch.randn(shape),
    "large": lambda shape: 300 + 50 * torch.randn(shape),
    "equal": lambda shape: torch.full(shape, 1.5),
    "narrow": lambda shape: 8 + 0.01 * torch.randn(shape),
    "peak": lambda shape: torch.randn(shape).index_fill_(-1, torch.tensor([shape[-1] - 2]), 30.0),
    "hidden": lambda shape: torch.randn(shape).masked_fill(torch.rand(shape) < 0.4, -torch.inf),
}


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("name", LONG)
def test_rows_of_many_segments(name, dtype):
    """The threshold is the sorted one, for more columns than a block of threads has, some in doubt or all."""
    length, top_p = 70001, 0.95
    scores, lse = LONG[name]((1, 2, 1, length)).to(dtype), torch.tensor([[[-1.0], [2.0]]])
    sets = test_sparse_ops.select(scores, lse, top_p, per_head=True)
    share, exact = test_sparse_ops.masses(scores.float(), lse)
    for h in range(2):
        row, kept = scores[0, h, 0].float(), torch.zeros(length, dtype=torch.bool)
        kept[sorted(sets[0][h])] = True
        least = row[kept].min()
        assert torch.equal(kept, row >= least)
        assert exact[0, h, 0] + share[0, h, 0, kept].sum() >= top_p - 1e-5
        assert exact[0, h, 0] + share[0, h, 0, row > least].sum() < top_p + 1e-5


def test_a_long_selection_is_cut_to_its_capacity():
    scores = torch.randn(1, 2, 1, 20000)
    (chosen,) = test_sparse_ops.select(scores, torch.full((1, 2, 1), -torch.inf), 1.0, capacity=1500, per_head=True)
    for h in range(2):
        assert chosen[h] == set(scores[0, h, 0].topk(1500).indices.tolist())


@on_gpu
def test_host_memory_is_gathered_if_it_is_pinned():
    case = SparseCase("host", batch=2, tokens=500, dim=128, dtype=BF16)
    (_, (keys,), _, indices, count, *_), *_ = selected_problem(case)
    expected = torch.zeros(*indices.shape, 128, dtype=BF16)
    sparse_reference.gather_selected(keys, indices, count, expected)
    out, rest = torch.zeros(expected.shape, dtype=BF16, device="cuda"), moved((indices, count), "cuda")
    ops.gather_selected(keys.pin_memory(), *rest, out)
    assert torch.equal(out.cpu(), expected)
    with pytest.raises(RuntimeError, match="x must be in pinned memory"):
        ops.gather_selected(keys, *rest, out)


@on_gpu
def test_a_graph_follows_the_counts():
    """What was captured selects and attends anew: the number of tokens is known to the device alone."""
    case = SparseCase("graph", batch=2, heads=4, tokens=3000, dim=128, group=4, dtype=BF16)
    (q, keys, values, *_), *_ = selected_problem(case)
    q, keys, values = moved((q, keys, values), "cuda")
    scores, lse = torch.randn(2, 16, 1, 3000, device="cuda"), torch.zeros(2, 16, 1, device="cuda")
    indices = torch.zeros(2, 4, 3000, dtype=torch.int32, device="cuda")
    count, out = torch.zeros(2, 4, dtype=torch.int32, device="cuda"), torch.empty_like(q)
    out_lse = torch.empty_like(lse)

    def step():
        ops.top_p_select(scores, lse, None, None, 0.9, indices, count)
        ops.attend_selected(q, keys, values, indices, count, None, 0.1, 0.0, out, out_lse)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for size in (0.1, 3.0, 8.0):
        scores.copy_(size * torch.randn_like(scores))
        step()
        expected = [x.clone() for x in (count, out, out_lse)]
        for x in (out, out_lse):
            x.fill_(torch.nan)
        count.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        for ours, theirs in zip((count, out, out_lse), expected):
            assert torch.equal(ours, theirs)
