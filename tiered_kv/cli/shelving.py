"""``tiered-kv inspect``, ``verify``, ``delete`` and ``digest``: what lies in a tier's medium. No cache is opened."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tiered_kv.cli.common import (
    AsJSON,
    ConfigFile,
    err,
    one_line_errors,
    out,
    print_json,
    print_table,
    refuse_if,
    settings_of,
    size_of,
)
from tiered_kv.media.inventory import MOST_FOUND_BYTES, Found, Inventory, Place
from tiered_kv.media.record import HEADER_BYTES, key_in, parse_record, payload_bytes_in
from tiered_kv.settings.chain_settings import CPUTier, GPUTier, tier_from, tier_name
from tiered_kv.settings.registry import resolve
from tiered_kv.settings.tier_settings import StorageTierSettings, TierSettings
from tiered_kv.values.errors import BlockCorruptError, ConfigurationError, LayoutMismatchError
from tiered_kv.values.keys import NO_SALT, epoch_digest, salt_digest

if TYPE_CHECKING:
    from tiered_kv.media.seal import Seal

_LEAST_DIGITS: Final = 8
_DIRECTORIES: Final = ("nvme", "shared_fs")
"""The media whose directories are known by what is in them."""
_ANY_CAPACITY: Final = "1EiB"
OnProgress = Callable[[int], None]
"""Told of so many records more."""
Where = Annotated[
    str,
    typer.Argument(help="A directory of an nvme or shared_fs tier, a tier's URL, or its name in the settings."),
]


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
    """Which blocks are wanted: of a model, weights, a tenant, by the digests that `inspect` shows; empty is any.

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


def inspect_command(where: Where, config: ConfigFile = None, *, as_json: AsJSON = False) -> None:
    """Show what lies in a tier's medium: models, epochs and tenants by digest, blocks, bytes, ages."""

    async def look(on_progress: OnProgress) -> list[Shelf]:
        tier = tier_at(where, config)
        async with inventory_at(tier) as inventory:
            _tell_missing(inventory)
            return await shelves_in(inventory, on_progress, no_salt=_on_medium(tier, NO_SALT))

    with one_line_errors(), _progress("looking", is_shown=not as_json) as on_progress:
        shelves = asyncio.run(look(on_progress))
    if as_json:
        print_json([asdict(each) for each in shelves])
        return
    rows = [
        (
            each.model[:12],
            each.epoch[:8],
            each.shard,
            each.tenant[:8],
            f"{each.num_blocks:,}",
            f"{each.num_bytes / 2**20:,.1f}",
            "" if each.youngest_s is None else _age(each.youngest_s),
        )
        for each in shelves
    ]
    print_table(("model", "epoch", "shard", "tenant", "blocks", "MiB", "written"), rows)


def verify_command(
    where: Where,
    config: ConfigFile = None,
    *,
    fix: Annotated[bool, typer.Option(help="Delete what is broken; of nvme only while no cache has it open.")] = False,
    rate: Annotated[str | None, typer.Option(help="Read so much a second at most, e.g. 50MiB: to scrub by it.")] = None,
    as_json: AsJSON = False,
) -> None:
    """Read every record of a tier's medium, and check every byte of it. Exits 1 if something broken is left."""

    async def look(on_progress: OnProgress) -> InventoryReport:
        bytes_a_second = None if rate is None else size_of("--rate", rate)
        tier = tier_at(where, config)
        encryption = getattr(tier, "encryption", None)
        seal = None if encryption is None else encryption.make_seal()
        async with inventory_at(tier) as inventory:
            _tell_missing(inventory)
            if fix:
                await _hold(inventory)
            return await verify(inventory, fix=fix, rate=bytes_a_second, seal=seal, on_progress=on_progress)

    with one_line_errors(), _progress("verifying", is_shown=not as_json) as on_progress:
        report = asyncio.run(look(on_progress))
    if as_json:
        print_json(asdict(report))
    else:
        for each in report.broken:
            out.print(f"[red]broken[/] {escape(each.where)}: {escape(each.why)}", highlight=False)
        out.print(
            f"{report.num_good:,} good, {len(report.broken):,} broken, {report.num_fixed:,} deleted, "
            f"{report.num_sealed:,} sealed and not verified",
            highlight=False,
        )
    raise typer.Exit(int(len(report.broken) > report.num_fixed))


