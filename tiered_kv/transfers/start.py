"""Where every load and store begins: which kind of transfer serves a request, and loads that need no task.

A load of what can be had at once needs none: what is in memory is leased, and being copied, before `start_load`
returns; what owned storage tiers have is being read by then, if it is one window and host slots are free. What is
small, and copied by a thread anyway, is copied at once: to hand it over would take longer.

A load in a task decides window by window, and waits for turns, slots and tiers. These decide once, when they are
started, and are told once, when their bytes have come. What goes otherwise than was decided then, as a block that was
evicted or is broken, is left to a load in a task, which looks for all of it anew.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.catalog.books import READY
from tiered_kv.catalog.leases import Lease
from tiered_kv.memory.device import attempt, nothing, raise_the_programs
from tiered_kv.memory.lanes import LaneCopy, RevokedError
from tiered_kv.tiers.chain import FROM_ENGINE, Chain
from tiered_kv.tiers.fills import Fill
from tiered_kv.tiers.gate import Kind, Waiter
from tiered_kv.tiers.owned import OwnedTier
from tiered_kv.tiers.tier import MemoryTier, ReadReport, Tier, prefix_of
from tiered_kv.transfers.direct import DirectLoad, DirectStore, direct_target
from tiered_kv.transfers.engine_memory import DirectSlots
from tiered_kv.transfers.handles import LAST_COPIES_S, LoadHandle, Loading
from tiered_kv.transfers.layerwise import LayerLoad, LayerStore
from tiered_kv.transfers.load import Load
from tiered_kv.transfers.load_parts import BackLoad, GapLoad
from tiered_kv.transfers.store import Store, StoreHandle
from tiered_kv.transfers.transfer_requests import MOST_AT_ONCE, LoadRequest, StoreRequest, may_copy_at_once
from tiered_kv.values.errors import Reason, TierFault
from tiered_kv.values.keys import Names
from tiered_kv.values.results import LoadResult


def start_load(request: LoadRequest) -> LoadHandle:
    """Start a load, on the event loop."""
    return _start_ready(request) or _in_task(request)


def _in_task(request: LoadRequest) -> LoadHandle:
    """Start a load that waits for slots, tiers, or its turn."""
    load: GapLoad | BackLoad | Load
    if request.gaps:
        load = GapLoad(request, start_load)
    elif request.order == "back":
        load = BackLoad(request, start_load)
    else:
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


def _start_ready(request: LoadRequest) -> LoadHandle | None:
    """Start a load of what one memory tier has, or storage tiers of this cache's own can be asked for now; or None."""
    chain, n, gpu = request.chain, len(request.pages), request.binding.gpu
    if not 0 < n <= min(MOST_AT_ONCE, chain.resident_blocks) or request.layerwise:
        return None
    if asyncio.get_running_loop().time() >= request.deadline or request.binding.error is not None:
        return None
    # To promote from the host to the pool takes a task.
    for tier in (chain.host,) if gpu is None else (gpu,) if chain.limits.promote else (gpu, chain.host):
        slots, states = tier.index.find(request.batch.names)
        num_ready = states.tobytes().count(READY)
        if num_ready == n:
            return _start_resident(request, tier, slots)
    if request.order != "front" or gpu is not None:
        return None
    return _bring(request, slots, num_ready) if request.binding.direct is None else _read_in_place(request, slots)


def _start_resident(request: LoadRequest, tier: MemoryTier, slots: NDArray[np.int64]) -> LoadHandle:
    """Start a load of what is in these slots of one memory tier."""
    if may_copy_at_once(request, len(slots)):  # without a lease: what could evict it comes in later turns of the loop
        return ReadyLoad(request, tier, slots).copy_at_once()
    return ReadyLoad(request, tier, slots, tier.index.lease(request.batch.names)).start()


