"""What an owned medium is told to remember: which slots were forgotten, and now and then all that it holds.

One such call at a time: what is forgotten before a checkpoint must not come back by it. Whatever leaves the books
passes here: the medium is told, or that is owed until a checkpoint that begins later has gone well.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np

from tiered_kv.catalog.leases import Lease
from tiered_kv.catalog.table import Slots
from tiered_kv.media.backend import SlotBackend
from tiered_kv.tiers.storage import TierParts
from tiered_kv.values.events import TierFailed
from tiered_kv.values.keys import Names

_SLOTS_AT_ONCE: Final = 4096
"""Forgotten by one call, unless more were removed at once by name."""


class Journal:
    """Tells the medium of one tier which blocks to remember and which to forget. Never raises for the medium.

    Attributes:
        num_owed: Counts what the medium could not be told: it remembers what it should not, and a restart could bring
            that back.
        num_paid: How many of these a checkpoint has made up for.
    """

    def __init__(self, parts: TierParts, backend: SlotBackend) -> None:
        self.num_owed = self.num_paid = 0
        self._leaving: deque[tuple[Lease, asyncio.Future[None]]] = deque()
        self._telling: asyncio.Task[None] | None = None
        self._backend = backend
        self._calls = parts.calls
        self._group = parts.group
        self._health = parts.health
        self._tasks = parts.tasks
        self._turn = asyncio.Lock()

    @property
    def is_owing(self) -> bool:
        """Whether the medium remembers what it should not."""
        return self.num_paid < self.num_owed

    def owe(self) -> None:
        """Take note that the medium remembers what it should not."""
        self.num_owed += 1

    def tell(self, left: Lease) -> "asyncio.Future[None]":
        """Have the medium forget what has left the books, and release the lease once it has, or that is owed.

        Returns:
            What is done by then.
        """
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._leaving.append((left, told))
        if self._telling is None or self._telling.done():
            self._telling = self._tasks.spawn(self._tell(), f"forget blocks of {self._health.name}")
        return told

    async def _tell(self) -> None:
        """Forget what leaves, a bounded number of slots at a time, however often some do."""
        while self._leaving:
            parts, num_slots = [], 0
            while self._leaving and num_slots < _SLOTS_AT_ONCE:
                parts.append(self._leaving.popleft())
                num_slots += len(parts[-1][0].slots)
            try:
                await self.forget(np.concatenate([left.slots for left, _ in parts]))
            finally:
                for left, told in parts:
                    left.release()
                    told.set_result(None)

    async def forget(self, slots: Slots, on_late: Callable[[], None] | None = None) -> None:
        """Have the medium forget what is in some slots, which nobody uses until this returns."""
        if not len(slots):
            return
        is_well = False
        try:
            is_well = await self._note("forget", len(slots), lambda: self._backend.forget(self._group, slots), on_late)
        finally:
            if not is_well:
                self.owe()

    async def checkpoint(self, held: Callable[[], tuple[Names, Slots]], num_blocks: int, *, sync: bool) -> bool:
        """Have the medium remember what ``held`` says when its turn has come; say whether that went well, and in time.

        Nobody waits for a call that is late, or whose wait is cancelled: it goes on in a task of the cache.
        """
        late = asyncio.get_running_loop().create_future()

        async def call() -> None:
            num_owed = self.num_owed  # what comes later may be among what is held now
            await self._backend.checkpoint(self._group, *held(), sync=sync)
            self.num_paid = max(self.num_paid, num_owed)

        noting = self._tasks.spawn(
            self._note("checkpoint", num_blocks, call, lambda: late.set_result(None)),
            f"checkpoint {self._health.name}",
        )
        await asyncio.wait({noting, late}, return_when=asyncio.FIRST_COMPLETED)
        return not late.done() and not noting.cancelled() and noting.result()

    async def _note(
        self, doing: str, num_blocks: int, call: Callable[[], Awaitable[None]], on_late: Callable[[], None] | None
    ) -> bool:
        """Make a call when its turn has come; say whether it went well. It is given up if its turn is late."""
        timeout_s = self._health.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            error = f"its turn has not come within {timeout_s:g} s: another call hangs"
            self._health.emit(TierFailed(self._health.name, doing, error, num_blocks))
            return False
        try:
            answer = await self._calls.make(doing, call, num_blocks=num_blocks, on_late=on_late)
        finally:
            self._turn.release()
        return answer.is_well
