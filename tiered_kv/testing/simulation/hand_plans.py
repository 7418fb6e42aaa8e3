"""A scheduler that copies to and from host slots itself: it plans for several tenants at once, and answers key by key.

What is planned side by side is left to each other, fails, is late or cancelled. What nobody has copied is not served,
what is counted as there is there in the end, what a tier lacks gets there with the next store, planned or not.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.testing.simulation.acting import COMPUTED_LATER, Quiet, scene
from tiered_kv.testing.simulation.engine import LAYOUT, PROMPTS, content
from tiered_kv.testing.simulation.known import WrongAnswer, names_of
from tiered_kv.testing.simulation.planned_jobs import PLANNED_S
from tiered_kv.testing.simulation.world import LONGEST_S
from tiered_kv.transfers.jobs import Job
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import BlockKeys, hash_blocks
from tiered_kv.values.plan import Outcomes, Plan
from tiered_kv.values.results import BlockState

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.requester import Numbers
    from tiered_kv.testing.simulation.workload import Requests

_LATE_S: Final = (0.0, 0.0, 0.01, 0.3, 4.0)
"""How long the scheduler does something else before it copies what is planned."""
_WAYS: Final = ("all", "some", "some, then all", "none", "cancel", "bare")
"""How it answers."""
_TOGETHER: Final = ((0, 4), (0,), (4, 0, 1), (1, 2), (5, 6), (0, 4))
"""Prompts of one plan: 0 and 4 are two tenants' of the same hashes, 5 and 6 of the other KV group."""
_LONG: Final = 40
"""Blocks of a prompt of which every other one is planned to be stored: more than a load looks anew."""
_SLOW_WRITE_S: Final = 0.02


class _Hand:
    """Plans stores and loads of a cache, and copies what is planned."""

    def __init__(self, requests: "Requests") -> None:
        self._requests = requests
        self._tape = requests.world.tape
        self._planner = requests.planning().with_workers()
        self._rows = requests.rows()

    async def store(self, runs: Sequence[BlockKeys], way: str = "", late_s: float | None = None) -> None:
        """Have a store of several prompts planned, copy some of it, and answer in some way or other."""
        requests, known = self._requests, self._requests.world.known
        names = [name for run in runs for name in names_of(run, requests.weights)]
        keys = [run[i : i + 1] for run in runs for i in range(len(run))]
        mask: NDArray[np.bool_] = np.zeros(len(names), np.bool_)
        known.store_begins(names, requests.now, is_computed=False)
        requests.count_asked("store", len(names), is_sure=False)
        try:
            job = self._planner.plan_store(list(runs))
            plan = await requests.within(PLANNED_S, "planned()", job.planned())
            await asyncio.sleep(self._tape.pick("plan", _LATE_S) if late_s is None else late_s)
            self._answer(job, plan, keys, names, way or self._tape.pick("plan", _WAYS))
            result = await requests.within(LONGEST_S, "the end of a job", job.ended())
            mask = result.mask if len(result.mask) else mask
        finally:
            may_be_lost = requests.may_be_lost(is_planned=True)  # without room for all, nothing is sent below
            known.store_ends(names, requests.now, is_whole=bool(mask.all()), may_be_lost=may_be_lost)

    def _answer(self, job: Job, plan: Plan, keys: Sequence[BlockKeys], names: Sequence[Any], way: str) -> None:
        """Copy some of what is planned, and say of each block whether it was; or cancel all of it."""
        if job.result is not None or not plan.moves:
            return
        self._requests.world.tell(f"answers {way}")
        [move] = plan.moves
        if way == "cancel":
            job.cancel()
            return
        odds = {"none": 1.0, "all": 0.0}.get(way, 0.5)
        left = [at for at in move.positions if odds == 1.0 or (odds and self._tape.chance("plan", odds))]
        rows, group = self._rows[move.host.pool], keys[0].group
        for at, slot in zip(move.positions, move.host.ids.tolist(), strict=True):
            if at not in left:
                rows[slot, : LAYOUT.groups[group].payload_bytes] = np.frombuffer(content(names[at]), np.uint8)
                self._requests.world.known.computed([names[at]])
        if way == "bare":
            self._answer_bare(job, keys)
        for at in move.positions:
            if at in left or way != "some, then all":
                job.complete(keys[at], moved=at not in left)
        if way == "some, then all":
            self._planner.complete(Outcomes(job.number, 0, len(move.positions)))

    @staticmethod
    def _answer_bare(job: Job, keys: Sequence[BlockKeys]) -> None:
        """What may be another tenant's is refused."""
        if len({run.salt_id for run in keys if run[0] == keys[0][0]}) > 1 and job.result is None:
            try:
                job.complete([keys[0][0]])
            except ConfigurationError:
                return
            raise WrongAnswer("two tenants", "a hash that blocks of two tenants have was taken for an answer")

    async def load(self, keys: BlockKeys, *, gaps: bool = False) -> NDArray[np.bool_]:
        """Have a load planned, look at what is held for it now and later, and return which blocks are."""
        requests, known = self._requests, self._requests.world.known
        names, held = names_of(keys, requests.weights), np.zeros(len(keys), np.bool_)
        asked = known.ask(names)
        known.used(names, requests.now)
        requests.count_asked("load", len(keys), is_sure=False)
        job = self._planner.plan_load(keys, gaps=gaps)
        plan = await requests.within(PLANNED_S, "planned()", job.planned())
        for late_s in (0.0, self._tape.pick("plan", _LATE_S)):
            await asyncio.sleep(late_s)
            if job.result is not None or not plan.moves:
                break
            [move] = plan.moves
            held[list(move.positions)] = True
            for at, slot in zip(move.positions, move.host.ids.tolist(), strict=True):
                data = content(names[at])
                if self._rows[move.host.pool][slot, : len(data)].tobytes() != data:
                    raise WrongAnswer("wrong bytes", f"block {at} of a planned load, in the slot that is held for it")
        known.check(asked, held, "a planned load")
        job.complete(keys, moved=bool(self._tape.draw("plan", 2)))
        await requests.within(LONGEST_S, "the end of a job", job.ended())
        known.used(names, requests.now)
        return held


