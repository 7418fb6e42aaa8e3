"""Whose the directory is: locks, links, others' rights, removal, and the room on its disk."""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from structlog.testing import capture_logs

from tests.support.caches import until
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
)
from tests.support.programs import started
from tiered_kv.media.backend import Outcome
from tiered_kv.testing import block_names, open_context
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError
from tiered_kv.values.keys import Names
from tiered_kv_backends.nvme import NVMeBackend, directory, directory_store, slab
from tiered_kv_backends.nvme.directory import Directory, taken
from tiered_kv_backends.nvme.open_files import OpenFiles
from tiered_kv_backends.shared_fs import files

FileLimit = Callable[[int], AbstractContextManager[None]]
HOLD = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print(flush=True)
input()
"""
"""Holds a directory until it is told."""
FORK_AND_DIE = """
import asyncio, os, signal, sys
from tests.support.nvme_tier import open_tier
from itertools import count
from pathlib import Path

async def main():
    async with open_tier(Path(sys.argv[1])) as tier:
        await tier.write({0: 0})
        if os.fork() == 0:
            print("forked", flush=True)
            os.read(0, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
"""Opens a tier, forks a child that waits until it is told, and is killed."""


async def test_one_owner(tmp_path: Path) -> None:
    """A directory that another process holds is refused by name and process, and is free when that one is gone."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: ASYNC220 - starts at once
    with other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ConfigurationError, match="held by another NVMe tier") as raised:
            async with open_tier(tmp_path):
                pass
        assert str(tmp_path) in str(raised.value)
        other.kill()
    async with open_tier(tmp_path):
        with pytest.raises(ConfigurationError, match=f"process {os.getpid()}"):
            async with open_tier(tmp_path):
                pass
    async with open_tier(tmp_path):
        pass


def open_in(path: Path) -> list[Path]:
    """Return what this process has open in a directory."""
    return [each for each in map(Path.resolve, Path("/proc/self/fd").iterdir()) if each.is_relative_to(path)]


def as_nvme(path: Path) -> None:
    """Take a directory for an NVMe tier, and let go of it."""
    with taken(path):
        pass


def as_shared_fs(path: Path) -> None:
    """Open a directory as a shared_fs tier does."""
    files.probe(str(path))


@pytest.mark.parametrize(
    ("one", "mark", "other", "error"),
    [(as_nvme, "holder", as_shared_fs, ConfigurationError), (as_shared_fs, "sweeper.lock", as_nvme, FileExistsError)],
    ids=["nvme", "shared_fs"],
)
def test_a_fresh_directory_is_of_one_kind(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    one: Callable[[Path], None],
    mark: str,
    other: Callable[[Path], None],
    error: type[Exception],
) -> None:
    """However two processes that open it at once come between each other's steps; who was first keeps it."""
    path, open_, others = tmp_path / "kv", os.open, [other]

    def open_behind_the_other(name: str | Path, flags: int, *args: Any, **options: Any) -> int:  # noqa: ANN401 - as it is
        if flags & os.O_CREAT and Path(name).name == mark and others:
            others.pop()(path)
        return open_(name, flags, *args, **options)

    monkeypatch.setattr(os, "open", open_behind_the_other)
    with pytest.raises(error, match="of its own"):
        one(path)
    for _ in range(2):
        other(path)


async def test_an_opening_that_is_given_up_leaves_the_directory_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while a thread opens the files: that closes them again, and another tier may have the directory."""
    begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def open_late(*args: Any) -> OpenFiles:  # noqa: ANN401 - what it is made of
        begun.set()
        goes_on.wait()
        files = OpenFiles(*args)
        ended.set()
        return files

    with monkeypatch.context() as patched:
        patched.setattr(directory_store, "OpenFiles", open_late)
        opening = asyncio.ensure_future(open_tier(tmp_path).__aenter__())
        await asyncio.to_thread(begun.wait)
        opening.cancel()
        goes_on.set()
        await asyncio.wait([opening])
        await asyncio.to_thread(ended.wait)
    await until(lambda: not open_in(tmp_path))
    async with open_tier(tmp_path):
        pass


async def test_only_the_owner_may_read(tmp_path: Path) -> None:
    """Directories are 0700 and files 0600."""
    path = tmp_path / "deep" / "tier"
    async with open_tier(path) as tier:
        await tier.write(count_up(1))
        modes = {file.stat().st_mode & 0o777 for file in path.rglob("*") if file.is_file()}
        assert modes == {0o600}
        assert {file.stat().st_mode & 0o777 for file in (path, *path.rglob("*")) if file.is_dir()} == {0o700}


async def test_a_forked_child_does_not_hold_it(tmp_path: Path) -> None:
    """When the owner is killed the directory is free, though a child that it forked lives on."""
    with started("-c", FORK_AND_DIE, tmp_path, folder=Path(__file__).parents[3]) as owner:
        assert owner.stdout.readline() == "forked\n"
        assert await asyncio.to_thread(owner.wait) == -signal.SIGKILL
        async with open_tier(tmp_path) as tier:
            assert tier.recovered(1) == {0: 0}


@pytest.mark.parametrize("direct", ["auto", "never"])
@pytest.mark.parametrize(("first", "then", "how"), [("kv", "kv/more", "in"), ("kv/more", "kv", "above")])
async def test_neither_of_two_lies_in_the_other(tmp_path: Path, first: str, then: str, how: str, direct: str) -> None:
    """Neither counts what the other keeps. A folder that nobody may look into is no tier's."""
    async with open_tier(tmp_path / first, direct=direct) as tier:
        await tier.write(count_up(2))
    (tmp_path / "kv" / "lost+found").mkdir(mode=0, exist_ok=True)
    here, there = tmp_path / then, tmp_path / first
    with pytest.raises(ConfigurationError, match=f"^{here} is {how} {there}, which is an NVMe tier's too"):
        async with open_tier(here):
            pass
    assert not (here / "holder").exists()
    async with open_tier(there) as tier:
        assert len(tier.recovered(2)) == 2


@pytest.mark.parametrize("is_tried", [False, True], ids=["new", "tried-before"])
@pytest.mark.parametrize(("first", "then"), [("kv", "kv/more"), ("kv/more", "kv")])
def test_of_two_that_are_made_at_once_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, then: str, *, is_tried: bool
) -> None:
    """Each has looked for the other before that was there: else both would be refused at the next start."""
    here, there = tmp_path / first, tmp_path / then
    if is_tried:
        for path in (here, there):
            with pytest.raises(ConfigurationError), taken(path):
                raise ConfigurationError("too small")
    with contextlib.ExitStack() as others:

        def be_late(fd: int) -> None:
            patch.undo()
            others.enter_context(taken(there))
            directory._name_holder(fd)  # noqa: SLF001 - as it is

        with monkeypatch.context() as patch:
            patch.setattr(directory, "_name_holder", be_late)
            with pytest.raises(ConfigurationError, match=f"^{here} is .* {there}, which is an NVMe tier's too"):
                others.enter_context(taken(here))
        assert not {"holder", "member"} & {each.name for each in here.iterdir()}
    with taken(there):
        pass


