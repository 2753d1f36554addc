"""The ops of the CUDA library on the CPU, by the emulator of this folder."""

import pytest
import torch
from cuda_host import attend_checks as checks
from cuda_host import codec_checks, emulated_library, few_row_cases
from op_cases import CASES

from torch_kvq.ops.schemas import SCALE_RULES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not emulated_library.is_possible(), reason="needs g++ and the headers of CUDA"),
]
HUGE = ("rows", "rows-masked")  # an hour of emulation
SMALL_CASES = [case for case in CASES if case.name not in HUGE]


@pytest.fixture(scope="module")
def ops():
    return emulated_library.load()


@pytest.fixture(autouse=True)
def left_out(request):
    emulated_library.skip_if_left_out(request.node.name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", SMALL_CASES, ids=checks.named)
def test_attend(ops, case, dtype):
    checks.check_attend(ops, "cpu", checks.in_dtype(case, dtype))


@pytest.mark.parametrize("case", few_row_cases.FEW_ROW_CASES, ids=checks.named)
def test_attend_of_few_rows(ops, case, monkeypatch):
    monkeypatch.setenv("KVQ_EMULATE_FEW_ROWS", "1")
    checks.check_few_rows(ops, "cpu", case)


@pytest.mark.parametrize("case", few_row_cases.NEAR_CASES, ids=checks.named)
def test_attend_of_few_exact_tokens(ops, case, monkeypatch):
    monkeypatch.setenv("KVQ_EMULATE_FEW_ROWS", "1")
    checks.check_few_rows(ops, "cpu", case)


@pytest.mark.parametrize("dtype", checks.HALF)
@pytest.mark.parametrize("exact", [4, 17, 132])
def test_few_exact_tokens_in_a_buffer(ops, exact, dtype, monkeypatch):
    monkeypatch.setenv("KVQ_EMULATE_FEW_ROWS", "1")
    checks.check_near_in_a_buffer(ops, "cpu", exact, dtype)


@pytest.mark.parametrize("dtype", checks.HALF)
def test_few_exact_tokens_of_dead_rows(ops, dtype, monkeypatch):
    monkeypatch.setenv("KVQ_EMULATE_FEW_ROWS", "1")
    checks.check_near_of_dead_rows(ops, "cpu", dtype)


@pytest.mark.parametrize("place", ["query", "key", "value", "mask"])
def test_nan_of_few_exact_tokens(ops, place, monkeypatch):
    monkeypatch.setenv("KVQ_EMULATE_FEW_ROWS", "1")
    checks.check_near_of_nan(ops, "cpu", place)


@pytest.mark.parametrize("tokens", [100, 4097])
@pytest.mark.parametrize("dim", [80, 128, 256])
def test_few_rows_have_kernels_of_their_own(ops, dim, tokens, monkeypatch):
    """They round otherwise than the tiles, and are the ones that answer."""
    case = checks.Case("own", dim=dim, tokens=tokens, dtype=torch.bfloat16)
    arguments, _, expected, _ = checks.problem(case)
    tiles = checks.run_attend(ops, "cpu", arguments, expected.shape, case.dtype)[0]
    monkeypatch.setenv("KVQ_EMULATE_FEW_ROWS", "1")
    assert not torch.equal(checks.run_attend(ops, "cpu", arguments, expected.shape, case.dtype)[0], tiles)


@pytest.mark.parametrize("heads, tokens", [(1, 2000), (2, 2000), (2, 4000)])  # by each kernel
@pytest.mark.parametrize("group", [4, 8])
def test_flat_tail_of_few_rows(ops, group, heads, tokens, monkeypatch):
    monkeypatch.setenv("KVQ_EMULATE_FEW_ROWS", "1")
    checks.check_flat_tail(ops, "cpu", heads, group, tokens)


@pytest.mark.parametrize("limited", [True, False])
def test_few_rows_with_too_many_parts(ops, limited, monkeypatch):
    """Where an index of 32 bits does not reach all parts, the tiles answer."""
    case = checks.Case("parts", dim=256, tokens=100, exact=132, dtype=torch.bfloat16)
    arguments, _, expected, _ = checks.problem(case)
    tiles = checks.run_attend(ops, "cpu", arguments, expected.shape, case.dtype)[0]
    monkeypatch.setenv("KVQ_EMULATE_FEW_ROWS", "1")
    if limited:
        monkeypatch.setenv("KVQ_EMULATE_FEW_PARTS", "1")
    assert torch.equal(checks.run_attend(ops, "cpu", arguments, expected.shape, case.dtype)[0], tiles) == limited


@pytest.mark.parametrize("tokens", [1900, 5000])
def test_few_rows_on_unlike_cards(ops, tokens, monkeypatch):
    """Of two cards of a machine the second one has no clusters."""
    case = checks.Case("unlike", heads=1, tokens=tokens, exact=132, dtype=torch.bfloat16)
    monkeypatch.setenv("KVQ_EMULATE_FEW_ROWS", "1")
    for device in ("0", "1", "0"):
        monkeypatch.setenv("KVQ_EMULATE_DEVICE", device)
        checks.check_few_rows(ops, "cpu", case)


@pytest.mark.parametrize("tokens", [100, 4097])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_no_rows(ops, dim, tokens, monkeypatch):
    monkeypatch.setenv("KVQ_EMULATE_FEW_ROWS", "1")
    checks.check_no_rows(ops, "cpu", checks.Case("none", dim=dim, tokens=tokens, dtype=torch.bfloat16))


@pytest.mark.parametrize("case", [case for case in checks.SCORE_CASES if case in SMALL_CASES], ids=checks.named)
def test_scores_and_sums(ops, case):
    checks.check_scores_and_sums(ops, "cpu", case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case, make_mask", checks.LONG_CASES)
def test_many_query_tokens(ops, case, make_mask, dtype):
    checks.check_long(ops, "cpu", checks.in_dtype(case, dtype), make_mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", checks.LATENT_CASES + checks.EXTREME_CASES, ids=checks.named)
def test_latents_and_extremes(ops, case, dtype):
    checks.check_attend(ops, "cpu", checks.in_dtype(case, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_values_of_any_magnitude(ops, size, dtype):
    checks.check_values_of_any_magnitude(ops, "cpu", size, dtype)


@pytest.mark.parametrize("dim", [80, 128])
def test_stores_with_gaps(ops, dim):
    checks.check_stores_with_gaps(ops, "cpu", checks.Case("gaps", dim=dim, tokens=100, queries=2, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_stays_in_its_row(ops, dtype):
    checks.check_nan_stays_in_its_row(ops, "cpu", dtype)


@pytest.mark.parametrize("place", ["query", "exact key", "mask"])
def test_nan_of_few_rows(ops, place, monkeypatch):
    monkeypatch.setenv("KVQ_EMULATE_FEW_ROWS", "1")
    checks.check_nan_of_few_rows(ops, "cpu", place)


@pytest.mark.parametrize("dtype", checks.HALF)
def test_output_rounds_once(ops, dtype):
    checks.check_output_rounds_once(ops, "cpu", dtype)


@pytest.mark.parametrize("kind", ["isoquant", "hadamard2", "dense"])
@pytest.mark.parametrize("dim", [4, 80, 128, 512])
def test_rotate(ops, dim, kind):
    codec_checks.check_rotate(ops, "cpu", dim, kind)


CODECS = [(64, "isoquant"), (128, "isoquant"), (256, "hadamard"), (80, "isoquant"), (12, "dense")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize("dim, kind", CODECS)
def test_encode_and_decode(ops, dim, kind, along_tokens, dtype):
    bits, rule = 2 + dim % 3, SCALE_RULES[dim // 4 % 4]
    for plain in (False, True):  # tensor cores take values without centre and balance
        codec_checks.check_encode(ops, "cpu", dim, kind, bits, along_tokens, rule, dtype, plain)
    codec_checks.check_decode(ops, "cpu", dim, kind, bits, along_tokens, dtype)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_encode_by_every_scale_rule(ops, dim, along_tokens, bits):
    for rule in SCALE_RULES:
        codec_checks.check_encode(ops, "cpu", dim, "isoquant", bits, along_tokens, rule, torch.bfloat16, True, ((0, 40),))


@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_encode_in_turns(ops, dim, along_tokens):
    args = (dim, "isoquant", 3, along_tokens, "unbiased", torch.bfloat16, True, codec_checks.TURNS)
    codec_checks.check_encode(ops, "cpu", *args)


@pytest.mark.parametrize("heads, pieces", [(3, codec_checks.RAGGED), (1, codec_checks.TURNS), (8, codec_checks.BLOCKS)])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_encode_of_keys_and_values_at_once(ops, dim, bits, heads, pieces):
    codec_checks.check_encode_kv(ops, "cpu", (dim, dim), (bits, bits), "isoquant", torch.bfloat16, heads, pieces)


@pytest.mark.parametrize("dims, bits, kind, dtype, plain", codec_checks.APART)
def test_encode_of_unlike_keys_and_values(ops, dims, bits, kind, dtype, plain):
    codec_checks.check_encode_kv(ops, "cpu", dims, bits, kind, dtype, plain=plain)


@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_encode_of_any_magnitude(ops, dim, along_tokens):
    codec_checks.check_encode_of_any_magnitude(ops, "cpu", dim, along_tokens, torch.bfloat16)


@pytest.mark.parametrize("dim", [64, 128])
def test_encode_beside_a_large_centre(ops, dim):
    codec_checks.check_encode_beside_a_large_centre(ops, "cpu", dim, torch.bfloat16)


@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize("dim", [64, 80])
def test_encode_of_odd_vectors(ops, dim, along_tokens):
    codec_checks.check_encode_of_odd_vectors(ops, "cpu", dim, along_tokens, "unbiased", torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge(ops, dtype):
    codec_checks.check_merge(ops, "cpu", dtype)
