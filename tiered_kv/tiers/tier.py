"""Tiers as transfers know them: names and counts, the books that this cache keeps, and memory that copies reach.

`Batch` and `Naming` make names of an engine's keys, of one KV group on one rank. `ReadReport` and `WriteReport` say
what became of the blocks of one read or write, a `Tally` of those of one store in all tiers.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.catalog.index import TierIndex
from tiered_kv.catalog.table import counted, hash_names, names_at
from tiered_kv.media.backend import Outcome
from tiered_kv.memory.host import HostSlab, check_host_memory
from tiered_kv.values.errors import ConfigurationError, Reason
from tiered_kv.values.integers import Mask
from tiered_kv.values.keys import BlockKeys, Names, Namespace, Shard, StoredKeys
from tiered_kv.values.layout import blocks_within
from tiered_kv.values.results import TierStore
from tiered_kv.values.specs import CPULoadStoreSpec, LoadStoreSpec

_NONE: Final[Mapping[Reason, int]] = {}
_MOST_NAMESPACES: Final = 4096
"""Tenants come and go; the digest of one costs a microsecond."""


@dataclass
class Batch:
    """Blocks by name. Nobody changes one; like all that each call makes it is not frozen, which takes 60 ns a field.

    Attributes:
        namespace: Theirs; what a store holds of several prompts may be of others too.
        names: ``(n, 4)``.
        positions: Which block of its prompt each is.
        spaces: ``(n,)`` namespaces, where they are not all of one.
        prompts: ``(n,)``, of what has waited to be written, the `Prompt` of each; None in place of one that is unknown.
    """

    namespace: Namespace
    names: Names
    positions: NDArray[np.int64]
    spaces: NDArray[np.object_] | None = None
    prompts: NDArray[np.object_] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, at: "slice | NDArray[np.int64] | NDArray[np.bool_]") -> "Batch":
        """Return some of the blocks; a mask of all of them, or such a slice, gives this batch."""
        if isinstance(at, slice):
            if not at.start and at.step is None and (at.stop is None or at.stop >= len(self.names)):
                return self
            names = self.names[at]
        elif at.dtype == np.bool_ and len(at.nonzero()[0]) == len(self.names):
            return self
        else:
            names = names_at(self.names, at)
        spaces = None if self.spaces is None else self.spaces[at]
        prompts = None if self.prompts is None else self.prompts[at]
        return Batch(self.namespace, names, self.positions[at], spaces, prompts)


class Naming:
    """Adds to an engine's keys what they leave out: the fingerprint, the epoch and the shard.

    Attributes:
        fingerprint: Of the KV group.
        shard: Whose part of the heads the blocks are.
    """

    def __init__(self, fingerprint: bytes, shard: Shard) -> None:
        self.fingerprint = fingerprint
        self.shard = shard
        self._namespaces: dict[tuple[bytes, bytes], Namespace] = {}

    def batch(self, keys: StoredKeys, epoch: bytes) -> Batch:
        """Name blocks that weights of ``epoch`` computed."""
        if isinstance(keys, BlockKeys):
            space = self.namespace(keys.salt_id, epoch)
            names = space.names(keys)
            positions = counted(len(names))
            return Batch(space, names, keys.start + positions if keys.start else positions)
        spaces, sizes = [self.namespace(run.salt_id, epoch) for run in keys.runs], [len(run) for run in keys.runs]
        words = np.frombuffer(b"".join([run.digests for run in keys.runs]), np.uint64).reshape(-1, 4)
        positions = np.array([at for run in keys.runs for at in range(run.start, run.start + len(run))], np.int64)
        if all(space is spaces[0] for space in spaces):
            return Batch(spaces[0], words ^ spaces[0].mask, positions)
        masks = np.repeat(np.array([space.mask for space in spaces]), sizes, axis=0)
        return Batch(spaces[0], words ^ masks, positions, np.repeat(np.array(spaces, object), sizes))

    def namespace(self, salt_id: bytes, epoch: bytes) -> Namespace:
        """Return what a tenant's blocks, computed by weights of ``epoch``, share."""
        space = self._namespaces.get((epoch, salt_id))
        if space is None:
            if len(self._namespaces) >= _MOST_NAMESPACES:
                self._namespaces.clear()
            space = self._namespaces[epoch, salt_id] = Namespace(self.fingerprint, epoch, salt_id, self.shard.part)
        return space


