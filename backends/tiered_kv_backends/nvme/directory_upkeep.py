"""What lies in an NVMe tier's directories, for operators: listed while a cache has them open, deleted while none has.

Directories that tiers have left: which are such, and how one goes, or is cut, that nobody uses any more. What is
deleted is what a tier has made and nobody holds: a directory of this user's alone, with a holder file, folders
of blocks, the page that its disk is probed by and what it says of itself, and nothing else. Anything of others in it,
or a tier that has it open, keeps it whole.
"""

import asyncio
import contextlib
import errno
import os
import re
import stat
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast

import numpy as np
from typing_extensions import override

from tiered_kv.media.backend import RecordShape
from tiered_kv.media.inventory import Found, Inventory, Place, in_thread
from tiered_kv.media.record import HEADER_BYTES, MAGIC, key_in, payload_bytes_in
from tiered_kv.system import files, system
from tiered_kv.values.errors import BackendUnavailableError, BlockCorruptError, ConfigurationError
from tiered_kv.values.keys import BlockKey
from tiered_kv_backends.nvme.directory import (
    EXCLUSIVE,
    FINGERPRINT,
    HOLDER,
    IN_FOLDER,
    MEMBER,
    NO_DESCRIPTOR,
    OTHERS_MAY_WRITE,
    PROBE,
    DirectoryLock,
    fit,
    folders_in,
    holder,
    open_file,
    open_folder,
    remove_folder,
)
from tiered_kv_backends.nvme.ledger import Entries, Ledger, Order, Slots, parse
from tiered_kv_backends.nvme.nvme_settings import NVMeSettings
from tiered_kv_backends.nvme.open_files import entries_of
from tiered_kv_backends.nvme.slab import Erase, Slab

_SLOTS_AT_ONCE: Final = 4096
_BYTES_AT_ONCE: Final = 1 << 20
_ENTERED_S: Final = 1.0
"""How long after a record its entry may come, which is written once the others of its batch are."""
MODEL: Final = re.compile(r"[0-9a-f]{32}")
"""Where a host's server keeps a model: a directory below that of its settings."""
_EMPTY_FILE: Final = "/dev/null"
_LEFT: Final = frozenset({HOLDER, PROBE, MEMBER, f"{MEMBER}.new"})
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class _InSlot(Found):
    """A record in a slab. ``said`` is what the ledger says of it: its name and when it was used, or nothing."""

    folder: Path = Path()
    slot: int = 0
    said: tuple[int, ...] = ()

    @override
    def is_named_by(self, key: BlockKey) -> bool:
        if not self.said:
            return True  # by its header alone
        return tuple(key.namespace.names_of([key.hash])[0].tolist()) == self.said[:4]


