"""Every operator's CPU kernel against its naive twin, for each instruction set of the machine, and its checks.

Outputs are filled with NaN and fenced by sentinels before a call. Errors are relative to the largest coordinate of a
row of the output, but no row counts as smaller than a tenth of the largest.
"""

import functools
import re

import pytest
import torch
from cuda_host import codec_checks
from op_cases import CASES, Case, check_fences, codes_of, encode, fenced, make_store, problem, relative_error

from torch_kvq import backends, ops
from torch_kvq.backends import native
from torch_kvq.codecs.rotation import make_rotation
from torch_kvq.ops import reference
from torch_kvq.ops.schemas import DENSE_NAMES, NAMES, SCALE_RULES

native.load()
needs_kernels = pytest.mark.skipif(not native.loaded(), reason=f"no CPU kernels: {native._state.reason}")
TOLERANCE = 1e-5
INTEGER_TOLERANCE = 3e-4  # attend of at most 16 rows in 16-bit integers (avx512vnni)


def attend_tolerance():
    return INTEGER_TOLERANCE if backends.cpu_isa() == "avx512vnni" else TOLERANCE


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=native.available_isas())
def isa(request):
    before = native.set_cpu_isa(request.param)
    yield request.param
    native.set_cpu_isa(before)


@needs_kernels
@pytest.mark.parametrize("isa", native.ISAS)
def test_the_kernels_serve_every_operator(isa):
    if isa not in native.available_isas():
        pytest.skip(f"{isa} is not on this machine or not built")
    before = native.set_cpu_isa(isa)
    report = backends.report()
    rows = [row for row in report.rows if row.device == "cpu" and row.op in NAMES]
    assert [row.op for row in rows] == list(NAMES) and report["sign_top_p_select"].served_by == "sign_scores + top_p_select"
    assert all(row.served_by == isa == backends.cpu_isa() for row in rows)
    assert isa in str(report)
    native.set_cpu_isa(before)


@needs_kernels
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attend(case, isa):
    arguments, _, expected, expected_lse = problem(case)
    (out, whole), (lse, whole_lse) = fenced(expected.shape), fenced(expected_lse.shape)
    ops.attend(*arguments, out, lse)
    check_fences(whole, whole_lse)
    tolerance = attend_tolerance()
    assert relative_error(out, expected) <= tolerance
    finite = expected_lse.isfinite()
    assert torch.equal(lse[~finite], expected_lse[~finite])
    assert torch.allclose(lse[finite], expected_lse[finite], rtol=1e-5, atol=tolerance)
    if case.mask == "dead" and not case.sink_logits:
        assert (lse[:, :, 0] == -torch.inf).all() and (out[:, :, 0] == 0).all()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attend_rounds_its_output_once(dtype, isa):
    arguments, _, expected, _ = problem(Case("rounding", dtype=dtype, queries=70, dim=80))
    (out, whole), lse = fenced(expected.shape, dtype), torch.empty(expected.shape[:-1])
    ops.attend(*arguments, out, lse)
    check_fences(whole)
    rounded = expected.to(dtype)
    unit = 2.0 ** torch.floor(torch.log2(expected.abs())) * torch.finfo(dtype).eps
    assert ((out.float() - rounded.float()).abs() <= 1.01 * unit + 1e-6).all()
    assert (out != rounded).float().mean() < 0.01


PLAIN = dict(shared=False, mask="", softcap=0.0, sink_logits=False, start=0)
SCORE_CASES = [case for case in CASES if all(getattr(case, name) == value for name, value in PLAIN.items())]


@needs_kernels
@pytest.mark.parametrize("case", SCORE_CASES, ids=lambda case: case.name)
def test_qk_and_pv(case, isa):
    (q, keys, _, exact_keys, exact_values, *_), values, expected, _ = problem(case)
    shape = (*q.shape[:3], case.tokens + case.exact)
    scores, expected_scores = fenced(shape), torch.empty(shape)
    ops.qk(q, keys, exact_keys, case.tokens, case.num_sinks, scores[0])
    reference.qk(q, keys, exact_keys, case.tokens, case.num_sinks, expected_scores)
    assert relative_error(scores[0], expected_scores) <= TOLERANCE
    p = (expected_scores * case.dim**-0.5).softmax(-1).to(case.dtype)
    out, expected = fenced(expected.shape), torch.empty_like(expected)
    ops.pv(p, values, exact_values, case.tokens, case.num_sinks, out[0])
    reference.pv(p, values, exact_values, case.tokens, case.num_sinks, expected)
    assert relative_error(out[0], expected) <= TOLERANCE
    check_fences(scores[1], out[1])


