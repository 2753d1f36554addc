"""``sign_top_p_select`` by the kernels for CUDA devices where masses lie unevenly between rows, blocks of threads and exact
tokens: up to four rows a kv head are one launch (``csrc/cuda/sparse_item.cuh``), more are several (``sparse_select.cu``)."""

import dataclasses
import functools

import pytest
import test_sparse_cuda
import test_sparse_item_cuda
import torch
from sparse_cases import SparseCase, coded, index_of
from test_sparse_cuda import HALF, on_gpu
from test_sparse_item_cuda import ITEM, check_item, check_replays, of_item

from torch_kvq import ops
from torch_kvq.ops import sparse_reference

kernels = test_sparse_cuda.kernels
SUMMED = dataclasses.replace(ITEM, tokens=1500, group=6)  # the scan adds up masses
SCORED = dataclasses.replace(ITEM, group=6)  # of more segments than it may have for that
by_kernels = pytest.mark.parametrize("case", [ITEM, SUMMED, SCORED], ids=["item", "summed", "scored"])


def heavy(terms, index):
    """All mass in one token."""
    index.bias[:, :, 1300] += 60


def front(terms, index):
    """All mass in the first tokens."""
    index.bias[:, :, :128] += 30


def ascending(terms, index):
    index.bias.add_(torch.linspace(-20, 20, index.bias.shape[-1]).half())


def descending(terms, index):
    index.bias.sub_(torch.linspace(-20, 20, index.bias.shape[-1]).half())


def flat(terms, index):
    terms.mul_(0.02), index.bias.mul_(0.1)


def low(terms, index):
    """Masses of every other row, not of the first, too small for sums relative to exp(0)."""
    terms[:, 1::2, :, 3] -= 150


def dead(terms, index):
    """Rows and a head without any token."""
    terms[:, 2, :, 3] = -torch.inf
    index.bias[0, 1] = -torch.inf


def high(terms, index):
    """A few scores too large for narrow bins; sums of masses are finite all the same."""
    flat(terms, index)
    index.bias[:, :, 9::500] = 245.0  # times a scale of 0.3


def strange(terms, index):
    """A few scores of one head are no numbers."""
    index.factor[0, 1, 9::500] = torch.nan


EDITS = [heavy, front, ascending, descending, flat, low, dead, high, strange]


@by_kernels
@pytest.mark.parametrize("top_p", [0.2, 0.99])
@pytest.mark.parametrize("edit", EDITS)
def test_hard_scores(edit, top_p, case, kernels):
    check_item(kernels, of_item(edit, case), top_p)


@by_kernels
@pytest.mark.parametrize("more", [-torch.inf, -150.0, 60.0])
@pytest.mark.parametrize("edit", [None, low, dead, high])
def test_hard_scores_next_to_exact_tokens(edit, more, case, kernels):
    """Exact tokens have no mass, one that is far too low, or most of it."""
    check_item(kernels, of_item(edit, case), 0.5 if more < 60 else 0.9999, more=more)


@by_kernels
@pytest.mark.parametrize("capacity", [1, 300])
@pytest.mark.parametrize("edit", [front, flat, high, strange])
def test_hard_selections_are_cut_to_their_capacity(edit, capacity, case, kernels):
    check_item(kernels, of_item(edit, case), 0.9, capacity=capacity)


@pytest.mark.parametrize("edit", [test_sparse_item_cuda.unknown, test_sparse_item_cuda.large, test_sparse_item_cuda.tiny])
@pytest.mark.parametrize("top_p", [0.0, 0.5, 1.0])
def test_odd_scores_in_several_launches(top_p, edit, kernels):
    check_item(kernels, of_item(edit, SUMMED), top_p)


