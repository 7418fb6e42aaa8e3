"""Whether LRU would do better: what it would hold is known from when each block was used last.

What the count does: it bounds what a policy that learns loses where there is nothing to learn, or where what it has
learned is no longer so.
"""

from typing import Final

import numpy as np

from tiered_kv.catalog.policies.ghosts import Times

_WINDOWS: Final = 1024
_A_TIER: Final = 16
"""Windows, while as many blocks are used as there are slots: how exactly it is known what LRU holds."""
_LEAST_WIDTH: Final = 64
_LOSS: Final = 0.1
"""Hits that may be lost before LRU's order is taken, as a part of the slots."""
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
        if self._noted and now // self._width != self._window:
            self._settle()
        self._go_on(now)
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
        start = 0
        for now, _, each, is_hit in noted:
            of_batch = slice(start, start := start + len(each))
            num_lru = int(np.count_nonzero(in_lru[of_batch]))
            self._judge(now, int(np.count_nonzero(is_known[of_batch])) - num_lru if is_hit else -num_lru)

    def _go_on(self, now: int) -> None:
        window = now // self._width
        if window == self._window:
            return
        passed = np.arange(max(self._window + 1, window - _WINDOWS + 1), window + 1)
        self._counts[passed % _WINDOWS] = 0
        self._window = window
        newest_first = self._counts[np.arange(window, window - _WINDOWS, -1) % _WINDOWS]
        num_held = int(np.searchsorted(np.cumsum(newest_first), self._num_slots, side="right"))
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
