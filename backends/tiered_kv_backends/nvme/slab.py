"""One file of records at a fixed stride, and the vectored calls that move them.

Reads and writes run in many threads at once; they keep no state but their own, and no slot is in two of them.
"""

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tiered_kv.backend import Block, Outcome, RecordShape
from tiered_kv.layout import PAGE_BYTES

_MAX_CALL_BYTES = 8 << 20
"""Of one system call: longer ones are no faster and keep a load waiting behind a store."""
_MAX_CALL_BLOCKS = os.sysconf("SC_IOV_MAX") // 2  # a header and a payload each


class _Way(NamedTuple):
    call: Callable[[int, list[memoryview], int], int]
    whole: Outcome
    short: Outcome
    """Of a block that the call ends within: the file ends there, or the disk is full."""


_READ = _Way(os.preadv, Outcome.HIT, Outcome.MISS)
_WRITE = _Way(os.pwritev, Outcome.STORED, Outcome.FAILED)


@dataclass
class Moved:
    """What became of the blocks of one job: one outcome each, and the last error met, if any."""

    outcomes: list[Outcome]
    error: OSError | None = None


class Slab:
    """The slots of one KV group.

    Args:
        path: Its file; created if need be.
        shape: The records.
        num_slots: How many there are to be. Slots of a longer file are cut off.
        flags: For `os.open`, e.g. ``os.O_DIRECT``.

    Attributes:
        num_allocated: The first so many slots have their place on the disk.
    """

    def __init__(self, path: Path, shape: RecordShape, num_slots: int, flags: int) -> None:
        self.shape = shape
        self.num_slots = num_slots
        self.call_blocks = max(1, min(_MAX_CALL_BYTES // shape.stride_bytes, _MAX_CALL_BLOCKS))
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
        num_whole = os.fstat(self._fd).st_size // shape.stride_bytes
        self.num_allocated = min(num_whole, num_slots)
        os.ftruncate(self._fd, self.num_allocated * shape.stride_bytes)

    def grow(self, num_slots: int, allocate: Callable[[int, int, int], None]) -> None:
        """Give the first ``num_slots`` slots their place by ``allocate(fd, offset, num_bytes)``."""
        stride = self.shape.stride_bytes
        allocate(self._fd, self.num_allocated * stride, (num_slots - self.num_allocated) * stride)
        self.num_allocated = num_slots

    def resize(self, num_slots: int) -> None:
        """Have so many slots; those given up are in no call, and free on the disk when this returns."""
        self.num_slots = num_slots
        if self.num_allocated > num_slots:
            self.num_allocated = num_slots
            os.ftruncate(self._fd, num_slots * self.shape.stride_bytes)

    def read(self, slots: list[int], into: Sequence[Block]) -> Moved:
        """Fill blocks from ascending slots: HIT, MISS where the file ends before, or FAILED each."""
        return self._move(_READ, slots, into)

    def write(self, slots: list[int], blocks: Sequence[Block]) -> Moved:
        """Write blocks to ascending slots: STORED or FAILED each, FAILED where a slot has no place on the disk."""
        num_here = bisect_left(slots, self.num_allocated)
        moved = self._move(_WRITE, slots[:num_here], blocks[:num_here])
        moved.outcomes += [Outcome.FAILED] * (len(slots) - num_here)
        return moved

    def sync(self) -> None:
        """Return when all that was written survives a loss of power."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file. No call may be running."""
        os.close(self._fd)

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
        num_bytes = way.call(fd, rest, offset)
        if num_bytes == 0 or num_bytes % PAGE_BYTES:
            return False
        offset, num_left = offset + num_bytes, num_left - num_bytes
        rest = [block.padded[len(block.padded) - num_left :]]  # of whole pages the first is the header
    return True


def probe_direct_io(folder: Path, mode: Literal["auto", "always", "never"]) -> tuple[int, str]:
    """Find out by a page written and read back whether ``folder`` has O_DIRECT.

    Returns:
        Flags for `os.open`, and why there are none; empty if there are.
    """
    if mode == "never":
        return 0, "direct='never'"
    page = Block.empty(PAGE_BYTES).padded
    page[:] = bytes(range(256)) * (PAGE_BYTES // 256)
    path = folder / "probe"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError as error:
        path.unlink(missing_ok=True)
        return 0, f"open: {error.strerror}"
    try:
        back = Block.empty(PAGE_BYTES).padded
        if os.pwritev(fd, [page], 0) == os.preadv(fd, [back], 0) == PAGE_BYTES and back == page:
            return os.O_DIRECT, ""
    except OSError as error:
        return 0, f"a page written and read: {error.strerror}"
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)
    return 0, "a page written was not read back"
