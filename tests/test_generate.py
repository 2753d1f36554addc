"""Every generate mode: token-identical to ``DynamicCache`` while nothing is packed, and all on packed data when it is."""

import pytest
import tiny_models
import torch
from oracle import oracle_cache
from transformers import DynamicCache

from torch_kvq import IsoQuantCache, RaBitQSparseCache
from torch_kvq._requirements import cache_keyword

pytestmark = pytest.mark.versions

PACKED = dict(window_len=32, flush_len=16)
FAMILIES = tiny_models.names(
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "mixtral", "gpt_oss", "deepseek_v3"),
    *("qwen3_next", "falcon_h1", "nemotron_h", "lfm2"),
)
ATTENTION_ONLY = tiny_models.names("llama", "gemma3", "gpt_oss", "deepseek_v3")
FEW = [("llama", "sdpa"), ("gpt_oss", "eager"), ("deepseek_v3", "sdpa")]
LONG = [("mistral_full" if name == "mistral" else name, attn) for name, attn in FAMILIES]
HYBRIDS = tiny_models.names("qwen3_next", "falcon_h1", "lfm2")

# Options of generate by name; ``assisted`` gets its model in ``generate``.
MODES = {
    "greedy": {},
    "sampling": dict(do_sample=True, temperature=0.8, top_k=20),
    "beams_2": dict(num_beams=2),
    "beams_3": dict(num_beams=3),
    "return_3": dict(do_sample=True, num_return_sequences=3),
    "beam_sampling": dict(num_beams=3, do_sample=True),
    "beams_return_2": dict(num_beams=3, num_return_sequences=2),
    "assisted": {},
    "prompt_lookup": dict(prompt_lookup_num_tokens=3),
    "chunked": dict(prefill_chunk_size=16),
    "guidance": dict(guidance_scale=1.5),
    "dict": dict(return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True),
}
ROLLBACK = ("assisted", "prompt_lookup")


def generate(model, cache, inputs, mode="greedy", new_tokens=8, **options):
    options = {**MODES[mode], **options}
    if mode == "assisted":
        assistant = tiny_models.build("llama", "sdpa", num_hidden_layers=1)
        options["assistant_model"] = assistant
    torch.manual_seed(3)
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **options)
    return out if isinstance(out, torch.Tensor) else out.sequences


def padded(batch, length=40):
    return tiny_models.left_padded([length, length - 13][:batch])


def repetitive(length=60):
    """A prompt in which prompt lookup finds something to propose."""
    ids = tiny_models.prompt(1, 12, seed=2).repeat(1, length // 12 + 1)[:, :length]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def inputs_for(mode):
    return repetitive() if mode in ROLLBACK else padded(1 if mode == "guidance" else 2)


# ---- nothing packed: the tokens of DynamicCache


@pytest.mark.parametrize("family, attn", FAMILIES)
@pytest.mark.parametrize("mode", ["greedy", "beams_3"])
def test_exact_in_every_family(family, attn, mode):
    check_exact(tiny_models.build(family, attn), mode)


@pytest.mark.parametrize("family, attn", FEW)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("greedy", "beams_3")])
def test_exact_in_every_mode(family, attn, mode):
    check_exact(tiny_models.build(family, attn), mode)


@pytest.mark.parametrize("family, attn", HYBRIDS)
@pytest.mark.parametrize("mode", ["sampling", "return_3", "chunked"])
def test_exact_hybrids(family, attn, mode):
    check_exact(tiny_models.build(family, attn), mode)


def check_exact(model, mode, inputs=None, **options):
    inputs = inputs or inputs_for(mode)
    wanted = generate(model, DynamicCache(config=model.config), inputs, mode, **options)
    for cache in (IsoQuantCache(window_len=512), RaBitQSparseCache()):
        got = generate(model, cache, inputs, mode, **options)
        assert got.tolist() == wanted.tolist()
        assert cache.stats.tokens_compressed == cache.stats.attend_calls == 0
        assert cache.get_seq_length() > 40


def test_exact_from_embeddings():
    model = tiny_models.build("llama", "sdpa")
    embeddings = model.get_input_embeddings()(tiny_models.prompt(2, 40)).detach()
    check_exact(model, "greedy", {"inputs_embeds": embeddings, "attention_mask": torch.ones(2, 40, dtype=torch.long)})


def test_exact_with_attentions():
    model = tiny_models.build("llama", "eager")
    check_exact(model, "greedy", output_attentions=True, return_dict_in_generate=True)


def test_exact_with_early_exit():
    check_exact(tiny_models.build("llama", "sdpa"), "greedy", repetitive(), assistant_early_exit=1)


