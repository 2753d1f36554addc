"""Tiny random mixture-of-experts models of ten families, as ``tiny_models`` does for attention: one row each."""

import torch
import transformers

BASE = dict(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
SMALL = dict(moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3)
FAMILIES = {
    "mixtral": ("Mixtral", dict(intermediate_size=48, num_local_experts=8, num_experts_per_tok=2, head_dim=16)),
    "qwen2_moe": ("Qwen2Moe", dict(SMALL, intermediate_size=96, shared_expert_intermediate_size=64)),
    "qwen3_moe": ("Qwen3Moe", dict(SMALL, intermediate_size=96, num_experts=12, num_experts_per_tok=4, head_dim=16)),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        dict(
            SMALL,
            shared_expert_intermediate_size=32,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention"],
        ),
    ),
    "deepseek_v3": (
        "DeepseekV3",
        dict(
            num_hidden_layers=3,
            num_key_value_heads=4,
            intermediate_size=96,
            moe_intermediate_size=32,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=3,
            n_group=2,
            topk_group=2,
            first_k_dense_replace=1,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
        ),
    ),
    "olmoe": ("Olmoe", dict(intermediate_size=32, num_experts=12, num_experts_per_tok=4)),
    "gpt_oss": (
        "GptOss",
        dict(
            intermediate_size=32,
            num_local_experts=8,
            num_experts_per_tok=4,
            head_dim=16,
            sliding_window=32,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "granitemoe": ("GraniteMoe", dict(intermediate_size=32, num_local_experts=8, num_experts_per_tok=3)),
    "nemotron_h": (
        "NemotronH",
        dict(
            num_hidden_layers=4,
            layers_block_type=["mamba", "moe", "attention", "moe"],
            intermediate_size=64,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=48,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=3,
            head_dim=16,
            ssm_state_size=16,
            mamba_num_heads=4,
            mamba_head_dim=16,
            n_groups=1,
            n_group=1,
            topk_group=1,
            conv_kernel=4,
        ),
    ),
    "gemma4": (
        "Gemma4",
        dict(
            intermediate_size=96,
            head_dim=16,
            global_head_dim=16,
            enable_moe_block=True,
            num_experts=8,
            top_k_experts=3,
            moe_intermediate_size=32,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=32,
            hidden_size_per_layer_input=0,
            num_kv_shared_layers=0,
            vocab_size_per_layer_input=256,
        ),
    ),
    "llama4": (
        "Llama4",
        dict(intermediate_size=32, intermediate_size_mlp=64, num_local_experts=4, num_experts_per_tok=1, moe_layers=[0, 1]),
    ),
    "dbrx": ("Dbrx", {}),
}
REFUSED = ("llama4", "dbrx")
NAMES = [name for name in FAMILIES if name not in REFUSED]


def config(name: str):
    prefix, settings = FAMILIES[name]
    if name == "dbrx":
        ffn = dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2)
        return transformers.DbrxConfig(
            d_model=64,
            n_heads=4,
            n_layers=1,
            vocab_size=256,
            ffn_config=ffn,
            attn_config=dict(kv_n_heads=2, rope_theta=10000.0),
        )
    config_class = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    return config_class(**{**BASE, **settings})


def build(name: str, dtype: torch.dtype = torch.bfloat16, implementation: str | None = None, seed: int = 0):
    """A model of ``FAMILIES[name]`` in eval mode whose matrices are random and large enough that routing varies."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config(name), dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.08)
    if implementation is not None:
        model.set_experts_implementation(implementation)
    return model


def prompt(batch: int = 2, length: int = 9, seed: int = 1) -> torch.Tensor:
    """Random token ids ``[batch, length]``."""
    return torch.randint(3, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def answers(model, **options) -> list[torch.Tensor]:
    """Logits of a prompt, greedy ids and ids of a search with two beams."""
    ids = prompt()
    common = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, **options)
    with torch.no_grad():
        logits = model(ids).logits
        return [logits, model.generate(ids, **common), model.generate(ids[:1], num_beams=2, **common)]
