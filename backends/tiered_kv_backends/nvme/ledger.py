"""Which block is in which slot, on disk: one entry a slot, written in place. ``docs/format.md`` describes it.

An entry stands where its slot's number says, is found without any other, and has a checksum of its own. So nothing
grows, nothing is ever compacted, and a damaged place costs no more than what lay there: `Ledger.read` names the slots
whose entries cannot be read, and the headers of the records there say what they hold, as far as what is `Damaged` does
not deny it.

Nothing here is trusted with bytes: a record names itself and is verified when it is read. A ledger that is stale, or
that survived a loss of power better than its slab did, costs misses and nothing else.

Used by one thread at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from tiered_kv.system import files, system
from tiered_kv.values.keys import Names

ENTRY: Final = np.dtype(
    [("magic", "S8"), ("name", "<u8", (4,)), ("sequence", "<u8"), ("slot", "<u8"), ("checksum", "<u8")]
)
"""What a slot holds. Bytes of zeros: nothing was ever written of it."""
MAGIC: Final = b"TKVSLOT2"
EMPTY: Final = np.frombuffer(b"TKVEMPTY" * (ENTRY.itemsize // 8), ENTRY)
"""What is written of a slot that holds nothing any more: else an emptied ledger looked like one that was lost."""
LOST: Final = np.frombuffer(b"TKVLOST1" * (ENTRY.itemsize // 8), ENTRY)
"""What is written of slots whose entries are lost, before any entry is made anew: else a ledger of which only a part is
made anew looked like one that says of all others that nothing was ever written. While there is one, zeros say nothing.
"""

_CHECKED_BYTES = ENTRY.itemsize - 8
_CHUNK = 1 << 16
"""Entries read or written at once."""
_MAX_SEQUENCE = 1 << 62

Slots = NDArray[np.int64]


@dataclass(frozen=True)
class Entries:
    """What some slots hold.

    Attributes:
        names: ``(n, 4)``.
        slots: ``(n,)``.
        sequences: ``(n,)`` uint64. Greater is later; 0 where it is not known.
    """

    names: Names
    slots: Slots
    sequences: NDArray[np.uint64]

    @classmethod
    def joined(cls, *parts: "Entries") -> "Entries":
        """Return all of them, in the order given."""
        return cls(
            np.concatenate([part.names for part in parts]),
            np.concatenate([part.slots for part in parts]),
            np.concatenate([part.sequences for part in parts]),
        )

    def latest(self) -> tuple["Entries", Slots]:
        """Return each name once, the last written last; and the slots of what a later one replaced."""
        order = np.argsort(self.sequences, kind="stable")
        names, slots, sequences = self.names[order], self.slots[order], self.sequences[order]
        is_last = np.ones(len(names), np.bool_)
        by_word = np.argsort(names[:, 0], kind="stable")
        is_same = names[by_word[1:], 0] == names[by_word[:-1], 0]
        if is_same.any():  # few: only these are compared in full
            few = np.sort(by_word[np.append(is_same, False) | np.insert(is_same, 0, False)])
            by_name = few[np.lexsort(names[few].T)]  # stable: of equal names the last written stays last
            is_last[by_name[:-1]] = (names[by_name[1:]] != names[by_name[:-1]]).any(axis=1)
        return Entries(names[is_last], slots[is_last], sequences[is_last]), slots[~is_last]


@dataclass(frozen=True)
class Damaged:
    """Slots whose entries cannot be read.

    Who is killed, or without power, between a record and its entry leaves the record in a slot that is empty by the
    ledger, or another block's. Its block may have been evicted by name since, and must not come back because that entry
    rots. Of an entry with a few wrong bits it can be told what it was; of garbage, and of what is lost, it cannot.

    Attributes:
        slots: ``(n,)``.
        left: ``(m, 64)`` uint8: the entries of the first so many, which ascend, as they are; those of the others are
            lost.
    """

    slots: Slots
    left: NDArray[np.uint8]

    @property
    def lost(self) -> Slots:
        """The slots of which nothing is left."""
        return self.slots[len(self.left) :]

    def deny(self, found: Entries) -> NDArray[np.bool_]:
        """Say of each whether what is left of the slot's entry says still that the slot holds something else."""
        broken = self.slots[: len(self.left)]
        at = np.searchsorted(broken, found.slots)
        denied = at < len(broken)
        denied[denied] = broken[at[denied]] == found.slots[denied]
        left, names, slots = self.left[at[denied]], found.names[denied], found.slots[denied]
        asked = encode(names, slots, np.zeros(len(slots), np.uint64)).view(np.uint8).reshape(left.shape)
        is_empty = _are_near(left, _EMPTY_BYTES) | _are_near(left, np.zeros_like(_EMPTY_BYTES))
        is_entry = _are_near(left[:, _MAGIC_AND_SLOT], asked[:, _MAGIC_AND_SLOT])
        denied[denied] = is_empty | (is_entry & ~_are_near(left[:, _NAME], asked[:, _NAME]))
        return denied


