"""Loads that are made of other loads: from the back, and with gaps.

A `BackLoad` is for an engine that computes the same blocks from the front until the two meet. It is made of loads of
short parts, the last part first. The engine claims what it is about to compute, by `LoadHandle.stop_before`: a claimed
part is given up unless its copy has begun, so the engine waits for no medium, only for copies. Together they take no
longer than the faster of them would alone.

A `GapLoad` loads what is there, block by block: a hole ends nothing. It asks which blocks are anywhere, and loads these
as if there were none between them, by one load of what is in memory and one of what is not. Where one of these ends
early, as a block was lost after all, another begins behind that block.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.tiers.chain import Chain, Head
from tiered_kv.tiers.storage import StorageTier
from tiered_kv.tiers.tasks import is_being_cancelled
from tiered_kv.tiers.tier import Batch, MemoryTier, prefix_of
from tiered_kv.transfers.handles import LoadHandle, cancel_each, each_of
from tiered_kv.transfers.load import PACKED, InTask
from tiered_kv.transfers.prefetch import Brought, bringing, start_bringing
from tiered_kv.transfers.transfer_requests import LoadRequest
from tiered_kv.transfers.window import Said, said_of
from tiered_kv.values.errors import Reason, TierFault
from tiered_kv.values.integers import Mask
from tiered_kv.values.results import LoadResult

_OF_NO_TIER: Final = ("", "engine")
"""Whom a fault names that ends the whole load: no tier. It is the last one."""
_ROUNDS: Final = 16
"""How often a plan looks for blocks behind one that was lost, or for which there was no room."""


@dataclass
class _LoadPart:
    """A part of a load: blocks ``start <= i < stop``, and the load that brings them."""

    start: int
    stop: int
    handle: LoadHandle


class InParts(InTask):
    """Base of loads that are made of other loads: it holds what memory has of their blocks while these run.

    Each of these loads holds only its own blocks, and would evict those of the others to make room. How many blocks
    come is known when the whole has ended.
    """

    def __init__(self, request: LoadRequest, start_part: Callable[[LoadRequest], LoadHandle]) -> None:
        """Prepare a load; ``start_part`` starts those of a prefix that it is made of."""
        super().__init__(request)
        self._start_part = start_part

    @contextmanager
    def _holding(self) -> Generator[None]:
        """Hold what memory has of the blocks until the ``with`` block ends."""
        chain, names = self._request.chain, self._request.batch.names
        memory: Sequence[MemoryTier] = ()  # to which blocks come
        if chain.limits.promote and not chain.host.index.ready(names).all():
            memory = [chain.host] if self._request.binding.gpu is None else chain.memory
        head = Head(chain)
        try:
            for tier in memory:
                head.hold_rest(tier, names)
            yield
            for tier in memory:
                head.hold(tier, names)  # also what has come: whatever came last, the head of the prefix is evicted last
        finally:
            head.let_go()


class BackLoad(InParts):
    """A load from the back of one KV group's blocks."""

    def __init__(self, request: LoadRequest, start_part: Callable[[LoadRequest], LoadHandle]) -> None:
        """Prepare a load, see `InParts`."""
        super().__init__(request, start_part)
        self._ahead = request.chain.limits.reads_in_flight + 1
        self._size = _part_size(len(request.batch), request.chain.window_blocks, self._ahead)
        self.num_from_back = len(request.batch)
        self._claimed = 0
        self._begun = len(request.batch)
        self._parts: list[_LoadPart] = []  # the last blocks first
        self._given_up: list[LoadHandle] = []
        self._in_place = len(request.batch)
        self._hole: int | None = None

    @override
    def stop_before(self, block: int) -> int:
        while self._parts and (first := self._parts[-1]).start < block and not first.handle.is_copying:
            self._parts.pop()
            first.handle.cancel()
            self._given_up.append(first.handle)
            self._begun = first.stop
            if block < first.stop:  # blocks behind the claim join the read that is under way
                self._begin_part(block, first.stop)
        self._claimed = max(self._claimed, min(block, self._begun))
        return self._claimed

    async def run(self) -> LoadResult:
        """Move the blocks; as for `Load.run`, nothing touches the engine's memory any more when it ends."""
        request, loop = self._request, asyncio.get_running_loop()
        started = loop.time()
        by_tier: Counter[str] = Counter()
        faults: list[TierFault] = []
        with self._holding():
            try:
                await self._move(by_tier, faults)
            except asyncio.CancelledError:
                self.revoked = True
            finally:
                await self._end_parts()
        n = len(request.batch)
        if not request.is_current():
            self._in_place = self._begun = n
            by_tier.clear()
            faults = [request.overtaken()]
        mask: Mask = np.arange(n) >= self._in_place
        mask.flags.writeable = False
        self._settle(n - self._in_place)
        # What the engine has claimed it did not miss.
        wanted = replace(request, batch=request.batch[self._claimed :])
        ended_by = self._in_place - 1 if self._hole is None else self._hole
        last_missed = max(0, ended_by - self._claimed)
        counts = [by_tier[tier.name] for tier in request.chain.tiers]
        faults += [wanted.revocation()] if self.revoked and len(wanted.batch) else []
        result = wanted.ended(last_missed, counts, faults, loop.time() - started, mask)
        return replace(result, num_blocks=0 if self._in_place else n, num_requested=n)

    async def _move(self, by_tier: Counter[str], faults: list[TierFault]) -> None:
        """Load part after part towards the front, a few at a time, until one is not whole or the engine is met."""
        while not self.revoked:
            while self._begun > self._claimed and len(self._parts) < self._ahead:
                self._begin_part(self._start_of_part(), self._begun)
            if not self._parts:
                return
            part = self._parts[0]
            result = await part.handle
            if not self._parts or self._parts[0] is not part:
                continue  # the engine has claimed it meanwhile
            del self._parts[0]
            faults += result.faults
            if result.num_blocks < part.stop - part.start:
                self._hole = part.start + result.num_blocks
                return  # an engine that comes from the front has no use for what is before a hole
            by_tier.update(result.by_tier)
            self._in_place = part.start

    def _start_of_part(self) -> int:
        """Return where the part begins that ends where the others begin; media that pack blocks pack aligned ones."""
        over = (int(self._request.batch.positions[self._begun - 1]) + 1) % self._size
        return max(self._claimed, self._begun - (over or self._size))

    def _begin_part(self, start: int, stop: int) -> None:
        request = self._request
        part = replace(
            request, batch=request.batch[start:stop], pages=request.pages[start:stop], lane=request.lane.part(),
            order="front", is_part=True,
        )  # fmt: skip
        self._parts.append(_LoadPart(start, stop, self._start_part(part)))
        self._begun = start

    async def _end_parts(self) -> None:
        """Stop what is under way, and wait until nothing moves. All that is not in place may then be claimed."""
        parts, self._parts = self._parts, []
        self._begun = min((part.start for part in parts if part.handle.is_copying), default=self._in_place)
        cancel_each([part.handle for part in parts])
        await each_of([*self._given_up, *(part.handle for part in parts)])
        self._begun = self._in_place
        self.revoked |= is_being_cancelled()


