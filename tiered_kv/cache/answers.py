"""Answers to lookups and explanations: which tiers have a prefix, what loading costs, why blocks are not there.

They are made from the books of the owned tiers, from what shared tiers have said, and from what is remembered of the
past. Names carry the digest of their salt, so an answer about a tenant's keys is about that tenant's blocks alone. What
several ranks say is made one: a block is there if all of them have it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.cache.checks import check_are_keys
from tiered_kv.cache.seat import Seat
from tiered_kv.catalog.books import SlotState
from tiered_kv.catalog.locate import append_runs, states_from_any_thread
from tiered_kv.catalog.uses import Fate, said_of
from tiered_kv.media.backend import Block, Outcome
from tiered_kv.tiers.calls import Outcomes
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.owned import OwnedTier
from tiered_kv.tiers.pins import Pins
from tiered_kv.tiers.shared import SharedTier
from tiered_kv.tiers.storage import READ, StorageTier
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.tiers.tier import Batch, prefix_of
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.integers import Mask
from tiered_kv.values.keys import BlockKey, BlockKeys, Names
from tiered_kv.values.results import BlockState, LoadCost, LookupResult, TierRun, num_found
from tiered_kv.values.specs import LoadStoreSpec

_EXPLAINED_AT_ONCE: Final = 64
"""In one turn of the event loop, of all that are being explained: some 0.4 ms."""
_SAMPLED: Final = 16
"""Blocks of a tier whose headers are read."""
_PENDING: Final = int(SlotState.PENDING)
_MISS = int(BlockState.MISS)
_STATES = np.full(len(SlotState), _MISS, np.int8)
_STATES[SlotState.PENDING], _STATES[SlotState.READY] = BlockState.PENDING, BlockState.HIT


@dataclass(frozen=True)
class Explanation:
    """Why one block is there, or is not.

    Attributes:
        state: ``"ready"``; ``"pending"``: on its way to memory, and a load waits for it; ``"being written"``: on its
            way to a storage tier alone, and a load finds it once it is there; ``"bypassed"``: only in a tier that does
            not answer; ``"old epoch"``: there, but of other weights; or what befell it last: ``"evicted"``,
            ``"removed"`` (by a call), ``"expired"``, ``"corrupt"``, ``"refused"`` (sealed by a key that its tier
            lacks), ``"failed"`` (to be written), ``"dropped"``, ``"not admitted"`` (not used often enough). ``"never
            stored"`` if nothing is remembered: since the cache was opened or cleared, and as far back as its memory of
            65,536 blocks goes.
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


def lookup_result(chains: Sequence[Chain], found: Sequence[list[TierRun]]) -> LookupResult:
    """Say what is there of one prefix, for every rank.

    Args:
        chains: One per rank, of one KV group.
        found: What each has, from the first block on.
    """
    runs = found[0] if len(found) == 1 else _weakest(chains[0].names, found)
    num_blocks = num_found(runs)
    payload_bytes = len(chains) * chains[0].group.payload_bytes
    costs = {tier.name: _cost(tier, len(chains)) for tier in chains[0].storage}
    return LookupResult(num_blocks, tuple(runs), num_blocks * payload_bytes, chains[0].group.block_size, costs)


def with_pending(parts: Sequence[tuple[Chain, Batch]], found: LookupResult) -> LookupResult:
    """Say how many blocks behind a prefix a load would wait for, or find, on every rank."""
    start, num_pending = found.num_blocks, 0
    if start == len(parts[0][1]):
        return found
    for chain, batch in parts:
        host = chain.host.index
        first = host.find(batch.names[start : start + 1])[1]
        if len(parts) == 1 and not (len(first) and first[0] == SlotState.PENDING):
            return found  # as nearly always: that should cost nothing
        behind = batch[start:]
        n = prefix_of(chain.fills.are_coming(behind.names) | chain.has(behind))
        num_pending = n if chain is parts[0][0] else min(num_pending, n)
    return replace(found, num_pending=num_pending) if num_pending else found


def why_not_more(parts: Sequence[tuple[Chain, Batch]], found: Sequence[list[TierRun]], num_blocks: int) -> str:
    """Say why the prefix ends where it does: what befell the first block behind it, on the rank that lacks it."""
    for (chain, batch), runs in zip(parts, found, strict=True):
        if num_blocks < len(batch) and num_found(runs) == num_blocks:
            return chain.why_missing(batch[num_blocks : num_blocks + 1])
    return ""


def why_not_found(parts: Sequence[tuple[Chain, Batch]], num_found: int, first: int) -> str:
    """Say what befell the block ``first``, on the rank that lacks it; nothing if all blocks were found."""
    if num_found == len(parts[0][1]):
        return ""
    blocks = [(chain, batch[first : first + 1]) for chain, batch in parts]
    chain, block = next((each for each in blocks if not each[0].locate(each[1])), blocks[0])
    return chain.why_missing(block)


