"""Reading the directories of nvme and shared_fs tiers, by their formats alone: ``docs/format.md``. No cache is opened.

Only names and files of ours are looked at, and no link is followed.
"""

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from tiered_kv.backend import RecordShape
from tiered_kv.errors import BlockCorruptError, ConfigurationError, LayoutMismatchError
from tiered_kv.keys import NO_SALT, BlockKey
from tiered_kv.record import HEADER_BYTES, key_in, parse_record, payload_bytes_in
from tiered_kv.settings import tier_from

_NVME_FOLDER: Final = re.compile(r"[0-9a-f]{64}(-\d+of\d+)?")
_SHARED_FILE: Final = re.compile(
    r"[0-9a-f]{64}/[0-9a-f]{32}/(replicated|[0-9]+of[0-9]+)/[0-9a-f]{32}/[0-9a-f]+/[0-9a-f]{64}"
)
_ENTRY: Final = np.dtype(
    [("magic", "S8"), ("name", "<u8", (4,)), ("sequence", "<u8"), ("slot", "<u8"), ("checksum", "<u8")]
)
_ENTRY_MAGIC: Final = b"TKVSLOT2"


@dataclass(frozen=True)
class Shelf:
    """The blocks of one namespace.

    Attributes:
        fingerprint: Of model and layout, hexadecimal, as are the next.
        epoch: Digest of the weights.
        shard: Whose part of the heads.
        salt: Digest of the tenant's salt.
        is_unsalted: Whether there is none.
        num_blocks, num_bytes: What there is, with headers and padding.
        youngest_s: How long ago the last one was written, if that is known.
    """

    fingerprint: str
    epoch: str
    shard: str
    salt: str
    is_unsalted: bool
    num_blocks: int
    num_bytes: int
    youngest_s: float | None


@dataclass(frozen=True)
class Broken:
    """A record that is none: where it lies, and why."""

    where: str
    why: str


@dataclass
class Report:
    """What was found by reading everything; ``num_sealed`` records need keys to be verified."""

    num_good: int = 0
    num_sealed: int = 0
    num_fixed: int = 0
    broken: list[Broken] = field(default_factory=list)


@dataclass(frozen=True)
class _Lying:
    """A record where it lies; ``name`` is what the place says that it is."""

    path: Path
    offset: int
    num_bytes: int
    name: bytes
    written_at: float | None

    @property
    def where(self) -> str:
        return f"{self.path}@{self.offset}" if self.path.name == "slab" else str(self.path)

    def read(self, num_bytes: int) -> bytes:
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), num_bytes, self.offset)

    def is_named_by(self, key: BlockKey) -> bool:
        """Whether the place says the same as the record."""
        named = key.namespace.names_of([key.hash]).tobytes() if self.path.name == "slab" else key.hash
        return named == self.name

    def delete(self) -> None:
        """Have nobody find it again."""
        if self.path.name != "slab":
            self.path.unlink()
            return
        slot = self.offset // self.num_bytes
        with self.path.with_name("ledger").open("r+b") as ledger:
            os.pwrite(ledger.fileno(), bytes(_ENTRY.itemsize), slot * _ENTRY.itemsize)
        with self.path.open("r+b") as slab:
            os.pwrite(slab.fileno(), bytes(HEADER_BYTES), self.offset)


def directory_of(where: str) -> Path:
    """Return the directory that a path or a tier's URL names.

    Raises:
        ConfigurationError: There is none.
    """
    path: object = Path(where)
    if "://" in where:
        path = getattr(tier_from(where), "path", None)
        if not isinstance(path, Path):
            scheme = where.partition("://")[0]
            raise ConfigurationError(f"{scheme}:// is no directory: only those of nvme and shared_fs tiers can be read")
    assert isinstance(path, Path)  # noqa: S101 - made here or checked
    if not path.is_dir():
        raise ConfigurationError(f"{path} is no directory: give the path of an nvme or shared_fs tier")
    return path