def _bring(request: LoadRequest, slots: NDArray[np.int64], num_ready: int) -> LoadHandle | None:
    """Begin to read what the host lacks; None, with nothing changed, if not all of it can be read now.

    It has ``num_ready`` blocks ready in these slots; others that have a slot there are on their way.
    """
    chain, batch, index, n = request.chain, request.batch, request.chain.host.index, len(slots)
    missing = (slots < 0).nonzero()[0]
    is_coming = len(missing) + num_ready < n
    if is_coming or n > chain.window_blocks or not chain.tasks.goes_on():
        return None
    part = batch if len(missing) == n else batch[missing]
    if (sources := _owned_sources(chain, part.names)) is None:
        return None
    keep = chain.limits.promote and index.room_for(batch.names) >= len(missing)
    waiter, lowest = Waiter(Kind.LOAD, request.priority), max(sources.tolist())
    if chain.room.is_wanted((lowest, FROM_ENGINE)):
        return None
    # First: to make room must not take what is there.
    held = index.lease(batch.names) if part is not batch else None
    reservation = chain.reserve_host_now(part, waiter, keep=keep, source=lowest)
    if reservation is None or min(reservation.slots.tolist()) < 0:  # what is asked for twice has one slot
        if reservation is not None:
            reservation.close()
        if held is not None:
            chain.release(held)
        return None
    fill = chain.fills.start(part, sources, reservation, waiter)
    return ReadyLoad(request, chain.host, slots, held, fill, missing).start()


def _read_in_place(request: LoadRequest, slots: NDArray[np.int64]) -> LoadHandle | None:
    """Have the first tier in use read all of it to where it belongs; None, with nothing changed, if it lacks some."""
    chain, n, direct = request.chain, len(request.batch), request.binding.direct
    tier = next((each for each in chain.storage if not each.health.is_bypassed), None)
    most = chain.window_blocks * chain.limits.reads_in_flight
    if direct is None or tier is None or n > most or (slots >= 0).any():
        return None
    if request.lane.has_events or not isinstance(tier, OwnedTier) or not tier.index.ready(request.batch.names).all():
        return None
    return InPlaceLoad(request, direct, tier).start() if chain.tasks.goes_on() else None


def _owned_sources(chain: Chain, names: Names) -> NDArray[np.int8] | None:
    """Say which storage tier is to be read for each of some blocks; None if one of others has to be asked first."""
    sources = np.empty(len(names), np.int8)
    sources.fill(-1)
    for number, tier in enumerate(chain.storage, start=len(chain.memory)):
        if tier.health.is_bypassed:
            continue
        if not isinstance(tier, OwnedTier):
            return None
        sources[(sources < 0) & tier.index.ready(names)] = number
        if min(sources.tolist()) >= 0:
            return sources
    return None


