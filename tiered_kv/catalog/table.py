"""Which slot holds a name: a hash table over numpy arrays that works on whole batches and never rehashes.

A Python dict of a million names pauses for tens of milliseconds when it grows, and gives the garbage collector a
million objects to walk. Here everything is allocated once: buckets of eight 64-bit entries, one cache line each, an
entry being 32 bits of hash and a slot id. The few names that find their bucket full live in a small dict. Names are
compared exactly before any of them is called found, so a weak or hostile distribution of names costs time and never a
wrong answer.

Pure data: no locks; one thread at a time.

numpy lets other threads run in `take`, `arange`, `sort`, `argmax`, `searchsorted`, in moving rows of an array and in
converting an index, even if there are only two elements; in indexing from some hundred on. Transfers take some dozens
of such calls a window on the event loop's thread: beside transfers at full speed it let go of the interpreter 14,000
times a second, and where another thread of the cache came first it had it back 0.4 ms later. So the catalog does
without these for few blocks.
"""

from operator import mul
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.values.keys import Names

Slots = NDArray[np.int64]
"""A batch of slot ids, shape ``(n,)``. Where a slot may be absent, -1 says so."""

_WAYS: Final = 8
_ROW: Final = np.dtype("V32")  # numpy copies an opaque row with one memcpy, which `take` and `put` of four words do not
_BUCKET: Final = np.dtype((np.void, 8 * _WAYS))
_FEW: Final = 32
"""Of so many names Python finds repeats sooner than numpy begins."""
_FEW_SLOTS: Final = 64
"""Likewise, of slots. More rows are taken in a third of the time that it takes to index them."""
_COUNTED: Final = np.arange(_FEW_SLOTS)
_COUNTED.flags.writeable = False
_SLOT_BITS: Final = np.uint64(32)
_SLOT_LIMIT: Final = np.uint64(1 << 32)
_LANE_BITS: Final = 3
_ALL_FOUR: Final = np.uint32(0x01010101)  # four words of a name that are all the same, as bytes of booleans
# Odd, hence invertible modulo 2**64: names that differ in one word only never collide in all 64 bits.
_MULTIPLIERS: Final = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64
)
_INT_MULTIPLIERS: Final[list[int]] = _MULTIPLIERS.tolist()
_WORD: Final = (1 << 64) - 1
_WORDS: Final = Struct("=4Q")
_TAG: Final = (1 << 32) - 1


def hash_names(names: Names) -> NDArray[np.uint64]:
    """Mix all four words of each name into 64 bits, ``(n,)``. Cheap, not cryptographic: equal hashes prove nothing."""
    mixed: NDArray[np.uint64] = names @ _MULTIPLIERS
    return mixed


def _hash_one(name: bytes) -> int:
    """Return `hash_names` of one as an int."""
    mixed: int = sum(map(mul, _WORDS.unpack(name), _INT_MULTIPLIERS)) & _WORD
    return mixed


def counted(n: int) -> Slots:
    """Return ``0, 1, ..., n - 1``, perhaps read-only. To make few anew numpy would let go of the interpreter."""
    return _COUNTED[:n] if n <= _FEW_SLOTS else np.arange(n)


def names_at(names: Names, at: Slots | NDArray[np.bool_]) -> Names:
    """Return copies of the names at some positions, or of those that a mask says."""
    rows = _rows(names)
    rows = rows[at] if len(at) <= _FEW_SLOTS or at.dtype == np.bool_ else rows.take(at)
    return rows.view(np.uint64).reshape(-1, 4)


def first_occurrences(names: Names) -> Slots:
    """Positions in the batch, ascending, at which a name appears for the first time."""
    if len(names) <= _FEW and len(set(_rows(names).tolist())) == len(names):
        return counted(len(names))
    hashes = np.sort(hash_names(names))
    if not (hashes[1:] == hashes[:-1]).any():
        return counted(len(names))
    seen: set[bytes] = set()
    first: list[int] = []
    for position, row in enumerate(_rows(names).tolist()):
        if row not in seen:
            seen.add(row)
            first.append(position)
    return np.array(first, dtype=np.int64)


