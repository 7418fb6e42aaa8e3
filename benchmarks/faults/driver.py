"""What a tier's driver does, and the sixteen classes' view of blocks: numbers, each with bytes that only it has."""

import abc
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np


class NotApplicableError(Exception):
    """The design has nothing that this fault could hit; the message says why."""


@dataclass(frozen=True)
class Setting:
    """How a tier is opened.

    Attributes:
        folder: Where its files are to lie, and nothing else.
        weights: Of which weights of the one model: what an engine tells the tier of a checkpoint that was exchanged.
        room: How many blocks it may keep.
    """

    folder: pathlib.Path
    weights: str = "first weights"
    room: int = 64


class Driver(abc.ABC):
    """One tier, opened: the storage alone, with what stands between it and an engine's memory.

    Attributes:
        block_bytes: Of a block's content.
        header_bytes: What a file has in front of each block.
    """

    block_bytes: ClassVar[int] = 65536
    header_bytes: ClassVar[int] = 0

    @abc.abstractmethod
    def __init__(self, setting: Setting) -> None:
        """Open it."""

    @abc.abstractmethod
    def store(self, numbers: Sequence[int], tenant: str = "a") -> None:
        """Store blocks, and return when the tier has told that they are stored, or lost."""

    @abc.abstractmethod
    def load(self, number: int, tenant: str = "a", between: Callable[[], object] | None = None) -> bytes | None:
        """Return what an engine is given of a block; None where it is told to compute it.

        ``between`` is called when the tier has said that it has the block, and before it is read.

        Raises:
            TimeoutError: The engine would wait on.
        """

    @abc.abstractmethod
    def forget(self) -> None:
        """Drop what memory above the storage has, so that a load reads it."""

    def evict(self, number: int) -> None:
        """Have the tier itself drop a block; where it has no call for that, its file is deleted."""
        raise NotImplementedError

    def late(self, number: int, other: int) -> tuple[int, bytes]:
        """Load while the medium takes 2 s, with the least patience that can be set.

        Returns:
            Whose bytes the memory of the load must have in the end, and what it has: those of ``number`` if it came,
            else of ``other``, which was given that memory before the medium answered.
        """
        raise NotImplementedError

    def cancelled(self, number: int, other: int, release: Callable[[], object]) -> bytes:
        """Cancel a load that hangs, use its memory for block ``other``, release the medium; return what is in there."""
        raise NotApplicableError("a load is one blocking call")

    @abc.abstractmethod
    def close(self) -> None:
        """End it as its engine does."""


def content(number: int, num_bytes: int) -> bytes:
    """Return what a block holds: no other has any part of it."""
    return np.random.default_rng(number).bytes(num_bytes)


@dataclass(frozen=True)
class Place:
    """Where a block lies: its record begins at ``start`` in a file, its content ``header_bytes`` later."""

    path: pathlib.Path
    start: int
    num_bytes: int

    @property
    def is_whole_file(self) -> bool:
        """Whether the file has nothing else."""
        return self.start == 0 and self.path.stat().st_size < 2 * self.num_bytes


_PROBE_BYTES: Final = 64


def place_of(number: int, folder: pathlib.Path, driver: Driver) -> Place:
    """Find where a block lies by looking for its bytes.

    Raises:
        LookupError: Nowhere: it is no file's.
    """
    probe = content(number, driver.block_bytes)[:_PROBE_BYTES]
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (at := path.read_bytes().find(probe)) >= 0:
            return Place(path, at - driver.header_bytes, driver.header_bytes + driver.block_bytes)
    raise LookupError(f"block {number} is in no file under {folder}")