async def test_a_directory_that_could_not_be_opened_is_no_tiers(tmp_path: Path) -> None:
    """Who has tried one that is too small for it may choose another in it, and has nothing to delete before."""
    with pytest.raises(ConfigurationError, match="lower capacity by"):
        async with open_tier(tmp_path / "kv", capacity=1 << 60):
            pass
    async with open_tier(tmp_path / "kv" / "more"):
        pass


async def test_nobody_can_delete_the_lock(tmp_path: Path) -> None:
    """With the file deleted that names the holder, the directory is still held."""
    async with open_tier(tmp_path):
        (tmp_path / "holder").unlink()
        with pytest.raises(ConfigurationError, match="held by another NVMe tier"):
            async with open_tier(tmp_path):
                pass


async def test_stores_into_a_removed_directory_fail(tmp_path: Path) -> None:
    """After ``rm -rf`` the first store says that the tier is gone, and a tier made anew there is not touched."""
    path = tmp_path / "tier"
    async with open_tier(path) as tier:
        await tier.write(count_up(4))
        shutil.rmtree(path)
        async with open_tier(path) as other:
            await other.write({1: 11})
            before = ledger_of(path).read_bytes()
            with pytest.raises(BackendUnavailableError, match="deleted"):
                await tier.write({0: 5})
            with pytest.raises(BackendUnavailableError, match="deleted"):
                await tier.backend.checkpoint(0, block_names([key_of(3)]), np.array([3]), sync=True)
            await tier.backend.forget(0, np.arange(2))
            assert ledger_of(path).read_bytes() == before
        assert await tier.verified({3: 3}) == [Outcome.HIT]
    async with open_tier(path) as tier:
        assert tier.recovered(12) == {1: 11}
        assert await tier.verified({1: 11}) == [Outcome.HIT]


