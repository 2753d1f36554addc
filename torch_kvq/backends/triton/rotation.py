"""Products of tiles with the matrix of a rotation: of one row in float32, of more in three TF32 passes, which is as good."""

import triton
import triton.language as tl

FEW_ROWS = 512
CHUNK = tl.constexpr(32)  # coordinates of one step of a product


def options(width: int) -> dict[str, int]:
    """Warps and stages of kernels that multiply tiles of ``width`` coordinates: no spilt registers, under 100 KB a program."""
    return {"num_warps": 4 if width <= 128 else 8, "num_stages": 2 if width <= 256 else 1}


def rows_of(total: int, width: int) -> dict[str, int]:
    """Rows of a program and coordinates of one step for ``total`` rows: one row a program, as long as all of them do not load
    the matrix more often than there are multiprocessors to wait for it; its warps then load most of it at once."""
    if total <= FEW_ROWS:
        return dict(ROWS=1, CHUNK=max(32, min(width, 16384 // width)), num_warps=8)
    return dict(ROWS=16, CHUNK=32, **options(width))


@triton.jit
def add_product(acc, x, matrix, chunk, columns, dim, INVERSE: tl.constexpr):
    """``acc [X, Y] + x @ R^T`` or, inverse, ``x @ R``, of coordinates ``chunk [C]`` of ``x [X, C]`` alone.

    ``columns [Y]`` are the coordinates of the result.
    """
    across, down = columns[None, :], chunk[:, None]
    where = down * dim + across if INVERSE else across * dim + down
    part = tl.load(matrix + where, (across < dim) & (down < dim), 0.0)
    if x.shape[0] == 1:
        acc += tl.sum(tl.trans(x) * part, 0)[None, :]
    else:
        acc = tl.dot(x, part, acc, input_precision="tf32x3")
    return acc
