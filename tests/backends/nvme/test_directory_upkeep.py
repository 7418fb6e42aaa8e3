"""Deleting a tenant's blocks from a directory that no cache has open."""

import asyncio
import errno
import fcntl
import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tests.support.any_layout import AnyEngine, cpu, nvme, open_any, prompt
from tests.support.serving import attached, serving
from tiered_kv import BackendUnavailableError, BlockKeys, ConfigurationError, KVGroup, KVLayout, Shard
from tiered_kv.media.record import HEADER_BYTES, payload_bytes_in
from tiered_kv.system import Files
from tiered_kv_backends.nvme import NVMeBackend, directory_upkeep
from tiered_kv_backends.nvme.ledger import Ledger, Order

N = 8
delete_tenant = NVMeBackend.delete_tenant
TWO_GROUPS = KVLayout((KVGroup(2, 1, 48, "bfloat16", 4), KVGroup(1, 2, 64, "float32", 8, "HND", 4)))
KEYS = {"keys": ["01" * 32]}


def prompts(salt: str) -> list[BlockKeys]:
    """Return a prompt of a tenant in each KV group."""
    return [prompt(N, group=n, block_size=group.block_size, salt=salt) for n, group in enumerate(TWO_GROUPS.groups)]


async def filled(settings: dict[str, object]) -> AnyEngine:
    """Leave blocks of two tenants, and of none."""
    engine = AnyEngine(TWO_GROUPS)
    async with open_any(engine, settings) as kv:
        for salt in ("ann", "bob", ""):
            for keys in prompts(salt):
                await kv.store(keys, engine.fill(keys, range(N)))
                await kv.flush()
    return engine


async def found(engine: AnyEngine, settings: dict[str, object]) -> list[int]:
    """Load everything; return how many blocks of each tenant are there, and right."""
    counts = []
    async with open_any(engine, settings) as kv:
        for salt in ("ann", "bob", ""):
            engine.wipe()
            counts.append(0)
            for keys in prompts(salt):
                await kv.load(keys, engine.spec(range(N), keys.group))
                counts[-1] += engine.count_right(keys, range(N))
    return counts


def damage_ledgers(path: Path) -> None:
    """Leave nothing of what the ledgers say."""
    for ledger in path.rglob("ledger"):
        ledger.write_bytes(b"x" * 100)


def lose_ledgers(path: Path) -> None:
    """Have there be none."""
    for ledger in path.rglob("ledger"):
        ledger.unlink()


def zero_ledgers(path: Path, num_bytes: int | None) -> None:
    """Have them begin with so many zeros, or be all zeros."""
    for ledger in path.rglob("ledger"):
        data = ledger.read_bytes()
        ledger.write_bytes(bytes(num_bytes or len(data)) + data[num_bytes or len(data) :])


def num_open_files() -> int:
    """Count the descriptors of this process."""
    return len([*Path("/proc/self/fd").iterdir()])


def slab_files(path: Path) -> list[Path]:
    """Return where the slabs are."""
    return [*path.rglob("slab")]


def slabs_in(path: Path) -> bytes:
    """Return what the slabs hold."""
    return b"".join(slab.read_bytes() for slab in slab_files(path))


@pytest.mark.parametrize("more", [{}, {"erase": True}, {"encryption": KEYS}])
async def test_a_tenant_goes_and_the_others_stay(tmp_path: Path, more: dict[str, object]) -> None:
    """In every KV group, whatever then becomes of the ledger; with ``erase`` no byte of it is left."""
    settings = {**nvme(tmp_path), **more}
    engine = await filled(settings)
    assert await delete_tenant(settings, "nobody") == 0
    assert await delete_tenant(settings, "ann") == 2 * N
    assert await delete_tenant(settings, "ann") == 0
    damage_ledgers(tmp_path)
    assert await found(engine, settings) == [0, 2 * N, 2 * N]
    slabs = slabs_in(tmp_path)
    left = [engine.content(digest, keys.group, "") in slabs for keys in prompts("ann") for digest in keys]
    assert any(left) == (not more)


async def test_a_tenant_goes_where_the_ledger_is_gone(tmp_path: Path) -> None:
    """An open would find the blocks by their headers."""
    settings: dict[str, object] = {**nvme(tmp_path)}
    engine = await filled(settings)
    lose_ledgers(tmp_path)
    assert await delete_tenant(settings, "ann") == 2 * N
    assert await found(engine, settings) == [0, 2 * N, 2 * N]


