"""Holding a prefix in host memory: brought there from below, then leased."""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.rights import Lease
from tiered_kv.motion.chain import Chain
from tiered_kv.motion.handles import Handle, cancel_each, each_of
from tiered_kv.motion.prefetch import Prefetch
from tiered_kv.motion.tiers import Batch
from tiered_kv.results import PrefetchResult


async def bring_to_host(parts: Sequence[tuple[Chain, Batch]]) -> list[NDArray[np.int8]]:
    """Copy up what is below the CPU tier, as far as it fits; for several ranks at once. Holds nothing.

    Returns:
        For each rank, by position, the number of the tier that had the block before; -1 where it was not brought.
    """
    handles: list[Handle[PrefetchResult]] = []
    sources = []
    for chain, batch in parts:
        ready = chain.host.index.ready(batch.names)
        sources.append(np.where(ready, len(chain.memory) - 1, -1).astype(np.int8))
        if not ready.all():
            prefetch = Prefetch(chain, batch, chain.host)
            sources[-1] = prefetch.source
            handles.append(prefetch.start(chain.tasks.spawn(prefetch.run(), f"bring {len(batch)} blocks")))
    try:
        await each_of(handles)
    except asyncio.CancelledError:
        cancel_each(handles)  # they touch no memory but ours: nobody has to wait for their end
        raise
    return sources


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
