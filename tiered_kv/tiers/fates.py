"""What became of the blocks of one cache: counts and times for `stats`, the last fate of each name for `explain`.

One a cache, shared by its chains; for the event loop's thread. A `Histogram` is cheap to tell, and worked out when
somebody looks.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Literal, Protocol

import numpy as np

from tiered_kv.catalog.books import Change
from tiered_kv.catalog.index import TierIndex
from tiered_kv.catalog.uses import Fate, History
from tiered_kv.values.errors import Reason
from tiered_kv.values.keys import Names

if TYPE_CHECKING:  # it brings torch, which who reads events alone does without
    from tiered_kv.tiers.tier import Batch

SECONDS: Final = tuple(digit * 10.0**power for power in range(-4, 2) for digit in (1, 2.5, 5))
"""Upper bounds of a histogram's ranges; what takes longer is in one more."""
_COUNTED_AT_ONCE: Final = 256
_FATES: Final = 8
_MOST_DETAILS: Final = 31
_NOTED_AT_ONCE: Final = 256
"""Told to the history together, in 0.15 ms: to tell it of one block takes 70 us."""
_FATE_OF: Final = {
    Change.EVICTED: Fate.EVICTED,
    Change.REMOVED: Fate.REMOVED,
    Change.EXPIRED: Fate.EXPIRED,
    Change.CORRUPT: Fate.CORRUPT,
    Change.LOST: Fate.FAILED,
}


@dataclass(frozen=True)
class IndexPlace:
    """Where an index is: one KV group of one rank in one tier."""

    tier: str
    group: int
    rank: int


class HasIndex(Protocol):
    """A tier that this cache owns, and so has the books of."""

    index: TierIndex

    @property
    def may_hold_blocks(self) -> bool:
        """Whether blocks may ever stay there."""
        ...


OnPlaceChange = Callable[[IndexPlace, Change, Names], None]
Direction = Literal["load", "store"]
OnUse = Callable[[Direction, Names], None]
OnLoad = Callable[["Batch", int, str], None]
"""Takes the blocks that a load was asked for, how many came, and what befell the first of the others."""