@pytest.mark.parametrize("num_zeros", [None, 4096])
async def test_of_others_nothing_goes_where_the_ledger_is_zeros(tmp_path: Path, num_zeros: int | None) -> None:
    """What is entered of those that go is not taken for all that was ever written."""
    engine = await filled(nvme(tmp_path))
    zero_ledgers(tmp_path, num_zeros)
    assert await delete_tenant(nvme(tmp_path), "ann") == 2 * N
    assert await found(engine, nvme(tmp_path)) == [0, 2 * N, 2 * N]


async def test_nothing_is_cleared_in_a_lost_ledger_that_cannot_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what is cleared would be all that it says, and others' blocks be gone with the tenant's."""
    engine, pwrite = await filled(nvme(tmp_path)), Files.pwrite
    zero_ledgers(tmp_path, None)

    def write_all_but_marks(self: Files, fd: int, data: memoryview, offset: int) -> int:
        if bytes(data[:8]) == b"TKVLOST1":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pwrite(self, fd, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(Files, "pwrite", write_all_but_marks)
        with pytest.raises(BackendUnavailableError, match="could not delete a tenant"):
            await delete_tenant(nvme(tmp_path), "ann")
    assert await found(engine, nvme(tmp_path)) == [2 * N, 2 * N, 2 * N]


async def test_a_block_that_cannot_be_looked_at_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the tenant's, and the disk may give it again later on."""
    engine, read = await filled(nvme(tmp_path)), Files.preadv

    def read_all_but_the_first(self: Files, fd: int, buffers: list[memoryview], offset: int) -> int:
        if not offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, fd, buffers, offset)

    with monkeypatch.context() as patched:
        patched.setattr(Files, "preadv", read_all_but_the_first)
        assert await delete_tenant(nvme(tmp_path), "ann") == 2 * N - 2
    assert await found(engine, nvme(tmp_path)) == [0, 2 * N, 2 * N]


async def test_a_place_that_can_be_neither_read_nor_written_keeps_no_other_from_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has failed, which is said; its block is in no ledger, and what is behind it has gone."""
    engine, read, write = await filled(nvme(tmp_path)), Files.preadv, Files.pwrite

    def read_all_but_the_first(self: Files, fd: int, buffers: list[memoryview], offset: int) -> int:
        if not offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, fd, buffers, offset)

    def write_all_but_the_first(self: Files, fd: int, data: memoryview, offset: int) -> int:
        if not offset and len(data) >= 4096:  # of a slab
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(self, fd, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(Files, "preadv", read_all_but_the_first)
        patched.setattr(Files, "pwrite", write_all_but_the_first)
        with pytest.raises(BackendUnavailableError, match="could not delete a tenant"):
            await delete_tenant(nvme(tmp_path), "ann")
    assert (await found(engine, nvme(tmp_path)))[0] == 0


async def test_a_bad_place_at_the_front_of_a_slab_keeps_no_block_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long its records are is said by each of them; where none can be read, no file stays open."""
    engine, pread = await filled(nvme(tmp_path)), Files.pread
    num_open, bad_until = num_open_files(), 1 << 40

    def read_what_is_behind(self: Files, fd: int, num_bytes: int, offset: int) -> bytes:
        if offset < bad_until and num_bytes == 4096:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(self, fd, num_bytes, offset)

    with monkeypatch.context() as patched:
        patched.setattr(directory_upkeep, "_BYTES_AT_ONCE", 4096)
        patched.setattr(Files, "pread", read_what_is_behind)
        with pytest.raises(BackendUnavailableError, match="could not delete a tenant"):
            await delete_tenant(nvme(tmp_path), "ann")
        assert num_open_files() == num_open
        bad_until = 4096
        assert await delete_tenant(nvme(tmp_path), "ann") == 2 * N
    assert await found(engine, nvme(tmp_path)) == [0, 2 * N, 2 * N]


async def test_blocks_without_a_salt_are_a_tenant_s(tmp_path: Path) -> None:
    """The empty salt is one like others, and nothing else goes with it."""
    engine = await filled(nvme(tmp_path))
    assert await delete_tenant(nvme(tmp_path), "") == 2 * N
    assert await found(engine, nvme(tmp_path)) == [2 * N, 2 * N, 0]


