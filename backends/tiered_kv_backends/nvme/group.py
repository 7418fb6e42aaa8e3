"""The files of one KV group: its slab, its ledger, and what happens to each slot at the moment."""

import asyncio
import contextlib
import errno
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered_kv.keys import Names
from tiered_kv_backends.nvme.ledger import Ledger, Slots
from tiered_kv_backends.nvme.slab import Erase, Slab

EMPTY, HELD, WRITING, ERASING = range(4)
"""States of a slot: it has no header of a record, or may have one; a call is writing it; one is overwriting it."""

_NUM_ERASING_THREADS = 2
"""At once for one call: the others go on writing."""
Run = Callable[..., "asyncio.Future[Any]"]
_NO_SLOTS: Slots = np.empty(0, np.int64)


class Group:
    """A slab, its ledger, and the states of its slots, which are the event loop's.

    No slot is written while it is erased: a write waits for the erasure, and an erasure leaves out what is being
    written.

    Attributes:
        states: Of each slot, ``(num_slots,)`` after `resize_states`.
        erasures: Those under way.
    """

    def __init__(self, slab: Slab, ledger: Ledger) -> None:
        self.slab = slab
        self.ledger = ledger
        self.states = np.empty(0, np.uint8)
        self.erasures: set[asyncio.Future[None]] = set()

    def mark(self, slots: Slots, state: int) -> None:
        """Give slots a state, as far as they still exist."""
        self.states[slots[slots < len(self.states)]] = state

    def resize_states(self, num_slots: int) -> None:
        """Have states of so many slots; those that come are empty."""
        was = self.states
        self.states = np.full(num_slots, EMPTY, np.uint8)
        num_kept = min(len(was), num_slots)
        self.states[:num_kept] = was[:num_kept]

    def held_beside(self, slots: Slots) -> Slots:
        """Return the slots that may hold a record, are not being written, and are not among ``slots``."""
        is_held = self.states == HELD
        is_held[slots] = False
        return np.flatnonzero(is_held)

    async def until_erased(self, slots: Slots) -> None:
        """Return when none of these is being erased."""
        while (self.states[slots[slots < len(self.states)]] == ERASING).any():
            await asyncio.wait(self.erasures, return_when=asyncio.FIRST_COMPLETED)

    async def forget(self, slots: Slots, erase: Erase, in_clerk: Run, in_writers: Run) -> None:
        """Forget slots and overwrite what they hold, save those that are being written.

        Args:
            slots: Which.
            erase: How much of their records.
            in_clerk: Runs a call in the ledger's thread.
            in_writers: Runs one in any that may write.

        Raises:
            OSError: The disk did not take it.
        """
        await self.until_erased(slots)
        slots = slots[slots < len(self.states)]
        to_erase = slots[self.states[slots] != WRITING]
        self.mark(to_erase, ERASING)
        erased = asyncio.ensure_future(self._erase(slots, to_erase, erase, in_clerk, in_writers))
        self.erasures.add(erased)
        erased.add_done_callback(_look_at)
        erased.add_done_callback(self.erasures.discard)
        await asyncio.shield(erased)  # a write to one of these slots waits for it, whoever waits here

    async def _erase(self, slots: Slots, to_erase: Slots, erase: Erase, in_clerk: Run, in_writers: Run) -> None:
        state = HELD
        try:
            await in_clerk(self.ledger.clear, slots)
            shares = np.array_split(np.sort(to_erase), _NUM_ERASING_THREADS)
            jobs = [in_writers(self.slab.erase, share.tolist(), erase) for share in shares]
            await asyncio.wait(jobs)
            for job in jobs:
                job.result()
            state = EMPTY
        finally:
            self.mark(to_erase, state)

    def remember(self, names: Names, slots: Slots, sequences: NDArray[np.uint64], failed: Slots = _NO_SLOTS) -> None:
        """Enter what was written, in which order, and that slots whose write has failed hold nothing.

        In the ledger's thread.

        Raises:
            OSError: It cannot be, or would be in vain.
        """
        if len(failed):
            with contextlib.suppress(OSError):  # then a restart finds what was there before, if it is whole
                self.ledger.clear(failed)
        if self.slab.is_removed or self.ledger.is_removed:
            raise OSError(errno.ESTALE, "the files of this tier were deleted")
        self.ledger.write(names, slots, sequences)


def _look_at(erased: "asyncio.Future[None]") -> None:
    """Take note of an error, so that one whose waiter was cancelled is not logged as forgotten."""
    if not erased.cancelled():
        erased.exception()
