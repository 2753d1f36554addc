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


METHODS = ("insert", "touch", "remove", "victims")
POLICIES = {"lru": LRU, "lfu": LFU}


def policy_class(policy: str | type) -> type:
    """A policy class by its name or itself.

    Raises:
        ValueError: neither a name in ``POLICIES`` nor a class with the four methods.
    """
    found = POLICIES.get(policy) if isinstance(policy, str) else policy
    if not isinstance(found, type) or not all(callable(getattr(found, name, None)) for name in METHODS):
        raise ValueError(f"policy must be one of {sorted(POLICIES)} or a class with {', '.join(METHODS)}, got {policy!r}")
    return found
