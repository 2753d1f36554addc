"""Attention recall: what selectors keep, from facts that hold whatever the model is."""

import dataclasses

import pytest
import real_models
import tiny_models
import torch
from test_fidelity import text_ids

from torch_kvq import ops
from torch_kvq.evaluate import attention_recall
from torch_kvq.evaluate.capture import LayerStates, Places, capture
from torch_kvq.evaluate.recall import measure, num_selected
from torch_kvq.evaluate.selectors import Chance, Oracle, Quest, RaBitQ, Refined, SparQ, TopP, default_selectors

BUDGETS = (0.1, 0.3)
SINKS, WINDOW = 4, 32


def states_of(tokens=400, heads=2, group=3, dim=64, batch=2, queries=5, sharpness=2.0, layer=0, softcap=0.0) -> LayerStates:
    """Random queries and keys; logits have a standard deviation of ``sharpness``."""
    rng = torch.Generator().manual_seed(layer)
    query = sharpness * torch.randn(batch, heads * group, queries, dim, generator=rng)
    key = torch.randn(batch, heads, tokens, dim, generator=rng)
    positions = torch.linspace(tokens - 60, tokens - 1, queries).long()
    places = Places(positions, tokens, SINKS, WINDOW, tokens - 60)
    moments = torch.zeros(batch, heads, dim), torch.full((batch, heads, dim), sharpness**2)
    return LayerStates(layer, query, key, *moments, dim**-0.5, softcap, places)


def kept(states: LayerStates, selector, budget=BUDGETS[0]):
    return measure([states], [selector], [budget]).rows[0]


def group_means(row, states: LayerStates) -> torch.Tensor:
    return torch.cat(row.recall).view(-1, states.group).mean(-1)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_oracle_is_an_upper_bound(budget, softcap):
    states = states_of(softcap=softcap)
    best = group_means(kept(states, Oracle(), budget), states)
    for selector in default_selectors():
        if not selector.is_adaptive:
            assert (group_means(kept(states, selector, budget), states) <= best + 1e-6).all(), selector.name
    every = states_of(group=1, batch=1, queries=1)
    mass = every.shares()[0, :, 0]
    exact, rest = mass[:, every.places.exact[0]].sum(-1), mass[:, every.places.selectable[0]].sort(-1, descending=True).values
    count = num_selected(every.places, budget).item()
    torch.testing.assert_close(torch.cat(kept(every, Oracle(), budget).recall), exact + rest[:, :count].sum(-1))


def test_random_tokens_keep_their_share_of_the_mass():
    states = states_of(batch=16, heads=8, queries=8)
    mass = states.shares()
    body = (mass * states.places.selectable).sum(-1)
    share = num_selected(states.places, 0.3) / states.places.selectable.sum(-1)
    expected = (1 - body + body * share).mean().item()
    got = kept(states, Chance(), 0.3)
    error = got.recall[0].std().item() / states.key.shape[1] ** 0.5
    assert abs(got.mean_recall - expected) < 4 * error < 0.02
    assert kept(states, Chance(seed=1), 0.3).mean_recall != got.mean_recall


def test_without_a_preference_every_selector_keeps_as_much():
    states = states_of(sharpness=0.0)
    count, seen = num_selected(states.places, 0.3), states.places.visible.sum(-1)
    expected = ((count + SINKS + WINDOW) / seen).mean().item()
    for selector in (Oracle(), RaBitQ(center=False, balance=False), Quest(), Chance()):
        assert kept(states, selector, 0.3).mean_recall == pytest.approx(expected, abs=1e-6), selector.name


def test_the_bound_of_a_page_is_above_its_products_and_tight_where_keys_are_equal():
    query, key = torch.randn(3, 5, 64), torch.randn(3, 100, 64)
    bound = Quest(16).bound(query, key)
    products = query @ key.transpose(-1, -2)
    assert bound.shape == (3, 5, 7)
    for page in range(7):
        inside = products[..., 16 * page : 16 * page + 16]
        assert (bound[..., page] >= inside.amax(-1)).all()
    same = key[:, :1].expand(-1, 48, -1)
    torch.testing.assert_close(Quest(16).bound(query, same), (query @ same.transpose(-1, -2))[..., ::16])


def test_quest_reads_whole_pages():
    states = states_of()
    whole = states.places.selectable[:, :352].unflatten(-1, (-1, 16)).all(-1)  # [M, pages]
    priority = Quest().priority(states)[..., :352].unflatten(-1, (-1, 16))
    assert whole.sum(-1).min() >= 15
    assert (priority == priority[..., :1]).all(-1)[whole.expand(2, 2, -1, -1)].all()
    assert len(priority[..., 0][whole.expand(2, 2, -1, -1)].unique()) > 200
    assert (num_selected(states.places, 0.1) % 16 == 0).all()


