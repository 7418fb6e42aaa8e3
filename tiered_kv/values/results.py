"""What calls answer. Counts are blocks; ``by_tier`` maps a tier's name to blocks, in the order of the chain.

`LookupResult.split` also says how many of the blocks found to load, where computing them may be faster.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from tiered_kv.values.errors import ConfigurationError, Reason, TierFault
from tiered_kv.values.integers import as_int, is_number
from tiered_kv.values.specs import LoadStoreSpec


@dataclass(frozen=True)
class LoadCost:
    """What loading from one tier takes, as seen by the reads of late.

    Attributes:
        first_s: Seconds before the first block: what the tier was asked for before comes first.
        block_s: Seconds for each block, many of them asked for at once.
        num_others: Loads and prefetches under way there, with which a load takes turns.
        others_blocks: How many blocks they are still going to ask for, all together.
        answer_s: Seconds until a tier that others use too says which blocks it has, when `TieredKV.membership` has it
            asked; 0 before it was.
        found_part: Which part of the blocks that it was asked for like that it had; 1 before it was, 0 while it is
            bypassed.
    """

    first_s: float
    block_s: float
    num_others: int = 0
    others_blocks: int = 0
    answer_s: float = 0.0
    found_part: float = 1.0

    def seconds(self, num_blocks: NDArray[np.int64]) -> NDArray[np.float64]:
        """Say how long so many blocks take, for each of several numbers; none take no time."""
        before = np.minimum(num_blocks * self.num_others, self.others_blocks)
        seconds: NDArray[np.float64] = (num_blocks > 0) * self.first_s + (num_blocks + before) * self.block_s
        return seconds


@dataclass(frozen=True)
class Split:
    """Which part of a prefix to load.

    Attributes:
        num_blocks: How many leading blocks to load, or with ``order="back"`` all that were found.
        order: ``"front"``: load these, and compute what is behind them then. ``"back"``: do both at once, see
            `TieredKV.start_load`.
        load_s: What loading these takes, by the estimates.
        total_s: How long until all blocks that were found are in place.
    """

    num_blocks: int
    order: Literal["front", "back"]
    load_s: float
    total_s: float


def split(
    runs: Sequence[tuple[str, int]],
    costs: Mapping[str, LoadCost],
    *,
    block_size: int,
    prefill_tokens_per_s: float,
    queue_s: float,
    chunk_tokens: int | None,
    max_storage_tokens: int | None,
) -> Split:
    """Choose how many leading blocks to load; see `LookupResult.split`.

    Args:
        runs: Blocks in prompt order: the tier, and how many. Tiers without a cost take no time.
        costs: By tier.
        block_size: Tokens a block.
        prefill_tokens_per_s: Of the engine.
        queue_s: How long the engine would not begin to compute anyway.
        chunk_tokens: How many tokens the engine computes at once, if it can load meanwhile.
        max_storage_tokens: How many tokens may come from tiers that have a cost; as many as there are if left out.
    """
    _check(prefill_tokens_per_s, queue_s, chunk_tokens)
    block_s = block_size / prefill_tokens_per_s
    n, most = sum(count for _, count in runs), _most(runs, costs, block_size, max_storage_tokens)
    load_s = _seconds(runs, costs)
    left = np.arange(n, -1, -1)
    total = (np.maximum(load_s, queue_s) + left * block_s)[: most + 1]
    best = most - int(np.argmin(total[::-1]))  # of equals the longest: it computes least
    if chunk_tokens is not None and most == n:
        chunk = max(1, chunk_tokens // block_size)
        computed = np.minimum(np.arange(0, n + chunk, chunk), n)
        have_computed = queue_s + computed * block_s
        have_loaded = _seconds(runs[::-1], costs)[n - computed]
        meets = int(np.argmax(_MARGIN * have_loaded <= have_computed))  # when all is computed, at the latest
        if have_computed[meets] < total[best]:
            return Split(n, "back", float(load_s[n]), float(have_computed[meets]))
    return Split(best, "front", float(load_s[best]), float(total[best]))


def _seconds(runs: Sequence[tuple[str, int]], costs: Mapping[str, LoadCost]) -> NDArray[np.float64]:
    """Say how long the first 0, 1, 2, ... blocks take, from one tier after another."""
    counts: dict[str, int] = {}
    steps = [np.zeros(1)]
    for tier, num_blocks in runs:
        before = counts.get(tier, 0)
        counts[tier] = before + num_blocks
        steps.append(np.diff(costs.get(tier, _NOTHING).seconds(np.arange(before, before + num_blocks + 1))))
    seconds: NDArray[np.float64] = np.cumsum(np.concatenate(steps))
    return seconds


def _most(
    runs: Sequence[tuple[str, int]], costs: Mapping[str, LoadCost], block_size: int, max_tokens: int | None
) -> int:
    """Return how many leading blocks there are of which no more than so many tokens come from tiers with a cost."""
    n = 0
    left = sum(count for _, count in runs)
    if max_tokens is not None:
        left = max(0, as_int("max_storage_tokens", max_tokens, least=None)) // block_size
    for tier, num_blocks in runs:
        taken = min(num_blocks, left) if tier in costs else num_blocks
        n += taken
        if taken < num_blocks:
            break
        left -= taken if tier in costs else 0
    return n


def _check(prefill_tokens_per_s: float, queue_s: float, chunk_tokens: int | None) -> None:
    if not (is_number(prefill_tokens_per_s) and prefill_tokens_per_s > 0):
        raise ConfigurationError(f"prefill_tokens_per_s must be a positive number, got {prefill_tokens_per_s!r:.80}")
    if not (is_number(queue_s) and queue_s >= 0):
        raise ConfigurationError(f"queue_s must be a number of seconds, 0 or more, got {queue_s!r:.80}")
    if chunk_tokens is not None:
        as_int("chunk_tokens", chunk_tokens, least=1)


_NOTHING: Final = LoadCost(0.0, 0.0)
_MARGIN: Final = 1.1
"""An estimate is not exact, and whoever misses the end of a load by a little computes a whole step more."""


@dataclass(frozen=True)
class TierRun:
    """Blocks ``start <= i < stop`` of the batch are in ``tier``.

    ``spec`` says where there, ``len(spec) == stop - start``, if the lookup was asked (``where=True``) and the tier can
    tell. A place may be another block's a moment later: a record says whose it is (`parse_record`), a slot of memory
    does not, so pin or lease what is read there.
    """

    tier: str
    start: int
    stop: int
    spec: LoadStoreSpec | None = field(default=None, repr=False)


def num_found(runs: Sequence[TierRun]) -> int:
    """Count the blocks of a prefix by its runs, which follow one another."""
    return runs[-1].stop if runs else 0


class BlockState(IntEnum):
    """What can be said of one block now, without waiting, by `TieredKV.membership`."""

    MISS = 0
    """Absent."""
    ASKING = 1
    """No tier of this cache's own has it, and a shared one is being asked: look again later."""
    PENDING = 2
    """It is being stored, or filled: not yet to be loaded at once."""
    HIT = 3
    """To be loaded. Of a shared tier a second old at most, and a load decides."""


