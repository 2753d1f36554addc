"""Tiny random models of many families: one row of ``FAMILIES`` each, built by name.

``build("llama", "eager")`` gives a float32 model with fixed random weights. Its matrices are sharpened so that greedy
text is not one token over and over; it has no end-of-sequence token, so it writes as many tokens as it is asked for.
To add a family, add a row: the names of its two transformers classes and what its config needs beyond ``BASE``.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

VOCAB_SIZE = 257
FIRST_TOKEN = 3  # 0 pads, 1 begins, 2 is unused
SHARPNESS = 4.0
BIAS_STD = 0.5

BASE = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=4096,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
SLIDING_LEN = 16
LOCAL_GLOBAL = dict(num_hidden_layers=4, sliding_window=SLIDING_LEN)
MLA = dict(
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    n_routed_experts=4,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
)
PER_LAYER_INPUTS = dict(vocab_size_per_layer_input=VOCAB_SIZE, hidden_size_per_layer_input=16)
SHARED_KV = dict(
    num_hidden_layers=6,
    layer_types=["sliding_attention", "full_attention"] * 3,
    sliding_window=SLIDING_LEN,
    num_kv_shared_layers=2,
    **PER_LAYER_INPUTS,
)
VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)


@dataclass(frozen=True)
class Family:
    """The transformers classes of a family; ``settings`` are added to ``BASE``, the names in ``without`` removed."""

    model: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    attentions: tuple[str, ...] = ("sdpa", "eager")
    seed: int = 0


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig"),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config"),
    "mistral": Family("MistralForCausalLM", "MistralConfig", dict(sliding_window=SLIDING_LEN)),
    "mistral_full": Family("MistralForCausalLM", "MistralConfig", dict(sliding_window=None)),
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", dict(num_local_experts=4, sliding_window=None)),
    # Soft-capped logits: newer transformers refuse sdpa for gemma2, older ones drop the cap there without a word.
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", dict(LOCAL_GLOBAL, query_pre_attn_scalar=32), attentions=("eager",)),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        dict(LOCAL_GLOBAL, query_pre_attn_scalar=32, layer_types=["sliding_attention"] * 3 + ["full_attention"]),
    ),
    # Learnt attention sinks: no sdpa.
    "gpt_oss": Family("GptOssForCausalLM", "GptOssConfig", dict(LOCAL_GLOBAL, num_local_experts=4), attentions=("eager",)),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", "DeepseekV3Config", MLA, without=("head_dim",), seed=1),
    "deepseek_v3_wide": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        dict(MLA, kv_lora_rank=512, qk_rope_head_dim=64),
        without=("head_dim",),
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        dict(
            num_hidden_layers=4,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
    ),
    "falcon_h1": Family(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        dict(
            mamba_d_ssm=64,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_n_groups=1,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=1,
            mamba_chunk_size=16,
        ),
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        dict(
            num_hidden_layers=5,
            layers_block_type=["mamba", "attention", "moe", "mamba", "attention"],
            mamba_num_heads=4,
            mamba_head_dim=32,
            n_groups=1,
            ssm_state_size=16,
            conv_kernel=4,
            chunk_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
        ),
    ),
    "lfm2": Family("Lfm2ForCausalLM", "Lfm2Config", dict(num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2)),
    "bamba": Family(
        "BambaForCausalLM",
        "BambaConfig",
        dict(
            num_hidden_layers=4,
            attn_layer_indices=[2],
            mamba_n_heads=4,
            mamba_d_head=32,
            mamba_n_groups=1,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=16,
        ),
    ),
    "jamba": Family(
        "JambaForCausalLM",
        "JambaConfig",
        dict(
            num_hidden_layers=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=2,
            num_experts_per_tok=1,
            use_mamba_kernels=False,
            mamba_d_state=8,
            mamba_dt_rank=4,
        ),
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        dict(
            num_hidden_layers=4,
            attention_chunk_size=SLIDING_LEN,
            num_local_experts=2,
            intermediate_size_mlp=64,
            interleave_moe_layer_step=2,
        ),
    ),
    "gemma3n": Family(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        dict(SHARED_KV, laurel_rank=8, activation_sparsity_pattern=[0.0] * 6, altup_num_inputs=2),
    ),
    "gemma4": Family("Gemma4ForCausalLM", "Gemma4TextConfig", dict(SHARED_KV, global_head_dim=64)),
    "gemma3_vlm": Family(
        "Gemma3ForConditionalGeneration",
        "Gemma3TextConfig",
        dict(LOCAL_GLOBAL, query_pre_attn_scalar=32, layer_types=["sliding_attention"] * 3 + ["full_attention"]),
    ),
}


def names(*wanted: str) -> list[tuple[str, str]]:
    """(family, attention) pairs to parametrize a test with: of the families named, or of all."""
    return [(name, attn) for name in wanted or FAMILIES for attn in FAMILIES[name].attentions]


def build(name: str, attn: str | None = None, dtype: torch.dtype = torch.float32, **overrides) -> torch.nn.Module:
    """A model of ``FAMILIES[name]`` in eval mode.

    ``attn`` is one of the family's attentions, its first by default; ``overrides`` replace (text) config entries.
    """
    family = FAMILIES[name]
    attn = attn or family.attentions[0]
    if attn not in family.attentions:
        raise ValueError(f"attn: {name} runs with {family.attentions}, got {attn!r}")
    settings = {**BASE, **family.settings}
    for key in family.without:
        settings.pop(key)
    config = getattr(transformers, family.config)(**{**settings, **overrides})
    if name.endswith("_vlm"):
        config = with_vision(config)
    torch.manual_seed(family.seed)
    model = getattr(transformers, family.model)._from_config(config, dtype=dtype, attn_implementation=attn)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.mul_(SHARPNESS)
            elif key.endswith(("q_proj.bias", "k_proj.bias")):  # zero by default, large in real qwen2
                weight.normal_(std=BIAS_STD)
    return model.eval()


def with_vision(text_config) -> transformers.PreTrainedConfig:
    """The text config inside a Gemma 3 config with a vision tower of one layer."""
    return transformers.Gemma3Config(
        text_config=text_config.to_dict(),
        vision_config=VISION,
        mm_tokens_per_image=4,
        boi_token_index=254,
        eoi_token_index=255,
        image_token_index=256,
        eos_token_id=None,
    )


def prompt(batch: int = 1, length: int = 24, seed: int = 1) -> torch.Tensor:
    """Random token ids ``[batch, length]`` without special or image tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_TOKEN, 254, (batch, length), generator=generator)


def left_padded(lengths: list[int], seed: int = 1) -> dict[str, torch.Tensor]:
    """``input_ids`` and ``attention_mask`` ``[len(lengths), max(lengths)]`` of prompts of those lengths."""
    ids = prompt(len(lengths), max(lengths), seed)
    positions = torch.arange(max(lengths))
    mask = positions >= max(lengths) - torch.tensor(lengths)[:, None]
    return {"input_ids": ids.where(mask, torch.zeros_like(ids)), "attention_mask": mask.long()}
