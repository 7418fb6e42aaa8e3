"""Scenes: a few requests in a row that aim at what requests drawn one by one come to once in a thousand seeds.

Each is acted by one of several engines at once, and the others go on meanwhile. What was found by reading is aimed at:
what has left the books of a tier while its medium was not told, and waits that traffic never lets end.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from tiered_kv.testing.simulation.engine import PROMPTS, fresh
from tiered_kv.testing.simulation.world import Shape

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.workload import Numbers, Requests

Scene = Callable[["Requests", "Numbers"], Awaitable[None]]
_WELL_S: Final = 13.0
"""After this, tiers that were at fault are in use again."""
_FLOOD_S: Final = 10.0
"""What a call may take beside stores that never end, where media take 10 ms a call."""


async def expire_and_die(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks get too old, are evicted by name, and the process dies: they are not found again."""
    ttl_s = requests.shape.ttl_s or 0.0
    await _store(requests, numbers)
    await asyncio.sleep(3 * ttl_s + 7.0)
    if numbers[1] % 2:
        await _evict(requests, numbers)
        await asyncio.sleep(2.5 * (numbers[2] % 2))
    await _die(requests, numbers)


async def shrink_and_die(requests: "Requests", numbers: "Numbers") -> None:
    """A tier is made smaller while some of its blocks are pinned; all are evicted, and the process dies."""
    for prompt in range(numbers[1] % 4):
        await _store(requests, (prompt, *numbers[1:]))
    await requests.do("flush", (0, 0, 0, 0))
    await requests.do("pin", (numbers[0], numbers[1], numbers[2], 1 + numbers[3] % 2))
    await requests.do("resize", (0, 0, numbers[2] % 2, 0))
    for prompt in range(len(PROMPTS)):
        await _evict(requests, (prompt, *numbers[1:]))
    await asyncio.sleep((0.0, 0.5, 7.0)[numbers[2] % 3])
    await _die(requests, numbers)


async def fail_once_and_die(requests: "Requests", numbers: "Numbers") -> None:
    """One call of a medium fails while blocks leave; when all is well again and flushed, the process dies."""
    world, what = requests.world, ("clear", "store", "evict", "resize")[numbers[1] % 4]
    for prompt in range(2 + numbers[2] % 3):
        await _store(requests, (prompt, *numbers[1:]))
    await requests.do("flush", (0, 0, 0, 1))
    world.fail_once(numbers[2], 1 + numbers[3] % 8)
    if what == "clear":
        await requests.do("clear", (0, 0, 0, 0))
    elif what == "store":  # others have to go for it
        await _store(requests, (3 + numbers[0], *numbers[1:]))
    elif what == "evict":
        await _evict(requests, numbers)
    else:
        await requests.do("resize", (0, 0, numbers[2], 0))
    await asyncio.sleep(0.1)
    world.end_trouble()
    if what != "clear":
        for prompt in range(len(PROMPTS)):
            await _evict(requests, (prompt, *numbers[1:]))
    await asyncio.sleep(_WELL_S)
    await requests.do("flush", (0, 0, 0, 0))
    await _die(requests, numbers)


async def wait_beside_stores(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks are stored without end; who flushes, drains or resizes is not kept waiting by that."""
    world = requests.world
    world.known.forget_kept()  # others have to go for what never ends
    is_over = False

    async def store_for_ever() -> None:
        while not (is_over or requests.ending or world.is_over):
            await requests.transfer(fresh(world.number()), (1, 1, 10, 2), is_load=False)
            await asyncio.sleep(0.002)

    with world.slow():
        await asyncio.sleep(_WELL_S)
        traffic = [asyncio.ensure_future(store_for_ever()) for _ in range(2)]
        await asyncio.sleep(0.3)
        try:
            if numbers[1] % 3 == 0:
                await requests.do("flush", (0, 0, 0, numbers[3]), limit_s=_FLOOD_S)
            elif numbers[1] % 3 == 1:
                await requests.do("resize", (0, 0, numbers[2], 1), limit_s=_FLOOD_S)
            else:
                await requests.do("drain", (0, 0, 0, 0), limit_s=_FLOOD_S)
        finally:
            is_over = True
            await asyncio.gather(*traffic)


async def drain_and_end(requests: "Requests", numbers: "Numbers") -> None:
    """What is stored before a drain that says True is there when the next process begins, whatever fails meanwhile."""
    if numbers[2] % 3 == 0:
        requests.world.fail_once(numbers[2], 1 + numbers[3] % 8)
    elif numbers[2] % 3 == 1:
        requests.world.fail_all()
    for prompt in range(1 + numbers[1] % 3):
        await _store(requests, (numbers[0] + prompt, *numbers[1:]))
    await requests.do("drain", (0, 0, 0, 0))
    if numbers[3] % 2:
        await _die(requests, numbers)


async def use_and_flush(requests: "Requests", numbers: "Numbers") -> None:
    """A block that is used again goes to tiers that take what is used often; who flushes waits for it."""
    with requests.world.slow():
        await asyncio.sleep(_WELL_S)
        await _store(requests, numbers)
        await requests.do("load", (numbers[0], 2, 10, 2))
        await requests.do("flush", (0, 0, 0, numbers[3]))
        await _die(requests, numbers)
        await asyncio.sleep(0.1)


_SCENES: Final[tuple[tuple[Scene, Callable[[Shape], bool]], ...]] = (
    (expire_and_die, lambda shape: shape.ttl_s is not None and shape.has("nvme")),
    (shrink_and_die, lambda shape: shape.has("nvme")),
    (fail_once_and_die, lambda shape: shape.has("nvme")),
    (wait_beside_stores, lambda shape: shape.writes_back and shape.has("cpu") and not shape.has("other")),
    (drain_and_end, lambda shape: shape.keeps_all),
    (use_and_flush, lambda shape: shape.keeps_all and shape.admit_after > 1),
)


def scene_for(shape: Shape, number: int) -> Scene:
    """Choose one that means something to such tiers."""
    scenes = [scene for scene, suits in _SCENES if suits(shape)]
    return scenes[number % len(scenes)] if scenes else nothing


async def nothing(_: "Requests", __: "Numbers") -> None:
    """Act none."""
    await asyncio.sleep(0)


async def _store(requests: "Requests", numbers: "Numbers") -> None:
    await requests.do("store", (numbers[0], 2, 30 if numbers[3] % 2 else 10, 2))


async def _evict(requests: "Requests", numbers: "Numbers") -> None:
    await requests.do("evict", (numbers[0], 2, 10, 1))


async def _die(requests: "Requests", numbers: "Numbers") -> None:
    await requests.do("die", (0, 0, 0, numbers[3] % 40))
