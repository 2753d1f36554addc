"""rotate, encode, decode: vectors of one head each, one simdgroup a vector."""

from ...layout import BLOCK_LEN, round_up
from ...ops import problems
from ...ops.reference import largest_power_of_two
from . import Unserved, library, require_served
from .plan import NUM_SIMDS, ceil_div

ROTATION = ("rotation.metal",)


def dims(dim: int) -> dict[str, int]:
    """What ``rotation.metal`` is compiled for."""
    return dict(kDim=dim, kPower=largest_power_of_two(dim))


def rotate(x, signs, blocks, matrix, inverse, out) -> None:
    rotation, dim = problems.rotate(x, signs, blocks, matrix, inverse, out), x.shape[-1]
    if x.dim() > 4:
        raise Unserved(f"vectors in {x.dim()} dims")
    require_served(dim)
    x, out = (part[(None,) * (4 - part.dim())] for part in (x, out))
    rows = x.shape[:3].numel()
    shader = library.shaders.get("rotate_rows", (*ROTATION, "rotate.metal"), In=x.dtype, Out=out.dtype, **dims(dim))
    sizes = dict(rows=rows, size=x.shape[:3], x=x.stride()[:3], out=out.stride()[:3], inverse=inverse, **rotation.sizes)
    shader.launch((ceil_div(rows, NUM_SIMDS),), sizes, x.device, x=x, out=out, **rotation.tensors)


def encode(x, levels, centre, balance, signs, blocks, matrix, rule, along_tokens, start, sign, mag, scale) -> None:
    store = problems.encode(
        x, levels, centre, balance, signs, blocks, matrix, rule, along_tokens, start, sign, mag, scale
    )  # fmt: skip
    batch, heads, tokens, dim = x.shape
    require_served(dim)
    name = "encode_values" if along_tokens else "encode_keys"
    files = (*ROTATION, "quantise.metal", "encode.metal")
    shader = library.shaders.get(name, files, In=x.dtype, **dims(dim), kBits=store.bits)
    sizes = dict(heads=heads, tokens=tokens, start=start, rule=rule, x=x.stride()[:3], **store.sizes)
    sizes |= store.statistics.sizes | store.rotation.sizes
    first, last = start // BLOCK_LEN, round_up(start + tokens) // BLOCK_LEN
    groups = (last - first) * bool(tokens) if along_tokens else ceil_div(tokens, NUM_SIMDS)
    tensors = store.tensors | store.statistics.tensors | store.rotation.tensors
    shader.launch((groups, heads, batch), sizes, x.device, x=x, levels=levels, **tensors)


def decode(packed, along_tokens, start, out) -> None:
    store, device = problems.decode(packed, along_tokens, start, out), out.device
    batch, heads, tokens, dim = out.shape
    require_served(dim)
    files = (*ROTATION, "decode.metal")
    shader = library.shaders.get("decode", files, Out=out.dtype, **dims(dim), kBits=store.bits)
    sizes = dict(heads=heads, tokens=tokens, start=start, along_tokens=along_tokens, out=out.stride()[:3], **store.sizes)
    sizes |= store.statistics.sizes | store.rotation.sizes
    tensors = store.tensors | store.statistics.tensors | store.rotation.tensors
    shader.launch((ceil_div(tokens, NUM_SIMDS), heads, batch), sizes, device, levels=store.levels, out=out, **tensors)
