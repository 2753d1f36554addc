"""Every operator on a CUDA device, by whatever serves it there, against the reference on the CPU; ``KVQ_CUDA`` chooses.

The checks are those of ``cuda_host``, where an emulator runs the same kernels without a GPU. What only a GPU shows is
here: streams, graphs, other devices, tensors in the wrong place.
"""

import concurrent.futures
import re
import time

import pytest
import torch
from cuda_host import attend_checks, codec_checks, few_row_cases
from cuda_host.attend_checks import in_dtype, moved, named
from op_cases import CASES, Case, encode, make_store, problem, relative_error
from test_ops import ARGUMENTS, BAD, CALLS, calls, outputs_of, visible_outputs

from torch_kvq import backends, ops
from torch_kvq.backends import cuda
from torch_kvq.ops import reference
from torch_kvq.ops.schemas import NAMES, SCALE_RULES

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXACT = cuda.served_by() != cuda.NATIVE  # Triton's encode rounds no coordinates to float16


def test_kernels_serve_every_operator():
    rows = [row for row in backends.report().rows if row.device == "cuda" and row.op in NAMES]
    assert [row.op for row in rows] == list(NAMES)
    assert {row.served_by for row in rows} == {cuda.served_by()} != {cuda.REFERENCE}
    if cuda.LIBRARY.exists() and "KVQ_CUDA" not in str(cuda.skipped()):
        assert cuda.served_by() == cuda.NATIVE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_attend(case, dtype):
    attend_checks.check_attend(ops, DEVICE, in_dtype(case, dtype))


@pytest.mark.parametrize("case", few_row_cases.FEW_ROW_CASES + few_row_cases.CARD_CASES, ids=named)
def test_attend_of_few_rows(case):
    attend_checks.check_few_rows(ops, DEVICE, case)


@pytest.mark.parametrize("heads, tokens", [(1, 2000), (66, 2000), (66, 3200)])  # by each kernel
@pytest.mark.parametrize("group", [4, 8])
def test_flat_tail_of_few_rows(group, heads, tokens):
    attend_checks.check_flat_tail(ops, DEVICE, heads, group, tokens)


@pytest.mark.parametrize("case", few_row_cases.NEAR_CASES, ids=named)
def test_attend_of_few_exact_tokens(case):
    attend_checks.check_few_rows(ops, DEVICE, case)


@pytest.mark.parametrize("dtype", attend_checks.HALF)
@pytest.mark.parametrize("exact", [4, 17, 132])
def test_few_exact_tokens_in_a_buffer(exact, dtype):
    attend_checks.check_near_in_a_buffer(ops, DEVICE, exact, dtype)


@pytest.mark.parametrize("dtype", attend_checks.HALF)
def test_few_exact_tokens_of_dead_rows(dtype):
    attend_checks.check_near_of_dead_rows(ops, DEVICE, dtype)


@pytest.mark.parametrize("place", ["query", "key", "value", "mask"])
def test_nan_of_few_exact_tokens(place):
    attend_checks.check_near_of_nan(ops, DEVICE, place)


