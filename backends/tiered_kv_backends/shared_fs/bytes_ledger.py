"""How many bytes may still be written to a shared directory, for all processes together: a number in a file.

Who writes takes the bytes from the ledger first, so that what is there never exceeds the capacity, however many write
and whether anyone sweeps or not. Deleting gives nothing back: a sweep counts what is there, and sets the number right.
Bytes that were taken and perhaps not yet written when a sweep began are counted on top, whatever it found of them; so
the number is never too low. Where it is not known, nothing is written.

The file is one line, a checksum and JSON, changed under flock(2) for some microseconds. Where who has it locked was
stopped, another file takes its place: what is written to the old one from then on counts for nobody, who writes it
included.

What a process may write to a shared directory: bytes taken from the ledger that all share, if it has room.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import math
import mmap
import os
import random
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, TypeAdapter, ValidationError

from tiered_kv.media.backend import Block
from tiered_kv.values.errors import BackendUnavailableError
from tiered_kv.values.log import log
from tiered_kv_backends.shared_fs import files
from tiered_kv_backends.shared_fs.files import FileThreads, check_mounted, open_own, text_of, unless

LEDGER_NAME = "ledger"
_NEXT_NAME = f"{LEDGER_NAME}.new"
ALLOWANCE_S = 60.0
"""For how long bytes taken may lie unused, before they must be taken anew."""

_DEAD_NS = 600 * 10**9
"""Age at which a process that has neither taken nor returned anything since has nothing unwritten any more."""
_LOCK_S, _PAUSE_S = 2.0, 0.01
"""How long others may keep it locked: they need microseconds, unless their machine has stopped them. The longest pause
between two tries; chance chooses each, so that of many who wait none is always too late."""
_STOPPED_NS = 60 * 10**9
"""Age of what was written last at which who keeps it locked is taken to have been stopped."""
_MOST_BYTES = 1 << 20
"""Of the file: of some 20,000 processes."""
_PART_BYTES = 1 << 14
"""Read at once: few processes' lines are longer."""


_Count = Annotated[int, Field(strict=True, gt=-(2**63), lt=2**63)]


@dataclass(frozen=True)
class LedgerCounts:
    """What a directory's ledger says.

    Attributes:
        total: Bytes there at most, everything taken included.
        num_sweeps: Sweeps that have set ``total`` right.
        swept_ns: Wall clock of the last one.
        writers: Of each process that writes, the bytes it has taken and perhaps not written, and when it last said so.
    """

    total: _Count = 0
    num_sweeps: _Count = 0
    swept_ns: _Count = 0
    writers: dict[str, tuple[_Count, _Count]] = field(default_factory=dict)


_BOOKS = TypeAdapter(LedgerCounts)


