"""Getting memory ready in the background."""

import ctypes
import os
import platform
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiered_kv.memory import CPUDevice, HostSlab, PageLocking, PageLockState, host
from tiered_kv.memory.host import is_page_locked, node_of_gpu
from tiered_kv.values.events import Event, HostMemoryPageable, HostMemoryReady, MemoryPageLocked

STRIDE = 8192


def test_on_a_cpu_memory_is_touched_and_stays_pageable() -> None:
    """That is by design and no cause for a warning; the bytes stay as they are."""
    slab = HostSlab(10, 4096, 4096)
    slab.payload(3)[:3] = b"abc"
    device = CPUDevice()
    events: list[Event] = []
    locking = device.page_lock(slab, emit=events.append)
    assert locking.wait() is PageLockState.PAGEABLE
    assert os.fstat(slab.fd).st_blocks * 512 == 40960
    assert (locking.page_locked_bytes, locking.is_slow) == (0, False)
    assert [type(event) for event in events] == [HostMemoryReady]
    assert (device.page_locked_bytes, device.is_pageable) == (0, False)
    assert "no GPU" in locking.reason
    assert bytes(slab.payload(3)[:3]) == b"abc"
    assert device.close()


def test_of_an_attached_slab_only_what_is_there_is_touched_on_a_cpu() -> None:
    """Where there is no block its process may have given the memory back, or never have taken it."""
    slab, device = HostSlab(4, 2 << 20, 2 << 20), CPUDevice()
    slab.payload(1)[:3] = b"abc"
    attached = HostSlab(4, 2 << 20, 2 << 20, fd=slab.fd)
    locking = device.page_lock(attached)
    assert locking.wait() is PageLockState.PAGEABLE
    assert os.fstat(slab.fd).st_blocks * 512 == 2 << 20
    assert device.close()
    attached.close()


def test_memory_is_locked_in_pieces_of_whole_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is locked once and unlocked once, and none cuts a slot in two. How far it is, is said now and then."""
    monkeypatch.setattr(host, "PIECE_BYTES", 2 * STRIDE + 4096)
    monkeypatch.setattr(host, "_SAY_BYTES", 4 * STRIDE)
    locked: dict[int, int] = {}
    unlocked: list[int] = []
    slab = HostSlab(5, STRIDE, STRIDE)
    events: list[Event] = []
    locking = PageLocking(slab, lock=locked.__setitem__, unlock=unlocked.append, emit=events.append)
    assert locking.wait() is PageLockState.LOCKED
    progress = [event.page_locked_bytes for event in events if isinstance(event, MemoryPageLocked)]
    assert progress == [4 * STRIDE, 5 * STRIDE]
    assert isinstance(events[-1], HostMemoryReady)
    assert events[-1].page_locked_bytes == events[-1].num_bytes == 5 * STRIDE
    first = slab.rows.data_ptr()
    assert locked == {first: 2 * STRIDE, first + 2 * STRIDE: 2 * STRIDE, first + 4 * STRIDE: STRIDE}
    assert locking.page_locked_bytes == locking.num_bytes == 5 * STRIDE
    locking.close()
    locking.close()
    assert sorted(unlocked) == sorted(locked)
    assert locking.state is PageLockState.PAGEABLE


def test_two_threads_may_unlock_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the device is closed while a slab is being given back: one unlocks, and both return when it has."""
    monkeypatch.setattr(host, "PIECE_BYTES", STRIDE)
    locked: dict[int, int] = {}
    closers: list[Future[None]] = []
    with ThreadPoolExecutor(1) as pool:

        def unlock(address: int) -> None:
            if not closers:
                closers.append(pool.submit(locking.close))
                wait(closers, 0.2)  # it is to come to its end only after this one
            del locked[address]

        locking = PageLocking(HostSlab(3, STRIDE, STRIDE), lock=locked.__setitem__, unlock=unlock)
        assert locking.wait() is PageLockState.LOCKED
        locking.close()
        closers[0].result()
    assert not locked


def test_memory_that_is_only_read_shows_what_is_stored_later() -> None:
    """It is neither touched nor page-locked, which would copy its pages: a GPU gets it as pageable memory."""
    locked: dict[int, int] = {}
    events: list[Event] = []
    slab = HostSlab(4, STRIDE, STRIDE)
    fd = os.open(f"/proc/self/fd/{slab.fd}", os.O_RDONLY)
    reading = HostSlab(4, STRIDE, STRIDE, fd=fd, is_read_only=True)
    os.close(fd)
    locking = PageLocking(reading, lock=locked.__setitem__, emit=events.append)
    assert locking.wait() is PageLockState.PAGEABLE
    slab.rows.fill_(7)
    assert reading.rows.eq(7).all()
    assert (locked, locking.is_slow, locking.reason) == ({}, True, "it is only read here")
    assert [type(event) for event in events] == [HostMemoryPageable, HostMemoryReady]
    locking.close()