@needs_kernels
@pytest.mark.parametrize("kind", ["isoquant", "hadamard2", "dense", "so3", "none"])
@pytest.mark.parametrize("dim", [4, 12, 80, 128, 192, 512])
def test_rotate(dim, kind, isa):
    x = torch.randn(3, dim, 37, generator=torch.Generator().manual_seed(dim)).transpose(1, 2).contiguous()[:, 1:]
    parts = make_rotation(kind, dim).tensors()
    for inverse in (False, True):
        out, whole = fenced(x.shape)
        ops.rotate(x, *parts, inverse, out)
        check_fences(whole)
        assert relative_error(out, reference.rotated(x, *parts, inverse)) <= TOLERANCE
    back = out.clone()
    ops.rotate(back, *parts, False, back)  # in place
    assert relative_error(back, x) <= TOLERANCE


@functools.cache
def encoded(bits, along_tokens, rule):
    x = torch.randn(2, 2, 3001, 128, generator=torch.Generator().manual_seed(bits))
    return x, make_store(x, bits, along_tokens, rule=rule)


@needs_kernels
@pytest.mark.parametrize(
    "bits, along_tokens, rule", [(2, False, "norm"), (3, False, "matched"), (3, True, "unbiased"), (4, True, "mse")]
)
def test_encode_equals_the_reference(bits, along_tokens, rule, isa):
    x, expected = encoded(bits, along_tokens, rule)
    store = make_store(x, bits, along_tokens, fill=False)
    encode(ops.encode, x, store, along_tokens, rule=rule)
    codes, expected_codes = (codes_of(s, along_tokens, x.shape[2]) for s in (store, expected))
    differ = codes != expected_codes  # a coordinate within rounding of a boundary of two codes
    assert differ.float().mean() < 1e-5
    ours, theirs = (s[2][:, :, : x.shape[2]].view(torch.int16).int() for s in (store, expected))
    assert (ours - theirs)[~differ.any(-1)].abs().max() <= 1


@needs_kernels
@pytest.mark.parametrize("dims, bits", [((64, 64), (3, 3)), ((80, 48), (3, 4)), ((128, 128), (2, 3))])
def test_encode_of_keys_and_values_at_once(dims, bits, isa):
    codec_checks.check_encode_kv(ops, "cpu", dims, bits, "isoquant", torch.float32)


@needs_kernels
@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize("dim", [4, 12, 80, 96, 256, 512])
def test_encode_and_decode_in_ragged_pieces(dim, along_tokens, isa):
    rng = torch.Generator().manual_seed(dim)
    x = torch.randn(2, 3, 101, dim, generator=rng)
    store = make_store(x, 3, along_tokens, fill=False)
    expected = [part.clone() for part in store]
    for first, last in ((0, 1), (1, 33), (33, 64), (64, 64), (64, 101)):
        piece = x[:, :, first:last].transpose(1, 2).contiguous().transpose(1, 2)
        encode(ops.encode, piece, store, along_tokens, first)
        encode(reference.encode, piece, expected, along_tokens, first)
    assert (codes_of(store, along_tokens, 128) != codes_of(expected, along_tokens, 128)).sum() <= 1
    assert torch.equal(store[2].isnan(), expected[2].isnan())
    for first, last in ((0, 101), (37, 70), (5, 5), (100, 101)):
        out, whole = fenced((2, 3, last - first, dim))
        ops.decode(expected, along_tokens, first, out)
        check_fences(whole)
        theirs = reference.decoded(expected, along_tokens, first, last, dim)
        assert relative_error(out, theirs) <= TOLERANCE


@needs_kernels
@pytest.mark.parametrize("name, make", [
    ("zeros", lambda x: x * 0),
    ("denormal", lambda x: x * 1e-40),
    ("large", lambda x: x * 1e4),
    ("largest", lambda x: x / x.norm(dim=-1, keepdim=True) * 65504 * x.shape[-1] ** 0.5),
    ("one coordinate", lambda x: torch.nn.functional.one_hot(torch.tensor(3), x.shape[-1]) * x),
])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 70])
def test_extreme_inputs_stay_finite(name, make, tokens, isa):
    rng = torch.Generator().manual_seed(3)
    x, q = (make(torch.randn(1, 1, n, 64, generator=rng)) for n in (tokens, 2))
    for rule in SCALE_RULES:
        stores = [make_store(x, 3, along, centre=False, balance=False, fill=False) for along in (False, True)]
        for store, along in zip(stores, (False, True)):
            encode(ops.encode, x, store, along, rule=rule)
            out, expected = torch.empty_like(x), make_store(x, 3, along, centre=False, balance=False, rule=rule)
            ops.decode(store, along, 0, out)
            assert relative_error(out, reference.decoded(expected, along, 0, tokens, 64)) <= 1e-3
        out, lse = torch.full((1, 1, 2, 64), torch.nan), torch.full((1, 1, 2), torch.nan)
        ops.attend(q, *stores, x[:, :, :1], x[:, :, :1], None, None, 0, tokens, 1, 0.125, 0.0, out, lse)
        assert out.isfinite().all() and lse.isfinite().all()


