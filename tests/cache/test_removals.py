"""What leaves the books of an owned tier is gone from its medium too, or owed: no sudden end brings it back."""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support import virtual
from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import inside, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, SMALL_LIMITS, Engine, prompt
from tiered_kv import BackendUnavailableError, BlockKey, BlockKeys, Outcome, RemovalResult, TieredKV
from tiered_kv.tiers import upkeep

KEYS = prompt(4)
OTHERS = prompt(4, seed=1)


async def _ended(task: "asyncio.Task[RemovalResult]") -> bool:
    """Let everything run for a while; say whether the task has ended."""
    for _ in range(50):
        await asyncio.sleep(0)
    return task.done()


async def test_an_eviction_that_is_cancelled_has_been_decided() -> None:
    """With its first step: who gives up only does not wait for the media."""
    engine = Engine()
    async with open_cache(ScriptedSlotBackend(16), engine=engine) as kv:
        await keep(kv, engine, KEYS)
        evicting = asyncio.create_task(kv.evict(KEYS))
        await asyncio.sleep(0)
        evicting.cancel()
        await asyncio.wait([evicting])
        assert (await kv.lookup(KEYS)).num_blocks == 0
        await until_idle(kv)


async def test_an_eviction_that_nobody_waits_for_goes_on() -> None:
    """As that of a rank does where one of the next rank has raised: nothing that was to wait for it is left behind."""
    engine, disk = Engine(), ScriptedSlotBackend(16)
    async with open_cache(disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        ((chain, batch),) = inside(kv).batches(KEYS)
        upkeep.evict(chain, batch, None)
        await until(lambda: disk.num_records == 0)
        await until_idle(kv)


# By age.


def test_what_expires_is_forgotten() -> None:
    """No eviction by name could have that done later: the books do not know it any more."""

    async def main() -> None:
        engine, disk, device = Engine(), ScriptedSlotBackend(16, ttl_s=5.0), virtual.CountingDevice()
        async with open_cache(disk, engine=engine, device=device) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            await keep(kv, engine, KEYS)
            await asyncio.sleep(7.0)
            assert kv.stats()["slots"].expired == 4
            await until_idle(kv)
            assert disk.num_records == 0

    virtual.run(main)


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_evicting_what_has_expired_ends_when_it_is_forgotten(how: str) -> None:
    """The medium is busy with forgetting it, or could not: a sudden end after the eviction finds nothing either way."""

    async def main() -> None:
        engine, disk, device = Engine(), ScriptedSlotBackend(16, ttl_s=5.0), virtual.CountingDevice()
        async with open_cache(disk, engine=engine, device=device) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            await keep(kv, engine, KEYS)
            if how == "hangs":
                disk.on_forget.hold()
            else:
                disk.on_forget.fail_next(BackendUnavailableError("busy"))
                disk.on_checkpoint.hold()
            await asyncio.sleep(7.0)
            assert disk.on_forget.num_calls == 1
            evicting = asyncio.create_task(kv.evict(KEYS))
            assert not await _ended(evicting)
            disk.on_forget.release()
            disk.on_checkpoint.release()
            assert await evicting == RemovalResult(0)
            assert disk.num_records == 0
            await until_idle(kv)

    virtual.run(main)


async def test_what_leaves_while_the_medium_is_busy_is_forgotten_by_one_call() -> None:
    """Not by one each: however often something leaves, little is asked of a slow medium."""
    engine, disk = Engine(), ScriptedSlotBackend(16)
    async with open_cache(disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        disk.on_forget.hold()
        evicting = [asyncio.create_task(kv.evict(KEYS[n : n + 1])) for n in range(4)]
        assert not await _ended(evicting[0])
        disk.on_forget.release()
        assert await asyncio.gather(*evicting) == [RemovalResult(1)] * 4
        assert disk.num_records == 0
        assert (disk.on_forget.num_calls, disk.on_forget.num_blocks) == (1, 4)
        await until_idle(kv)


# For want of room.


def _has_failed(outcomes: list[Outcome]) -> list[Outcome]:
    return [Outcome.FAILED] * len(outcomes)


def _is_refused(outcomes: list[Outcome]) -> list[Outcome]:
    return [Outcome.REFUSED] * len(outcomes)


class NothingWritten(ScriptedSlotBackend):
    """Answers as it is told, and keeps what was in the slots."""

    answer: Callable[[list[Outcome]], list[Outcome]] | None = None

    async def _write(self, *args: object) -> list[Outcome]:
        if self.answer is None:
            return await super()._write(*args)  # type: ignore[arg-type]
        return self.answer([Outcome.STORED] * len(args[3]))  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [_has_failed, _is_refused, None])
async def test_what_had_to_go_for_a_write_that_failed_is_forgotten(
    answer: Callable[[list[Outcome]], list[Outcome]] | None,
) -> None:
    """Its record is still there, as nothing was written over it. However the write failed: None is an error."""
    engine, disk = Engine(), NothingWritten(4)
    async with open_cache(disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        if answer is None:
            disk.on_write.fail_next(BackendUnavailableError("broken"))
        disk.answer = answer
        await (await kv.store(OTHERS, engine.compute(OTHERS))).settled()
        assert (await kv.evict(KEYS)).num_blocks == 0
        assert disk.num_records == 0
        await until_idle(kv)


async def test_what_had_to_go_for_a_write_that_failed_is_owed_if_it_cannot_be_forgotten() -> None:
    """An eviction by name ends when the medium has made up for it."""
    engine, disk = Engine(), ScriptedSlotBackend(4)
    async with open_cache(disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        disk.on_write.fail_next(BackendUnavailableError("broken"))
        disk.on_forget.fail_next(BackendUnavailableError("broken"))
        await (await kv.store(OTHERS, engine.compute(OTHERS))).settled()
        assert disk.num_records == 4
        await kv.evict(KEYS)
        assert disk.num_records == 0
        await until_idle(kv)


async def test_evicting_what_has_to_go_for_a_write_waits_for_the_write() -> None:
    """Until its slot is written over, its record is there."""
    engine, disk = Engine(), ScriptedSlotBackend(4)
    async with open_cache(disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        disk.on_write.hold()
        stored = await kv.store(OTHERS, engine.compute(OTHERS))
        await until(lambda: disk.on_write.num_held == 1)
        names = {name for name, _ in disk.records.values()}
        evicting = asyncio.create_task(kv.evict(KEYS))
        assert not await _ended(evicting)
        disk.on_write.release()
        await evicting
        assert not names & {name for name, _ in disk.records.values()}
        await stored.settled()
        await until_idle(kv)


async def test_what_was_written_and_said_to_have_failed_is_forgotten() -> None:
    """It is in no books, and perhaps on the medium."""
    engine, disk = Engine(), ScriptedSlotBackend(16)
    async with open_cache(disk, engine=engine) as kv:
        disk.on_write.change_next(_has_failed)
        await (await kv.store(KEYS, engine.compute(KEYS))).settled()
        assert (await kv.evict(KEYS)).num_blocks == 0
        assert disk.num_records == 0
        await until_idle(kv)


async def test_an_eviction_names_the_tiers_that_have_not_removed_the_blocks() -> None:
    """Who has to know that they are gone asks again, until none is named; here they are unfindable at once."""
    engine, disk = Engine(), ScriptedSlotBackend(16, name="disk", timeout_s=0.5)
    store = ScriptedBackend(name="store", timeout_s=0.5)
    async with open_cache(disk, store, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        disk.on_forget.fail_next(BackendUnavailableError("busy"))
        store.on_delete.hold()
        assert await kv.evict(KEYS) == RemovalResult(len(KEYS), kept_by=("disk", "store"))
        assert (await kv.lookup(KEYS)).num_blocks == 0
        store.on_delete.release()
        await until(lambda: (disk.num_records, store.num_records) == (0, 0))
        assert await kv.evict(KEYS) == RemovalResult(0)
        await until_idle(kv)


async def test_an_eviction_names_no_tier_for_others_that_it_has() -> None:
    """A write under way of blocks that were evicted too is no matter of these, which are gone."""
    engine, disk = Engine(), ScriptedSlotBackend(16)
    async with open_cache(disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        disk.on_write.hold()
        await kv.store(OTHERS, engine.compute(OTHERS))
        await until(lambda: disk.on_write.num_held > 0)
        evicting = asyncio.ensure_future(kv.evict(OTHERS))
        assert not await _ended(evicting)
        assert await kv.evict(KEYS) == RemovalResult(len(KEYS))
        disk.on_write.release()
        assert (await evicting).kept_by == ()
        await until_idle(kv)


async def test_an_eviction_names_no_tier_for_what_it_can_be_told_by_now() -> None:
    """What a medium could not be told before, of these blocks or others, it is told before the answer."""
    engine, disk = Engine(), ScriptedSlotBackend(16)
    async with open_cache(disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await keep(kv, engine, OTHERS)
        disk.on_forget.fail_next(BackendUnavailableError("busy"))
        assert (await kv.evict(OTHERS)).kept_by == (disk.settings.name,)
        assert await kv.evict(KEYS) == RemovalResult(len(KEYS))
        assert disk.num_records == 0
        await until_idle(kv)


async def test_a_flush_says_whether_all_is_written_and_noted() -> None:
    """Of a tier that is bypassed blocks go on waiting; a checkpoint that fails leaves nothing to rely on."""
    engine, disk = Engine(), ScriptedSlotBackend(16, write="back", timeout_s=0.2)
    cpu = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
    async with open_cache(cpu, disk, engine=engine) as kv:
        await kv.store(KEYS, engine.compute(KEYS))
        disk.on_write.hold()
        assert not await kv.flush()
        disk.on_write.release()
        await until(lambda: not kv.stats()["slots"].is_bypassed)
        assert await kv.flush()
        disk.on_checkpoint.fail_next(BackendUnavailableError("busy"))
        assert not await kv.flush(sync=True)
        await until(lambda: not kv.stats()["slots"].is_bypassed)
        assert await kv.flush(sync=True)
        await until_idle(kv)


# All at once.


async def test_a_clear_whose_checkpoint_fails_is_made_up_for() -> None:
    """The medium is told again what it holds, without being asked."""
    engine, disk = Engine(), ScriptedSlotBackend(16)
    async with open_cache(disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        disk.on_checkpoint.fail_next(BackendUnavailableError("busy"))
        await kv.clear()
        assert (await kv.lookup(KEYS)).num_blocks == 0
        await until(lambda: disk.num_records == 0)
        await until_idle(kv)


@pytest.mark.parametrize("how", ["hangs", "fails"])
async def test_evicting_what_was_cleared_ends_when_it_is_forgotten(how: str) -> None:
    """Whether the checkpoint that tells the medium is under way, or has failed."""
    engine, disk = Engine(), ScriptedSlotBackend(16)
    async with open_cache(disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        if how == "hangs":
            disk.on_checkpoint.hold()
        else:
            disk.on_checkpoint.fail_next(BackendUnavailableError("busy"))
        clearing = asyncio.create_task(kv.clear())
        await until(lambda: disk.on_checkpoint.num_calls == 1)
        evicting = asyncio.create_task(kv.evict(KEYS))
        if how == "hangs":
            assert not await _ended(evicting)
            disk.on_checkpoint.release()
        await evicting
        assert disk.num_records == 0
        await clearing
        await until_idle(kv)


# By another capacity.


def _nvme(path: Path) -> dict[str, object]:
    return {"medium": "nvme", "path": path, "capacity": "2MiB", "max_capacity": "2MiB"}


def _num_found(kv: TieredKV, keys: BlockKeys) -> int:
    return sum(kv.lookup_nowait(keys[n : n + 1]).num_blocks for n in range(len(keys)))


async def _found_after_a_kill(path: Path, keys: BlockKeys) -> int:
    """Say how many blocks are found by a start on what is on the disk now."""
    copied = path.with_name("copied")
    shutil.copytree(path, copied)
    async with open_cache(_nvme(copied)) as kv:
        return _num_found(kv, keys)


async def test_a_disk_made_smaller_beside_a_pin_forgets_what_went(tmp_path: Path) -> None:
    """Though its file cannot be cut yet; once the pin has ended it is."""
    engine, path = Engine(), tmp_path / "disk"
    limits = SMALL_LIMITS.model_copy(update={"store_timeout_s": 0.1})
    async with open_cache(_nvme(path), engine=engine, limits=limits) as kv:
        keys = prompt(16)
        await keep(kv, engine, keys)
        assert kv.pin(keys, ttl_s=600).num_blocks == 16  # those with slots that go among them
        (slab,) = path.glob("*/slab")
        before = slab.stat().st_size
        num_slots = await kv.resize("nvme", "150KiB")
        assert 0 < num_slots < 16
        assert slab.stat().st_size == before
        assert _num_found(kv, keys) == num_slots
        await kv.evict(keys)
        assert await _found_after_a_kill(path, keys) == 0
        kv.unpin(keys)
        await until(lambda: slab.stat().st_size <= num_slots * 2 * PAYLOAD_BYTES)
        await until_idle(kv)


def test_what_was_not_deleted_is_told_again_while_others_are_evicted() -> None:
    """Though there is no moment at which nothing is being deleted."""

    class Slow(ScriptedBackend):
        async def delete(self, keys: Sequence[BlockKey]) -> None:
            await asyncio.sleep(0.05)
            await super().delete(keys)

    async def main() -> None:
        cpu = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
        engine, slow, device, keys = Engine(), Slow(), virtual.CountingDevice(), prompt(4)
        async with open_cache(cpu, slow, engine=engine, device=device) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            await keep(kv, engine, keys)
            slow.on_delete.fail_next(OSError("for a moment"))
            assert (await kv.evict(keys)).kept_by == ("keyed",)

            async def evict_others(first: float) -> None:
                await asyncio.sleep(first)
                for seed in range(1, 400):
                    await kv.evict(prompt(1, seed=seed))

            evicting = [asyncio.create_task(evict_others(first)) for first in (0.0, 0.025)]
            await asyncio.sleep(10.0)
            assert not any(each.done() for each in evicting)
            assert slow.num_records == 0
            await asyncio.gather(*evicting)
            await until_idle(kv)

    virtual.run(main)
