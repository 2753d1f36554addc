"""Checks of rotate, encode, decode and merge on any device, against the reference on the CPU: what the emulator and a GPU
both run."""

import torch
from cuda_host.attend_checks import fenced_on, moved
from op_cases import check_fences, encode, make_store, relative_error

from torch_kvq.codecs.rotation import make_rotation
from torch_kvq.ops import reference
from torch_kvq.ops.schemas import SCALE_RULES

TOLERANCE = 1e-5
CODES_TOLERANCE = 1e-4  # share of coordinates that may get the code next to the reference's
HALF_CODES_TOLERANCE = 2e-3  # the same of kernels that round coordinates to float16
EDGE_TOLERANCE = 2**-8  # root mean squares of a vector between a coordinate and the edge of its code, if that differs
RAGGED = ((0, 1), (1, 33), (33, 64), (64, 64), (64, 101))  # pieces that begin and end inside words
BLOCKS = ((0, 16), (16, 32), (32, 48))
TURNS = ((0, 5), (5, 730), (730, 763), (763, 1100))  # of which warps take several in turn, where there is room for few

# Keys and values that CUDA kernels encode one after the other: head dims, bits, rotation, dtype, values without statistics.
APART = [
    ((128, 64), (3, 3), "isoquant", torch.bfloat16, True),
    ((128, 128), (3, 2), "isoquant", torch.bfloat16, True),
    ((128, 128), (3, 3), "hadamard2", torch.float16, True),
    ((64, 64), (3, 3), "isoquant", torch.bfloat16, False),
    ((64, 64), (3, 3), "isoquant", torch.float32, True),
    ((80, 12), (4, 3), "isoquant", torch.bfloat16, True),
]

# (head dim, rotation): those with kernels on tensor cores for 16-bit vectors, then others.
CODECS = [
    *((dim, kind) for dim in (64, 128, 256) for kind in ("isoquant", "hadamard")),
    *((dim, "isoquant") for dim in (4, 12, 36, 80, 96, 192, 512)),
    *((64, kind) for kind in ("hadamard2", "dense", "so4", "none")),
]


def check_rotate(ops, device, dim, kind, dtype=torch.float32):
    x = torch.randn(3, dim, 37, generator=torch.Generator().manual_seed(dim)).to(dtype)
    x = x.transpose(1, 2).contiguous()[:, 1:]
    parts = make_rotation(kind, dim).tensors()
    for inverse in (False, True):
        out, whole = fenced_on(device, x.shape)
        ops.rotate(*moved((x, *parts), device), inverse, out)
        check_fences(whole.cpu())
        assert relative_error(out.cpu(), reference.rotated(x, *parts, inverse)) <= TOLERANCE
    (back,) = moved((out.clone(),), device)
    ops.rotate(back, *moved(parts, device), False, back)  # in place
    assert relative_error(back.cpu(), x.float()) <= TOLERANCE


def codes(store, along_tokens, dim):
    sign, mag = store[:2]
    return reference.unpack_values(sign, mag) if along_tokens else reference.unpack_keys(sign, mag, dim)


def rounds_to_half(dim, kind, along_tokens, dtype, plain):
    """Whether the CUDA kernels on tensor cores take vectors, whose coordinates are float16 from the first products on."""
    half = dtype in (torch.bfloat16, torch.float16)
    return half and dim in (64, 128, 256) and kind in ("isoquant", "hadamard") and (plain or not along_tokens)


def order(codes, bits):
    """Codes as numbers that grow with what they stand for: 0 is the smallest positive level."""
    magnitude = codes.long() & ((1 << (bits - 1)) - 1)
    return torch.where(codes.long() >> (bits - 1) & 1 == 1, -1 - magnitude, magnitude)


