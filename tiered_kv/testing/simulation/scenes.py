"""Scenes: a few requests in a row that aim at what requests drawn one by one come to once in a thousand seeds.

Each is acted by one of several engines at once, and the others go on meanwhile. What was found by reading is aimed at:
what has left the books of a tier while its medium was not told, and waits that traffic never lets end.
"""

import asyncio
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered_kv.testing.simulation.acting import NEARLY_LATE_S, WELL_S, scene
from tiered_kv.testing.simulation.engine import PROMPTS, fresh, span
from tiered_kv.testing.simulation.known import WrongAnswer, names_of
from tiered_kv.testing.simulation.overwriting import NUM_ROT
from tiered_kv.testing.simulation.world import LONGEST_S, WEIGHTS
from tiered_kv.values.results import BlockState

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.requester import Numbers
    from tiered_kv.testing.simulation.workload import Requests

_CROWD: Final = 150
_SLOW_LOOKUP_S: Final = 0.2
"""Of 16 at once, so that a crowd takes nearly two seconds: twice the time limit of one call."""
_FLOOD_S: Final = 10.0
"""What a call may take beside stores that never end, where media take 10 ms a call."""
_FLOOD_GAP_S: Final = 0.005
"""Between such stores of two blocks: four times what a disk takes, and half of what it takes for one call."""
_AHEAD: Final = 150
_SLOW_READ_S: Final = 0.6
_AT_ONCE_S: Final = 1.5
"""What a load of one prompt takes at most from a store so slow, where it has to wait for nobody's prefetches."""