class BegunLoad(Loading):
    """A load that was begun in the call that started it, and ends in a callback.

    Attributes:
        is_admitted: Whether it is known how many blocks will be in place.
    """

    is_admitted = False

    def __init__(self, request: LoadRequest) -> None:
        """Begin to count its time."""
        loop = asyncio.get_running_loop()
        self.num_layers = request.chain.group.num_layers
        self.thread = request.chain.tasks.thread
        self.num_from_back = len(request.batch) if request.order == "back" else None
        self._request = request
        self._started = loop.time()
        self._again: LoadHandle | None = None
        self._faults: list[TierFault] = []
        self._num_blocks = 0
        self._ended: asyncio.Future[LoadResult] = loop.create_future()
        self._admitted: asyncio.Future[None] | None = None  # once somebody waits for it
        self._over: Callable[[], None] = nothing

    def handle(self) -> LoadHandle:
        """Return a handle of what is under way, which the end of the cache ends."""
        if not self._ended.done():
            self._over = self._request.chain.tasks.hold(self.revoke)
        return LoadHandle(self._ended, self)

    @override
    async def wait_admitted(self) -> int:
        """Return how many blocks there will be, in a later turn of the loop."""
        await asyncio.sleep(0)
        if not self.is_admitted:
            self._admitted = self._admitted or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._admitted)
        return self._num_blocks

    @override
    def stop_before(self, block: int) -> int:
        """Claim blocks for the engine; nothing is waited for: all is in place, or will be in a moment."""
        has_failed = self._ended.done() and not self._ended.result().num_blocks
        return block if has_failed else 0

    def _admit(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.is_admitted = True
        if self._admitted is not None:
            self._admitted.set_result(None)

    def _begin_again(self) -> None:
        """Look for all of it anew, as any load does."""
        self._again = _in_task(self._request)
        self._again.when_done(self._ended_again)

    def _ended_again(self, ended: "asyncio.Future[LoadResult]") -> None:
        is_well = not ended.cancelled() and ended.exception() is None
        self._admit(ended.result().num_blocks if is_well else 0)
        self._over()
        if ended.cancelled():
            self._ended.cancel()
        elif (error := ended.exception()) is not None:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(ended.result())

    def _is_overtaken(self) -> bool:
        """Say whether the weights have changed, and that they have: then nothing that was brought is of use."""
        if self._request.is_current():
            return False
        self._faults.append(self._request.overtaken())
        return True

    def _end(self, num_blocks: int, counts: Sequence[int], *, but: Tier | None = None) -> None:
        """Count a use, in ``but`` not again, and say what is in place, which is the engine's alone from here on."""
        request, chain = self._request, self._request.chain
        self._num_blocks = num_blocks
        self._over()
        if num_blocks:
            used = request.batch if num_blocks == len(request.pages) else request.batch[:num_blocks]
            chain.touch(used, but=but)
        seconds = asyncio.get_running_loop().time() - self._started
        self._ended.set_result(request.ended(num_blocks, counts, self._faults, seconds))


class InPlaceLoad(BegunLoad):
    """A load that one storage tier of this cache's own reads to where it belongs."""

    def __init__(self, request: LoadRequest, slots: DirectSlots, tier: OwnedTier) -> None:
        """Prepare to read from ``tier``."""
        super().__init__(request)
        self._tier = tier
        self._blocks = slots.lend(request.pages[:, 0])
        self._waiter = Waiter(Kind.LOAD, request.priority, lends=True)
        self._timer: asyncio.TimerHandle | None = None
        self._is_revoked = False

    def start(self) -> LoadHandle:
        """Have the tier read, once it is its turn: until the deadline, at most, it is waited for."""
        request, waiter = self._request, self._waiter
        self._tier.start_read(request.batch, self._blocks, waiter, self._late, self._read, is_use=True)
        if waiter.is_waiting:
            self._timer = asyncio.get_running_loop().call_at(request.deadline, waiter.give_up)
        return self.handle()

    @override
    def revoke(self) -> None:
        """Have what is begun end: a medium that has been given memory cannot be asked to stop."""
        self._is_revoked = True
        self._waiter.give_up()
        if self._again is not None:
            self._again.cancel()

    def _late(self) -> None:
        self._faults.append(TierFault(self._tier.name, Reason.TIMEOUT, len(self._request.batch)))

    def _read(self, report: ReadReport) -> None:
        """Say what is in place, now that the medium has let go of the engine's memory."""
        request, n = self._request, len(self._request.batch)
        self._blocks.give_back()
        if self._timer is not None:
            self._timer.cancel()
        num_right = prefix_of(report.right)
        is_in_time = asyncio.get_running_loop().time() < request.deadline
        if num_right < n and is_in_time and not self._is_revoked:
            self._begin_again()  # another tier may have what is broken here
            return
        if self._is_revoked:
            self._faults.append(request.revocation())
        elif not is_in_time:
            self._faults.append(TierFault("", Reason.DEADLINE, n))
        request.lane.release()
        num_blocks = 0 if self._is_overtaken() else num_right
        self._admit(num_blocks)
        counts = [0] * len(request.chain.tiers)
        counts[request.chain.tiers.index(self._tier)] = num_blocks
        self._end(num_blocks, counts, but=self._tier if num_right == n else None)


class ReadyLoad(BegunLoad):
    """A load of what is in memory, from its lease on, or of what is being read there already."""

    def __init__(
        self,
        request: LoadRequest,
        tier: MemoryTier,
        slots: NDArray[np.int64],
        held: Lease | None = None,
        fill: Fill | None = None,
        filled: NDArray[np.intp] | None = None,
    ) -> None:
        """Take over ``held``: it holds the blocks in ``slots`` of ``tier``, all but those ``filled`` by ``fill``."""
        super().__init__(request)
        self._tier = tier
        self._slots = slots
        self._leases = [] if held is None else [held]
        self._fill = fill
        self._filled = np.empty(0, np.intp) if filled is None else filled
        self._copy: LaneCopy | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> LoadHandle:
        """Copy, or have it done by the stream, once all is in memory."""
        if self._fill is None:
            self._submit(self._slots)
        else:
            self._timer = asyncio.get_running_loop().call_at(self._request.deadline, self._arrived, self._fill)
            self._fill.add_done_callback(self._arrived)
        return self.handle()

    def copy_at_once(self) -> LoadHandle:
        """Copy what is there in this turn of the loop."""
        self._copy_now(self._slots)
        if self._ended.result().num_blocks:
            self._tier.index.use(self._slots)  # as else the end of a lease would be one
        return self.handle()

    @override
    def copy_of(self, layer: int) -> LaneCopy | None:
        return self._copy

    @property
    @override
    def is_copying(self) -> bool:
        """True from the moment when all blocks are in memory."""
        return self.is_admitted

    @override
    def revoke(self) -> None:
        """Stop, unless the copy has begun."""
        if self._again is not None:
            self._again.cancel()
        elif self._copy is not None:
            if not self._copy.has_begun:
                self._faults.append(self._request.revocation())
            self._copy.revoke()
        elif not self._ended.done():
            self._admit(0)
            self._faults.append(self._request.revocation())
            self._copied(None)

    def _arrived(self, fill: Fill) -> None:
        """Copy what has come, once nothing more will, or none came in time."""
        chain, n = self._request.chain, len(self._request.pages)
        if self.is_admitted:
            return
        if not fill.is_done:
            names = sorted({chain.names[number] for number in fill.source.tolist()})
            self._faults.append(TierFault(",".join(names), Reason.DEADLINE, n))
        self._faults += chain.fills.faults_of(fill)
        slots = self._slots.copy()
        slots[self._filled] = fill.slots
        num_blocks = prefix_of(slots >= 0)
        is_short = num_blocks < n and (not self._faults or (self._request.gaps and fill.is_done))
        if is_short:  # what was brought has left already; or what comes after what did not come is wanted too
            self._faults.clear()
            self._let_go()
            self._begin_again()
        elif not num_blocks or may_copy_at_once(self._request, num_blocks):
            self._copy_now(slots[:num_blocks])
        else:
            self._submit(slots[:num_blocks])

    def _copy_now(self, slots: NDArray[np.int64]) -> None:
        error = attempt(self._copy_of_slots(slots)) if len(slots) else None
        self._admit(len(slots))
        self._copied(error)
        raise_the_programs(error)

    def _submit(self, slots: NDArray[np.int64]) -> None:
        """Have the stream copy what is in these slots, which are held until then."""
        request, loop = self._request, asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        self._copy = request.chain.copy(request.lane, self._copy_of_slots(slots))
        if self._copy.is_late:  # no stream could wait for it yet without blocking who has it wait
            self._num_blocks = len(slots)
        else:
            self._admit(len(slots))
        self._copy.ended.add_done_callback(self._stream_copied)
        self._timer = loop.call_at(max(request.deadline, loop.time() + LAST_COPIES_S), self._revoke_late)

    def _copy_of_slots(self, slots: NDArray[np.int64]) -> Callable[[], None]:
        pages = self._request.pages[: len(slots)].ravel()
        return partial(self._request.binding.scatter, self._tier.rows, slots, pages)

    def _let_go(self, *, is_use: bool = False) -> None:
        if self._timer is not None:
            self._timer.cancel()
        chain = self._request.chain
        if self._fill is not None:
            self._fill.let_go()
            chain.room.changed()
        if self._leases:
            chain.release(*self._leases, is_use=is_use)

    def _revoke_late(self) -> None:
        self._faults.append(TierFault("", Reason.DEADLINE, len(self._request.batch)))
        if self._copy is not None:
            self._copy.revoke()

    def _stream_copied(self, copied: "asyncio.Future[None]") -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._copied(copied.exception())

    def _copied(self, error: BaseException | None) -> None:
        """Let go of everything, and say what is in place."""
        request, num_blocks, is_resident = self._request, self._num_blocks, self._fill is None
        request.lane.release()
        if error is not None:
            num_blocks = 0
            if not isinstance(error, RevokedError):
                self._faults.append(request.copy_failure(error))
        if self._is_overtaken():
            num_blocks = 0
        if not self.is_admitted:
            self._admit(num_blocks)
        self._let_go(is_use=num_blocks > 0 and is_resident)
        self._end(num_blocks, self._counts(num_blocks), but=self._tier if is_resident else None)

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
