"""The fidelity harness, and what it must say of the default cache on a real model and real texts.

``KVQ_TEST_SCORED`` says how many tokens of the real model are scored, 512 unless it is set.
"""

import os

import pytest
import real_texts
import tiny_models
import torch
from transformers import DynamicCache

from torch_kvq import IsoQuantCache, backends
from torch_kvq.backends import native
from torch_kvq.evaluate import fidelity

PACKED = dict(window_len=32, flush_len=16)
SCORED = int(os.environ.get("KVQ_TEST_SCORED", "512"))
BARE = dict(balance=False, center=False, num_sinks=0, window_len=1, flush_len=1)


def test_exact_cache_has_no_error():
    model = tiny_models.build("llama", "sdpa")
    ids = tiny_models.prompt(3, 60, seed=2)
    got = fidelity(model, ids, lambda: DynamicCache(config=model.config), 20)
    with torch.no_grad():
        log_probs = model(input_ids=ids).logits[:, 19:-1].log_softmax(-1)
    nll = -log_probs.gather(-1, ids[:, 20:, None])
    assert got.num_tokens == 3 * 40 and len(got.per_sequence) == 3
    assert abs(got.nll_exact - nll.mean().item()) < 1e-5 and abs(got.delta_nll) < 1e-5
    assert got.kl < 1e-8 and got.top1 == 1.0
    each = [row.nll_exact for row in got.per_sequence]
    torch.testing.assert_close(torch.tensor(each), nll.mean((1, 2)), rtol=1e-4, atol=1e-4)


def test_fewer_bits_cost_more():
    model = tiny_models.build("llama", "sdpa")
    ids = tiny_models.prompt(2, 160, seed=2)
    kl = [fidelity(model, ids, lambda: IsoQuantCache(k_bits=b, v_bits=b, **PACKED), 120).kl for b in (4, 3, 2)]  # noqa: B023
    assert 0 < kl[0] < kl[1] < kl[2]


def test_a_context_that_was_never_packed_is_refused():
    model = tiny_models.build("llama", "sdpa")
    with pytest.raises(RuntimeError, match="no packed token was read: a prefix_len of 20"):
        fidelity(model, tiny_models.prompt(1, 40), IsoQuantCache, 20)


@pytest.mark.parametrize("prefix_len", [0, 40, -1])
def test_prefix_out_of_range_is_refused(prefix_len):
    model = tiny_models.build("llama", "sdpa")
    with pytest.raises(ValueError, match=f"prefix_len must be from 1 to 39 for 40 tokens, got {prefix_len}"):
        fidelity(model, tiny_models.prompt(1, 40), IsoQuantCache, prefix_len)


def text_ids(tokenizer, num_tokens: int, texts: int = 4) -> torch.Tensor:
    rows = list(real_texts.texts().values())[:texts]
    return torch.tensor([tokenizer(text, add_special_tokens=False).input_ids[:num_tokens] for text in rows])


@pytest.fixture
def kernels(request, smollm2):
    """The kernels of float32 queries as they are, and on the CPU the integer ones that answer 16-bit queries."""
    if request.param == "in use":
        yield backends.cpu_isa()
        return
    if smollm2[0].device.type != "cpu":
        pytest.skip(f"{native.INTEGER} is for the CPU")
    if native.INTEGER not in native.available_isas():
        pytest.skip(f"{native.INTEGER} is not on this machine or not built")
    before = native.set_cpu_isa(native.INTEGER)
    yield native.INTEGER
    native.set_cpu_isa(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernels, bits, kl, top1, delta",
    [("in use", 3, 0.012, 0.95, 0.015), ("in use", 4, 0.004, 0.97, 0.015), (native.INTEGER, 3, 0.012, 0.95, 0.015)],
    indirect=["kernels"],
)
def test_smollm2_at_default_settings(smollm2, bits, kl, top1, delta, kernels, exact_once, capsys):
    model, tokenizer = smollm2
    ids = text_ids(tokenizer, 1024 + SCORED).to(model.device)
    got = fidelity(model, ids, lambda: IsoQuantCache(k_bits=bits, v_bits=bits), 1024)
    with capsys.disabled():
        print(f"\nSmolLM2 K{bits} V{bits}, {kernels if model.device.type == 'cpu' else model.device}, {model.dtype}: {got}")
    assert backends.cpu_isa() == kernels
    assert got.kl <= kl and got.top1 >= top1 and got.delta_nll <= delta


@pytest.mark.slow
def test_order_of_rotations_on_smollm2(smollm2, exact_once, capsys):
    """RotaryQuant, table 8: without centring, balance, window and sinks each weaker rotation costs clearly more."""
    model, tokenizer = smollm2
    ids = text_ids(tokenizer, 320, texts=2).to(model.device)
    rotations = ("none", "so3", "so4", "hadamard", "isoquant", "dense")
    kl = {r: fidelity(model, ids, lambda: IsoQuantCache(rotation=r, **BARE), 256).kl for r in rotations}  # noqa: B023
    with capsys.disabled():
        print("\nKL by rotation: " + ", ".join(f"{name} {value:.3f}" for name, value in kl.items()))
    mixed = [kl[name] for name in ("hadamard", "isoquant", "dense")]
    assert kl["none"] > kl["so3"] > kl["so4"] > 2 * max(mixed)
    assert max(mixed) < 1.5 * min(mixed)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(model="llama"), TypeError, "model must be a causal language model, got 'llama'"),
        (dict(input_ids=[[1, 2]]), TypeError, r"input_ids must be a tensor \[batch, tokens\], got \[\[1, 2\]\]"),
        (dict(input_ids=torch.zeros(1, 40)), ValueError, "input_ids must be integers, got torch.float32"),
        (
            dict(cache_factory=IsoQuantCache()),
            TypeError,
            "cache_factory must be a class of caches or a function that makes one",
        ),
        (dict(prefix_len=20.0), ValueError, "prefix_len must be from 1 to 39 for 40 tokens, got 20.0"),
        (dict(progress=True), TypeError, "progress must be a function of an iterable, got True"),
    ],
)
def test_arguments(change, error, message):
    options = dict(
        model=tiny_models.build("llama"), input_ids=tiny_models.prompt(1, 40), cache_factory=IsoQuantCache, prefix_len=20
    )
    with pytest.raises(error, match=message):
        fidelity(**{**options, **change})
