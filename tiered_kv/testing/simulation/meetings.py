"""Scenes in which two things meet: blocks that are on their way, and what takes them away or the room that they need.

And what scenes have in common: how a prompt is stored, evicted, taken out of memory, and how a process ends.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from tiered_kv.testing.simulation.acting import (
    AT_ONCE_S,
    COMPUTED_LATER,
    NEARLY_LATE_S,
    PLAIN,
    SMALL,
    WELL_S,
    Quiet,
    scene,
)
from tiered_kv.testing.simulation.engine import PROMPTS, N, fresh
from tiered_kv.testing.simulation.known import WrongAnswer
from tiered_kv.testing.simulation.world import KINDS_OF_TROUBLE, LONGEST_S
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.results import BlockState

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.requester import Numbers
    from tiered_kv.testing.simulation.workload import Requests

_COPY_S: Final = 0.005
_SLOW_WRITE_S: Final = 0.05
_LONGEST_STALL_S: Final = 30.0
_LONGEST_PAUSE_S: Final = 4.5
"""After a failure, before a tier is tried again."""
_READING_S: Final = (0.0001, 0.0002, 0.0004, 0.0015)
"""After one of these a load is being read, of media that are well."""
_LATE_DELETION_S: Final = (1.5, 3.0)


# Other capacities.


@scene(lambda shape: shape.keeps_all and shape.writes_back and shape.has("cpu") and shape.admit_after == 1)
async def shrink_memory(requests: "Requests", numbers: "Numbers") -> None:
    """The CPU tier is made smaller while blocks wait there to be written: they are written first."""
    await requests.well()
    prompts = [fresh(requests.world.number()) for _ in range(5 + numbers[1] % 4)]
    quiet, is_resizing = Quiet(requests), requests.num_resizing > 0
    for keys in prompts:
        await requests.put(keys)
    # What has found no room there is in the GPU pool only, if at all: its store has said so.
    there = [keys for keys in prompts if (requests.kv.membership(keys, tier="cpu") == BlockState.HIT).all()]
    if requests.ending or not requests.keeps_all() or is_resizing:
        return
    await requests.do("resize", (0, 0, 0, 1))
    is_quiet = quiet.is_so(1) and requests.are_in_use
    if is_quiet and requests.keeps_all() and (lost := sum(not requests.is_there(keys) for keys in there)):
        raise WrongAnswer("lost", f"{lost} of {len(there)} prompts that were in memory, as it was made smaller")
    for keys in prompts:
        await requests.evict_all(keys)


@scene(lambda shape: shape.has("cpu") or shape.has("nvme"))
async def shrink_while_filling(requests: "Requests", numbers: "Numbers") -> None:
    """A tier is made smaller while blocks are on their way to slots beyond its new end."""
    await requests.store(*range(3))
    is_of_memory = bool(numbers[3] % 2)
    if is_load := is_of_memory and numbers[1] % 2 == 0:  # what is read is not waited for, unlike stores
        await requests.flush()
        await requests.leave_memory(2)
    with requests.world.slow():
        how: Numbers = COMPUTED_LATER if is_of_memory and not is_load else PLAIN
        keys = [PROMPTS[2]] if is_load else [fresh(requests.world.number()) for _ in range(5)]
        moving = [asyncio.ensure_future(requests.transfer(each, how, is_load=is_load)) for each in keys]
        await asyncio.sleep(0.005 * (numbers[2] % 8))
        await requests.do("resize", (0, 0, 0, int(is_of_memory)))
        await asyncio.gather(*moving)
        await asyncio.sleep(0.3)
        await requests.do("stats", numbers)
        await requests.do("resize", (0, 0, 2, int(is_of_memory)))


# What is on its way.


@scene(lambda shape: shape.chain[0] in {"cpu", "gpu"})
async def look_while_computing(requests: "Requests", numbers: "Numbers") -> None:
    """Half of a prompt is there, and the rest not even computed: it is not found."""
    await requests.evict(numbers[0])
    await requests.do("store", (numbers[0], 2, 10 + N // 2, 2))
    await requests.do("store", (numbers[0], 2, 10 + N // 2, 2))  # a use more
    prompt = PROMPTS[numbers[0] % len(PROMPTS)]
    storing = asyncio.ensure_future(requests.transfer(prompt, COMPUTED_LATER, is_load=False))
    for _ in range(3):
        await asyncio.sleep(0.02)
        await requests.do("lookup", (numbers[0], 2, 10, 1))
    await storing


@scene(lambda shape: shape.is_owned and shape.has("gpu") and shape.cpu_slots <= SMALL)
async def evict_on_its_way(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks are evicted while they go from one tier to the next, or wait for room there: they arrive nowhere."""
    world = requests.world
    before = world.gpu_s, world.slow_copies
    world.gpu_s, world.slow_copies = _COPY_S, 1.0
    try:
        if numbers[2] % 2:
            await _evict_behind_a_full_host(requests, numbers)
            return
        for i in range(4):
            num_epochs = requests.num_epochs
            others, keys = [fresh(world.number()) for _ in range(numbers[1] >> i & 3)], fresh(world.number())
            await asyncio.gather(*(requests.put(each) for each in (*others, keys)))
            await asyncio.sleep(0.002 * (numbers[3] >> 3 * i & 7))
            await _arrive_nowhere(requests, [keys], num_epochs)
            if requests.ending:
                return
    finally:
        world.gpu_s, world.slow_copies = before


