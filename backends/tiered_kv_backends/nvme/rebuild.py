"""What a slab holds, read from the headers of its records: for slots whose entry in the ledger cannot be read."""

import asyncio
from collections.abc import Callable

import numpy as np

from tiered_kv.log import log
from tiered_kv.record import key_in
from tiered_kv.system import system
from tiered_kv_backends.nvme.ledger import Entries, Slots
from tiered_kv_backends.nvme.slab import Slab

_SLOTS_PER_JOB = 4096


async def rebuild(slab: Slab, damaged: Slots, run: Callable[..., "asyncio.Future[Entries]"]) -> Entries:
    """Return the blocks in these slots by the headers there, and log how many there are.

    Args:
        slab: Where to look: one page of I/O a slot. Payloads are verified when they are read.
        damaged: Slots of which nothing else is known.
        run: Runs a function in a thread that may read.
    """
    started = system().monotonic()
    starts = range(0, len(damaged), _SLOTS_PER_JOB)
    jobs = [run(_entries_in, slab, damaged[start : start + _SLOTS_PER_JOB].tolist()) for start in starts]
    await asyncio.wait(jobs)
    rebuilt = Entries.joined(*(job.result() for job in jobs))
    log(
        "warning",
        "nvme.ledger_damaged",
        folder=slab.shape.folder,
        damaged=len(damaged),
        rebuilt=len(rebuilt.slots),
        took_ms=round(1000 * (system().monotonic() - started), 1),
    )
    return rebuilt


def _entries_in(slab: Slab, slots: list[int]) -> Entries:
    hashes, masks, found = [], [], []
    for slot, header in zip(slots, slab.headers(slots), strict=True):
        key = key_in(header.data)
        if key is not None and key.namespace.fingerprint == slab.shape.fingerprint:
            hashes.append(key.hash)
            masks.append(key.namespace.mask)
            found.append(slot)
    names = np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, 4) ^ np.array(masks, np.uint64).reshape(-1, 4)
    return Entries(names, np.array(found, np.int64), np.zeros(len(found), np.uint64))
