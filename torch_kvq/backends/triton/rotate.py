"""rotate: out = R x or R^T x for every vector of x [..., D]. A program takes 16 vectors."""

import triton
import triton.language as tl

from . import checks, plan, stores
from .rotation import CHUNK, add_product, options

_ROWS = 16


# Sizes that are not worth a compilation of their own.
_SIZES = "middle inner total".split()


@triton.jit(do_not_specialize=_SIZES)
def _rotate(
    x, x_outer, x_middle, x_inner, out, out_outer, out_middle, out_inner, matrix, middle, inner, total,
    DIM: tl.constexpr, WIDTH: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = index < total
    i, j, k = index // inner // middle, index // inner % middle, index % inner
    start = x + i * x_outer + j * x_middle + k * x_inner
    columns = tl.arange(0, WIDTH)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(0, DIM, CHUNK):
        chunk = first + tl.arange(0, CHUNK)
        part = tl.load(start[:, None] + chunk[None, :], inside[:, None] & (chunk < DIM)[None, :], 0.0)
        acc = add_product(acc, part.to(tl.float32), matrix, chunk, columns, DIM, INVERSE)
    tl.debug_barrier()  # out may be x: every warp has read its vectors
    place = out + i * out_outer + j * out_middle + k * out_inner
    mask = inside[:, None] & (columns < DIM)[None, :]
    tl.store(place[:, None] + columns[None, :], acc.to(out.dtype.element_ty), mask)


def _merged(sizes, *strides) -> list[tuple[int, ...]]:
    """Leading dims as ``(size, stride, stride)``, neighbours merged where both tensors allow it."""
    dims: list[tuple[int, ...]] = []
    for size, *steps in zip(sizes, *strides):
        if size == 1:
            continue
        if dims and all(outer == size * step for outer, step in zip(dims[-1][1:], steps)):
            dims[-1] = (dims[-1][0] * size, *steps)
        else:
            dims.append((size, *steps))
    return dims


def rotate(x, signs, blocks, matrix, inverse, out) -> None:
    """Launches ``torch_kvq::rotate`` (``ops/schemas.py``)."""
    checks.require(x.dim() > 0, "x", "have a last dim", x)
    for name, tensor in (("x", x), ("out", out)):
        checks.require_floats(name, tensor)
        checks.require_shape(name, tensor, tuple(x.shape), x.device)
        checks.require_inner(name, tensor, 1)
    dim = x.shape[-1]
    rotation = stores.dense((signs, blocks, matrix), dim, x.device)
    if not x.numel():
        return
    dims = _merged(x.shape[:-1], x.stride()[:-1], out.stride()[:-1])
    if len(dims) > 3:
        for part, turned in zip(x.unbind(0), out.unbind(0)):
            rotate(part, signs, blocks, matrix, inverse, turned)
        return
    (_, *outer), (middle, *between), (inner, *steps) = [(1, 0, 0)] * (3 - len(dims)) + dims
    total, width = x.numel() // dim, plan.padded(dim)
    with plan.on_device(x):
        _rotate[(triton.cdiv(total, _ROWS),)](
            x, outer[0], between[0], steps[0], out, outer[1], between[1], steps[1], rotation,
            middle, inner, total, DIM=dim, WIDTH=width, INVERSE=inverse, ROWS=_ROWS, **options(width),
        )  # fmt: skip
