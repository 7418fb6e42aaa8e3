"""Least hit density: which block promises the fewest hits for the room it takes, as learned from those before it.

Sources: N. Beckmann, H. Chen and A. Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018, for
the idea: blocks of one class and age are alike, and what became of them is counted; J. C. Gittins, "Bandit Processes
and Dynamic Allocation Indices", 1979, for how long to wait for the hits that are counted on. Departures from LHD: a
class is a number of uses and a hint; what was evicted goes on being counted, by its ghost; victims come from the ends
of queues, not from a sample; of two blocks of equal age the one used more often never goes first, so that the head of a
prefix, which every use of its tail uses too, outlives the tail; densities that are about the same count as the same,
and then the older block goes; and where that loses hits that LRU would have, it goes by LRU for a while.
"""

import math
from heapq import heapify, heappop, heappush
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.policies.against_lru import AgainstLRU
from tiered_kv.catalog.policies.base import Policy
from tiered_kv.catalog.policies.ghosts import Ghosts, at_least_as_often
from tiered_kv.catalog.policies.hit_density import NUM_AGES, Counts, age_classes, hit_densities, told_hazards
from tiered_kv.catalog.policies.lives import Classes, Lives
from tiered_kv.catalog.slots import SlotQueue
from tiered_kv.catalog.table import Slots
from tiered_kv.hints import ReuseHint
from tiered_kv.keys import Names

_Said = tuple[str, int, int | None]

_LEVELS: Final = np.searchsorted([2, 3, 4, 5, 7, 10, 16], np.arange(256), side="right").astype(np.uint8)
"""By number of uses: 1, 2, 3, 4, up to 6, up to 9, up to 15, more."""
_NUM_LEVELS: Final = 8
_NUM_KINDS: Final = 8
"""Of hints; the first is none."""
_COLD: Final = _NUM_KINDS * _NUM_LEVELS
"""The queue of what is to go first."""
_GHOSTS: Final = 4
"""Blocks that are remembered when they are gone, for each slot."""
_LEAST_GHOSTS: Final = 1 << 15
"""A small tier learns how long blocks stay away only if it remembers more of them; 14 bytes each."""
_LEARN_EVERY: Final = 512
"""Blocks used; to compute densities takes some 100 us."""
_FEW: Final = 32
"""So many slots are told apart one by one sooner than numpy begins."""
_SAME: Final = 1.1
"""Densities that differ by less count as the same: the age of two blocks is certain, and these are estimates."""
_LEAST_DENSITY: Final = 1e-15
_TIME_BITS: Final = 52
"""Of a key by which blocks go: the rest is the density's."""


