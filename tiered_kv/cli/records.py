"""What lies in a tier's medium: counting it, verifying it, deleting some of it. No cache is opened."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tiered_kv.chain_settings import CPUTier, GPUTier, tier_from, tier_name
from tiered_kv.cli.directories import DirectoryInventory, open_directories
from tiered_kv.errors import BlockCorruptError, ConfigurationError, LayoutMismatchError
from tiered_kv.inventory import Found, Inventory, Place
from tiered_kv.record import HEADER_BYTES, key_in, parse_record, payload_bytes_in
from tiered_kv.registry import resolve
from tiered_kv.settings import TieredKVSettings
from tiered_kv.tier_settings import TierSettings

_LEAST_DIGITS: Final = 8
OnProgress = Callable[[int], None]
"""Told of so many records more."""


@dataclass(frozen=True)
class Shelf:
    """The blocks of one namespace.

    Attributes:
        fingerprint: Of model and layout, hexadecimal, as are the next.
        epoch: How the digest of the weights begins.
        shard: Whose part of the heads.
        salt: How the digest of the tenant's salt begins.
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
    where: str, settings: TieredKVSettings | None = None, *, to_delete: bool = False
) -> AbstractAsyncContextManager[Inventory]:
    """Return the inventory of a directory, of the tier that a URL says, or of a tier of the settings by its name.

    Raises:
        ConfigurationError: There is no such tier, or its medium cannot list what it has.
    """
    tier = _tier_at(where, settings)
    if tier is None:
        return open_directories([Path(where)], to_delete=to_delete)
    if isinstance(tier, CPUTier | GPUTier):
        raise ConfigurationError(f"a {tier.medium} tier lies in a process's memory: ask the running cache, by status")
    if isinstance(path := getattr(tier, "path", None), Path | tuple):
        return open_directories(path if isinstance(path, tuple) else [path], to_delete=to_delete)
    return resolve(tier.medium).inventory(tier)


def _tier_at(where: str, settings: TieredKVSettings | None) -> TierSettings | None:
    if "://" in where:
        return tier_from(where)
    if settings is None:
        return None
    named = {tier_name(tier): tier for tier in settings.tiers}
    if where not in named:
        raise ConfigurationError(f"no tier {where!r} in the settings: there are {', '.join(named)}")
    return named[where]


async def shelves_in(inventory: Inventory, on_progress: OnProgress = lambda _: None) -> list[Shelf]:
    """Count what lies there, by namespace."""
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
            place.fingerprint, place.epoch, place.shard, place.salt, place.is_unsalted, num_blocks, num_bytes,
            max(0.0, now - latest) if latest else None,
        )
        for place, (num_blocks, num_bytes, latest) in sorted(counts.items())
        if place.epoch
    ]  # fmt: skip


def missing_of(inventory: Inventory) -> list[str]:
    """Name the parts of a medium that are not there."""
    return [str(path) for path in inventory.missing] if isinstance(inventory, DirectoryInventory) else []


async def verify(
    inventory: Inventory, *, fix: bool, rate: int | None = None, on_progress: OnProgress = lambda _: None
) -> Report:
    """Read every record, and check every byte of it.

    Args:
        inventory: What to read.
        fix: Delete what is broken; of several records in one object all of them.
        rate: Bytes a second to read at most.
        on_progress: Told of what was read.
    """
    report = Report(missing=missing_of(inventory))
    started, num_bytes = time.monotonic(), 0
    async for some in inventory.found():
        for each in some:
            data = await inventory.read(each)
            num_bytes += each.num_bytes
            if rate is not None:
                await asyncio.sleep(max(0.0, started + num_bytes / rate - time.monotonic()))
            if data is not None:
                why = _look_at(each, data, report)
                if why:
                    report.broken.append(Broken(each.where, why))
                if why and fix:
                    await inventory.delete([each])
                    report.num_fixed += 1
            on_progress(1)
    return report


async def matching(inventory: Inventory, wanted: Wanted, on_progress: OnProgress = lambda _: None) -> list[Found]:
    """Return all that is wanted of what lies there."""
    matches: list[Found] = []
    async for some in inventory.found():
        matches += [each for each in some if each.place.epoch and each.place.is_of(**vars(wanted))]
        on_progress(len(some))
    return matches


def _look_at(found: Found, data: bytes, report: Report) -> str:
    """Count the records of one place that are well; say what is wrong with the first that is not."""
    num_left = found.num_blocks
    for record in _records_of(data):
        try:
            if not found.is_named_by(parse_record(record).key):
                return "it is another block's record"
            report.num_good += 1
        except ConfigurationError:
            report.num_sealed += 1
        except (BlockCorruptError, LayoutMismatchError) as error:
            return str(error)
        num_left -= 1
    return f"{num_left} of {found.num_blocks} records are missing" if num_left > 0 else ""


def _records_of(data: bytes) -> Iterator[memoryview]:
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