class Order:
    """Numbers what is written, in the order of time: one for all ledgers of a tier. Any thread may use it."""

    def __init__(self) -> None:
        self._next = 1
        self._lock = system().lock()

    def take(self, n: int) -> NDArray[np.uint64]:
        """Return the next ``n`` numbers."""
        with self._lock:
            first, self._next = self._next, self._next + n
        return np.arange(first, first + n, dtype=np.uint64)

    def go_on_after(self, sequence: int) -> None:
        """Return greater numbers than this one from now on."""
        with self._lock:
            self._next = max(self._next, sequence + 1)


class Ledger:
    """The ledger of one slab.

    Args:
        fd: Its file, which belongs to this object from now on.
        order: Numbers what is written here; goes on after what is found.

    Attributes:
        num_slots: How many slots have their entry in the file.
        is_blank: Whether all of it was zeros when it was read: nothing was ever written, or it was lost.
        bytes_written: To the file, by this object.

    Raises:
        OSError: From everything here. What was not written to is as it was.
    """

    def __init__(self, fd: int, order: Order) -> None:
        self._fd = fd
        self._order = order
        self._lock = system().lock()
        self.bytes_written = 0
        self.is_blank = False
        try:
            self.num_slots = files().fstat(fd).st_size // ENTRY.itemsize
        except BaseException:  # nobody else has it yet
            files().close(fd)
            raise

    @staticmethod
    def num_bytes(num_slots: int) -> int:
        """Length of the file for so many slots."""
        return num_slots * ENTRY.itemsize

    @property
    def is_removed(self) -> bool:
        """Whether somebody has deleted the file."""
        return not files().fstat(self._fd).st_nlink

    def read(self, num_allocated: int) -> tuple[Entries, Damaged]:
        """Return what the first so many slots hold, and which of them have an entry that cannot be read.

        What the file says about later slots is dropped: those have no place on the disk, so they hold nothing. A file
        of zeros alone can be read as little as one that is not there. Of what is lost it says so from now on, if it can
        be written to: until there are entries of it, that stays lost, whoever is killed meanwhile.
        """
        here, damaged, later = self.look(num_allocated)
        self.clear(later)
        with suppress(OSError):
            self.say_lost(damaged.lost)
        return here, damaged

    def look(self, num_allocated: int) -> tuple[Entries, Damaged, Slots]:
        """Return what `read` does, and which later slots the file says something about. Nothing is written."""
        parts, damaged, left = [_NO_ENTRIES], [_NO_SLOTS], [np.empty((0, ENTRY.itemsize), np.uint8)]
        losses = [_NO_SLOTS]
        self.is_blank = self.num_slots > 0
        for start, data in self._chunks():
            entries, broken = parse(data, start)
            words = _words(data)
            is_lost = (words[broken - start] == _LOST_WORDS).all(axis=1)
            parts.append(entries)
            losses.append(broken[is_lost])
            damaged.append(broken := broken[~is_lost])
            left.append(words[broken - start].view(np.uint8))
            self.is_blank &= not words.any()
        entries, broken, lost = Entries.joined(*parts), np.concatenate(damaged), np.concatenate(losses)
        self._order.go_on_after(int(entries.sequences.max(initial=0)))
        is_here, is_broken_here, is_lost_here = (each < num_allocated for each in (entries.slots, broken, lost))
        later = np.concatenate([entries.slots[~is_here], broken[~is_broken_here], lost[~is_lost_here]])
        here = Entries(entries.names[is_here], entries.slots[is_here], entries.sequences[is_here])
        if self.is_blank or len(lost):
            zeros = [start + np.flatnonzero(np.logical_not(_words(data).any(axis=1))) for start, data in self._chunks()]
            lost = np.concatenate([lost, *zeros])
        lost = np.sort(np.append(lost[lost < num_allocated], np.arange(self.num_slots, num_allocated)))
        return here, Damaged(np.append(broken[is_broken_here], lost), np.concatenate(left)[is_broken_here]), later

    def say_lost(self, slots: Slots) -> None:
        """Remember, whatever befalls the machine, that nobody knows what these slots hold but the headers there."""
        if len(slots):
            self._put(slots, lambda part: np.repeat(LOST, len(part)))
            self.sync()

    def _chunks(self) -> Iterator[tuple[int, bytes]]:
        """Yield the entries of some slots, and the first of these, again and again; zeros where the file has ended."""
        for start in range(0, self.num_slots, _CHUNK):
            num_bytes = self.num_bytes(min(_CHUNK, self.num_slots - start))
            yield start, files().pread(self._fd, num_bytes, self.num_bytes(start)).ljust(num_bytes, b"\0")

    def write(self, names: Names, slots: Slots, sequences: NDArray[np.uint64] | None = None) -> None:
        """Remember that ``slots[i]`` holds ``names[i]`` from now on, used later than all that was written before.

        It survives the end of this process, not a loss of power.

        Args:
            names: ``(n, 4)``.
            slots: ``(n,)``.
            sequences: ``(n,)``, of the order: when else it was used. By default all are used now, one after another.
        """
        numbers = self._order.take(len(slots)) if sequences is None else sequences
        self._put(slots, lambda part: encode(names[part], slots[part], numbers[part]))

    def write_oldest(self, names: Names, slots: Slots) -> None:
        """Remember that ``slots[i]`` holds ``names[i]``, used before all that has been or will be written."""
        self._put(slots, lambda part: encode(names[part], slots[part], np.zeros(len(part), np.uint64)))

    def clear(self, slots: Slots) -> None:
        """Remember that these slots hold nothing."""
        self._put(slots, lambda part: np.repeat(EMPTY, len(part)))

    def grow(self, num_slots: int, allocate: Callable[[int, int, int], None]) -> None:
        """Have entries for at least so many slots: ``allocate(fd, offset, num_bytes)`` gives them their place."""
        if num_slots > self.num_slots:
            here = self.num_bytes(self.num_slots)
            allocate(self._fd, here, self.num_bytes(num_slots) - here)
            self.num_slots = num_slots

    def shrink(self, num_slots: int) -> int:
        """Drop the entries of the slots from ``num_slots`` on; return how many bytes that frees."""
        num_dropped = max(0, self.num_slots - num_slots)
        cut(self._fd, self.num_bytes(self.num_slots - num_dropped))
        self.num_slots -= num_dropped
        return self.num_bytes(num_dropped)

    def sync(self) -> None:
        """Return when all that was written survives a loss of power."""
        files().fsync(self._fd)

    def close(self) -> None:
        """Close the file."""
        files().close(self._fd)

    def _put(self, slots: Slots, make: Callable[[Slots], NDArray[np.void]]) -> None:
        """Write ``make(part)`` to the places of ``slots[part]``, neighbours by one call."""
        order = np.argsort(slots, kind="stable")  # of a slot that is there twice the last one counts
        for run in _runs(slots[order]):
            part = order[run]
            data = make(part).tobytes()
            _write_all(self._fd, data, int(slots[part[0]]) * ENTRY.itemsize)
            with self._lock:
                self.bytes_written += len(data)