class ByteLedger:
    """The ledger of a directory's bytes, as one process uses it. Each call may be in a thread of its own.

    Args:
        root: The directory.
        capacity: Bytes that all processes together may have there.
        wall_clock_ns: What entries are dated with.
        timeout_s: Of the tier: no call waits for others longer than a part of that.
    """

    def __init__(self, root: str, capacity: int, wall_clock_ns: Callable[[], int], timeout_s: float = math.inf) -> None:
        self._root = root
        self._path = Path(root, LEDGER_NAME)
        self._capacity = capacity
        self._wall_clock_ns = wall_clock_ns
        self._timeout_s = timeout_s
        self._writer = uuid.uuid4().hex[:16]
        self.num_sweeps = 0
        """When bytes were last taken, or a sweep was found to be done."""

    def create(self, *, is_empty: bool) -> None:
        """Make the file, if there is none. Of a directory that is not empty nothing is known until it is swept.

        Raises:
            OSError: It cannot be made or locked; `BlockingIOError`: others have it locked.
        """
        with self._locked(os.O_CREAT) as file:
            if is_empty and not _bytes_of(file):
                _write(file, LedgerCounts(swept_ns=self._wall_clock_ns()))

    def read(self) -> LedgerCounts | None:
        """Return what it says now; None if nothing can be known.

        Raises:
            OSError: The filesystem fails.
        """
        try:
            with self._locked() as file:
                return _read(file)
        except (BlockingIOError, FileNotFoundError):
            check_mounted(self._root)
            return None

    def take(self, num_bytes: int, unwritten: int) -> int | None:
        """Take up to ``num_bytes``.

        Args:
            num_bytes: Wanted.
            unwritten: Taken before by this process, and perhaps not written.

        Returns:
            How many it is; None if nothing can be known now.

        Raises:
            OSError: The filesystem fails, or is not mounted; `BlockingIOError`: others have it locked.
        """
        try:
            with self._locked() as file:
                if (books := _read(file)) is None:
                    return None
                taken = max(0, min(num_bytes, self._capacity - books.total))
                self._put(file, books, taken, unwritten + taken)
                self.num_sweeps = books.num_sweeps
                return taken
        except FileNotFoundError:
            check_mounted(self._root)
            return None

    def give_back(self, num_bytes: int, unwritten: int) -> None:
        """Return bytes that were not used; ``unwritten`` are still to come.

        Raises:
            OSError: The filesystem fails.
        """
        with contextlib.suppress(BlockingIOError, FileNotFoundError), self._locked() as file:
            if (books := _read(file)) is not None:
                self._put(file, books, -num_bytes, unwritten)

    def begin_sweep(self, unwritten: Callable[[], int]) -> LedgerCounts:
        """Return what it says before anything is counted, without those who are dead.

        Args:
            unwritten: Says what this process has taken, or may be taking, and has perhaps not written.

        Raises:
            OSError: The filesystem fails, and not for want of room; `BlockingIOError`: others have it locked.
        """
        with self._locked(os.O_CREAT) as file:
            books = _read(file)
            if books is None:
                books = LedgerCounts(total=self._capacity)  # full, as long as nobody knows
            now_ns = self._wall_clock_ns()
            entries = books.writers | {self._writer: (unwritten(), now_ns)}
            books = replace(books, writers={k: v for k, v in entries.items() if v[0] and v[1] > now_ns - _DEAD_NS})
            with unless(files.FULL):  # there is no room, which the sweep is to make
                _write(file, books)
            return books

    def end_sweep(self, begun: LedgerCounts, num_bytes: int) -> None:
        """Set right what is there, unless another sweep has: ``num_bytes`` were found and not deleted since ``begun``.

        Raises:
            OSError: The filesystem fails, and not for want of room; `BlockingIOError`: others have it locked.
        """
        with self._locked() as file:
            if (books := _read(file)) is None or books.num_sweeps != begun.num_sweeps:
                return  # what was taken since is not to be told then
            unwritten = sum(each for each, _ in begun.writers.values())
            taken_since = books.total - begun.total
            total = num_bytes + unwritten + taken_since
            with unless(files.FULL):  # some have room a while after files are gone: the next sweep sets it right
                _write(
                    file, replace(books, total=total, num_sweeps=books.num_sweeps + 1, swept_ns=self._wall_clock_ns())
                )

    def _put(self, file: int, books: LedgerCounts, taken: int, unwritten: int) -> None:
        entry = {self._writer: (unwritten, self._wall_clock_ns())}
        _write(file, replace(books, total=books.total + taken, writers=books.writers | entry))

    @contextlib.contextmanager
    def _locked(self, flags: int = 0) -> Iterator[int]:
        """Yield the file, locked.

        Raises:
            BlockingIOError: Others keep it locked, or have another in its place by now: nothing was written.
            OSError: The filesystem fails, or knows no locks.
        """
        file = self._lock(flags)
        try:
            yield file
            if not self._is_in_place(file):
                raise self._blocked()
        finally:
            os.close(file)

    def _lock(self, flags: int) -> int:
        until = time.monotonic() + min(_LOCK_S, self._timeout_s / 4)
        while True:
            with contextlib.ExitStack() as opened:
                file = open_own(self._root, LEDGER_NAME, flags)
                opened.callback(os.close, file)
                if not (is_ours := try_lock(file) and self._is_in_place(file)) and time.monotonic() > until:
                    return self._replaced(file)
                if is_ours:
                    opened.pop_all()
                    return file
            time.sleep(random.uniform(0, _PAUSE_S))  # noqa: S311 - no secret; in a thread

    def _replaced(self, stopped: int) -> int:
        """Put a file, locked, in the place of one that a process keeps locked which was stopped.

        In its place first, and then filled: until it is nothing is known, and what is written to the other one before
        is read, if who writes it does not find it replaced.
        """
        if os.fstat(stopped).st_mtime_ns > self._wall_clock_ns() - _STOPPED_NS:
            raise self._blocked()
        with contextlib.ExitStack() as opened:
            file = open_own(self._root, _NEXT_NAME, os.O_CREAT)
            opened.callback(os.close, file)
            if not (try_lock(file) and self._is_in_place(stopped)):
                raise self._blocked()  # others are at it, or have been
            Path(self._root, _NEXT_NAME).rename(self._path)
            os.pwrite(file, _bytes_of(stopped), 0)
            log("warning", "shared_fs.ledger_replaced", path=self._root)
            opened.pop_all()
            return file

    def _is_in_place(self, file: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file), self._path.stat())
        return False

    def _blocked(self) -> BlockingIOError:
        return BlockingIOError(errno.EAGAIN, "others keep it locked", str(self._path))