@pytest.mark.parametrize("tokens", [100, 4097])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_attend_of_no_rows(dim, tokens):
    attend_checks.check_no_rows(ops, DEVICE, Case("none", dim=dim, tokens=tokens, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", attend_checks.SCORE_CASES, ids=named)
def test_qk_and_pv(case, dtype):
    attend_checks.check_scores_and_sums(ops, DEVICE, in_dtype(case, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case, make_mask", attend_checks.LONG_CASES)
def test_many_query_tokens(case, make_mask, dtype):
    attend_checks.check_long(ops, DEVICE, in_dtype(case, dtype), make_mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", attend_checks.LATENT_CASES + attend_checks.EXTREME_CASES, ids=named)
def test_latents_and_extremes(case, dtype):
    attend_checks.check_attend(ops, DEVICE, in_dtype(case, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_values_of_any_magnitude(size, dtype):
    attend_checks.check_values_of_any_magnitude(ops, DEVICE, size, dtype)


@pytest.mark.parametrize("dim", [80, 128])
def test_stores_with_gaps(dim):
    attend_checks.check_stores_with_gaps(ops, DEVICE, Case("gaps", dim=dim, tokens=100, queries=2, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row(dtype):
    attend_checks.check_nan_stays_in_its_row(ops, DEVICE, dtype)


@pytest.mark.parametrize("place", ["query", "exact key", "mask"])
def test_nan_of_few_rows(place):
    attend_checks.check_nan_of_few_rows(ops, DEVICE, place)


@pytest.mark.parametrize("dtype", attend_checks.HALF)
def test_output_rounds_once(dtype):
    attend_checks.check_output_rounds_once(ops, DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim, kind", codec_checks.CODECS)
def test_rotate(dim, kind, dtype):
    codec_checks.check_rotate(ops, DEVICE, dim, kind, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dim, kind", codec_checks.CODECS)
def test_encode_and_decode(dim, kind, bits, along_tokens, dtype):
    rule = SCALE_RULES[(dim // 4 + bits) % 4]
    for plain in (False, True):
        codec_checks.check_encode(ops, DEVICE, dim, kind, bits, along_tokens, rule, dtype, plain, exact=EXACT)
    codec_checks.check_decode(ops, DEVICE, dim, kind, bits, along_tokens, dtype)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("along_tokens", [False, True])
def test_encode_of_many_tokens_and_of_flushes(along_tokens, rule):
    for pieces in (((0, 5000),), codec_checks.BLOCKS):
        args = (128, "isoquant", 3, along_tokens, rule, torch.bfloat16, along_tokens, pieces)
        codec_checks.check_encode(ops, DEVICE, *args)


@pytest.mark.parametrize("heads, pieces", [(3, codec_checks.RAGGED), (2, ((0, 5), (5, 40000))), (8, codec_checks.BLOCKS)])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_encode_of_keys_and_values_at_once(dim, bits, heads, pieces):
    for dtype in (torch.bfloat16, torch.float16):
        codec_checks.check_encode_kv(ops, DEVICE, (dim, dim), (bits, bits), "isoquant", dtype, heads, pieces)


def test_threads_encode_keys_and_values():
    """One kernel, which needs less shared memory for values than for keys, launched by two threads at once."""
    x = torch.randn(1, 2, 40, 256, device=DEVICE, dtype=torch.bfloat16)
    stores = [moved(make_store(x.cpu(), 2, along, centre=False, balance=False, fill=False), DEVICE) for along in (False, True)]

    end = time.monotonic() + 1  # as often as there is time for, also under an instrument

    def encode_often(along):
        while time.monotonic() < end:
            encode(ops.encode, x, stores[along], along)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(encode_often, along) for along in (False, True)]:
            done.result()
    torch.cuda.synchronize()


@pytest.mark.parametrize("dims, bits, kind, dtype, plain", codec_checks.APART)
def test_encode_of_unlike_keys_and_values(dims, bits, kind, dtype, plain):
    codec_checks.check_encode_kv(ops, DEVICE, dims, bits, kind, dtype, plain=plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_encode_of_any_magnitude(dim, along_tokens, dtype):
    codec_checks.check_encode_of_any_magnitude(ops, DEVICE, dim, along_tokens, dtype, EXACT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_encode_beside_a_large_centre(dim, dtype):
    codec_checks.check_encode_beside_a_large_centre(ops, DEVICE, dim, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize("dim", [64, 80])
def test_encode_of_odd_vectors(dim, along_tokens, rule, dtype):
    codec_checks.check_encode_of_odd_vectors(ops, DEVICE, dim, along_tokens, rule, dtype, EXACT)


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge(dtype):
    codec_checks.check_merge(ops, DEVICE, dtype)


@pytest.mark.parametrize("name", (*NAMES, "encode_kv"))
def test_opcheck(name):
    for _, arguments in (call for call in calls() if call[0] == name):
        torch.library.opcheck(getattr(ops, name), tuple(moved(arguments, DEVICE)))


def poison(x):
    """Bits that are NaN in floats."""
    x.view(torch.int16 if x.element_size() == 2 else torch.int32).fill_(-1)


def call_on_device(index):
    name, arguments = list(calls())[index]
    return name, getattr(ops, name), moved(arguments, DEVICE)


@pytest.mark.parametrize("index", CALLS)
def test_graphs_replay_what_was_captured(index):
    """The captured call gives the results of new inputs, in memory that was poisoned since."""
    name, operator, arguments = call_on_device(index)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        operator(*arguments)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operator(*arguments)
    first = arguments[0][0] if isinstance(arguments[0], list) else arguments[0]
    first.copy_(first.flip(1, -1) if first.is_floating_point() else ~first)
    operator(*arguments)
    expected = visible_outputs(name, arguments)
    for x in outputs_of(name, arguments):
        poison(x)
    graph.replay()
    torch.cuda.synchronize()
    for ours, theirs in zip(visible_outputs(name, arguments), expected):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("index", CALLS)
def test_work_is_done_on_the_current_stream(index):
    """Inputs that appear late on a side stream are waited for."""
    name, operator, arguments = call_on_device(index)
    operator(*arguments)
    expected = visible_outputs(name, arguments)
    inputs = arguments[: -len(outputs_of(name, arguments))]
    inputs = [x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()]
    inputs = inputs or [arguments[0][2]]  # decode: the scales
    kept = [x.clone() for x in inputs]
    for x in (*outputs_of(name, arguments), *inputs):
        poison(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        for x, value in zip(inputs, kept):
            x.copy_(value)
        operator(*arguments)
    side.synchronize()
    for ours, theirs in zip(visible_outputs(name, arguments), expected):
        assert torch.equal(ours, theirs)


def test_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    attend_checks.check_attend(ops, "cuda:1", Case("second", dtype=torch.bfloat16, dim=128))
    attend_checks.check_attend(ops, "cuda:1", Case("second-tiles", queries=70))
    codec_checks.check_encode(ops, "cuda:1", 128, "isoquant", 3, False, "mse", torch.bfloat16)
    codec_checks.check_decode(ops, "cuda:1", 80, "isoquant", 3, True)
    codec_checks.check_merge(ops, "cuda:1", torch.bfloat16)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("index", CALLS)
def test_results_do_not_depend_on_the_call(index):
    name, operator, arguments = call_on_device(index)
    operator(*arguments)
    once = visible_outputs(name, arguments)
    operator(*arguments)
    for ours, theirs in zip(visible_outputs(name, arguments), once):
        assert torch.equal(ours, theirs)


native_only = pytest.mark.skipif(cuda.served_by() != cuda.NATIVE, reason="the wording is that of the compiled kernels")


def attend_arguments():
    arguments, _, out, lse = problem(Case("errors"))
    return dict(zip(ARGUMENTS, (*arguments, out.clone(), lse.clone())))


def refused(message, arguments):
    """attend raises ``message`` before it writes anything."""
    before = arguments["out"].clone()
    with pytest.raises(RuntimeError, match=re.escape(message)):
        ops.attend(*arguments.values())
    assert torch.equal(arguments["out"], before)


@native_only
@pytest.mark.parametrize("message, name, change", BAD, ids=[bad[0] for bad in BAD])
def test_an_error_names_the_argument_and_the_rule(message, name, change):
    arguments = attend_arguments()
    arguments[name] = change(arguments)
    refused(message.replace("the CPU", "cuda:0"), dict(zip(arguments, moved(arguments.values(), DEVICE))))


ELSEWHERE = [
    ("q must be on a CUDA device like the other tensors, got cpu", "q"),
    ("keys.sign must be on cuda:0, got cpu", "keys"),
    *((f"{name} must be on cuda:0, got cpu", name) for name in ("exact_keys", "exact_values", "out", "lse")),
]


@native_only
@pytest.mark.parametrize("message, name", ELSEWHERE)
def test_a_tensor_on_another_device_is_named(message, name):
    on_cpu = attend_arguments()
    arguments = dict(zip(on_cpu, moved(on_cpu.values(), DEVICE)))
    arguments[name] = [on_cpu["keys"][0], *arguments["keys"][1:]] if name == "keys" else on_cpu[name]
    refused(message, arguments)


@native_only
@pytest.mark.parametrize("index, start, store", [(1, 9, "store"), (3, 6, "key")])
def test_encode_behind_the_store_is_refused(index, start, store):
    name, operator, arguments = call_on_device(index)
    arguments[start] = 1000
    before = visible_outputs(name, arguments)
    with pytest.raises(RuntimeError, match=f"{store}.scale must have a capacity of at least 1033"):
        operator(*arguments)
    for ours, theirs in zip(visible_outputs(name, arguments), before):
        assert torch.equal(ours.nan_to_num(-1), theirs.nan_to_num(-1))


def test_the_reference_gives_the_same_on_the_device():
    arguments, _, expected, _ = problem(Case("reference", dim=80, queries=3))
    out, lse = (torch.empty(shape, device=DEVICE) for shape in (expected.shape, expected.shape[:-1]))
    reference.attend(*moved(arguments, DEVICE), out, lse)
    assert relative_error(out.cpu(), expected) <= 1e-4
