"""The script's own means: steps, failures, chance."""

import random
import threading

from tiered_kv.memory import HostSlab, PageLockState
from tiered_kv.testing import ScriptedDevice


def test_nothing_runs_until_the_script_says_so() -> None:
    """Step by step, in the order of submission over all streams."""
    device = ScriptedDevice()
    load, store = device.stream("load"), device.stream("store")
    ran: list[int] = []
    for number, stream in enumerate([load, store, store, load]):
        stream.submit(lambda number=number: ran.append(number), lambda _: None)  # type: ignore[misc]
    assert (ran, device.pending) == ([], 4)
    assert device.step()
    assert (ran, device.pending) == ([0], 3)
    assert device.run_all() == 3
    assert ran == [0, 1, 2, 3]
    assert not device.step()


def test_the_log_tells_what_happened() -> None:
    """Waits and submissions when they were made, copies when they ended."""
    device = ScriptedDevice()
    stream, event = device.stream("store"), threading.Event()
    stream.wait(event)
    stream.submit(lambda: None, lambda _: None)
    assert not device.step()
    event.set()
    device.fail_next(OSError("gone"))
    stream.submit(lambda: None, lambda _: None)
    device.run_all()
    assert [what for _, what in device.log] == ["wait", "submit", "submit", "failed", "done"]


def test_a_copy_told_to_fail_does_not_run() -> None:
    """Its ``done`` gets the error; the next one runs."""
    device = ScriptedDevice()
    stream, ran, errors, error = device.stream("load"), [], [], OSError("gone")  # type: ignore[var-annotated]
    device.fail_next(error)
    for number in range(2):
        stream.submit(lambda number=number: ran.append(number), errors.append)  # type: ignore[misc]
    device.run_all()
    assert (ran, errors) == ([1], [error, None])


def test_chance_changes_the_order_of_streams_but_not_within_one() -> None:
    """And equal seeds give equal orders, so that a simulation can be run again."""

    def run(seed: int) -> list[tuple[str, int]]:
        device = ScriptedDevice(chance=random.Random(seed))
        ran: list[tuple[str, int]] = []
        for name in ("load", "store"):
            stream = device.stream(name)
            for number in range(5):
                stream.submit(lambda each=(name, number): ran.append(each), lambda _: None)  # type: ignore[misc]
        device.run_all()
        return ran

    orders = [run(seed) for seed in range(20)]
    assert orders == [run(seed) for seed in range(20)]
    assert len({tuple(order) for order in orders}) > 1
    for order in orders:
        for name in ("load", "store"):
            assert [number for stream, number in order if stream == name] == list(range(5))


def test_memory_is_ready_at_once() -> None:
    """No thread of the locking outlives the call."""
    assert ScriptedDevice().page_lock(HostSlab(2, 4096, 4096)).state is PageLockState.PAGEABLE
