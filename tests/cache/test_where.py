"""A lookup that says where blocks are: run by run, in every medium, so that whoever reads there finds the bytes."""

import asyncio
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import Recorder, keep, open_cache, until, until_idle
from tests.support.engine import MODEL, PAYLOAD_BYTES, Engine, contents, prompt, small_layout
from tests.support.planned import mapped
from tests.support.virtual import CountingDevice, pools_of, run, watch
from tiered_kv import (
    BlockKey,
    BlockKeys,
    ConfigurationError,
    CPULoadStoreSpec,
    FileLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    Shard,
    TieredKV,
    open_blocking,
    parse_record,
)
from tiered_kv.testing import records_in_files
from tiered_kv.values.events import TierFailed

KEYS = prompt(6)


def cpu(num_blocks: int) -> dict[str, object]:
    """A CPU tier of so many blocks."""
    return {"medium": "cpu", "capacity": num_blocks * PAYLOAD_BYTES}


def gpu(num_blocks: int) -> dict[str, object]:
    """A GPU tier of so many blocks."""
    return {"medium": "gpu", "capacity": num_blocks * PAYLOAD_BYTES}


def nvme(path: Path) -> dict[str, object]:
    """A tier of files."""
    return {"medium": "nvme", "path": path / "nvme", "capacity": "4MiB"}


def shared_fs(path: Path) -> dict[str, object]:
    """A tier of a file per block."""
    return {"medium": "shared_fs", "path": path / "shared", "capacity": "4MiB", "min_free_fraction": 0}


def assert_there(kv: TieredKV, keys: BlockKeys, spec: LoadStoreSpec | None) -> None:
    """Check that records in files are those of these keys, whole and of the right bytes."""
    assert isinstance(spec, FileLoadStoreSpec)
    for digest, content, data in zip(keys, contents(keys), records_in_files(spec), strict=True):
        record = parse_record(data)
        assert record.key == BlockKey(kv.namespace(), digest)
        assert bytes(record.payload) == content


class _Answering:
    answer: object = None
    hangs_until: asyncio.Event | None = None
    num_located = 0

    async def _say(self) -> LoadStoreSpec | None:
        self.num_located += 1
        if self.hangs_until is not None:
            await self.hangs_until.wait()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer  # type: ignore[return-value]  # a backend may say anything


class Locates(_Answering, ScriptedBackend):
    """A keyed backend that answers what a test says, or raises it."""

    async def locate(self, keys: Sequence[BlockKey]) -> LoadStoreSpec | None:
        """Say it."""
        return await self._say()


class LocatesSlots(_Answering, ScriptedSlotBackend):
    """An owned medium that does the same."""

    async def locate(self, group: int, slots: NDArray[np.int64]) -> LoadStoreSpec | None:
        """Say it."""
        return await self._say()


both_kinds = pytest.mark.parametrize("kind", [Locates, LocatesSlots])


