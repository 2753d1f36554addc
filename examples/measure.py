"""What the demo measures: one generation with its progress bars, and the bytes a cache holds as it grows."""

import copy
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer


@dataclass
class Run:
    """One generation: token ids ``[new]``, seconds of prefill and of decoding, and the cache as it was left."""

    tokens: list[int]
    prompt_len: int
    prefill_s: float
    decode_s: float
    cache: object

    @property
    def prefill_rate(self) -> float:
        return self.prompt_len / self.prefill_s

    @property
    def decode_rate(self) -> float:
        return (len(self.tokens) - 1) / self.decode_s


class Progress(BaseStreamer):
    """Two bars, layers of the prefill and tokens of decoding, and the clock: ``generate`` shows it every token."""

    def __init__(self, model, name: str, new_tokens: int) -> None:
        self.name, self.new_tokens, self.times, self.prompt_len = name, new_tokens, [], 0
        layers = model.model.layers
        self.bar = tqdm(total=len(layers), desc=f"{name:14} prefill", unit="layer")
        self.hooks = [layer.register_forward_hook(self.layer_done) for layer in layers]

    def layer_done(self, *_) -> None:
        self.bar.update()

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) == 1:
            self.prompt_len = value.numel()
            return
        if len(self.times) == 2:
            self.close_prefill()
            self.bar = tqdm(total=self.new_tokens, desc=f"{self.name:14} decode ", unit="token")
        self.bar.update()

    def close_prefill(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.bar.close()

    def end(self) -> None:
        self.bar.close()


def generate(model, prompt: torch.Tensor, cache, new_tokens: int) -> Run:
    """Greedy text after ``prompt [1, T]``, timed."""
    progress = Progress(model, type(cache).__name__, new_tokens)
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        streamer=progress,
    )
    start, first, *_, last = progress.times
    tokens = out[0, progress.prompt_len :].tolist()
    return Run(tokens, progress.prompt_len, first - start, last - first, cache)


@torch.inference_mode()
def agreement(model, run: Run, tokens: list[int]) -> float:
    """Share of ``tokens`` (but the first) that ``run``'s cache would choose too after the prompt and those before."""
    cache = copy.deepcopy(run.cache)
    cache.crop(run.prompt_len - cache.get_seq_length())
    logits = model(torch.tensor([tokens[:-1]]), past_key_values=cache).logits
    return (logits[0].argmax(-1) == torch.tensor(tokens[1:])).float().mean().item()


def resident_bytes(cache) -> int:
    """Bytes that a cache keeps: ours counts itself, the library's is the sum of its tensors."""
    if hasattr(cache, "nbytes"):
        return cache.nbytes
    return sum(tensor.untyped_storage().nbytes() for layer in cache.layers for tensor in (layer.keys, layer.values))


def growth(cache_class, model, lengths: list[int]) -> list[int]:
    """Resident bytes at each of ``lengths`` of a cache that really grows, by random keys of the model's shape."""
    config = model.config
    cache = cache_class(config=config)
    generator = torch.Generator().manual_seed(0)
    made, held = [], 0
    for length in tqdm(lengths, desc=f"{cache_class.__name__:14} growth ", unit="length"):
        shape = (1, config.num_key_value_heads, length - held, config.head_dim)
        query = torch.randn(1, config.num_attention_heads, 1, config.head_dim, generator=generator, dtype=model.dtype)
        for index in range(config.num_hidden_layers):
            keys, values = (torch.randn(shape, generator=generator).to(model.dtype) for _ in range(2))
            keys, values = cache.update(keys, values, index)
            F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)  # an answered layer packs its tokens
        held = length
        made.append(resident_bytes(cache))
    return made


def kv_share(model, cache: DynamicCache) -> float:
    """Share of keys and values in all the bytes that one decode step reads: weights and cache, both dense."""
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return resident_bytes(cache) / (resident_bytes(cache) + weights)
