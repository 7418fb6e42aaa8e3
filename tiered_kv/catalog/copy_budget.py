"""Which of the blocks that an engine drops are worth a copy: those that come back most often, and not too many of all.

Pure data: no locks; one thread at a time.

Blocks are told apart by how often they were asked for. Of each such level it is counted how many were dropped, and how
many of these were asked for again, copied or not: so what is passed over goes on being judged.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.uses import LEVELS, NUM_LEVELS, Ghosts
from tiered_kv.values.keys import Names

COPIES: Final = 0.495
"""For each block that is asked for, over some time: so many, of what does not come back soon often enough."""
OFTEN: Final = 1 / 4
"""What comes back soon as often is copied always: the time that it takes to copy it is a small part of that saved."""
_KEPT: Final = 0
_DROPPED: Final = 1
_GHOSTS: Final = 16
"""Blocks that are remembered, for each that the engine and the memory below it hold; 14 bytes each."""
_PERIODS: Final = 8
"""In the time in which as many blocks are asked for as both hold: at their ends it is decided what is worth a copy."""
_LEAST_PERIOD: Final = 512
_SPREAD: Final = 4
"""Periods over which what is left over is spent, and what was too much is saved again."""
_SAVED: Final = 64
"""Periods whose copies can be left over: traffic is not even."""
_REMEMBERED: Final = 0.98
"""Of what was counted, from one period to the next."""


class CopyBudget:
    """Decides which blocks to copy out of an engine, level by level, those that come back most often first.

    Of the last level that there is room for only some are copied: those of the first part of a period, as a prompt is
    of use from its head on, and half of each prompt would be of none.

    Attributes:
        cost: What a copy takes, as a part of the time that it takes to compute the block; 0 while that is not known.
            What comes back soon less often is not copied at all.
    """

    def __init__(self, *, engine_blocks: int, memory_blocks: int) -> None:
        """Know nothing yet: then all is copied, until memory is full.

        Args:
            engine_blocks: How many the engine's own cache holds.
            memory_blocks: How many the memory below it holds.
        """
        self.cost = 0.0
        self._eased = 1.0  # less while nothing is copied: else nobody would see that copies are cheap again
        self._num_copied = 0  # in this period
        self._both = engine_blocks + memory_blocks
        self._ghosts = Ghosts(_GHOSTS * self._both)
        self._period = max(_LEAST_PERIOD, self._both // _PERIODS)
        self._now = 0
        self._ends_at = self._period
        self._left = 0.0  # of what might have been copied; below 0 where it was too much
        self._asked = 0.0  # like these three by what is remembered of it
        self._dropped = np.zeros(NUM_LEVELS)
        self._came_back = np.zeros(NUM_LEVELS)
        self._came_soon = np.full(NUM_LEVELS, OFTEN * memory_blocks)  # as if: until memory is full, all is copied
        self._wanted = np.zeros(NUM_LEVELS)  # dropped in this period
        self._is_worth = np.ones(NUM_LEVELS, np.bool_)
        self._last: int | None = None  # the level of which only some are
        self._num_of_last = 0  # that are left, in this period

    def ask(self, names: Names) -> None:
        """Take note of a prompt's blocks, whoever has them."""
        num_uses, used_at, states = self._ghosts.recall(names)
        came_back = ((num_uses > 0) & (states == _DROPPED)).nonzero()[0]
        levels = LEVELS[num_uses[came_back]]
        self._came_back += np.bincount(levels, minlength=NUM_LEVELS)
        is_soon = self._now - used_at[came_back] <= self._soon()
        self._came_soon += np.bincount(levels[is_soon], minlength=NUM_LEVELS)
        self._now += len(names)
        self._asked += len(names)
        self._left += COPIES * len(names)
        self._ghosts.add(names, np.minimum(num_uses, 254) + 1, np.full(len(names), self._now), _KEPT)
        if self._now >= self._ends_at:
            self._decide()

    def drop(self, names: Names) -> NDArray[np.bool_]:
        """Say which to copy of the blocks that the engine drops, and that are not below: ``(n,)``."""
        num_uses, used_at, _ = self._ghosts.recall(names)
        num_uses = np.maximum(num_uses, 1)
        self._ghosts.add(names, num_uses, used_at, _DROPPED)
        levels = LEVELS[num_uses]
        counts = np.bincount(levels, minlength=NUM_LEVELS)
        self._dropped += counts
        self._wanted += counts
        is_worth = self._is_worth[levels]
        if self._num_of_last:
            some = (levels == self._last).nonzero()[0][: self._num_of_last]
            self._num_of_last -= len(some)
            is_worth[some] = True
        num_copied = int(np.count_nonzero(is_worth))
        self._num_copied += num_copied
        self._left -= num_copied
        return is_worth

    def _soon(self) -> float:
        """Return within how many blocks asked for memory has a block yet, if all are copied and the oldest go."""
        return self._both * max(1.0, self._asked / max(1.0, float(self._dropped.sum())))

    def _decide(self) -> None:
        allowed = COPIES * self._period + self._left / _SPREAD
        self._eased = 1.0 if self._num_copied else self._eased / 2
        self._num_copied = 0
        soon = self._came_soon / np.maximum(self._dropped, 1.0)
        pays = soon >= self.cost * self._eased
        self._is_worth = pays & (soon >= OFTEN)
        self._num_of_last = 0
        rates = (self._came_back + 1.0) / (self._dropped + 2.0)
        allowed -= float(self._wanted[self._is_worth].sum())
        for level in np.argsort(-rates, kind="stable").tolist():
            if self._is_worth[level] or not pays[level]:
                continue
            if self._wanted[level] > allowed:
                self._last, self._num_of_last = level, max(0, int(allowed))
                break
            allowed -= self._wanted[level]
            self._is_worth[level] = True
        self._ends_at = self._now + self._period
        most = float(_SAVED * self._period)
        self._left = min(max(self._left, -most), most)
        self._wanted[:] = 0
        self._dropped *= _REMEMBERED
        self._came_back *= _REMEMBERED
        self._came_soon *= _REMEMBERED
        self._asked *= _REMEMBERED