class GapLoad(InParts):
    """A load with gaps of one KV group's blocks."""

    async def run(self) -> LoadResult:
        """Move the blocks; as for `Load.run`, nothing touches the engine's memory any more when it ends."""
        request, loop = self._request, asyncio.get_running_loop()
        started = loop.time()
        mask: Mask = np.zeros(len(request.batch), np.bool_)
        by_tier: Counter[str] = Counter()
        faults: list[TierFault] = []
        befell: dict[int, Reason] = {}
        with self._holding():
            try:
                await self._move(mask, by_tier, faults, befell)
            except TimeoutError:
                faults.append(TierFault("", Reason.DEADLINE, len(request.batch)))
            except asyncio.CancelledError:
                self.revoked = True
        if not request.is_current():
            mask[:] = False
            by_tier.clear()
            faults = [request.overtaken()]
        mask.flags.writeable = False
        self._settle(int(np.count_nonzero(mask)))
        counts = [by_tier[tier.name] for tier in request.chain.tiers]
        faults = _away_once(faults) + ([request.revocation()] if self.revoked else [])
        first = prefix_of(mask)
        why = None
        if first < len(mask) and faults and faults[-1].tier not in _OF_NO_TIER:
            why = befell.get(first) or request.chain.why_missing(request.batch[first : first + 1])
        return request.ended(first, counts, faults, loop.time() - started, mask, why)

    async def _move(
        self, mask: Mask, by_tier: Counter[str], faults: list[TierFault], befell: dict[int, Reason]
    ) -> None:
        """Load in rounds; take note of what befell the first block that was lost in each."""
        request, loop = self._request, asyncio.get_running_loop()
        chain = request.chain
        memories = chain.memory if request.binding.gpu is not None else [chain.host]
        at = np.arange(len(request.batch))
        while not self.revoked and request.is_current() and loop.time() < request.deadline:
            async with asyncio.timeout_at(request.deadline):
                silent: list[TierFault] = []
                found, said = await anywhere(chain, request.batch[at], memories, silent)
                if silent:
                    faults += silent
                    befell[int(np.delete(at, found)[0])] = silent[-1].reason
                at = at[found]
            if not len(at):
                return
            resident = np.logical_or.reduce([memory.index.ready(request.batch.names[at]) for memory in memories])
            # One load of what is in memory, one of the rest: no medium delays what is in memory.
            each = [where for where in ((~resident).nonzero()[0], resident.nonzero()[0]) if len(where)]
            parts = [at[where] for where in each]
            results = await self._load_each(parts, [_of_each(said, where) for where in each])
            for part, result in zip(parts, results, strict=True):
                mask[part[: result.num_blocks]] = True
                by_tier.update(result.by_tier)
                faults += result.faults
                if result.faults and result.num_blocks < len(part):
                    befell[int(part[result.num_blocks])] = result.faults[-1].reason
            if any(fault.tier == "engine" for result in results for fault in result.faults):
                return
            behind = [part[result.num_blocks + 1 :] for part, result in zip(parts, results, strict=True)]
            at = np.sort(np.concatenate(behind))  # the blocks that ended these loads are lost
        if len(at) and loop.time() >= request.deadline:
            raise TimeoutError

    async def _load_each(self, parts: Sequence[NDArray[np.int64]], said: Sequence[Said]) -> list[LoadResult]:
        """Load blocks side by side, those of each part as if they were a prompt; cancelled, until nothing moves."""
        request = self._request
        handles = []
        for at, known in zip(parts, said, strict=True):
            batch, pages, lane = request.batch[at], request.pages[at], request.lane.part()
            part = replace(request, batch=batch, pages=pages, lane=lane, gaps=False, said=known, is_part=True)
            try:
                handles.append(self._start_part(part))
            except BaseException:  # an interrupt of the program's, in a copy made at once
                lane.release()
                cancel_each(handles)
                await each_of(handles)
                raise
        results = await each_of(handles)
        self.revoked |= is_being_cancelled()
        return results