@needs_kernels
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dim", [64, 128, 512])
def test_the_largest_codes_do_not_overflow(dim, bits, isa):
    x = torch.ones(1, 1, 96, dim)
    for sign in (0, -1):
        stores = [make_store(x, bits, along, "none", centre=False, balance=False) for along in (False, True)]
        for store in stores:
            store[0].fill_(sign), store[1].fill_(-1), store[2].fill_(1)
        q, none, out, lse = torch.ones(1, 3, 1, dim), x[:, :, :0], torch.empty(1, 3, 1, dim), torch.empty(1, 3, 1)
        ops.attend(q, *stores, none, none, None, None, 0, 96, 0, dim**-0.5, 0.0, out, lse)
        level = (1 + 2 * sign) * stores[0][3][-1].item()
        assert torch.allclose(out, torch.full_like(out, level), rtol=1e-3)
        assert torch.allclose(lse, torch.full_like(lse, level * dim**0.5 + torch.tensor(96.0).log().item()), rtol=1e-3)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge(dtype, isa):
    rng = torch.Generator().manual_seed(1)
    outs = torch.randn(3, 2, 4, 5, 80, generator=rng).to(dtype)
    lses = 5 * torch.randn(3, 2, 4, 5, generator=rng)
    lses[0, 0], lses[:, 1, 1] = -torch.inf, -torch.inf
    expected, expected_lse = torch.empty(2, 4, 5, 80), torch.empty(2, 4, 5)
    reference.merge(outs, lses, expected, expected_lse)
    outs[0, 0], outs[:, 1, 1] = torch.nan, torch.nan  # without a share
    for merge in (ops.merge, reference.merge):
        (out, whole), (lse, whole_lse) = fenced(expected.shape), fenced(expected_lse.shape)
        merge(outs, lses, out, lse)
        check_fences(whole, whole_lse)
        assert relative_error(out, expected) <= TOLERANCE
        assert torch.allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)


@needs_kernels
def test_splitting_and_merging_is_attending(isa):
    arguments, _, expected, expected_lse = problem(Case("T4097", tokens=4097))
    q, keys, values, exact_keys, exact_values, *_, scale, softcap = arguments
    outs, lses = torch.empty(2, *expected.shape), torch.empty(2, *expected_lse.shape)
    ops.attend(q, keys, values, exact_keys, exact_values, None, None, 3000, 4097, 4, scale, softcap, outs[0], lses[0])
    none = exact_keys[:, :, :0]
    ops.attend(q, keys, values, none, none, None, None, 0, 3000, 0, scale, softcap, outs[1], lses[1])
    out, lse = torch.empty_like(expected), torch.empty_like(expected_lse)
    ops.merge(outs, lses, out, lse)
    tolerance = attend_tolerance()
    assert relative_error(out, expected) <= tolerance and torch.allclose(lse, expected_lse, rtol=1e-5, atol=tolerance)


def results_of_all_operators():
    (q, keys, values, exact_keys, exact_values, *rest), _, expected, expected_lse = problem(Case("T4097", tokens=4097))
    out, lse, scores = torch.empty_like(expected), torch.empty_like(expected_lse), torch.empty(*q.shape[:3], 4117)
    ops.attend(q, keys, values, exact_keys, exact_values, *rest, out, lse)
    ops.qk(q, keys, exact_keys, 4097, 4, scores)
    summed, turned = torch.empty_like(expected), torch.empty_like(q)
    ops.pv(scores, values, exact_values, 4097, 4, summed)
    ops.rotate(q, *keys[6:], False, turned)
    x, _ = encoded(3, False, "matched")
    store = make_store(x, 3, False, fill=False)
    encode(ops.encode, x, store, False)
    decoded = torch.empty_like(x)
    ops.decode(store, False, 0, decoded)
    return [out, lse, scores, summed, turned, decoded, store[0], store[1]]


@needs_kernels
def test_results_do_not_depend_on_the_number_of_threads(isa):
    one = results_of_all_operators()
    torch.set_num_threads(2)
    for ours, theirs in zip(results_of_all_operators(), one):
        assert torch.equal(ours, theirs)


