"""Where every load and store begins: which kind of transfer serves a request.

A load of what is in memory needs no task: it is leased, and being copied, before `start_load` returns. What is small,
and copied by a thread anyway, is copied at once: to hand it over would take longer.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from tiered_kv.catalog.leases import Lease
from tiered_kv.memory.device import attempt, raise_the_programs
from tiered_kv.memory.lanes import LaneCopy, RevokedError
from tiered_kv.system import system
from tiered_kv.tiers.tier import MemoryTier
from tiered_kv.transfers.direct import DirectLoad, DirectStore, direct_target
from tiered_kv.transfers.handles import LAST_COPIES_S, LoadHandle
from tiered_kv.transfers.layerwise import LayerLoad, LayerStore
from tiered_kv.transfers.load import Load, check_stop, load_result, overtaken
from tiered_kv.transfers.load_parts import BackLoad, GapLoad
from tiered_kv.transfers.store import Store, StoreHandle
from tiered_kv.transfers.transfer_requests import MOST_AT_ONCE, LoadRequest, StoreRequest, may_copy_at_once
from tiered_kv.values.results import LoadResult, Reason, TierFault


def start_load(request: LoadRequest) -> LoadHandle:
    """Start a load, on the event loop."""
    if (handle := _start_resident(request)) is not None:
        return handle
    if request.gaps:
        return GapLoad(request, start_load).begin()
    if request.order == "back":
        return BackLoad(request, start_load).begin()
    kind = LayerLoad if request.layerwise else DirectLoad if request.binding.direct is not None else Load
    load = kind(request)
    return load.start_load(request.chain.tasks.spawn(load.run(), f"load {len(request.batch)} blocks"))


def start_store(request: StoreRequest) -> StoreHandle:
    """Start a store, on the event loop."""
    store: Store
    if (slots := request.binding.direct) is not None and (tier := direct_target(request)) is not None:
        store = DirectStore(request, tier, slots)
    else:
        store = (LayerStore if request.layerwise else Store)(request)
        if not request.layerwise and (handle := store.start_at_once()) is not None:
            return handle
    return store.start_store(request.chain.tasks.spawn(store.run(), f"store {len(request.batch)} blocks"))


def _start_resident(request: LoadRequest) -> LoadHandle | None:
    """Start a load of which one memory tier has all blocks; None if none does, or it needs more than one copy."""
    chain, n, loop = request.chain, len(request.batch), asyncio.get_running_loop()
    if not 0 < n <= min(MOST_AT_ONCE, chain.resident_blocks) or request.layerwise:
        return None
    started = loop.time()
    if started >= request.deadline or request.binding.error is not None:
        return None
    tier = _tier_of(request)
    if tier is None:
        return None
    lease = tier.index.lease(request.batch.names)
    return ResidentLoad(request, tier, lease, started).start()


def _tier_of(request: LoadRequest) -> MemoryTier | None:
    chain, names = request.chain, request.batch.names
    gpu = request.binding.gpu
    if gpu is not None and gpu.index.ready_prefix(names) == len(names):
        return gpu
    if gpu is not None and chain.limits.promote:
        return None  # what is on the host is to be in the GPU pool too
    return chain.host if chain.host.index.ready_prefix(names) == len(names) else None


class ResidentLoad:
    """A load of what is in memory, from its lease on."""

    def __init__(self, request: LoadRequest, tier: MemoryTier, lease: Lease, started: float) -> None:
        """Take over ``lease``, which holds all blocks in ``tier``."""
        self.num_layers = request.chain.group.num_layers
        self.thread = system().get_ident()
        self._request = request
        self._tier = tier
        self._lease = lease
        self._started = started
        self._copy: LaneCopy | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_late = False
        self._ended: asyncio.Future[LoadResult] = asyncio.get_running_loop().create_future()

    def start(self) -> LoadHandle:
        """Copy, or have it done by the stream."""
        request, chain = self._request, self._request.chain
        work = partial(request.binding.scatter, self._tier.rows, self._lease.slots, request.pages.ravel())
        if may_copy_at_once(request, len(request.batch)):
            error = attempt(work)
            self._end(error)
            raise_the_programs(error)
        else:
            self._copy = chain.copy(request.lane, work)
            self._copy.ended.add_done_callback(self._copied)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(request.deadline, self._started + LAST_COPIES_S), self._revoke_late)
            chain.tasks.watch(self._ended, self.revoke)
        return LoadHandle(self._ended, self)

    @property
    def is_admitted(self) -> bool:
        """Always: all blocks are leased."""
        return True

    async def wait_admitted(self) -> int:
        """Return how many blocks there will be, in a later turn of the loop."""
        await asyncio.sleep(0)
        return len(self._request.batch)

    def copy_of(self, layer: int) -> LaneCopy | None:
        """Return the one copy that brings all layers; None where all was copied at once."""
        return self._copy

    @property
    def is_copying(self) -> bool:
        """From the beginning."""
        return True

    def stop_before(self, block: int) -> int:
        """Claim blocks for the engine; nothing is waited for: all is in place, or will be in a moment."""
        check_stop(self._request, block)
        has_failed = self._ended.done() and not self._ended.result().num_blocks
        return block if has_failed else 0

    def revoke(self) -> None:
        """Stop, unless the copy has begun."""
        if self._copy is not None:
            self._copy.revoke()

    def _revoke_late(self) -> None:
        self._is_late = True
        self.revoke()

    def _copied(self, copied: "asyncio.Future[None]") -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._end(copied.exception())

    def _end(self, error: BaseException | None) -> None:
        """Let go of everything, and say what is in place. The engine's memory is the engine's alone from here on."""
        request, chain, n = self._request, self._request.chain, len(self._request.batch)
        request.lane.release()
        faults = list(self._faults(error))
        counts = [0] * len(chain.tiers)
        num_blocks = 0 if error is not None else n
        if not request.is_current():
            faults.append(overtaken(request))
            num_blocks = 0
        chain.release(self._lease, is_use=num_blocks > 0)
        if num_blocks:
            counts[chain.memory.index(self._tier)] = num_blocks
            chain.touch(request.batch, but=self._tier)
        self._ended.set_result(
            load_result(request, num_blocks, counts, faults, asyncio.get_running_loop().time() - self._started)
        )

    def _faults(self, error: BaseException | None) -> Sequence[TierFault]:
        n = len(self._request.batch)
        late = [TierFault("", Reason.DEADLINE, n)] if self._is_late else []
        if error is None or isinstance(error, RevokedError):
            return late
        return [*late, TierFault("engine", Reason.COPY_FAILED, n, f"{type(error).__name__}: {error}")]
