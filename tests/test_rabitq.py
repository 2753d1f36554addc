"""The 1-bit estimate against its theory, and what selecting by it keeps."""

import math

import pytest
import torch

from torch_kvq.attention.select import select_tokens
from torch_kvq.codecs.rabitq import RaBitQConfig, RaBitQIndex, posterior_scores
from torch_kvq.ops import reference

ROTATIONS = 256
PAIRS = 16


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def pairs_of(cosine, dim, make):
    """Unit keys and queries ``[1, 1, PAIRS, D]`` of that cosine."""
    keys = unit(make(torch.randn(1, 1, PAIRS, dim)))
    other = torch.randn(1, 1, PAIRS, dim)
    other = unit(other - (other * keys).sum(-1, keepdim=True) * keys)
    return keys, cosine * keys + (1 - cosine**2) ** 0.5 * other


def estimates(keys, queries, kind):
    """Of every pair by every rotation, ``[ROTATIONS, PAIRS]``: with the query as it is, and in 4 bits; and its step squared."""
    exact, coded, steps = [], [], []
    for seed in range(ROTATIONS):
        index = RaBitQIndex.of(keys, RaBitQConfig(kind, seed))
        code = index.code(queries, 1.0)
        coded.append(index.scores(code, 0, PAIRS)[0, 0].diagonal())
        bits = reference._to_bits(index.sign[:, :, :PAIRS]).flatten(-2)[..., : keys.shape[-1]]
        turned = reference.rotated(queries, *index.transform[3:])
        exact.append(((turned * (1 - 2 * bits)).sum(-1) * index.factor[:, :, :PAIRS].float())[0, 0])
        steps.append(code.terms[..., 0].square().mean())
    return torch.stack(exact), torch.stack(coded), torch.stack(steps).mean().item()


ALPHA = {64: 0.8004, 128: 0.7994, 256: 0.7986}  # mean cosine of a random vector and its signs

KEYS = {
    "random": lambda x: x,
    "outliers": lambda x: x * torch.where(torch.arange(x.shape[-1]) % 32 == 5, 20.0, 1.0),
    "two": lambda x: x * (torch.arange(x.shape[-1]) % (x.shape[-1] // 2) == 3),
    "constant": lambda x: 1 + 0.1 * x,
}


def check(kind, cosine, dim, make):
    torch.manual_seed(dim)
    keys, queries = pairs_of(cosine, dim, make)
    exact, coded, step = estimates(keys, queries, kind)
    noise = ((1 - ALPHA[dim] ** 2) / ALPHA[dim] ** 2 * (1 - cosine**2) / (dim - 1)) ** 0.5
    rounding = (step / 12) ** 0.5 / ALPHA[dim]  # of a query's codes, uniform in half a step
    for ours, theory in ((exact, noise), (coded, math.hypot(noise, rounding))):
        error = ours - cosine
        spread = error.square().mean().sqrt().item()
        assert abs(error.mean()) <= 4 * theory / (ROTATIONS * PAIRS) ** 0.5 + 1e-4
        assert spread <= 1.05 * theory
    return spread


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("cosine", [0.0, 0.3, 0.7, 0.95])
def test_the_estimate_is_unbiased_and_as_precise_as_the_theory(cosine, dim):
    check("hadamard2", cosine, dim, KEYS["random"])


@pytest.mark.parametrize("kind", ["hadamard2", "dense"])
@pytest.mark.parametrize("name", ["outliers", "two", "constant"])
def test_so_it_is_for_keys_that_are_not_random(name, kind):
    check(kind, 0.7, 128, KEYS[name])


@pytest.mark.parametrize("cosine, spread", [(0.0, 0.0682), (0.3, 0.0640), (0.7, 0.0497), (0.95, 0.0226)])
def test_known_spreads_of_4_bit_queries(cosine, spread):
    assert check("dense", cosine, 128, KEYS["random"]) == pytest.approx(spread, rel=0.05)


def test_one_round_of_mixing_is_not_enough_for_sparse_vectors():
    """A key and a query that differ in the same two channels."""
    torch.manual_seed(0)
    keys, queries = unit(KEYS["two"](torch.randn(1, 1, PAIRS, 128))), KEYS["two"](torch.randn(1, 1, PAIRS, 128))
    queries = unit(queries - (queries * keys).sum(-1, keepdim=True) * keys)
    one, two = (estimates(keys, queries, kind)[0].std() for kind in ("hadamard", "hadamard2"))
    assert one > 2 * two


def test_the_parts_of_a_logit_add_up_for_any_centres():
    """Equation 2: with a signless key, ``k = centre``, nothing is left to estimate."""
    centre, query_centre, balance = (torch.randn(1, 2, 64) for _ in range(3))
    queries = torch.randn(1, 4, 3, 64)
    index = RaBitQIndex.of(centre[:, :, None], centre=centre, balance=balance.abs() + 0.5, query_centre=query_centre)
    scores = index.scores(index.code(queries, 0.5), 0, 1)[..., 0]
    theirs = 0.5 * (queries * centre.repeat_interleave(2, 1).unsqueeze(2)).sum(-1)
    assert torch.allclose(scores, theirs, rtol=1e-4, atol=1e-4)


def test_centred_queries_have_less_noise():
    torch.manual_seed(0)
    mean = torch.randn(1, 1, 64)
    queries, keys = 3 * mean[:, :, None] + 0.3 * torch.randn(1, 1, 40, 64), torch.randn(1, 1, 200, 64)
    errors = []
    for centre in (None, queries.mean(2)):
        index = RaBitQIndex.of(keys, query_centre=centre)
        errors.append((index.scores(index.code(queries, 1.0), 0, 200) - queries @ keys.transpose(-1, -2)).std())
    assert errors[1] < 0.2 * errors[0]


@pytest.mark.parametrize("noise, mass", [(0, 0.950), (0.25, 0.947), (0.5, 0.936), (1, 0.884), (1.5, 0.774)])
def test_the_true_mass_of_noisy_scores(noise, mass):
    torch.manual_seed(0)
    logits = 2 * torch.randn(1, 4, 1, 16384)
    selection = select_tokens(logits + noise * torch.randn(logits.shape), torch.full((1, 4, 1), -torch.inf), 0.95, 4)
    share = logits.softmax(-1)
    kept = [share[0, h, 0, selection.indices[0, h, : selection.count[0, h]].long()].sum() for h in range(4)]
    assert sum(kept) / 4 == pytest.approx(mass, abs=0.006)


def test_widening_restores_the_mass():
    torch.manual_seed(0)
    keys, queries = torch.randn(1, 1, 8192, 64), torch.randn(1, 8, 1, 64)
    scale = 2 / 8  # logits of standard deviation 2
    index = RaBitQIndex.of(keys)
    scores = index.scores(index.code(queries, scale), 0, 8192)
    share = (scale * queries @ keys.transpose(-1, -2)).softmax(-1)
    nothing = torch.full((1, 8, 1), -torch.inf)
    masses = []
    for each in (scores, posterior_scores(scores, index, queries, scale)):
        selection = select_tokens(each, nothing, 0.95, 8)
        kept = [share[0, h, 0, selection.indices[0, h, : selection.count[0, h]].long()].sum() for h in range(8)]
        masses.append(sum(kept) / 8)
    assert masses[0] < 0.85 and abs(masses[1] - 0.95) < 0.01
    total = (scale * queries @ keys.transpose(-1, -2)).logsumexp(-1)
    assert (posterior_scores(scores, index, queries, scale).logsumexp(-1) - total).abs().max() < 0.3
