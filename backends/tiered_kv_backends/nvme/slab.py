"""One file of records at a fixed stride, and the vectored calls that move them.

Reads and writes run in many threads at once; they keep no state but their own, and no slot is in two writes.
"""

import errno
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered_kv.media.backend import Block, Outcome, RecordShape
from tiered_kv.media.record import SIGNED_BYTES
from tiered_kv.system import files
from tiered_kv.values.layout import PAGE_BYTES
from tiered_kv_backends.nvme.ledger import cut

_MAX_CALL_BYTES = 8 << 20
"""Of one system call: longer ones are no faster and keep a load waiting behind a store."""
_MAX_HEADERS_BYTES = 256 << 10
"""Read at once to get the headers in it."""
_MANY_SLOTS = 64
"""Neighbours whose headers are not overwritten one by one. Fewer would cut the file into many extents."""
_PUNCHED, _ZEROED = 0x03, 0x10
"""Modes of fallocate(2): a range loses its place on the disk, or keeps it; it reads as zeros either way."""
Erase = bool | Literal["punch"]
"""How much of a record goes: its header, all of it, or its place on the disk with it."""
_MAX_CALL_BLOCKS = os.sysconf("SC_IOV_MAX") // 2  # a header and a payload each


class _Way(NamedTuple):
    call: Callable[[int, list[memoryview], int], int]
    whole: Outcome
    short: Outcome
    """Of a block that the call ends within: the file ends there, or the disk is full."""


_READ = _Way(lambda *args: files().preadv(*args), Outcome.HIT, Outcome.MISS)
_WRITE = _Way(lambda *args: files().pwritev(*args), Outcome.STORED, Outcome.FAILED)


@dataclass
class Moved:
    """What became of the blocks of one job: one outcome each, and the last error met, if any."""

    outcomes: list[Outcome]
    error: OSError | None = None


