"""merge: attention over the union of pieces, one thread a coordinate."""

import torch

from . import library
from .checks import require, require_dense, require_typed
from .library import NUM_THREADS
from .plan import ceil_div


def merge(outs, lses, out, lse) -> None:
    require(outs.dim() == 5, "outs", "have 5 dims", outs)
    device = outs.device
    require_dense("outs", outs, tuple(outs.shape), device)
    require_typed("lses", lses, torch.float32, tuple(outs.shape[:4]), device)
    require_dense("out", out, tuple(outs.shape[1:]), device)
    require_typed("lse", lse, torch.float32, tuple(outs.shape[1:4]), device)
    pieces, *size, dim = outs.shape
    rows = size[0] * size[1] * size[2]
    shader = library.shaders.get("merge", ("merge.metal",), In=outs.dtype, Out=out.dtype)
    sizes = dict(pieces=pieces, rows=rows, dim=dim, size=size, outs=outs.stride()[:4], lses=lses.stride())
    sizes |= dict(out=out.stride()[:3], lse=lse.stride())
    groups = (ceil_div(dim, NUM_THREADS), rows)
    shader.launch(groups, sizes, device, outs=outs, lses=lses, out=out, lse=lse)
