"""Types and functions of the emulated language against numpy and torch."""

import numpy as np
import pytest
import torch

import metalsim

pytestmark = pytest.mark.skipif(metalsim.compiler() is None, reason="needs clang++-19 and its sanitizers")

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def run(body, *tensors, threads, group_size=None):
    """Runs a kernel over tensors a, b, c, .. with the types of their dtypes."""
    kinds = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat", torch.int32: "int", torch.int64: "long"}
    buffers = [f"device {kinds[x.dtype]}* {name} [[buffer({i})]]" for i, (x, name) in enumerate(zip(tensors, "abcd"))]
    positions = "uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]"
    library = metalsim.compile_shader(f"{HEAD}kernel void k({', '.join(buffers)}, {positions}) {{ {body} }}")
    library.k(*tensors, threads=threads, group_size=group_size or min(threads, 256))


def test_half_rounds_after_each_operation():
    a, b, out = torch.randn(4096).half(), torch.randn(4096).half(), torch.zeros(4096).half()
    run("c[i] = a[i] * b[i] + a[i];", a, b, out, threads=4096)
    assert torch.equal(out, torch.from_numpy(a.numpy() * b.numpy() + a.numpy()))


def test_bfloat_rounds_to_nearest_even():
    special = [0.0, -0.0, float("inf"), 1e-40, 3.4e38, float("-inf")]
    x, out = torch.cat([torch.randn(4090), torch.tensor(special)]), torch.zeros(4096).bfloat16()
    run("b[i] = bfloat(a[i]);", x, out, threads=4096)
    assert torch.equal(out, x.bfloat16())


def test_a_number_without_suffix_is_float():
    x, out = torch.randn(256).half(), torch.zeros(256)
    run("b[i] = a[i] * 0.1;", x, out, threads=256)
    assert torch.equal(out, x.float() * torch.tensor(0.1))


def test_functions_of_a_simdgroup():
    x, out = torch.randint(-50, 50, (64,)).float(), torch.zeros(8, 64)
    body = """
      b[i] = simd_sum(a[i]); b[64 + i] = simd_max(a[i]); b[128 + i] = simd_min(a[i]);
      b[192 + i] = simd_shuffle_xor(a[i], 5); b[256 + i] = simd_broadcast(a[i], 7);
      b[320 + i] = simd_prefix_inclusive_sum(a[i]);
      b[384 + i] = float(popcount(uint(static_cast<simd_vote::vote_t>(simd_ballot(a[i] > 0.0f)))));
      b[448 + i] = simd_any(a[i] > 48.0f) ? 1.0f : simd_all(a[i] > -51.0f) ? 2.0f : 3.0f;
    """
    run(body, x, out, threads=64)
    lanes = x.view(2, 32)
    expected = [lanes.sum(1), lanes.amax(1), lanes.amin(1), None, lanes[:, 7], None, (lanes > 0).sum(1), None]
    for row, each in zip(out.view(8, 2, 32), expected):
        assert each is None or torch.equal(row, each.float()[:, None].expand(2, 32))
    assert torch.equal(out[3].view(2, 32), lanes[:, torch.arange(32) ^ 5])
    assert torch.equal(out[5].view(2, 32), lanes.cumsum(1))
    assert torch.equal(out[7].view(2, 32)[:, 0], torch.where((lanes > 48).any(1), 1.0, 2.0))


def test_a_lane_that_does_not_exist_reads_junk():
    x, out = torch.ones(40), torch.zeros(40)
    run("b[i] = simd_shuffle_down(a[i], 1);", x, out, threads=40)
    assert (out[:31] == 1).all() and (out[32:39] == 1).all() and out[31] != 1 and out[39] != 1


def test_min_and_max_give_the_number_of_a_number_and_nan():
    x, out = torch.tensor([float("nan"), 1.0, -2.0]), torch.zeros(6)
    run("b[i] = max(a[i], 0.5f); b[3 + i] = min(0.5f, a[i]);", x, out, threads=3)
    assert out.tolist() == [0.5, 1.0, 0.5, 0.5, 0.5, -2.0]


def test_integer_functions_and_vectors():
    x, out = torch.tensor([0x12345678, -1, 0], dtype=torch.int32), torch.zeros(12, dtype=torch.int32)
    body = """
      const uint u = as_type<uint>(a[i]);
      const uint4 v = uint4(popcount(u), clz(u), ctz(u), extract_bits(u, 4u, 8u));
      b[4 * i] = v.x; b[4 * i + 1] = v.y; b[4 * i + 2] = v.z; b[4 * i + 3] = v.w;
    """
    run(body, x, out, threads=3)
    assert out.view(3, 4).tolist() == [[13, 3, 3, 0x67], [32, 0, 0, 255], [0, 32, 32, 0]]


@pytest.mark.parametrize("kind", [None, "thread"])
def test_atomics(kind):
    source = f"""{HEAD}
kernel void k(device atomic_uint* count [[buffer(0)]], device atomic_float* top [[buffer(1)]],
              uint i [[thread_position_in_grid]], uint n [[threads_per_threadgroup]]) {{
  threadgroup atomic_uint bits;
  atomic_store_explicit(&bits, 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_or_explicit(&bits, 1u << (i % 32), memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(count, popcount(atomic_load_explicit(&bits, memory_order_relaxed)), memory_order_relaxed);
  atomic_fetch_max_explicit(top, float(i), memory_order_relaxed);
}}
"""
    count, top = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    metalsim.compile_shader(source, kind=kind, orders=(0, 1)).k(count, top, threads=96, group_size=32)
    assert count == 96 * 32 and top == 95


def test_positions_and_groups_at_the_edge_of_a_grid():
    source = f"""{HEAD}
kernel void k(device int* out [[buffer(0)]], uint2 at [[thread_position_in_grid]], uint2 grid [[threads_per_grid]],
              uint2 group [[threads_per_threadgroup]], uint2 full [[dispatch_threads_per_threadgroup]]) {{
  out[at.y * grid.x + at.x] = int(group.x + 100 * group.y + 10000 * full.x + 1000000 * full.y);
}}
"""
    out = torch.zeros(5, 70, dtype=torch.int32)
    metalsim.compile_shader(source).k(out, threads=(70, 5), group_size=(32, 4))
    assert out[0, 0] == 4320432 and out[4, 69] == 4320106


def test_exponentials_are_those_of_the_c_library():
    x, out = torch.linspace(-80, 80, 1024), torch.zeros(2, 1024)
    run("b[i] = precise::exp(a[i]); b[1024 + i] = precise::tanh(a[i]);", x, out, threads=1024)
    assert np.allclose(out[0].numpy(), np.exp(x.double().numpy()), rtol=3e-7)
    assert np.allclose(out[1].numpy(), np.tanh(x.double().numpy()), rtol=3e-7)
