"""What lies in a tier's medium: counting it, verifying it, deleting some of it. No cache is opened.

A shared medium lists what it has by its own `Inventory`. The one here reads the directories of nvme and shared_fs
tiers, by their formats alone (``docs/format.md``): it looks at names and files of ours only, and follows no link. Where
some of an NVMe tier's directories are missing, it lists what is on the others, and deletes nothing.
"""

import asyncio
import fcntl
import os
import re
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered_kv.media.backend import MOST_FOUND_BYTES, Found, Inventory, Place, RecordShape
from tiered_kv.media.record import HEADER_BYTES, key_in, parse_record, payload_bytes_in
from tiered_kv.settings.chain_settings import CPUTier, GPUTier, tier_from, tier_name
from tiered_kv.settings.registry import resolve
from tiered_kv.settings.settings import TieredKVSettings
from tiered_kv.settings.tier_settings import TierSettings, paths_of
from tiered_kv.values.errors import (
    BackendUnavailableError,
    BlockCorruptError,
    ConfigurationError,
    LayoutMismatchError,
)
from tiered_kv.values.keys import BlockKey

if TYPE_CHECKING:
    from tiered_kv.media.seal import Seal

_NVME_FOLDER: Final = re.compile(r"[0-9a-f]{64}(-\d+of\d+)?")
_FOLDER: Final = re.compile(r"[0-9a-f]+(-\d+of\d+)?|replicated|\d+of\d+")
"""What a tier calls its folders; others in its place, as lost+found, are nobody's here."""
_SHARED_FILE: Final = re.compile(
    r"(?P<path>[0-9a-f]{64}/[0-9a-f]{32}/(replicated|[0-9]+of[0-9]+)/[0-9a-f]{32})/[0-9a-f]+/[0-9a-f]{64}"
)
_ENTRY: Final = np.dtype(
    [("magic", "S8"), ("name", "<u8", (4,)), ("sequence", "<u8"), ("slot", "<u8"), ("checksum", "<u8")]
)
_ENTRY_MAGIC: Final = b"TKVSLOT2"
_EMPTY: Final = b"TKVEMPTY" * (_ENTRY.itemsize // 8)
_AT_ONCE: Final = 256
_LEAST_DIGITS: Final = 8
OnProgress = Callable[[int], None]
"""Told of so many records more."""


@dataclass(frozen=True)
class _File(Found):
    """A record that is a file; ``where`` is its path."""

    def is_named_by(self, key: BlockKey) -> bool:
        return self.where.endswith(f"/{key.hash.hex()}") and key.namespace.path in self.where


@dataclass(frozen=True)
class _Slot(Found):
    """A record in a slab; ``name`` is what the ledger beside it says that it is."""

    slab: Path = Path()
    slot: int = 0
    name: bytes = b""

    def is_named_by(self, key: BlockKey) -> bool:
        return key.namespace.names_of([key.hash]).tobytes() == self.name


class DirectoryInventory(Inventory):
    """What lies in the directories of one tier. It deletes from an NVMe tier only while no cache has that open.

    Attributes:
        missing: Directories that are not there.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.missing = tuple(root for root in roots if not root.is_dir())
        self._roots = [root for root in roots if root not in self.missing]
        self._locks: dict[Path, int] = {}

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
            raise BackendUnavailableError(f"{found.where}: {error.strerror}") from error

    async def delete(self, found: Sequence[Found]) -> None:
        """Have nobody find them again.

        Raises:
            ConfigurationError: They are an NVMe tier's, and a cache has it open.
        """
        if any(isinstance(each, _Slot) for each in found):
            self.lock_out_caches()
        await asyncio.to_thread(_delete, found)

    def close(self) -> None:
        """Let caches open it again."""
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
    inventory = DirectoryInventory(roots)
    if len(inventory.missing) == len(roots):
        named = _listed(roots)
        raise ConfigurationError(f"{named}: give the path of an nvme or shared_fs tier, or a tier's URL")
    if not any(_is_a_tiers(root) for root in roots):
        named = ", ".join(map(str, roots))
        raise ConfigurationError(f"no nvme or shared_fs tier has used {named}: give its path, or a tier's URL")
    try:
        if to_delete:
            inventory.lock_out_caches()
        yield inventory
    finally:
        inventory.close()


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


def _delete(found: Sequence[Found]) -> None:
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
        if "slab" in files and _NVME_FOLDER.fullmatch(here.name):
            yield from _in_slab(here)
            continue
        for name in sorted(files):
            path = here / name
            if (match := _SHARED_FILE.search(path.as_posix())) is None:
                continue
            try:
                status = path.lstat()
            except FileNotFoundError:  # deleted meanwhile, by whoever uses the tier
                continue
            if stat.S_ISREG(status.st_mode):
                yield _File(str(path), Place.of(match["path"]), status.st_size, written_at=status.st_mtime)


def _in_slab(folder: Path) -> Iterator[Found]:
    """Yield what the ledger beside a slab says is there."""
    slab, ledger = folder / "slab", folder / "ledger"
    if any(path.is_symlink() or not path.is_file() for path in (slab, ledger)):  # who opens a pipe waits for ever
        return
    data = ledger.read_bytes()
    entries = np.frombuffer(data[: len(data) // _ENTRY.itemsize * _ENTRY.itemsize], _ENTRY)
    is_live = (entries["magic"] == _ENTRY_MAGIC) & (entries["slot"] == np.arange(len(entries)))
    slots = np.flatnonzero(is_live).tolist()
    if not slots or not (stride := _stride_of(slab)):
        return
    with slab.open("rb") as file:
        for slot in slots:
            header = memoryview(os.pread(file.fileno(), HEADER_BYTES, slot * stride))
            key = key_in(header) if len(header) == HEADER_BYTES else None
            place = Place.of(key.path) if key is not None else Place(folder.name[:64], "", "", "")
            name = entries["name"][slot].tobytes()
            yield _Slot(f"{slab}@{slot * stride}", place, stride, slab=slab, slot=slot, name=name)


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


@dataclass(frozen=True)
class Shelf:
    """The blocks of one namespace, by its digests as they are on the medium: hidden, if the tier has keys.

    Attributes:
        model: The fingerprint of model and layout, hexadecimal, as are the next.
        epoch: How the digest of the weights begins.
        shard: Whose part of the heads.
        tenant: How the digest of the tenant's salt begins; ``"none"`` without one. Where names are hidden it takes the
            tier's settings to tell.
        num_blocks, num_bytes: What there is, with headers and padding.
        youngest_s: How long ago the last one was written, if that is known.
    """

    model: str
    epoch: str
    shard: str
    tenant: str
    num_blocks: int
    num_bytes: int
    youngest_s: float | None


@dataclass(frozen=True)
class Broken:
    """A record that is none: where it lies, and why."""

    where: str
    why: str


@dataclass
class InventoryReport:
    """What was found by reading everything; ``num_sealed`` need keys to be verified, ``missing`` were not read."""

    num_good: int = 0
    num_sealed: int = 0
    num_fixed: int = 0
    broken: list[Broken] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Wanted:
    """Which blocks: of a model, of weights, of a tenant, as `inspect` shows their digests; empty is any.

    Raises:
        ConfigurationError: One is no digest, or too little of it.
    """

    model: str = ""
    epoch: str = ""
    tenant: str = ""

    def __post_init__(self) -> None:
        for what, digits in vars(self).items():
            if digits and (len(digits) < _LEAST_DIGITS or set(digits) - set("0123456789abcdef")):
                raise ConfigurationError(
                    f"--{what} takes {_LEAST_DIGITS} or more digits of a digest, as inspect has it, got {digits!r:.80}"
                )


def inventory_at(
    where: str, tier: TierSettings | None = None, *, to_delete: bool = False
) -> AbstractAsyncContextManager[Inventory]:
    """Return the inventory of a tier, see `tier_at`, or without one of the directory that is there.

    Raises:
        ConfigurationError: There is no such directory, or the tier's medium cannot list what it has.
    """
    if tier is None:
        return open_directories([Path(where)], to_delete=to_delete)
    if isinstance(tier, CPUTier | GPUTier):
        raise ConfigurationError(f"a {tier.medium} tier lies in a process's memory: ask the running cache, by status")
    if paths := paths_of(tier):
        return open_directories(paths, to_delete=to_delete)
    return resolve(tier.medium).inventory(tier)


def tier_at(where: str, settings: TieredKVSettings | None) -> TierSettings | None:
    """Return the settings of a tier by its URL or name; None of a directory: nothing is known of that but its format.

    Raises:
        ConfigurationError: There is no such tier.
    """
    if "://" in where:
        with suppress(ConfigurationError):  # how much it may hold says nothing of what lies there
            return tier_from(f"{where}{'&' if '?' in where else '?'}capacity=1EiB")
        return tier_from(where)
    if settings is None:
        return None
    named = {tier_name(tier): tier for tier in settings.tiers}
    if where not in named:
        there_are = f"no tier of that name is in the settings: there are {', '.join(named)}"
        raise ConfigurationError(f"{where!r} is no directory, and {there_are}")
    return named[where]


async def shelves_in(inventory: Inventory, on_progress: OnProgress, *, no_salt: bytes) -> list[Shelf]:
    """Count what lies there, by namespace; ``no_salt`` is what stands there for no tenant."""
    counts: dict[Place, tuple[int, int, float]] = {}
    async for some in inventory.found():
        for each in some:
            num_blocks, num_bytes, latest = counts.get(each.place, (0, 0, 0.0))
            counts[each.place] = (
                num_blocks + each.num_blocks, num_bytes + each.num_bytes, max(latest, each.written_at or 0.0),
            )  # fmt: skip
        on_progress(len(some))
    now = time.time()
    return [
        Shelf(
            place.fingerprint, place.epoch, place.shard,
            "none" if no_salt.hex().startswith(place.salt) else place.salt,
            num_blocks, num_bytes, max(0.0, now - latest) if latest else None,
        )
        for place, (num_blocks, num_bytes, latest) in sorted(counts.items())
        if place.epoch
    ]  # fmt: skip


def missing_of(inventory: Inventory) -> list[str]:
    """Name the parts of a medium that are not there."""
    return [str(path) for path in inventory.missing] if isinstance(inventory, DirectoryInventory) else []


async def verify(
    inventory: Inventory,
    *,
    fix: bool,
    rate: int | None = None,
    seal: "Seal | None" = None,
    on_progress: OnProgress = lambda _: None,
) -> InventoryReport:
    """Read every record, and check every byte of it.

    Args:
        inventory: What to read.
        fix: Delete what is broken; of several records in one object all of them.
        rate: Bytes a second to read at most.
        seal: Opens what is sealed.
        on_progress: Told of what was read.
    """
    report = InventoryReport(missing=missing_of(inventory))
    started, num_bytes = time.monotonic(), 0
    async for some in inventory.found():
        for each in some:
            data = await inventory.read(each)
            num_bytes += each.num_bytes
            if rate is not None:
                await asyncio.sleep(max(0.0, started + num_bytes / rate - time.monotonic()))
            if data is not None:
                why = _look_at(each, data, report, seal)
                if why:
                    report.broken.append(Broken(each.where, why))
                if why and fix:
                    await inventory.delete([each])
                    report.num_fixed += 1
            on_progress(1)
    return report


async def matching(inventory: Inventory, wanted: Wanted, on_progress: OnProgress) -> list[Found]:
    """Return all that is wanted of what lies there."""
    matches: list[Found] = []
    async for some in inventory.found():
        matches += [each for each in some if each.place.epoch and each.place.is_of(**vars(wanted))]
        on_progress(len(some))
    return matches


def _look_at(found: Found, data: bytes | bytearray, report: InventoryReport, seal: "Seal | None") -> str:
    """Count the records of one place that are well; say what is wrong with the first that is not."""
    if found.is_too_long:
        return f"{found.num_bytes} bytes are no record: none has more than {MOST_FOUND_BYTES}"
    num_left = found.num_blocks
    for record in _records_of(data):
        try:
            key = key_in(record[:HEADER_BYTES]) if len(record) >= HEADER_BYTES else None
            if key is not None and not found.is_named_by(key):
                return "it is another block's record"
            parse_record(record, seal=seal)
            report.num_good += 1
        except ConfigurationError:
            report.num_sealed += 1
        except (BlockCorruptError, LayoutMismatchError) as error:
            return str(error)
        num_left -= 1
    return f"{num_left} of {found.num_blocks} records are missing" if num_left > 0 else ""


def _records_of(data: bytes | bytearray) -> Iterator[memoryview]:
    """Yield the records that lie one after another, as long as headers say how long they are; then what is left."""
    left = memoryview(data)
    while True:
        header = left[:HEADER_BYTES]
        if len(header) < HEADER_BYTES or key_in(header) is None:
            yield left
            return
        length = HEADER_BYTES + payload_bytes_in(header)
        yield left[:length]
        left = left[length:]
        if len(left) < HEADER_BYTES or not any(left[:HEADER_BYTES]):
            return  # at the end, or padding
