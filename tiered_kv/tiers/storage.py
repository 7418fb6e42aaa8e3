"""A storage tier: a backend with its byte budget, its records and its verdicts. No fault of a tier raises here.

A call that is late has its waiters told, keeps its buffers (they stay reserved: quarantined), and until it returns the
tier is bypassed.
"""

import asyncio
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.catalog.index import TierIndex
from tiered_kv.catalog.table import hash_names
from tiered_kv.media.backend import Backend, Block, Blocks, Make, Outcome, RecordShape, SlotBackend, Then, Verify
from tiered_kv.settings.tier_settings import StorageTierSettings
from tiered_kv.tiers.calls import CLOSED, Calls, Outcomes, Turn
from tiered_kv.tiers.gate import Priority, ReadSpeed, Waiter, Wear
from tiered_kv.tiers.health import StorageHealth
from tiered_kv.tiers.records import ExponentCodec, Records, Refusals, SpareBlocks, Verification, do_soon
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.tiers.tier import Batch, ReadReport, Tier, WriteReport
from tiered_kv.values.errors import Reason, TierFault, in_words
from tiered_kv.values.events import BlocksCorrupted, BlocksNotEncoded, RecordsRefused, TierFailed
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.integers import Mask
from tiered_kv.values.keys import Names
from tiered_kv.values.specs import LoadStoreSpec

READ: Final = (Outcome.HIT, Outcome.MISS, Outcome.CORRUPT, Outcome.FAILED)
_KEYS_TOLD: Final = 8
"""Of broken blocks, in an event."""
WRITTEN: Final = (Outcome.STORED, Outcome.REFUSED, Outcome.FAILED)
_PARTLY: Final = "a part of the medium did not answer"


@dataclass(frozen=True)
class TierParts:
    """What a storage tier is made of.

    Attributes:
        health: Of its backend; shared by the tiers that KV groups and ranks make of it, like all that follows.
        calls: Of its backend.
        records: Makes and verifies records.
        tasks: Of the cache.
        settings: The tier's.
        group: Which kind of block this tier has: a KV group on one rank.
        shape: Of its records.
        wear: How much may be written.
        codec: What makes their payloads of what is in slots, if these differ.
    """

    health: StorageHealth
    calls: Calls
    records: Records
    tasks: Tasks
    settings: StorageTierSettings
    group: int
    shape: RecordShape
    wear: Wear
    codec: ExponentCodec | None


R = TypeVar("R")
Writing = tuple[Callable[[Then], bool] | None, Callable[[], Awaitable[list[Outcome]]]]
"""What has threads of the medium begin a write, if they can, and what makes it else: see `Turn.make`."""


@dataclass
class BlockIO(Generic[R]):
    """Blocks that a medium is to read or write, now that it is their turn.

    Attributes:
        batch: Which blocks.
        blocks: Their memory. Lent until ``then``.
        on_late: Called when the medium is late with it.
        then: Told on the event loop, once, what has become of them, when the medium has let go of their memory.
    """

    batch: Batch
    blocks: Sequence[Block]
    on_late: Callable[[], None]
    then: Callable[[R], None]


