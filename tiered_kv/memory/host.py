"""Host memory for blocks: one slab of equal slots in a memfd, which other processes can attach; how it is made ready.

Whoever holds a slot's lease or reservation may touch its bytes; the slab keeps no account of that. A worker process
maps the same pages by the file descriptor, so what one process gathers another can write to a disk.

Near a GPU: on a machine of several NUMA nodes, copies from the far node run at a fraction of the bus (`node_of_gpu`).
That is known on Linux only, by what the kernel says; elsewhere, and where it says nothing, memory is where it falls.

A slab's pages are allocated one by one in the background, and page-locked where a GPU will reach them (`PageLocking`).
For hundreds of GiB that takes minutes and may fail half-way, and serving need not wait for either: a slab is right from
the start, only slower.

Before it is taken, `check_host_memory` asks whether the machine will give it: Linux says yes to any allocation and ends
the process later, when the pages are first touched. So the numbers are compared beforehand: the memory that is
available, the limits of the control groups the process is in (version 2 or 1), and the limit of locked memory.
"""

import ctypes
import enum
import fcntl
import mmap
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiered_kv.media.backend import Block, Blocks
from tiered_kv.media.record import HEADER_BYTES
from tiered_kv.system import files
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.events import Emit, HostMemoryPageable, HostMemoryReady, MemoryPageLocked
from tiered_kv.values.layout import PAGE_BYTES
from tiered_kv.values.log import log

PIECE_BYTES = 128 << 20
"""Page-locked at once: the driver does nothing else for a process meanwhile, 0.1 s a GiB where others measured it."""
_HEADERS_AT_ONCE = 64
_MADV_REMOVE = 9
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it