def test_sparq_with_every_component_is_exact():
    states = states_of()
    torch.testing.assert_close(SparQ(1.0).estimate(states), states.logits())
    assert kept(states, SparQ(1.0)).mean_recall == pytest.approx(kept(states, Oracle()).mean_recall, abs=1e-6)
    few, more = (kept(states, SparQ(fraction)).mean_recall for fraction in (0.125, 0.5))
    assert few < more < kept(states, Oracle()).mean_recall


def test_sparq_does_not_read_small_components():
    states = states_of(group=1)
    query = states.query.clone()
    query[..., 8:] *= 1e-3
    hidden = dataclasses.replace(states, query=query, key=torch.cat([states.key[..., :8], torch.randn(2, 2, 400, 56)], -1))
    torch.testing.assert_close(
        SparQ(0.125).estimate(hidden), SparQ(0.125).estimate(dataclasses.replace(states, query=query)), rtol=0, atol=0
    )


def test_refined_candidates_are_ranked_by_packed_keys():
    states = states_of()
    coarse, fine, best = (kept(states, selector).mean_recall for selector in (RaBitQ(), Refined(), Oracle()))
    assert coarse + (best - coarse) / 2 < fine <= best
    assert kept(states, Refined(candidates=0.1)).mean_recall == pytest.approx(coarse, abs=0.01)  # no more than are read
    error = Refined().packed(states) - states.key
    assert error.square().mean() == pytest.approx(0.0345, rel=0.1)  # Lloyd-Max at 3 bits, of unit variance


@pytest.mark.parametrize("budget", BUDGETS)
def test_equal_budgets_are_equal(budget):
    states = [states_of(layer=layer) for layer in range(3)]
    report = measure(states, default_selectors(), [budget])
    counts, selectable = num_selected(states[0].places, budget), states[0].places.selectable.sum(-1)
    expected = (counts.sum() / selectable.sum()).item()
    assert expected == pytest.approx(budget, abs=8 / 300)
    for row in report.rows:
        assert row.mean_budget == pytest.approx(expected, rel=1e-5), row.selector
        if row.top_p is None:
            assert all((layer == layer[0]).all() for layer in row.budget)
        else:
            assert torch.cat(row.budget).std() > 1e-3 and 0 < row.top_p < 1


def test_an_adaptive_budget_is_that_of_top_p_select():
    states = states_of()
    row = kept(states, TopP(RaBitQ()), 0.3)
    places, read = states.places, torch.zeros(states.key.shape[1])
    scores, logits = RaBitQ().estimate(states), states.logits()
    for at, position in enumerate(places.positions.tolist()):
        exact = logits[:, :, at, places.exact[at]].logsumexp(-1)
        body = scores[:, :, at : at + 1, SINKS : position - WINDOW + 1].contiguous()
        indices = torch.empty(*states.key.shape[:2], body.shape[-1], dtype=torch.int32)
        count = torch.empty(states.key.shape[:2], dtype=torch.int32)
        ops.top_p_select(body, exact.unsqueeze(-1), None, None, row.top_p, indices, count)
        read += count.sum(0)
    torch.testing.assert_close(row.budget[0], read / places.selectable.sum() / 2, rtol=0.01, atol=0)


def test_adaptive_budgets_go_where_the_mass_is():
    flat, sharp = states_of(sharpness=0.5), states_of(sharpness=6.0, layer=1)
    adaptive, fixed = measure([flat, sharp], [TopP(Oracle()), Oracle()], [0.3]).rows
    assert adaptive.budget[0].mean() > 2 * adaptive.budget[1].mean()
    assert adaptive.worst_recall > fixed.worst_recall


def test_what_each_query_head_needs_is_read_by_its_group():
    states = states_of(batch=1, heads=1, group=4, queries=1, sharpness=0.1)
    key, query = 0.1 * states.key, states.query.clone()
    planted = torch.tensor([50, 117, 200, 301])
    key[0, 0, planted] = 8 * torch.nn.functional.normalize(query[0, :, 0], dim=-1)
    query = 40 * torch.nn.functional.normalize(query, dim=-1)
    states = dataclasses.replace(states, key=key, query=query)
    assert states.shares()[0, range(4), 0, planted].min() > 0.99
    for selector in (Oracle(), RaBitQ(), Quest(), SparQ(0.25)):
        row = kept(states, selector, 0.05 if not isinstance(selector, Quest) else 0.25)
        assert row.worst_recall > 0.98, selector.name


FULL_LAYERS = dict(qwen2=[0, 1], deepseek_v3=[0, 1], gemma2=[1, 3], gemma4=[1, 3, 5], llama4=[3], mistral=[])
RUNS = [(family, attn) for family in FULL_LAYERS for attn in tiny_models.FAMILIES[family].attentions]