async def with_specs(chain: Chain, batch: Batch, found: LookupResult) -> LookupResult:
    """Say of each run where its blocks are, as far as its tier can tell. Each tier is asked once."""
    tiers = {tier.name: tier for tier in chain.tiers}
    runs_of: dict[str, list[TierRun]] = {}
    for run in found.runs:
        runs_of.setdefault(run.tier, []).append(run)

    async def locate(name: str) -> dict[TierRun, LoadStoreSpec]:
        runs = runs_of[name]
        spec = await tiers[name].locate(batch[np.concatenate([np.arange(run.start, run.stop) for run in runs])])
        if spec is None:
            return {}
        ends = accumulate(run.stop - run.start for run in runs)
        return {run: spec[end - (run.stop - run.start) : end] for run, end in zip(runs, ends, strict=True)}

    specs: dict[TierRun, LoadStoreSpec] = {}
    for each in await asyncio.gather(*map(locate, runs_of)):
        specs |= each
    return replace(found, runs=tuple(replace(run, spec=specs.get(run)) for run in found.runs))


def states_of(
    parts: Sequence[tuple[Chain, Batch]], tier: str | None = None, *, prefix_only: bool = False
) -> NDArray[np.int8]:
    """Say of each block what is known of it, from any thread; of several ranks, what the one says that has least.

    See `BlockCache.membership`.

    Raises:
        ConfigurationError: No tier is called ``tier``, or it has no books here.
    """
    look = _states_of_rank if tier is None else partial(_states_in, tier)
    first, *others = [look(chain, batch, prefix_only=prefix_only) for chain, batch in parts]
    return np.minimum.reduce([first, *others]) if others else first


async def explain(seat: Seat, keys: BlockKeys, *, ask: bool) -> list[Explanation]:
    """Explain each block; of several ranks, one that lacks it speaks. See `TieredKV.explain`."""
    check_are_keys(keys)
    explanations: list[Explanation] = []
    others: list[list[bytes]] | None = None
    for start in range(0, max(1, len(keys)), _EXPLAINED_AT_ONCE):  # of no keys at all it is looked at whose they are
        piece = keys[start : start + _EXPLAINED_AT_ONCE]
        parts = seat.batches(piece)
        asked = [await _ask(chain, batch) if ask else {} for chain, batch in parts]
        if ask and others is None and not all(chain.has(batch).all() for chain, batch in parts):
            others = [await _epochs_in(chain, batch.namespace.epoch) for chain, batch in parts]
        async with seat.cache.explaining:
            of_ranks = [
                _of_rank(chain, batch, piece, [*seat.past_epochs, *epochs], seat.pins, found)
                for (chain, batch), epochs, found in zip(parts, others or [[]] * len(parts), asked, strict=True)
            ]
            await asyncio.sleep(0)
        explanations += [
            next((each for each in block if each.state != "ready"), block[0]) for block in zip(*of_ranks, strict=True)
        ]
    return explanations


def _cost(tier: StorageTier, num_ranks: int) -> LoadCost:
    """Say what blocks cost that are read from a tier now, all ranks' parts of them; nothing where none was read yet."""
    answer_s, found_part = 0.0, 1.0
    if isinstance(tier, SharedTier):  # one that is bypassed has nothing, which needs no question
        answer_s, found_part = (0.0, 0.0) if tier.health.is_bypassed else tier.answers.cost()
    if (now := tier.speed.estimate()) is None:
        return LoadCost(0.0, 0.0, answer_s=answer_s, found_part=found_part)
    stride = tier.shape.stride_bytes
    return LoadCost(
        now.first_s, num_ranks * stride * now.byte_s, now.num_others, now.others_bytes // stride,
        answer_s=answer_s, found_part=found_part,
    )  # fmt: skip


def _weakest(names: Sequence[str], found: Sequence[list[TierRun]]) -> list[TierRun]:
    """Cut to the prefix that all have; of each block, the slowest tier that some rank has to read it from."""
    num_blocks = min(num_found(runs) for runs in found)
    slowest = np.zeros(num_blocks, np.int64)
    for runs in found:
        for run in runs:
            part = slowest[run.start : run.stop]
            np.maximum(part, names.index(run.tier), out=part)
    weakest: list[TierRun] = []
    append_runs(weakest, names, slowest)
    return weakest


def _states_in(name: str, chain: Chain, batch: Batch, *, prefix_only: bool) -> NDArray[np.int8]:
    tier = next((each for each in chain.booked if each.name == name), None)
    if tier is None:
        owned = ", ".join(each.name for each in chain.booked)
        raise ConfigurationError(f"no tier {name!r} here that this cache owns; there are {owned}")
    indexes = [tier.index] if tier.is_in_use else []
    return _STATES[states_from_any_thread(indexes, batch.names, prefix_only=prefix_only)]


def _states_of_rank(chain: Chain, batch: Batch, *, prefix_only: bool) -> NDArray[np.int8]:
    """Ask shared tiers, one after another, for what is nowhere above them; their answers come later.

    Only where there is one of them at most is known what is behind the end of a prefix: each may have what others lack.
    """
    prefix_only = prefix_only and len(chain.shared) <= 1
    books = chain.books_in_use()
    states = _STATES[states_from_any_thread(books, batch.names, prefix_only=prefix_only and not chain.shared)]
    for tier in chain.shared:
        left = np.flatnonzero(states == _MISS)
        if not len(left):
            break
        if tier.health.is_bypassed:
            continue
        states[left], to_ask = tier.answers.look(batch.names[left], prefix_only=prefix_only)
        if to_ask.any():
            chain.loop_calls.call(partial(tier.ask_later, batch[left[to_ask]], prefix_only=prefix_only))
    return states


