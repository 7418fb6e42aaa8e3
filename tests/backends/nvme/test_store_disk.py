"""What an NVMe tier forces to its disk, takes of it, and gives back."""

import asyncio
import errno
import gc
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.caches import until
from tests.support.descriptors import num_open_in
from tests.support.nvme_tier import (
    MIB,
    STRIDE,
    backend_at,
    count_up,
    disk_usage,
    key_of,
    ledger_of,
    open_tier,
    shape_of,
    slab_of,
    slots_of,
)
from tiered_kv.media.backend import Outcome, RecordShape
from tiered_kv.testing import block_names, open_context
from tiered_kv.values.errors import BackendUnavailableError, ClosedError, ConfigurationError
from tiered_kv_backends.nvme import NVMeBackend
from tiered_kv_backends.nvme.disks import Member, look_into, write_member
from tiered_kv_backends.nvme.nvme_settings import NVMeSettings
from tiered_kv_backends.nvme.slab import Erase, Slab


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """What was forced to the medium, by name, while the test ran."""
    paths, fsync = set[Path](), os.fsync

    def note(fd: int) -> None:
        paths.add(Path(f"/proc/self/fd/{fd}").readlink())
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    return paths


async def test_the_directory_itself_survives_a_loss_of_power(tmp_path: Path, forced: set[Path]) -> None:
    """Where it and what is above it were made for the tier, their names are forced to the medium, too."""
    async with open_tier(tmp_path / "new" / "kv"):
        assert {tmp_path, tmp_path / "new"} <= forced


async def test_what_the_disk_did_not_take_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it fails to force, forget or remember, the call does, and facts say why."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(2))
        names, slots = block_names([key_of(0), key_of(1)]), slots_of(count_up(2))
        calls: list[tuple[str, int, Callable[[], Awaitable[None]]]] = [
            ("fsync", errno.EIO, lambda: tier.backend.checkpoint(0, names, slots, sync=True)),
            ("pwrite", errno.ENOSPC, lambda: tier.backend.checkpoint(0, names, slots)),
            ("pwrite", errno.EIO, lambda: tier.backend.forget(0, slots)),
        ]
        for name, code, call in calls:

            def fail(*_: object, code: int = code) -> None:
                raise OSError(code, os.strerror(code))

            with monkeypatch.context() as patch:
                patch.setattr(os, name, fail)
                with pytest.raises(BackendUnavailableError, match=os.strerror(code)):
                    await call()
            assert os.strerror(code) in str(tier.backend.describe()["last_error"])
            await call()


async def test_a_loss_of_power_is_survived_where_it_is_asked_for(tmp_path: Path, forced: set[Path]) -> None:
    """Records, what is said about them, and the names of the files; without being asked, nothing is waited for."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(2))
        forced.clear()
        names, slots = block_names([key_of(0), key_of(1)]), slots_of(count_up(2))
        await tier.backend.checkpoint(0, names, slots)
        assert not forced
        await tier.backend.checkpoint(0, names, slots, sync=True)
        slab = slab_of(tmp_path)
        assert forced == {slab, ledger_of(tmp_path), slab.parent, tmp_path}


def test_who_belongs_together_is_whole_before_it_has_its_name(tmp_path: Path, forced: set[Path]) -> None:
    """After a loss of power there is the file of before, or the new one: never half of one."""
    write_member(tmp_path, Member("a" * 16, 1, frozenset()))
    assert forced == {tmp_path / "member"}


async def test_a_deletion_survives_a_loss_of_power(tmp_path: Path, forced: set[Path]) -> None:
    """What a tenant had is gone for good when `delete_tenant` returns."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(2))
    forced.clear()
    assert await NVMeBackend.delete_tenant({"path": tmp_path, "capacity": 4 * MIB}, "") == 2
    assert forced == {slab_of(tmp_path), ledger_of(tmp_path)}
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(2) == {}


async def test_what_was_opened_is_closed(tmp_path: Path) -> None:
    """One directory or several, whatever was done with them, and deleting a tenant: no descriptor stays."""
    several = (tmp_path / "a", tmp_path / "b")
    settings = {"path": several, "capacity": 4 * MIB}
    (several[1] / shape_of("empty").folder).mkdir(parents=True, mode=0o700)
    several[1].chmod(0o700)
    for _ in range(2):
        async with open_tier(tmp_path / "one", erase=True) as tier:
            await tier.write(count_up(3))
            await tier.backend.forget(0, np.arange(1))
            await tier.backend.checkpoint(0, block_names([key_of(1)]), np.array([1]), sync=True)
            await tier.backend.resize(4)
        backend = backend_at(several)
        with open_context(shape_of("a")) as context:
            await backend.open(context)
            await backend.aclose()
        await NVMeBackend.delete_tenant(settings, "")
        assert num_open_in(tmp_path) == 0


