"""A tier that finds and evicts for itself, and that others may share: what it says it has, a read decides."""

import asyncio
from collections.abc import Callable

import numpy as np

from tiered_kv.backend import Backend, Block, Outcome, RecordShape, TierSettings
from tiered_kv.events import BlocksCorrupted, TierFailed
from tiered_kv.tiers.budget import Budget, Priority, Ticket
from tiered_kv.tiers.health import StorageHealth
from tiered_kv.tiers.memory import Batch
from tiered_kv.tiers.storage import Mask, StorageTier, WriteReport, ignore
from tiered_kv.tiers.suspects import Suspects
from tiered_kv.tiers.tasks import Tasks, WorkerPool


class SharedTier(StorageTier):
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
            n = await self.health.timed(self.backend.lookup_prefix(batch[asked].keys()), "lookup", ignore)
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
            await self.health.timed(self.backend.delete(batch.keys()), "delete", ignore)
            self.health.went("delete", well=True)
        except Exception as caught:  # noqa: BLE001 - a shared medium may be away; its TTL will do it
            self.health.went("delete", well=False)
            self.health.emit(TierFailed(self.name, "delete", f"{type(caught).__name__}: {caught}", len(batch)))
            return 0
        return len(batch)

    def _forget_later(self, batch: Batch) -> None:
        """Delete blocks in a task of the cache: no transfer keeps its buffers for it."""
        self._tasks.spawn(self.forget(batch), f"delete {len(batch)} blocks of {self.name}")
