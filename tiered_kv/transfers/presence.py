"""Which storage tier has which blocks of one transfer: each shared tier is asked once, as far as its answer reaches."""

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.results import TierFault
from tiered_kv.tiers.base import Mask
from tiered_kv.tiers.batch import Batch
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.storage import StorageTier

_ASKED_AT_ONCE: Final = 1024


class _Known(IntEnum):
    """What is known of a block in one shared tier."""

    UNASKED = 0
    ABSENT = 1
    THERE = 2
    BEYOND = 3
    """Past the first block that the tier lacks: it has not said. Absent, unless no other tier has the block."""


# numpy compares an array with a plain int in a quarter of the time.
_UNASKED, _ABSENT, _THERE, _BEYOND = map(int, _Known)


Said = Mapping[StorageTier, NDArray[np.int8]]
"""What shared tiers have been asked about a transfer's blocks already: an array of `_Known`, by position, of each."""


def said_of(asked: NDArray[np.int64], found: Mask, num_blocks: int) -> NDArray[np.int8]:
    """Return what one tier has said, for `Said`: of the blocks ``asked`` whether they were ``found``."""
    known = np.full(num_blocks, _UNASKED, np.int8)
    known[asked] = np.where(found, _THERE, _ABSENT)
    return known


class Presence:
    """What the shared tiers have said of the blocks of one transfer. Owned ones are looked at each time, for little.

    An answer may be seconds old when its blocks are read: a read decides.

    Attributes:
        silent: What kept tiers from answering: they may have what was found nowhere.
    """

    def __init__(self, chain: Chain, batch: Batch, said: Said | None = None) -> None:
        self._chain = chain
        self._batch = batch
        self._known = {tier: known.copy() for tier, known in (said or {}).items()}
        self.silent: list[TierFault] = []

    async def sources(self, at: NDArray[np.int64], are_holes: Callable[[NDArray[np.int64]], Mask]) -> NDArray[np.int8]:
        """Say which storage tier, by its number in the chain, to read blocks from; -1 for nowhere.

        Args:
            at: Positions in the transfer, ascending.
            are_holes: Asked of positions that are in no storage tier, which of them end the prefix: others may be on
                their way already.
        """
        while True:
            numbers = await self._sources(at)
            nowhere = at[numbers < 0]
            holes = nowhere[are_holes(nowhere)] if len(nowhere) else nowhere
            if not len(holes):
                return numbers
            behind = slice(int(holes[0]), None)
            unsaid = [known[behind] for known in self._known.values() if known[behind][0] == _BEYOND]
            if not unsaid:
                return numbers
            for known in unsaid:
                known[known == _BEYOND] = _UNASKED

    async def _sources(self, at: NDArray[np.int64]) -> NDArray[np.int8]:
        numbers = np.full(len(at), -1, np.int8)
        for number, tier in enumerate(self._chain.storage, start=len(self._chain.memory)):
            left = np.flatnonzero(numbers < 0)
            if not len(left):
                break
            if not tier.is_shared:
                has = await tier.find(self._batch[at[left]])
            elif tier.health.is_bypassed:
                continue
            else:
                known = self._known.setdefault(tier, np.full(len(self._batch), _UNASKED, np.int8))
                unasked = np.flatnonzero(known[at[left]] == _UNASKED)
                if len(unasked):
                    await self._ask(tier, known, int(at[left[unasked[0]]]))
                has = known[at[left]] == _THERE
            numbers[left[has]] = number
        return numbers

    async def _ask(self, tier: StorageTier, known: NDArray[np.int8], first: int) -> None:
        """Ask a tier for a block and all behind it of which nothing is known, here or in the tiers above."""
        span = np.arange(first, min(first + _ASKED_AT_ONCE, len(self._batch)))
        names = self._batch.names[span]
        wanted = known[span] == _UNASKED
        for index in self._chain.indexes():
            wanted &= ~index.ready(names)
        for above, said in self._known.items():
            if above is not tier:
                wanted &= said[span] != _THERE
        wanted[0] = True
        question = span[wanted]
        found = await tier.find(self._batch[question], self.silent)
        known[question] = np.where(found, _THERE, _ABSENT)
        if not found.all():
            known[question[np.argmin(found) + 1 :]] = _BEYOND