@scene(lambda shape: shape.ttl_s is not None and shape.has("nvme"))
async def expire_and_die(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks get too old, are evicted by name, and the process dies: they are not found again."""
    ttl_s = requests.shape.ttl_s or 0.0
    await requests.store(numbers[0])
    await asyncio.sleep(3 * ttl_s + 7.0)
    if numbers[1] % 2:
        await requests.evict(numbers[0])
        await asyncio.sleep(2.5 * (numbers[2] % 2))
    await requests.die(numbers)


@scene(lambda shape: shape.is_roomy)
async def shrink_and_die(requests: "Requests", numbers: "Numbers") -> None:
    """A tier is made smaller while some of its blocks are pinned; all are evicted, and the process dies."""
    prompts = range(1 + numbers[1] % 4)
    await requests.store(*[*prompts] * requests.shape.admit_after)
    await requests.flush(sync=True)
    if numbers[1] >> 2 & 1:  # else it is memory that holds what is pinned
        await requests.leave_memory(*prompts)
    await requests.do("pin", (prompts[-1], 2, 10 + numbers[2] % 3, 1 + numbers[3] % 2))
    await requests.do("resize", (0, 0, numbers[2] % 2, 0))
    await requests.evict(*range(len(PROMPTS)))
    if waits := numbers[2] % 3 == 2:
        for keys in PROMPTS:
            requests.kv.unpin(keys)
    most_bytes = requests.disk_bytes
    await asyncio.sleep((0.0, 0.5, 7.0)[numbers[2] % 3])
    if waits and most_bytes == requests.disk_bytes and not requests.world.may_be_wrong:
        requests.check_disks()  # nobody reads what has gone for so long
    await requests.die(numbers)


@scene(lambda shape: shape.has("nvme"))
async def fail_once_and_die(requests: "Requests", numbers: "Numbers") -> None:
    """A call of a medium fails, or a few in a row, while blocks leave; all is well again, and the process dies."""
    world, what = requests.world, ("clear", "store", "evict", "resize")[numbers[1] % 4]
    await requests.store(*range(2 + numbers[2] % 3))
    await requests.flush()
    world.fail_once(numbers[2], 1 + numbers[3] % 8, 1 + (numbers[3] >> 4) % 6)
    if what == "clear":
        await requests.do("clear", (0, 0, 0, 0))
    elif what == "store":  # others have to go for it
        await requests.store(3 + numbers[0])
    elif what == "evict":
        await requests.evict(numbers[0])
    else:
        await requests.do("resize", (0, 0, numbers[2], 0))
    await asyncio.sleep(0.1)
    world.end_trouble()
    if what != "clear":
        await requests.evict(*range(len(PROMPTS)))
    await asyncio.sleep(WELL_S)
    await requests.flush(sync=True)
    await requests.die(numbers)


@scene(lambda shape: shape.writes_back and shape.has("cpu") and not shape.has("other"))
async def wait_beside_stores(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks are stored without end; who flushes, drains or resizes is not kept waiting by that."""
    world = requests.world
    if world.is_slow:  # by how much others say: and two who flood cost twice, and find no more than one
        return
    world.flood()  # others have to go for what never ends
    is_over = False

    async def store_for_ever() -> None:
        while not (is_over or requests.ending or world.is_over):
            await requests.put(fresh(world.number())[:2])
            await asyncio.sleep(_FLOOD_GAP_S)

    with world.slow():
        await asyncio.sleep(WELL_S)
        traffic = asyncio.ensure_future(store_for_ever())
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
            await traffic


@scene(lambda shape: shape.keeps_all)
async def drain_and_end(requests: "Requests", numbers: "Numbers") -> None:
    """What is stored before a drain that says True is there when the next process begins, whatever fails meanwhile."""
    if numbers[2] % 3 == 0:
        requests.world.fail_once(numbers[2], 1 + numbers[3] % 8)
    elif numbers[2] % 3 == 1:
        requests.world.fail_all()
    await requests.store(*(numbers[0] + prompt for prompt in range(1 + numbers[1] % 3)))
    if numbers[0] % 3 == 0:
        await requests.evict(numbers[0])
    if numbers[0] % 2:
        await requests.well()
    await requests.do("drain", (0, 0, 0, 0))
    if numbers[3] % 2:
        await requests.die(numbers)


@scene(lambda shape: shape.keeps_all)
async def sync_and_lose_power(requests: "Requests", numbers: "Numbers") -> None:
    """What a flush has synced is there when the machine is back."""
    await requests.well()
    await requests.store(*(numbers[0] + prompt for prompt in range(1 + numbers[1] % 3)))
    await requests.flush(sync=True)
    await requests.do("power", (0, 0, 0, numbers[3] % 40))


@scene(lambda shape: shape.keeps_all and shape.admit_after > 1)
async def use_and_flush(requests: "Requests", numbers: "Numbers") -> None:
    """A block that is used again goes to tiers that take what is used often; who flushes waits for it."""
    with requests.world.slow():
        await asyncio.sleep(WELL_S)
        await requests.store(numbers[0])
        if numbers[1] % 2 and requests.shape.has("cpu"):
            await requests.do("plan", (numbers[0], 2, 30, 0))
        else:
            await requests.load(numbers[0])
        await requests.do("flush", (0, 0, 0, numbers[3]))
        await requests.die(numbers)
        await asyncio.sleep(0.1)


@scene(lambda shape: shape.has("store") and not shape.has("other"))
async def load_from_afar(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks are in a store alone that is nearly late with each call: who loads or plans hears by the deadline."""
    chain, world = requests.shape.chain, requests.world
    await requests.store(numbers[0])
    await requests.flush()
    await requests.leave(chain[:-1], numbers[0])
    with world.slow(lookup_s=NEARLY_LATE_S, latency_s=NEARLY_LATE_S):
        await requests.do("plan" if numbers[1] % 2 else "load", (numbers[0], 2, 30, 0))


@scene(lambda _: True)
async def overtake(requests: "Requests", numbers: "Numbers") -> None:
    """Weights change while blocks of theirs are being loaded, and change back."""
    await requests.store(numbers[0])
    chain = requests.shape.chain
    if len(chain) > 1:
        await requests.leave(chain[:1], numbers[0])
    number = WEIGHTS.index(requests.weights)
    loading = asyncio.ensure_future(requests.load(numbers[0]))
    await asyncio.sleep((0.0, 0.0002, 0.001, 0.003)[numbers[1] % 4])
    await requests.do("epoch", (0, 0, 0, 1 - number))
    await loading
    await requests.do("epoch", (0, 0, 0, number))


@scene(lambda shape: shape.writes_back and shape.has("cpu") and not shape.has("other"))
async def store_for_two(requests: "Requests", _: "Numbers") -> None:
    """Two tenants' blocks of the same hashes wait to be written together, and each is served its own."""
    whose = [number for number, keys in enumerate(PROMPTS) if keys.digests == PROMPTS[0].digests]
    await requests.evict(*whose)
    await requests.store(*whose)
    await requests.flush()
    await requests.leave(requests.shape.chain[:-1], *whose)
    await requests.load(*whose)


@scene(lambda shape: shape.has("cpu") and len(shape.chain) > 1 and not shape.has_neighbours)
async def be_late(requests: "Requests", numbers: "Numbers") -> None:
    """Calls end long after their time, when others would like their slots: no block has another's bytes."""
    world, is_read = requests.world, numbers[1] % 2 == 0
    if is_read:
        await requests.store(numbers[0])
        await requests.flush()
        await requests.leave_memory(numbers[0])
    world.stall_all()
    await requests.do("load" if is_read else "store", (numbers[0], 2, 10, 2))
    await asyncio.sleep((0.0, 1.5)[numbers[2] % 2])
    world.end_trouble()
    others = [numbers[0] + 1 + i for i in range(3)]
    await requests.store(*others)
    await asyncio.sleep((0.0, 6.0, 25.0)[numbers[3] % 3])
    await requests.load(*others, numbers[0])
    await requests.leave_memory(*others, numbers[0])
    await requests.load(*others, numbers[0])


@scene(lambda shape: shape.has("nvme") != shape.has("store"))
async def rot_and_load(requests: "Requests", numbers: "Numbers") -> None:
    """Bits change where blocks are: those are not served."""
    prompts = [numbers[0], numbers[0] + 1]
    await requests.store(*prompts)
    await requests.flush()
    await requests.leave_memory(*prompts)
    for _ in range(NUM_ROT):
        await requests.do("rot", (0, 0, 0, 1 if requests.shape.has("store") else 2))
    await requests.load(*prompts)


@scene(lambda shape: shape.chain == ("nvme",) and shape.has_direct_pools)
async def evict_before_it_is_there(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks are evicted while they are being stored, and wait for a disk: then they are not there."""
    with requests.world.slow():
        await asyncio.sleep(WELL_S)
        for i in range(3):
            traffic = [
                asyncio.ensure_future(requests.transfer(fresh(requests.world.number()), (1, 1, 10, 14), is_load=False))
                for _ in range(5)
            ]
            await asyncio.sleep(0)
            try:
                await _evict_at_once(requests, (numbers[2] >> 4 * i) % 30, in_pool=(numbers[1] >> 2 * i) % 8 > 0)
            finally:
                await asyncio.gather(*traffic)


async def _evict_at_once(requests: "Requests", num_turns: int, *, in_pool: bool) -> None:
    """Begin to store blocks, and evict them some turns of the loop later."""
    memory, kv, keys, region = requests.memory, requests.kv, fresh(requests.world.number()), requests.memory.take()
    if region is None or requests.ending:
        return
    handle = kv.start_store(keys, memory.fill(keys, requests.weights, region, in_pool=in_pool))
    requests.count_asked("store", len(keys), is_sure=True)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    evicted = await requests.within(LONGEST_S, "evict", kv.evict(keys))
    await requests.within(LONGEST_S, "the end of a store", handle)
    memory.give(region)
    await requests.flush()
    if not requests.ending and not evicted.kept_by and kv.lookup_nowait(keys).num_blocks:
        raise WrongAnswer("came back", "blocks were evicted while they were being stored, and are there")


@scene(lambda shape: shape.has("store") and not shape.has_neighbours)
async def evict_from_a_slow_store(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks are evicted and stored anew while a store is slow to write them, to delete them, or to say what it has."""
    world, kv, n = requests.world, requests.kv, numbers[3]
    keys = fresh(world.number())
    is_over = False

    async def ask() -> None:
        while not (is_over or requests.ending or world.is_over):
            asked = world.known.ask(names_of(keys, requests.weights))
            states = kv.membership(keys)  # which has the store asked, too, for answers that lookups would correct
            world.known.check(asked, np.asarray(states == BlockState.HIT), "membership beside evictions")
            if numbers[1] >> 9 & 1:
                found = await kv.lookup(keys)
                world.known.check(asked, np.arange(len(keys)) < found.num_blocks, "a lookup beside evictions")
            await asyncio.sleep(0.05)

    async def evict(*, at_once: bool) -> None:
        since, names = world.known.moment(), names_of(keys, requests.weights)
        world.known.removing(names)
        evicted = await requests.within(LONGEST_S, "evict", kv.evict(keys))
        world.known.removed(names, since, requests.now, "evicted", weakly=bool(evicted.kept_by))
        if at_once and names == names_of(keys, requests.weights):
            asked = world.known.ask(names)
            states = kv.membership(keys)
            world.known.check(asked, np.asarray(states == BlockState.HIT), "membership of what was just evicted")

    with world.slow():
        await asyncio.sleep(WELL_S)
        slow = ("write", "delete", "lookup", "read")
        world.store.faults.extra_s = dict.fromkeys((slow[numbers[1] % 4], slow[numbers[1] >> 2 & 3]), 0.3)
        if numbers[2] % 3 == 0:  # what is to go is remembered until the store can be told
            world.store.faults.broken_methods = ("delete",)
        asking = [asyncio.ensure_future(ask()) for _ in range(numbers[2] // 3 % 3)]
        try:
            for i in range(4):
                storing = asyncio.ensure_future(requests.put(keys))
                await asyncio.sleep((0.01, 0.02, 0.2, 0.5)[(n >> 2 * i) % 4])
                if n >> (8 + i) & 1:
                    await storing
                    world.known.forget_kept(names_of(keys, requests.weights))
                    await asyncio.gather(*(kv.evict(keys, tier=tier) for tier in requests.shape.chain[:-1]))
                    loading = asyncio.ensure_future(requests.get(keys))
                    await asyncio.sleep(0.01)
                    await evict(at_once=n >> (12 + i) & 1 == 1)
                    await loading
                else:
                    await evict(at_once=n >> (12 + i) & 1 == 1)
                await storing
                await asyncio.sleep(0.4 * (numbers[1] >> 9 + i & 1))
                if requests.ending:
                    return
            await requests.flush()
        finally:
            is_over = True
            await asyncio.gather(*asking)


@scene(lambda shape: shape.keeps_in_store and shape.keeps_in_memory and shape.admit_after == 1)
async def load_before_prefetches(requests: "Requests", _: "Numbers") -> None:
    """Much is being brought ahead from a slow store: a load that comes later goes before it."""
    world, kv, is_alone = requests.world, requests.kv, requests.is_alone
    mine, *ahead = [fresh(world.number())[:1] for _ in range(1 + _AHEAD)]
    await requests.well()
    for keys in (mine, *ahead):
        await requests.put(keys)
    await requests.flush()
    for tier in requests.shape.chain[:-1]:
        await asyncio.gather(*(kv.evict(keys, tier=tier) for keys in (mine, *ahead)))
    world.known.forget_kept([name for keys in (mine, *ahead) for name in names_of(keys, requests.weights)])
    if requests.ending or world.may_be_wrong or world.is_slow:
        return
    with world.slow(latency_s=_SLOW_READ_S):
        for keys in ahead:
            kv.prefetch(keys)
        await asyncio.sleep(1.0)  # by then fewer calls are made at once
        started = requests.now
        await requests.get(mine)
        took_s = requests.now - started
        # Loads that came before it go before it: all prefetches would take most of a minute.
        if took_s > _AT_ONCE_S * (1 if is_alone else 4) and not requests.ending:
            raise WrongAnswer("delayed", f"a load took {took_s:.2f} s beside prefetches that came before it")


@scene(lambda shape: shape.has("store") and not shape.has_neighbours and not shape.has("other"))
async def ask_in_a_crowd(requests: "Requests", numbers: "Numbers") -> None:
    """So many ask a store at once that the last waits for longer than a call may take: it hears what it would alone."""
    keys, kv, world = span(numbers), requests.kv, requests.world
    if world.is_slow:
        return
    with world.slow(lookup_s=_SLOW_LOOKUP_S):
        await asyncio.sleep(WELL_S)
        await requests.do("store", numbers)
        await requests.flush()
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