def test_a_failure_is_said_once_and_the_slab_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was locked before the failure is unlocked at the end, and nothing is tried after it."""
    monkeypatch.setattr(host, "PIECE_BYTES", STRIDE)
    tried: list[int] = []
    unlocked: list[int] = []

    def lock(address: int, num_bytes: int) -> None:
        tried.append(address)
        if len(tried) == 2:
            raise RuntimeError("out of lockable memory")

    slab = HostSlab(4, STRIDE, STRIDE)
    events: list[Event] = []
    locking = PageLocking(slab, lock=lock, unlock=unlocked.append, emit=events.append)
    assert locking.wait() is PageLockState.PAGEABLE
    assert locking.is_slow
    (said,) = [event for event in events if isinstance(event, HostMemoryPageable)]
    assert said.reason == locking.reason == "out of lockable memory"
    assert (said.page_locked_bytes, said.wanted_bytes, said.level) == (STRIDE, 4 * STRIDE, "warning")
    slab.payload(3)[0] = 1
    locking.close()
    assert unlocked == tried[:1]


def test_others_get_a_turn_between_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver does nothing else while it locks one: the thread lets go after each, and locks 128 MiB at most."""
    done = list[str]()

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout
            done.append("yields")
            return self.is_set()

    monkeypatch.setattr(host, "threading", SimpleNamespace(Event=Stop, Thread=threading.Thread, Lock=threading.Lock))
    assert 64 << 20 <= host.PIECE_BYTES <= 128 << 20
    monkeypatch.setattr(host, "PIECE_BYTES", STRIDE)
    locking = PageLocking(HostSlab(3, STRIDE, STRIDE), lock=lambda *_: done.append("locks"), unlock=lambda _: None)
    assert locking.wait() is PageLockState.LOCKED
    assert done == ["locks", "yields"] * 3
    locking.close()


def test_what_is_locked_is_known_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first piece on, up to the last that was locked; nothing is left of it once it is unlocked."""
    monkeypatch.setattr(host, "PIECE_BYTES", STRIDE)
    slab = HostSlab(4, STRIDE, STRIDE)
    first = slab.rows.data_ptr()
    seen: list[list[bool]] = []

    def known() -> list[bool]:
        return [is_page_locked(first + at, first + at + STRIDE) for at in range(0, 4 * STRIDE, STRIDE)]

    def lock(address: int, num_bytes: int) -> None:
        seen.append(known())
        if len(seen) == 3:
            raise RuntimeError("out of lockable memory")

    def unlock(address: int) -> None:
        seen.append(known())

    locking = PageLocking(slab, lock=lock, unlock=unlock)
    assert locking.wait() is PageLockState.PAGEABLE
    assert known() == [True, True, False, False]
    assert is_page_locked(first + 100, first + 2 * STRIDE)
    assert not is_page_locked(first, first + 2 * STRIDE + 1)
    assert not is_page_locked(first - 1, first + STRIDE)
    seen[:] = [[], []]
    other = PageLocking(slab, lock=lock, unlock=unlock)  # of the same memory, which the driver refuses
    other.wait()
    other.close()
    assert known() == [True, True, False, False]
    locking.close()
    assert seen[3:] == [[False] * 4] * 2
    assert known() == [False] * 4


def test_closing_does_not_wait_for_the_whole_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locking goes on for minutes on large slabs; once told to stop it ends after the piece at hand."""
    monkeypatch.setattr(host, "PIECE_BYTES", STRIDE)
    begun, go_on = threading.Event(), threading.Event()

    def lock(address: int, num_bytes: int) -> None:
        begun.set()
        assert go_on.wait(60)

    unlocked: list[int] = []
    locking = PageLocking(HostSlab(4, STRIDE, STRIDE), lock=lock, unlock=unlocked.append)
    assert begun.wait(60)
    assert locking.state is PageLockState.PREPARING
    locking.stop()
    go_on.set()
    assert locking.wait() is PageLockState.PAGEABLE
    assert locking.page_locked_bytes == STRIDE
    locking.close()
    assert len(unlocked) == 1


def test_memory_that_nothing_can_lock_for_a_gpu_is_said_at_once() -> None:
    """Before it is used, and the slab serves."""
    events: list[Event] = []
    locking = PageLocking(HostSlab(2, STRIDE, STRIDE), reason="no driver", is_wanted=True, emit=events.append)
    assert locking.wait() is PageLockState.PAGEABLE
    assert [type(event) for event in events] == [HostMemoryPageable, HostMemoryReady]
    assert locking.is_slow


def test_memory_comes_from_a_node_if_the_system_gives_it() -> None:
    """Node 0 is everywhere; a node that is not there is not used, and nothing fails for it."""
    for node, expected in ((0, 0 if _has_policies() else None), (1000, None)):
        events: list[Event] = []
        PageLocking(HostSlab(2, STRIDE, STRIDE), node=node, emit=events.append).wait()
        (ready,) = [event for event in events if isinstance(event, HostMemoryReady)]
        assert ready.node == expected
        assert ready.num_bytes == 2 * STRIDE


def _has_policies() -> bool:
    """Say whether the system lets a thread ask where its memory comes from; else it lets nobody choose, either."""
    number = {"x86_64": 239, "aarch64": 236}.get(platform.machine())
    return number is not None and ctypes.CDLL(None).syscall(number, None, None, 0, None, 0) == 0


@pytest.mark.parametrize(
    ("num_nodes", "says", "node"),
    [(2, "1", 1), (2, "-1", None), (1, "0", None), (2, "", None), (2, None, None)],
)
def test_the_node_of_a_gpu(tmp_path: Path, num_nodes: int, says: str | None, node: int | None) -> None:
    """As sysfs tells it; None where there is one node only, or nobody knows."""
    for number in range(num_nodes):
        (tmp_path / f"devices/system/node/node{number}").mkdir(parents=True)
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    if says is not None:
        (device / "numa_node").write_text(says + "\n")
    assert node_of_gpu("0000:3B:00.0", sysfs=tmp_path) == node