async def test_a_disk_too_small_to_grow_on_changes_nothing(small_disk: Path) -> None:
    """By how much is said; what is promised to other models and what lies there stay as they were."""
    path = small_disk / "tier"
    async with open_tier(path, "other", capacity=8 * MIB) as tier:
        await tier.write(count_up(60))
    async with open_tier(path, capacity=8 * MIB) as tier:
        before, used = tier.backend.describe(), disk_usage(path)
        with pytest.raises(BackendUnavailableError, match=r"\d{8,} bytes more are wanted, its filesystem has \d{7,}$"):
            await tier.backend.resize(1000)
        now = tier.backend.describe()
        assert "more are wanted" in str(now["last_error"])
        assert {**now, "capacity_bytes": 0, "last_error": ""} == {**before, "capacity_bytes": 0}
        assert STRIDE > int(str(before["capacity_bytes"])) - int(str(now["capacity_bytes"])) >= 0
        assert disk_usage(path) == used
        num_slots = tier.found.num_slots
        assert set(await tier.write(count_up(num_slots))) == {Outcome.STORED}
        assert disk_usage(path) <= 8 * MIB  # the other model has made room, at the limit of before


async def test_it_grows_as_far_as_the_disk_has_room(small_disk: Path) -> None:
    """What other models have there is room; so is what this one has already."""
    path = small_disk / "tier"
    async with open_tier(path, "other", capacity=12 * MIB) as tier:
        await tier.write(count_up(150))
    async with open_tier(path, capacity=2 * MIB) as tier:
        assert tier.backend.describe()["reclaimed_fingerprints"] == 1
    async with open_tier(path, "other", capacity=12 * MIB) as tier:
        await tier.write(count_up(150))
    async with open_tier(path, capacity=12 * MIB) as tier:
        await tier.backend.resize(200)
        assert ledger_of(path).stat().st_size == 200 * 64
        assert set(await tier.write(count_up(200))) == {Outcome.STORED}
        assert tier.backend.describe()["reclaimed_fingerprints"] == 1


async def test_what_is_kept_about_slots_counts_too(tmp_path: Path) -> None:
    """Of small records that is a hundredth: another model goes as the tier opens where the two are above the limit."""
    shape, capacity = RecordShape(bytes(32), 4096), 64 * MIB
    backend = backend_at(tmp_path, capacity=capacity)
    with open_context(shape) as context:
        await backend.open(context)
        await backend.aclose()
        ours = disk_usage(tmp_path)
        assert ours > 480 << 10
        other = tmp_path / shape_of("other").folder
        other.mkdir(mode=0o700)
        with (other / "slab").open("wb") as slab:
            os.posix_fallocate(slab.fileno(), 0, capacity - ours + 8192)
        (other / "ledger").touch()
        backend = backend_at(tmp_path, capacity=capacity)
        await backend.open(context)
        assert backend.describe()["reclaimed_fingerprints"] == 1
        assert disk_usage(tmp_path) <= capacity
        await backend.aclose()


async def test_other_models_go_where_other_programs_fill_the_disk(small_disk: Path) -> None:
    """The tier is below its capacity, and a block that it wants to write is worth more than a foreign one."""
    path = small_disk / "tier"
    async with open_tier(path, "other", capacity=12 * MIB) as tier:
        await tier.write(count_up(80))
    async with open_tier(path, capacity=14 * MIB) as tier:
        with pytest.raises(OSError, match="No space"):
            (small_disk / "filler").write_bytes(bytes(17 * MIB))
        assert set(await tier.write(count_up(20))) == {Outcome.STORED}
        assert tier.backend.describe()["reclaimed_fingerprints"] == 1
        assert not slab_of(path, "other").exists()


async def test_a_place_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab that is read header by header loses the block whose header the disk does not give."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(6))
    ledger_of(tmp_path).unlink()
    preadv = os.preadv

    def fails(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset <= 2 * STRIDE < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, buffers, offset)

    expected = count_up(6)
    del expected[2]
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        async with open_tier(tmp_path) as tier:
            assert tier.recovered(6) == expected
    async with open_tier(tmp_path) as tier:
        assert await tier.verified(expected) == [Outcome.HIT] * 5


@pytest.mark.parametrize("most", [512, 4096 + 512])
async def test_a_read_that_stops_where_the_file_goes_on_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """So does a disk with a bad sector. The block is not lost by it, as one is that the file ends before."""
    preadv = os.preadv

    def stops(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        num_bytes, until_there = preadv(fd, buffers, offset), 2 * STRIDE + most - offset
        return until_there if 0 <= until_there < num_bytes else num_bytes

    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(6))
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", stops)
            outcomes = await tier.verified(count_up(6))
        assert outcomes == [Outcome.HIT] * 2 + [Outcome.FAILED] + [Outcome.HIT] * 3
        assert await tier.verified(count_up(6)) == [Outcome.HIT] * 6


