"""Bring a window of blocks to where copies reach them: the first half of every load and prefetch.

A `Bringer` begins a window (resident blocks are leased, the others are being filled) and then lands it (all blocks that
arrived are leased). While a load holds one window, its next one is begun without waiting, so that no two loads wait for
each other's slots.

`Presence` knows which storage tier has which blocks of one transfer. It asks each shared tier once, as far as the
answer reaches.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.index import TierIndex
from tiered_kv.catalog.leases import Lease
from tiered_kv.catalog.table import names_at
from tiered_kv.tiers.chain import FROM_ENGINE, Chain
from tiered_kv.tiers.fills import Fill
from tiered_kv.tiers.gate import Kind, Priority, Waiter
from tiered_kv.tiers.storage import StorageTier
from tiered_kv.tiers.tier import Batch, MemoryTier
from tiered_kv.transfers.handles import until_done
from tiered_kv.values.errors import Reason, TierFault
from tiered_kv.values.integers import Mask

_ASKED_AT_ONCE: Final = 1024
_UNASKED, _ABSENT, _THERE, _BEYOND = range(4)
"""What is known of a block in one shared tier. `_BEYOND` is past the first block that the tier lacks: it has not said.
Absent, unless no other tier has the block."""
Said = Mapping[StorageTier, NDArray[np.int8]]
"""What shared tiers have been asked about a transfer's blocks already: by position, of each, what is known of it."""


class Presence:
    """The answers of shared tiers about the blocks of one transfer. Owned tiers are looked at each time, for little.

    An answer may be seconds old when its blocks are read: a read decides. But what was evicted since is asked for anew:
    a store that comes then would count on its read.

    Attributes:
        silent: What kept tiers from answering: they may have what was found nowhere.
    """

    def __init__(self, chain: Chain, batch: Batch, said: Said | None = None, gpu: MemoryTier | None = None) -> None:
        """Begin with what has been ``said``; blocks in the ``gpu`` pool count as there if the transfer reads it."""
        self._chain = chain
        self._batch = batch
        self._above = [tier for tier in chain.booked if tier is not chain.gpu or tier is gpu]
        self._known = {tier: known.copy() for tier, known in (said or {}).items()}
        self._away = set[StorageTier]()  # passed over when blocks were looked for last
        self._stands: Mask | None = None  # what was said of them: not of what was evicted since
        self.silent: list[TierFault] = []

    async def sources(self, at: NDArray[np.int64], are_holes: Callable[[NDArray[np.int64]], Mask]) -> NDArray[np.int8]:
        """Say which storage tier, by its number in the chain, to read blocks from; -1 for nowhere.

        Args:
            at: Positions in the transfer, ascending.
            are_holes: Asked of positions that are in no storage tier, which of them end the prefix: others may be on
                their way already.
        """
        while True:
            self._doubt_evicted()
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

    def stands(self, at: NDArray[np.int64]) -> Mask:
        """Say of which blocks what `sources` has said is true yet, as they were not evicted meanwhile."""
        return np.ones(len(at), np.bool_) if self._stands is None else self._stands[at]

    def close(self) -> None:
        """Ask no more."""
        if self._stands is not None:
            self._chain.sought.drop(self._stands)

    def _doubt_evicted(self) -> None:
        if self._stands is None:
            self._stands = self._chain.sought.add(self._batch.names)
        elif not self._stands.all():
            for known in self._known.values():
                known[~self._stands] = _UNASKED
            self._stands[:] = True

    async def _sources(self, at: NDArray[np.int64]) -> NDArray[np.int8]:
        numbers = np.full(len(at), -1, np.int8)
        for number, tier in enumerate(self._chain.storage, start=len(self._chain.memory)):
            left = (numbers < 0).nonzero()[0]
            if not len(left):
                break
            if tier.health.is_bypassed:
                self._away.add(tier)
                continue
            self._away.discard(tier)
            if not tier.is_shared:
                has = await tier.find(self._batch[at[left]])
            else:
                known = self._known.setdefault(tier, np.full(len(self._batch), _UNASKED, np.int8))
                unasked = (known[at[left]] == _UNASKED).nonzero()[0]
                if len(unasked):
                    await self._ask(tier, known, int(at[left[unasked[0]]]))
                has = known[at[left]] == _THERE
            numbers[left[has]] = number
        return numbers

    def not_said(self, hole: int) -> list[TierFault]:
        """Name, once each, the tiers that may have the block ``hole``, found nowhere: they did not say, or are away."""
        faults = {(fault.tier, fault.reason): fault for fault in self.silent}
        for tier in self._chain.storage:
            if tier in self._away and (may_have := tier.may_have(self._batch[hole:]))[0]:
                fault = TierFault(tier.name, Reason.TIER_AWAY, int(np.count_nonzero(may_have)))
                faults[tier.name, fault.reason] = fault
        return list(faults.values())

    async def _ask(self, tier: StorageTier, known: NDArray[np.int8], first: int) -> None:
        """Ask a tier for a block and all behind it of which nothing is known, here or in the tiers above."""
        span = np.arange(first, min(first + _ASKED_AT_ONCE, len(self._batch)))
        names = self._batch.names[span]
        wanted = known[span] == _UNASKED
        for tier_above in self._above:
            if tier_above.is_in_use:
                wanted &= ~tier_above.index.ready(names)
        for above, said in self._known.items():
            if above is not tier:
                wanted &= said[span] != _THERE
        wanted[0] = True
        question = span[wanted]
        found = await tier.find(self._batch[question], self.silent)
        known[question] = np.where(found, _THERE, _ABSENT)
        if not found.all():
            known[question[np.argmin(found) + 1 :]] = _BEYOND


