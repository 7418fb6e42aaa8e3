"""What a process may write to a shared directory: bytes taken from the ledger that all share, if it has room."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from tiered_kv.backend import Block
from tiered_kv.errors import BackendUnavailableError
from tiered_kv_backends import shared_fs_files as files
from tiered_kv_backends.shared_fs_ledger import ALLOWANCE_S, Ledger
from tiered_kv_backends.shared_fs_threads import Threads, text_of

_FREE_SPACE_AGE_S: Final = 1.0
_TAKEN_FRACTION, _TAKEN_BYTES = 1 / 1024, 256 << 20
"""Of the capacity, and at most: what is taken from the ledger at once, ahead of what is written now."""


class Room:
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
    """

    def __init__(
        self,
        root: str,
        ledger: Ledger,
        capacity: int,
        min_free_fraction: float,
        threads: Threads,
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
        self.unwritten = 0
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
        needed = sum(block.num_bytes for block in blocks)
        async with self._taking:
            if self._clock() >= self._allowance_until:
                self.unwritten -= self._allowance
                self._allowance = 0
            if self._allowance < needed:
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
        """What was taken for a block is in a file, or can be used again."""
        if is_written:
            self.unwritten -= num_bytes
        else:
            self._allowance += num_bytes

    def forget_free(self) -> None:
        """Ask the filesystem again how much is free: a sweep has made room."""
        self._free_bytes_until = float("-inf")

    def return_all(self) -> None:
        """Give back what is not used. In a thread."""
        with contextlib.suppress(OSError):  # the next sweep finds that it is not used
            self._ledger.give_back(self._allowance, self.unwritten - self._allowance)

    async def _take(self, wanted: int) -> None:
        before = self.unwritten
        self.unwritten += wanted  # first: a sweep may begin meanwhile
        try:
            taken = await self._threads.run(self._ledger.take, wanted, before) or 0
        except OSError as error:
            self.unwritten -= wanted
            raise BackendUnavailableError(f"{self._root}: {text_of(error)}") from error
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
            return False
        self._free_bytes -= num_bytes
        return True