class LHDPolicy(Policy):
    """Evicts the blocks with the least hit density: hits to be expected over the time until they come.

    What is learned of blocks used some time ago counts half after twice as many uses as there are ghosts. Where the
    number of uses tells nothing, all classes are alike, and what goes is what was used least recently; so it is too
    while LRU would do better, see `AgainstLRU`. Takes about 80 bytes a slot, and 1.8 MB.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._queues = SlotQueue.several(num_slots, _COLD + 1)
        self._queue_of = np.full(num_slots, 0, dtype=np.uint8)
        self._num_uses = np.full(num_slots, 0, dtype=np.uint8)
        self._used_at = np.full(num_slots, 0, dtype=np.int64)
        self._kinds = np.full(num_slots, 0, dtype=np.uint8)
        num_ghosts = max(_LEAST_GHOSTS, _GHOSTS * num_slots)
        self._ghosts = Ghosts(num_ghosts)
        self._half_life = 2.0 * num_ghosts
        self._now = 0
        self._num_passed = 0
        self._num_evictable = 0
        self._is_used = False
        self._forget_learned()

    def resize(self, num_slots: int) -> None:
        """See `Policy.resize`. What LRU would hold is counted anew."""
        super().resize(num_slots)
        self._against_lru = AgainstLRU(num_slots, self._now)

    def __len__(self) -> int:
        return self._num_evictable

    def add(self, slots: Slots, names: Names) -> None:
        """Learn from those that were here before, and let them go on counting."""
        self._begin_moment(is_use=False)
        num_uses, used_at, kinds = self._ghosts.recall(names)
        if num_uses.any():
            known = np.flatnonzero(num_uses)
            ended, used_at = self._classes(kinds[known], num_uses[known]), used_at[known]
            self._lives.end(ended, self._now - used_at)
            num_uses = at_least_as_often(num_uses)
        else:
            used_at = used_at[:0]
        self._against_lru.count(self._now, len(slots) - len(used_at), used_at, is_hit=False)
        self._begin(slots, num_uses)

    def use(self, slots: Slots) -> None:
        """Learn how long it took."""
        self._begin_moment(is_use=True)
        num_uses, used_at = self._num_uses.take(slots), self._used_at.take(slots)
        self._against_lru.count(self._now, 0, used_at, is_hit=True)
        self._lives.end(self._classes(self._kinds_of(slots), num_uses), self._now - used_at)
        self._begin(slots, num_uses)

    def hint(self, slots: Slots, hint: ReuseHint, elapsed_s: float) -> None:
        """Let blocks be of the hint's kind, and learn of that kind from now on."""
        kind, num_uses = self._kind_of(hint, elapsed_s), self._num_uses[slots]
        self._lives.begin(self._classes(self._kinds[slots], num_uses), -1)
        self._kinds[slots] = kind
        self._lives.begin(self._classes(self._kinds[slots], num_uses))

    def park(self, slots: Slots) -> None:
        """Take blocks out of their queues."""
        self._num_evictable -= len(slots)
        for number, batch in _by_number(self._queue_of.take(slots), slots):
            self._queues[number].remove(batch)

    def unpark(self, slots: Slots, *, cold: bool = False) -> None:
        """Put blocks at the hot ends of the queues of their uses; if ``cold``, at the cold end of what goes first."""
        self._num_passed += len(slots)
        self._num_evictable += len(slots)
        if cold:
            self._queue_of[slots] = _COLD
            self._queues[_COLD].push_cold(slots)
            return
        numbers = self._classes(self._kinds_of(slots), self._num_uses.take(slots))
        self._queue_of[slots] = numbers
        for number, batch in _by_number(numbers, slots):
            self._queues[number].push(batch)

    def victims(self, n: int, keep: Slots) -> Slots:
        """Choose from the queue whose first block has the least density, then from that where it is so now."""
        chosen = [self._queues[_COLD].head(n, skip=keep)]
        missing = n - len(chosen[0])
        fronts: dict[int, tuple[Slots, NDArray[np.int64]]] = {}
        numbers = [number for number in self._class_numbers() if len(self._queues[number])]
        if len(numbers) == 1:
            return np.concatenate((chosen[0], self._queues[numbers[0]].head(missing, skip=keep)))
        firsts = self._keys(numbers, np.array([self._queues[number].first for number in numbers], np.int64))
        waiting = [(key, number, -1) for key, number in zip(firsts.tolist(), numbers, strict=True)]
        heapify(waiting)
        while missing:
            _, number, start = heappop(waiting)
            if start < 0:  # only looked at from afar so far
                slots = self._queues[number].head(missing, skip=keep)
                keys = np.maximum.accumulate(self._keys(number, slots))
                fronts[number] = slots, keys
                if len(slots):
                    heappush(waiting, (int(keys[0]), number, 0))
                continue
            slots, keys = fronts[number]
            stop = len(slots)
            if waiting:
                key, other, _ = waiting[0]
                stop = int(keys.searchsorted(key, side="right" if number < other else "left"))
            stop = min(max(stop, start + 1), start + missing)
            chosen.append(slots[start:stop])
            missing -= stop - start
            if stop < len(slots):
                heappush(waiting, (int(keys[stop]), number, stop))
        return np.concatenate(chosen)

    def evict(self, slots: Slots, names: Names) -> None:
        """Take blocks out of their queues and remember how often they were used, and when."""
        self.park(slots)
        self._ghosts.add(names, self._num_uses[slots].astype(np.int32), self._used_at[slots], self._kinds[slots])

    def order(self) -> Slots:
        """Return the blocks in the order in which they would go: after a restart nothing else is known of them."""
        queues = [(number, self._queues[number].head(len(self._queues[number]))) for number in self._class_numbers()]
        slots = np.concatenate([slots for _, slots in queues])
        keys = np.concatenate([np.maximum.accumulate(self._keys(number, slots)) for number, slots in queues])
        by_key = np.argsort(keys, kind="stable")  # the queues' own orders are right, as `victims` merges them
        return np.concatenate((self._queues[_COLD].head(len(self._queues[_COLD])), slots[by_key]))

    def clear(self) -> None:
        """Empty the queues, and forget what was evicted and what was learned."""
        for queue in self._queues:
            queue.clear()
        self._num_evictable = 0
        self._ghosts.clear()
        self._kinds.fill(0)  # those of before mean nothing now
        self._forget_learned()

    def _forget_learned(self) -> None:
        self._lives = Lives(_COLD, self._half_life)
        self._ranks = _ranks(np.zeros((_NUM_KINDS, _NUM_LEVELS, NUM_AGES))).reshape(_COLD, NUM_AGES)
        self._told = np.full((_COLD, NUM_AGES), np.nan)  # hazards, by the hints
        self._kinds_known: dict[_Said, int] = {}
        self._until_learning = _LEARN_EVERY
        self._learned = 0  # the kind that was learned of last
        self._due: dict[int, tuple[Counts, Counts]] = {}  # by kind, what was counted when it was learned of last
        self._against_lru = AgainstLRU(self.num_slots, self._now)

    def _begin(self, slots: Slots, num_uses: NDArray[np.integer[Any]]) -> None:
        """Let a life begin, of blocks that were used so often before this use."""
        num_uses = np.minimum(num_uses, 254) + 1
        self._num_uses[slots] = num_uses
        self._used_at[slots] = self._now
        if self._kinds_known:
            self._kinds[slots] = 0  # what was said of them was said of the time until now
        self._lives.begin(_LEVELS.take(num_uses))

    def _kinds_of(self, slots: Slots) -> NDArray[np.uint8] | None:
        """Return the kinds of blocks; None where nothing was ever said of any, as nearly always."""
        return self._kinds.take(slots) if self._kinds_known else None

    def _classes(self, kinds: NDArray[np.uint8] | None, num_uses: NDArray[np.integer[Any]]) -> Classes:
        levels: Classes = _LEVELS.take(num_uses)
        return levels if kinds is None else kinds * np.uint8(_NUM_LEVELS) + levels

    def _kind_of(self, hint: ReuseHint, elapsed_s: float) -> int:
        """Return the number of a hint's kind, a new one if there is one left, or else 0."""
        octave = None if hint.within_s is None else round(math.log2(hint.within_s))
        said = hint.category, round(4 * hint.probability), octave
        kind = self._kinds_known.get(said)
        if kind is None:
            if len(self._kinds_known) == _NUM_KINDS - 1:
                return 0
            kind = self._kinds_known[said] = len(self._kinds_known) + 1
            used_a_s = (self._now + self._num_passed) / elapsed_s if elapsed_s > 0 else 0.0
            mean_age = max(1.0, hint.within_s * used_a_s if hint.within_s and used_a_s else float(self.num_slots))
            self._told[_of_kind(kind)] = told_hazards(hint.probability, mean_age)
            self._due[kind] = self._lives.of(_of_kind(kind))
        return kind

    def _class_numbers(self) -> range:
        return range((len(self._kinds_known) + 1) * _NUM_LEVELS)

    def _compute_densities(self) -> None:
        """Take into account what was learned of, where something has to go: what only hits needs no order."""
        for kind, (seen, hits) in self._due.items():
            # What nobody told of passes for all kinds together, which are all without a hint as a rule.
            found = hit_densities(seen, hits, self._told[_of_kind(kind)])
            self._ranks[_of_kind(kind)] = _ranks(np.maximum.accumulate(found))
        self._due.clear()

    def _begin_moment(self, *, is_use: bool) -> None:
        """Let time go on, but not between a use and what is added after it: that is the rest of the same prompt.

        Were the tail younger than its head, it would outlive it.
        """
        was_used, self._is_used = self._is_used, is_use
        if is_use or not was_used:
            self._advance(self._num_passed)
            self._num_passed = 0

    def _advance(self, num_blocks: int) -> None:
        """Let time go on, and every now and then take into account what was noted."""
        self._now += num_blocks
        self._lives.advance(num_blocks)
        self._until_learning -= num_blocks
        if self._until_learning <= 0:
            self._until_learning = _LEARN_EVERY
            self._learned = (self._learned + 1) % (len(self._kinds_known) + 1)
            self._due[self._learned] = self._lives.of(_of_kind(self._learned))

    def _keys(self, numbers: int | list[int], slots: Slots) -> NDArray[np.int64]:
        """Return by what blocks of these queues go, the least first: density, and when they were used."""
        self._compute_densities()
        used_at = self._used_at[slots]
        if self._against_lru.prefers_lru:
            return used_at
        keys: NDArray[np.int64] = self._ranks[numbers, age_classes(self._now - used_at)] + used_at
        return keys


