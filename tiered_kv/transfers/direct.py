"""Loads straight into memory of the engine's own: a medium reads into a pool, and no host slot is taken.

What is in memory is copied as in every load; what is only in storage is read in place, verified there, and counts
from then on. A medium that has been given the engine's memory cannot be left: such a load ends when the medium lets go
of it, so its deadline is soft. It begins nothing more once its time is up.
"""

import asyncio
from collections import deque
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tiered_kv.tiers.gate import Kind, Waiter
from tiered_kv.tiers.tier import Batch, prefix_of
from tiered_kv.transfers.load import Copied, Load
from tiered_kv.transfers.window import Landed, Window
from tiered_kv.values.results import Reason, TierFault


class DirectLoad(Load):
    """A load into `DirectSlots` that takes turns: what is resident is copied, what is in storage is read in place."""

    @property
    def is_copying(self) -> bool:
        """See `Loading.is_copying`: a medium that has been given memory cannot be asked how far it is."""
        return True

    async def _move(self, underway: deque[Window], begun: int = 0, end: int | None = None) -> None:
        done, n = begun, len(self._batch) if end is None else end
        host, size = self._chain.host.index, self._chain.window_blocks * self._chain.limits.reads_in_flight
        is_free = False
        while done < n:
            resident = host.ready_prefix(self._batch.names[done:n])
            if resident:
                await super()._move(underway, done, done + resident)
                if self._num_landed() < done + resident:
                    return
                done += resident
                continue
            part = self._batch[done : min(done + size, n)]
            part = part[: prefix_of(~host.ready(part.names))]
            async with asyncio.timeout_at(self._request.deadline):
                at = np.arange(done, done + len(part))
                numbers = await self._bringer.presence.sources(at, lambda nowhere: np.ones(len(nowhere), np.bool_))
                is_free = is_free or await self._is_free()
            part = part[: prefix_of(numbers >= 0)]
            right = await self._read(done, part, numbers[: len(part)]) if is_free else 0
            done += right
            if not right:  # being stored, unreadable, or nowhere: what can be had is had by way of slots
                await super()._move(underway, done, n)
                return

    async def _is_free(self) -> bool:
        """Wait until nobody else uses the pages: until the lane is past the caller's event, if there is one."""
        if not self._request.lane.has_events:
            return True
        copy = self._chain.copy(self._request.lane, _nothing)
        errors: list[BaseException | None] = []
        self.watch(copy, errors.append)
        await asyncio.wait({copy.ended})
        self._say_failed(errors[0], len(self._batch))
        return errors[0] is None

    async def _read(self, start: int, part: Batch, numbers: NDArray[np.int8]) -> int:
        """Read blocks to where they belong; return how many leading ones are right. Ends when the media have let go."""
        if not len(part):
            return 0
        loop = asyncio.get_running_loop()
        waiters: dict[asyncio.Task[None], Waiter] = {}
        reading = loop.create_task(self._read_from_all(start, part, numbers, waiters), name=f"read {len(part)} blocks")
        stop = partial(_stop_waiting, waiters)
        self._chain.tasks.watch(reading, stop)  # what has its turn ends with the calls only, at close too
        timer = loop.call_at(self._request.deadline, stop)
        while not reading.done():
            try:
                await asyncio.wait({reading})
            except asyncio.CancelledError:
                self.revoked = True
                stop()
        timer.cancel()
        num_right = prefix_of(reading.result()) if not reading.cancelled() else 0
        nowhere = np.full(len(part), -1, np.int64)
        window = Window(start, part, numbers, nowhere, nowhere, np.full(len(part), -1, np.int8))
        self._copied.append(Copied(Landed(window, num_right, nowhere, nowhere, [], is_worth_another=False), ok=True))
        if self.revoked:
            raise asyncio.CancelledError
        if loop.time() >= self._request.deadline:
            raise TimeoutError
        return num_right

    async def _read_from_all(
        self, start: int, part: Batch, numbers: NDArray[np.int8], waiters: dict[asyncio.Task[None], Waiter]
    ) -> NDArray[np.bool_]:
        """Read blocks, each from its tier, all tiers at once, in tasks with these ``waiters``; say which are right."""
        slots = self._request.binding.direct
        assert slots is not None  # noqa: S101 - else it would be a plain load
        blocks = slots.blocks(self._request.pages[start : start + len(part), 0])
        right = np.zeros(len(part), np.bool_)

        async def read_from(number: int, waiter: Waiter) -> None:
            tier, at = self._chain.storage[number - len(self._chain.memory)], (numbers == number).nonzero()[0]
            late = partial(self._say_late, tier.name, len(at))
            right[at] = await tier.read(part[at], [blocks[i] for i in at], waiter, late)

        for number in np.unique(numbers).tolist():
            waiter = Waiter(Kind.LOAD, self._request.priority, lends=True)
            waiters[asyncio.create_task(read_from(number, waiter))] = waiter
        await asyncio.wait(waiters)  # all of them, whatever one of them raises
        for task in waiters:
            if not task.cancelled():
                task.result()
        return right

    def _say_late(self, tier: str, n: int) -> None:
        self._bringer.faults.append(TierFault(tier, Reason.TIMEOUT, n))

    def _num_landed(self) -> int:
        return sum(copied.landed.num_blocks for copied in self._copied)


def _stop_waiting(waiters: dict[asyncio.Task[None], Waiter]) -> None:
    """Cancel reads whose turn has not come: their media have not been given the memory yet."""
    for task, waiter in waiters.items():
        if waiter.is_waiting:
            task.cancel()


def _nothing() -> None:
    pass
