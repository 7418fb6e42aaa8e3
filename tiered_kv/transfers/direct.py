"""Loads straight into memory of the engine's own, and stores straight out of it: a medium has a pool, and no host slot.

In a load, what is in memory is copied as in every load; what is only in storage is read in place, verified there, and
counts from then on. A store is written from where it is, if nothing but one storage tier of this cache's own is to have
it. A medium that has been given the engine's memory cannot be left: such a transfer ends when the medium lets go of it,
so its deadline is soft. It begins nothing more once its time is up.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.catalog.uses import Fate
from tiered_kv.memory.device import nothing
from tiered_kv.memory.host import LentBlocks
from tiered_kv.memory.lanes import Lane
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.gate import Kind, Priority, Waiter
from tiered_kv.tiers.owned import OwnedTier
from tiered_kv.tiers.tasks import to_the_end
from tiered_kv.tiers.tier import Batch, ReadReport, WriteReport, prefix_of
from tiered_kv.transfers.engine_memory import DirectSlots
from tiered_kv.transfers.handles import LAST_COPIES_S, Revocable
from tiered_kv.transfers.load import Load, WindowCopy
from tiered_kv.transfers.store import Store, StoreHandle
from tiered_kv.transfers.transfer_requests import MOST_AT_ONCE, StoreRequest
from tiered_kv.transfers.window import Window, WindowResult
from tiered_kv.values.errors import Reason, TierFault
from tiered_kv.values.integers import Mask
from tiered_kv.values.results import StoreResult


class DirectLoad(Load):
    """A load into `DirectSlots` that takes turns: resident blocks are copied, those in storage are read in place."""

    @property
    def is_copying(self) -> bool:
        """True from the beginning: a medium that was given memory cannot be asked how far it is."""
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
        """Wait until nobody else uses the pages; say whether that went well."""
        error = await _until_free(self, self._chain, self._request.lane)
        self._say_failed(error, len(self._batch))
        return error is None

    async def _read(self, start: int, part: Batch, numbers: NDArray[np.int8]) -> int:
        """Read blocks to where they belong; return how many leading ones are right. Ends when the media have let go."""
        if not len(part):
            return 0
        num_right = prefix_of(await self._read_from_all(start, part, numbers))
        nowhere = np.full(len(part), -1, np.int64)
        window = Window(start, part, numbers, nowhere, nowhere, np.full(len(part), -1, np.int8))
        self._copied.append(
            WindowCopy(WindowResult(window, num_right, nowhere, nowhere, [], is_worth_another=False), ok=True)
        )
        if self.revoked:
            raise asyncio.CancelledError
        if asyncio.get_running_loop().time() >= self._request.deadline:
            raise TimeoutError
        return num_right

    async def _read_from_all(self, start: int, part: Batch, numbers: NDArray[np.int8]) -> NDArray[np.bool_]:
        """Read blocks, each from its tier, all tiers at once; say which are right."""
        slots = self._request.binding.direct
        assert slots is not None  # noqa: S101 - else it would be a plain load
        pages = self._request.pages[start : start + len(part), 0]
        right = np.zeros(len(part), np.bool_)
        parts: dict[asyncio.Future[ReadReport], NDArray[np.intp]] = {}
        waiters: dict[asyncio.Future[Any], Waiter] = {}
        for number in np.unique(numbers).tolist():
            tier, at = self._chain.storage[number - len(self._chain.memory)], (numbers == number).nonzero()[0]
            waiter = Waiter(Kind.LOAD, self._request.priority, lends=True)
            late = partial(self._say_late, tier.name, len(at))
            there, lent = part[at], slots.lend(pages[at])
            ended: asyncio.Future[ReadReport] = asyncio.get_running_loop().create_future()
            ended.add_done_callback(partial(_give_back, lent))
            tier.start_read(there, lent, waiter, late, ended.set_result)
            parts[ended], waiters[ended] = at, waiter
        await _until_let_go(self, self._chain, waiters, self._request.deadline)
        for ended, at in parts.items():
            right[at] = ended.result().right
        return right

    def _say_late(self, tier: str, n: int) -> None:
        self._bringer.faults.append(TierFault(tier, Reason.TIMEOUT, n))

    def _num_landed(self) -> int:
        return sum(copied.landed.num_blocks for copied in self._copied)


class DirectStore(Store):
    """A store out of `DirectSlots`: one storage tier writes from the engine's memory, and nothing is copied.

    The slots are the engine's again when it ends. Until then a load does not find the blocks.
    """

    def __init__(self, request: StoreRequest, tier: OwnedTier, slots: DirectSlots) -> None:
        """Prepare a store to what `direct_target` names."""
        super().__init__(request)
        self._tier = tier
        self._slots = slots
        self._size = self._chain.window_blocks * self._chain.limits.reads_in_flight
        self._waiter = Waiter(Kind.STORE, lends=True)

    @override
    async def run(self) -> StoreResult:
        chain, batch, loop = self._chain, self._batch, asyncio.get_running_loop()
        started, done = loop.time(), 0
        deadline = started + max(chain.limits.store_timeout_s, LAST_COPIES_S)
        timer = loop.call_at(deadline, self._is_late)
        try:
            chain.count_use(batch, self._came)
            if self._is_refused():
                done = len(batch)
            elif (error := await self._until_free(deadline)) is not None:
                self._drop(batch, error)
                done = len(batch)
            while done < len(batch) and not self.revoked and loop.time() < deadline:
                await chain.tasks.turn(Priority.STORE, at_once=not done)
                stop = min(done + self._size, len(batch))
                pages, wanted = self._request.pages[done:stop, 0], self._wanted[done:stop]
                await self._store(batch[done:stop], pages, wanted, deadline)
                done = stop
        except asyncio.CancelledError:
            self.revoked = True
        finally:
            timer.cancel()
            self._drop(batch[done:], Reason.REVOKED if self.revoked else Reason.DEADLINE)
            self._close_one()
        await self._use_present()
        return self._ended(loop.time() - started)

    @override
    def start_at_once(self) -> StoreHandle | None:
        """Have the tier write all of it once it is its turn; None, with nothing changed, if it takes more than that."""
        batch, request, chain, tier = self._batch, self._request, self._chain, self._tier
        if not 0 < len(batch) <= min(MOST_AT_ONCE, self._size) or request.lane.has_events or self._refusal():
            return None
        loop, waiter = asyncio.get_running_loop(), self._waiter
        started, ended = loop.time(), loop.create_future()
        if not (lacks := tier.lacks(batch)).any():
            return None
        part, pages = batch[lacks], request.pages[lacks, 0]
        lent, wanted = self._slots.lend(pages), tier.expected.add(part.names)

        def end(report: WriteReport) -> None:
            lent.give_back()
            tier.expected.drop(wanted)
            if timer is not None:
                timer.cancel()
            self._count(part, report, wanted)
            self._count_known(len(batch) - len(part))
            self._close_one()
            chain.touch_there(batch[~lacks])
            request.lane.release()
            ended.set_result(self._ended(loop.time() - started))

        def late() -> None:
            self._is_late()  # first: to give up may end it
            waiter.give_up()

        timer: asyncio.TimerHandle | None = None
        tier.start_write(part, lent, wanted.copy, nothing, waiter, end)
        chain.count_use(batch, self._came)
        if not ended.done():
            timer = loop.call_at(started + max(chain.limits.store_timeout_s, LAST_COPIES_S), late)
            chain.tasks.watch(ended, self.revoke)
        return StoreHandle(ended, self)

    @override
    def revoke(self) -> None:
        super().revoke()
        self._waiter.give_up()

    async def _until_free(self, deadline: float) -> Reason | None:
        """Wait until the engine has written the pages; say why not, if so."""
        try:
            async with asyncio.timeout_at(deadline):
                error = await _until_free(self, self._chain, self._request.lane)
        except TimeoutError:
            return Reason.DEADLINE
        return None if error is None else Reason.COPY_FAILED

    async def _store(self, part: Batch, pages: NDArray[np.int64], still: Mask, deadline: float) -> None:
        """Write one piece of the store; ends when the medium has let go of the engine's memory."""
        known = ~self._tier.lacks(part)
        if known.any():
            self._count_known(int(np.count_nonzero(known)))
            self._present.append(part[known])
            part, pages, still = part[~known], pages[~known], still[~known]
        if not len(part):
            return
        lent, wanted = self._slots.lend(pages), self._tier.expected.add(part.names)
        still &= self._chain.unwritten.is_wanted(self._tier.name, part.names, self._came)
        wanted[~still] = False  # what was evicted while this waited for its turn
        ended: asyncio.Future[WriteReport] = asyncio.get_running_loop().create_future()
        ended.add_done_callback(partial(_give_back, lent))
        self._tier.start_write(part, lent, wanted.copy, nothing, self._waiter, ended.set_result)
        await _until_let_go(self, self._chain, {ended: self._waiter}, deadline)
        self._tier.expected.drop(wanted)
        self._count(part, ended.result(), wanted)

    def _count(self, part: Batch, report: WriteReport, wanted: Mask) -> None:
        """Count what became of blocks."""
        if report.because is Reason.REVOKED and not self.revoked:
            report.because = Reason.DEADLINE  # which is when the waiter gives up
        tier, counts, drops = self._tier, report.counts(), report.drops()
        self._tally.add(tier, **counts, dropped=drops)
        self._num_stored += counts["written"]
        self._num_present += counts["present"]
        for reason, num_dropped in (*drops.items(), (Reason.UNWRITTEN, counts["failed"])):
            self._count_dropped(reason, num_dropped)
        self._chain.fates.note(part.names[report.dropped], Fate.DROPPED, tier.name)
        self._chain.fates.note(part.names[report.failed], Fate.FAILED, tier.name)
        self._chain.unwritten.has_lost |= bool(((report.dropped & wanted) | report.failed).any())
        if self._request.hint is not None:
            tier.hint(part[report.written], self._request.hint)