def calls():
    (q, keys, values, *rest), _, out, lse = problem(Case("opcheck", tokens=33, mask="bool", sink_logits=True))
    exact_keys, exact_values = rest[:2]
    x, scores = torch.randn(1, 2, 33, 64), torch.empty(*q.shape[:3], 53)
    rule = SCALE_RULES.index("matched")
    yield "rotate", (x, *keys[6:], False, torch.empty_like(x))
    yield "encode", (x, *keys[3:], rule, False, 0, *(part.clone() for part in keys[:3]))
    yield "encode", (x, *values[3:], rule, True, 0, *(part.clone() for part in values[:3]))
    planes = (part.clone() for store in (keys, values) for part in store[:3])
    yield "encode_kv", (x, -x, keys[3:], values[3:], rule, SCALE_RULES.index("mse"), 0, *planes)
    yield "decode", (keys, False, 0, torch.empty_like(x))
    yield "attend", (q, keys, values, *rest, out.clone(), lse.clone())
    yield "qk", (q, keys, exact_keys, 33, 4, scores)
    yield "pv", (torch.rand_like(scores), values, exact_values, 33, 4, out.clone())
    yield "merge", (torch.randn(2, *out.shape), torch.randn(2, *lse.shape), out.clone(), lse.clone())


CALLS = range(len(list(calls())))


def outputs_of(name, arguments):
    return arguments[-{"encode": 3, "encode_kv": 6, "attend": 2, "merge": 2}.get(name, 1) :]


def visible_outputs(name, arguments):
    """What an operator has written: of a store the codes and scales of the 33 tokens of ``calls``."""
    outputs, written = outputs_of(name, arguments), []
    if not name.startswith("encode"):
        return [x.clone() for x in outputs]
    for place, along_tokens in enumerate([arguments[8]] if name == "encode" else [False, True]):
        store = outputs[3 * place : 3 * place + 3]
        written += codec_checks.codes(store, along_tokens, arguments[0].shape[-1])[:, :, :33], store[2][:, :, :33].clone()
    return written


@needs_kernels
@pytest.mark.parametrize("index", CALLS)
def test_results_do_not_depend_on_the_call(index):
    name, arguments = list(calls())[index]
    outputs = outputs_of(name, arguments)
    assert all(isinstance(x, torch.Tensor) for x in outputs)
    getattr(ops, name)(*arguments)
    once = visible_outputs(name, arguments)
    for x in outputs:
        x.view(torch.int16 if x.element_size() == 2 else torch.int32).fill_(0)
    getattr(ops, name)(*arguments)
    for ours, theirs in zip(visible_outputs(name, arguments), once, strict=True):
        assert torch.equal(ours, theirs) and ours.any()


@needs_kernels
@pytest.mark.parametrize("name", (*DENSE_NAMES, "encode_kv"))
def test_opcheck(name):
    for _, arguments in (call for call in calls() if call[0] == name):
        torch.library.opcheck(getattr(ops, name), arguments)


@needs_kernels
def test_attend_compiles_without_a_graph_break(isa):
    arguments, _, expected, expected_lse = problem(Case("compile", tokens=33))

    def run(q):
        out, lse = torch.empty_like(expected), torch.empty_like(expected_lse)
        ops.attend(q, *arguments[1:], out, lse)
        return out + 0, lse

    out, lse = torch.compile(run, fullgraph=True, backend="eager")(arguments[0])
    tolerance = attend_tolerance()
    assert relative_error(out, expected) <= tolerance and torch.allclose(lse, expected_lse, rtol=1e-5, atol=tolerance)


BAD = [
    ("q must have 4 dims", "q", lambda a: a["q"][0]),
    ("exact_keys must have 4 dims", "exact_keys", lambda a: a["exact_keys"][0]),
    ("exact_keys must have the shape [1, 2, *, 60]", "q", lambda a: a["q"][..., :60]),
    ("q must be float32, bfloat16 or float16", "q", lambda a: a["q"].double()),
    ("q must have a contiguous last dim", "q", lambda a: a["q"].repeat(1, 1, 1, 2)[..., ::2]),
    ("keys must be nine tensors", "keys", lambda a: a["keys"][:8]),
    ("keys.scale must have a capacity of at least", "length", lambda a: 5000),
    ("start must be from 0 to length", "start", lambda a: 200),
    ("num_sinks must be from 0", "num_sinks", lambda a: 21),
    ("mask must be bool or float32", "mask", lambda a: torch.zeros(1, 4, 1, 148, dtype=torch.int32)),
    ("mask must be on the CPU with the shape", "mask", lambda a: torch.ones(1, 4, 1, 147, dtype=torch.bool)),
    ("out must have the shape", "out", lambda a: a["out"][:, :3]),
    ("lse must be float32", "lse", lambda a: a["lse"].double()),
]
ARGUMENTS = "q keys values exact_keys exact_values mask sink_logits start length num_sinks scale softcap out lse".split()


@needs_kernels
@pytest.mark.parametrize("message, name, change", BAD, ids=[bad[0] for bad in BAD])
def test_an_error_names_the_argument_and_the_rule(message, name, change):
    arguments, _, out, lse = problem(Case("errors"))
    named = dict(zip(ARGUMENTS, (*arguments, out.clone(), lse.clone())))
    named[name] = change(named)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        ops.attend(*named.values())
