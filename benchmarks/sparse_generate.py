"""What a model pays for an index, and for keys and values in host memory: ``python benchmarks/sparse_generate.py --device cuda
--shape llama-3.1-8b --layers 8 --json sparse_generate.json``.

Random weights of a shape. Every round, all caches in random order: a new cache takes in a prompt, until its next token is known
to the host, then decodes ``--new-tokens``; the first round does not count. Medians over the rounds, with the extremes.
Attention of random weights is flat, so that a share of it would be a share of the tokens: a cap selects ``--share`` of them in
each kv head.
"""

import argparse
import time

import models
import sparse_generate_tables
import timing
import torch
from caches import resident_bytes
from transformers import DynamicCache

from torch_kvq import RaBitQSparseCache
from torch_kvq._requirements import cache_keyword

DENSE, STORES = "dynamic", ("exact", "isoquant", "host")


class Side:
    """A cache of ``store``, or the dense one, at work on a prompt ``ids [B, T]``."""

    def __init__(self, model, store: str, ids: torch.Tensor, max_selected: int, new_tokens: int) -> None:
        self.model, self.store, self.ids, self.max_selected, self.new_tokens = model, store, ids, max_selected, new_tokens
        self.prefill_s: list[float] = []
        self.decode_s: list[float] = []
        self.figures: dict = {}

    def make(self):
        if self.store == DENSE:
            return DynamicCache(config=self.model.config)
        return RaBitQSparseCache(self.model.config, store=self.store, max_selected=self.max_selected)

    @torch.inference_mode()
    def run(self) -> None:
        cache, ids = self.make(), self.ids
        synchronize(ids)
        began = time.perf_counter()
        token = self.step(cache, ids)
        token.tolist()  # the stream of the model is waited for, not what runs beside it
        prefilled = time.perf_counter()
        token = self.step(cache, token)
        synchronize(ids)
        opened, before = time.perf_counter(), self.counts(cache)
        for _ in range(self.new_tokens):
            token = self.step(cache, token)
        synchronize(ids)
        self.prefill_s.append(prefilled - began)
        self.decode_s.append((time.perf_counter() - opened) / self.new_tokens)
        self.note(cache, before)

    def step(self, cache, ids: torch.Tensor) -> torch.Tensor:
        out = self.model(input_ids=ids, logits_to_keep=1, use_cache=True, **{cache_keyword(): cache})
        return out.logits[:, -1:].argmax(-1)

    def counts(self, cache) -> tuple[int, int]:
        """Bytes read of the index, and of selected keys and values."""
        if self.store == DENSE:
            return 0, 0
        return cache.stats.index_bytes_read, cache.stats.bytes_read - cache.stats.index_bytes_read

    def note(self, cache, before: tuple[int, int]) -> None:
        index, selected = ((now - then) / self.new_tokens for now, then in zip(self.counts(cache), before))
        host = 0 if self.store == DENSE else cache.host_nbytes
        held = dict(tokens=cache.get_seq_length(), bytes=resident_bytes(cache) - host, host_bytes=host)
        self.figures = held | dict(index_bytes=index, selected_bytes=selected)

    def row(self) -> dict:
        times = dict(prefill=timing.summary(self.prefill_s[1:]), decode=timing.summary(self.decode_s[1:]))
        return dict(cache=self.store) | times | self.figures


def synchronize(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def measure(model, context: int, args) -> list[dict]:
    ids = models.prompt(args.shape, args.batch, context).to(args.device)
    sides = {name: Side(model, name, ids, int(args.share * context), args.new_tokens) for name in (DENSE, *args.stores)}
    timing.in_turn({name: side.run for name, side in sides.items()}, args.rounds)
    return [dict(context=context) | side.row() for side in sides.values()]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = timing.arguments(__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(models.SHAPES))
    parser.add_argument("--layers", type=int, help="of the shape, fewer than it has")
    parser.add_argument("--contexts", default="32768", help="tokens, comma-separated")
    parser.add_argument("--stores", default=",".join(STORES), help="of the sparse cache, comma-separated")
    parser.add_argument("--share", type=float, default=0.1, help="of the tokens, selected at most in each kv head")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=timing.count, default=7)
    args = parser.parse_args(arguments)
    args.contexts = [int(context) for context in args.contexts.split(",")]
    args.stores = args.stores.split(",")
    for name in args.stores:
        if name not in STORES:
            parser.error(f"--stores must be among {', '.join(STORES)}, got {name}")
    return args


def main() -> None:
    args = parse()
    models.prepare(args.threads)
    model = models.load(args.shape, getattr(torch, args.dtype), args.device, args.layers)
    rows = [row for context in args.contexts for row in measure(model, context, args)]
    settings = {name: getattr(args, name) for name in ("shape", "batch", "rounds", "new_tokens", "share", "dtype")}
    settings |= dict(layers=model.config.num_hidden_layers)
    result = timing.result("sparse_generate", timing.conditions(args.device), **settings, rows=rows)
    if args.json:
        timing.save(result, args.json)
    timing.show(sparse_generate_tables.views(result))


if __name__ == "__main__":
    main()
