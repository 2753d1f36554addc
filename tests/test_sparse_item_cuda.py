"""``sign_top_p_select`` in one launch (``csrc/cuda/sparse_item.cuh``): up to four rows a kv head, whose scores stay in the
kernel and whose blocks of threads are a cluster or wait for each other in memory."""

import dataclasses

import pytest
import test_sparse_cuda
import torch
from cuda_host.attend_checks import moved
from op_cases import check_fences, fenced
from sparse_cases import SparseCase, coded, index_of
from test_sparse_cuda import HALF, OnDevice, is_native, on_gpu

from torch_kvq import ops
from torch_kvq.ops import sparse_reference

kernels = test_sparse_cuda.kernels
ITEM = SparseCase("item", dim=128, tokens=2500, group=4, batch=2, heads=2, centred=True)  # of several blocks of threads
LONG = dataclasses.replace(ITEM, tokens=45000, batch=1, heads=1)  # of as many as one item may have, a few parts each


def of_item(edit=None, case=ITEM, scale=0.3, junk=False):
    """Arguments of ``sign_top_p_select`` up to ``scale``, which ``edit(terms, index)`` may change. With the ``junk`` of unused
    capacity as tokens every row has scores that are unknown, and is handled like one with large scores."""
    index = index_of(case)
    planes, terms, _ = coded(index, scale)
    if edit:
        edit(terms, index)
    parts = index.sign, index.factor, index.bias
    if not junk:
        parts = (x[:, :, : case.tokens] if x.numel() else x for x in parts)
    return planes, terms, *parts, case.dim, scale


def check_item(kernels, coding, top_p, capacity=None, start=0, more=0.0, written=False):
    """One selection against the reference, where exact tokens have some log-sum-exp and ``more``. Scores of up to four rows a
    kv head stay in the kernel unless a ``capacity`` may be exceeded or they are to be ``written``."""
    planes, sign = coding[0], coding[2]
    tokens, selections = sign.shape[2] - start, sign.shape[:2]
    room = tokens if capacity is None else capacity
    lse = more + torch.linspace(-1, 3, planes.shape[1])[None, :, None].expand(planes.shape[:3])
    scores, scores_whole = fenced((*planes.shape[:3], tokens), HALF)
    (indices, indices_whole), (count, count_whole) = (fenced(s, torch.int32) for s in ((*selections, room), selections))
    kernels.sign_top_p_select(*coding, start, lse, top_p, scores, indices, count)
    check_fences(scores_whole, indices_whole, count_whole)
    expected = torch.empty_like(scores), torch.empty_like(indices), torch.empty_like(count)
    sparse_reference.sign_scores(*coding, start, expected[0])
    sparse_reference.top_p_select(expected[0], lse, None, None, top_p, *expected[1:])
    assert torch.equal(count, expected[2])
    for b, k in count.nonzero().tolist():
        assert torch.equal(indices[b, k, : count[b, k]], expected[1][b, k, : count[b, k]])
    if written or planes.shape[1] * planes.shape[2] > 4 * sign.shape[1]:
        torch.testing.assert_close(scores, expected[0], rtol=0, atol=0, equal_nan=True)
    else:
        assert capacity is not None or not is_native(kernels) or scores.isnan().all()


with_junk = pytest.mark.parametrize("junk", [False, True], ids=["tokens", "junk"])


@with_junk
@pytest.mark.parametrize("top_p", [0.0, 0.5, 0.95, 1.0])
def test_scores_of_four_rows_stay_in_the_kernel(top_p, junk, kernels):
    check_item(kernels, of_item(junk=junk), top_p)


@with_junk
@pytest.mark.parametrize("tokens", [1, 33, 64, 65, 700, 5600])
def test_items_of_any_number_of_blocks(tokens, junk, kernels):
    """Ends of words, of parts and of segments; unused capacity may begin within each."""
    case = SparseCase("any", dim=128, tokens=tokens, group=2, queries=2, batch=2, heads=3)
    check_item(kernels, of_item(case=case, junk=junk), 0.7)


