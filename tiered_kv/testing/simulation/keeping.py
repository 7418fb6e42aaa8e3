"""What takes blocks away from a simulated cache, what promises that they stay, and what is expected after each."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tiered_kv.testing.simulation.engine import STRIDE, span
from tiered_kv.testing.simulation.known import Name, names_of, within
from tiered_kv.testing.simulation.requester import COPIES_S, Numbers, Requester
from tiered_kv.testing.simulation.shapes import NUM_ALL
from tiered_kv.testing.simulation.world import LONGEST_S, TIMEOUT_S, WEIGHTS, World
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError


class Keeping(Requester):
    """An engine that evicts, clears, resizes and names other weights; and one that flushes and drains."""

    async def _evict(self, numbers: Numbers) -> None:
        self.num_removals += 1
        keys, known = span(numbers), self.world.known
        names, since = names_of(keys, self.weights), known.moment()
        tier = self.shape.chain[numbers[3] // 4 % len(self.shape.chain)] if numbers[3] % 4 == 0 else None
        is_from_memory = tier in {"gpu", "cpu"}
        if is_from_memory:
            known.taken_from_memory(names)
        else:
            known.removing(names)
        result = await self.within(TIMEOUT_S + COPIES_S, "evict", self.kv.evict(keys, tier=tier))
        if is_from_memory:
            known.taken_from_memory(names)
        elif tier is not None or (self.world.has_neighbour and self.shape.has("store")):
            known.taken_apart(names)
        else:
            known.removed(names, since, self.now, "evicted", weakly=bool(result.kept_by))

    async def _clear(self, numbers: Numbers) -> None:
        self.num_removals += 1
        if numbers[3] % 3:
            return
        known, since = self.world.known, self.world.known.moment()
        known.removing()
        result = await self.within(TIMEOUT_S + COPIES_S, "clear", self.kv.clear())
        if self.shape.is_owned:
            known.removed(known.all_names(), since, self.now, "cleared", weakly=bool(result.kept_by))

    async def _resize(self, numbers: Numbers, limit_s: float = LONGEST_S) -> None:
        self.num_removals += 1
        tier = ("nvme", "cpu")[numbers[3] % 2]
        if not self.shape.has(tier):
            return
        num_slots = (10, 24, 160, 250)[numbers[2] % 4]
        capacity = World.disk_bytes(num_slots // self.shape.num_disks) if tier == "nvme" else num_slots * STRIDE
        known = self.world.known
        known.taken_apart(known.all_names())
        was_wrong, was_late = self.world.may_be_wrong, self.world.may_be_late
        if num_slots < NUM_ALL:
            self._small.add(tier)
        if tier == "nvme":
            self.disk_bytes = max(self.disk_bytes, capacity)
        self.num_resizing += 1
        try:
            await self.within(limit_s, f"resize of {tier}", self.kv.resize(tier, capacity))
        except (BackendUnavailableError, ConfigurationError):
            if not (was_late or self.world.may_be_late) and tier != "cpu":
                raise
        else:
            if num_slots >= NUM_ALL and self.num_resizing == 1:  # else it may become small after all
                self._small.discard(tier)
            if tier == "nvme" and not was_wrong and not self.world.may_be_wrong:
                self.disk_bytes = capacity
        finally:
            self.num_resizing -= 1

    async def _epoch(self, numbers: Numbers) -> None:
        while self._num_beginning:  # noqa: ASYNC110 - a turn or two of the loop
            await asyncio.sleep(0)
        self.weights = WEIGHTS[numbers[3] % 2]
        self.kv.advance_epoch(self.weights)
        self.num_epochs += 1
        for handle, weights in self._loading.items():
            if not handle.done and weights != self.weights:
                self._overtaken.add(handle)
            elif weights == self.weights:
                self._overtaken.discard(handle)

    async def _flush(self, numbers: Numbers, limit_s: float = LONGEST_S) -> None:
        world, since, sync = self.world, self.world.known.moment(), numbers[3] % 2 == 0
        started, was_wrong, is_told = self.now, world.may_be_wrong, self._media_listen()
        settling = list(self._settling)
        is_all = await self.within(limit_s, "flush", self.kv.flush(sync=sync))
        await self._see_settled(settling)
        if sync and self.shape.is_owned and is_told():
            world.trouble.since_told = False
            world.known.told(started, is_synced=is_all)
        if not was_wrong and not world.may_be_wrong and self.keeps_all():
            why = "synced" if sync else "flushed"
            world.known.keep(world.known.all_names(), since, why, num_uses=self.shape.admit_after)

    async def _see_settled(self, settling: Sequence[tuple["asyncio.Task[Any]", list[Name]]]) -> None:
        """See what became of stores that a flush has waited for."""
        for task, names in settling:
            for tier in await within(LONGEST_S, "settled() of a store that a flush has waited for", task):
                if tier.tier not in {"gpu", "cpu"} and tier.dropped + tier.failed:
                    self.world.known.taken_apart(names)
        self._settling = [each for each in self._settling if each not in settling]

    async def _drain(self, numbers: Numbers, limit_s: float = LONGEST_S) -> None:
        if self.ending or numbers[3] % 2:
            return
        world, known, started = self.world, self.world.known, self.now
        self.ending, since = "drain", known.moment()
        is_written = await self.within(limit_s, "drain", self.kv.drain(timeout_s=5.0))
        world.tell(f"drain says {is_written}")
        if is_written:
            known.told(started)
        if is_written and self.keeps_all():
            uses = self.shape.admit_after
            begun = self._opened_at
            known.keep(known.all_names(), since, "synced", since=begun, num_uses=uses, despite_trouble=True)

    def _media_listen(self) -> Callable[[], bool]:
        """Return what says, after a call, whether no medium has failed or was bypassed meanwhile, and may owe anything.

        A store is bypassed, too, that is asked for more than it can do.
        """
        world, num_faults = self.world, self.world.num_tier_faults
        is_well = not world.may_be_wrong and self.are_in_use
        return lambda: is_well and not world.may_be_wrong and num_faults == world.num_tier_faults
