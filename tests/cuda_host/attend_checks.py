"""Checks of attend, qk and pv on any device, against the reference or a float64 twin of it: what the emulator and a GPU
both run."""

import dataclasses
import math

import torch
from cuda_host.few_row_cases import NEAR
from op_cases import CASES, FENCE, SENTINEL, Case, check_fences, problem, relative_error

from torch_kvq.ops import reference

HALF = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}  # the logits' error grows with their size
PLAIN = dict(shared=False, mask="", softcap=0.0, sink_logits=False, start=0)
SCORE_CASES = [case for case in CASES if all(getattr(case, name) == value for name, value in PLAIN.items())]
MASK = 5  # place of the argument of attend


def named(case: Case) -> str:
    return case.name


def in_dtype(case: Case, dtype: torch.dtype) -> Case:
    return dataclasses.replace(case, dtype=dtype)


def moved(arguments, device):
    """Tensors and lists of them on ``device``; broadcast dims of masks stay broadcast."""

    def move(x):
        if isinstance(x, list):
            return [move(part) for part in x]
        if not isinstance(x, torch.Tensor) or x.device == torch.device(device):
            return x
        if 0 in x.stride() and x.numel():
            small = x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())]
            return small.to(device).expand(x.shape)
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)

    return [move(x) for x in arguments]


def fenced_on(device, shape, dtype=torch.float32):
    """A NaN-filled tensor on ``device`` between two fences of sentinels, and the whole."""
    size = torch.Size(shape).numel()
    whole = torch.full((size + 2 * FENCE,), SENTINEL, dtype=dtype, device=device)
    whole[FENCE : FENCE + size] = torch.nan
    return whole[FENCE : FENCE + size].view(shape), whole


def run_attend(ops, device, arguments, shape, dtype=torch.float32):
    """``out`` and ``lse`` on the CPU."""
    (out, whole), (lse, whole_lse) = fenced_on(device, shape, dtype), fenced_on(device, shape[:-1])
    ops.attend(*moved(arguments, device), out, lse)
    check_fences(whole.cpu(), whole_lse.cpu())
    return out.cpu(), lse.cpu()


def tolerance_of(case: Case) -> float:
    return TOLERANCE[case.dtype] * max(1, case.size if case.dtype == torch.float32 else case.size / 4)  # 16-bit queries


def assert_close(out, lse, expected, expected_lse, tolerance):
    assert relative_error(out, expected) <= tolerance
    finite = expected_lse.isfinite()
    assert torch.equal(lse[~finite], expected_lse[~finite].to(lse.dtype))
    assert torch.allclose(lse[finite].double(), expected_lse[finite].double(), rtol=1e-5, atol=tolerance)


def attend64(q, keys, values, exact_keys, exact_values, mask, sink_logits, start, length, num_sinks, scale, softcap):
    """What attend should give, in float64 from the decoded stores."""
    heads = exact_keys.shape[1]
    every_key = reference._all_keys(keys, exact_keys, length, num_sinks).double()
    every_value = reference._all_values(values, exact_values, length, num_sinks).double() if values else every_key
    rows = q.double().unflatten(1, (heads, -1)).flatten(2, 3)
    logits = (rows @ every_key.transpose(-1, -2) * scale).reshape(*q.shape[:3], -1)
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    logits[..., num_sinks : num_sinks + start] = -torch.inf
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.double()
    total = logits.logsumexp(-1)
    if sink_logits is not None:
        total = torch.logaddexp(total, sink_logits.double()[:, None])
    weights = torch.exp(logits - torch.where(total == -torch.inf, 0, total).unsqueeze(-1))
    out = weights.unflatten(1, (heads, -1)).flatten(2, 3) @ every_value
    return out.reshape(*q.shape[:3], -1), total


def check_attend(ops, device, case):
    arguments = problem(case)[0]
    out, lse = check_against_float64(ops, device, arguments, tolerance_of(case))
    if case.mask == "dead" and not case.sink_logits:
        assert (lse[:, :, 0] == -torch.inf).all() and (out[:, :, 0] == 0).all()


def check_against_float64(ops, device, arguments, tolerance):
    expected, expected_lse = attend64(*arguments)
    out, lse = run_attend(ops, device, arguments, expected.shape)
    assert_close(out, lse, expected, expected_lse, tolerance)
    return out, lse


