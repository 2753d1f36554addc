"""The slots that resident experts live in, and which expert is in which."""

import reprlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import index

from .loader import Load, Loader
from .policy import policy_class
from .slots import Residues, Slots
from .spec import ExpertSpec
from .stats import LayerStats
from .store import ExpertStore

Key = tuple[str, int]
MIN_GUESSES, MIN_USEFUL = 256, 0.5


@dataclass
class Ticket:
    """Experts of one layer on their way into slots. They are there, and stay until the next request, after :meth:`wait`."""

    pool: "ExpertPool"
    layer: str
    experts: list[int]
    slots: list[int]
    missed: list[int]
    load: Load | None

    def wait(self) -> list[int]:
        """The slot of every expert, in order, once what runs next on the device may read them.

        Raises:
            OSError: an expert could not be read. Those that were missing are not resident afterwards.
        """
        load, self.load = self.load, None
        if load is not None:
            stats = self.pool.stats[self.layer]
            begin = time.perf_counter()
            try:
                stats.bytes_read += load.wait()
            except BaseException:
                self.pool.forget(self.layer, self.missed)
                raise
            finally:
                stats.stall_seconds += time.perf_counter() - begin
        return self.slots

    def settle(self) -> None:
        """Let the load end, well or not, after something else went wrong."""
        try:
            self.wait()
        except OSError:
            pass


def experts_of(argument: str, layer: str, experts: Iterable[int], count: int) -> list[int]:
    """Experts of a layer that has ``count``.

    Raises:
        ValueError: one that does not exist. TypeError: no integers. Both name ``argument``.
    """
    try:
        found = [index(expert) for expert in experts]
    except TypeError:
        raise TypeError(f"{argument} must have experts of {layer} as integers, got {reprlib.repr(experts)}") from None
    if any(not 0 <= expert < count for expert in found):
        raise ValueError(f"{argument}: {layer} has experts 0 to {count - 1}, got {found}")
    return found


