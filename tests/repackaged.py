"""SmolLM2 re-packed into architectures of which no small real weights exist, without changing what it computes.

The layers that are added have no effect on the logits, yet they run: routers choose experts, recurrent states evolve.
What is tested with them is the plumbing under a real text's keys and values, not the numerics of a trained model.
"""

import torch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, MixtralConfig, MixtralForCausalLM

SHARED_FIELDS = (
    "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads max_position_embeddings "
    "rms_norm_eps rope_parameters tie_word_embeddings bos_token_id eos_token_id pad_token_id"
).split()
ATTENTION_WEIGHTS = ["input_layernorm", "post_attention_layernorm"] + [f"self_attn.{x}_proj" for x in "qkvo"]


def as_mixtral(model, experts: int = 4, top_k: int = 2):
    """Mixtral whose experts are all copies of the dense MLP behind a random router: sparse, with the dense result."""
    config = MixtralConfig(
        **shared(model.config),
        num_hidden_layers=model.config.num_hidden_layers,
        head_dim=model.config.head_dim,
        sliding_window=None,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
    )
    weights = {key: value for key, value in model.state_dict().items() if ".mlp." not in key}
    generator = torch.Generator().manual_seed(0)
    for index, layer in enumerate(model.model.layers):
        mlp, prefix = layer.mlp, f"model.layers.{index}.mlp."
        weights[prefix + "experts.gate_up_proj"] = gate_and_up(mlp).expand(experts, -1, -1)
        weights[prefix + "experts.down_proj"] = mlp.down_proj.weight.expand(experts, -1, -1)
        weights[prefix + "gate.weight"] = 0.1 * torch.randn(experts, config.hidden_size, generator=generator)
    return filled(MixtralForCausalLM, config, weights, model)


def as_hybrid(model, every: int = 3):
    """Granite hybrid: after every third attention layer a Mamba-2 layer whose output projections are zero."""
    places = []  # of each layer of the hybrid: the attention layer it copies, or None
    for index in range(model.config.num_hidden_layers):
        places += [index, None] if (index + 1) % every == 0 else [index]
    config = GraniteMoeHybridConfig(
        **shared(model.config),
        num_hidden_layers=len(places),
        layer_types=["linear_attention" if place is None else "full_attention" for place in places],
        position_embedding_type="rope",
        attention_multiplier=model.config.head_dim**-0.5,
        shared_intermediate_size=model.config.intermediate_size,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=18,
        mamba_d_head=64,
        mamba_d_state=32,
        mamba_expand=2,
    )
    source = model.state_dict()
    weights = {key: value for key, value in source.items() if not key.startswith("model.layers.")}
    for index, place in enumerate(places):
        prefix = f"model.layers.{index}."
        if place is None:
            weights[prefix + "mamba.out_proj.weight"] = torch.zeros(config.hidden_size, 18 * 64)
            down = torch.zeros_like(model.model.layers[0].mlp.down_proj.weight)
        else:
            mlp = model.model.layers[place].mlp
            for name in ATTENTION_WEIGHTS:
                weights[f"{prefix}{name}.weight"] = source[f"model.layers.{place}.{name}.weight"]
            weights[prefix + "shared_mlp.input_linear.weight"] = gate_and_up(mlp)
            down = mlp.down_proj.weight
        weights[prefix + "shared_mlp.output_linear.weight"] = down
    return filled(GraniteMoeHybridForCausalLM, config, weights, model)


def shared(config) -> dict:
    return {name: getattr(config, name) for name in SHARED_FIELDS}


def gate_and_up(mlp) -> torch.Tensor:
    return torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])


def filled(model_class, config, weights: dict[str, torch.Tensor], like):
    """The new model with the weights given; what they do not name keeps its fixed random start."""
    torch.manual_seed(0)
    attn = like.config._attn_implementation
    model = model_class._from_config(config, dtype=like.dtype, attn_implementation=attn)
    unexpected = model.load_state_dict(weights, strict=False).unexpected_keys
    if unexpected:
        raise KeyError(f"{model_class.__name__} has no {unexpected}")
    model.generation_config = like.generation_config
    return model.eval()
