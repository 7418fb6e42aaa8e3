"""A storage tier: a backend with its deadlines, its byte budget and its verdicts. No fault of a tier raises here.

Every call of a backend runs to its end, in a task of the cache: only waiting for it is bounded. A call that is late has
its waiters told, keeps its buffers (they stay reserved: quarantined), and until it returns the tier is bypassed.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tiered_kv.backend import Backend, Block, Outcome, OwnedTierSettings, RecordShape, SlotBackend, TierSettings
from tiered_kv.catalog.index import TierIndex
from tiered_kv.catalog.statistics import Change
from tiered_kv.errors import CapacityError
from tiered_kv.events import BlocksCorrupted, TierFailed
from tiered_kv.keys import BlockKey, Names
from tiered_kv.motion.budget import Budget, Priority, Ticket
from tiered_kv.motion.health import StorageHealth
from tiered_kv.motion.suspects import Suspects
from tiered_kv.motion.tiers import Batch, Tier
from tiered_kv.motion.workers import Tasks, WorkerPool
from tiered_kv.record import encode, verify

T = TypeVar("T")
Mask = NDArray[np.bool_]


@dataclass
class Rate:
    """Bytes a second as seen lately; 0 before anything was seen."""

    bytes_per_s: float = 0.0

    def saw(self, num_bytes: int, seconds: float) -> None:
        """Take one more transfer into account."""
        if num_bytes and seconds > 0:
            seen = num_bytes / seconds
            self.bytes_per_s = seen if not self.bytes_per_s else 0.8 * self.bytes_per_s + 0.2 * seen


@dataclass
class WriteReport:
    """What became of the blocks of one write, by position. Every position is in exactly one of them."""

    written: Mask
    present: Mask
    dropped: Mask
    failed: Mask = field(init=False)

    def __post_init__(self) -> None:
        self.failed = ~(self.written | self.present | self.dropped)

    @classmethod
    def nothing_of(cls, n: int) -> "WriteReport":
        """All of ``n`` blocks dropped."""
        nothing = np.zeros(n, np.bool_)
        return cls(nothing, nothing, ~nothing)

    @classmethod
    def failure_of(cls, n: int) -> "WriteReport":
        """All of ``n`` blocks failed."""
        nothing = np.zeros(n, np.bool_)
        return cls(nothing, nothing, nothing)

    def counts(self) -> dict[str, int]:
        """How many blocks, by what became of them."""
        return {name: int(np.count_nonzero(mask)) for name, mask in vars(self).items()}


class StorageTier(Tier, ABC):
    """One KV group of one storage tier."""

    def __init__(
        self,
        health: StorageHealth,
        settings: TierSettings,
        group: int,
        shape: RecordShape,
        budget: Budget,
        codec_threads: WorkerPool,
        tasks: Tasks,
    ) -> None:
        super().__init__(health.name)
        self.health = health
        self.settings = settings
        self.group = group
        self.shape = shape
        self.budget = budget
        self.load_rate = Rate()
        self._codec = codec_threads
        self._tasks = tasks
        health.on_stall.append(budget.room.changed)

    @property
    def is_written_back(self) -> bool:
        """Whether blocks wait above this tier for the cleaner."""
        return self.settings.write == "back"

    @property
    def is_exclusive(self) -> bool:
        """Whether a block is either here or in the CPU tier."""
        return isinstance(self.settings, OwnedTierSettings) and self.settings.exclusive

    @abstractmethod
    async def find(self, batch: Batch) -> Mask:
        """Say which blocks can be read, as far as is known: in a tier that is not owned, a prefix at most."""

    @abstractmethod
    async def read(self, batch: Batch, blocks: list[Block], ticket: Ticket, on_late: Callable[[], None]) -> Mask:
        """Fill the blocks and verify them; say which are right. Returns when the medium has let go of the buffers."""

    @abstractmethod
    async def write(
        self,
        batch: Batch,
        blocks: list[Block],
        is_wanted: Callable[[], Mask],
        on_late: Callable[[], None],
        priority: Priority,
    ) -> WriteReport:
        """Encode and write blocks, as long as they are wanted: checked when their turn has come, and behind it."""

    @abstractmethod
    def touch(self, batch: Batch) -> None:
        """Note that the blocks were used, wherever they were served from."""

    @abstractmethod
    async def forget(self, batch: Batch) -> int:
        """Make blocks unfindable at once (in an owned tier, before the first await), and after a restart too."""

    def _num_bytes(self, n: int) -> int:
        return n * self.shape.stride_bytes

    async def _take(self, n: int, ticket: Ticket) -> Callable[[], None]:
        """Wait for our turn to move ``n`` blocks, or until the tier stalls: behind a hung call it might never come."""
        return await self.budget.take(self._num_bytes(n), ticket, lambda: self._is_off(ticket))

    def _is_off(self, ticket: Ticket) -> bool:
        is_store = ticket.priority in {Priority.STORE, Priority.DEMOTE}
        return self.health.is_shedding if is_store else self.health.is_bypassed

    async def _call(
        self, call: Awaitable[list[Outcome]], n: int, doing: str, on_late: Callable[[], None]
    ) -> list[Outcome]:
        """Make one call of the backend: what it raises, or a wrong number of answers, is one FAILED per block."""
        try:
            outcomes = await self.health.timed(call, doing, on_late)
            if len(outcomes) == n:
                self.health.went(doing, well=outcomes.count(Outcome.FAILED) < n)
                return list(outcomes)
            error = f"{len(outcomes)} outcomes for {n} blocks"
        except Exception as caught:  # noqa: BLE001 - whatever a medium raises, serving goes on without it
            error = f"{type(caught).__name__}: {caught}"
        self.health.went(doing, well=False)
        self.health.emit(TierFailed(self.name, doing, error, n))
        return [Outcome.FAILED] * n

    async def _verify(self, keys: list[BlockKey], blocks: list[Block], outcomes: list[Outcome]) -> list[Outcome]:
        """Replace each HIT by what the record itself says."""
        verdicts = await self._codec.run(_verify_hits, keys, blocks, outcomes, self.shape)
        self.counters.corrupt += verdicts.count(Outcome.CORRUPT)
        self.counters.failed += verdicts.count(Outcome.FAILED)
        return verdicts

    async def _encode(self, batch: Batch, blocks: list[Block]) -> list[BlockKey]:
        keys = batch.keys()
        await self._codec.run(_encode_all, keys, blocks, self.shape)
        return keys


class OwnedTier(StorageTier):
    """A `SlotBackend` and the index of its slots."""

    def __init__(
        self,
        health: StorageHealth,
        settings: TierSettings,
        group: int,
        shape: RecordShape,
        budget: Budget,
        codec_threads: WorkerPool,
        tasks: Tasks,
        backend: SlotBackend,
        index: TierIndex,
    ) -> None:
        super().__init__(health, settings, group, shape, budget, codec_threads, tasks)
        self.backend = backend
        self.index = index
        self._journal = asyncio.Lock()  # what is forgotten before a checkpoint must not come back by it
        self._writing: dict[object, tuple[Names, NDArray[np.int64]]] = {}

    async def find(self, batch: Batch) -> Mask:
        """See `StorageTier.find`; exact, and does not wait."""
        return np.zeros(len(batch), np.bool_) if self.health.is_bypassed else self.index.ready(batch.names)

    async def read(self, batch: Batch, blocks: list[Block], ticket: Ticket, on_late: Callable[[], None]) -> Mask:
        """See `StorageTier.read`. A block that is not what the index says is removed."""
        right = np.zeros(len(batch), np.bool_)
        give_back = await self._take(len(batch), ticket)
        try:
            if self.health.is_bypassed:
                on_late()
                return np.zeros(len(batch), np.bool_)
            with self.index.lease(batch.names) as lease:
                at = np.flatnonzero(lease.slots >= 0)
                if not len(at):
                    return right
                there, wanted = [blocks[i] for i in at], batch[at]
                started = asyncio.get_running_loop().time()
                call = self.backend.read(self.group, lease.slots[at], there)
                outcomes = await self._call(call, len(at), "read", on_late)
                self.load_rate.saw(self._num_bytes(len(at)), asyncio.get_running_loop().time() - started)
                outcomes = await self._verify(wanted.keys(), there, outcomes)
                right[at] = [outcome is Outcome.HIT for outcome in outcomes]
                broken = np.array([outcome in (Outcome.CORRUPT, Outcome.MISS) for outcome in outcomes])
                if broken.any():
                    self.health.emit(BlocksCorrupted(self.name, int(broken.sum())))
                    slots, _ = self.index.find(wanted.names[broken])
                    self.index.remove(wanted.names[broken], Change.CORRUPT)
                    self._forget_later(slots[slots >= 0])
        finally:
            give_back()
        return right

    async def write(
        self,
        batch: Batch,
        blocks: list[Block],
        is_wanted: Callable[[], Mask],
        on_late: Callable[[], None],
        priority: Priority,
    ) -> WriteReport:
        """See `StorageTier.write`. What is removed while it is written never commits."""
        n = len(batch)
        nothing = np.zeros(n, np.bool_)
        give_back, write = await self._take(n, Ticket(priority)), object()
        try:
            if self.health.is_shedding:
                return WriteReport.nothing_of(n)
            wanted = is_wanted()
            at = np.flatnonzero(wanted)
            try:
                reservation = self.index.reserve(batch.names[at])
            except CapacityError:
                return WriteReport.nothing_of(n)
            with reservation:
                self.counters.evicted += len(reservation.evicted)
                fresh = reservation.slots >= 0
                todo = at[fresh]
                written, present = nothing.copy(), nothing.copy()
                present[at[~fresh]] = True
                if len(todo):
                    chosen, there = batch[todo], [blocks[i] for i in todo]
                    await self._encode(chosen, there)
                    slots = reservation.slots[fresh]
                    self._writing[write] = chosen.names, slots
                    call = self.backend.write(self.group, slots, chosen.names, there)
                    outcomes = await self._call(call, len(todo), "write", on_late)
                    written[todo] = [outcome is Outcome.STORED for outcome in outcomes]
                    with reservation.commit(written[at]) as lease:
                        evicted_meanwhile = slots[written[todo] & (lease.slots[fresh] < 0)]
                    if len(evicted_meanwhile):  # the medium remembers them now, and they must not outlive a crash
                        self._forget_later(evicted_meanwhile)
                return WriteReport(written, present, ~wanted)
        finally:
            self._writing.pop(write, None)
            give_back()

    def touch(self, batch: Batch) -> None:
        """See `StorageTier.touch`."""
        self.index.touch(batch.names)

    def remove(self, names: Names) -> None:
        """Make blocks unfindable at once, and have the medium forget them in a task of the cache."""
        slots, _ = self.index.find(names)
        self.index.remove(names)
        self._forget_later(slots[slots >= 0])

    async def forget(self, batch: Batch) -> int:
        """See `StorageTier.forget`."""
        slots, _ = self.index.find(batch.names)
        num_removed = self.index.remove(batch.names)
        await self._forget_slots(slots[slots >= 0])
        return num_removed

    def _forget_later(self, slots: NDArray[np.int64]) -> None:
        """Let the medium forget slots in a task of the cache: no transfer keeps its buffers for it."""
        self._tasks.spawn(self._forget_slots(slots), f"forget {len(slots)} blocks of {self.name}")

    async def _forget_slots(self, slots: NDArray[np.int64]) -> None:
        # Should it fail, the index has forgotten all the same: only a restart could bring the blocks back.
        if len(slots):
            await self._note("forget", len(slots), lambda: self.backend.forget(self.group, slots), _ignore)

    async def clear(self) -> None:
        """Forget every block, after a restart too."""
        self.index.clear()
        await self.checkpoint(sync=False)

    async def checkpoint(self, *, sync: bool) -> None:
        """Let the medium remember which blocks it holds, in order of use. Never raises for the tier.

        Nobody waits for one that is late: it goes on in a task of the cache. A cancellation ends it.
        """
        late = asyncio.get_running_loop().create_future()

        def on_late() -> None:
            late.set_result(None)

        noting = self._tasks.spawn(self._checkpoint(on_late, sync=sync), f"checkpoint {self.name}")
        try:
            await asyncio.wait({noting, late}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            noting.cancel()
            raise

    async def _checkpoint(self, on_late: Callable[[], None], *, sync: bool) -> None:
        def write() -> Awaitable[None]:
            names, slots = self.index.names_in_order()
            # What is being written is listed too: it is verified when read, and would else be lost to a restart.
            writing = [
                (each[still], at[still])
                for each, at in self._writing.values()
                if (still := (self.index.find(each)[0] == at) & ~self.index.ready(each)).any()
            ]
            names = np.concatenate([names, *(each[0] for each in writing)])
            slots = np.concatenate([slots, *(each[1] for each in writing)])
            return self.backend.checkpoint(self.group, names, slots, sync=sync)

        await self._note("checkpoint", self.index.statistics().ready, write, on_late)

    async def _note(
        self, doing: str, num_blocks: int, call: Callable[[], Awaitable[None]], on_late: Callable[[], None]
    ) -> None:
        """Make a call that changes what the medium remembers, when its turn has come: given up if that takes long."""
        try:
            async with asyncio.timeout(self.health.timeout_s):
                await self._journal.acquire()
        except TimeoutError:
            error = f"its turn has not come within {self.health.timeout_s:g} s: another call hangs"
            self.health.emit(TierFailed(self.name, doing, error, num_blocks))
            return
        try:
            await self.health.timed(call(), doing, on_late)
            self.health.went(doing, well=True)
        except Exception as caught:  # noqa: BLE001 - whatever a medium raises, serving goes on without it
            self.health.went(doing, well=False)
            self.health.emit(TierFailed(self.name, doing, f"{type(caught).__name__}: {caught}", num_blocks))
        finally:
            self._journal.release()


class KeyedTier(StorageTier):
    """A `Backend`: it finds and evicts for itself."""

    def __init__(
        self,
        health: StorageHealth,
        settings: TierSettings,
        group: int,
        shape: RecordShape,
        budget: Budget,
        codec_threads: WorkerPool,
        tasks: Tasks,
        backend: Backend,
    ) -> None:
        super().__init__(health, settings, group, shape, budget, codec_threads, tasks)
        self.backend = backend
        self.suspects = Suspects(health.clock)

    async def find(self, batch: Batch) -> Mask:
        """See `StorageTier.find`. What could not be read lately is absent."""
        found = np.zeros(len(batch), np.bool_)
        asked = np.flatnonzero(~self.suspects.absent(batch.names))
        if self.health.is_bypassed or not len(asked):
            return found
        try:
            n = await self.health.timed(self.backend.lookup_prefix(batch[asked].keys()), "lookup", _ignore)
            found[asked[:n]] = True
            self.health.went("lookup", well=True)
        except Exception as caught:  # noqa: BLE001 - whatever a medium raises, serving goes on without it
            self.health.went("lookup", well=False)
            self.health.emit(TierFailed(self.name, "lookup", f"{type(caught).__name__}: {caught}", len(batch)))
        return found

    async def read(self, batch: Batch, blocks: list[Block], ticket: Ticket, on_late: Callable[[], None]) -> Mask:
        """See `StorageTier.read`. A block that is broken twice is deleted; until then a store may repair it."""
        give_back = await self._take(len(batch), ticket)
        try:
            if self.health.is_bypassed:
                on_late()
                return np.zeros(len(batch), np.bool_)
            keys = batch.keys()
            started = asyncio.get_running_loop().time()
            outcomes = await self._call(self.backend.read(keys, blocks), len(keys), "read", on_late)
            self.load_rate.saw(self._num_bytes(len(batch)), asyncio.get_running_loop().time() - started)
            outcomes = await self._verify(keys, blocks, outcomes)
            broken = np.array([outcome is Outcome.CORRUPT for outcome in outcomes])
            if broken.any():
                self.health.emit(BlocksCorrupted(self.name, int(broken.sum())))
            if (twice := self.suspects.saw(batch.names, outcomes)).any():
                self._forget_later(batch[twice])
        finally:
            give_back()
        return np.array([outcome is Outcome.HIT for outcome in outcomes])

    async def write(
        self,
        batch: Batch,
        blocks: list[Block],
        is_wanted: Callable[[], Mask],
        on_late: Callable[[], None],
        priority: Priority,
    ) -> WriteReport:
        """See `StorageTier.write`."""
        n = len(batch)
        nothing = np.zeros(n, np.bool_)
        give_back = await self._take(n, Ticket(priority))
        try:
            if self.health.is_shedding:
                return WriteReport.nothing_of(n)
            wanted = is_wanted()
            at = np.flatnonzero(wanted)
            written, dropped = nothing.copy(), ~wanted
            if len(at):
                there = [blocks[i] for i in at]
                keys = await self._encode(batch[at], there)
                outcomes = await self._call(self.backend.write(keys, there), len(at), "write", on_late)
                written[at] = [outcome is Outcome.STORED for outcome in outcomes]
                self.suspects.wrote(batch.names[written])
                dropped[at] = [outcome is Outcome.REFUSED for outcome in outcomes]
                evicted_meanwhile = written & ~is_wanted()
                if evicted_meanwhile.any():
                    self._forget_later(batch[evicted_meanwhile])
            return WriteReport(written, nothing, dropped)
        finally:
            give_back()

    def touch(self, batch: Batch) -> None:
        """See `StorageTier.touch`: such a medium keeps its own recency, by what is read."""

    async def forget(self, batch: Batch) -> int:
        """See `StorageTier.forget`."""
        try:
            await self.health.timed(self.backend.delete(batch.keys()), "delete", _ignore)
            self.health.went("delete", well=True)
        except Exception as caught:  # noqa: BLE001 - a shared medium may be away; its TTL will do it
            self.health.went("delete", well=False)
            self.health.emit(TierFailed(self.name, "delete", f"{type(caught).__name__}: {caught}", len(batch)))
            return 0
        return len(batch)

    def _forget_later(self, batch: Batch) -> None:
        """Delete blocks in a task of the cache: no transfer keeps its buffers for it."""
        self._tasks.spawn(self.forget(batch), f"delete {len(batch)} blocks of {self.name}")


def _verify_hits(
    keys: Sequence[BlockKey], blocks: Sequence[Block], outcomes: Sequence[Outcome], shape: RecordShape
) -> list[Outcome]:
    return [
        verify(key, block, codec=shape.codec) if outcome is Outcome.HIT else outcome
        for key, block, outcome in zip(keys, blocks, outcomes, strict=True)
    ]


def _encode_all(keys: Sequence[BlockKey], blocks: Sequence[Block], shape: RecordShape) -> None:
    for key, block in zip(keys, blocks, strict=True):
        encode(key, block, codec=shape.codec, decoded_bytes=shape.decoded_bytes)


def _ignore() -> None:
    pass
