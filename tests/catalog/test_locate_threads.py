"""Threads that look while the owning thread changes the books."""

import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.catalog.indexed import names_of
from tiered_kv.catalog import TierIndex, locate_from_any_thread
from tiered_kv.values.keys import Names
from tiered_kv.values.results import TierRun, num_found

GROUP = 300  # blocks that come and go by one call
TURNS = 200


@pytest.fixture(autouse=True)
def often_interrupted() -> Iterator[None]:
    """Let threads take turns as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def group(number: int) -> Names:
    """Return the names of one group."""
    return names_of(*range(number * GROUP, (number + 1) * GROUP))


def store(index: TierIndex, names: Names) -> None:
    """Store blocks as a caller would."""
    with index.reserve(names) as reservation:
        reservation.commit().release()


def look_while(change: Callable[[], None], look: Callable[[], None], *, num_threads: int = 2) -> None:
    """Call ``look`` over and over on other threads until ``change`` has returned on this one; raise what they raise."""
    done = threading.Event()
    errors: list[BaseException] = []
    numbers: list[int] = []

    def look_on() -> None:
        number = 0
        try:
            while not done.is_set() or not number:
                look()
                number += 1
        except BaseException as error:  # noqa: BLE001 - raised again by the test's own thread
            errors.append(error)
        numbers.append(number)

    threads = [threading.Thread(target=look_on) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        change()
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
    for error in errors:
        raise error
    assert min(numbers) > 0


def test_a_batch_is_seen_whole_or_not_at_all() -> None:
    """Blocks that come by one commit and go by one call are seen all or none; what stays is seen, strangers never.

    Slots are taken again and again by other names, so that a half-made change would show one group's block as
    another's.
    """
    index = TierIndex(3 * GROUP, max_slots=4 * GROUP, write_back=True)
    store(index, group(0))
    kept = index.lease(group(0))

    def change() -> None:
        for turn in range(TURNS):
            coming = group(1 + turn % 3)
            with index.reserve(coming) as reservation:
                lease = reservation.commit()
            if turn % 4 == 0:
                index.mark_dirty(lease)
            lease.release()
            index.remove(coming)
            if turn % 10 == 0:
                index.resize((3 + turn // 10 % 2) * GROUP)

    def look() -> None:
        for number in (1, 2, 3):
            with index.lock:
                is_ready = index.ready(group(number))
                prefix = index.ready_prefix(group(number))
            assert is_ready.all() or not is_ready.any()
            assert prefix == np.count_nonzero(is_ready)
        assert locate_from_any_thread({"cpu": index}, group(0)) == [TierRun("cpu", 0, GROUP)]
        assert not locate_from_any_thread({"cpu": index}, group(9))

    look_while(change, look)
    kept.release()


@pytest.mark.slow
def test_a_block_that_moves_is_always_found() -> None:
    """Blocks that are taken up before they are let go below, or written below before they leave, are never missed."""
    upper, lower = TierIndex(2 * GROUP), TierIndex(2 * GROUP)
    names = group(0)
    store(lower, names)

    def change() -> None:
        for turn in range(TURNS):
            source, target = (lower, upper) if turn % 2 == 0 else (upper, lower)
            store(target, names)
            source.remove(names)
            store(source, group(1 + turn % 3))  # where the blocks were are others now

    def look() -> None:
        runs = locate_from_any_thread({"upper": upper, "lower": lower}, names)
        assert num_found(runs) == sum(run.stop - run.start for run in runs) == GROUP

    look_while(change, look)


@pytest.mark.slow
def test_eviction_and_clearing_under_readers() -> None:
    """Whatever the owner does, no reader meets an error, nor two names in one slot."""
    index = TierIndex(GROUP, num_bounce=GROUP)

    def change() -> None:
        for turn in range(TURNS):
            store(index, group(turn % 5))
            with index.reserve(group(6), bounce=True) as reservation:
                reservation.commit().release()
            if turn % 50 == 49:
                index.clear()
                index.restore(group(7), np.arange(GROUP))

    def look() -> None:
        found = 0
        with index.lock:
            for number in range(8):
                slots, _ = index.find(group(number))
                there = slots[slots >= 0]
                assert len(np.unique(there)) == len(there)
                found += len(there)
        assert found <= 2 * GROUP

    look_while(change, look)


def test_long_prefixes_are_found_in_parts() -> None:
    """From any thread the answer is that of the owning one, over any number of parts and tiers."""
    upper, lower = TierIndex(3_000), TierIndex(5_000)
    store(upper, names_of(*range(900, 3_200)))
    store(lower, names_of(*range(4_100)))
    names = names_of(*range(5_000))
    tiers = {"upper": upper, "lower": lower}
    runs = [TierRun("lower", 0, 900), TierRun("upper", 900, 3_200), TierRun("lower", 3_200, 4_100)]
    assert locate_from_any_thread(tiers, names) == runs
    assert not locate_from_any_thread({}, names)
    assert not locate_from_any_thread(tiers, names[:0])
