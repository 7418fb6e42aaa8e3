"""Holding a prefix in host memory: brought there from below, then leased."""

import asyncio
from collections.abc import Sequence

from tiered_kv.catalog.rights import Lease
from tiered_kv.motion.chain import Chain
from tiered_kv.motion.handles import Handle, cancel_each, each_of
from tiered_kv.motion.prefetch import Prefetch
from tiered_kv.motion.tiers import Batch
from tiered_kv.results import PrefetchResult


async def bring_to_host(parts: Sequence[tuple[Chain, Batch]]) -> None:
    """Copy up what is below the CPU tier, as far as it fits; for several ranks at once. Holds nothing."""
    handles: list[Handle[PrefetchResult]] = []
    for chain, batch in parts:
        if not chain.host.index.ready(batch.names).all():
            prefetch = Prefetch(chain, batch, chain.host)
            handles.append(prefetch.start(chain.tasks.spawn(prefetch.run(), f"bring {len(batch)} blocks")))
    try:
        await each_of(handles)
    except asyncio.CancelledError:
        cancel_each(handles)  # they touch no memory but ours: nobody has to wait for their end
        raise


def lease_prefix(parts: Sequence[tuple[Chain, Batch]]) -> list[Lease]:
    """Lease the prefix that is in host memory for every rank; all leases are of one length."""
    leases = [chain.host.index.lease(batch.names) for chain, batch in parts]
    n = min(lease.num_prefix for lease in leases)
    if all(len(lease.slots) == n for lease in leases):
        return leases
    shorter = [chain.host.index.lease(batch.names[:n]) for chain, batch in parts]
    for (chain, _), lease in zip(parts, leases, strict=True):
        chain.release(lease)
    return shorter
