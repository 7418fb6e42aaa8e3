"""Scenes: a few requests in a row that aim at what requests drawn one by one come to once in a thousand seeds.

Each is acted by one of several engines at once, and the others go on meanwhile. What was found by reading is aimed at:
what has left the books of a tier while its medium was not told, and waits that traffic never lets end.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered_kv.testing.simulation.engine import PROMPTS, fresh, span
from tiered_kv.testing.simulation.known import WrongAnswer, names_of
from tiered_kv.testing.simulation.neighbours import open_beside, share_store
from tiered_kv.testing.simulation.shapes import Shape
from tiered_kv.testing.simulation.transferring import awaited
from tiered_kv.testing.simulation.world import LONGEST_S, WEIGHTS
from tiered_kv.values.results import BlockState

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.requester import Numbers
    from tiered_kv.testing.simulation.workload import Requests

Scene = Callable[["Requests", "Numbers"], Awaitable[None]]
_WELL_S: Final = 13.0
"""After this, tiers that were at fault are in use again."""
_CROWD: Final = 150
_SLOW_LOOKUP_S: Final = 0.2
"""Of 16 at once, so that a crowd takes nearly two seconds: twice the time limit of one call."""
_NEARLY_LATE_S: Final = 0.9
_FLOOD_S: Final = 10.0
"""What a call may take beside stores that never end, where media take 10 ms a call."""
_AHEAD: Final = 150
_SLOW_READ_S: Final = 0.6
_AT_ONCE_S: Final = 1.5
"""What a load of one prompt takes at most from a store so slow, where it has to wait for nobody's prefetches."""
_NUM_ROT: Final = 24


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
    if waits := numbers[2] % 3 == 2:
        for keys in PROMPTS:
            requests.kv.unpin(keys)
    most_bytes = requests.disk_bytes
    await asyncio.sleep((0.0, 0.5, 7.0)[numbers[2] % 3])
    if waits and most_bytes == requests.disk_bytes and not requests.world.may_be_wrong:
        requests.check_disks()  # nobody reads what has gone for so long
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
    world.known.forget_kept()
    world.has_flooded = True  # others have to go for what never ends
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


async def sync_and_lose_power(requests: "Requests", numbers: "Numbers") -> None:
    """What a flush has synced is there when the machine is back."""
    requests.world.end_trouble()
    await asyncio.sleep(_WELL_S)
    for prompt in range(1 + numbers[1] % 3):
        await _store(requests, (numbers[0] + prompt, *numbers[1:]))
    await requests.do("flush", (0, 0, 0, 0))
    await requests.do("power", (0, 0, 0, numbers[3] % 40))


async def use_and_flush(requests: "Requests", numbers: "Numbers") -> None:
    """A block that is used again goes to tiers that take what is used often; who flushes waits for it."""
    with requests.world.slow():
        await asyncio.sleep(_WELL_S)
        await _store(requests, numbers)
        if numbers[1] % 2 and requests.shape.has("cpu"):
            await requests.do("plan", (numbers[0], 2, 30, 0))
        else:
            await requests.do("load", (numbers[0], 2, 10, 2))
        await requests.do("flush", (0, 0, 0, numbers[3]))
        await _die(requests, numbers)
        await asyncio.sleep(0.1)


