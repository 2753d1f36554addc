"""Attention of one decode step over selected tokens against dense attention:
``python benchmarks/attend_sparse.py --threads 2 --json attend_sparse.json``.

The whole step is measured: the query's code, attention over sinks and window and the scan of the 1-bit index with the selection
in one operator, attention over the selected tokens with the merge of both in another; and each of these parts alone, the scan
with the selection, too. ``sparse`` selects from exact 16-bit
keys and values, ``sparse packed`` from a store packed along ``D`` whose sign plane is the index, ``packed`` attends to all
tokens of a packed store. Queries are bfloat16. Keys and queries are random, so that heads of a group agree on few tokens;
top_p is found, before anything is timed, such that ``--share`` of the tokens are selected. Dense sides, rounds, graphs and
ratios are those of ``attend.py``. On CUDA the scan alone too, ``sign_scores``, for the shape of which the paper gives a time.
"""

import argparse
import dataclasses
from collections.abc import Callable

import attend
import attend_tables
import dense
import timing
import torch

from torch_kvq import ops
from torch_kvq.backends import native
from torch_kvq.codecs.isoquant import IsoQuantConfig
from torch_kvq.codecs.rotation import make_rotation
from torch_kvq.layout import num_words, token_bytes
from torch_kvq.store import PackedStore, no_tokens

CPU_SHAPES = [(1, 32, 8, 128, tokens) for tokens in (4096, 32768)]
GPU_SHAPES = [(b, 32, 8, 128, tokens) for b, tokens in ((8, 32768), (8, 131072), (1, 32768), (1, 131072))]
SCORES_SHAPES = [(1, query_heads, 8, 128, 16384) for query_heads in (8, 32)]  # the paper's has a query head a kv head
EXACT, NUM_SINKS = 132, 4
PARTS = ("query, window, scan and select", "attend and merge")
ALONE = ("scan and select",)  # of the first part
SIDES = ("sparse", "sparse packed")
INDEX_BYTES = 4  # factor and bias of a token


@dataclasses.dataclass
class Step:
    """One decode step: ``q [B, Hq, 1, D]``, sinks and window, what is selected from, its index and all outputs.

    Args:
        keys, values: one tensor ``[B, H, L, D]`` or the nine of a store packed along ``D``.
        transform: query_centre, centre, balance, signs, blocks, matrix of the index.
        sign, factor, bias: the index of ``length`` tokens, for all of which a selection has room, as in a cache by default.
    """

    q: torch.Tensor
    exact: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    transform: tuple
    sign: torch.Tensor
    factor: torch.Tensor
    bias: torch.Tensor
    length: int
    top_p: float = 0.5

    def __post_init__(self) -> None:
        (batch, query_heads, queries, dim), heads = self.q.shape, self.exact[0].shape[1]
        new, rows = self.q.new_empty, (batch, query_heads, queries)
        self.scale = dim**-0.5
        self.planes, self.terms = new((*rows, 4, num_words(dim)), dtype=torch.int32), new((*rows, 4), dtype=torch.float32)
        self.scores = new((*rows, self.length), dtype=torch.float32 if self.q.is_cpu else torch.float16)
        self.indices = new((batch, heads, self.length), dtype=torch.int32)
        self.count = new((batch, heads), dtype=torch.int32)
        self.outs, self.lses = new((2, *rows, dim)), new((2, *rows), dtype=torch.float32)
        self.out, self.lse = new((*rows, dim)), new(rows, dtype=torch.float32)
        self.nothing = [no_tokens(batch, heads, dim, along, self.q.device) for along in (False, True)]

    def quantise(self) -> None:
        ops.quantise_query(self.q, *self.transform, self.scale, self.planes, self.terms)

    def query_window_scan_and_select(self) -> None:
        room = self.outs[0], self.lses[0], self.planes, self.terms, self.scores, self.indices, self.count
        index = *self.transform, self.sign, self.factor, self.bias
        ops.attend_top_p_select(self.q, *self.nothing, *self.exact, None, *index, self.scale, self.top_p, *room)

    def scan_and_select(self) -> None:
        index, dim = (self.sign, self.factor, self.bias), self.q.shape[-1]
        to = self.scores, self.indices, self.count
        ops.sign_top_p_select(self.planes, self.terms, *index, dim, self.scale, 0, self.lses[0], self.top_p, *to)

    def score(self) -> None:
        index, dim = (self.sign, self.factor, self.bias), self.q.shape[-1]
        ops.sign_scores(self.planes, self.terms, *index, dim, self.scale, 0, self.scores)

    def attend_and_merge(self) -> None:
        to = self.outs, self.lses, self.out, self.lse
        ops.merge_selected(self.q, self.keys, self.values, self.indices, self.count, None, self.scale, 0.0, *to)

    def parts(self, names: tuple[str, ...] = PARTS) -> dict[str, Callable]:
        return {name: getattr(self, name.replace(",", "").replace(" ", "_")) for name in names}

    def __call__(self) -> None:
        for part in self.parts().values():
            part()

    def share(self) -> float:
        """Share of the tokens that the last selection holds."""
        return self.count.float().mean().item() / self.length

    def aim(self, share: float) -> None:
        """Finds the top_p that selects about this share of the tokens."""
        low, high = 0.0, 1.0
        for _ in range(20):
            self.top_p = (low + high) / 2
            self()
            low, high = (self.top_p, high) if self.share() < share else (low, self.top_p)


