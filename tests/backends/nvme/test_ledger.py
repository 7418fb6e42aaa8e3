import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiered_kv.values.keys import Names
from tiered_kv_backends.nvme.ledger import ENTRY, Entries, Ledger, Order, encode, parse

FileLimit = Callable[[int], AbstractContextManager[None]]
NUM_SLOTS = 10
Found = tuple[list[tuple[int, int]], list[int]]
"""(slot, name) in order, and the slots whose entries are damaged."""


def names_of(numbers: list[int]) -> Names:
    """Return names of which only one word differs."""
    names = np.zeros((len(numbers), 4), np.uint64)
    names[:, 3] = numbers
    return names


def slots_of(slots: list[int]) -> NDArray[np.int64]:
    """Return an array of slots."""
    return np.array(slots, np.int64)


@contextmanager
def opened(path: Path, num_slots: int = NUM_SLOTS) -> Iterator[tuple[Ledger, Found]]:
    """Open a ledger; yield it and what it says."""
    ledger = Ledger(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), Order())
    try:
        entries, damaged = ledger.read(num_slots if ledger.num_slots else 0)
        ledger.grow(num_slots, os.posix_fallocate)
        latest, _ = entries.latest()
        there = zip(latest.slots.tolist(), latest.names[:, 3].tolist(), strict=True)
        yield ledger, (list(there), damaged.slots.tolist())
    finally:
        ledger.close()


def content_of(path: Path, num_slots: int = NUM_SLOTS) -> Found:
    """Return what a ledger says when it is opened."""
    with opened(path, num_slots) as (_, found):
        return found


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), max_size=40))
def test_the_last_place_of_a_name_counts(history: list[tuple[int, int]]) -> None:
    """Of entries in any order, names and slots come once each, in the order of writing; what was replaced is said."""
    by_slot: dict[int, tuple[int, int]] = {}
    for sequence, (slot, name) in enumerate(history, 1):
        by_slot[slot] = sequence, name
    by_name = {name: slot for slot, (_, name) in sorted(by_slot.items(), key=lambda item: item[1])}
    slots = list(by_slot)
    entries = Entries(
        names_of([by_slot[slot][1] for slot in slots]),
        slots_of(slots),
        np.array([by_slot[slot][0] for slot in slots], np.uint64),
    )
    latest, replaced = entries.latest()
    names, found = latest.names, latest.slots
    expected = sorted(by_name.items(), key=lambda item: by_slot[item[1]])
    assert list(zip(names[:, 3].tolist(), found.tolist(), strict=True)) == expected
    assert sorted(replaced.tolist()) == sorted(set(slots) - set(found.tolist()))


def test_a_damaged_byte_costs_one_entry(tmp_path: Path) -> None:
    """Whatever byte is flipped, or wherever the file is cut: what is hit is named, and every other entry is right."""
    path = tmp_path / "ledger"
    with opened(path, 4) as (ledger, _):
        ledger.write(names_of([3, 1]), slots_of([0, 2]))
    whole = path.read_bytes()
    assert content_of(path, 4) == ([(0, 3), (2, 1)], [])
    for at in range(len(whole)):
        hit = at // ENTRY.itemsize
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert content_of(path, 4) == ([each for each in [(0, 3), (2, 1)] if each[0] != hit], [hit])
        path.write_bytes(whole[:at])
        found, damaged = content_of(path, 4) if hit else ([], [0, 1, 2, 3])
        assert found == [each for each in [(0, 3), (2, 1)] if each[0] < hit]
        assert damaged == list(range(hit, 4))


