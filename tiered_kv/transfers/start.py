"""Where every load and store begins: which kind of transfer serves a request."""

from tiered_kv.transfers.back import BackLoad
from tiered_kv.transfers.direct import DirectLoad
from tiered_kv.transfers.gaps import GapLoad
from tiered_kv.transfers.layerwise import LayerLoad, LayerStore
from tiered_kv.transfers.load import Load
from tiered_kv.transfers.load_handle import LoadHandle
from tiered_kv.transfers.requests import LoadRequest, StoreRequest
from tiered_kv.transfers.resident import start_resident
from tiered_kv.transfers.store import Store, StoreHandle


def start_load(request: LoadRequest) -> LoadHandle:
    """Start a load, on the event loop."""
    if (handle := start_resident(request)) is not None:
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
    store = (LayerStore if request.layerwise else Store)(request)
    if not request.layerwise and (handle := store.start_at_once()) is not None:
        return handle
    return store.start_store(request.chain.tasks.spawn(store.run(), f"store {len(request.batch)} blocks"))