@dataclass
class Counters:
    """Counts of one tier since the cache was opened; of blocks unless they say otherwise."""

    hits: int = 0
    """Loaded from here: each block asked for is counted once, in the tier that had it before promotion."""
    written: int = 0
    """Stored or written down to here."""
    promoted: int = 0
    """Copied up to here by a load or prefetch."""
    evicted: int = 0
    """Made to leave for want of room."""
    dropped: int = 0
    """Not written for want of room, because the queue was full, or as `dropped_because` says."""
    dropped_because: Counter[Reason] = field(default_factory=Counter)
    corrupt: int = 0
    """Read and found broken."""
    failed: int = 0
    """Not read or written because the medium failed."""
    held_back: int = 0
    """Not written as so many bytes a day have been already; counted as dropped, too."""
    expired: int = 0
    """Removed because they were here for too long."""
    bytes_read: int = 0
    """Of records that reads brought, padding included: nothing is counted for a memory tier."""
    read_s: float = 0.0
    """Of these reads, each as long as the medium took: several may be under way at once."""
    read_queue_s: float = 0.0
    """How long reads waited for their turn before that."""
    bytes_written: int = 0
    """Of records that the medium took."""
    block_bytes_written: int = 0
    """Of the blocks in these records alone, as they are in slots of memory."""
    write_s: float = 0.0
    """Of these writes."""
    write_queue_s: float = 0.0
    """How long they waited for their turn before that."""


