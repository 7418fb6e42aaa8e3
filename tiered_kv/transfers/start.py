"""Where every load and store begins: which kind of transfer serves a request.

A load of what can be had at once needs no task: what is in memory is leased, and being copied, before `start_load`
returns; what owned storage tiers have is being read by then, if it is one window and host slots are free. What is
small, and copied by a thread anyway, is copied at once: to hand it over would take longer.
"""

import asyncio
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.books import READY
from tiered_kv.catalog.leases import Lease
from tiered_kv.memory.device import attempt, raise_the_programs
from tiered_kv.memory.lanes import LaneCopy, RevokedError
from tiered_kv.system import system
from tiered_kv.tiers.chain import FROM_ENGINE
from tiered_kv.tiers.fills import Fill
from tiered_kv.tiers.gate import Kind, Waiter
from tiered_kv.tiers.tier import MemoryTier, prefix_of
from tiered_kv.transfers.direct import DirectLoad, DirectStore, direct_target
from tiered_kv.transfers.handles import LAST_COPIES_S, LoadHandle
from tiered_kv.transfers.layerwise import LayerLoad, LayerStore
from tiered_kv.transfers.load import InTask, Load, check_stop, load_result, overtaken, revocation
from tiered_kv.transfers.load_parts import BackLoad, GapLoad
from tiered_kv.transfers.store import Store, StoreHandle
from tiered_kv.transfers.transfer_requests import MOST_AT_ONCE, LoadRequest, StoreRequest, may_copy_at_once
from tiered_kv.values.results import LoadResult, Reason, TierFault


def start_load(request: LoadRequest) -> LoadHandle:
    """Start a load, on the event loop."""
    if (load := _ready_load(request)) is not None:
        return load.start()
    if request.gaps:
        return GapLoad(request, start_load).begin()
    if request.order == "back":
        return BackLoad(request, start_load).begin()
    return _in_task(request)


def _in_task(request: LoadRequest) -> LoadHandle:
    """Start a load of a prefix from the front that waits for slots, tiers, or its turn."""
    load: InTask
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


def _ready_load(request: LoadRequest) -> "ReadyLoad | None":
    """Return a load of what one memory tier has, or storage tiers of this cache's own can be asked for now; or None."""
    chain, n = request.chain, len(request.batch)
    if not 0 < n <= min(MOST_AT_ONCE, chain.resident_blocks) or request.layerwise:
        return None
    if asyncio.get_running_loop().time() >= request.deadline or request.binding.error is not None:
        return None
    if (tier := _tier_of(request)) is not None:
        return ReadyLoad(request, tier, tier.index.lease(request.batch.names))
    is_plain = not request.gaps and request.order == "front" and request.binding.direct is None
    return _bring(request) if is_plain and request.binding.gpu is None and n <= chain.window_blocks else None


def _tier_of(request: LoadRequest) -> MemoryTier | None:
    chain, names = request.chain, request.batch.names
    gpu = request.binding.gpu
    if gpu is not None and gpu.index.ready_prefix(names) == len(names):
        return gpu
    if gpu is not None and chain.limits.promote:
        return None  # what is on the host is to be in the GPU pool too
    return chain.host if chain.host.index.ready_prefix(names) == len(names) else None


def _bring(request: LoadRequest) -> "ReadyLoad | None":
    """Begin to read what the host lacks; None, with nothing changed, if not all of it can be read now."""
    chain, batch, index = request.chain, request.batch, request.chain.host.index
    slots, states = index.find(batch.names)
    missing = (slots < 0).nonzero()[0]
    is_coming = len(missing) + np.count_nonzero(states == READY) < len(batch)
    if is_coming or (sources := _owned_sources(request, missing)) is None or not chain.tasks.goes_on():
        return None
    keep = chain.limits.promote and index.room_for(batch.names) >= len(missing)
    waiter, lowest = Waiter(Kind.LOAD, request.priority), int(sources.max())
    if chain.room.is_wanted((lowest, FROM_ENGINE)):
        return None
    held = index.lease(batch.names)  # first: to make room must not take what is there
    part = batch[missing] if len(missing) < len(batch) else batch
    reservation = chain.reserve_host_now(part, waiter, keep=keep, source=lowest)
    if reservation is None or (reservation.slots < 0).any():  # of a block that is asked for twice, there is one slot
        if reservation is not None:
            reservation.close()
        chain.release(held)
        return None
    return ReadyLoad(request, chain.host, held, chain.fills.start(part, sources, reservation, waiter), missing)