@pytest.mark.parametrize("name", ["holder", "probe", "slab", "ledger"])
@pytest.mark.parametrize("kind", ["symlink", "hard link"])
async def test_planted_links_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    """The file that a link leads to keeps its bytes; the tier does not open, or opens without the link."""
    victim, path = tmp_path / "victim", tmp_path / "tier"
    victim.write_bytes(b"precious" * 1000)
    folder = path / shape_of("a").folder
    folder.mkdir(parents=True, mode=0o700)
    path.chmod(0o700)
    planted = (path if name in {"holder", "probe"} else folder) / name
    if kind == "symlink":
        planted.symlink_to(victim)
    else:
        planted.hardlink_to(victim)
    if name == "probe":  # then it is not known whether I/O can be direct
        async with open_tier(path) as tier:
            assert await tier.write({0: 0}) == [Outcome.STORED]
    else:
        with pytest.raises(ConfigurationError, match="symbolic link" if kind == "symlink" else "another name"):
            async with open_tier(path):
                pass
    assert victim.read_bytes() == b"precious" * 1000


async def test_a_planted_folder_is_refused(tmp_path: Path) -> None:
    """A symbolic link in the place of a model's folder leads nowhere."""
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "tier"
    elsewhere.mkdir(mode=0o700)
    path.mkdir(mode=0o700)
    (path / shape_of("a").folder).symlink_to(elsewhere)
    with pytest.raises(ConfigurationError, match="Not a directory"):
        async with open_tier(path):
            pass
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("name", ["slab", "ledger", "holder"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
async def test_what_is_no_file_is_refused(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    """A FIFO or a folder in the place of a file is an error at once, and hangs nothing."""
    async with open_tier(tmp_path) as tier:
        await tier.write({0: 0})
    place = tmp_path / name if name == "holder" else slab_of(tmp_path).with_name(name)
    place.unlink()
    make(place)
    with pytest.raises(ConfigurationError, match=name):
        async with open_tier(tmp_path):
            pass


async def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a socket, whose opening is an error of its own."""
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("holder")
    with pytest.raises(ConfigurationError, match="holder"):
        async with open_tier(tmp_path):
            pass


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777])
async def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    """Of the path itself, of a model's folder, and of a file, with what to change."""
    async with open_tier(tmp_path) as tier:
        await tier.write({0: 0})
    for place in (tmp_path, slab_of(tmp_path).parent, slab_of(tmp_path)):
        was = place.stat().st_mode
        place.chmod(mode)
        with pytest.raises(ConfigurationError, match=f"{mode:04o}, others may write to it"):
            async with open_tier(tmp_path):
                pass
        place.chmod(was)
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(1) == {0: 0}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
async def test_a_directory_that_cannot_be_written_to_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """And not the file that was only tried in it."""
    opened = os.open

    def refuse(path: str | Path, flags: int, *how: int, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number), path)
        return opened(path, flags, *how, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigurationError, match=f"^{tmp_path}: .*{os.strerror(number)}; .* can write to"):
        async with open_tier(tmp_path):
            pass


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("name", ["kv", None], ids=["itself", "a folder in it"])
async def test_a_disk_without_room_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, number: int
) -> None:
    """Nobody is asked whether the directory is another's, or whether it can be written to."""
    made = os.mkdir

    def refuse(path: str | Path, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if name in {None, Path(path).name}:
            raise OSError(number, os.strerror(number), path)
        made(path, mode, dir_fd=dir_fd)

    if name is None:
        (tmp_path / "kv").mkdir(0o700)
    monkeypatch.setattr(os, "mkdir", refuse)
    words = f"^{tmp_path}/kv.*: {os.strerror(number)}; make room there, or choose a directory that has some$"
    with pytest.raises(ConfigurationError, match=words):
        async with open_tier(tmp_path / "kv"):
            pass


@pytest.mark.parametrize("path", ["link", "link/kv", "link/more/kv"])
async def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, path: str) -> None:
    """As that, and not as a file: what it leads to may be a disk that is not mounted."""
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(ConfigurationError, match=f"^{tmp_path}/link: it is a link that leads nowhere; "):
        async with open_tier(tmp_path / path):
            pass


@pytest.mark.parametrize("path", ["kv", "mnt/nvme/kv"])
async def test_parents_that_are_made_are_told(tmp_path: Path, path: str) -> None:
    """Once, and from which on: a mount point that is misspelt fills another disk."""
    with capture_logs() as logs:
        for _ in range(2):
            async with open_tier(tmp_path / path):
                pass
    told = [(each["log_level"], each["first"], each["path"]) for each in logs if each["event"] == "nvme.parents_made"]
    assert told == ([] if path == "kv" else [("warning", str(tmp_path / "mnt"), str(tmp_path / path))])


async def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """Who owns it could put anything there at any time."""
    if os.geteuid():
        pytest.skip("no right to give files away: run as root")
    path = tmp_path / "tier"
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)
    with pytest.raises(ConfigurationError, match="belongs to user 65534"):
        async with open_tier(path):
            pass
    assert list(path.iterdir()) == []


