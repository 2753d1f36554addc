"""Problems for the operators of sparse attention: indexed keys, coded queries, selections."""

import dataclasses

import torch
from op_cases import fenced, make_mask, make_store

from torch_kvq import layout
from torch_kvq.codecs.rotation import make_rotation
from torch_kvq.ops import sparse_reference
from torch_kvq.store import no_tokens


@dataclasses.dataclass(frozen=True)
class SparseCase:
    """``group`` query heads a key head; ``centred``: the queries have a centre, so the index a bias."""

    name: str
    tokens: int = 130
    dim: int = 64
    value_dim: int = 0
    batch: int = 1
    heads: int = 2
    group: int = 3
    queries: int = 1
    bits: tuple[int, int] = (3, 3)
    kind: str = "hadamard2"
    centred: bool = False
    plain: bool = False
    packed: bool = False
    per_head: bool = False
    share: float = 0.3
    mask: str = ""
    softcap: float = 0.0
    dtype: torch.dtype = torch.float32
    exact: int = 0

    @property
    def query_heads(self) -> int:
        return self.heads * self.group

    @property
    def selections(self) -> int:
        return self.query_heads if self.per_head else self.heads


SPARSE_CASES = [
    *(SparseCase(f"T{n}", tokens=n) for n in (1, 31, 32, 33, 1025)),
    *(SparseCase(f"D{d}", dim=d) for d in (4, 12, 80, 96, 128, 256, 512)),
    *(SparseCase(f"G{g}", group=g) for g in (1, 4, 8, 16)),
    *(SparseCase(f"M{m}", queries=m) for m in (2, 5)),
    SparseCase("D80-48", dim=80, value_dim=48),
    SparseCase("batch", batch=3, queries=2, mask="bool"),
    SparseCase("mask-float", mask="float", batch=2),
    SparseCase("mask-dead", mask="dead", queries=2),
    SparseCase("softcap", softcap=4.0),
    SparseCase("centred", centred=True),
    SparseCase("plain", plain=True),
    SparseCase("none", share=0.0),
    SparseCase("all", share=1.0),
    SparseCase("per-head", per_head=True, queries=2, mask="bool"),
    SparseCase("bf16", dtype=torch.bfloat16, dim=128),
    SparseCase("fp16", dtype=torch.float16),
    SparseCase("bf16-long", dtype=torch.bfloat16, dim=96, value_dim=160, tokens=1300, share=0.9, mask="bool"),
    SparseCase("fp16-G8", dtype=torch.float16, dim=32, value_dim=96, group=8, batch=2, per_head=True),
    *(SparseCase(f"packed{k}{v}", packed=True, bits=(k, v)) for k, v in ((2, 4), (3, 3), (4, 2))),
    SparseCase("packed", packed=True, kind="isoquant", dim=96, value_dim=64, batch=2, queries=2, mask="float", tokens=300),
    SparseCase("packed-per-head", packed=True, per_head=True, dim=128, group=4),
    *(SparseCase(f"rotation-{kind}", kind=kind) for kind in ("isoquant", "hadamard", "dense", "none")),
]


def draws(case: SparseCase, seed: int = 5):
    rng = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=rng)


@dataclasses.dataclass(frozen=True)
class Index:
    """Queries, keys, and what the reference makes of them; unused capacity is junk."""

    q: torch.Tensor
    keys: torch.Tensor
    transform: tuple  # query_centre, centre, balance, signs, blocks, matrix
    sign: torch.Tensor
    factor: torch.Tensor
    bias: torch.Tensor


def index_of(case: SparseCase, q=None, keys=None) -> Index:
    draw = draws(case)
    batch, heads, tokens, dim = case.batch, case.heads, case.tokens, case.dim
    q = draw(batch, case.query_heads, case.queries, dim).to(case.dtype) if q is None else q
    keys = draw(batch, heads, tokens, dim).to(case.dtype) if keys is None else keys
    nothing = torch.empty(0)
    query_centre = draw(batch, heads, dim) if case.centred else nothing
    centre = nothing if case.plain else 0.3 * draw(batch, heads, dim)
    balance = nothing if case.plain else 0.5 + draw(batch, heads, dim).abs()
    transform = (query_centre, centre, balance, *make_rotation(case.kind, dim).tensors())
    capacity = layout.round_up(tokens + 1)
    sign = torch.full((batch, heads, capacity, layout.num_words(dim)), -1, dtype=torch.int32)
    factor = torch.full((batch, heads, capacity), torch.nan, dtype=torch.float16)
    bias = factor.clone() if case.centred else torch.empty(0, dtype=torch.float16)
    sparse_reference.index_keys(keys, *transform, 0, sign, factor, bias)
    return Index(q, keys, transform, sign, factor, bias)


