"""A tier that the cache owns alone: a medium of numbered slots, and the index that says which block is in which.

Nothing leaves the books without the medium being told, or that being owed. What is removed, by name, age, another
capacity or damage, the index hands over, and it keeps its slots until the medium has forgotten it: nothing is written
there before. Who reads it is not waited for, as a restart in between would bring it back. What makes room for a write
is written over by it, and forgotten if that fails. What is cleared is owed until a checkpoint. `forget` waits for each.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered_kv.backend import Block, Missing, Outcome, SlotBackend
from tiered_kv.catalog.books import Change
from tiered_kv.catalog.index import TierIndex
from tiered_kv.catalog.leases import Lease
from tiered_kv.catalog.table import Slots, hash_names
from tiered_kv.errors import BackendUnavailableError, CapacityError, ConfigurationError, TieredKVError
from tiered_kv.events import TierFailed
from tiered_kv.hints import ReuseHint
from tiered_kv.keys import Names
from tiered_kv.results import TierFault
from tiered_kv.specs import LoadStoreSpec
from tiered_kv.tier_settings import OwnedTierSettings
from tiered_kv.tiers.base import BookedTier, Mask
from tiered_kv.tiers.batch import Batch
from tiered_kv.tiers.budget import Kind, Waiter
from tiered_kv.tiers.calls import Answer
from tiered_kv.tiers.journal import Journal
from tiered_kv.tiers.records import Refusals
from tiered_kv.tiers.refused import Refused
from tiered_kv.tiers.reports import WriteReport
from tiered_kv.tiers.storage import StorageTier, TierParts
from tiered_kv.tiers.tombstones import Tombstones


class OwnedTier(StorageTier, BookedTier):
    """A `SlotBackend` and the index of its slots."""

    is_shared = False

    def __init__(self, parts: TierParts, backend: SlotBackend, index: TierIndex) -> None:
        super().__init__(parts)
        self.backend = backend
        self.index = index
        self._journal = Journal(parts, backend)
        self._in_write: dict[object, tuple[Names, Slots]] = {}
        self._evicted = Tombstones()  # while the medium is not open
        self._resizing: asyncio.Task[Answer[None]] | None = None
        self._missing: Missing | None = None
        self._refused = Refused()
        self._paying: asyncio.Task[bool] | None = None
        self.index.on_left = self._left
        if self.health.is_open:  # else `opened` comes first
            self._see_missing()

    @property
    def is_in_use(self) -> bool:
        """See `BookedTier.is_in_use`."""
        return not self.health.is_bypassed

    @property
    def is_exclusive(self) -> bool:
        """Whether a block is either here or in the CPU tier."""
        return isinstance(self.settings, OwnedTierSettings) and self.settings.exclusive

    @property
    def is_scrubbed(self) -> bool:
        """Whether what lies there is verified in the background."""
        return isinstance(self.settings, OwnedTierSettings) and self.settings.scrub_bandwidth is not None

    async def opened(self, books: Sequence[TierIndex]) -> None:
        """See `StorageTier.opened`. What was evicted meanwhile is not there any more."""
        index = books[self.group]
        evicted, self._evicted = self._evicted, Tombstones()
        if evicted.is_cleared or evicted.num_lost:  # too many to remember which: better none than one of these
            index.clear()
        elif (names := evicted.names()) is not None:
            index.remove(names)
        index.on_change, index.on_left, self.index = self.index.on_change, self._left, index
        self._missing = None
        self._refused.clear()
        self._see_missing()
        if index.on_change is not None and index.statistics().ready:
            index.on_change(Change.ADDED, index.names_in_order()[0])
        if evicted:
            self._journal.owe()
            await self.checkpoint(sync=False)

    async def find(self, batch: Batch, faults: list[TierFault] | None = None) -> Mask:
        """See `StorageTier.find`; exact, and does not wait."""
        return np.zeros(len(batch), np.bool_) if self.health.is_bypassed else self.index.ready(batch.names)

    async def locate(self, batch: Batch) -> LoadStoreSpec | None:
        """See `Tier.locate`."""
        if (slots := self.slots_of(batch)) is None:
            return None
        return await self._locate(partial(self.backend.locate, self.group, slots), len(batch))

    async def _read_blocks(
        self, batch: Batch, blocks: list[Block], waiter: Waiter, on_late: Callable[[], None]
    ) -> Mask:
        """See `StorageTier.read`. A block that is not what the index says is removed, see `take_out`.

        One that was removed while it was read may have been overwritten, and is a miss like any other.
        """
        right = np.zeros(len(batch), np.bool_)
        with self.index.lease(batch.names) as lease:
            at = np.flatnonzero(lease.slots >= 0)
            if not len(at):
                return right
            there, wanted, slots = [blocks[i] for i in at], batch[at], lease.slots[at]
            outcomes, refused = await self._read(
                lambda into: self.backend.read(self.group, slots, into), wanted.keys(), there, waiter, on_late
            )
            right[at] = [outcome is Outcome.HIT for outcome in outcomes]
            broken = np.array([outcome in (Outcome.CORRUPT, Outcome.MISS) for outcome in outcomes])
            now, _ = self.index.find(wanted.names)
            broken &= now == slots
            self.take_out(wanted.names, slots, broken, refused, wanted)
        self._see_missing()
        return right

    async def _write_blocks(
        self, batch: Batch, blocks: list[Block], wanted: Mask, on_late: Callable[[], None], kind: Kind
    ) -> WriteReport:
        """See `StorageTier.write`. What is removed while it is written never commits."""
        n, at = len(batch), np.flatnonzero(wanted)
        if len(kept := self._refused.take(batch.names[at])):
            forgetting = self._forget_refused(batch.names[at], kept)
            self._tasks.spawn(forgetting, f"forget {len(kept)} refused records of {self.name}")
        try:
            reservation = self.index.reserve(batch.names[at])
        except CapacityError:
            return WriteReport.nothing_of(n)
        with reservation:
            self.counters.evicted += len(reservation.evicted)
            fresh = reservation.slots >= 0
            todo = at[fresh]
            written, present, dropped = np.zeros(n, np.bool_), np.zeros(n, np.bool_), ~wanted
            present[at[~fresh]] = True
            if len(todo):
                # Who evicts what has to go waits too: it is there until it is written over, or forgotten.
                with self._is_writing(np.concatenate((batch.names[todo], reservation.evicted))):
                    there, slots = [blocks[i] for i in todo], reservation.slots[fresh]
                    try:
                        outcomes = await self._write_to(batch[todo], there, slots, on_late, kind)
                    except BaseException:
                        self._journal.owe()  # nobody knows what is there now
                        raise
                    written[todo] = [outcome is Outcome.STORED for outcome in outcomes]
                    dropped[todo] = [outcome is Outcome.REFUSED for outcome in outcomes]
                    with reservation.commit(written[at]) as lease:
                        doomed = written[at] & fresh & (lease.slots < 0)
                    doomed |= fresh & ~written[at] & ~dropped[at]  # there may be anything
                    if len(reservation.evicted):  # of which the medium still has what was not overwritten
                        doomed |= dropped[at] & fresh
                    # The medium remembers them now, and they must not outlive a crash: their slots are kept for it.
                    await self._journal.forget(reservation.slots[doomed], on_late)
        self._see_missing()
        return WriteReport(written, present, dropped)

    async def _write_to(
        self, batch: Batch, blocks: list[Block], slots: Slots, on_late: Callable[[], None], kind: Kind
    ) -> list[Outcome]:
        write = object()
        async with self._encoded(batch, blocks) as made:
            names, slots = batch.names[made.at], slots[made.at]
            self._in_write[write] = names, slots
            try:
                written = await self._write(
                    lambda: self.backend.write(self.group, slots, names, made.records), len(slots), kind, on_late
                )
            finally:
                del self._in_write[write]
        return made.outcomes(written)

    def take_out(
        self, names: Names, slots: Slots, is_wrong: Mask, refused: Refusals, batch: Batch | None = None
    ) -> int:
        """Remove those of the blocks, leased and read, that are not what they should be; return how many are broken.

        Whole ones that are only refused for their seal stay on the medium, as far as `Refused` keeps them. ``batch``
        says what keys they are of, if that is known.
        """
        if not is_wrong.any():
            return 0
        is_refused = np.zeros(len(names), np.bool_)
        is_refused[list(refused)] = True
        if len(broken := np.flatnonzero(is_wrong & ~is_refused)):
            keys = batch[broken].keys() if batch else []
            self.tell_corrupted([key.path for key in keys] or [name.tobytes().hex() for name in names[broken]])
        names, slots, is_refused = names[is_wrong], slots[is_wrong], is_refused[is_wrong]
        kept = np.zeros(len(names), np.bool_)
        if is_refused.any():
            kept[is_refused] = self._refused.keep(names[is_refused], slots[is_refused], self.index.num_slots)
            self.index.remove(names[kept], Change.CORRUPT, withhold=True)
        self.index.remove(names[~kept], Change.CORRUPT)
        return len(broken)

    def _withhold(self) -> int:
        """Put no blocks where the medium has failed, or where records are kept; return how many blocks that loses."""
        lost = None if self._missing is None else self._missing.slots
        return self.index.withhold(self._refused.withheld(lost, self.index.max_slots))

    async def _forget_refused(self, names: Names, slots: Slots) -> None:
        """Forget what was kept of some blocks in some slots; then they can be used again."""
        with self._is_writing(names):
            await self._journal.forget(slots)
        self._refused.forgotten(slots)
        self._use_again(slots)

    def _drop_refused(self, lost: NDArray[np.bool_] | None) -> Slots:
        """Keep no record where the tier has no slot any more, or its medium has lost it; say where some were."""
        if len(gone := self._refused.drop_beyond(self.index.num_slots, lost)):
            self._journal.owe()  # `forget` finds them nowhere now
        return gone

    def _use_again(self, slots: Slots) -> None:
        """Put blocks again where no record is kept any more, unless the medium has lost that place meanwhile."""
        self.index.use_again(slots if self._missing is None else slots[~self._missing.slots[slots]])

    def lacks(self, batch: Batch) -> Mask:
        """See `StorageTier.lacks`."""
        return ~self.index.ready(batch.names)

    def touch(self, batch: Batch) -> None:
        """See `StorageTier.touch`."""
        self.index.touch(batch.names)

    def hint(self, batch: Batch, hint: ReuseHint) -> None:
        """See `StorageTier.hint`."""
        self.index.hint(batch.names, hint)

    def forget(self, batch: Batch) -> Coroutine[Any, Any, None]:
        """See `StorageTier.forget`. Of what is in no books the medium may know as well: see what is owed."""
        if not self.health.is_open:
            self._evicted.add(batch)
        is_all_known = bool(self.index.ready(batch.names).all())
        self.index.remove(batch.names)
        kept = self._refused.take(batch.names)

        async def forget() -> None:
            await self._until_written(batch.names)  # and until what has left is forgotten
            if len(kept):
                await self._forget_refused(batch.names, kept)
            if not is_all_known:
                await self._pay()

        return forget()

    def _left(self, names: Names, left: Lease) -> None:
        """Have the medium forget what has left the books; `forget` waits for it."""
        told = self._journal.tell(left)
        self._writing[told] = hash_names(names), told
        told.add_done_callback(self._writing.pop)

    async def _pay(self) -> None:
        """Return when the medium remembers nothing that it should not have until now, or cannot be told."""
        num_owed = self._journal.num_owed
        while self._journal.num_paid < num_owed and not self.health.is_off("checkpoint"):
            paying = self._begin_to_pay()
            await asyncio.wait({paying})
            if paying.cancelled() or not paying.result():
                return

    def _begin_to_pay(self) -> "asyncio.Task[bool]":
        if self._paying is None or self._paying.done():
            self._paying = self._tasks.spawn(self.checkpoint(sync=False), f"checkpoint {self.name} again")
        return self._paying

    def clear(self) -> Coroutine[Any, Any, None]:
        """Forget every block: at once, before this returns; what it returns ends when a restart finds none either."""
        self.index.clear()
        self._journal.owe()
        if len(self._refused):
            self._refused.clear()
            self._withhold()
        if not self.health.is_open:
            self._evicted.add_all()

        async def clear() -> None:
            if busy := [done for _, done in self._writing.values()]:
                await asyncio.wait(busy, timeout=self.health.timeout_s)  # each of them has what it wrote forgotten
            if self.health.is_open:
                await self.checkpoint(sync=False)

        return clear()

    def tick(self) -> None:
        """See `StorageTier.tick`."""
        if self._journal.is_owing and not self.health.is_off("checkpoint"):
            self._begin_to_pay()
        if self.health.num_late:
            self.calls.ask("find_hung", self.backend.find_hung, None)
        if self.health.is_open:
            self._see_missing()
        if self._missing is not None:
            self.calls.ask("try_again", self.backend.try_again, None)

    def _see_missing(self) -> None:
        """Put no blocks where the medium has failed, and what was there out of the books."""
        missing = self.calls.ask(
            "missing", lambda: self.backend.missing(self.group), self._missing, problem_of=self._problem_of
        )
        if missing is self._missing:
            return
        self._missing = missing
        self._drop_refused(None if missing is None else missing.slots)
        num_lost = self._withhold()
        self.counters.failed += num_lost
        if missing is not None:
            self.calls.let_go_of_late()
            self.health.emit(TierFailed(self.name, "keep", missing.why, num_lost))

    def _problem_of(self, missing: Missing | None) -> str:
        """Say what is wrong with what the medium calls missing."""
        if missing is None:
            return ""
        if not isinstance(missing, Missing):
            return f"neither Missing nor None: {missing!r:.80}"
        slots, n = missing.slots, self.index.max_slots
        is_right = slots.shape == (n,) and slots.dtype == np.bool_
        return "" if is_right else f"not {n} truth values, but {slots.dtype} of shape {slots.shape}"

    def describe(self) -> Mapping[str, object]:
        """Return what the medium says of itself."""
        return self.calls.ask("describe", self.backend.describe, {}, problem_of=_problem_of_facts)

    async def checkpoint(self, *, sync: bool) -> bool:
        """Let the medium remember which blocks it holds, in order of use; say whether it does. Never raises for it."""
        return await self._journal.checkpoint(self._remembered, self.index.statistics().ready, sync=sync)

    def _remembered(self) -> tuple[Names, Slots]:
        """Return what is to be found after a restart, the least recently used first, and where."""
        names, slots = self.index.names_in_order()
        # What is being written is listed too: it is verified when read, and a restart would lose it otherwise.
        writing = [
            (each[still], at[still])
            for each, at in self._in_write.values()
            if (still := (self.index.find(each)[0] == at) & ~self.index.ready(each)).any()
        ]
        self._use_again(self._drop_refused(None))
        parts = [self._refused.all(), (names, slots), *writing]
        return np.concatenate([each for each, _ in parts]), np.concatenate([at for _, at in parts])

    # Another capacity.

    def slots_within(self, capacity_bytes: int, block_bytes: int) -> int:
        """See `BookedTier.slots_within`: the medium knows, once it is open."""
        if not self.health.is_open:
            raise BackendUnavailableError(f"{self.name} is not open yet: resize it once it is")
        return self.backend.fit(capacity_bytes)

    async def grow(self, num_slots: int, more_bytes: int) -> None:
        """See `BookedTier.grow`."""
        await self._resize(num_slots)

    async def shrink(self, num_slots: int) -> None:
        """See `BookedTier.shrink`. What a medium does not give back is its own to keep: the books have shrunk."""
        with suppress(BackendUnavailableError, ConfigurationError):  # the call has been reported
            await self._resize(num_slots)

    async def _resize(self, num_slots: int) -> None:
        if self._resizing is not None and not self._resizing.done():
            raise BackendUnavailableError(f"{self.name} is still being resized by a call that is late")
        raised: list[TieredKVError] = []

        async def resize() -> None:
            try:
                await self.backend.resize(num_slots)
            except TieredKVError as error:
                raised.append(error)
                raise

        call = self._tasks.spawn(self.calls.make("resize", resize, until_late=False), f"resize {self.name}")
        self._resizing = call
        await asyncio.wait({call}, timeout=self.health.timeout_s)
        if not call.done():
            raise BackendUnavailableError(f"{self.name} was not resized within {self.health.timeout_s:g} s")
        answer = call.result()
        if raised:
            raise raised[0]
        if not answer.is_well:
            raise BackendUnavailableError(f"{self.name} was not resized to {num_slots} slots: {answer.error}")


def _problem_of_facts(facts: Mapping[str, object]) -> str:
    return "" if isinstance(facts, dict) else f"no dict: {facts!r:.80}"