class ExpertPool:
    """Slots for experts of one shape, dtype and device, shared by the layers named.

    Args:
        store: where experts come from. loader: how they come into a slot.
        layers: names of the layers that use this pool; their experts must have the same spec.
        num_slots: experts resident at most.
        policy: ``lru`` (default), ``lfu`` or a policy class.
        num_guesses: further slots for experts that a predictor fetches; a guess never evicts what was really used.
        residues: where in a page each layer's parameters begin in a slot, by default anywhere.
    """

    def __init__(
        self,
        store: ExpertStore,
        loader: Loader,
        layers: list[str],
        num_slots: int,
        policy: str | type = "lru",
        num_guesses: int = 0,
        residues: Mapping[str, Residues] | None = None,
    ) -> None:
        self.store, self.loader, self.layers, self.num_slots = store, loader, layers, num_slots
        self.spec: ExpertSpec = store.spec(layers[0])
        self.num_rows = num_slots + num_guesses
        self.slots = Slots(self.spec, self.num_rows, loader.device, residues or dict.fromkeys(layers, {}))
        self.num_experts = sum(store.num_experts(layer) for layer in layers)
        self.stats = {layer: LayerStats() for layer in layers}
        self.lock = threading.RLock()
        self.pinned: set[Key] = set()
        self.version = 0  # changes whenever an expert comes into a slot
        self._policy = policy_class(policy)()
        self._slots: dict[Key, int] = {}
        self._free = list(reversed(range(num_slots)))
        self._guesses: OrderedDict[Key, tuple[int, Load]] = OrderedDict()
        self._free_guesses = list(range(num_slots, self.num_rows))

    # ---- who is where

    def is_resident(self, layer: str, expert: int) -> bool:
        """Whether the expert is in a slot, or was guessed and is on its way into one."""
        return (layer, expert) in self._slots or (layer, expert) in self._guesses

    @property
    def is_complete(self) -> bool:
        """Whether every expert of every layer is resident."""
        return len(self._slots) == self.num_experts

    @property
    def room(self) -> int:
        """Slots that are not pinned."""
        return self.num_slots - len(self.pinned)

    def fits(self, layer: str, experts: list[int]) -> bool:
        """Whether ``experts`` can all be resident at a time."""
        return len(experts) <= self.room or len({(layer, expert) for expert in experts} - self.pinned) <= self.room

    def places(self, layer: str) -> tuple[list[int], list[int]]:
        """Resident experts of a layer and their slots."""
        found = [(expert, slot) for (name, expert), slot in self._slots.items() if name == layer]
        return [expert for expert, _ in found], [slot for _, slot in found]

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes

    # ---- coming and going

    def request(self, layer: str, experts: list[int], keep: Iterable[int] = (), later: Iterable[int] = ()) -> Ticket:
        """Book a slot for each of ``experts`` (which :meth:`fits`) and begin to load those that are missing.

        Neither ``experts`` nor ``keep``, those of the layer that are being computed with, give up a slot; ``later``, which
        this call needs afterwards, do so only if nothing else can.
        """
        held = {(layer, expert) for expert in (*experts, *keep)}
        spared = {(layer, expert) for expert in later}
        stats, missed = self.stats[layer], []
        for expert in experts:
            key = (layer, expert)
            if key in self._slots:
                self._policy.touch(key)
                stats.hits += 1
            elif key in self._guesses and self._claim(key, held, spared):
                stats.hits += 1
                stats.useful_guesses += 1
            else:
                missed.append(expert)
        for expert in missed:
            self._place((layer, expert), self._free.pop() if self._free else self._evict(held, spared))
        stats.misses += len(missed)
        load = self._start(layer, [(expert, self._slots[layer, expert]) for expert in missed]) if missed else None
        return Ticket(self, layer, experts, [self._slots[layer, expert] for expert in experts], missed, load)

    def _start(self, layer: str, places: list[tuple[int, int]]) -> Load:
        begin = time.perf_counter()
        try:
            return self.loader.start(layer, [(expert, self.slots.one(layer, at)) for expert, at in places])
        except BaseException:
            self.forget(layer, [expert for expert, _ in places])
            raise
        finally:
            self.stats[layer].stall_seconds += time.perf_counter() - begin  # experts in memory are copied here

    def forget(self, layer: str, experts: Iterable[int]) -> None:
        """Free the slots of experts whose contents are not to be trusted."""
        for expert in experts:
            if (slot := self._slots.pop((layer, expert), None)) is not None:
                self._policy.remove((layer, expert))
                self._free.append(slot)

    def clear(self) -> None:
        """Free every slot that is not pinned and zero the counters."""
        for layer, expert in set(self._slots) - self.pinned:
            self.forget(layer, [expert])
        self.stats = {layer: LayerStats() for layer in self.layers}

    def _place(self, key: Key, slot: int) -> None:
        self._slots[key] = slot
        self.version += 1
        self._policy.insert(key)

    def _evict(self, held: set[Key], spared: set[Key]) -> int:
        """The slot of the first victim of the policy that may go."""
        fixed = held | self.pinned
        victim = next((key for key in self._policy.victims() if key not in fixed and key not in spared), None)
        if victim is None:
            victim = max((key for key in self._slots if key not in fixed), key=lambda key: key[1])  # needed last
        self._policy.remove(victim)
        self.stats[victim[0]].evictions += 1
        return self._slots.pop(victim)

    def pin(self, layer: str, experts: Iterable[int]) -> None:
        """Load experts and keep them until the pool goes.

        Raises:
            ValueError: an expert that does not exist, or no slot would be left to work with. TypeError: no integers.
        """
        experts = experts_of("pin", layer, experts, self.store.num_experts(layer))
        wanted = self.pinned | {(layer, expert) for expert in experts}
        if len(wanted) >= self.num_slots and len(wanted) < self.num_experts:
            raise ValueError(f"pin must leave one of the {self.num_slots} slots free, got {len(wanted)} experts")
        with self.lock:
            for expert in experts:
                self.request(layer, [expert]).wait()
                self.pinned.add((layer, expert))

    # ---- guesses of a predictor

    def guess(self, layer: str, experts: list[int]) -> None:
        """Begin to load experts that a later call may need, into the slots set aside for guesses in place of older guesses.

        Once a layer's guesses have turned out wrong more often than right, no more are made.
        """
        stats = self.stats[layer]
        if stats.guesses >= MIN_GUESSES and stats.useful_guesses < MIN_USEFUL * stats.guesses:
            return
        absent = [expert for expert in experts if not self.is_resident(layer, expert)]
        for expert in absent[: self.num_rows - self.num_slots]:
            if not self._free_guesses:
                (old, _), (slot, load) = self._guesses.popitem(last=False)
                self._settle(old, load)
                self._free_guesses.append(slot)
            slot = self._free_guesses.pop()
            self._guesses[layer, expert] = slot, self.loader.start(layer, [(expert, self.slots.one(layer, slot))])
            stats.guesses += 1

    def _settle(self, layer: str, load: Load) -> bool:
        """Wait for a guess; a guess that cannot be read is no error, the expert is read again if it is needed."""
        begin = time.perf_counter()
        try:
            self.stats[layer].bytes_read += load.wait()
        except OSError:
            return False
        finally:
            self.stats[layer].stall_seconds += time.perf_counter() - begin
        return True

    def _claim(self, key: Key, held: set[Key], spared: set[Key]) -> bool:
        """A guess came true: it keeps its slot, and the slot that falls free instead takes the next guess."""
        slot, load = self._guesses.pop(key)
        if not self._settle(key[0], load):
            self._free_guesses.append(slot)
            return False
        self._free_guesses.append(self._free.pop() if self._free else self._evict(held, spared))
        self._place(key, slot)
        return True