def _owned_sources(request: LoadRequest, missing: NDArray[np.intp]) -> NDArray[np.int8] | None:
    """Say which storage tier is to be read for each of some blocks; None if one of others has to be asked first."""
    chain, names = request.chain, request.batch.names[missing]
    sources = np.full(len(missing), -1, np.int8)
    for number, tier in enumerate(chain.storage, start=len(chain.memory)):
        if tier.health.is_bypassed:
            continue
        if (books := tier.books) is None:
            return None
        sources[(sources < 0) & books.ready(names)] = number
        if (sources >= 0).all():
            return sources
    return None


class ReadyLoad:
    """A load of what is in memory, from its lease on, or of what is being read already."""

    def __init__(
        self,
        request: LoadRequest,
        tier: MemoryTier,
        held: Lease,
        fill: Fill | None = None,
        filled: NDArray[np.intp] | None = None,
    ) -> None:
        """Take over ``held``, which holds blocks in ``tier``: all of them, but for those ``filled`` by ``fill``."""
        loop = asyncio.get_running_loop()
        self.num_layers = request.chain.group.num_layers
        self.thread = system().get_ident()
        self._request = request
        self._tier = tier
        self._leases = [held]
        self._slots = held.slots
        self._fill = fill
        self._filled = np.empty(0, np.intp) if filled is None else filled
        self._num_blocks = len(request.batch) if fill is None else 0
        self._started = loop.time()
        self._copy: LaneCopy | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._again: LoadHandle | None = None
        self._faults: list[TierFault] = []
        self._ended: asyncio.Future[LoadResult] = loop.create_future()
        self._is_admitted = False
        self._admitted: asyncio.Future[None] | None = None if fill is None else loop.create_future()

    def start(self) -> LoadHandle:
        """Copy, or have it done by the stream, once all is in memory."""
        if self._fill is None:
            self._copy_all()
        else:
            loop = asyncio.get_running_loop()
            self._fill.done.add_done_callback(lambda _: self._arrived())
            self._timer = loop.call_at(self._request.deadline, self._arrived)
        if not self._ended.done():
            self._request.chain.tasks.watch(self._ended, self.revoke)
        return LoadHandle(self._ended, self)

    @property
    def is_admitted(self) -> bool:
        """Whether it is known how many blocks will be in place: all of them are leased."""
        return self._is_admitted

    async def wait_admitted(self) -> int:
        """Return how many blocks there will be, in a later turn of the loop."""
        await asyncio.sleep(0)
        if self._admitted is not None:
            await asyncio.shield(self._admitted)
        return self._num_blocks

    def copy_of(self, layer: int) -> LaneCopy | None:
        """Return the one copy that brings all layers; None where all was copied at once."""
        return self._copy

    @property
    def is_copying(self) -> bool:
        """From the moment when all is in memory."""
        return self._is_admitted

    def stop_before(self, block: int) -> int:
        """Claim blocks for the engine; nothing is waited for: all is in place, or will be in a moment."""
        check_stop(self._request, block)
        has_failed = self._ended.done() and not self._ended.result().num_blocks
        return block if has_failed else 0

    def revoke(self) -> None:
        """Stop, unless the copy has begun."""
        if self._again is not None:
            self._again.cancel()
        elif self._copy is not None:
            self._copy.revoke()
        elif not self._ended.done():
            self._let_go_of_fill()
            self._admit(0)
            self._faults += revocation(self._request.batch)
            self._end(None)

    def _arrived(self) -> None:
        """Copy what has come, once nothing more will, or none came in time."""
        fill, chain, n = self._fill, self._request.chain, len(self._request.batch)
        if fill is None or self._is_admitted:
            return
        if not fill.done.done():
            names = sorted({chain.names[number] for number in fill.source.tolist()})
            self._faults.append(TierFault(",".join(names), Reason.DEADLINE, n))
        self._faults += chain.fills.faults_of(fill)
        lease = self._tier.index.lease(self._request.batch.names[self._filled])
        self._leases.append(lease)
        self._slots = self._slots.copy()
        self._slots[self._filled] = lease.slots
        self._let_go_of_fill()
        num_blocks = prefix_of(self._slots >= 0)
        if num_blocks < n and not self._faults:
            self._begin_again()  # what was brought has left already
        elif num_blocks:
            self._num_blocks = num_blocks
            self._copy_all()
        else:
            self._admit(0)
            self._end(None)

    def _begin_again(self) -> None:
        """Look for all of it anew, as any load does."""
        self._request.chain.release(*self._leases)
        self._again = _in_task(self._request)
        self._again.when_done(self._ended_again)

    def _ended_again(self, ended: "asyncio.Future[LoadResult]") -> None:
        is_well = not ended.cancelled() and ended.exception() is None
        self._admit(ended.result().num_blocks if is_well else 0)
        if ended.cancelled():
            self._ended.cancel()
        elif (error := ended.exception()) is not None:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(ended.result())

    def _let_go_of_fill(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._fill is not None:
            self._fill.let_go()

    def _admit(self, num_blocks: int) -> None:
        self._num_blocks, self._is_admitted = num_blocks, True
        if self._admitted is not None:
            self._admitted.set_result(None)

    def _copy_all(self) -> None:
        """Copy what has been found, or have it done by the stream."""
        request, n = self._request, self._num_blocks
        self._admit(n)
        work = partial(request.binding.scatter, self._tier.rows, self._slots[:n], request.pages[:n].ravel())
        if may_copy_at_once(request, n):
            error = attempt(work)
            self._end(error)
            raise_the_programs(error)
            return
        self._copy = request.chain.copy(request.lane, work)
        self._copy.ended.add_done_callback(self._copied)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(max(request.deadline, loop.time() + LAST_COPIES_S), self._revoke_late)

    def _revoke_late(self) -> None:
        self._faults.append(TierFault("", Reason.DEADLINE, len(self._request.batch)))
        self.revoke()

    def _copied(self, copied: "asyncio.Future[None]") -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._end(copied.exception())

    def _end(self, error: BaseException | None) -> None:
        """Let go of everything, and say what is in place. The engine's memory is the engine's alone from here on."""
        request, chain = self._request, self._request.chain
        request.lane.release()
        num_blocks, faults = self._num_blocks, self._faults
        if error is not None:
            num_blocks = 0
            if not isinstance(error, RevokedError):
                what = f"{type(error).__name__}: {error}"
                faults.append(TierFault("engine", Reason.COPY_FAILED, len(request.batch), what))
        if not request.is_current():
            faults.append(overtaken(request))
            num_blocks = 0
        is_resident = self._fill is None
        chain.release(*self._leases, is_use=num_blocks > 0 and is_resident)
        if num_blocks:
            used = request.batch if num_blocks == len(request.batch) else request.batch[:num_blocks]
            chain.touch(used, but=self._tier if is_resident else None)
        counts = self._counts(num_blocks)
        self._ended.set_result(
            load_result(request, num_blocks, counts, faults, asyncio.get_running_loop().time() - self._started)
        )

    def _counts(self, num_blocks: int) -> list[int]:
        """Say how many of so many leading blocks each tier had."""
        chain, number = self._request.chain, self._request.chain.memory.index(self._tier)
        counts = [0] * len(chain.tiers)
        counts[number] = num_blocks
        if self._fill is not None:
            brought = self._fill.source[self._filled < num_blocks]
            counts[number] -= len(brought)
            for source in brought.tolist():
                counts[source] += 1
        return counts
