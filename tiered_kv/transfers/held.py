"""What a job holds of one rank's host memory: leased blocks of a load, reserved slots of a store."""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.leases import Lease, Reservation
from tiered_kv.hints import ReuseHint
from tiered_kv.specs import CPULoadStoreSpec
from tiered_kv.tiers.base import Mask
from tiered_kv.tiers.batch import Batch
from tiered_kv.tiers.chain import Chain
from tiered_kv.transfers.load import count_uses
from tiered_kv.transfers.prefetch import Brought
from tiered_kv.transfers.tally import Tally
from tiered_kv.transfers.writedown import write_down


class HeldLoad:
    """Blocks leased on the host for one rank.

    Attributes:
        chain: Of the rank.
        spec: Where they are.
        positions: Which of the job's keys they are.
        present: Which blocks of the job need no move: none.
        answers: What a flush waits for: nothing.
    """

    answers: "tuple[asyncio.Future[None], ...]" = ()

    def __init__(
        self,
        chain: Chain,
        batch: Batch,
        lease: Lease,
        brought: Brought,
        positions: NDArray[np.int64] | None = None,
    ) -> None:
        """Take over a lease on a prefix of ``batch``, or on its blocks at these positions; ``brought`` is about all."""
        self.chain = chain
        self.spec = CPULoadStoreSpec(lease.slots, chain.host.slab.name)
        self.positions = np.arange(len(lease.slots)) if positions is None else positions
        self.present: Mask = np.zeros(len(brought.source), np.bool_)
        self._batch = batch
        self._lease = lease
        self._brought = brought

    def end(self, moved: Mask, wanted: slice) -> None:
        """Let go of the slots; ``moved`` is what all ranks have in place, ``wanted`` what they were asked for."""
        chain = self.chain
        source = self._source_of(moved)
        chain.ledger.count_load(self._batch.namespace.salt, len(moved[wanted]), len(source), "not moved")
        for tier, count in zip(chain.tiers, np.bincount(source, minlength=len(chain.tiers)), strict=True):
            tier.counters.hits += int(count)
        chain.release(self._lease)
        if len(used := self._batch[moved]):
            came = chain.unwritten.begin()  # a flush waits for what it admits, though the job has ended
            counting = chain.tasks.spawn(count_uses(chain, used, came=came), f"count uses of {len(used)} blocks")
            counting.add_done_callback(lambda _: chain.unwritten.end(came))

    def shares(self, moved: Mask, now: float) -> Iterator[tuple[str, int, float]]:
        """Yield the tiers that had what has moved: their names, how many blocks, when these were on the host."""
        source, arrived = self._source_of(moved), self._brought.arrived[moved]
        for number in np.unique(source).tolist():
            of_tier = source == number
            yield self.chain.tiers[number].name, int(np.count_nonzero(of_tier)), float(arrived[of_tier].max())

    def _source_of(self, moved: Mask) -> NDArray[np.int8]:
        # What another call brought meanwhile was on the host.
        source: NDArray[np.int8] = np.where(self._brought.source < 0, len(self.chain.memory) - 1, self._brought.source)[
            moved
        ]
        return source

    def abandon(self, wanted: slice) -> None:
        """End it while a worker may be reading the slots yet: what that brings counts for nothing."""
        self.end(np.zeros_like(self.present), wanted)


class HeldStore:
    """Slots reserved on the host for what one rank is to copy out.

    Attributes:
        chain: Of the rank.
        spec: Where it goes.
        positions: Which of the job's keys go there.
        present: Which blocks of the job were there already.
        answers: What a flush waits for, if a worker may be copying: done once it has answered and what it copied counts
            as not written yet, cancelled if the cache was closed before.
    """

    def __init__(
        self, chain: Chain, batch: Batch, reservation: Reservation, num_keys: int, hint: ReuseHint | None
    ) -> None:
        """Take over what was reserved for ``batch``: all ``num_keys`` of the job, or none where there is no room."""
        self.chain = chain
        self.positions = np.flatnonzero(reservation.slots >= 0)
        self.spec = CPULoadStoreSpec(reservation.slots[self.positions], chain.host.slab.name)
        self.present: Mask = np.zeros(num_keys, np.bool_)
        self.present[: len(batch)] = reservation.slots < 0
        self._batch = batch
        self._reservation = reservation
        self._hint = hint
        self._came = chain.unwritten.now
        self._answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answers = (self._answer,)

    def end(self, moved: Mask, wanted: slice) -> None:
        """Make readable what all ranks have copied out, give back the other slots, and write down."""
        self._count(moved, wanted)
        chain = self.chain
        lease = self._reservation.commit(moved[: len(self._batch)])
        self._reservation.close()
        chain.room.changed()
        live = lease.slots >= 0
        if self._hint is not None:
            chain.host.index.hint(self._batch.names[live], self._hint)
        n = int(np.count_nonzero(live))
        tally = Tally(chain.tiers)
        tally.add(chain.host, written=n, dropped=len(self.spec) - n)
        present = self.present[: len(live)]
        came = chain.unwritten.begin(self._came)  # from here on a flush waits for it as for any store
        chain.touch_there(self._batch[~live & present])
        chain.count_use(self._batch[live | present], came)
        ended = partial(chain.unwritten.end, came)
        write_down(chain, tally, chain.host, self._batch[live], lease.slots[live], lease, came, ended)
        self._answer.set_result(None)

    def abandon(self, wanted: slice) -> None:
        """End it while a worker may be writing to the slots yet: nobody gets them any more."""
        self._count(np.zeros_like(self.present), wanted)
        self._answer.cancel()

    def shares(self, moved: Mask, now: float) -> Iterator[tuple[str, int, float]]:
        """Yield the host's name, how many blocks it has got, and when."""
        if num_blocks := int(np.count_nonzero(moved[self.positions])):
            yield self.chain.host.name, num_blocks, now

    def _count(self, moved: Mask, wanted: slice) -> None:
        stored, present = int(np.count_nonzero(moved[self.positions])), int(np.count_nonzero(self.present[wanted]))
        requested = len(moved[wanted])
        reason = "not moved" if len(self._batch) else "no room"
        dropped = requested - stored - present
        reasons = {reason: dropped} if dropped else {}
        self.chain.ledger.count_store(requested, stored=stored, present=present, dropped=reasons)


Held = HeldLoad | HeldStore


def reserve_all(batches: Sequence[tuple[Chain, Batch]], hint: ReuseHint | None) -> list[HeldStore]:
    """Reserve slots for what each rank lacks, if there is room for all of it; else for nothing."""
    num_keys = len(batches[0][1])
    # Asked of all ranks first: what one would evict for its part must not be lost because another has no room.
    if not all(chain.limits.takes_stores and chain.host.index.fits(batch.names) for chain, batch in batches):
        batches = [(chain, batch[:0]) for chain, batch in batches]
    reservations = [chain.reserve(chain.host, batch) for chain, batch in batches]
    return [
        HeldStore(chain, batch, reservation, num_keys, hint)
        for (chain, batch), reservation in zip(batches, reservations, strict=True)
        if reservation is not None  # it fits, as was said
    ]
