"""A tier that the cache owns alone: a medium of numbered slots, and the index that says which block is in which."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
from numpy.typing import NDArray

from tiered_kv.backend import Block, Outcome, RecordShape, SlotBackend, TierSettings
from tiered_kv.catalog.books import Change
from tiered_kv.catalog.index import TierIndex
from tiered_kv.errors import CapacityError
from tiered_kv.events import BlocksCorrupted, TierFailed
from tiered_kv.keys import Names
from tiered_kv.tiers.budget import Budget, Priority, Ticket
from tiered_kv.tiers.health import StorageHealth
from tiered_kv.tiers.memory import Batch
from tiered_kv.tiers.storage import Mask, StorageTier, WriteReport, ignore
from tiered_kv.tiers.tasks import Tasks, WorkerPool


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
            await self._note("forget", len(slots), lambda: self.backend.forget(self.group, slots), ignore)

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
