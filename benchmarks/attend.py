"""Attention of one decode step on packed tokens against dense attention, and encode against prefill:
``python benchmarks/attend.py --threads 1 --json attend.json``. With ``--exact``, the flush of a block too, whose ``share``
is its time over that of attention of the first instruction set in the ``FLUSH_LEN`` steps for which it is made once.

Both sides run in every round, in random order, so that whatever else the machine does and what the caches still hold hits
both; medians and minima over the rounds, the spread is (third - first quartile) / median. Dense is the best by median of
``dense.py``: on the CPU ``F.scaled_dot_product_attention`` in bfloat16 and float32, with ``enable_gqa`` and with the group
of query heads folded into the query length. Ratios are of medians in the same rounds. ``memory`` is packed bytes over time,
over the measured rate of a plain read (on CUDA of a copy); that of encode is measured without prefill attention between, which
brings a GPU to its power limit. On the CPU queries are float32, whichever instruction set answers.

On CUDA a side is the replay of one graph over copies of its data that together exceed the L2 cache, as the layers of a model
do, timed by events; on MPS a queue of calls between two synchronisations. ``--isas packed triton`` measures the Triton twin
of the operators too, in the same rounds.
"""

import argparse
import copy
import functools
from collections.abc import Callable

import attend_tables
import dense
import timing
import torch

from torch_kvq import ops
from torch_kvq.backends import native, triton
from torch_kvq.codecs.isoquant import IsoQuantConfig
from torch_kvq.layout import token_bytes
from torch_kvq.store import ExactStore, PackedStore, append_kv

CPU_SHAPES = [(1, hq, hk, d, t) for hq, hk, d in ((32, 8, 128), (9, 3, 64)) for t in (512, 1024, 4096, 32768)]
GPU_MODELS = ((32, 8, 128), (16, 8, 128), (64, 8, 128), (32, 8, 64), (32, 8, 256))
GPU_SHAPES = [
    *((b, 32, 8, 128, t) for b, t in ((8, 131072), (8, 32768), (8, 8192), (32, 8192))),
    *((1, 32, 8, 128, t) for t in (131072, 32768, 8192, 2048)),
    *((8, *model, 32768) for model in GPU_MODELS[1:]),
]
PREFILL = 4096
NUM_SINKS = 4
FLUSH_LEN = 16  # tokens that a cache packs at a time
CACHE_MULTIPLE = 3  # copies of the data hold this many times the L2 cache
MAX_COPIES = 96
TWIN = "triton"


