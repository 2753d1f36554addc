"""The naive twin of the operators of sparse attention, as ``reference.py`` is of the others.

The estimate (RaBitQCache, equation 4): for a rotated key ``y`` and query ``z``, ``<z, y>`` is about ``<z, sign(y)> |y|^2 / sum
|y_i|``, unbiased over random rotations; ``z`` is coded in 4 bits (equation 5), so that ``<z, sign(y)>`` takes popcounts.
"""

import torch

from ..layout import WORD_BITS, num_words
from .reference import _grouped, _to_bits, _to_words, decoded, rotated

QUERY_BITS = 4
_TOP_CODE = (1 << QUERY_BITS) - 1
_HALF_MAX = torch.finfo(torch.float16).max


def _per_query_head(x: torch.Tensor, query_heads: int) -> torch.Tensor:
    """``[B, H, D]`` to ``[B, Hq, 1, D]``."""
    return x.repeat_interleave(query_heads // x.shape[1], 1).unsqueeze(-2)


def quantise_query(q, query_centre, centre, balance, signs, blocks, matrix, scale, planes, terms) -> None:
    q, heads, dim = q.float(), q.shape[1], q.shape[-1]
    y = q - _per_query_head(query_centre, heads) if query_centre.numel() else q
    y = y * _per_query_head(balance, heads) if balance.numel() else y
    y = rotated(y, signs, blocks, matrix)
    low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
    delta = (high - low) / _TOP_CODE
    codes = torch.where(delta > 0, torch.round((y - low) / delta), 0).clamp(0, _TOP_CODE).int()
    base = (q * _per_query_head(centre, heads)).sum(-1, keepdim=True) if centre.numel() else torch.zeros_like(low)
    joined = torch.cat([scale * delta, scale * low, codes.sum(-1, keepdim=True).float(), scale * base], -1)
    finite = y.isfinite().all(-1, keepdim=True) & base.isfinite()
    terms.copy_(torch.where(finite, joined, torch.nan))
    bits = torch.stack([codes >> j & 1 for j in range(QUERY_BITS)], -2) * finite.unsqueeze(-1)
    planes.copy_(
        _to_words(torch.nn.functional.pad(bits, (0, planes.shape[-1] * WORD_BITS - dim)).unflatten(-1, (-1, WORD_BITS)))
    )


def index_keys(x, query_centre, centre, balance, signs, blocks, matrix, start, sign, factor, bias) -> None:
    x, stop = x.float(), start + x.shape[-2]
    x = x - centre.unsqueeze(-2) if centre.numel() else x
    if query_centre.numel():
        bias[..., start:stop] = (x * query_centre.unsqueeze(-2)).sum(-1).clamp(-_HALF_MAX, _HALF_MAX)
    y = rotated(x / balance.unsqueeze(-2) if balance.numel() else x, signs, blocks, matrix)
    total = y.abs().sum(-1)
    factor[..., start:stop] = torch.where(total > 0, y.square().sum(-1) / total, 0).clamp_max(_HALF_MAX)
    if sign.numel():
        missing = num_words(y.shape[-1]) * WORD_BITS - y.shape[-1]
        sign[..., start:stop, :] = _to_words(torch.nn.functional.pad(y < 0, (0, missing)).unflatten(-1, (-1, WORD_BITS)))


def _inner_products(planes: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    """``sum_j 2^j popcount(planes[j] & sign)``, ``[B, Hq, M, N]`` float32, exact, of ``planes [B, Hq, M, 4, W]``."""
    weights = 2.0 ** torch.arange(QUERY_BITS, device=planes.device)
    codes = (_to_bits(planes).flatten(-2).float() * weights[:, None]).sum(-2)
    bits = _to_bits(sign).flatten(-2).float()
    return (_grouped(codes, sign.shape[1]) @ bits.transpose(-1, -2)).reshape(*planes.shape[:3], bits.shape[-2])


def sign_scores(planes, terms, sign, factor, bias, head_dim, scale, start, out) -> None:
    if not out.numel():
        return
    stop, group = start + out.shape[-1], planes.shape[1] // sign.shape[1]
    sign = sign[:, :, start:stop]
    delta, low, total, base = terms.unsqueeze(-2).unbind(-1)
    negative = _to_bits(sign).sum((-2, -1)).float().repeat_interleave(group, 1).unsqueeze(2)
    factor, bias = (
        x[..., start:stop].float().repeat_interleave(group, 1).unsqueeze(2) if x.numel() else x for x in (factor, bias)
    )
    score = (low * (head_dim - 2 * negative) + delta * (total - 2 * _inner_products(planes, sign))) * factor
    score = score + scale * bias if bias.numel() else score
    out.copy_(score + base)


def _kept(scores: torch.Tensor, exact_lse: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[..., L]``: which tokens each keeps, and the logarithm of their shares (inf where a score is no number)."""
    unknown = scores.isnan() | (scores == torch.inf)
    known = scores.masked_fill(unknown, -torch.inf).double()
    exact = exact_lse.double().unsqueeze(-1)
    total = torch.logaddexp(known.logsumexp(-1, keepdim=True), exact)
    total = torch.where(total == -torch.inf, 0, total)
    ordered = known.sort(-1, descending=True).values
    share = torch.exp(exact - total)
    reached = share + torch.exp(ordered - total).cumsum(-1) >= top_p
    crossing = torch.where(reached.any(-1), reached.int().argmax(-1), reached.shape[-1] - 1).unsqueeze(-1)
    kept = known > -torch.inf
    if top_p < 1:
        kept = kept & (known >= ordered.gather(-1, crossing)) & (share < top_p)
    return kept | unknown, (known - total).float().masked_fill(unknown, torch.inf)


def _masked(scores: torch.Tensor, mask: torch.Tensor | None, candidates: torch.Tensor | None) -> torch.Tensor:
    if mask is None:
        return scores
    if candidates is not None:
        places = _per_row(candidates, scores.shape).long().clamp(0, mask.shape[-1] - 1)
        mask = mask.expand(*scores.shape[:3], -1).gather(-1, places)
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()


def _per_row(x: torch.Tensor, shape) -> torch.Tensor:
    """``[B, K, S]`` of a selection to ``[B, Hq, M, S]``, for ``shape [B, Hq, M, ...]``."""
    return x.repeat_interleave(shape[1] // x.shape[1], 1).unsqueeze(2).expand(-1, -1, shape[2], -1)


def top_p_select(scores, exact_lse, mask, candidates, top_p, indices, count) -> None:
    selections, capacity, columns = indices.shape[1], indices.shape[2], scores.shape[-1]
    if not scores.numel():
        count.zero_()
        return
    kept, share = _kept(_masked(scores.float(), mask, candidates), exact_lse, top_p)
    kept = kept.unflatten(1, (selections, -1)).flatten(2, 3).any(2)  # [B, K, L]
    share = share.unflatten(1, (selections, -1)).flatten(2, 3).amax(2).masked_fill(~kept, -torch.inf)
    most = kept.sum(-1).clamp_max(capacity)
    rank = share.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    kept &= rank < most.unsqueeze(-1)
    places = torch.where(kept, torch.arange(columns, device=kept.device), columns).sort(-1).values[..., :capacity]
    valid = torch.arange(places.shape[-1], device=kept.device) < most.unsqueeze(-1)
    if candidates is not None:
        places = candidates.gather(-1, places.clamp_max(columns - 1)).long()
    held = indices[..., : places.shape[-1]]
    held.copy_(torch.where(valid, places, held))
    count.copy_(most)


def _selected(indices: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of a selection that any row uses, ``[B, K, N]`` int64 with 0 where not valid, and where it is valid."""
    most = int(count.max()) if count.numel() else 0
    valid = torch.arange(most, device=indices.device) < count.unsqueeze(-1)
    return torch.where(valid, indices[..., :most], 0).long(), valid


def _rows(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rows ``places [B, K, N]`` of ``x [B, H, C, ...]``, ``[B, K, N, ...]``; head ``k`` takes those of head ``k * H // K``."""
    batch, heads = places.shape[:2]
    sequence = torch.arange(batch, device=x.device)[:, None, None]
    head = torch.arange(heads, device=x.device)[:, None] * x.shape[1] // heads
    return x[sequence, head, places.to(x.device)].to(places.device)


def _picked(packed: list[torch.Tensor], places: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows ``places [B, K, N]`` of one tensor or of a packed store, ``[B, K, N, D]`` float32."""
    if len(packed) == 1:
        return _rows(packed[0], places).float()
    sign, mag, scale, levels, centre, balance, *rotation = packed
    repeats = places.shape[1] // sign.shape[1]
    centre, balance = (x.repeat_interleave(repeats, 1) if x.numel() else x for x in (centre, balance))
    rows = [_rows(x, places) for x in (sign, mag, scale)]
    return decoded([*rows, levels, centre, balance, *rotation], False, 0, places.shape[-1], head_dim)


def _scores(q, keys, places, valid, scale) -> torch.Tensor:
    """``scale * q . k`` of rows ``places [B, K, N]``, ``[B, Hq, M, N]`` float32, -inf where not valid."""
    picked = _picked(keys, places, q.shape[-1])
    scores = (_grouped(q, places.shape[1]) @ picked.transpose(-1, -2)).reshape(*q.shape[:3], picked.shape[-2]) * scale
    return scores.masked_fill(~_per_row(valid, scores.shape), -torch.inf)


def qk_selected(q, keys, indices, count, scale, out) -> None:
    places, valid = _selected(indices, count)
    out.fill_(-torch.inf)
    out[..., : places.shape[-1]] = _scores(q, keys, places, valid, scale)


def attend_selected(q, keys, values, indices, count, mask, scale, softcap, out, lse) -> None:
    places, valid = _selected(indices, count)
    scores = _scores(q, keys, places, valid, scale)
    if softcap:
        scores = torch.where(scores == -torch.inf, scores, torch.tanh(scores / softcap) * softcap)
    if places.shape[-1]:
        scores = _masked(scores, mask, places)
    total = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(total == -torch.inf, 0, total).unsqueeze(-1))
    lse.copy_(total)
    out.copy_((_grouped(weights, places.shape[1]) @ _picked(values, places, out.shape[-1])).reshape(out.shape))


def gather_selected(x, indices, count, out) -> None:
    places, valid = _selected(indices, count)
    held = out[:, :, : places.shape[-1]]
    held.copy_(torch.where(valid.unsqueeze(-1), _rows(x, places), held))
