"""Which block is in which slot, on disk: an append-only file, replayed at start. ``docs/format.md`` describes it.

Entries come in frames, one frame per batch, each with a checksum; what follows the last whole frame is cut. Nothing
here is trusted with bytes: a record names itself and is verified when it is read, so a journal that is stale, or that
survived a loss of power better than its slab did, costs misses and nothing else.

Used by one thread at a time.
"""

import contextlib
import os
import struct
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from tiered_kv.keys import Names

MAGIC = b"TKVJRNL1"
FRAME_MAGIC = b"TKVFRAME"
ENTRY = np.dtype([("name", "<u8", (4,)), ("slot", "<u8")])
"""One slot's new content; a name of zeros says that it has none."""

_HEAD = struct.Struct("<8sQQQ")
"""Of the file: magic, generation, stride, checksum. Of a frame: magic, generation, number of entries, checksum."""
_CHECKED = slice(8, 24)
"""The part of a head that its checksum covers, before the entries."""
_ENTRIES_PER_FRAME = 65536
_FIXED_BYTES = 65536
_BYTES_PER_SLOT = 160  # two frames of one entry each and then some: a full cache compacts once per 1.6 x slots written

Entries = NDArray[np.void]


class Journal:
    """The journal of one slab.

    Args:
        path: Its file; created if need be.
        stride_bytes: Length of a slot. A journal of another stride is begun anew.
        num_slots: Slots of the slab: bounds the length of the file.

    Attributes:
        num_bytes: Length of the file.

    Raises:
        OSError: From everything here. The file then holds what it held before.
    """

    def __init__(self, path: Path, *, stride_bytes: int, num_slots: int) -> None:
        self.path = path
        self._stride_bytes = stride_bytes
        self.resize(num_slots)
        self._generation, self._entries, self.num_bytes = parse(_read_file(path), stride_bytes)
        if not self.num_bytes:
            self._fd = self._begin(np.empty(0, ENTRY))
            return
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(self._fd, self.num_bytes)

    def resize(self, num_slots: int) -> None:
        """Bound the length of the file for so many slots; what is longer now is shortened at the next call."""
        self._limit_bytes = _FIXED_BYTES + _BYTES_PER_SLOT * num_slots

    @staticmethod
    def reserved_bytes(num_slots: int) -> int:
        """The most that a journal takes on disk, with its successor during a compaction."""
        return 2 * _FIXED_BYTES + (_BYTES_PER_SLOT + 2 * ENTRY.itemsize) * num_slots

    def recover(self) -> tuple[Names, NDArray[np.int64]]:
        """Return names ``(n, 4)`` and slots ``(n,)`` as the file was when it was opened, the last written last."""
        entries, self._entries = latest(self._entries), np.empty(0, ENTRY)
        return np.ascontiguousarray(entries["name"]), entries["slot"].astype(np.int64)

    def append(self, names: Names, slots: NDArray[np.int64]) -> None:
        """Remember that ``slots[i]`` holds ``names[i]`` from now on; names of zeros: that it holds nothing.

        It survives the end of this process, not a loss of power.
        """
        frames = _encode_frames(make_entries(names, slots), self._generation)
        if self.num_bytes + len(frames) > self._limit_bytes:
            _, entries, _ = parse(_read_file(self.path), self._stride_bytes)
            self._replace(latest(entries))
            frames = _encode_frames(make_entries(names, slots), self._generation)
        _write_all(self._fd, frames, self.num_bytes)  # behind the last whole frame, whatever an earlier failure left
        self.num_bytes += len(frames)

    def rewrite(self, names: Names, slots: NDArray[np.int64], *, sync: bool = False) -> None:
        """Remember exactly these, in this order; with ``sync``, return when it survives a loss of power."""
        self._replace(make_entries(names, slots), sync=sync)
        if sync:  # only now: should it fail, we go on with the new file, which is in place all the same
            _sync_folder(self.path.parent)
            _sync_folder(self.path.parent.parent)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _replace(self, entries: Entries, *, sync: bool = False) -> None:
        fd = self._begin(entries, sync=sync)
        os.close(self._fd)
        self._fd = fd

    def _begin(self, entries: Entries, *, sync: bool = False) -> int:
        """Put a new file in the place of the old one; return its descriptor."""
        temporary = self.path.with_suffix(".new")
        generation = self._generation + 1
        content = _pack(MAGIC, generation, self._stride_bytes) + _encode_frames(entries, generation)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, content, 0)
            if sync:
                os.fsync(fd)
            temporary.replace(self.path)
        except OSError:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        self._generation, self.num_bytes = generation, len(content)
        return fd