@dataclass
class Window:
    """Consecutive blocks of one load.

    Attributes:
        start: Position of its first block in the load.
        batch: Its blocks; cut to the prefix that is anywhere.
        source: By position, the number of the tier that had the block before this load.
        gpu: Slots of the GPU pool by position, -1 where it lacks the block.
        host: Slots of the host by position, of what was resident there; -1 elsewhere.
        coming: By position, the number of the tier that another transfer is reading the block from, or -1.
        held: Leases on what was resident when the window began: it arrives, whatever is removed from a tier meanwhile.
        own: The fill that this window started, if any.
        own_at: Positions of what that fills.
        fills: All fills it waits for, its own among them.
        is_last: Whether the block behind it is nowhere.
        not_said: The tiers that may have that block all the same.
    """

    start: int
    batch: Batch
    source: NDArray[np.int8]
    gpu: NDArray[np.int64]
    host: NDArray[np.int64]
    coming: NDArray[np.int8]
    held: list[Lease] = field(default_factory=list)
    own: Fill | None = None
    own_at: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    fills: list[Fill] = field(default_factory=list)
    is_last: bool = False
    not_said: list[TierFault] = field(default_factory=list)


@dataclass
class WindowResult:
    """What a window has come to: the prefix that copies can reach, of ``num_blocks`` blocks, under ``leases``.

    Attributes:
        gpu: Slots of the GPU pool, -1 where the block is not there.
        host: Slots of the host where the GPU pool lacks the block, else -1.
        is_worth_another: The block behind the prefix was not lost: it was brought, and has left already.
    """

    window: Window
    num_blocks: int
    gpu: NDArray[np.int64]
    host: NDArray[np.int64]
    leases: list[Lease]
    is_worth_another: bool

    def to_promote(self, host: TierIndex) -> NDArray[np.int64]:
        """Return the positions of what may go to the GPU pool: what the host alone has, and was not removed from it."""
        slots, _ = host.find(self.window.batch.names[: self.num_blocks])
        return np.flatnonzero((self.gpu < 0) & np.equal(self.host, slots))