def absent_from(names: Names, found: Slots) -> Slots:
    """Return the positions of those names, each once, for which no slot was ``found``."""
    absent = (found < 0).nonzero()[0]
    if len(absent) == len(names):
        return first_occurrences(names)
    return absent[first_occurrences(names_at(names, absent))] if len(absent) else absent


def unique(slots: Slots) -> Slots:
    """Drop repeats, keep the order of first occurrences."""
    if len(slots) <= _FEW_SLOTS and len(set(slots.tolist())) == len(slots):
        return slots
    # Not by np.unique: its first call imports numpy.ma, a pause of 7 ms.
    ordered = np.sort(slots)
    if not (ordered[1:] == ordered[:-1]).any():
        return slots
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    return slots[np.sort(order[np.diff(ordered, prepend=-1).nonzero()[0]])]


class NameTable:
    """A map from names to the slots ``0 <= slot < capacity``, at most one name a slot and one slot a name.

    Takes 32 bytes a slot for the names and 32 to 64 for the buckets.
    """

    def __init__(self, capacity: int) -> None:
        """Allocate for ``capacity`` slots; nothing is allocated later but the entries of full buckets."""
        self.capacity = capacity
        bits = max(1, (max(capacity, 1) - 1).bit_length() - 1)  # one to two names a bucket when full: 0.01 % spill over
        self._shift = np.uint64(64 - bits)
        self._shift_int = 64 - bits
        # Written to, so that the pages exist: at a million slots the faults of one random batch took 100 ms.
        self._names = _rows(np.full((max(capacity, 1), 4), 0, dtype=np.uint64))
        self._buckets = np.full((1 << bits, _WAYS), 0, dtype=np.uint64)
        self._bucket_rows = self._buckets.view(_BUCKET).reshape(-1)
        self._spilled = np.full(1 << bits, 0, dtype=np.int32)  # names of this bucket that live in `_stash`
        self._stash: dict[bytes, int] = {}

    def find(self, names: Names) -> Slots:
        """Return each name's slot, or -1: ``(n,)`` int64."""
        hashes = hash_names(names)
        buckets = self._bucket_of(hashes)
        entries = self._entries_of(buckets)
        tags = (hashes << _SLOT_BITS).repeat(_WAYS).reshape(entries.shape)  # numpy is slow to spread so few columns
        entries ^= tags  # where the tag agrees, the slot (plus one) is all that is left
        matches = (entries < _SLOT_LIMIT).ravel().nonzero()[0]
        slots = entries.reshape(-1)[matches].view(np.int64)
        slots -= 1
        # Nearly every batch is a whole hit or a whole miss: one comparison of the bytes settles a hit.
        if len(matches) == len(names) and self.names(slots).tobytes() == names.tobytes():
            return slots
        return self._settle(names, buckets, matches >> _LANE_BITS, slots)

    def find_one(self, name: bytes) -> int:
        """Return the slot of one name, or -1: `find` without the fixed cost of arrays."""
        mixed = _hash_one(name)
        tag = (mixed & _TAG) << 32
        for entry in self._buckets[mixed >> self._shift_int].tolist():
            slot: int = (entry ^ tag) - 1
            if 0 <= slot < self.capacity and self._names[slot].tobytes() == name:
                return slot
        return self._stash.get(name, -1)

    def names(self, slots: Slots) -> Names:
        """Return copies of the names that were last inserted at these slots."""
        rows = self._names[slots] if len(slots) <= _FEW_SLOTS else self._names.take(slots)
        return rows.view(np.uint64).reshape(-1, 4)

    def run_at(self, slot: int, names: Names) -> int:
        """Count the leading names that lie at ``slot, slot + 1, ...``; a removed name counts as still lying there."""
        held = self._names[slot : slot + len(names)]
        rows = _rows(names)
        if held[1:2].tobytes() != rows[1:2].tobytes():
            return 1 if held[:1].tobytes() == rows[:1].tobytes() else 0
        if held.tobytes() == rows.tobytes():
            return len(names)
        same = held.view(np.uint64) == rows[: len(held)].view(np.uint64)
        differing = (same.view(np.uint32) != _ALL_FOUR).ravel().nonzero()[0]
        return int(differing[0]) if len(differing) else len(held)

    def insert(self, names: Names, slots: Slots) -> None:
        """Add names, none of them in the table or twice in the batch, at slots that hold none."""
        self._names.put(slots, _rows(names))
        if len(names) == 1:  # without the fixed cost of arrays: most stores of a decoding engine are
            mixed = _hash_one(names.tobytes())
            entries_of_bucket = self._buckets[mixed >> self._shift_int]
            lanes = entries_of_bucket.tolist()
            if 0 in lanes:
                entries_of_bucket[lanes.index(0)] = (mixed & _TAG) << 32 | int(slots[0]) + 1
                return
        hashes = hash_names(names)
        buckets = self._bucket_of(hashes)
        entries = hashes << _SLOT_BITS | (slots + 1).view(np.uint64)
        flat = self._buckets.reshape(-1)
        left = counted(len(names))
        while len(left):
            places = (buckets[left] << _LANE_BITS) + _first_zeros(self._entries_of(buckets[left]))
            full = flat[places] != 0
            if len(full.nonzero()[0]):
                self._spill(names, slots, buckets, left[full])
                left, places = left[~full], places[~full]
            flat[places] = entries[left]
            left = left[flat[places] != entries[left]]  # of several names at one place the last one stays: go on

    def remove(self, slots: Slots) -> None:
        """Forget the names at these slots, each of which holds one, none twice."""
        names = self.names(slots)
        hashes = hash_names(names)
        buckets = self._bucket_of(hashes)
        entries = hashes << _SLOT_BITS | (slots + 1).view(np.uint64)
        matches = (self._entries_of(buckets) == entries[:, None]).ravel().nonzero()[0]
        rows = matches >> _LANE_BITS
        self._buckets.reshape(-1)[(buckets[rows] << _LANE_BITS) + (matches & (_WAYS - 1))] = 0
        if len(matches) < len(slots):
            stashed = np.ones(len(slots), dtype=np.bool_)
            stashed[rows] = False
            for row in np.flatnonzero(stashed).tolist():
                del self._stash[names[row].tobytes()]
                self._spilled[buckets[row]] -= 1

    def clear(self) -> None:
        """Forget every name."""
        self._buckets.fill(0)
        self._spilled.fill(0)
        self._stash.clear()

    def _entries_of(self, buckets: Slots) -> NDArray[np.uint64]:
        """Return copies of the entries of some buckets: ``(n, 8)``."""
        rows = self._bucket_rows
        entries = rows[buckets] if len(buckets) <= _FEW_SLOTS else rows.take(buckets)
        return entries.view(np.uint64).reshape(-1, _WAYS)

    def _bucket_of(self, hashes: NDArray[np.uint64]) -> Slots:
        return (hashes >> self._shift).view(np.int64)

    def _settle(self, names: Names, buckets: Slots, rows: Slots, candidates: Slots) -> Slots:
        """Compare each candidate with the name of its row; look for the rest among the spilled."""
        slots = np.empty(len(names), dtype=np.int64)
        slots.fill(-1)
        if len(candidates):
            same = (self.names(candidates) == names_at(names, rows)).all(axis=1)
            same &= candidates >= 0  # an empty entry looks like a match to a name whose tag is 0
            slots[rows[same]] = candidates[same]
        if self._stash and (spilled := self._spilled[buckets]).any():
            for row in ((slots < 0) & (spilled > 0)).nonzero()[0].tolist():
                slots[row] = self._stash.get(names[row].tobytes(), -1)
        return slots

    def _spill(self, names: Names, slots: Slots, buckets: Slots, rows: Slots) -> None:
        for row in rows.tolist():
            self._stash[names[row].tobytes()] = int(slots[row])
            self._spilled[buckets[row]] += 1


def _first_zeros(entries: NDArray[np.uint64]) -> Slots:
    """Return the first lane of each row that holds 0, or any if none does."""
    is_free = entries == 0
    if len(is_free) > _FEW:
        lanes: Slots = is_free.argmax(axis=1)
        return lanes
    held = is_free.tobytes()
    return np.array([max(0, held.find(1, row, row + _WAYS) - row) for row in range(0, len(held), _WAYS)], np.int64)


def _rows(names: Names) -> NDArray[np.void]:
    return names.view(_ROW).reshape(-1)
