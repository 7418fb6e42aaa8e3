"""Direct transfers that need no task: NVMe reads into memory of the engine's own, and writes out of it, when called."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from anyio import fail_after
from anyio.lowlevel import checkpoint
from numpy.typing import NDArray

from tests.cache.test_direct_stores import LIMITS
from tests.cache.test_host_pools import KEYS, SLOTS, Pool
from tests.support.caches import inside, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tiered_kv import Block, CPULoadStoreSpec, GPULoadStoreSpec, TieredKV
from tiered_kv.media.backend import Make, Outcome, Then, Verify
from tiered_kv.values.keys import Names
from tiered_kv.values.specs import EngineBlocks
from tiered_kv_backends.nvme.nvme_backend import NVMeBackend

INTO = CPULoadStoreSpec(SLOTS, pool="swap")
Slots = NDArray[np.int64]


class GatedNVMe(NVMeBackend):
    """A real one, whose threads wait at a gate before they say that a block has come, and before they write one.

    Attributes:
        gate: Open, unless a test closes it.
        num_held: How many threads have come to it while it was closed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__({"path": str(path), "capacity": "16MiB"})
        self.gate = threading.Event()
        self.gate.set()
        self.num_held = 0

    def _pass(self) -> None:
        self.num_held += not self.gate.is_set()
        self.gate.wait(30)

    def begin_read(self, group: int, slots: Slots, into: Sequence[Block], verify: Verify, then: Then) -> bool:
        """Read, and hold what was read."""

        def held(at: Sequence[int], outcomes: list[Outcome]) -> list[Outcome]:
            self._pass()
            return verify(at, outcomes)

        return super().begin_read(group, slots, into, held, then)

    def begin_write(
        self, group: int, slots: Slots, names: Names, blocks: Sequence[Block], make: Make, then: Then
    ) -> bool:
        """Hold what is to be written."""

        def held(at: Sequence[int]) -> None:
            self._pass()
            make(at)

        return super().begin_write(group, slots, names, blocks, held, then)


def _with_pool(kv: TieredKV) -> Pool:
    pool = Pool()
    pool.fill(SLOTS, contents(KEYS))
    kv.register_host_pool("swap", pool.memory, direct=True)
    return pool


async def _stored(kv: TieredKV) -> Pool:
    """Register a pool, and have `KEYS` in storage; then the pool has other bytes."""
    pool = _with_pool(kv)
    await (await kv.store(KEYS, INTO)).settled()
    pool.fill(SLOTS, [bytes(len(each)) for each in contents(KEYS)])
    return pool


def _num_tasks() -> int:
    return len(asyncio.all_tasks())


async def test_a_load_and_a_store_need_no_task(tmp_path: Path) -> None:
    """All is under way when they are called; what comes of it is counted as of any transfer."""
    nvme = GatedNVMe(tmp_path)
    async with open_cache(nvme, engine=Engine(), limits=LIMITS) as kv:
        pool = await _stored(kv)
        num_tasks = _num_tasks()
        nvme.gate.clear()
        loading = kv.start_load(KEYS, INTO)
        assert (_num_tasks(), loading.done) == (num_tasks, False)
        await until(lambda: nvme.num_held > 0)
        nvme.gate.set()
        loaded = await loading
        assert (loaded.num_blocks, loaded.by_tier, loaded.faults) == (9, {"nvme": 9}, ())
        assert (await loading.admitted(), loading.is_copying) == (9, True)
        assert pool.read(SLOTS) == contents(KEYS)
        await kv.evict(KEYS)
        storing = kv.start_store(KEYS, INTO)
        assert _num_tasks() == num_tasks
        stored = await storing
        assert (stored.num_stored, stored.num_present) == (9, 0)
        again = await kv.store(prompt(10), CPULoadStoreSpec([*SLOTS, 2], pool="swap"))
        assert (again.num_stored, again.num_present) == (1, 9)
        stats = kv.stats()
        assert (stats.requested, stats.missed, stats["nvme"].hits) == (9, 0, 9)
        assert (stats.store_requested, stats.stored, stats.present) == (28, 19, 9)
        await until_idle(kv)


