"""A storage tier: a backend with its byte budget, its records and its verdicts. No fault of a tier raises here.

A call that is late has its waiters told, keeps its buffers (they stay reserved: quarantined), and until it returns the
tier is bypassed.
"""

import asyncio
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.catalog.index import TierIndex
from tiered_kv.catalog.table import hash_names
from tiered_kv.media.backend import Block, Blocks, Outcome, RecordShape, Verify
from tiered_kv.settings.tier_settings import StorageTierSettings
from tiered_kv.tiers.calls import Answer, Calls, all_failed, outcomes_problem
from tiered_kv.tiers.gate import Budget, Give, Kind, Priority, Read, ReadSpeed, Waiter, Wear
from tiered_kv.tiers.health import StorageHealth
from tiered_kv.tiers.records import Encoded, ExponentCodec, Records, Refusals, SpareBlocks, Verification
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.tiers.tier import Batch, Mask, ReadReport, Tier, WriteReport
from tiered_kv.values.errors import Reason, TierFault
from tiered_kv.values.events import BlocksCorrupted, BlocksNotEncoded, RecordsRefused
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import BlockKey, Names
from tiered_kv.values.specs import LoadStoreSpec

READ: Final = (Outcome.HIT, Outcome.MISS, Outcome.CORRUPT, Outcome.FAILED)
_KEYS_TOLD: Final = 8
"""Of broken blocks, in an event."""
_READERS: Final = frozenset({Kind.LOAD, Kind.PREFETCH})
WRITTEN: Final = (Outcome.STORED, Outcome.REFUSED, Outcome.FAILED)


