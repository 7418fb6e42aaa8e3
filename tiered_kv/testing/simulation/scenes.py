"""Scenes: a few requests in a row that aim at what requests drawn one by one come to once in a thousand seeds.

Each is acted by one of several engines at once, and the others go on meanwhile. What was found by reading is aimed at:
what has left the books of a tier while its medium was not told, and waits that traffic never lets end.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered_kv.testing.simulation.directories import NUM_DISKS, live_on_directories
from tiered_kv.testing.simulation.engine import PROMPTS, fresh, span
from tiered_kv.testing.simulation.hand_plans import (
    answer_by_keys,
    leave_to_each_other,
    load_around_workers,
    store_again_while_written,
    store_what_a_tier_lacks,
)
from tiered_kv.testing.simulation.known import WrongAnswer, names_of
from tiered_kv.testing.simulation.meetings import (
    NEARLY_LATE_S,
    WELL_S,
    ask_where,
    die,
    evict,
    evict_on_its_way,
    flush_and_die,
    hang_and_flush,
    leave_memory,
    load_behind_held_slots,
    load_beside_a_slow_store,
    load_in_a_crowd,
    look_while_computing,
    of_tier,
    plan_and_store,
    shrink_memory,
    shrink_while_filling,
    store,
    store_after_a_late_deletion,
    suffer,
    use_again,
)
from tiered_kv.testing.simulation.neighbours import open_beside, share_store
from tiered_kv.testing.simulation.overwriting import (
    NUM_ROT,
    clear_beside_stores,
    evict_rot_and_die,
    fail_to_overwrite_and_die,
    note_down_beside_stores,
    overwrite_and_die,
    pin_and_flush,
)
from tiered_kv.testing.simulation.ranks import plan_for_ranks
from tiered_kv.testing.simulation.scrubbing import (
    break_beside_scrubs,
    overfill_beside_scrubs,
    replace_beside_scrubs,
)
from tiered_kv.testing.simulation.shapes import Shape, drawn_shape, scrubbed
from tiered_kv.testing.simulation.tape import Tape
from tiered_kv.testing.simulation.world import LONGEST_S, WEIGHTS
from tiered_kv.values.results import BlockState

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.requester import Numbers
    from tiered_kv.testing.simulation.workload import Requests

Scene = Callable[["Requests", "Numbers"], Awaitable[None]]
Suited = tuple[tuple[Scene, Callable[[Shape], bool]], ...]
"""Scenes, and for which tiers each is."""
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


async def expire_and_die(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks get too old, are evicted by name, and the process dies: they are not found again."""
    ttl_s = requests.shape.ttl_s or 0.0
    await store(requests, numbers)
    await asyncio.sleep(3 * ttl_s + 7.0)
    if numbers[1] % 2:
        await evict(requests, numbers)
        await asyncio.sleep(2.5 * (numbers[2] % 2))
    await die(requests, numbers)


async def shrink_and_die(requests: "Requests", numbers: "Numbers") -> None:
    """A tier is made smaller while some of its blocks are pinned; all are evicted, and the process dies."""
    prompts = range(1 + numbers[1] % 4)
    for prompt in [*prompts] * requests.shape.admit_after:
        await requests.do("store", (prompt, 2, 10, 2))
    await requests.do("flush", (0, 0, 0, 0))
    if numbers[1] >> 2 & 1:  # else it is memory that holds what is pinned
        await leave_memory(requests, prompts)
    await requests.do("pin", (prompts[-1], 2, 10 + numbers[2] % 3, 1 + numbers[3] % 2))
    await requests.do("resize", (0, 0, numbers[2] % 2, 0))
    for prompt in range(len(PROMPTS)):
        await evict(requests, (prompt, *numbers[1:]))
    if waits := numbers[2] % 3 == 2:
        for keys in PROMPTS:
            requests.kv.unpin(keys)
    most_bytes = requests.disk_bytes
    await asyncio.sleep((0.0, 0.5, 7.0)[numbers[2] % 3])
    if waits and most_bytes == requests.disk_bytes and not requests.world.may_be_wrong:
        requests.check_disks()  # nobody reads what has gone for so long
    await die(requests, numbers)


