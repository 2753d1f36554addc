"""Each test plants one bug and shows which layer of the emulator reports it; the same kernel without it is clean."""

import pytest
import torch

import metalsim

pytestmark = pytest.mark.skipif(metalsim.compiler() is None, reason="needs clang++-19 and its sanitizers")

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
PREFIX_SUMS = (
    HEAD
    + """
kernel void prefix_sums(device float* x [[buffer(0)]], uint i [[thread_index_in_threadgroup]],
                        uint g [[threadgroup_position_in_grid]]) {
  threadgroup float shared[64];
  shared[i] = x[64 * g + i];
  FIRST
  for (uint step = 1; step < 64; step *= 2) {
    const float before = i >= step ? shared[i - step] : 0.0f;
    SECOND
    shared[i] += before;
    THIRD
  }
  x[64 * g + i] = shared[i];
}
"""
)


def prefix_sums(without=None, **options):
    source = PREFIX_SUMS
    for name in ("FIRST", "SECOND", "THIRD"):
        source = source.replace(name, "" if name == without else BARRIER)
    x = torch.randint(-9, 9, (3, 64)).float()
    expected = x.cumsum(-1)
    library = metalsim.compile_shader(source, name="sums.metal", **options)
    library.prefix_sums(x, threads=(192,), group_size=(64,))
    assert torch.equal(x, expected)


def one_kernel(body, parameters="device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]"):
    return f"{HEAD}kernel void k({parameters}) {{\n  {body}\n}}\n"


def run(source, *tensors, threads=32, **options):
    metalsim.compile_shader(source, **options).k(*(tensors or [torch.ones(64)]), threads=threads, group_size=32)


@pytest.mark.parametrize("kind", [None, "thread", "address", "loads"])
def test_a_kernel_without_bugs_is_clean(kind):
    prefix_sums(kind=kind)


@pytest.mark.parametrize("without", ["FIRST", "SECOND", "THIRD"])
def test_a_missing_barrier_shows_in_the_order_of_threads(without):
    with pytest.raises(metalsim.MetalError, match="depends on the order of threads"):
        prefix_sums(without)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("without", ["FIRST", "SECOND", "THIRD"])
def test_a_missing_barrier_is_a_data_race_in_any_order(without, order):
    with pytest.raises(metalsim.MetalError, match="data race") as caught:
        prefix_sums(without, kind="thread", orders=(order,))
    assert "sums.metal:" in str(caught.value), "the source line is not named"


def test_lanes_that_rely_on_lockstep_are_a_data_race():
    body = "threadgroup float s[32];\n  s[i] = x[i];\n  const float y = simd_sum(x[i]);\n  WAIT\n  x[i] = y + s[31 - i];"
    with pytest.raises(metalsim.MetalError, match="data race"):
        run(one_kernel(body.replace("WAIT", "")), kind="thread", orders=(0,))
    run(one_kernel(body.replace("WAIT", "simdgroup_barrier(mem_flags::mem_threadgroup);")), kind="thread", orders=(0,))


def test_a_barrier_without_memory_flags_orders_no_memory():
    body = "threadgroup float s[32];\n  s[i] = x[i];\n  threadgroup_barrier(mem_flags::mem_none);\n  x[i] = s[31 - i];"
    with pytest.raises(metalsim.MetalError, match="data race"):
        run(one_kernel(body), kind="thread", orders=(0,))


def test_threadgroups_that_write_one_address_are_a_data_race():
    with pytest.raises(metalsim.MetalError, match="data race"):
        run(one_kernel("x[i & 31] += 1;"), threads=64, kind="thread", orders=(0,))