async def test_a_store_beyond_the_end_of_the_file_needs_no_task(tmp_path: Path) -> None:
    """Whichever thread writes first to a new place has the file grow, also where two stores come to it at once."""
    async with open_cache(GatedNVMe(tmp_path), engine=Engine(), limits=LIMITS) as kv:
        pool, num_tasks = _with_pool(kv), _num_tasks()
        assert kv.stats()["nvme"].facts["allocated_bytes"] == 0
        others = prompt(9, seed=4)
        stores = [kv.start_store(keys, INTO) for keys in (KEYS, others)]
        assert _num_tasks() == num_tasks
        assert [(await each).num_stored for each in stores] == [9, 9]
        pool.fill(SLOTS, [bytes(PAYLOAD_BYTES)] * 9)
        assert (await kv.load(KEYS, INTO)).num_blocks == 9
        assert pool.read(SLOTS) == contents(KEYS)
        await until_idle(kv)


async def test_what_was_loaded_stays_for_longest(tmp_path: Path) -> None:
    """A load is a use of the blocks, of each once."""
    async with open_cache({"medium": "nvme", "path": str(tmp_path), "capacity": "16MiB"}, limits=LIMITS) as kv:
        await _stored(kv)
        before = inside(kv).chains[0].owned[0].index.names_in_order()[0]
        assert (await kv.load(KEYS[:3], INTO[:3])).num_blocks == 3
        after = inside(kv).chains[0].owned[0].index.names_in_order()[0]
        used = kv.namespace().names(KEYS[:3])
        assert {name.tobytes() for name in after[-3:]} == {name.tobytes() for name in used}
        assert {name.tobytes() for name in before} == {name.tobytes() for name in after}


@pytest.mark.parametrize("how", ["broken", "gone"])
async def test_what_is_not_there_ends_the_prefix(how: str, tmp_path: Path) -> None:
    """Of a load that finds less than its books said, what is before the first such block is right."""
    nvme = GatedNVMe(tmp_path)
    async with open_cache(nvme, engine=Engine(), limits=LIMITS) as kv:
        pool = await _stored(kv)
        nvme.gate.clear()
        loading = kv.start_load(KEYS, INTO)
        await until(lambda: nvme.num_held > 0)
        pool.fill(
            SLOTS[5:6], [bytes(len(contents(KEYS)[0]))]
        )  # as another engine's mistake, or a disk's, would have it
        if how == "gone":
            await kv.evict(KEYS[5:6])
        nvme.gate.set()
        loaded = await loading
        assert loaded.num_blocks == 5
        assert pool.read(SLOTS[:5]) == contents(KEYS[:5])
        assert not (await kv.lookup(KEYS[5:])).num_blocks
        await until_idle(kv)


@pytest.mark.parametrize("way", ["in place", "by slots"])
async def test_what_comes_after_a_broken_block_is_had_where_gaps_may_be(way: str, tmp_path: Path) -> None:
    """Such a load too needs a task only if something is not as its books said; the mask says what is in place."""
    nvme, engine = GatedNVMe(tmp_path), Engine()
    async with open_cache(nvme, engine=engine, limits=LIMITS) as kv:
        pool = await _stored(kv)
        engine_into = GPULoadStoreSpec(range(9))
        into: EngineBlocks = INTO if way == "in place" else engine_into
        num_tasks = _num_tasks()
        whole = kv.start_load(KEYS, into, gaps=True)
        assert _num_tasks() == num_tasks
        assert ((await whole).num_blocks, list((await whole).mask)) == (9, [True] * 9)
        nvme.gate.clear()
        loading = kv.start_load(KEYS, into, gaps=True)
        await until(lambda: nvme.num_held > 0)
        await kv.evict(KEYS[4:5])
        nvme.gate.set()
        loaded = await loading
        there = [at for at in range(9) if loaded.mask[at]]
        read = pool.read(SLOTS) if way == "in place" else engine.read(engine_into)
        assert [read[at] for at in there] == [contents(KEYS)[at] for at in there]
        assert set(range(9)) - set(there) <= {4}
        await until_idle(kv)