class Tier:
    """What all tiers have: a name and counts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counters = Counters()

    @property
    @abstractmethod
    def can_keep(self) -> bool:
        """Whether blocks may stay here at all."""

    async def locate(self, batch: Batch) -> LoadStoreSpec | None:
        """Say where all these blocks are in this tier now; None where that is not to be told."""
        return None


class BookedTier(Tier):
    """A tier of which this cache knows, without asking, what is in it.

    Attributes:
        index: Which block is in which slot.
    """

    index: TierIndex

    @property
    @abstractmethod
    def is_in_use(self) -> bool:
        """Whether what the books say can be had now."""

    @property
    def may_hold_blocks(self) -> bool:
        """Whether blocks may ever stay here: on a host there may be bounce slots only."""
        return self.index.max_slots > 0

    def slots_of(self, batch: Batch) -> NDArray[np.int64] | None:
        """Return the slots of these blocks, or None unless every one of them can be read now."""
        slots, _ = self.index.find(batch.names)
        return slots if self.is_in_use and self.index.ready(batch.names).all() else None

    @abstractmethod
    def blocks_within(self, capacity_bytes: int, needed: Callable[[int], int]) -> int:
        """Say how many blocks of prompts it would hold within a capacity; in memory ``needed(n)`` is what n take.

        Of the tier of a KV group that has a slot for each of them.

        Raises:
            ConfigurationError: It cannot have that capacity.
        """

    @abstractmethod
    async def grow(self, num_blocks: int, more_bytes: int) -> None:
        """Have what so many blocks of prompts need, of every KV group: in memory ``more_bytes`` than now.

        Raises:
            ConfigurationError: The machine lacks the memory.
            BackendUnavailableError: The medium did not grow. Nothing has changed.
        """

    @abstractmethod
    async def shrink(self, num_blocks: int) -> None:
        """Give back what is beyond so many blocks of prompts; nobody uses it, of any KV group."""

    def give_back(self, start: int, stop: int) -> bool:
        """Return what idle slots beyond the capacity took, of this kind of block; say if none of them is in use."""
        return True


class MemoryTier(BookedTier):
    """A tier whose slots copies reach: rows of a tensor on the host or on a device.

    Attributes:
        index: Which block is in which row.
        rows: ``(num_slots, stride / 8)`` int64.
        left: What stores have left to others, which have slots for it.
    """

    def __init__(self, name: str, index: TierIndex, rows: torch.Tensor) -> None:
        super().__init__(name)
        self.index = index
        self.rows = rows
        self.left = Expected()

    @property
    def can_keep(self) -> bool:
        """Whether blocks may stay: a host tier may have bounce slots only."""
        return self.index.num_slots > 0

    @property
    @override
    def is_in_use(self) -> bool:
        return True

    def blocks_within(self, capacity_bytes: int, needed: Callable[[int], int]) -> int:
        """Refuse: the memory of a device is taken once."""
        raise ConfigurationError(f"the capacity of tier {self.name!r} cannot be changed while it is used")

    async def grow(self, num_blocks: int, more_bytes: int) -> None:
        """Take memory for more slots."""

    async def shrink(self, num_blocks: int) -> None:
        """Give nothing back yet: host memory goes back as it becomes free, see `HostTier.give_back`."""


class HostTier(MemoryTier):
    """The CPU tier and the bounce slots that everything else passes through: always there, if with no own slots.

    Attributes:
        write_back: Whether blocks wait in the tier above for the cleaner, if there is one above.
    """

    def __init__(self, name: str, index: TierIndex, slab: HostSlab, *, write_back: bool = False) -> None:
        super().__init__(name, index, slab.rows)
        self.slab = slab
        self.write_back = write_back

    def close(self) -> None:
        """Let go of the memory, which goes back to the system as soon as nothing copies to or from it any more."""
        self.slab.close()
        self.rows = self.slab.rows  # those of before would keep it mapped for as long as anybody knows this tier

    async def locate(self, batch: Batch) -> CPULoadStoreSpec | None:
        """Say where blocks are: slots of the slab, payloads without headers."""
        slots = self.slots_of(batch)
        return None if slots is None else CPULoadStoreSpec(slots, self.slab.name)

    @override
    def blocks_within(self, capacity_bytes: int, needed: Callable[[int], int]) -> int:
        num_blocks, most = blocks_within(capacity_bytes, needed), self.index.max_slots
        if not 0 < num_blocks <= most:
            raise ConfigurationError(
                f"tier {self.name!r} can hold 1 to {most} blocks, not {num_blocks}"
                + (": set max_capacity" if num_blocks else "")
            )
        return num_blocks

    @override
    async def grow(self, num_blocks: int, more_bytes: int) -> None:
        check_host_memory(more_bytes)

    @override
    def give_back(self, start: int, stop: int) -> bool:
        idle = self.index.idle_retired(start, stop)
        runs = [run for run in np.split(idle, (np.diff(idle) > 1).nonzero()[0] + 1) if len(run)]
        are_given = [self.slab.give_back(int(run[0]), int(run[-1]) + 1) for run in runs]
        return len(idle) == max(0, stop - start) and all(are_given)


class Prompt:
    """Blocks of a prompt that came together, and are let go of window by window."""

    def __init__(self, tiers: Sequence[BookedTier], names: Names) -> None:
        """Take note of the blocks, in the order of their prompt, and of the tiers that they may be in."""
        self._tiers = tiers
        self._names = names
        self._num_let_go = self._next = 0

    def let_go(self, n: int) -> None:
        """Line the blocks up, if windows of so many more that were let go of may have put them out of order.

        When it is twice as many as before, or all: to do it for each window would take a time that grows by its square.
        """
        is_first, self._num_let_go = not self._num_let_go, self._num_let_go + n
        if self._num_let_go < min(self._next, len(self._names)):
            return
        self._next = 2 * self._num_let_go
        if not is_first:  # which was let go of tail first
            self.line_up()

    def line_up(self) -> None:
        """Have the prompt's tail evicted first: as windows come, and are let go of, its head would be."""
        for tier in self._tiers if len(self._names) > 1 else ():
            tier.index.line_up(self._names)