def coded(index: Index, scale: float, function=sparse_reference.quantise_query):
    """``planes`` and ``terms`` of the queries, with the fences around them."""
    shape = index.q.shape
    planes, planes_whole = fenced((*shape[:3], 4, layout.num_words(shape[-1])), torch.int32)
    terms, terms_whole = fenced((*shape[:3], 4))
    function(index.q, *index.transform, scale, planes, terms)
    return planes, terms, (planes_whole, terms_whole)


def selection_of(case: SparseCase) -> tuple[torch.Tensor, torch.Tensor]:
    """A random selection ``indices [B, K, S]``, ``count [B, K]``; what is not valid of it is junk."""
    rng = torch.Generator().manual_seed(9)
    kept = torch.rand(case.batch, case.selections, case.tokens, generator=rng) < case.share
    count = kept.sum(-1).int()
    indices = torch.full((case.batch, case.selections, case.tokens + 3), 2**31 - 1, dtype=torch.int32)
    for b in range(case.batch):
        for k in range(case.selections):
            indices[b, k, : count[b, k]] = kept[b, k].nonzero()[:, 0]
    return indices, count


def selected_problem(case: SparseCase):
    """Arguments of attend_selected without the outputs, and the keys and values that they stand for, ``[B, H, T, D]``."""
    draw = draws(case)
    value_dim = case.value_dim or case.dim
    q = draw(case.batch, case.query_heads, case.queries, case.dim).to(case.dtype)
    shape = (case.batch, case.heads, case.tokens)
    keys, values = (draw(*shape, d).to(case.dtype) for d in (case.dim, value_dim))
    mask = make_mask(case, torch.Generator().manual_seed(7)) if case.mask else None
    if case.packed:
        parts = dict(centre=not case.plain, balance=not case.plain, kind=case.kind)
        stores = [make_store(x, bits, False, **parts) for x, bits in zip((keys, values), case.bits)]
        keys, values = (sparse_reference.decoded(s, False, 0, case.tokens, d) for s, d in zip(stores, (case.dim, value_dim)))
    else:
        junk = torch.full((*shape[:2], 5, 1), torch.nan, dtype=case.dtype)
        stores = [[torch.cat([x, junk.expand(*shape[:2], 5, x.shape[-1])], 2)] for x in (keys, values)]
    return (q, *stores, *selection_of(case), mask, case.dim**-0.5, case.softcap), keys, values


def calls():
    """Every operator of sparse attention by name, with arguments."""
    case = SparseCase("opcheck", tokens=33, queries=2, mask="bool", centred=True, packed=True)
    index = index_of(case)
    planes, terms, _ = coded(index, 0.125)
    (q, keys, values, indices, count, mask, scale, softcap), dense, _ = selected_problem(case)
    scores, lse, out = torch.randn(1, 6, 2, 33), torch.zeros(1, 6, 2), torch.empty(q.shape)
    yield "quantise_query", (index.q, *index.transform, 0.125, planes.clone(), terms.clone())
    yield "index_keys", (index.keys, *index.transform, 0, index.sign.clone(), index.factor.clone(), index.bias.clone())
    yield "sign_scores", (planes, terms, index.sign, index.factor, index.bias, 64, 0.125, 0, scores.clone())
    yield "top_p_select", (scores, lse, mask, None, 0.9, indices.clone(), count.clone())
    coding = planes, terms, index.sign, index.factor, index.bias, 64, 0.125, 0
    yield "sign_top_p_select", (*coding, lse, 0.9, scores.clone(), indices.clone(), count.clone())
    nothing = [no_tokens(1, 2, 64, along, q.device) for along in (False, True)]
    step = (*nothing, dense[:, :, :5], dense[:, :, 5:10], torch.ones(6), *index.transform)
    room = out.clone(), lse.clone(), planes.clone(), terms.clone(), scores.clone(), indices.clone(), count.clone()
    yield "attend_top_p_select", (q, *step, index.sign, index.factor, index.bias, 0.125, 0.9, *room)
    yield "qk_selected", (q, keys, indices, count, scale, torch.empty(1, 6, 2, indices.shape[-1]))
    yield "attend_selected", (q, keys, values, indices, count, mask, scale, softcap, out, lse.clone())
    outs, lses = torch.zeros(2, *q.shape), torch.zeros(2, *q.shape[:3])
    yield "merge_selected", (q, keys, values, indices, count, mask, scale, softcap, outs, lses, out.clone(), lse.clone())
    yield "gather_selected", (dense, indices, count, torch.zeros(*indices.shape, 64))


def code_of(planes: torch.Tensor, dim: int) -> list[int]:
    """The 4-bit codes in ``planes [4, W]``, with Python's integers."""
    words = [[word % 2**32 for word in row] for row in planes.tolist()]
    return [sum((words[j][i // 32] >> i % 32 & 1) << j for j in range(4)) for i in range(dim)]