@dataclass(frozen=True)
class LookupResult:
    """The longest prefix that could be loaded now.

    Attributes:
        num_blocks: Its length.
        runs: Which tier each block would come from, neighbours in one tier together.
        num_bytes: Payload bytes of the prefix, as the engine has them.
        block_size: Tokens a block.
        costs: By storage tier, what loading from it takes now: no time where nothing was read from it yet.
        num_pending: How many blocks right behind the prefix are there or on their way, as another call, or another
            engine of the host, is storing or fetching them. A load that is given them too waits for them, at most until
            its deadline: cheaper than to compute the same. Nobody waits for a planner's workers: what these copy out is
            not counted.
    """

    num_blocks: int
    runs: tuple[TierRun, ...]
    num_bytes: int
    block_size: int
    costs: Mapping[str, LoadCost] = field(default_factory=dict)
    num_pending: int = 0

    @property
    def by_tier(self) -> dict[str, int]:
        """Blocks per tier."""
        counts: dict[str, int] = {}
        for run in self.runs:
            counts[run.tier] = counts.get(run.tier, 0) + run.stop - run.start
        return counts

    @property
    def estimated_load_s(self) -> float:
        """How long loading all of it would take by now; memory counts as 0, and so does what was never read."""
        parts = [(self.costs[tier], count) for tier, count in self.by_tier.items() if tier in self.costs]
        return sum(float(cost.seconds(np.array(count))) for cost, count in parts)

    def split(
        self,
        *,
        prefill_tokens_per_s: float,
        queue_s: float = 0.0,
        chunk_tokens: int | None = None,
        max_storage_tokens: int | None = None,
    ) -> Split:
        """Choose how many leading blocks to load, so that these and computing the others take the least time.

        Costs are as of the lookup: what the tiers read lately took, and what waits in their lines. A tier that has no
        cost yet is loaded from, and then it has.

        Args:
            prefill_tokens_per_s: How fast the engine computes a prompt.
            queue_s: How long this request waits for the engine anyway: loading takes nothing in that time.
            chunk_tokens: How many tokens the engine computes at once, if it can load and compute at the same time: then
                ``order="back"`` may be the answer.
            max_storage_tokens: How many tokens may come from storage, none if below 0; any number if left out.

        Raises:
            ConfigurationError: A speed that is not positive, a time below 0, or tokens that are no int.
        """
        return split(
            [(run.tier, run.stop - run.start) for run in self.runs],
            self.costs,
            block_size=self.block_size,
            prefill_tokens_per_s=prefill_tokens_per_s,
            queue_s=queue_s,
            chunk_tokens=chunk_tokens,
            max_storage_tokens=max_storage_tokens,
        )