class NVMeInventory(Inventory):
    """What lies in a tier's directories, and in those of models that a host's server keeps below them.

    The ledger of each slab says what is there; where it cannot, the headers do, as far as what is left of it does not
    deny them: so an open would find it. Headers that no open would look at are no blocks. Nothing is written but by
    `delete`, and nothing is deleted while a cache has the directory open.
    """

    def __init__(self, paths: Sequence[Path], erase: Erase) -> None:
        """Look for the directories.

        Raises:
            OSError: One cannot be looked at.
        """
        used = {path: _used_in(path) for path in paths}
        self.missing = [str(path) for path, directories in used.items() if not directories]
        self._directories = [each for directories in used.values() for each in directories]
        self._erase = erase
        self._to_delete: dict[Path, tuple[Slab, Ledger]] = {}
        self._opened = contextlib.ExitStack()
        self._in_use = system().lock()  # by a thread, which goes on when its caller is cancelled
        self._is_held = False

    def close(self) -> None:
        """Let caches open the directories, once no thread deletes anything any more. Blocks until then."""
        with self._in_use:
            self._opened.close()

    @override
    async def found(self, salt: str = "") -> AsyncIterator[list[Found]]:
        """Read the header of every record, some thousands at a time, whatever the salt: names there tell nothing."""
        failed = list[OSError]()
        async for some in in_thread(self._in_all(failed)):
            yield some
        _raise_first(failed)

    @override
    async def read(self, found: Found) -> bytes | None:
        """Read one record, with its padding."""
        return b"" if found.is_too_long else await asyncio.to_thread(_read, cast("_InSlot", found))

    @override
    async def delete(self, found: Sequence[Found]) -> None:
        """Have nobody find them again, also after a loss of power; with ``erase`` payloads are overwritten too.

        Cancelled, it goes on in its thread, and the directories stay held until that has ended.
        """
        await self.hold()
        await asyncio.to_thread(self._delete, cast("Sequence[_InSlot]", found))

    @override
    async def hold(self) -> None:
        if self._is_held:
            return
        with contextlib.ExitStack() as held:  # all of them or none
            for path in self._directories:
                try:
                    held.callback(_locked(path).release)
                except OSError as error:
                    raise BackendUnavailableError(f"{path}: {error.strerror}") from error
            self._opened.push(held.pop_all())
        self._is_held = True

    @override
    async def still_there(self, found: Sequence[Found]) -> list[bool]:
        """Look at the ledgers again, for longer than an entry comes behind its record, which is written in place."""
        are_there = await asyncio.to_thread(_are_said, found)
        if any(are_there):
            await asyncio.sleep(_ENTERED_S)
            are_there = await asyncio.to_thread(_are_said, found)
        return are_there

    def _in_all(self, failed: list[OSError]) -> Iterator[list[Found]]:
        for path in self._directories:
            try:
                for folder in _folders_in(path):
                    try:
                        yield from _in_folder(path / folder)
                    except OSError as error:  # of one model's records: the others' may be well
                        failed.append(error)
            except OSError as error:
                failed.append(error)

    def _delete(self, found: Sequence[_InSlot]) -> None:
        with self._in_use:
            self._delete_each(found)

    def _delete_each(self, found: Sequence[_InSlot]) -> None:
        failed = list[OSError]()
        for folder in dict.fromkeys(each.folder for each in found):
            mine = [each for each in found if each.folder == folder]
            slots = np.array(sorted(each.slot for each in mine))
            try:
                slab, ledger = self._opened_to_delete(folder, mine[0].num_bytes)
                try:
                    _forget(slab, ledger, slots, erase=self._erase)
                except OSError:  # a place that is bad keeps no other from going
                    for slot in slots:
                        try:
                            _forget(slab, ledger, np.array([slot]), erase=self._erase)
                        except OSError as error:
                            failed.append(error)
                slab.sync()
                ledger.sync()
            except OSError as error:
                failed.append(error)
        _raise_first(failed)

    def _opened_to_delete(self, folder: Path, stride: int) -> tuple[Slab, Ledger]:
        if (both := self._to_delete.get(folder)) is not None:
            return both
        with contextlib.ExitStack() as opened:
            parent = files().open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(files().close, parent)
            folder_fd = open_folder(parent, folder.name)
            opened.callback(files().close, folder_fd)
            file = open_file(folder_fd, "slab")
            shape = RecordShape(bytes.fromhex(folder.name[:64]), stride - HEADER_BYTES)
            slab = Slab(file, shape, files().fstat(file).st_size // stride)
            opened.callback(slab.close)
            ledger = Ledger(open_file(folder_fd, "ledger"), Order())
            opened.callback(ledger.close)
            # Of one that is lost, what is cleared here is not all that is known then; else others' blocks go with it.
            ledger.say_lost(ledger.read(slab.num_allocated)[1].lost)
            self._opened.push(opened.pop_all())
        self._to_delete[folder] = slab, ledger
        return slab, ledger


@contextlib.asynccontextmanager
async def open_inventory(settings: NVMeSettings) -> AsyncIterator[NVMeInventory]:
    """Yield the inventory of a tier's directories.

    Raises:
        BackendUnavailableError: No tier has used any of them, whose disks may not be mounted; or one fails.
    """
    try:
        inventory = await asyncio.to_thread(NVMeInventory, settings.paths, settings.erase)
    except OSError as error:
        raise BackendUnavailableError(f"{error.filename}: {error.strerror}") from error
    try:
        if len(inventory.missing) == len(settings.paths):
            raise BackendUnavailableError(f"no tier has used {', '.join(inventory.missing)}: is the disk mounted?")
        yield inventory
    finally:
        closing = asyncio.get_running_loop().run_in_executor(None, inventory.close)
        await asyncio.shield(closing)  # it is closed even if nobody waits for it


def has_used(path: Path) -> bool:
    """See `NVMeBackend.has_used`."""
    return bool(_used_in(path))


def _locked(path: Path) -> DirectoryLock:
    fd = files().open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return DirectoryLock(path, fd)
    except ConfigurationError as error:
        held = f"{path} is open in a cache, that of process {holder(fd)}"
        raise ConfigurationError(f"{held}: close that first, nothing was deleted") from error
    finally:
        files().close(fd)


def _used_in(path: Path) -> list[Path]:
    """Return where tiers have been: in a directory itself, or in those of models that a host's server keeps there."""
    is_used, below = _look_into(path)
    return [path] * is_used + [path / each for each in below if _look_into(path / each)[0]]


def _look_into(path: Path) -> tuple[bool, list[str]]:
    """Say whether a tier has used a directory, and which of those below may be of a server's models."""
    try:
        fd = files().open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False, []
    try:
        below = sorted(each.name for each in files().entries(fd) if each.is_folder and MODEL.fullmatch(each.name))
        return _is_file(fd, HOLDER) or bool(folders_in(fd)), below
    finally:
        files().close(fd)


def _folders_in(path: Path) -> list[str]:
    """Name the folders of blocks in a directory.

    Raises:
        OSError: One cannot be looked into: what is in it would be taken for gone.
    """
    fd = files().open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for each in files().entries(fd):
            if each.is_folder and FINGERPRINT.fullmatch(each.name):
                with contextlib.suppress(FileNotFoundError):  # a cache has made room meanwhile
                    files().close(files().open(path / each.name, _FOLDER))
        return folders_in(fd)
    finally:
        files().close(fd)


def _in_folder(folder: Path) -> Iterator[list[Found]]:
    """Yield what lies in one slab; nothing where there is another thing than a file in its place, or its ledger's."""
    with contextlib.ExitStack() as opened:
        file, ledger_fd = _open_regular(folder / "slab", opened), _open_regular(folder / "ledger", opened)
        if file is None or ledger_fd is None:
            return
        num_bytes, fingerprint = files().fstat(file).st_size, folder.name[:64]
        if (shape := _shape_in(file, num_bytes, bytes.fromhex(fingerprint))) is None:
            return
        slab = Slab(file, shape, num_bytes // shape.stride_bytes, may_cut=False)
        entries, damaged, _ = Ledger(ledger_fd, Order()).look(slab.num_allocated)
        unsaid = np.zeros(slab.num_allocated, np.bool_)
        unsaid[damaged.slots] = True
        for start in range(0, slab.num_allocated, _SLOTS_AT_ONCE):
            slots = range(start, min(start + _SLOTS_AT_ONCE, slab.num_allocated))
            headers, unread = slab.headers(list(slots))
            keys = {slot: key_in(header.data) for slot, header in zip(slots, headers, strict=True)}
            said = dict(_said(entries, *np.searchsorted(entries.slots, (slots.start, slots.stop))))
            rebuilt = entries_of({slot: key for slot, key in keys.items() if unsaid[slot]}, shape)
            there = {*rebuilt.slots[~damaged.deny(rebuilt)].tolist(), *said}
            yield [
                _InSlot(
                    f"{folder}/slab@{slot * shape.stride_bytes}",
                    Place(fingerprint, "", "", "") if key is None else Place.of(key.path),
                    shape.stride_bytes,
                    int(slot in there),
                    folder=folder,
                    slot=slot,
                    said=said.get(slot, ()),
                )
                for (slot, key), is_unread in zip(keys.items(), unread.tolist(), strict=True)
                if slot in there or key is not None or is_unread
            ]


def _said(entries: Entries, start: int = 0, end: int | None = None) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the slots of some entries, and what these say: names and when they were used."""
    part = slice(start, end)
    names, used = entries.names[part].tolist(), entries.sequences[part].tolist()
    for slot, name, number in zip(entries.slots[part].tolist(), names, used, strict=True):
        yield slot, (*name, number)


def _are_said(found: Sequence[Found]) -> list[bool]:
    """Say whether the ledger says of each slot what it said when it was found."""
    return [_said_now(each) == each.said for each in cast("Sequence[_InSlot]", found)]


def _said_now(found: _InSlot) -> tuple[int, ...]:
    with contextlib.ExitStack() as opened:
        ledger = _open_regular(found.folder / "ledger", opened)
        entry = b"" if ledger is None else files().pread(ledger, Ledger.num_bytes(1), Ledger.num_bytes(found.slot))
        said = dict(_said(parse(entry, found.slot)[0])) if len(entry) == Ledger.num_bytes(1) else {}
        return said.get(found.slot, ())


def _read(found: _InSlot) -> bytes | None:
    try:
        with contextlib.ExitStack() as opened:
            slab = _open_regular(found.folder / "slab", opened)
            return None if slab is None else files().pread(slab, found.num_bytes, found.slot * found.num_bytes)
    except OSError as error:
        if error.errno == errno.EIO:
            raise BlockCorruptError(f"cannot be read: {error.strerror}") from error
        raise BackendUnavailableError(f"{found.where}: {error.strerror}") from error


def _open_regular(path: Path, opened: contextlib.ExitStack) -> int | None:
    """Open a file to read, which is closed with ``opened``; an empty one if there is none; None of anything else."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO would hang without it
    try:
        fd = files().open(path, flags)
    except FileNotFoundError:
        fd = files().open(_EMPTY_FILE, os.O_RDONLY | os.O_CLOEXEC)
        opened.callback(files().close, fd)
        return fd
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:
            return None
        raise
    opened.callback(files().close, fd)
    return fd if stat.S_ISREG(files().fstat(fd).st_mode) else None


def _raise_first(failed: Sequence[OSError]) -> None:
    if failed:
        where = f"{failed[0].filename}: " if failed[0].filename else ""
        raise BackendUnavailableError(f"{where}{failed[0].strerror}") from failed[0]


def _forget(slab: Slab, ledger: Ledger, slots: Slots, *, erase: Erase) -> None:
    ledger.clear(slots[slots < ledger.num_slots])
    slab.erase(slots.tolist(), erase)


def _shape_in(file: int, num_bytes: int, fingerprint: bytes) -> RecordShape | None:
    """Return how long the records of a slab are, by the first one that can be read; None if there is none.

    Raises:
        OSError: None was found, and not all could be read.
    """
    failure: OSError | None = None
    for start in range(0, num_bytes, _BYTES_AT_ONCE):
        try:
            parts = [(start, files().pread(file, _BYTES_AT_ONCE, start))]
        except OSError as error:  # a place that is bad: records beside it say as much
            failure, parts = failure or error, []
            for at in range(start, min(start + _BYTES_AT_ONCE, num_bytes), HEADER_BYTES):
                with contextlib.suppress(OSError):
                    parts.append((at, files().pread(file, HEADER_BYTES, at)))
        for first, data in parts:
            for at in range(0, len(data) - HEADER_BYTES + 1, HEADER_BYTES):
                header = memoryview(data)[at : at + HEADER_BYTES]
                if header[: len(MAGIC)] != MAGIC or (key := key_in(header)) is None:
                    continue
                shape = RecordShape(fingerprint, payload_bytes_in(header))
                if key.namespace.fingerprint == fingerprint and not (first + at) % shape.stride_bytes:
                    return shape
    if failure is not None:
        raise failure
    return None


def has_left(path: Path) -> bool:
    """See `NVMeBackend.has_left`."""
    try:
        fd = files().open(path, _FOLDER)
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return False
    try:
        return _is_file(fd, HOLDER)
    finally:
        files().close(fd)


def delete_left(path: Path) -> bool:
    """See `NVMeBackend.delete_left`."""
    with contextlib.ExitStack() as opened:
        try:
            fd = opened.enter_context(_left(path))
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                raise
            return not files().exists(path)
        for each in files().entries(fd):
            if each.is_folder:
                remove_folder(fd, each.name)
            elif each.name != HOLDER:
                files().unlink(each.name, dir_fd=fd)
        files().unlink(HOLDER, dir_fd=fd)  # the last: without it this would be no tier's when it is looked for
        files().rmdir(path)
    return True


def cut_left(path: Path, capacity_bytes: int) -> bool:
    """See `NVMeBackend.cut_left`."""
    try:
        with _left(path) as fd, contextlib.ExitStack() as opened:
            found = []
            for folder in folders_in(fd):
                folder_fd = open_folder(fd, folder)
                opened.callback(files().close, folder_fd)
                slab = open_file(folder_fd, "slab")
                opened.callback(files().close, slab)
                ledger = Ledger(open_file(folder_fd, "ledger"), Order())
                opened.callback(ledger.close)
                size = files().fstat(slab).st_size
                found.append((slab, size, ledger, _shape_in(slab, size, bytes.fromhex(folder[:64]))))
            shapes, num_blocks = _in_proportion([(shape, size) for _, size, _, shape in found]), 0
            with contextlib.suppress(ConfigurationError):  # not one fits
                num_blocks = fit(capacity_bytes, [shape for shape in shapes if shape]) if any(shapes) else 0
            for (slab, size, ledger, _), shape in zip(found, shapes, strict=True):  # what has no shape has no record
                num_slots = shape.num_slots(num_blocks) if shape else 0
                files().ftruncate(slab, min(size, num_slots * shape.stride_bytes) if shape else 0)
                ledger.shrink(num_slots)
    except OSError:
        return not files().exists(path)
    return True


def _in_proportion(sizes: Sequence[tuple[RecordShape | None, int]]) -> list[RecordShape | None]:
    """Give each kind of record the share of slots that its slab has now, as nobody here says what a model gave it."""
    nums = [max(1, size // shape.stride_bytes) if shape else 0 for shape, size in sizes]
    most = max(nums, default=1)
    return [shape and replace(shape, slots_per_block=n / most) for (shape, _), n in zip(sizes, nums, strict=True)]


@contextlib.contextmanager
def _left(path: Path) -> Iterator[int]:
    """Hold a directory that a tier has left, and yield its descriptor.

    Raises:
        OSError: A tier has it open, or it is none that such a tier has made all of.
    """
    fd = files().open(path, _FOLDER)
    try:
        files().flock(fd, EXCLUSIVE)  # which an open tier has
        if not _is_file(fd, HOLDER) or not _has_made_all(fd):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        yield fd
    finally:
        files().close(fd)


def _is_file(folder_fd: int, name: str) -> bool:
    """Say whether there is a file of this name, and no link to one."""
    try:
        fd = files().open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return False
    try:
        return stat.S_ISREG(files().fstat(fd).st_mode)
    finally:
        files().close(fd)


def _has_made_all(fd: int) -> bool:
    """Say whether all that lies in a directory is what a tier of this user's keeps there."""
    about = files().fstat(fd)
    if about.st_uid != files().geteuid() or about.st_mode & OTHERS_MAY_WRITE:
        return False
    return all(
        _has_made_folder(fd, each.name)
        if FINGERPRINT.fullmatch(each.name)
        else each.name in _LEFT and _is_file(fd, each.name)
        for each in files().entries(fd)
    )


def _has_made_folder(fd: int, name: str) -> bool:
    """Say whether a tier has made a folder of blocks. Other programs name folders by 64 digits too."""
    try:
        folder_fd = files().open(name, _FOLDER, dir_fd=fd)
    except OSError:
        return False
    try:
        return all(each.name in IN_FOLDER and _is_file(folder_fd, each.name) for each in files().entries(folder_fd))
    finally:
        files().close(folder_fd)
