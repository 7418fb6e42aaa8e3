"""Where every load and store begins: which kind of transfer serves a request.

A load of what can be had at once needs no task: what is in memory is leased, and being copied, before `start_load`
returns; what owned storage tiers have is being read by then, if it is one window and host slots are free. What is
small, and copied by a thread anyway, is copied at once: to hand it over would take longer.
"""

import asyncio

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.books import READY
from tiered_kv.tiers.chain import FROM_ENGINE
from tiered_kv.tiers.gate import Kind, Waiter
from tiered_kv.tiers.tier import MemoryTier
from tiered_kv.transfers.direct import DirectLoad, DirectStore, direct_target
from tiered_kv.transfers.handles import LoadHandle
from tiered_kv.transfers.layerwise import LayerLoad, LayerStore
from tiered_kv.transfers.load import InTask, Load
from tiered_kv.transfers.load_parts import BackLoad, GapLoad
from tiered_kv.transfers.ready import InPlaceLoad, ReadyLoad, copy_now
from tiered_kv.transfers.store import Store, StoreHandle
from tiered_kv.transfers.transfer_requests import MOST_AT_ONCE, LoadRequest, StoreRequest, may_copy_at_once


def start_load(request: LoadRequest) -> LoadHandle:
    """Start a load, on the event loop."""
    return _start_ready(request) or _in_task(request)


def _in_task(request: LoadRequest) -> LoadHandle:
    """Start a load that waits for slots, tiers, or its turn."""
    if request.gaps:
        return GapLoad(request, start_load).begin()
    if request.order == "back":
        return BackLoad(request, start_load).begin()
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


def _start_ready(request: LoadRequest) -> LoadHandle | None:
    """Start a load of what one memory tier has, or storage tiers of this cache's own can be asked for now; or None."""
    chain, n, gpu = request.chain, len(request.batch), request.binding.gpu
    if not 0 < n <= min(MOST_AT_ONCE, chain.resident_blocks) or request.layerwise:
        return None
    if asyncio.get_running_loop().time() >= request.deadline or request.binding.error is not None:
        return None
    for tier in (chain.host,) if gpu is None else (gpu, chain.host):
        if tier is chain.host and gpu is not None and chain.limits.promote:
            return None  # what is on the host is to be in the GPU pool too
        slots, states = tier.index.find(request.batch.names)
        if (states == READY).all():
            return _start_resident(request, tier, slots)
    if request.order != "front" or gpu is not None:
        return None
    return _bring(request, slots, states) if request.binding.direct is None else _read_in_place(request, slots)


def _start_resident(request: LoadRequest, tier: MemoryTier, slots: NDArray[np.int64]) -> LoadHandle:
    """Start a load of what is in these slots of one memory tier."""
    if may_copy_at_once(request, len(slots)):
        return copy_now(request, tier, slots)
    return ReadyLoad(request, _in_task, tier, tier.index.lease(request.batch.names)).start()


def _bring(request: LoadRequest, slots: NDArray[np.int64], states: NDArray[np.uint8]) -> LoadHandle | None:
    """Begin to read what the host lacks; None, with nothing changed, if not all of it can be read now."""
    chain, batch, index = request.chain, request.batch, request.chain.host.index
    missing = (slots < 0).nonzero()[0]
    is_coming = len(missing) + np.count_nonzero(states == READY) < len(batch)
    if is_coming or len(batch) > chain.window_blocks or not chain.tasks.goes_on():
        return None
    if (sources := _owned_sources(request, missing)) is None:
        return None
    keep = chain.limits.promote and index.room_for(batch.names) >= len(missing)
    waiter, lowest = Waiter(Kind.LOAD, request.priority), int(sources.max())
    if chain.room.is_wanted((lowest, FROM_ENGINE)):
        return None
    part, held = batch, None
    if len(missing) < len(batch):
        part, held = batch[missing], index.lease(batch.names)  # first: to make room must not take what is there
    reservation = chain.reserve_host_now(part, waiter, keep=keep, source=lowest)
    if reservation is None or (reservation.slots < 0).any():  # of a block that is asked for twice, there is one slot
        if reservation is not None:
            reservation.close()
        if held is not None:
            chain.release(held)
        return None
    fill = chain.fills.start(part, sources, reservation, waiter)
    return ReadyLoad(request, _in_task, chain.host, held, fill, missing).start()


def _read_in_place(request: LoadRequest, slots: NDArray[np.int64]) -> LoadHandle | None:
    """Begin to read all of it to where it belongs; None, with nothing changed, if the first tier in use can't."""
    chain, n, direct = request.chain, len(request.batch), request.binding.direct
    tier = next((each for each in chain.storage if not each.health.is_bypassed), None)
    most = chain.window_blocks * chain.limits.reads_in_flight
    if direct is None or tier is None or n > most or (slots >= 0).any():
        return None
    if request.lane.has_events or not chain.tasks.goes_on():
        return None
    return InPlaceLoad(request, _in_task, direct, tier).begin()


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