@dataclass(frozen=True)
class LoadResult:
    """What a load brought.

    Attributes:
        num_blocks: The prefix that is in place, byte for byte.
        num_requested: How many keys were asked for.
        by_tier: Where each block that is in place was found.
        num_bytes: Payload bytes of what is in place, as the engine has them.
        seconds: From the call to its end, on the cache's clock.
        faults: What kept blocks from being in place, if something but a plain miss did: a bypassed tier that may have
            them is named too, once. What befell the first one that is not in place comes last, without gaps.
        missed_because: What befell the first block that is not in place, as in `CacheStatistics.missed_because`, also
            of a plain miss; empty if all are. `TieredKV.explain` says more.
    """

    num_blocks: int
    num_requested: int
    by_tier: Mapping[str, int] = field(default_factory=dict)
    num_bytes: int = 0
    seconds: float = 0.0
    faults: tuple[TierFault, ...] = ()
    missed_because: str = field(default="", compare=False)
    _mask: NDArray[np.bool_] | None = field(default=None, repr=False, compare=False)

    @property
    def mask(self) -> NDArray[np.bool_]:
        """``(num_requested,)``, which blocks are in place: of a load without gaps, the prefix.

        Where it is False the target may hold anything.
        """
        return np.arange(self.num_requested) < self.num_blocks if self._mask is None else self._mask


@dataclass(frozen=True)
class TierStore:
    """What became of a store's blocks in one tier: every block of the store is counted once.

    ``deferred`` blocks come there later or by others: the tier has ``write="back"``, or wants them used more often
    (``admit_after``), or another rank writes them, of which each writes its share of what all of them hold; or memory
    had them already, and the tier, which lacks them, is being given them.
    """

    tier: str
    written: int = 0
    present: int = 0
    deferred: int = 0
    dropped: int = 0
    failed: int = 0


@dataclass(frozen=True)
class StoreResult:
    """What a store took from its source, which may be reused once this is here.

    What becomes of it then is not known yet: where memory has no room for a block that was copied, and the tiers below
    do not take it, as their queue is full or their medium fails, it is in no tier in the end. `settled` says so, and
    `TierStatistics.dropped_because` and ``failed`` of each tier count it.

    Attributes:
        num_requested: How many keys were given.
        num_stored: Blocks copied from the source.
        num_present: Blocks that were there already, that another call has stored meanwhile, or is still copying.
        num_dropped: Blocks not copied from the source, so that no tier gets them, unless by a worker that has slots for
            them: it may hang for days.
        drop_reasons: Why.
        num_bytes: Payload bytes of what was copied, as the engine has them.
        seconds: From the call until the source could be reused, on the cache's clock.
    """

    num_requested: int
    num_stored: int
    num_present: int
    num_dropped: int
    drop_reasons: Mapping[Reason, int] = field(default_factory=dict)
    num_bytes: int = 0
    seconds: float = 0.0
    _settled: Callable[[], Awaitable[tuple[TierStore, ...]]] | None = field(default=None, repr=False, compare=False)

    async def settled(self) -> tuple[TierStore, ...]:
        """Wait until every tier has the blocks or has given them up, and say which, fastest tier first.

        Never raises for a tier. Cancellation ends the wait only.
        """
        return await self._settled() if self._settled is not None else ()


