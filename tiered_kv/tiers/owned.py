"""A tier that the cache owns alone: a medium of numbered slots, and the index that says which block is in which.

Nothing leaves the books without the medium being told, or that being owed. What is removed, by name, age, another
capacity or damage, the index hands over, and it keeps its slots until the medium has forgotten it: nothing is written
there before. Who reads it is not waited for, as a restart in between would bring it back. What makes room for a write
is written over by it, and forgotten if that fails. What is cleared is owed until a checkpoint. `forget` waits for each.

What an owned medium is told to remember: which slots were forgotten, and now and then all that it holds.

One such call at a time: what is forgotten before a checkpoint must not come back by it. Whatever leaves the books
passes here: the medium is told, or that is owed until a checkpoint that begins later has gone well.

Whole records in an owned tier that its keys do not open: not found, and kept for a start that has the key.

Their slots are withheld: no block is put there. At most an eighth of the tier is kept so, that of the first ones met;
further ones are forgotten, as broken ones are.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.catalog.books import Change
from tiered_kv.catalog.index import TierIndex
from tiered_kv.catalog.leases import Lease
from tiered_kv.catalog.table import Slots, hash_names
from tiered_kv.media.backend import Block, Make, Missing, Outcome, SlotBackend, Verify
from tiered_kv.settings.tier_settings import OwnedTierSettings
from tiered_kv.tiers.calls import Answer
from tiered_kv.tiers.gate import Kind, Waiter
from tiered_kv.tiers.records import Refusals
from tiered_kv.tiers.shared import Tombstones
from tiered_kv.tiers.storage import StorageTier, TierParts
from tiered_kv.tiers.tier import Batch, BookedTier, Mask, WriteReport
from tiered_kv.values.errors import BackendUnavailableError, CapacityError, ConfigurationError, TieredKVError
from tiered_kv.values.events import TierFailed
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import Names, rows_of
from tiered_kv.values.results import TierFault
from tiered_kv.values.specs import LoadStoreSpec

_SLOTS_AT_ONCE: Final = 4096
"""Forgotten by one call, unless more were removed at once by name."""


class Journal:
    """Makes these calls for the slots of one tier. Never raises for the medium.

    Attributes:
        num_owed: Counts what the medium could not be told: it remembers what it should not, and a restart could bring
            that back.
        num_paid: How many of these a checkpoint has made up for.
    """

    def __init__(self, parts: TierParts, backend: SlotBackend) -> None:
        self.num_owed = self.num_paid = 0
        self._leaving: deque[tuple[Lease, asyncio.Future[None]]] = deque()
        self._telling: asyncio.Task[None] | None = None
        self._backend = backend
        self._calls = parts.calls
        self._group = parts.group
        self._health = parts.health
        self._tasks = parts.tasks
        self._turn = asyncio.Lock()

    @property
    def is_owing(self) -> bool:
        """Whether the medium remembers what it should not."""
        return self.num_paid < self.num_owed

    def owe(self) -> None:
        """Take note that the medium remembers what it should not."""
        self.num_owed += 1

    def tell(self, left: Lease) -> "asyncio.Future[None]":
        """Have the medium forget what has left the books, and release the lease once it has, or that is owed.

        Returns:
            What is done by then.
        """
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._leaving.append((left, told))
        if self._telling is None or self._telling.done():
            self._telling = self._tasks.spawn(self._tell(), f"forget blocks of {self._health.name}")
        return told

    async def _tell(self) -> None:
        """Forget what leaves, a bounded number of slots at a time, however often some do."""
        while self._leaving:
            parts, num_slots = [], 0
            while self._leaving and num_slots < _SLOTS_AT_ONCE:
                parts.append(self._leaving.popleft())
                num_slots += len(parts[-1][0].slots)
            try:
                await self.forget(np.concatenate([left.slots for left, _ in parts]))
            finally:
                for left, told in parts:
                    left.release()
                    told.set_result(None)

    async def forget(self, slots: Slots, on_late: Callable[[], None] | None = None) -> None:
        """Have the medium forget what is in some slots, which nobody uses until this returns."""
        if not len(slots):
            return
        is_well = False
        try:
            is_well = await self._note("forget", len(slots), lambda: self._backend.forget(self._group, slots), on_late)
        finally:
            if not is_well:
                self.owe()

    async def checkpoint(self, held: Callable[[], tuple[Names, Slots]], num_blocks: int, *, sync: bool) -> bool:
        """Have the medium remember what ``held`` says when its turn has come; say whether that went well, and in time.

        Nobody waits for a call that is late, or whose wait is cancelled: it goes on in a task of the cache.
        """
        late = asyncio.get_running_loop().create_future()

        async def call() -> None:
            num_owed = self.num_owed  # what comes later may be among what is held now
            await self._backend.checkpoint(self._group, *held(), sync=sync)
            self.num_paid = max(self.num_paid, num_owed)

        noting = self._tasks.spawn(
            self._note("checkpoint", num_blocks, call, lambda: late.set_result(None)),
            f"checkpoint {self._health.name}",
        )
        await asyncio.wait({noting, late}, return_when=asyncio.FIRST_COMPLETED)
        return not late.done() and not noting.cancelled() and noting.result()

    async def _note(
        self, doing: str, num_blocks: int, call: Callable[[], Awaitable[None]], on_late: Callable[[], None] | None
    ) -> bool:
        """Make a call when its turn has come; say whether it went well. It is given up if its turn is late."""
        timeout_s = self._health.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            error = f"its turn has not come within {timeout_s:g} s: another call hangs"
            self._health.emit(TierFailed(self._health.name, doing, error, num_blocks))
            return False
        try:
            answer = await self._calls.make(doing, call, num_blocks=num_blocks, on_late=on_late)
        finally:
            self._turn.release()
        return answer.is_well


_MOST_PARTS: Final = 8


class Refused:
    """Which records those are, by name. For the event loop's thread."""

    def __init__(self) -> None:
        self._slots: dict[bytes, int] = {}
        self._being_forgotten: set[int] = set()

    def __len__(self) -> int:
        return len(self._slots)

    def keep(self, names: Names, slots: Slots, num_slots: int) -> NDArray[np.bool_]:
        """Keep records that have just been refused; say which.

        Args:
            names: ``(n, 4)``.
            slots: Where they are.
            num_slots: Of the tier.
        """
        most, kept = num_slots // _MOST_PARTS, np.zeros(len(names), np.bool_)
        for i, (name, slot) in enumerate(zip(rows_of(names), slots.tolist(), strict=True)):
            if name not in self._slots and len(self._slots) < most:
                self._slots[name] = slot
            kept[i] = self._slots.get(name) == slot
        return kept

    def take(self, names: Names) -> Slots:
        """Keep these no longer; return the slots of those that were kept, which are withheld until `forgotten`."""
        if not self._slots:
            return np.empty(0, np.int64)
        found = [slot for name in rows_of(names) if (slot := self._slots.pop(name, -1)) >= 0]
        self._being_forgotten.update(found)
        return np.array(found, np.int64)

    def forgotten(self, slots: Slots) -> None:
        """Withhold slots of `take` no longer."""
        self._being_forgotten.difference_update(slots.tolist())

    def drop_beyond(self, num_slots: int, lost: NDArray[np.bool_] | None) -> Slots:
        """Keep none in slots that the tier does not have any more, or that its medium has lost; say in which."""
        gone = [n for n, at in self._slots.items() if at >= num_slots or (lost is not None and bool(lost[at]))]
        return np.array([self._slots.pop(name) for name in gone], np.int64)

    def withheld(self, lost: NDArray[np.bool_] | None, max_slots: int) -> NDArray[np.bool_] | None:
        """Say of each slot whether no block is to be put there: where these are, or the medium has lost it.

        Takes time in the size of the tier, some 4 ms a million slots: for when the medium has lost some.

        None: blocks may be put everywhere.
        """
        if not self._slots and not self._being_forgotten:
            return lost
        is_withheld = np.zeros(max_slots, np.bool_) if lost is None else lost.copy()
        is_withheld[[*self._slots.values(), *self._being_forgotten]] = True
        return is_withheld

    def all(self) -> tuple[Names, Slots]:
        """Return the names and slots of all."""
        names = np.frombuffer(b"".join(self._slots), np.uint64).reshape(-1, 4)
        return names, np.fromiter(self._slots.values(), np.int64, len(self._slots))

    def clear(self) -> None:
        """Keep none."""
        self._slots.clear()


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
    @override
    def is_in_use(self) -> bool:
        return not self.health.is_bypassed

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

    @override
    async def locate(self, batch: Batch) -> LoadStoreSpec | None:
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
            at = (lease.slots >= 0).nonzero()[0]
            if not len(at):
                return right
            there, wanted, slots = [blocks[i] for i in at], batch[at], lease.slots[at]
            keys = self.records.keys(wanted)
            outcomes, refused = await self._read(
                partial(self._read_slots, slots), keys, there, waiter, on_late,
                makes_records=self.backend.makes_records,
            )  # fmt: skip
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
        n, at = len(batch), wanted.nonzero()[0]
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
        if self.backend.makes_records and not self._stages:
            make = self.records.making(self.records.keys(batch), blocks, self.shape)
            records = [block.read_only() for block in blocks]
            return await self._write_records(batch.names, records, slots, on_late, kind, make)
        async with self._encoded(batch, blocks) as made:
            names, slots = batch.names[made.at], slots[made.at]
            written = await self._write_records(names, made.records, slots, on_late, kind)
        return made.outcomes(written)

    async def _write_records(
        self,
        names: Names,
        records: Sequence[Block],
        slots: Slots,
        on_late: Callable[[], None],
        kind: Kind,
        make: Make | None = None,
    ) -> list[Outcome]:
        """Write records to slots: those that are made, or are by ``make`` where they are written."""
        write, hidden, more = object(), self.records.names(names), {"make": make} if make else {}
        self._in_write[write] = names, slots
        try:
            return await self._write(
                lambda: self.backend.write(self.group, slots, hidden, records, **more), len(slots), kind, on_late
            )
        finally:
            del self._in_write[write]

    def _read_slots(self, slots: Slots, into: list[Block], verify: Verify | None) -> Awaitable[list[Outcome]]:
        more = {"verify": verify} if verify else {}
        return self.backend.read(self.group, slots, into, **more)

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
        if len(broken := (is_wrong & ~is_refused).nonzero()[0]):
            keys = self.records.keys(batch[broken]) if batch else []
            self.tell_corrupted([key.path for key in keys] or [name.hex() for name in rows_of(names[broken])])
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

    @override
    def lacks(self, batch: Batch) -> Mask:
        return ~self.index.ready(batch.names)

    @override
    def touch(self, batch: Batch) -> None:
        self.index.touch(batch.names)

    @override
    def hint(self, batch: Batch, hint: ReuseHint) -> None:
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

    async def pay(self) -> bool:
        """See `StorageTier.pay`."""
        if self.health.is_open:
            await self._pay()
        return not self._evicted and not self._journal.is_owing

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

    @override
    def tick(self) -> None:
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
        """Return the names on the medium of what a restart is to find, in order of use, and where it is."""
        names, slots = self.index.names_in_order()
        # What is being written is listed too: it is verified when read, and a restart would lose it otherwise.
        writing = [
            (each[still], at[still])
            for each, at in self._in_write.values()
            if (still := (self.index.find(each)[0] == at) & ~self.index.ready(each)).any()
        ]
        self._use_again(self._drop_refused(None))
        parts = [self._refused.all(), (names, slots), *writing]
        remembered = np.concatenate([each for each, _ in parts])
        return self.records.names(remembered), np.concatenate([at for _, at in parts])

    # Another capacity.

    def slots_within(self, capacity_bytes: int, block_bytes: int) -> int:
        """See `BookedTier.slots_within`: the medium knows, once it is open."""
        if not self.health.is_open:
            raise BackendUnavailableError(f"{self.name} is not open yet: resize it once it is")
        return self.backend.fit(capacity_bytes)

    @override
    async def grow(self, num_slots: int, more_bytes: int) -> None:
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
