"""Scenes, for which tiers each is, and what they have in common: how prompts are stored, evicted, taken out of memory.

A scene is a few requests in a row that aim at what requests drawn one by one come to once in a thousand seeds. It is
acted by one of several engines at once, and the others go on meanwhile.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Final

from tiered_kv.testing.simulation.asking import Asking
from tiered_kv.testing.simulation.keeping import Keeping
from tiered_kv.testing.simulation.known import WrongAnswer, names_of
from tiered_kv.testing.simulation.requester import Numbers
from tiered_kv.testing.simulation.shapes import Shape
from tiered_kv.values.keys import BlockKeys

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.workload import Requests

Scene = Callable[["Requests", Numbers], Awaitable[None]]
SCENES: Final[dict[Scene, tuple[Callable[[Shape], bool], int]]] = {}
"""All whose modules were imported: what says for which tiers each is, and what `scene` says of how many seeds."""
SMALL: Final = 24
"""Slots of a tier that has no room for all prompts."""
WELL_S: Final = 13.0
"""After this, tiers that were at fault are in use again."""
NEARLY_LATE_S: Final = 0.9
AT_ONCE_S: Final = 0.5
"""What a load takes at most from memory, or from a disk that takes 10 ms a call."""
PLAIN: Final = (1, 1, 10, 2)
"""Numbers of a transfer without anything particular."""
COMPUTED_LATER: Final = (1, 0, 10, 2)
"""The same behind an event that fires 0.2 s later."""


class Acting(Asking, Keeping):
    """An engine that does one thing after another; and what scenes have in common."""

    async def do(self, name: str, numbers: Numbers, *, by: str = "scene", **how: float) -> None:
        """Do one thing, and check what can be checked after each."""
        world = self.world
        world.num_steps += 1
        call = f"{by}: {name}"
        world.tell(f"{call} {' '.join(str(number % 97) for number in numbers)}")
        await getattr(self, f"_{name}")(numbers, **how)
        self._check()
        world.tell(f"{call} done")

    def _check(self) -> None:
        world = self.world
        if touched := self.memory.touched():
            raise WrongAnswer("foreign memory", f"somebody has written to regions {touched}, which are nobody's")
        if races := self.device.races:
            raise WrongAnswer("race", f"accesses that nothing orders: {races[0]}")
        for tier in self.kv.stats().tiers:
            beyond = tier.leased if tier.tier in self._small else 0  # what somebody holds goes when nobody does
            if tier.num_slots and tier.free + tier.ready + tier.withheld > tier.num_slots + beyond:
                held = f"{tier.free} free, {tier.ready} ready, {tier.withheld} withheld"
                raise WrongAnswer("limit", f"{tier.tier}: {held} of {tier.num_slots} slots")
        if self.shape.ttl_s is not None and self.shape.is_owned and not world.trouble.since_told:
            idle_s = 3 * self.shape.ttl_s + 6.0
            world.known.expire(idle_s, self.now, weakly=world.trouble.since_told)
        world.check()

    async def well(self) -> None:
        """Wait until nothing is, or was lately, at fault."""
        self.world.end_trouble()
        await asyncio.sleep(WELL_S)

    async def store(self, *prompts: int) -> None:
        """Store prompts, one after another; perhaps see what becomes of them in each tier."""
        for prompt in prompts:
            await self.do("store", (prompt, 2, self.world.tape.pick("plan", (10, 30)), 2))

    async def load(self, *prompts: int) -> None:
        """Load prompts, one after another."""
        for prompt in prompts:
            await self.do("load", (prompt, 2, 10, 2))

    async def evict(self, *prompts: int) -> None:
        """Evict prompts from everywhere."""
        for prompt in prompts:
            await self.do("evict", (prompt, 2, 10, 1))

    async def leave(self, tiers: Collection[str], *prompts: int) -> None:
        """Evict prompts from some tiers."""
        for i, tier in enumerate(self.shape.chain):
            for prompt in prompts if tier in tiers else ():
                await self.do("evict", (prompt, 2, 10, 4 * i))

    async def put(self, keys: BlockKeys) -> None:
        """Store blocks, without anything particular."""
        await self.transfer(keys, PLAIN, is_load=False)

    async def get(self, keys: BlockKeys) -> None:
        """Load blocks, without anything particular."""
        await self.transfer(keys, PLAIN, is_load=True)

    async def put_below(self, *prompts: BlockKeys) -> None:
        """Store blocks often enough for every tier to take them, and have memory lose them."""
        for keys in [*prompts] * self.shape.admit_after:
            await self.put(keys)
        await self.flush()
        for keys in prompts:
            await self.evict_from_memory(keys)

    async def leave_memory(self, *prompts: int) -> None:
        """Evict prompts from the memory tiers."""
        await self.leave({"gpu", "cpu"}, *prompts)

    async def flush(self, *, sync: bool = False) -> None:
        """Have all written, and perhaps noted down for good."""
        await self.do("flush", (0, 0, 0, int(not sync)))

    async def die(self, numbers: Numbers) -> None:
        """Have the process end suddenly, soon, and perhaps its machine."""
        await self.do("power" if numbers[2] % 5 == 0 else "die", (0, 0, 0, numbers[3] % 40))

    def is_there(self, keys: BlockKeys) -> bool:
        """Say whether all of some blocks are found at once."""
        return self.kv.lookup_nowait(keys).num_blocks == len(keys)

    def has_room(self, n: int) -> bool:
        """Say whether the CPU tier can take blocks that stay: clients that hang may hold all of its slots."""
        memory = self.kv.stats()["cpu"] if self.shape.has("cpu") else None
        return memory is None or memory.leased + memory.pending + n <= self.shape.cpu_slots

    async def evict_all(self, keys: BlockKeys) -> None:
        """Evict blocks that scenes alone have named, or of which nothing more is expected."""
        self.world.known.forget_kept(names_of(keys, self.weights))
        await self.kv.evict(keys)

    async def evict_from_memory(self, keys: BlockKeys) -> None:
        """Have the memory tiers lose blocks."""
        self.world.known.taken_from_memory(names_of(keys, self.weights))
        for tier in self.shape.chain:
            if tier in {"gpu", "cpu"}:
                await self.kv.evict(keys, tier=tier)


class Quiet:
    """Says whether nothing that a scene did not do has happened since it was made."""

    def __init__(self, requests: "Requests") -> None:
        self._requests = requests
        self._before = self._now()

    def is_so(self, num_own: int = 0) -> bool:
        """Say whether nothing was taken away but by the scene, no weights were named, and nothing is at fault."""
        requests, (num_removals, num_epochs) = self._requests, self._before
        is_same = self._now() == (num_removals + num_own, num_epochs)
        return is_same and not requests.ending and not requests.world.may_be_wrong

    def _now(self) -> tuple[int, int]:
        return self._requests.num_removals, self._requests.num_epochs


def scene(suits: Callable[[Shape], bool], *, alone: int = 0) -> Callable[[Scene], Scene]:
    """Have seeds be about a scene, on tiers that suit it.

    Args:
        suits: Says which.
        alone: How many times as many seeds are about it as about others, where it is acted in no other seeds.
    """

    def enter(act: Scene) -> Scene:
        SCENES[act] = suits, alone
        return act

    return enter


async def nothing(_: "Requests", __: Numbers) -> None:
    """Act none."""
    await asyncio.sleep(0)