_EMPTY_WORDS, _EMPTY_BYTES = EMPTY.view(np.uint64), EMPTY.view(np.uint8)
_LOST_WORDS = LOST.view(np.uint64)
_NO_SLOTS: Final[Slots] = np.empty(0, np.int64)
_NAME: Final = slice(8, 40)
_MAGIC_AND_SLOT: Final = (*range(8), *range(48, 56))
"""Where these are in the bytes of an entry."""
_NO_ENTRIES = Entries(np.empty((0, 4), np.uint64), np.empty(0, np.int64), np.empty(0, np.uint64))


def encode(names: Names, slots: Slots, sequences: NDArray[np.uint64]) -> NDArray[np.void]:
    """Return ``(n,)`` entries as they are on disk."""
    entries = np.empty(len(slots), ENTRY)
    entries["magic"], entries["name"], entries["sequence"], entries["slot"] = MAGIC, names, sequences, slots
    entries["checksum"] = _checksums(entries)
    return entries


def parse(data: bytes, first_slot: int) -> tuple[Entries, Slots]:
    """Read entries of consecutive slots; return those that hold a block, and the slots of those that are damaged."""
    entries = np.frombuffer(data, ENTRY)
    slots = np.arange(first_slot, first_slot + len(entries), dtype=np.int64)
    words = _words(data)
    is_used = words.any(axis=1) & (words != _EMPTY_WORDS).any(axis=1)
    used, slots = entries[is_used], slots[is_used]
    is_good = (used["magic"] == MAGIC) & (used["slot"] == slots.view(np.uint64)) & (used["sequence"] < _MAX_SEQUENCE)
    is_good[is_good] = used["checksum"][is_good] == _checksums(used[is_good])
    good = used[is_good]
    return Entries(np.ascontiguousarray(good["name"]), slots[is_good], good["sequence"].copy()), slots[~is_good]


