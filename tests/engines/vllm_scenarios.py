"""What vLLM's own tests of tiering ask, and what its tiers fail, over our tier: ``vllm_scenarios.py FOLDER``.

Runs in vLLM's environment and prints, per scenario, what came of it.
"""

import asyncio
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm.v1.kv_offload.base import LookupResult

from own_metrics import own_lookups
from tiered_kv.integrations.vllm import offload_jobs
from vllm_tiering import OURS, Tiering, keys_of

KIB = 1024
CHUNK = 128 * KIB
SCENARIOS: list[Callable[[pathlib.Path], Any]] = []


def scenario(function: Callable[[pathlib.Path], Any]) -> Callable[[pathlib.Path], Any]:
    """Have a function run, with an empty folder of its own."""
    SCENARIOS.append(function)
    return function


def nvme(folder: pathlib.Path, capacity: str = "64MiB") -> dict[str, Any]:
    """Our tier with an NVMe tier in it."""
    return {**OURS, "tiers": [f"file://{folder}/nvme?capacity={capacity}"]}


def faulty(folder: pathlib.Path) -> dict[str, Any]:
    """Our tier with a shared tier in it that stalls and fails where it is told to."""
    shared = {"medium": "stalling:StallingBackend", "path": f"{folder}/shared", "capacity": "64MiB"}
    return {**OURS, "tiers": [shared], "load_timeout_s": 0.5}


def filled(folder: pathlib.Path, tier: dict[str, Any], count: int) -> Tiering:
    """Return a manager that has stored so many chunks in the tier, and has an empty CPU tier again."""
    tiering = Tiering(tier, num_chunks=count, chunk_bytes=CHUNK)
    tiering.store(keys_of(count), range(1, count + 1))
    tiering.settle()
    tiering.tier.kv.flush()
    tiering.empty_primary()
    return tiering


def flip(folder: pathlib.Path, value: int) -> None:
    """Flip a bit on the disk, of the chunk that is filled with a value."""
    (slab,) = (folder / "nvme").glob("*/slab")
    stored = bytearray(slab.read_bytes())
    at = next(at for at in range(4096, len(stored), 4096) if stored[at : at + 4096] == bytes([value]) * 4096)
    stored[at + 17] ^= 1
    slab.write_bytes(stored)


@scenario
def promoted(folder: pathlib.Path) -> Any:
    """Chunks go down and come up again, in another process' stead, of two KV groups too."""
    filled(folder, nvme(folder), 8).close()
    tiering = Tiering(nvme(folder), num_chunks=8, chunk_bytes=CHUNK)
    context = tiering.request()
    found = tiering.find(keys_of(8), context), tiering.find(keys_of(8, group=1), context)
    values = tiering.read(keys_of(8), context)
    tiering.close()
    return {"found": found, "values": values}


@scenario
def in_flight(folder: pathlib.Path) -> Any:
    """What is being stored is no hit before vLLM's memory was read; while storage stalls it is right or no hit."""
    tiering = Tiering(faulty(folder), num_chunks=8, chunk_bytes=CHUNK)
    (folder / "stall-writes").touch()
    tiering.store(keys_of(8), range(1, 9))
    at_once = [tiering.tier.lookup(key, tiering.request()) is LookupResult.HIT for key in keys_of(8)]
    tiering.settle()
    tiering.empty_primary()
    tiering.rows[:] = 0
    context = tiering.request()
    found = tiering.find(keys_of(8), context)
    return {"at_once": any(at_once), "right": tiering.read(keys_of(found), context) == list(range(1, found + 1))}


@scenario
def stored_twice(folder: pathlib.Path) -> Any:
    """A second store of the same chunks takes no place."""
    tiering = filled(folder, nvme(folder), 8)
    before = tiering.tier.kv.stats()["nvme"]
    tiering.store(keys_of(8), range(1, 9))
    tiering.settle()
    tiering.tier.kv.flush()
    after = tiering.tier.kv.stats()["nvme"]
    tiering.close()
    return {"written": after.written - before.written, "ready": after.ready - before.ready}


