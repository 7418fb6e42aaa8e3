import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiered_kv.keys import Names
from tiered_kv_backends.nvme.journal import Journal, latest, make_entries, parse

STRIDE = 8192
FileLimit = Callable[[int], AbstractContextManager[None]]
writes = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=40)
"""(slot, name) in order; name 0 forgets."""


def names_of(numbers: list[int]) -> Names:
    """Return names of which only one word differs."""
    names = np.zeros((len(numbers), 4), np.uint64)
    names[:, 3] = numbers
    return names


def slots_of(slots: list[int]) -> NDArray[np.int64]:
    """Return an array of slots."""
    return np.array(slots, np.int64)


def content_of(path: Path, num_slots: int = 10) -> list[tuple[int, int]]:
    """Return what a journal says when it is opened, as (slot, name)."""
    journal = Journal(path, stride_bytes=STRIDE, num_slots=num_slots)
    names, slots = journal.recover()
    journal.close()
    return list(zip(slots.tolist(), names[:, 3].tolist(), strict=True))


@given(writes)
def test_the_last_entry_of_a_slot_and_of_a_name_counts(history: list[tuple[int, int]]) -> None:
    """Replay finds what one entry at a time would have left, in the order in which it was written."""
    slots: dict[int, int] = {}
    for slot, name in history:
        slots.pop(slot, None)
        slots[slot] = name
    names: dict[int, int] = {}
    for slot, name in slots.items():
        names.pop(name, None)
        names[name] = slot
    names.pop(0, None)
    found = latest(make_entries(names_of([name for _, name in history]), slots_of([slot for slot, _ in history])))
    assert dict(zip(found["name"][:, 3].tolist(), found["slot"].tolist(), strict=True)) == names
    assert found["name"][:, 3].tolist() == list(names)


def test_it_ends_where_it_was_torn(tmp_path: Path) -> None:
    """Cut anywhere, or with any byte flipped, it says what whole frames before that said, and goes on from there."""
    path = tmp_path / "journal"
    journal = Journal(path, stride_bytes=STRIDE, num_slots=10)
    ends = []
    for n in range(1, 4):
        journal.append(names_of([n]), slots_of([n]))
        ends.append(journal.num_bytes)
    journal.close()
    whole = path.read_bytes()
    for at in range(32, len(whole)):
        expected = [(n, n) for n, end in enumerate(ends, 1) if end <= at]
        path.write_bytes(whole[:at])
        assert content_of(path) == expected
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        journal = Journal(path, stride_bytes=STRIDE, num_slots=10)
        journal.append(names_of([9]), slots_of([9]))
        journal.close()
        assert content_of(path) == [*expected, (9, 9)]


@pytest.mark.parametrize("content", [b"", b"x", bytes(64), b"TKVJRNL1" + bytes(100), os.urandom(5000)])
def test_what_is_no_journal_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    """Foreign bytes, or a head cut off, mean that nothing is known; what is appended then is."""
    path = tmp_path / "journal"
    path.write_bytes(content)
    journal = Journal(path, stride_bytes=STRIDE, num_slots=10)
    journal.append(names_of([1]), slots_of([1]))
    journal.close()
    assert content_of(path) == [(1, 1)]


def test_slots_of_another_length_are_not_believed(tmp_path: Path) -> None:
    """A journal of another stride says nothing about this slab."""
    journal = Journal(tmp_path / "journal", stride_bytes=2 * STRIDE, num_slots=10)
    journal.append(names_of([1]), slots_of([1]))
    journal.close()
    assert content_of(tmp_path / "journal") == []


def test_its_length_is_bounded(tmp_path: Path) -> None:
    """However much is written over, it stays within what was reserved for it, and forgets nothing that counts."""
    path = tmp_path / "journal"
    num_slots = 50
    journal = Journal(path, stride_bytes=STRIDE, num_slots=num_slots)
    for n in range(1, 5001):
        journal.append(names_of([n]), slots_of([n % num_slots]))
        assert path.stat().st_size == journal.num_bytes <= Journal.reserved_bytes(num_slots)
    journal.close()
    assert content_of(path, num_slots) == [(n % num_slots, n) for n in range(4951, 5001)]


def test_a_rewrite_is_all_there_is(tmp_path: Path) -> None:
    """A rewrite replaces everything, in its own order, and what is appended comes behind it."""
    path = tmp_path / "journal"
    journal = Journal(path, stride_bytes=STRIDE, num_slots=10)
    journal.append(names_of([1, 2, 3]), slots_of([1, 2, 3]))
    journal.rewrite(names_of([3, 1]), slots_of([3, 1]), sync=True)
    journal.append(names_of([4]), slots_of([2]))
    journal.close()
    assert content_of(path) == [(3, 3), (1, 1), (2, 4)]
    assert [file.name for file in tmp_path.iterdir()] == ["journal"]


def test_frames_of_another_generation_are_not_replayed(tmp_path: Path) -> None:
    """Bytes that an earlier journal left behind the end of this one say nothing, whole as they are."""
    path = tmp_path / "journal"
    journal = Journal(path, stride_bytes=STRIDE, num_slots=10)
    journal.append(names_of([1]), slots_of([1]))
    old_frames = path.read_bytes()[32:]
    journal.rewrite(names_of([2]), slots_of([2]))
    journal.close()
    path.write_bytes(path.read_bytes() + old_frames)
    assert content_of(path) == [(2, 2)]


def test_a_failed_append_harms_nothing(tmp_path: Path, files_no_longer_than: FileLimit) -> None:
    """What a full disk took in part is as if it had never been written, and the next append is found."""
    path = tmp_path / "journal"
    journal = Journal(path, stride_bytes=STRIDE, num_slots=10)
    journal.append(names_of([1]), slots_of([1]))
    with files_no_longer_than(journal.num_bytes + 20), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        journal.append(names_of([2]), slots_of([2]))
    assert path.stat().st_size > journal.num_bytes
    journal.append(names_of([3]), slots_of([3]))
    with files_no_longer_than(20), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        journal.rewrite(names_of([4]), slots_of([4]))
    journal.close()
    assert content_of(path) == [(1, 1), (3, 3)]


def test_many_entries(tmp_path: Path) -> None:
    """More entries than a frame holds come back whole and in order."""
    count = 200_000
    names = np.random.default_rng(1).integers(1, 2**63, (count, 4), dtype=np.uint64)
    slots = np.random.default_rng(2).permutation(count)
    journal = Journal(tmp_path / "journal", stride_bytes=STRIDE, num_slots=count)
    journal.append(names, slots)
    journal.close()
    _, entries, num_bytes = parse((tmp_path / "journal").read_bytes(), STRIDE)
    assert num_bytes == journal.num_bytes
    assert np.array_equal(entries["name"], names)
    assert np.array_equal(entries["slot"], slots)


def test_a_folder_that_cannot_be_synced_costs_nothing_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new file is in its place by then: what is remembered afterwards is in it, and what is forgotten is gone."""
    path = tmp_path / "folder" / "journal"
    path.parent.mkdir()
    fsync = os.fsync

    def no_folders(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().is_dir():
            raise OSError(errno.EIO, "no folders today")
        fsync(fd)

    journal = Journal(path, stride_bytes=STRIDE, num_slots=10)
    monkeypatch.setattr(os, "fsync", no_folders)
    with pytest.raises(OSError, match="no folders today"):
        journal.rewrite(names_of([1, 2]), slots_of([1, 2]), sync=True)
    journal.append(names_of([0, 3]), slots_of([1, 3]))
    journal.close()
    assert content_of(path) == [(2, 2), (3, 3)]