def distances_to_edges(x, theirs, ours_order, theirs_order, along_tokens):
    """Of coordinates whose codes differ, how far they are from the edge between both, in root mean squares of the vector.

    Rounding to float16 moves a coordinate by some 2^-11 of the largest of its block of four, and a code only where that
    crosses an edge: there both levels are equally far, so that the reconstruction is as good.
    """
    levels, centre, balance, *rotation = theirs[3:]
    levels, x = levels.double(), x.double()
    x = x - centre.unsqueeze(-2) if centre.numel() else x
    x = x / balance.unsqueeze(-2) if balance.numel() else x
    x = reference.rotated(x.float(), *rotation).double()
    units = x / x.square().mean(-1, keepdim=True).sqrt()
    above = (levels[1:] + levels[:-1]) / 2
    edges = torch.cat([-above.flip(0), torch.zeros(1, dtype=torch.float64), above])
    lower = torch.minimum(ours_order, theirs_order) + len(levels)
    return (units - edges[lower.clamp_max(len(edges) - 1)]).abs()[ours_order != theirs_order]


def same_codes(ours, theirs, along_tokens, x, tokens, half=False):
    """Where the codes of the first ``tokens`` tokens agree; scales, and all words behind, must be the reference's.

    ``half``: the kernels round coordinates to float16, so codes may be next to the reference's where they are at an edge.
    """
    dim, bits = x.shape[-1], theirs[1].shape[-2] + 1
    our_codes, their_codes = codes(ours, along_tokens, dim), codes(theirs, along_tokens, dim)
    agree = our_codes == their_codes
    behind = -(-tokens // 32) * 32 if along_tokens else tokens
    assert agree[:, :, behind:].all(), "written behind the last token"
    agree = agree[:, :, :tokens]
    if half:
        ranks = [order(c[:, :, :tokens], bits) for c in (our_codes, their_codes)]
        assert ((ranks[0] - ranks[1]).abs() <= 1).all(), "codes that are not neighbours"
        assert (distances_to_edges(x, theirs, *ranks, along_tokens) <= EDGE_TOLERANCE).all(), "a code far from its edge"
    assert torch.equal(ours[2].isnan(), theirs[2].isnan()), "a scale was not written or one too many"
    steps = (ours[2][:, :, :tokens].view(torch.int16).int() - theirs[2][:, :, :tokens].view(torch.int16).int()).abs()
    assert not (steps[agree.all(-1)] > 1).any(), "scales differ by more than one unit in the last place"
    assert (~agree).sum() <= max(1, (HALF_CODES_TOLERANCE if half else CODES_TOLERANCE) * agree.numel())
    return agree


def encode_both(ops, device, x, bits, along_tokens, kind, rule, plain, pieces, centre=None):
    """Stores of ``x`` from the operator and from the reference, whose unused capacity is the same junk."""
    parts = dict(kind=kind, centre=not plain, balance=not plain, fill=False)
    theirs = make_store(x, bits, along_tokens, **parts)
    theirs[4] = theirs[4] if centre is None else centre
    ours = moved([part.clone() for part in theirs], device)
    for first, last in pieces:
        piece = x[:, :, first:last].transpose(1, 2).contiguous().transpose(1, 2)
        encode(ops.encode, *moved((piece,), device), ours, along_tokens, first, rule=rule)
        encode(reference.encode, piece, theirs, along_tokens, first, rule=rule)
    return [part.cpu() for part in ours], theirs


def check_encode(ops, device, dim, kind, bits, along_tokens, rule, dtype, plain=False, pieces=RAGGED, exact=False):
    """``exact``: no kernel of ``ops`` rounds coordinates to float16."""
    tokens = pieces[-1][1]
    x = torch.randn(2, 3, tokens, dim, generator=torch.Generator().manual_seed(dim + bits)).to(dtype)
    ours, theirs = encode_both(ops, device, x, bits, along_tokens, kind, rule, plain, pieces)
    half = not exact and rounds_to_half(dim, kind, along_tokens, dtype, plain)
    agree = same_codes(ours, theirs, along_tokens, x, tokens, half)
    if agree.numel() > 1e6:  # enough for codes at edges to be as good on average
        losses = [(reference.decoded(s, along_tokens, 0, tokens, dim).double() - x).square().sum() for s in (ours, theirs)]
        assert losses[0] / losses[1] - 1 <= 2e-4


def check_encode_kv(ops, device, dims, bits, kind, dtype, heads=3, pieces=RAGGED, rules=("unbiased", "mse"), plain=True):
    """Keys and values at once are what they are one after the other, bit for bit, and nothing else is written."""
    generator = torch.Generator().manual_seed(sum(dims))
    kv = [torch.randn(2, heads, pieces[-1][1], dim, generator=generator).to(dtype) for dim in dims]
    apart, at_once = [], []
    for x, each, along_tokens in zip(kv, bits, (False, True)):
        learnt = not (plain and along_tokens)
        store = make_store(x, each, along_tokens, kind=kind, centre=learnt, balance=learnt, fill=False)
        apart.append(moved(store, device))
        at_once.append(moved([part.clone() for part in store], device))
    rules = [SCALE_RULES.index(rule) for rule in rules]
    for first, last in pieces:
        new = moved([x[:, :, first:last] for x in kv], device)
        for x, store, rule, along_tokens in zip(new, apart, rules, (False, True)):
            ops.encode(x, *store[3:], rule, along_tokens, first, *store[:3])
        ops.encode_kv(*new, *(store[3:] for store in at_once), *rules, first, *at_once[0][:3], *at_once[1][:3])
    for ours, theirs in zip(at_once, apart):
        for x, y in zip(ours[:3], theirs[:3]):
            bits_of = torch.int16 if x.element_size() == 2 else torch.int32
            assert torch.equal(x.view(bits_of).cpu(), y.view(bits_of).cpu())


def check_encode_beside_a_large_centre(ops, device, dim, dtype):
    """Keys whose channels lie up to hundreds of their own spread from zero: their difference is what is coded."""
    generator = torch.Generator().manual_seed(dim)
    centre = 100 * torch.randn(2, 3, dim, generator=generator)
    x = (centre.unsqueeze(-2) + torch.randn(2, 3, 80, dim, generator=generator)).to(dtype)
    ours, theirs = encode_both(ops, device, x, 3, False, "isoquant", "unbiased", False, ((0, 80),), centre)
    same_codes(ours, theirs, False, x, 80, rounds_to_half(dim, "isoquant", False, dtype, False))


def check_encode_of_any_magnitude(ops, device, dim, along_tokens, dtype, exact=False):
    """Vectors of norms from 1e-6 to 1e6, some from 1e-18 to 1e17, those of float16 from 1e-3 to 1e3, next to each other:
    codes do not depend on it. A power of two, though squares are out of float32, changes none."""
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(2, 3, 80, dim, generator=generator)
    decades = 3 if dtype == torch.float16 else 6
    x = x * 10 ** (decades * (2 * torch.rand(2, 3, 80, 1, generator=generator) - 1))
    if dtype != torch.float16:
        x[:, :, 7], x[:, :, 40] = 1e11 * x[:, :, 7], 1e-12 * x[:, :, 40]
        x[:, :, [33, 50]] = torch.randn(2, 3, 2, dim, generator=generator)
    x = x.to(dtype)
    half = not exact and rounds_to_half(dim, "isoquant", along_tokens, dtype, True)
    ours, theirs = encode_both(ops, device, x, 3, along_tokens, "isoquant", "mse", True, ((0, 80),))
    same_codes(ours, theirs, along_tokens, x, 80, half)
    if half and dtype != torch.float16:
        x[:, :, 33], x[:, :, 50] = 2.0**90 * x[:, :, 33], 2.0**-90 * x[:, :, 50]
        moved_codes = codes(
            encode_both(ops, device, x, 3, along_tokens, "isoquant", "mse", True, ((0, 80),))[0], along_tokens, dim
        )
        assert torch.equal(moved_codes[:, :, :80], codes(ours, along_tokens, dim)[:, :, :80])


def check_encode_of_odd_vectors(ops, device, dim, along_tokens, rule, dtype, exact=False):
    """Zeros, tiny, huge and one-hot vectors, and a NaN and an infinity that must stay in their vectors."""
    x = torch.randn(1, 2, 70, dim, generator=torch.Generator().manual_seed(3))
    x[:, :, 3], x[:, :, 4], x[:, :, 5] = 0, x[:, :, 4] * 1e-40, x[:, :, 5] * 1e4
    x[:, :, 6] = torch.nn.functional.one_hot(torch.tensor(2), dim)
    x[0, 0, 7, 1], x[0, 1, 8, 2] = torch.nan, torch.inf
    x = x.to(dtype)
    ours, theirs = encode_both(ops, device, x, 3, along_tokens, "isoquant", rule, True, ((0, 70),))
    # One-hot: all coordinates at one edge. Codes of a vector so small that its scale is zero mean nothing.
    one_hot, bad = torch.tensor([6]), (ours[2][:, :, :70] == 0) & (theirs[2][:, :, :70] == 0)
    bad[0, 0, 7] = bad[0, 1, 8] = True
    agree = codes(ours, along_tokens, dim)[:, :, :70] == codes(theirs, along_tokens, dim)[:, :, :70]
    agree[bad], agree[:, :, one_hot] = True, True
    half = not exact and rounds_to_half(dim, "isoquant", along_tokens, dtype, True)
    assert (~agree).sum() <= (HALF_CODES_TOLERANCE * agree.numel() if half else 1)
    scales = ours[2][:, :, :70]
    assert not scales.isnan().any() and (scales[0, 0, 7] == 0) and (scales[:, :, 3] == 0).all()
    same = ~bad & agree.all(-1)
    wanted = reference.decoded(theirs, along_tokens, 0, 70, dim)
    assert relative_error(reference.decoded(ours, along_tokens, 0, 70, dim)[same], wanted[same]) <= 1e-3


def check_decode(ops, device, dim, kind, bits, along_tokens, dtype=torch.float32, plain=False):
    x = torch.randn(2, 3, 101, dim, generator=torch.Generator().manual_seed(dim))
    store = make_store(x, bits, along_tokens, kind, centre=not plain, balance=not plain)
    for first, last in ((0, 101), (37, 70), (5, 5), (100, 101)):
        out, whole = fenced_on(device, (2, 3, last - first, dim), dtype)
        ops.decode(*moved((store,), device), along_tokens, first, out)
        check_fences(whole.cpu())
        wanted = reference.decoded(store, along_tokens, first, last, dim)
        assert relative_error(out.cpu(), wanted) <= max(TOLERANCE, torch.finfo(dtype).eps)


def check_merge(ops, device, dtype, dim=80):
    generator = torch.Generator().manual_seed(1)
    outs = torch.randn(3, 2, 4, 5, dim, generator=generator).to(dtype)
    lses = 5 * torch.randn(3, 2, 4, 5, generator=generator)
    lses[0, 0], lses[:, 1, 1] = -torch.inf, -torch.inf
    expected, expected_lse = torch.empty(2, 4, 5, dim), torch.empty(2, 4, 5)
    reference.merge(outs, lses, expected, expected_lse)
    outs[0, 0], outs[:, 1, 1] = torch.nan, torch.nan  # without a share
    (out, whole), (lse, whole_lse) = fenced_on(device, expected.shape), fenced_on(device, expected_lse.shape)
    ops.merge(*moved((outs, lses), device), out, lse)
    check_fences(whole.cpu(), whole_lse.cpu())
    assert relative_error(out.cpu(), expected) <= TOLERANCE
    assert torch.allclose(lse.cpu(), expected_lse, rtol=1e-6, atol=1e-6)
