"""Loads: windows of a prefix brought to rows that copies reach, and copied on into the engine's blocks.

Reading one window overlaps copying the one before. A load ends early at the first window that is not whole; windows
behind it go on as fills of the cache, and are there for whoever asks next. Short ones mostly begin and end in
`transfers/start.py`, without a task; where a window ends is said in `transfers/window.py`.
"""

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.catalog.index import NO_SLOTS
from tiered_kv.catalog.leases import Reservation
from tiered_kv.memory.copies import copy_rows
from tiered_kv.memory.device import attempt, raise_the_programs
from tiered_kv.memory.lanes import LaneCopy, RevokedError
from tiered_kv.tiers.chain import Chain, Head
from tiered_kv.tiers.gate import Kind, Priority
from tiered_kv.tiers.tier import Batch
from tiered_kv.transfers.handles import LoadHandle, Loading, Revocable
from tiered_kv.transfers.transfer_requests import LoadRequest, may_copy_at_once
from tiered_kv.transfers.window import Bringer, Window, WindowResult
from tiered_kv.values.errors import Reason, TierFault, in_words
from tiered_kv.values.results import LoadResult

PACKED: Final = 16
"""How many neighbouring blocks media pack into one object; windows and parts end where a pack ends, if they can."""
_TOUCHED_AT_ONCE: Final = 512
"""Blocks; then other tasks have their turn."""
_RETRIES: Final = 3
"""How often in a row blocks are looked for again that another load brought and let go before we had them."""


@dataclass
class WindowCopy:
    """One window on its way into the engine's blocks; ``ok`` once it is in place."""

    landed: WindowResult
    ok: bool = False


class InTask(Revocable, Loading):
    """Base of loads that run in a task: their handle, and how many blocks that reports first."""

    def __init__(self, request: LoadRequest) -> None:
        super().__init__()
        self._request = request
        self.num_layers = request.chain.group.num_layers
        self.thread = request.chain.tasks.thread
        self._admitted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def start_load(self, task: "asyncio.Task[LoadResult]") -> LoadHandle:
        """Give the task that runs this load, for a handle."""
        self.start(task, self._request.lane)
        return LoadHandle(task, self)

    @override
    def _is_over(self) -> None:
        self._settle(0)

    @property
    @override
    def is_admitted(self) -> bool:
        return self._admitted.done()

    @override
    async def wait_admitted(self) -> int:
        return await asyncio.shield(self._admitted)

    @override
    def stop_before(self, block: int) -> int:
        """Raise: only a `BackLoad` can be stopped before a block."""
        raise NotImplementedError

    def _settle(self, num_blocks: int) -> None:
        if not self._admitted.done():
            self._admitted.set_result(num_blocks)