@pytest.mark.parametrize("family, attn", ATTENTION_ONLY)
@pytest.mark.parametrize("full_ids", [True, False])
def test_exact_over_turns(family, attn, full_ids):
    """The second call gets the whole conversation, or the new ids and the mask of the whole."""
    model, more = tiny_models.build(family, attn), tiny_models.prompt(1, 9, seed=4)
    answers = []
    for cache in (DynamicCache(config=model.config), IsoQuantCache(window_len=512), RaBitQSparseCache()):
        first = generate(model, cache, {"input_ids": tiny_models.prompt(1, 20)})
        ids = torch.cat([first, more], 1)
        mask = torch.ones_like(ids)
        new = ids if full_ids else ids[:, cache.get_seq_length() :]
        answers.append(generate(model, cache, {"input_ids": new, "attention_mask": mask})[:, -8:].tolist())
    assert answers[0] == answers[1] == answers[2]


def test_both_spellings():
    """transformers 5.24 calls the argument ``cache``; ``generate`` still takes ``past_key_values``."""
    model, ids = tiny_models.build("llama", "sdpa"), tiny_models.prompt(1, 100)
    outs = []
    for keyword in {"past_key_values", cache_keyword()}:
        cache = IsoQuantCache(**PACKED)
        outs.append(model.generate(ids, **{keyword: cache}, max_new_tokens=8, do_sample=False).tolist())
        assert cache.stats.attend_calls == 2 * 7 and cache.stats.decompress_calls == 0
    assert all(out == outs[0] for out in outs)


# ---- packed


def assert_nothing_rebuilt(cache):
    stats = cache.stats
    assert stats.attend_calls > 0 and stats.tokens_compressed > 0
    assert stats.decompress_calls == 0 and stats.fallback_calls == 0, stats.fallback_reasons


@pytest.mark.parametrize("family, attn", LONG)
def test_long_decode_reads_packed_data_only(family, attn):
    model, steps = tiny_models.build(family, attn), 256
    cache = IsoQuantCache(**PACKED)
    generate(model, cache, {"input_ids": tiny_models.prompt(1, 100)}, new_tokens=steps)
    assert_nothing_rebuilt(cache)
    rows = [row for row in cache.report().rows if row.num_packed]
    assert cache.stats.attend_calls == len(rows) * (steps - 1) and rows
    assert cache.get_seq_length() == 100 + steps - 1
    assert all(row.num_exact <= 4 + 32 + 16 for row in rows)


@pytest.mark.parametrize("family, attn", FEW)
@pytest.mark.parametrize("mode", MODES)
def test_packed_in_every_mode(family, attn, mode):
    """Every mode runs on packed data, and chooses the tokens that dense tensors of the same codes give.

    Not so for assisted decoding and prompt lookup: how many tokens come at a time decides when a block is packed. Those are
    compared with a dense twin too, which lives the same life.
    """
    model = tiny_models.build(family, attn)
    inputs = repetitive(100) if mode in ROLLBACK else padded(1 if mode == "guidance" else 2, 100)
    cache, twin = IsoQuantCache(**PACKED), oracle_cache(model.config, **PACKED)
    got, wanted = (generate(model, each, inputs, mode, new_tokens=24) for each in (cache, twin))
    assert got.shape == wanted.shape
    assert cache.stats.tokens_compressed > 0
    assert_nothing_rebuilt(cache)
    assert got.tolist() == wanted.tolist()


@pytest.mark.parametrize("mode", ROLLBACK)
def test_rollback_gives_the_greedy_tokens(mode):
    """Flush timing depends on how many tokens come at a time; the model is certain enough for that not to matter."""
    model, inputs = tiny_models.build("llama", "sdpa"), repetitive(100)
    options = dict(PACKED, k_bits=4, v_bits=4)
    greedy = generate(model, IsoQuantCache(**options), inputs, "greedy", new_tokens=40)
    cache = IsoQuantCache(**options)
    assert generate(model, cache, inputs, mode, new_tokens=40).tolist() == greedy.tolist()
    assert_nothing_rebuilt(cache)
    assert cache.get_seq_length() == 139


def test_use_cache_false_is_refused():
    """Without ``use_cache`` generate feeds the whole text at every step, and the cache would hold it many times."""
    model, cache = tiny_models.build("llama", "sdpa"), IsoQuantCache(**PACKED)
    for length in (1, 100):
        ids = tiny_models.prompt(1, length)
        with pytest.raises(ValueError, match="use_cache must be True"):
            model.generate(ids, past_key_values=cache, use_cache=False, max_new_tokens=4)
        cache.reset()
    generate(model, cache, {"input_ids": tiny_models.prompt(1, 100)})
    assert_nothing_rebuilt(cache)