@pytest.mark.parametrize("end", ["cancel", "task", "deadline", "weights"])
async def test_memory_that_is_being_read_into_is_waited_for(end: str, tmp_path: Path) -> None:
    """Whoever ends a load, it has not ended while a thread may write to the engine's memory."""
    nvme, loop = GatedNVMe(tmp_path), asyncio.get_running_loop()
    async with open_cache(nvme, engine=Engine(), limits=LIMITS) as kv:
        await _stored(kv)
        nvme.gate.clear()
        deadline = loop.time() + 0.3
        handle = kv.start_load(KEYS, INTO, deadline_s=0.3 if end == "deadline" else None)
        waiting = asyncio.ensure_future(handle)
        await until(lambda: nvme.num_held > 0)
        ends: dict[str, Callable[[], object]] = {
            "cancel": handle.cancel,
            "task": waiting.cancel,
            "weights": lambda: kv.advance_epoch("others"),
        }
        ends.get(end, lambda: None)()
        for _ in range(3):  # turns: a task that is cancelled hears of it in the next one, and tells its load
            await checkpoint()
        await until(lambda: end != "deadline" or loop.time() > deadline)
        assert (handle.done, waiting.done()) == (False, False)
        nvme.gate.set()
        with fail_after(30):
            if end == "task":
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            loaded = await handle
        reasons = {"deadline": ["deadline"], "weights": ["epoch advanced"]}
        assert [fault.reason for fault in loaded.faults] == reasons.get(end, ["revoked"])
        assert loaded.num_blocks == (0 if end == "weights" else 9)
        await until_idle(kv)


@pytest.mark.parametrize("end", ["cancel", "close"])
async def test_memory_that_is_being_written_out_of_is_waited_for(end: str, tmp_path: Path) -> None:
    """A store that is cancelled, and one that the cache's end meets, ends when the threads have let go."""
    nvme = GatedNVMe(tmp_path)
    async with open_cache(nvme, engine=Engine(), limits=LIMITS) as kv:
        await _stored(kv)
        nvme.gate.clear()
        storing = kv.start_store(prompt(9, seed=3), INTO)
        await until(lambda: nvme.num_held > 0)
        closing = asyncio.ensure_future(kv.aclose()) if end == "close" else None
        if end == "cancel":
            storing.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not storing.done
        nvme.gate.set()
        with fail_after(30):
            assert (await storing).num_stored == 9
            if closing is not None:
                await closing
            else:
                await until_idle(kv)


async def test_a_thread_that_outlives_the_closing_begins_nothing_anew(tmp_path: Path) -> None:
    """A load that a thread holds up ends once that has let go; it has nothing then, and looks no further."""
    nvme, limits = GatedNVMe(tmp_path), LIMITS.model_copy(update={"close_timeout_s": 0.05})
    async with open_cache(nvme, engine=Engine(), limits=limits) as kv:
        await _stored(kv)
        nvme.gate.clear()
        loading = kv.start_load(KEYS, INTO)
        await until(lambda: nvme.num_held > 0)
        await kv.aclose()
        assert not loading.done
        num_tasks = _num_tasks()
        nvme.gate.set()
        with fail_after(30):
            loaded = await loading
        assert (loaded.num_blocks, [fault.reason for fault in loaded.faults]) == (0, ["revoked"])
        assert _num_tasks() <= num_tasks


async def test_a_thread_that_outlives_the_closing_keeps_its_direct_store_from_ending(tmp_path: Path) -> None:
    """The engine's memory is not the engine's again while a thread may read it, though the cache is closed."""
    nvme, limits = GatedNVMe(tmp_path), LIMITS.model_copy(update={"close_timeout_s": 0.05})
    async with open_cache(nvme, engine=Engine(), limits=limits) as kv:
        _with_pool(kv)
        nvme.gate.clear()
        storing = kv.start_store(KEYS, INTO)
        await until(lambda: nvme.num_held > 0)
        await kv.aclose()
        assert not storing.done
        nvme.gate.set()
        with fail_after(30):
            await storing
