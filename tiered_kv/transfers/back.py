"""Loads from the back, for an engine that computes the same blocks from the front until the two meet.

Such a load is made of loads of short parts, the last part first. The engine claims what it is about to compute, by
`LoadHandle.stop_before`: a part that it claims is given up unless its copy has begun, so the engine waits for no
medium, only for copies. Together they take no longer than the faster of them would alone, whatever each would take.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tiered_kv.results import LoadResult, TierFault
from tiered_kv.tiers.base import Mask
from tiered_kv.transfers.handles import LoadHandle, cancel_each, each_of
from tiered_kv.transfers.load import InTask, check_stop, load_result, overtaken
from tiered_kv.transfers.requests import LoadRequest

_PACKED: Final = 16
"""Blocks that media pack; a part has no fewer unless it has to."""


@dataclass
class _Part:
    """Blocks ``start <= i < stop`` and what loads them."""

    start: int
    stop: int
    handle: LoadHandle


class BackLoad(InTask):
    """One such load of one KV group."""

    def __init__(self, request: LoadRequest, start_part: Callable[[LoadRequest], LoadHandle]) -> None:
        """Prepare a load; ``start_part`` starts those of a prefix that it is made of."""
        super().__init__(request)
        self._start_part = start_part
        self._ahead = request.chain.limits.reads_in_flight + 1
        self._size = _part_size(len(request.batch), request.chain.window_blocks, self._ahead)
        self._claimed = 0
        self._begun = len(request.batch)
        self._parts: list[_Part] = []  # the last blocks first
        self._given_up: list[LoadHandle] = []
        self._in_place = len(request.batch)

    def begin(self) -> LoadHandle:
        """Start it, in a task of the cache. How many blocks there are is known when it has ended."""
        chain = self._request.chain
        return self.start_load(chain.tasks.spawn(self._run(), f"load {len(self._request.batch)} blocks from the back"))

    def stop_before(self, block: int) -> int:
        """See `LoadHandle.stop_before`."""
        check_stop(self._request, block)
        while self._parts and (first := self._parts[-1]).start < block and not first.handle.is_copying:
            self._parts.pop()
            first.handle.cancel()
            self._given_up.append(first.handle)
            self._begun = first.stop
            if block < first.stop:  # what is behind the claim joins the read that is under way
                self._begin_part(block, first.stop)
        self._claimed = max(self._claimed, min(block, self._begun))
        return self._claimed

    async def _run(self) -> LoadResult:
        """Move the blocks; as for `Load.run`, nothing touches the engine's memory any more when it ends."""
        request, loop = self._request, asyncio.get_running_loop()
        started = loop.time()
        by_tier: Counter[str] = Counter()
        faults: list[TierFault] = []
        try:
            await self._move(by_tier, faults)
        except asyncio.CancelledError:
            self.revoked = True
        finally:
            await self._end_parts()
        n = len(request.batch)
        if not request.is_current():
            self._in_place = self._begun = n
            by_tier.clear()
            faults = [overtaken(request)]
        mask: Mask = np.arange(n) >= self._in_place
        mask.flags.writeable = False
        self._settle(n - self._in_place)
        # What the engine has claimed it did not miss.
        wanted = replace(request, batch=request.batch[self._claimed :])
        last_missed = max(0, self._in_place - 1 - self._claimed)
        counts = [by_tier[tier.name] for tier in request.chain.tiers]
        result = load_result(wanted, last_missed, counts, faults, loop.time() - started, mask)
        return replace(result, num_blocks=0 if self._in_place else n, num_requested=n)

    async def _move(self, by_tier: Counter[str], faults: list[TierFault]) -> None:
        """Load part after part towards the front, a few at a time, until one is not whole or the engine is met."""
        while not self.revoked:
            while self._begun > self._claimed and len(self._parts) < self._ahead:
                self._begin_part(self._start_of_part(), self._begun)
            if not self._parts:
                return
            part = self._parts[0]
            result = await part.handle
            if not self._parts or self._parts[0] is not part:
                continue  # the engine has claimed it meanwhile
            del self._parts[0]
            faults += result.faults
            if result.num_blocks < part.stop - part.start:
                return  # an engine that comes from the front has no use for what is before a hole
            by_tier.update(result.by_tier)
            self._in_place = part.start

    def _start_of_part(self) -> int:
        """Return where the part begins that ends where the others begin; media that pack blocks pack aligned ones."""
        over = (int(self._request.batch.positions[self._begun - 1]) + 1) % self._size
        return max(self._claimed, self._begun - (over or self._size))

    def _begin_part(self, start: int, stop: int) -> None:
        request = self._request
        part = replace(
            request, batch=request.batch[start:stop], pages=request.pages[start:stop], lane=request.lane.part(),
            order="front", is_part=True,
        )  # fmt: skip
        self._parts.append(_Part(start, stop, self._start_part(part)))
        self._begun = start

    async def _end_parts(self) -> None:
        """Stop what is under way, and wait until nothing moves. All that is not in place may then be claimed."""
        parts, self._parts = self._parts, []
        self._begun = min((part.start for part in parts if part.handle.is_copying), default=self._in_place)
        cancel_each([part.handle for part in parts])
        await each_of([*self._given_up, *(part.handle for part in parts)])
        self._begun = self._in_place
        task = asyncio.current_task()
        self.revoked = self.revoked or (task is not None and task.cancelling() > 0)


def _part_size(num_blocks: int, window_blocks: int, ahead: int) -> int:
    """Return a window, as other loads have it; of fewer blocks a part so large that all are under way at once."""
    size = max(1, min(-(-num_blocks // ahead), window_blocks))
    return size - size % _PACKED if size > _PACKED else size
