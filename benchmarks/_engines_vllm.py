"""Rounds of engines.py in vLLM's environment: ``_engines_vllm.py FOLDER ROUNDS [MIB]``. Chunks down and up again.

vLLM's own manager and CPU tier; chunks are stored by 8 MiB a request, one request a step, and a step is 2 ms long. Down
means that storage has them, up that vLLM's CPU tier has. What is measured has been done once before with other chunks.
In each round all tiers take their turn, with chunks that are new to them. What was made before the first round is kept
from the garbage collector, as vLLM's engine does once it has started: else it stops one tier or another for 0.4 s.

Neither tier has a disk flush what it was given, and both pass by the page cache, which is checked: so nothing is read
from memory. Ours has checksums, made and verified, and a limit of space, which is reached before it is measured: so it
evicts, and writes where it has written before, as a tier of its size does for all of its life but the first hour.
vLLM's never evicts, and writes new files for all of its life. The other settings are the defaults, but for the policy:
ours goes by LRU, as what is measured must be there, and `lhd` keeps some of the chunks that were used before instead.
"""

import gc
import json
import mmap
import os
import pathlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm.v1.kv_offload.base import LookupResult

from vllm_tiering import OURS, Tiering, keys_of

REQUEST_BYTES = 8 << 20
SIZES = {"1MiB": 1 << 20, "128KiB": 1 << 17}
STEP_S = 0.002
FOUND = {LookupResult.HIT, LookupResult.HIT_PENDING}


def opened(tier: dict[str, Any], chunk_bytes: int, num_bytes: int) -> Tiering:
    """Return a tier below vLLM's, with files of the size that they will have."""
    tiering = Tiering(tier, num_chunks=num_bytes // chunk_bytes, chunk_bytes=chunk_bytes)
    if not passes_by_the_page_cache(tiering):
        sys.exit(f"{tier['type']} would be read from memory: run this in a folder whose filesystem has direct I/O")
    down_and_up(tiering, chunk_bytes, first=0)
    return tiering


def passes_by_the_page_cache(tiering: Tiering) -> bool:
    """Say whether the tier found that it can read and write directly."""
    if hasattr(tiering.tier, "kv"):
        return bool(tiering.tier.kv.stats().tiers[-1].facts["io"] == "direct")
    return bool(tiering.tier._use_o_direct)  # noqa: SLF001 - vLLM says it nowhere else


def down_and_up(tiering: Tiering, chunk_bytes: int, first: int) -> dict[str, float]:
    """Store as many chunks as vLLM's CPU tier holds, from a number on, empty that, and have them come back."""
    count, num_bytes = len(tiering.rows), tiering.rows.size
    tiering.empty_primary()
    tiering.rows[:] = 7
    each = REQUEST_BYTES // chunk_bytes
    batches = [keys_of(each, start=start) for start in range(first, first + count, each)]
    figures = {}
    tiering.tier_s = tiering.scheduler_s = 0.0

    def take(what: str, seconds: float, cpu_s: float) -> None:
        figures[f"{what}_gb_s"] = num_bytes / seconds / 1e9
        figures[f"{what}_tier_ms"] = tiering.tier_s * 1e6 / count
        figures[f"{what}_manager_ms"] = tiering.scheduler_s * 1e6 / count
        figures[f"{what}_cpu_ms"] = cpu_s * 1e6 / count
        tiering.tier_s = tiering.scheduler_s = 0.0

    started, cpu_started = time.perf_counter(), time.process_time()
    for keys in batches:
        context = tiering.request()
        prepared = tiering.call(tiering.manager.prepare_store, keys, context)
        tiering.call(tiering.manager.complete_store, prepared.keys_to_store, context)
        tiering.step(context)
        time.sleep(STEP_S)
    settle(tiering)
    take("store", time.perf_counter() - started, time.process_time() - cpu_started)

    tiering.empty_primary()
    tiering.rows[:] = 0
    tiering.tier_s = tiering.scheduler_s = 0.0
    started, cpu_started = time.perf_counter(), time.process_time()
    waiting = [(keys, tiering.request()) for keys in batches]
    while waiting:
        answers = [{tiering.call(tiering.manager.lookup, key, context) for key in keys} for keys, context in waiting]
        tiering.step()
        if any(LookupResult.MISS in found for found in answers):
            sys.exit("chunks are gone that were stored")
        waiting = [each for each, found in zip(waiting, answers, strict=True) if not found <= FOUND]
        time.sleep(STEP_S)
    settle(tiering)
    take("promote", time.perf_counter() - started, time.process_time() - cpu_started)
    if not (tiering.rows == 7).all():
        sys.exit("what came back is not what went down")
    return figures


def bare(folder: pathlib.Path, num_bytes: int) -> dict[str, float]:
    """Return the GB/s of as many bytes written to places that were written before, and read, in 8 threads."""
    pages = memoryview(mmap.mmap(-1, num_bytes))
    pages[:] = bytes([7]) * num_bytes
    file = os.open(folder / "bare", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    os.posix_fallocate(file, 0, num_bytes)
    figures = {f"{what}_{unit}_ms": 0.0 for what in ("store", "promote") for unit in ("tier", "manager", "cpu")}
    with ThreadPoolExecutor(8) as threads:
        for name, call in (("", os.pwritev), ("store_gb_s", os.pwritev), ("promote_gb_s", os.preadv)):
            started = time.perf_counter()
            offsets = range(0, num_bytes, 1 << 20)
            for _ in threads.map(lambda at, call=call: call(file, [pages[at : at + (1 << 20)]], at), offsets):
                pass
            figures[name] = num_bytes / (time.perf_counter() - started) / 1e9
    os.close(file)
    del figures[""]
    return figures


def settle(tiering: Tiering) -> None:
    """Step until nothing moves, and what was stored is in storage."""
    while tiering.manager.has_pending_work():
        tiering.step()
        time.sleep(STEP_S)
    if hasattr(tiering.tier, "kv"):
        tiering.tier.kv.flush()  # vLLM's own says that a store has ended when it is written


def main(folder: pathlib.Path, num_rounds: int, num_mib: int = 256) -> None:
    """Print the figures of each round."""
    rounds: list[dict[str, dict[str, float]]] = [{} for _ in range(num_rounds)]
    options = f"capacity={num_mib + num_mib // 8 + 2}MiB&policy=lru"
    for size, chunk_bytes in SIZES.items():
        tiers: dict[str, dict[str, Any]] = {
            "vllm fs": {"type": "fs", "root_dir": str(folder / f"fs-{size}")},
            "tiered_kv": {**OURS, "tiers": [f"file://{folder}/nvme-{size}?{options}"]},
            "tiered_kv direct": {**OURS, "tiers": [f"file://{folder}/direct-{size}?{options}"], "direct": True},
        }
        tierings = {name: opened(tier, chunk_bytes, num_mib << 20) for name, tier in tiers.items()}
        gc.collect()
        gc.freeze()
        for number, found in enumerate(rounds):
            found[f"bare disk {size}"] = bare(folder, num_mib << 20)
            for name, tiering in tierings.items():
                found[f"{name} {size}"] = down_and_up(tiering, chunk_bytes, first=(number + 1) << 20)
        for tiering in tierings.values():
            tiering.close()
    print(json.dumps(rounds))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))