def long_coding(batch, heads, tokens, group):
    """Arguments of ``sign_top_p_select`` up to ``scale`` on a GPU: scores of a mean of 0 and a deviation of some 2."""
    scale, deviation = 0.2, 2.0
    case = SparseCase("seed", dim=128, tokens=32, group=group, batch=batch, heads=heads, centred=True)
    planes, terms, _ = coded(index_of(case), scale)
    planes, terms, shape = planes.cuda(), terms.cuda(), (batch, heads, tokens)
    generator = torch.Generator("cuda").manual_seed(2)
    sign = torch.randint(-(2**31), 2**31, (*shape, 4), dtype=torch.int32, device="cuda", generator=generator)
    factor = torch.rand(shape, dtype=HALF, device="cuda", generator=generator) + 0.5
    bias = torch.randn(shape, dtype=HALF, device="cuda", generator=generator)
    terms[..., :2] *= 0.3 * deviation / 128**0.5 / terms[..., :1]  # a step of four bits: a third of their deviation
    terms[..., 3] = 0
    return planes, terms, sign, factor, bias, 128, scale


LONG_EDITS = {
    "plain": lambda bias: None,
    "heavy": lambda bias: bias[:, :, 12345].add_(200),
    "ascending": lambda bias: bias.add_(torch.linspace(-20, 20, bias.shape[-1], device="cuda").half()),
    "hidden": lambda bias: bias[:, :, ::3].fill_(-torch.inf),
    "unknown": lambda bias: bias[-1, :, 4567].fill_(torch.nan),
    "large": lambda bias: bias[-1, :, 4567].fill_(60000.0),
}
# Several waves of blocks of one launch, one wave, more tokens than it takes, and more launches with and without masses
# that the scan adds up.
LONG_SHAPES = [(8, 8, 131072, 4), (5, 8, 100003, 4), (3, 70, 20011, 4), (1, 1, 131072, 4), (1, 1, 600001, 4)]
LONG_SHAPES += [(8, 8, 32768, 8), (1, 1, 131072, 8)]


@on_gpu
@pytest.mark.parametrize("top_p", [0.4, 0.9])
@pytest.mark.parametrize("edit", LONG_EDITS)
@pytest.mark.parametrize("shape", LONG_SHAPES, ids=str)
def test_selections_from_many_tokens(shape, edit, top_p):
    """Between those of a little less and a little more mass."""
    batch, heads, tokens, group = shape
    coding = long_coding(*shape)
    LONG_EDITS[edit](coding[4])
    lse = torch.full((batch, group * heads, 1), 5.0, device="cuda")
    scores = torch.empty(batch, group * heads, 1, tokens, dtype=HALF, device="cuda")
    ops.sign_scores(*coding, 0, scores)
    indices = torch.full((batch, heads, tokens), -1, dtype=torch.int32, device="cuda")
    count = torch.full((batch, heads), -1, dtype=torch.int32, device="cuda")
    ops.sign_top_p_select(*coding, 0, lse, top_p, torch.empty_like(scores), indices, count)
    for b in range(batch):
        less, more = (
            sparse_reference._kept(scores[b].float(), lse[b], p)[0].unflatten(0, (heads, group)).any((1, 2))
            for p in (top_p - 1e-5, top_p + 1e-5)
        )
        for h in range(heads):
            places = indices[b, h, : count[b, h]].long()
            assert (places.diff() > 0).all()
            kept = torch.zeros(tokens, dtype=torch.bool, device="cuda").index_fill_(0, places, True)
            assert not (less[h] & ~kept).any() and not (kept & ~more[h]).any()


@on_gpu
def test_a_graph_of_many_tokens_scans_anew():
    """Blocks of several waves forget from call to call which rows had large scores, too."""
    coding = long_coding(8, 8, 131072, 4)
    terms, bias = coding[1], coding[4]
    lse = torch.zeros(8, 32, 1, device="cuda")
    scores = torch.empty(8, 32, 1, 131072, dtype=HALF, device="cuda")
    indices, count = (torch.zeros(s, dtype=torch.int32, device="cuda") for s in ((8, 8, 131072), (8, 8)))

    def step():
        ops.sign_top_p_select(*coding, 0, lse, 0.3, scores, indices, count)

    def turn(sequence):
        terms.copy_(terms.roll(1, 1) * 1.05)
        bias[:, :, 1000] = 0.0
        bias[sequence, :, 1000] = 1000.0

    check_replays(step, [functools.partial(turn, i % 8) for i in range(10)], count, indices)
