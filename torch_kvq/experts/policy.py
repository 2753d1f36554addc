"""Which resident expert gives up its slot. To add a policy, subclass ``LRU`` or write its four methods and name it below."""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable


class LRU:
    """Least recently used first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Hashable, None] = OrderedDict()

    def insert(self, key: Hashable) -> None:
        self._keys[key] = None

    def touch(self, key: Hashable) -> None:
        """``key``, which is resident, was used."""
        self._keys.move_to_end(key)

    def remove(self, key: Hashable) -> None:
        del self._keys[key]

    def victims(self) -> Iterable[Hashable]:
        """Resident keys, first to go first."""
        return self._keys


class LFU(LRU):
    """Least often used since the beginning first, the least recent of equals; uses before an eviction count."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: Counter = Counter()

    def insert(self, key: Hashable) -> None:
        super().insert(key)
        self._uses[key] += 1

    def touch(self, key: Hashable) -> None:
        super().touch(key)
        self._uses[key] += 1

    def victims(self) -> Iterable[Hashable]:
        return sorted(self._keys, key=self._uses.__getitem__)


POLICIES = {"lru": LRU, "lfu": LFU}


def make_policy(policy: str | type) -> LRU:
    """A new policy by name or class.

    Raises:
        ValueError: a name that is not in ``POLICIES``.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {sorted(POLICIES)} or a policy class, got {policy!r}")
        policy = POLICIES[policy]
    return policy()