# The mmap module's own madvise() keeps the GIL, for a third of a second per GiB and more.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def slots_per_piece(stride_bytes: int) -> int:
    """Count the slots that are page-locked together. No DMA may cross from one such piece to the next."""
    return max(1, PIECE_BYTES // stride_bytes)


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
        is_attached: Whether it is another's, mapped by its descriptor.
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
        """Map the memory. The system gives pages as they are touched: `Device.page_lock` does that in the background.

        Args:
            num_slots: How many.
            stride_bytes: From one slot to the next.
            payload_bytes: What a slot holds.
            name: For people.
            fd: Of another process's slab of these sizes, inherited or received over a socket. It is duplicated, and
                stays the caller's. None makes a new slab.
            is_read_only: See the attribute: ``fd`` cannot be written by.

        Raises:
            ConfigurationError: Sizes that cannot be, or that the system refuses, or ``fd`` is of another length.
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
        self.is_attached = fd is not None
        try:
            self._fd = _new_memory(name, self.num_bytes) if fd is None else os.dup(fd)
            try:
                self._memory = _map(self._fd, self.num_bytes, is_read_only=is_read_only)
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as error:
            raise ConfigurationError(
                f"{_gib(self.num_bytes)} of host memory for {name!r} cannot be had: {error.strerror}; "
                "limits of the process (ulimit -f, -n, -v) bound it too"
            ) from error
        self.rows = _words_of(self._memory).view(num_slots, stride_bytes // 8)
        self._headers = Headers()
        self._keeping = threading.Lock()
        self._num_keeping = 0
        self._close_fd = weakref.finalize(self, os.close, self._fd)  # of a slab that nobody closes, too
        self._close_fd.atexit = False

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
        if not self._close_fd.alive:
            raise ClosedError(f"the slab {self.name!r} is closed")
        if not 0 <= slot < self.num_slots:
            raise ConfigurationError(f"slot {slot} is not one of the {self.num_slots} of {self.name!r}")
        return self._memory[slot * self.stride_bytes : (slot + 1) * self.stride_bytes]

    def lend_blocks(self, slots: Sequence[int] | NDArray[np.int64]) -> "LentBlocks":
        """Lend record buffers over ``slots`` until `LentBlocks.give_back`: each the slot and a header page.

        The headers hold whatever the last call left in them. They are lent again after that, so it must not come before
        the call that uses them has returned.
        """
        return LentBlocks(slots, self._headers, self.padded, self.payload_bytes)

    def keep(self) -> None:
        """Give no pages back until `keep_no_more`: a process that maps them may have page-locked them for a GPU.

        That would go on using the old ones, which are no part of the slab any more. Any thread may call.
        """
        with self._keeping:
            self._num_keeping += 1

    def keep_no_more(self) -> None:
        """End what one `keep` began."""
        with self._keeping:
            self._num_keeping -= 1

    @property
    def is_kept(self) -> bool:
        """Whether no pages are given back for now."""
        return self._num_keeping > 0

    def give_back(self, start: int, stop: int) -> bool:
        """Return the pages of some slots to the system, in every process: they read as zeros, and come when touched.

        Not those that this process has page-locked for a GPU. 1 GiB takes 0.4 s.

        Returns:
            False if they are kept, and nothing was done.
        """
        address, num_bytes = self.rows.data_ptr() + start * self.stride_bytes, (stop - start) * self.stride_bytes
        with self._keeping:
            if num_bytes and not self.is_kept:
                _madvise(address, num_bytes, _MADV_REMOVE)
            return not self.is_kept

    def close(self) -> None:
        """Let go of the memory; a second time does nothing. It is unmapped when the last view of it is gone."""
        if not self._close_fd.alive:
            return
        self._close_fd()
        self._fd = -1
        self.rows = self.rows.new_empty(0, self.stride_bytes // 8)
        self._memory = memoryview(b"")


def touch(rows: Tensor) -> None:
    """Have the system allocate the pages of ``rows``, contiguous, whose bytes stay as they are. Releases the GIL.

    Untouched memory is ten times slower to write. Harmless beside transfers, and on kernels that cannot do it.
    """
    _madvise(rows.data_ptr(), rows.nbytes, _MADV_POPULATE_WRITE)


class LentBlocks(Blocks):
    """Record buffers over slots: each the slot and a header page, which holds whatever the last call left in it.

    The headers are taken when the first block is looked at, by the call that has them: where the system gives no memory
    for them it is that call which fails, and nobody waits for what was never begun.
    """

    def __init__(
        self,
        slots: Sequence[int] | NDArray[np.int64],
        headers: "Headers",
        padded: Callable[[int], memoryview],
        payload_bytes: int,
    ) -> None:
        """Lend ``slots``, of which ``padded`` returns the bytes, whole pages."""
        numbers = slots.tolist() if isinstance(slots, np.ndarray) else slots
        self._headers = headers
        self._taken: list[memoryview] = []

        def make(n: int) -> Block:
            taken = self._taken or headers.take(len(numbers), self._taken)
            return Block(taken[n], padded(numbers[n]), payload_bytes)

        super().__init__(len(numbers), make)

    def give_back(self) -> None:
        """End the lending, once: the headers are lent again."""
        self._made = [None] * len(self._made)  # whoever keeps this must not keep the memory mapped
        self._headers.give(self._taken)


class Headers:
    """Page-aligned header buffers, made when needed and kept for the next call: as many as were ever lent at once."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    def take(self, n: int, taken: list[memoryview]) -> list[memoryview]:
        """Lend some to ``taken``, and return it: in any of several threads, of which one finds it empty.

        Raises:
            OSError: The system gives no more memory.
        """
        with self._lock:
            if not taken:
                while len(self._free) < n:
                    memory = memoryview(mmap.mmap(-1, _HEADERS_AT_ONCE * HEADER_BYTES))
                    self._free += [memory[at : at + HEADER_BYTES] for at in range(0, len(memory), HEADER_BYTES)]
                taken += self._free[len(self._free) - n :]
                del self._free[len(self._free) - n :]
            return taken

    def give(self, headers: list[memoryview]) -> None:
        """Take lent headers back."""
        with self._lock:
            self._free += headers


def _new_memory(name: str, num_bytes: int) -> int:
    fd = os.memfd_create(f"tiered_kv-{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        os.fchmod(fd, 0o600)  # else whoever has a descriptor that only reads opens it anew, and writes
        # Sealed: a process that shrank it would kill every other one by SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
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


_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED: Final = 1
_SYSFS: Final = Path("/sys")


def node_of_gpu(pci_address: str, *, sysfs: Path = _SYSFS) -> int | None:
    """Return the NUMA node a GPU hangs on.

    Args:
        pci_address: ``domain:bus:device.function`` in hexadecimal, e.g. ``"0000:3b:00.0"``.
        sysfs: Where sysfs is mounted.

    Returns:
        None where there is one node only, or the machine does not tell.
    """
    try:
        nodes = list((sysfs / "devices/system/node").glob("node[0-9]*"))
        node = int((sysfs / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if len(nodes) > 1 and node >= 0 else None


def prefer_node(node: int) -> bool:
    """Have memory that this thread touches first come from ``node`` while that has any; say whether the system will."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or os.name != "posix":
        return False
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << node % 64
    # The kernel takes one bit less than it is told there are.
    return bool(ctypes.CDLL(None, use_errno=True).syscall(number, _MPOL_PREFERRED, words, len(words) * 64 + 1) == 0)


_PAUSE_S = 0.1
_YIELD_S = 0.002
"""After each piece: whoever waits for the driver gets it first, kernels of the engine's to be launched for example."""
_SAY_BYTES = 1 << 30
_TOUCH_BYTES = 2 << 20
"""Touched at once: about 1 ms, in which nobody in the process can map or unmap memory, the event loop included."""


_locked_up_to: dict[int, int] = {}
"""Where memory that is page-locked begins, and how far it is by now. An entry grows after a piece was locked, and goes
before the first one is unlocked; any thread may read. torch is not asked: its ``is_pinned`` speaks of a storage's first
byte, whatever the tensor shows."""


def is_page_locked(start: int, stop: int) -> bool:
    """Say whether a GPU can reach host memory from one address up to another."""
    return any(first <= start and stop <= last for first, last in list(_locked_up_to.items()))


@contextmanager
def known_as_locked(tensor: Tensor) -> Iterator[None]:
    """Have `is_page_locked` know memory that torch allocated page-locked, inside the ``with`` block."""
    start = tensor.data_ptr()
    _locked_up_to[start] = start + tensor.nbytes
    try:
        yield
    finally:
        del _locked_up_to[start]


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
    """The preparation of one slab, by a daemon thread of its own, in pieces of whole slots and 128 MiB at most.

    Attributes:
        state: Where it stands.
        reason: Why it is pageable; empty otherwise.
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
    ) -> None:
        """Start to prepare the slab.

        Args:
            slab: Its mapping lives until this is closed. One that is only read is neither touched nor page-locked; of
                one that is attached and not to be page-locked only what its process has taken from the system by now.
            lock: Page-locks ``(address, num_bytes)`` or raises, `TryAgainError` to be called again in a while; None
                leaves the memory pageable.
            unlock: Undoes it for an address.
            reason: Why ``lock`` is None.
            is_wanted: Whether that is a pity: a GPU will copy from this memory.
            node: The NUMA node to take the memory from, or None.
            emit: Called in the thread of this.
        """
        self.state = PageLockState.PREPARING
        self.reason = reason
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
        self._said_bytes = 0
        self._took_ms = 0.0
        self._piece_slots = slots_per_piece(slab.stride_bytes)
        self._stop = threading.Event()
        self._closing = threading.Lock()  # a slab may be given back while its device is being closed
        self._thread = threading.Thread(target=self._prepare, name=f"tiered_kv-pin-{slab.name}", daemon=True)
        self._only_there: int | None = None
        if lock is None and slab.is_attached:
            self._only_there = -1
            with suppress(OSError):  # without a descriptor nothing is touched
                self._only_there = os.dup(slab.fd)
        try:
            self._thread.start()
        except BaseException:  # there is no thread to be had
            self._close_fd()
            raise

    def wait(self, timeout_s: float | None = None) -> PageLockState:
        """Wait until nothing more is coming, or ``timeout_s`` have passed, and return the state."""
        self._thread.join(timeout_s)
        return self.state

    def stop(self) -> None:
        """Begin no further piece. Does not wait for the one at hand."""
        self._stop.set()

    def close(self) -> None:
        """Stop, wait for the piece at hand, unlock everything. No copy may be under way. Again does nothing.

        What the driver does not unlock, as none does after an error of the device, is logged and left to it.
        """
        self.stop()
        self._thread.join()
        with self._closing:
            self._unlock_all()

    def _unlock_all(self) -> None:
        if self._locked:
            del _locked_up_to[self._locked[0]]
        errors = []
        while self._locked and self._unlock is not None:
            try:
                self._unlock(self._locked.pop())
            except Exception as error:  # noqa: BLE001 - the other pieces are to be unlocked all the same
                errors.append(error)
        if errors:
            log("warning", "host_memory.unlock_failed", slab=self._name, pieces=len(errors), error=str(errors[0]))
        self.page_locked_bytes = 0
        self.state = PageLockState.PAGEABLE
        self._rows = self._rows.new_empty(0, 1)

    def _prepare(self) -> None:
        try:
            self._run()
        finally:
            self._close_fd()

    def _close_fd(self) -> None:
        if self._only_there is not None and self._only_there >= 0:
            os.close(self._only_there)

    def _is_there(self, start: int, num_bytes: int) -> bool:
        """Say whether to touch some bytes, all or those that the system has given pages to."""
        if self._only_there is None:
            return True
        try:
            return os.lseek(self._only_there, start, os.SEEK_DATA) < start + num_bytes
        except OSError:  # there is nothing behind them either
            return False

    def _run(self) -> None:
        started, start = time.monotonic(), 0
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
                if not self._is_read_only and self._is_there(start, part.nbytes):
                    touch(part)
                start += part.nbytes
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
            _locked_up_to[self._locked[0]] = piece.data_ptr() + piece.nbytes
            self.page_locked_bytes += piece.nbytes
            self._took_ms += (time.monotonic() - started) * 1e3
            if self.page_locked_bytes - self._said_bytes >= _SAY_BYTES or self.page_locked_bytes == self.num_bytes:
                self._emit(MemoryPageLocked(self._name, self.page_locked_bytes, self.num_bytes, self._took_ms))
                self._said_bytes, self._took_ms = self.page_locked_bytes, 0.0
            self._stop.wait(_YIELD_S)

    def _lock_now(self, lock: Callable[[int, int], None], piece: Tensor) -> bool:
        try:
            lock(piece.data_ptr(), piece.nbytes)
        except TryAgainError:
            return False
        return True

    def _say_pageable(self) -> None:
        self.is_slow = True
        self._emit(HostMemoryPageable(self._name, self.reason, self.page_locked_bytes, self.num_bytes))


_GIB: Final = 1024**3
_CAP_IPC_LOCK: Final = 1 << 14
_LESS: Final = "give the cpu tier less capacity or lower limits.bounce or limits.swap_space"


def check_host_memory(num_bytes: int, *, ever: bool = False, less: str = _LESS, root: Path = Path("/")) -> None:
    """Raise unless ``num_bytes`` more of host memory can be had. Where the machine does not say, nothing is checked.

    Args:
        num_bytes: What is about to be allocated, all together.
        ever: Ask only whether it could be had if nobody else had any.
        less: What to change, for less of it.
        root: Where ``proc`` and ``sys`` are.

    Raises:
        ConfigurationError: It exceeds a limit. Every limit it exceeds is named, in GiB, with what to change.
    """
    problems = []
    if num_bytes > (available := _in_meminfo("MemTotal" if ever else "MemAvailable", root / "proc/meminfo")):
        problems.append(
            f"this machine has {_gib(available)}: {less}"
            if ever
            else f"{_gib(available)} are available on this machine: {less}, or end other processes"
        )
    for path, limit, used in _cgroups(root):
        if num_bytes > limit - (0 if ever else used):
            advice = f"raise it (docker --memory, Kubernetes resources.limits.memory, systemd MemoryMax) or {less}"
            problems.append(f"the control group {path} is limited to {_gib(limit)}, {_gib(used)} in use: {advice}")
    if problems:
        raise ConfigurationError(f"{_gib(num_bytes)} of host memory are wanted, but {'; '.join(problems)}")


def doubt_of_page_locking(num_bytes: int, *, root: Path = Path("/")) -> str:
    """Say why ``num_bytes`` might not be page-locked, or nothing.

    A doubt and no error: some drivers lock pages without asking RLIMIT_MEMLOCK, and where locking fails the cache works
    on with pageable memory, slower.
    """
    if num_bytes <= (limit := _memlock(root / "proc/self")):
        return ""
    advice = f"raise it (ulimit -l, docker --ulimit memlock=-1, systemd LimitMEMLOCK=infinity) or {_LESS}"
    return f"{_gib(num_bytes)} are to be pinned, locked memory (RLIMIT_MEMLOCK) is limited to {_gib(limit)}: {advice}"


def _in_meminfo(name: str, meminfo: Path) -> float:
    for line in files().lines(meminfo):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return float("inf")


def _cgroups(root: Path) -> Iterator[tuple[str, float, int]]:
    """Yield path, limit and use of every limited control group from the process's own up to the root."""
    for line in files().lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, names = "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            mount, names = "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        limit_file, use_file, prefix = names
        # A container may see the host's path here and only its own group there: what is absent is passed over.
        group = Path(path.lstrip("/"))
        for each in (group, *group.parents):
            folder = root / mount / each
            limit, use = _number(folder / limit_file), _number(folder / use_file)
            if limit is not None and use is not None:
                yield f"/{each}".removesuffix("."), limit, max(0, use - _page_cache(folder / "memory.stat", prefix))


def _page_cache(stat: Path, prefix: str) -> int:
    """Return the bytes that the kernel drops before it refuses memory: files that were read or written."""
    counted = (f"{prefix}inactive_file", f"{prefix}active_file")
    pairs = (line.split() for line in files().lines(stat))
    return sum(int(value) for name, value in pairs if name in counted)


def _memlock(process: Path) -> float:
    for line in files().lines(process / "status"):
        if line.startswith("CapEff:") and int(line.split()[1], 16) & _CAP_IPC_LOCK:
            return float("inf")  # the limit does not hold for a process with this capability
    for line in files().lines(process / "limits"):
        if line.startswith("Max locked memory"):
            soft = line.split()[3]
            return float("inf") if soft == "unlimited" else int(soft)
    return float("inf")


def _number(path: Path) -> int | None:
    """Return the number in a file; None for ``max`` and for no file."""
    text = next(iter(files().lines(path)), "").strip()
    return int(text) if text.isdigit() else None


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
