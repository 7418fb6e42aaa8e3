"""Getting a slab's memory ready in the background: allocated page by page, and page-locked where a GPU will reach it.

Page-locking hundreds of GiB takes minutes and may fail half-way, and serving need not wait for either: a slab is right
from the start, only slower.
"""

import enum
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tiered_kv.events import Emit, HostMemoryPageable, HostMemoryReady, MemoryPageLocked
from tiered_kv.memory.host import PIECE_BYTES, HostSlab, slots_per_piece, touch
from tiered_kv.memory.numa import prefer_node

_PAUSE_S = 0.1
_TOUCH_BYTES = 2 << 20
"""Touched at once: about 1 ms, in which nobody in the process can map or unmap memory, the event loop included."""


class PageLockState(enum.Enum):
    """What a copy to or from the slab can count on."""

    PREPARING = "preparing"
    """Some pieces are not touched or not page-locked yet."""
    LOCKED = "locked"
    """All of it is page-locked."""
    PAGEABLE = "pageable"
    """All there is to come has come, and not all of it is page-locked: by design on a CPU, an event on a GPU."""


class TryAgainError(Exception):
    """What page-locking raises where only the moment is wrong."""


def ignore(_: object) -> None:
    """Tell nobody."""


class PageLocking:
    """The preparation of one slab, by a daemon thread of its own, in pieces of whole slots and 1 GiB at most.

    Attributes:
        state: Where it stands.
        reason: Why it is pageable; empty otherwise.
        ready_bytes: Bytes touched so far.
        page_locked_bytes: Bytes page-locked so far.
        num_bytes: Bytes in all.
        is_slow: It is pageable although a GPU copies from it.
    """

    def __init__(
        self,
        slab: HostSlab,
        *,
        lock: Callable[[int, int], None] | None = None,
        unlock: Callable[[int], None] | None = None,
        reason: str = "",
        is_wanted: bool = False,
        node: int | None = None,
        emit: Emit = ignore,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Start it.

        Args:
            slab: Its mapping lives until this is closed. One that is only read is neither touched nor page-locked.
            lock: Page-locks ``(address, num_bytes)`` or raises, `TryAgainError` to be called again in a while; None
                leaves the memory pageable.
            unlock: Undoes it for an address.
            reason: Why ``lock`` is None.
            is_wanted: Whether that is a pity: a GPU will copy from this memory.
            node: The NUMA node to take the memory from, or None.
            emit: Called in the thread of this.
            piece_bytes: Locked at once, but no less than a slot.
        """
        self.state = PageLockState.PREPARING
        self.reason = reason
        self.ready_bytes = 0
        self.page_locked_bytes = 0
        self.num_bytes = slab.num_bytes
        self.is_slow = False
        self._emit = emit
        self._is_wanted = is_wanted or lock is not None
        self._is_read_only = slab.is_read_only
        if slab.is_read_only:  # either would give this process pages of its own: see `HostSlab.is_read_only`
            lock, self.reason = None, "it is only read here"
        self._node = node
        self._name = slab.name
        self._rows = slab.rows
        self._lock, self._unlock = lock, unlock
        self._locked: list[int] = []
        self._piece_slots = slots_per_piece(slab.stride_bytes, piece_bytes)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tiered_kv-pin-{slab.name}", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> PageLockState:
        """Wait until nothing more is coming, or ``timeout_s`` have passed, and return the state."""
        self._thread.join(timeout_s)
        return self.state

    def stop(self) -> None:
        """Begin no further piece. Does not wait for the one at hand."""
        self._stop.set()

    def close(self) -> None:
        """Stop, wait for the piece at hand, unlock everything. No copy may be under way. Again does nothing."""
        self.stop()
        self._thread.join()
        while self._locked and self._unlock is not None:
            self._unlock(self._locked.pop())
        self.page_locked_bytes = 0
        self.state = PageLockState.PAGEABLE
        self._rows = self._rows.new_empty(0, 1)

    def _run(self) -> None:
        started = time.monotonic()
        stride_bytes = self._rows.shape[1] * 8
        if self._node is not None and not prefer_node(self._node):
            self._node = None
        if self._lock is None and self._is_wanted:
            self._say_pageable()
        for piece in torch.split(self._rows, self._piece_slots):
            for part in torch.split(piece, max(1, _TOUCH_BYTES // stride_bytes)):
                if self._stop.is_set():
                    self.state = PageLockState.PAGEABLE
                    return
                if not self._is_read_only:
                    touch(part)
                self.ready_bytes += part.nbytes
            self._try_to_lock(piece)
        is_locked = self._lock is not None and self.page_locked_bytes == self.num_bytes
        self.state = PageLockState.LOCKED if is_locked else PageLockState.PAGEABLE
        took_ms = (time.monotonic() - started) * 1e3
        self._emit(HostMemoryReady(self._name, self.num_bytes, self.page_locked_bytes, self._node, took_ms))

    def _try_to_lock(self, piece: Tensor) -> None:
        if self._lock is None:
            return
        started = time.monotonic()
        try:
            while not self._lock_now(self._lock, piece):
                if self._stop.wait(_PAUSE_S):
                    return
        except Exception as error:  # noqa: BLE001 - whatever the driver says, the slab serves as pageable memory
            self.reason, self._lock = str(error) or repr(error), None
            self._say_pageable()
        else:
            self._locked.append(piece.data_ptr())
            self.page_locked_bytes += piece.nbytes
            took_ms = (time.monotonic() - started) * 1e3
            self._emit(MemoryPageLocked(self._name, self.page_locked_bytes, self.num_bytes, took_ms))

    def _lock_now(self, lock: Callable[[int, int], None], piece: Tensor) -> bool:
        try:
            lock(piece.data_ptr(), piece.nbytes)
        except TryAgainError:
            return False
        return True

    def _say_pageable(self) -> None:
        self.is_slow = True
        self._emit(HostMemoryPageable(self._name, self.reason, self.page_locked_bytes, self.num_bytes))
