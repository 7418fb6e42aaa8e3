"""Least hit density: which block promises the fewest hits for the room it takes, as learned from those before it.

Sources: N. Beckmann, H. Chen and A. Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018, for
the idea: blocks of one class and age are alike, and what became of them is counted; J. C. Gittins, "Bandit Processes
and Dynamic Allocation Indices", 1979, for how long to wait for the hits that are counted on. Departures from LHD: a
class is a number of uses and a hint; what was evicted goes on being counted, by its ghost; victims come from the ends
of queues, not from a sample; of two blocks of equal age the one used more often never goes first, so that the head of a
prefix, which every use of its tail uses too, outlives the tail; densities that are about the same count as the same,
and then the older block goes; and where that loses hits that LRU would have, it goes by LRU for a while.

It reads from the top: `AgainstLRU` counts whether LRU would do better, from when each block was used last, and bounds
what a policy that learns loses where there is nothing to learn; `hit_densities` says how many hits a block promises for
the time that it has to be kept, by its class and its age; `Lives` counts what became of blocks, by class and age: how
many lives there were, and at which ages they ended in another use; `LHDPolicy` keeps the queues.
"""

import math
from bisect import bisect_left, bisect_right
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.policies.base import Policy
from tiered_kv.catalog.slots import SlotQueue, by_number
from tiered_kv.catalog.table import Slots
from tiered_kv.catalog.uses import LEVELS, NUM_LEVELS, Ghosts, Times, Uses, at_least_as_often
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import Names

_WINDOWS: Final = 1024
_A_TIER: Final = 16
"""Windows, while as many blocks are used as there are slots: how exactly it is known what LRU holds."""
_LEAST_WIDTH: Final = 64
_LOSS: Final = 0.1
"""Hits that may be lost before LRU's order is taken, as a part of the slots."""
_FEW: Final = 32
"""So many slots are told apart one by one sooner than numpy begins, and without letting go of the interpreter."""
_NOTED_AT_ONCE: Final = 64
"""Batches of blocks, at most, that are judged together: those of one window, until somebody asks."""
_FIRST_PAUSE: Final = 4
"""For how long it is, in blocks used for each slot; twice as long each time that the next try has lost too."""


