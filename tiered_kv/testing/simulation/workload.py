"""What the engines of a simulation do, several at once, from the opening of a cache to its end."""

import asyncio
from typing import Final

import numpy as np

from tiered_kv.testing.simulation.acting import Acting, Scene, nothing
from tiered_kv.testing.simulation.disk import RECORD_BYTES
from tiered_kv.testing.simulation.engine import PROMPTS, span
from tiered_kv.testing.simulation.known import WrongAnswer, names_of
from tiered_kv.testing.simulation.mirroring import Subscriber
from tiered_kv.testing.simulation.planned_jobs import EnginesPlanning, Planning
from tiered_kv.testing.simulation.requester import Numbers
from tiered_kv.testing.simulation.themes import scene_for, suits
from tiered_kv.testing.simulation.threads import SimulatedProcess
from tiered_kv.testing.simulation.world import LONGEST_S, WEIGHTS, World, what_is_held
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError
from tiered_kv.values.results import CacheStatistics

_OPS: Final = (
    ("load", 30),
    ("store", 26),
    ("lookup", 4),
    ("groups", 3),
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
    ("remember", 1),
    ("drain", 1),
    ("reopen", 1),
    ("die", 2),
    ("power", 1),
    ("scene", 10),
)
_NAMES: Final = tuple(name for name, weight in _OPS for _ in range(weight))
_THEME_ODDS: Final = 0.4
"""Of the scene that a seed is about, for each thing that an engine does."""
_READS_ALL: Final = 0.5
"""How often all that may be there is loaded at an opening."""
_SUBSCRIBES: Final = 0.2
_MOST_UNTOLD: Final = 2
"""Errors of one kind of which nobody hears, as their processes end at that moment."""
_LOOKS_AGAIN_S: Final = 0.05
_LOOKS: Final = 40
"""Within which a scrub, which rests for a second between passes, holds nothing for a moment."""