class Load(InTask):
    """One load of one KV group."""

    def __init__(self, request: LoadRequest) -> None:
        """Prepare a load; nothing moves before `run`."""
        super().__init__(request)
        self._chain = chain = request.chain
        self._batch = batch = request.batch
        self._gpu = request.binding.gpu
        self._copied: list[WindowCopy] = []
        self._last: LaneCopy | None = None
        self._head = Head(chain)
        promote = chain.limits.promote
        self._bringer = Bringer(
            chain, batch, Kind.LOAD, priority=request.priority, keep=promote, gpu=self._gpu, said=request.said
        )
        self._may_promote = self._gpu.index.room_for(batch.names) if self._gpu and promote else 0
        self._head.hold_rest(chain.host, batch.names)

    @override
    def _is_over(self) -> None:
        self._head.let_go()  # of one that never ran
        super()._is_over()

    @override
    def copy_of(self, layer: int) -> LaneCopy | None:
        return self._last

    @property
    @override
    def is_copying(self) -> bool:
        return any(copied.landed.num_blocks for copied in self._copied)

    async def run(self) -> LoadResult:
        """Move the blocks. Ends only when nothing touches the engine's memory any more; never raises for a tier."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        underway: deque[Window] = deque()
        in_time = True
        try:
            if (error := self._request.binding.error) is None:
                await self._move(underway)
                await self._admit()
            else:
                self._bringer.faults.append(TierFault("engine", Reason.DEVICE_UNUSABLE, len(self._batch), repr(error)))
        except TimeoutError:
            in_time = False
            self.revoke_copies()
        except asyncio.CancelledError:
            self.revoked = True
        finally:
            self._bringer.close()
            for window in underway:
                self._bringer.abandon(window)
            self._head.let_go()
            self._give_up()
            in_time &= await self.drain_copies(self._request.deadline)
        if not in_time and not self.revoked:
            self._bringer.faults.append(TierFault("", Reason.DEADLINE, len(self._batch)))
        num_blocks, counts = self._count_loaded()
        self._settle(num_blocks)
        await count_uses(self._chain, self._batch[:num_blocks], self._request.priority)
        faults = [*self._bringer.faults, self._request.revocation()] if self.revoked else self._bringer.faults
        return self._request.ended(num_blocks, counts, faults, loop.time() - started)

    async def _move(self, underway: deque[Window], begun: int = 0, end: int | None = None) -> None:
        """Begin windows ahead of the one that is landed, as many as may be read ahead and find slots."""
        n, retries = len(self._batch) if end is None else end, _RETRIES
        while begun < n or underway:
            begun = await self._begin_ahead(underway, begun, n)
            if not underway:
                return  # only of a load that may not wait, as a layer-wise one that holds slots: there are none now
            window = underway[0]
            size = len(window.batch)
            landed = await self._bringer.land(window, self._request.deadline)
            underway.popleft()
            if self.revoked:  # the blocks may be the engine's again: the cancellation comes a turn later
                self._chain.release(*landed.leases)
                return
            if underway or begun < n:
                self._hold_head(landed)
            self._copy(landed)
            if landed.num_blocks:
                retries = _RETRIES
            if landed.num_blocks < size:
                if not landed.is_worth_another or not retries:
                    return
                retries -= 1
                while underway:
                    self._bringer.abandon(underway.popleft())
                begun = landed.window.start + landed.num_blocks

    async def _begin_ahead(self, underway: deque[Window], begun: int, n: int) -> int:
        """Begin windows from block ``begun`` on, as far as `_move` says; return where the next one begins."""
        while begun < n and len(underway) <= self._chain.limits.reads_in_flight:
            stop = min(begun + self._window(begun), n)
            async with asyncio.timeout_at(self._request.deadline):
                # What is resident never waits: let others run between windows.
                is_late = asyncio.get_running_loop().time() >= self._request.deadline
                await self._chain.tasks.turn(self._request.priority, at_once=not begun and not is_late)
                window = await self._bringer.begin(begun, self._batch[begun:stop], may_wait=self._may_wait(underway))
            if window is None:
                return begun
            underway.append(window)
            begun = n if window.is_last else begun + len(window.batch)
        return begun

    def _hold_head(self, landed: WindowResult) -> None:
        """Keep what is in memory tiers there until the rest is: a policy may have it make room for that."""
        names = landed.window.batch.names[: landed.num_blocks]
        if self._bringer.may_keep:
            self._head.hold(self._chain.host, names)
        if self._gpu is not None and self._may_promote:
            self._head.hold(self._gpu, names)

    def _may_wait(self, underway: deque[Window]) -> bool:
        """Say whether to wait for slots: only while holding none."""
        return not underway

    async def _admit(self) -> None:
        """Say how many blocks will be in place: all windows have landed. Wait for late copies first: no stream can."""
        if any(copy.is_late for copy in self._copies) and not await self.drain_copies(self._request.deadline):
            raise TimeoutError
        self._settle(sum(copied.landed.num_blocks for copied in self._copied))

    def _give_up(self) -> None:
        """Hold nothing that no copy of this load will use; called before the last copies are waited for."""

    def _window(self, begun: int) -> int:
        """Blocks of the next window: more where nothing has to be read, as each costs the event loop 0.2 ms."""
        size = self._chain.next_window(begun, len(self._batch) - begun)
        ahead = self._batch.names[begun : begun + self._chain.resident_blocks]
        resident = max(tier.index.ready_prefix(ahead) for tier in (self._gpu, self._chain.host) if tier is not None)
        if resident >= size:
            return resident
        if 0 < self._bringer.may_keep < size:
            return self._bringer.may_keep  # the part that stays in the CPU tier, and then what passes through
        if size > PACKED:  # media that pack neighbours pack aligned ones: end where a pack ends
            size -= (int(self._batch.positions[begun]) + size) % PACKED
        return size

    def _copy(self, landed: WindowResult) -> None:
        """Put the copies of a landed window on the stream; its leases end when they have."""
        chain, gpu, n, memory = self._chain, self._gpu, landed.num_blocks, self._request.binding
        pages = self._request.pages[landed.window.start : landed.window.start + n]
        in_gpu, on_host = (landed.gpu >= 0).nonzero()[0], (landed.gpu < 0).nonzero()[0]
        promoted, promotion = self._promote(landed)
        direct = np.setdiff1d(on_host, promoted, assume_unique=True) if len(promoted) else on_host

        def work() -> None:
            if len(in_gpu) and gpu:
                memory.scatter(gpu.rows, landed.gpu[in_gpu], pages[in_gpu].ravel())
            if len(promoted) and gpu and promotion:
                slots = promotion.slots[promotion.slots >= 0]
                copy_rows(chain.host.rows, landed.host[promoted], gpu.rows, slots)
                memory.scatter(gpu.rows, slots, pages[promoted].ravel())
            if len(direct):
                memory.scatter(chain.host.rows, landed.host[direct], pages[direct].ravel())

        copied = WindowCopy(landed)
        self._copied.append(copied)
        if n == 0:
            self._end_copy(copied, None, promotion)
            return
        if may_copy_at_once(self._request, n):
            error = attempt(work)
            self._end_copy(copied, error, promotion)
            raise_the_programs(error)
            return
        self._last = chain.copy(self._request.lane, work)
        self.watch(self._last, lambda error: self._end_copy(copied, error, promotion))

    def _promote(self, landed: WindowResult) -> tuple[NDArray[np.int64], Reservation | None]:
        """Reserve slots of the GPU pool for blocks that come through the host, if there is room without waiting."""
        if self._gpu is None or not self._may_promote:
            return NO_SLOTS, None
        head = landed.to_promote(self._chain.host.index)[: self._may_promote]
        self._may_promote -= len(head)
        if len(head):
            self._head.hold_rest(self._gpu, self._batch.names[landed.window.start :])
        if not len(head) or (promotion := self._chain.reserve(self._gpu, landed.window.batch[head])) is None:
            return NO_SLOTS, None
        return head[promotion.slots >= 0], promotion

    def _end_copy(self, copied: WindowCopy, error: BaseException | None, promotion: Reservation | None) -> None:
        copied.ok = error is None
        if promotion is not None:
            if copied.ok and self._gpu:
                self._gpu.counters.promoted += int(np.count_nonzero(promotion.keep() >= 0))
                self._head.hold(self._gpu, copied.landed.window.batch.names[: copied.landed.num_blocks])
            promotion.close()
        self._chain.release(*copied.landed.leases)
        self._say_failed(error, copied.landed.num_blocks)

    def _say_failed(self, error: BaseException | None, n: int) -> None:
        if error is not None and not isinstance(error, RevokedError):
            self._bringer.faults.append(TierFault("engine", Reason.COPY_FAILED, n, in_words(error)))

    def _count_loaded(self) -> tuple[int, list[int]]:
        """Return how many blocks are in place, and how many of them each tier had."""
        num_blocks = 0
        sources = [np.empty(0, np.int8)]
        for copied in self._copied:
            if not copied.ok:
                break
            num_blocks += copied.landed.num_blocks
            sources.append(copied.landed.window.source[: copied.landed.num_blocks])
        numbers = np.concatenate(sources)
        if not self._request.is_current():
            num_blocks, numbers = 0, numbers[:0]
            self._bringer.faults.append(self._request.overtaken())
        return num_blocks, np.bincount(numbers, minlength=len(self._chain.tiers)).tolist()


async def count_uses(chain: Chain, batch: Batch, priority: Priority = Priority.LOAD, came: int | None = None) -> None:
    """Count the use of what was loaded, a part in each turn of the loop: the tail first, as the head goes last.

    It came now, part by part, if not said, see `Unwritten`.
    """
    for stop in range(len(batch), 0, -_TOUCHED_AT_ONCE):
        chain.touch(batch[max(0, stop - _TOUCHED_AT_ONCE) : stop], came)
        if stop > _TOUCHED_AT_ONCE:
            with suppress(asyncio.CancelledError):  # all of it is in place
                await chain.tasks.turn(priority)