class AgainstLRU:
    """Counts hits that LRU would not have had, and hits that it would have had. Takes 8 KB, and constant time.

    LRU holds the blocks used last, as many as there are slots. So it is enough to count, by when they were used last,
    how many there are. As soon as a tenth of the slots more hits were lost than gained since it went best, the policy
    is to go by LRU for a while, and then to try again. So it never loses much, whatever comes, and the less often
    the longer nothing comes of it.

    Attributes:
        held_since: An engine above has the blocks used since then, None where there is none: LRU would have those, and
            as many others as there are slots.
    """

    def __init__(self, num_slots: int, now: int) -> None:
        """Begin at a moment, counted in blocks used like all others, with a tier of so many slots."""
        self._prefers_lru = False
        self._noted: list[tuple[int, int, Times, bool]] = []
        self._num_slots = num_slots
        self._begun_at = now
        self._width = max(_LEAST_WIDTH, num_slots // _A_TIER)
        self._window = now // self._width
        self._counts = np.zeros(_WINDOWS, np.int64)  # of blocks, by the window of their last use
        self._since = now  # LRU has the blocks used since then
        self.held_since: int | None = None
        self._most_lost = max(1.0, _LOSS * num_slots)
        self._lost = 0.0  # since it went best
        self._gained = 0.0  # since LRU was left, or since it last paid
        self._pause = _FIRST_PAUSE * num_slots
        self._tries_at = now

    @property
    def prefers_lru(self) -> bool:
        """What is to be done now."""
        self._settle()
        return self._prefers_lru

    def count(self, now: int, num_new: int, used_at: Times, *, is_hit: bool) -> None:
        """Take note of blocks that are used now, all of them hits or none.

        Args:
            now: When.
            num_new: How many more there are of which nothing is known.
            used_at: When the others were used last, ``(n,)``.
            is_hit: Whether they are here.
        """
        if (window := now // self._width) != self._window:
            self._settle()
            self._go_on(window)
        self._noted.append((now, num_new, used_at, is_hit))
        if len(self._noted) >= _NOTED_AT_ONCE:
            self._settle()

    def _settle(self) -> None:
        """Judge by what was noted of the present window: together, as each call of numpy takes more than a block."""
        noted, self._noted = self._noted, []
        if not noted:
            return
        used_at = np.concatenate([each for _, _, each, _ in noted])
        self._counts[self._window % _WINDOWS] += sum(num_new for _, num_new, _, _ in noted) + len(used_at)
        is_known = used_at >= max(self._begun_at, (self._window - _WINDOWS + 1) * self._width)
        np.subtract.at(self._counts, used_at[is_known] // self._width % _WINDOWS, 1)
        in_lru = is_known & (used_at >= self._since)
        ends = np.cumsum([0, *(len(each) for _, _, each, _ in noted)])
        known_of, in_lru_of = (np.diff(np.concatenate(([0], each.cumsum()))[ends]) for each in (is_known, in_lru))
        for (now, _, _, is_hit), num_known, num_lru in zip(noted, known_of.tolist(), in_lru_of.tolist(), strict=True):
            gained = num_known - num_lru if is_hit else -num_lru
            if gained or self._prefers_lru:
                self._judge(now, gained)

    def _go_on(self, window: int) -> None:
        passed = np.arange(max(self._window + 1, window - _WINDOWS + 1), window + 1)
        self._counts[passed % _WINDOWS] = 0
        self._window = window
        newest_first = np.cumsum(self._counts[np.arange(window, window - _WINDOWS, -1) % _WINDOWS])
        num_above = 0
        if self.held_since is not None:
            num_above = int(newest_first[min(window - self.held_since // self._width, _WINDOWS - 1)])
        num_held = int(np.searchsorted(newest_first, self._num_slots + num_above, side="right"))
        self._since = max(self._begun_at, (window - num_held) * self._width)

    def _judge(self, now: int, gained: int) -> None:
        if self._prefers_lru:
            self._prefers_lru = now < self._tries_at
            return
        self._lost = max(0.0, self._lost - gained)
        self._gained += gained
        if self._gained > self._most_lost:
            self._gained = 0.0
            self._pause = _FIRST_PAUSE * self._num_slots
        elif self._lost > self._most_lost:
            self._prefers_lru = True
            self._tries_at = now + self._pause
            self._pause *= 2
            self._lost = self._gained = 0.0


NUM_AGES: Final = 48
_YOUNGEST: Final = 16
_AGES_AN_OCTAVE: Final = 2

Counts = NDArray[np.float64]

_STARTS: Final[Counts] = np.concatenate(([0.0], _YOUNGEST * 2.0 ** (np.arange(NUM_AGES) / _AGES_AN_OCTAVE)))
_BOUNDS: Final = np.ceil(_STARTS[1:NUM_AGES]).astype(np.int64)
_BOUNDS_ONE_BY_ONE: Final[list[int]] = _BOUNDS.tolist()
_LENGTHS: Final[Counts] = np.diff(_STARTS)
_IS_LATER: Final = np.triu(np.ones((NUM_AGES, NUM_AGES), np.bool_))
_MOST_CERTAIN: Final = 0.999
_TOLD_COUNTS: Final = 16.0


def age_classes(ages: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the class of each age, two an octave from 16 on: ``(n,)``, below `NUM_AGES`."""
    if len(ages) <= _FEW:
        return np.array([bisect_right(_BOUNDS_ONE_BY_ONE, age) for age in ages.tolist()], np.int64)
    return _BOUNDS.searchsorted(ages, side="right")


def told_hazards(probability: float, mean_age: float) -> Counts:
    """Return what to expect of blocks that come back with so much probability, in an exponential time of this mean.

    Returns:
        ``(NUM_AGES,)``: the part that is used at each age, of what was not used before.

    Source: the reuse times of "KVCache Cache in the Wild", USENIX ATC 2025, which are exponential by category.
    """
    gone = probability * -np.expm1(-_STARTS / mean_age)
    hazards: Counts = np.diff(gone) / np.maximum(1 - gone[:-1], 1 - _MOST_CERTAIN)
    return hazards


def hit_densities(seen: Counts, hits: Counts, told: Counts) -> Counts:
    """Return the hit density of blocks of each class at the beginning of each age.

    A block is kept for as long as pays best: its density is the largest, over all ages at which one might give it up,
    of the hits until then over the time spent until then. A class of which little is known passes for all together.

    Args:
        seen: ``(n,)``, how many blocks there were of each class.
        hits: ``(n, NUM_AGES)``, how many of them were used again, by their ages then.
        told: ``(n, NUM_AGES)``, the hazards that a caller told of, NaN where nobody did. They count as much as 16
            blocks seen.

    Returns:
        ``(n, NUM_AGES)``, in hits for each block used.
    """
    shared = _hazards(seen.sum(keepdims=True), hits.sum(axis=0, keepdims=True), np.zeros((1, NUM_AGES)), np.ones(1))
    is_told = ~np.isnan(told[:, 0])
    priors = np.where(is_told[:, None], told, shared)
    hazards = _hazards(seen, hits, priors, np.where(is_told, _TOLD_COUNTS, 1.0))
    zero = np.zeros((len(seen), 1))
    living = np.concatenate((zero + 1, np.cumprod(1 - hazards, axis=1)), axis=1)
    spent = np.concatenate((zero, np.cumsum(_LENGTHS * living[:, :-1] * (1 - hazards / 2), axis=1)), axis=1)
    num_hits = living[:, :-1, None] - living[:, None, 1:]
    time = spent[:, None, 1:] - spent[:, :-1, None]
    ratios = np.divide(num_hits, time, out=np.zeros_like(time), where=_IS_LATER & (time > 0))
    densities: Counts = ratios.max(axis=2)
    return densities


def _hazards(seen: Counts, hits: Counts, priors: Counts, counts: Counts) -> Counts:
    """Return, by class and age, the part that was used then of what was not used before.

    A class's prior counts as so many blocks seen.
    """
    left = np.maximum(seen[:, None] - (np.cumsum(hits, axis=1) - hits), hits)
    hazards: Counts = np.minimum((hits + priors * counts[:, None]) / (left + counts[:, None]), _MOST_CERTAIN)
    return hazards


_SETTLE_AT: Final = 512
"""Blocks noted that are counted together: by the batch, each of which takes what numpy needs to begin, it is dear."""
_LARGEST_WEIGHT: Final = 1e6

Classes = NDArray[np.uint8]
_Batch = tuple[float, Classes, NDArray[np.int64] | None]


class Lives:
    """Counts lives of blocks, one from each use to the next. What was seen some time ago counts for less.

    What is noted is counted before it is looked at, and after every few hundred blocks.
    """

    def __init__(self, num_classes: int, half_life: float) -> None:
        """Make empty counts, in which what was seen ``half_life`` blocks ago counts half."""
        self._half_life = half_life
        self._weight = 1.0  # of what is seen now; it grows, so that all before it counts for less
        self._seen = np.zeros(num_classes)  # by class: blocks that came to it, by weight
        self._hits = np.zeros((num_classes, NUM_AGES))  # of these, by their age, those that were used again
        self._noted: list[_Batch] = []
        self._num_noted = 0

    def advance(self, num_blocks: int) -> None:
        """Let time go on by so many blocks."""
        self._weight *= 2.0 ** (num_blocks / self._half_life)
        if self._weight > _LARGEST_WEIGHT:
            self._settle()
            self._seen /= self._weight
            self._hits /= self._weight
            self._weight = 1.0

    def begin(self, classes: Classes, sign: int = 1) -> None:
        """Note that lives of blocks of these classes begin; with ``sign=-1``, that they were not of these."""
        self._note(sign * self._weight, classes, None)

    def end(self, classes: Classes, ages: NDArray[np.int64]) -> None:
        """Note that blocks of these classes were used again, at these ages."""
        self._note(self._weight, classes, ages)

    def of(self, classes: slice) -> tuple[Counts, Counts]:
        """Return of some classes how many lives began, ``(n,)``, and ended in a use, ``(n, NUM_AGES)``, as of now."""
        self._settle()
        return self._seen[classes] / self._weight, self._hits[classes] / self._weight

    def _note(self, weight: float, classes: Classes, ages: NDArray[np.int64] | None) -> None:
        if not len(classes):
            return  # or what is noted would grow without being counted
        self._noted.append((weight, classes, ages))
        self._num_noted += len(classes)
        if self._num_noted >= _SETTLE_AT:
            self._settle()

    def _settle(self) -> None:
        begun = [(weight, classes) for weight, classes, ages in self._noted if ages is None]
        ended = [(weight, classes, ages) for weight, classes, ages in self._noted if ages is not None]
        self._noted.clear()
        self._num_noted = 0
        if begun:
            classes = np.concatenate([each for _, each in begun])
            weights = np.repeat([weight for weight, _ in begun], [len(each) for _, each in begun])
            self._seen += np.bincount(classes, weights, minlength=len(self._seen))
        if ended:
            classes = np.concatenate([each for _, each, _ in ended])
            weights = np.repeat([weight for weight, _, _ in ended], [len(each) for _, each, _ in ended])
            ages = np.concatenate([each for _, _, each in ended])
            np.add.at(self._hits, (classes, age_classes(ages)), weights)


_Said = tuple[str, int, int | None]

# Looked up by indexes of numpy's own type: to convert others it lets go of the interpreter.
_ONE_MORE: Final = np.minimum(np.arange(1, 257), 255).astype(np.uint8)
"""By number of uses, what it is after one more."""
_NUM_KINDS: Final = 8
"""Of hints; the first is none."""
_HELD: Final = np.uint8(1 << 7)
"""Beside its kind, of a ghost: the engine has the block, or has dropped it since without anybody storing it here."""
_COLD: Final = _NUM_KINDS * NUM_LEVELS
"""The queue of what is to go first."""
_GHOSTS: Final = 4
"""Blocks that are remembered when they are gone, for each slot."""
_LEAST_GHOSTS: Final = 1 << 15
"""A small tier learns how long blocks stay away only if it remembers more of them; 14 bytes each."""
_LEARN_EVERY: Final = 512
"""Blocks used; to compute densities takes some 100 us."""
_TOUCHED_AT_ONCE: Final = 512
"""Blocks. With 64 a load of four took 8 % more than by LRU, with so many 3 %; to learn from them takes 0.25 ms."""
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
        self._held = np.full(num_slots, 0, dtype=np.uint8)  # `_HELD` if the engine has it, too
        self._any_held = False
        num_ghosts = max(_LEAST_GHOSTS, _GHOSTS * num_slots)
        self._ghosts = Ghosts(num_ghosts)
        self._half_life = 2.0 * num_ghosts
        self._now = 0
        self._num_passed = 0
        self._num_evictable = 0
        self._is_used = False
        self._touched: list[Slots] = []
        self._num_touched = 0
        self._forget_learned()

    def resize(self, num_slots: int) -> None:
        """Take another number of slots. What LRU would hold is counted anew."""
        self._settle()
        super().resize(num_slots)
        self._against_lru = AgainstLRU(num_slots, self._now)

    def __len__(self) -> int:
        return self._num_evictable

    def add(self, slots: Slots, names: Names) -> None:
        """Learn from those that were here before, and let them go on counting."""
        if self._touched:
            self._settle()
        self._begin_moment(is_use=False)
        num_uses, used_at, kinds = self._ghosts.recall(names)
        self._let_go(slots)
        if self._any_held and (was_held := (kinds & _HELD > 0) & (num_uses > 0)).any():
            self._add_dropped(slots[was_held], num_uses[was_held], used_at[was_held])
            others = (~was_held).nonzero()[0]
            slots, num_uses, used_at, kinds = slots[others], num_uses[others], used_at[others], kinds[others]
        known = num_uses.nonzero()[0]
        if len(known):
            ended, used_at = self._classes(kinds[known], num_uses[known]), used_at[known]
            self._lives.end(ended, self._now - used_at)
            num_uses = at_least_as_often(num_uses)
        else:
            used_at = used_at[:0]
        self._against_lru.count(self._now, len(slots) - len(used_at), used_at, is_hit=False)
        self._begin(slots, num_uses)

    def _add_dropped(self, slots: Slots, num_uses: Uses, used_at: Times) -> None:
        """Have blocks that the engine has had till now go on with the lives that they live: this is no use of them."""
        self._num_uses[slots], self._used_at[slots] = num_uses, used_at
        self._kinds[slots] = 0
        self._against_lru.held_since = int(used_at.max())

    def use(self, slots: Slots) -> None:
        """Learn how long it took."""
        if self._touched:
            self._settle()
        self._begin_moment(is_use=True)
        if not len(slots):
            return
        num_uses, used_at = self._num_uses[slots], self._used_at[slots]
        self._let_go(slots)
        self._against_lru.count(self._now, 0, used_at, is_hit=True)
        self._lives.end(self._classes_of(slots, num_uses), self._now - used_at)
        self._begin(slots, num_uses)

    def touch(self, slots: Slots) -> None:
        """Note uses. It learns from many touches at once, as most of the cost of learning is fixed."""
        if not len(slots) or self._kinds_known:
            super().touch(slots)
            return
        self._touched.append(slots)
        self._num_touched += len(slots)
        if self._num_touched >= _TOUCHED_AT_ONCE:
            self._settle()

    def _settle(self) -> None:
        """Learn how long it took until blocks were touched, each batch at its time, and move them between queues."""
        if not self._touched:
            return
        touched, self._touched, self._num_touched = self._touched, [], 0
        slots = np.concatenate(touched)
        self._begin_moment(is_use=True)
        lengths = [len(each) for each in touched]
        moments = list(accumulate(lengths[:-1], initial=self._now))
        times = np.array(moments).repeat(lengths)
        num_uses, used_at = self._num_uses[slots], self._used_at[slots]
        is_last = _follow_repeats(slots, times, num_uses, used_at) if len(touched) > 1 else None
        moved = slots if is_last is None else slots[is_last]
        for number, batch in by_number(self._queue_of[moved], moved):
            self._queues[number].remove(batch)
        self._let_go(slots)
        start = 0
        for moment, n in zip(moments, lengths, strict=True):
            self._against_lru.count(moment, 0, used_at[start : start + n], is_hit=True)
            start += n
        self._lives.end(LEVELS[num_uses.astype(np.intp)], times - used_at)
        levels = self._begin(slots, num_uses)
        self._used_at[slots] = times
        self._advance(moments[-1] - self._now)
        self._num_passed += lengths[-1]
        self._queue_of[slots] = levels
        for number, batch in by_number(levels if is_last is None else levels[is_last], moved):
            self._queues[number].push(batch)

    def hold(self, slots: Slots, absent: Names) -> None:
        """Learn from uses of what is not here, whose ghosts go on counting."""
        self._settle()
        self._held[slots], self._any_held = _HELD, True
        if not len(absent):
            return
        self._begin_moment(is_use=False)
        num_uses, used_at, kinds = self._ghosts.recall(absent)
        known = num_uses.nonzero()[0]
        was_held = (kinds[known] & _HELD) > 0  # then the engine has it yet, as a rule, and so would LRU
        self._lives.end(self._classes(kinds[known] & ~_HELD, num_uses[known]), self._now - used_at[known])
        self._against_lru.count(self._now, 0, used_at[known[was_held]], is_hit=True)
        lost = used_at[known[~was_held]]
        self._against_lru.count(self._now, len(absent) - len(known), lost, is_hit=False)
        num_uses = np.minimum(num_uses, 254) + 1
        self._lives.begin(LEVELS[num_uses.astype(np.intp)])
        self._ghosts.add(absent, num_uses, np.full(len(absent), self._now), np.full(len(absent), _HELD))
        self._num_passed += len(absent)

    def leave(self, slots: Slots) -> None:
        """Take note that LRU would not have what was used no later."""
        self._settle()
        self._let_go(slots)
        if len(slots):
            self._against_lru.held_since = int(self._used_at[slots].max())

    def hint(self, slots: Slots, hint: ReuseHint, elapsed_s: float) -> None:
        """Let blocks be of the hint's kind, and learn of that kind from now on."""
        self._settle()
        kind, num_uses = self._kind_of(hint, elapsed_s), self._num_uses[slots]
        self._lives.begin(self._classes(self._kinds[slots], num_uses), -1)
        self._kinds[slots] = kind
        self._lives.begin(self._classes(self._kinds[slots], num_uses))

    def park(self, slots: Slots) -> None:
        """Take blocks out of their queues."""
        if self._touched:
            self._settle()
        self._num_evictable -= len(slots)
        for number, batch in by_number(self._queue_of[slots], slots):
            self._queues[number].remove(batch)

    def unpark(self, slots: Slots, *, cold: bool = False) -> None:
        """Put blocks at the hot ends of the queues of their uses; if ``cold``, at the cold end of what goes first."""
        if self._touched:
            self._settle()
        self._num_passed += len(slots)
        self._num_evictable += len(slots)
        if cold:
            self._queue_of[slots] = _COLD
            self._queues[_COLD].push_cold(slots)
            return
        numbers = self._classes_of(slots, self._num_uses[slots])
        self._queue_of[slots] = numbers
        for number, batch in by_number(numbers, slots):
            self._queues[number].push(batch)

    def victims(self, n: int, keep: Slots) -> Slots:
        """Choose from the queue whose first block has the least density, then from that where it is so now."""
        self._settle()
        chosen = [self._queues[_COLD].head(n, skip=keep)]
        missing = n - len(chosen[0])
        fronts: dict[int, tuple[Slots, list[int]]] = {}
        numbers = [number for number in self._class_numbers() if len(self._queues[number])]
        if len(numbers) == 1:
            return np.concatenate((chosen[0], self._queues[numbers[0]].head(missing, skip=keep)))
        first = np.array([self._queues[number].first for number in numbers], np.int64)
        firsts = self._keys(np.array(numbers, np.int64), first)
        waiting = [(key, number, -1) for key, number in zip(firsts.tolist(), numbers, strict=True)]
        heapify(waiting)
        while missing:
            _, number, start = heappop(waiting)
            if start < 0:  # only looked at from afar so far
                slots = self._queues[number].head(missing, skip=keep)
                keys = np.maximum.accumulate(self._keys(number, slots)).tolist()
                fronts[number] = slots, keys
                if len(slots):
                    heappush(waiting, (keys[0], number, 0))
                continue
            slots, keys = fronts[number]
            stop = len(slots)
            if waiting:
                key, other, _ = waiting[0]
                stop = bisect_right(keys, key) if number < other else bisect_left(keys, key)
            stop = min(max(stop, start + 1), start + missing)
            chosen.append(slots[start:stop])
            missing -= stop - start
            if stop < len(slots):
                heappush(waiting, (keys[stop], number, stop))
        return np.concatenate(chosen)

    def evict(self, slots: Slots, names: Names) -> None:
        """Take blocks out of their queues and remember how often they were used, and when."""
        self.park(slots)
        kinds = self._kinds[slots] | self._held[slots]
        self._ghosts.add(names, self._num_uses[slots].astype(np.int32), self._used_at[slots], kinds)

    def order(self) -> Slots:
        """Return the blocks in the order in which they would go: after a restart nothing else is known of them."""
        self._settle()
        queues = [(number, self._queues[number].head(len(self._queues[number]))) for number in self._class_numbers()]
        slots = np.concatenate([slots for _, slots in queues])
        keys = np.concatenate([np.maximum.accumulate(self._keys(number, slots)) for number, slots in queues])
        by_key = np.argsort(keys, kind="stable")  # the queues' own orders are right, as `victims` merges them
        return np.concatenate((self._queues[_COLD].head(len(self._queues[_COLD])), slots[by_key]))

    def clear(self) -> None:
        """Empty the queues, and forget what was evicted and what was learned."""
        self._settle()
        for queue in self._queues:
            queue.clear()
        self._num_evictable = 0
        self._ghosts.clear()
        self._held.fill(0)
        self._any_held = False
        self._kinds.fill(0)  # those of before mean nothing now
        self._forget_learned()

    def _forget_learned(self) -> None:
        self._lives = Lives(_COLD, self._half_life)
        self._ranks = _ranks(np.zeros((_NUM_KINDS, NUM_LEVELS, NUM_AGES))).reshape(_COLD, NUM_AGES)
        self._told = np.full((_COLD, NUM_AGES), np.nan)  # hazards, by the hints
        self._kinds_known: dict[_Said, int] = {}
        self._until_learning = _LEARN_EVERY
        self._learned = 0  # the kind that was learned of last
        self._due: dict[int, tuple[Counts, Counts]] = {}  # by kind, what was counted when it was learned of last
        self._against_lru = AgainstLRU(self.num_slots, self._now)

    def _begin(self, slots: Slots, num_uses: NDArray[np.integer[Any]]) -> Classes:
        """Let a life begin, of blocks that were used so often before this use; return their levels."""
        num_uses = _ONE_MORE[num_uses.astype(np.intp)]
        self._num_uses[slots] = num_uses
        self._used_at[slots] = self._now
        if self._kinds_known:
            self._kinds[slots] = 0  # what was said of them was said of the time until now
        levels: Classes = LEVELS[num_uses.astype(np.intp)]
        self._lives.begin(levels)
        return levels

    def _let_go(self, slots: Slots) -> None:
        """The engine has them no more, or this cache has been asked for them."""
        if self._any_held:
            self._held[slots] = 0

    def _classes_of(self, slots: Slots, num_uses: NDArray[np.integer[Any]]) -> Classes:
        """Return the classes of blocks that are here; nearly always nothing was ever said of any."""
        if self._kinds_known:
            return self._classes(self._kinds[slots], num_uses)
        levels: Classes = LEVELS[num_uses.astype(np.intp)]
        return levels

    def _classes(self, kinds: NDArray[np.uint8], num_uses: NDArray[np.integer[Any]]) -> Classes:
        levels: Classes = LEVELS[num_uses.astype(np.intp)]
        return kinds * np.uint8(NUM_LEVELS) + levels

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
        return range((len(self._kinds_known) + 1) * NUM_LEVELS)

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
        if self._num_passed and (is_use or not was_used):
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

    def _keys(self, numbers: int | Slots, slots: Slots) -> NDArray[np.int64]:
        """Return by what blocks of these queues go, the least first: density, and when they were used."""
        self._compute_densities()
        used_at = self._used_at[slots]
        if self._against_lru.prefers_lru:
            return used_at
        places = numbers * NUM_AGES + age_classes(self._now - used_at)
        keys: NDArray[np.int64] = self._ranks.reshape(-1)[places] + used_at
        return keys


def _follow_repeats(
    slots: Slots, times: Times, num_uses: NDArray[np.uint8], used_at: Times
) -> NDArray[np.bool_] | None:
    """Of slots that were touched again, change ``num_uses`` and ``used_at`` to what earlier touches have made of them.

    Returns:
        Which touches are the last ones of their slots; None if no slot comes twice.
    """
    if len(set(slots.tolist())) == len(slots):
        return None
    order = np.argsort(slots, kind="stable")
    is_again = slots[order[1:]] == slots[order[:-1]]
    later, sooner = order[1:][is_again], order[:-1][is_again]
    used_at[later] = times[sooner]
    is_last = np.ones(len(slots), np.bool_)
    is_last[sooner] = False
    at = np.arange(len(slots))
    num_sooner = at - np.maximum.accumulate(np.where(np.concatenate(([False], is_again)), 0, at))
    num_uses[order] = np.minimum(num_uses[order] + num_sooner, 255)
    return is_last


def _of_kind(kind: int) -> slice:
    return slice(kind * NUM_LEVELS, (kind + 1) * NUM_LEVELS)


def _ranks(densities: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the upper bits of the keys by which blocks go, from their densities by level and age, also of many kinds.

    Where no hit was ever seen what was used less goes first: so a scan longer than any before it takes little along.
    """
    steps = np.log(np.maximum(densities, _LEAST_DENSITY) / _LEAST_DENSITY) / math.log(_SAME) + NUM_LEVELS
    ranks = np.where(densities > _LEAST_DENSITY, steps, np.arange(NUM_LEVELS)[:, None])
    return ranks.astype(np.int64) << _TIME_BITS