@asynccontextmanager
async def bring_around_gaps(parts: Sequence[tuple[Chain, Batch]], deadline: float) -> AsyncGenerator[list[Brought]]:
    """Copy up to host memory what every rank has, as far as it fits, until ``deadline``; it is held as by `bringing`.

    Where blocks are lost on their way it goes on behind them, a few times. Yields what became of each rank's blocks.
    """
    async with AsyncExitStack() as stack:
        yield await _bring_around_gaps(parts, deadline, stack)


async def anywhere(
    chain: Chain, batch: Batch, memories: Sequence[MemoryTier], faults: list[TierFault] | None = None
) -> tuple[NDArray[np.int64], Said]:
    """Return which blocks some tier has, or is getting, and what the shared tiers have said of these.

    Args:
        chain: The tiers of storage.
        batch: The blocks.
        memories: Those of its memory tiers that are in reach.
        faults: Told what kept tiers from answering that may have blocks which no other has.
    """
    there: Mask = np.zeros(len(batch), np.bool_)
    said: dict[StorageTier, NDArray[np.int8]] = {}
    silent: list[TierFault] = []
    for memory in memories:
        there |= chain.has_or_brings(memory, batch.names)
    for tier in chain.storage:
        left = (~there).nonzero()[0]
        if not len(left):
            break
        there[left] = found = await tier.find_each(batch[left], silent)
        if tier.is_shared:
            said[tier] = said_of(left, found, len(batch))
    at = there.nonzero()[0]
    if faults is not None and len(at) < len(batch):
        faults += silent
    return at, _of_each(said, at)