def steps_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bits: int) -> dict[str, Step]:
    """A step a side over ``k``, ``v`` ``[B, H, T, D]``, of which the first ``EXACT`` tokens are exact."""
    batch, heads, length, dim = *k.shape[:2], k.shape[2] - EXACT, k.shape[3]
    exact, far = ([x[:, :, part].to(q.dtype).contiguous() for x in (k, v)] for part in (slice(EXACT), slice(EXACT, None)))
    moments = [0.1 * torch.randn(batch, heads, dim, device=q.device) for _ in range(2)]
    balance = 0.5 + torch.rand(batch, heads, dim, device=q.device)
    packed = []
    for x, centre in zip(far, moments):
        shape = (batch, heads, dim)
        packed.append(PackedStore(IsoQuantConfig(bits), False, *shape, q.device, centre, balance, capacity=length))
        packed[-1].append(x)
    stores = [store.tensors() for store in packed]
    own = (moments[1], moments[0], balance, *(part.to(q.device) for part in make_rotation("hadamard2", dim).tensors()))
    theirs = (moments[1], *stores[0][4:])
    steps = {}
    for name, keys, values, transform in (("sparse", far[:1], far[1:], own), ("sparse packed", *stores, theirs)):
        sign = stores[0][0] if len(keys) > 1 else torch.empty_like(stores[0][0])
        factor, bias = (torch.empty(sign.shape[:3], dtype=torch.float16, device=q.device) for _ in range(2))
        written = torch.empty(0, dtype=torch.int32, device=q.device) if len(keys) > 1 else sign
        ops.index_keys(far[0], *transform, 0, written, factor, bias)
        steps[name] = Step(q, exact, keys, values, transform, sign, factor, bias, length)
    return steps


def sparse_calls(steps: dict[str, Step]) -> dict[str, Callable]:
    calls = dict(steps)
    for name, step in steps.items():
        calls |= {f"{name}: {part}": call for part, call in step.parts(PARTS + ALONE).items()}
    return calls