@scenario
def store_fails(folder: pathlib.Path) -> Any:
    """A store that fails keeps what was there."""
    tiering = filled(folder, faulty(folder), 8)
    (folder / "full").touch()
    tiering.store(keys_of(4, start=100), range(100, 104))
    tiering.settle()
    tiering.empty_primary()
    context = tiering.request()
    found = tiering.find(keys_of(8), context)
    return {"found": found, "values": tiering.read(keys_of(found), context)}


@scenario
def flipped(folder: pathlib.Path) -> Any:
    """A promotion that meets a flipped bit keeps exactly what came before it, and nobody is given wrong bytes."""
    filled(folder, nvme(folder), 8).close()
    flip(folder, 6)
    tiering = Tiering(nvme(folder), num_chunks=8, chunk_bytes=CHUNK)
    context = tiering.request()
    found = tiering.find(keys_of(8), context)
    values = tiering.read(keys_of(found), context)
    tiering.close()
    return {"found": found, "values": values}


@scenario
def longer_than_vllms(folder: pathlib.Path) -> Any:
    """A prefix longer than vLLM's CPU tier is asked for, and then one that fits."""
    filled(folder, nvme(folder), 8).close()
    tiering = Tiering(nvme(folder), num_chunks=4, chunk_bytes=CHUNK)
    counts, values = [], []
    for count in (8, 3):
        context = tiering.request()
        counts.append(tiering.find(keys_of(count), context))
        values.append(tiering.read(keys_of(counts[-1]), context))
        tiering.settle()
    tiering.close()
    is_right = all(found == list(range(1, count + 1)) for count, found in zip(counts, values, strict=True))
    return {"is_right": is_right, "then": counts[-1]}


@scenario
def duplicates(folder: pathlib.Path) -> Any:
    """A batch that names a chunk twice fills both places."""
    tiering = filled(folder, nvme(folder), 4)
    keys = [keys_of(4)[number] for number in (0, 1, 1, 2)]
    rows = tiering.rows
    rows[:] = 0
    tiering.tier.submit_load(SimpleNamespace(job_id=7, keys=keys, chunk_ids=[0, 1, 2, 3], is_promotion=True))
    tiering.tier.drain_jobs()
    (result,) = tiering.tier.get_finished_jobs()
    return {"success": result.success, "values": [int(row[0]) for row in rows]}


@scenario
def together(folder: pathlib.Path) -> Any:
    """Jobs that are given together are loaded together; what one of them lacks is lacking in none of the others."""
    filled(folder, nvme(folder), 8).close()
    flip(folder, 6)
    tiering = Tiering(nvme(folder), num_chunks=8, chunk_bytes=CHUNK)
    tiering.rows[:] = 0

    def submit() -> None:
        for number, chunks in enumerate(([0, 1, 2], [3, 4, 5, 6], [7])):
            keys = [keys_of(8)[chunk] for chunk in chunks]
            tiering.tier.submit_load(SimpleNamespace(job_id=number, keys=keys, chunk_ids=chunks, is_promotion=True))

    tiering.tier.kv.call(submit)  # on its loop, which else may begin with some of them before the others come
    tiering.tier.drain_jobs()
    ended = {each.job_id: each for each in tiering.tier.get_finished_jobs()}
    kept = [keys_of(8).index(key) for key in ended[1].successful_keys]
    answer = {
        "whole": [number for number, each in sorted(ended.items()) if each.success],
        "kept": kept,
        "values": [int(tiering.rows[chunk][0]) for chunk in (0, 1, 2, *kept, 7)],
    }
    tiering.close()
    return answer


