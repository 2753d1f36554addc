"""RaBitQ: one bit a dimension of rotated, centred keys, and unbiased estimates of logits from it (RaBitQCache, algorithm 1).

With the centred, balanced, rotated key ``y`` and query ``z``, ``q . k = z . y + query_centre . (k - centre) + q . centre``
(equation 2), exactly and for any centres; only ``z . y`` is estimated, by ``z . sign(y) * |y|^2 / sum |y_i|`` (equation 4).
"""

import dataclasses
import math

import torch

from .. import ops
from ..layout import num_words, round_up
from ..ops.sparse_reference import QUERY_BITS
from .rotation import Rotation, check_kind, make_rotation

LEAST_SHARE = 0.25


@dataclasses.dataclass(frozen=True)
class RaBitQConfig:
    """How keys are indexed.

    Args:
        rotation: a key of ``rotation.KINDS``; two signed rounds (hadamard2, default) behave like a Haar rotation on every
            kind of key, one is biased on keys with outliers.
        seed: of the rotation.
    """

    rotation: str = "hadamard2"
    seed: int = 0

    def __post_init__(self) -> None:
        check_kind("rotation", self.rotation)

    def make_rotation(self, head_dim: int, device: torch.device) -> Rotation:
        return make_rotation(self.rotation, head_dim, self.seed, device)


