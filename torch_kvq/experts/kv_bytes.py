"""Bytes of a KV cache at a length, from the config alone."""

import transformers
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionAndFullAttentionLayer

from ..caches.isoquant import IsoQuantCache
from ..caches.settings import IsoQuantSettings
from ..layout import round_up
from ..store import grown

EXACT_BYTES = 2


def kv_bytes(
    config: transformers.PreTrainedConfig, context: int, batch: int, k_bits: int | None, v_bits: int
) -> tuple[int, int, str]:
    """(bytes as configured, bytes of ``DynamicCache``, a description); recurrent states are not counted.

    Exact tokens are taken for 16-bit; learnt statistics and rotations, which do not grow, are left out.
    """
    decoder = config.get_text_config(decoder=True)
    settings = IsoQuantCache(k_bits=k_bits or 3, v_bits=v_bits).settings
    packed = exact = 0
    recurrent, is_latent = False, bool(getattr(decoder, "kv_lora_rank", None))
    for layer in DynamicCache(config=decoder).layers:
        heads, k_dim, v_dim, full = shape_of(decoder, layer)
        tokens = context if full or not heads else min(context, layer.sliding_window - 1)
        recurrent |= not heads
        dense = batch * heads * tokens * (k_dim + v_dim) * EXACT_BYTES
        exact += dense
        packed += batch * heads * packed_bytes(settings, tokens, k_dim, v_dim, is_latent) if full and k_bits else dense
    note = f"IsoQuantCache k{k_bits} v{v_bits}" if k_bits else "DynamicCache"
    return packed, exact, note + (", without recurrent states" if recurrent else "")


def packed_bytes(settings: IsoQuantSettings, tokens: int, k_dim: int, v_dim: int, is_latent: bool) -> int:
    """Bytes of one kv head of a packed layer; keys, and both parts of a latent one, take whole words of 32 coordinates."""
    exact = min(tokens, settings.num_sinks + settings.window_len + settings.flush_len)
    body = grown(tokens - exact) if tokens > exact else 0
    bits = round_up(k_dim) * settings.k_bits + 2 * 16
    bits += round_up(v_dim) * settings.k_bits if is_latent else v_dim * settings.v_bits
    return exact * (k_dim + v_dim) * EXACT_BYTES + body * bits // 8


def shape_of(config: transformers.PreTrainedConfig, layer) -> tuple[int, int, int, bool]:
    """(kv heads, key dim, value dim, whether it keeps all tokens); no heads for layers that keep no tokens."""
    full = type(layer) in (DynamicLayer, LinearAttentionAndFullAttentionLayer)
    if not full and not isinstance(layer, DynamicSlidingWindowLayer):
        return 0, 0, 0, False
    if getattr(config, "kv_lora_rank", None):
        return 1, config.kv_lora_rank, config.qk_rope_head_dim, full
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if full:
        dim = getattr(config, "global_head_dim", None) or dim
        heads = getattr(config, "num_global_key_value_heads", None) or heads
    return heads, dim, dim, full
