"""Work on whole tiers: remove blocks that are too old, evict and clear on request, note down books, scrub.

Scrubbing verifies slowly, in the background, all that an owned medium keeps. So a broken block is removed before anyone
waits for it, and one that is never asked for does not keep its slot for ever.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from tiered_kv.catalog.books import Change, SlotState
from tiered_kv.catalog.table import Slots
from tiered_kv.media.backend import Block, Outcome
from tiered_kv.settings.tier_settings import OwnedTierSettings
from tiered_kv.tiers.calls import Outcomes, Turn
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.owned import OwnedTier
from tiered_kv.tiers.records import Refusals
from tiered_kv.tiers.storage import READ, StorageTier
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.tiers.tier import Batch, BookedTier
from tiered_kv.values.events import TierScrubbed
from tiered_kv.values.integers import Mask
from tiered_kv.values.keys import Names

_TICK_S: Final = 1.0
_SLOTS_AT_ONCE: Final = 1 << 16
"""How many slots are looked at in one step, in some 50 us; at most 4,096 of them are emptied at once, in 1 ms."""
_BYTES_AT_ONCE: Final = 1 << 20
"""How much is verified in one step, at least a block: a load that comes meanwhile hardly waits for so little."""
_AWAY_S: Final = 1.0
"""How often to look whether a tier that is bypassed is in use again."""

Removals: TypeAlias = list[tuple[StorageTier, "asyncio.Task[bool]"]]
"""Under way, by tier."""


async def keep_up(chain: Chain) -> None:
    """Once a second make up for what a medium did not do, and remove what is too old; until cancelled."""
    while True:
        await asyncio.sleep(_TICK_S)
        for storage in chain.storage:
            storage.tick()
        for booked in chain.booked:
            if booked.index.ttl_s is not None:
                await _expire(chain, booked)


async def scrub_for_ever(tier: OwnedTier, tasks: Tasks) -> None:
    """Verify the whole tier, again and again, as its settings say; until cancelled, as ``tasks`` are with it."""
    clock, settings = tier.health.clock, tier.settings
    assert isinstance(settings, OwnedTierSettings)  # noqa: S101 - else it would not be scrubbed
    while True:
        if not tier.is_in_use:  # before it is open it has no slots: that would be a pass
            await asyncio.sleep(_AWAY_S)
            continue
        started = clock()
        num_blocks, num_removed = await _scrub(tier, tasks)
        tier.health.emit(TierScrubbed(tier.name, num_blocks, num_removed, clock() - started))
        await asyncio.sleep(max(_AWAY_S, started + settings.scrub_interval_s - clock()))


def evict(chain: Chain, batch: Batch, tier: str | None) -> tuple[Mask, Removals]:
    """Remove blocks from one tier, or from all.

    All of it is decided when this returns: a cancellation of `kept_by` ends the wait for the media, and nothing else.

    Returns:
        Which blocks were in an owned tier, and the removals from media, which go on.
    """
    found = np.zeros(len(batch), np.bool_)
    for booked in (each for each in chain.booked if tier in (None, each.name)):
        found |= booked.index.ready(batch.names)
    if tier is None:
        chain.expected.forget(batch.names)
    elif tier != chain.memory[0].name:  # else what has it no more writes nothing down
        chain.unwritten.evict(tier, batch.names[_may_go_down(chain, batch)])
    for memory in (each for each in chain.memory if tier in (None, each.name)):
        memory.index.remove(batch.names)
        memory.left.forget(batch.names)
    storage = [each for each in chain.storage if tier in (None, each.name)]
    if storage:
        chain.sought.forget(batch.names)
    removals = [(each, chain.tasks.spawn(each.forget(batch), f"evict from {each.name}")) for each in storage]
    chain.room.changed()
    return found, removals


async def kept_by(removals: Removals) -> list[str]:
    """Wait for removals, for as long as their tiers may take; name the tiers of those that have not gone well."""
    if not removals:
        return []
    await asyncio.wait([task for _, task in removals], timeout=max(tier.health.timeout_s for tier, _ in removals))
    is_gone = [task.done() and not task.cancelled() and not task.exception() and task.result() for _, task in removals]
    return [tier.name for (tier, _), gone in zip(removals, is_gone, strict=True) if not gone]


async def clear(chains: Sequence[Chain]) -> tuple[int, list[str]]:
    """Empty the owned tiers, after a restart too; tiers that do not answer are not waited for beyond their time.

    Returns:
        How many blocks there were, and the tiers that are not known to have removed theirs.
    """
    removals: Removals = []
    num_blocks = sum(tier.index.statistics().ready for chain in chains for tier in chain.booked)
    for chain in chains:
        chain.expected.clear()
        chain.sought.clear()
        for memory in chain.memory:
            memory.index.clear()
            memory.left.clear()
        chain.room.changed()
        removals += [(tier, chain.tasks.spawn(tier.clear(), f"clear {tier.name}")) for tier in chain.owned]
    return num_blocks, await kept_by(removals)


async def pay(chains: Sequence[Chain]) -> bool:
    """Have all media remove what they could not be told to remove; say whether that was all."""
    return all([await tier.pay() for chain in chains for tier in chain.storage])


async def checkpoint(chains: Sequence[Chain], *, sync: bool) -> bool:
    """Let the owned tiers remember what they hold, in order of use; with ``sync`` through a loss of power.

    Returns:
        Whether all do that hold something: those that are open.
    """
    is_well = True
    for chain in chains:
        for tier in chain.owned:
            if tier.is_in_use:
                is_well &= await tier.checkpoint(sync=sync)
            else:
                is_well &= not tier.health.is_open
    return is_well


async def _expire(chain: Chain, tier: BookedTier) -> None:
    """Look through a tier once. What is on its way up is had by those who load it already, and found by nobody else."""
    host = chain.host.index
    for _ in range(0, tier.index.num_slots, _SLOTS_AT_ONCE):
        expired = tier.index.expire(limit=_SLOTS_AT_ONCE)
        tier.counters.expired += len(expired)
        if len(expired):
            slots, states = host.find(expired)
            has_come = (states == SlotState.READY) & host.is_bounce(slots)  # what is read now may be another tier's
            host.remove(expired[has_come], Change.EXPIRED)
            chain.room.changed()
        await asyncio.sleep(0)


def _may_go_down(chain: Chain, batch: Batch) -> Mask:
    """Say which blocks may be on their way from memory to the tiers below it, or are to come to memory first."""
    may = chain.expected.has(batch.names)
    for memory in chain.memory:
        may |= memory.index.find(batch.names)[0] >= 0
    return may


async def _scrub(tier: OwnedTier, tasks: Tasks) -> tuple[int, int]:
    """Verify what is there, slot by slot; return how many blocks could be read, and how many were removed."""
    pace, shape = tier.calls.budget.scrubs, tier.shape
    assert pace is not None  # noqa: S101 - whoever scrubs has one
    num_at_once = max(1, _BYTES_AT_ONCE // shape.stride_bytes)
    blocks = _empty(num_at_once, shape.payload_bytes)
    num_blocks = num_removed = start = 0
    failed_at = -1
    while start < tier.index.num_slots:
        await asyncio.sleep(pace.wait_s() if tier.is_in_use else _AWAY_S)
        if not tier.is_in_use:
            continue
        names, slots, following = tier.index.ready_from(start, num_at_once)
        if len(slots):
            pace.take(len(slots) * shape.stride_bytes)
            late = asyncio.Event()
            work = _verify(tier, names, slots, blocks[: len(slots)], tasks, late.set)
            verifying = tasks.spawn(work, f"verify {len(slots)} blocks of {tier.name}")
            # Where the tier is used on although a read is late, what that hangs on has been taken out of use.
            while not verifying.done() and not (late.is_set() and tier.is_in_use):
                await asyncio.wait({verifying}, timeout=_AWAY_S)
            if not verifying.done():
                blocks = _empty(num_at_once, shape.payload_bytes)  # the others are that read's until it ends
                continue
            if (seen := verifying.result()) is None:
                continue  # and again, once the tier is in use
            num_read, num_broken = seen
            num_removed += num_broken
            if num_read < len(slots) and failed_at != start:
                failed_at = start
                continue  # once: a place that cannot be read must not hold up the others
            num_blocks += num_read
        start = following
    return num_blocks, num_removed


def _empty(num_blocks: int, payload_bytes: int) -> list[Block]:
    return [Block.empty(payload_bytes) for _ in range(num_blocks)]


async def _verify(
    tier: OwnedTier, names: Names, slots: Slots, blocks: list[Block], tasks: Tasks, on_late: Callable[[], None]
) -> tuple[int, int] | None:
    """Remove what is not what the books say; return how many blocks could be read, and how many of them are broken.

    None: the tier has come to be bypassed, and they were not read.

    They are read without a lease, so that none counts as used. What looks wrong may have been overwritten meanwhile: it
    is read again under one, which is taken when its turn has come.

    Args:
        tier: Where they are.
        names: What should be there.
        slots: In which slots.
        blocks: To read into.
        tasks: Those that this is of.
        on_late: Called when the medium is late with them; the bytes in flight are others' from then on.
    """
    if (turn := await tier.turn_to_look(len(names), tasks)) is None:
        return None
    is_wrong, _, num_read = await _wrong(tier, turn, tier.backend.peek, names, slots, blocks, on_late)
    if not is_wrong.any():
        return num_read, 0
    at = is_wrong.nonzero()[0]
    if (turn := await tier.turn_to_look(len(at), tasks)) is None:
        return None
    with tier.index.lease(names[at]) as lease:
        at = at[lease.slots == slots[at]]
        if not len(at):
            turn.give_back()
            return num_read, 0
        names, slots = names[at], slots[at]
        again = [blocks[i] for i in at]
        is_wrong, refused, num_again = await _wrong(tier, turn, tier.backend.read, names, slots, again, on_late)
        is_wrong &= tier.index.find(names)[0] == slots  # else removed, and perhaps stored anew elsewhere
        tier.tell_refused(refused)
        num_broken = tier.take_out(names, is_wrong, refused)
        tier.counters.corrupt += num_broken
        return num_read - len(at) + num_again, num_broken


async def _wrong(
    tier: OwnedTier,
    turn: Turn,
    read: Callable[[int, Slots, Sequence[Block]], Awaitable[list[Outcome]]],
    names: Names,
    slots: Slots,
    blocks: list[Block],
    on_late: Callable[[], None],
) -> tuple[Mask, Refusals, int]:
    """Say which blocks are not what they should be, why whole ones are refused, and how many could be read."""
    n, ended = len(names), asyncio.get_running_loop().create_future()
    call, told = partial(read, tier.group, slots, blocks), ended.set_result
    turn.make(None, call, told, allowed=READ, num_blocks=n, on_late=on_late)
    await asyncio.wait({ended})
    answer: Outcomes = ended.result()
    if not answer.value:
        return np.zeros(n, np.bool_), {}, 0
    verification = tier.records.verification_by_name(names, blocks, tier.shape)
    verdicts = await verification.verify_all(answer.value)
    is_wrong = np.array([each in (Outcome.CORRUPT, Outcome.MISS) for each in verdicts], np.bool_)
    return is_wrong, verification.refused, n - verdicts.count(Outcome.FAILED)
