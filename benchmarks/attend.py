"""Attention of one decode step on packed tokens against dense attention, and encode against prefill:
``python benchmarks/attend.py --threads 1 --json attend.json``.

Both sides run in every round, in random order, so that whatever else the machine does and what the caches still hold hits
both; medians and minima over the rounds, the spread is (third - first quartile) / median. Dense is
``F.scaled_dot_product_attention`` in bfloat16 and float32, with ``enable_gqa`` and with the group of query heads folded
into the query length; the best by median counts. Ratios are of medians in the same rounds. ``DRAM`` is packed bytes over
time, over the measured rate of a plain read.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import torch_kvq
from torch_kvq import ops
from torch_kvq.backends import native
from torch_kvq.codecs.isoquant import IsoQuantConfig
from torch_kvq.layout import token_bytes
from torch_kvq.store import PackedStore

SHAPES = [(hq, hk, d, t) for hq, hk, d in ((32, 8, 128), (9, 3, 64)) for t in (512, 1024, 4096, 32768)]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PREFILL = 4096
HOPELESS = 2.0  # a dense variant whose best of three rounds is this far behind is dropped, as it would set the pace


def read_rate(num_bytes: int = 1 << 29, rounds: int = 7) -> float:
    """Bytes a second of a plain read of a buffer far larger than the caches: the best round of a sum and a maximum."""
    x = torch.ones(num_bytes // 4)
    best = float("inf")
    for run in (x.sum, x.max) * rounds:
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return num_bytes / best


def in_turn(sides: dict[str, Callable], rounds: int, droppable: tuple[str, ...]) -> dict[str, list[float]]:
    """Seconds of every side in every round, after one that does not count; hopeless droppable sides end early."""
    times = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in random.Random(number).sample(list(times), len(times)):
            began = time.perf_counter()
            sides[name]()
            times[name].append(time.perf_counter() - began)
        if number == 0:
            times = {name: [] for name in times}
        if number == 3:
            best = min(min(times[name]) for name in droppable)
            times = {k: v for k, v in times.items() if k not in droppable or min(v) <= HOPELESS * best}
    return times


def summary(times: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return dict(median_ms=1e3 * median, min_ms=1e3 * min(times), spread=(high - low) / median, rounds=len(times))


def stores(keys: torch.Tensor, values: torch.Tensor, bits: int) -> list[PackedStore]:
    """Both packed, with a centre and a balance as a cache has them."""
    packed = []
    for x, along_tokens in ((keys, False), (values, True)):
        batch, heads, tokens, dim = x.shape
        shape = (batch, heads, dim)
        parts = dict(centre=0.1 * torch.randn(shape), balance=0.5 + torch.rand(shape), capacity=tokens)
        packed.append(PackedStore(IsoQuantConfig(bits), along_tokens, *shape, x.device, **parts))
        packed[-1].append(x)
    return packed


def attend_row(shape: tuple[int, int, int, int], bits: int, isas: list[str], rounds: int, rate: float) -> dict:
    query_heads, heads, dim, tokens = shape
    q, k, v = (torch.randn(1, h, t, dim) for h, t in ((query_heads, 1), (heads, tokens), (heads, tokens)))
    packed = [store.tensors() for store in stores(k, v, bits)]
    none, out, lse = k[:, :, :0], torch.empty(q.shape), torch.empty(q.shape[:3])

    def attend(isa: str) -> None:
        native.set_cpu_isa(isa)
        ops.attend(q, *packed, none, none, None, None, 0, tokens, 0, dim**-0.5, 0.0, out, lse)

    sides = {isa: (lambda isa=isa: attend(isa)) for isa in isas}
    dense = {}
    for name, dtype in DTYPES.items():
        x, y, z = (part.to(dtype) for part in (q, k, v))
        folded = x.view(1, heads, query_heads // heads, dim)
        dense[f"{name} folded"] = lambda x=folded, y=y, z=z: F.scaled_dot_product_attention(x, y, z)
        dense[f"{name} enable_gqa"] = lambda x=x, y=y, z=z: F.scaled_dot_product_attention(x, y, z, enable_gqa=True)
    times = in_turn(sides | dense, rounds, tuple(dense))
    results = {name: summary(seconds) for name, seconds in times.items()}
    best = min((name for name in dense if name in results), key=lambda name: results[name]["median_ms"])
    num_bytes = heads * tokens * sum(token_bytes(dim, bits, along) for along in (False, True))
    for isa in isas:
        row = results[isa]
        row["ratio"] = results[best]["median_ms"] / row["median_ms"]
        row["ratio_of_minima"] = results[best]["min_ms"] / row["min_ms"]
        row["dram_share"] = num_bytes / (row["median_ms"] / 1e3) / rate
    return dict(shape=shape, best_dense=best, packed_bytes=num_bytes, results=results)


def encode_row(query_heads: int, heads: int, dim: int, bits: int, isas: list[str], rounds: int) -> dict:
    """Encode of keys and values of all heads against causal attention over the same tokens."""
    q, k, v = (torch.randn(1, h, PREFILL, dim) for h in (query_heads, heads, heads))
    packed = stores(k, v, bits)

    def encode(isa: str) -> None:
        native.set_cpu_isa(isa)
        for store, x in zip(packed, (k, v)):
            store.length = 0
            store.append(x)

    sides = {isa: (lambda isa=isa: encode(isa)) for isa in isas}
    dense = {}
    for name, dtype in DTYPES.items():
        x, y, z = (part.to(dtype) for part in (q, k, v))
        wide = [part.repeat_interleave(query_heads // heads, 1) for part in (y, z)]
        causal = dict(is_causal=True)
        dense[f"{name} repeated"] = lambda x=x, kv=wide: F.scaled_dot_product_attention(x, *kv, **causal)  # noqa: B023
        dense[f"{name} enable_gqa"] = lambda x=x, y=y, z=z: F.scaled_dot_product_attention(
            x, y, z, enable_gqa=True, is_causal=True
        )
    times = in_turn(sides | dense, rounds, tuple(dense))
    results = {name: summary(seconds) for name, seconds in times.items()}
    best = min((name for name in dense if name in results), key=lambda name: results[name]["median_ms"])
    for isa in isas:
        results[isa]["share"] = results[isa]["median_ms"] / results[best]["median_ms"]
    return dict(shape=(query_heads, heads, dim, PREFILL), best_dense=best, results=results)


def print_rows(rows: list[dict], isas: list[str], column: str) -> None:
    left = f"{'Hq Hk d T':>18}  {'best dense':16}"
    print(f"{left} {'ms':>9} {'spread':>7}  {'packed':11} {'ms':>9} {'spread':>7}  {column}")
    for row in rows:
        dense = row["results"][row["best_dense"]]
        for isa in isas:
            ours = row["results"][isa]
            if "share" in ours:
                last = f"{ours['share']:6.1%}"
            else:
                last = f"{ours['ratio']:5.2f}x {ours['ratio_of_minima']:6.2f}x {ours['dram_share']:7.0%}"
            left = f"{' '.join(map(str, row['shape'])):>18}  {row['best_dense']:16}"
            times = [f"{side['median_ms']:9.3f} {side['spread']:7.0%}" for side in (dense, ours)]
            print(f"{left} {times[0]}  {isa:11} {times[1]}  {last}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--isas", nargs="*", help="instruction sets to compare, default the one in use")
    parser.add_argument("--shapes", nargs="*", help="Hq,Hk,d,T each, default a table of two models")
    parser.add_argument("--json", help="file for all numbers")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    isas, rate = args.isas or [torch_kvq.backends.cpu_isa()], read_rate()
    shapes = [tuple(map(int, shape.split(","))) for shape in args.shapes] if args.shapes else SHAPES
    print(f"torch {torch.__version__}, {args.threads} thread(s), K{args.bits} V{args.bits}, plain read {rate / 1e9:.1f} GB/s\n")
    rows = [attend_row(shape, args.bits, isas, args.rounds, rate) for shape in shapes]
    print("attend, one query token")
    print_rows(rows, isas, "ratio, of minima, DRAM")
    models = dict.fromkeys(shape[:3] for shape in shapes)
    encodes = [encode_row(*model, args.bits, isas, max(3, args.rounds // 8)) for model in models]
    print(f"\nencode of {PREFILL} tokens against dense causal attention over them")
    print_rows(encodes, isas, "share")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(dict(threads=args.threads, bits=args.bits, read_rate=rate, attend=rows, encode=encodes), file, indent=1)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
