"""``tiered-kv inspect``, ``verify`` and ``delete``: what lies in a tier's medium."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, Field, TypeAdapter, ValidationError
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tiered_kv.cli import inventories
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
)
from tiered_kv.cli.inventories import OnProgress
from tiered_kv.media.backend import Inventory
from tiered_kv.settings.tier_settings import StorageTierSettings, TierSettings
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import NO_SALT, epoch_digest, salt_digest

Where = Annotated[
    str,
    typer.Argument(help="A directory of an nvme or shared_fs tier, a tier's URL, or its name in the settings."),
]


def inspect_command(where: Where, config: ConfigFile = None, *, as_json: AsJSON = False) -> None:
    """Show what lies in a tier's medium: models, epochs and tenants by digest, blocks, bytes, ages."""

    async def look(on_progress: OnProgress) -> list[inventories.Shelf]:
        tier = _tier_at(where, config)
        async with inventories.inventory_at(where, tier) as inventory:
            _tell_missing(inventory)
            return await inventories.shelves_in(inventory, on_progress, no_salt=_on_medium(tier, NO_SALT))

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

    async def look(on_progress: OnProgress) -> inventories.InventoryReport:
        bytes_a_second = None if rate is None else _bytes_of(rate)
        tier = _tier_at(where, config)
        encryption = getattr(tier, "encryption", None)
        seal = None if encryption is None else encryption.make_seal()
        async with inventories.inventory_at(where, tier, to_delete=fix) as inventory:
            _tell_missing(inventory)
            return await inventories.verify(inventory, fix=fix, rate=bytes_a_second, seal=seal, on_progress=on_progress)

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
        tier = _tier_at(where, config)
        is_named = salt or tenant == "none"
        of_tenant = _on_medium(tier, salt_digest(salt or "")).hex() if is_named else tenant
        of_weights = _on_medium(tier, epoch_digest(weights)).hex() if weights else epoch
        wanted = inventories.Wanted(model or "", of_weights or "", of_tenant or "")
        async with inventories.inventory_at(where, tier, to_delete=not dry_run) as inventory:
            found = await inventories.matching(inventory, wanted, on_progress)
            num_blocks, num_bytes = sum(each.num_blocks for each in found), sum(each.num_bytes for each in found)
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


def _tier_at(where: str, config: Path | None) -> TierSettings | None:
    """Return the tier that is meant, or None of a directory; settings are read where they have to say which it is."""
    is_place = "://" in where or "/" in where or Path(where).exists()
    return inventories.tier_at(where, settings_of(config) if config is not None or not is_place else None)


def _on_medium(tier: TierSettings | None, digest: bytes) -> bytes:
    """Return what stands there for a digest: a tier that has keys hides it."""
    return tier.on_medium(digest) if isinstance(tier, StorageTierSettings) else digest


def _tell_missing(inventory: Inventory) -> None:
    for name in inventories.missing_of(inventory):
        err.print(f"[red]missing[/] {escape(name)}: what is there was not looked at", highlight=False)


def _bytes_of(text: str) -> int:
    try:
        return TypeAdapter(Annotated[ByteSize, Field(gt=0)]).validate_python(text)
    except ValidationError as error:
        raise ConfigurationError(f"--rate takes a size such as 50MiB, got {text!r:.80}") from error


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
