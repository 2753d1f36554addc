"""Quest (arXiv 2406.10774): whole pages, by an upper bound of the logits in them."""

import torch

from ..capture import LayerStates
from .base import Selector

PAGE_LEN = 16


class Quest(Selector):
    """Pages of ``page_len`` tokens (default 16, the paper's) with the least and largest key of each channel."""

    name = "Quest"

    def __init__(self, page_len: int = PAGE_LEN) -> None:
        self.page_len = page_len

    def estimate(self, states: LayerStates) -> torch.Tensor:
        bound = states.scale * self.bound(states.grouped(states.query.float()), states.key.float().unsqueeze(2))
        return bound.repeat_interleave(self.page_len, -1)[..., : states.key.shape[2]].flatten(1, 2)

    def bound(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """``[..., M, pages]``, no ``q . k`` in a page above it, for ``query [..., M, D]`` and ``key [..., T, D]``."""
        missing = -key.shape[-2] % self.page_len
        key = torch.cat([key, key[..., -1:, :].expand(*key.shape[:-2], missing, key.shape[-1])], -2)
        pages = key.unflatten(-2, (-1, self.page_len))
        least, most = pages.amin(-2).transpose(-1, -2), pages.amax(-2).transpose(-1, -2)
        return query.clamp_min(0) @ most + query.clamp_max(0) @ least

    def scan_bytes(self, states: LayerStates) -> float:
        return 2 * 2 * states.key.shape[-1] / self.page_len
