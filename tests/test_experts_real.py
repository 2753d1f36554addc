"""Real text: SmolLM2 re-packed as a Mixtral, offloaded, says and scores the same as resident; packed experts pass a gate."""

import pathlib
import subprocess
import sys

import pytest
import real_texts
import repackaged
import torch
from transformers import AutoModelForCausalLM

from torch_kvq import load_with_expert_offload, offload_experts, plan_bits
from torch_kvq.experts import Gate
from torch_kvq.experts.gate import mean_nll


@pytest.fixture(scope="module")
def folder(smollm2, tmp_path_factory):
    """Checkpoint of SmolLM2 as a Mixtral, in bfloat16."""
    path = tmp_path_factory.mktemp("mixtral")
    repackaged.as_mixtral(smollm2[0]).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture
def mixtral(smollm2, folder):
    """(that model, resident, and tokens of a real text)"""
    ids = smollm2[1](real_texts.texts()["reference"][:4000], return_tensors="pt").input_ids
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval(), ids


def says_and_scores(model, ids) -> tuple[torch.Tensor, float]:
    text = model.generate(ids[:, :64], attention_mask=torch.ones_like(ids[:, :64]), max_new_tokens=10, do_sample=False)
    return text, mean_nll(model, [ids[:, :200]])


def test_text_and_perplexity_are_identical(mixtral, folder):
    model, ids = mixtral
    text, nll = says_and_scores(model, ids)
    for budget in (3,):
        handle = offload_experts(model, budget)
        offloaded_text, offloaded_nll = says_and_scores(model, ids)
        assert torch.equal(offloaded_text, text) and offloaded_nll == nll
        assert handle.stats().misses > 100
        handle.remove()
    loaded = load_with_expert_offload(folder, 0.25, attn_implementation="sdpa")
    loaded_text, loaded_nll = says_and_scores(loaded, ids)
    assert torch.equal(loaded_text, text) and loaded_nll == nll


@pytest.mark.slow
def test_gate_on_real_text(mixtral):
    """At 4 bits the text is scored nearly as before; 2 bits fail the same gate."""
    model, ids = mixtral
    plan = plan_bits(model, [ids[:, :300]], base={"routed": 4}, threshold=1e9)
    applied = plan.apply(0.5, gate=Gate(max_error=0.3, max_delta_nll=0.2), roles=("routed",), verbose=False)
    (_, errors, delta) = applied.gate.trials[-1]
    assert len(applied.gate.trials) == 1 and abs(delta) < 0.2 and max(errors.values()) < 0.3
    applied.handle.remove()


@pytest.mark.slow
def test_example(smollm2, tmp_path):
    script = pathlib.Path(__file__).resolve().parent.parent / "examples" / "experts.py"
    done = subprocess.run(
        [sys.executable, script, "--new-tokens", "8"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    for word in ("Q_W", "C_KV", "O_E", "expected hit rate", "8 bits: worst output error", "read from the checkpoint"):
        assert word in done.stdout