async def fail_once_and_die(requests: "Requests", numbers: "Numbers") -> None:
    """A call of a medium fails, or a few in a row, while blocks leave; all is well again, and the process dies."""
    world, what = requests.world, ("clear", "store", "evict", "resize")[numbers[1] % 4]
    for prompt in range(2 + numbers[2] % 3):
        await store(requests, (prompt, *numbers[1:]))
    await requests.do("flush", (0, 0, 0, 1))
    world.fail_once(numbers[2], 1 + numbers[3] % 8, 1 + (numbers[3] >> 4) % 6)
    if what == "clear":
        await requests.do("clear", (0, 0, 0, 0))
    elif what == "store":  # others have to go for it
        await store(requests, (3 + numbers[0], *numbers[1:]))
    elif what == "evict":
        await evict(requests, numbers)
    else:
        await requests.do("resize", (0, 0, numbers[2], 0))
    await asyncio.sleep(0.1)
    world.end_trouble()
    if what != "clear":
        for prompt in range(len(PROMPTS)):
            await evict(requests, (prompt, *numbers[1:]))
    await asyncio.sleep(WELL_S)
    await requests.do("flush", (0, 0, 0, 0))
    await die(requests, numbers)


async def wait_beside_stores(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks are stored without end; who flushes, drains or resizes is not kept waiting by that."""
    world = requests.world
    if world.is_slow:  # by how much others say: and two who flood cost twice, and find no more than one
        return
    world.flood()  # others have to go for what never ends
    is_over = False

    async def store_for_ever() -> None:
        while not (is_over or requests.ending or world.is_over):
            await requests.transfer(fresh(world.number())[:2], (1, 1, 10, 2), is_load=False)
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


async def drain_and_end(requests: "Requests", numbers: "Numbers") -> None:
    """What is stored before a drain that says True is there when the next process begins, whatever fails meanwhile."""
    if numbers[2] % 3 == 0:
        requests.world.fail_once(numbers[2], 1 + numbers[3] % 8)
    elif numbers[2] % 3 == 1:
        requests.world.fail_all()
    for prompt in range(1 + numbers[1] % 3):
        await store(requests, (numbers[0] + prompt, *numbers[1:]))
    if numbers[0] % 3 == 0:
        await evict(requests, numbers)
    if numbers[0] % 2:
        requests.world.end_trouble()
        await asyncio.sleep(WELL_S)
    await requests.do("drain", (0, 0, 0, 0))
    if numbers[3] % 2:
        await die(requests, numbers)


async def sync_and_lose_power(requests: "Requests", numbers: "Numbers") -> None:
    """What a flush has synced is there when the machine is back."""
    requests.world.end_trouble()
    await asyncio.sleep(WELL_S)
    for prompt in range(1 + numbers[1] % 3):
        await store(requests, (numbers[0] + prompt, *numbers[1:]))
    await requests.do("flush", (0, 0, 0, 0))
    await requests.do("power", (0, 0, 0, numbers[3] % 40))


async def use_and_flush(requests: "Requests", numbers: "Numbers") -> None:
    """A block that is used again goes to tiers that take what is used often; who flushes waits for it."""
    with requests.world.slow():
        await asyncio.sleep(WELL_S)
        await store(requests, numbers)
        if numbers[1] % 2 and requests.shape.has("cpu"):
            await requests.do("plan", (numbers[0], 2, 30, 0))
        else:
            await requests.do("load", (numbers[0], 2, 10, 2))
        await requests.do("flush", (0, 0, 0, numbers[3]))
        await die(requests, numbers)
        await asyncio.sleep(0.1)


async def load_from_afar(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks are in a store alone that is nearly late with each call: who loads or plans hears by the deadline."""
    chain, world = requests.shape.chain, requests.world
    await requests.do("store", (numbers[0], 2, 30, 2))
    await requests.do("flush", (0, 0, 0, 1))
    for i in range(len(chain) - 1):
        await requests.do("evict", (numbers[0], 2, 30, of_tier(i)))
    with world.slow(lookup_s=NEARLY_LATE_S, latency_s=NEARLY_LATE_S):
        await requests.do("plan" if numbers[1] % 2 else "load", (numbers[0], 2, 30, 0))


async def overtake(requests: "Requests", numbers: "Numbers") -> None:
    """Weights change while blocks of theirs are being loaded, and change back."""
    await store(requests, numbers)
    chain = requests.shape.chain
    if len(chain) > 1:
        await requests.do("evict", (numbers[0], 2, 30, of_tier(0)))
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
        await evict(requests, (prompt, *numbers[1:]))
    for prompt in whose:
        await store(requests, (prompt, *numbers[1:]))
    await requests.do("flush", (0, 0, 0, 1))
    for i in range(len(requests.shape.chain) - 1):
        for prompt in whose:
            await requests.do("evict", (prompt, 2, 30, of_tier(i)))
    for prompt in whose:
        await requests.do("load", (prompt, 2, 30, 2))


async def be_late(requests: "Requests", numbers: "Numbers") -> None:
    """Calls end long after their time, when others would like their slots: no block has another's bytes."""
    world, is_read = requests.world, numbers[1] % 2 == 0
    if is_read:
        await store(requests, numbers)
        await requests.do("flush", (0, 0, 0, 1))
        await leave_memory(requests, [numbers[0]])
    world.stall_all()
    await requests.do("load" if is_read else "store", (numbers[0], 2, 10, 2))
    await asyncio.sleep((0.0, 1.5)[numbers[2] % 2])
    world.end_trouble()
    others = [numbers[0] + 1 + i for i in range(3)]
    for prompt in others:
        await store(requests, (prompt, *numbers[1:]))
    await asyncio.sleep((0.0, 6.0, 25.0)[numbers[3] % 3])
    for prompt in (*others, numbers[0]):
        await requests.do("load", (prompt, 2, 10, 2))
    await leave_memory(requests, [*others, numbers[0]])
    for prompt in (*others, numbers[0]):
        await requests.do("load", (prompt, 2, 10, 2))


async def rot_and_load(requests: "Requests", numbers: "Numbers") -> None:
    """Bits change where blocks are: those are not served."""
    prompts = [numbers[0], numbers[0] + 1]
    for prompt in prompts:
        await store(requests, (prompt, *numbers[1:]))
    await requests.do("flush", (0, 0, 0, 1))
    await leave_memory(requests, prompts)
    for _ in range(NUM_ROT):
        await requests.do("rot", (0, 0, 0, 1 if requests.shape.has("store") else 2))
    for prompt in prompts:
        await requests.do("load", (prompt, 2, 10, 2))


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
    await requests.do("flush", (0, 0, 0, 1))
    if not requests.ending and not evicted.kept_by and kv.lookup_nowait(keys).num_blocks:
        raise WrongAnswer("came back", "blocks were evicted while they were being stored, and are there")


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
        world.known.removing(names)
        evicted = await requests.within(LONGEST_S, "evict", kv.evict(keys))
        world.known.removed(names, since, requests.now, "evicted", weakly=bool(evicted.kept_by))
        if at_once and names == names_of(keys, requests.weights):
            asked = world.known.ask(names)
            states = kv.membership(keys)
            world.known.check(asked, np.asarray(states == BlockState.HIT), "membership of what was just evicted")

    with world.slow():
        await asyncio.sleep(WELL_S)
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
                    world.known.forget_kept(names_of(keys, requests.weights))
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
    world, kv, is_alone = requests.world, requests.kv, requests.is_alone
    mine, *ahead = [fresh(world.number())[:1] for _ in range(1 + _AHEAD)]
    world.end_trouble()
    await asyncio.sleep(WELL_S)
    for keys in (mine, *ahead):
        await requests.transfer(keys, (1, 1, 10, 2), is_load=False)
    await requests.do("flush", (0, 0, 0, 1))
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
        await requests.transfer(mine, (1, 1, 10, 2), is_load=True)
        took_s = requests.now - started
        # Loads that came before it go before it: all prefetches would take most of a minute.
        if took_s > _AT_ONCE_S * (1 if is_alone else 4) and not requests.ending:
            raise WrongAnswer("delayed", f"a load took {took_s:.2f} s beside prefetches that came before it")


async def ask_in_a_crowd(requests: "Requests", numbers: "Numbers") -> None:
    """So many ask a store at once that the last waits for longer than a call may take: it hears what it would alone."""
    keys, kv, world = span(numbers), requests.kv, requests.world
    if world.is_slow:
        return
    with world.slow(lookup_s=_SLOW_LOOKUP_S):
        await asyncio.sleep(WELL_S)
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


_SMALL: Final = 24
_ABOUT_ONE: Final = 0.9
"""How many seeds are about one scene, and on tiers for it."""
_SCRUBBED: Final = 0.02
"""How many others have tiers that are scrubbed."""
_MOST_DRAWN: Final = 100
SCENES: Final[Suited] = (
    (expire_and_die, lambda shape: shape.ttl_s is not None and shape.has("nvme")),
    (shrink_and_die, lambda shape: shape.is_roomy),
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
    (
        shrink_memory,
        lambda shape: shape.keeps_all and shape.writes_back and shape.has("cpu") and shape.admit_after == 1,
    ),
    (shrink_while_filling, lambda shape: shape.has("cpu") or shape.has("nvme")),
    (look_while_computing, lambda shape: shape.chain[0] in {"cpu", "gpu"}),
    (evict_on_its_way, lambda shape: shape.is_owned and shape.has("gpu") and shape.cpu_slots <= _SMALL),
    (plan_and_store, lambda shape: shape.has("cpu") and shape.cpu_slots <= _SMALL),
    (overwrite_and_die, lambda shape: shape.has("nvme") and shape.disk_slots <= _SMALL),
    (
        note_down_beside_stores,
        lambda shape: shape.writes_soon and (shape.disk_slots <= _SMALL or shape.num_disks > 1),
    ),
    (fail_to_overwrite_and_die, lambda shape: shape.has("nvme") and shape.disk_slots <= _SMALL),
    (load_behind_held_slots, lambda shape: shape.keeps_all and shape.chain[0] == "nvme"),
    (pin_and_flush, lambda shape: shape.keeps_all),
    (clear_beside_stores, lambda shape: shape.is_owned),
    (evict_rot_and_die, lambda shape: shape.has("nvme") and shape.num_disks == 1),
    (flush_and_die, lambda shape: shape.keeps_all),
    (load_in_a_crowd, lambda shape: shape.keeps_all),
    (load_beside_a_slow_store, lambda shape: shape.has("store") and shape.chain[0] in {"cpu", "nvme"}),
    (hang_and_flush, lambda shape: not shape.has("other")),
    (use_again, lambda shape: (shape.keeps_all or shape.keeps_in_store) and shape.admit_after == 1),
    (suffer, lambda shape: not shape.has("other")),
    (ask_where, lambda shape: shape.keeps_in_store and shape.admit_after == 1),
    (store_after_a_late_deletion, lambda shape: shape.keeps_in_store and shape.admit_after == 1),
)


async def serve(requests: "Requests", numbers: "Numbers") -> None:
    """Clients of a server that has this cache come and go; see `clients`, which needs what a server does."""
    from tiered_kv.testing.simulation.clients import serve_clients  # noqa: PLC0415 - an extra, see `HAS_HOST`

    await serve_clients(requests, numbers)


async def plan(requests: "Requests", numbers: "Numbers") -> None:
    """Clients of a server plan, and their workers copy; see `client_planners`, which needs what a server does."""
    from tiered_kv.testing.simulation.client_planners import plan_for_clients  # noqa: PLC0415 - as in `serve`

    await plan_for_clients(requests, numbers)


HAS_HOST: Final = find_spec("msgspec") is not None
"""Whether the extra ``host`` is there: without it no seed is about clients."""
SCRUBS: Final[Suited] = (
    (break_beside_scrubs, lambda shape: shape.keeps_all),
    (replace_beside_scrubs, lambda shape: shape.keeps_all and shape.writes_soon),
    (
        overfill_beside_scrubs,
        lambda shape: (
            shape.chain == ("nvme",)
            and shape.policy == "lru"
            and shape.disk_slots <= _SMALL
            and shape.ttl_s is None
            and shape.writes_soon
        ),
    ),
)
"""Of tiers that are scrubbed. Such tiers go with any other scene, too."""
HANDS: Final[Suited] = (
    (answer_by_keys, lambda shape: shape.has("cpu") and shape.codec == "none"),
    (leave_to_each_other, lambda shape: shape.keeps_in_memory and shape.codec == "none"),
    (
        load_around_workers,
        lambda shape: (
            shape.keeps_in_memory and shape.keeps_all and shape.chain == ("cpu", "nvme") and not shape.has_short_queue
        ),
    ),
    (
        store_what_a_tier_lacks,
        lambda shape: shape.keeps_all and shape.chain == ("cpu", "nvme") and not shape.has_short_queue,
    ),
    (store_again_while_written, lambda shape: shape.keeps_all and shape.has("cpu") and shape.admit_after == 1),
)
"""Of a scheduler that copies itself, and of what it stores again."""
WHOLE: Final[Suited] = (
    (serve, lambda shape: HAS_HOST and shape.codec == "none"),
    (plan, lambda shape: HAS_HOST and shape.codec == "none" and shape.has("cpu")),
    (plan_for_ranks, lambda _: True),
    (live_on_directories, lambda shape: shape.has("nvme") and shape.is_owned and shape.ttl_s is None),
)
"""What much of the library is for alone, so that more seeds are about it than about any other scene."""
_TIMES: Final = 5
_SUITS: Final = dict((*SCENES, *SCRUBS, *HANDS, *WHOLE))
THEMES: Final = (*(scene for scene, _ in (*SCENES, *HANDS, *SCRUBS, *SCRUBS)), *_TIMES * [scene for scene, _ in WHOLE])
"""What seeds are about. Of these `SCENES` are acted in other seeds, too."""


def scene_for(shape: Shape, number: int) -> Scene:
    """Choose one that means something to such tiers."""
    scenes = [scene for scene, is_for in SCENES if is_for(shape)]
    return scenes[number % len(scenes)] if scenes else nothing


def suits(scene: Scene, shape: Shape) -> bool:
    """Say whether a scene means something to such tiers."""
    return scene is nothing or _SUITS[scene](shape)


def drawn_theme(tape: Tape) -> tuple[Scene, Shape]:
    """Draw the scene that a seed is about, or none, and tiers that it means something to."""
    theme = tape.pick("plan", THEMES) if tape.chance("plan", _ABOUT_ONE) else nothing
    for _ in range(_MOST_DRAWN):
        shape = drawn_shape(tape)
        if suits(theme, shape):
            break
    else:
        theme = nothing
    if theme is live_on_directories:
        shape = replace(shape, num_disks=2 + tape.draw("plan", NUM_DISKS - 1), changes_disks=True)
    is_scrubbed = theme in dict(SCRUBS) or tape.chance("plan", _SCRUBBED)
    return theme, scrubbed(shape, tape) if is_scrubbed else shape


async def nothing(_: "Requests", __: "Numbers") -> None:
    """Act none."""
    await asyncio.sleep(0)
