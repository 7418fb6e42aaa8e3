"""Loads and stores of a simulated engine, in every form there is, and what must be true of each."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from tiered_kv.testing.scripted import ScriptedEvent
from tiered_kv.testing.simulation.engine import PROMPTS, STRIDE, span
from tiered_kv.testing.simulation.known import Asked, Name, WrongAnswer, names_of
from tiered_kv.testing.simulation.requester import COPIES_S, Numbers, Requester
from tiered_kv.testing.simulation.world import LIMITS, LONGEST_S
from tiered_kv.tiers.gate import Priority
from tiered_kv.transfers.handles import LoadHandle
from tiered_kv.transfers.submissions import Ticket
from tiered_kv.values.errors import ClosedError
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.results import LoadResult, StoreResult
from tiered_kv.values.specs import EngineBlocks

T = TypeVar("T")
_OWN_S: Final = 1.0
"""What a load takes at most of tiers that answer in milliseconds, whatever other tiers do."""


class Transferring(Requester):
    """An engine that loads and stores: at once, layer by layer, from threads, out of pools, cancelled."""

    async def _load(self, numbers: Numbers) -> None:
        await self.transfer(span(numbers), numbers, is_load=True)

    async def _store(self, numbers: Numbers) -> None:
        await self.transfer(span(numbers), numbers, is_load=False)

    async def _start(self, numbers: Numbers) -> None:
        await self.transfer(span(numbers), numbers, is_load=numbers[3] % 2 == 0, form="layers")

    async def _submit(self, numbers: Numbers) -> None:
        await self.transfer(span(numbers), numbers, is_load=numbers[3] % 2 == 0, form="thread")

    async def _swap_out(self, numbers: Numbers) -> None:
        if (region := self.memory.take()) is None:
            return
        keys, known = span(numbers), self.world.known
        names = names_of(keys, self.weights)
        self._asked["store"] += len(keys)
        known.store_begins(names, self.now)
        try:
            source = self.memory.fill(keys, self.weights, region)
            await self.kv.swap_out(keys, source, ttl_s=3.0)  # type: ignore[arg-type]  # pages
        finally:
            known.store_ends(names, self.now, is_whole=False, may_be_lost=self.may_be_lost())
            self.memory.give(region)

    async def transfer(self, keys: BlockKeys, numbers: Numbers, *, is_load: bool, form: str = "") -> None:
        """Load or store, perhaps by layers or from a thread, from a pool, behind an event, with gaps, cancelled."""
        if (region := self.memory.take()) is None:
            await asyncio.sleep(0.01)
            return
        in_pool, began = numbers[3] % 7 == 0 and form != "layers", self.now
        try:
            move = self._loads if is_load else self._stores
            task = asyncio.ensure_future(move(keys, region, numbers, in_pool=in_pool, form=form))
            if is_cancelled := numbers[3] % 5 == 1 and form != "thread":
                for _ in range(numbers[2] % 40):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.wait({task}, timeout=LONGEST_S)
            if not task.done() and self._may_wait_for_medium(in_pool=in_pool, since=began):
                self.world.end_trouble()  # a disk that hangs has the engine's memory
                await asyncio.wait({task}, timeout=LONGEST_S)
            if not task.done():
                raise WrongAnswer("never ends", f"{'load' if is_load else 'store'} of {len(keys)} blocks")
            if not task.cancelled():
                task.result()
            elif not is_cancelled:
                raise WrongAnswer("cancelled", "a transfer was cancelled by nobody")
        except ClosedError:
            if not (self.ending and form == "thread"):  # which may come too late
                raise
        finally:
            self._computing.pop(region, None)
            self.memory.give(region)

    def _may_wait_for_medium(self, *, in_pool: bool, since: float) -> bool:
        """Whether a transfer may end late: media that were late have memory of the engine's own until they let go.

        A call that stalls goes on after the trouble, and others wait behind it.
        """
        world = self.world
        was_late = world.trouble.ended >= since or any(disk.stalls_until >= since for disk in world.disks)
        return in_pool and self.shape.has_direct_pools and (world.may_be_late or was_late)

    def _event(self, numbers: Numbers, region: int, before: Callable[[], object]) -> ScriptedEvent | None:
        """Return an event that a transfer waits for, or none: it fires in a while, or much later, after ``before``.

        That is not called any more where the transfer has ended, as the region may be another's.
        """
        if numbers[1] % 6:
            return None
        event = self._computing[region] = ScriptedEvent()

        def fire() -> None:
            if self._computing.get(region) is event:
                before()
            event.fire()

        delay_s = (0.0, 0.2, 1.0, 8.0)[numbers[0] % 4]
        self.copies_until = max(self.copies_until, self.now + delay_s)
        asyncio.get_running_loop().call_later(delay_s, fire)
        return event

    def _see_untouched(self, region: int) -> None:
        """The engine still computes on these blocks: nobody is to write there yet."""
        if not self.memory.is_poisoned(region):
            self.world.fail(WrongAnswer("too early", f"a load wrote to region {region} before its event"))

    async def _loads(self, keys: BlockKeys, region: int, numbers: Numbers, *, in_pool: bool, form: str) -> None:
        known, weights = self.world.known, self.weights
        names = names_of(keys, weights)
        asked, started = known.ask(names), self.now
        event = self._event(numbers, region, partial(self._see_untouched, region))
        known.used(names, self.now)
        way = form if form == "layers" else {0: "gaps", 1: "back"}.get(numbers[2] % 8, "")
        deadline_s = (None, None, None, 0.0, 0.5)[numbers[3] % 5]
        self._asked["load"] += len(keys)
        num_epochs, were_in_use = self.num_epochs, self.are_in_use
        into = self.memory.at(keys, region, in_pool=in_pool)
        priority = Priority.PREFETCH if numbers[3] % 11 == 0 else Priority.LOAD
        how: dict[str, Any] = {"after": event, "deadline_s": deadline_s, "priority": priority, "gaps": way == "gaps"}
        if form == "thread":
            result = await self._in_a_thread(lambda: self.kv.submit_load(keys, into, **how))
        else:
            how["order"] = "back" if way == "back" else "front"
            handle = self.kv.start_load(keys, into, layerwise=form == "layers", **how)
            result = await self._not_overtaken(handle, weights)
        limit_s = LIMITS.load_timeout_s if deadline_s is None else deadline_s
        self.check_load(asked, keys, region, result, weights, in_pool=in_pool)
        self._check_took(started, limit_s, f"a {form} load", in_pool=in_pool)
        known.used(names, self.now)
        known.loaded(name for name, is_there in zip(names, result.mask, strict=True) if is_there)
        is_in_reach = not in_pool or not self.shape.has("gpu")  # no copy goes from the pool to host memory
        is_free = event is None and deadline_s is None and num_epochs == self.num_epochs
        if is_free and is_in_reach:
            self._check_reach(asked, names, result, self.now - started, is_prefix=not way and were_in_use)

    async def _not_overtaken(self, handle: LoadHandle, weights: str) -> LoadResult:
        """Wait for a load; if other weights are served before it has ended, it brings nothing."""
        self._loading[handle] = weights
        try:
            result = await handle
        finally:
            del self._loading[handle]
            is_overtaken = handle in self._overtaken
            self._overtaken.discard(handle)
        if is_overtaken and result.mask.any():
            raise WrongAnswer("overtaken", f"{result.num_blocks} blocks of other weights than are served now")
        return result

    def _check_took(self, started: float, limit_s: float, what: str, *, in_pool: bool) -> None:
        """A transfer ends in time."""
        took_s = self.now - started
        if took_s > limit_s + COPIES_S and not self._may_wait_for_medium(in_pool=in_pool, since=started):
            raise WrongAnswer("late", f"{what} took {took_s:.2f} s of {limit_s:g} s")

    def check_load(
        self, asked: Asked, keys: BlockKeys, region: int, result: LoadResult, weights: str, *, in_pool: bool
    ) -> None:
        """Every block that is in place is right, and may be there."""
        self.memory.check(keys, weights, region, result.mask, f"a load of {len(keys)}", in_pool=in_pool)
        self.world.known.check(asked, result.mask, "a load")
        if sum(result.by_tier.values()) != int(np.count_nonzero(result.mask)):
            raise WrongAnswer("counts", f"{result.by_tier} is not {result.num_blocks} blocks")

    def _check_reach(
        self, asked: Asked, names: list[Name], result: LoadResult, took_s: float, *, is_prefix: bool
    ) -> None:
        """A load brings what was promised to be there, and says why where it does not; no other tier delays it.

        ``is_prefix``: that promise is looked at. All tiers were in use as it began, and it is of a prefix.
        """
        if self.world.may_be_late:
            return
        served = set(result.by_tier)
        is_explained = self.now - took_s < self.copies_until  # it may wait for blocks that a store is to copy then
        is_near = served <= {"gpu", "cpu", "nvme"} and result.num_blocks == len(names)
        if is_near and took_s > _OWN_S and not is_explained:
            raise WrongAnswer("delayed", f"a load of {len(names)} blocks from {sorted(served)} took {took_s:.2f} s")
        still = self.world.known.kept_of(names)
        kept = [bool(before and now) for before, now in zip(asked.kept, still, strict=True)]
        num_kept = [*kept, False].index(False)
        if is_prefix and result.num_blocks < num_kept and self.are_in_use:
            raise WrongAnswer("lost", f"{result.num_blocks} of {num_kept} blocks came that were kept: {result.faults}")

    async def _stores(self, keys: BlockKeys, region: int, numbers: Numbers, *, in_pool: bool, form: str) -> None:
        known, weights, started, num_removals = self.world.known, self.weights, self.now, self.num_removals
        names = names_of(keys, weights)
        source = self.memory.at(keys, region, in_pool=in_pool)

        def compute() -> None:
            self.memory.fill(keys, weights, region, in_pool=in_pool)
            known.computed(names)

        event = self._event(numbers, region, compute)
        self._asked["store"] += len(keys)
        known.store_begins(names, self.now, is_computed=False)
        if event is None:
            compute()
        is_whole = False
        try:
            hint = ReuseHint(0.0) if numbers[2] % 13 == 0 else None
            result = await self._stored(keys, source, form, {"after": event, "hint": hint})
            is_whole = result.num_dropped == 0
        finally:
            is_use, may_be_lost = numbers[2] % 13 > 0, self.may_be_lost(is_told=is_whole)
            known.store_ends(names, self.now, is_whole=is_whole, is_use=is_use, may_be_lost=may_be_lost)
        self._settles(names, result)
        queued, most_queued = self.kv.stats().store_queue_bytes, max(self.shape.queue_bytes, len(PROMPTS[0]) * STRIDE)
        if queued > most_queued:
            raise WrongAnswer("limit", f"{queued} bytes wait to be written, {most_queued} at most")
        if result.num_stored + result.num_present + result.num_dropped != len(keys):
            raise WrongAnswer("counts", f"{result} of {len(keys)} blocks")
        self._check_took(started, LIMITS.store_timeout_s, f"a {form} store", in_pool=in_pool)
        if self.keeps_in_memory() and num_removals == self.num_removals and not self.world.may_be_late:
            known.remember(names)
        if numbers[2] % 3 == 0:
            settled = await self.within(LONGEST_S, "settled()", result.settled())
            for tier in settled:
                if tier.written + tier.present + tier.deferred + tier.dropped + tier.failed != len(keys):
                    raise WrongAnswer("counts", f"{tier} of {len(keys)} blocks")

    async def _stored(self, keys: BlockKeys, source: EngineBlocks, form: str, how: dict[str, Any]) -> StoreResult:
        if form == "thread":
            return await self._in_a_thread(lambda: self.kv.submit_store(keys, source, **how))
        handle = self.kv.start_store(keys, source, layerwise=form == "layers", **how)
        for layer in (1, 0) if form == "layers" else ():
            handle.store_layer(layer)
        return await handle

    def _settles(self, names: list[Name], result: StoreResult) -> None:
        """Take note of what a store says once it has settled: of what was lost on its way nothing is promised."""
        self._settling.append((asyncio.ensure_future(result.settled()), names))

    async def _in_a_thread(self, submit: Callable[[], Ticket[T]]) -> T:
        """Load or store from a thread of the engine's. No other weights are named before it has begun.

        It polls, or waits for what it has submitted where another one polls, who might be told in its place.
        """
        loop, kv = asyncio.get_running_loop(), self.kv
        ended: asyncio.Future[T] = loop.create_future()
        self._num_beginning += 1

        def tell(result: T | None, error: Exception | None) -> None:
            if ended.done():
                return
            if error is not None:
                ended.set_exception(error)
            elif result is not None:
                ended.set_result(result)

        def poll(ticket: Ticket[T]) -> None:
            self._is_polled = True
            try:
                while ticket.result is None:
                    kv.poll(LONGEST_S)
            finally:
                self._is_polled = False

        def work() -> None:
            try:
                try:
                    ticket = submit()
                finally:
                    loop.call_soon_threadsafe(self._has_begun)
                if self._is_polled:
                    ticket.wait(LONGEST_S)
                else:
                    poll(ticket)
                loop.call_soon_threadsafe(tell, ticket.result, None)
            except Exception as error:  # noqa: BLE001 - carried to who waits
                loop.call_soon_threadsafe(tell, None, error)

        self.world.start_thread(self.process, work, f"{self.process.name}: submits")
        return await ended
