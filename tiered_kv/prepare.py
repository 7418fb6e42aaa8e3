"""The part of a load or store that any thread may do: check it, and enqueue its wait. The rest is the event loop's."""

from collections.abc import Callable
from functools import partial

from tiered_kv.arguments import check_pages, check_priority, check_seconds
from tiered_kv.core import Core
from tiered_kv.keys import BlockKeys
from tiered_kv.specs import EngineBlocks
from tiered_kv.tiers.budget import Priority
from tiered_kv.transfers.direct import DirectLoad
from tiered_kv.transfers.layerwise import LayerLoad, LayerStore
from tiered_kv.transfers.load import Load, LoadHandle
from tiered_kv.transfers.store import Store, StoreHandle


def prepare_load(
    core: Core,
    keys: BlockKeys,
    into: EngineBlocks,
    after: object,
    deadline_s: float | None,
    priority: Priority,
    *,
    layerwise: bool = False,
) -> Callable[[], LoadHandle]:
    """Check a load and enqueue its wait, in any thread; return what starts it on the event loop."""
    epoch = core.epoch  # before the keys are named by it: if it advances in between, the load is overtaken
    chain, batch = core.batch(keys, anywhere=True)
    if (pool := core.pools.find(into, keys.group)) is not None:
        chain = pool.chain
    caches, pages = check_pages(chain.caches, chain.group, keys, into)
    check_priority(priority)
    check_seconds("deadline_s", deadline_s)
    deadline = core.deadline(deadline_s)
    lane = chain.h2d.take(after)
    kind: Callable[..., Load] = LayerLoad if layerwise else Load
    if pool is not None and pool.direct is not None and not layerwise:
        kind = partial(DirectLoad, pool.direct)

    def start() -> LoadHandle:
        load = kind(chain, batch, caches, pages, lane, deadline, priority, lambda: core.epoch == epoch)
        return load.start_load(core.tasks.spawn(load.run(), f"load {len(keys)} blocks"))

    return start


def prepare_store(
    core: Core, keys: BlockKeys, source: EngineBlocks, after: object, epoch: str | None, *, layerwise: bool = False
) -> Callable[[], StoreHandle]:
    """Check a store and enqueue its wait, in any thread; return what starts it on the event loop."""
    chain, batch = core.batch(keys, epoch, anywhere=True)
    if (pool := core.pools.find(source, keys.group)) is not None:
        chain = pool.chain
    caches, pages = check_pages(chain.caches, chain.group, keys, source)
    lane = chain.d2h.take_own(after) if layerwise else chain.d2h.take(after)

    def start() -> StoreHandle:
        store = (LayerStore if layerwise else Store)(chain, batch, caches, pages, lane)
        return store.start_store(core.tasks.spawn(store.run(), f"store {len(keys)} blocks"))

    return start
