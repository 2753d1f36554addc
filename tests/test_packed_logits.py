"""Logits through packed attention against a dense twin with the same codes, over models, masks and turns."""

import pytest
import tiny_models
import torch
from oracle import forced_logits, oracle_cache, relative_error

from torch_kvq import IsoQuantCache
from torch_kvq._requirements import cache_keyword

pytestmark = pytest.mark.versions

TOLERANCE = 1e-5
PACKED = dict(window_len=32, flush_len=16)  # so that short prompts are packed

FAMILIES = tiny_models.names(
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral_full", "mixtral", "gpt_oss", "deepseek_v3"),
    *("deepseek_v3_wide", "qwen3_next", "falcon_h1", "nemotron_h", "lfm2", "bamba", "jamba", "gemma3n", "gemma4", "gemma3_vlm"),
)
FEW = tiny_models.names("llama", "gpt_oss", "deepseek_v3", "gemma3")


def one_by_one(ids: torch.Tensor) -> list[torch.Tensor]:
    return list(ids.split(1, 1))


def compare(model, pieces, attention_mask=None, **options):
    options = {**PACKED, **options}
    ours, twin = IsoQuantCache(**options), oracle_cache(model.config, **options)
    got = forced_logits(model, ours, pieces, attention_mask)
    wanted = forced_logits(model, twin, pieces, attention_mask)
    if attention_mask is not None:
        got, wanted = got[attention_mask.bool()], wanted[attention_mask.bool()]
    assert relative_error(got, wanted) <= TOLERANCE
    assert ours.stats.attend_calls > 0 and ours.stats.tokens_compressed > 0
    assert ours.stats.decompress_calls == 0 and ours.stats.fallback_calls == 0, ours.stats.fallback_reasons
    return ours


@pytest.mark.parametrize("family, attn", FAMILIES)
def test_prompt_and_decode(family, attn):
    model = tiny_models.build(family, attn)
    ids = tiny_models.prompt(1, 140, seed=3)
    compare(model, [ids[:, :100], *one_by_one(ids[:, 100:])])


@pytest.mark.parametrize("family, attn", FEW)
def test_left_padded_batch(family, attn):
    model = tiny_models.build(family, attn)
    batch = tiny_models.left_padded([120, 60, 90, 3])
    more = tiny_models.prompt(4, 40, seed=5)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(more)], 1)
    compare(model, [batch["input_ids"], *one_by_one(more)], mask)


@pytest.mark.parametrize("family, attn", FEW)
def test_second_turn_reads_the_packed_first(family, attn):
    model = tiny_models.build(family, attn)
    # A seed whose second turn, which the twin computes to the last bits otherwise, keeps clear of the edges of codes.
    ids = tiny_models.prompt(2, 260, seed=14)
    compare(model, [ids[:, :100], *one_by_one(ids[:, 100:110]), ids[:, 110:240], *one_by_one(ids[:, 240:])])


@pytest.mark.parametrize("family, attn", FEW)
def test_several_tokens_at_a_time(family, attn):
    model = tiny_models.build(family, attn)
    ids = tiny_models.prompt(1, 160, seed=6)
    compare(model, [ids[:, :100], *ids[:, 100:].split(5, 1)])


@pytest.mark.parametrize("k_bits, v_bits", [(2, 2), (2, 4), (4, 3), (4, 4)])
@pytest.mark.parametrize("rotation", ["hadamard2", "dense", "none"])
def test_bits_and_rotations(k_bits, v_bits, rotation):
    model = tiny_models.build("llama", "sdpa")
    ids = tiny_models.prompt(1, 120, seed=7)
    compare(model, [ids[:, :90], *one_by_one(ids[:, 90:])], k_bits=k_bits, v_bits=v_bits, rotation=rotation)


@pytest.mark.parametrize("option", [dict(balance=False), dict(center=False), dict(num_sinks=0), dict(window_len=16)])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_options(option, attn):
    model = tiny_models.build("qwen2", attn)
    ids = tiny_models.prompt(1, 130, seed=8)
    compare(model, [ids[:, :90], *one_by_one(ids[:, 90:])], **option)


def test_float_mask_over_a_tree_of_candidates():
    """A 4-D additive mask that lets four candidate tokens see the past and only themselves."""
    model = tiny_models.build("llama", "sdpa")
    ids, tree = tiny_models.prompt(1, 100, seed=9), tiny_models.prompt(1, 4, seed=10)
    step = tiny_models.prompt(1, 1, seed=11)
    low = torch.finfo(torch.float32).min
    mask = torch.full((1, 1, 4, 105), low)
    mask[..., :101] = 0
    mask[..., 101:] = torch.where(torch.eye(4, dtype=torch.bool), 0, low)
    got = []
    for cache in (IsoQuantCache(**PACKED), oracle_cache(model.config, **PACKED)):
        forced_logits(model, cache, [ids, step])
        with torch.no_grad():
            places = torch.full((1, 4), 101)
            out = model(input_ids=tree, attention_mask=mask, position_ids=places, **{cache_keyword(): cache})
            got.append(out.logits)
    assert relative_error(*got) <= TOLERANCE


@pytest.mark.parametrize("family, attn", FEW)
def test_padding_changes_nothing(family, attn):
    """A row of a left-padded batch gets the logits of its prompt alone: padding enters neither statistics nor sinks."""
    model = tiny_models.build(family, attn)
    batch = tiny_models.left_padded([150, 120])
    more = tiny_models.prompt(2, 20, seed=12)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(more)], 1)
    together = forced_logits(model, IsoQuantCache(**PACKED), [batch["input_ids"], *one_by_one(more)], mask)
    for row, length in enumerate((150, 120)):
        prompt = batch["input_ids"][row : row + 1, -length:]
        alone = forced_logits(model, IsoQuantCache(**PACKED), [prompt, *one_by_one(more[row : row + 1])])
        assert relative_error(together[row : row + 1, -20:], alone[:, -20:]) <= 1e-4
