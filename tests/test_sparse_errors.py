"""What a sparse cache refuses, by name, and warns of."""

import warnings

import pytest
import tiny_models
import torch
from oracle import forced_logits
from test_sparse_cache import pieces_of, sparse

from torch_kvq import RaBitQSparseCache


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(top_p=0), "top_p must be above 0 and at most 1, a share of attention, got 0"),
        (dict(top_p=1.5), "top_p must be above 0 and at most 1, a share of attention, got 1.5"),
        (dict(top_p="all"), "top_p must be above 0"),
        (dict(top_p=float("nan")), "top_p must be above 0"),
        (dict(store="disk"), "store must be one of exact, isoquant, host, got 'disk'"),
        (dict(selection="layer"), "selection must be one of group, head, got 'layer'"),
        (dict(max_selected=0), "max_selected must be an integer of at least 1, got 0"),
        (dict(min_dense_len=-1), "min_dense_len must be an integer of at least 0, got -1"),
        (dict(widening=1), "widening must be True or False, got 1"),
        (dict(store="host", refine=True), "refine must be False with store='host'"),
        (dict(rotation="fourier"), "rotation must be one of"),
        (dict(k_bits=1), "k_bits must be an integer from 2 to 4, got 1"),
    ],
)
def test_options(options, message):
    with pytest.raises(ValueError, match=message):
        RaBitQSparseCache(**options)


def test_a_query_that_is_not_finite_is_refused_and_nothing_lost():
    cache, pieces, keys, values = pieces_of()
    query = torch.randn(1, 4, 1, 32)
    query[..., 3] = torch.nan
    with pytest.raises(ValueError, match="query must be finite, got inf or nan in layer 0"):
        pieces.attend(query, None, 0.2)
    assert cache.layers[0].get_seq_length() == 150 and cache.stats.select_calls == 0
    assert pieces.attend(torch.randn(1, 4, 1, 32), None, 0.2)[0].isfinite().all()


def test_states_of_another_device_are_refused():
    cache, *_ = pieces_of()
    x = torch.randn(1, 2, 1, 32, device="meta")
    with pytest.raises(ValueError, match="key_states must stay on cpu with layer 0, got meta"):
        cache.update(x, x, 0)
    assert cache.layers[0].get_seq_length() == 150


def test_a_budget_that_selects_everything_says_so_once():
    with pytest.warns(UserWarning, match="top_p of 1 selects every token"):
        RaBitQSparseCache(top_p=1.0)
    model, cache = tiny_models.build("llama", "sdpa"), sparse(top_p=0.9999)
    ids = tiny_models.prompt(1, 200)
    forced_logits(model, cache, [ids[:, :120], *ids[:, 120:140].split(1, 1)])
    with pytest.warns(UserWarning, match="RaBitQSparseCache selected 9.% of the tokens|selected 100%"):
        forced_logits(model, cache, [ids[:, 140:160]])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        forced_logits(model, cache, [ids[:, 160:]])


def test_one_answer_is_enough_to_hear_that_everything_is_selected():
    model, cache = tiny_models.build("llama", "sdpa"), sparse(top_p=0.9999)
    ids = tiny_models.prompt(1, 160)
    with pytest.warns(UserWarning, match="RaBitQSparseCache selected") as said:
        forced_logits(model, cache, [ids[:, :120], *ids[:, 120:].split(1, 1)])
    assert len([each for each in said if "RaBitQSparseCache selected" in str(each.message)]) == 1
