"""Products of tiles with the matrix of a rotation, in three TF32 passes: as good as float32."""

import triton
import triton.language as tl

CHUNK = tl.constexpr(32)  # coordinates of one step of a product


def options(width: int) -> dict[str, int]:
    """Warps and stages of kernels that multiply tiles of ``width`` coordinates: no spilt registers, under 100 KB a program."""
    return {"num_warps": 4 if width <= 128 else 8, "num_stages": 2 if width <= 256 else 1}


@triton.jit
def add_product(acc, x, matrix, chunk, columns, dim, INVERSE: tl.constexpr):
    """``acc [X, Y] + x @ R^T`` or, inverse, ``x @ R``, of coordinates ``chunk [CHUNK]`` of ``x [X, CHUNK]`` alone.

    ``columns [Y]`` are the coordinates of the result.
    """
    across, down = columns[None, :], chunk[:, None]
    where = down * dim + across if INVERSE else across * dim + down
    part = tl.load(matrix + where, (across < dim) & (down < dim), 0.0)
    return tl.dot(x, part, acc, input_precision="tf32x3")
