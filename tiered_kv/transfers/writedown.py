"""Writing down: the second half of a store. Blocks go from the tier that has them to every tier below it.

Tiers with ``write="through"`` get them now (`write_down`). Blocks stay leased until the last tier has let go of their
memory; a tier that is late is counted as failed and not waited for, but keeps what it was lent.

For tiers with ``write="back"`` they wait where they are, and the chain's `Cleaner` writes them, the oldest first. It
begins when too little of a memory tier could be given to new blocks, or when a block has waited for long enough, and
heeds a bandwidth of its own. A tier that is bypassed keeps its blocks waiting, and then what is stored is dropped once
memory is full of them: bounded by the tier, and nothing waits for it but they.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.leases import Lease, Reservation
from tiered_kv.catalog.uses import Fate
from tiered_kv.memory.copies import copy_rows
from tiered_kv.tiers.calls import both
from tiered_kv.tiers.chain import FROM_ENGINE, Chain, Head
from tiered_kv.tiers.fills import Fill
from tiered_kv.tiers.gate import Kind, Priority, Waiter
from tiered_kv.tiers.storage import StorageTier
from tiered_kv.tiers.tasks import to_the_end
from tiered_kv.tiers.tier import Batch, MemoryTier, Prompt, Tally, WriteReport
from tiered_kv.tiers.unwritten import Waiting
from tiered_kv.transfers.handles import until_done
from tiered_kv.values.errors import Reason
from tiered_kv.values.integers import Mask

_MOST_TRIES: Final = 3
"""How often the cleaner tries to write a block before it counts as failed."""
_QUEUED: Final = Waiter(Kind.LOAD)
"""Of the store queue all may have all: there are only stores in it."""


class WriteDown:
    """The blocks of one window, leased in the tier that has them, on their way down."""

    def __init__(
        self,
        chain: Chain,
        tally: Tally,
        tier: MemoryTier,
        batch: Batch,
        slots: NDArray[np.int64],
        lease: Lease,
        came: int,
        *,
        to: Sequence[StorageTier] | None = None,
        kind: Kind = Kind.STORE,
        prompt: Prompt | None = None,
        head: Head | None = None,
    ) -> None:
        """Take over ``lease``, which holds ``batch`` in ``slots`` of ``tier``.

        Args:
            chain: The tiers.
            tally: Counts what becomes of the blocks.
            tier: Where they are.
            batch: The blocks.
            slots: Where in ``tier`` each is.
            lease: Released in the end.
            came: When they came, see `Unwritten`.
            to: The storage tiers to write to; those whose turn it is by their policies if left out.
            kind: `Kind.CLEAN` for blocks that waited: what fails then waits again.
            prompt: Of those that have not waited.
            head: Holds what comes to the host of a prompt, while the rest of it is to come there. Who gives it lets go.
        """
        self._chain = chain
        self._tally = tally
        self._tier = tier
        self._batch = batch
        self._slots = slots
        self._lease = lease
        self._came = came
        self._to = to
        self._kind = kind
        self._prompt = prompt
        self._head = head

    def let_wait(self) -> None:
        """Let the blocks wait here for the tiers that get them later, if it is here that they wait for those."""
        chain, tier = self._chain, self._tier
        if tier is chain.gpu and chain.host.index.max_slots and not chain.host.write_back:
            return  # on the host
        later = chain.later(tier)
        self._to = [] if chain.host in later else chain.through
        if not later:
            return
        stays = ~tier.index.is_bounce(self._slots)
        num_passing = int(np.count_nonzero(~stays))
        for each in later:
            self._tally.add(each, deferred=len(self._batch) - num_passing, dropped={Reason.NO_ROOM: num_passing})
        wanted = chain.admitted(later, self._batch)
        if num_passing:
            chain.unwritten.has_lost |= bool((wanted & ~stays).any())
            for storage in chain.back:
                chain.has_missed(storage, self._batch[~stays])
        wanted &= stays
        if wanted.any():
            chain.waiting[tier].add(self._batch[wanted], self._slots[wanted], self._lease, self._came, self._prompt)

    def part(self, at: slice | Mask, lease: Lease) -> "WriteDown":
        """Return the writing down of some of the blocks, which takes over a lease on them."""
        return WriteDown(
            self._chain, self._tally, self._tier, self._batch[at], self._slots[at], lease, self._came,
            to=self._to, kind=self._kind, prompt=self._prompt, head=self._head,
        )  # fmt: skip

    @property
    def is_done(self) -> bool:
        """Whether nothing is to be written now."""
        return not len(self._batch.names) or (self._to is not None and not self._to)

    def give_up(self) -> None:
        """Write nothing, and let go."""
        n = len(self._batch)
        if not self.is_done:
            self._chain.fates.note(self._batch.names, Fate.DROPPED, "queue full")
            self._lose(self._batch)
        if self._to is None:
            self._tally.add_below(self._tier, dropped={Reason.QUEUE_FULL: n})
        for storage in self._to or ():
            self._tally.add(storage, dropped={Reason.QUEUE_FULL: n})
        self._chain.release(self._lease)

    def start(self, ended: Callable[[], None]) -> None:
        """Write to the tiers below. Never raises for a tier.

        Args:
            ended: Called when each has the blocks or is given up, perhaps before this returns.
        """
        for storage in self._chain.through if self._to is None else self._to:
            storage.miss_no_more(self._batch.names)  # what does not come there is missed again
        gpu = self._chain.gpu
        if gpu is None or self._tier is not gpu:
            self._write(ended)
        else:
            writing = self._write_by_host(gpu, self._announce(gpu), ended)
            self._chain.tasks.spawn(writing, f"write down {len(self._batch)} blocks")

    def _announce(self, gpu: MemoryTier) -> Callable[[], None]:
        """Tell the tiers below what comes there by the host from the GPU pool, until what this returns is called."""
        unwritten, batch, slots, came = self._chain.unwritten, self._batch, self._slots, self._came

        def is_wanted(storage: StorageTier) -> Mask:
            found, _ = gpu.index.find(batch.names)
            there = np.equal(found, slots) & unwritten.is_wanted(self._chain.host.name, batch.names, came)
            return there & unwritten.is_wanted(storage.name, batch.names, came)

        to = self._chain.written if self._to is None else self._to
        announced = [each.announce(batch.names, partial(is_wanted, each)) for each in to]

        def over() -> None:
            for each in announced:
                each()

        return over

    async def _write_by_host(self, gpu: MemoryTier, copied: Callable[[], None], ended: Callable[[], None]) -> None:
        """Copy blocks of the GPU pool to the host, and write them from there."""
        try:
            try:
                await self._copy_to_host(gpu)
            finally:
                copied()
            if self._to is None:
                self.let_wait()
        except BaseException:
            if self._kind is Kind.CLEAN:  # the cache is closing, which counts what was not written
                self._chain.waiting[self._tier].put_back(self._batch, self._slots, self._lease, self._came)
            else:
                self._lose(self._batch)
            self._chain.release(self._lease)
            ended()
            raise
        self._write(ended)

    def _write(self, ended: Callable[[], None]) -> None:
        """Write what is on the host, to each tier once it is its turn there."""
        to = self._to or ()
        if not to or not len(self._batch):
            self._chain.release(self._lease)
            ended()
            return
        unsettled, lent = set(to), set(to)

        def settled(storage: StorageTier) -> None:
            unsettled.discard(storage)
            if not unsettled:
                ended()

        def let_go(storage: StorageTier) -> None:
            lent.discard(storage)
            if not lent:
                self._chain.release(self._lease)

        for storage in to:
            self._write_to(storage, partial(settled, storage), partial(let_go, storage))

    async def _copy_to_host(self, gpu: MemoryTier) -> None:
        """Copy blocks of the GPU pool to the host, and hold those that are there then instead."""
        chain, host, n = self._chain, self._chain.host, len(self._batch)
        with ExitStack() as joined:
            reservation = await self._reserve_host(joined)
            if reservation is None:
                if self._kind is Kind.CLEAN:
                    chain.waiting[gpu].put_back(self._batch, self._slots, self._lease, self._came)
                else:
                    self._lose(self._batch)
                    self._count_below(self._batch, dropped={Reason.NO_ROOM: n})
                    self._tally.add(host, dropped={Reason.NO_ROOM: n})
                self._batch, self._slots = self._batch[:0], self._slots[:0]
                return
            passes, is_filled = None, np.zeros(n, np.bool_)
            while reservation is not None:
                # Blocks that are there already stay until the others are copied: then all are written below together.
                joined.callback(chain.release, host.index.lease(self._batch.names))
                passes = host.index.is_bounce(reservation.slots)
                if (filled := await self._fill(gpu, reservation, passes)) is None:
                    break
                joined.callback(filled.release)
                passes, is_filled = None, is_filled | (filled.slots >= 0)
                # A smaller capacity, or age, takes what is leased as well.
                is_gone = self._goes_down(gpu) & (host.index.find(self._batch.names)[0] < 0)
                reservation = await self._reserve_host(joined) if is_gone.any() else None
            held = host.index.lease(self._batch.names)
        there = held.slots >= 0
        failed = ~there & self._goes_down(gpu, passes)
        is_removed = ~there & ~failed
        num_removed = int(np.count_nonzero(is_removed))
        num_again = self._wait_again(gpu, failed.nonzero()[0])
        chain.release(self._lease)
        num_failed = n - int(np.count_nonzero(there)) - num_again - num_removed
        num_passing = int(np.count_nonzero(host.index.is_bounce(held.slots)))
        num_written = max(0, int(np.count_nonzero(is_filled & there)) - num_passing)
        removed = {Reason.REMOVED: num_removed} if num_removed else {}
        self._tally.add(
            host,
            written=num_written,
            present=n - num_again - num_written - num_passing - num_failed - num_removed,
            deferred=num_again,
            dropped={Reason.NO_ROOM: num_passing, **removed},
            failed=num_failed,
        )
        self._count_below(self._batch[is_removed], dropped=removed, failed=num_failed)
        self._tier, self._lease, self._slots, self._batch = host, held, held.slots[there], self._batch[there]
        if self._head is not None:
            self._head.hold(host, self._batch.names)

    async def _fill(self, gpu: MemoryTier, reservation: Reservation, passes: Mask) -> Lease | None:
        """Copy blocks of the GPU pool to reserved host slots, and lease those that go down; None if the copy failed."""
        chain, host, fresh = self._chain, self._chain.host, reservation.slots >= 0
        fill = Fill(self._batch.names, Waiter(self._kind))
        chain.fills.announce(fill, reservation)
        try:
            if fresh.any():
                source, target = self._slots[fresh], reservation.slots[fresh]
                copy = chain.copy(chain.d2h.take(), lambda: copy_rows(gpu.rows, source, host.rows, target))
                await to_the_end([copy.ended], copy.revoke)  # the slots are ours until then
                if copy.ended.exception() is not None:
                    return None
            return reservation.commit(fresh & self._goes_down(gpu, passes))
        finally:
            chain.fills.conclude(fill, reservation)

    def _count_below(self, lost: Batch, *, dropped: Mapping[Reason, int], failed: int = 0) -> None:
        """Count what goes no further in the tiers that were to get it now: for others it was counted as deferred."""
        for storage in self._chain.storage if self._to is None else self._to:
            self._tally.add(storage, dropped=dropped, failed=failed)
            storage.miss(lost.names)  # the pool may have it yet

    def _wait_again(self, gpu: MemoryTier, at: NDArray[np.intp]) -> int:
        """Let blocks that waited, and were not copied to the host, wait for another try; say how many do.

        Args:
            gpu: Where they are.
            at: Their positions.
        """
        if not len(at):
            return 0
        again = np.zeros(len(at), np.bool_)
        if self._kind is Kind.CLEAN:
            line = self._chain.waiting[gpu]
            again = line.again(self._batch[at], self._slots[at], self._lease, self._came, most_tries=_MOST_TRIES)
        self._lose(self._batch[at[~again]])
        return int(np.count_nonzero(again))

    def _goes_down(self, gpu: MemoryTier, passes: Mask | None = None) -> Mask:
        """Say which blocks were not evicted by name since, from the pool or from the host: the others go no further.

        Args:
            gpu: The pool that they come from.
            passes: Which are not to stay on the host, and go past it though they were evicted there; none if left out.
        """
        slots, _ = gpu.index.find(self._batch.names)
        wanted = self._chain.unwritten.is_wanted(self._chain.host.name, self._batch.names, self._came)
        return np.equal(slots, self._slots) & (wanted if passes is None else wanted | passes)

    def _is_for(self, storage: StorageTier, batch: Batch) -> Mask:
        """Say which blocks are for this cache to write to a tier."""
        mine = self._chain.admitted([storage], batch)
        return mine & self._chain.naming.shard.writes(batch.positions) if storage.is_shared else mine

    def _lose(self, batch: Batch) -> None:
        """Take note that blocks go no further: perhaps a tier below was to get one of them, and may at its next use."""
        chain = self._chain
        to = chain.written if self._to is None else self._to
        is_for_host = self._to is None and chain.host.can_keep
        is_lost = len(batch) > 0 if is_for_host else any(self._is_for(each, batch).any() for each in to)
        chain.unwritten.has_lost |= is_lost
        for storage in to:
            chain.has_missed(storage, batch)

    async def _reserve_host(self, joined: ExitStack) -> Reservation | None:
        """Reserve host slots for what is not there; wait for them only where something below is to have the blocks now.

        What others are filling is waited for: ``joined`` holds what came so. What did not come is reserved too.
        """
        chain, host = self._chain, self._chain.host
        try:
            async with asyncio.timeout(chain.limits.store_timeout_s):
                while True:
                    chain.fills.make_way(self._batch.names)
                    if not (chain.through if self._to is None else self._to):
                        reservation = chain.reserve(host, self._batch)
                    else:
                        waiter = Waiter(self._kind)
                        reservation = await chain.reserve_host(self._batch, waiter, keep=self._to is None)
                    if reservation is None:
                        return None
                    filling = chain.fills.of(self._batch, self._kind, Priority.STORE)
                    fills = [fill for fill in filling if not fill.is_done]  # of one that is late comes nothing
                    if not fills:
                        return reservation
                    reservation.close()  # who fills them may wait for these
                    chain.room.changed()
                    for fill in fills:
                        fill.join()
                        joined.callback(fill.let_go)
                        await until_done([fill])
        except TimeoutError:
            return None

    def _write_to(self, storage: StorageTier, settled: Callable[[], None], let_go: Callable[[], None]) -> None:
        """Write blocks to one tier.

        Args:
            storage: The tier.
            settled: Called once what becomes of them is known: written, given up, or late.
            let_go: Called then, and once the medium has let go of their memory.
        """
        chain, batch, slots = self._chain, self._batch, self._slots
        mine = self._is_for(storage, batch)
        if num_others := len((~mine).nonzero()[0]):
            chain.fates.note(batch.names[~chain.admitted([storage], batch)], Fate.UNADMITTED, storage.name)
            self._tally.add(storage, deferred=num_others)
            batch, slots = batch[mine], slots[mine]
        is_settled = False

        def settle(report: WriteReport | None) -> None:
            nonlocal is_settled
            if not is_settled:
                is_settled = True
                try:
                    self._settle(storage, batch, slots, report or WriteReport.failure_of(len(batch)))
                finally:
                    settled()

        def is_wanted() -> Mask:
            return self._is_wanted(storage, batch, slots)

        def end(report: WriteReport) -> None:
            lent.give_back()
            settle(report)
            let_go()

        if not len(batch.names):
            settle(WriteReport.nothing_of(0, Reason.TIER_AWAY))
            let_go()
            return
        lent = chain.host.slab.lend_blocks(slots)
        storage.start_write(batch, lent, is_wanted, lambda: settle(None), Waiter(self._kind), end)

    def _is_wanted(self, storage: StorageTier, batch: Batch, slots: NDArray[np.int64]) -> Mask:
        """Say which blocks were not evicted by name since: they must not come back from below."""
        found, _ = self._chain.host.index.find(batch.names)
        return np.equal(found, slots) & self._chain.unwritten.is_wanted(storage.name, batch.names, self._came)

    def _settle(self, storage: StorageTier, batch: Batch, slots: NDArray[np.int64], report: WriteReport) -> None:
        """Count what became of the blocks in one tier; what waited for it and failed waits again."""
        has_waited = self._kind is Kind.CLEAN and storage.is_written_back  # else it only passes by, from the GPU pool
        waiting = self._chain.waiting.get(self._tier) if has_waited else None
        num_again, lost = 0, report.dropped | report.failed
        if waiting is not None and lost.any():
            failed = (report.failed & self._is_wanted(storage, batch, slots)).nonzero()[0]
            again = waiting.again(batch[failed], slots[failed], self._lease, self._came, most_tries=_MOST_TRIES)
            num_again = int(np.count_nonzero(again))
            report.failed[failed[again]] = False
            is_away = all(each.health.is_shedding for each in self._to or ())
            if is_away or report.because is Reason.REVOKED:  # nobody tried, or wants it now
                waiting.put_back(batch[report.dropped], slots[report.dropped], self._lease, self._came)
                num_again += int(np.count_nonzero(report.dropped))
                report.dropped[:] = False
            lost = report.dropped | report.failed
        self._tally.add(storage, deferred=num_again, dropped=report.drops(), **report.counts())
        if len(lost.nonzero()[0]):
            wanted = self._is_wanted(storage, batch[lost], slots[lost])
            self._chain.unwritten.has_lost |= bool(wanted.any())
            storage.miss(batch.names[lost])
            self._chain.has_missed(storage, batch[lost][wanted])
            self._chain.fates.note(batch.names[report.dropped], Fate.DROPPED, storage.name)
            self._chain.fates.note(batch.names[report.failed], Fate.FAILED, storage.name)


def write_down(
    chain: Chain,
    tally: Tally,
    tier: MemoryTier,
    batch: Batch,
    slots: NDArray[np.int64],
    lease: Lease,
    came: int,
    ended: Callable[[], None],
    prompt: Prompt,
    head: Head | None = None,
    *,
    to: Sequence[StorageTier] | None = None,
) -> None:
    """Send blocks of a tier on to those below: now, later, or not at all where the store queue is full.

    They go in windows, however many there are: a tier has no more in flight than it may, nor the queue. Which go is
    decided when this returns; many are begun in the turns that follow.

    Args:
        chain: The tiers.
        tally: Counts what becomes of the blocks.
        tier: Where they are.
        batch: The blocks.
        slots: Where in ``tier`` each is.
        lease: Over them; taken over.
        came: When they came, see `Unwritten`.
        ended: Called once nothing of this is under way any more.
        prompt: Of which they are.
        head: Of the prompt, see `WriteDown`.
        to: The only storage tiers to write to, at once; those whose turn it is by their policies if left out.
    """
    down = WriteDown(chain, tally, tier, batch, slots, lease, came, to=to, prompt=prompt, head=head)
    if to is None:
        down.let_wait()
    attempt = partial(chain.quotas.store_queue.attempt, waiter=_QUEUED)
    if down.is_done or len(batch) <= chain.most_window:
        give = None if down.is_done else attempt(len(batch) * chain.stride_bytes)
        if give is not None:
            down.start(both(give, ended))
        else:
            down.give_up()
            ended()
        return
    begins: list[Callable[[], None]] = []
    num_open = 1  # window, and this call

    def one_ended() -> None:
        nonlocal num_open
        num_open -= 1
        if not num_open:
            asyncio.get_running_loop().call_soon(prompt.line_up)  # once the last of them is let go of
            ended()

    for start in range(0, len(batch), chain.most_window):
        part = slice(start, start + chain.most_window)
        if (give := attempt(len(slots[part]) * chain.stride_bytes)) is None:
            break
        window = down.part(part, tier.index.lease(batch.names[part]))  # now: later their slots may be others'
        begins.append(partial(window.start, both(give, one_ended)))
    num_open += len(begins)
    down.part(slice(len(begins) * chain.most_window, None), lease).give_up()
    one_ended()
    chain.tasks.in_turns(begins, Priority.STORE, f"write down {len(begins)} windows")


def write_admitted(chain: Chain, storage: StorageTier, batch: Batch, came: int | None) -> None:
    """Send blocks that are used often enough now on to a tier that did not have them, from the memory they are in.

    They came when that use did: now if not said, see `Unwritten`. What passes through memory is sent on if a store has
    brought it, within its share of the bounce slots; those of loads are not kept for a write.
    """
    prompt, batch = Prompt(chain.booked, batch.names), batch[storage.lacks(batch)]
    for each in (storage, chain.host) if storage.is_written_back else ():
        chain.unwritten.want(each.name, batch.names, came)  # blocks that wait already do so since before the eviction
    for tier in reversed(chain.memory):
        if not len(batch):
            return
        lease = tier.index.lease(batch.names)
        there = (lease.slots >= 0) & ~tier.index.is_bounce(lease.slots)
        if not storage.is_written_back:
            there |= tier.index.passes_for(lease.slots, FROM_ENGINE)
        part, slots = batch[there], lease.slots[there]
        if storage.is_written_back and (waiting := chain.waiting.get(tier)) is not None:
            waiting.add(part, slots, lease, came, prompt)
            chain.release(lease)
        else:
            begun = chain.unwritten.begin(came)
            ended = partial(chain.unwritten.end, begun)
            write_down(chain, Tally(chain.tiers), tier, part, slots, lease, begun, ended, prompt, to=[storage])
        batch = batch[~there]


_TICK_S: Final = 1.0
"""How often it looks by itself: leases and tiers that are well again tell nobody."""
_LEAST_WAIT_S: Final = 0.001
"""Between two looks: it may not be due yet by as little as a clock does not tell."""
_PIECE: Final = 32
"""Blocks of what has waited for long enough that are written at once, each piece in its time. A window of small ones
would take the interpreter from an engine's thread for several of its steps, and 64 of them make a step half as long
again; fewer than 32 cost nearly as much."""
_GAP_S: Final = 0.02
"""Between two pieces, longer than most steps of an engine's: none has to bear two. Not where it lags behind."""
_MOST_LAG_S: Final = 0.5
_AT_ONCE: Final = 2
"""Windows on their way: while one is written, the next one is encoded."""