async def _evict_behind_a_full_host(requests: "Requests", numbers: "Numbers") -> None:
    """Evict what waits in the GPU pool, as slots of the host are being written to disks that take a while."""
    world = requests.world
    with world.slow():
        for disk in world.disks:
            disk.faults.latency_s = _SLOW_WRITE_S
        world.flood()
        for i in range(3):
            num_epochs, prompts = requests.num_epochs, [fresh(world.number()) for _ in range(8)]
            for keys in prompts:
                await requests.put(keys)
            await asyncio.sleep(0.005 * (numbers[3] >> 3 * i & 7))
            await _arrive_nowhere(requests, prompts, num_epochs)
            if requests.ending:
                return


async def _arrive_nowhere(requests: "Requests", prompts: Sequence[BlockKeys], num_epochs: int) -> None:
    """Evict blocks, and see that they are not there once nothing is on its way, if they are of the same weights."""
    kv = requests.kv
    evicted = await asyncio.gather(*(requests.within(LONGEST_S, "evict", kv.evict(keys)) for keys in prompts))
    await asyncio.sleep(0.1)
    await requests.flush()
    if requests.ending or requests.num_epochs != num_epochs:
        return
    for keys, each in zip(prompts, evicted, strict=True):
        if not each.kept_by and kv.lookup_nowait(keys).num_blocks:
            raise WrongAnswer("came back", "blocks were evicted on their way from tier to tier, and are there")


@scene(lambda shape: shape.has("cpu") and shape.cpu_slots <= SMALL)
async def plan_and_store(requests: "Requests", numbers: "Numbers") -> None:
    """Plans lie in a queue while much is stored: their slots are nobody else's."""
    world = requests.world
    prompts = [numbers[0] + i for i in range(1 + numbers[1] % 2)]
    await requests.store(*prompts)
    planning = [asyncio.ensure_future(requests.do("plan", (prompt, 2, 5 + 8 * 2, 0))) for prompt in prompts]
    world.flood()
    for _ in range(4):
        keys = [fresh(world.number()) for _ in range(5)]
        await asyncio.gather(*(requests.put(each) for each in keys))
        await asyncio.sleep(0.01)
    await asyncio.gather(*planning)


# Waits.


@scene(lambda shape: shape.keeps_all)
async def flush_and_die(requests: "Requests", numbers: "Numbers") -> None:
    """What is on its way to a slow disk is there once it is flushed."""
    with requests.world.slow():
        await asyncio.sleep(WELL_S)
        await requests.store(*(numbers[0] + prompt for prompt in range(1 + numbers[1] % 3)))
        await requests.do("flush", (0, 0, 0, numbers[3]))
        await requests.do("power" if numbers[3] % 4 == 0 else "die", (0, 0, 0, numbers[2] % 8))
        await asyncio.sleep(0.1)


@scene(lambda shape: shape.keeps_all)
async def load_in_a_crowd(requests: "Requests", numbers: "Numbers") -> None:
    """More is loaded at once from media that are well than there are slots for: each load is whole, and soon."""
    await requests.well()
    prompts = [numbers[0] + i for i in range(8)]
    await requests.store(*prompts)
    await requests.flush()
    await requests.leave_memory(*prompts)
    await requests.load(*prompts[:1])  # a tier that was bypassed till now lets one try it alone
    await asyncio.gather(*(requests.load(prompt) for prompt in prompts[1:]))