def check_against_float64_rounded(ops, device, arguments, dtype, tolerance=0.0):
    """As ``check_against_float64``, of an output in the queries' dtype: only then the kernels for few rows answer."""
    expected, expected_lse = attend64(*arguments)
    out, lse = run_attend(ops, device, arguments, expected.shape, dtype)
    rounding = relative_error(expected.to(dtype), expected)
    assert_close(out, lse, expected, expected_lse, max(tolerance, TOLERANCE[dtype]) + rounding)
    return out, lse


def check_few_rows(ops, device, case):
    out, lse = check_against_float64_rounded(ops, device, problem(case)[0], case.dtype, tolerance_of(case))
    if case.mask == "dead" and not case.sink_logits:
        assert (lse[:, :, 0] == -torch.inf).all() and (out[:, :, 0] == 0).all()


def check_flat_tail(ops, device, heads, group, tokens, dtype=torch.float16):
    """One token has nearly all weight, the others, too little each for an integer, the rest: together they count."""
    case = Case("tail", heads=heads, group=group, tokens=tokens, exact=0, num_sinks=0, dim=128, dtype=dtype, plain=True)
    q, keys, values, *rest = problem(dataclasses.replace(case, kind="none"))[0]
    keys, values = ([torch.zeros_like(s[0]), torch.full_like(s[1], -1), torch.ones_like(s[2]), *s[3:]] for s in (keys, values))
    level, step = keys[3][-1].item(), math.log(2) / case.dim**0.5  # all coordinates are the same
    for log2 in (16.6, 17.2, 18.0):
        keys[2].fill_(1 - log2 * step / level), keys[2][:, :, 5].fill_(1)
        check_against_float64_rounded(ops, device, [torch.ones_like(q), keys, values, *rest], dtype)


def check_near_in_a_buffer(ops, device, exact, dtype):
    """Exact tokens that are a view of more, with NaN around them."""
    arguments = list(problem(dataclasses.replace(NEAR, name="buffer", exact=exact, queries=2, mask="bool", dtype=dtype))[0])
    for place in (3, 4):
        x = arguments[place]
        whole = torch.full((*x.shape[:2], exact + 50, x.shape[3]), torch.nan, dtype=dtype)
        arguments[place] = whole[:, :, 20 : 20 + exact].copy_(x)
    check_against_float64_rounded(ops, device, arguments, dtype)


def check_near_of_dead_rows(ops, device, dtype):
    """A mask of -inf alone for whole rows, of other rows for whole warps."""
    case = dataclasses.replace(NEAR, name="dead-float", mask="float", group=3, queries=2, dtype=dtype)
    arguments = list(problem(case)[0])
    mask = arguments[MASK].clone()
    mask[:, 1] = -torch.inf
    mask[:, 2, 1, :48] = -torch.inf
    arguments[MASK] = mask
    out, lse = check_against_float64_rounded(ops, device, arguments, dtype)
    assert (out[:, 1] == 0).all() and (lse[:, 1] == -torch.inf).all()


def check_near_of_nan(ops, device, place):
    """A NaN makes NaN of the rows that see it, of no others."""
    case = dataclasses.replace(NEAR, name="nan", mask="float", num_sinks=0)
    arguments = list(problem(case)[0])
    arguments[MASK] = torch.zeros_like(arguments[MASK])
    at, row = {"query": (0, 0), "key": (3, 131), "value": (4, 131), "mask": (MASK, 0)}[place]
    expected = attend64(*arguments)[0]
    arguments[at] = arguments[at].clone()
    arguments[at][0, 0, row, 9] = torch.nan
    out, lse = run_attend(ops, device, arguments, expected.shape, case.dtype)
    stop = case.group if place in ("key", "value") else 1  # of the heads that see it
    seen = out[0, :stop, :, 9] if place == "value" else out[0, :stop]
    assert seen.isnan().all() and (place == "value" or lse[0, :stop].isnan().all())
    assert relative_error(out[0, stop:], expected[0, stop:]) <= 4e-3 and lse[0, stop:].isfinite().all()