def direct_target(request: StoreRequest) -> OwnedTier | None:
    """Return the tier that may write a store straight out of the engine's memory; None if it has to be copied."""
    chain = request.chain
    if request.binding.direct is None or request.layerwise or chain.host.can_keep or len(chain.written) != 1:
        return None
    tier = chain.written[0]
    is_plain = not tier.is_written_back and tier.settings.admit_after == 1
    return tier if is_plain and isinstance(tier, OwnedTier) else None


async def _until_free(transfer: Revocable, chain: Chain, lane: Lane) -> BaseException | None:
    """Wait until the lane is past the caller's event, if there is one; return what that failed with."""
    if not lane.has_events:
        return None
    copy = chain.copy(lane, nothing)
    errors: list[BaseException | None] = []
    transfer.watch(copy, errors.append)
    await asyncio.wait({copy.ended})
    return errors[0]


async def _until_let_go(
    transfer: Revocable, chain: Chain, waiters: "Mapping[asyncio.Future[Any], Waiter]", deadline: float
) -> None:
    """Wait for calls that have memory of the engine's, however often this is cancelled.

    Those whose turn has not come are given up at the deadline, then, and at close.
    """

    def stop() -> None:
        for waiter in waiters.values():
            waiter.give_up()

    def revoke() -> None:
        transfer.revoked = True
        stop()

    for ended in waiters:
        chain.tasks.watch(ended, stop)
    timer = asyncio.get_running_loop().call_at(deadline, stop)
    await to_the_end(waiters, revoke)
    timer.cancel()


def _give_back(lent: LentBlocks, _: object) -> None:
    lent.give_back()
