"""Tokens a second of ``generate`` with packed keys and values and with the caches of transformers:
``python benchmarks/generate.py --threads 2 --json generate.json``.

Every cache of every dtype is a side. Each is given the same prompt, then all go on decoding from it in turn, ``--new-tokens`` a
round, in random order; the first round does not count. A prompt is so much shorter than the context that the counted
rounds lie around it. Decoding is timed token by token through a streamer, from the first new token of a round to the last, so
neither the prompt nor the start of ``generate`` is in it. Speeds are medians over the rounds, with the extremes. Prefill is
timed once, after a short one that does not count. All models use sdpa attention; which dtype is the faster one depends on the
machine, so both run and a bar is held against the faster.
"""

import argparse
import gc
import time

import generate_tables
import models
import timing
import torch
from caches import CACHES, PACKAGES, fill, resident_bytes
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from torch_kvq import IsoQuantCache
from torch_kvq._requirements import cache_keyword

DTYPES = {"cpu": "float32,bfloat16", "cuda": "bfloat16", "mps": "float16"}
WARM_UP_LEN = 300  # tokens, enough to pack some


class Clock(BaseStreamer):
    """When ``generate`` had its prompt and each new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Side:
    """A cache and the sequences ``ids [B, T]`` that a model goes on writing with it.

    Args:
        context: tokens up to which the bytes of the cache are noted.
        filled: take random keys and values for those of the prompt instead of computing it.
    """

    def __init__(self, model, cache: Cache, ids: torch.Tensor, context: int, filled: bool) -> None:
        self.model, self.cache, self.ids, self.context = model, cache, ids, context
        self.prompt_len, self.prefill_s = ids.shape[1], None
        if filled:
            fill(cache, model, *ids.shape)
            self.ids = torch.cat([ids, ids[:, :1]], 1)
        else:
            start, first = self.write(1)
            self.prefill_s = first - start
        self.note_bytes()

    def write(self, tokens: int) -> list[float]:
        """Appends ``tokens``; when the sequences were there, and each new token."""
        clock = Clock()
        self.ids = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            streamer=clock,
            **{cache_keyword(): self.cache},
        )
        return clock.times

    def decode(self, tokens: int) -> float:
        """Appends ``tokens``; seconds a token."""
        _, first, *_, last = self.write(tokens)
        self.note_bytes()
        return (last - first) / (tokens - 1)

    def note_bytes(self) -> None:
        if self.ids.shape[1] - 1 <= self.context:
            self.kv_tokens, self.kv_bytes = self.ids.shape[1] - 1, resident_bytes(self.cache)


def open_side(model, name: str, ids: torch.Tensor, context: int, args) -> Side | str:
    """A side that has its prompt, or why there is none."""
    try:
        return Side(model, CACHES[name](model.config), ids, context, args.fill)
    except ImportError:
        return "package not installed"
    except torch.OutOfMemoryError:
        return "out of memory"


def warm_up(model, name: str, args) -> None:
    """A short prompt and a few tokens: the first calls of a process load code."""
    ids = models.prompt(args.model, args.batch, WARM_UP_LEN).to(args.device)
    side = open_side(model, name, ids, WARM_UP_LEN, args)
    if isinstance(side, Side):
        side.decode(4)


def measure(loaded: dict[str, object], context: int, args) -> list[dict]:
    """One row a dtype and cache at ``context`` tokens."""
    length = context - (args.rounds + 1) * args.new_tokens // 2
    ids = models.prompt(args.model, args.batch, length).to(args.device)
    sides = {}
    for dtype, model in loaded.items():
        for name in args.caches:
            sides[dtype, name] = open_side(model, name, ids, context, args)
            print(f"{context} {dtype} {name}: {_opened(sides[dtype, name])}", flush=True)
            release()
    usable = {key: side for key, side in sides.items() if isinstance(side, Side)}
    calls = {key: lambda side=side: side.decode(args.new_tokens) for key, side in usable.items()}
    times = timing.in_turn(calls, args.rounds)
    rows = []
    for (dtype, name), side in sides.items():
        row = dict(context=context, dtype=dtype, cache=name)
        rows.append(row | (dict(missing=side) if isinstance(side, str) else figures(side, times[dtype, name])))
    return rows


def _opened(side: Side | str) -> str:
    if isinstance(side, str):
        return side
    return "filled" if side.prefill_s is None else f"prefill {side.prefill_s:.1f} s"


def figures(side: Side, seconds: list[float]) -> dict:
    """Tokens a second of all sequences together, ms a step, bytes, and what must be zero."""
    step, batch = timing.summary(seconds), side.ids.shape[0]
    rate, least, most = (1e3 * batch / step[f"{name}_ms"] for name in ("median", "max", "min"))
    row = dict(step=step, rate=rate, rate_min=least, rate_max=most, kv_tokens=side.kv_tokens, kv_bytes=side.kv_bytes)
    if side.prefill_s is not None:
        row |= dict(prefill_rate=side.prompt_len * batch / side.prefill_s)
    if isinstance(side.cache, IsoQuantCache):
        stats = side.cache.stats
        row |= dict(decompress_calls=stats.decompress_calls, fallback_calls=stats.fallback_calls)
    return row


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = timing.arguments(__doc__)
    names = parser.add_mutually_exclusive_group()
    names.add_argument("--model", default="smollm2-135m", choices=list(models.real_models.SOURCES))
    names.add_argument("--shape", choices=list(models.SHAPES), help="random weights of this shape instead")
    parser.add_argument("--layers", type=int, help="of the shape, fewer than it has")
    parser.add_argument("--contexts", default="512,2000,8000", help="tokens, comma-separated")
    parser.add_argument("--caches", default=",".join(CACHES), help="which, comma-separated")
    parser.add_argument("--dtype", help="one or more, comma-separated; default on the CPU float32,bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens decoded a round")
    parser.add_argument("--rounds", type=timing.count, default=5)
    parser.add_argument("--fill", action="store_true", help="random keys and values instead of a prefill")
    args = parser.parse_args(arguments)
    if args.layers and not args.shape:
        parser.error("--layers needs --shape: a real model has all of its layers")
    args.model = args.shape or args.model
    args.dtypes = (args.dtype or DTYPES[args.device]).split(",")
    args.caches = args.caches.split(",")
    args.contexts = [int(context) for context in args.contexts.split(",")]
    for name in args.caches:
        if name not in CACHES:
            parser.error(f"--caches must be among {', '.join(CACHES)}, got {name}")
    if args.new_tokens < 2:
        parser.error(f"--new-tokens must be at least 2, got {args.new_tokens}")
    least = (args.rounds + 1) * args.new_tokens // 2 + 1
    if min(args.contexts) < least:
        parser.error(f"--contexts must be at least {least}, half of all rounds and a token, got {min(args.contexts)}")
    return args


def main() -> None:
    args = parse()
    models.prepare(args.threads)
    conditions = timing.conditions(args.device, *PACKAGES)
    loaded = {dtype: models.load(args.model, getattr(torch, dtype), args.device, args.layers) for dtype in args.dtypes}
    for model in loaded.values():
        for name in args.caches:
            warm_up(model, name, args)
    rows = []
    for context in args.contexts:
        release()
        rows += measure(loaded, context, args)
        settings = {name: getattr(args, name) for name in ("model", "layers", "batch", "rounds", "new_tokens")}
        settings |= dict(random_weights=args.shape is not None, filled=args.fill)
        result = timing.result("generate", conditions, **settings, rows=rows)
        if args.json:  # after each context, so that a long run that is stopped keeps what it has
            timing.save(result, args.json)
    timing.show(generate_tables.views(result))


if __name__ == "__main__":
    main()