def delete_command(
    where: Where,
    config: ConfigFile = None,
    *,
    model: Annotated[
        str | None, typer.Option(help="Of this model and layout: 8 or more digits, as inspect shows them.")
    ] = None,
    epoch: Annotated[str | None, typer.Option(help="Of these weights: likewise.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Of this tenant: likewise, or none for what has no salt.")] = None,
    salt: Annotated[str | None, typer.Option(envvar="TIERED_KV_SALT", help="Of the tenant with this salt.")] = None,
    weights: Annotated[str | None, typer.Option(help="Of these weights, as ModelIdentity has them.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, no more.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Delete from a tier's medium what is of a model, of weights, or of a tenant, or of all that are given.

    From an nvme tier only while no cache has it open; what is in the memory of running caches stays there.
    """

    async def find_and_delete(on_progress: OnProgress) -> tuple[int, int]:
        tier = tier_at(where, config)
        is_named = salt or tenant == "none"
        of_tenant = _on_medium(tier, salt_digest(salt or "")).hex() if is_named else tenant
        of_weights = _on_medium(tier, epoch_digest(weights)).hex() if weights else epoch
        wanted = Wanted(model or "", of_weights or "", of_tenant or "")
        async with inventory_at(tier) as inventory:
            if not dry_run:
                await _hold(inventory)
            found = await matching(inventory, wanted, on_progress)
            blocks = [each for each in found if each.num_blocks and each.place.epoch]
            num_blocks, num_bytes = sum(each.num_blocks for each in blocks), sum(each.num_bytes for each in blocks)
            if found and not dry_run and (yes or _agreed(f"Delete {num_blocks:,} blocks from {where}?")):
                await inventory.delete(found)
            elif found and not dry_run:
                raise typer.Exit(1)
            return num_blocks, num_bytes

    with one_line_errors(), _progress("looking", is_shown=not as_json and yes) as on_progress:
        given = {"--model": model, "--epoch": epoch, "--tenant": tenant, "--salt": salt, "--weights": weights}
        said = [name for name, value in given.items() if value is not None]
        empty = next((name for name in said if not given[name]), "")
        refuse_if(
            (not said, "say what to delete: --model, --epoch, --tenant, --salt or --weights; see inspect"),
            (bool(empty), f"{empty} is empty: leave it out if any is meant; what has no salt is of --tenant none"),
            (
                bool((epoch and weights) or (tenant and salt)),
                "--epoch and --weights are the same, as are --tenant and --salt: give one of them",
            ),
        )
        num_blocks, num_bytes = asyncio.run(find_and_delete(on_progress))
    if as_json:
        print_json({"num_blocks": num_blocks, "num_bytes": num_bytes, "is_deleted": not dry_run})
    else:
        done = "would be deleted" if dry_run else "deleted"
        out.print(f"{num_blocks:,} blocks, {num_bytes / 2**20:,.1f} MiB, {done}", highlight=False)


def digest_command(
    where: Annotated[
        str, typer.Argument(help="A tier's URL, or its name in the settings: as it hides them if it has keys.")
    ] = "",
    config: ConfigFile = None,
    *,
    salt: Annotated[list[str] | None, typer.Option(help="Of a tenant; as often as there are some.")] = None,
    weights: Annotated[list[str] | None, typer.Option(help="As ModelIdentity has them; likewise.")] = None,
    as_json: AsJSON = False,
) -> None:
    """Show the digests of tenants and weights: what inspect, status, explain, metrics and the log call them."""
    with one_line_errors():
        refuse_if((not (salt or weights), "say of what: --salt or --weights"))
        tier = tier_at(where, config) if where else None
        named = [("tenant", each, salt_digest(each)) for each in salt or ()]
        named += [("weights", each, epoch_digest(each)) for each in weights or ()]
        rows = [
            (what, name, (digest if tier is None else _on_medium(tier, digest)).hex()) for what, name, digest in named
        ]
    if as_json:
        print_json([dict(zip(("what", "name", "digest"), row, strict=True)) for row in rows])
    else:
        print_table(("what", "name", "digest"), [tuple(map(escape, row)) for row in rows])


def inventory_at(tier: TierSettings) -> AbstractAsyncContextManager[Inventory]:
    """Return the inventory of a tier, see `tier_at`.

    Raises:
        ConfigurationError: The tier's medium cannot list what it has.
    """
    if isinstance(tier, CPUTier | GPUTier):
        raise ConfigurationError(f"a {tier.medium} tier lies in a process's memory: ask the running cache, by status")
    return resolve(tier.medium).inventory(tier)


def tier_at(where: str, config: Path | None) -> TierSettings:
    """Return the settings of a tier by its URL, or by its name in the settings, which a file or the environment has.

    Of a directory, those of a tier that has used it: nothing is known of it but its format.

    Raises:
        ConfigurationError: There is no such tier.
        OSError: The directory cannot be looked at.
    """
    is_place = "://" in where or "/" in where or Path(where).exists()
    settings = settings_of(config) if config is not None or not is_place else None
    if "://" in where:
        with suppress(ConfigurationError):  # how much it may hold says nothing of what lies there
            return tier_from(f"{where}{'&' if '?' in where else '?'}capacity={_ANY_CAPACITY}")
        return tier_from(where)
    if settings is None:
        medium = next((each for each in _DIRECTORIES if resolve(each).has_used(Path(where))), None)
        if medium is None:
            raise ConfigurationError(f"no nvme or shared_fs tier has used {where}: give its path, or a tier's URL")
        return tier_from({"medium": medium, "path": where, "capacity": _ANY_CAPACITY})
    named = {tier_name(tier): tier for tier in settings.tiers}
    if where not in named:
        there_are = f"no tier of that name is in the settings: there are {', '.join(named)}"
        raise ConfigurationError(f"{where!r} is no directory, and {there_are}")
    return named[where]


async def shelves_in(inventory: Inventory, on_progress: OnProgress, *, no_salt: bytes) -> list[Shelf]:
    """Count what lies there, by namespace; ``no_salt`` is what stands there for no tenant."""
    counts: dict[Place, tuple[int, int, float]] = {}
    async for some in inventory.found():
        for each in filter(_is_of_blocks, some):
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
    report = InventoryReport(missing=[*inventory.missing])
    started, num_bytes = time.monotonic(), 0
    broken: list[Found] = []
    async for some in inventory.found():
        for each in filter(_is_of_blocks, some):
            why = ""
            try:
                data = await inventory.read(each)
            except BlockCorruptError as error:
                data, why = b"", str(error)
            num_bytes += each.num_bytes
            if rate is not None:
                await asyncio.sleep(max(0.0, started + num_bytes / rate - time.monotonic()))
            if data is not None:
                why = why or _look_at(each, data, report, seal)
                if why:
                    report.broken.append(Broken(each.where, why))
                    broken.append(each)
                if why and fix:
                    await inventory.delete([each])
                    report.num_fixed += 1
            on_progress(1)
    if not fix:  # else no cache has it open, or puts other blocks in their place
        are_there = await inventory.still_there(broken)
        report.broken = [each for each, is_there in zip(report.broken, are_there, strict=True) if is_there]
    return report


async def matching(inventory: Inventory, wanted: Wanted, on_progress: OnProgress) -> list[Found]:
    """Return all that is wanted of what lies there, and that of which nobody can say whether it is."""
    matches: list[Found] = []
    async for some in inventory.found(wanted.tenant[:32] if len(wanted.tenant) >= 32 else ""):  # as a place has it
        matches += [each for each in some if each.place.is_of(**vars(wanted))]
        on_progress(len(some))
    return matches


def _is_of_blocks(found: Found) -> bool:
    return found.num_blocks > 0


def _on_medium(tier: TierSettings, digest: bytes) -> bytes:
    """Return what stands there for a digest: a tier that has keys hides it."""
    return tier.on_medium(digest) if isinstance(tier, StorageTierSettings) else digest


async def _hold(inventory: Inventory) -> None:
    """Keep caches out, as far as its medium needs that, from before something is found until it is deleted."""
    if inventory.missing:
        raise ConfigurationError(
            f"no tier has used {', '.join(inventory.missing)}: nothing was deleted, what is there would come back"
        )
    await inventory.hold()


def _tell_missing(inventory: Inventory) -> None:
    for name in inventory.missing:
        err.print(f"[red]missing[/] {escape(name)}: what is there was not looked at", highlight=False)


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigurationError("nobody is there to be asked: add --yes")
    return typer.confirm(question, err=True)


@contextmanager
def _progress(what: str, *, is_shown: bool) -> Iterator[OnProgress]:
    """Show how many records were looked at."""
    columns = (SpinnerColumn(), TextColumn("{task.description}, {task.completed:,.0f} records"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not (is_shown and err.is_terminal)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda num_records: bar.advance(task, num_records)


def _age(seconds: float) -> str:
    units = (("d", 86400), ("h", 3600), ("min", 60))
    return next((f"{seconds / each:.0f} {unit} ago" for unit, each in units if seconds >= each), f"{seconds:.0f} s ago")


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
