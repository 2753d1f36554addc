"""What is learnt from the first tokens of a sequence, per kv head: the centre of the keys and the channel balance."""

import torch

_PRIOR_TOKENS = 4.0
_FLOOR = 1e-6
_MOST_TOKENS = 4096  # of a longer prompt evenly spread tokens are taken, at least half as many


def masked_mean(x: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Mean over tokens of ``x [B, H, N, D]`` where ``valid [B, N]`` (all if ``None``): ``[B, H, D]`` float32, 0 if none."""
    if valid is None:
        return x.mean(-2, dtype=torch.float32)
    x = x.float()
    weight = valid[:, None, :, None].float()
    return (x * weight).sum(-2) / weight.sum(-2).clamp_min(1)


def second_moment(x: torch.Tensor, centre: torch.Tensor | None, valid: torch.Tensor | None) -> torch.Tensor:
    """``E[(x_i - centre_i)^2]`` for each channel, ``[B, H, D]`` float32, over the valid tokens of ``x [B, H, N, D]``.

    It is drawn towards the mean of the channels with the weight of four tokens, so that very few tokens stay harmless.
    """
    x = _sampled(x) if valid is None else x
    x = x.float() if centre is None else x.float() - centre.unsqueeze(-2)
    moment = masked_mean(x.square(), valid)
    count = x.shape[-2] if valid is None else valid.sum(-1).float()[:, None, None]
    return (moment * count + moment.mean(-1, keepdim=True) * _PRIOR_TOKENS) / (count + _PRIOR_TOKENS)


def _sampled(x: torch.Tensor) -> torch.Tensor:
    """Tokens of ``x [B, H, N, D]``, all or every few: enough, without copies of all in float32."""
    return x[:, :, :: max(1, -(-x.shape[2] // _MOST_TOKENS))]


def channel_balance(key_moment: torch.Tensor, query_moment: torch.Tensor | None) -> torch.Tensor:
    """``lambda_i = (E[k_i^2] / E[q_i^2])^(1/4)``, normed to geometric mean 1, ``[B, H, D]`` float32.

    Keys are stored as ``k / lambda`` and queries multiplied by ``lambda``. Among diagonal maps it minimises
    ``E|q . (k - k^)|^2`` for isotropic noise. Without queries (``None``) they count as isotropic. Channels below 1e-6 of the
    mean count as that.
    """
    log_balance = _log_moment(key_moment)
    if query_moment is not None:
        log_balance = log_balance - _log_moment(query_moment)
    log_balance = log_balance / 4
    return torch.exp(log_balance - log_balance.mean(-1, keepdim=True))


def _log_moment(moment: torch.Tensor) -> torch.Tensor:
    mean = moment.mean(-1, keepdim=True)
    return torch.log(torch.maximum(moment, _FLOOR * mean).clamp_min(1e-30))


class QueryMoments:
    """Running first and second moments of the queries that a layer has seen, per kv head.

    Once every sequence has seen ``enough_tokens``, padding not counted, nothing is added any more.
    """

    enough_tokens = 1024

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        self.sum: torch.Tensor | None = None
        self.count: torch.Tensor | float = 0.0
        self.tokens = 0

    def add(self, queries: torch.Tensor, heads: int, valid: torch.Tensor | None) -> None:
        """Adds ``queries [B, G * H, M, D]``, of which token ``m`` of a sequence counts where ``valid [B, M]``."""
        if self.tokens >= self.enough_tokens:
            return
        queries = queries.detach() if valid is not None else _sampled(queries.detach())
        grouped = queries.float().unflatten(1, (heads, -1))
        first, square = grouped.mean(2), grouped.square().mean(2)  # [B, H, M, D]
        if valid is None:
            first, total, tokens = first.sum(-2), square.sum(-2), square.shape[-2]
            count = float(tokens)
        else:
            seen = valid[:, None, :, None]
            first, total, tokens = (first * seen).sum(-2), (square * seen).sum(-2), int(valid.sum(-1).min())
            count = valid.sum(-1).float()[:, None, None]
        self.sum = first if self.sum is None else self.sum + first
        self.total = total if self.total is None else self.total + total
        self.count = self.count + count
        self.tokens += tokens

    def mean(self) -> torch.Tensor | None:
        """``E[q_i^2]``, ``[B, H, D]``, or ``None`` if no query was seen. Sequences without one get equal channels."""
        return self._mean(self.total)

    def centre(self) -> torch.Tensor | None:
        """``E[q_i]``, ``[B, H, D]``, or ``None`` if no query was seen; 0 in sequences without one."""
        return self._mean(self.sum)

    def _mean(self, total: torch.Tensor | None) -> torch.Tensor | None:
        if total is None:
            return None
        return total / (self.count if isinstance(self.count, float) else self.count.clamp_min(1))

    def map_batch(self, function) -> None:
        """Applies ``function`` to what has a batch dim (crop, reorder, repeat, select)."""
        if self.total is not None:
            self.sum, self.total = function(self.sum), function(self.total)
        if isinstance(self.count, torch.Tensor):
            self.count = function(self.count)
