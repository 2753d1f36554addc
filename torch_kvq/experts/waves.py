"""One call of an experts module with a pool that need not hold all experts of the call.

The experts of a call are divided into waves that fit. All tokens of an expert are in its wave, so each expert is loaded at
most once a call, and each token's product with an expert is the same number as with all experts resident. While a wave is
computed the next one loads, where there is room for both.
"""

from collections.abc import Callable

import torch

from .pool import ExpertPool

HOST_PAIRS = 1024  # up to so many ids it is cheaper to work on the host


def make_waves(pool: ExpertPool, layer: str, experts: list[int], overlap: bool) -> list[list[int]]:
    """``experts`` in groups that fit, those that are resident first."""
    is_fit = pool.fits(layer, experts)
    if is_fit and not overlap:
        return [experts]
    here = [expert for expert in experts if pool.is_resident(layer, expert)]
    gone = [expert for expert in experts if not pool.is_resident(layer, expert)]
    if is_fit:
        return [here, gone] if here and gone else [experts]
    room = max(1, pool.room)
    size = max(1, room // 2) if overlap else room
    chunks = [*range(0, len(here), room)], [*range(0, len(gone), size)]
    return [here[at : at + room] for at in chunks[0]] + [gone[at : at + size] for at in chunks[1]]


def run_waves(pool: ExpertPool, layer: str, waves: list[list[int]], compute: Callable[[list[int], list[int]], None]) -> None:
    """``compute(experts, slots)`` for one wave after the other, the next one already loading if both fit."""
    pool.stats[layer].waves += len(waves)
    now, ahead = pool.request(layer, waves[0]), None
    for wave, following in zip(waves, [*waves[1:], []]):
        try:
            if following and pool.fits(layer, wave + following):
                ahead = pool.request(layer, following, keep=wave)
            compute(wave, now.wait())
            if following and ahead is None:
                ahead = pool.request(layer, following)
        except BaseException:
            for ticket in (now, ahead):
                if ticket is not None:
                    ticket.settle()
            raise
        now, ahead = ahead, None


class Remap:
    """Expert ids to slots, by a table ``[num_experts] int64`` on the device, to which it is sent only when it changed."""

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self._there = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self._here = torch.zeros(num_experts, dtype=torch.int64) if self._there.is_cuda else self._there
        self._table = self._here.numpy()

    def __call__(self, ids: torch.Tensor, experts: list[int], slots: list[int]) -> torch.Tensor:
        """Slots of ``ids`` (any shape), all of which are among ``experts``."""
        self.learn(experts, slots)
        return self.known(ids)

    def learn(self, experts: list[int], slots: list[int]) -> None:
        """``experts`` are in ``slots``."""
        if self._there.is_cuda and (self._table[experts] == slots).all():
            return
        self._table[experts] = slots
        if self._there.is_cuda:
            self._there.copy_(self._here.pin_memory(), non_blocking=True)

    def known(self, ids: torch.Tensor) -> torch.Tensor:
        """Slots of ``ids`` whose entries are known to be right."""
        return self._there[ids].to(ids.dtype)


class Routing:
    """Expert ids ``[N, K]`` of a call, read back from the device once."""

    def __init__(self, ids: torch.Tensor, num_experts: int) -> None:
        self.ids, self.flat, self._num_experts = ids, ids.reshape(-1), num_experts
        self._host: list[int] | None = None
        if len(self.flat) <= HOST_PAIRS:
            self._host = self.flat.tolist()
            self.experts = sorted({*self._host})
        else:
            present = torch.zeros(num_experts, dtype=torch.bool, device=ids.device)
            present[self.flat] = True
            self.experts = [expert for expert, here in enumerate(present.tolist()) if here]

    def pairs(self, experts: list[int]) -> torch.Tensor:
        """Positions in ``flat`` that go to one of ``experts``, ascending."""
        if self._host is not None:
            wanted = set(experts)
            places = [at for at, expert in enumerate(self._host) if expert in wanted]
            return torch.tensor(places, device=self.ids.device)
        chosen = torch.zeros(self._num_experts, dtype=torch.bool)
        chosen[experts] = True
        return chosen.to(self.ids.device)[self.flat].nonzero()[:, 0]


def weighted_sum(products: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``products [N * K, H]`` of token-expert pairs times ``weights [N, K]``, summed over ``K`` as transformers does."""
    products = products * weights.reshape(-1, 1)
    return products.view(*weights.shape, -1).sum(dim=1).to(dtype)
