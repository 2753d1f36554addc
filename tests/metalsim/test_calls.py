"""The host side: calls are checked and numbers passed as torch does it."""

import pytest
import torch

import metalsim

pytestmark = pytest.mark.skipif(metalsim.compiler() is None, reason="needs clang++-19 and its sanitizers")

SOURCE = """
#include <metal_stdlib>
using namespace metal;
struct Sizes { long rows; long strides[2]; };
kernel void scale(device const half* x [[buffer(0)]], device float* out [[buffer(1)]], constant uint& n [[buffer(2)]],
                  constant float& factor [[buffer(3)]], uint i [[thread_position_in_grid]]) {
  if (i < n) {
    out[i] = factor * float(x[i]);
  }
}
kernel void numbers(device float* out [[buffer(0)]], constant long& n [[buffer(1)]], constant float& f [[buffer(2)]],
                    constant long* v [[buffer(3)]], constant uint3& z [[buffer(4)]], constant half& h [[buffer(5)]],
                    constant Sizes& sizes [[buffer(6)]]) {
  out[0] = float(n) + f;
  out[1] = float(v[0] * 10 + v[1]);
  out[2] = float(z.z);
  out[3] = float(h);
  out[4] = float(sizes.rows * 100 + sizes.strides[1]);
}
[[max_total_threads_per_threadgroup(64)]] kernel void small(device float* x [[buffer(0)]]) {
  x[0] = 1;
}
"""


@pytest.fixture(scope="module")
def library():
    return metalsim.compile_shader(SOURCE)


def test_a_call_as_in_torch(library):
    x, out = torch.randn(100).half(), torch.full((100,), torch.nan)
    library.scale(x, out, 100, 2.0, threads=128, group_size=64, arg_casts={2: "int32"})
    assert torch.equal(out, 2 * x.float())
    assert dir(library) == ["numbers", "scale", "small"]
    assert library.scale.max_threads_per_threadgroup == 1024 and library.small.max_threads_per_threadgroup == 64


def test_numbers_as_torch_passes_them(library):
    out = torch.zeros(5)
    arguments = (out, 7, 0.5, [1, 2], [1, 2, 3, 0], 1.5, [9, 8, 7])
    library.numbers(*arguments, threads=1, arg_casts={4: "int32", 5: "fp16"})
    assert out.tolist() == [7.5, 12, 3, 1.5, 907]


CAST = {2: "int32"}


@pytest.mark.parametrize("message, arguments, options", [
    ("8 bytes of int", dict(n=4), dict(arg_casts=None)),
    ("4 bytes of float", dict(n=4.0), dict(arg_casts=None)),
    ("torch.float32 tensor", dict(x=torch.zeros(4)), {}),
    ("not contiguous", dict(x=torch.zeros(8).half()[::2]), {}),
    ("empty tensor", dict(x=torch.zeros(0).half()), {}),
    ("torch.uint8 tensor", dict(out=torch.zeros(16, dtype=torch.uint8)), {}),
    ("would be truncated", dict(factor=2.7), dict(arg_casts="int32")),
    ("writable but bound to a number", dict(out=1.0), {}),
    ("as many dims", {}, dict(threads=(4, 1), group_size=4)),
    ("exceeds 1024", {}, dict(threads=2048, group_size=2048)),
    ("empty grid", {}, dict(threads=0)),
    ("1 to 3 dims", {}, dict(threads=(1, 1, 1, 1))),
])  # fmt: skip
def test_a_call_that_a_mac_would_misread(library, message, arguments, options):
    given = dict(x=torch.zeros(4).half(), out=torch.zeros(4), n=4, factor=1.0) | arguments
    with pytest.raises(metalsim.MetalError, match=message):
        library.scale(*given.values(), **(dict(threads=4, group_size=4, arg_casts=CAST) | options))


def test_a_wrong_number_of_arguments_or_name(library):
    with pytest.raises(metalsim.MetalError, match="3 arguments given, the kernel has buffers"):
        library.scale(torch.zeros(4).half(), torch.zeros(4), 4, threads=4)
    with pytest.raises(metalsim.MetalError, match="Failed to create function state object for: nothing"):
        library.nothing()
    with pytest.raises(ValueError, match="exceeds 64 limit"):
        library.small(torch.zeros(4), threads=128, group_size=128)


def test_a_source_that_does_not_compile_is_a_syntax_error():
    with pytest.raises(SyntaxError, match="undeclared identifier"):
        metalsim.compile_shader("#include <metal_stdlib>\nkernel void k(device float* x [[buffer(0)]]) { x[0] = y; }")


@pytest.mark.parametrize("sources, loaded", [("x[i]", 4 * 64), ("x[i / 2] + x[63]", 2 * 4 * 64), ("1.0f", 0)])
def test_loaded_bytes_are_counted(sources, loaded):
    parameters = "device const float* x [[buffer(0)]], device float* out [[buffer(1)]], uint i [[thread_position_in_grid]]"
    source = f"#include <metal_stdlib>\nkernel void k({parameters}) {{ out[i] = {sources}; }}"
    library = metalsim.compile_shader(source, kind="loads", orders=(0,))
    library.k(torch.zeros(64), torch.zeros(64), threads=64, group_size=32)
    assert library.launches[-1].loaded == [loaded, 0]
