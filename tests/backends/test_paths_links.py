"""Opening a file by a path that no symbolic link is part of."""

import os
from pathlib import Path

import pytest

from tiered_kv.media.backend import Block, Outcome
from tiered_kv.testing import GROUPS, block_key, make_block, open_backend
from tiered_kv_backends.paths import Opener
from tiered_kv_backends.shared_fs import files as shared_fs_files
from tiered_kv_backends.shared_fs.shared_fs_backend import SharedFSBackend

FLAGS = os.O_RDONLY | os.O_CLOEXEC


def test_a_link_anywhere_is_left_to_the_caller(tmp_path: Path) -> None:
    """A file is opened, one that is absent is said to be, and whatever has a link in its path is not followed."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_bytes(b"bytes")
    (tmp_path / "folder").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "link").symlink_to(tmp_path / "real" / "file")
    opener = Opener(FLAGS)
    root = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        file = opener.open("real/file", root)
        if file < 0:
            pytest.skip("no openat2 here: run on Linux 5.6 or newer, outside a sandbox that refuses it")
        assert os.read(file, 9) == b"bytes"
        os.close(file)
        assert [opener.open(name, root) for name in ("folder/file", "real/link", "real/file/file")] == [-1] * 3
        for name in ("real/absent", "absent/file"):
            with pytest.raises(FileNotFoundError):
                opener.open(name, root)
    finally:
        os.close(root)


async def test_blocks_are_read_without_the_call_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system does not know it, folder by folder."""
    opener = Opener(FLAGS)
    opener.is_there = False
    monkeypatch.setattr(shared_fs_files, "_OPENERS", {0: opener, os.O_DIRECT: opener})
    key, absent = block_key(1), block_key(2)
    backend = SharedFSBackend({"path": tmp_path / "kv", "capacity": "32MiB"})
    async with open_backend(backend):
        block = make_block(bytes(GROUPS[0].payload_bytes), key)
        assert await backend.write([key], [block]) == [Outcome.STORED]
        into = [Block.empty(GROUPS[0].payload_bytes) for _ in range(2)]
        assert await backend.read([key, absent], into) == [Outcome.HIT, Outcome.MISS]
        assert bytes(into[0]) == bytes(block)