async def test_links_in_a_foreign_folder_lead_nowhere(tmp_path: Path) -> None:
    """What a link in another model's folder leads to is neither counted nor deleted when that folder goes."""
    path, elsewhere = tmp_path / "tier", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_bytes(bytes(8 * MIB))
    async with open_tier(path, "other") as tier:
        await tier.write(count_up(20))
    (slab_of(path, "other").parent / "link").symlink_to(elsewhere)
    (slab_of(path, "other").parent / "file").symlink_to(elsewhere / "precious")
    async with open_tier(path) as tier:
        assert tier.backend.describe()["reclaimed_fingerprints"] == 0
    async with open_tier(path, capacity=2 * MIB) as tier:
        await tier.write(count_up(20))
        assert tier.backend.describe()["reclaimed_fingerprints"] == 1
    assert (elsewhere / "precious").stat().st_size == 8 * MIB


async def test_folders_of_other_programs_stay(tmp_path: Path) -> None:
    """Named by 64 digits too, as container engines name theirs: what no tier has made is not counted or deleted."""
    names = [digit * 64 for digit in "0af"]
    for name in names:
        (tmp_path / name).mkdir(mode=0o700)
        (tmp_path / name / "config.json").write_bytes(bytes(2 * MIB))
    (tmp_path / names[0] / "slab").mkdir()
    (tmp_path / names[1] / "slab").write_bytes(b"of stone")
    (tmp_path / ("b" * 64)).mkdir(mode=0o700)
    async with open_tier(tmp_path, capacity=2 * MIB) as tier:
        await tier.write(count_up(20))
        assert tier.backend.describe()["reclaimed_fingerprints"] == 0
    assert [(tmp_path / name / "config.json").stat().st_size for name in names] == [2 * MIB] * 3
    assert await NVMeBackend.delete_tenant({"medium": "nvme", "path": tmp_path, "capacity": "2MiB"}, "ann") == 0
    assert sorted(each.name for each in (tmp_path / names[1]).iterdir()) == ["config.json", "slab"]
    assert (tmp_path / ("b" * 64)).is_dir()


