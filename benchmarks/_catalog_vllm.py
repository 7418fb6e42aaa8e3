"""vLLM's CPU offloading manager by the steps of catalog.py, which starts this: _catalog_vllm.py NUM POLICY."""

import gc
import json
import random
import sys
from collections.abc import Iterable

from vllm.v1.kv_offload.base import (  # type: ignore[import-not-found, unused-ignore]
    LookupResult,
    OffloadKey,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager  # type: ignore[import-not-found, unused-ignore]

from _catalog_common import BATCH, NUM_CALLS, Figures, Stopwatch, resident_bytes

Request = tuple[ReqContext, list[OffloadKey]]


class Scheduler:
    """Calls the manager as vLLM's scheduler does for a request."""

    def __init__(self, tracked: int, policy: str) -> None:
        self.manager = CPUOffloadingManager(num_chunks=tracked, cache_policy=policy)
        self.num_requests = 0

    def request(self, keys: list[OffloadKey]) -> Request:
        """Start a request for a prefix."""
        self.num_requests += 1
        context = ReqContext(req_id=str(self.num_requests))
        self.manager.on_new_request(context)
        for position, key in enumerate(keys):
            context.set_offload_key_position(key, position)
        return context, keys

    def admit(self, request: Request) -> None:
        """Store a prefix."""
        context, keys = request
        if self.manager.prepare_store(keys, context) is None:
            raise RuntimeError("nothing could be evicted")
        self.manager.complete_store(keys, context)
        self.manager.on_request_finished(context)

    def lookup(self, request: Request) -> int:
        """Count the leading hits."""
        context, keys = request
        for position, key in enumerate(keys):
            if self.manager.lookup(key, context) is not LookupResult.HIT:
                return position
        return len(keys)


def measure(tracked: int, policy: str) -> Figures:
    """Fill a manager with prefixes, then time lookups and admissions."""
    rng = random.Random(0)

    def chain() -> list[OffloadKey]:
        return [make_offload_key(rng.randbytes(32), 0) for _ in range(BATCH)]

    watch = Stopwatch()
    before = resident_bytes()
    scheduler = Scheduler(tracked, policy)
    chains = [chain() for _ in range(tracked // BATCH)]
    watch.median_ms(scheduler.admit, map(scheduler.request, chains))
    if policy == "arc":  # all of its memory is in use only once it has seen as many evictions
        watch.median_ms(scheduler.admit, (scheduler.request(chain()) for _ in chains))
        watch.median_ms(scheduler.admit, map(scheduler.request, chains))
    gc.collect()
    num_bytes = resident_bytes() - before

    def picked() -> Iterable[Request]:
        for keys in rng.choices(chains, k=NUM_CALLS):
            yield scheduler.request([OffloadKey(bytes(bytearray(key))) for key in keys])

    return {
        "lookup": watch.median_ms(scheduler.lookup, picked()),
        "miss": watch.median_ms(scheduler.lookup, (scheduler.request(chain()) for _ in range(NUM_CALLS))),
        "admit_evict": watch.median_ms(scheduler.admit, (scheduler.request(chain()) for _ in range(NUM_CALLS))),
        "worst_pause": watch.longest_ms,
        "bytes_per_block": num_bytes / tracked,
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), sys.argv[2])))
