"""The models that ``generate.py`` runs and the prompts it gives them."""

import functools
import pathlib
import sys
import warnings

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import real_models
import real_texts

# Random weights of these shapes take the same time as the real ones.
SHAPES = {
    "llama-3.1-8b": dict(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters=dict(rope_type="default", rope_theta=500000.0),
    ),
    "tiny": dict(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
    ),
}


def load(name: str, dtype: torch.dtype, device: str, layers: int | None = None) -> PreTrainedModel:
    """A real model, or random weights of a shape, perhaps with fewer ``layers``, with sdpa attention."""
    if name not in SHAPES:
        return real_models.load(name, dtype)[0].to(device)
    with torch.device(device):
        config = LlamaConfig(**SHAPES[name] | ({} if layers is None else dict(num_hidden_layers=layers)))
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def prompt(name: str, batch: int, tokens: int) -> torch.Tensor:
    """Token ids ``[batch, tokens]``: of a real model stretches of real texts, otherwise random."""
    if name in SHAPES:
        return torch.randint(SHAPES[name]["vocab_size"], (batch, tokens))
    ids = _text_ids(name)
    if batch * tokens > len(ids):
        raise ValueError(f"batch * tokens must be at most {len(ids)}, the texts there are, got {batch} * {tokens}")
    return ids[: batch * tokens].view(batch, tokens)


@functools.cache
def _text_ids(name: str) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(real_models.models_dir() / name)
    return tokenizer("\n\n".join(real_texts.texts().values()), verbose=False, return_tensors="pt").input_ids[0]


def prepare(threads: int) -> None:
    """Threads, seed, and no words of transformers between the numbers."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", ".*past_key_values.*", FutureWarning)  # renamed `cache` in newer transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