@dataclass(frozen=True)
class TierParts:
    """What a storage tier is made of.

    Attributes:
        health: Of its backend; shared by the tiers that KV groups and ranks make of it, like all that follows.
        calls: Of its backend.
        budget: Bytes in flight.
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
    budget: Budget
    records: Records
    tasks: Tasks
    settings: StorageTierSettings
    group: int
    shape: RecordShape
    wear: Wear
    codec: ExponentCodec | None


class StorageTier(Tier):
    """One kind of block in one storage tier."""

    is_shared: bool
    """Whether others may write to this medium."""

    def __init__(self, parts: TierParts) -> None:
        super().__init__(parts.health.name)
        self.health = parts.health
        self.calls = parts.calls
        self.settings = parts.settings
        self.group = parts.group
        self.shape = parts.shape
        self.budget = parts.budget
        self.speed = ReadSpeed(parts.health.clock)
        self._codec = parts.codec
        self.records = parts.records
        self._wear = parts.wear
        self._spare_blocks = SpareBlocks(parts.shape)
        self._tasks = parts.tasks
        self._writing: dict[object, tuple[NDArray[np.uint64], asyncio.Future[None]]] = {}
        parts.health.on_stall.append(parts.budget.room.changed)

    @property
    @override
    def can_keep(self) -> bool:
        return not self.settings.read_only

    @property
    def books(self) -> TierIndex | None:
        """Those that say, without asking, what can be read here; None of a tier that others write to."""
        return None

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

    async def read(
        self, batch: Batch, blocks: Sequence[Block], waiter: Waiter, on_late: Callable[[], None]
    ) -> ReadReport:
        """Fill the blocks and verify them; say which are right. Returns when the medium has let go of the buffers."""
        read, report = self._begin_to_count(len(batch), waiter), ReadReport.nothing_of(len(batch))
        no_more = partial(self.speed.end, read, is_well=False)  # of one that is late the breakers take care
        try:
            if (give_back := await self.take(len(batch), waiter)) is None:
                on_late()
            else:
                try:
                    report = await self._read_blocks(batch, blocks, waiter, both(give_back, both(no_more, on_late)))
                finally:
                    give_back()
        except asyncio.CancelledError:
            self.speed.give_up(read)
            raise
        finally:
            self.speed.end(read, is_well=bool(report.right.all()))
        return report

    def _begin_to_count(self, n: int, waiter: Waiter) -> Read:
        return self.speed.begin(self._num_bytes(n), goes_first=waiter.priority is Priority.LOAD)

    def begin_read(
        self,
        batch: Batch,
        blocks: Sequence[Block],
        waiter: Waiter,
        on_late: Callable[[], None],
        then: Callable[[ReadReport], None],
        *,
        is_use: bool = False,
    ) -> bool:
        """Do what `read` does, at once and without a task; False, and nothing is done, if it has to wait for anything.

        ``then`` is told on the event loop, once, when the medium has let go of the buffers: perhaps before this
        returns. With ``is_use`` it counts as a use of the blocks, if all of them are right.
        """
        return False

    @abstractmethod
    async def _read_blocks(
        self, batch: Batch, blocks: Sequence[Block], waiter: Waiter, on_late: Callable[[], None]
    ) -> ReadReport:
        """Read and verify, once it is our turn; call ``on_late`` when the medium is late with it."""

    async def write(
        self,
        batch: Batch,
        blocks: Sequence[Block],
        is_wanted: Callable[[], Mask],
        on_late: Callable[[], None],
        waiter: Waiter,
    ) -> WriteReport:
        """Encode and write the blocks that are still wanted when their turn has come.

        Returns when the medium has let go of the buffers.
        """
        num_bytes, num_worn = self._num_bytes(len(batch)), 0
        if not self._wear.take(num_bytes):
            self.counters.held_back += len(batch)
            return WriteReport.nothing_of(len(batch), Reason.HELD_BACK)
        try:
            if (give_back := await self.take(len(batch), waiter)) is None:
                return WriteReport.nothing_of(len(batch), Reason.TIER_AWAY)
            num_worn = num_bytes  # unless it is known better in the end
            try:
                report = await self._write_blocks(batch, blocks, is_wanted(), both(give_back, on_late), waiter)
            finally:
                give_back()
            num_worn = self._num_bytes(report.num_worn)
        finally:
            self._wear.give_back(num_bytes - num_worn)
        return report

    def begin_write(
        self,
        batch: Batch,
        blocks: Sequence[Block],
        is_wanted: Callable[[], Mask],
        on_late: Callable[[], None],
        waiter: Waiter,
        then: Callable[[WriteReport], None],
    ) -> Callable[[], None] | None:
        """Do what `write` does, at once and without a task; None, and nothing is done, if it has to wait for its turn.

        ``then`` is told on the event loop, once, when the medium has let go of the buffers: perhaps before this
        returns. What is returned gives the write up as long as it waits, if the medium makes it wait after all.
        """
        return None

    @property
    def _refusal(self) -> Reason:
        """Why blocks are dropped that have just been refused: by the medium, or as it was not asked."""
        return Reason.TIER_AWAY if self.health.is_shedding else Reason.REFUSED

    @abstractmethod
    async def _write_blocks(
        self, batch: Batch, blocks: Sequence[Block], wanted: Mask, on_late: Callable[[], None], waiter: Waiter
    ) -> WriteReport:
        """Write those of the blocks that are wanted, once it is our turn."""

    def describe(self) -> Mapping[str, object]:
        """Return what the medium says of itself, for statistics."""
        return {}

    async def opened(self, books: Sequence[TierIndex]) -> None:
        """Begin to use a medium that has been opened later than the cache.

        Args:
            books: Of what was found there, by kind of block; none of a shared one.
        """

    @abstractmethod
    def lacks(self, batch: Batch) -> Mask:
        """Say which blocks would be news to this tier, as far as is known without asking."""

    @abstractmethod
    def touch(self, batch: Batch) -> None:
        """Note that the blocks were used, wherever they were served from."""

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

    def _num_bytes(self, n: int) -> int:
        return n * self.shape.stride_bytes

    async def take(self, n: int, waiter: Waiter) -> Give | None:
        """Wait for our turn to move ``n`` blocks; None once the tier stalls: behind a hung call it might never come."""
        started = self.health.clock()
        give = await self.budget.take_unless(lambda: self._is_off(waiter), self._num_bytes(n), waiter)
        waited_s = self.health.clock() - started
        if waiter.kind in _READERS:
            self.counters.read_queue_s += waited_s
        else:
            self.counters.write_queue_s += waited_s
        return give

    def _is_off(self, waiter: Waiter) -> bool:
        return self.health.is_bypassed if waiter.kind in _READERS else self.health.is_shedding

    async def _locate(self, call: Callable[[], Awaitable[LoadStoreSpec | None]], n: int) -> LoadStoreSpec | None:
        """Ask the medium. Where it fails there is no spec, and lookups and reads go on as before."""

        def problem_of(spec: LoadStoreSpec | None) -> str:
            is_right = spec is None or (isinstance(spec, LoadStoreSpec) and len(spec) == n)
            return "" if is_right else f"no spec of {n} blocks: {spec!r:.80}"

        answer = await self.calls.make("locate", call, num_blocks=n, until_late=True, problem_of=problem_of)
        return answer.value if answer.is_well else None

    async def _read(
        self,
        call: Callable[[Sequence[Block], Verify | None], Awaitable[list[Outcome]]],
        keys: list[BlockKey],
        blocks: Sequence[Block],
        waiter: Waiter,
        on_late: Callable[[], None],
        *,
        makes_records: bool = False,
    ) -> tuple[list[Outcome], Refusals]:
        """Read records, replace each HIT by what the record itself says, and leave in the blocks what they hold.

        Says also which are refused for their seal. A medium that ``makes_records`` verifies them where it reads them.
        """
        n, started = len(keys), self.health.clock()
        records = blocks if self._codec is None else [self._codec.record_in(each) for each in blocks]
        verification = self.records.verification(keys, records, self.shape, self._codec, blocks)
        verify, into = (verification.verify, records) if makes_records else (None, Blocks.lent(records))
        answer = await self.calls.make(
            "read", lambda: call(into, verify), num_blocks=n, waiter=waiter, on_late=on_late, in_this_task=True,
            problem_of=outcomes_problem(n, READ), is_failure=all_failed,
        )  # fmt: skip
        self.counters.read_queue_s += self.health.clock() - started - answer.seconds
        if not answer.was_made:
            on_late()  # as bypassed as a tier can be
        verdicts = answer.value
        if verdicts and not makes_records and not self.records.threads.is_closed:
            verdicts = await verification.verify_all(verdicts)
        return self._seen(answer, verification, n, verdicts), verification.refused

    def _seen(
        self,
        answer: Answer[list[Outcome]],
        verification: Verification,
        n: int,
        verdicts: list[Outcome] | None,
    ) -> list[Outcome]:
        """Count what a read of ``n`` blocks brought, and return what has become of each."""
        if not verdicts or self.records.threads.is_closed:  # nobody verifies what comes after the cache's end
            self.counters.failed += n
            return [Outcome.FAILED] * n
        self.counters.bytes_read += self._num_bytes(verification.num_filled)
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

    async def _write(
        self, call: Callable[[], Awaitable[list[Outcome]]], n: int, waiter: Waiter, on_late: Callable[[], None]
    ) -> list[Outcome]:
        if not n:
            return []
        started = self.health.clock()
        answer = await self.calls.make(
            "write", call, num_blocks=n, waiter=waiter, on_late=on_late, in_this_task=True,
            problem_of=outcomes_problem(n, WRITTEN), is_failure=all_failed,
        )  # fmt: skip
        self.counters.write_queue_s += self.health.clock() - started - answer.seconds
        return self._told(answer, n)

    def _told(self, answer: Answer[list[Outcome]], n: int) -> list[Outcome]:
        """Count what a write of ``n`` blocks has done, and return what became of each."""
        self.counters.write_s += answer.seconds
        if not answer.was_made:
            return [Outcome.REFUSED] * n
        outcomes = list(answer.value or [Outcome.FAILED] * n)
        num_stored = outcomes.count(Outcome.STORED)
        self.counters.bytes_written += self._num_bytes(num_stored)
        self.counters.block_bytes_written += num_stored * (self.shape.decoded_bytes or self.shape.payload_bytes)
        return outcomes

    @property
    def _stages(self) -> bool:
        """Whether records are made in memory of their own, as their payloads are not what is in slots."""
        return self._codec is not None or self.records.encrypts

    @asynccontextmanager
    async def _encoded(self, batch: Batch, blocks: Sequence[Block]) -> AsyncIterator[Encoded]:
        """Make the records; lend them until the backend has let go of them."""
        keys = self.records.keys(batch)
        staged = self._spare_blocks.take(len(keys)) if self._stages else blocks
        made = await self.records.encode(keys, blocks, staged, self.shape, self._codec)
        if len(made.at) < len(keys):
            self.health.emit(BlocksNotEncoded(self.name, len(keys) - len(made.at), self.shape.codec))
        yield made
        if staged is not blocks:  # and not after an error: who was cancelled cannot tell whether they are still read
            self._spare_blocks.give(staged)

    @contextmanager
    def _is_writing(self, names: Names) -> Iterator[None]:
        """Let `forget` wait for what is done with these blocks on the medium."""
        write, done = object(), asyncio.get_running_loop().create_future()
        self._writing[write] = hash_names(names), done
        try:
            yield
        finally:
            del self._writing[write]
            done.set_result(None)

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


def both(give_back: Give, on_late: Callable[[], None]) -> Callable[[], None]:
    """Return what to call when a call is late: nobody has to wait for its bytes, if the tier is used on without it."""

    def late() -> None:
        give_back()
        on_late()

    return late
