"""Scenes on disks: blocks that come in the place of others, are noted down, cleared and pinned; processes that die."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from tiered_kv.testing.simulation.acting import SMALL, scene
from tiered_kv.testing.simulation.engine import PROMPTS, fresh
from tiered_kv.testing.simulation.world import LONGEST_S

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.requester import Numbers
    from tiered_kv.testing.simulation.workload import Requests

_LEDGER_S: Final = 0.05
_MOST_AGAIN: Final = 64
_ANY_SPEED: Final = 1e18
"""Bytes a second."""
NUM_ROT: Final = 24


@scene(lambda shape: shape.has("nvme") and shape.disk_slots <= SMALL)
async def overwrite_and_die(requests: "Requests", numbers: "Numbers") -> None:
    """The process dies while a small disk takes new blocks in the place of others: each is what it is called."""
    world = requests.world
    await requests.store(*range(len(PROMPTS)))
    await requests.do("flush", (0, 0, 0, numbers[1] % 2))
    world.flood()
    with world.slow():
        keys = [fresh(world.number()) for _ in range(1 + numbers[2] % 5)]
        storing = [asyncio.ensure_future(requests.put(each)) for each in keys]
        await asyncio.sleep(0.002 * (numbers[3] >> 6 & 31))
        await requests.do("die", (0, 0, 0, numbers[3] % 8))
        await asyncio.gather(*storing)


@scene(lambda shape: shape.has("nvme") and shape.disk_slots <= SMALL)
async def fail_to_overwrite_and_die(requests: "Requests", numbers: "Numbers") -> None:
    """A small disk fails to write blocks in the place of others, and these are evicted by name: they stay away."""
    world = requests.world
    await requests.store(*range(3))
    await requests.flush()
    world.flood()
    world.fail_all()
    keys = [fresh(world.number()) for _ in range(1 + numbers[1] % 3)]
    await asyncio.gather(*(requests.put(each) for each in keys))
    await asyncio.sleep(0.001 * (numbers[2] % 8))
    await requests.well()
    await requests.evict(*range(len(PROMPTS)))
    if numbers[3] % 2:
        await requests.flush(sync=True)
    await requests.do("die", (0, 0, 0, numbers[3] % 8))
    await asyncio.sleep(0.1)


class _Churn:
    """Blocks that come and go on small disks, which note down what they hold."""

    def __init__(self, requests: "Requests", numbers: "Numbers") -> None:
        self.is_over = False
        self._requests = requests
        self._num_blocks = 2 + numbers[0] % 6
        self._gap = numbers[1] >> 9 & 3

    async def again(self, what: Callable[[int], Awaitable[object]], wait: int) -> None:
        """Do something again and again, with a while between that some bits say, until it is over."""
        for i in range(_MOST_AGAIN):
            if self.is_over or self._requests.ending or self._requests.world.is_over:
                break
            await what(i)
            await asyncio.sleep(0.01 * (wait >> 2 * (i % 8) & 3))

    async def note_down(self, i: int) -> None:
        """Have all written and noted down."""
        await self._requests.within(LONGEST_S, "flush", self._requests.kv.flush(sync=i % 2 == 0))

    async def go_and_come(self, i: int) -> None:
        """Evict, store and load a prompt of another KV group, which the same threads note down."""
        prompt = PROMPTS[5 + i % 2]
        await self._requests.evict_all(prompt)
        await self._requests.put(prompt)
        await self.read(5 + i % 2)

    async def come(self, i: int) -> None:
        """Store a part of a prompt."""
        await self._requests.put(PROMPTS[i % 5][: self._num_blocks])

    async def read(self, i: int) -> None:
        """Load a prompt from the disk; perhaps have it lose a block, so that there are gaps."""
        prompt = PROMPTS[i % len(PROMPTS)]
        await self._requests.evict_from_memory(prompt)
        await self._requests.get(prompt)
        if self._gap and i < 5:
            await self._requests.evict_all(prompt[self._gap : 1 + self._gap])


@scene(lambda shape: shape.writes_soon and (shape.disk_slots <= SMALL or shape.num_disks > 1))
async def note_down_beside_stores(requests: "Requests", numbers: "Numbers") -> None:
    """Disks note down what they hold while blocks come and go, in the place of others; then the process may die."""
    world, churn = requests.world, _Churn(requests, numbers)
    world.flood()
    with world.slow():
        for i, disk in enumerate(world.disks):
            disk.faults.bytes_per_s = _ANY_SPEED  # so that calls end at the same moments
            disk.faults.latency_s *= 1 + 4 * i * (numbers[0] >> 2 & 1)
            disk.faults.extra_s = {"ledger": _LEDGER_S} if numbers[0] % 3 else {}
        under_way = [
            asyncio.ensure_future(churn.again(what, wait))
            for what, wait in (
                (churn.note_down, numbers[1]),
                (churn.go_and_come, numbers[2] & 0x5555),
                (churn.come, numbers[3]),
                (lambda i: churn.come(i + 2), numbers[3] >> 3),
                (churn.read, numbers[2] | 0x5555),
            )
        ]
        await asyncio.sleep(0.01 * (numbers[3] >> 6 & 63))
        churn.is_over = True
        await asyncio.gather(*under_way)
        if numbers[1] % 2:
            await requests.do("die", (0, 0, 0, 0))
            await asyncio.sleep(0.1)
        for i in range(len(PROMPTS)):
            await churn.read(i)


@scene(lambda shape: shape.keeps_all)
async def pin_and_flush(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks that somebody holds are noted down like others."""
    await requests.well()
    await requests.store(numbers[0])
    await requests.flush()
    await requests.leave_memory(numbers[0])
    await requests.do("pin", (numbers[0], 2, 10, 1))
    await requests.flush(sync=True)
    if numbers[1] % 2:
        await requests.load(numbers[0])
    await requests.do("die", (0, 0, 0, numbers[3] % 8))
    await asyncio.sleep(0.1)


@scene(lambda shape: shape.is_owned)
async def clear_beside_stores(requests: "Requests", numbers: "Numbers") -> None:
    """All is cleared while blocks are stored: these are whole if they are there, and what was there before is not."""
    world, n = requests.world, numbers[2]
    with world.slow():
        await requests.store(*range(1 + numbers[1] % 4))
        if n % 2:
            await requests.flush()
        clearing = asyncio.ensure_future(requests.do("clear", (0, 0, 0, 0)))
        for _ in range(n >> 1 & 7):
            await asyncio.sleep(0.001 * (n >> 4 & 3))
        keys = [fresh(world.number()) for _ in range(3)]
        await asyncio.gather(*(requests.put(each) for each in keys))
        await clearing
        for prompt in range(len(PROMPTS)):
            await requests.do("lookup", (prompt, 2, 10, 1))
        for each in keys:
            await requests.evict_from_memory(each)
            await requests.get(each)
            await requests.evict_all(each)


@scene(lambda shape: shape.has("nvme") and shape.num_disks == 1)
async def evict_rot_and_die(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks are evicted, then bits change in what a disk has noted down: it does not bring them back."""
    await requests.store(*range(len(PROMPTS)))
    await requests.flush()
    await requests.evict(*range(len(PROMPTS)))
    for _ in range(NUM_ROT):
        await requests.do("rot", (0, 0, 0, 4))
    await requests.do("die", (0, 0, 0, numbers[3] % 8))
    await asyncio.sleep(0.1)
