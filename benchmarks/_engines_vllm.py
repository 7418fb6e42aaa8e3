"""One round of engines.py in vLLM's environment: ``_engines_vllm.py FOLDER``. Chunks down and up again.

vLLM's own manager and CPU tier; chunks are stored by 8 MiB a request, one request a step, and a step is 2 ms long. Down
means that storage has them, up that vLLM's CPU tier has. The limits of both tiers are their defaults.
"""

import json
import pathlib
import sys
import time
from typing import Any

from vllm.v1.kv_offload.base import LookupResult

from vllm_tiering import OURS, Tiering, keys_of

NUM_BYTES = 256 << 20
REQUEST_BYTES = 8 << 20
SIZES = {"1MiB": 1 << 20, "128KiB": 1 << 17}
STEP_S = 0.002
FOUND = {LookupResult.HIT, LookupResult.HIT_PENDING}


def measure(tier: dict[str, Any], chunk_bytes: int) -> dict[str, float]:
    """Return GB/s and the scheduler's milliseconds per 1,000 chunks, of the tier and with vLLM's manager."""
    count = NUM_BYTES // chunk_bytes
    tiering = Tiering(tier, num_chunks=count, chunk_bytes=chunk_bytes)
    tiering.rows[:] = 7
    each = REQUEST_BYTES // chunk_bytes
    batches = [keys_of(each, start=start) for start in range(0, count, each)]
    figures = {}

    def take(what: str, seconds: float) -> None:
        figures[f"{what}_gb_s"] = NUM_BYTES / seconds / 1e9
        figures[f"{what}_tier_ms"] = tiering.tier_s * 1e6 / count
        figures[f"{what}_manager_ms"] = tiering.scheduler_s * 1e6 / count
        tiering.tier_s = tiering.scheduler_s = 0.0

    started = time.perf_counter()
    for keys in batches:
        context = tiering.request()
        prepared = tiering.call(tiering.manager.prepare_store, keys, context)
        tiering.call(tiering.manager.complete_store, prepared.keys_to_store, context)
        tiering.step(context)
        time.sleep(STEP_S)
    settle(tiering)
    take("store", time.perf_counter() - started)

    tiering.empty_primary()
    tiering.rows[:] = 0
    tiering.tier_s = tiering.scheduler_s = 0.0
    started = time.perf_counter()
    waiting = [(keys, tiering.request()) for keys in batches]
    while waiting:
        answers = [{tiering.call(tiering.manager.lookup, key, context) for key in keys} for keys, context in waiting]
        tiering.step()
        waiting = [each for each, found in zip(waiting, answers, strict=True) if not found <= FOUND]
        time.sleep(STEP_S)
    settle(tiering)
    take("promote", time.perf_counter() - started)
    if not (tiering.rows == 7).all():
        sys.exit("what came back is not what went down")
    tiering.close()
    return figures


def settle(tiering: Tiering) -> None:
    """Step until nothing moves, and what was stored is in storage."""
    while tiering.manager.has_pending_work():
        tiering.step()
        time.sleep(STEP_S)
    if hasattr(tiering.tier, "kv"):
        tiering.tier.kv.flush()  # vLLM's own says that a store has ended when it is written


def main(folder: pathlib.Path) -> None:
    """Print a round's figures."""
    found: dict[str, dict[str, float]] = {}
    for size, chunk_bytes in SIZES.items():
        tiers: dict[str, dict[str, Any]] = {
            "vllm fs": {"type": "fs", "root_dir": str(folder / f"fs-{size}")},
            "tiered_kv": {**OURS, "tiers": [f"file://{folder}/nvme-{size}?capacity=1GiB"]},
            "tiered_kv direct": {**OURS, "tiers": [f"file://{folder}/direct-{size}?capacity=1GiB"], "direct": True},
        }
        found |= {f"{name} {size}": measure(tier, chunk_bytes) for name, tier in tiers.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
