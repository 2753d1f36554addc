"""Encoder-decoder models: the cache stands for the decoder's self-attention, and refuses to stand for both."""

import pytest
import tiny_models
import torch
from oracle import relative_error
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    T5Config,
    T5ForConditionalGeneration,
)

from torch_kvq import IsoQuantCache

pytestmark = pytest.mark.versions


def encoder_decoder(kind):
    torch.manual_seed(0)
    if kind == "t5":
        config = T5Config(
            vocab_size=99,
            d_model=32,
            d_kv=32,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            eos_token_id=None,
        )
        return T5ForConditionalGeneration(config).eval()
    sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = BartConfig(
        vocab_size=99, d_model=64, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=256,
        eos_token_id=None, forced_eos_token_id=None, **sizes,
    )  # fmt: skip
    return BartForConditionalGeneration(config).eval()


@pytest.mark.parametrize("kind", ["t5", "bart"])
@pytest.mark.parametrize("window_len", [512, 32])
def test_encoder_decoder(kind, window_len):
    """In the place of the decoder's self-attention cache."""
    model, ids = encoder_decoder(kind), tiny_models.prompt(2, 12) % 99
    ours = EncoderDecoderCache(IsoQuantCache(window_len=window_len), DynamicCache())
    exact = EncoderDecoderCache(DynamicCache(), DynamicCache())
    options = dict(max_new_tokens=100, do_sample=False, output_logits=True, return_dict_in_generate=True)
    got, wanted = (model.generate(ids, past_key_values=cache, **options) for cache in (ours, exact))
    cache = ours.self_attention_cache
    assert cache.get_seq_length() == 100
    if window_len == 512:
        assert got.sequences.tolist() == wanted.sequences.tolist()
    else:
        assert cache.stats.attend_calls > 0 and cache.stats.tokens_compressed > 0 and cache.stats.decompress_calls == 0
        assert relative_error(got.logits[70], wanted.logits[70]) < 0.2 or not got.sequences.equal(wanted.sequences)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_bare_cache_in_an_encoder_decoder_is_refused(kind):
    """Cross-attention would append the encoder's states to the decoder's."""
    model, cache = encoder_decoder(kind), IsoQuantCache()
    with pytest.raises(ValueError, match=r"EncoderDecoderCache\(IsoQuantCache\(\), DynamicCache\(\)\)"):
        model.generate(tiny_models.prompt(2, 12) % 99, past_key_values=cache, max_new_tokens=5)
    assert cache.get_seq_length() == 0