@scene(lambda shape: shape.has("cpu") and shape.codec == "none", alone=1)
async def answer_by_keys(requests: "Requests", numbers: "Numbers") -> None:
    """Stores are planned beside each other, for several tenants; what was answered as copied is loaded, and right."""
    prompts = _TOGETHER[numbers[0] % len(_TOGETHER)]
    runs = [PROMPTS[prompt][: 1 + numbers[2] % 5] for prompt in prompts]
    await requests.evict(*prompts if numbers[3] % 2 else ())
    with requests.planning().unless_ended():
        hand = _Hand(requests)
        await asyncio.gather(*(hand.store(runs) for _ in range(1 + numbers[1] % 2)))
        for run in runs:
            await requests.get(run)
            if numbers[3] >> 2 & 1:
                await hand.load(run, gaps=bool(numbers[3] >> 3 & 1))


@scene(lambda shape: shape.keeps_in_memory and shape.codec == "none", alone=1)
async def leave_to_each_other(requests: "Requests", numbers: "Numbers") -> None:
    """Plans, or stores without one, leave blocks to each other, which may not come: none of those counts as there."""
    kv, quiet = requests.kv, Quiet(requests)
    prompt = (0, 4, 5)[numbers[0] % 3]
    some = PROMPTS[prompt][: 1 + numbers[2] % 4]
    more = PROMPTS[prompt][: len(some) + 1]
    await requests.evict(prompt)
    with requests.planning().unless_ended():
        before = kv.stats()
        if numbers[1] % 2:
            hand = _Hand(requests)
            await asyncio.gather(hand.store([some]), hand.store([more]))
        else:
            cancelled = (1, 0, numbers[1] >> 1, 1)
            await asyncio.gather(
                requests.transfer(some, cancelled, is_load=False),
                requests.transfer(more, COMPUTED_LATER, is_load=False),
            )
        after = kv.stats()
        is_all = after.store_requested - before.store_requested == len(some) + len(more)
        is_quiet = requests.is_alone and quiet.is_so(1) and not (before.transfers or requests.world.may_be_late)
        if requests.keeps_in_memory() and is_quiet and is_all:
            # What a scene beside this one still copies counts as present, too, as `StoreResult` says.
            num_there = sum(int(np.count_nonzero(kv.membership(keys) >= BlockState.PENDING)) for keys in (some, more))
            counted = after.stored + after.present - before.stored - before.present
            if counted > num_there:
                raise WrongAnswer("counts", f"two stores counted {counted} blocks as there, and {num_there} are")