@scene(lambda shape: shape.keeps_all and shape.chain[0] == "nvme")
async def load_behind_held_slots(requests: "Requests", _: "Numbers") -> None:
    """Loads that wait for what the engine computes have all slots: who comes next has theirs as soon as they end."""
    world, kv = requests.world, requests.kv
    await requests.well()
    prompts = [0, 1, 2, 3, 4]
    await requests.store(*prompts)
    await requests.flush()
    mine, *others = [PROMPTS[prompt][:4] for prompt in prompts]
    are_there = all(requests.is_there(keys) for keys in (mine, *others))
    if requests.ending or not requests.is_alone or kv.stats().transfers or not are_there or world.may_be_late:
        return
    holding = [asyncio.ensure_future(requests.transfer(keys, COMPUTED_LATER, is_load=True)) for keys in others]
    await asyncio.sleep(0.1)
    started = requests.now
    await requests.get(mine)
    took_s = requests.now - started
    await asyncio.gather(*holding)
    if took_s > AT_ONCE_S and not requests.ending and not world.may_be_late:
        raise WrongAnswer("delayed", f"a load took {took_s:.2f} s behind others that had the slots for 0.2 s")


@scene(lambda shape: shape.has("store") and shape.chain[0] in {"cpu", "nvme"})
async def load_beside_a_slow_store(requests: "Requests", numbers: "Numbers") -> None:
    """A store is nearly late with each call: what is in tiers of the cache's own is loaded at once."""
    with requests.world.slow(lookup_s=NEARLY_LATE_S, latency_s=NEARLY_LATE_S):
        await asyncio.sleep(WELL_S)
        keys = fresh(requests.world.number())
        await requests.put(keys)
        if numbers[1] % 2 and requests.shape.has("nvme"):
            await requests.flush()
            await requests.evict_from_memory(keys)
        if requests.ending or not requests.is_there(keys):
            return
        started = requests.now
        await requests.get(keys)
        took_s = requests.now - started
        if requests.is_there(keys) and took_s > AT_ONCE_S and not requests.ending:
            raise WrongAnswer("delayed", f"a load from tiers of its own took {took_s:.2f} s beside a slow store")


@scene(lambda shape: not shape.has("other"))
async def hang_and_flush(requests: "Requests", numbers: "Numbers") -> None:
    """Media hang, and much is to be written: who flushes is told that it is not, and does not wait for ever."""
    world = requests.world
    world.trouble_of("all calls hang", [*world.disks, world.store], hang=1.0)
    storing = [asyncio.ensure_future(requests.store(numbers[0] + i)) for i in range(3 + numbers[2] % 4)]
    await asyncio.gather(*storing)
    await requests.flush()
    world.end_trouble()


@scene(lambda shape: (shape.keeps_all or shape.keeps_in_store) and shape.admit_after == 1)
async def use_again(requests: "Requests", numbers: "Numbers") -> None:
    """Media that were at fault are in use again some seconds after they are well: they are written to, and read."""
    world, kv, there = requests.world, requests.kv, numbers[0] + 4
    await requests.store(there)
    await requests.flush()
    if numbers[1] % 3 == 0:
        world.stall_all()
    else:
        kinds = ("errors", "store errors") if numbers[1] % 3 == 1 else ("disk hangs", "store hangs")
        for kind in kinds:
            world.begin_trouble(0, kind)
    for i in range(4):
        cancelled = (numbers[0] + i, 2, numbers[2] >> i, 1)
        await asyncio.gather(
            requests.store(numbers[0] + i),
            requests.do("load", cancelled),
            requests.do("load", cancelled),
            requests.do("lookup", (numbers[0] + i, 2, 10, 1)),
        )
        await asyncio.sleep((0.0, 0.3, 1.0, 3.0)[numbers[3] >> 2 * i & 3])
    world.end_trouble()
    await asyncio.sleep(_LONGEST_PAUSE_S)
    await requests.leave_memory(there)
    await requests.store(there)  # what they have is not written: that is no try
    await asyncio.sleep(_LONGEST_STALL_S + WELL_S)  # which may have begun at the last moment
    quiet = Quiet(requests)
    for is_probe in (True, False):
        keys = fresh(world.number())
        is_roomy = requests.has_room(len(keys))
        await requests.put_below(keys)
        if requests.ending:
            return
        reading = asyncio.ensure_future(requests.get(keys))
        await asyncio.sleep(_READING_S[numbers[1] >> 8 & 3])  # only a tier that is being tried has one call at a time
        num_found = (await requests.within(LONGEST_S, "lookup", kv.lookup(keys))).num_blocks
        await reading
        if not is_probe and num_found < len(keys) and is_roomy and quiet.is_so() and requests.keeps_all():
            raise WrongAnswer("bypassed", f"{num_found} of {len(keys)} blocks are kept by media that are well again")
        await asyncio.sleep(1.0)