class StorageTier(Tier):
    """One kind of block in one storage tier.

    Attributes:
        backend: The medium.
        is_shared: Whether others may write to the tier's medium; such a tier has no books here.
    """

    backend: Backend | SlotBackend
    is_shared: ClassVar[bool]

    def __init__(self, parts: TierParts) -> None:
        super().__init__(parts.health.name)
        self.health = parts.health
        self.calls = parts.calls
        self.settings = parts.settings
        self.group = parts.group
        self.shape = parts.shape
        self.speed = ReadSpeed(parts.health.clock)
        self._codec = parts.codec
        self.records = parts.records
        self._wear = parts.wear
        self._spare_blocks = SpareBlocks(parts.shape)
        self._tasks = parts.tasks
        self._writing: dict[object, tuple[NDArray[np.uint64], asyncio.Future[None]]] = {}

    @property
    @override
    def can_keep(self) -> bool:
        return not self.settings.read_only

    @property
    def is_written_back(self) -> bool:
        """Whether blocks wait above this tier for the cleaner."""
        return self.settings.write == "back"

    @abstractmethod
    async def find(self, batch: Batch, faults: list[TierFault] | None = None) -> Mask:
        """Say which blocks can be read: in a shared tier, a prefix at most.

        In an owned tier it does not wait. In a shared one it waits for the turn to ask, as long as the caller does, and
        then for the tier's time limit at most.

        Args:
            batch: The blocks.
            faults: Told, by one more, what kept the tier from answering: then none is found.
        """

    @abstractmethod
    def may_have(self, batch: Batch) -> Mask:
        """Say which blocks may be here while the tier is bypassed, and cannot say so."""

    async def find_each(self, batch: Batch, faults: list[TierFault] | None = None) -> Mask:
        """Say which blocks can be read, also behind a hole; otherwise as `find`."""
        return await self.find(batch, faults)

    def _away(self, batch: Batch, faults: list[TierFault] | None) -> Mask:
        """Find nothing, as the tier is bypassed, and name it for those of the blocks that it may have."""
        if faults is not None and (n := int(np.count_nonzero(self.may_have(batch)))):
            faults.append(TierFault(self.name, Reason.TIER_AWAY, n))
        return np.zeros(len(batch), np.bool_)

    async def find_for_store(self, batch: Batch) -> Mask:
        """Say which blocks a store need not write; otherwise as `find`."""
        return await self.find(batch)

    def start_read(
        self,
        batch: Batch,
        blocks: Sequence[Block],
        waiter: Waiter,
        on_late: Callable[[], None],
        then: Callable[[ReadReport], None],
        *,
        is_use: bool = False,
    ) -> None:
        """Fill the blocks and verify them, once their turn has come: what need not wait is begun before this returns.

        Args:
            batch: Which blocks.
            blocks: Get them. Lent until ``then``.
            waiter: Its place in line. To give it up ends a read whose turn has not come.
            on_late: Called when the medium is late with it, or is bypassed before its turn has come.
            then: Told on the event loop, once, when the medium has let go of the buffers: perhaps before this returns.
            is_use: Whether it counts as a use of the blocks, if all of them are right.
        """
        n = len(batch.names)
        num_bytes = n * self.shape.stride_bytes
        read = self.speed.begin(num_bytes, goes_first=waiter.priority is Priority.LOAD)

        def late() -> None:
            self.speed.end(read, is_well=False)  # of one that is late the breakers take care
            on_late()

        def end(report: ReadReport) -> None:
            self.speed.end(read, is_well=bool(report.right.all()))
            then(report)

        def go(turn: Turn | None) -> None:
            self.counters.read_queue_s += self.health.clock() - read.started
            if turn is not None:
                self._read_blocks(turn, BlockIO(batch, blocks, late, end), is_use=is_use)
                return
            if waiter.is_given_up:
                self.speed.give_up(read)
            else:
                late()
            end(ReadReport.nothing_of(n))

        self.calls.when_due("read", num_bytes, waiter, self._tasks, go)

    @abstractmethod
    def _read_blocks(self, turn: Turn, io: BlockIO[ReadReport], *, is_use: bool) -> None:
        """Do what `start_read` does, now that it is our turn."""

    def start_write(
        self,
        batch: Batch,
        blocks: Sequence[Block],
        is_wanted: Callable[[], Mask],
        on_late: Callable[[], None],
        waiter: Waiter,
        then: Callable[[WriteReport], None],
    ) -> None:
        """Encode and write the blocks that are still wanted once their turn has come.

        What need not wait is begun before this returns.

        Args:
            batch: Which blocks.
            blocks: Have them. Lent until ``then``.
            is_wanted: Says which are wanted, when the turn has come.
            on_late: Called when the medium is late with it.
            waiter: Its place in line. To give it up ends a write whose turn has not come: its blocks are revoked.
            then: Told on the event loop, once, when the medium has let go of the buffers: perhaps before this returns.
        """
        n, started = len(batch.names), self.health.clock()
        num_bytes = n * self.shape.stride_bytes
        if not self._wear.take(num_bytes):
            self.counters.held_back += n
            then(WriteReport.nothing_of(n, Reason.HELD_BACK))
            return

        def end(report: WriteReport) -> None:
            self._wear.give_back(num_bytes - report.num_worn * self.shape.stride_bytes)
            then(report)

        come: Callable[[], None] | None = None
        has_turn = False

        def go(turn: Turn | None) -> None:
            nonlocal has_turn
            has_turn = True
            if come is not None:
                come()
            self.counters.write_queue_s += self.health.clock() - started
            if turn is not None:
                self._write_blocks(turn, BlockIO(batch, blocks, on_late, end), is_wanted())
            else:
                end(WriteReport.nothing_of(n, Reason.REVOKED if waiter.is_given_up else Reason.TIER_AWAY))

        self.calls.when_due("write", num_bytes, waiter, self._tasks, go)
        if not has_turn:
            come = self.announce(batch.names, is_wanted)

    def announce(self, names: Names, is_wanted: Callable[[], Mask]) -> Callable[[], None]:
        """Take note of blocks that are to come here once their turn does, until what this returns is called.

        ``is_wanted`` says which of them would be written if it came now. Of a shared tier nobody asks for that.
        """
        return lambda: None

    @abstractmethod
    def _write_blocks(self, turn: Turn, io: BlockIO[WriteReport], wanted: Mask) -> None:
        """Write those of the blocks that are wanted, now that it is our turn."""

    @property
    def _refusal(self) -> Reason:
        """Why blocks are dropped that have just been refused: by the medium, or as it was not asked."""
        return Reason.TIER_AWAY if self.health.is_shedding else Reason.REFUSED

    def describe(self) -> Mapping[str, object]:
        """Return what the medium says of itself, for statistics."""
        return self.calls.ask("describe", self.backend.describe, {}, problem_of=_problem_of_facts)

    def tell_failed(self, doing: str, num_blocks: int) -> None:
        """Tell of blocks that failed in a call that raised nothing, if there are any; at most once a minute."""
        if num_blocks:
            self.calls.tell_seldom(doing, self.why_partly, num_blocks)

    @property
    def why_partly(self) -> str:
        """Why blocks failed in a call that raised nothing, as far as the medium tells."""
        facts = self.describe()
        return self.calls.ask("describe", lambda: str(facts.get("last_error") or _PARTLY), _PARTLY)

    def opened(self, books: Sequence[TierIndex]) -> None:
        """Begin to use a medium that has been opened later than the cache.

        Args:
            books: Of what was found there, by kind of block; none of a shared one.
        """

    @abstractmethod
    def lacks(self, batch: Batch) -> Mask:
        """Say which blocks would be news to this tier, as far as is known without asking."""

    def miss(self, names: Names) -> None:
        """Take note that it did not get blocks that it was to have; one with books sees it there."""

    @abstractmethod
    def missed(self, batch: Batch) -> Mask:
        """Say which blocks it is known to lack: of those that memory has it was to have all that it takes."""

    def miss_no_more(self, names: Names) -> None:
        """Take note that blocks are here, or on their way, until `miss` says otherwise."""

    def is_coming(self, batch: Batch) -> Mask:
        """Say which blocks are being written here, or are to be once their turn comes: of those that are `missed`."""
        return np.zeros(len(batch), np.bool_)

    def hint(self, batch: Batch, hint: ReuseHint) -> None:
        """Note what a caller says of the blocks."""

    @abstractmethod
    def forget(self, batch: Batch) -> Coroutine[Any, Any, bool]:
        """Make blocks unfindable at once, before this returns.

        What it returns ends when a restart finds none either, or when the medium could not be told: then it says False.
        Blocks that are being written are waited for, and then forgotten.
        """

    @abstractmethod
    async def pay(self) -> bool:
        """Have the medium remove what it could not be told to, and say whether nothing is left that it should not have.

        What is evicted from a tier that is only read is others' to keep.
        """

    @abstractmethod
    def tick(self) -> None:
        """Begin to make up for what a medium that failed did not do. Called once in a while."""

    async def _locate(self, call: Callable[[], Awaitable[LoadStoreSpec | None]], n: int) -> LoadStoreSpec | None:
        """Ask the medium. Where it fails there is no spec, and lookups and reads go on as before."""

        def problem_of(spec: LoadStoreSpec | None) -> str:
            is_right = spec is None or (isinstance(spec, LoadStoreSpec) and len(spec) == n)
            return "" if is_right else f"no spec of {n} blocks: {spec!r:.80}"

        answer = await self.calls.make("locate", call, num_blocks=n, until_late=True, problem_of=problem_of)
        return answer.value if answer.is_well else None

    def _read(
        self,
        turn: Turn,
        batch: Batch,
        blocks: Sequence[Block],
        begin: Callable[[Sequence[Block], Verify, Then], bool] | None,
        call: Callable[[Sequence[Block], Verify], Awaitable[list[Outcome]]],
        on_late: Callable[[], None],
        then: Callable[[list[Outcome], Refusals, str], None],
    ) -> None:
        """Read records, replace each HIT by what the record itself says, and leave in the blocks what they hold.

        A medium that has a ``begin`` makes records: it verifies them where it reads them, in ``call``, too. ``then`` is
        told also which are refused for their seal, and why others could not be read.
        """
        n = len(batch.names)
        records = blocks if (codec := self._codec) is None else Blocks(n, lambda at: codec.record_in(blocks[at]))
        verification = self.records.verification(batch, records, self.shape, self._codec, blocks)

        def read() -> Awaitable[list[Outcome]]:
            # Of others' code all are made first: a thread of its may come to one when the cache has been closed.
            return call(records if begin is not None else list(Blocks.lent(records)), verification.verify)

        def verified(answer: Outcomes, verdicts: list[Outcome] | None) -> None:
            error = answer.error or (self.why_partly if Outcome.FAILED in (answer.value or ()) else "")
            then(self._count_read(answer, verification, n, verdicts), verification.refused, error)

        def ended(answer: Outcomes) -> None:
            self.tell_failed("read", (answer.value or []).count(Outcome.FAILED))
            if begin is None and answer.value:
                verify = partial(verification.verify, range(n), answer.value)
                do_soon(self.records.threads, verify, self._tasks, partial(verified, answer))
            else:
                verified(answer, answer.value)

        turn.make(
            begin and partial(begin, records, verification.verify),
            read,
            ended,
            allowed=READ,
            num_blocks=n,
            on_late=on_late,
        )

    def _count_read(
        self,
        answer: Outcomes,
        verification: Verification,
        n: int,
        verdicts: list[Outcome] | None,
    ) -> list[Outcome]:
        """Count what a read of ``n`` blocks brought, and return what has become of each."""
        if not verdicts or self.records.threads.is_closed:  # nobody verifies what comes after the cache's end
            self.counters.failed += n
            return [Outcome.FAILED] * n
        self.counters.bytes_read += sum(verification.filled) * self.shape.stride_bytes
        self.counters.read_s += answer.seconds
        if verification.refused:
            self.tell_refused(verification.refused)
        self.counters.corrupt += verdicts.count(Outcome.CORRUPT)
        self.counters.failed += verdicts.count(Outcome.FAILED)
        return list(verdicts)

    def tell_corrupted(self, keys: Sequence[str]) -> None:
        """Tell of blocks that were not what they should be; see `BlocksCorrupted`."""
        self.health.emit(BlocksCorrupted(self.name, len(keys), tuple(keys[:_KEYS_TOLD])))

    def tell_refused(self, refused: Refusals) -> None:
        """Tell of whole records that were refused for their seal."""
        for reason, num_blocks in Counter(refused.values()).items():
            self.health.emit(RecordsRefused(self.name, num_blocks, reason))

    def _count_written(self, answer: Outcomes, n: int) -> list[Outcome]:
        """Count what a write of ``n`` blocks has done, and return what became of each."""
        self.counters.write_s += answer.seconds
        self.tell_failed("write", (answer.value or []).count(Outcome.FAILED))
        outcomes = list(answer.value or [Outcome.FAILED] * n)
        num_stored = outcomes.count(Outcome.STORED)
        self.counters.bytes_written += num_stored * self.shape.stride_bytes
        self.counters.block_bytes_written += num_stored * (self.shape.decoded_bytes or self.shape.payload_bytes)
        return outcomes

    def _write(
        self,
        turn: Turn,
        batch: Batch,
        blocks: Sequence[Block],
        write: Callable[[NDArray[np.int64] | None, Sequence[Block], Make | None], Writing],
        on_late: Callable[[], None],
        then: Callable[[list[Outcome], str], None],
        *,
        makes_records: bool = False,
    ) -> None:
        """Have records made of the blocks, and written: those that the codec keeps.

        Args:
            turn: Ours.
            batch: Which blocks.
            blocks: Their memory.
            write: Says how the medium writes records, of the blocks at some positions, or of all: None.
            on_late: Called when the medium is late.
            then: Told what has become of each block, and the error of the call, or why no record could be made.
            makes_records: Whether the medium makes records where it writes them: then ``write`` is given what does so,
                unless payloads are not what is in slots, and records need memory of their own.
        """
        n, stages = len(batch.names), self._codec is not None or self.records.encrypts
        if makes_records and not stages:
            make = self.records.making(batch, blocks, blocks, self.shape)
            self._write_records(turn, n, write(None, Blocks.read_only(blocks), make), on_late, then)
            return
        staged: list[Block] = []

        def made(kept: Sequence[Block | None], error: str = "") -> None:
            at = [position for position, record in enumerate(kept) if record is not None]
            if len(at) < n and not error:
                self.health.emit(BlocksNotEncoded(self.name, n - len(at), self.shape.codec))

            def end(outcomes: list[Outcome], why: str) -> None:
                if why != CLOSED:  # else nobody can tell whether they are still read
                    self._spare_blocks.give(staged)
                written, unkept = dict(zip(at, outcomes, strict=True)), Outcome.FAILED if error else Outcome.REFUSED
                then([written.get(position, unkept) for position in range(n)], why or error)

            records = [record for record in kept if record is not None]
            self._write_records(turn, len(at), write(np.array(at, np.int64), records, None), on_late, end)

        try:
            next(iter(blocks), None)  # for which those that are lent take their headers
            staged += self._spare_blocks.take(n) if stages else ()
        except OSError as error:  # the system has no memory for them
            self.health.emit(TierFailed(self.name, "write", words := in_words(error), n))
            made((), words)
            return
        make = self.records.making(batch, blocks, staged or blocks, self.shape, self._codec)
        work = partial(make, range(n))
        do_soon(self.records.threads, work, self._tasks, lambda kept: made(kept or (), "" if kept else CLOSED))

    def _write_records(
        self,
        turn: Turn,
        n: int,
        writing: Writing,
        on_late: Callable[[], None],
        then: Callable[[list[Outcome], str], None],
    ) -> None:
        """Have ``n`` records written, unless there are none, or calls that write have come to hang."""
        if not n or turn.is_off:
            turn.give_back()
            then([Outcome.REFUSED] * n, "")
            return
        turn.make(
            *writing, lambda answer: then(self._count_written(answer, n), answer.error),
            allowed=WRITTEN, num_blocks=n, on_late=on_late,
        )  # fmt: skip

    def _begin_writing(self, names: Names) -> Callable[[], None]:
        """Let `forget` wait for what is done with these blocks on the medium, until what this returns is called."""
        write, done = object(), asyncio.get_running_loop().create_future()
        self._writing[write] = hash_names(names), done

        def end() -> None:
            del self._writing[write]
            done.set_result(None)

        return end

    def _is_being_written(self, names: Names) -> Mask:
        """Say of which of these blocks something may be under way on the medium."""
        hashes, busy = hash_names(names), np.zeros(len(names), np.bool_)
        for each, _ in self._writing.values():
            busy |= np.isin(hashes, each)
        return busy

    async def _until_written(self, names: Names) -> None:
        """Wait until nothing is under way on the medium that may be about these blocks."""
        hashes = hash_names(names)
        while busy := [done for each, done in self._writing.values() if np.isin(hashes, each).any()]:
            await asyncio.wait(busy)


def _problem_of_facts(facts: Mapping[str, object]) -> str:
    return "" if isinstance(facts, dict) else f"no dict: {facts!r:.80}"
