"""What ``experts.py`` measures: a generated Qwen3-MoE, its checkpoint, routers that follow a trace, a decode and its costs."""

import hashlib
import itertools
import json
import os
import pathlib
import random
import statistics
import threading
import time
from collections.abc import Callable

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from torch_kvq.experts.families import find_experts
from torch_kvq.experts.predictors import router_of
from torch_kvq.experts.trace import synthetic_trace

DISK = dict(hidden_size=1024, moe_intermediate_size=512, num_hidden_layers=16, num_experts=64, vocab_size=8192)
GPU = dict(hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_experts=128, vocab_size=151936)
HEADS = dict(num_attention_heads=16, num_key_value_heads=4, head_dim=128, num_experts_per_tok=8, intermediate_size=1024)
PROMPT, REST = 16, "model-rest.safetensors"


def config(device: str, layers: int | None = None) -> transformers.PreTrainedConfig:
    shape = dict(DISK if device == "cpu" else GPU)
    shape["num_hidden_layers"] = layers or shape["num_hidden_layers"]
    tokens = dict(bos_token_id=1, eos_token_id=None, pad_token_id=0)
    return transformers.Qwen3MoeConfig(**shape, **HEADS, **tokens, tie_word_embeddings=False, dtype=torch.bfloat16)


# ---- the checkpoint


def write_checkpoint(folder: pathlib.Path) -> None:
    """One shard a layer, experts one by one as published checkpoints have them; the index is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    cfg = config("cpu")
    cfg.architectures = ["Qwen3MoeForCausalLM"]
    cfg.save_pretrained(folder)
    with torch.device("meta"):
        names = transformers.AutoModelForCausalLM.from_config(cfg).state_dict()
    torch.manual_seed(0)
    shards: dict[str, dict] = {}
    for name, tensor in names.items():
        shard = f"model-{name.split('.')[2]}.safetensors" if ".layers." in name else REST
        shards.setdefault(shard, {})[name] = tensor.shape
    places = {}
    for shard, shapes in shards.items():
        tensors = {}
        for name, shape in shapes.items():
            for part, part_shape in split_names(name, shape):
                tensors[part] = torch.ones(part_shape) if "norm" in name else 0.03 * torch.randn(part_shape)
                tensors[part] = tensors[part].bfloat16()
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, shard))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    os.sync()


def split_names(name: str, shape: torch.Size) -> list[tuple[str, tuple[int, ...]]]:
    """The stored tensors of a parameter: experts one by one, gate and up apart."""
    prefix, _, last = name.rpartition(".")
    if not prefix.endswith("experts"):
        return [(name, tuple(shape))]
    parts = ["down_proj"] if last == "down_proj" else ["gate_proj", "up_proj"]
    size = (shape[1] // len(parts), shape[2])
    return [(f"{prefix}.{expert}.{part}.weight", size) for expert in range(shape[0]) for part in parts]


# ---- what is measured


class Memory(threading.Thread):
    """Samples ``RssAnon``; ``peak`` in bytes. Its CPU time counts as the process's, so a sample must cost little."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._ends = 0, threading.Event()

    def run(self) -> None:
        while not self._ends.wait(0.01):
            self.peak = max(self.peak, anonymous_bytes())

    def __enter__(self) -> "Memory":
        self.start()
        return self

    def __exit__(self, *args) -> None:
        self._ends.set()
        self.join()
        self.peak = max(self.peak, anonymous_bytes())


def anonymous_bytes() -> int:
    status = os.open("/proc/self/status", os.O_RDONLY)
    try:
        return 1024 * int(os.read(status, 8192).partition(b"RssAnon:")[2].split(maxsplit=1)[0])
    finally:
        os.close(status)


def disk_bytes() -> int:
    for line in pathlib.Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes"):
            return int(line.split()[1])
    return 0