@pytest.mark.parametrize("family, implementation", RUNS)
def test_captured_states_are_those_of_the_models_attention(family, implementation):
    """Layers with a window or chunks are left out; soft-capped, latent and shared keys are as the model has them."""
    model = tiny_models.build(family, implementation)
    ids = tiny_models.prompt(2, 90, seed=3)
    places = Places(torch.tensor([70, 80, 89]), 90, SINKS, WINDOW, 70)
    before = model(ids).logits
    states = capture(model, ids, places)
    assert model.config._attn_implementation == implementation and torch.equal(model(ids).logits, before)
    model.set_attn_implementation("eager")
    expected = model(ids, output_attentions=True).attentions
    assert [each.layer for each in states] == FULL_LAYERS[family]
    for each in states:
        torch.testing.assert_close(each.shares(), expected[each.layer][:, :, places.positions], rtol=1e-3, atol=1e-5)
        assert (each.query_moment >= each.query_mean.square()).all() and bool(each.softcap) == (family == "gemma2")


def test_a_model_without_full_attention_is_refused():
    with pytest.raises(ValueError, match="model must have a layer of full attention"):
        attention_recall(tiny_models.build("mistral", "sdpa"), tiny_models.prompt(1, 300), prefix_len=200)


def test_a_report_is_a_table(capsys):
    model = tiny_models.build("llama", "sdpa")
    report = attention_recall(model, tiny_models.prompt(2, 300, seed=3), prefix_len=200, budgets=BUDGETS, num_queries=7)
    lines = str(report).splitlines()
    assert len(lines) == 2 + len(report.rows) == 2 + len(BUDGETS) * len(default_selectors()) and report.num_queries == 14
    assert report.layers == (0, 1) and len(report.by_layer(0.1).splitlines()) == 3
    row = report.of("oracle", 0.3)
    assert (
        f"{row.mean_recall:.4f}" in str(report) and row.mean_recall > report.of("oracle", 0.1).mean_recall > report.exact_mass
    )
    with pytest.raises(KeyError, match="no row of 'oracle' at a budget of 0.2"):
        report.of("oracle", 0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(prefix_len=150), "prefix_len must be from 152 .* to 299 for 300 tokens, got 150"),
        (dict(prefix_len=300), "got 300"),
        (dict(budgets=(0.1, 1.0)), "budgets must be between 0 and 1, shares of the tokens, got 1.0"),
        (dict(budgets=("few",)), "budgets must be between 0 and 1, shares of the tokens, got 'few'"),
        (dict(prefix_len=None), "prefix_len must be from 152 .* got None"),
        (dict(num_queries=2.5), "num_queries must be an integer of at least 1, got 2.5"),
        (dict(num_queries=0), "num_queries must be an integer of at least 1, got 0"),
        (dict(num_sinks=-1), "num_sinks must be an integer of at least 0, got -1"),
        (dict(window_len=0), "window_len must be an integer of at least 1, got 0"),
        (dict(window_len=280), "input_ids must have more than 300 tokens .*, got 300"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    model = tiny_models.build("llama", "sdpa")
    if "window_len" not in options:
        options = dict(window_len=132) | options
    with pytest.raises(ValueError, match=message):
        attention_recall(model, tiny_models.prompt(1, 300), **dict(prefix_len=200) | options)
    assert model.config._attn_implementation == "sdpa"


def test_models_that_cannot_be_measured_are_refused():
    model = tiny_models.build("llama", "sdpa")
    with pytest.raises(ValueError, match=r"input_ids must be \[batch, tokens\], got shape \(300,\)"):
        attention_recall(model, tiny_models.prompt(1, 300)[0], prefix_len=200)
    with pytest.raises(ValueError, match="model must be in eval mode"):
        attention_recall(model.train(), tiny_models.prompt(1, 300), prefix_len=200)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_recall_on_real_models(name, capsys):
    if not real_models.available(name):
        pytest.skip(f"{name} is not installed: see examples/real_models.py")
    model, tokenizer = real_models.load(name)
    report = attention_recall(model, text_ids(tokenizer, 2048, texts=2), num_queries=8)
    with capsys.disabled():
        print(f"\n{name}: {report}")
    for budget in (0.05, 0.1, 0.2):
        names = ("oracle", "RaBitQ refined", "RaBitQ", "SparQ r=0.25D", "SparQ r=0.125D", "Quest", "random")
        best, refined, ours, wide, narrow, quest, chance = (report.of(name, budget).mean_recall for name in names)
        assert best - 0.03 < ours and best - 0.01 < refined
        assert ours > narrow > quest > chance and refined > wide
