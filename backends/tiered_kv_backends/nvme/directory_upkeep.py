"""Deleting a tenant's blocks from an NVMe tier's directory. For a job of your own, while no cache has it open.

Directories that tiers have left: which are such, and how one goes, or is cut, that nobody uses any more.

What is deleted is what a tier has made and nobody holds: a directory of this user's alone, with a holder file, folders
of blocks, the page that its disk is probed by and what it says of itself, and nothing else. Anything of others in it,
or a tier that has it open, keeps it whole.
"""

import asyncio
import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from tiered_kv.media.backend import RecordShape
from tiered_kv.media.record import HEADER_BYTES, MAGIC, key_in, payload_bytes_in
from tiered_kv.system import files
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError
from tiered_kv.values.keys import salt_digest
from tiered_kv_backends.nvme.directory import (
    EXCLUSIVE,
    FINGERPRINT,
    HOLDER,
    IN_FOLDER,
    OTHERS_MAY_WRITE,
    PROBE,
    fit,
    folders_in,
    open_file,
    open_folder,
    remove_folder,
    taken,
)
from tiered_kv_backends.nvme.disks import MEMBER
from tiered_kv_backends.nvme.ledger import Ledger, Order, Slots
from tiered_kv_backends.nvme.nvme_settings import NVMeSettings
from tiered_kv_backends.nvme.slab import Erase, Slab

_SLOTS_AT_ONCE: Final = 4096
_BYTES_AT_ONCE: Final = 1 << 20
_LEFT: Final = frozenset({HOLDER, PROBE, MEMBER, f"{MEMBER}.new"})
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


async def delete_tenant(settings: NVMeSettings | Mapping[str, Any] | str, salt: str | bytes) -> int:
    """Delete the blocks of one salt, of every model and epoch: nothing finds them again when this returns.

    Reads the header of every record, in each model's directory where a host's server keeps those. Payloads are
    overwritten too if the settings say ``erase``. A record whose header the disk fails to read goes too, uncounted: it
    may be one of them.

    Returns:
        How many blocks were deleted.

    Raises:
        ConfigurationError: No settings of this medium, or a cache has the directory open: a block may be in its memory.
        BackendUnavailableError: A disk failed, or a directory is none that a tier has used: its disk may not be
            mounted. All that could be deleted is, whatever else failed.
    """
    settings, failed = NVMeSettings.of(settings), []
    of_salt = await asyncio.to_thread(settings.on_medium, salt_digest(salt))
    num_deleted = 0
    for path in settings.paths:
        try:
            num_deleted += await asyncio.to_thread(_delete, path, of_salt, erase=settings.erase)
        except OSError as error:
            failed.append((path, error))
    if failed:
        reasons = "; ".join(f"{path}: {error.strerror}" for path, error in failed)
        raise BackendUnavailableError(f"could not delete a tenant: {reasons}") from failed[0][1]
    return num_deleted


def _delete(path: Path, salt: bytes, *, erase: Erase) -> int:
    num_deleted, failures = 0, list[OSError]()
    for each in _used_in(path):
        if each != path and not _holds_blocks(each):
            continue  # another program's, perhaps: it has its own idea of a file of that name
        with taken(each) as root:
            for folder in folders_in(root):
                try:
                    num_deleted += _delete_in(root, folder, salt, erase=erase)
                except OSError as error:  # of one model's records: the others' may be well
                    failures.append(error)
    if failures:
        raise failures[0]
    return num_deleted


def _used_in(path: Path) -> list[Path]:
    """Return where tiers have been: in a directory itself, or in those of models that a host's server keeps there.

    Raises:
        OSError: In none: of a disk that is away blocks would come back with it.
    """
    used = [path] if files().exists(path / HOLDER) else []
    with contextlib.suppress(FileNotFoundError):
        fd = files().open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            below = sorted(path / each.name for each in files().entries(fd) if each.is_folder)
        finally:
            files().close(fd)
        for each in below:
            with contextlib.suppress(PermissionError):  # another user's, as lost+found is
                used += [each] if files().exists(each / HOLDER) else []
    if not used:
        raise FileNotFoundError(errno.ENOENT, "no tier has used it: is the disk mounted?")
    return used