@scenario
def one_is_wrong(folder: pathlib.Path) -> Any:
    """Of jobs that are given at once one names a place that vLLM's CPU tier does not have: the others go on."""
    tiering = filled(folder, nvme(folder), 8)
    tiering.rows[:] = 0

    def give() -> None:
        for number, (chunk, is_promotion) in enumerate([(99, True), (0, True), (1, False)]):
            keys = keys_of(1, start=number)
            job = SimpleNamespace(job_id=number, keys=keys, chunk_ids=[chunk], is_promotion=is_promotion)
            if is_promotion:
                tiering.tier.submit_load(job)
            else:
                tiering.tier.submit_store(job)

    tiering.tier.kv.call(give)  # on the event loop, which so hears of all of them in one turn
    tiering.tier.drain_jobs()
    ended = {each.job_id: each.success for each in tiering.tier.get_finished_jobs()}
    tiering.close()
    return sorted(ended.items())


@scenario
def stalled(folder: pathlib.Path) -> Any:
    """Storage that does not answer is a miss after a while, for this request and the next."""
    tiering = filled(folder, faulty(folder), 8)
    (folder / "stall").write_text("3600")
    started = time.monotonic()
    first = tiering.find(keys_of(8), tiering.request())
    second = tiering.find(keys_of(8), tiering.request())
    return {"found": [first, second], "seconds": time.monotonic() - started}


@scenario
def one_stalls(folder: pathlib.Path) -> Any:
    """Of loads that take turns the first one stalls: the others do not wait for it."""
    tiering = filled(folder, {**faulty(folder), "load_timeout_s": 3600}, 8)
    was = offload_jobs._READ_AHEAD_BYTES  # noqa: SLF001 - a load of so many bytes takes long to make
    offload_jobs._READ_AHEAD_BYTES = CHUNK  # noqa: SLF001 - as above
    (folder / "stall").write_text("3600")

    def load(number: int) -> None:
        keys = keys_of(1, start=number)
        tiering.tier.submit_load(SimpleNamespace(job_id=number, keys=keys, chunk_ids=[number], is_promotion=True))

    load(0)
    while not (folder / "stalled").exists():
        time.sleep(0.01)
    (folder / "stall").unlink()
    for number in range(1, 8):
        load(number)
    ended: dict[int, bool] = {}
    deadline = time.monotonic() + 120.0
    while len(ended) < 7 and time.monotonic() < deadline:
        ended |= {each.job_id: each.success for each in tiering.tier.get_finished_jobs()}
        time.sleep(0.01)
    offload_jobs._READ_AHEAD_BYTES = was  # noqa: SLF001 - as it was
    return sorted(number for number, success in ended.items() if success)


@scenario
def stores_wait(folder: pathlib.Path) -> Any:
    """Beside two stores others wait until one ends or they are many, and go together then."""
    tiering = Tiering(nvme(folder), num_chunks=8, chunk_bytes=CHUNK)
    kv, sizes, held = tiering.tier.kv, [], []
    real = kv.cache.start_store
    were = offload_jobs._SLOW_S, offload_jobs._STORE_BYTES  # noqa: SLF001 - no clock ends the waiting, and few are many
    offload_jobs._SLOW_S, offload_jobs._STORE_BYTES = 3600.0, 3 * CHUNK  # noqa: SLF001 - as above

    def start_store(keys: Any, spec: Any) -> Any:
        sizes.append(len(keys))
        handle = real(keys, spec)
        return SimpleNamespace(when_done=lambda then: held.append((handle, then)))

    def seen() -> list[int]:
        for _ in range(4):  # turns of the loop: a job is taken, gathered, begun
            kv.call(asyncio.sleep, 0)
        return list(sizes)

    def store(number: int) -> list[int]:
        keys = keys_of(1, start=number)
        tiering.tier.submit_store(SimpleNamespace(job_id=number, keys=keys, chunk_ids=[number], is_promotion=False))
        return seen()

    kv.cache.start_store = start_store
    given = [store(number) for number in range(6)]
    for handle, then in held[:2]:
        kv.call(handle.when_done, then)
    last = seen()
    for handle, then in held[2:]:
        kv.call(handle.when_done, then)
    tiering.tier.drain_jobs()
    ended = sorted((each.job_id, each.success) for each in tiering.tier.get_finished_jobs())
    offload_jobs._SLOW_S, offload_jobs._STORE_BYTES = were  # noqa: SLF001 - as they were
    tiering.close()
    return {"given": given, "last": last, "ended": ended}


