"""What all requests of a simulated engine have in common: whose they are, and what is known of them together."""

import asyncio
from collections.abc import Awaitable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.cache.tiered_kv import SeatCalls, TieredKV
from tiered_kv.memory.host import HostSlab
from tiered_kv.testing.scripted import ScriptedEvent
from tiered_kv.testing.simulation.engine import Memory
from tiered_kv.testing.simulation.known import Name, within
from tiered_kv.testing.simulation.threads import SimulatedProcess
from tiered_kv.testing.simulation.world import World
from tiered_kv.tiers.pins import Pins
from tiered_kv.transfers.handles import LoadHandle
from tiered_kv.values.keys import Shard

COPIES_S: Final = 0.3
"""What is at hand when a call's time is up is still copied."""
Numbers = tuple[int, int, int, int]
"""Of one request: which blocks, and how."""


class Requester:
    """One process's engine and its cache, which may be open.

    Attributes:
        world: All that there is beside them.
        process: Where they run.
        shape: Which tiers the cache has.
        memory: The engine's own.
        device: Its GPU.
        weights: What it computes with now.
        kv: The cache.
        ending: Why no more is asked for; empty while it is.
        disk_bytes: What each disk may have at most, once nothing is in the way.
        num_removals: How often something was asked to go.
        num_epochs: How often other weights were named.
        num_resizing: Resizes that are under way.
        is_alone: Whether a scene is acted beside which nobody begins anything.
        copies_until: Until when some store may not have copied what loads wait for.
    """

    def __init__(self, world: World, process: SimulatedProcess, weights: str) -> None:
        self.world = world
        self.process = process
        self.shape = shape = world.shape
        self.memory = Memory()
        self.device = world.device(process)
        self.weights = weights
        self.kv: TieredKV = world.new_cache(process, shape, self.device, weights)
        self.ending = ""
        self.disk_bytes = world.disk_bytes(shape.disk_slots // shape.num_disks)
        self.num_removals = self.num_epochs = self.num_resizing = 0
        self.is_alone = False
        self._small: set[str] = set()
        self._opened_at = 0
        self._pinned_until = 0.0
        self._loading: dict[LoadHandle, str] = {}
        self._overtaken: set[LoadHandle] = set()
        self._computing: dict[int, ScriptedEvent] = {}
        self.copies_until = 0.0
        self._num_beginning = 0
        self._is_polled = False
        self._asked = {"load": 0, "store": 0}
        self._perhaps = {"load": 0, "store": 0}
        self._settling: list[tuple[asyncio.Task[Any], list[Name]]] = []
        world.bury(self.kv, self, self.device)

    @property
    def has_opened(self) -> bool:
        """Whether its cache was ever open."""
        return self._opened_at > 0

    @property
    def are_in_use(self) -> bool:
        """Whether no tier is bypassed: a call that stalls may outlast the trouble of which it is by half a minute."""
        return not any(tier.open_breakers for tier in self.kv.stats().tiers)

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.world.turns.now

    def slabs(self) -> list[HostSlab]:
        """Return the host memory of its cache, as processes have it that map it."""
        seat = SeatCalls(self.kv, (Shard(0, 1),), b"", Pins(0)).seat
        return [chain.host.slab for chain in seat.chains]

    def rows(self) -> dict[str, NDArray[np.uint8]]:
        """Return the bytes of its slots, by pool."""
        return {slab.name: slab.rows.numpy().view(np.uint8) for slab in self.slabs()}

    async def within(self, limit_s: float, what: str, call: Awaitable[Any]) -> Any:  # noqa: ANN401 - its result
        """Make a call, which is to end in time. No other weights are named before it has begun."""
        task = asyncio.ensure_future(call)
        self._num_beginning += 1
        asyncio.get_running_loop().call_soon(self._has_begun)
        return await within(limit_s, what, task)

    def _has_begun(self) -> None:
        self._num_beginning -= 1

    def count_asked(self, what: str, num_blocks: int, *, is_sure: bool) -> None:
        """Note that a load or store of so many blocks was begun; and whether it is sure to be counted."""
        if is_sure:
            self._asked[what] += num_blocks
        else:
            self._perhaps[what] += num_blocks

    def may_be_lost(self, *, is_told: bool = False, is_planned: bool = False) -> bool:
        """Whether what a store kept in memory may be lost on its way down, and who stored it is not told of that.

        It is while media may fail, where what waits for the cleaner fills the memory that it has to pass, and, of a
        plan or a client of the wire, where the queue of stores is short: no `settled()` says what that has dropped.
        """
        is_short = self.shape.writes_back and not self.shape.keeps_in_memory
        is_dropped = is_planned and self.shape.has_short_queue
        return self.world.may_be_wrong or is_dropped or (is_short and not is_told)

    def keeps_in_memory(self) -> bool:
        """Whether the CPU tier has room for whatever is stored."""
        return self.shape.keeps_in_memory and "cpu" not in self._small and not self.world.has_flooded

    def keeps_all(self) -> bool:
        """Whether the disk or the store has room for whatever is stored, and loses none of it."""
        is_on_disk = self.shape.keeps_all and "nvme" not in self._small and not self.world.has_flooded
        return (is_on_disk or self.shape.keeps_in_store) and not self.world.trouble.has_rot