async def load_from_afar(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks are in a store alone that is nearly late with each call: who loads or plans hears by the deadline."""
    chain, world = requests.shape.chain, requests.world
    await requests.do("store", (numbers[0], 2, 30, 2))
    await requests.do("flush", (0, 0, 0, 1))
    for i in range(len(chain) - 1):
        await requests.do("evict", (numbers[0], 2, 30, _of_tier(requests, i)))
    with world.slow(lookup_s=_NEARLY_LATE_S, latency_s=_NEARLY_LATE_S):
        await requests.do("plan" if numbers[1] % 2 else "load", (numbers[0], 2, 30, 0))


async def overtake(requests: "Requests", numbers: "Numbers") -> None:
    """Weights change while blocks of theirs are being loaded, and change back."""
    await _store(requests, numbers)
    chain = requests.shape.chain
    if len(chain) > 1:
        await requests.do("evict", (numbers[0], 2, 30, _of_tier(requests, 0)))
    number = WEIGHTS.index(requests.weights)
    loading = asyncio.ensure_future(requests.do("load", (numbers[0], 2, 30, 2)))
    await asyncio.sleep((0.0, 0.0002, 0.001, 0.003)[numbers[1] % 4])
    await requests.do("epoch", (0, 0, 0, 1 - number))
    await loading
    await requests.do("epoch", (0, 0, 0, number))


async def store_for_two(requests: "Requests", numbers: "Numbers") -> None:
    """Two tenants' blocks of the same hashes wait to be written together, and each is served its own."""
    whose = [number for number, keys in enumerate(PROMPTS) if keys.digests == PROMPTS[0].digests]
    for prompt in whose:
        await _evict(requests, (prompt, *numbers[1:]))
    for prompt in whose:
        await _store(requests, (prompt, *numbers[1:]))
    await requests.do("flush", (0, 0, 0, 1))
    for i in range(len(requests.shape.chain) - 1):
        for prompt in whose:
            await requests.do("evict", (prompt, 2, 30, _of_tier(requests, i)))
    for prompt in whose:
        await requests.do("load", (prompt, 2, 30, 2))


async def be_late(requests: "Requests", numbers: "Numbers") -> None:
    """Calls end long after their time, when others would like their slots: no block has another's bytes."""
    world, is_read = requests.world, numbers[1] % 2 == 0
    if is_read:
        await _store(requests, numbers)
        await requests.do("flush", (0, 0, 0, 1))
        await _leave_memory(requests, [numbers[0]])
    world.stall_all()
    await requests.do("load" if is_read else "store", (numbers[0], 2, 10, 2))
    await asyncio.sleep((0.0, 1.5)[numbers[2] % 2])
    world.end_trouble()
    others = [numbers[0] + 1 + i for i in range(3)]
    for prompt in others:
        await _store(requests, (prompt, *numbers[1:]))
    await asyncio.sleep((0.0, 6.0, 25.0)[numbers[3] % 3])
    for prompt in (*others, numbers[0]):
        await requests.do("load", (prompt, 2, 10, 2))
    await _leave_memory(requests, [*others, numbers[0]])
    for prompt in (*others, numbers[0]):
        await requests.do("load", (prompt, 2, 10, 2))


async def rot_and_load(requests: "Requests", numbers: "Numbers") -> None:
    """Bits change where blocks are: those are not served."""
    prompts = [numbers[0], numbers[0] + 1]
    for prompt in prompts:
        await _store(requests, (prompt, *numbers[1:]))
    await requests.do("flush", (0, 0, 0, 1))
    await _leave_memory(requests, prompts)
    for _ in range(_NUM_ROT):
        await requests.do("rot", (0, 0, 0, 1 if requests.shape.has("store") else 2))
    for prompt in prompts:
        await requests.do("load", (prompt, 2, 10, 2))


async def evict_before_it_is_there(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks are evicted while they are being stored, and wait for a disk: then they are not there."""
    world, memory, kv = requests.world, requests.memory, requests.kv
    with world.slow():
        await asyncio.sleep(_WELL_S)
        traffic = [
            asyncio.ensure_future(requests.transfer(fresh(world.number()), (1, 1, 10, 14), is_load=False))
            for _ in range(5)
        ]
        await asyncio.sleep(0)
        keys, region = fresh(world.number()), memory.take()
        if region is not None and not requests.ending:
            in_pool = numbers[1] % 8 > 0
            handle = kv.start_store(keys, memory.fill(keys, requests.weights, region, in_pool=in_pool))
            requests.count_asked("store", len(keys), is_sure=True)
            for _ in range(numbers[2] % 30):
                await asyncio.sleep(0)
            evicted = await requests.within(LONGEST_S, "evict", kv.evict(keys))
            await requests.within(LONGEST_S, "the end of a store", awaited(lambda: handle))
            memory.give(region)
            await requests.do("flush", (0, 0, 0, 1))
            if not requests.ending and not evicted.kept_by and kv.lookup_nowait(keys).num_blocks:
                raise WrongAnswer("came back", "blocks were evicted while they were being stored, and are there")
        await asyncio.gather(*traffic)


async def evict_from_a_slow_store(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks are evicted and stored anew while a store is slow to write them, to delete them, or to say what it has."""
    world, kv, n = requests.world, requests.kv, numbers[3]
    keys = fresh(world.number())
    is_over = False

    async def ask() -> None:
        while not (is_over or requests.ending or world.is_over):
            asked = world.known.ask(names_of(keys, requests.weights))
            found = await kv.lookup(keys)
            world.known.check(asked, np.arange(len(keys)) < found.num_blocks, "a lookup beside evictions")
            kv.membership(keys)  # which has the store asked, too
            await asyncio.sleep(0.05)

    async def evict(*, at_once: bool) -> None:
        since, names = world.known.moment(), names_of(keys, requests.weights)
        world.known.forget_kept(names)
        evicted = await requests.within(LONGEST_S, "evict", kv.evict(keys))
        world.known.removed(names, since, requests.now, "evicted", weakly=bool(evicted.kept_by))
        if at_once and names == names_of(keys, requests.weights):
            asked = world.known.ask(names)
            states = kv.membership(keys)
            world.known.check(asked, np.asarray(states == BlockState.HIT), "membership of what was just evicted")

    with world.slow():
        await asyncio.sleep(_WELL_S)
        slow = ("write", "delete", "lookup", "read")[numbers[1] % 4]
        world.store.faults.extra_s = {slow: 0.3}
        if numbers[2] % 3 == 0:  # what is to go is remembered until the store can be told
            world.store.faults.broken_methods = ("delete",)
        asking = [asyncio.ensure_future(ask()) for _ in range(numbers[2] // 3 % 3)]
        try:
            for i in range(4):
                storing = asyncio.ensure_future(requests.transfer(keys, (1, 1, 10, 2), is_load=False))
                await asyncio.sleep((0.01, 0.02, 0.2, 0.5)[(n >> 2 * i) % 4])
                if n >> (8 + i) & 1:
                    await storing
                    await asyncio.gather(*(kv.evict(keys, tier=tier) for tier in requests.shape.chain[:-1]))
                    loading = asyncio.ensure_future(requests.transfer(keys, (1, 1, 10, 2), is_load=True))
                    await asyncio.sleep(0.01)
                    await evict(at_once=n >> (12 + i) & 1 == 1)
                    await loading
                else:
                    await evict(at_once=n >> (12 + i) & 1 == 1)
                await storing
                if requests.ending:
                    return
            await requests.do("flush", (0, 0, 0, 1))
        finally:
            is_over = True
            await asyncio.gather(*asking)


async def load_before_prefetches(requests: "Requests", _: "Numbers") -> None:
    """Much is being brought ahead from a slow store: a load that comes later goes before it."""
    world, kv = requests.world, requests.kv
    mine, *ahead = [fresh(world.number())[:1] for _ in range(1 + _AHEAD)]
    world.end_trouble()
    await asyncio.sleep(_WELL_S)
    for keys in (mine, *ahead):
        await requests.transfer(keys, (1, 1, 10, 2), is_load=False)
    await requests.do("flush", (0, 0, 0, 1))
    for tier in requests.shape.chain[:-1]:
        await asyncio.gather(*(kv.evict(keys, tier=tier) for keys in (mine, *ahead)))
    if requests.ending or world.may_be_wrong:
        return
    with world.slow(latency_s=_SLOW_READ_S):
        for keys in ahead:
            kv.prefetch(keys)
        await asyncio.sleep(1.0)  # by then fewer calls are made at once
        started = requests.now
        await requests.transfer(mine, (1, 1, 10, 2), is_load=True)
        took_s = requests.now - started
        if took_s > _AT_ONCE_S and not requests.ending:
            raise WrongAnswer("delayed", f"a load took {took_s:.2f} s beside prefetches that came before it")


async def _leave_memory(requests: "Requests", prompts: Sequence[int]) -> None:
    for i, tier in enumerate(requests.shape.chain):
        for prompt in prompts if tier in {"gpu", "cpu"} else ():
            await requests.do("evict", (prompt, 2, 10, _of_tier(requests, i)))


def _of_tier(requests: "Requests", i: int) -> int:
    """Return the last number of an eviction from one tier."""
    return next(number for number in range(0, 100, 4) if number % len(requests.shape.chain) == i)


async def ask_in_a_crowd(requests: "Requests", numbers: "Numbers") -> None:
    """So many ask a store at once that the last waits for longer than a call may take: it hears what it would alone."""
    keys, kv, world = span(numbers), requests.kv, requests.world
    with world.slow(lookup_s=_SLOW_LOOKUP_S):
        await asyncio.sleep(_WELL_S)
        await requests.do("store", numbers)
        await requests.do("flush", (0, 0, 0, 1))
        if requests.shape.has("cpu"):
            await requests.do("evict", (*numbers[:3], 0))  # from memory alone
        if requests.ending:
            return
        changes = requests.num_epochs, requests.num_removals
        alone = await kv.lookup(keys)
        others = [asyncio.ensure_future(kv.lookup(fresh(world.number()))) for _ in range(_CROWD)]
        last = await requests.within(LONGEST_S, "lookup in a crowd", kv.lookup(keys))
        await asyncio.wait(others)
        is_same = changes == (requests.num_epochs, requests.num_removals) and not world.trouble.has_rot
        if is_same and last.num_blocks < alone.num_blocks:
            raise WrongAnswer("crowded out", f"{last.num_blocks} of {alone.num_blocks} blocks are found in a crowd")


_SCENES: Final[tuple[tuple[Scene, Callable[[Shape], bool]], ...]] = (
    (expire_and_die, lambda shape: shape.ttl_s is not None and shape.has("nvme")),
    (shrink_and_die, lambda shape: shape.has("nvme")),
    (fail_once_and_die, lambda shape: shape.has("nvme")),
    (wait_beside_stores, lambda shape: shape.writes_back and shape.has("cpu") and not shape.has("other")),
    (drain_and_end, lambda shape: shape.keeps_all),
    (use_and_flush, lambda shape: shape.keeps_all and shape.admit_after > 1),
    (load_from_afar, lambda shape: shape.has("store") and not shape.has("other")),
    (overtake, lambda _: True),
    (store_for_two, lambda shape: shape.writes_back and shape.has("cpu") and not shape.has("other")),
    (ask_in_a_crowd, lambda shape: shape.has("store") and not shape.has_neighbours and not shape.has("other")),
    (be_late, lambda shape: shape.has("cpu") and len(shape.chain) > 1 and not shape.has_neighbours),
    (rot_and_load, lambda shape: shape.has("nvme") != shape.has("store")),
    (evict_before_it_is_there, lambda shape: shape.chain == ("nvme",) and shape.has_direct_pools),
    (load_before_prefetches, lambda shape: shape.keeps_in_store and shape.keeps_in_memory and shape.admit_after == 1),
    (evict_from_a_slow_store, lambda shape: shape.has("store") and not shape.has_neighbours),
    (sync_and_lose_power, lambda shape: shape.keeps_all),
    (open_beside, lambda shape: shape.has_neighbours and shape.has("nvme")),
    (share_store, lambda shape: shape.has_neighbours and shape.has("store")),
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
    await requests.do("power" if numbers[2] % 5 == 0 else "die", (0, 0, 0, numbers[3] % 40))