@scenario
def cannot_begin(folder: pathlib.Path) -> Any:
    """A job that cannot be begun, whatever keeps it from that, ends: vLLM waits for each."""
    tiering = Tiering(nvme(folder), num_chunks=8, chunk_bytes=CHUNK)

    def refuse(*args: object, **kwargs: object) -> Any:
        raise MemoryError

    tiering.tier.kv.cache.start_load = tiering.tier.kv.cache.start_store = refuse
    keys = keys_of(1)
    tiering.tier.submit_load(SimpleNamespace(job_id=0, keys=keys, chunk_ids=[0], is_promotion=True))
    tiering.tier.submit_store(SimpleNamespace(job_id=1, keys=keys, chunk_ids=[0], is_promotion=False))
    tiering.tier.drain_jobs()
    ended = sorted((each.job_id, each.success) for each in tiering.tier.get_finished_jobs())
    tiering.close()
    return ended


@scenario
def counted(folder: pathlib.Path) -> Any:
    """What requests look up is in the metrics of the cache, once for each request however often it is asked for."""
    os.environ["TIERED_KV_METRICS"] = "true"
    tiering = filled(folder, nvme(folder), 4)
    del os.environ["TIERED_KV_METRICS"]
    context, counts = tiering.request(), []
    for request in (context, context, tiering.request()):
        tiering.tier._jobs.answers.clear()  # noqa: SLF001 - they count for a second
        tiering.find(keys_of(8), request)
        for _ in range(2):  # turns of the event loop: an answer is known, then counted, and then in the metrics
            tiering.tier.kv.stats()
        counts.append(own_lookups())
    return counts


@scenario
def quota(folder: pathlib.Path) -> Any:
    """More than the disk may hold is stored: the limit holds, and what is found is right."""
    tiering = Tiering(nvme(folder, "2MiB"), num_chunks=64, chunk_bytes=CHUNK)
    for start in range(0, 64, 4):
        tiering.store(keys_of(4, start=start), range(start + 1, start + 5))
        tiering.settle()
        tiering.tier.kv.flush()
    tiering.empty_primary()
    wrong = found = 0
    for start in range(64):
        context = tiering.request()
        if tiering.find(keys_of(1, start=start), context):
            found += 1
            wrong += tiering.read(keys_of(1, start=start), context) != [start + 1]
    used = sum(file.stat().st_blocks * 512 for file in (folder / "nvme").rglob("*") if file.is_file())
    tiering.close()
    return {"found": found, "wrong": wrong, "used": used}


@scenario
def shut_down_twice(folder: pathlib.Path) -> Any:
    """A second shutdown does nothing, in the middle of work too."""
    tiering = Tiering(nvme(folder), num_chunks=8, chunk_bytes=CHUNK)
    tiering.store(keys_of(8), range(1, 9))
    tiering.tier.shutdown()
    tiering.tier.shutdown()
    reported = len(tiering.tier.get_finished_jobs())
    mapped = tiering.region.mmap_obj
    tiering.close()
    return {"reported": reported, "is_unmapped": mapped.closed}


def main(folder: pathlib.Path) -> None:
    """Run all and print what came of each."""
    answers = {}
    for each in SCENARIOS:
        own = folder / each.__name__
        own.mkdir()
        answers[each.__name__] = each(own)
        print(each.__name__, answers[each.__name__], flush=True)
    print(json.dumps(answers))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
