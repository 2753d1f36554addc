"""The naive twin of every operator, in plain torch: the oracle of all tests and the path where no kernel exists.

Same arguments as ``schemas.py``. Written to be checked by eye; float32 throughout.
"""

import torch

from ..layout import BLOCK_LEN, WORD_BITS, num_words, round_up
from .schemas import SCALE_RULES

_EPS = 1e-30


def largest_power_of_two(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def walsh_hadamard(x: torch.Tensor) -> torch.Tensor:
    """Normalised Walsh-Hadamard transform of the last dim, a power of two; its own inverse. ``[..., P]``."""
    size = x.shape[-1]
    half = 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], size // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), -2).reshape(*x.shape)
        half *= 2
    return x * size**-0.5


def mixing_windows(size: int) -> list[slice]:
    """The parts that one mixing round transforms in turn: the first ``P`` coordinates, then the last ``P``, with ``P`` the
    largest power of two that fits; one part, the whole, if the size is a power of two."""
    power = largest_power_of_two(size)
    return [slice(0, power)] if power == size else [slice(0, power), slice(size - power, size)]


def mix(x: torch.Tensor, sign: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """One mixing round: each window in turn is multiplied by its part of ``sign [D]``, then transformed.

    Only the window's coordinates are multiplied: signs on all ``D`` would meet the others twice and cancel.
    """
    x, windows = x.clone(), mixing_windows(x.shape[-1])
    for window in reversed(windows) if inverse else windows:
        part = x[..., window] if inverse else x[..., window] * sign[window]
        part = walsh_hadamard(part)
        x[..., window] = part * sign[window] if inverse else part
    return x


def rotated(x: torch.Tensor, signs: torch.Tensor, blocks: torch.Tensor, matrix: torch.Tensor, inverse: bool = False):
    """``R x`` with ``R = matrix . blocks . mix ... mix``, or ``R^T x``. ``[..., D]`` float32."""
    x = x.float()
    rounds = list(signs.reshape(-1, x.shape[-1])) if signs.numel() else []
    if not inverse:
        for sign in rounds:
            x = mix(x, sign)
        if blocks.numel():
            x = torch.einsum("nij,...nj->...ni", blocks, x.unflatten(-1, (-1, 4))).flatten(-2)
        return x @ matrix.T if matrix.numel() else x
    if matrix.numel():
        x = x @ matrix
    if blocks.numel():
        x = torch.einsum("nij,...ni->...nj", blocks, x.unflatten(-1, (-1, 4))).flatten(-2)
    for sign in reversed(rounds):
        x = mix(x, sign, inverse=True)
    return x


def rotate(x, signs, blocks, matrix, inverse, out) -> None:
    out.copy_(rotated(x, signs, blocks, matrix, inverse))


def _to_words(bits: torch.Tensor) -> torch.Tensor:
    """0/1 of ``[..., 32]`` to int32 words ``[...]``, bit ``b`` from index ``b``."""
    weights = torch.ones(WORD_BITS, dtype=torch.int64, device=bits.device) << torch.arange(WORD_BITS, device=bits.device)
    words = (bits.long() * weights).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _to_bits(words: torch.Tensor) -> torch.Tensor:
    """int32 words ``[...]`` to 0/1 of ``[..., 32]``."""
    return (words.unsqueeze(-1) >> torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)) & 1


def code_planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes ``sign << (bits - 1) | magnitude`` of any shape to planes ``[bits, ...]``: sign first, then magnitude bits."""
    return torch.stack([codes >> (bits - 1), *(codes >> p for p in range(bits - 1))]) & 1


def pack_keys(codes: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[B, H, N, D]`` codes to ``sign [B, H, N, W]`` and ``mag [B, H, N, bits-1, W]``."""
    planes = code_planes(codes, bits)
    missing = num_words(codes.shape[-1]) * WORD_BITS - codes.shape[-1]
    words = _to_words(torch.nn.functional.pad(planes, (0, missing)).unflatten(-1, (-1, WORD_BITS)))
    return words[0], words[1:].movedim(0, -2)


