"""What a load or store is asked for, once it has been checked: made in any thread, moved on the event loop.

A load's request also says how the load has ended, and counts it: whatever kind of load it was.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from tiered_kv.memory.codec import Codec
from tiered_kv.memory.lanes import Lane
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.gate import Priority
from tiered_kv.tiers.tier import Batch
from tiered_kv.transfers.engine_memory import EngineMemory
from tiered_kv.transfers.window import Said
from tiered_kv.values.errors import Reason, TierFault, in_words
from tiered_kv.values.events import BlocksLoaded
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.integers import Mask
from tiered_kv.values.keys import StoredKeys
from tiered_kv.values.results import LoadResult
from tiered_kv.values.specs import GPULoadStoreSpec

Order = Literal["front", "back"]
MOST_AT_ONCE: Final = 1024
"""Blocks that one turn of the loop decides about: of more the books take longer than a turn should."""
_COPIED_AT_ONCE_BYTES: Final = 256 << 10
"""Some 40 us of copying, which is what a thread needs to be woken and to wake the loop."""


@dataclass
class LoadRequest:
    """A load of one KV group, checked and with its place in the order of copies.

    Attributes:
        chain: The tiers.
        batch: What to load.
        binding: The engine's memory.
        pages: ``(n, pages_per_block)`` page ids in it, in key order.
        lane: Behind the pages' last use; released when the load has ended.
        deadline: On the loop's clock.
        priority: Of its reads.
        is_current: False once the weights have changed: then the load returns 0 blocks.
        layerwise: Whether to copy layer by layer.
        gaps: Whether to load what is there, block by block, and not a prefix.
        order: Whether the prefix is loaded from the front, or from the back until it meets an engine that computes it.
        said: What shared tiers have been asked just before; see `Presence`.
        is_part: Whether it is a part of another load, which counts and tells of it.
    """

    chain: Chain
    batch: Batch
    binding: EngineMemory
    pages: NDArray[np.int64]
    lane: Lane
    deadline: float
    priority: Priority
    is_current: Callable[[], bool]
    layerwise: bool = False
    gaps: bool = False
    order: Order = "front"
    said: Said | None = None
    is_part: bool = False

    def overtaken(self) -> TierFault:
        """Say that the weights have changed since the load began."""
        return TierFault("", Reason.EPOCH_ADVANCED, len(self.batch))

    def copy_failure(self, error: BaseException) -> TierFault:
        """Say with what a copy into the engine's memory failed."""
        return TierFault("engine", Reason.COPY_FAILED, len(self.batch), in_words(error))

    def revocation(self) -> TierFault:
        """Say that whoever asked for the blocks has given up."""
        return TierFault("", Reason.REVOKED, len(self.batch))

    def ended(
        self,
        num_blocks: int,
        counts: Sequence[int],
        faults: Sequence[TierFault],
        seconds: float,
        mask: Mask | None = None,
        why: str | None = None,
    ) -> LoadResult:
        """Count the load, which has ended, tell of it, and say what it brought.

        Of a part of another load nothing is counted or told: that load does it.

        Args:
            num_blocks: The prefix that is in place.
            counts: By tier, the blocks in place that it had.
            faults: What went wrong; the last one is what befell the first block that did not come, unless ``why`` is.
            seconds: How long it took.
            mask: Which blocks are in place, of a load with gaps.
            why: What befell the first block that did not come, where another fault may be the last one.
        """
        chain, num_requested, num_in_place = self.chain, len(self.batch.names), sum(counts)
        by_tier: dict[str, int] = {}
        for tier, count in zip(chain.tiers, counts, strict=True):
            if count:
                by_tier[tier.name] = count
                tier.counters.hits += 0 if self.is_part else count
        if not self.is_part:
            if num_in_place == num_requested:
                why = ""
            elif why is None:
                why = self._why_not_more(num_blocks, faults)
            said = tuple([f"{fault.tier}: {fault.reason}" for fault in faults]) if faults else ()
            chain.fates.load_ended(self.batch, num_in_place, why, seconds)
            if said:
                chain.fates.load_faults.update(said)
            chain.emit(BlocksLoaded(num_in_place, num_requested, by_tier, seconds * 1e3, said, why))
        num_bytes = num_in_place * chain.group.payload_bytes
        return LoadResult(num_blocks, num_requested, by_tier, num_bytes, seconds, tuple(faults), why or "", mask)

    def _why_not_more(self, num_blocks: int, faults: Sequence[TierFault]) -> str:
        """Return why the first block behind the prefix did not come: a fault's reason, or what befell it before."""
        if faults:
            return faults[-1].reason
        return self.chain.why_missing(self.batch[num_blocks : num_blocks + 1])


@dataclass
class StoreRequest:
    """A store of one KV group, checked and with its place in the order of copies.

    Attributes:
        chain: The tiers.
        batch: What to store, in the namespace of the weights that computed it.
        binding: The engine's memory.
        pages: ``(n, pages_per_block)`` page ids in it, in key order.
        lane: Behind the pages' computation; released when the store has let go of them.
        layerwise: Whether layers are given one by one.
        hint: What the caller says of the blocks' future.
    """

    chain: Chain
    batch: Batch
    binding: EngineMemory
    pages: NDArray[np.int64]
    lane: Lane
    layerwise: bool = False
    hint: ReuseHint | None = None


@dataclass(frozen=True)
class JobRequest:
    """One load or store that other processes carry out.

    Attributes:
        direction: Of the bytes.
        keys: What to move; of a store perhaps of several prompts.
        parts: By rank, the tiers and the blocks.
        engine: The engine's blocks, the same on every rank; None if they are to be bound.
        is_current: False once what was loaded is of other weights than are served.
        deadline: On the loop's clock: then a load is planned with what is in host memory.
        gaps: Whether to load what is there, block by block, and not a prefix.
        hint: What the caller of a store says of the blocks' future.
        is_far: Whether it is planned, and so bound, in another process: a worker may have the plan before that is said.
            Then ``engine`` stands for blocks that only that process knows, with one id for each key.
    """

    direction: Literal["load", "store"]
    keys: StoredKeys
    parts: Sequence[tuple[Chain, Batch]]
    engine: GPULoadStoreSpec | None
    is_current: Callable[[], bool]
    deadline: float
    gaps: bool = False
    hint: ReuseHint | None = None
    is_far: bool = False

    @property
    def pages_per_block(self) -> int:
        """Block ids of the engine per key."""
        return 1 if self.is_far else self.parts[0][0].group.pages_per_block


def may_copy_at_once(request: LoadRequest | StoreRequest, num_blocks: int) -> bool:
    """Say whether to copy in the calling thread so many blocks of a load or store."""
    return is_copied_at_once(num_blocks * request.chain.group.payload_bytes, request.chain.codec, request.lane)


def is_copied_at_once(num_bytes: int, codec: Codec | None, lane: Lane) -> bool:
    """Say whether to copy in the calling thread what a thread would copy anyway: less work than to wake that."""
    return num_bytes <= _COPIED_AT_ONCE_BYTES and codec is None and lane.is_idle