def shelves_in(root: Path) -> list[Shelf]:
    """Count what lies there, by namespace; reads the header of every record."""
    counts: dict[tuple[str, str, str, str], list[float]] = {}
    for each in _records_in(root):
        key = key_in(memoryview(each.read(HEADER_BYTES)))
        if key is None:
            continue
        space = key.namespace
        of = (space.fingerprint.hex(), space.epoch.hex(), str(space.shard), space.salt.hex())
        num_blocks, num_bytes, latest = counts.get(of, [0, 0, 0.0])
        counts[of] = [num_blocks + 1, num_bytes + each.num_bytes, max(latest, each.written_at or 0.0)]
    now = time.time()
    return [
        Shelf(*of, of[3] == NO_SALT.hex(), int(n), int(num_bytes), max(0.0, now - latest) if latest else None)
        for of, (n, num_bytes, latest) in sorted(counts.items())
    ]


def verify(root: Path, *, fix: bool, on_record: Callable[[int, int], None] = lambda _done, _of: None) -> Report:
    """Read every record, and check every byte of it.

    Args:
        root: The directory.
        fix: Delete what is broken.
        on_record: Told now and then how many were read, of how many.

    Raises:
        ConfigurationError: It is to be fixed, and a cache has it open.
    """
    report = Report()
    with _alone(root, needed=fix):
        lying = list(_records_in(root))
        for number, each in enumerate(lying):
            if number % 64 == 0:
                on_record(number, len(lying))
            _look_at(each, report, fix=fix)
    return report


def _look_at(lying: _Lying, report: Report, *, fix: bool) -> None:
    try:
        data = lying.read(lying.num_bytes)
        header = memoryview(data)[:HEADER_BYTES]
        if len(header) == HEADER_BYTES and key_in(header) is not None:
            data = data[: HEADER_BYTES + payload_bytes_in(header)]
        why = "" if lying.is_named_by(parse_record(data).key) else "it is another block's record"
    except FileNotFoundError:
        return  # evicted meanwhile
    except ConfigurationError:
        report.num_sealed += 1
        return
    except (BlockCorruptError, LayoutMismatchError) as error:
        why = str(error)
    if not why:
        report.num_good += 1
        return
    report.broken.append(Broken(lying.where, why))
    if fix:
        lying.delete()
        report.num_fixed += 1


def _records_in(root: Path) -> Iterator[_Lying]:
    for folder, folders, files in os.walk(root):
        folders.sort()
        here = Path(folder)
        if "slab" in files and _NVME_FOLDER.fullmatch(here.name):
            yield from _in_slab(here)
            continue
        for name in sorted(files):
            path = here / name
            if _SHARED_FILE.search(path.as_posix()) and not path.is_symlink():
                status = path.stat()
                yield _Lying(path, 0, status.st_size, bytes.fromhex(name), status.st_mtime)


def _in_slab(folder: Path) -> Iterator[_Lying]:
    """Yield what the ledger beside a slab says is there."""
    slab, ledger = folder / "slab", folder / "ledger"
    if slab.is_symlink() or ledger.is_symlink() or not ledger.is_file():
        return
    data = ledger.read_bytes()
    entries = np.frombuffer(data[: len(data) // _ENTRY.itemsize * _ENTRY.itemsize], _ENTRY)
    is_live = (entries["magic"] == _ENTRY_MAGIC) & (entries["slot"] == np.arange(len(entries)))
    slots = np.flatnonzero(is_live).tolist()
    if not slots or not (stride := _stride_of(slab)):
        return
    for slot in slots:
        yield _Lying(slab, slot * stride, stride, entries["name"][slot].tobytes(), None)


def _stride_of(slab: Path) -> int:
    """Return how far apart the records of a slab are, by the first whole header in it; 0 if there is none."""
    with slab.open("rb") as file:
        for at in range(0, os.fstat(file.fileno()).st_size, HEADER_BYTES):
            header = memoryview(os.pread(file.fileno(), HEADER_BYTES, at))
            if len(header) == HEADER_BYTES and (key := key_in(header)) is not None:
                stride = RecordShape(key.namespace.fingerprint, payload_bytes_in(header)).stride_bytes
                if at % stride == 0:
                    return stride
    return 0


@contextmanager
def _alone(root: Path, *, needed: bool) -> Iterator[None]:
    """Keep caches from opening an NVMe tier's directory meanwhile: they lock it."""
    if not needed or not any(root.glob("*/slab")):
        yield
        return
    file = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(f"{root} is open in a cache: close that first, or verify without --fix") from error
        yield
    finally:
        os.close(file)