class Fates:
    """Counts what happened to blocks since the cache was opened, and remembers why those that left are gone.

    Attributes:
        requested: Blocks that loads were asked for: each is a hit of one tier, or missed.
        missed: Those of them that were not in place at the end.
        missed_because: The same by reason; they add up to ``missed``.
        store_requested: Blocks that stores were given: each is stored, present or dropped.
        dropped_because: The dropped ones by reason.
        load_seconds: From each load's call to its end.
        store_seconds: From each store's call until its source was free again.
        load_faults: What shortened loads: by ``"tier: reason"``.
        preemptions: Sequences that were swapped out.
        tiers: The owned tiers, by place.
        listeners: Called with every change of an owned tier.
        on_use: Called with what each load and store is about, in prompt order, if somebody wants to know.
        on_load: Called when a load has ended, likewise.
    """

    def __init__(self) -> None:
        self.requested = self.missed = 0
        self.store_requested = self.stored = self.present = self.dropped = 0
        self.missed_because, self.dropped_because = Counter[str](), Counter[Reason]()
        self.load_seconds, self.store_seconds = Histogram(), Histogram()
        self.load_faults = Counter[str]()
        self.preemptions = 0
        self.on_use: OnUse | None = None
        self.on_load: OnLoad | None = None
        self.tiers: dict[IndexPlace, HasIndex] = {}
        self.listeners: list[OnPlaceChange] = []
        self._history = History()
        self._details = [""]
        self._noted = np.full((_NOTED_AT_ONCE, 4), 0, dtype=np.uint64)  # not told to the history yet
        self._codes = np.full(_NOTED_AT_ONCE, 0, dtype=np.uint8)
        self._num_noted = 0

    def load_ended(self, batch: "Batch", loaded: int, why_not_more: str, seconds: float) -> None:
        """Count a load that has ended, with its blocks, and tell of it. Of plans `count_load` is told, by rank."""
        self.count_load(batch, loaded, why_not_more)
        self.load_seconds.saw(seconds)
        self.use("load", batch.names)

    def count_load(self, batch: "Batch", loaded: int, why_not_more: str) -> None:
        """Count the blocks of a load that has ended; those behind the first one missed are missed for its reason."""
        num_requested = len(batch.names)
        self.requested += num_requested
        if missed := num_requested - loaded:
            self.missed += missed
            self.missed_because[why_not_more] += missed
        if self.on_load is not None:
            self.on_load(batch, loaded, why_not_more)

    def count_store(self, requested: int, *, stored: int, present: int, dropped: Mapping[Reason, int]) -> None:
        """Count the blocks of a store that has let go of its source; ``dropped`` by reason."""
        self.store_requested += requested
        self.stored += stored
        self.present += present
        if dropped:
            self.dropped += sum(dropped.values())
            self.dropped_because.update(dropped)

    def use(self, direction: Direction, names: Names) -> None:
        """Take note that a load or a store of these blocks begins or ends."""
        if self.on_use is not None:
            self.on_use(direction, names)

    def watch(self, place: IndexPlace, tier: HasIndex) -> None:
        """Take note of whatever changes in the index of a tier."""
        self.tiers[place] = tier
        tier.index.on_change = partial(self.changed, place)

    def changed(self, place: IndexPlace, change: Change, names: Names) -> None:
        """Take note of what changed in an owned tier; see `catalog.books.OnChange`."""
        if change is Change.CLEARED:
            self._forget()
        elif (fate := _FATE_OF.get(change)) is not None:
            self.note(names, fate, place.tier)
        for listener in self.listeners:
            listener(place, change, names)

    def note(self, names: Names, fate: Fate, detail: str) -> None:
        """Remember what befell blocks just now, in the place of what befell them before.

        Args:
            names: Of the blocks.
            fate: What it was.
            detail: The tier, or a reason of a few fixed words.
        """
        if not len(names):
            return
        code = fate + _FATES * self._number_of(detail)
        if len(names) > _NOTED_AT_ONCE:
            self._settle()
            self._history.note(names, code)
            return
        while len(names):
            start = self._num_noted
            part, names = names[: _NOTED_AT_ONCE - start], names[_NOTED_AT_ONCE - start :]
            self._num_noted = stop = start + len(part)
            self._noted[start:stop], self._codes[start:stop] = part, code
            if stop == _NOTED_AT_ONCE:
                self._settle()

    def of(self, names: Names) -> list[tuple[Fate, str]]:
        """Return what befell each block last, and the detail of it, as far as is remembered."""
        self._settle()
        return [(Fate(code % _FATES), self._details[code // _FATES]) for code in self._history.fates(names).tolist()]

    def _settle(self) -> None:
        n, self._num_noted = self._num_noted, 0
        if n:
            self._history.note(self._noted[:n], self._codes[:n])

    def _forget(self) -> None:
        self._num_noted = 0
        self._history.clear()

    def _number_of(self, detail: str) -> int:
        if detail in self._details:
            return self._details.index(detail)
        if len(self._details) == _MOST_DETAILS:
            return 0
        self._details.append(detail)
        return len(self._details) - 1


class Histogram:
    """How often a value of each range was seen. For one thread.

    Attributes:
        bounds: Upper bounds of the ranges, ascending; the last range has none.
    """

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self._total = 0.0
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._seen: list[float] = []  # not counted yet

    def saw(self, value: float) -> None:
        """Count a value."""
        self._seen.append(value)
        if len(self._seen) == _COUNTED_AT_ONCE:
            self._count()

    @property
    def total(self) -> float:
        """The sum of what was seen."""
        self._count()
        return self._total

    def copy(self) -> "Histogram":
        """Return a histogram with the same counts."""
        self._count()
        copied = Histogram(self.bounds)
        copied._total, copied._counts = self._total, self._counts.copy()
        return copied

    def cumulated(self) -> list[tuple[str, float]]:
        """Return how many values were at most each bound, as Prometheus has it: the last one is ``"+Inf"``."""
        self._count()
        names = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts.tolist())), strict=True))

    def _count(self) -> None:
        seen = np.array(self._seen)
        self._seen.clear()
        self._total += float(seen.sum())
        self._counts += np.bincount(np.searchsorted(self.bounds, seen), minlength=len(self._counts))