class Slab:
    """The slots of one KV group.

    Args:
        fd: Its file, which belongs to this object from now on.
        shape: The records.
        num_slots: How many there are to be. Slots of a longer file are cut off.
        may_cut: False of a file that is only read, which stays as it is.

    Attributes:
        num_allocated: The first so many slots have their place on the disk.
        is_full: Whether the disk had no room for more when it was last asked.
    """

    is_full = False

    def __init__(self, fd: int, shape: RecordShape, num_slots: int, *, may_cut: bool = True) -> None:
        self.shape = shape
        self.num_slots = num_slots
        self.call_blocks = max(1, min(_MAX_CALL_BYTES // shape.stride_bytes, _MAX_CALL_BLOCKS))
        self._fd = fd
        try:
            num_whole = files().fstat(fd).st_size // shape.stride_bytes
            self.num_allocated = min(num_whole, num_slots)
            if may_cut:
                cut(fd, self.num_allocated * shape.stride_bytes)
        except BaseException:  # nobody else has it yet
            files().close(fd)
            raise

    @property
    def is_removed(self) -> bool:
        """Whether somebody has deleted the file: what is written goes nowhere that a restart would look."""
        return not files().fstat(self._fd).st_nlink

    def grow(self, num_slots: int, allocate: Callable[[int, int, int], None]) -> None:
        """Give the first ``num_slots`` slots their place by ``allocate(fd, offset, num_bytes)``."""
        stride = self.shape.stride_bytes
        allocate(self._fd, self.num_allocated * stride, (num_slots - self.num_allocated) * stride)
        self.num_allocated, self.is_full = num_slots, False

    def resize(self, num_slots: int) -> int:
        """Have so many slots; those given up are in no call. Returns how many bytes that frees on the disk."""
        self.num_slots = num_slots
        num_freed = max(0, self.num_allocated - num_slots)
        if num_freed:
            files().ftruncate(self._fd, num_slots * self.shape.stride_bytes)
            self.num_allocated = num_slots  # not before: what could not be cut off has to be erased, or cut off later
        return num_freed * self.shape.stride_bytes

    def cut_off(self) -> None:
        """Have the file end where its last slot does that has its place."""
        cut(self._fd, self.num_allocated * self.shape.stride_bytes)

    def read(self, slots: list[int], into: Sequence[Block]) -> Moved:
        """Fill blocks from ascending slots: HIT, MISS where the file ends before, or FAILED each."""
        return self._move(_READ, slots, into)

    def write(self, slots: list[int], blocks: Sequence[Block]) -> Moved:
        """Write blocks to ascending slots: STORED or FAILED each, FAILED where a slot has no place on the disk."""
        num_here = bisect_left(slots, self.num_allocated)
        moved = self._move(_WRITE, slots[:num_here], blocks[:num_here])
        moved.outcomes += [Outcome.FAILED] * (len(slots) - num_here)
        return moved

    def erase(self, slots: list[int], erase: Erase) -> None:
        """Have the headers of records in ascending slots read as zeros, or whole records.

        Where many headers of neighbours go, the filesystem is asked to do it. Where it cannot, or cannot punch, zeros
        are written.
        """
        stride, num_bytes = self.shape.stride_bytes, self.shape.stride_bytes if erase else PAGE_BYTES
        zeros = Block.empty(min(num_bytes, _MAX_CALL_BYTES)).padded
        for first, end in _runs(slots[: bisect_left(slots, self.num_allocated)], len(slots)):
            is_asked = erase == "punch" or (not erase and end - first >= _MANY_SLOTS)
            mode = _PUNCHED if erase else _ZEROED
            if is_asked and files().fallocate(self._fd, mode, first * stride, (end - first) * stride):
                continue
            for slot in range(first, end):
                at, stop = slot * stride, slot * stride + num_bytes
                while at < stop:
                    at += files().pwrite(self._fd, zeros[: stop - at], at)

    def headers(self, slots: list[int]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Return the headers in ascending slots, ``(n, 512)``, zeros where there is none; and which could not be read.

        Those of short records are read with what lies between them: on any disk that takes less time.
        """
        stride = self.shape.stride_bytes
        most = max(1, _MAX_HEADERS_BYTES // stride)
        buffer = Block.empty(most * stride).padded
        records = np.frombuffer(buffer, np.uint8).reshape(most, stride)[:, :SIGNED_BYTES]
        parts, failed = [], []
        for first, end in _runs(slots, most):
            part = np.zeros((end - first, SIGNED_BYTES), np.uint8)
            if self._reads_whole(first * stride, buffer[: (end - first - 1) * stride + PAGE_BYTES]):
                part[:] = records[: end - first]
                failed += [False] * len(part)
            else:  # the file ends there, or one place is bad, which loses no other
                for slot in range(first, end):
                    is_whole = self._reads_whole(slot * stride, buffer[:PAGE_BYTES])
                    if is_whole:
                        part[slot - first] = records[0]
                    failed.append(is_whole is None)
            parts.append(part)
        return np.concatenate(parts), np.array(failed, np.bool_)

    def _reads_whole(self, offset: int, into: memoryview) -> bool | None:
        """Read, and say whether so much is there; None if the disk has failed to."""
        try:
            return files().preadv(self._fd, [into], offset) == len(into)
        except OSError:
            return None

    def sync(self) -> None:
        """Return when all that was written survives a loss of power."""
        files().fsync(self._fd)

    def close(self) -> None:
        """Close the file. No call may be running."""
        files().close(self._fd)

    def _move(self, way: _Way, slots: list[int], blocks: Sequence[Block]) -> Moved:
        """Move runs of neighbouring slots by one call each."""
        moved = Moved([])
        start = 0
        for end in range(1, len(slots) + 1):
            if end < len(slots) and slots[end] == slots[end - 1] + 1 and end - start < self.call_blocks:
                continue
            self._move_run(way, slots[start], blocks[start:end], moved)
            start = end
        return moved

    def _move_run(self, way: _Way, slot: int, blocks: Sequence[Block], moved: Moved) -> None:
        stride = self.shape.stride_bytes
        segments = [segment for block in blocks for segment in (block.header, block.padded)]
        try:
            num_whole = way.call(self._fd, segments, slot * stride) // stride
        except OSError:
            num_whole = 0  # which block it was shows when each goes alone
        moved.outcomes += [way.whole] * num_whole
        for i in range(num_whole, len(blocks)):
            try:
                is_whole = _move_block(way, self._fd, blocks[i], (slot + i) * stride)
                moved.outcomes.append(way.whole if is_whole else way.short)
            except OSError as error:
                moved.outcomes.append(Outcome.FAILED)
                moved.error = error


def _move_block(way: _Way, fd: int, block: Block, offset: int) -> bool:
    """Move one block by as many calls as it takes; False if it does not get to its end."""
    rest, num_left = [block.header, block.padded], len(block.header) + len(block.padded)
    while num_left:
        num_moved = way.call(fd, rest, offset)
        num_bytes = num_moved // PAGE_BYTES * PAGE_BYTES
        if not num_bytes:
            if way is _READ and files().fstat(fd).st_size >= offset + num_left:  # else the file ends there
                raise OSError(errno.EIO, f"{num_moved} of {num_left} bytes were read")
            return False
        offset, num_left = offset + num_bytes, num_left - num_bytes
        rest = [block.padded[len(block.padded) - num_left :]]  # of whole pages the first is the header
    return True


def _runs(ascending: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield the first slot and the end of each run of neighbours, at most so many long."""
    start = 0
    for end in range(1, len(ascending) + 1):
        if end == len(ascending) or ascending[end] != ascending[end - 1] + 1 or end - start == most:
            yield ascending[start], ascending[end - 1] + 1
            start = end