@pytest.mark.parametrize("group, queries", [(2, 1), (1, 3), (1, 4)])
def test_queries_of_several_tokens(group, queries, kernels):
    check_item(kernels, of_item(case=dataclasses.replace(ITEM, group=group, queries=queries)), 0.6)


def unknown(terms, index):
    terms[:, 1] = torch.nan  # a row
    index.factor[:, 0, 70] = torch.nan  # a token
    index.bias[:, :, 1400] = torch.inf


def large(terms, index):
    terms[:, 2] *= 300
    index.bias[0, -1, 1234] = 60000.0


def hidden(terms, index):
    index.bias[:, :, ::3] = -torch.inf


def equal(terms, index):
    terms[..., :2] = 0
    index.bias.zero_()


def tiny(terms, index):
    """Scores round to numbers without a normal float16, of both signs and to -0."""
    terms.mul_(1e-7)
    index.bias.mul_(1e-7)


@with_junk
@pytest.mark.parametrize("top_p", [0.5, 0.95])
@pytest.mark.parametrize("edit", [unknown, large, hidden, equal, tiny])
def test_odd_scores_of_four_rows(edit, top_p, junk, kernels):
    check_item(kernels, of_item(edit, junk=junk), top_p)


@with_junk
@pytest.mark.parametrize("edit", [None, unknown, large])
def test_a_selection_of_four_rows_is_cut_to_its_capacity(edit, junk, kernels):
    check_item(kernels, of_item(edit, junk=junk), 0.9, capacity=200)


@with_junk
@pytest.mark.parametrize("edit", [None, unknown, large])
def test_a_selection_without_room_is_empty(edit, junk, kernels):
    check_item(kernels, of_item(edit, junk=junk), 0.9, capacity=0)


@pytest.mark.parametrize("edit", [None, hidden, large])
@pytest.mark.parametrize("more", [-torch.inf, -1000.0, 50.0, 1000.0, torch.inf])
def test_beside_any_mass_of_exact_tokens(more, edit, kernels):
    """From none to one that leaves nothing to select; each block of threads finds the same cut, or they wait for ever."""
    check_item(kernels, of_item(edit), 0.95, more=more)


@pytest.mark.parametrize("edit", [None, large])
@pytest.mark.parametrize("processors", [4, 7, 33])
@pytest.mark.parametrize("tokens", [1535, 1537, 5000])
def test_segments_with_fewer_parts_than_warps(tokens, processors, edit, kernels, monkeypatch):
    """Of GPUs of any size: warps of the last block of threads have no part, and the last part few tokens."""
    monkeypatch.setenv("KVQ_EMULATE_MULTIPROCESSORS", str(processors))
    case = SparseCase("few", dim=100, tokens=tokens, group=1, queries=3, batch=2, heads=3, centred=True, kind="none")
    check_item(kernels, of_item(edit, case), 0.9, start=2)


@pytest.mark.parametrize("edit", [None, unknown, large, equal])
def test_blocks_of_long_contexts_meet(edit, kernels):
    check_item(kernels, of_item(edit, LONG), 0.8, capacity=4000 if edit else None)


def meet_in(place, monkeypatch):
    """Blocks of threads of a kv head are a cluster on device 0 only."""
    monkeypatch.setenv("KVQ_EMULATE_DEVICE", "0" if place == "cluster" else "1")


places = pytest.mark.parametrize("place", ["cluster", "memory"])


