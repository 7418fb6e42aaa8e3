"""Eviction policies on traces: hits of each at several sizes of the cache, beside the best that there can be.

    python benchmarks/policies.py [TRACE...] [--sizes 1000 5859 10000 30000] [--policies lru arc ...]

A trace is a file, in Mooncake's or Bailian's format, or a made-up one: ``synthetic:chat``. Without any it takes the
made-up ones. A request leases what is there and stores the rest, as much of it as fits. A *hit* is a block that is
there with all blocks before it. *Belady's bound* counts the hits of a cache that knows what will be asked for.

*us a block* is processor time for one block asked for, at the largest size. The worst *pause* is the longest single
call on a tier of a million blocks that is filled, used and overfilled in batches of 1,000.
"""

import argparse
import heapq
import json
import time
from collections.abc import Sequence
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from _catalog_common import BATCH, Stopwatch
from catalog import admit
from tiered_kv.catalog import TierIndex
from tiered_kv.catalog.policies.make_policy import POLICIES
from tiered_kv.traces import SYNTHETIC, Trace, names_of, open_trace
from tiered_kv.values.keys import Names

NEVER = 2**62
Rates = dict[str, dict[int, float]]


def serve(index: TierIndex, names: Names) -> int:
    """Serve one request; return its leading hits."""
    lease = index.lease(names)
    num_hits = lease.num_prefix
    lease.release(is_use=True)
    with index.reserve(names[: index.num_slots]) as reservation:
        reservation.commit().release()
    return num_hits


def replay(requests: Sequence[Names], num_blocks: int, policy: str) -> tuple[float, float]:
    """Replay requests on a tier of so many blocks; return hits, and microseconds, per block asked for."""
    index = TierIndex(num_blocks, policy=policy)
    num_references = sum(map(len, requests))
    start = time.process_time()
    num_hits = sum(serve(index, names) for names in requests)
    return num_hits / num_references, (time.process_time() - start) / num_references * 1e6


def belady(trace: Trace, num_blocks: int) -> float:
    """Return hits per block asked for, when what is asked for again last, or never, is not kept.

    Source: L. A. Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", IBM Systems Journal 1966.
    """
    ids = np.concatenate([each.ids for each in trace.requests])
    order = np.argsort(ids, kind="stable")
    following = np.full(len(ids), NEVER)
    is_again = ids[order[1:]] == ids[order[:-1]]
    following[order[:-1][is_again]] = order[1:][is_again]
    held: dict[int, int] = {}  # of each block, where it is asked for next
    latest: list[tuple[int, int]] = []
    num_hits = 0
    for block, then in zip(ids.tolist(), following.tolist(), strict=True):
        num_hits += held.pop(block, None) is not None
        if then == NEVER:
            continue
        held[block] = then
        heapq.heappush(latest, (-then, block))
        while len(held) > num_blocks:
            negative, victim = heapq.heappop(latest)
            if held.get(victim) == -negative:
                del held[victim]
    return num_hits / len(ids)


def worst_pause_ms(policy: str, num_blocks: int) -> tuple[float, float]:
    """Fill a tier twice and use half of it; return the longest call and the median one, of 1,000 blocks."""
    index, watch = TierIndex(num_blocks, policy=policy), Stopwatch()
    batches = [names_of(np.arange(start, start + BATCH)) for start in range(0, num_blocks, BATCH)]
    serve(TierIndex(BATCH, policy=policy), batches[0])  # numpy loads parts of itself at the first call

    def use(names: Names) -> None:
        index.lease(names).release(is_use=True)

    watch.median_ms(admit(index), batches)
    watch.median_ms(use, batches[::2])
    typical_ms = watch.median_ms(admit(index), [names + np.uint64(1 << 40) for names in batches])
    return watch.longest_ms, typical_ms


def show(trace: Trace, rates: Rates, costs: dict[str, float]) -> None:
    """Print one trace's figures."""
    title = (
        f"Hits per block on {trace.name}: {len(trace.requests):,} requests, {trace.num_references:,} blocks asked for"
    )
    table = Table(title=title)
    table.add_column("policy")
    for size in next(iter(rates.values())):
        table.add_column(f"{size:,} blocks", justify="right")
    table.add_column("us a block", justify="right")
    for policy, by_size in rates.items():
        cost = f"{costs[policy]:.1f}" if policy in costs else ""
        table.add_row(policy, *(f"{rate:.3f}" for rate in by_size.values()), cost)
    Console(width=120).print(table)


def main() -> None:
    """Replay every trace under every policy; print tables, then one line of JSON."""
    parser = argparse.ArgumentParser(description="Replay traces under every eviction policy.")
    parser.add_argument("traces", nargs="*", metavar="TRACE", help="a file, or synthetic:NAME")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 5_859, 10_000, 30_000], help="blocks")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--tracked", type=int, default=1_000_000, help="blocks, when pauses are timed; 0 for no timing")
    options = parser.parse_args()
    rates: dict[str, Rates] = {}
    costs: dict[str, list[float]] = {policy: [] for policy in options.policies}
    for where in options.traces or [f"synthetic:{name}" for name in SYNTHETIC]:
        trace = open_trace(where)
        requests = [names_of(each.ids) for each in trace.requests]
        found: Rates = {}
        for policy in options.policies:
            found[policy] = {}
            for size in options.sizes:
                rate, cost_us = replay(requests, size, policy)
                found[policy][size] = round(rate, 4)
            costs[policy].append(cost_us)
        found["Belady's bound"] = {size: round(belady(trace, size), 4) for size in options.sizes}
        show(trace, found, {policy: each[-1] for policy, each in costs.items()})
        rates[trace.name] = found
    pauses: dict[str, float] = {}
    if options.tracked:
        for policy in options.policies:
            pauses[policy], typical_ms = (round(ms, 2) for ms in worst_pause_ms(policy, options.tracked))
            print(f"{policy}: worst pause {pauses[policy]} ms, {BATCH:,} blocks for as many others {typical_ms} ms")
    figures = {
        "rates": rates,
        "us_a_block": {policy: round(median(each), 1) for policy, each in costs.items()},
        "worst_pause_ms": pauses,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