class Cleaner:
    """Writes dirty blocks of one chain's memory tiers to the tiers below. For the event loop's thread."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._woken = asyncio.Event()
        self._turns = asyncio.Semaphore(_AT_ONCE)  # fair: whoever always has blocks to write keeps no other out
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
                if n := await self._write_window(tier, waiting, self._chain.window_blocks):
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
                async with asyncio.timeout(self._until_due_s()):
                    await self._woken.wait()

    async def _clean(self, tier: MemoryTier, waiting: Waiting) -> None:
        bandwidth = self._chain.quotas.clean_bandwidth
        left = len(waiting)  # what comes back was tried, and has to wait for the next time
        while left > 0 and len(waiting) and self._can_write(tier):
            is_low, lag_s = self._is_low(tier, waiting), self._lag_s(waiting)
            if not is_low and lag_s < 0:
                return
            if (wait_s := bandwidth.wait_s()) > 0:
                await asyncio.sleep(wait_s)
                continue
            most = self._chain.window_blocks if is_low else min(self._chain.window_blocks, _PIECE)
            if not (n := await self._write_window(tier, waiting, most)):
                return  # until the next tick, or until something was written and made room
            bandwidth.take(n * self._chain.stride_bytes)
            left -= n
            if not is_low and lag_s < _MOST_LAG_S:
                await asyncio.sleep(_GAP_S)

    def _until_due_s(self) -> float:
        """Say how long it is until something is due, or may be: what is due already waits for something else."""
        after_s = self._chain.limits.clean_after_s
        left_s = [after_s - waiting.oldest_s() for waiting in self._chain.waiting.values() if len(waiting)]
        return max(_LEAST_WAIT_S, min([_TICK_S, *(each_s for each_s in left_s if each_s > 0)]))

    def _wake_if_due(self, tier: MemoryTier, waiting: Waiting) -> None:
        if self._is_due(tier, waiting):
            self._woken.set()

    def _is_due(self, tier: MemoryTier, waiting: Waiting) -> bool:
        if not len(waiting):
            return False
        return self._is_low(tier, waiting) or self._lag_s(waiting) >= 0

    def _lag_s(self, waiting: Waiting) -> float:
        """Say for how long the first has been due."""
        return waiting.oldest_s() - self._chain.limits.clean_after_s

    def _is_low(self, tier: MemoryTier, waiting: Waiting) -> bool:
        """Say whether too little of a tier could be given to new blocks."""
        books = tier.index.statistics()
        # What is being written will be evictable when it is: else all would be written whenever some is.
        to_be_had = books.free + books.evictable + waiting.num_taken
        return to_be_had < self._chain.limits.low_water * books.num_slots

    def _can_write(self, tier: MemoryTier) -> bool:
        if self._chain.host in self._chain.later(tier):
            return True
        return not all(storage.health.is_shedding for storage in self._chain.back)

    async def _write_window(self, tier: MemoryTier, waiting: Waiting, most: int) -> int:
        """Begin to write so many blocks at most of those that wait longest, when it is our turn; say how many.

        0 where they go to the CPU tier, which is full, and nowhere past it.
        """
        await self._turns.acquire()
        if not (n := self._begin_window(tier, waiting, most)):
            self._turns.release()
        return n

    def _begin_window(self, tier: MemoryTier, waiting: Waiting, most: int) -> int:
        """Begin a window if there are blocks to write and room; return how many. Its end gives the turn to another."""
        chain = self._chain
        if not len(waiting):
            return 0
        goes_to_host = chain.host in chain.later(tier)
        if goes_to_host:  # a whole window may be too large for the host ever to have room
            books = chain.host.index.statistics()
            num_free = books.free + books.evictable - waiting.num_taken  # those taken before may still need slots there
            most = max(0, min(most, num_free))
            if not most and not chain.through:
                return 0
            most = max(1, most)
        batch, lease, came = waiting.take(most)
        num_blocks = len(batch)
        prompts = Counter(() if batch.prompts is None else batch.prompts)
        loop, to = asyncio.get_running_loop(), None if goes_to_host else chain.back
        down = WriteDown(chain, Tally(chain.tiers), tier, batch, lease.slots, lease, came, to=to, kind=Kind.CLEAN)

        def let_go() -> None:
            for prompt, n in prompts.items():
                if prompt is not None and goes_to_host:  # where the next window might evict them
                    prompt.line_up()
                elif prompt is not None:
                    prompt.let_go(n)

        def written() -> None:
            self._turns.release()
            waiting.ended(num_blocks, came)
            loop.call_soon(let_go)  # once it has let go of the window
            if tier is chain.host and chain.gpu in chain.waiting:
                self._woken.set()  # blocks in the GPU pool may have waited for this room

        down.start(written)
        return num_blocks


async def write_all(marks: Mapping[Chain, int], cleaners: Mapping[Chain, Cleaner]) -> None:
    """Wait until all that came to some chains before these marks is in every tier or given up; see `Cleaner.write`."""
    for chain, mark in marks.items():
        await cleaners[chain].write(mark)