async def test_what_a_ledger_cannot_note_is_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that were found in the slab are served; why it took so long, each time, is said."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(4))
    ledger_of(tmp_path).write_bytes(b"x" * 4 * 64)

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails)
        async with open_tier(tmp_path) as tier:
            assert tier.recovered(4) == count_up(4)
            assert "Input/output error" in str(tier.backend.describe()["last_error"])
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(4) == count_up(4)
        assert int(str(tier.backend.describe()["num_damaged"])) >= 4


async def test_many_headers_go_where_the_filesystem_does_not_help(small_disk: Path) -> None:
    """A tmpfs overwrites no range by itself: of what was forgotten a lost ledger brings nothing back."""
    async with open_tier(small_disk, capacity=12 * MIB) as tier:
        await tier.write(count_up(100))
        await tier.backend.forget(0, np.arange(10, 90))
    ledger_of(small_disk).unlink()
    async with open_tier(small_disk, capacity=12 * MIB) as tier:
        assert sorted(tier.recovered(100)) == [*range(10), *range(90, 100)]


async def test_a_disk_that_takes_a_page_but_does_not_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not force to the medium it has not written: there is no direct I/O there."""

    def fails(_fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    async with open_tier(tmp_path) as tier:
        assert "Input/output error" in str(tier.backend.describe()["io_reason"])


async def test_a_slot_is_given_up_while_it_is_to_be_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits to forget it finds it gone, and forgets the others."""
    erase, is_erasing, may_go_on = Slab.erase, threading.Event(), threading.Event()

    def erase_later(slab: Slab, slots: list[int], how: Erase) -> None:
        is_erasing.set()
        assert may_go_on.wait(60)
        erase(slab, slots, how)

    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(5))
        with monkeypatch.context() as patch:
            patch.setattr(Slab, "erase", erase_later)
            calls = [asyncio.ensure_future(tier.backend.forget(0, np.array(slots))) for slots in ([4], [3, 4])]
            await asyncio.to_thread(is_erasing.wait)
            await tier.backend.resize(4)
            may_go_on.set()
            await asyncio.gather(*calls)
        await until(lambda: slab_of(tmp_path).stat().st_size == 4 * STRIDE)
        assert await tier.verified(count_up(4)) == [Outcome.HIT] * 3 + [Outcome.MISS]
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(5) == count_up(3)


async def test_nothing_is_kept_of_calls_that_ended(tmp_path: Path) -> None:
    """However many blocks are forgotten: each is a call of its own for a while."""

    def num_tasks() -> int:
        gc.collect()
        return sum(type(each) is asyncio.Task for each in gc.get_objects())

    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(8))
        before = num_tasks()
        for slot in range(8):
            await tier.backend.forget(0, np.array([slot]))
        await until(lambda: num_tasks() <= before)


async def test_one_directory_is_described_as_it_is(tmp_path: Path) -> None:
    """Without a list of one, and with what each call has written beside the blocks."""
    async with open_tier(tmp_path) as tier:
        facts = tier.backend.describe()
        assert "directories" not in facts
        assert (facts["path"], facts["capacity_bytes"]) == (str(tmp_path), 4 * MIB)
        before = int(str(facts["own_bytes_written"]))
        await tier.write(count_up(3))
        facts = tier.backend.describe()
        assert facts["own_bytes_written"] == before + 3 * 64
        assert facts["num_recovered"] == 0
        assert int(str(facts["allocated_bytes"])) % STRIDE == 0
        assert facts["ledger_bytes"] == ledger_of(tmp_path).stat().st_size
    with pytest.raises(ClosedError, match=f"{tmp_path} is not open"):
        await tier.write(count_up(1))


CAPACITY = {"capacity": "1GiB"}


@pytest.mark.parametrize(
    "change",
    [{"num_threads": 0}, {"num_threads": 257}, {"capacity": 0}, {"path": tuple(f"/kv/{n}" for n in range(65))}],
)
def test_settings_are_checked(change: dict[str, object]) -> None:
    """Threads, bytes and directories have their bounds; what is on them is taken."""
    with pytest.raises(ConfigurationError):
        NVMeSettings.of({"path": "/kv", **CAPACITY, **change})
    for most in ({"num_threads": 1}, {"num_threads": 256}, {"path": tuple(f"/kv/{n}" for n in range(64))}):
        NVMeSettings.of({"path": "/kv", **CAPACITY, **most})
    assert NVMeSettings.of({"path": "/kv", **CAPACITY, "max_capacity": "1GiB"}).max_capacity == 1 << 30


def test_what_says_nothing_readable_is_new(tmp_path: Path) -> None:
    """Each time another, so that no two directories are taken for one."""
    assert look_into(tmp_path)[0] is None
    assert Member().id != Member().id
    assert len(Member().id) == 16