def make_entries(names: Names, slots: NDArray[np.int64]) -> Entries:
    """Return ``(n,)`` entries of names ``(n, 4)`` and slots ``(n,)``."""
    entries = np.empty(len(slots), ENTRY)
    entries["name"], entries["slot"] = names, slots
    return entries


def latest(entries: Entries) -> Entries:
    """Return, in order, the entries that no later one contradicts: each slot and each name once, no name of zeros."""
    _, last_of_slot = np.unique(entries["slot"][::-1], return_index=True)
    entries = entries[np.sort(len(entries) - 1 - last_of_slot)]
    entries = entries[entries["name"].any(axis=1)]
    words = entries["name"]
    order = np.lexsort(words.T)  # stable: of equal names the last written stays last
    is_last = np.ones(len(order), np.bool_)
    is_last[:-1] = (words[order[1:]] != words[order[:-1]]).any(axis=1)
    return entries[np.sort(order[is_last])]


def parse(data: bytes, stride_bytes: int) -> tuple[int, Entries, int]:
    """Read a journal up to its first bad byte.

    Returns:
        Its generation, its entries in order, and the length of what is good; length 0 if it is none of this stride.
    """
    view, at = memoryview(data), _HEAD.size
    if len(data) < at:
        return 0, np.empty(0, ENTRY), 0
    magic, generation, stride, checksum = _HEAD.unpack_from(data)
    if magic != MAGIC or stride != stride_bytes or checksum != xxhash.xxh3_64_intdigest(view[_CHECKED]):
        return 0, np.empty(0, ENTRY), 0
    bodies: list[memoryview] = []
    while at + _HEAD.size <= len(data):
        magic, frame_generation, count, checksum = _HEAD.unpack_from(data, at)
        body = view[at + _HEAD.size : at + _HEAD.size + count * ENTRY.itemsize]
        if magic != FRAME_MAGIC or frame_generation != generation or len(body) != count * ENTRY.itemsize:
            break
        if checksum != _checksum(view[at : at + _HEAD.size], body):
            break
        bodies.append(body)
        at += _HEAD.size + len(body)
    return generation, np.frombuffer(b"".join(bodies), ENTRY), at


def _encode_frames(entries: Entries, generation: int) -> bytes:
    parts = []
    for start in range(0, len(entries), _ENTRIES_PER_FRAME):
        body = entries[start : start + _ENTRIES_PER_FRAME].tobytes()
        parts += [_pack(FRAME_MAGIC, generation, len(body) // ENTRY.itemsize, body), body]
    return b"".join(parts)


def _pack(magic: bytes, generation: int, value: int, body: bytes = b"") -> bytes:
    head = bytearray(_HEAD.pack(magic, generation, value, 0))
    return _HEAD.pack(magic, generation, value, _checksum(memoryview(head), memoryview(body)))


def _checksum(head: memoryview, body: memoryview) -> int:
    hasher = xxhash.xxh3_64(head[_CHECKED])
    hasher.update(body)
    return hasher.intdigest()


def _read_file(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def _write_all(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        num_written = os.pwrite(fd, view, at)
        view, at = view[num_written:], at + num_written


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
