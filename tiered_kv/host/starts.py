"""How a client's loads and stores begin: checked in the caller's thread, and started on the event loop."""

import asyncio
from collections.abc import Callable
from typing import Any

from tiered_kv.events import BlocksLoaded, BlocksStored, Emit
from tiered_kv.host.connection import Connection
from tiered_kv.host.far_load import FarBackLoad, FarLoad
from tiered_kv.host.far_store import FarStore
from tiered_kv.host.fields import Keys
from tiered_kv.host.messages import Load, Store
from tiered_kv.keys import BlockKeys, epoch_digest
from tiered_kv.results import LoadResult, StoreResult
from tiered_kv.transfers.handles import LoadHandle
from tiered_kv.transfers.store import StoreHandle
from tiered_kv.validation import LoadCall, StoreCall, check_pages


class Starts:
    """Of one client.

    Attributes:
        epoch: The digest of the weights that the engine serves.
        is_draining: Whether stores are refused.
    """

    def __init__(self, connection: Connection, epoch: bytes, emit: Emit) -> None:
        """Tell ``emit`` how transfers end."""
        self.epoch = epoch
        self.is_draining = False
        self._connection = connection
        self._emit = emit

    def said(self, keys: BlockKeys, *, epoch: bytes | None = None, anywhere: bool = False) -> Keys:
        """Check keys, in the event loop's thread or ``anywhere``, and say them, of these weights or the current."""
        self._connection.here(anywhere=anywhere).check(keys)
        return Keys.of(keys, self.epoch if epoch is None else epoch)

    def prepare_load(self, call: LoadCall, *, anywhere: bool) -> Callable[[], LoadHandle]:
        """Check a load and enqueue its wait; return what starts it on the event loop."""
        here = self._connection.here(anywhere=anywhere)
        epoch = self.epoch  # before the keys are named by it: if it advances in between, the load is overtaken
        keys = call.keys
        here.check(keys)
        said = Keys.of(keys, epoch)
        binding = here.bindings.find(call.into, keys.group)
        pages = check_pages(binding, keys, call.into)
        deadline = here.loop.time() + (self._connection.load_timeout_s if call.deadline_s is None else call.deadline_s)
        lane = binding.h2d.take(call.after)

        def start() -> LoadHandle:
            facts: Any = keys, binding, pages, lane, deadline, here.loop_calls
            is_from_back = call.order == "back"
            if is_from_back:
                load: FarLoad = FarBackLoad(*facts, is_current=lambda: self.epoch == epoch)
            else:
                load = FarLoad(*facts, is_current=lambda: self.epoch == epoch, layerwise=call.layerwise, gaps=call.gaps)
            load.ended.add_done_callback(self._say_loaded)
            left_s = max(0.0, deadline - here.loop.time())
            load.start(
                self._connection.there,
                lambda id_: Load(id_, said, left_s, int(call.priority), call.layerwise, call.gaps, is_from_back),
            )
            here.tasks.watch(load.ended, load.revoke)
            return load.handle()

        return start

    def prepare_store(self, call: StoreCall, *, anywhere: bool) -> Callable[[], StoreHandle]:
        """Check a store and enqueue its wait; return what starts it on the event loop."""
        here, keys = self._connection.here(anywhere=anywhere), call.keys
        here.check(keys)
        said = Keys.of(keys, self.epoch if call.epoch is None else epoch_digest(call.epoch))
        binding = here.bindings.find(call.source, keys.group)
        pages = check_pages(binding, keys, call.source)
        lane = binding.d2h.take_own(call.after) if call.layerwise else binding.d2h.take(call.after)

        def start() -> StoreHandle:
            there = self._connection.there
            timeout_s = there.attached.store_timeout_s if there is not None else 0.0
            facts: Any = keys, binding, pages, lane, here.loop.time() + timeout_s, here.loop_calls
            store = FarStore(*facts, layerwise=call.layerwise)
            store.ended.add_done_callback(self._say_stored)
            if self.is_draining:
                store.refuse("draining")
            else:
                store.start(there, lambda id_: Store(id_, said, call.layerwise, call.hint))
            here.tasks.watch(store.ended, store.revoke)
            return StoreHandle(store.ended, store)

        return start

    def _say_loaded(self, ended: "asyncio.Future[LoadResult]") -> None:
        result = ended.result()
        said = tuple(f"{fault.tier}: {fault.reason}" for fault in result.faults)
        num_in_place = sum(result.by_tier.values())
        self._emit(BlocksLoaded(num_in_place, result.num_requested, result.by_tier, result.seconds * 1e3, said))

    def _say_stored(self, ended: "asyncio.Future[StoreResult]") -> None:
        result = ended.result()
        reasons, took_ms = result.drop_reasons, result.seconds * 1e3
        self._emit(BlocksStored(result.num_stored, result.num_present, result.num_dropped, reasons, took_ms))
