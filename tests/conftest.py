"""What every test shares: one seed, few threads, and the real model where its package is installed."""

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import real_models
import torch
import transformers

from torch_kvq.evaluate import fidelity


def pytest_configure(config):
    torch.set_num_threads(int(os.environ.get("KVQ_TEST_THREADS", "1")))
    transformers.utils.logging.disable_progress_bar()


def pytest_report_header(config):
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} thread(s)"


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2():
    """(model, tokenizer) of the real SmolLM2-135M-Instruct, in float32 on the CPU.

    ``KVQ_TEST_DEVICE=cuda`` puts it on a GPU, ``KVQ_TEST_DTYPE=bfloat16`` makes it that: tests of fidelity take both. Their
    bars are for float32: in bfloat16 the rounding of the model itself adds to every distance.
    """
    dtype = getattr(torch, os.environ.get("KVQ_TEST_DTYPE", "float32"))
    model, tokenizer = real_model("smollm2-135m", dtype)
    return model.to(os.environ.get("KVQ_TEST_DEVICE", "cpu")), tokenizer


@pytest.fixture(scope="module")
def exact_once():
    """Has ``fidelity`` compute the exact side of the same texts once, whatever caches are compared with it."""
    module = sys.modules[fidelity.__module__]
    compute, known = module._log_probs, {}

    def once(model, input_ids, cache, keep):
        if type(cache) is not transformers.DynamicCache:
            return compute(model, input_ids, cache, keep)
        key = id(model), keep, tuple(input_ids.flatten().tolist())
        if key not in known:
            known.clear()
            known[key] = compute(model, input_ids, cache, keep)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_log_probs", once)
        yield


def real_model(name: str, dtype: torch.dtype = torch.float32):
    """``real_models.load`` of a model that a test cannot do without: skips where its packages are not installed."""
    if not real_models.available(name):
        pytest.skip(f"{name} is not installed: see examples/real_models.py")
    return real_models.load(name, dtype)