@scene(lambda shape: not shape.has("other"))
async def suffer(requests: "Requests", numbers: "Numbers") -> None:
    """Something is wrong with media most of the time, of one kind, while all that there is to ask is asked."""
    world = requests.world
    await requests.store(*(numbers[0] + prompt for prompt in range(2)))
    await requests.flush()
    await requests.leave_memory(numbers[0])
    media = {medium for medium, name in (("store", "store"), ("disk", "nvme")) if requests.shape.has(name)}
    kinds = [kind for kind in KINDS_OF_TROUBLE if ("store" if kind.startswith("store") else "disk") in media]
    kind = kinds[numbers[1] % len(kinds)]
    world.begin_trouble(numbers[2], kind)
    for i, what in enumerate(2 * ("lookup", "load", "stats", "store", "groups", "evict", "explain", "store", "load")):
        await requests.do(what, (numbers[0] + (i + numbers[3]) % 3, 2, 10, 3 * (numbers[3] >> i & 1) + 2))
        await asyncio.sleep(0.5 * (numbers[2] >> i & 1))  # a breaker may let one more call through then
    world.end_trouble()


@scene(lambda shape: shape.keeps_in_store and shape.admit_after == 1)
async def ask_where(requests: "Requests", _: "Numbers") -> None:
    """A store cannot say where blocks are; that it has them it can say, and it is read."""
    world, kv = requests.world, requests.kv
    with world.slow():
        await asyncio.sleep(WELL_S)
        keys = fresh(world.number())
        await requests.put_below(keys)
        if requests.ending:
            return
        quiet, before = Quiet(requests), (await kv.lookup(keys)).num_blocks
        world.store.faults.broken_methods = ("locate",)
        for __ in range(4):
            await kv.lookup(keys, where=True)
        after = (await kv.lookup(keys)).num_blocks
        if after < before and quiet.is_so():
            raise WrongAnswer("bypassed", f"{after} of {before} blocks are found in a store that cannot say where")


@scene(lambda shape: shape.keeps_in_store and shape.admit_after == 1)
async def store_after_a_late_deletion(requests: "Requests", numbers: "Numbers") -> None:
    """A store is late to delete blocks: what is stored anew, once who evicted knows that, is there if it says so."""
    world, kv, memory = requests.world, requests.kv, requests.memory
    with world.slow():
        await asyncio.sleep(WELL_S)
        keys = fresh(world.number())
        await requests.put(keys)
        await requests.flush()
        world.store.faults.extra_s = {"delete": _LATE_DELETION_S[numbers[1] % 2]}
        evicted = await requests.within(LONGEST_S, "evict", kv.evict(keys))
        if requests.ending or not evicted.kept_by or (region := memory.take()) is None:
            return
        quiet = Quiet(requests)
        handle = kv.start_store(keys, memory.fill(keys, requests.weights, region))
        requests.count_asked("store", len(keys), is_sure=True)
        result = await requests.within(LONGEST_S, "the end of a store", handle)
        memory.give(region)
        settled = await requests.within(LONGEST_S, "settled()", result.settled())
        is_written = all(tier.written == len(keys) for tier in settled if tier.tier == "store")
        await asyncio.sleep(2 * _LATE_DELETION_S[1])
        world.store.faults.extra_s = {}
        await requests.evict_from_memory(keys)
        if requests.ending:
            return
        is_in_use, num_found = requests.are_in_use, (await kv.lookup(keys)).num_blocks
        if is_written and num_found < len(keys) and is_in_use and quiet.is_so():
            raise WrongAnswer("lost", f"{num_found} of {len(keys)} blocks are there that were written to the store")
