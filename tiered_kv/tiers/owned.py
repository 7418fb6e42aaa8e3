"""A tier that the cache owns alone: a medium of numbered slots, and the index that says which block is in which.

Nothing leaves the books without the medium being told, or that being owed. What is removed, by name, age, another
capacity or damage, the index hands over, and it keeps its slots until the medium has forgotten it: nothing is written
there before. Who reads it is not waited for, as a restart in between would bring it back. What makes room for a write
is written over by it, and forgotten if that fails. What is cleared is owed until a checkpoint. `forget` waits for each.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.catalog.books import Change, SlotState
from tiered_kv.catalog.index import TierIndex
from tiered_kv.catalog.leases import Lease, Reservation
from tiered_kv.catalog.table import Slots, hash_names
from tiered_kv.media.backend import Block, Blocks, Make, Missing, Outcome, RecordBackend, SlotBackend, Verify
from tiered_kv.settings.tier_settings import OwnedTierSettings
from tiered_kv.tiers.calls import CLOSED, Answer, Turn
from tiered_kv.tiers.gate import Kind, Waiter
from tiered_kv.tiers.journal import Journal
from tiered_kv.tiers.records import Refusals
from tiered_kv.tiers.storage import BlockIO, StorageTier, TierParts, Writing
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.tiers.tier import Batch, BookedTier, Expected, ReadReport, WriteReport, which
from tiered_kv.tiers.tombstones import Tombstones
from tiered_kv.values.errors import (
    BackendUnavailableError,
    CapacityError,
    ConfigurationError,
    Reason,
    TieredKVError,
    TierFault,
)
from tiered_kv.values.events import TierFailed
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.integers import Mask
from tiered_kv.values.keys import Names, rows_of
from tiered_kv.values.specs import LoadStoreSpec


@dataclass(frozen=True, eq=False)
class _Coming:
    """Blocks that are on their way to a tier.

    Attributes:
        hashes: Of their names.
        is_wanted: Says which of them would be written now.
    """

    hashes: NDArray[np.uint64]
    is_wanted: Callable[[], Mask]


class OwnedTier(StorageTier, BookedTier):
    """The tier of a `SlotBackend`, with the index of its slots.

    Attributes:
        expected: What is to be written here once its turn comes.
        has_lost: Whether a part of the medium has failed with blocks that were written since it was opened.
    """

    is_shared = False

    def __init__(self, parts: TierParts, backend: SlotBackend, index: TierIndex) -> None:
        super().__init__(parts)
        self.backend: SlotBackend = backend
        self._maker = backend if isinstance(backend, RecordBackend) else None
        self.index = index
        self._journal = Journal(parts, backend)
        self._in_write: dict[object, tuple[Names, Slots]] = {}
        self.expected = Expected()
        # By each block's hash, nothing of its own for the collector to walk; where one is to come twice, in two dicts.
        self._coming: list[dict[int, _Coming]] = []
        self._awaited = Expected()  # what writes have left to others that have slots for it
        self._tombstones = Tombstones()  # while the medium is not open
        self._resizing: asyncio.Task[Answer[None]] | None = None
        self._missing: Missing | None = None
        self.has_lost = False
        self._is_fresh = np.zeros(index.max_slots, np.bool_)  # what was written to a slot since the opening
        self._paying: asyncio.Task[bool] | None = None
        self.index.on_left = self._left
        if self.health.is_open:  # else `opened` comes first
            self._see_missing()

    @property
    @override
    def is_in_use(self) -> bool:
        return not self.health.is_bypassed

    @property
    @override
    def may_hold_blocks(self) -> bool:
        return True  # once its medium is open

    @property
    def is_scrubbed(self) -> bool:
        """Whether what lies there is verified in the background."""
        return isinstance(self.settings, OwnedTierSettings) and self.settings.scrub_bandwidth is not None

    @override
    def opened(self, books: Sequence[TierIndex]) -> None:
        """Begin to use what was found on the medium. What was evicted meanwhile is not there any more."""
        index = books[self.group]
        evicted, self._tombstones = self._tombstones, Tombstones()
        if evicted.is_cleared or evicted.num_lost:  # too many to remember which: better none than one of these
            index.clear()
        elif (names := evicted.names()) is not None:
            index.remove(names)
        index.on_change, index.on_left = self.index.on_change, self._left
        self.index = index
        self._is_fresh = np.zeros(index.max_slots, np.bool_)
        self._missing = None
        self._see_missing()
        if index.on_change is not None and index.statistics().ready:
            index.on_change(Change.ADDED, index.readable()[0])
        if evicted:
            self._journal.owe()
            self._begin_to_pay()

    async def find(self, batch: Batch, faults: list[TierFault] | None = None) -> Mask:
        """Say which blocks can be read; exact, and does not wait."""
        return self._away(batch, faults) if self.health.is_bypassed else self.index.ready(batch.names)

    @override
    def may_have(self, batch: Batch) -> Mask:
        return self.index.ready(batch.names) if self.health.is_open else ~self._tombstones.holds(batch)

    @override
    async def locate(self, batch: Batch) -> LoadStoreSpec | None:
        if (slots := self.slots_of(batch)) is None:
            return None
        return await self._locate(partial(self.backend.locate, self.group, slots), len(batch))

    @override
    def _read_blocks(self, turn: Turn, io: BlockIO[ReadReport], *, is_use: bool) -> None:
        """Read and verify. A block that is not what the index says is removed, see `take_out`.

        One that was removed while it was read may have been overwritten, and is a miss like any other.
        """
        batch, blocks = io.batch, io.blocks
        n, lease = len(batch.names), self.index.lease(batch.names)
        at = (lease.slots >= 0).nonzero()[0]
        if not len(at):
            turn.give_back()
            lease.release()
            io.then(ReadReport.of(n, at, [], {}))
            return
        wanted, there, slots = batch, blocks, lease.slots
        if len(at) < n:
            wanted, there, slots = batch[at], Blocks.some(blocks, at.tolist()), slots[at]

        def end(outcomes: list[Outcome], refused: Refusals, error: str) -> None:
            self._take_out_wrong(wanted, slots, outcomes, refused)
            report = ReadReport.of(n, at, outcomes, refused, error)
            lease.release(is_use=is_use and outcomes.count(Outcome.HIT) == n)
            self._see_missing()
            io.then(report)

        begin = None if self._maker is None else partial(self._maker.begin_read, self.group, slots.copy())
        self._read(turn, wanted, there, begin, partial(self._read_slots, slots), io.on_late, end)

    def _read_slots(self, slots: Slots, into: Sequence[Block], verify: Verify) -> Awaitable[list[Outcome]]:
        if self._maker is None:
            return self.backend.read(self.group, slots.copy(), into)
        return self._maker.read(self.group, slots.copy(), into, verify)

    def _take_out_wrong(self, wanted: Batch, slots: Slots, outcomes: list[Outcome], refused: Refusals) -> None:
        """Remove what was read and is not as it should be."""
        if outcomes.count(Outcome.HIT) < len(outcomes):
            broken = np.array([outcome in (Outcome.CORRUPT, Outcome.MISS) for outcome in outcomes])
            broken &= self.index.find(wanted.names)[0] == slots
            self.take_out(wanted.names, broken, refused, wanted)

    async def turn_to_look(self, n: int, tasks: Tasks) -> Turn | None:
        """Wait until ``n`` records may be read for nobody who is to have the blocks: what holds these is taken then.

        None: the tier is bypassed, or ``tasks`` come to their end.
        """
        return await self.calls.due("read", n * self.shape.stride_bytes, Waiter(Kind.LOOK), tasks)

    @override
    def _write_blocks(self, turn: Turn, io: BlockIO[WriteReport], wanted: Mask) -> None:
        """Write to slots of the index. What is removed while it is written never commits."""
        writing, on_late = self._take_slots(io.batch, wanted), io.on_late
        if not len(writing.todo):
            turn.give_back()
            self._end_write(writing, io.then)
            return

        def end(outcomes: list[Outcome], error: str) -> None:
            doomed = self._commit(writing, outcomes)
            if error == CLOSED:
                self._journal.owe()  # nobody knows what is there now
            elif len(doomed):
                self._tasks.spawn(forget(doomed), f"forget blocks of {self.name}")
                return
            self._end_write(writing, io.then)

        async def forget(doomed: Slots) -> None:
            try:
                await self._journal.forget(doomed, on_late)
            finally:
                self._end_write(writing, io.then)

        def write(at: Slots | None, records: Sequence[Block], make: Make | None) -> Writing:
            names, slots = writing.batch.names, writing.slots
            if at is not None:
                names, slots = names[at], slots[at]
            self._in_write[writing] = names, slots
            slots, hidden, maker = slots.copy(), self.records.names(names), self._maker
            if make is None or maker is None:
                return None, partial(self.backend.write, self.group, slots, hidden, records)
            return (
                partial(maker.begin_write, self.group, slots, hidden, records, make),
                partial(maker.write, self.group, slots, hidden, records, make),
            )

        there = Blocks.some(io.blocks, writing.todo.tolist())
        self._write(turn, writing.batch, there, write, on_late, end, makes_records=self._maker is not None)

    def _take_slots(self, batch: Batch, wanted: Mask) -> "_SlotWrite":
        """Reserve slots for those of the blocks that are wanted, and that the tier lacks."""
        at = wanted.nonzero()[0]
        asked = batch[wanted]
        try:
            reservation = self.index.reserve(asked.names)
        except CapacityError:
            return _SlotWrite(batch[:0], at[:0], None, WriteReport.nothing_of(len(batch), Reason.NO_ROOM))
        self.counters.evicted += len(reservation.evicted)
        fresh = reservation.slots >= 0
        nothing, present = np.zeros(len(batch), np.bool_), np.zeros(len(batch), np.bool_)
        present[at[~fresh]] = True
        report = WriteReport(nothing, present, ~wanted, unwanted=~wanted)
        todo = at[fresh]
        writing = _SlotWrite(asked[fresh], todo, reservation, report)
        if len(todo) < len(at):
            is_left = ~(fresh | self.index.ready(asked.names))
            if is_left.any():  # who expects nothing would be looked at for ever
                writing.left, writing.left_names = at[is_left], asked.names[is_left]
                writing.left_wanted = self.expected.add(writing.left_names)
                writing.left_missing = self._awaited.add(writing.left_names)
        if len(todo):
            # Who evicts what has to go waits too: it is there until it is written over, or forgotten.
            names = np.concatenate((writing.batch.names, reservation.evicted))
            self._writing[writing] = hash_names(names), writing.done
        return writing

    def _commit(self, writing: "_SlotWrite", outcomes: list[Outcome]) -> Slots:
        """Make readable what was stored; return the slots that the medium has to forget, which are kept for it."""
        self._in_write.pop(writing, None)
        reservation = writing.reservation
        assert reservation is not None  # noqa: S101 - else there was nothing to write
        stored, refused = which(outcomes, Outcome.STORED), which(outcomes, Outcome.REFUSED)
        is_fresh = reservation.slots >= 0
        ok = np.zeros(len(is_fresh), np.bool_)
        ok[is_fresh] = stored
        self._is_fresh[writing.slots[stored]] = True
        doomed = stored & (reservation.keep(ok)[is_fresh] < 0)
        writing.report.num_removed = len(doomed.nonzero()[0])
        self._awaited.forget(writing.batch.names[stored & ~doomed])
        doomed |= ~stored & ~refused  # there may be anything
        if len(reservation.evicted):  # of which the medium still has what was not overwritten
            doomed |= refused
        report = writing.report
        report.written[writing.todo] = stored
        report.dropped[writing.todo] = refused
        # The medium remembers them now, and they must not outlive a crash: their slots are kept for it.
        return writing.slots[doomed]

    def _end_write(self, writing: "_SlotWrite", then: Callable[[WriteReport], None]) -> None:
        """Give back the slots that hold nothing, and say what became of the blocks: of others' once they end."""
        if writing.reservation is not None:
            writing.reservation.close()
        if self._writing.pop(writing, None) is not None:
            writing.done.set_result(None)
        self._see_missing()
        if not len(writing.left):
            then(self._report_of(writing))
            return

        async def others() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.health.timeout_s):
                    await self._until_written(writing.left_names)

        waiting = self._tasks.spawn(others(), f"wait for what others write to {self.name}")
        waiting.add_done_callback(lambda _: then(self._report_of(writing)))

    def _report_of(self, writing: "_SlotWrite") -> WriteReport:
        """Say what became of the blocks: what another write was to bring, and has not, is gone or has failed here.

        What it has brought is not looked for: it may have been evicted since to make room.
        """
        report, left, unwanted = writing.report, writing.left, writing.report.unwanted
        if len(left) and unwanted is not None:
            report.present[left] = has_come = ~writing.left_missing
            report.dropped[left] = unwanted[left] = ~(has_come | writing.left_wanted)
            self.expected.drop(writing.left_wanted)
            self._awaited.drop(writing.left_missing)
        is_refused = writing.reservation is not None and len(report.dropped.nonzero()[0]) > 0
        because = self._refusal if is_refused else Reason.NO_ROOM
        return WriteReport(report.written, report.present, report.dropped, because, unwanted, report.num_removed)

    def take_out(self, names: Names, is_wrong: Mask, refused: Refusals, batch: Batch | None = None) -> int:
        """Remove those of the blocks, leased and read, that are not what they should be; return how many are broken.

        Whole ones that no key opens are removed too, and are not broken. ``batch`` says what keys they are of, if that
        is known.
        """
        if not is_wrong.any():
            return 0
        is_broken = is_wrong.copy()
        is_broken[list(refused)] = False
        if len(broken := is_broken.nonzero()[0]):
            keys = self.records.keys(batch[broken]) if batch else []
            self.tell_corrupted([key.path for key in keys] or [name.hex() for name in rows_of(names[broken])])
        self.index.remove(names[is_wrong], Change.CORRUPT)
        return len(broken)

    @override
    def lacks(self, batch: Batch) -> Mask:
        return ~self.index.ready(batch.names)

    @override
    def missed(self, batch: Batch) -> Mask:
        return self.lacks(batch)

    @override
    def announce(self, names: Names, is_wanted: Callable[[], Mask]) -> Callable[[], None]:
        coming = _Coming(hash_names(names), is_wanted)
        hashes: list[int] = coming.hashes.tolist()
        books = next((each for each in self._coming if each.keys().isdisjoint(hashes)), None)
        if books is None:
            self._coming.append(books := {})
        books.update(dict.fromkeys(hashes, coming))

        def over() -> None:
            for each in dict.fromkeys(hashes):
                del books[each]
            self._coming = [each for each in self._coming if each]

        return over

    @override
    def is_coming(self, batch: Batch) -> Mask:
        _, states = self.index.find(batch.names)
        return np.equal(states, SlotState.PENDING) | self._is_announced(batch.names)

    def _is_announced(self, names: Names) -> Mask:
        """Say which blocks are to come here, as it was announced, and are wanted yet: however many others are."""
        hashes, is_so = hash_names(names), np.zeros(len(names), np.bool_)
        asked = hashes.tolist() if self._coming else []
        found = {coming for books in self._coming for each in asked if (coming := books.get(each)) is not None}
        for coming in found:
            is_so |= np.isin(hashes, coming.hashes[coming.is_wanted()])
        return is_so

    @override
    def hint(self, batch: Batch, hint: ReuseHint) -> None:
        self.index.hint(batch.names, hint)

    def forget(self, batch: Batch) -> Coroutine[Any, Any, bool]:
        """Make blocks unfindable at once. Of what is in no books the medium may know as well: see what is owed."""
        if not self.health.is_open:
            self._tombstones.add(batch)
        has_to_pay = self._journal.is_owing or not self.index.ready(batch.names).all()  # of these, too, perhaps
        self.index.remove(batch.names)
        self.expected.forget(batch.names)

        async def forget() -> bool:
            await self._until_written(batch.names)  # and until what has left is forgotten
            if has_to_pay:
                await self._pay()
            return not (self._tombstones or self._journal.is_owing)  # whatever others' writes may bring

        return forget()

    @property
    def _has_paid(self) -> bool:
        """Whether the medium has nothing left that it should not have, and gets nothing that was removed meanwhile."""
        if self._tombstones or self._journal.is_owing:
            return False
        return all(bool((self.index.find(names)[0] == slots).all()) for names, slots in self._in_write.values())

    def _left(self, names: Names, left: Lease) -> None:
        """Have the medium forget what has left the books; `forget` waits for it."""
        told = self._journal.tell(left)
        self._writing[told] = hash_names(names), told
        told.add_done_callback(self._writing.pop)

    @override
    async def pay(self) -> bool:
        if self.health.is_open:
            await self._pay()
        return self._has_paid

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

    def clear(self) -> Coroutine[Any, Any, bool]:
        """Forget every block: at once, before this returns; otherwise as `forget`."""
        self.index.clear()
        self.expected.clear()
        self._journal.owe()
        if not self.health.is_open:
            self._tombstones.add_all()

        async def clear() -> bool:
            if busy := [done for _, done in self._writing.values()]:
                await asyncio.wait(busy, timeout=self.health.timeout_s)  # each of them has what it wrote forgotten
            if self.health.is_open:
                await self.checkpoint(sync=False)
            return self._has_paid

        return clear()

    @override
    def tick(self) -> None:
        if self._journal.is_owing and not self.health.is_off("checkpoint"):
            self._begin_to_pay()
        if self.health.num_late:
            self.calls.ask("find_hung", self.backend.find_hung, None)
        if self.health.is_open:
            self._see_missing()
            self.calls.ask("try_again", self.backend.try_again, None)

    def _see_missing(self) -> None:
        """Put no blocks where the medium has failed, and what was there out of the books."""
        missing = self.calls.ask(
            "missing", partial(self.backend.missing, self.group), self._missing, problem_of=self._problem_of
        )
        if missing is self._missing:
            return
        self._missing = missing
        if missing is not None:
            self.has_lost |= bool((missing.slots & self._is_fresh)[self.index.readable()[1]].any())
        num_lost = self.index.withhold(None if missing is None else missing.slots)
        self.counters.failed += num_lost
        if missing is not None:
            self._journal.owe()  # until the medium says that no restart finds what was there
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

    async def checkpoint(self, *, sync: bool) -> bool:
        """Let the medium remember which blocks it holds, in order of use; say whether it does, and nothing else.

        Never raises for it.
        """
        is_noted = await self._journal.checkpoint(self._remembered, self.index.statistics().ready, sync=sync)
        self._see_missing()  # what has failed by that call is no more remembered
        return is_noted and self._has_paid

    def _remembered(self) -> tuple[Names, Slots]:
        """Return the names on the medium of what a restart is to find, in order of use, and where it is."""
        names, slots = self.index.names_in_order()
        # What is being written is listed too: it is verified when read, and a restart would lose it otherwise.
        writing = [
            (each[still], at[still])
            for each, at in self._in_write.values()
            if (still := (self.index.find(each)[0] == at) & ~self.index.ready(each)).any()
        ]
        parts = [(names, slots), *writing]
        remembered = np.concatenate([each for each, _ in parts])
        return self.records.names(remembered), np.concatenate([at for _, at in parts])

    # Another capacity.

    def blocks_within(self, capacity_bytes: int, needed: Callable[[int], int]) -> int:
        """Return how many blocks a capacity is: the medium knows, once it is open."""
        if not self.health.is_open:
            raise BackendUnavailableError(f"{self.name} is not open yet: resize it once it is")
        return self.backend.fit(capacity_bytes)

    @override
    async def grow(self, num_blocks: int, more_bytes: int) -> None:
        await self._resize(num_blocks)

    async def shrink(self, num_blocks: int) -> None:
        """Cut the medium. What it does not give back is its own to keep: the books have shrunk."""
        with suppress(BackendUnavailableError, ConfigurationError):  # the call has been reported
            await self._resize(num_blocks)

    async def _resize(self, num_blocks: int) -> None:
        if self._resizing is not None and not self._resizing.done():
            raise BackendUnavailableError(f"{self.name} is still being resized by a call that is late")
        raised: list[TieredKVError] = []

        async def resize() -> None:
            try:
                await self.backend.resize(num_blocks)
            except TieredKVError as error:
                raised.append(error)
                raise

        call = self._tasks.spawn(self.calls.make("resize", resize), f"resize {self.name}")
        self._resizing = call
        await asyncio.wait({call}, timeout=self.health.timeout_s)
        if not call.done():
            raise BackendUnavailableError(f"{self.name} was not resized within {self.health.timeout_s:g} s")
        answer = call.result()
        if raised:
            raise raised[0]
        if not answer.is_well:
            raise BackendUnavailableError(f"{self.name} was not resized to {num_blocks} blocks: {answer.error}")


@dataclass(eq=False)
class _SlotWrite:
    """The blocks of one write, on their way to slots of the index.

    Attributes:
        batch: What is to be written.
        todo: Its positions in the write.
        reservation: Of its slots; None if there was no room.
        report: What has become of all blocks.
        left: Positions of those that another write has slots for, which may fail; ``left_names`` are theirs,
            ``left_wanted`` says which were not removed since, and ``left_missing`` which it has not brought.
    """

    batch: Batch
    todo: NDArray[np.intp]
    reservation: Reservation | None
    report: WriteReport

    def __post_init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.left, self.left_names = np.empty(0, np.intp), self.batch.names[:0]
        self.left_wanted, self.left_missing = np.empty(0, np.bool_), np.empty(0, np.bool_)
        slots = np.empty(0, np.int64) if self.reservation is None else self.reservation.slots
        self.slots: Slots = slots[slots >= 0]