@scene(
    lambda shape: (
        shape.keeps_in_memory and shape.keeps_all and shape.chain == ("cpu", "nvme") and not shape.has_short_queue
    ),
    alone=1,
)
async def load_around_workers(requests: "Requests", _: "Numbers") -> None:
    """Workers have slots for every other block of a long prompt: a load with gaps has what storage has of the rest."""
    world, kv = requests.world, requests.kv
    await requests.well()
    world.flood()
    tokens = np.arange(_LONG * LAYOUT.groups[0].block_size) + 1_000_000 * world.number()
    keys = hash_blocks(tokens, block_size=LAYOUT.groups[0].block_size, salt="long")
    with requests.planning().unless_ended():
        hand, disk = _Hand(requests), requests.shape.chain[-1]
        for __ in range(requests.shape.admit_after):
            await hand.store([keys], "all", 0.0)
        await requests.flush()
        if requests.ending:
            return
        quiet = Quiet(requests)
        for tier in requests.shape.chain[:-1]:
            await kv.evict(keys, tier=tier)
        evens = [keys[at : at + 1] for at in range(0, _LONG, 2)]
        for each in evens:
            await requests.within(LONGEST_S, "evict", kv.evict(each))
        storing = asyncio.ensure_future(hand.store(evens, "none", 1.0))
        await asyncio.sleep(0.1)
        is_there: NDArray[np.bool_] = kv.membership(keys, tier=disk) == BlockState.HIT
        held = await hand.load(keys, gaps=True)
        still = kv.membership(keys, tier=disk) == BlockState.HIT
        missing = int(np.count_nonzero(is_there & still & ~held))
        memory = kv.stats()["cpu"]  # scenes that had begun before this one go on, with slots of their own
        has_room = memory.pending + memory.leased + missing <= requests.shape.cpu_slots
        is_well = has_room and quiet.is_so() and requests.are_in_use and not world.may_be_late
        if missing and is_well and requests.is_alone and not world.trouble.has_rot:
            raise WrongAnswer("lost", f"{missing} blocks are on the disk that a load with gaps was not given")
        await storing
        await requests.within(LONGEST_S, "evict", kv.evict(keys))


@scene(lambda shape: shape.keeps_all and shape.chain == ("cpu", "nvme") and not shape.has_short_queue, alone=1)
async def store_what_a_tier_lacks(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks have gone from the disk alone, and are stored again, with a plan or without: the disk has them then."""
    await requests.well()
    await requests.store(*[numbers[0]] * requests.shape.admit_after)
    await requests.flush()
    prompt = PROMPTS[numbers[0] % len(PROMPTS)]
    requests.num_removals += 1
    requests.world.known.taken_apart(names_of(prompt, requests.weights))
    await requests.within(LONGEST_S, "evict", requests.kv.evict(prompt, tier="nvme"))
    requests.world.known.taken_apart(names_of(prompt, requests.weights))
    with requests.planning().unless_ended():
        if numbers[1] % 2:
            await _Hand(requests).store([prompt], "all", 0.0)
        else:
            await requests.store(numbers[0])
    await requests.flush()
    await requests.leave_memory(numbers[0])
    if numbers[2] % 2:
        await requests.load(numbers[0])
    else:
        await requests.die((0, 0, 1, numbers[3]))


@scene(lambda shape: shape.keeps_all and shape.has("cpu") and shape.admit_after == 1, alone=1)
async def store_again_while_written(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks leave memory while they are written, and are stored again: drained, they are there, or it says not so."""
    world = requests.world
    await requests.well()
    for disk in world.disks:
        disk.faults.latency_s = _SLOW_WRITE_S
    await requests.store(numbers[0])
    await asyncio.sleep(0.005 * (numbers[1] % 8))
    if numbers[2] % 3:
        world.fail_once(numbers[2], 1 + numbers[3] % 3, 1 + (numbers[3] >> 4) % 3)
    await requests.leave_memory(numbers[0])
    await requests.store(numbers[0])
    await asyncio.sleep(0.2)
    world.end_trouble()
    for disk in world.disks:
        disk.faults.latency_s = 1e-4
    await requests.do("drain", (0, 0, 0, 0))
    await requests.die((0, 0, 1, numbers[3] >> 8))