@places
@pytest.mark.parametrize("capacity", [None, 300])
@pytest.mark.parametrize("top_p", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("edit", [None, unknown, large, hidden, equal])
def test_blocks_meet_in_a_cluster_or_in_memory(edit, top_p, capacity, place, kernels, monkeypatch):
    meet_in(place, monkeypatch)
    check_item(kernels, of_item(edit), top_p, capacity)


@places
@pytest.mark.parametrize("edit", [None, large])
@pytest.mark.parametrize("tokens", [1537, 3136, 7743, 12288, 12289])
def test_clusters_of_any_size(tokens, edit, place, kernels, monkeypatch):
    """Of two blocks of threads, three, six and eight, the last one with few tokens or many; nine are too many."""
    meet_in(place, monkeypatch)
    case = SparseCase("clusters", dim=128, tokens=tokens, group=3, heads=1, centred=True)
    check_item(kernels, of_item(edit, case), 0.9, tokens // 4)


@with_junk
@pytest.mark.parametrize("start", [3, 8])
@pytest.mark.parametrize("tokens", [130, 1301])
def test_rows_begin_anywhere(tokens, start, junk, kernels):
    case = SparseCase("odd", dim=112, tokens=tokens, group=3, heads=2, centred=start == 3)
    check_item(kernels, of_item(case=case, junk=junk), 0.8, start=start)


FULL = 360 * 64  # tokens of a segment at most


@on_gpu
@pytest.mark.parametrize("tokens", [FULL, FULL + 1])
def test_segments_are_as_long_as_they_may_be(tokens, kernels):
    """So many kv heads, of 132 blocks of threads at once, that each is one block's or, just above its size, three's."""
    case = SparseCase("long", dim=128, tokens=tokens, group=1, batch=7, heads=10, centred=True, kind="none")
    check_item(kernels, of_item(case=case), 0.8)


@pytest.mark.parametrize("edit", [None, equal, large])
@pytest.mark.parametrize("processors, heads, tokens", [(4, 5, FULL), (8, 3, 30000), (8, 5, 2 * FULL)])
def test_segments_on_a_small_gpu(processors, heads, tokens, edit, kernels, monkeypatch):
    """Of blocks that begin in turns: one a kv head, two that are alike, two that are full. ``equal`` scores are all
    counted as one code."""
    monkeypatch.setenv("KVQ_EMULATE_MULTIPROCESSORS", str(processors))
    case = SparseCase("turns", dim=128, tokens=tokens, group=2, heads=heads, centred=True)
    check_item(kernels, of_item(edit, case), 0.8)


def test_kv_heads_of_too_many_blocks(kernels, monkeypatch):
    """Where a quarter of a GPU does not hold one, the scan is a launch of its own and writes scores."""
    monkeypatch.setenv("KVQ_EMULATE_MULTIPROCESSORS", "4")
    case = SparseCase("many", dim=128, tokens=FULL + 1, group=1, heads=1, centred=True)
    check_item(kernels, of_item(case=case), 0.8, written=not isinstance(kernels, OnDevice))


def check_replays(step, changes, count, indices):
    """A captured ``step``, twice a graph, selects what it selects by itself after each of ``changes``."""
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
        step()
    for change in changes:
        change()
        step()
        expected = [x.clone() for x in (count, indices)]
        count.fill_(-1), indices.fill_(-1)
        graph.replay()
        assert torch.equal(count, expected[0])
        valid = torch.arange(indices.shape[-1], device="cuda") < count.unsqueeze(-1)
        assert torch.equal(indices[valid], expected[1][valid])


@on_gpu
def test_a_graph_scans_anew():
    """What blocks of threads tell each other is forgotten from call to call."""
    coding = moved(of_item(case=dataclasses.replace(ITEM, tokens=50000)), "cuda")
    planes, terms = coding[:2]
    lse, room = torch.zeros(planes.shape[:3], device="cuda"), (2, 2)
    scores = torch.empty(*planes.shape[:3], 50000, dtype=HALF, device="cuda")
    indices, count = (torch.zeros(s, dtype=torch.int32, device="cuda") for s in ((*room, 50000), room))

    def step():
        ops.sign_top_p_select(*coding, 0, lse, 0.8, scores, indices, count)

    def turn():
        planes.copy_(planes.roll(1, 1)), terms.copy_(terms.roll(1, 1) * 1.1)

    check_replays(step, 20 * [turn], count, indices)