async def test_each_run_says_where_its_blocks_are(tmp_path: Path) -> None:
    """Slots of the slab for what is in memory, and for storage what any program can read: alternating runs too."""
    engine = Engine()
    async with open_cache(cpu(16), nvme(tmp_path), shared_fs(tmp_path), engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.flush()
        await kv.evict(KEYS[1:3], tier="cpu")
        await kv.evict(KEYS[4:], tier="cpu")
        await kv.evict(KEYS[5:], tier="nvme")
        found = await kv.lookup(KEYS, where=True)
        assert [(run.tier, run.start, run.stop) for run in found.runs] == [
            ("cpu", 0, 1), ("nvme", 1, 3), ("cpu", 3, 4), ("nvme", 4, 5), ("shared_fs", 5, 6)
        ]  # fmt: skip
        for run in found.runs:
            if run.tier == "cpu":
                assert isinstance(run.spec, CPULoadStoreSpec)
                assert len(run.spec) == 1
            else:
                assert_there(kv, KEYS[run.start : run.stop], run.spec)
        assert pickle.loads(pickle.dumps(found)) == found
        assert all(run.spec is None for run in (await kv.lookup(KEYS)).runs)


async def test_slots_of_memory_hold_the_bytes() -> None:
    """The spec says by which name a process finds the slab that it attaches, and which slots of it."""
    engine = Engine()
    async with open_cache(cpu(16), engine=engine) as kv:
        await keep(kv, engine, KEYS)
        (run,) = (await kv.lookup(KEYS, where=True)).runs
        (slab,) = kv.planner().slabs()
        assert isinstance(run.spec, CPULoadStoreSpec)
        assert run.spec.pool == slab.pool
        with mapped(slab) as memory:
            starts = run.spec.ids * slab.stride_bytes
            assert [memory[at : at + slab.payload_bytes] for at in starts.tolist()] == contents(KEYS)


async def test_what_cannot_be_told_is_none() -> None:
    """Blocks of the GPU pool are nobody else's, and a medium need not say where it keeps what."""
    engine = Engine()
    async with open_cache(gpu(2), cpu(0), ScriptedSlotBackend(), ScriptedBackend(), engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.flush()
        await kv.evict(KEYS[4:], tier="slots")
        found = await kv.lookup(KEYS, where=True)
        assert {run.tier for run in found.runs} >= {"slots", "keyed"}
        assert all(run.spec is None for run in found.runs)


@pytest.mark.parametrize(
    "answer", [[1, 2], CPULoadStoreSpec([1]), ValueError("not today"), asyncio.CancelledError()], ids=repr
)
async def test_a_wrong_answer_is_none(answer: object) -> None:
    """Whatever a backend says or raises, a lookup answers; the fault is told, and the blocks are found as before."""
    engine, backend, recorder = Engine(), Locates(), Recorder()
    async with open_cache(cpu(0), backend, engine=engine, emit=recorder) as kv:
        await keep(kv, engine, KEYS)
        await kv.flush()
        backend.answer = answer
        found = await kv.lookup(KEYS, where=True)
        assert [(run.tier, run.spec) for run in found.runs] == [("keyed", None)]
        assert [event.tier for event in recorder.of(TierFailed)] == ["keyed"]
        assert (await kv.lookup(KEYS)).num_blocks == len(KEYS)


async def test_a_medium_that_hangs_is_not_waited_for() -> None:
    """No longer than for a lookup; what it says too late is nobody's."""
    engine, backend = Engine(), Locates(timeout_s=0.01)
    async with open_cache(cpu(0), backend, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.flush()
        backend.hangs_until = asyncio.Event()
        assert [run.spec for run in (await kv.lookup(KEYS, where=True)).runs] == [None]
        backend.hangs_until.set()
        await until_idle(kv)


@both_kinds
async def test_a_medium_that_cannot_say_where_blocks_are_serves_them(kind: type[Locates | LocatesSlots]) -> None:
    """However often that fails: blocks are found and loaded, and where they are is asked a few times, not for ever."""
    engine, backend = Engine(), kind(name="below")
    async with open_cache(cpu(0), backend, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.flush()
        backend.answer = KeyError("no such column")
        for _ in range(5):
            assert [(run.tier, run.spec) for run in (await kv.lookup(KEYS, where=True)).runs] == [("below", None)]
        stats = kv.stats()["below"]
        assert (stats.is_bypassed, stats.open_breakers) == (False, ("locates",))
        assert backend.num_located == 3, "then it is a probe's turn, after a pause"
        assert (await kv.load(KEYS, GPULoadStoreSpec(range(6)))).num_blocks == 6
        await keep(kv, engine, prompt(2, seed=1))
        assert kv.stats()["below"].written == 8
        await until_idle(kv)


@both_kinds
def test_a_medium_that_hangs_over_where_blocks_are_serves_them(kind: type[Locates | LocatesSlots]) -> None:
    """Also while the question has no answer; once it has one, it is in use again for that too."""

    async def main() -> None:
        engine, device, backend = Engine(), CountingDevice(), kind(name="below", timeout_s=0.5)
        async with open_cache(cpu(0), backend, engine=engine, device=device) as kv:
            watch(device, pools_of(kv))
            await keep(kv, engine, KEYS)
            await kv.flush()
            backend.hangs_until = asyncio.Event()
            for _ in range(3):
                assert [(run.tier, run.spec) for run in (await kv.lookup(KEYS, where=True)).runs] == [("below", None)]
            stats = kv.stats()["below"]
            assert (stats.is_bypassed, stats.open_breakers) == (False, ("locates",))
            assert backend.num_located == 1
            assert (await kv.load(KEYS, GPULoadStoreSpec(range(6)))).num_blocks == 6
            backend.hangs_until.set()
            await until(lambda: not kv.stats()["below"].open_breakers)
            await until_idle(kv)

    run(main)


async def test_a_block_that_leaves_meanwhile_is_nowhere(tmp_path: Path) -> None:
    """A place of memory is told only if every block of the run is there when it is."""
    engine, backend = Engine(), ScriptedBackend()
    async with open_cache(cpu(16), backend, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.flush()
        await kv.evict(KEYS[4:], tier="cpu")
        backend.on_lookup.hold()
        asking = asyncio.ensure_future(kv.lookup(KEYS, where=True))
        await until(lambda: backend.on_lookup.num_held == 1)
        await kv.evict(KEYS[:1], tier="cpu")
        backend.on_lookup.release()
        assert [run.spec for run in (await asking).runs] == [None, None]


async def test_ranks_are_asked_one_by_one() -> None:
    """A cache of several ranks cannot say where a block is: each rank has its part elsewhere."""
    async with TieredKV([cpu(16)], model=MODEL, layout=small_layout(), shard=Shard.every(2)) as kv:
        assert (await kv.lookup(KEYS)).num_blocks == 0
        with pytest.raises(ConfigurationError, match="2 ranks: only each rank's own"):
            await kv.lookup(KEYS, where=True)


def test_a_program_without_a_loop_may_ask() -> None:
    """`open_blocking` takes the same question."""
    engine = Engine()
    with open_blocking(TieredKV([cpu(16)], model=MODEL, layout=small_layout())) as kv:
        kv.register_kv_caches(engine.caches)
        kv.store(KEYS, engine.compute(KEYS))
        assert isinstance(kv.lookup(KEYS, where=True).runs[0].spec, CPULoadStoreSpec)