def drop_page_cache(*folders: str | None) -> None:
    """Of files with experts; that with the embeddings is mapped by the model, which would read it again page by page."""
    for path in itertools.chain.from_iterable(pathlib.Path(folder).glob("*.safetensors") for folder in folders if folder):
        if path.name == REST:
            continue
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Foreteller:
    """A predictor that knows the trace and names ``recall`` of the next layer's experts, others in place of the rest."""

    def __init__(self, recall: float) -> None:
        self.recall, self.draw = recall, random.Random(0)
        self.trace: Trace | None = None

    def __call__(self, layer: str, hidden_states: torch.Tensor) -> dict[str, list[int]]:
        names = list(self.trace.ids)
        index = names.index(layer) + 1
        if index == len(names) or len(hidden_states) > 1:
            return {}
        ids, position = self.trace.ids[names[index]], self.trace.positions[names[index]]
        right = ids[position].tolist()
        return {names[index]: [e if self.draw.random() < self.recall else (e + 1) % (1 + int(ids.max())) for e in right]}


class Trace:
    """Routers of ``model`` answer with the experts of one synthetic trace, token after token; their weights stay their own.

    ``ids [num_tokens, top k]`` and the next token, by layer.
    """

    def __init__(self, model: nn.Module, num_tokens: int) -> None:
        self.modules = find_experts(model)
        device = next(p.device for p in model.parameters() if not p.is_meta)
        counts = {name: module.num_experts for name, module in self.modules.items()}
        rows: dict[str, list] = {name: [] for name in counts}
        for name, chosen in synthetic_trace(counts, model.config.num_experts_per_tok, num_tokens).calls:
            rows[name].append(chosen)
        self.ids = {name: torch.tensor(chosen, device=device) for name, chosen in rows.items()}
        self.restart()
        modules = dict(model.named_modules())
        for name in self.ids:
            router_of(modules, name).register_forward_hook(lambda _, args, output, name=name: self._answer(name, output))

    def restart(self) -> None:
        """From the first token on, also for a ``Foreteller`` that the model was given since."""
        self.positions = dict.fromkeys(self.ids, 0)
        for module in self.modules.values():
            predictor = getattr(getattr(module, "_hf_hook", None), "predictor", None)
            if isinstance(predictor, Foreteller):
                predictor.trace = self

    def _answer(self, name: str, output: tuple) -> tuple:
        first, count = self.positions[name], len(output[-1])
        self.positions[name] += count
        return *output[:-1], self.ids[name][first : first + count]


@torch.inference_mode()
def decode(model: nn.Module, num_tokens: int, before_token: Callable[[], None] = lambda: None) -> dict:
    """Greedy tokens after a fixed prompt: median seconds a token, CPU seconds, disk bytes, a hash of the tokens."""
    device = next(p.device for p in model.parameters() if not p.is_meta)
    most = min(8000, model.config.vocab_size)
    ids = torch.randint(3, most, (1, PROMPT), generator=torch.Generator().manual_seed(1)).to(device)
    cache = transformers.DynamicCache(config=model.config)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    before_token()
    began = time.perf_counter()
    token = model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
    wait()
    prefill, seconds, cpu, tokens, disk = time.perf_counter() - began, [], 0.0, [token.item()], 0
    handle = getattr(model, "expert_offload", None)
    if handle is not None:
        handle.reset_stats()
    for _ in range(num_tokens):
        before_token()
        began, cpu_began, disk_began = time.perf_counter(), time.process_time(), disk_bytes()
        token = model(token, past_key_values=cache).logits.argmax(-1)
        wait()
        seconds.append(time.perf_counter() - began)
        cpu += time.process_time() - cpu_began
        disk += disk_bytes() - disk_began
        tokens.append(token.item())
    result = dict(
        num_tokens=num_tokens,
        prefill_s=prefill,
        token_s=statistics.median(seconds),
        cpu_s=cpu / num_tokens,
        disk_bytes=disk,
        tokens=hashlib.sha256(str(tokens).encode()).hexdigest()[:12],
    )
    if handle is not None:
        stats = handle.stats()
        each = next(iter(handle.pools.values())).spec.nbytes
        result.update(hits=stats.hits, misses=stats.misses, bytes_read=stats.bytes_read, expert_bytes=each)
        result.update(slot_bytes=stats.resident_bytes, stall_s=stats.stall_seconds / num_tokens)
        result.update(guesses=stats.guesses, useful_guesses=stats.useful_guesses)
    return result
