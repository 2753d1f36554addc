"""Whether keys move away from the centre around which they are indexed.

The noise of an estimate grows with the distance of the key from its centre (RaBitQ), and keys do move: with the subject, and
under rotary positions, which turn whatever the keys have in common. The decomposition is exact for any centre, so that later
tokens may have another one.
"""

import torch

LOOK_LEN = 1024  # tokens at least between two looks
LOOK_SHARE = 8  # and an eighth of what is indexed
DRIFT = 0.5  # of their spread, by which keys may be off their centre: half as much variance again
MAX_CENTRES = 8  # each costs every scan a launch
SAMPLE_LEN = 1024  # tokens whose spread is measured, so that a look at a long turn makes no copy of it


class DriftWatch:
    """Looks at blocks of keys, and says at the next one whether they were off their centre: the device has seldom to be waited
    for.

    Args:
        balance: of the key channels, ``[B, H, D]``, or empty; distances are those of balanced keys.
    """

    def __init__(self, balance: torch.Tensor) -> None:
        self.balance, self.seen = balance, 0
        self._look: tuple | None = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_look": None}

    def is_due(self, length: int) -> bool:
        """Whether to look at the tokens between ``seen`` and ``length``."""
        return length - self.seen >= max(LOOK_LEN, length // LOOK_SHARE)

    def look(self, keys: torch.Tensor, first: int, centre: torch.Tensor) -> None:
        """At ``keys [B, H, N, D]``, tokens ``first .. first + N``, which were indexed around ``centre [B, H, D]``."""
        self.seen = first + keys.shape[2]
        mean = keys.mean(2, dtype=torch.float32)
        some = keys[:, :, :: max(1, keys.shape[2] // SAMPLE_LEN)]
        shift, spread = mean - centre, some.float() - mean.unsqueeze(2)
        if self.balance.numel():
            shift, spread = shift / self.balance, spread / self.balance.unsqueeze(2)
        share = shift.square().sum(-1) / spread.square().sum(-1).mean(-1)
        moved, event = share.mean() > DRIFT, None
        if keys.is_cuda:
            moved = moved.to("cpu", non_blocking=True)
            event = torch.cuda.current_stream(keys.device).record_event()
        self._look = first, mean, moved, event

    def moved(self) -> tuple[int, torch.Tensor] | None:
        """Since which token keys are off their centre, and their own, by the last look; said once."""
        if self._look is None:
            return None
        (first, mean, moved, event), self._look = self._look, None
        if event is not None:
            event.synchronize()
        return (first, mean) if moved else None

    def forget(self, length: int) -> None:
        """What lies behind ``length`` is gone, or the batch is another: the last look says nothing any more."""
        self.seen, self._look = min(self.seen, length), None
