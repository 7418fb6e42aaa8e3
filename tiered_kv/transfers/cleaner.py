"""The cleaner of a chain: writes blocks that wait in memory to the tiers with ``write="back"``, the oldest first.

It begins when too little of a memory tier could be given to new blocks, or when a block has waited for long enough, and
heeds a bandwidth of its own. A tier that is bypassed keeps its blocks waiting, and then what is stored is dropped once
memory is full of them: bounded by the tier, and nothing waits for it but they.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Final

from tiered_kv.tiers.budget import Kind
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.dirty import Waiting
from tiered_kv.tiers.memory import MemoryTier
from tiered_kv.transfers.tally import Tally
from tiered_kv.transfers.writedown import WriteDown

_TICK_S: Final = 1.0
"""How often it looks by itself: leases, ages and tiers that are well again tell nobody."""
_AT_ONCE: Final = 2
"""Windows on their way: while one is written, the next one is encoded."""


class Cleaner:
    """Cleans one chain. For the event loop's thread."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._woken = asyncio.Event()
        self._turns = asyncio.Semaphore(_AT_ONCE)  # which is fair: else one who always writes would keep out the others
        for tier, waiting in chain.waiting.items():
            waiting.on_add = partial(self._wake_if_due, tier, waiting)

    async def write(self, mark: int) -> None:
        """Wait until all that came before a mark is written or given up, see `Unwritten`; write it as fast as can be.

        Returns early where a tier does not take it: what is left waits. Cancellation ends the wait; windows that are
        being written go on.
        """
        unwritten = self._chain.unwritten
        while unwritten.is_under_way(mark):
            await unwritten.one_ended()
        left = 2 * unwritten.num_blocks  # from the GPU pool to the CPU tier, and from there on
        while not unwritten.is_written(mark):
            num_begun = await self._write_one(mark) if left > 0 else 0
            left -= num_begun
            if num_begun:
                continue
            if not unwritten.is_under_way(mark):
                if left <= 0 or not any(line.num_taken for line in unwritten.waiting.values()):
                    return
                left -= 1  # what came later is being written, and may make room on the host
            await unwritten.one_ended()

    async def _write_one(self, mark: int) -> int:
        """Begin to write a window of what came before a mark, when it is our turn; say how many blocks.

        Where that waits for room in the CPU tier, write what is in its way there, whenever that came.
        """
        is_in_the_way = False
        for tier, waiting in self._chain.waiting.items():
            if (waiting.num_before(mark) or is_in_the_way) and self._can_write(tier):
                if n := await self._write_window(tier, waiting):
                    return n
                is_in_the_way = True
        return 0

    async def run(self) -> None:
        """Clean when it is due, until cancelled; what is being written then goes on."""
        while True:
            self._woken.clear()
            for tier, waiting in self._chain.waiting.items():
                await self._clean(tier, waiting)
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._woken.wait()

    async def _clean(self, tier: MemoryTier, waiting: Waiting) -> None:
        bandwidth = self._chain.limits.clean_bandwidth
        left = len(waiting)  # what comes back was tried, and has to wait for the next time
        while left > 0 and self._is_due(tier, waiting) and self._can_write(tier):
            if (wait_s := bandwidth.wait_s()) > 0:
                await asyncio.sleep(wait_s)
                continue
            if not (n := await self._write_window(tier, waiting)):
                return  # until the next tick, or until something was written and made room
            bandwidth.take(n * self._chain.stride_bytes)
            left -= n

    def _wake_if_due(self, tier: MemoryTier, waiting: Waiting) -> None:
        if self._is_due(tier, waiting):
            self._woken.set()

    def _is_due(self, tier: MemoryTier, waiting: Waiting) -> bool:
        books, limits = tier.index.statistics(), self._chain.limits
        if not books.dirty:
            return False
        # What is being written will be evictable when it is: else all would be written whenever some is.
        to_be_had = books.free + books.evictable + waiting.num_taken
        return to_be_had < limits.low_water * books.num_slots or waiting.oldest_s() >= limits.clean_after_s

    def _can_write(self, tier: MemoryTier) -> bool:
        if self._chain.host in self._chain.later(tier):
            return True
        return not all(storage.health.is_shedding for storage in self._chain.back)

    async def _write_window(self, tier: MemoryTier, waiting: Waiting) -> int:
        """Begin to write a window of what waits longest, when it is our turn; say how many blocks.

        None where they go to the CPU tier, which is full, and nowhere past it.
        """
        await self._turns.acquire()
        if not (n := self._begin_window(tier, waiting)):
            self._turns.release()
        return n

    def _begin_window(self, tier: MemoryTier, waiting: Waiting) -> int:
        """Begin it, if there is anything to write and room for it; say how many blocks. Its end is another's turn."""
        chain, most = self._chain, self._chain.window_blocks
        if not len(waiting):
            return 0
        goes_to_host = chain.host in chain.later(tier)
        if goes_to_host:  # a whole window may never find room there
            books = chain.host.index.statistics()
            num_free = books.free + books.evictable - waiting.num_taken  # who were taken may have no slot there yet
            most = max(0, min(most, num_free))
            if not most and not chain.through:
                return 0
            most = max(1, most)
        batch, lease, came = waiting.take(most)
        num_blocks = len(batch)
        to = None if goes_to_host else chain.back
        down = WriteDown(chain, Tally(chain.tiers), tier, batch, lease.slots, lease, came, to=to, kind=Kind.CLEAN)
        writing = chain.tasks.spawn(down.run(), f"clean {num_blocks} blocks of {tier.name}")

        def written(_: "asyncio.Task[None]") -> None:
            self._turns.release()
            waiting.ended(num_blocks, came)
            if tier is chain.host and chain.gpu in chain.waiting:
                self._woken.set()  # what waits in the GPU pool may have waited for this

        writing.add_done_callback(written)
        return num_blocks


async def write_all(marks: Mapping[Chain, int], cleaners: Mapping[Chain, Cleaner]) -> None:
    """Wait until all that came to some chains before these marks is in every tier or given up; see `Cleaner.write`."""
    for chain, mark in marks.items():
        await cleaners[chain].write(mark)
