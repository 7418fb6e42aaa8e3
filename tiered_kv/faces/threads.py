"""Calls from any thread, for engines with a synchronous loop."""

from functools import partial

from tiered_kv.core import Core
from tiered_kv.keys import BlockKeys
from tiered_kv.lookups import lookup_result, owned_runs
from tiered_kv.results import LoadResult, LookupResult, StoreResult
from tiered_kv.specs import EngineBlocks
from tiered_kv.tiers.budget import Priority
from tiered_kv.transfers.start import start_load, start_store
from tiered_kv.transfers.submissions import Ticket, load_failed, store_failed
from tiered_kv.validation import check_seconds, load_request, store_request

LoadTicket = Ticket[LoadResult]
StoreTicket = Ticket[StoreResult]


class FromThreads:
    """Submit here, poll there: nothing waits for the event loop."""

    _core: Core

    def submit_load(
        self,
        keys: BlockKeys,
        into: EngineBlocks,
        *,
        after: object = None,
        deadline_s: float | None = None,
        priority: Priority = Priority.LOAD,
    ) -> LoadTicket:
        """`start_load` from any thread, which waits for nothing. Its time counts from now.

        Whatever is wrong raises here, as there. How it ends is for `poll` to say, or `Ticket.wait`.
        """
        request = load_request(self._core, keys, into, after, deadline_s, priority, anywhere=True)
        return self._core.submissions.submit(partial(start_load, request), partial(load_failed, len(keys)))

    def submit_store(
        self, keys: BlockKeys, source: EngineBlocks, *, after: object = None, epoch: str | None = None
    ) -> StoreTicket:
        """`start_store` from any thread, which waits for nothing; see `submit_load`."""
        request = store_request(self._core, keys, source, after, epoch, anywhere=True)
        return self._core.submissions.submit(partial(start_store, request), partial(store_failed, len(keys)))

    def poll(self, timeout_s: float = 0.0) -> list[tuple[LoadTicket, LoadResult] | tuple[StoreTicket, StoreResult]]:
        """Return what was submitted and has ended since the last `poll`, with its result. Any thread may call.

        Waits for the first of them, at most ``timeout_s``, and only while anything is under way. Results are kept until
        they are polled or waited for, after closing too; each is given to one caller only.
        """
        check_seconds("timeout_s", timeout_s)
        return self._core.submissions.poll(timeout_s)

    def lookup_nowait(self, keys: BlockKeys) -> LookupResult:
        """`lookup` over the tiers that this cache owns alone (memory and NVMe), at once and from any thread."""
        parts = self._core.batches(keys, anywhere=True)
        return lookup_result([chain for chain, _ in parts], [owned_runs(chain, batch) for chain, batch in parts])