def unpack_keys(sign: torch.Tensor, mag: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The inverse of :func:`pack_keys`: codes ``[B, H, N, D]``."""
    bits = mag.shape[-2] + 1
    planes = _to_bits(torch.cat([sign.unsqueeze(-2), mag], -2)).flatten(-2)[..., :head_dim]
    magnitude = sum(planes[..., 1 + p, :] << p for p in range(bits - 1))
    return planes[..., 0, :] << (bits - 1) | magnitude


def pack_values(codes: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[B, H, N, D]`` codes, ``N`` a multiple of 32, to ``sign [B, H, N/32, D]`` and ``mag [B, H, N/32, bits-1, D]``."""
    planes = code_planes(codes, bits).unflatten(-2, (-1, BLOCK_LEN)).transpose(-1, -2)
    words = _to_words(planes)
    return words[0], words[1:].movedim(0, -2)


def unpack_values(sign: torch.Tensor, mag: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack_values`: codes ``[B, H, N, D]``."""
    bits = mag.shape[-2] + 1
    planes = _to_bits(torch.cat([sign.unsqueeze(-2), mag], -2))  # [B, H, N/32, bits, D, 32]
    magnitude = sum(planes[..., 1 + p, :, :] << p for p in range(bits - 1))
    return (planes[..., 0, :, :] << (bits - 1) | magnitude).transpose(-1, -2).flatten(-3, -2)


def code_values(codes: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Codes to their float32 values ``(-1) ** sign * levels[magnitude]``."""
    half = levels.numel()
    magnitude = levels[(codes % half).long()]
    return torch.where(codes >= half, -magnitude, magnitude)


def quantise(x: torch.Tensor, levels: torch.Tensor, rule: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest codes of ``x [..., D]``, normed to unit variance, and the scale ``[...]`` float16 of the chosen rule.

    With the code values ``Q`` and ``r = |x| / sqrt(D)``: norm ``r``; matched ``|x| / |Q|``; unbiased ``|x|^2 / <x, Q>``
    (EDEN); mse ``<x, Q> / |Q|^2``.
    """
    half = levels.numel()
    norm = x.norm(dim=-1, keepdim=True)
    rms = norm * x.shape[-1] ** -0.5
    unit = x / rms.clamp_min(_EPS)
    magnitude = torch.bucketize(unit.abs().contiguous(), (levels[1:] + levels[:-1]) / 2)
    codes = magnitude + half * (unit < 0)
    value = code_values(codes, levels)
    dot = (unit * value).sum(-1, keepdim=True) * rms
    square = value.square().sum(-1, keepdim=True)
    name = SCALE_RULES[rule]
    if name == "norm":
        scale = rms
    elif name == "matched":
        scale = norm / square.sqrt()
    elif name == "unbiased":
        scale = norm.square() / dot.clamp_min(_EPS)
    else:
        scale = dot / square
    scale = torch.where(norm > 0, scale, 0).clamp_max(torch.finfo(torch.float16).max)
    return codes, scale.squeeze(-1).half()


def encode(x, levels, centre, balance, signs, blocks, matrix, rule, along_tokens, start, sign, mag, scale) -> None:
    x = x.float()
    if centre.numel():
        x = x - centre.unsqueeze(-2)
    if balance.numel():
        x = x / balance.unsqueeze(-2)
    codes, scales = quantise(rotated(x, signs, blocks, matrix), levels, rule)
    bits, tokens = mag.shape[-2] + 1, x.shape[-2]
    scale[..., start : start + tokens] = scales
    if not along_tokens:
        sign[..., start : start + tokens, :], mag[..., start : start + tokens, :, :] = pack_keys(codes, bits)
        return
    first, last = start // BLOCK_LEN, round_up(start + tokens) // BLOCK_LEN
    kept = unpack_values(sign[..., first : first + 1, :], mag[..., first : first + 1, :, :])[..., : start % BLOCK_LEN, :]
    filled = torch.cat([kept, codes], -2)
    missing = (last - first) * BLOCK_LEN - filled.shape[-2]
    filled = torch.nn.functional.pad(filled, (0, 0, 0, missing))
    sign[..., first:last, :], mag[..., first:last, :, :] = pack_values(filled, bits)


def decoded(packed: list[torch.Tensor], along_tokens: bool, start: int, stop: int, head_dim: int) -> torch.Tensor:
    """Tokens ``start .. stop`` of a store as float32 ``[B, H, N, D]``."""
    sign, mag, scale, levels, centre, balance, signs, blocks, matrix = packed
    if along_tokens:
        first, last = start // BLOCK_LEN, round_up(stop) // BLOCK_LEN
        codes = unpack_values(sign[..., first:last, :], mag[..., first:last, :, :])
        codes = codes[..., start - first * BLOCK_LEN : stop - first * BLOCK_LEN, :]
    else:
        codes = unpack_keys(sign[..., start:stop, :], mag[..., start:stop, :, :], head_dim)
    x = code_values(codes, levels) * scale[..., start:stop].float().unsqueeze(-1)
    x = rotated(x, signs, blocks, matrix, inverse=True)
    if balance.numel():
        x = x * balance.unsqueeze(-2)
    return x + centre.unsqueeze(-2) if centre.numel() else x


def decode(packed, along_tokens, start, out) -> None:
    out.copy_(decoded(packed, along_tokens, start, start + out.shape[-2], out.shape[-1]))


def _in_order(exact: torch.Tensor, body: torch.Tensor, num_sinks: int) -> torch.Tensor:
    """Sinks, packed tokens, recent tokens: ``[B, H, T, D]`` float32."""
    exact = exact.float()
    return torch.cat([exact[..., :num_sinks, :], body, exact[..., num_sinks:, :]], -2)


def _all_keys(keys, exact_keys, length, num_sinks):
    return _in_order(exact_keys, decoded(keys, False, 0, length, exact_keys.shape[-1]), num_sinks)


def _all_values(values, exact_values, length, num_sinks):
    return _in_order(exact_values, decoded(values, True, 0, length, exact_values.shape[-1]), num_sinks)


def _grouped(x: torch.Tensor, heads: int) -> torch.Tensor:
    """``[B, G * H, M, D]`` to ``[B, H, G * M, D]`` float32."""
    return x.float().unflatten(1, (heads, -1)).flatten(2, 3)


def qk(q, keys, exact_keys, length, num_sinks, out) -> None:
    every = _all_keys(keys, exact_keys, length, num_sinks)
    out.copy_((_grouped(q, every.shape[1]) @ every.transpose(-1, -2)).reshape(out.shape))


def pv(p, values, exact_values, length, num_sinks, out) -> None:
    every = _all_values(values, exact_values, length, num_sinks)
    out.copy_((_grouped(p, every.shape[1]) @ every).reshape(out.shape))


def attend(
    q, keys, values, exact_keys, exact_values, mask, sink_logits, start, length, num_sinks, scale, softcap, out, lse
) -> None:
    every_key = _all_keys(keys, exact_keys, length, num_sinks)
    every_value = _all_values(values, exact_values, length, num_sinks) if values else every_key
    scores = _grouped(q, every_key.shape[1]) @ every_key.transpose(-1, -2) * scale
    scores = scores.reshape(*q.shape[:3], every_key.shape[2])
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores[..., num_sinks : num_sinks + start] = -torch.inf
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()
    total = scores.logsumexp(-1)
    if sink_logits is not None:
        total = torch.logaddexp(total, sink_logits.float()[:, None])
    weights = torch.exp(scores - torch.where(total == -torch.inf, 0, total).unsqueeze(-1))
    lse.copy_(total)
    out.copy_((_grouped(weights, every_value.shape[1]) @ every_value).reshape(out.shape))


def merge(outs, lses, out, lse) -> None:
    total = lses.logsumexp(0)
    weights = torch.exp(lses - torch.where(total == -torch.inf, 0, total)).unsqueeze(-1)
    lse.copy_(total)
    out.copy_(torch.where(weights == 0, 0, outs.float() * weights).sum(0))
