"""Host memory for blocks: one slab of equal slots in a memfd, which other processes can attach.

Whoever holds a slot's lease or reservation may touch its bytes; the slab keeps no account of that. A worker process
maps the same pages by the file descriptor, so what one process gathers another can write to a disk.
"""

import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiered_kv.backend import Block
from tiered_kv.errors import ClosedError, ConfigurationError

PAGE_BYTES = 4096
PIECE_BYTES = 1 << 30
_HEADER_BYTES = 4096
_HEADERS_AT_ONCE = 64
_MADV_REMOVE = 9
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it

# The mmap module's own madvise() keeps the GIL, for a third of a second per GiB and more.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def slots_per_piece(stride_bytes: int, piece_bytes: int = PIECE_BYTES) -> int:
    """Count the slots that are page-locked together. No DMA may cross from one such piece to the next."""
    return max(1, piece_bytes // stride_bytes)


class HostSlab:
    """Numbered, page-aligned slots of host memory, all zeros at first.

    Attributes:
        num_slots: May be 0.
        stride_bytes: From one slot to the next; a multiple of 4096.
        payload_bytes: What a slot holds, at most the stride.
        name: Shown by the system in ``/proc/<pid>/maps``, and in logs.
        is_read_only: Whether it is another process's, and only read here. A page that is written all the same, or
            page-locked, is this process's own from then on: it shows nothing of what the other one stores.
        rows: ``(num_slots, stride_bytes // 8)`` int64 over the memory. It keeps the mapping alive: after `close` it is
            still safe to touch.
    """

    def __init__(
        self,
        num_slots: int,
        stride_bytes: int,
        payload_bytes: int,
        *,
        name: str = "slab",
        fd: int | None = None,
        is_read_only: bool = False,
    ) -> None:
        """Map the memory. The system gives pages when they are touched: `Device.pin` sees to that in the background.

        Args:
            num_slots: How many.
            stride_bytes: From one slot to the next.
            payload_bytes: What a slot holds.
            name: For people.
            fd: Of a slab of these sizes; it is duplicated and stays the caller's. None makes a new slab.
            is_read_only: See the attribute: ``fd`` cannot be written by.

        Raises:
            ConfigurationError: Sizes that cannot be, or ``fd`` is of another length.
        """
        if num_slots < 0 or stride_bytes < 1 or stride_bytes % PAGE_BYTES or not 0 < payload_bytes <= stride_bytes:
            raise ConfigurationError(
                f"a slab of {num_slots} slots every {stride_bytes} bytes for payloads of {payload_bytes} bytes "
                f"cannot be: the stride must be a multiple of {PAGE_BYTES} and hold the payload"
            )
        self.num_slots = num_slots
        self.stride_bytes = stride_bytes
        self.payload_bytes = payload_bytes
        self.name = name
        self.is_read_only = is_read_only
        self._fd = _new_memory(name, self.num_bytes) if fd is None else os.dup(fd)
        try:
            self._memory = _map(self._fd, self.num_bytes, is_read_only=is_read_only)
        except BaseException:
            os.close(self._fd)
            raise
        self.rows = _words_of(self._memory).view(num_slots, stride_bytes // 8)
        self._headers = _Headers()
        self._closed = False

    @classmethod
    def attach(
        cls,
        fd: int,
        num_slots: int,
        stride_bytes: int,
        payload_bytes: int,
        *,
        name: str = "slab",
        is_read_only: bool = False,
    ) -> "HostSlab":
        """Map another process's slab by its file descriptor, inherited or received over a socket.

        Args:
            fd: Duplicated; it stays the caller's.
            num_slots: As the other process made it, like all that follows.
            stride_bytes: From one slot to the next.
            payload_bytes: What a slot holds.
            name: For people.
            is_read_only: Whether ``fd`` cannot be written by.

        Raises:
            ConfigurationError: The memory has another length.
        """
        return cls(num_slots, stride_bytes, payload_bytes, name=name, fd=fd, is_read_only=is_read_only)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.stride_bytes

    @property
    def fd(self) -> int:
        """The file descriptor to hand to a worker process. It stays the slab's, and is closed by `close`."""
        return self._fd

    def payload(self, slot: int) -> memoryview:
        """Return the ``payload_bytes`` of a slot, writable."""
        return self.padded(slot)[: self.payload_bytes]

    def padded(self, slot: int) -> memoryview:
        """Return all ``stride_bytes`` of a slot, writable and page-aligned: for direct I/O."""
        if self._closed:
            raise ClosedError(f"the slab {self.name!r} is closed")
        if not 0 <= slot < self.num_slots:
            raise ConfigurationError(f"slot {slot} is not one of the {self.num_slots} of {self.name!r}")
        return self._memory[slot * self.stride_bytes : (slot + 1) * self.stride_bytes]

    @contextmanager
    def blocks(self, slots: Sequence[int] | NDArray[np.int64]) -> Iterator[list[Block]]:
        """Lend record buffers over ``slots`` for the length of an I/O call: each the slot and a header page.

        The headers hold whatever the last call left in them. They are lent again after the ``with`` block, so it must
        not end before the call that uses them has returned.
        """
        headers = self._headers.take(len(slots))
        try:
            yield [
                Block(header, self.padded(int(slot)), self.payload_bytes)
                for header, slot in zip(headers, slots, strict=True)
            ]
        finally:
            self._headers.give(headers)

    def give_back(self, start: int, stop: int) -> None:
        """Return the pages of some slots to the system, in every process: they read as zeros, and come when touched.

        Not for memory that is page-locked for a GPU, which would go on using the old pages. 1 GiB takes 0.4 s.
        """
        address, num_bytes = self.rows.data_ptr() + start * self.stride_bytes, (stop - start) * self.stride_bytes
        if num_bytes:
            _madvise(address, num_bytes, _MADV_REMOVE)

    def close(self) -> None:
        """Let go of the memory; a second time does nothing. It is unmapped when the last view of it is gone."""
        if self._closed:
            return
        self._closed = True
        os.close(self._fd)
        self._fd = -1
        self.rows = self.rows.new_empty(0, self.stride_bytes // 8)
        self._memory = memoryview(b"")


def touch(rows: Tensor) -> None:
    """Have the system allocate the pages of ``rows``, contiguous, whose bytes stay as they are. Releases the GIL.

    Untouched memory is ten times slower to write. Harmless beside transfers, and on kernels that cannot do it.
    """
    _madvise(rows.data_ptr(), rows.nbytes, _MADV_POPULATE_WRITE)


class _Headers:
    """Page-aligned header buffers, made when needed and kept for the next call: as many as were ever lent at once."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    def take(self, n: int) -> list[memoryview]:
        with self._lock:
            while len(self._free) < n:
                memory = memoryview(mmap.mmap(-1, _HEADERS_AT_ONCE * _HEADER_BYTES))
                self._free += [memory[at : at + _HEADER_BYTES] for at in range(0, len(memory), _HEADER_BYTES)]
            taken = self._free[len(self._free) - n :]
            del self._free[len(self._free) - n :]
            return taken

    def give(self, headers: list[memoryview]) -> None:
        with self._lock:
            self._free += headers


def _new_memory(name: str, num_bytes: int) -> int:
    fd = os.memfd_create(f"tiered_kv-{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    os.fchmod(fd, 0o600)  # else whoever has a descriptor that only reads opens it anew, and writes
    # Sealed: a process that shrank it would kill every other one by SIGBUS.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def _map(fd: int, num_bytes: int, *, is_read_only: bool) -> memoryview:
    """Map the memory. It is unmapped with its last view and never by force: a tensor over it does not hold it back."""
    if (found := os.fstat(fd).st_size) != num_bytes:
        raise ConfigurationError(f"the memory to attach has {found} bytes, {num_bytes} are expected")
    if not num_bytes:
        return memoryview(b"")
    # Private, and so writable though it need not be: torch knows no memory that cannot be written.
    return memoryview(mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE if is_read_only else mmap.MAP_SHARED))


@torch.inference_mode(mode=False)  # a cache opened under it is used outside of it too
def _words_of(memory: memoryview) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.int64) if len(memory) else torch.empty(0, dtype=torch.int64)