async def _bring_around_gaps(
    parts: Sequence[tuple[Chain, Batch]], deadline: float, stack: AsyncExitStack
) -> list[Brought]:
    n = len(parts[0][1])
    brought = [Brought(chain, n) for chain, _ in parts]
    for of_rank in brought:
        of_rank.befell = {}
    at = np.arange(n)
    for _ in range(_ROUNDS):
        silent: list[list[TierFault]] = [[] for _ in parts]
        try:
            async with asyncio.timeout_at(deadline):
                found_of = [
                    await anywhere(chain, batch[at], [chain.host], faults)
                    for (chain, batch), faults in zip(parts, silent, strict=True)
                ]
        except TimeoutError:
            for of_rank, faults in zip(brought, silent, strict=True):
                of_rank.faults += [*faults, TierFault("", Reason.DEADLINE, len(at))]
            break
        for of_rank, faults, (found, _) in zip(brought, silent, found_of, strict=True):
            _note(of_rank, faults, np.delete(at, found))
        everywhere = reduce(np.intersect1d, [found for found, _ in found_of])
        said = [_of_each(known, np.searchsorted(found, everywhere)) for found, known in found_of]
        at = at[everywhere]
        wanted = [(chain, batch[at]) for chain, batch in parts]
        coming, handles = start_bringing(wanted, said, deadline)
        await stack.enter_async_context(bringing(coming, handles))
        arrived = [chain.host.index.ready_prefix(batch.names) for chain, batch in wanted]
        for of_rank, now, num_there in zip(brought, coming, arrived, strict=True):
            came = now.source >= 0
            of_rank.source[at[came]], of_rank.arrived[at[came]] = now.source[came], now.arrived[came]
            _note(of_rank, now.faults, at[num_there:])
        at = at[min(arrived) + 1 :]
        if not len(at):
            break
    return brought


def _note(brought: Brought, faults: Sequence[TierFault], missing: NDArray[np.int64]) -> None:
    """Note what kept blocks from being brought; the last fault is that of the first missing block."""
    brought.faults = _away_once([*brought.faults, *faults])
    if faults and len(missing) and brought.befell is not None:
        brought.befell[int(missing[0])] = faults[-1].reason


def _of_each(said: Said, at: NDArray[np.int64]) -> Said:
    return {tier: known[at] for tier, known in said.items()}


def _part_size(num_blocks: int, window_blocks: int, ahead: int) -> int:
    """Return a window, as other loads have it; of fewer blocks a part so large that all are under way at once."""
    size = max(1, min(-(-num_blocks // ahead), window_blocks))
    return size - size % PACKED if size > PACKED else size


def _away_once(faults: Sequence[TierFault]) -> list[TierFault]:
    """Return the faults with one for each tier that is away, its first: every round reports the tier again."""
    first = {fault.tier: fault for fault in reversed(faults) if fault.reason is Reason.TIER_AWAY}
    return [fault for fault in faults if fault.reason is not Reason.TIER_AWAY or fault is first[fault.tier]]
