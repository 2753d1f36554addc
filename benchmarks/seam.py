"""What the cache costs a decode step beyond its kernels: ``python benchmarks/seam.py --threads 1 --json seam.json``.

SmolLM2-135M decodes a text behind ``--context`` tokens through packed keys and values and through the library's
``DynamicCache``, every token through both, in random order. Clocks stand around ``cache.update``, around the answer to
attention (``scaled_dot_product_attention``; with ``eager`` whatever is done to the handles, and both matmuls) and around the
kernels in both. ``seam`` is update + answer - kernels of one layer and token: Python, small tensor operations and the clocks
themselves. The first layer of a step makes things ready for all others, so the mean counts too. For the library the kernel is
all of the answer, and update holds the copy that ``torch.cat`` makes of all tokens. ``asked`` is ``get_seq_length`` and
``get_mask_sizes``, a token. On an accelerator kernels are timed until they are launched.

Tokens are packed in blocks. A step that packs one must take less than twice the median step; the slowest step that packs
none says how calm the machine was.
"""

import argparse
import contextlib
import json
import pathlib
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from transformers import DynamicCache
from transformers.cache_utils import Cache

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import real_models
import real_texts

import torch_kvq
from torch_kvq import IsoQuantCache, ops
from torch_kvq._requirements import cache_keyword
from torch_kvq.attention.handle import LazyTensor

SEAM_LIMIT_US = 60.0
FLUSH_LIMIT = 2.0
WARM_UP = 4  # tokens that do not count
SDPA, MATMUL = (F, "scaled_dot_product_attention"), (torch, "matmul")
ANSWERS = {"sdpa": [SDPA], "eager": [MATMUL, (LazyTensor, "__torch_function__")]}
PACKED_KERNELS = [(ops, name) for name in ("attend", "qk", "pv", "encode", "encode_kv")]
DENSE_KERNELS = [SDPA, MATMUL]


class Clock:
    """Seconds by part: ``rows`` one a layer and token, ``asked`` and ``steps`` (seconds, packs a block) one a token."""

    def __init__(self, cache: Cache, attn: str, kernels: list[tuple[object, str]]) -> None:
        self.cache, self.parts = (
            cache,
            [*((each, "kernels") for each in kernels), *((each, "answer") for each in ANSWERS[attn])],
        )
        self.row, self.rows, self.asked, self.steps, self.depth = Counter(), [], [], [], 0
        for name, part in (("update", "update"), ("get_seq_length", "asked"), ("get_mask_sizes", "asked")):
            setattr(cache, name, self.around(getattr(cache, name), part))

    def around(self, function: Callable, part: str) -> Callable:
        """``function``, timed as ``part``: kernels inside another part, all others outside."""

        def timed(*args, **kwargs):
            counts = (self.depth > 0) == (part == "kernels")
            if part == "update":
                self.row = Counter()
                self.rows.append(self.row)
            self.depth += 1
            began = time.perf_counter()
            out = function(*args, **kwargs)
            self.row[part] += (time.perf_counter() - began) * counts
            self.depth -= 1
            return out

        return timed

    def step(self, model, ids: torch.Tensor) -> None:
        """Feeds ``ids [1, 1]``."""
        packed = self.compress_calls()
        self.row = Counter()
        self.asked.append(self.row)
        with contextlib.ExitStack() as stack:
            for (owner, name), part in self.parts:
                timed = self.around(getattr(owner, name), part)
                stack.enter_context(mock.patch.object(owner, name, staticmethod(timed) if isinstance(owner, type) else timed))
            began = time.perf_counter()
            model(input_ids=ids, **{cache_keyword(): self.cache}).logits.argmax().item()
            self.steps.append((time.perf_counter() - began, self.compress_calls() > packed))

    def compress_calls(self) -> int:
        return self.cache.stats.compress_calls if isinstance(self.cache, IsoQuantCache) else 0


def spread(seconds: list[float], unit: float) -> dict[str, float]:
    """Median, ninth decile, mean and maximum in ``1 / unit`` seconds."""
    values = dict(median=statistics.median(seconds), p90=statistics.quantiles(seconds, n=10)[-1])
    values |= dict(mean=statistics.fmean(seconds), max=max(seconds))
    return {name: value * unit for name, value in values.items()}