@dataclass(frozen=True)
class PrefetchResult:
    """What a prefetch brought: the prefix that was in the tier when it ended, and the blocks it had to move for it."""

    num_blocks: int
    num_moved: int
    faults: tuple[TierFault, ...] = ()


@dataclass(frozen=True)
class RemovalResult:
    """What became of blocks that are unfindable in this cache since `evict` or `clear` was called.

    Attributes:
        num_blocks: How many were in an owned tier: of `evict`, the keys that one was in, of any rank; of `clear`, the
            blocks of each tier, KV group and rank, so that what is in two tiers counts twice.
        kept_by: The storage tiers that are not known to have removed them by now: they failed, or were not in time, or
            a write that failed lately may come behind. Each is told again, until it has; before that another process,
            or another start, may find blocks there. Of an ``s3`` tier also if a block may be in a pack that cannot be
            named yet. A shared tier that is only read is not told, nor named: what is there is others' to keep.
    """

    num_blocks: int
    kept_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class PinResult:
    """What a pin holds now: the prefix that was in owned tiers, as far as the quota and half of each tier went."""

    num_blocks: int


@dataclass(frozen=True)
class SwapOutResult(StoreResult):
    """What `TieredKV.swap_out` kept.

    Attributes:
        num_pinned: The prefix that is pinned. What is behind it is in the tiers as far as it was stored, and may be
            evicted.
    """

    num_pinned: int = 0


@dataclass(frozen=True)
class SwapResult:
    """What a swap moved, in pages; each target counts.

    Attributes:
        num_out: Pages that went out, all or none.
        num_in: Pages that came in, all or none.
        num_copied: Pages copied within the engine, all or none.
        fault: Why it ended early, and with how many pages.
        failed: Which part did not go well then: ``"out"``, ``"in"`` or ``"copy"``. The targets of that part may hold
            anything; the parts after it have not begun.
    """

    num_out: int
    num_in: int
    num_copied: int
    fault: TierFault | None = None
    failed: str = ""


@dataclass(frozen=True)
class TierStatistics:
    """One tier at one moment, all KV groups together. Slots and blocks; counters since the cache was opened.

    Attributes:
        tier: Its name.
        num_slots: 0 for a tier that the cache does not own.
        free: Slots that hold nothing. Each slot is one of free, pending, ready, doomed and withheld, or beyond what a
            tier that was made smaller may have: while `resize` goes on, what somebody holds there is counted, too.
            Bounce slots are counted in `CacheStatistics` alone.
        ready: Readable blocks.
        evictable: Those that nobody uses, and that do not wait to be written below.
        leased: Slots that somebody reads, or holds for it.
        pending: Slots that are being filled.
        doomed: Removed blocks that somebody still reads.
        is_bypassed: Whether loads and stores go on without it now.
        open_breakers: For what its calls failed or were late: ``"reads"``, ``"writes"``, ``"deletes"``, ``"upkeep"``,
            ``"locates"``.
        hits: Blocks loaded that this tier had before any promotion: each block loaded counts in one tier.
        dirty: Blocks that wait here to be written below.
        withheld: Slots that no block is put in for now: their disk is away, or full.
        written: Blocks that were stored or written down to here.
        promoted: Blocks that a load or prefetch has copied up to here.
        evicted: Blocks that had to go as others needed their room.
        dropped: Blocks that were to be written here, and were not.
        corrupt: Blocks that were read and found broken.
        failed: Blocks that the medium failed to read or write.
        expired: Blocks that went because they were here for longer than ``ttl_s``.
        dropped_because: The dropped ones by reason.
        held_back: Of the dropped ones, those that `max_write_bytes_per_day` has kept from being written.
        bytes_read, bytes_written: Of records that the medium brought and took, headers and padding included. 0 for
            memory tiers, whose copies are a part of each load and store.
        block_bytes_written: Of the blocks in the records written alone, as they are in memory.
        read_s, write_s: How long its calls took. Calls under way side by side add up: bytes over seconds is what one of
            them gets.
        read_queue_s, write_queue_s: How long they waited before that: for bytes in flight, and for a turn.
        capacity_bytes, used_bytes: Of its slots, and of those with a readable block; 0 for a tier that the cache does
            not own.
        in_flight_bytes: Being read or written now, for transfers; of storage.
        num_calls, num_waiting: Of these transfers' calls, those that the medium has not answered, and those that wait.
        facts: What else the backend says of itself, e.g. its I/O mode; of one that is not open yet, as ``last_error``,
            why.
    """

    tier: str
    num_slots: int = 0
    free: int = 0
    ready: int = 0
    evictable: int = 0
    leased: int = 0
    pending: int = 0
    doomed: int = 0
    dirty: int = 0
    withheld: int = 0
    is_bypassed: bool = False
    open_breakers: tuple[str, ...] = ()
    hits: int = 0
    written: int = 0
    promoted: int = 0
    evicted: int = 0
    dropped: int = 0
    dropped_because: Mapping[Reason, int] = field(default_factory=dict)
    corrupt: int = 0
    failed: int = 0
    expired: int = 0
    held_back: int = 0
    bytes_read: int = 0
    read_s: float = 0.0
    read_queue_s: float = 0.0
    bytes_written: int = 0
    block_bytes_written: int = 0
    write_s: float = 0.0
    write_queue_s: float = 0.0
    capacity_bytes: int = 0
    used_bytes: int = 0
    in_flight_bytes: int = 0
    num_calls: int = 0
    num_waiting: int = 0
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def write_amplification(self) -> float:
        """Bytes written for each byte of the blocks stored: records, and what the backend keeps beside them.

        What a disk writes for a byte that it is given is its own to say. 0 before the first write.
        """
        beside = self.facts.get("own_bytes_written", 0)
        written = self.bytes_written + (beside if isinstance(beside, int) else 0)
        return written / self.block_bytes_written if self.block_bytes_written else 0.0


