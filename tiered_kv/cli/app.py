"""The commands: what they take, and what they show of the answers. What they do is in the modules beside this one."""

import asyncio
import logging
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import Progress

from tiered_kv.cli import configuration, doctoring, records
from tiered_kv.cli.planning import plan_command
from tiered_kv.cli.replaying import replay_command
from tiered_kv.cli.showing import AsJSON, ConfigFile, err, one_line_errors, out, print_json, print_table, settings_of

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Where = Annotated[str, typer.Argument(help="A directory of an nvme or shared_fs tier, or such a tier's URL.")]


@app.callback()
def _about() -> None:
    """Look after tiered KV caches."""


@app.command()
def doctor(config: ConfigFile = None, *, as_json: AsJSON = False) -> None:
    """See whether this machine, and the tiers that are configured, will do; say what to change.

    Of shared tiers one small block is stored, loaded and deleted. Exits 1 if a cache would not work.
    """
    with one_line_errors():
        found = asyncio.run(doctoring.examine(settings_of(config)))
    if as_json:
        print_json([asdict(each) for each in found])
    else:
        marks = {"ok": "[green]ok[/]", "slow": "[yellow]slow[/]", "bad": "[red]bad[/]"}
        rows = [(marks[each.state], escape(each.what), escape(each.found), escape(each.advice)) for each in found]
        print_table(("", "what", "found", "what to change"), rows)
    raise typer.Exit(int(any(each.state == "bad" for each in found)))


@app.command()
def config(
    config: ConfigFile = None,
    *,
    keys: Annotated[bool, typer.Option(help="All keys there are, of every medium.")] = False,
    schema: Annotated[bool, typer.Option(help="The JSON schema of the settings, and of each medium's.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Show the settings that are in force, and where each comes from; no secrets."""
    with one_line_errors():
        if schema:
            print_json(configuration.schema())
            return
        found = configuration.all_keys() if keys else configuration.in_force(settings_of(config), config)
    if as_json:
        print_json([asdict(each) for each in found])
        return
    columns = ("key", "default", "environment") if keys else ("key", "value", "from")
    print_table(columns, [tuple(map(escape, (each.key, each.value, each.source))) for each in found])


@app.command()
def inspect(where: Where, *, as_json: AsJSON = False) -> None:
    """Show what lies in a tier's directory: models, epochs and tenants by digest, blocks, bytes, ages."""
    with one_line_errors():
        shelves = records.shelves_in(records.directory_of(where))
    if as_json:
        print_json([asdict(each) for each in shelves])
        return
    rows = [
        (
            each.fingerprint[:12],
            each.epoch[:8],
            each.shard,
            "none" if each.is_unsalted else each.salt[:8],
            f"{each.num_blocks:,}",
            f"{each.num_bytes / 2**20:,.1f}",
            "" if each.youngest_s is None else _age(each.youngest_s),
        )
        for each in shelves
    ]
    print_table(("model", "epoch", "shard", "tenant", "blocks", "MiB", "written"), rows)


@app.command()
def verify(
    where: Where,
    *,
    fix: Annotated[bool, typer.Option(help="Delete what is broken; of nvme only while no cache has it open.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Read every record of a tier's directory, and check every byte of it. Exits 1 if something broken is left."""
    with one_line_errors(), Progress(console=err, transient=True, disable=as_json or not err.is_terminal) as bar:
        task = bar.add_task("verifying", total=None)
        report = records.verify(
            records.directory_of(where), fix=fix, on_record=lambda done, of: bar.update(task, completed=done, total=of)
        )
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


app.command("replay")(replay_command)
app.command("plan")(plan_command)


@app.command()
def serve(config: ConfigFile = None) -> None:
    """Keep one cache for all engines of this host, until SIGTERM; they attach to its socket.

    It is at [host] socket of the file, or $TIERED_KV_HOST__SOCKET. Exits 1 if not all was written in time at the end.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with one_line_errors():
        from tiered_kv.host.serve import serve as serve_until_told  # noqa: PLC0415 - needs msgspec, others do not

        is_written = asyncio.run(serve_until_told(settings_of(config)))
    raise typer.Exit(int(not is_written))


def _age(seconds: float) -> str:
    units = (("d", 86400), ("h", 3600), ("min", 60))
    return next((f"{seconds / each:.0f} {unit} ago" for unit, each in units if seconds >= each), f"{seconds:.0f} s ago")
