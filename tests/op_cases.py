"""Problems for the operators: stores, a table of attention cases and what the reference makes of them, fences."""

import dataclasses
import functools

import torch

from torch_kvq import layout
from torch_kvq.codecs.codebook import grid_levels
from torch_kvq.codecs.rotation import make_rotation
from torch_kvq.ops import reference
from torch_kvq.ops.schemas import SCALE_RULES

SENTINEL, FENCE = 12345.0, 64


def fenced(shape, dtype=torch.float32):
    """A tensor filled with NaN (integers: junk) between two fences of sentinels, and the whole."""
    size = torch.Size(shape).numel()
    whole = torch.full((size + 2 * FENCE,), SENTINEL, dtype=dtype)
    whole[FENCE : FENCE + size] = torch.nan if dtype.is_floating_point else -77777
    return whole[FENCE : FENCE + size].view(shape), whole


def check_fences(*wholes):
    for whole in wholes:
        edge = torch.cat([whole[:FENCE], whole[-FENCE:]])
        assert torch.equal(edge, torch.full_like(edge, SENTINEL)), "written outside out"


def relative_error(ours, theirs):
    if not theirs.numel():
        return 0.0
    assert ours.isfinite().all()
    size = theirs.float().abs().amax(-1)
    error = (ours.float() - theirs.float()).abs().amax(-1)
    return (error / size.clamp_min(size.max() / 10).clamp_min(1e-30)).max().item()


def make_store(x, bits, along_tokens, kind="isoquant", centre=True, balance=True, rule="matched", fill=True):
    """The nine tensors of a store of ``x [B, H, T, D]``, encoded by the reference; its unused capacity is junk."""
    batch, heads, tokens, dim = x.shape
    capacity = layout.round_up(tokens + 1) if tokens else 0
    shapes = (layout.value_shapes if along_tokens else layout.key_shapes)(batch, heads, capacity, dim, bits)
    rng = torch.Generator().manual_seed(dim + bits)
    store = [
        torch.randint(-(2**31), 2**31 - 1, shapes["sign"], generator=rng, dtype=torch.int32),
        torch.randint(-(2**31), 2**31 - 1, shapes["mag"], generator=rng, dtype=torch.int32),
        torch.full(shapes["scale"], torch.nan, dtype=torch.float16),
        torch.tensor(grid_levels(bits)),
        0.3 * torch.randn(batch, heads, dim, generator=rng) if centre else torch.empty(0),
        0.5 + torch.rand(batch, heads, dim, generator=rng) if balance else torch.empty(0),
        *make_rotation(kind, dim).tensors(),
    ]
    if fill:
        encode(reference.encode, x, store, along_tokens, rule=rule)
    return store


def encode(function, x, store, along_tokens, start=0, rule="matched"):
    function(x, *store[3:], SCALE_RULES.index(rule), along_tokens, start, *store[:3])


