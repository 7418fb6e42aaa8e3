"""Other caches beside an engine's: one that wants the same directory, and one that shares a store."""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered_kv.cache.tiered_kv import TieredKV
from tiered_kv.testing.simulation.acting import scene
from tiered_kv.testing.simulation.engine import Memory, span
from tiered_kv.testing.simulation.known import WrongAnswer, names_of
from tiered_kv.testing.simulation.threads import SimulatedProcess
from tiered_kv.testing.simulation.world import World
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.requester import Numbers
    from tiered_kv.testing.simulation.workload import Requests

_MOST_REQUESTS: Final = 16
_CALLS: Final = ("load", "load", "store", "store", "evict", "lookup", "wait", "wait")


@scene(lambda shape: shape.has_neighbours and shape.has("nvme"))
async def open_beside(requests: "Requests", _: "Numbers") -> None:
    """Another process opens a cache on the same directory: it is told that somebody has it."""
    world = requests.world

    async def main(process: SimulatedProcess) -> None:
        device = world.device(process)
        cache = world.new_cache(process, requests.shape, device, requests.weights)
        world.bury(cache, device, asyncio.current_task())
        try:
            await cache.__aenter__()
        except (BackendUnavailableError, ConfigurationError):
            return
        has_ended = requests.process.is_dead or requests.process.has_ended or world.trouble.is_stale
        lets_go = requests.shape.num_disks > 1 and world.may_be_wrong  # of several that fail, even if all of them do
        if not (has_ended or lets_go):
            raise WrongAnswer("two owners", "two caches have one directory")
        await cache.aclose()

    await world.until_ended(world.start_process("another owner", main))


@scene(lambda shape: shape.has_neighbours and shape.has("store"))
async def share_store(requests: "Requests", numbers: "Numbers") -> None:
    """Another engine has the same store below, and goes on beside this one until it ends or dies."""
    world = requests.world
    world.has_neighbour = True

    async def main(process: SimulatedProcess) -> None:
        device = world.device(process)
        shape = replace(requests.shape, chain=("cpu", "store"), cpu_slots=6, writes_back=bool(numbers[2] % 2))
        cache = world.new_cache(process, shape, device, requests.weights)
        world.bury(cache, device, asyncio.current_task())
        await _Neighbour(world, cache, requests.weights).serve()

    process = world.start_process("a neighbour", main)
    if numbers[1] % 3 == 0:
        await asyncio.sleep(0.01 * (numbers[3] % 40))
        if not process.has_ended:
            world.tell("the neighbour is killed")
            world.turns.kill(process)
    await world.until_ended(process)


class _Neighbour:
    """An engine of another process. What it is served is right; what it stores may be found by others."""

    def __init__(self, world: World, cache: TieredKV, weights: str) -> None:
        self._world = world
        self._cache = cache
        self._weights = weights
        self._memory = Memory()

    async def serve(self) -> None:
        """Open the cache, make requests one after another, and close it."""
        world, tape, started = self._world, self._world.tape, self._world.turns.now
        try:
            await self._cache.__aenter__()
        except BackendUnavailableError:
            if not world.may_have_been_wrong(started):
                raise
            return
        for group, caches in enumerate(self._memory.caches):
            self._cache.register_kv_caches(caches, group=group)
        for _ in range(_MOST_REQUESTS):
            numbers = tuple(tape.draw("plan", 1 << 16) for _ in range(4))
            await self._request(tape.pick("plan", _CALLS), numbers)
        await self._cache.aclose()

    async def _request(self, what: str, numbers: tuple[int, ...]) -> None:
        keys, known, now = span(numbers), self._world.known, self._world.turns.now
        names = names_of(keys, self._weights)
        self._world.tell(f"{what} {' '.join(str(number % 97) for number in numbers)}")
        if what == "wait":
            await asyncio.sleep(0.01 * (numbers[3] % 20))
        elif what == "lookup":
            await self._cache.lookup(keys)
        elif what == "evict":
            await self._cache.evict(keys)
        elif what == "store":
            source = self._memory.fill(keys, self._weights, 0)
            known.store_begins(names, now)
            await self._cache.store(keys, source)
            known.store_ends(names, self._world.turns.now, is_whole=False)
        else:
            loaded = await self._cache.load(keys, self._memory.at(keys, 0))
            self._memory.check(keys, self._weights, 0, loaded.mask, "a neighbour's load")
            if (found := np.flatnonzero(loaded.mask & ~known.were_stored(names))).size:
                raise WrongAnswer("came back", f"a neighbour's load found blocks {found}, which were never stored")
        self._memory.poison(0)