def check_no_rows(ops, device, case):
    """A batch without sequences, and sequences without query tokens: there is nothing to do."""
    (q, keys, values, exact_keys, exact_values, *rest), _, expected, _ = problem(case)
    nobody = [[x[:0] if x.ndim > 2 and i < 6 else x for i, x in enumerate(store)] for store in (keys, values)]
    for arguments in (
        (q[:0], *nobody, exact_keys[:0], exact_values[:0], *rest),
        (q[:, :, :0], keys, values, exact_keys, exact_values, *rest),
    ):
        shape = (*arguments[0].shape[:3], expected.shape[-1])
        out, lse = run_attend(ops, device, arguments, shape, case.dtype)
        assert out.shape == shape and lse.shape == shape[:-1]


def check_scores_and_sums(ops, device, case):
    (q, keys, _, exact_keys, exact_values, *_), values, expected, _ = problem(case)
    length, num_sinks, shape = case.tokens, case.num_sinks, (*q.shape[:3], case.tokens + case.exact)
    tolerance = TOLERANCE[case.dtype]
    (scores, whole), expected_scores = fenced_on(device, shape), torch.empty(shape)
    ops.qk(*moved((q, keys, exact_keys), device), length, num_sinks, scores)
    check_fences(whole.cpu())
    reference.qk(q, keys, exact_keys, length, num_sinks, expected_scores)
    assert relative_error(scores.cpu(), expected_scores) <= tolerance
    p = (expected_scores * case.dim**-0.5).softmax(-1).to(case.dtype)
    (out, whole), expected = fenced_on(device, expected.shape), torch.empty_like(expected)
    ops.pv(*moved((p, values, exact_values), device), length, num_sinks, out)
    check_fences(whole.cpu())
    reference.pv(p, values, exact_values, length, num_sinks, expected)
    assert relative_error(out.cpu(), expected) <= tolerance


def causal_mask(case: Case) -> torch.Tensor:
    """The last ``queries`` tokens are those of the queries; broadcast over sequences and heads."""
    tokens = case.tokens + case.exact
    mask = torch.ones(case.queries, tokens, dtype=torch.bool).tril(tokens - case.queries)
    return mask.expand(case.batch, case.heads * case.group, -1, -1)


def structured_mask(case: Case) -> torch.Tensor:
    """float32, of each head alone, with tiles that are attended whole, in part and not at all."""
    shape = (case.batch, case.heads * case.group, case.queries, case.tokens + case.exact)
    mask = torch.zeros(shape)
    for head in range(shape[1]):
        mask[:, head, :, : 70 * head] = -torch.inf
        mask[:, head, : 65 * head, -40:] = -torch.inf
    mask[0, 1, 3, -77:] = torch.linspace(-2, 2, 77)
    return mask


def padded_mask(case: Case) -> torch.Tensor:
    """bool, with a different number of columns missing on the left of each sequence; the same for all query tokens."""
    mask = torch.ones(case.batch, 1, 1, case.tokens + case.exact, dtype=torch.bool)
    for sequence in range(case.batch):
        mask[sequence, ..., : 90 * sequence] = False
    return mask.expand(-1, case.heads * case.group, case.queries, -1)


def with_mask(case: Case, mask):
    arguments = list(problem(case)[0])
    arguments[MASK] = mask
    return arguments


LONG = Case("long", queries=300, tokens=700, exact=430, dim=64, group=2, heads=1)
LONG_CASES = [
    (LONG, causal_mask),
    (dataclasses.replace(LONG, group=1, queries=130, batch=2, tokens=300, exact=200), causal_mask),
    (dataclasses.replace(LONG, group=3, queries=90, exact=100, tokens=320), structured_mask),
    (dataclasses.replace(LONG, group=2, queries=75, exact=150, tokens=220, batch=3), padded_mask),
    (dataclasses.replace(LONG, group=5, queries=33, exact=60, tokens=100, dim=128, bits=(4, 2)), causal_mask),
]
LATENT_CASES = [
    Case("mla", shared=True, dim=512, heads=1, group=16, queries=3, tokens=150),
    Case("mla-rows", shared=True, dim=512, heads=1, group=40, queries=2, tokens=70, bits=(4, 4)),
    Case("mla-ragged", shared=True, dim=80, heads=1, group=16, queries=1, tokens=150, bits=(2, 2), start=33),
]
EXTREME_CASES = [
    Case("logits", size=8.0, queries=3, tokens=300, dim=128),
    Case("logits-many", size=8.0, queries=40, tokens=100, dim=64),
    Case("tiny", size=1e-3, queries=2, tokens=100),
]


