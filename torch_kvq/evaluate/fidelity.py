"""Teacher-forced fidelity of a compressed cache against the exact one."""

import dataclasses
from collections.abc import Callable, Iterable

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

from .._requirements import cache_keyword
from ..checks import check_callable
from .checks import check_inputs


@dataclasses.dataclass(frozen=True)
class Fidelity:
    """Means over all scored tokens of all sequences.

    Attributes:
        nll, nll_exact: negative log-likelihood of the text, nats a token, through the cache and exactly.
        delta_nll: their difference.
        kl: KL divergence from the exact to the compressed next-token distribution, nats.
        top1: share of tokens where both have the same likeliest next token.
        num_tokens: tokens scored.
        per_sequence: one ``Fidelity`` a sequence, empty in those.
    """

    nll: float
    nll_exact: float
    delta_nll: float
    kl: float
    top1: float
    num_tokens: int
    per_sequence: tuple["Fidelity", ...] = ()

    @classmethod
    def of(cls, nll: torch.Tensor, nll_exact: torch.Tensor, kl: torch.Tensor, same: torch.Tensor) -> "Fidelity":
        """From ``[N]`` values a token each."""
        means = [x.double().mean().item() for x in (nll, nll_exact, kl, same)]
        return cls(means[0], means[1], means[0] - means[1], means[2], means[3], nll.numel())

    def __str__(self) -> str:
        return (
            f"NLL {self.nll:.4f} (exact {self.nll_exact:.4f}, delta {self.delta_nll:+.4f})  KL {self.kl:.5f}  "
            f"top-1 {self.top1:.3f}  tokens {self.num_tokens}"
        )


@torch.inference_mode()
def fidelity(
    model,
    input_ids: torch.Tensor,
    cache_factory: Callable[[], Cache],
    prefix_len: int,
    progress: Callable[[Iterable], Iterable] | None = None,
) -> Fidelity:
    """Feeds a prefix, lets the cache pack it, then scores the rest one token at a time through the cache.

    The exact side feeds the same tokens at once, which is the same arithmetic up to rounding.

    Args:
        model: a causal language model in eval mode.
        input_ids: ``[B, T]``, no padding.
        cache_factory: makes the cache under test, ``IsoQuantCache`` or a function that returns one.
        prefix_len: tokens fed before the first one that is scored; 1 to ``T - 1``. ``T - prefix_len`` tokens are scored.
        progress: wraps the iterable of decode steps, ``tqdm.tqdm`` for a bar.

    Raises:
        ValueError, TypeError: prefix_len out of range, input_ids not ``[B, T]``, a model in training mode.
        RuntimeError: the cache has counters and no packed token was read, so the figures would compare exact with exact.
    """
    check_inputs(model, input_ids)
    check_callable("cache_factory", cache_factory, "a class of caches or a function that makes one")
    if progress is not None:
        check_callable("progress", progress, "a function of an iterable")
    total = input_ids.shape[1]
    if not isinstance(prefix_len, int) or not 1 <= prefix_len < total:
        raise ValueError(f"prefix_len must be from 1 to {total - 1} for {total} tokens, got {prefix_len}")
    exact = _log_probs(model, input_ids[:, :-1], DynamicCache(config=model.config), total - prefix_len)
    cache = cache_factory()
    steps = range(prefix_len, total - 1)
    scored = [_compare(exact[:, 0], _log_probs(model, input_ids[:, :prefix_len], cache, 1)[:, 0], input_ids[:, prefix_len])]
    for place in progress(steps) if progress else steps:
        ours = _log_probs(model, input_ids[:, place : place + 1], cache, 1)[:, 0]
        scored.append(_compare(exact[:, place + 1 - prefix_len], ours, input_ids[:, place + 1]))
    _check_packed(cache, prefix_len)
    columns = [torch.stack(column, 1) for column in zip(*scored)]
    each = tuple(Fidelity.of(*row) for row in zip(*columns))
    return dataclasses.replace(Fidelity.of(*(column.flatten() for column in columns)), per_sequence=each)


def _log_probs(model, input_ids: torch.Tensor, cache: Cache, keep: int) -> torch.Tensor:
    """Log-probabilities after the last ``keep`` tokens, ``[B, keep, vocabulary]`` in the dtype of the logits or float32."""
    out = model(input_ids=input_ids, use_cache=True, logits_to_keep=keep, **{cache_keyword(): cache})
    return out.logits.float().log_softmax(-1)


def _compare(exact: torch.Tensor, ours: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """NLL, exact NLL, KL and agreement of one step, each ``[B]``, from log-probabilities ``[B, vocabulary]``."""
    pick = token.unsqueeze(-1)
    kl = (exact.exp() * (exact - ours)).sum(-1)
    return -ours.gather(-1, pick)[:, 0], -exact.gather(-1, pick)[:, 0], kl, (ours.argmax(-1) == exact.argmax(-1)).float()


def _check_packed(cache: Cache, prefix_len: int) -> None:
    stats = getattr(cache, "stats", None)
    if stats is not None and stats.attend_calls == 0 and stats.decompress_calls == 0:
        raise RuntimeError(
            f"no packed token was read: a prefix_len of {prefix_len} leaves nothing older than the exact window, or the model "
            "has no layer that is packed (see report() of the cache)"
        )