def row_of(shape: tuple[int, ...], args: argparse.Namespace) -> dict:
    batch, query_heads, heads, dim, tokens = shape
    device = dict(device=args.device)
    q, k, v = (torch.randn(batch, h, t, dim, **device) for h, t in ((query_heads, 1), (heads, tokens), (heads, tokens)))
    query, found = q.bfloat16(), {}

    def make() -> dict[str, Callable]:
        steps = steps_of(query, k, v, args.bits)
        for name, step in steps.items():
            if name in found:
                step.top_p = found[name]["top_p"]
                step()
            else:
                step.aim(args.share)
                found[name] = dict(top_p=step.top_p, share=step.share())
        return sparse_calls(steps)

    selectable = batch * heads * (tokens - EXACT)
    index_bytes = selectable * (4 * num_words(dim) + INDEX_BYTES)
    read = {
        "sparse": index_bytes + args.share * selectable * 2 * dim * query.itemsize,
        "sparse packed": index_bytes + args.share * selectable * 2 * token_bytes(dim, args.bits, False),
    }
    ours = attend.sides_of(make, min(read.values()), args.device)
    packed_bytes = selectable * sum(token_bytes(dim, args.bits, along) for along in (False, True))

    def packed() -> dict[str, Callable]:
        return {"packed": attend.packed_calls(query, k, v, args.bits, EXACT, [native.AUTO])[native.AUTO]}

    ours |= attend.sides_of(packed, packed_bytes, args.device)
    dense_bytes = 2 * k.numel() * query.itemsize
    theirs = attend.sides_of(lambda: dense.decode_calls(q, k, v), dense_bytes, args.device)
    best, results = attend.compare(ours, theirs, args.rounds)
    for name in (*SIDES, "packed"):
        results[name]["ratio"] = results[best]["median_ms"] / results[name]["median_ms"]
        results[name]["ratio_of_minima"] = results[best]["min_ms"] / results[name]["min_ms"]
        results[name]["to_packed"] = results["packed"]["median_ms"] / results[name]["median_ms"]
    return dict(shape=shape, best_dense=best, read_bytes=read, dense_bytes=dense_bytes, selected=found, results=results)


def scores_row(shape: tuple[int, ...], args: argparse.Namespace) -> dict:
    """``sign_scores`` of ``T`` tokens alone."""
    batch, query_heads, heads, dim, tokens = shape
    sizes = ((query_heads, 1), (heads, tokens + EXACT), (heads, tokens + EXACT))
    q, k, v = (torch.randn(batch, h, t, dim, device=args.device) for h, t in sizes)

    def make() -> dict[str, Callable]:
        step = steps_of(q.bfloat16(), k, v, args.bits)["sparse"]
        step.quantise()
        return dict(scores=step.score)

    num_bytes = batch * heads * tokens * (4 * num_words(dim) + INDEX_BYTES)
    times = timing.in_turn(attend.sides_of(make, num_bytes, args.device), args.rounds)
    return dict(shape=shape, read_bytes=num_bytes, results={name: timing.summary(x) for name, x in times.items()})


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = timing.arguments(__doc__)
    parser.add_argument("--bits", type=int, default=3, choices=timing.BITS, help="of keys and values of the packed stores")
    parser.add_argument("--share", type=float, default=0.1, help="of the tokens to select")
    parser.add_argument("--rounds", type=timing.count, default=25)
    parser.add_argument("--shapes", nargs="*", type=timing.attention_shape, help="[B,]Hq,Hk,d,T each")
    args = parser.parse_args(arguments)
    args.shapes = args.shapes or (CPU_SHAPES if args.device == "cpu" else GPU_SHAPES)
    if EXACT >= min(shape[-1] for shape in args.shapes):
        parser.error(f"--shapes must have more than {EXACT} tokens each")
    if not 0 < args.share < 1:
        parser.error(f"--share must be in (0, 1), got {args.share}")
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    conditions, rows = timing.conditions(args.device, "flashinfer-python"), []
    for shape in args.shapes:
        rows.append(row_of(shape, args))
        sides = {name: rows[-1]["results"][name]["median_ms"] for name in (rows[-1]["best_dense"], *SIDES)}
        print(*shape, ", ".join(f"{name} {median:.3f} ms" for name, median in sides.items()), flush=True)
    scores = [scores_row(shape, args) for shape in SCORES_SHAPES] if args.device == "cuda" else []
    numbers = dict(bits=args.bits, exact=EXACT, share=args.share, attend=rows, scores=scores)
    result = timing.result("attend_sparse", conditions, **numbers)
    timing.show(attend_tables.sparse_views(result))
    if args.json:
        timing.save(result, args.json)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
