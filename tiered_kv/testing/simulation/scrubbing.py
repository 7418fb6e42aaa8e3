"""Scenes on disks that are scrubbed: what is broken is found in time, nothing else is lost or lives longer for it."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tiered_kv.testing.simulation.acting import SMALL, Quiet, scene
from tiered_kv.testing.simulation.engine import FRESH_SALT, fresh
from tiered_kv.testing.simulation.known import WrongAnswer, names_of
from tiered_kv.testing.simulation.world import LONGEST_S
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.results import BlockState
from tiered_kv.values.specs import FileLoadStoreSpec

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.requester import Numbers
    from tiered_kv.testing.simulation.workload import Requests

_BESIDE: Final = ("load", "store", "evict", "flush", "lookup", "resize", "pin", "stats", "groups", "wait")
_KINDS: Final = ("errors", "short", "disk stalls", "disk hangs")
_WAITS_S: Final = 5.0
"""What reads and whatever goes before them take of a scrub's time, where media are well."""
_SLOW_CALL_S: Final = 0.05
_ONE_PASS_S: Final = 1.5
"""After this, one pass more has begun where passes follow each other closely, and read a handful of blocks."""


@scene(lambda shape: shape.keeps_all, alone=2)
async def break_beside_scrubs(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks break that nobody asks for: they are gone within the time of a pass and its interval, others stay."""
    shape, world = requests.shape, requests.world
    await requests.well()
    prompts = [fresh(world.number()) for _ in range(2 + numbers[1] % 3)]
    await requests.put_below(*prompts)
    if numbers[0] % 2 and shape.num_disks == 1:  # of several one may be given up
        await _fail_beside_scrubs(requests, prompts, _KINDS[numbers[1] >> 2 & 3])
    quiet, started = Quiet(requests), requests.now
    broken, *others = [keys for keys in prompts if _num_on_disk(requests, keys) == len(keys)] or prompts
    if requests.ending or world.may_be_late or not await _break(requests, broken):
        return
    num_bytes = requests.disk_bytes * shape.num_disks
    while requests.now < started + shape.scrubbed_within_s(num_bytes) + _WAITS_S:
        if not numbers[3] % 2 or requests.ending:
            await asyncio.sleep(1.0)
            continue
        what = world.tape.pick("plan", _BESIDE)
        await requests.do(what, (world.tape.draw("plan", 1 << 16), 2, 2, world.tape.draw("plan", 1 << 16)))
        num_bytes = max(num_bytes, requests.disk_bytes * shape.num_disks)
    if requests.ending or world.may_have_been_wrong(started) or world.may_be_late:
        return
    if _num_on_disk(requests, broken):
        took_s = requests.now - started
        raise WrongAnswer("unscrubbed", f"{_num_on_disk(requests, broken)} blocks are broken since {took_s:.0f} s")
    lost = sum(not requests.is_there(keys) for keys in others)
    if lost and quiet.is_so() and requests.keeps_all():
        raise WrongAnswer("lost", f"{lost} of {len(others)} prompts on a disk of which others are broken")


async def _fail_beside_scrubs(requests: "Requests", prompts: Sequence[BlockKeys], kind: str) -> None:
    """Have something be wrong with the disk for the time of a pass: what lies there is not lost for it."""
    if requests.ending or requests.world.may_be_late:
        return
    quiet, before = Quiet(requests), [_num_on_disk(requests, keys) for keys in prompts]
    requests.world.begin_trouble(0, kind)
    await asyncio.sleep(requests.shape.scrubbed_within_s(requests.disk_bytes))
    await requests.well()
    if requests.ending or not quiet.is_so() or not requests.keeps_all() or not requests.are_in_use:
        return
    after = [_num_on_disk(requests, keys) for keys in prompts]
    if any(now < then for now, then in zip(after, before, strict=True)):
        raise WrongAnswer("lost", f"of prompts of two blocks on a disk that was at fault {after} are there of {before}")


@scene(lambda shape: shape.keeps_all and shape.writes_soon, alone=2)
async def replace_beside_scrubs(requests: "Requests", numbers: "Numbers") -> None:
    """Broken blocks are evicted and stored anew while a slow disk is scrubbed: from then on they are there."""
    world, kv, memory = requests.world, requests.kv, requests.memory
    with world.slow():
        for disk in world.disks:
            disk.faults.extra_s = {"slab": _SLOW_CALL_S}
        for i in range(4):
            keys = fresh(world.number())
            await requests.put_below(keys)
            if requests.ending or not await _break(requests, keys):
                continue
            await _until_held(requests, patience_s=_ONE_PASS_S * (numbers[2] >> i & 3))
            if requests.ending or not _num_on_disk(requests, keys) or (region := memory.take()) is None:
                continue  # a scrub was sooner: nothing shows when the eviction has begun
            quiet = Quiet(requests)
            evicting = asyncio.ensure_future(kv.evict(keys))
            while _num_on_disk(requests, keys):  # noqa: ASYNC110 - a turn or two of the loop
                await asyncio.sleep(0)
            handle = kv.start_store(keys, memory.fill(keys, requests.weights, region))
            requests.count_asked("store", len(keys), is_sure=True)
            await requests.within(LONGEST_S, "evict", _result_of(evicting))
            result = await requests.within(LONGEST_S, "the end of a store", handle)
            memory.give(region)
            settled = await requests.within(LONGEST_S, "settled()", result.settled())
            await asyncio.sleep(_ONE_PASS_S)
            if requests.ending or world.may_be_wrong or not quiet.is_so() or not requests.keeps_all():
                continue
            on_disk = next(tier for tier in settled if tier.tier == "nvme")
            if on_disk.dropped and requests.shape.has_short_queue:  # others fill it, and the store says so
                continue
            written = on_disk.written + on_disk.present
            if min(written, _num_on_disk(requests, keys)) < len(keys):
                there = f"{written} were written, {_num_on_disk(requests, keys)} are there"
                raise WrongAnswer("lost", f"of {len(keys)} blocks that were stored in the place of broken ones {there}")


@scene(
    lambda shape: (
        shape.chain == ("nvme",)
        and shape.policy == "lru"
        and shape.disk_slots <= SMALL
        and shape.ttl_s is None
        and shape.writes_soon
    ),
    alone=2,
)
async def overfill_beside_scrubs(requests: "Requests", _: "Numbers") -> None:
    """A small disk that is full takes more: what has to go for it is what was used least recently, not verified so."""
    world, shape, is_alone = requests.world, requests.shape, requests.is_alone
    await requests.well()
    world.flood()
    quiet, started = Quiet(requests), requests.now
    num_slots = requests.kv.stats()["nvme"].num_slots // 2  # of one KV group
    prompts = [fresh(world.number()) for _ in range(num_slots // 2 + 2)]
    for keys in prompts[:-2]:
        await requests.put(keys)
        await requests.within(LONGEST_S, "flush", requests.kv.flush())  # else writes end in any order
    await asyncio.sleep(shape.scrubbed_within_s(requests.disk_bytes * shape.num_disks))
    prompts = [keys for keys in prompts if _num_on_disk(requests, keys)] + prompts[-2:]
    for keys in prompts[-2:]:
        await requests.put(keys)
    await requests.flush()
    are_there = [_num_on_disk(requests, keys) for keys in prompts]
    if is_alone and are_there != sorted(are_there) and quiet.is_so() and not world.may_have_been_wrong(started):
        raise WrongAnswer("order", f"of prompts of two blocks, the oldest first, are there {are_there}")


async def _until_held(requests: "Requests", patience_s: float) -> None:
    """Wait until a scrub, or somebody else, holds what lies on the disk, or for so long."""
    until = requests.now + patience_s
    while requests.now < until and not requests.ending and not requests.kv.stats()["nvme"].leased:  # noqa: ASYNC110 - a tier tells nobody
        await asyncio.sleep(_SLOW_CALL_S / 4)


async def _break(requests: "Requests", keys: BlockKeys) -> bool:
    """Change a bit of each of these blocks on the disk; False where not all are there, and there alone."""
    started, weights = requests.now, requests.weights
    found = await requests.kv.lookup(keys, where=True)
    places = [run.spec for run in found.runs if isinstance(run.spec, FileLoadStoreSpec)]
    is_there = found.num_blocks == sum(map(len, places)) == len(keys)
    if requests.ending or not is_there or requests.now > started or weights != requests.weights:
        return False
    namespace = requests.kv.namespace(FRESH_SALT, group=keys.group)
    for spec in places:
        requests.world.damage(spec, [each.tobytes().hex() for each in namespace.names(keys)] + [d.hex() for d in keys])
    requests.world.known.damaged(names_of(keys, weights))
    return True


async def _result_of(task: "asyncio.Task[Any]") -> object:
    return await task


def _num_on_disk(requests: "Requests", keys: BlockKeys) -> int:
    return int(np.count_nonzero(requests.kv.membership(keys, tier="nvme") == BlockState.HIT))


SCRUBS: Final = (break_beside_scrubs, replace_beside_scrubs, overfill_beside_scrubs)
"""What is acted on tiers that are scrubbed. Such tiers go with any other scene, too."""