class Expected:
    """Blocks that are to come later, by their own turn or by others, and which of them were not evicted meanwhile.

    What is evicted by name, or cleared, before it has a place in any books must not come after that; who waits for
    what others bring is to know why it has not come.
    """

    def __init__(self) -> None:
        self._batches: dict[int, tuple[NDArray[np.uint64], Mask]] = {}

    def __len__(self) -> int:
        """Count the calls of `add` whose blocks are expected yet."""
        return len(self._batches)

    def add(self, names: Names) -> Mask:
        """Return which of some blocks are wanted, from now on until `drop`."""
        wanted = np.ones(len(names), np.bool_)
        self._batches[id(wanted)] = hash_names(names), wanted
        return wanted

    def drop(self, wanted: Mask) -> None:
        """Expect the blocks of one `add` no more: they have their places, or will not come."""
        self._batches.pop(id(wanted), None)

    def forget(self, names: Names) -> None:
        """Want none of these blocks any more, among those expected now."""
        batches = list(self._batches.values())
        if not batches:
            return
        is_gone = np.isin(np.concatenate([hashes for hashes, _ in batches]), hash_names(names))
        start = 0
        for hashes, wanted in batches:
            wanted[is_gone[start : start + len(hashes)]] = False
            start += len(hashes)

    def has(self, names: Names) -> Mask:
        """Say which of some blocks are expected."""
        hashes = [each for each, _ in self._batches.values()]
        return np.isin(hash_names(names), np.concatenate(hashes)) if hashes else np.zeros(len(names), np.bool_)

    def clear(self) -> None:
        """Want none of them."""
        for _, wanted in self._batches.values():
            wanted[:] = False


@dataclass(frozen=True)
class ReadReport:
    """What a tier says of the blocks of one read, by position.

    Attributes:
        right: Which are as they were stored.
        gone: Which it no longer has.
        refused: Why, of those that are whole, and sealed otherwise than the tier's keys say.
        error: Why the medium could not read others, in words.
    """

    right: Mask
    gone: Mask
    refused: Mapping[int, str]
    error: str = ""

    @classmethod
    def of(
        cls, n: int, at: NDArray[np.intp], outcomes: Sequence[Outcome], refused: Mapping[int, str], error: str = ""
    ) -> "ReadReport":
        """Report ``n`` blocks, of which those ``at`` positions were read. ``refused`` holds places among these."""
        right, gone = which(outcomes, Outcome.HIT), which(outcomes, Outcome.MISS)
        if len(at) == n:
            return cls(right, gone, refused, error)
        at_all = {int(at[i]): why for i, why in refused.items()}
        report = cls(np.zeros(n, np.bool_), np.ones(n, np.bool_), at_all, error)
        report.right[at], report.gone[at] = right, gone
        return report

    @classmethod
    def nothing_of(cls, n: int) -> "ReadReport":
        """None of ``n`` blocks was read, and it is not known whether they are there."""
        return cls(np.zeros(n, np.bool_), np.zeros(n, np.bool_), {})


