"""The cleaner of a chain: writes blocks that wait in memory to the tiers with ``write="back"``, the oldest first.

It begins when too little of a memory tier could be given to new blocks, or when a block has waited for long enough, and
heeds a bandwidth of its own. A tier that is bypassed keeps its blocks waiting, and then what is stored is dropped once
memory is full of them: bounded by the tier, and nothing waits for it but they.
"""

import asyncio
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
        self._writing: set[asyncio.Task[None]] = set()
        self._num_leaving = dict.fromkeys(chain.waiting, 0)
        for tier, waiting in chain.waiting.items():
            waiting.on_add = partial(self._wake_if_due, tier, waiting)

    @property
    def num_waiting(self) -> int:
        """Blocks that wait, or are being written."""
        return sum(len(waiting) for waiting in self._chain.waiting.values())

    async def drain(self) -> None:
        """Write what waits now, as fast as the tiers take it. Returns early where one does not; what is left waits.

        Cancellation ends the wait; windows that are being written go on.
        """
        *upper, _ = self._chain.waiting.values()
        left = 2 * self.num_waiting  # from the GPU pool to the CPU tier, and from there on
        while (num_moved := await self._drain_once()) and any(len(waiting) for waiting in upper):
            left -= num_moved
            if left <= 0:
                return

    async def _drain_once(self) -> int:
        """Try to write all that waits once, tier by tier; say how many fewer wait in one of them, if only for now."""
        num_moved = 0
        for tier, waiting in self._chain.waiting.items():
            left = before = len(waiting)
            while left > 0 and self._can_write(tier) and (n := await self._write_window(tier, waiting)):
                left -= n
            while self._writing:
                await asyncio.wait(self._writing)
            num_moved += max(0, before - len(waiting))
        return num_moved

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
        to_be_had = books.free + books.evictable + self._num_leaving[tier]
        return to_be_had < limits.low_water * books.num_slots or waiting.oldest_s() >= limits.clean_after_s

    def _can_write(self, tier: MemoryTier) -> bool:
        if self._chain.host in self._chain.later(tier):
            return True
        return not all(storage.health.is_shedding for storage in self._chain.back)

    async def _write_window(self, tier: MemoryTier, waiting: Waiting) -> int:
        """Begin to write a window of what waits longest, once few others are on their way; say how many blocks.

        None where they go to the CPU tier, which is full, and nowhere past it.
        """
        while len(self._writing) >= _AT_ONCE:
            await asyncio.wait(self._writing, return_when=asyncio.FIRST_COMPLETED)
        if not len(waiting):
            return 0
        chain = self._chain
        goes_to_host, most = chain.host in chain.later(tier), chain.window_blocks
        if goes_to_host:  # a whole window may never find room there
            books = chain.host.index.statistics()
            most = min(most, books.free + books.evictable)
            if not most and not chain.through:
                return 0
            most = max(1, most)
        batch, lease = waiting.take(most)
        to = None if goes_to_host else chain.back
        down = WriteDown(chain, Tally(chain.tiers), tier, batch, lease.slots, lease, to=to, kind=Kind.CLEAN)
        writing = chain.tasks.spawn(down.run(), f"clean {len(batch)} blocks of {tier.name}")
        self._writing.add(writing)
        self._num_leaving[tier] += len(batch)

        def written(_: "asyncio.Task[None]") -> None:
            self._writing.discard(writing)
            self._num_leaving[tier] -= len(batch)
            if tier is chain.host and chain.gpu in chain.waiting:
                self._woken.set()  # what waits in the GPU pool may have waited for this

        writing.add_done_callback(written)
        return len(batch)
