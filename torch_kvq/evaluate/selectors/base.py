"""What a selector is: a ranking of the tokens that a kv head may read for a query."""

import torch

from ..capture import LayerStates


class Selector:
    """Ranks tokens by estimated logits; a subclass defines ``estimate``.

    The query heads of a kv head share what is read, so a token counts by the sum of its estimated shares of attention in all of
    them: with true logits this keeps the most mass that any choice of as many tokens can keep.

    Attributes:
        name: in reports.
        is_adaptive: ranks are compared across queries, heads and layers, so that some read more and others less; otherwise
            every query and kv head reads as many tokens.
    """

    name: str
    is_adaptive = False

    def estimate(self, states: LayerStates) -> torch.Tensor:
        """Logits ``[B, G * H, M, T]`` before a softcap; those of tokens that cannot be selected are not looked at."""
        raise NotImplementedError

    def priority(self, states: LayerStates) -> torch.Tensor:
        """``[B, H, M, T]``: tokens of larger values are read first, the earlier of equal ones."""
        return states.grouped(states.log_shares(self.estimate(states))).logsumexp(2)

    def scan_bytes(self, states: LayerStates) -> float:
        """Bytes that the ranking reads for each token and kv head, of 16-bit keys."""
        raise NotImplementedError