@pytest.mark.parametrize("body, message", [
    ("float s = 0;\n  if (i & 1) s = simd_sum(x[i]);\n  threadgroup_barrier(mem_flags::mem_none);\n  x[i] = s;", "deadlock"),
    ("if (i & 1) {\n    x[i] = simd_sum(x[i]);\n  } else {\n    x[i] = simd_max(x[i]);\n  }", "divergent control flow"),
    ("if (i > 20) return;\n  threadgroup_barrier(mem_flags::mem_none);\n  x[i] = 1;", "not reached by all threads: 11 of 32"),
    ("if (i & 1) {\n  threadgroup_barrier(mem_flags::mem_none);\n  } else {\n  threadgroup_barrier(mem_flags::mem_none);\n  }",
     "different threadgroup_barriers"),
    ("threadgroup float s[8193];\n  s[i] = x[i];\n  x[i] = s[i];", "the limit is 32768"),
])  # fmt: skip
def test_a_run_reports(body, message):
    with pytest.raises(metalsim.MetalError, match=message):
        run(one_kernel(body))


def test_threadgroup_memory_starts_as_junk():
    x = torch.ones(64)
    body = "threadgroup float s[64];\n  s[i] = x[i];\n  threadgroup_barrier(mem_flags::mem_threadgroup);\n  x[i] = s[i + 1];"
    run(one_kernel(body), x)
    assert torch.equal(x[:31], torch.ones(31)) and x[31] not in (0, 1)


@pytest.mark.parametrize("body, message", [
    ("x[i] = x[i + 33];", "heap-buffer-overflow"),
    ("threadgroup float s[31];\n  threadgroup float* p = s;\n  p[i] = x[i];", "heap-buffer-overflow"),
    ("x[i] = float(*reinterpret_cast<device const uint*>((device const uchar*)x + 3 * i));", "misaligned address"),
    ("x[i] = float(int(i) << (i + 1));", "shift exponent|left shift"),
])  # fmt: skip
def test_the_address_sanitizer_reports(body, message):
    with pytest.raises(metalsim.MetalError, match=message):
        run(one_kernel(body), kind="address", orders=(0,))


X = "device float* x [[buffer(0)]]"


@pytest.mark.parametrize("parameters, body, message", [
    (X, "threadgroup float s[4];\n threadgroup float* p = s; p = x; x[0] = *p;", "address space"),
    ("constant float* x [[buffer(0)]]", "x[0] = 1;", "read-only"),
    ("float* x [[buffer(0)]]", "x[0] = 1;", "needs `device`"),
    (X, "x[0] = std::sqrt(x[0]);", "no std::"),
    (X, "double y = x[0]; x[0] = y;", "no double"),
    (X, "x[0] = expf(x[0]);", "expf"),
    ("device bfloat* x [[buffer(0)]]", "x[0] = simd_sum(x[0]);", "cast first"),
    ("device half* x [[buffer(0)]]", "x[0] = max(x[0], 0.0f);", "ambiguous|no matching"),
    (X + ", threadgroup float* s [[threadgroup(0)]]", "x[0] = s[0];", "cannot size"),
    (X, "x[0] = 1; // Walsh\u2013Hadamard", "not ASCII"),
    (X, "if constexpr (sizeof(float) > 1) { x[0] = 1; }", "Metal 4"),
    (X, "uint n = 3; int m = -1; x[0] = n > m ? 1 : 0;", "different signs"),
    (X, "x[0] = y;", "undeclared identifier"),
    (X + ", uint i [[thread_index]]", "x[i] = 1;", "unknown attribute"),
])  # fmt: skip
def test_the_check_reports(parameters, body, message):
    with pytest.raises(metalsim.MetalError, match=message):
        metalsim.check(one_kernel(body, parameters), "bad.metal")


def test_the_check_passes_what_is_right():
    source = f"{HEAD}inline float twice(threadgroup const float* p) {{ return 2.0f * *p; }}\n"
    source += one_kernel("threadgroup float s[4];\n  s[0] = x[0];\n  x[0] = twice(s);", X).removeprefix(HEAD)
    assert metalsim.check(source) == ["k"]


def test_too_many_buffers_are_reported():
    parameters = ", ".join(f"device float* x{i} [[buffer({i})]]" for i in range(32))
    with pytest.raises(metalsim.MetalError, match="32 buffers, the limit is 31"):
        metalsim.check(one_kernel("x0[0] = 1;", parameters))