async def test_a_directory_in_use_is_left_alone(tmp_path: Path) -> None:
    """The cache that has it open may have the tenant's blocks in memory: it is named instead."""
    engine = await filled(nvme(tmp_path))
    async with open_any(engine, nvme(tmp_path)):
        with pytest.raises(ConfigurationError, match="process"):
            await delete_tenant(nvme(tmp_path), "ann")
    assert await found(engine, nvme(tmp_path)) == [2 * N] * 3


async def test_of_several_directories_one_in_use_keeps_none_of_the_others_held(tmp_path: Path) -> None:
    """Caches may open those; whoever asks again hears of the one in use, and gets all of them once that is free."""
    first, second = nvme(tmp_path / "first"), nvme(tmp_path / "second")
    engine = await filled(first)
    await filled(second)
    both = NVMeBackend.Settings.of({**first, "path": [first["path"], second["path"]]})
    async with NVMeBackend.inventory(both) as inventory:
        async with open_any(engine, second):
            for _ in range(2):
                with pytest.raises(ConfigurationError, match="second is open in a cache"):
                    await inventory.hold()
            assert await found(engine, first) == [2 * N] * 3
        await inventory.hold()
        with pytest.raises(ConfigurationError, match="held by another"):
            await found(engine, first)


async def test_what_is_cancelled_holds_the_directory_until_its_thread_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would write to files that are closed, or are another's by then, and beside a cache that opens them."""
    engine, pwrite, loop = await filled(nvme(tmp_path)), Files.pwrite, asyncio.get_running_loop()
    num_open, is_held = num_open_files(), list[bool]()

    async def cancel() -> None:
        for _ in range(3):  # whoever is asked to stop, and asked again
            deleting.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    def write_while_cancelled(self: Files, fd: int, data: memoryview, offset: int) -> int:
        if not is_held:
            asyncio.run_coroutine_threadsafe(cancel(), loop).result()
            another = os.open(tmp_path, os.O_RDONLY)
            try:
                fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_held.append(True)
            else:
                is_held.append(False)
            finally:
                os.close(another)
        return pwrite(self, fd, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(Files, "pwrite", write_while_cancelled)
        deleting = asyncio.create_task(delete_tenant(nvme(tmp_path), "ann"))
        with pytest.raises(asyncio.CancelledError):
            await deleting
        await loop.shutdown_default_executor()
    assert is_held == [True]
    assert num_open_files() == num_open
    anns, *others = await found(engine, nvme(tmp_path))
    assert anns < 2 * N
    assert others == [2 * N, 2 * N]


async def test_a_tenant_goes_from_every_model_of_a_server(tmp_path: Path) -> None:
    """By the tier's settings: each model has a directory of its own in that which they name."""
    settings, keys = nvme(tmp_path / "disk"), prompt(N, salt="ann")
    with serving(tmp_path, cpu(64), settings) as server:
        for shard in (Shard(0, 2), Shard()):
            engine = AnyEngine()
            async with attached(server, engine, shard=shard) as kv:
                await kv.store(keys, engine.fill(keys, range(N)))
                assert await kv.flush()
        with pytest.raises(ConfigurationError, match="process"):
            await delete_tenant(settings, "ann")
    assert await delete_tenant(settings, "ann") == 2 * N
    assert await delete_tenant(settings, "ann") == 0


async def test_what_another_program_keeps_there_is_not_touched(tmp_path: Path) -> None:
    """A folder in the tier's directory that is no tier's, though a file in it is called as one of theirs is."""
    engine = await filled(nvme(tmp_path))
    theirs = tmp_path / "lease" / "holder"
    theirs.parent.mkdir(mode=0o777)
    theirs.parent.chmod(0o777)
    theirs.write_text("node-7")
    assert await delete_tenant(nvme(tmp_path), "ann") == 2 * N
    assert theirs.read_text() == "node-7"
    assert await found(engine, nvme(tmp_path)) == [0, 2 * N, 2 * N]


async def test_a_folder_that_may_not_be_looked_into_is_no_tier_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root of a disk has a folder of its filesystem's own, which is for the superuser alone."""
    open_ = Files.open

    def open_where_allowed(self: Files, path: str | Path, *how: int, **where: int) -> int:
        if "lost+found" in Path(path).parts:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_(self, path, *how, **where)

    engine = await filled(nvme(tmp_path))
    (tmp_path / "lost+found").mkdir(mode=0o700)
    monkeypatch.setattr(Files, "open", open_where_allowed)
    assert await delete_tenant(nvme(tmp_path), "ann") == 2 * N
    assert await found(engine, nvme(tmp_path)) == [0, 2 * N, 2 * N]


async def test_a_model_s_directory_is_right_below_the_tier_s(tmp_path: Path) -> None:
    """Other programs have folders in folders of 32 digits too, and files that are called as one of ours is."""
    theirs = tmp_path / ("a" * 32) / ("b" * 32) / "holder"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("node-7")
    assert not NVMeBackend.has_used(tmp_path)
    with pytest.raises(BackendUnavailableError, match="is the disk mounted"):
        await delete_tenant(nvme(tmp_path), "ann")


async def test_a_directory_that_cannot_be_locked_is_not_deleted_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is said in the words of the interface, whatever the system raises."""

    def fail(_: Files, fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    engine, num_open = await filled(nvme(tmp_path)), num_open_files()
    with monkeypatch.context() as patched:
        patched.setattr(Files, "flock", fail)
        with pytest.raises(BackendUnavailableError, match=f"{tmp_path}: No locks"):
            await delete_tenant(nvme(tmp_path), "ann")
    assert num_open_files() == num_open
    assert await found(engine, nvme(tmp_path)) == [2 * N] * 3


async def test_a_folder_that_goes_while_it_is_listed_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that has the tier open deletes those of other models when it needs their room."""
    await filled(nvme(tmp_path))
    gone, open_ = slab_files(tmp_path)[0].parent, Files.open

    def open_when_gone(self: Files, path: str | Path, *how: int, **where: int) -> int:
        if Path(path).name == gone.name:
            shutil.rmtree(gone, ignore_errors=True)
        return open_(self, path, *how, **where)

    monkeypatch.setattr(Files, "open", open_when_gone)
    settings = NVMeBackend.Settings.model_validate(nvme(tmp_path))
    async with NVMeBackend.inventory(settings) as inventory:
        assert sum([each.num_blocks async for some in inventory.found() for each in some]) == 3 * N


async def test_a_listing_needs_little_memory_for_each_slot(tmp_path: Path) -> None:
    """A disk has millions of them: of most no more is kept than what the ledger says."""
    await filled(nvme(tmp_path))
    slab, other = slab_files(tmp_path)
    shutil.rmtree(other.parent)
    with slab.open("rb") as file:
        stride = HEADER_BYTES + -(-payload_bytes_in(memoryview(file.read(HEADER_BYTES))) // 4096) * 4096
    num_slots = 60_000
    os.truncate(slab, num_slots * stride)
    ledger = Ledger(os.open(slab.with_name("ledger"), os.O_RDWR), Order())
    ledger.write(np.arange(4 * num_slots, dtype=np.uint64).reshape(-1, 4), np.arange(num_slots))
    ledger.close()
    num_found = 0
    async with NVMeBackend.inventory(NVMeBackend.Settings.model_validate(nvme(tmp_path))) as inventory:
        tracemalloc.start()
        try:
            async for some in inventory.found():
                num_found += len(some)
                del some
                assert tracemalloc.get_traced_memory()[0] < 250 * num_slots
        finally:
            tracemalloc.stop()
    assert num_found == num_slots


async def test_where_no_tier_was_nobody_knows_what_is_gone(tmp_path: Path) -> None:
    """A disk that is not mounted has blocks that come back with it: no directory, or an empty one, is no success.

    Nothing is made there. A tier's directory without a block is one.
    """
    (tmp_path / "mount point").mkdir()
    for name in ("absent", "mount point"):
        with pytest.raises(BackendUnavailableError, match="is the disk mounted"):
            await delete_tenant(nvme(tmp_path / name), "ann")
    assert not (tmp_path / "absent").exists()
    assert not list((tmp_path / "mount point").iterdir())
    async with open_any(AnyEngine(), nvme(tmp_path / "empty")):
        pass
    assert await delete_tenant(nvme(tmp_path / "empty"), "ann") == 0
