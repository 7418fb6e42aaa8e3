"""What lies in the directories of nvme and shared_fs tiers, by their formats alone: ``docs/format.md``.

No cache is opened, only names and files of ours are looked at, and no link is followed. Where some of an NVMe tier's
directories are missing, what is on the others is listed, and nothing is deleted.
"""

import asyncio
import errno
import fcntl
import os
import re
import stat
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from tiered_kv.media.backend import Found, Inventory, Place, RecordShape
from tiered_kv.media.record import HEADER_BYTES, key_in, payload_bytes_in
from tiered_kv.values.errors import BackendUnavailableError, BlockCorruptError, ConfigurationError
from tiered_kv.values.keys import BlockKey

_NVME_FOLDER: Final = re.compile(r"[0-9a-f]{64}(-\d+of\d+)?")
_FOLDER: Final = re.compile(r"[0-9a-f]+(-\d+of\d+)?|replicated|\d+of\d+")
"""What a tier calls its folders; others in its place, as lost+found, are nobody's here."""
_MODELS_FOLDER: Final = re.compile(r"[0-9a-f]{32}")
"""Where a host's server keeps a model: a tier's directory below that of its settings."""
_SHARED_FILE: Final = re.compile(
    r"(?P<path>[0-9a-f]{64}/[0-9a-f]{32}/(replicated|[0-9]+of[0-9]+)/[0-9a-f]{32})/[0-9a-f]+/[0-9a-f]{64}"
)
_ENTRY: Final = np.dtype(
    [("magic", "S8"), ("name", "<u8", (4,)), ("sequence", "<u8"), ("slot", "<u8"), ("checksum", "<u8")]
)
_ENTRY_MAGIC: Final = b"TKVSLOT2"
_EMPTY: Final = b"TKVEMPTY" * (_ENTRY.itemsize // 8)
_LOST: Final = b"TKVLOST1" * (_ENTRY.itemsize // 8)
_AT_ONCE: Final = 256
_ENTERED_S: Final = 1.0
"""How long after a record its entry may come, which is written once the others of its batch are."""


@dataclass(frozen=True)
class _File(Found):
    """A record that is a file; ``where`` is its path."""

    def is_named_by(self, key: BlockKey) -> bool:
        return self.where.endswith(f"/{key.hash.hex()}") and key.namespace.path in self.where


@dataclass(frozen=True)
class _Slot(Found):
    """A record in a slab; ``entry`` is what the ledger beside it says of it, if that can be read: ``is_said``."""

    slab: Path = Path()
    slot: int = 0
    entry: bytes = b""
    is_said: bool = True

    def is_named_by(self, key: BlockKey) -> bool:
        if not self.is_said:
            return True  # by its header alone
        (entry,) = np.frombuffer(self.entry, _ENTRY)
        return bool(key.namespace.names_of([key.hash]).tobytes() == entry["name"].tobytes())

    def is_entered(self) -> bool:
        """Say whether the ledger says so still."""
        try:
            with self.slab.with_name("ledger").open("rb") as ledger:
                return os.pread(ledger.fileno(), _ENTRY.itemsize, self.slot * _ENTRY.itemsize) == self.entry
        except FileNotFoundError:
            return not self.entry and self.slab.exists()


class DirectoryInventory(Inventory):
    """What lies in the directories of one tier. It deletes from an NVMe tier only while no cache has that open.

    Attributes:
        missing: Directories that are not there.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.missing = tuple(root for root in roots if not root.is_dir())
        self._roots = [root for root in roots if root not in self.missing]
        self._locks: dict[Path, int] = {}

    def is_a_tiers(self) -> bool:
        """Say whether a tier has used one of them."""
        return any(map(_is_a_tiers, self._roots))

    async def found(self) -> AsyncIterator[list[Found]]:
        """Walk them, and read the headers of an NVMe tier's records: names there tell nothing."""
        for root in self._roots:
            some: list[Found] = []
            for each in _records_in(root):
                some.append(each)
                if len(some) == _AT_ONCE:
                    yield some
                    some = []
            yield some

    async def read(self, found: Found) -> bytes | bytearray | None:
        """Read one record, with its padding."""
        try:
            return await asyncio.to_thread(_read, found)
        except FileNotFoundError:
            return None  # evicted meanwhile
        except OSError as error:
            if error.errno == errno.EIO:
                raise BlockCorruptError(f"cannot be read: {error.strerror}") from error
            raise BackendUnavailableError(f"{found.where}: {error.strerror}") from error

    async def still_there(self, found: Sequence[Found]) -> list[bool]:
        """Say which records were not replaced, nor removed, since they were found: by a cache that has the tier open.

        An NVMe tier's slots are written in place, and a moment later their entries.
        """
        are_there = await asyncio.to_thread(_are_there, found)
        if any(is_there and isinstance(each, _Slot) for is_there, each in zip(are_there, found, strict=True)):
            await asyncio.sleep(_ENTERED_S)
            are_there = await asyncio.to_thread(_are_there, found)
        return are_there

    async def delete(self, found: Sequence[Found]) -> None:
        """Have nobody find them again.

        Raises:
            ConfigurationError: They are an NVMe tier's, and a cache has it open.
        """
        if any(isinstance(each, _Slot) for each in found):
            self.lock_out_caches()
        await asyncio.to_thread(_delete, found)

    def close(self) -> None:
        """Let caches open the tier again."""
        while self._locks:
            os.close(self._locks.popitem()[1])

    def lock_out_caches(self) -> None:
        """Keep caches from opening an NVMe tier's directories until this is closed.

        Raises:
            ConfigurationError: One has one of them open, or one is missing, which would bring its blocks back.
        """
        if self.missing:
            raise ConfigurationError(f"{_listed(self.missing)}: nothing was deleted, what is there would come back")
        for root in self._roots:
            if root in self._locks or not any(root.glob("*/slab")):
                continue
            file = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(file)
                raise ConfigurationError(f"{root} is open in a cache: close that first, nothing was deleted") from error
            self._locks[root] = file


@asynccontextmanager
async def open_directories(roots: Sequence[Path], *, to_delete: bool) -> AsyncIterator[DirectoryInventory]:
    """Yield the inventory of a tier's directories; ``to_delete``, with the right to delete from them.

    Raises:
        ConfigurationError: None is there; or it is to be deleted from, and not all are, or a cache has one open.
    """
    inventory = DirectoryInventory([each for root in roots for each in _with_models(root)])
    if len(inventory.missing) == len(roots):
        named = _listed(roots)
        raise ConfigurationError(f"{named}: give the path of an nvme or shared_fs tier, or a tier's URL")
    if not inventory.is_a_tiers():
        named = ", ".join(map(str, roots))
        raise ConfigurationError(f"no nvme or shared_fs tier has used {named}: give its path, or a tier's URL")
    try:
        if to_delete:
            inventory.lock_out_caches()
        yield inventory
    finally:
        inventory.close()


def _with_models(root: Path) -> Iterator[Path]:
    """Yield a directory, and those below it of the models of a host's server."""
    yield root
    for each in sorted(root.iterdir()) if root.is_dir() else ():
        if _MODELS_FOLDER.fullmatch(each.name) and each.is_dir() and not each.is_symlink() and _is_a_tiers(each):
            yield each


def _is_a_tiers(root: Path) -> bool:
    """Whether there is what a tier makes there when it is opened, or a record that was copied there."""
    return (root / "sweeper.lock").exists() or any(root.glob("*/slab")) or any(True for _ in _records_in(root))


def _listed(roots: Sequence[Path]) -> str:
    return f"{', '.join(map(str, roots))} {'is no directory' if len(roots) == 1 else 'are no directories'}"


def _read(found: Found) -> bytes:
    if found.is_too_long:
        return b""
    if not isinstance(found, _Slot):
        with Path(found.where).open("rb") as file:
            return file.read(found.num_bytes)
    with found.slab.open("rb") as file:
        return os.pread(file.fileno(), found.num_bytes, found.slot * found.num_bytes)


def _are_there(found: Sequence[Found]) -> list[bool]:
    return [not isinstance(each, _Slot) or each.is_entered() for each in found]


def _delete(found: Sequence[Found]) -> None:
    for unsaid in {each.slab for each in found if isinstance(each, _Slot) and not each.is_said}:
        _say_lost(unsaid)
    for each in found:
        if not isinstance(each, _Slot):
            Path(each.where).unlink(missing_ok=True)
            continue
        with each.slab.with_name("ledger").open("r+b") as ledger:
            os.pwrite(ledger.fileno(), _EMPTY, each.slot * _ENTRY.itemsize)
        with each.slab.open("r+b") as slab:
            os.pwrite(slab.fileno(), bytes(HEADER_BYTES), each.slot * each.num_bytes)


def _records_in(root: Path) -> Iterator[Found]:
    def give_up(error: OSError) -> None:
        """Raise for a folder of ours that cannot be listed: what is in it would be taken for gone."""
        path = Path(error.filename or root)
        if not isinstance(error, FileNotFoundError) and (path == root or _FOLDER.fullmatch(path.name)):
            raise error

    for folder, folders, files in os.walk(root, onerror=give_up):
        folders.sort()
        here = Path(folder)
        if "slab" in files and here.parent == root and _NVME_FOLDER.fullmatch(here.name):
            yield from _in_slab(here)
            continue
        for name in sorted(files):
            path = here / name  # of what only ends or begins like a record, or lies deeper, nothing is ours
            if (match := _SHARED_FILE.fullmatch(path.relative_to(root).as_posix())) is None:
                continue
            try:
                status = path.lstat()
            except FileNotFoundError:  # deleted meanwhile, by whoever uses the tier
                continue
            if stat.S_ISREG(status.st_mode):
                yield _File(str(path), Place.of(match["path"]), status.st_size, written_at=status.st_mtime)


def _in_slab(folder: Path) -> Iterator[Found]:
    """Yield what the ledger beside a slab says is there; of slots of which it cannot say it, what their headers do."""
    slab, ledger = folder / "slab", folder / "ledger"
    if slab.is_symlink() or not slab.is_file() or ledger.is_symlink():
        return
    if ledger.exists() and not ledger.is_file():  # who opens a pipe waits for ever
        return
    data, said, unsaid = _read_ledger(ledger)
    if (data and not len(said) and not len(unsaid)) or not (stride := _stride_of(slab)):
        return
    num_slots = slab.stat().st_size // stride
    unknown = np.append(unsaid[unsaid < num_slots], np.arange(len(data) // _ENTRY.itemsize, num_slots))
    with slab.open("rb") as file:
        for slot, is_said in sorted([(n, True) for n in said.tolist()] + [(n, False) for n in unknown.tolist()]):
            key = _key_at(file.fileno(), slot * stride)
            if not is_said and (key is None or key.namespace.fingerprint.hex() != folder.name[:64]):
                continue
            place = Place.of(key.path) if key is not None else Place(folder.name[:64], "", "", "")
            entry = data[slot * _ENTRY.itemsize : (slot + 1) * _ENTRY.itemsize]
            where = f"{slab}@{slot * stride}"
            yield _Slot(where, place, stride, slab=slab, slot=slot, entry=entry, is_said=is_said)


def _read_ledger(ledger: Path) -> tuple[bytes, NDArray[np.int64], NDArray[np.int64]]:
    """Return whole entries, the slots of those that name a block, and of those that cannot say what there is."""
    data = ledger.read_bytes() if ledger.exists() else b""
    data = data[: len(data) // _ENTRY.itemsize * _ENTRY.itemsize]
    entries, rows = np.frombuffer(data, _ENTRY), np.frombuffer(data, "S64")
    is_said = (entries["magic"] == _ENTRY_MAGIC) & (entries["slot"] == np.arange(len(entries)))
    for slot in np.flatnonzero(is_said).tolist():
        entry = data[slot * _ENTRY.itemsize : (slot + 1) * _ENTRY.itemsize]
        is_said[slot] = xxhash.xxh3_64_intdigest(entry[:-8]) == entries["checksum"][slot]
    is_zero, is_lost = rows == b"", rows == _LOST
    is_unsaid = ~(is_said | is_zero | (rows == _EMPTY))
    if is_zero.all() or is_lost.any():
        is_unsaid |= is_zero
    return data, np.flatnonzero(is_said), np.flatnonzero(is_unsaid)


def _say_lost(slab: Path) -> None:
    """Have the ledger say which of its entries are lost, before some of these are made: see ``docs/format.md``."""
    ledger, stride = slab.with_name("ledger"), _stride_of(slab)
    data, _, unsaid = _read_ledger(ledger)
    fd = os.open(ledger, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        for slot in (*unsaid.tolist(), *range(len(data) // _ENTRY.itemsize, slab.stat().st_size // stride)):
            os.pwrite(fd, _LOST, slot * _ENTRY.itemsize)
        os.fsync(fd)
    finally:
        os.close(fd)


def _key_at(file: int, at: int) -> BlockKey | None:
    """Return whose header lies there; None of what is none, or cannot be read."""
    try:
        header = memoryview(os.pread(file, HEADER_BYTES, at))
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return None
    return key_in(header) if len(header) == HEADER_BYTES else None


def _stride_of(slab: Path) -> int:
    """Return how far apart the records of a slab are, by the first whole header in it; 0 if there is none."""
    with slab.open("rb") as file:
        for at in range(0, os.fstat(file.fileno()).st_size, HEADER_BYTES):
            if (key := _key_at(file.fileno(), at)) is not None:
                header = memoryview(os.pread(file.fileno(), HEADER_BYTES, at))
                stride = RecordShape(key.namespace.fingerprint, payload_bytes_in(header)).stride_bytes
                if at % stride == 0:
                    return stride
    return 0
