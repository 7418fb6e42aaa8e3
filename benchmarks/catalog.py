"""How long the catalog thinks: lookups, admissions, the worst pause, memory per block; ours beside vLLM's manager.

    python benchmarks/catalog.py [--tracked 100000 1000000] [--vllm-python PATH]

Every row comes from a fresh process that tracks so many blocks, stored as prefixes of 1,000. A *lookup* starts from
fresh key objects and goes over two tiers. *Scattered* names 1,000 blocks that were stored in different prefixes: the
worst layout there is. An *admission* reserves, commits and releases 1,000 new blocks, evicting 1,000, in a tier that
has evicted as many as its policy remembers. The worst *pause* is the longest single call of all, filling included. vLLM
(0.33) goes through the same steps where it can be imported: by this interpreter, or by the one given.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from _catalog_common import BATCH, NUM_CALLS, Figures, Stopwatch, resident_bytes
from tiered_kv.catalog import TierIndex, locate
from tiered_kv.values.keys import BlockKeys, Names, Namespace
from tiered_kv.values.results import num_found

COLUMNS = {
    "lookup": "lookup ms",
    "lookup_lower_tier": "lower tier ms",
    "lookup_scattered": "scattered ms",
    "miss": "miss ms",
    "admit_evict": "admit+evict ms",
    "worst_pause": "worst pause ms",
    "bytes_per_block": "bytes/block",
}
GHOSTS = {"lru": 0, "arc": 1, "mq": 4, "lhd": 4}
"""How many evicted blocks each policy remembers, in tiers full."""
VLLM_POLICIES = ("lru", "arc")
NAMESPACE = Namespace(fingerprint=bytes(32), epoch=bytes(32))


def names_of(chain: bytes) -> Names:
    """Return the names of a prefix from its hashes, by way of fresh keys."""
    return NAMESPACE.names(BlockKeys(chain, block_size=16))


def admit(index: TierIndex) -> Callable[[Names], None]:
    """Return a function that stores a prefix."""

    def reserve_commit_release(names: Names) -> None:
        with index.reserve(names) as reservation:
            reservation.commit().release()

    return reserve_commit_release


def measure(tracked: int, policy: str) -> Figures:
    """Fill two tiers, the upper one with the younger half of the lower one's blocks, and time them."""
    random = np.random.default_rng(0)
    chains = [random.bytes(32 * BATCH) for _ in range(tracked // BATCH)]

    admit(TierIndex(BATCH, policy=policy))(names_of(chains[0]))  # numpy loads parts of itself at the first call
    watch = Stopwatch()
    before = resident_bytes()
    used = TierIndex(tracked, policy=policy)
    # All of a policy's memory is in use only once it has seen so many evictions.
    num_evicted = GHOSTS[policy] * len(chains)
    watch.median_ms(admit(used), (names_of(random.bytes(32 * BATCH)) for _ in range(len(chains) + num_evicted)))
    num_bytes = resident_bytes() - before
    lower = TierIndex(tracked, policy=policy)
    watch.median_ms(admit(lower), map(names_of, chains))
    upper = TierIndex(tracked // 2, policy=policy)
    young, old = chains[len(chains) // 2 :], chains[: len(chains) // 2]
    watch.median_ms(admit(upper), map(names_of, young))

    tiers = {"upper": upper, "lower": lower}

    def lookup(chain: bytes) -> None:
        runs = locate(tiers, names_of(chain))
        if num_found(runs) != BATCH:
            raise RuntimeError(f"a stored prefix is not found: {runs}")

    rows = np.concatenate([np.frombuffer(chain, dtype="V32") for chain in young])
    scattered = [random.choice(rows, BATCH, replace=False).tobytes() for _ in range(NUM_CALLS)]
    fresh = [random.bytes(32 * BATCH) for _ in range(NUM_CALLS)]
    return {
        "lookup": watch.median_ms(lookup, [copied(young[i]) for i in random.integers(0, len(young), NUM_CALLS)]),
        "lookup_lower_tier": watch.median_ms(lookup, [copied(old[i]) for i in random.integers(0, len(old), NUM_CALLS)]),
        "lookup_scattered": watch.median_ms(lookup, scattered),
        "miss": watch.median_ms(lambda chain: locate(tiers, names_of(chain)), fresh),
        "admit_evict": watch.median_ms(admit(used), map(names_of, fresh)),
        "worst_pause": watch.longest_ms,
        "bytes_per_block": num_bytes / tracked,
    }


def copied(chain: bytes) -> bytes:
    """Return equal bytes in another place, as a new request brings them."""
    return bytes(bytearray(chain))


def in_new_process(command: list[str], tracked: int, policy: str) -> Figures:
    """Run one measurement."""
    done = subprocess.run([*command, str(tracked), policy], check=True, capture_output=True, text=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def has_vllm(python: str) -> bool:
    """Whether the interpreter ``python`` can import vLLM's manager."""
    probe = [python, "-c", "import vllm.v1.kv_offload.cpu.manager"]
    return subprocess.run(probe, check=False, capture_output=True).returncode == 0


def show(rows: list[tuple[str, int, str, Figures]]) -> None:
    """Print all figures, one row a process."""
    table = Table(title=f"Catalog: medians for batches of {BATCH:,} blocks, {os.cpu_count()} cores")
    for title in ("system", "tracked", "policy", *COLUMNS.values()):
        table.add_column(title, justify="left" if title in {"system", "policy"} else "right")
    for system, tracked, policy, figures in rows:
        cells = [f"{figures[key]:,.3f}" if key in figures else "-" for key in COLUMNS]
        table.add_row(system, f"{tracked:,}", policy, *cells)
    Console(width=140).print(table)


def main() -> None:
    """Measure everything asked for; print a table, then one line of JSON with the worst of ours over all policies."""
    parser = argparse.ArgumentParser(description="Time the catalog, ours beside vLLM's.")
    parser.add_argument("--tracked", type=int, nargs="+", default=[100_000, 1_000_000], help="blocks tracked")
    parser.add_argument("--policy", nargs="+", default=list(GHOSTS))
    parser.add_argument("--vllm-python", default=sys.executable, help="an interpreter that can import vLLM 0.33")
    parser.add_argument("--measure", nargs=2, metavar=("NUM", "POLICY"), help="measure once, in this process")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(int(options.measure[0]), options.measure[1])))
        return
    systems = {"tiered_kv": [sys.executable, __file__, "--measure"]}
    if has_vllm(options.vllm_python):
        systems["vllm"] = [options.vllm_python, str(Path(__file__).with_name("_catalog_vllm.py"))]
    else:
        print(f"{options.vllm_python} cannot import vLLM: measuring ours alone")
    rows = [
        (system, tracked, policy, in_new_process(command, tracked, policy))
        for system, command in systems.items()
        for tracked in options.tracked
        for policy in options.policy
        if system == "tiered_kv" or policy in VLLM_POLICIES
    ]
    show(rows)
    ours = [figures for system, _, _, figures in rows if system == "tiered_kv"]
    largest = [f for system, tracked, _, f in rows if (system, tracked) == ("tiered_kv", max(options.tracked))]
    summary = {
        "lookup_1000_ms": round(max(figures["lookup"] for figures in ours), 4),
        "admit_evict_1000_ms": round(max(figures["admit_evict"] for figures in largest), 3),
        "worst_pause_ms": round(max(figures["worst_pause"] for figures in ours), 2),
        "bytes_per_block": round(max(figures["bytes_per_block"] for figures in largest)),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