def _holds_blocks(path: Path) -> bool:
    try:
        fd = files().open(path, _FOLDER)
    except PermissionError:
        return False
    try:
        return bool(folders_in(fd))
    finally:
        files().close(fd)


def _delete_in(root: int, folder: str, salt: bytes, *, erase: Erase) -> int:
    with contextlib.ExitStack() as opened:
        folder_fd = open_folder(root, folder)
        opened.callback(files().close, folder_fd)
        file = open_file(folder_fd, "slab")
        with contextlib.ExitStack() as unread:
            unread.callback(files().close, file)
            num_bytes, fingerprint = files().fstat(file).st_size, bytes.fromhex(folder[:64])
            shape = _shape_in(file, num_bytes, fingerprint)
            if shape is None:
                return 0
            unread.pop_all()
        slab = Slab(file, shape, num_bytes // shape.stride_bytes)
        opened.callback(slab.close)
        ledger = Ledger(open_file(folder_fd, "ledger"), Order())
        opened.callback(ledger.close)
        _, damaged = ledger.read(slab.num_allocated)
        # Of one that is lost, what is cleared here is not all that is known then; else others' blocks would go with it.
        ledger.say_lost(damaged.slots[len(damaged.left) :])
        num_deleted, failures = 0, list[OSError]()
        for start in range(0, slab.num_allocated, _SLOTS_AT_ONCE):
            slots = np.arange(start, min(start + _SLOTS_AT_ONCE, slab.num_allocated))
            headers, failed = slab.headers(slots.tolist())
            is_mine = np.array([_is_of(header.data, salt) for header in headers])
            num_deleted += int(np.count_nonzero(is_mine))
            for going in (slots[is_mine], slots[failed]):  # whose block nobody can say now may be read by a later open
                try:
                    _forget(slab, ledger, going, erase=erase)
                except OSError as error:  # a place that is bad keeps no other from going
                    failures.append(error)
        slab.sync()
        ledger.sync()
        if failures:
            raise failures[0]
        return num_deleted


def _forget(slab: Slab, ledger: Ledger, slots: Slots, *, erase: Erase) -> None:
    ledger.clear(slots[slots < ledger.num_slots])
    slab.erase(slots.tolist(), erase)


def _is_of(header: memoryview, salt: bytes) -> bool:
    key = key_in(header)
    return key is not None and key.namespace.salt == salt


def _shape_in(file: int, num_bytes: int, fingerprint: bytes) -> RecordShape | None:
    """Return how long the records of a slab are, by the first one that can be read; None if there is none.

    Raises:
        OSError: None was found, and not all could be read.
    """
    failure: OSError | None = None
    for start in range(0, num_bytes, _BYTES_AT_ONCE):
        try:
            data = memoryview(files().pread(file, _BYTES_AT_ONCE, start))
        except OSError as error:  # a place that is bad: records behind it say as much
            failure = failure or error
            continue
        for at in range(0, len(data) - HEADER_BYTES + 1, HEADER_BYTES):
            header = data[at : at + HEADER_BYTES]
            if header[: len(MAGIC)] != MAGIC or (key := key_in(header)) is None:
                continue
            shape = RecordShape(fingerprint, payload_bytes_in(header))
            if key.namespace.fingerprint == fingerprint and not (start + at) % shape.stride_bytes:
                return shape
    if failure is not None:
        raise failure
    return None


def has_left(path: Path) -> bool:
    """See `NVMeBackend.has_left`."""
    try:
        fd = files().open(path, _FOLDER)
    except OSError:
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
        except OSError:
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
    except OSError:
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
    """Say the same of a folder of blocks. Other programs call theirs by 64 digits too."""
    try:
        folder_fd = files().open(name, _FOLDER, dir_fd=fd)
    except OSError:
        return False
    try:
        return all(each.name in IN_FOLDER and _is_file(folder_fd, each.name) for each in files().entries(folder_fd))
    finally:
        files().close(folder_fd)