def try_lock(file: int) -> bool:
    """Say whether nobody else has a file locked: it is ours until it is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(file: int) -> LedgerCounts | None:
    line, _, _ = _bytes_of(file).partition(b"\n")
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text) or not text:
        return None
    try:
        return _BOOKS.validate_json(text)
    except ValidationError:  # whoever may write here may have made a checksum too
        return None


def _bytes_of(file: int) -> bytes:
    """Read a file past the page cache, if the filesystem can: that of a FUSE client may be old, lock or not."""
    part, read, num_bytes = mmap.mmap(-1, _PART_BYTES), b"", _PART_BYTES
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_DIRECT)
        try:
            while num_bytes == _PART_BYTES and len(read) < _MOST_BYTES:
                num_bytes = os.preadv(file, [part], len(read))
                read += part[:num_bytes]
        finally:
            fcntl.fcntl(file, fcntl.F_SETFL, 0)
    except OSError as error:
        if error.errno not in files.NOT_DIRECT:
            raise
        return os.pread(file, _MOST_BYTES, 0)
    return read


def _write(file: int, books: LedgerCounts) -> None:
    text = json.dumps(asdict(books)).encode()
    line = b"%08x %b\n" % (zlib.crc32(text), text)
    if os.pwrite(file, line, 0) == len(line):  # if not, it is found to be broken
        os.ftruncate(file, len(line))


_FREE_SPACE_AGE_S: Final = 1.0
_TAKEN_FRACTION, _TAKEN_BYTES = 1 / 1024, 256 << 20
"""Of the capacity, and at most: what is taken from the ledger at once, ahead of what is written now."""


class DirectoryRoom:
    """Takes bytes for what is to be written. For the event loop, but for `unwritten`, which any thread may read.

    Args:
        root: The directory.
        ledger: Of it.
        capacity: Of the tier, in bytes.
        min_free_fraction: Part of the filesystem that is left free.
        threads: Where files are touched.
        clock: Seconds, monotonic.

    Attributes:
        unwritten: Bytes taken or being taken from the ledger, and not in a file.
        refused_bytes: What calls wanted for which too little was free, since who makes room took note of that.
    """

    def __init__(
        self,
        root: str,
        ledger: ByteLedger,
        capacity: int,
        min_free_fraction: float,
        threads: FileThreads,
        clock: Callable[[], float],
    ) -> None:
        self._root = root
        self._ledger = ledger
        self._capacity = capacity
        self._min_free_fraction = min_free_fraction
        self._threads = threads
        self._clock = clock
        self._taking = asyncio.Lock()
        self._allowance, self._allowance_until = 0, float("-inf")
        self._num_blocked = 0  # calls that others kept the ledger from
        self.unwritten = 0
        self.refused_bytes = set[int]()
        self._free_bytes, self._free_bytes_until = 0.0, float("-inf")

    async def take(self, blocks: Sequence[Block], on_taken: Callable[[], object]) -> int:
        """Take room for as many of the leading blocks as there is; return how many that is.

        Args:
            blocks: To be written.
            on_taken: Called when more was taken from the ledger.

        Raises:
            BackendUnavailableError: The filesystem fails.
        """
        if not await self._is_free(blocks):
            return 0
        needed, num_blocked = sum(block.num_bytes for block in blocks), self._num_blocked
        async with self._taking:
            if self._clock() >= self._allowance_until:
                self.unwritten -= self._allowance
                self._allowance = 0
            if self._allowance < needed and num_blocked == self._num_blocked:  # else it has waited as long behind one
                ahead = min(int(self._capacity * _TAKEN_FRACTION), _TAKEN_BYTES)
                await self._take(max(needed, ahead) - self._allowance)
                on_taken()
            num_blocks = 0
            for block in blocks:
                if block.num_bytes > self._allowance:
                    break
                self._allowance -= block.num_bytes
                num_blocks += 1
        return num_blocks

    def settle(self, num_bytes: int, *, is_written: bool) -> None:
        """What was taken for a block is in a file, or in nobody's books any more; or it can be used again."""
        if is_written:
            self.unwritten -= num_bytes
        else:
            self._allowance += num_bytes

    def forget_free(self) -> None:
        """Ask the filesystem again how much is free: a sweep has made room."""
        self._free_bytes_until = float("-inf")

    def return_all(self) -> None:
        """Give back what is not used. In a thread."""
        # What has lain too long may be in the number no more: others' sweeps take it for that of a dead process.
        unused = self._allowance if self._clock() < self._allowance_until else 0
        with contextlib.suppress(OSError):  # the next sweep finds that it is not used
            self._ledger.give_back(unused, self.unwritten - self._allowance)

    async def _take(self, wanted: int) -> None:
        before = self.unwritten
        self.unwritten += wanted  # first: a sweep may begin meanwhile
        try:
            taken = await self._threads.run(self._ledger.take, wanted, before) or 0
        except BlockingIOError:
            taken, self._num_blocked = 0, self._num_blocked + 1
        except BaseException as error:  # cancelled too: what is taken all the same the next sweep finds unused
            self.unwritten -= wanted
            if isinstance(error, OSError):
                raise BackendUnavailableError(f"{self._root}: {text_of(error)}") from error
            raise
        self.unwritten -= wanted - taken
        self._allowance += taken
        self._allowance_until = self._clock() + ALLOWANCE_S

    async def _is_free(self, blocks: Sequence[Block]) -> bool:
        """Say whether the filesystem has room above what is to be left free; asks at most once a second."""
        if self._clock() >= self._free_bytes_until:
            try:
                self._free_bytes = await self._threads.run(files.free_bytes, self._root, self._min_free_fraction)
            except OSError as error:
                raise BackendUnavailableError(f"{self._root}: {text_of(error)}") from error
            self._free_bytes_until = self._clock() + _FREE_SPACE_AGE_S
        num_bytes = sum(block.num_bytes for block in blocks)
        if num_bytes > self._free_bytes:
            self.refused_bytes.add(num_bytes)
            return False
        self._free_bytes -= num_bytes
        return True
