"""What the engines of a simulation do, several at once, and what must be true of each answer."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.cache.tiered_kv import TieredKV
from tiered_kv.testing.scripted import ScriptedDevice, ScriptedEvent
from tiered_kv.testing.simulation.engine import PROMPTS, STRIDE, Memory, span
from tiered_kv.testing.simulation.known import Asked, Name, WrongAnswer, names_of
from tiered_kv.testing.simulation.planning import Planning
from tiered_kv.testing.simulation.scenes import scene_for
from tiered_kv.testing.simulation.threads import Process
from tiered_kv.testing.simulation.world import LIMITS, LONGEST_S, Held, Shape, World
from tiered_kv.tiers.gate import Priority
from tiered_kv.values.errors import BackendUnavailableError, ClosedError, ConfigurationError
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.results import BlockState, LoadResult, StoreResult

_COPIES_S: Final = 0.3
"""What is at hand when a transfer's time is up is still copied."""
_OWN_S: Final = 1.0
"""What a load takes at most of tiers that answer in milliseconds, whatever other tiers do."""
_OPS: Final = (
    ("load", 30),
    ("store", 26),
    ("lookup", 4),
    ("start", 6),
    ("submit", 6),
    ("plan", 8),
    ("prefetch", 3),
    ("touch", 3),
    ("pin", 4),
    ("unpin", 2),
    ("lease", 2),
    ("swap_out", 2),
    ("evict", 8),
    ("clear", 1),
    ("resize", 3),
    ("flush", 4),
    ("explain", 1),
    ("stats", 1),
    ("epoch", 1),
    ("wait", 11),
    ("trouble", 3),
    ("calm", 2),
    ("rot", 1),
    ("drain", 1),
    ("reopen", 1),
    ("die", 2),
    ("power", 1),
    ("scene", 10),
)
_NAMES: Final = tuple(name for name, weight in _OPS for _ in range(weight))
WEIGHTS: Final = ("w0", "w1")
Numbers = tuple[int, int, int, int]


@dataclass(frozen=True)
class End:
    """Why a process's cache ended: ``"over"``, ``"reopen"`` or ``"drain"``."""

    why: str


