"""Scenes, for which tiers each is, and what they have in common: how prompts are stored, evicted, taken out of memory.

A scene is a few requests in a row that aim at what requests drawn one by one come to once in a thousand seeds. It is
acted by one of several engines at once, and the others go on meanwhile.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from tiered_kv.testing.simulation.known import names_of
from tiered_kv.testing.simulation.shapes import Shape
from tiered_kv.values.keys import BlockKeys

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.requester import Numbers
    from tiered_kv.testing.simulation.workload import Requests

Scene = Callable[["Requests", "Numbers"], Awaitable[None]]
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


async def well(requests: "Requests") -> None:
    """Wait until nothing is, or was lately, at fault."""
    requests.world.end_trouble()
    await asyncio.sleep(WELL_S)


async def store(requests: "Requests", numbers: "Numbers") -> None:
    """Store a prompt; by half of the numbers all of it."""
    await requests.do("store", (numbers[0], 2, 30 if numbers[3] % 2 else 10, 2))


async def evict(requests: "Requests", numbers: "Numbers") -> None:
    """Evict a prompt from everywhere."""
    await requests.do("evict", (numbers[0], 2, 10, 1))


async def load(requests: "Requests", prompts: Sequence[int]) -> None:
    """Load prompts, one after another."""
    for prompt in prompts:
        await requests.do("load", (prompt, 2, 10, 2))


async def die(requests: "Requests", numbers: "Numbers") -> None:
    """Have the process end suddenly, soon, and perhaps its machine."""
    await requests.do("power" if numbers[2] % 5 == 0 else "die", (0, 0, 0, numbers[3] % 40))


async def leave_memory(requests: "Requests", prompts: Sequence[int]) -> None:
    """Evict prompts from the memory tiers."""
    for i, tier in enumerate(requests.shape.chain):
        for prompt in prompts if tier in {"gpu", "cpu"} else ():
            await requests.do("evict", (prompt, 2, 10, of_tier(i)))


def of_tier(i: int) -> int:
    """Return the last number of an eviction from the ``i``'th tier alone."""
    return 4 * i


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


def is_there(requests: "Requests", keys: BlockKeys) -> bool:
    """Say whether all of some blocks are found at once."""
    return requests.kv.lookup_nowait(keys).num_blocks == len(keys)


def has_room(requests: "Requests", n: int) -> bool:
    """Say whether the CPU tier can take blocks that stay: clients that hang may hold all of its slots."""
    memory = requests.kv.stats()["cpu"] if requests.shape.has("cpu") else None
    return memory is None or memory.leased + memory.pending + n <= requests.shape.cpu_slots


async def evict_all(requests: "Requests", keys: BlockKeys) -> None:
    """Evict blocks that scenes alone have named, or of which nothing more is expected."""
    requests.world.known.forget_kept(names_of(keys, requests.weights))
    await requests.kv.evict(keys)


async def evict_from_memory(requests: "Requests", keys: BlockKeys) -> None:
    """Have the memory tiers lose blocks."""
    requests.world.known.taken_from_memory(names_of(keys, requests.weights))
    for tier in requests.shape.chain:
        if tier in {"gpu", "cpu"}:
            await requests.kv.evict(keys, tier=tier)


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


async def nothing(_: "Requests", __: "Numbers") -> None:
    """Act none."""
    await asyncio.sleep(0)