def memory_rate(device: str, num_bytes: int = 1 << 29, rounds: int = 7) -> float:
    """Bytes a second, the best of some, of a plain read of a buffer far larger than the caches; on a GPU of a copy
    by a kernel (a copy node of a graph runs at less than two thirds of it)."""
    x = torch.ones(num_bytes // 4, device=device)
    if device == "cpu":
        return num_bytes / min(second for times in timing.in_turn(dict(a=x.sum, b=x.max), rounds).values() for second in times)
    y = torch.empty_like(x)
    times = timing.in_turn(dict(copy=side([lambda: torch.neg(x, out=y)], device)), rounds)["copy"]
    return 2 * num_bytes / min(times)


def side(calls: list[Callable], device: str) -> Callable:
    """What runs in a round: one call on the CPU, all of ``calls`` on a GPU."""
    if device == "cpu":
        return calls[0]
    return timing.replayed(calls) if device == "cuda" else timing.queued(calls)


def num_copies(num_bytes: float, device: str) -> int:
    """Copies of data of ``num_bytes`` that a side goes through."""
    if device != "cuda":
        return 1
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return min(MAX_COPIES, int(CACHE_MULTIPLE * l2 / num_bytes) + 1)


def stores(keys: torch.Tensor, values: torch.Tensor, bits: int) -> list[PackedStore]:
    """Both packed, the keys with a centre and a balance, as a cache has them."""
    packed = []
    for x, along_tokens in ((keys, False), (values, True)):
        batch, heads, tokens, dim = x.shape
        shape = (batch, heads, dim)
        learnt = () if along_tokens else (0.1 * torch.randn(shape, device=x.device), 0.5 + torch.rand(shape, device=x.device))
        packed.append(PackedStore(IsoQuantConfig(bits), along_tokens, *shape, x.device, *learnt, capacity=tokens))
        packed[-1].append(x)
    return packed


def use(isa: str) -> None:
    """Chooses an instruction set of the CPU; a GPU and the pure-torch reference have one way to compute."""
    if isa in native.ISAS:
        native.set_cpu_isa(isa)


def operator(name: str, isa: str) -> Callable:
    """Operator ``name`` as what serves the device answers it, or its Triton twin."""
    return triton.launcher(name) if isa == TWIN else getattr(ops, name)


def packed_calls(q, k, v, bits: int, exact: int, isas: list[str]) -> dict[str, Callable]:
    """``attend`` by every instruction set over all tokens packed but ``exact`` ones, which have the query's dtype."""
    length, num_sinks = k.shape[2] - exact, min(NUM_SINKS, exact)
    packed = [store.tensors() for store in stores(k[:, :, exact:], v[:, :, exact:], bits)]
    exact_kv = [x[:, :, :exact].to(q.dtype).contiguous() for x in (k, v)]
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    def attend(isa: str) -> None:
        use(isa)
        answer = operator("attend", isa)
        answer(q, *packed, *exact_kv, None, None, 0, length, num_sinks, q.shape[3] ** -0.5, 0.0, out, lse)

    return {isa: lambda isa=isa: attend(isa) for isa in isas}


def flush_call(k: torch.Tensor, v: torch.Tensor, bits: int, exact: int, dtype: torch.dtype) -> dict[str, Callable]:
    """What a cache with ``exact`` tokens does once in ``FLUSH_LEN`` steps: packs a block, moves the tokens that stay exact."""
    num_sinks, capacity, held = min(NUM_SINKS, exact), exact + FLUSH_LEN, ExactStore()
    held.keep(*(x[:, :, :capacity].to(dtype) for x in (k, v)), capacity)
    packed = stores(k[:, :, :FLUSH_LEN], v[:, :, :FLUSH_LEN], bits)

    def flush() -> None:
        full = copy.copy(held)
        for store in packed:
            store.length = 0
        append_kv(*packed, *(x[:, :, num_sinks : num_sinks + FLUSH_LEN] for x in (full.keys, full.values)))
        full.drop(num_sinks, num_sinks + FLUSH_LEN, capacity)

    return dict(flush=flush)


def sides_of(make: Callable[[], dict[str, Callable]], num_bytes: float, device: str) -> dict[str, Callable]:
    """Sides of what ``make`` returns, each over its own copies."""
    made = [make() for _ in range(num_copies(num_bytes, device))]
    return {name: side([calls[name] for calls in made], device) for name in made[0]}


def compare(ours: dict[str, Callable], dense_sides: dict[str, Callable], rounds: int) -> tuple[str, dict[str, dict]]:
    """Name of the best dense side, and the summaries of all sides."""
    exact = tuple(name for name in dense_sides if name not in dense.FEWER_BITS)
    times = timing.in_turn(ours | dense_sides, rounds, exact)
    results = {name: timing.summary(seconds) for name, seconds in times.items()}
    return min(set(exact) & set(results), key=lambda name: results[name]["median_ms"]), results


def attend_row(shape: tuple[int, ...], args, rate: float) -> dict:
    batch, query_heads, heads, dim, tokens = shape
    device = dict(device=args.device)
    q, k, v = (torch.randn(batch, h, t, dim, **device) for h, t in ((query_heads, 1), (heads, tokens), (heads, tokens)))
    query = q if args.device == "cpu" else q.bfloat16()
    packed_tokens = batch * heads * (tokens - args.exact)
    num_bytes = packed_tokens * sum(token_bytes(dim, args.bits, along) for along in (False, True))
    dense_bytes = 2 * k.numel() * torch.bfloat16.itemsize
    exact_bytes = 2 * batch * heads * args.exact * dim * query.itemsize
    ours = sides_of(lambda: packed_calls(query, k, v, args.bits, args.exact, args.isas), num_bytes, args.device)
    if args.exact:
        moved_bytes = exact_bytes + 2 * batch * heads * FLUSH_LEN * dim * query.itemsize
        ours |= sides_of(lambda: flush_call(k, v, args.bits, args.exact, query.dtype), moved_bytes, args.device)
    theirs = sides_of(lambda: dense.decode_calls(q, k, v), dense_bytes, args.device)
    best, results = compare(ours, theirs, args.rounds)
    for isa in args.isas:
        row = results[isa]
        row["ratio"] = results[best]["median_ms"] / row["median_ms"]
        row["ratio_of_minima"] = results[best]["min_ms"] / row["min_ms"]
        row["memory_share"] = num_bytes / (row["median_ms"] / 1e3) / rate
    flush = results.pop("flush", None)
    if flush:
        flush["share"] = flush["median_ms"] / FLUSH_LEN / results[args.isas[0]]["median_ms"]
    sizes = dict(packed_bytes=num_bytes, dense_bytes=dense_bytes, exact_bytes=exact_bytes)
    return dict(shape=shape, best_dense=best, **sizes, results=results, flush=flush)


def encode_row(model: tuple[int, int, int], args, rate: float) -> dict:
    """Encode of keys and values of all heads of one sequence against causal attention over the same tokens, and alone."""
    query_heads, heads, dim = model
    q, k, v = (torch.randn(1, h, args.prefill, dim, device=args.device) for h in (query_heads, heads, heads))
    fresh = (k, v) if args.device == "cpu" else (k.bfloat16(), v.bfloat16())

    def calls() -> dict[str, Callable]:
        packed = stores(k, v, args.bits)
        return {isa: lambda isa=isa: encode(packed, isa) for isa in args.isas}

    def encode(packed: list[PackedStore], isa: str) -> None:
        use(isa)
        for store in packed:
            store.length = 0
        if isa != TWIN:
            return append_kv(*packed, *fresh)
        for store, x in zip(packed, fresh):
            tensors = store.tensors()
            operator("encode", isa)(x, *tensors[3:], store.config.rule, store.along_tokens, 0, *tensors[:3])

    read = sum(x.numel() * x.itemsize for x in fresh)
    written = k.shape[1] * args.prefill * sum(token_bytes(dim, args.bits, along) for along in (False, True))
    once = functools.partial(timing.replayed, least=1) if args.device == "cuda" else functools.partial(side, device=args.device)
    theirs = {name: once([call]) for name, call in dense.prefill_calls(q, k, v).items()}  # of many milliseconds each
    rounds = max(3, args.rounds // 8) if args.device == "cpu" else max(7, args.rounds // 2)
    ours = sides_of(calls, read, args.device)
    alone = timing.in_turn(ours, rounds)
    best, results = compare(ours, theirs, rounds)
    for isa in args.isas:
        results[isa]["share"] = results[isa]["median_ms"] / results[best]["median_ms"]
        results[isa]["alone"] = timing.summary(alone[isa])
        results[isa]["memory_share"] = (read + written) / (results[isa]["alone"]["median_ms"] / 1e3) / rate
    return dict(shape=(1, *model, args.prefill), best_dense=best, results=results)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = timing.arguments(__doc__)
    parser.add_argument("--bits", type=int, default=3, choices=timing.BITS)
    parser.add_argument("--rounds", type=timing.count, default=25)
    parser.add_argument("--isas", nargs="*", help="CPU instruction sets, default those in use; on CUDA packed, triton")
    parser.add_argument(
        "--shapes",
        nargs="*",
        type=timing.attention_shape,
        help="[B,]Hq,Hk,d,T each, default a table of two models, on a GPU of five",
    )
    parser.add_argument("--exact", type=int, default=0, help="of T, tokens that are exact: sinks and window; a cache has 132")
    parser.add_argument("--prefill", type=timing.count, default=PREFILL, help="tokens to encode")
    args = parser.parse_args(arguments)
    there = dict(cpu=native.available_isas() or (native.REFERENCE,), cuda=("packed", TWIN), mps=("packed",))[args.device]
    in_use = [native.cpu_isa(dtype) for dtype in (torch.bfloat16, torch.float32)] if args.device == "cpu" else there[:1]
    args.isas = list(dict.fromkeys(args.isas or in_use))
    if wrong := [isa for isa in args.isas if isa not in there]:
        parser.error(f"--isas must be among {', '.join(there)} here, got {wrong[0]}")
    args.shapes = args.shapes or (CPU_SHAPES if args.device == "cpu" else GPU_SHAPES)
    if args.exact >= min(shape[-1] for shape in args.shapes):
        parser.error(f"--exact must be less than every T, got {args.exact}")
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    conditions, rate, rows = timing.conditions(args.device, "flashinfer-python"), memory_rate(args.device), []
    for shape in args.shapes:
        rows.append(attend_row(shape, args, rate))
        dense_ms, ours_ms = (rows[-1]["results"][name]["median_ms"] for name in (rows[-1]["best_dense"], args.isas[0]))
        print(*shape, f"dense {dense_ms:.3f} ms, {args.isas[0]} {ours_ms:.3f} ms", flush=True)
    models = dict.fromkeys(shape[1:4] for shape in args.shapes)
    encodes = [encode_row(model, args, rate) for model in models]
    numbers = dict(bits=args.bits, exact=args.exact, isas=args.isas, memory_rate=rate, attend=rows, encode=encodes)
    result = timing.result("attend", conditions, **numbers)
    timing.show(attend_tables.views(result))
    if args.json:
        timing.save(result, args.json)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