def _of_kind(kind: int) -> slice:
    return slice(kind * _NUM_LEVELS, (kind + 1) * _NUM_LEVELS)


def _ranks(densities: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the upper bits of the keys by which blocks go, from their densities by level and age, also of many kinds.

    Where no hit was ever seen what was used less goes first: so a scan longer than any before it takes little along.
    """
    steps = np.log(np.maximum(densities, _LEAST_DENSITY) / _LEAST_DENSITY) / math.log(_SAME) + _NUM_LEVELS
    ranks = np.where(densities > _LEAST_DENSITY, steps, np.arange(_NUM_LEVELS)[:, None])
    return ranks.astype(np.int64) << _TIME_BITS


def _by_number(numbers: Classes, slots: Slots) -> list[tuple[int, Slots]]:
    """Return the slots of each number that has some of them, in the order given."""
    if not len(slots):
        return []
    if len(slots) == 1 or (numbers == numbers[0]).all():
        return [(int(numbers[0]), slots)]
    if len(slots) <= _FEW:
        batches: dict[int, list[int]] = {}
        for number, slot in zip(numbers.tolist(), slots.tolist(), strict=True):
            batches.setdefault(number, []).append(slot)
        return [(number, np.array(batch)) for number, batch in batches.items()]
    return [(number, slots[numbers == number]) for number in np.flatnonzero(np.bincount(numbers)).tolist()]