async def _ask(chain: Chain, batch: Batch) -> dict[str, Mask]:
    others = [tier for tier in chain.shared if not tier.health.is_bypassed]
    found = {tier: await tier.find_each(batch) for tier in others}
    return {tier.name: each for tier, each in found.items() if not tier.health.is_bypassed}  # else it did not answer


def _of_rank(
    chain: Chain,
    batch: Batch,
    keys: BlockKeys,
    epochs: Sequence[bytes],
    pins: Pins,
    asked: dict[str, Mask],
) -> list[Explanation]:
    n, before = len(batch), _weights_of(chain, keys, epochs)
    is_pending, is_dirty = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    serving, silent, writing = dict[str, Mask](), dict[str, Mask](), dict[str, Mask]()
    for tier in chain.booked:
        slots, states = tier.index.find(batch.names)
        if isinstance(tier, StorageTier):
            writing[tier.name] = states == _PENDING
        else:
            is_pending |= states == _PENDING
        is_dirty |= tier.index.is_dirty(batch.names)
        has = tier.index.ready(batch.names) & ~tier.index.is_bounce(slots)
        (serving if tier.is_in_use else silent)[tier.name] = has
    serving |= asked
    unknown_in = tuple(tier.name for tier in chain.shared if tier.name not in asked)
    spoiled = {tier.name: tier.suspects.why(batch.names) for tier in chain.shared}
    fates = chain.fates.of(batch.names)
    is_pinned = pins.is_pinned(chain, batch, keys)
    explanations = []
    for i in range(n):
        in_tiers = tuple(name for name in chain.names if name in serving and serving[name][i])
        if in_tiers:
            state, detail = "ready", ""
        elif is_pending[i]:
            state, detail = "pending", ""
        elif taking := [name for name, is_taking in writing.items() if is_taking[i]]:
            state, detail = "being written", taking[0]
        elif hidden := [name for name, has in silent.items() if has[i]]:
            state, detail = "bypassed", hidden[0]
        elif said := [(why[i], name) for name, why in spoiled.items() if why[i]]:
            state, detail = said[0]
        else:
            fate, detail = fates[i]
            state = said_of(fate)
            if fate is Fate.UNKNOWN and before[i]:
                state, detail = "old epoch", before[i]
        explanations.append(
            Explanation(state, detail, in_tiers, unknown_in, is_pinned=bool(is_pinned[i]), is_dirty=bool(is_dirty[i]))
        )
    return explanations


async def _epochs_in(chain: Chain, served: bytes) -> list[bytes]:
    """Return of which other weights storage tiers hold blocks: an earlier start may have served them.

    The headers of a few say it, read one by one from all over a tier. One that is late is not waited for.
    """
    epochs = dict[bytes, None]()
    for tier in chain.owned:
        index = tier.index
        for start in range(0, index.num_slots, max(1, index.num_slots // _SAMPLED)):
            names, _, _ = index.ready_from(start, 1)
            if not len(names) or not tier.is_in_use:
                continue
            if (key := await _key_in(tier, names, chain.tasks)) is not None:
                epochs[key.namespace.epoch] = None
    return [epoch for epoch in epochs if epoch != served]


async def _key_in(tier: OwnedTier, names: Names, tasks: Tasks) -> BlockKey | None:
    """Return the key in the header of one record, if that can be read in time."""
    block = Block.empty(tier.shape.payload_bytes)
    if (turn := await tier.turn_to_look(1, tasks)) is None:
        return None
    lease = tier.index.lease(names)
    slots = lease.slots.copy()
    if slots[0] < 0:  # removed since
        turn.give_back()
        return None
    seen: asyncio.Future[list[Outcome] | None] = asyncio.get_running_loop().create_future()

    def see(outcomes: list[Outcome] | None) -> None:
        if not seen.done():
            seen.set_result(outcomes)

    def end(answer: Outcomes) -> None:
        lease.release()  # nobody else has the slot before, though it is late
        see(answer.value)

    read = partial(tier.backend.read, tier.group, slots, [block])
    turn.make(None, read, end, allowed=READ, num_blocks=1, on_late=lambda: see(None))
    return tier.records.key_in(block.header) if await seen == [Outcome.HIT] else None


def _weights_of(chain: Chain, keys: BlockKeys, epochs: Sequence[bytes]) -> list[str]:
    """Say of each block of which of these other weights it is there, the first one, or an empty string."""
    before = [""] * len(keys)
    for epoch in epochs:
        batch = chain.naming.batch(keys, epoch)
        has = chain.has(batch)
        before = [each or (epoch.hex()[:8] if there else "") for each, there in zip(before, has, strict=True)]
    return before