def check_long(ops, device, case, make_mask):
    check_against_float64(ops, device, with_mask(case, make_mask(case)), tolerance_of(case))


def check_values_of_any_magnitude(ops, device, size, dtype):
    """Scales of values far from one, some tokens much larger than others."""
    arguments = list(problem(Case("magnitude", queries=2, tokens=100, plain=True, dtype=dtype))[0])
    values = list(arguments[2])
    spread = torch.tensor([1.0, 1e-3]).repeat(values[2].shape[-1] // 2)
    values[2] = (values[2].float() * size * spread).half()
    arguments[2], arguments[4] = values, (arguments[4].float() * size).to(dtype)
    check_against_float64(ops, device, arguments, TOLERANCE[dtype])


def spread_out(store):
    """The same store with gaps between the words of a token and between tokens, and views that start at odd words."""

    def spread(x):
        whole = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 1, dtype=x.dtype)
        view = whole[..., 1 : 1 + x.shape[-1]]
        view.copy_(x)
        return view

    return [spread(store[0]), spread(store[1]), spread(store[2]), *store[3:]]


def check_stores_with_gaps(ops, device, case):
    arguments, _, expected, expected_lse = problem(case)
    arguments = list(arguments)
    arguments[1] = spread_out(arguments[1])
    arguments[2] = spread_out(arguments[2]) if arguments[2] else []
    out, lse = run_attend(ops, device, arguments, expected.shape)
    assert_close(out, lse, expected, expected_lse, TOLERANCE[case.dtype])


def check_nan_stays_in_its_row(ops, device, dtype):
    arguments, _, expected, _ = problem(Case("nan", queries=5, tokens=100, dtype=dtype))
    arguments = list(arguments)
    q = arguments[0].clone()
    q[0, 1, 2, 3] = torch.nan
    arguments[0] = q
    (out, _), (lse, _) = fenced_on(device, expected.shape), fenced_on(device, expected.shape[:-1])
    ops.attend(*moved(arguments, device), out, lse)
    out, lse = out.cpu(), lse.cpu()
    assert out[0, 1, 2].isnan().all() and lse[0, 1, 2].isnan()
    out[0, 1, 2] = expected[0, 1, 2]
    assert relative_error(out, expected) <= TOLERANCE[dtype]


def check_nan_of_few_rows(ops, device, place):
    """A NaN makes its row NaN; it is not taken for a token that the row does not see."""
    exact = 20 if place == "exact key" else 0
    case = Case("nan", tokens=100, exact=exact, num_sinks=0, dim=128, plain=True, mask="float", dtype=torch.bfloat16)
    arguments = list(problem(case)[0])
    arguments[MASK] = torch.zeros_like(arguments[MASK])
    at, row = {"query": (0, 0), "exact key": (3, 6), "mask": (MASK, 0)}[place]
    expected = attend64(*arguments)[0]
    arguments[at] = arguments[at].clone()
    arguments[at][0, 0, row, 9] = torch.nan
    out, lse = run_attend(ops, device, arguments, expected.shape, torch.bfloat16)
    stop = case.group if place == "exact key" else 1  # of the heads that see it
    assert out[0, :stop].isnan().all() and lse[0, :stop].isnan().all()
    assert relative_error(out[0, stop:], expected[0, stop:]) <= 4e-3 and lse[0, stop:].isfinite().all()


def check_output_rounds_once(ops, device, dtype):
    """float32 inputs, so that the result before rounding is the reference's but for the last digits."""
    arguments, _, expected, _ = problem(Case("rounding", queries=70, dim=80))
    out, _ = run_attend(ops, device, arguments, expected.shape, dtype)
    rounded = expected.to(dtype)
    unit = 2.0 ** torch.floor(torch.log2(expected.abs())) * torch.finfo(dtype).eps
    assert ((out.float() - rounded.float()).abs() <= 1.01 * unit + 1e-6).all()
    assert (out != rounded).float().mean() < 0.01