class Requests:
    """The requests of one process's engine, while its cache is open."""

    def __init__(
        self, world: World, process: Process, shape: Shape, memory: Memory, device: ScriptedDevice, weights: str
    ) -> None:
        self.world = world
        self.process = process
        self.shape = shape
        self.memory = memory
        self.device = device
        self.weights = weights
        self.kv: TieredKV = world.new_cache(process, shape, device, weights)
        self.ending = ""
        self.is_small = False
        self._opened_at = 0
        self._num_removals = 0
        self._num_beginning = 0
        self._asked = {"load": 0, "store": 0}
        self._perhaps = {"load": 0, "store": 0}
        self._planning: Planning | None = None
        world.bury(self.kv, self)

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.world.turns.now

    # A process from the opening of its cache to its end.

    async def serve(self, num_drivers: int) -> End:
        """Open the cache, serve requests until enough is done, and close it."""
        world = self.world
        async with asyncio.timeout(LONGEST_S):
            try:
                await self.kv.__aenter__()
            except (BackendUnavailableError, ConfigurationError):
                if not world.may_be_wrong:
                    raise
                world.end_trouble()
                await asyncio.sleep(1.0)
                self.kv = world.new_cache(self.process, self.shape, self.device, self.weights)
                world.bury(self.kv)
                await self.kv.__aenter__()
        world.tell("opened")
        for group, caches in enumerate(self.memory.caches):
            self.kv.register_kv_caches(caches, group=group)
        for group, pool in enumerate(self.memory.pools):
            self.kv.register_host_pool(f"pool{group}", pool, group=group)
        self._opened_at = world.known.moment()
        world.known.opened(self.now)
        self._check_kept()
        self._check_gone()
        try:
            await asyncio.gather(*(self._drive(n) for n in range(num_drivers)))
            if not world.failures:
                await self._settle()
        finally:
            await self._close()
        return End(self.ending or "over")

    def _check_kept(self) -> None:
        """What was promised to survive is there, now that the cache is open again."""
        if self.world.trouble.is_on:
            return
        for prompt in PROMPTS:
            names = names_of(prompt, self.weights)
            for i, why in enumerate(self.world.known.kept_of(names)):
                if why and not self.kv.lookup_nowait(prompt[i : i + 1]).num_blocks:
                    raise WrongAnswer("lost", f"block {i} of a prompt was {why}, and is not there after a restart")

    def _check_gone(self) -> None:
        """What has gone for good is not there, now that the cache is open again; under no weights."""
        known, kv = self.world.known, self.kv
        for weights in sorted(WEIGHTS, key=lambda each: each == self.weights):  # its own last
            kv.advance_epoch(weights)
            for prompt in PROMPTS:
                asked = known.ask(names_of(prompt, weights), self.now)
                found = [bool(kv.lookup_nowait(prompt[i : i + 1]).num_blocks) for i in range(len(prompt))]
                known.check(asked, np.array(found), "after a restart a lookup")

    async def _drive(self, number: int) -> None:
        world, tape = self.world, self.world.tape
        while not world.is_over and not self.ending:
            name = tape.pick("plan", _NAMES)
            a, b, c, d = (tape.draw("plan", 1 << 16) for _ in range(4))
            await self.do(name, (a, b, c, d), by=str(number))

    async def do(self, name: str, numbers: Numbers, *, by: str = "scene", **how: float) -> None:
        """Do one thing, and check what can be checked after each."""
        world = self.world
        world.num_steps += 1
        call = f"{by}: {name}"
        world.tell(f"{call} {' '.join(str(number % 97) for number in numbers)}")
        await getattr(self, f"_{name}")(numbers, **how)
        self._check()
        world.tell(f"{call} done")

    async def _scene(self, numbers: Numbers) -> None:
        scene = scene_for(self.shape, numbers[0])
        self.world.tell(f"scene {scene.__name__}")
        await scene(self, (numbers[0] // 7, *numbers[1:]))

    def _check(self) -> None:
        world = self.world
        if touched := self.memory.touched():
            raise WrongAnswer("foreign memory", f"somebody has written to regions {touched}, which are nobody's")
        if races := self.device.races:
            raise WrongAnswer("race", f"accesses that nothing orders: {races[0]}")
        if self.shape.ttl_s is not None and self.shape.is_owned and not world.trouble.since_told:
            idle_s = 3 * self.shape.ttl_s + 6.0
            world.known.expire(idle_s, self.now, weakly=world.trouble.since_told)
        world.check()

    async def within(self, limit_s: float, what: str, call: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 - its result
        """Make a call, which is to end in time. No other weights are named before it has begun."""
        task = asyncio.ensure_future(call)
        self._num_beginning += 1
        asyncio.get_running_loop().call_soon(self._has_begun)
        await asyncio.wait({task}, timeout=limit_s)
        if not task.done():
            raise WrongAnswer("never ends", f"{what} has not ended after {limit_s:g} s")
        return task.result()

    def _has_begun(self) -> None:
        self._num_beginning -= 1

    async def _settle(self) -> None:
        """Let everything end: then nothing is held, and what was counted adds up."""
        world, kv = self.world, self.kv
        world.end_trouble()
        if self._planning is not None:
            await self.within(LONGEST_S, "the end of planning", self._planning.end())

        async def end() -> None:
            for prompt in PROMPTS:
                kv.unpin(prompt)
            await asyncio.sleep(6.0)  # tiers that were at fault are tried again
            await kv.flush()
            while kv.stats().transfers or any(tier.dirty for tier in kv.stats().tiers):
                await asyncio.sleep(1.0)
                await kv.flush()
            await asyncio.sleep(2.5)  # what is owed to media is made up for

        await self.within(LONGEST_S, "the end of all transfers", end())
        stats = kv.stats()
        if held := Held.of(stats).what:
            raise WrongAnswer("leak", "; ".join(held))
        if sum(tier.hits for tier in stats.tiers) + stats.missed != stats.requested:
            raise WrongAnswer(
                "counts", f"{stats.requested} blocks asked for, {stats.missed} missed, hits do not add up"
            )
        if stats.stored + stats.present + stats.dropped != stats.store_requested:
            raise WrongAnswer("counts", "stores do not add up")
        for what, counted in (("load", stats.requested), ("store", stats.store_requested)):
            if not 0 <= counted - self._asked[what] <= self._perhaps[what]:
                raise WrongAnswer("counts", f"{self._asked[what]} blocks were asked for by {what}s, {counted} counted")
        world.trouble.since_told = False
        world.known.told()

    async def _close(self) -> None:
        if self.process.is_dead:
            return
        await self.within(LONGEST_S, "closing", self.kv.aclose())

    # Loads and stores.

    async def _load(self, numbers: Numbers) -> None:
        await self.transfer(span(numbers), numbers, is_load=True)

    async def _store(self, numbers: Numbers) -> None:
        await self.transfer(span(numbers), numbers, is_load=False)

    async def _start(self, numbers: Numbers) -> None:
        await self.transfer(span(numbers), numbers, is_load=numbers[3] % 2 == 0, is_layerwise=True)

    async def transfer(self, keys: BlockKeys, numbers: Numbers, *, is_load: bool, is_layerwise: bool = False) -> None:
        """Load or store; perhaps from a pool, behind an event, with gaps, from the back, cancelled."""
        if (region := self.memory.take()) is None:
            await asyncio.sleep(0.01)
            return
        in_pool = numbers[3] % 7 == 0 and not is_layerwise
        try:
            move = self._loads if is_load else self._stores
            task = asyncio.ensure_future(move(keys, region, numbers, in_pool=in_pool, is_layerwise=is_layerwise))
            if numbers[3] % 5 == 1:
                for _ in range(numbers[2] % 40):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.wait({task}, timeout=LONGEST_S)
            if not task.done():
                raise WrongAnswer("never ends", f"{'load' if is_load else 'store'} of {len(keys)} blocks")
            if not task.cancelled():
                task.result()
        finally:
            self.memory.give(region)

    def _event(self, numbers: Numbers) -> ScriptedEvent | None:
        """Return an event that a transfer waits for, or none: it fires in a while, or much later."""
        if numbers[1] % 6:
            return None
        event = ScriptedEvent()
        asyncio.get_running_loop().call_later((0.0, 0.2, 1.0, 8.0)[numbers[0] % 4], event.fire)
        return event

    async def _loads(
        self, keys: BlockKeys, region: int, numbers: Numbers, *, in_pool: bool, is_layerwise: bool
    ) -> None:
        known, weights = self.world.known, self.weights
        names = names_of(keys, weights)
        asked, started, event = known.ask(names, self.now), self.now, self._event(numbers)
        known.used(names, self.now)
        way = {0: "gaps", 1: "back"}.get(numbers[2] % 8, "") if not is_layerwise else "layers"
        deadline_s = (None, None, None, 0.0, 0.5)[numbers[3] % 5]
        self._asked["load"] += len(keys)
        handle = self.kv.start_load(
            keys,
            self.memory.at(keys, region, in_pool=in_pool),
            after=event,
            deadline_s=deadline_s,
            priority=Priority.PREFETCH if numbers[3] % 11 == 0 else Priority.LOAD,
            layerwise=is_layerwise,
            gaps=way == "gaps",
            order="back" if way == "back" else "front",
        )
        result = await handle
        limit_s = LIMITS.load_timeout_s if deadline_s is None else deadline_s
        self._check_load(asked, keys, region, result, weights, in_pool=in_pool)
        took_s = self.now - started
        if took_s > limit_s + _COPIES_S:
            raise WrongAnswer("late", f"a load took {took_s:.2f} s of {limit_s:g} s")
        known.used(names, self.now)
        known.loaded(name for name, is_there in zip(names, result.mask, strict=True) if is_there)
        is_in_reach = not in_pool or not self.shape.has("gpu")  # no copy goes from the pool to host memory
        if event is None and deadline_s is None and is_in_reach:
            self._check_reach(asked, names, result, took_s, weights, is_prefix=not way)

    def _check_load(
        self, asked: Asked, keys: BlockKeys, region: int, result: LoadResult, weights: str, *, in_pool: bool
    ) -> None:
        """Every block that is in place is right, and may be there."""
        right = self.memory.are_right(keys, weights, region, in_pool=in_pool)
        if (wrong := np.flatnonzero(result.mask & ~right)).size:
            raise WrongAnswer("wrong bytes", f"blocks {wrong.tolist()} of a load of {len(keys)}")
        self.world.known.check(asked, result.mask, "a load")
        if sum(result.by_tier.values()) != int(np.count_nonzero(result.mask)):
            raise WrongAnswer("counts", f"{result.by_tier} is not {result.num_blocks} blocks")

    def _check_reach(
        self, asked: Asked, names: list[Name], result: LoadResult, took_s: float, weights: str, *, is_prefix: bool
    ) -> None:
        """A load brings what was promised to be there, and says why where it does not; no other tier delays it."""
        if self.world.may_be_late or weights != self.weights:
            return
        served = set(result.by_tier)
        if served <= {"gpu", "cpu", "nvme"} and result.num_blocks == len(names) and took_s > _OWN_S:
            raise WrongAnswer("delayed", f"a load of {len(names)} blocks from {sorted(served)} took {took_s:.2f} s")
        still = self.world.known.kept_of(names)
        kept = [bool(before and now) for before, now in zip(asked.kept, still, strict=True)]
        num_kept = [*kept, False].index(False)
        if is_prefix and result.num_blocks < num_kept:
            raise WrongAnswer("lost", f"{result.num_blocks} of {num_kept} blocks came that were kept: {result.faults}")

    async def _stores(
        self, keys: BlockKeys, region: int, numbers: Numbers, *, in_pool: bool, is_layerwise: bool
    ) -> None:
        known, weights, started, num_removals = self.world.known, self.weights, self.now, self._num_removals
        names = names_of(keys, weights)
        event = self._event(numbers)
        source = self.memory.fill(keys, weights, region, in_pool=in_pool)
        self._asked["store"] += len(keys)
        known.store_begins(names, self.now)
        is_whole = False
        try:
            hint = ReuseHint(0.0) if numbers[2] % 13 == 0 else None
            handle = self.kv.start_store(keys, source, after=event, layerwise=is_layerwise, hint=hint)
            for layer in (1, 0) if is_layerwise else ():
                handle.store_layer(layer)
            result = await handle
            is_whole = result.num_dropped == 0
        finally:
            known.store_ends(names, self.now, is_whole=is_whole, is_use=numbers[2] % 13 > 0)
        self._check_store(result, len(keys), self.now - started)
        if self.shape.keeps_in_memory and num_removals == self._num_removals and not self.world.may_be_late:
            known.remember(names)
        if numbers[2] % 3 == 0:
            settled = await self.within(LONGEST_S, "settled()", _awaited(result.settled))
            for tier in settled:
                if tier.written + tier.present + tier.deferred + tier.dropped + tier.failed != len(keys):
                    raise WrongAnswer("counts", f"{tier} of {len(keys)} blocks")

    def _check_store(self, result: StoreResult, num_keys: int, took_s: float) -> None:
        if result.num_stored + result.num_present + result.num_dropped != num_keys:
            raise WrongAnswer("counts", f"{result} of {num_keys} blocks")
        if took_s > LIMITS.store_timeout_s + _COPIES_S:
            raise WrongAnswer("late", f"a store took {took_s:.2f} s")

    async def _submit(self, numbers: Numbers) -> None:  # noqa: C901 - a load or a store, there and here
        """Load or store from a thread of the engine's, which polls."""
        if (region := self.memory.take()) is None:
            return
        keys, weights, kv, is_load = span(numbers), self.weights, self.kv, numbers[3] % 2 == 0
        names, known, is_whole = names_of(keys, weights), self.world.known, False
        asked, ended = known.ask(names, self.now), asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        self._asked["load" if is_load else "store"] += len(keys)
        known.used(names, self.now)
        if is_load:
            into = self.memory.at(keys, region)
        else:
            into = self.memory.fill(keys, weights, region)
            known.store_begins(names, self.now)

        self._num_beginning += 1  # until the thread has named the blocks by the weights that are served

        def work() -> None:
            try:
                try:
                    ticket = kv.submit_load(keys, into) if is_load else kv.submit_store(keys, into)
                finally:
                    loop.call_soon_threadsafe(self._has_begun)
                while ticket.result is None:
                    kv.poll(0.5)
                loop.call_soon_threadsafe(_tell, ended, ticket.result, None)
            except Exception as error:  # noqa: BLE001 - carried to who waits
                loop.call_soon_threadsafe(_tell, ended, None, error)

        self.world.start_thread(self.process, work, f"{self.process.name}: submits")
        try:
            await asyncio.wait({ended}, timeout=LONGEST_S)
            if not ended.done():
                raise WrongAnswer("never ends", "what a thread has submitted")
            result = ended.result()
            if isinstance(result, LoadResult):
                self._check_load(asked, keys, region, result, weights, in_pool=False)
                known.loaded(name for name, is_there in zip(names, result.mask, strict=True) if is_there)
                known.used(names, self.now)
            else:
                is_whole = result.num_dropped == 0
        except ClosedError:
            if not self.ending:
                raise
        finally:
            if not is_load:
                known.store_ends(names, self.now, is_whole=is_whole)
            self.memory.give(region)

    def count_asked(self, what: str, num_blocks: int, *, is_sure: bool) -> None:
        """Note that a load or store of so many blocks was begun; and whether it is sure to be counted."""
        if is_sure:
            self._asked[what] += num_blocks
        else:
            self._perhaps[what] += num_blocks

    async def _plan(self, numbers: Numbers) -> None:
        """Have a worker load or store what is planned here."""
        if "cpu" not in self.shape.chain:
            return
        if self._planning is None:
            self._planning = Planning(self)
        await self._planning.one(numbers)

    # What is asked and done ahead.

    async def _lookup(self, numbers: Numbers) -> None:
        keys, known = span(numbers), self.world.known
        asked = known.ask(names_of(keys, self.weights), self.now)
        where = numbers[3] % 3 == 0
        found = await self.within(LONGEST_S, "lookup", self.kv.lookup(keys, where=where))
        known.check(asked, np.arange(len(keys)) < found.num_blocks, "a lookup")
        owned = self.kv.lookup_nowait(keys)
        asked = known.ask(names_of(keys, self.weights), self.now)
        known.check(asked, np.arange(len(keys)) < owned.num_blocks, "a lookup of owned tiers")
        states = self.kv.membership(keys)
        known.check(asked, _are_hits(states), "membership")

    async def _prefetch(self, numbers: Numbers) -> None:
        if "cpu" not in self.shape.chain:
            return
        keys = span(numbers)
        self.world.known.used(names_of(keys, self.weights), self.now)
        handle = self.kv.prefetch(keys)
        if numbers[3] % 3 == 0:
            await asyncio.sleep(0)
            handle.cancel()
        elif numbers[3] % 3 == 1:
            return
        task = asyncio.ensure_future(_awaited(lambda: handle))
        await asyncio.wait({task}, timeout=LONGEST_S)
        if not task.done():
            raise WrongAnswer("never ends", "prefetch")
        self.world.known.used(names_of(keys, self.weights), self.now)

    async def _touch(self, numbers: Numbers) -> None:
        keys = span(numbers)
        self.kv.touch(keys, hint=ReuseHint(0.0) if numbers[3] % 4 == 0 else None)

    async def _pin(self, numbers: Numbers) -> None:
        self.kv.pin(span(numbers), ttl_s=(0.5, 5.0, 30.0)[numbers[3] % 3])

    async def _unpin(self, numbers: Numbers) -> None:
        self.kv.unpin(span(numbers))

    async def _lease(self, numbers: Numbers) -> None:
        if "cpu" not in self.shape.chain:
            return
        keys, known = span(numbers), self.world.known

        async def hold() -> None:
            names = names_of(keys, self.weights)
            asked = known.ask(names, self.now)
            known.used(names, self.now)
            async with self.kv.lease(keys) as lease:
                known.check(asked, np.arange(len(keys)) < lease.num_blocks, "a lease")
                await asyncio.sleep((0.0, 0.1, 2.0)[numbers[3] % 3])
            known.used(names, self.now)

        await self.within(LONGEST_S, "lease", hold())

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
            known.store_ends(names, self.now, is_whole=False)
            self.memory.give(region)

    # What goes.

    async def _evict(self, numbers: Numbers) -> None:
        self._num_removals += 1
        keys, known = span(numbers), self.world.known
        names, since = names_of(keys, self.weights), known.moment()
        tier = self.shape.chain[numbers[3] % len(self.shape.chain)] if numbers[3] % 4 == 0 else None
        known.forget_kept(names)
        await self.within(LONGEST_S, "evict", self.kv.evict(keys, tier=tier))
        if tier is None:
            known.removed(names, since, self.now, "evicted", weakly=self._is_weak())

    async def _clear(self, numbers: Numbers) -> None:
        self._num_removals += 1
        if numbers[3] % 3:
            return
        known, since = self.world.known, self.world.known.moment()
        known.forget_kept()
        await self.within(LONGEST_S, "clear", self.kv.clear())
        if self.shape.is_owned:
            known.removed(known.all_names(), since, self.now, "cleared", weakly=self._is_weak())

    def _is_weak(self) -> bool:
        """Whether a restart may bring back what has gone: media that fail may not have been told."""
        return self.world.trouble.since_told or self.world.may_be_wrong

    async def _resize(self, numbers: Numbers, limit_s: float = LONGEST_S) -> None:
        self._num_removals += 1
        tier = ("nvme", "cpu")[numbers[3] % 2]
        if not self.shape.has(tier):
            return
        num_slots = (10, 24, 160, 250)[numbers[2] % 4]
        capacity = World.disk_bytes(num_slots // self.shape.num_disks) if tier == "nvme" else num_slots * STRIDE
        self.world.known.forget_kept()
        self.is_small = tier == "nvme" and num_slots < 160
        try:
            await self.within(limit_s, f"resize of {tier}", self.kv.resize(tier, capacity))
        except (BackendUnavailableError, ConfigurationError):
            if not self.world.may_be_wrong and tier != "cpu":
                raise

    # What is written, and what is told.

    async def _flush(self, numbers: Numbers, limit_s: float = LONGEST_S) -> None:
        world, since, sync = self.world, self.world.known.moment(), numbers[3] % 2 == 0
        was_wrong = world.may_be_wrong
        await self.within(limit_s, "flush", self.kv.flush(sync=sync))
        shape = self.shape
        if sync and not was_wrong and not world.may_be_wrong:
            world.trouble.since_told = False
            world.known.told()
        if was_wrong or world.may_be_wrong or self.is_small or not shape.keeps_all:
            return
        if world.trouble.since_told or world.trouble.has_rot:
            return
        why = "synced" if sync else "flushed"
        world.known.keep(world.known.all_names(), since, why, num_uses=shape.admit_after)

    async def _drain(self, numbers: Numbers, limit_s: float = LONGEST_S) -> None:
        if self.ending or numbers[3] % 2:
            return
        world, shape = self.world, self.shape
        self.ending, since = "drain", world.known.moment()
        is_written = await self.within(limit_s, "drain", self.kv.drain(timeout_s=5.0))
        world.tell(f"drain says {is_written}")
        if is_written and shape.keeps_all and not self.is_small and not world.trouble.has_rot:
            uses = shape.admit_after
            world.known.keep(world.known.all_names(), since, "synced", since=self._opened_at, num_uses=uses)

    async def _explain(self, numbers: Numbers) -> None:
        keys = span(numbers)
        await self.within(LONGEST_S, "explain", self.kv.explain(keys, ask=numbers[3] % 2 == 0))

    async def _stats(self, _: Numbers) -> None:
        self.kv.stats()

    async def _epoch(self, numbers: Numbers) -> None:
        while self._num_beginning:  # noqa: ASYNC110 - a turn or two of the loop
            await asyncio.sleep(0)
        self.weights = WEIGHTS[numbers[3] % 2]
        self.kv.advance_epoch(self.weights)

    async def _wait(self, numbers: Numbers) -> None:
        await asyncio.sleep((0.001, 0.05, 0.7, 2.0, 15.0)[numbers[3] % 5])

    # The world.

    async def _trouble(self, numbers: Numbers) -> None:
        if self.world.trouble.is_settled:
            return
        what = self.world.begin_trouble(numbers[3])
        self.world.known.forget_kept()
        self.world.tell(f"trouble: {what}")

    async def _calm(self, _: Numbers) -> None:
        self.world.end_trouble()

    async def _rot(self, numbers: Numbers) -> None:
        world = self.world
        if world.trouble.is_settled:
            return
        world.known.forget_kept()
        world.trouble.ended = self.now
        world.trouble.has_rot = True
        world.tape.num_faults += 1
        if numbers[3] % 2 and self.shape.has("store"):
            world.store.rot()
        else:
            world.disks[0].rot()

    async def _reopen(self, _: Numbers) -> None:
        self.ending = self.ending or "reopen"

    async def _die(self, numbers: Numbers) -> None:
        self.world.tape.num_faults += 1
        self.world.die_at = self.world.turns.num_turns + 1 + numbers[3] % 300

    async def _power(self, numbers: Numbers) -> None:
        self.world.trouble.lost_power = True
        await self._die(numbers)


async def _awaited(of: Callable[[], Awaitable[Any]]) -> Any:  # noqa: ANN401 - its result
    return await of()


def _are_hits(states: NDArray[np.int8]) -> NDArray[np.bool_]:
    return np.asarray(states == BlockState.HIT, np.bool_)


def _tell(ended: "asyncio.Future[Any]", result: object, error: Exception | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(result)
    else:
        ended.set_exception(error)
