"""Scrubbing: what an owned medium keeps is read and verified in the background, slowly, so that damage is found early.

A broken block is removed before anyone waits for it, and one that is never asked for does not keep its slot for ever.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import numpy as np

from tiered_kv.backend import Block, Outcome
from tiered_kv.catalog.table import Slots
from tiered_kv.events import TierScrubbed
from tiered_kv.keys import Names
from tiered_kv.tier_settings import OwnedTierSettings
from tiered_kv.tiers.base import Mask
from tiered_kv.tiers.budget import Kind, Priority, Waiter
from tiered_kv.tiers.calls import outcomes_problem
from tiered_kv.tiers.owned import OwnedTier
from tiered_kv.tiers.records import Refusals
from tiered_kv.tiers.storage import READ, all_failed

_BYTES_AT_ONCE: Final = 1 << 20
"""One block at least: so little that a load which comes meanwhile hardly waits for it."""
_AWAY_S: Final = 1.0
"""How often to look whether a tier that is bypassed is in use again."""


async def scrub_for_ever(tier: OwnedTier) -> None:
    """Verify the whole tier, again and again, as its settings say; until cancelled."""
    clock, settings = tier.health.clock, tier.settings
    assert isinstance(settings, OwnedTierSettings)  # noqa: S101 - else it would not be scrubbed
    while True:
        if not tier.is_in_use:  # before it is open it has no slots: that would be a pass
            await asyncio.sleep(_AWAY_S)
            continue
        started = clock()
        num_blocks, num_removed = await _scrub(tier)
        tier.health.emit(TierScrubbed(tier.name, num_blocks, num_removed, clock() - started))
        await asyncio.sleep(max(_AWAY_S, started + settings.scrub_interval_s - clock()))


async def _scrub(tier: OwnedTier) -> tuple[int, int]:
    """Verify what is there, slot by slot; return how many blocks that were, and how many were removed."""
    pace, shape = tier.budget.scrubs, tier.shape
    assert pace is not None  # noqa: S101 - whoever scrubs has one
    num_at_once = max(1, _BYTES_AT_ONCE // shape.stride_bytes)
    blocks = [Block.empty(shape.payload_bytes) for _ in range(num_at_once)]
    num_blocks = num_removed = start = 0
    while start < tier.index.num_slots:
        await asyncio.sleep(pace.wait_s() if tier.is_in_use else _AWAY_S)
        if not tier.is_in_use:
            continue
        names, slots, following = tier.index.ready_from(start, num_at_once)
        if len(slots):
            pace.take(len(slots) * shape.stride_bytes)
            if (num_broken := await _verify(tier, names, slots, blocks[: len(slots)])) is None:
                continue  # and again, once the tier is in use
            num_blocks += len(slots)
            num_removed += num_broken
        start = following
    return num_blocks, num_removed


async def _verify(tier: OwnedTier, names: Names, slots: Slots, blocks: list[Block]) -> int | None:
    """Remove what is not what the books say; return how many blocks are broken.

    None: the tier has come to be bypassed, and they were not read.

    They are read without a lease, so that none counts as used. What looks wrong may have been overwritten meanwhile: it
    is read again under one.

    Args:
        tier: Where they are.
        names: What should be there.
        slots: In which slots.
        blocks: To read into.
    """
    waiter = Waiter(Kind.PREFETCH, Priority.DEMOTE)
    if (give_back := await tier.take(len(names), waiter)) is None:
        return None
    try:
        seen = await _wrong(tier, tier.backend.peek, names, slots, blocks, waiter)
        if seen is None or not seen[0].any():
            return None if seen is None else 0
        with tier.index.lease(names[seen[0]]) as lease:
            at = np.flatnonzero(seen[0])[lease.slots == slots[seen[0]]]
            if not len(at):
                return 0
            names, slots = names[at], slots[at]
            seen = await _wrong(tier, tier.backend.read, names, slots, [blocks[i] for i in at], waiter)
            if seen is None:
                return None
            is_wrong, refused = seen
            is_wrong &= tier.index.find(names)[0] == slots  # else removed, and perhaps stored anew elsewhere
            tier.tell_refused(refused)
            num_broken = tier.take_out(names, slots, is_wrong, refused)
            tier.counters.corrupt += num_broken
            return num_broken
    finally:
        give_back()


async def _wrong(
    tier: OwnedTier,
    read: Callable[[int, Slots, Sequence[Block]], Awaitable[list[Outcome]]],
    names: Names,
    slots: Slots,
    blocks: list[Block],
    waiter: Waiter,
) -> tuple[Mask, Refusals] | None:
    """Say which blocks are not what they should be, as far as could be read; and why whole ones are refused.

    None: the tier is bypassed.
    """
    n = len(names)
    answer = await tier.calls.make(
        "read", lambda: read(tier.group, slots, blocks), num_blocks=n, waiter=waiter,
        problem_of=outcomes_problem(n, READ), is_failure=all_failed,
    )  # fmt: skip
    if not answer.was_made:
        return None
    if not answer.value:
        return np.zeros(n, np.bool_), {}
    verdicts, refused = await tier.records.verify_named(names, blocks, answer.value, tier.shape)
    return np.array([each in (Outcome.CORRUPT, Outcome.MISS) for each in verdicts], np.bool_), refused