class Requests(Acting):
    """The requests of one process's engine, while its cache is open."""

    def __init__(self, world: World, process: SimulatedProcess, weights: str, theme: Scene) -> None:
        super().__init__(world, process, weights)
        self._planning: Planning | None = None
        self._subscriber: Subscriber | None = None
        self._theme = theme

    # A process from the opening of its cache to its end.

    async def serve(self, num_drivers: int) -> None:
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
        self._subscriber = Subscriber(self) if world.tape.chance("plan", _SUBSCRIBES) else None
        for group, caches in enumerate(self.memory.caches):
            self.kv.register_kv_caches(caches, group=group)
        for group, pool in enumerate(self.memory.pools):
            self.kv.register_host_pool(f"pool{group}", pool, group=group, direct=self.shape.has_direct_pools)
        self._opened_at = world.known.moment()
        world.known.opened(self.now)
        self._check_kept()
        self._check_gone()
        if world.tape.chance("plan", _READS_ALL):  # what is found is what it is called
            for prompt in range(len(PROMPTS)):
                await self.do("load", (prompt, 2, 10, 2), by="opening")
        try:
            await asyncio.gather(*(self._drive(n) for n in range(num_drivers)))
            if not world.failures:
                await self._settle()
        finally:
            await self._close()

    def _check_kept(self) -> None:
        """What was promised to survive is there, now that the cache is open again."""
        if self.world.trouble.is_on or not self.shape.is_owned:
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
                asked = known.ask(names_of(prompt, weights))
                found = [bool(kv.lookup_nowait(prompt[i : i + 1]).num_blocks) for i in range(len(prompt))]
                known.check(asked, np.array(found), "after a restart a lookup")

    async def _drive(self, number: int) -> None:
        world, tape = self.world, self.world.tape
        while not world.is_over and not self.ending:
            if self.is_alone:
                await asyncio.sleep(_LOOKS_AGAIN_S)
                continue
            is_theme = self._theme is not nothing and tape.chance("plan", _THEME_ODDS)
            name = "of_theme" if is_theme else tape.pick("plan", _NAMES)
            a, b, c, d = (tape.draw("plan", 1 << 16) for _ in range(4))
            await self.do(name, (a, b, c, d), by=str(number))

    async def _scene(self, numbers: Numbers) -> None:
        await self._act(scene_for(self.shape, numbers[0]), (numbers[0] // 7, *numbers[1:]))

    async def _of_theme(self, numbers: Numbers) -> None:
        await self._act(self._theme if suits(self._theme, self.shape) else nothing, numbers)

    async def _act(self, scene: Scene, numbers: Numbers) -> None:
        """Act a scene, beside what others do, or alone: then nobody begins anything else before it is over."""
        is_alone = not self.is_alone and bool(numbers[1] >> 8 & 1)
        self.world.tell(f"scene {scene.__name__}" + (", alone" if is_alone else ""))
        self.is_alone |= is_alone
        try:
            await scene(self, numbers)
        finally:
            self.is_alone &= not is_alone

    async def _settle(self) -> None:
        """Let everything end: then nothing is held, and what was counted adds up."""
        world, kv = self.world, self.kv
        world.end_trouble()
        if self._planning is not None:
            self._planning.give_up()

        async def end() -> None:
            # Pins end by themselves, and tiers that were at fault are tried again.
            await asyncio.sleep(max(6.0, self._pinned_until - self.now + 0.1))
            # Who explains a block holds what it reads of a disk, without a transfer.
            await asyncio.sleep(max(0.0, *(disk.stalls_until - self.now + 0.1 for disk in world.disks)))
            await kv.flush()
            while world.store.num_calls or kv.stats().transfers or any(tier.dirty for tier in kv.stats().tiers):
                await asyncio.sleep(1.0)  # a call that stalls keeps the store out of use, and what is owed to it untold
                await kv.flush()
            await asyncio.sleep(2.5)  # what is owed to media is made up for

        await self.within(LONGEST_S, "the end of all transfers", end())
        stats = kv.stats()
        for _ in range(_LOOKS if self.shape.scrub_bytes_per_s else 0):
            if not what_is_held(stats):
                break
            await asyncio.sleep(_LOOKS_AGAIN_S)  # a scrub holds what it reads just now
            stats = kv.stats()
        if held := what_is_held(stats):
            raise WrongAnswer("leak", "; ".join(held))
        self._check_counts(stats)
        if self._subscriber is not None:
            await self._subscriber.check()
        if world.trouble.is_stale:
            return
        self.check_disks()
        world.trouble.since_told = False
        world.known.told(self.now)

    def _check_counts(self, stats: CacheStatistics) -> None:
        """What was counted adds up, and of what media raised somebody was told."""
        if sum(tier.hits for tier in stats.tiers) + stats.missed != stats.requested:
            raise WrongAnswer(
                "counts", f"{stats.requested} blocks asked for, {stats.missed} missed, hits do not add up"
            )
        if stats.stored + stats.present + stats.dropped != stats.store_requested:
            raise WrongAnswer("counts", "stores do not add up")
        for what, counted in (("load", stats.requested), ("store", stats.store_requested)):
            if not 0 <= counted - self._asked[what] <= self._perhaps[what]:
                raise WrongAnswer("counts", f"{self._asked[what]} blocks were asked for by {what}s, {counted} counted")
        raised, told = self.world.store.raised, self.world.told
        if silent := [what for what, n in raised.items() if n >= _MOST_UNTOLD and not told[what]]:
            raise WrongAnswer("silent", f"a store raised {silent} again and again, and nobody was told")

    def check_disks(self) -> None:
        """What lies on a disk is no more than its tier may take, once nothing is in the way of giving it back."""
        if not self.shape.has("nvme"):
            return
        most, disks = self.disk_bytes, self.world.disks[: self.shape.num_disks]
        if max(disk.used_bytes for disk in disks) > most:
            raise WrongAnswer("limit", f"{[disk.used_bytes for disk in disks]} bytes on disks, {most} at most on each")
        num_slots = next(tier for tier in self.kv.stats().tiers if tier.tier == "nvme").num_slots
        if num_slots * RECORD_BYTES > most * len(disks):
            raise WrongAnswer("limit", f"{num_slots} slots on {len(disks)} disks of {most} bytes at most")

    async def _close(self) -> None:
        if self.process.is_dead:
            return
        await self.within(LONGEST_S, "closing", self.kv.aclose())

    # What else is asked for.

    async def _plan(self, numbers: Numbers) -> None:
        """Have a worker load or store what is planned here."""
        if "cpu" not in self.shape.chain:
            return
        await self.planning().one(span(numbers), self.weights, is_load=numbers[3] % 2 == 0, is_plain=numbers[3] == 0)

    def planning(self) -> Planning:
        """Return the planner of this cache, of which there is one."""
        if self._planning is None:
            self._planning = EnginesPlanning(self)
        return self._planning

    async def _wait(self, numbers: Numbers) -> None:
        await asyncio.sleep((0.001, 0.05, 0.7, 2.0, 15.0)[numbers[3] % 5])

    # The world.

    async def _trouble(self, numbers: Numbers) -> None:
        if not self.world.trouble.is_settled:
            self.world.begin_trouble(numbers[3])

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
            world.disks[0].rot(in_largest=numbers[3] % 4 == 2, name="ledger" if numbers[3] % 8 == 4 else "")

    async def _remember(self, numbers: Numbers) -> None:
        self.world.disks[numbers[3] % len(self.world.disks)].remember()

    async def _reopen(self, _: Numbers) -> None:
        self.ending = self.ending or "reopen"

    async def _die(self, numbers: Numbers) -> None:
        self.world.tape.num_faults += 1
        self.world.die_at = self.world.turns.num_turns + 1 + numbers[3] % 300

    async def _power(self, numbers: Numbers) -> None:
        self.world.trouble.lost_power = True
        await self._die(numbers)