async def test_records_without_a_ledger_are_counted_and_go(tmp_path: Path) -> None:
    """Another model's, whose ledger is lost, take no part of the capacity for good."""
    async with open_tier(tmp_path, "other", capacity=2 * MIB) as tier:
        await tier.write(count_up(20))
    ledger_of(tmp_path, "other").unlink()
    async with open_tier(tmp_path, capacity=2 * MIB) as tier:
        assert set(await tier.write(count_up(20))) == {Outcome.STORED}
        assert tier.backend.describe()["reclaimed_fingerprints"] == 1
        assert disk_usage(tmp_path) <= 2 * MIB
    assert not slab_of(tmp_path, "other").parent.exists()


async def test_what_cannot_be_deleted_counts_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds: blocks find no place where another model's should have gone, until these do at a later start."""
    async with open_tier(tmp_path, "other", capacity=2 * MIB) as tier:
        await tier.write(count_up(10))
    async with open_tier(tmp_path, capacity=2 * MIB) as tier:
        with monkeypatch.context() as patch:

            def fail(*_: object, **__: object) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patch.setattr(os, "unlink", fail)
            outcomes = [(await tier.write({n: n}))[0] for n in range(tier.found.num_slots)]
        assert set(outcomes) == {Outcome.STORED, Outcome.FAILED}
        assert disk_usage(tmp_path) <= 2 * MIB
    async with open_tier(tmp_path, capacity=2 * MIB) as tier:
        outcomes = [(await tier.write({n: n}))[0] for n in range(tier.found.num_slots)]
        assert set(outcomes) == {Outcome.STORED}
        assert disk_usage(tmp_path) <= 2 * MIB


async def test_a_tier_opens_though_what_fills_it_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model's blocks take all of the capacity: these find no place, until those go at a later start."""
    async with open_tier(tmp_path, "other", capacity=300 * MIB) as tier:
        await tier.write({tier.found.num_slots - 1: 1})  # all before it have their place too
    with monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        patch.setattr(os, "unlink", fail)
        async with open_tier(tmp_path, capacity=300 * MIB) as tier:
            assert await tier.write(count_up(2)) == [Outcome.FAILED] * 2
    async with open_tier(tmp_path, capacity=300 * MIB) as tier:
        assert await tier.write(count_up(2)) == [Outcome.STORED] * 2