def _words(data: bytes) -> NDArray[np.uint64]:
    """Return entries as rows of eight words."""
    return np.frombuffer(data, np.uint64).reshape(-1, ENTRY.itemsize // 8)


def _are_near(some: NDArray[np.uint8], other: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Say of each row whether fewer than one bit in eight is another: of random ones it is every second."""
    near: NDArray[np.bool_] = np.unpackbits(some ^ other, axis=1).sum(axis=1) < some.shape[1]
    return near


def _checksums(entries: NDArray[np.void]) -> NDArray[np.uint64]:
    data, digest, each = memoryview(entries.tobytes()), xxhash.xxh3_64_intdigest, ENTRY.itemsize
    starts = range(0, len(data), each)
    return np.fromiter((digest(data[at : at + _CHECKED_BYTES]) for at in starts), np.uint64, len(entries))


def _runs(ascending: Slots) -> Iterator[slice]:
    """Split ascending slots where they are not neighbours, and where a run is as long as a chunk."""
    cuts = (np.diff(ascending) != 1).nonzero()[0] + 1
    bounds = [0, *cuts.tolist(), len(ascending)]
    for start, end in pairwise(bounds):
        for at in range(start, end, _CHUNK):
            yield slice(at, min(end, at + _CHUNK))


def cut(fd: int, num_bytes: int) -> None:
    """Have a file end there at the latest. One that does is let be: where writes copy, a full disk takes no call."""
    if files().fstat(fd).st_size > num_bytes:
        files().ftruncate(fd, num_bytes)


def _write_all(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        num_written = files().pwrite(fd, view, at)
        view, at = view[num_written:], at + num_written
