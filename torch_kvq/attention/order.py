"""Where stored tokens stand in the sequence, for batches that were padded on the left.

A row that starts with padding has its first real tokens, the sinks, further in. A layer stores every row as sinks,
padding, rest; only the first ``sinks + padding`` places of a row are permuted.
"""

import dataclasses

import torch


@dataclasses.dataclass
class TokenOrder:
    """``stored [B, P]``: sequence index of each of the first ``P`` stored tokens; ``sequence [B, P]`` is its inverse."""

    stored: torch.Tensor
    sequence: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """``P``: tokens from here on are in sequence order."""
        return self.stored.shape[1]

    def to_stored(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """``x [B, ...]`` with ``dim`` in sequence order, to stored order."""
        return _permuted(x, self.stored, dim)

    def to_sequence(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """``x [B, ...]`` with ``dim`` in stored order, to sequence order."""
        return _permuted(x, self.sequence, dim)

    def map_batch(self, function) -> "TokenOrder":
        return TokenOrder(function(self.stored), function(self.sequence))


def _permuted(x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    head, rest = x.narrow(dim, 0, index.shape[1]), x.narrow(dim, index.shape[1], x.shape[dim] - index.shape[1])
    shape = [1] * x.dim()
    shape[0], shape[dim] = index.shape
    return torch.cat([head.gather(dim, index.reshape(shape).expand(head.shape)), rest], dim)


def sinks_first(padding: torch.Tensor, num_sinks: int, num_tokens: int) -> TokenOrder | None:
    """The order for rows with ``padding [B]`` tokens in front, or ``None`` if no row has any.

    Needs ``num_tokens >= max(padding) + num_sinks``, else the sinks of a row reach back into its padding.
    """
    longest = int(padding.max())
    if longest == 0 or num_sinks == 0:
        return None
    span = min(longest + num_sinks, num_tokens)
    place = torch.arange(span, device=padding.device).expand(padding.shape[0], span)
    first = padding.clamp_max(span - num_sinks).unsqueeze(1)
    is_sink = (place >= first) & (place < first + num_sinks)
    rank = torch.where(is_sink, place - first, torch.where(place < first, place + num_sinks, place))
    return TokenOrder(stored=rank.argsort(1), sequence=rank)


def leading_padding(visible: torch.Tensor) -> torch.Tensor:
    """Tokens in front of the first visible one, ``[B]`` int64, from ``visible [B, T]`` bool; ``T`` if none is visible."""
    return (visible.cumsum(1) == 0).sum(1)
