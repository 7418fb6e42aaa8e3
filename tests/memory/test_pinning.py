"""Getting memory ready in the background."""

import threading
from pathlib import Path

import pytest

from tiered_kv.events import Event, HostMemoryPageable, HostMemoryReady, MemoryPinned
from tiered_kv.memory import CPUDevice, HostSlab, Pinning, PinState
from tiered_kv.memory.numa import node_of_gpu

STRIDE = 8192


def test_on_a_cpu_memory_is_touched_and_stays_pageable() -> None:
    """That is by design and no cause for a warning; the bytes stay as they are."""
    slab = HostSlab(10, 4096, 4096)
    slab.payload(3)[:3] = b"abc"
    device = CPUDevice()
    events: list[Event] = []
    pinning = device.pin(slab, emit=events.append)
    assert pinning.wait() is PinState.PAGEABLE
    assert (pinning.ready_bytes, pinning.pinned_bytes, pinning.is_slow) == (40960, 0, False)
    assert [type(event) for event in events] == [HostMemoryReady]
    assert (device.pinned_bytes, device.is_pageable) == (0, False)
    assert "no GPU" in pinning.reason
    assert bytes(slab.payload(3)[:3]) == b"abc"
    assert device.close()


def test_memory_is_locked_in_pieces_of_whole_slots() -> None:
    """Each piece is locked once and unlocked once, and none cuts a slot in two."""
    locked: dict[int, int] = {}
    unlocked: list[int] = []
    slab = HostSlab(5, STRIDE, STRIDE)
    events: list[Event] = []
    size = 2 * STRIDE + 4096
    pinning = Pinning(slab, lock=locked.__setitem__, unlock=unlocked.append, emit=events.append, piece_bytes=size)
    assert pinning.wait() is PinState.PINNED
    progress = [event.pinned_bytes for event in events if isinstance(event, MemoryPinned)]
    assert progress == [2 * STRIDE, 4 * STRIDE, 5 * STRIDE]
    assert isinstance(events[-1], HostMemoryReady)
    assert events[-1].pinned_bytes == events[-1].num_bytes == 5 * STRIDE
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
    events: list[Event] = []
    pinning = Pinning(slab, lock=lock, unlock=unlocked.append, emit=events.append, piece_bytes=STRIDE)
    assert pinning.wait() is PinState.PAGEABLE
    assert pinning.is_slow
    (said,) = [event for event in events if isinstance(event, HostMemoryPageable)]
    assert said.reason == pinning.reason == "out of lockable memory"
    assert (said.pinned_bytes, said.wanted_bytes, said.level) == (STRIDE, 4 * STRIDE, "warning")
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


def test_memory_that_nothing_can_lock_for_a_gpu_is_said_at_once() -> None:
    """Before it is used, and the slab serves."""
    events: list[Event] = []
    pinning = Pinning(HostSlab(2, STRIDE, STRIDE), reason="no driver", is_wanted=True, emit=events.append)
    assert pinning.wait() is PinState.PAGEABLE
    assert [type(event) for event in events] == [HostMemoryPageable, HostMemoryReady]
    assert pinning.is_slow


def test_memory_comes_from_a_node_if_the_system_gives_it() -> None:
    """Node 0 is everywhere; a node that is not there is not used, and nothing fails for it."""
    for node, expected in ((0, {0, None}), (1000, {None})):
        events: list[Event] = []
        Pinning(HostSlab(2, STRIDE, STRIDE), node=node, emit=events.append).wait()
        (ready,) = [event for event in events if isinstance(event, HostMemoryReady)]
        assert ready.node in expected
        assert ready.num_bytes == 2 * STRIDE


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
