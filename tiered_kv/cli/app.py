"""The commands. What each does, and what it shows of the answer, is in the modules beside this one."""

import asyncio
import logging
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from tiered_kv.cli import configuration, doctoring
from tiered_kv.cli.benching import bench_command
from tiered_kv.cli.explaining import explain_command
from tiered_kv.cli.planning import plan_command
from tiered_kv.cli.replaying import replay_command
from tiered_kv.cli.shelving import delete_command, inspect_command, verify_command
from tiered_kv.cli.showing import AsJSON, ConfigFile, one_line_errors, print_json, print_table, settings_of
from tiered_kv.cli.watching import status_command, top_command

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


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


app.command("status")(status_command)
app.command("top")(top_command)
app.command("explain")(explain_command)
app.command("bench")(bench_command)
app.command("inspect")(inspect_command)
app.command("verify")(verify_command)
app.command("delete")(delete_command)
app.command("replay")(replay_command)
app.command("plan")(plan_command)


@app.command()
def serve(config: ConfigFile = None) -> None:
    """Keep one cache for all engines of this host, until SIGTERM; they attach to its socket.

    It is at [host] socket of the file, or $TIERED_KV_HOST__SOCKET. Exits 1 if not all was written in time at the end.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with one_line_errors():
        from tiered_kv.host import serve as serving  # noqa: PLC0415 - needs msgspec and uvloop, others do not

        is_written = serving.run(settings_of(config))
    raise typer.Exit(int(not is_written))
