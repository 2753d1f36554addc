"""The largest context that fits beside a model: ``python benchmarks/largest_context.py --device cuda --json largest.json``.

Random weights of a shape. A cache takes random keys and values for those of a prompt, a layer at a time and each in one piece,
then the model decodes two tokens with it: a context fits if no allocation of all that fails. What two short contexts take at
their peak says how long the first one tried is; each further one is 2 % shorter.
"""

import argparse
import gc

import largest_context_tables
import models
import timing
import torch
from caches import CACHES, fill, resident_bytes

from torch_kvq._requirements import cache_keyword

COMPARED = ("isoquant", "dynamic")
STEP = 0.98


@torch.inference_mode()
def attempt(model, name: str, batch: int, tokens: int) -> dict | None:
    """Peak of what is allocated and bytes of the cache, or ``None`` if ``tokens`` did not fit."""
    release(model.device)
    try:
        cache = CACHES[name](model.config)
        fill(cache, model, batch, tokens)
        ids = torch.zeros((batch, 1), dtype=torch.long, device=model.device)
        for _ in range(2):
            model(input_ids=ids, use_cache=True, **{cache_keyword(): cache})
        held = resident_bytes(cache)
        peak = torch.cuda.max_memory_allocated() if model.device.type == "cuda" else held
        return dict(tokens=tokens, peak_bytes=peak, kv_bytes=held)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        return None


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def first_guess(model, name: str, args) -> int:
    """The context whose peak is all memory, if peaks are a line through those of two short contexts."""
    short = [attempt(model, name, args.batch, tokens) for tokens in (args.short, 2 * args.short)]
    rise = (short[1]["peak_bytes"] - short[0]["peak_bytes"]) / args.short
    return int(args.short + (args.memory - short[0]["peak_bytes"]) / rise)


def measure(model, name: str, args) -> dict:
    """The largest context of a cache that fits, and how many were tried."""
    tokens, tried = first_guess(model, name, args), 0
    while tokens > 0:
        tried += 1
        found = attempt(model, name, args.batch, tokens)
        print(f"{name} {tokens}: {'does not fit' if found is None else found}", flush=True)
        if found is not None and found["peak_bytes"] <= args.memory:
            return dict(cache=name, tried=tried) | found
        del found
        tokens = int(STEP * tokens)
    raise RuntimeError(f"no context of {name} fits in {args.memory} bytes")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = timing.arguments(__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(models.SHAPES))
    parser.add_argument("--layers", type=int, help="of the shape, fewer than it has")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--short", type=int, default=8192, help="tokens of the shorter context that the first guess is from")
    parser.add_argument("--memory", type=int, help="bytes that may be allocated; default all of a CUDA device, less 1 GiB")
    args = parser.parse_args(arguments)
    if args.memory is None:
        if args.device != "cuda":
            parser.error("--memory must be given but for CUDA devices, got none")
        args.memory = torch.cuda.mem_get_info()[0] - 2**30
    return args


def main() -> None:
    args = parse()
    models.prepare(args.threads)
    model = models.load(args.shape, getattr(torch, args.dtype), args.device, args.layers)
    rows = [measure(model, name, args) for name in COMPARED]
    settings = {name: getattr(args, name) for name in ("shape", "batch", "dtype", "memory")}
    settings |= dict(layers=model.config.num_hidden_layers)
    result = timing.result("largest_context", timing.conditions(args.device), **settings, rows=rows)
    if args.json:
        timing.save(result, args.json)
    timing.show(largest_context_tables.views(result))


if __name__ == "__main__":
    main()