def codes_of(store, along_tokens, tokens):
    sign, mag = store[:2]
    if along_tokens:
        return reference.unpack_values(sign, mag)[:, :, :tokens]
    return reference.unpack_keys(sign, mag, store[4].shape[-1])[:, :, :tokens]


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem; ``group`` query heads a key head, ``shared``: the keys are the values."""

    name: str
    tokens: int = 128
    dim: int = 64
    value_dim: int = 0
    batch: int = 1
    heads: int = 2
    group: int = 2
    queries: int = 1
    bits: tuple[int, int] = (3, 3)
    exact: int = 20
    num_sinks: int = 4
    start: int = 0
    mask: str = ""
    softcap: float = 0.0
    sink_logits: bool = False
    dtype: torch.dtype = torch.float32
    kind: str = "isoquant"
    plain: bool = False
    shared: bool = False
    strided: bool = False
    size: float = 1.0


CASES = [
    *(Case(f"T{n}", tokens=n) for n in (0, 1, 31, 32, 33, 127, 128, 4097)),
    *(Case(f"D{d}", dim=d, tokens=70) for d in (4, 12, 64, 80, 96, 128, 192, 256, 512)),
    Case("D80-48", dim=80, value_dim=48, tokens=70, queries=3),
    Case("D128-192", dim=128, value_dim=192, tokens=70, queries=70),
    *(Case(f"G{g}", group=g) for g in (1, 3, 4, 8, 16)),
    *(Case(f"M{m}", queries=m, tokens=100) for m in (2, 3, 4, 5, 70)),
    Case("rows", dim=12, group=16, queries=600, tokens=40),
    Case("rows-masked", dim=12, group=16, queries=600, tokens=40, mask="bool", batch=2),
    *(Case(f"bits{k}{v}", bits=(k, v), tokens=100, queries=9) for k in (2, 3, 4) for v in (2, 3, 4)),
    *(Case(f"few{k}{v}", bits=(k, v), tokens=100, dim=d) for k, v, d in ((2, 2, 128), (2, 4, 64), (4, 3, 96), (4, 4, 128))),
    *(Case(f"mask-{m}", mask=m, queries=3, batch=2) for m in ("bool", "float", "heads", "row", "column", "ones")),
    Case("mask-dead", mask="dead", queries=3, batch=2),
    Case("start", start=37, tokens=100),
    Case("start-all", start=100, tokens=100, exact=0, num_sinks=0),
    Case("softcap", softcap=5.0, queries=2, size=3.0),
    Case("sink-logits", sink_logits=True, queries=2),
    Case("sink-logits-dead", sink_logits=True, queries=2, mask="dead"),
    Case("no-sinks", num_sinks=0),
    Case("only-sinks", exact=4),
    Case("no-exact", exact=0, num_sinks=0),
    Case("only-exact", tokens=0, exact=77),
    Case("nothing", tokens=0, exact=0, num_sinks=0),
    Case("long-exact", tokens=40, exact=1100, queries=2),
    Case("batch3", batch=3, queries=2, tokens=1100),
    Case("bf16", dtype=torch.bfloat16, queries=2, dim=128),
    Case("fp16", dtype=torch.float16, queries=2, dim=80),
    Case("strided", strided=True, queries=5, batch=2),
    *(Case(f"rotation-{k}", kind=k, dim=96) for k in ("dense", "hadamard", "hadamard2", "so4", "none")),
    Case("plain", plain=True),
    Case("latent", shared=True, dim=192, heads=1, group=16, queries=2),
    Case("latent-start", shared=True, dim=80, heads=1, group=4, queries=2, start=40, mask="bool", bits=(4, 4)),
    Case("latent-plain", shared=True, plain=True, dim=64, heads=1, bits=(2, 2)),
    Case("everything", batch=2, dim=96, value_dim=64, group=3, queries=40, tokens=1300, mask="float", softcap=20.0,
         sink_logits=True, start=5, bits=(4, 2), strided=True),
]  # fmt: skip


def make_mask(case, rng):
    shape = (case.batch, case.heads * case.group, case.queries, case.tokens + case.exact)
    kept = torch.rand(shape, generator=rng) > 0.3
    if case.mask == "float":
        return torch.randn(shape, generator=rng).masked_fill(~kept, -torch.inf)
    if case.mask == "heads":
        return kept[:, :1].expand(shape)
    if case.mask == "row":
        return kept[:1, :1, :1].expand(shape)
    if case.mask == "column":
        return kept[:, :, :, :1].expand(shape)
    if case.mask == "dead":
        kept[:, :, 0] = False
    return torch.ones(shape, dtype=torch.bool) if case.mask == "ones" else kept


@functools.cache
def problem(case):
    """Arguments of attend without the outputs, and what the reference makes of them."""
    rng = torch.Generator().manual_seed(7)
    query_heads, value_dim = case.heads * case.group, case.value_dim or case.dim

    def draw(*shape):
        return case.size * torch.randn(shape, generator=rng)

    q = draw(case.batch, query_heads, case.queries, case.dim).to(case.dtype)
    if case.strided:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    parts = dict(centre=not case.plain, balance=not case.plain, kind=case.kind)
    keys = make_store(draw(case.batch, case.heads, case.tokens, case.dim), case.bits[0], False, **parts)
    values = make_store(draw(case.batch, case.heads, case.tokens, value_dim), case.bits[1], True, **parts)
    exact = [draw(case.batch, case.heads, case.exact, d).to(case.dtype) for d in (case.dim, value_dim)]
    if case.strided:
        exact = [torch.cat([x, x], -1)[..., : x.shape[-1]] for x in exact]
    mask = make_mask(case, rng) if case.mask else None
    sink_logits = draw(query_heads) if case.sink_logits else None
    rest = (mask, sink_logits, case.start, case.tokens, case.num_sinks, case.dim**-0.5, case.softcap)
    arguments = (q, keys, [] if case.shared else values, *exact, *rest)
    shape = (case.batch, query_heads, case.queries)
    out, lse = torch.empty(*shape, value_dim), torch.empty(shape)
    reference.attend(*arguments, out, lse)
    return arguments, values, out, lse
