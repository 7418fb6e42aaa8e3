"""An engine of several ranks: its scheduler plans for all of them, and a worker of each moves its part of every block.

The scheduler is a process with a cache of its own, in which each rank has its part of host memory; workers are
processes too, that are late, die in the middle, get a plan or lose it. Parts of one block differ, so that whoever is
served another rank's part, or a slot that is another's by now, is found out. Below is the store that all share.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered_kv.cache.tiered_kv import TieredKV
from tiered_kv.testing.simulation.acting import scene
from tiered_kv.testing.simulation.engine import Memory, span
from tiered_kv.testing.simulation.known import WrongAnswer, names_of, within
from tiered_kv.testing.simulation.planned_jobs import Planning, WorkerProcess
from tiered_kv.testing.simulation.threads import SimulatedProcess
from tiered_kv.testing.simulation.world import LONGEST_S, TIMEOUT_S, World, what_is_held
from tiered_kv.values.errors import BackendUnavailableError
from tiered_kv.values.keys import BlockKeys, Shard

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.requester import Numbers
    from tiered_kv.testing.simulation.workload import Requests

NUM_RANKS: Final = 2
_DRIVERS: Final = 3
_REQUESTS: Final = 6
"""Of each driver."""
_CALLS: Final = ("load", "load", "store", "store", "store", "evict", "lookup", "flush", "wait", "lose")
_PROMPTS: Final = (0, 4, 5)
"""Two tenants' blocks of the same hashes, and those of another KV group: few, so that most are there."""
_LATE_S: Final = (0.0, 0.0, 0.01, 0.3, 4.0)
"""How long a worker does something else before it does what is planned, and before it says that it has."""


@scene(lambda _: True, alone=5)
async def plan_for_ranks(requests: "Requests", numbers: "Numbers") -> None:
    """An engine of several ranks loads and stores by plans: every rank has its part of a block, or none is used.

    In one of four two workers hold each part.
    """
    world = requests.world
    if world.scheduler is not None and not (world.scheduler.is_dead or world.scheduler.has_ended):
        return  # what one evicts another would store again

    async def main(process: SimulatedProcess) -> None:
        device = world.device(process)
        shape = replace(requests.shape, chain=("cpu", "store"), cpu_slots=(10, 20, 40)[numbers[1] % 3])
        copies = 2 if numbers[2] % 4 == 0 else 1
        shard = Shard.every(NUM_RANKS, copies=copies)
        cache = world.new_cache(process, shape, device, requests.weights, shard=shard)
        world.bury(cache, device, asyncio.current_task())
        await _Scheduler(world, cache, requests.weights, copies).serve()

    world.scheduler = world.start_process(f"scheduler {world.number()}", main)
    await world.until_ended(world.scheduler)


class _Scheduler:
    """A scheduler without tensors: it plans, has workers carry plans out, and looks at what has become of blocks."""

    def __init__(self, world: World, cache: TieredKV, weights: str, copies: int) -> None:
        self._world = world
        self._cache = cache
        self._weights = weights
        self._known = world.known_of_ranks
        self._known.restarted(lost_power=False)
        self._ranks = [
            WorkerProcess(world, f"rank {n}", Memory(), rank=n, version=f" of rank {n // copies}", late_s=_LATE_S)
            for n in range(NUM_RANKS * copies)
        ]
        self._began = world.turns.now

    async def serve(self) -> None:
        """Open the cache, plan beside each other, see that nothing is held in the end, and close it."""
        try:
            await self._cache.__aenter__()
        except BackendUnavailableError:
            if not self._world.may_have_been_wrong(self._began):
                raise
            return
        self._planning = Planning(self._world, self._cache.planner(), self._ranks, self._known)
        try:
            await asyncio.gather(*(self._drive() for _ in range(_DRIVERS)))
            await within(LONGEST_S, "the end of a scheduler's transfers", self._settle())
        finally:
            await asyncio.sleep(0.001)  # who has just been started finds its memory
            await within(LONGEST_S, "closing of a scheduler", self._cache.aclose())
            self._planning.give_up()

    async def _drive(self) -> None:
        tape = self._world.tape
        for _ in range(_REQUESTS):
            if self._world.is_over:
                return
            self._world.num_steps += 1
            what, numbers = tape.pick("plan", _CALLS), [tape.draw("plan", 1 << 16) for _ in range(4)]
            keys = span((_PROMPTS[numbers[0] % len(_PROMPTS)], *numbers[1:3]))
            self._world.tell(f"{what} {' '.join(str(number % 97) for number in numbers)}")
            await self._request(what, keys, numbers)

    async def _request(self, what: str, keys: BlockKeys, numbers: Sequence[int]) -> None:
        known, names = self._known, names_of(keys, self._weights)
        if what == "wait":
            await asyncio.sleep(0.01 * (numbers[2] % 20))
        elif what == "flush":
            await within(LONGEST_S, "flush of a scheduler", self._cache.flush())
        elif what == "lose":
            self._lose_part(Shard(numbers[0] % NUM_RANKS, NUM_RANKS))
            await within(TIMEOUT_S, "evict of a scheduler", self._cache.evict(keys, tier="cpu"))
        elif what == "lookup":
            asked = known.ask(names)
            found = await within(LONGEST_S, "lookup of a scheduler", self._cache.lookup(keys))
            known.check(asked, np.arange(len(keys)) < found.num_blocks, "a lookup of all ranks")
        elif what == "evict":
            known.removing(names)
            since = known.moment()
            result = await within(TIMEOUT_S + 0.3, "evict of a scheduler", self._cache.evict(keys))
            known.removed(names, since, self._world.turns.now, "evicted", weakly=bool(result.kept_by))
        else:
            await self._planning.one(keys, self._weights, is_load=what == "load")

    def _lose_part(self, shard: Shard) -> None:
        """Have the store lose half of what one rank has there, as stores do that are full; hidden names say of none."""
        store = self._world.store
        for path in [path for path in store.records if f"/{shard}/" in path]:
            if self._world.tape.chance("plan", 0.5):
                store.drop(path)

    async def _settle(self) -> None:
        """Let everything end: then nothing is held, whatever has become of workers."""
        await self._cache.flush()
        if self._world.may_have_been_wrong(self._began) or self._world.may_be_late:
            return
        while (stats := self._cache.stats()).transfers or any(tier.dirty for tier in stats.tiers):
            await asyncio.sleep(1.0)
            await self._cache.flush()
        if not self._world.may_have_been_wrong(self._began) and (held := what_is_held(stats)):
            raise WrongAnswer("leak", "; ".join(held))