@given(st.binary(max_size=10 * ENTRY.itemsize))
def test_foreign_bytes_say_nothing(data: bytes) -> None:
    """Bytes of any kind are damaged entries, and no blocks."""
    data = data[: len(data) // ENTRY.itemsize * ENTRY.itemsize]
    entries, damaged = parse(data, 5)
    assert not len(entries.slots)
    assert set(damaged.tolist()) <= set(range(5, 5 + len(data) // ENTRY.itemsize))


def test_an_entry_counts_in_its_own_place_alone(tmp_path: Path) -> None:
    """A whole entry that lies elsewhere, be its slot negative or beyond the end, is damage."""
    path = tmp_path / "ledger"
    slots = slots_of([3, -1, 2**62])
    path.write_bytes(encode(names_of([1, 2, 3]), slots, np.ones(3, np.uint64)).tobytes())
    assert content_of(path, 3) == ([], [0, 1, 2])


def test_a_sparse_file_of_any_length_is_read_as_far_as_it_counts(tmp_path: Path) -> None:
    """What follows the last slot is cut off and not read."""
    path = tmp_path / "ledger"
    with opened(path) as (ledger, _):
        ledger.write(names_of([1]), slots_of([1]))
    os.truncate(path, 3 << 30)
    ledger = Ledger(os.open(path, os.O_RDWR), Order())
    ledger.shrink(NUM_SLOTS)
    entries, damaged = ledger.read(NUM_SLOTS)
    ledger.close()
    assert (entries.slots.tolist(), damaged.slots.tolist()) == ([1], [])
    assert path.stat().st_size == Ledger.num_bytes(NUM_SLOTS)


def test_it_never_grows(tmp_path: Path) -> None:
    """However much is written over, it is as long as it was, and says what was written last."""
    path = tmp_path / "ledger"
    with opened(path) as (ledger, _):
        for n in range(1, 1001):
            ledger.write(names_of([n]), slots_of([n % NUM_SLOTS]))
        assert path.stat().st_size == Ledger.num_bytes(NUM_SLOTS)
    assert content_of(path) == ([(n % NUM_SLOTS, n) for n in range(991, 1001)], [])


def test_order_outlives_reopening(tmp_path: Path) -> None:
    """What is written after a restart counts as used later than all before; what was cleared is gone."""
    path = tmp_path / "ledger"
    with opened(path) as (ledger, _):
        ledger.write(names_of([1, 2, 3]), slots_of([7, 3, 5]))
    with opened(path) as (ledger, _):
        ledger.clear(slots_of([3]))
        ledger.write(names_of([4]), slots_of([0]))
        ledger.write(names_of([1]), slots_of([7]))
        ledger.write_oldest(names_of([9]), slots_of([9]))
        ledger.sync()
    assert content_of(path) == ([(9, 9), (5, 3), (0, 4), (7, 1)], [])


def test_a_failed_write_harms_no_other(tmp_path: Path, files_no_longer_than: FileLimit) -> None:
    """What a disk does not take is an error, and every entry that it was not is as it was."""
    path = tmp_path / "ledger"
    with opened(path) as (ledger, _):
        ledger.write(names_of([1, 2]), slots_of([1, 8]))
        with (
            files_no_longer_than(5 * ENTRY.itemsize + 20),
            pytest.raises(OSError, match=os.strerror(errno.EFBIG)),
        ):
            ledger.write(names_of([3, 4, 5]), slots_of([4, 5, 6]))
    assert content_of(path) == ([(1, 1), (8, 2), (4, 3)], [5])


def test_what_is_written_in_parts_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem may take less than it is given."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:50], at))
    with opened(tmp_path / "ledger") as (ledger, _):
        ledger.write(names_of([1, 2, 3]), slots_of([2, 3, 4]))
        assert ledger.bytes_written == 3 * ENTRY.itemsize
    assert content_of(tmp_path / "ledger") == ([(2, 1), (3, 2), (4, 3)], [])


def test_a_million_entries(tmp_path: Path) -> None:
    """As many as there are come back whole and in order, by as many calls as it takes."""
    count = 1_000_000
    names = np.random.default_rng(1).integers(1, 2**63, (count, 4), dtype=np.uint64)
    slots = np.random.default_rng(2).permutation(count)
    with opened(tmp_path / "ledger", count) as (ledger, _):
        ordered = np.argsort(slots)
        ledger.write(names[ordered], slots[ordered])
        entries, damaged = ledger.read(count)
    assert not len(damaged.slots)
    latest, replaced = entries.latest()
    assert not len(replaced)
    assert np.array_equal(latest.names, names[ordered])
    assert np.array_equal(latest.slots, slots[ordered])
