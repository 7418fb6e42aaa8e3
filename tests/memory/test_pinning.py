"""Getting memory ready in the background."""

import threading

from structlog.testing import capture_logs

from tiered_kv.memory import CPUDevice, HostSlab, Pinning, PinState

STRIDE = 8192


def test_on_a_cpu_memory_is_touched_and_stays_pageable() -> None:
    """That is by design and no cause for a warning; the bytes stay as they are."""
    slab = HostSlab(10, 4096, 4096)
    slab.payload(3)[:3] = b"abc"
    device = CPUDevice()
    with capture_logs() as logs:
        pinning = device.pin(slab)
        assert pinning.wait() is PinState.PAGEABLE
    assert (pinning.ready_bytes, pinning.pinned_bytes, logs) == (40960, 0, [])
    assert "no GPU" in pinning.reason
    assert bytes(slab.payload(3)[:3]) == b"abc"
    assert device.close()


def test_memory_is_locked_in_pieces_of_whole_slots() -> None:
    """Each piece is locked once and unlocked once, and none cuts a slot in two."""
    locked: dict[int, int] = {}
    unlocked: list[int] = []
    slab = HostSlab(5, STRIDE, STRIDE)
    pinning = Pinning(slab, lock=locked.__setitem__, unlock=unlocked.append, piece_bytes=2 * STRIDE + 4096)
    assert pinning.wait() is PinState.PINNED
    first = slab.rows.data_ptr()
    assert locked == {first: 2 * STRIDE, first + 2 * STRIDE: 2 * STRIDE, first + 4 * STRIDE: STRIDE}
    assert pinning.pinned_bytes == pinning.num_bytes == 5 * STRIDE
    pinning.close()
    pinning.close()
    assert sorted(unlocked) == sorted(locked)
    assert pinning.state is PinState.PAGEABLE


def test_a_failure_is_said_once_and_the_slab_serves_on() -> None:
    """What was locked before the failure is unlocked at the end, and nothing is tried after it."""
    tried: list[int] = []
    unlocked: list[int] = []

    def lock(address: int, num_bytes: int) -> None:
        tried.append(address)
        if len(tried) == 2:
            raise RuntimeError("out of lockable memory")

    slab = HostSlab(4, STRIDE, STRIDE)
    with capture_logs() as logs:
        pinning = Pinning(slab, lock=lock, unlock=unlocked.append, piece_bytes=STRIDE)
        assert pinning.wait() is PinState.PAGEABLE
    assert [entry["event"] for entry in logs] == ["host_memory.pageable"]
    assert logs[0]["reason"] == pinning.reason == "out of lockable memory"
    assert (logs[0]["pinned_bytes"], logs[0]["wanted_bytes"], logs[0]["log_level"]) == (STRIDE, 4 * STRIDE, "warning")
    slab.payload(3)[0] = 1
    pinning.close()
    assert unlocked == tried[:1]


def test_closing_does_not_wait_for_the_whole_slab() -> None:
    """Locking goes on for minutes on large slabs; once told to stop it ends after the piece at hand."""
    begun, go_on = threading.Event(), threading.Event()

    def lock(address: int, num_bytes: int) -> None:
        begun.set()
        assert go_on.wait(60)

    unlocked: list[int] = []
    pinning = Pinning(HostSlab(4, STRIDE, STRIDE), lock=lock, unlock=unlocked.append, piece_bytes=STRIDE)
    assert begun.wait(60)
    assert pinning.state is PinState.PREPARING
    pinning.stop()
    go_on.set()
    assert pinning.wait() is PinState.PAGEABLE
    assert pinning.pinned_bytes == STRIDE
    pinning.close()
    assert len(unlocked) == 1
