"""Direct I/O in eight threads, a call a block: what the disk gives."""

import mmap
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from _peer import Peer, Row, Space
from nvme import bare_loop


class Bare(Peer):
    """One file, written where it was written before."""

    says = "direct, where the filesystem can"

    def __init__(self, folder: Path, space: Space) -> None:
        """Make the file."""
        memory = memoryview(mmap.mmap(-1, space.num_bytes))
        self._rows = np.frombuffer(memory, np.uint8).reshape(space.num_blocks, -1)
        views = [(memory[at : at + space.block_bytes],) for at in range(0, space.num_bytes, space.block_bytes)]
        self._stack = ExitStack()
        self._move = self._stack.enter_context(bare_loop(folder / "bare", views, space.block_bytes))

    def fill(self, contents: Iterable[Row], requests: Sequence[range]) -> None:
        """Fill the memory; the file is written over."""
        for row, content in zip(self._rows, contents, strict=True):
            row[:] = content

    def store(self) -> None:
        """Write."""
        self._move(True)  # noqa: FBT003 - the only argument

    def blank(self) -> None:
        """Fill the memory with zeros."""
        self._rows[:] = 0

    def load(self) -> None:
        """Read."""
        self._move(False)  # noqa: FBT003 - the only argument

    def blocks(self) -> Iterable[Row]:
        """Give the rows of the memory."""
        return self._rows

    def close(self) -> None:
        """Delete the file."""
        self._stack.close()


PEERS = {"bare": Bare}
