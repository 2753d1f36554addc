"""Pieces answered apart and merged equal attention over all of their tokens."""

import pytest
import torch

from torch_kvq.attention.compose import attend_exact, attend_packed, merge
from torch_kvq.codecs.isoquant import IsoQuantConfig
from torch_kvq.store import PackedStore


def packed(x: torch.Tensor, along_tokens: bool, bits: int = 3) -> PackedStore:
    store = PackedStore(IsoQuantConfig(bits=bits), along_tokens, x.shape[0], x.shape[1], x.shape[3], x.device)
    store.append(x)
    return store


def test_merge_is_exact_over_any_split():
    query, keys, values = torch.randn(2, 6, 3, 64), torch.randn(2, 2, 200, 64), torch.randn(2, 2, 200, 32)
    whole, whole_lse = attend_exact(query, keys, values)
    edges = [0, 1, 77, 78, 200]
    parts = [attend_exact(query, keys[:, :, a:b], values[:, :, a:b]) for a, b in zip(edges, edges[1:])]
    out, lse = merge(parts)
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=1e-5)


def test_a_piece_that_sees_nothing_adds_nothing():
    query, keys, values = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 40, 32), torch.randn(1, 2, 40, 32)
    seen = attend_exact(query, keys, values)
    blind = attend_exact(query, keys, values, mask=torch.zeros(1, 1, 1, 40, dtype=torch.bool))
    assert bool((blind[1] == -torch.inf).all()) and bool((blind[0] == 0).all())
    out, lse = merge([seen, blind])
    torch.testing.assert_close(out, seen[0])
    torch.testing.assert_close(lse, seen[1])


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("masked", [None, "bool", "float"])
def test_packed_piece_equals_its_decoded_tokens(softcap, masked):
    query, x, y = torch.randn(2, 8, 2, 64), torch.randn(2, 4, 130, 64), torch.randn(2, 4, 130, 96)
    keys, values = packed(x, False), packed(y, True)
    mask = None if masked is None else torch.rand(2, 1, 2, 130) > 0.3
    if masked == "float":
        mask = torch.where(mask, torch.randn(mask.shape), -torch.inf)
    ours = attend_packed(query, keys, values, 0.2, mask, softcap)
    dense = [store.decode(0, 130, torch.float32) for store in (keys, values)]
    wanted = attend_exact(query, *dense, 0.2, mask, softcap)
    torch.testing.assert_close(ours[0], wanted[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[1], wanted[1], rtol=1e-5, atol=1e-5)


def test_window_start_leaves_older_tokens_out():
    query, x = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 100, 64)
    keys, values = packed(x, False), packed(x, True)
    out, lse = attend_packed(query, keys, values, start=60)
    mask = torch.arange(100).view(1, 1, 1, -1) >= 60
    wanted, wanted_lse = attend_packed(query, keys, values, mask=mask)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)


def test_stores_of_different_lengths_are_refused():
    keys, values = packed(torch.randn(1, 1, 40, 64), False), packed(torch.randn(1, 1, 39, 64), True)
    with pytest.raises(ValueError, match="values must hold the 40 tokens of keys, got 39"):
        attend_packed(torch.randn(1, 1, 1, 64), keys, values)
