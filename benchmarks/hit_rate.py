"""Block hit rates: how many of a trace's blocks each policy would have had, at several sizes of the cache.

    python benchmarks/hit_rate.py [--trace PATH] [--sizes 1000 5859 10000 30000]

A trace is a file of JSON lines whose ``hash_ids`` name a request's blocks in order (the format of the Mooncake traces).
Without one, conversations are made up that share system prompts and come back turn by turn. A request leases what is
there (these are the hits, wherever in the prompt) and stores the rest, as much of it as fits.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from tiered_kv.catalog import TierIndex
from tiered_kv.keys import Names

POLICIES = ("lru", "arc", "mq")


def read_trace(path: Path) -> Iterator[list[int]]:
    """Yield the block ids of each request."""
    with path.open() as lines:
        for line in lines:
            yield json.loads(line)["hash_ids"]


def make_trace(num_requests: int = 8_000) -> Iterator[list[int]]:
    """Yield requests of conversations: a shared system prompt, then a history that grows with every turn."""
    rng = random.Random(0)
    next_id = 0

    def blocks(n: int) -> list[int]:
        nonlocal next_id
        next_id += n
        return list(range(next_id - n, next_id))

    prompts = [blocks(rng.randint(1, 8)) for _ in range(20)]
    conversations: list[list[int]] = []
    for _ in range(num_requests):
        if conversations and rng.random() < 0.6:  # mostly a conversation that spoke lately
            history = conversations.pop(-1 - min(len(conversations) - 1, int(rng.expovariate(1 / 200))))
        else:
            history = rng.choice(prompts)
        history = history + blocks(rng.randint(1, 30))
        conversations.append(history)
        yield history


def names_of(ids: list[int]) -> Names:
    """Return names that are the ids themselves."""
    names = np.zeros((len(ids), 4), dtype=np.uint64)
    names[:, 0] = ids
    return names


def hit_rate(requests: list[Names], num_blocks: int, policy: str) -> float:
    """Replay requests on a tier of ``num_blocks`` blocks; return hits per block asked for."""
    index = TierIndex(num_blocks, policy=policy)
    num_hits = 0
    for names in requests:
        with index.lease(names) as lease:
            num_hits += int(np.count_nonzero(lease.slots >= 0))
        with index.reserve(names[:num_blocks]) as reservation:
            reservation.commit().release()
    return num_hits / sum(map(len, requests))


def main() -> None:
    """Replay one trace under every policy; print a table, then one line of JSON: policy to size to rate."""
    parser = argparse.ArgumentParser(description="Replay a trace under every eviction policy.")
    parser.add_argument("--trace", type=Path, help="JSON lines with hash_ids; made up without one")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 5_859, 10_000, 30_000], help="blocks")
    options = parser.parse_args()
    requests = [names_of(ids) for ids in (read_trace(options.trace) if options.trace else make_trace())]
    num_references = sum(map(len, requests))
    rates = {
        policy: {size: round(hit_rate(requests, size, policy), 4) for size in options.sizes} for policy in POLICIES
    }
    trace = options.trace.name if options.trace else "a made-up trace"
    table = Table(title=f"Block hit rates on {trace}: {len(requests):,} requests, {num_references:,} references")
    table.add_column("policy")
    for size in options.sizes:
        table.add_column(f"{size:,} blocks", justify="right")
    for policy, by_size in rates.items():
        table.add_row(policy, *(f"{rate:.3f}" for rate in by_size.values()))
    Console(width=120).print(table)
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