async def test_a_folder_of_the_earlier_format_begins_anew(tmp_path: Path) -> None:
    """Its journal said what had been evicted, and is not read any more: none of its records is served."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(4))
    ledger_of(tmp_path).rename(ledger_of(tmp_path).with_name("journal"))
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(4) == {}
        assert await tier.verified(count_up(4)) == [Outcome.MISS] * 4
        assert await tier.write(count_up(4)) == [Outcome.STORED] * 4
    assert not ledger_of(tmp_path).with_name("journal").exists()


def fill(disk: Path) -> Path:
    """Leave no room on a disk."""
    filler = disk / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(17 * MIB))
    return filler


async def test_what_fits_once_fits_again(small_disk: Path) -> None:
    """A tier that fills its filesystem opens again, with every block, and says nothing of missing room."""
    free = os.statvfs(small_disk)
    capacity = free.f_bavail * free.f_frsize
    async with open_tier(small_disk / "tier", capacity=capacity) as tier:
        num_slots = tier.found.num_slots
        assert num_slots * STRIDE > 0.95 * capacity
        assert set(await tier.write(count_up(num_slots))) == {Outcome.STORED}
    fill(small_disk)
    async with open_tier(small_disk / "tier", capacity=capacity) as tier:
        assert tier.recovered(num_slots) == count_up(num_slots)
        assert await tier.write({0: 0}) == [Outcome.STORED]


async def test_a_disk_filled_by_others_keeps_nothing_closed(small_disk: Path) -> None:
    """What has its place is served; what has none fails until there is room."""
    path = small_disk / "tier"
    async with open_tier(path, capacity=8 * MIB) as tier:
        await tier.write(count_up(8))
    filler = fill(small_disk)
    async with open_tier(path, capacity=8 * MIB) as tier:
        assert tier.recovered(8) == count_up(8)
        assert await tier.verified(count_up(8)) == [Outcome.HIT] * 8
        last = tier.found.num_slots - 1
        assert await tier.write({last: 1}) == [Outcome.FAILED]
        filler.unlink()
        assert await tier.write({last: 1}) == [Outcome.STORED]


async def test_a_full_disk_that_takes_no_write_over_another_keeps_nothing_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where writes copy, and a quota is reached: btrfs refuses to date a folder, or cut a file to its own length."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(8))

    def full(*_: object) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    for name in ("pwrite", "pwritev", "ftruncate", "posix_fallocate", "utime"):
        monkeypatch.setattr(os, name, full)
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(8) == count_up(8)
        assert await tier.verified(count_up(8)) == [Outcome.HIT] * 8
        assert await tier.write({0: 8}) == [Outcome.FAILED]


async def test_a_shrink_costs_no_later_write(tmp_path: Path) -> None:
    """After a smaller capacity the ledger is as short as for a new tier, and stays so whatever is written."""
    async with open_tier(tmp_path, capacity=64 * MIB) as tier:
        await tier.backend.checkpoint(0, *_names_and_slots(tier.found.num_slots))
    async with open_tier(tmp_path, capacity=4 * MIB) as tier:
        num_bytes = 64 * tier.found.num_slots
        for n in range(20):
            assert await tier.write({n: n}) == [Outcome.STORED]
            assert ledger_of(tmp_path).stat().st_size == num_bytes
        assert disk_usage(tmp_path) <= 4 * MIB


async def test_a_ledger_of_any_length_is_opened_at_once(tmp_path: Path) -> None:
    """What follows the last slot is cut off unread: a sparse file of a GiB costs no more than a short one."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(4))
    os.truncate(ledger_of(tmp_path), 1 << 30)
    before = num_bytes_read()
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(4) == count_up(4)
        assert ledger_of(tmp_path).stat().st_size == 64 * tier.found.num_slots
    assert num_bytes_read() - before < 64 * MIB


async def test_a_running_tier_gives_back_what_it_shrinks_by(tmp_path: Path) -> None:
    """`resize` frees slab and ledger at once, and grows both again."""
    async with open_tier(tmp_path, capacity=16 * MIB) as tier:
        num_slots = tier.found.num_slots
        await tier.write(count_up(num_slots))
        await tier.backend.resize(4)
        assert await tier.verified({3: 3}) == [Outcome.HIT]
        assert disk_usage(tmp_path) < MIB
        await tier.backend.resize(num_slots)
        assert await tier.write({num_slots - 1: 7}) == [Outcome.STORED]
    async with open_tier(tmp_path, capacity=16 * MIB) as tier:
        assert tier.recovered(num_slots) == count_up(4) | {num_slots - 1: 7}
        assert await tier.verified(tier.recovered(num_slots)) == [Outcome.HIT] * 5


