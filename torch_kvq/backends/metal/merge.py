"""merge: attention over the union of pieces, one thread a coordinate."""

from ...ops import problems
from . import library
from .library import NUM_THREADS
from .plan import ceil_div


def merge(outs, lses, out, lse) -> None:
    problems.merge(outs, lses, out, lse)
    pieces, *size, dim = outs.shape
    rows = size[0] * size[1] * size[2]
    shader = library.shaders.get("merge", ("merge.metal",), In=outs.dtype, Out=out.dtype)
    sizes = dict(pieces=pieces, rows=rows, dim=dim, size=size, outs=outs.stride()[:4], lses=lses.stride())
    sizes |= dict(out=out.stride()[:3], lse=lse.stride())
    groups = (ceil_div(dim, NUM_THREADS), rows)
    shader.launch(groups, sizes, outs.device, outs=outs, lses=lses, out=out, lse=lse)
