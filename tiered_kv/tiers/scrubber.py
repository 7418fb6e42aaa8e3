"""Scrubbing: what an owned medium keeps is read and verified in the background, slowly, so that damage is found early.

A broken block is removed before anyone waits for it, and one that is never asked for does not keep its slot for ever.
"""

import asyncio
from typing import Final

from tiered_kv.backend import Block, OwnedTierSettings
from tiered_kv.events import TierScrubbed
from tiered_kv.tiers.owned import OwnedTier

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
            if (num_broken := await tier.scrub(names, slots, blocks[: len(slots)])) is None:
                continue  # and again, once the tier is in use
            num_blocks += len(slots)
            num_removed += num_broken
        start = following
    return num_blocks, num_removed
