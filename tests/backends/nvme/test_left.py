"""Directories that NVMe tiers have left: they go whole, and nothing of others does."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.descriptors import descriptors_left
from tests.support.nvme_tier import MIB, count_up, disk_usage, open_tier
from tiered_kv.media.backend import Outcome
from tiered_kv.system import Files
from tiered_kv_backends.nvme import NVMeBackend

NAME = "0123456789abcdef" * 2


def left_behind(path: Path) -> Path:
    """Make a directory as an NVMe tier leaves it."""
    made = path / NAME
    (made / ("ab" * 32)).mkdir(parents=True, mode=0o700)
    made.chmod(0o700)
    (made / "holder").write_text("1\n")
    (made / ("ab" * 32) / "slab").write_bytes(b"x" * 4096)
    (made / ("ef" * 32)).mkdir()
    for name in ("probe", "member", "member.new"):
        (made / name).write_bytes(b"x")
    return made


def test_a_directory_that_a_tier_has_left_goes_whole(tmp_path: Path) -> None:
    """And one that is gone already is gone."""
    made = left_behind(tmp_path)
    assert NVMeBackend.has_left(made)
    assert NVMeBackend.delete_left(made)
    assert not made.exists()
    assert NVMeBackend.delete_left(made)


async def test_a_directory_that_a_tier_has_left_is_cut(tmp_path: Path) -> None:
    """To what it may take at most; the blocks that have a place still are found in it."""
    async with open_tier(tmp_path / NAME) as tier:
        await tier.write(count_up(40))
    assert NVMeBackend.cut_left(tmp_path / NAME, 4 * MIB)
    async with open_tier(tmp_path / NAME) as tier:
        assert tier.recovered(40) == count_up(40)
    assert NVMeBackend.cut_left(tmp_path / NAME, MIB)
    assert MIB // 2 < disk_usage(tmp_path / NAME) <= MIB
    async with open_tier(tmp_path / NAME) as tier:
        there = tier.recovered(40)
        assert len(there) > 10
        assert set(await tier.verified(there)) == {Outcome.HIT}
    for _ in range(2):
        assert NVMeBackend.cut_left(tmp_path / NAME, 0)
    async with open_tier(tmp_path / NAME) as tier:
        assert tier.recovered(40) == {}
    assert NVMeBackend.cut_left(tmp_path / "gone", 0)


def test_what_cannot_be_deleted_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another time it may: what is there yet is a tier's still."""
    made = left_behind(tmp_path)

    def refuse(_: Files, name: str, *, dir_fd: int) -> None:
        raise PermissionError(errno.EPERM, "not now", name)

    with monkeypatch.context() as patched:
        patched.setattr(Files, "unlink", refuse)
        with pytest.raises(PermissionError, match="not now"):
            NVMeBackend.delete_left(made)
    assert NVMeBackend.has_left(made)
    assert NVMeBackend.delete_left(made)


@pytest.mark.parametrize("num_left", [0, 1, 2])
def test_what_cannot_be_looked_into_says_so(tmp_path: Path, num_left: int) -> None:
    """For want of descriptors nobody knows whether it may go: that is not to say that it is in use."""
    made = left_behind(tmp_path)
    with descriptors_left(num_left), pytest.raises(OSError, match="Too many open files"):
        NVMeBackend.delete_left(made)
    assert NVMeBackend.delete_left(made)


def _foreign_file(made: Path) -> None:
    (made / "notes.txt").write_text("mine")


def _foreign_folder(made: Path) -> None:
    (made / "results").mkdir()


def _folder_for_a_file(made: Path) -> None:
    (made / "probe").unlink()
    (made / "probe").mkdir()


def _folder_that_is_called_alike(made: Path) -> None:
    (made / ("cd" * 32)).mkdir()
    (made / ("cd" * 32) / "layer.tar").write_text("mine")


def _foreign_file_beside_blocks(made: Path) -> None:
    (made / ("ab" * 32) / "notes.txt").write_text("mine")


def _folder_beside_blocks(made: Path) -> None:
    (made / ("ab" * 32) / "journal").mkdir()


def _link_for_a_folder(made: Path) -> None:
    (made.parent / "elsewhere").mkdir()
    (made / ("cd" * 32)).symlink_to(made.parent / "elsewhere")


def _no_holder(made: Path) -> None:
    (made / "holder").unlink()


def _link_for_the_holder(made: Path) -> None:
    (made / "holder").unlink()
    (made / "holder").symlink_to(made / ("ab" * 32) / "slab")


def _for_all(made: Path) -> None:
    made.chmod(0o777)


@pytest.mark.parametrize(
    "spoil",
    [
        _foreign_file,
        _foreign_folder,
        _folder_for_a_file,
        _folder_that_is_called_alike,
        _foreign_file_beside_blocks,
        _folder_beside_blocks,
        _link_for_a_folder,
        _no_holder,
        _link_for_the_holder,
        _for_all,
    ],
)
def test_a_directory_of_others_never_goes(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    """Whatever it is called: with anything in it that no tier has made nothing of it is deleted."""
    made = left_behind(tmp_path)
    spoil(made)
    before = sorted(tmp_path.rglob("*"))
    assert not NVMeBackend.delete_left(made)
    assert not NVMeBackend.cut_left(made, 0)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_that_a_tier_has_open_stays(tmp_path: Path) -> None:
    """Another server's, or an engine's own: it is locked."""
    made = left_behind(tmp_path)
    fd = os.open(made, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert not NVMeBackend.delete_left(made)
    assert not NVMeBackend.cut_left(made, 0)
    os.close(fd)
    assert NVMeBackend.delete_left(made)


def test_a_link_is_no_directory(tmp_path: Path) -> None:
    """What a link leads to is kept, and so is the link."""
    made = left_behind(tmp_path)
    elsewhere = made.rename(tmp_path / "elsewhere")
    made.symlink_to(elsewhere)
    assert not NVMeBackend.has_left(made)
    assert not NVMeBackend.delete_left(made)
    assert (elsewhere / "holder").exists()
