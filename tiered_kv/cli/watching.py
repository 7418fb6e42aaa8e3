"""``tiered-kv status`` and ``top``: what a cache that runs is doing."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tiered_kv.cli import hosting
from tiered_kv.cli.common import AsJSON, one_line_errors, out, print_json
from tiered_kv.cli.running import At, PageState, running_cache
from tiered_kv.settings.page_address import DEFAULT
from tiered_kv.settings.setting_errors import size_in_words

_BAR: Final = 12
_MOST_REASONS: Final = 5
_MOST_SHORTFALLS: Final = 8


def status_command(
    at: At = DEFAULT,
    *,
    host: Annotated[
        Path | None, typer.Option(help="Instead of a cache, the server that `tiered-kv serve` runs: its socket.")
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Show what a running cache has, and what it did in the last hour. Exits 1 if a tier is in trouble.

    With --host, whether a server is ready, its models and clients; exits 1 if it is not.
    """
    if host is not None:
        with one_line_errors():
            server = hosting.state_of(host)
        if as_json:
            print_json(server)
        else:
            hosting.show(server)
        raise typer.Exit(int(not server["is_ready"]))
    with one_line_errors(), running_cache(at) as cache:
        state = cache.state()
    if as_json:
        print_json(state)
    else:
        out.print(*_overview(state), sep="\n", highlight=False)
    raise typer.Exit(int(bool(_troubled(state))))


def top_command(
    at: At = DEFAULT,
    *,
    every: Annotated[float, typer.Option(min=0.2, max=86_400.0, help="Seconds between two looks.")] = 1.0,
    looks: Annotated[int, typer.Option(min=0, help="End after so many looks; 0: until Ctrl-C.")] = 0,
    as_json: AsJSON = False,
) -> None:
    """Watch a running cache. With --json, a line of JSON for each look."""
    with one_line_errors(), running_cache(at) as cache:
        state = cache.state()
        number = 1
        live = None if as_json else Live(Group(*_overview(state)), console=out, auto_refresh=False)
        try:
            if live is not None:
                live.start(refresh=True)
            else:
                print_json(state)
            while number != looks:
                time.sleep(every)
                before, state = state, cache.state()
                number += 1
                if live is not None:
                    live.update(Group(*_overview(state, before)), refresh=True)
                else:
                    print_json(state)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            pass
        finally:
            if live is not None:
                live.stop()
                if not out.is_terminal:
                    out.print()  # what Rich leaves out there: the end of the last line


def _overview(state: PageState, before: PageState | None = None) -> list[RenderableType]:
    hour, troubled = state["hour"], _troubled(state)
    if before is not None and before["opened_at"] != state["opened_at"]:
        before = None  # of a cache that was there before: this one counts from its own opening
    rate = hour["hit_rate"]
    said = f"[red]trouble in {escape(', '.join(troubled))}[/]" if troubled else "[green]no tier in trouble[/]"
    busy = "" if state["lag_s"] < 0.9 else ", [yellow]its event loop is busy[/]"
    head = Text.from_markup(
        f"[bold]{escape(state['model'])}[/], {said}{busy}; hit rate of the last hour: "
        f"[bold]{'-' if rate is None else f'{100 * rate:.0f} %'}[/]; {state['cache']['transfers']} transfers under way"
    )
    return [head, *_troubles(state, troubled), _tiers(state, before), *_reasons(state), *_shortfalls(state)]


def _tiers(state: PageState, before: PageState | None) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("tier", "", "full", "size", "blocks", "hits", "evicted", "reads", "writes", "under way", "trouble"):
        table.add_column(column, justify="left" if column in {"tier", "", "trouble"} else "right")
    seconds = state["at"] - before["at"] if before else 0.0
    then = {tier["tier"]: tier for tier in before["tiers"]} if before else {}
    hits = sum(state["hour"]["hits"].values())
    for tier in state["tiers"]:
        name = tier["tier"]
        full = tier["ready"] / tier["num_slots"] if tier["num_slots"] else None
        speeds = [
            _size((tier[way] - then[name][way]) / seconds) + "/s" if seconds else _size(state["hour"][way][name])
            for way in ("bytes_read", "bytes_written")
        ]
        wrong = ["bypassed"] * tier["is_bypassed"] + [f"no {each}" for each in tier["open_breakers"]]
        share = state["hour"]["hits"][name] / hits if hits else 0.0
        table.add_row(
            escape(name),
            "" if full is None else "█" * round(_BAR * full) + "░" * (_BAR - round(_BAR * full)),
            "" if full is None else f"{100 * full:.0f} %",
            _size(tier["capacity_bytes"]) if full is not None else "shared",
            f"{tier['ready'] if full is not None else tier['written']:,}",
            f"{100 * share:.0f} %",
            f"{state['hour']['evicted'][name]:,}",
            *speeds,
            _size(tier["in_flight_bytes"]) + (f", {tier['num_waiting']} wait" if tier["num_waiting"] else ""),
            f"[red]{escape(', '.join(wrong))}[/]",
        )
    return table


def _troubles(state: PageState, troubled: Sequence[str]) -> list[RenderableType]:
    """Return, for tiers in trouble, how often each kind of call went wrong, and its last error."""
    return [
        Text(f"{each['tier']}, {each['call']} {each['what']} {each['times']:,} times, the last time: {each['error']}")
        for each in state["troubles"]
        if each["tier"] in troubled
    ]


def _reasons(state: PageState) -> list[RenderableType]:
    hour = state["hour"]
    broken = {tier["tier"]: tier["corrupt"] for tier in state["tiers"] if tier["corrupt"]}
    lines = [
        ("missed in the last hour", hour["missing_because"]),
        ("kept in no tier", hour["dropped_because"]),
        *((f"not written to {tier}", reasons) for tier, reasons in hour["not_written"].items()),
        ("found broken since the cache was opened", broken),
    ]
    return [
        Text(f"{what}: " + ", ".join(f"{reason} {n:,}" for reason, n in Counter(counts).most_common(_MOST_REASONS)))
        for what, counts in lines
        if counts
    ]


def _shortfalls(state: PageState) -> list[RenderableType]:
    last = state["shortfalls"][:_MOST_SHORTFALLS]
    if not last:
        return []
    table = Table(box=None, pad_edge=False)
    for column in ("at", "tokens", "tenant", "blocks", "the next one was"):
        table.add_column(column, justify="right" if column in {"tokens", "blocks"} else "left")
    for each in last:
        at = time.strftime("%H:%M:%S", time.localtime(each["at"]))
        there = f"{each['found']:,} of {each['requested']:,}"
        table.add_row(at, f"{each['tokens']:,}", each["tenant"][:8], there, escape(each["because"]))
    return [Text("Prompts that fell short:"), table]


def _troubled(state: PageState) -> list[str]:
    away = [tier["tier"] for tier in state["tiers"] if tier["is_bypassed"] or tier["open_breakers"]]
    return away if state["cache"]["is_device_usable"] else [*away, "the engine's device"]


def _size(num_bytes: float) -> str:
    return size_in_words(max(0, num_bytes)) if num_bytes else "0"