async def test_what_grows_again_waits_for_what_is_being_erased_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread erases slots that are given up and come back meanwhile: what is put there would be erased."""
    erase, is_erasing, may_go_on = slab.Slab.erase, threading.Event(), threading.Event()

    def late(one: slab.Slab, slots: list[int], how: Any) -> None:  # noqa: ANN401 - as it is called
        is_erasing.set()
        assert may_go_on.wait(30)
        erase(one, slots, how)

    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(8))
        with monkeypatch.context() as patch:
            patch.setattr(slab.Slab, "erase", late)
            forgetting = asyncio.ensure_future(tier.backend.forget(0, np.array([6, 7])))
            await asyncio.to_thread(is_erasing.wait)
            await tier.backend.resize(4)
            growing = asyncio.ensure_future(tier.backend.resize(tier.found.num_slots))
            await asyncio.wait({growing}, timeout=0.1)
            assert not growing.done()
            may_go_on.set()
            await asyncio.gather(growing, forgetting)
        assert await tier.write({6: 60, 7: 70}) == [Outcome.STORED] * 2
        assert await tier.verified({6: 60, 7: 70}) == [Outcome.HIT] * 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
async def test_other_models_make_room_where_a_quota_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As where the disk is full."""
    async with open_tier(tmp_path, model="b", capacity=16 * MIB) as tier:
        await tier.write(count_up(20))
    other, allocate = slab_of(tmp_path, "b"), os.posix_fallocate

    def limited(fd: int, offset: int, num_bytes: int) -> None:
        if other.exists():
            raise OSError(code, os.strerror(code))
        allocate(fd, offset, num_bytes)

    async with open_tier(tmp_path, model="a", capacity=16 * MIB) as tier:
        monkeypatch.setattr(os, "posix_fallocate", limited)
        assert await tier.write({0: 0}) == [Outcome.STORED]
        assert tier.backend.describe()["reclaimed_fingerprints"] == 1