@dataclasses.dataclass(frozen=True, slots=True)
class CodedQuery:
    """Queries as 4-bit codes: ``planes [B, Hq, M, 4, W]`` int32, ``terms [B, Hq, M, 4]`` float32 (``ops/schemas.py``).

    ``later`` are the terms for each of the later centres of an index.
    """

    planes: torch.Tensor
    terms: torch.Tensor
    scale: float
    later: tuple[torch.Tensor, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class RaBitQIndex:
    """The index of keys ``[B, H, C, D]``.

    Args:
        head_dim: ``D``.
        sign: ``[B, H, C, W]`` int32, 1 = negative; the sign plane of packed keys is one.
        factor: ``[B, H, C]`` float16, ``|y|^2 / sum |y_i|``.
        bias: ``[B, H, C]`` float16, ``query_centre . (k - centre)``, or empty.
        transform: query_centre, centre, balance ``[B, H, D]`` or empty, and the three tensors of a rotation.
        later: first token and centre of those from there on that have a centre of their own, in ascending order.
    """

    head_dim: int
    sign: torch.Tensor
    factor: torch.Tensor
    bias: torch.Tensor
    transform: tuple[torch.Tensor, ...]
    later: tuple[tuple[int, torch.Tensor], ...] = ()

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them."""
        return self.sign, self.factor, self.bias, *self.transform, *(centre for _, centre in self.later)

    @property
    def token_bytes(self) -> int:
        """Bytes that a scan reads of one token of one head."""
        return 4 * self.sign.shape[-1] + self.factor.element_size() + (self.bias.element_size() if self.bias.numel() else 0)

    @classmethod
    def of(
        cls,
        keys: torch.Tensor,
        config: RaBitQConfig | None = None,
        centre: torch.Tensor | None = None,
        balance: torch.Tensor | None = None,
        query_centre: torch.Tensor | None = None,
    ) -> "RaBitQIndex":
        """Indexes ``keys [B, H, T, D]``; ``centre``, ``balance`` and ``query_centre`` are ``[B, H, D]`` float32 or absent."""
        batch, heads, tokens, dim = keys.shape
        nothing = torch.empty(0, device=keys.device)
        given = (nothing if x is None else x for x in (query_centre, centre, balance))
        transform = (*given, *(config or RaBitQConfig()).make_rotation(dim, keys.device).tensors())
        shape = (batch, heads, round_up(tokens))
        sign = torch.empty((*shape, num_words(dim)), dtype=torch.int32, device=keys.device)
        factor = torch.empty(shape, dtype=torch.float16, device=keys.device)
        bias = nothing if query_centre is None else torch.empty_like(factor)
        index = cls(dim, sign, factor, bias, transform)
        index.write(keys, 0)
        return index

    def write(self, keys: torch.Tensor, start: int, signs: bool = True) -> None:
        """Indexes ``keys [B, H, N, D]`` as tokens ``start .. start + N``; without ``signs`` their plane is left as it is.

        All of them take the centre of the first.
        """
        sign = self.sign if signs else self.sign.new_empty(0)
        query_centre, centre, *rest = self.transform
        centre = next((each for first, each in reversed(self.later) if first <= start), centre)
        ops.index_keys(keys, query_centre, centre, *rest, start, sign, self.factor, self.bias)

    def code(self, query: torch.Tensor, scale: float) -> CodedQuery:
        """Codes ``query [B, G * H, M, D]``, whose logits are ``scale * q . k``."""
        coded = self.room_for(query, scale)
        ops.quantise_query(query, *self.transform, scale, coded.planes, coded.terms)
        later = tuple(self._terms_of(centre, query, coded.terms, scale) for _, centre in self.later)
        return dataclasses.replace(coded, later=later) if later else coded

    def room_for(self, query: torch.Tensor, scale: float) -> CodedQuery:
        """What operators code ``query`` to."""
        planes = query.new_empty((*query.shape[:3], QUERY_BITS, num_words(self.head_dim)), dtype=torch.int32)
        return CodedQuery(planes, query.new_empty((*query.shape[:3], QUERY_BITS), dtype=torch.float32), scale)

    @staticmethod
    def _terms_of(centre: torch.Tensor, query: torch.Tensor, terms: torch.Tensor, scale: float) -> torch.Tensor:
        """``terms`` with the logit of another centre."""
        grouped = query.float().unflatten(1, (centre.shape[1], -1))
        logits = scale * (grouped * centre[:, :, None, None]).sum(-1, keepdim=True)
        return torch.cat([terms[..., :-1], logits.flatten(1, 2)], -1)

    def scores(self, query: CodedQuery, start: int, stop: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Estimated logits of tokens ``start .. stop``, ``[B, Hq, M, stop - start]`` float32 or float16."""
        out = query.terms.new_empty((*query.terms.shape[:3], stop - start), dtype=dtype)
        edges = [start, *(min(max(first, start), stop) for first, _ in self.later), stop]
        for terms, first, last in zip((query.terms, *query.later), edges, edges[1:]):
            if first < last:
                part, index = out[..., first - start : last - start], (self.sign, self.factor, self.bias)
                ops.sign_scores(query.planes, terms, *index, self.head_dim, query.scale, first, part)
        return out


def posterior_scores(scores: torch.Tensor, index: RaBitQIndex, query: torch.Tensor, scale: float) -> torch.Tensor:
    """What estimates ``scores [B, Hq, M, L]`` say of the logits, if these are normal about their mean in a row.

    An estimate is a logit plus noise of the variance ``s = (scale |z| |y|)^2 (pi/2 - 1) / D``, so the largest estimates are too
    large, and a share of ``p`` by them is less in truth. With ``k = 1 - s / Var(score)`` a logit is ``mean + k (score - mean)``
    on average, with the variance ``k s``, whose half is added for the mean of its exponential.
    """
    query_centre, _, balance, *_ = index.transform
    heads, length = index.factor.shape[1], scores.shape[-1]
    z = query.float().unflatten(1, (heads, -1))
    z = z - query_centre[:, :, None, None] if query_centre.numel() else z
    z = z * balance[:, :, None, None] if balance.numel() else z
    size = index.factor[:, :, :length].float().square().mean(-1)  # |y|^2 / D * pi / 2
    noise = (scale**2 * z.square().sum(-1) * size[:, :, None, None] * (1 - 2 / math.pi)).flatten(1, 2).unsqueeze(-1)
    mean = scores.mean(-1, keepdim=True)
    share = (1 - noise / scores.var(-1, keepdim=True)).nan_to_num(1.0).clamp(LEAST_SHARE, 1)
    return mean + share * (scores - mean) + share * noise / 2