@dataclass
class WriteReport:
    """What became of the blocks of one write, by position. Every position is in exactly one of the four.

    Attributes:
        written, present, dropped, failed: The four.
        because: Why blocks were dropped, but for those that nobody wanted any more.
        unwanted: Blocks that were removed before their turn came: dropped, unless something else became of them.
        num_removed: How many of those written were removed while they were: they count as dropped.
    """

    written: Mask
    present: Mask
    dropped: Mask
    because: Reason = Reason.NO_ROOM
    unwanted: Mask | None = None
    num_removed: int = 0
    failed: Mask = field(init=False)

    def __post_init__(self) -> None:
        self.failed = ~(self.written | self.present | self.dropped)

    @classmethod
    def nothing_of(cls, n: int, because: Reason) -> "WriteReport":
        """Report all of ``n`` blocks as dropped."""
        nothing = np.zeros(n, np.bool_)
        return cls(nothing, nothing, ~nothing, because)

    @classmethod
    def failure_of(cls, n: int) -> "WriteReport":
        """Report all of ``n`` blocks as failed."""
        nothing = np.zeros(n, np.bool_)
        return cls(nothing, nothing, nothing)

    @property
    def num_worn(self) -> int:
        """How many blocks the medium may have written: of what failed nobody knows how much."""
        return len((self.written | self.failed).nonzero()[0])

    def counts(self) -> dict[str, int]:
        """How many blocks, by what became of them; the dropped ones apart."""
        return {
            "written": len(self.written.nonzero()[0]) - self.num_removed,
            "present": len(self.present.nonzero()[0]),
            "failed": len(self.failed.nonzero()[0]),
        }

    def drops(self) -> dict[Reason, int]:
        """How many blocks were dropped, by reason."""
        num_dropped = len(self.dropped.nonzero()[0])
        num_unwanted = 0 if self.unwanted is None else len((self.dropped & self.unwanted).nonzero()[0])
        return {Reason.REMOVED: num_unwanted + self.num_removed, self.because: num_dropped - num_unwanted}


class Tally:
    """What became of a store's blocks, tier by tier, counted for the store and for the tier at once.

    Covers the tiers that can keep blocks: a host tier with bounce slots only is passed over.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        """Count nothing yet in ``tiers``, fastest first."""
        self._tiers = tiers
        self._counts = {tier.name: [0] * 5 for tier in tiers if tier.can_keep}

    def add(
        self,
        tier: Tier,
        *,
        written: int = 0,
        present: int = 0,
        deferred: int = 0,
        dropped: Mapping[Reason, int] = _NONE,
        failed: int = 0,
    ) -> None:
        """Count blocks in one tier; the dropped ones by reason."""
        if tier.name not in self._counts:
            return
        counts, num_dropped = self._counts[tier.name], sum(dropped.values())
        for place, count in enumerate((written, present, deferred, num_dropped, failed)):
            counts[place] += count
        tier.counters.written += written
        if num_dropped:
            tier.counters.dropped += num_dropped
            tier.counters.dropped_because += Counter(dropped)
        tier.counters.failed += failed

    def add_all(self, *, present: int = 0, dropped: Mapping[Reason, int] = _NONE) -> None:
        """Count blocks in every tier."""
        for tier in self._tiers:
            self.add(tier, present=present, dropped=dropped)

    def add_above(self, tier: Tier, *, dropped: Mapping[Reason, int]) -> None:
        """Count blocks in every tier above one."""
        for each in self._tiers[: self._tiers.index(tier)]:
            self.add(each, dropped=dropped)

    def add_below(self, tier: Tier, *, dropped: Mapping[Reason, int]) -> None:
        """Count blocks in every tier below one."""
        for each in self._tiers[self._tiers.index(tier) + 1 :]:
            self.add(each, dropped=dropped)

    def results(self) -> tuple[TierStore, ...]:
        """What became of the blocks, fastest tier first."""
        return tuple([TierStore(tier, *counts) for tier, counts in self._counts.items()])


def prefix_of(mask: Mask) -> int:
    """Count the leading positions of which it is true."""
    holes = (~mask).nonzero()[0]
    return int(holes[0]) if len(holes) else len(mask)


def which(outcomes: Sequence[Outcome], outcome: Outcome) -> Mask:
    """Say which blocks of a call have this outcome: as a rule all have the same."""
    n = outcomes.count(outcome)
    if 0 < n < len(outcomes):
        return np.array([each is outcome for each in outcomes], np.bool_)
    mask = np.empty(len(outcomes), np.bool_)
    mask.fill(n > 0)
    return mask