def summary(clock: Clock, num_layers: int) -> dict:
    rows, steps = clock.rows[WARM_UP * num_layers :], clock.steps[WARM_UP:]
    parts = {name: [row[name] for row in rows] for name in ("update", "answer", "kernels")}
    parts["seam"] = [row["update"] + row["answer"] - row["kernels"] for row in rows]
    parts["asked"] = [row["asked"] for row in clock.asked[WARM_UP:]]
    seconds = [seconds for seconds, _ in steps]
    median = statistics.median(seconds)
    slowest = [max((s / median for s, packs in steps if packs is kind), default=0.0) for kind in (True, False)]
    return dict(
        us={name: spread(each, 1e6) for name, each in parts.items()},
        step_ms=spread(seconds, 1e3),
        num_packing_steps=sum(packs for _, packs in steps),
        slowest_packing_step=slowest[0],
        slowest_other_step=slowest[1],
    )


def token_ids(tokenizer, num_tokens: int) -> torch.Tensor:
    """The first ``num_tokens`` ids of the joined texts, ``[1, num_tokens]``."""
    ids = tokenizer("\n\n".join(real_texts.texts().values()), verbose=False).input_ids
    return torch.tensor([ids[:num_tokens]])


@torch.inference_mode()
def measure(args) -> dict[str, dict]:
    model, tokenizer = real_models.load("smollm2-135m", getattr(torch, args.dtype), attn_implementation=args.attn)
    model.to(args.device)
    ids = token_ids(tokenizer, args.context + WARM_UP + args.tokens).to(args.device)
    caches = {"packed": IsoQuantCache(model.config), "DynamicCache": DynamicCache(config=model.config)}
    for cache in caches.values():
        model(input_ids=ids[:, : args.context], logits_to_keep=1, **{cache_keyword(): cache})
    kernels = dict(zip(caches, (PACKED_KERNELS, DENSE_KERNELS)))
    clocks = {name: Clock(cache, args.attn, kernels[name]) for name, cache in caches.items()}
    for place in range(args.context, ids.shape[1]):
        for name in random.Random(place).sample(list(clocks), len(clocks)):
            clocks[name].step(model, ids[:, place : place + 1])
    return {name: summary(clock, model.config.num_hidden_layers) for name, clock in clocks.items()}


def print_tables(results: dict[str, dict]) -> None:
    parts = list(results["packed"]["us"])
    print(f"{'us: median, p90':16}" + "".join(f"{name:>17}" for name in parts) + f"{'mean seam':>12}")
    for name, side in results.items():
        columns = "".join(f"{side['us'][part]['median']:9.1f} {side['us'][part]['p90']:7.1f}" for part in parts)
        print(f"{name:16}{columns}{side['us']['seam']['mean']:12.1f}")
    print(f"\n{'ms a step':16}{'median':>9}{'p90':>9}{'max':>9}   slowest / median: packs a block, does not")
    for name, side in results.items():
        times = "".join(f"{side['step_ms'][each]:9.2f}" for each in ("median", "p90", "max"))
        slowest = f"{side['slowest_packing_step']:.2f}x" if side["num_packing_steps"] else "-"
        print(f"{name:16}{times}   {slowest}, {side['slowest_other_step']:.2f}x")


def print_bar(name: str, value: float, limit: str, held: bool) -> None:
    print(f"{name:46} {value:7.2f}, must be {limit}: {'held' if held else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "mps"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--attn", default="sdpa", choices=list(ANSWERS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=1000, help="tokens before the first that is decoded")
    parser.add_argument("--tokens", type=int, default=256, help="tokens decoded and measured, 2 or more")
    parser.add_argument("--json", help="file for all numbers")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = measure(args)
    isa = torch_kvq.backends.cpu_isa() if args.device == "cpu" else args.device
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"SmolLM2-135M {args.dtype}, {args.attn}, {args.context} + {args.tokens} tokens, {args.threads} thread(s), {isa}")
    print(f"{versions}\n")
    print_tables(results)
    seam, slowest = results["packed"]["us"]["seam"]["median"], results["packed"]["slowest_packing_step"]
    print()
    print_bar("seam of a layer and token, median, us", seam, f"at most {SEAM_LIMIT_US:g}", seam <= SEAM_LIMIT_US)
    print_bar("slowest step that packs a block / median step", slowest, f"under {FLUSH_LIMIT:g}", 0 < slowest < FLUSH_LIMIT)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(dict(vars(args), isa=isa, versions=versions, results=results), file, indent=1)


if __name__ == "__main__":
    main()