async def test_a_tier_that_does_not_open_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again, for as long as it takes."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(3))
    with slab_of(tmp_path).open("ab") as slab:
        slab.write(b"to be cut off")
    cut = os.ftruncate

    def named(fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - of a number

    def fails(fd: int, length: int) -> None:
        if named(fd).endswith("slab"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        cut(fd, length)

    def open_slabs() -> list[str]:
        found = []
        for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers
            with contextlib.suppress(OSError):  # that of the listing
                found.append(named(int(fd)))
        return [each for each in found if str(tmp_path) in each]

    monkeypatch.setattr(os, "ftruncate", fails)
    for _ in range(3):
        with pytest.raises(ConfigurationError, match="Input/output error"):
            await open_tier(tmp_path).__aenter__()
    assert open_slabs() == []


async def test_what_is_erased_while_it_is_given_up_takes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header that a thread overwrites behind the new end would make the file longer again."""
    async with open_tier(tmp_path, capacity=16 * MIB) as tier:
        num_slots, runs, is_cut = tier.found.num_slots, slab._runs, threading.Event()  # noqa: SLF001 - between a look and a write
        await tier.write(count_up(num_slots))

        def late(slots: list[int], most: int) -> list[tuple[int, int]]:
            assert is_cut.wait(30)
            return list(runs(slots, most))

        monkeypatch.setattr(slab, "_runs", late)
        forgetting = asyncio.ensure_future(tier.backend.forget(0, np.array([num_slots - 1])))
        resizing = asyncio.ensure_future(tier.backend.resize(4))
        await until(lambda: slab_of(tmp_path).stat().st_size == 4 * STRIDE)
        is_cut.set()
        await asyncio.gather(forgetting, resizing)
        assert slab_of(tmp_path).stat().st_size == 4 * STRIDE
        assert ledger_of(tmp_path).stat().st_size == 4 * 64
        assert await tier.verified({3: 3}) == [Outcome.HIT]


@pytest.mark.parametrize("fails", [1, 2], ids=["slab", "ledger"])
async def test_what_a_shrink_that_failed_left_there_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    """And counts until then, once: what is written afterwards has room."""
    async with open_tier(tmp_path, capacity=16 * MIB) as tier:
        num_slots, cut, num_calls = tier.found.num_slots, os.ftruncate, count(1)

        def fail(fd: int, length: int) -> None:
            if next(num_calls) == fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            cut(fd, length)

        await tier.write(count_up(num_slots))
        used = disk_usage(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "ftruncate", fail)
            with pytest.raises(BackendUnavailableError, match="Input/output error"):
                await tier.backend.resize(4)
        await tier.backend.resize(4)
        assert disk_usage(tmp_path) < used - 8 * MIB
        for _ in range(2):
            await tier.backend.resize(num_slots)
            assert set(await tier.write(count_up(num_slots))) == {Outcome.STORED}
            await tier.backend.resize(4)


def _names_and_slots(num_slots: int) -> tuple[Names, NDArray[np.int64]]:
    names = np.random.default_rng(1).integers(1, 2**63, (num_slots, 4), dtype=np.uint64)
    return names, np.arange(num_slots)


async def test_a_directory_that_is_held_costs_no_descriptor(tmp_path: Path) -> None:
    """However often somebody tries to open it."""
    async with open_tier(tmp_path):
        before = descriptors_below(tmp_path)
        for _ in range(3):
            with pytest.raises(ConfigurationError, match="held by another NVMe tier"):
                async with open_tier(tmp_path):
                    pass
        assert descriptors_below(tmp_path) == before
        assert before


async def test_a_model_that_cannot_be_opened_costs_no_descriptor(tmp_path: Path) -> None:
    """What was opened before it is closed again."""
    (tmp_path / shape_of("b").fingerprint.hex() / "slab").mkdir(parents=True, mode=0o700)
    backend = backend_at(tmp_path)
    with open_context(shape_of("a"), shape_of("b")) as context:
        with pytest.raises(ConfigurationError, match="slab"):
            await backend.open(context)
        await backend.aclose()
    assert not descriptors_below(tmp_path)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSPC])
def test_a_filesystem_that_sets_no_room_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """One that cannot extends files without it; on one that is full no file grows."""

    def fail(_fd: int, _offset: int, _num_bytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    directory = Directory(tmp_path / "tier", 4 * MIB, [shape_of("a")])
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(100))
        file.flush()
        if number == errno.ENOSPC:
            with pytest.raises(OSError, match="No space"):
                directory.allocate(file.fileno(), 100, 900)
        else:
            directory.allocate(file.fileno(), 100, 900)
    assert (tmp_path / "file").stat().st_size == (100 if number == errno.ENOSPC else 1000)
    directory.held.close()


async def test_a_directory_that_cannot_grow_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full: what was there is, and no more is promised to other models."""

    def full(_fd: int, _offset: int, _num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(4))
        before = tier.backend.describe()
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(BackendUnavailableError, match="No space"):
                await tier.backend.resize(100 * tier.found.num_slots)
        now = tier.backend.describe()
        assert (now["num_slots"], now["ledger_bytes"]) == (before["num_slots"], before["ledger_bytes"])
        assert int(str(now["capacity_bytes"])) <= int(str(before["capacity_bytes"]))
        assert await tier.verified(count_up(4)) == [Outcome.HIT] * 4
        await tier.backend.resize(2 * tier.found.num_slots)
        assert tier.backend.describe()["num_slots"] == 2 * tier.found.num_slots


async def test_a_tier_that_could_not_grow_keeps_its_limit(tmp_path: Path, files_no_longer_than: FileLimit) -> None:
    """What a failed `resize` wanted is no room: other models still go where the tier's own blocks need theirs."""
    async with open_tier(tmp_path, "other", capacity=8 * MIB) as tier:
        await tier.write(count_up(tier.found.num_slots // 2))
    async with open_tier(tmp_path, capacity=8 * MIB) as tier:
        num_slots = tier.found.num_slots
        with (
            files_no_longer_than(ledger_of(tmp_path).stat().st_size),
            pytest.raises(BackendUnavailableError, match="File too large"),
        ):
            await tier.backend.resize(4 * num_slots)
        assert tier.backend.describe()["reclaimed_fingerprints"] == 0
        assert set(await tier.write(count_up(num_slots))) == {Outcome.STORED}
        assert disk_usage(tmp_path) <= 8 * MIB


def num_bytes_read() -> int:
    """Count the bytes that this process has read, from files and all else."""
    return int(Path("/proc/self/io").read_text().split()[1])


def descriptors_below(directory: Path) -> list[str]:
    """Name what of a directory this process has open: all it has open changes with every garbage collection."""
    opened = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            opened.append(str(descriptor.readlink()))
    return sorted(path for path in opened if path.startswith(str(directory)))