@dataclass(frozen=True)
class CacheStatistics:
    """A whole cache at one moment.

    Attributes:
        tiers: Fastest first. The host memory that blocks pass through is one of them, ``"cpu"``, also where no CPU tier
            keeps any: then it has no slots. Shared tiers are among them, which `BlockCache.media` leaves out.
        transfers: Tasks under way: loads, stores, prefetches, fills, writes.
        store_queue_bytes: Bytes of stores accepted and not yet in every tier.
        bounce_free: Free bounce slots; all of them when nothing moves.
        bounce_slots: How many there are.
        requested: Blocks that loads which have ended were asked for; the hits of all tiers and ``missed`` add up to it.
        missed: Those that were not in place at the end.
        missed_because: The same by `Reason`, or by what had befallen the block, a state of `Explanation`, or ``"not in
            time"``: it came when the load had looked for it. Behind the first block missed, all are missed for its
            reason.
        store_requested: Blocks given to stores that have let go of their source; the next three add up to it.
        stored, present, dropped: What became of them, see `StoreResult`: of what was stored, tiers that did not take it
            count that, see `TierStatistics`.
        dropped_because: The dropped ones by reason, as in `StoreResult.drop_reasons`.
        num_preemptions: Sequences swapped out by name, `TieredKV.swap_out`.
        pinned_bytes: Of slots that `TieredKV.pin` holds.
        page_locked_bytes: Host memory that is page-locked for a GPU.
        is_pageable: Whether a GPU copies to and from memory that is not, much slower.
        is_device_usable: False once the engine's device has failed: then nothing is loaded or stored any more.
    """

    tiers: tuple[TierStatistics, ...]
    transfers: int
    store_queue_bytes: int
    bounce_free: int
    bounce_slots: int
    requested: int
    missed: int
    store_requested: int
    stored: int
    present: int
    dropped: int
    missed_because: Mapping[str, int] = field(default_factory=dict)
    dropped_because: Mapping[Reason, int] = field(default_factory=dict)
    num_preemptions: int = 0
    pinned_bytes: int = 0
    page_locked_bytes: int = 0
    is_pageable: bool = False
    is_device_usable: bool = True

    def __getitem__(self, tier: str) -> TierStatistics:
        named = {each.tier: each for each in self.tiers}
        if tier not in named:
            known = f"there are {', '.join(named)}" if named else "there are none while a host's server is away"
            raise KeyError(f"no tier {tier!r} here; {known}")
        return named[tier]
