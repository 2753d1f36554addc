"""Checks of rotate, encode, decode and merge on any device, against the reference on the CPU: what the emulator and a GPU
both run."""

import torch
from cuda_host.attend_checks import fenced_on, moved
from op_cases import check_fences, encode, make_store, relative_error

from torch_kvq.codecs.rotation import make_rotation
from torch_kvq.ops import reference

TOLERANCE = 1e-5
CODES_TOLERANCE = 1e-4  # share of coordinates that may get the code next to the reference's
RAGGED = ((0, 1), (1, 33), (33, 64), (64, 64), (64, 101))  # pieces that begin and end inside words
BLOCKS = ((0, 16), (16, 32), (32, 48))

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


def same_codes(ours, theirs, along_tokens, dim, tokens):
    """Where the codes of the first ``tokens`` tokens agree; scales, and all words behind, must be the reference's."""
    agree = codes(ours, along_tokens, dim) == codes(theirs, along_tokens, dim)
    behind = -(-tokens // 32) * 32 if along_tokens else tokens
    assert agree[:, :, behind:].all(), "written behind the last token"
    agree = agree[:, :, :tokens]
    assert torch.equal(ours[2].isnan(), theirs[2].isnan()), "a scale was not written or one too many"
    steps = (ours[2][:, :, :tokens].view(torch.int16).int() - theirs[2][:, :, :tokens].view(torch.int16).int()).abs()
    assert not (steps[agree.all(-1)] > 1).any(), "scales differ by more than one unit in the last place"
    return agree


def encode_both(ops, device, x, bits, along_tokens, kind, rule, plain, pieces):
    """Stores of ``x`` from the operator and from the reference, whose unused capacity is the same junk."""
    parts = dict(kind=kind, centre=not plain, balance=not plain, fill=False)
    theirs = make_store(x, bits, along_tokens, **parts)
    ours = moved([part.clone() for part in theirs], device)
    for first, last in pieces:
        piece = x[:, :, first:last].transpose(1, 2).contiguous().transpose(1, 2)
        encode(ops.encode, *moved((piece,), device), ours, along_tokens, first, rule=rule)
        encode(reference.encode, piece, theirs, along_tokens, first, rule=rule)
    return [part.cpu() for part in ours], theirs


def check_encode(ops, device, dim, kind, bits, along_tokens, rule, dtype, plain=False, pieces=RAGGED):
    tokens = pieces[-1][1]
    x = torch.randn(2, 3, tokens, dim, generator=torch.Generator().manual_seed(dim + bits)).to(dtype)
    ours, theirs = encode_both(ops, device, x, bits, along_tokens, kind, rule, plain, pieces)
    agree = same_codes(ours, theirs, along_tokens, dim, tokens)
    assert (~agree).sum() <= max(1, CODES_TOLERANCE * agree.numel())


def check_encode_of_any_magnitude(ops, device, dim, along_tokens, dtype):
    """Vectors of norms from 1e-6 to 1e6, those of float16 from 1e-3 to 1e3, next to each other: codes do not depend on it."""
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(2, 3, 80, dim, generator=generator)
    decades = 3 if dtype == torch.float16 else 6
    x = (x * 10 ** (decades * (2 * torch.rand(2, 3, 80, 1, generator=generator) - 1))).to(dtype)
    ours, theirs = encode_both(ops, device, x, 3, along_tokens, "isoquant", "mse", True, ((0, 80),))
    agree = same_codes(ours, theirs, along_tokens, dim, 80)
    assert (~agree).sum() <= max(1, CODES_TOLERANCE * agree.numel())


def check_encode_of_odd_vectors(ops, device, dim, along_tokens, rule, dtype):
    """Zeros, tiny, huge and one-hot vectors, and a NaN and an infinity that must stay in their vectors."""
    x = torch.randn(1, 2, 70, dim, generator=torch.Generator().manual_seed(3))
    x[:, :, 3], x[:, :, 4], x[:, :, 5] = 0, x[:, :, 4] * 1e-40, x[:, :, 5] * 1e4
    x[:, :, 6] = torch.nn.functional.one_hot(torch.tensor(2), dim)
    x[0, 0, 7, 1], x[0, 1, 8, 2] = torch.nan, torch.inf
    x = x.to(dtype)
    ours, theirs = encode_both(ops, device, x, 3, along_tokens, "isoquant", rule, True, ((0, 70),))
    one_hot, bad = torch.tensor([6]), torch.zeros(1, 2, 70, dtype=torch.bool)  # one-hot: all coordinates at one edge
    bad[0, 0, 7] = bad[0, 1, 8] = True
    agree = codes(ours, along_tokens, dim)[:, :, :70] == codes(theirs, along_tokens, dim)[:, :, :70]
    agree[bad], agree[:, :, one_hot] = True, True
    assert (~agree).sum() <= 1
    scales = ours[2][:, :, :70]
    assert not scales.isnan().any() and (scales[0, 0, 7] == 0) and (scales[:, :, 3] == 0).all()
    wanted = reference.decoded(theirs, along_tokens, 0, 70, dim)
    assert relative_error(reference.decoded(ours, along_tokens, 0, 70, dim)[~bad], wanted[~bad]) <= 1e-3


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
