"""Why blocks can be loaded, or cannot: from the books of the owned tiers, and from what is remembered of the past.

Names carry the digest of their salt, so what is told of a tenant's keys is about that tenant's blocks alone.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from tiered_kv.backend import Block, Outcome
from tiered_kv.catalog.books import SlotState
from tiered_kv.catalog.history import Fate, said_of
from tiered_kv.keys import BlockKeys
from tiered_kv.open_cache import OpenCache
from tiered_kv.record import key_in
from tiered_kv.tiers.base import Mask
from tiered_kv.tiers.batch import Batch
from tiered_kv.tiers.budget import Kind, Priority, Waiter
from tiered_kv.tiers.calls import outcomes_problem
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.pins import Pins
from tiered_kv.tiers.storage import READ, all_failed

_ASKED_AT_ONCE: Final = 32
_SAMPLED: Final = 16
"""Blocks of a tier whose headers are read."""
_PENDING: Final = int(SlotState.PENDING)


@dataclass(frozen=True)
class Explanation:
    """Why one block is there, or is not.

    Attributes:
        state: ``"ready"``; ``"pending"``: on its way; ``"bypassed"``: only in a tier that does not answer; ``"old
            epoch"``: there, but of other weights; or what befell it last: ``"evicted"``, ``"removed"`` (by a call),
            ``"expired"``, ``"corrupt"``, ``"failed"`` (to be written), ``"dropped"``, ``"not admitted"`` (not used
            often enough). ``"never stored"`` if nothing is remembered: since the cache was opened or cleared, and as
            far back as its memory of 65,536 blocks goes.
        detail: The tier of which the state speaks; of ``"dropped"`` perhaps the reason, as in
            `StoreResult.drop_reasons`; of ``"old epoch"`` how the digest of those weights begins.
        in_tiers: The tiers that have it, fastest first.
        unknown_in: Tiers that were not asked, and may have it.
        is_pinned: It cannot be evicted for want of room.
        is_dirty: It waits to be written to the tier below.
    """

    state: str
    detail: str = ""
    in_tiers: tuple[str, ...] = ()
    unknown_in: tuple[str, ...] = ()
    is_pinned: bool = False
    is_dirty: bool = False

    def __str__(self) -> str:
        words = [f"{self.state} ({self.detail})" if self.detail else self.state]
        words += [f"in {tier}" for tier in self.in_tiers] + [f"unknown in {tier}" for tier in self.unknown_in]
        return ", ".join(words + ["pinned"] * self.is_pinned + ["dirty"] * self.is_dirty)


async def explain(cache: OpenCache, keys: BlockKeys, *, ask: bool) -> list[Explanation]:
    """Explain each block; of several ranks, one that lacks it speaks. See `TieredKV.explain`."""
    parts = cache.batches(keys)
    asked = [await _ask(chain, batch) if ask else {} for chain, batch in parts]
    # To its end, whoever waits: what is being read must not be overwritten.
    others = [
        [*cache.past_epochs, *(await cache.finish(_epochs_in(chain, batch), "explain") if ask else [])]
        for chain, batch in parts
    ]
    of_ranks = [
        _of_rank(chain, batch, keys, _weights_of(chain, keys, epochs), cache.pins, found)
        for (chain, batch), epochs, found in zip(parts, others, asked, strict=True)
    ]
    return [next((each for each in block if each.state != "ready"), block[0]) for block in zip(*of_ranks, strict=True)]


async def _ask(chain: Chain, batch: Batch) -> dict[str, Mask]:
    others = [tier for tier in chain.shared if not tier.health.is_bypassed]
    found = {tier.name: np.zeros(len(batch), np.bool_) for tier in others}
    for tier in others:
        for start in range(0, len(batch), _ASKED_AT_ONCE):
            # One by one: they say how long a prefix they have, and here the blocks behind a hole count as well.
            part = [batch[i : i + 1] for i in range(start, min(start + _ASKED_AT_ONCE, len(batch)))]
            answers = await asyncio.gather(*(tier.find(each) for each in part))
            found[tier.name][start : start + len(part)] = np.concatenate(answers)
    return {tier.name: found[tier.name] for tier in others if not tier.health.is_bypassed}  # else it did not answer


def _of_rank(
    chain: Chain,
    batch: Batch,
    keys: BlockKeys,
    before: Sequence[str],
    pins: Pins,
    asked: dict[str, Mask],
) -> list[Explanation]:
    n = len(batch)
    is_pending, is_dirty = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    serving, silent = dict[str, Mask](), dict[str, Mask]()
    for tier in chain.booked:
        slots, states = tier.index.find(batch.names)
        is_pending |= states == _PENDING
        is_dirty |= tier.index.is_dirty(batch.names)
        has = tier.index.ready(batch.names) & ~tier.index.is_transient(slots)
        (serving if tier.is_in_use else silent)[tier.name] = has
    serving |= asked
    unknown_in = tuple(tier.name for tier in chain.shared if tier.name not in asked)
    broken = {tier.name: tier.suspects.broken(batch.names) for tier in chain.shared}
    fates = chain.ledger.fates(batch.names)
    is_pinned = pins.is_pinned(chain, batch, keys)
    explanations = []
    for i in range(n):
        in_tiers = tuple(name for name in chain.names if name in serving and serving[name][i])
        if in_tiers:
            state, detail = "ready", ""
        elif is_pending[i]:
            state, detail = "pending", ""
        elif hidden := [name for name, has in silent.items() if has[i]]:
            state, detail = "bypassed", hidden[0]
        elif spoiled := [name for name, is_broken in broken.items() if is_broken[i]]:
            state, detail = said_of(Fate.CORRUPT), spoiled[0]
        else:
            fate, detail = fates[i]
            state = said_of(fate)
            if fate is Fate.UNKNOWN and before[i]:
                state, detail = "old epoch", before[i]
        explanations.append(
            Explanation(state, detail, in_tiers, unknown_in, is_pinned=bool(is_pinned[i]), is_dirty=bool(is_dirty[i]))
        )
    return explanations


async def _epochs_in(chain: Chain, batch: Batch) -> list[bytes]:
    """Return of which other weights storage tiers hold blocks: an earlier start may have served them.

    The headers of a few say it, read one by one from all over a tier, unless all blocks asked for are here.
    """
    epochs = dict[bytes, None]()
    if np.logical_or.reduce([index.ready(batch.names) for index in chain.indexes()]).all():
        return []
    for tier in chain.owned:
        index, block = tier.index, Block.empty(tier.shape.payload_bytes)
        for start in range(0, index.num_slots, max(1, index.num_slots // _SAMPLED)):
            names, slots, _ = index.ready_from(start, 1)
            if not len(names) or not tier.is_in_use:
                continue
            with index.lease(names):
                read = partial(tier.backend.read, tier.group, slots, [block])
                answer = await tier.calls.make(
                    "read", read, num_blocks=1, waiter=Waiter(Kind.PREFETCH, Priority.DEMOTE),
                    problem_of=outcomes_problem(1, READ), is_failure=all_failed,
                )  # fmt: skip
            if answer.value == [Outcome.HIT] and (key := key_in(block.header)) is not None:
                epochs[key.namespace.epoch] = None
    return [epoch for epoch in epochs if epoch != batch.namespace.epoch]


def _weights_of(chain: Chain, keys: BlockKeys, epochs: Sequence[bytes]) -> list[str]:
    """Say of each block of which of these other weights it is there, the first one, or an empty string."""
    before = [""] * len(keys)
    for epoch in epochs:
        batch = chain.naming.batch(keys, epoch)
        has = np.logical_or.reduce([index.ready(batch.names) for index in chain.indexes()])
        before = [each or (epoch.hex()[:8] if there else "") for each, there in zip(before, has, strict=True)]
    return before