class Bringer:
    """Begins and lands the windows of one transfer."""

    def __init__(
        self,
        chain: Chain,
        batch: Batch,
        kind: Kind,
        *,
        priority: Priority | None = None,
        keep: bool,
        may_pass: bool = True,
        gpu: MemoryTier | None = None,
        said: Said | None = None,
    ) -> None:
        """Begin nothing yet.

        Args:
            chain: The tiers.
            batch: All blocks of the transfer.
            kind: Of the reads.
            priority: Of the reads; that of their kind by default.
            keep: Whether blocks read from storage are to stay in the CPU tier.
            may_pass: Whether blocks that are to stay, and find no room, may pass through.
            gpu: The GPU pool, if a block that is there need not be on the host.
            said: What shared tiers have been asked just before.
        """
        self.chain = chain
        self._batch = batch
        self._kind = kind
        self._priority = Priority(kind) if priority is None else priority
        self.faults: list[TierFault] = []
        # A load longer than the CPU tier must not evict its own head: past this many, blocks only pass through.
        self.may_keep = chain.host.index.room_for(batch.names) if keep else 0
        self.presence = Presence(chain, batch, said, gpu)
        self._may_pass = may_pass
        self._gpu = gpu
        self._read_from: StorageTier | None = None

    async def begin(self, start: int, batch: Batch, *, may_wait: bool) -> Window | None:
        """Begin a window; its batch is cut to the prefix that is anywhere, and to what may be read at once.

        Returns:
            None if there are no slots for it now. With ``may_wait`` it waits for them instead.
        """
        n, nowhere = len(batch), np.full(len(batch), -1, np.int64)
        window = Window(start, batch, np.full(n, -1, np.int8), nowhere, nowhere.copy(), np.full(n, -1, np.int8))
        try:
            if not await self._begin(window, may_wait=may_wait):
                self.abandon(window)
                return None
        except BaseException:
            self.abandon(window)
            raise
        return window

    async def _begin(self, window: Window, *, may_wait: bool) -> bool:
        missing = self._hold_resident(window)
        size = self.chain.next_window(window.start, len(self._batch) - window.start)
        if len(missing) and len(window.batch) > size:
            # It was to be as long as what was resident, and some of that has left: what is read is never so long.
            self.chain.release(*window.held)
            window.held = []
            window.source[:] = -1
            window.host[:] = -1
            self._cut(window, int(missing[0]) or size)
            missing = self._hold_resident(window)
        if not len(missing):
            return True
        chain = self.chain
        await chain.tasks.turn(self._priority, at_once=True)  # what is to be read takes as many steps again
        numbers = await self.presence.sources(window.start + missing, self._are_holes)
        nowhere = missing[numbers < 0]
        if len(nowhere) and len(nowhere := nowhere[self._are_holes(window.start + nowhere)]):
            self._cut(window, int(nowhere[0]))
            window.is_last = True
            window.not_said = self.presence.not_said(window.start + int(nowhere[0]))
            keep = missing < nowhere[0]
            missing, numbers = missing[keep], numbers[keep]
        if not len(missing):
            return True
        wanted = numbers >= 0
        at, numbers = missing[wanted], numbers[wanted]
        chain.fills.make_way(window.batch.names[at])
        if len(at) and not await self._fill(window, at, numbers, may_wait=may_wait):
            return False
        if len(at):
            self._say_planned(window, int(numbers[-1]))
        self._take_resident(window)  # what others brought while we waited
        left = (window.source < 0).nonzero()[0]
        if len(left):
            window.coming[left] = chain.fills.coming_from(window.batch[left])
            for fill in chain.fills.of(window.batch[left], self._kind, self._priority):
                if fill is not window.own:
                    fill.join()
                    window.fills.append(fill)
        return True

    def _say_planned(self, window: Window, number: int) -> None:
        """Tell the tier that the last block comes from how much more it will be asked for: all behind, presumably."""
        tier = self.chain.storage[number - len(self.chain.memory)]
        if self._read_from is not tier:
            self._plan_no_more()
            self._read_from = tier
        left = 0 if window.is_last else len(self._batch) - window.start - len(window.batch)
        tier.speed.plan(self, left * tier.shape.stride_bytes)

    def close(self) -> None:
        """Begin no more windows."""
        self._plan_no_more()
        self.presence.close()

    def _plan_no_more(self) -> None:
        if self._read_from is not None:
            self._read_from.speed.plan(self, 0)

    async def _fill(self, window: Window, at: NDArray[np.int64], numbers: NDArray[np.int8], *, may_wait: bool) -> bool:
        chain, batch = self.chain, window.batch[at]
        keep = self.may_keep >= len(at)
        if not keep:
            self.may_keep = 0  # what stays is the head, without gaps
        waiter, source = Waiter(self._kind, self._priority), int(numbers.max())
        reservation = None
        if not chain.room.is_wanted((source, FROM_ENGINE)):
            may_pass = self._may_pass
            reservation = chain.reserve_host_now(batch, waiter, keep=keep, may_pass=may_pass, source=source)
        if reservation is None:
            if not may_wait:
                return False
            # Lease no host slots while waiting for more: other loads may wait for just these. Leased again later.
            first = 0 if self._gpu is None else 1
            chain.release(*window.held[first:])
            del window.held[first:]
            window.source[window.gpu < 0] = -1
            window.host[:] = -1
            reservation = await chain.reserve_host(batch, waiter, keep=keep, source=source)
        is_taken = reservation.slots >= 0
        fresh = is_taken & self.presence.stands(window.start + at)
        if len(gone := (is_taken & ~fresh).nonzero()[0]):
            chain.host.index.remove(names_at(batch.names, gone))  # nobody is to count on their coming
        if not fresh.any():
            reservation.close()
            return True
        if keep:
            self.may_keep -= int(fresh.sum())
        window.source[at[fresh]] = numbers[fresh]
        window.own = chain.fills.start(batch, np.where(fresh, numbers, -1).astype(np.int8), reservation, waiter)
        window.own_at = at
        window.fills.append(window.own)
        return True

    async def land(self, window: Window, deadline: float) -> WindowResult:
        """Wait until the window has arrived, at most until ``deadline``, and lease the prefix that has."""
        chain, batch, n = self.chain, window.batch, len(window.batch)
        if waiting := [fill for fill in window.fills if not fill.is_done]:
            await until_done(waiting, deadline)
        if not chain.tasks.goes_on():  # thousands may have waited for the same fill
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await chain.tasks.turn(self._priority)
        host = window.host
        arrived = ((window.gpu < 0) & (host < 0)).nonzero()[0]
        lease = chain.host.index.lease(names_at(batch.names, arrived))
        host[arrived] = lease.slots
        absent = ((window.gpu < 0) & (host < 0)).nonzero()[0]
        num_blocks = int(absent[0]) if len(absent) else n
        faults: list[TierFault] = []
        if not len(absent):
            faults += window.not_said  # the load ends here, and not before
        else:
            wanted = names_at(batch.names, absent)  # a fill that was joined is of others' blocks, too
            for fill in window.fills:
                if not fill.is_done and fill.are_among(wanted).any():
                    faults.append(TierFault(self._tiers_of(fill), Reason.DEADLINE, n))
                faults += chain.fills.faults_of(fill, wanted)
            # What befell the first block that did not come is said last.
            number = max(int(window.source[num_blocks]), int(window.coming[num_blocks]))
            faults.sort(key=lambda fault: number >= 0 and chain.names[number] in fault.tier.split(","))
        self.faults += faults
        if window.own is not None:
            came = window.own_at[window.own.arrived]
            window.source[came[host[came] < 0]] = -1  # the tier has shrunk since, or had them evicted
        joined = (window.source < 0) & (host >= 0)
        from_storage = joined & (window.coming >= 0)
        window.source[joined] = len(chain.memory) - 1  # stored by the engine meanwhile: on the host
        window.source[from_storage] = window.coming[from_storage]
        have_come = all(fill.is_in_time for fill in window.fills)
        is_worth_another = num_blocks < n and have_come and window.source[num_blocks] < 0
        leases = [*window.held, lease]
        window.held = []
        self.abandon(window)
        return WindowResult(window, num_blocks, window.gpu[:num_blocks], host[:num_blocks], leases, is_worth_another)

    def abandon(self, window: Window) -> None:
        """Hold nothing of a window any more. Its fill goes on: it is the cache's."""
        for fill in window.fills:
            fill.let_go()
        self.chain.release(*window.held)
        window.fills, window.held = [], []

    def _hold_resident(self, window: Window) -> NDArray[np.int64]:
        """Lease what is in memory; return the positions of the rest."""
        if self._gpu is not None:
            lease = self._gpu.index.lease(window.batch.names)
            window.held.append(lease)
            window.gpu = lease.slots
            window.source[lease.slots >= 0] = 0
        self._take_resident(window)
        return (window.source < 0).nonzero()[0]

    def _take_resident(self, window: Window) -> None:
        """Lease what the host can serve right now."""
        left = (window.source < 0).nonzero()[0]
        if not len(left):
            return
        lease = self.chain.host.index.lease(names_at(window.batch.names, left))
        window.held.append(lease)
        window.host[left] = lease.slots
        window.source[left[lease.slots >= 0]] = len(self.chain.memory) - 1

    def _are_holes(self, at: NDArray[np.int64]) -> Mask:
        """Say which blocks of the transfer are not on the host, and not on their way there."""
        slots, _ = self.chain.host.index.find(names_at(self._batch.names, at))
        return np.less(slots, 0)

    def _cut(self, window: Window, n: int) -> None:
        window.batch, window.source, window.coming = window.batch[:n], window.source[:n], window.coming[:n]
        window.gpu, window.host = window.gpu[:n], window.host[:n]

    def _tiers_of(self, fill: Fill) -> str:
        return ",".join(self.chain.names[number] for number in sorted(set(fill.source.tolist())) if number >= 0)


def said_of(asked: NDArray[np.int64], found: Mask, num_blocks: int) -> NDArray[np.int8]:
    """Return what one tier has said, for `Said`: of the blocks ``asked`` whether they were ``found``."""
    known = np.full(num_blocks, _UNASKED, np.int8)
    known[asked] = np.where(found, _THERE, _ABSENT)
    return known
