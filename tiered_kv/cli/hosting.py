"""``tiered-kv serve``, and what ``status --host`` shows: how such a server is, who is attached, what it keeps."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from tiered_kv.cli.common import ConfigFile, one_line_errors, out, print_table, settings_of
from tiered_kv.settings.setting_errors import size_in_words
from tiered_kv.values.log import log


def serve_command(config: ConfigFile = None) -> None:
    """Keep one cache for all engines of this host, until SIGTERM; they attach to its socket.

    It is at [host] socket of the file, or $TIERED_KV_HOST__SOCKET. Exits 1 if not all was written in time at the end.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with one_line_errors():
        from tiered_kv.host import serve  # noqa: PLC0415 - needs msgspec, uvloop and torch; who asks for the state not

        settings = settings_of(config)
        if settings.metrics and not settings.page:  # a program of one's own may serve them, this one does not
            log("warning", "host.metrics_unserved", advice="set page too: they are at its /metrics")
        is_written = serve.run(settings)
    raise typer.Exit(int(not is_written))


def state_of(socket: Path) -> dict[str, Any]:
    """Ask the server that listens there.

    Raises:
        ConfigurationError, BackendUnavailableError: There is none that answers.
    """
    from tiered_kv.host.handshake import health_at  # noqa: PLC0415 - needs msgspec, others do not

    return health_at(Path(str(socket).removeprefix("unix:")))  # as `connect` takes it, too


def show(state: Mapping[str, Any]) -> None:
    """Show what it said, as a line and two tables."""
    how = "draining" if state["is_draining"] else "ready" if state["is_ready"] else "not ready"
    clients = "1 client" if len(state["clients"]) == 1 else f"{len(state['clients'])} clients"
    out.print(f"{how}, for {state['up_s']:,.0f} s, process {state['pid']}; {clients} attached")
    if state["shares"]:
        columns = ("model", "clients", "weight", "tier", "given", "own", "blocks", "of", "in use", "hits")
        names = Counter(share["model"] for share in state["shares"])
        print_table(columns, [row for share in state["shares"] for row in _rows_of(share, names)])
        if names.total() > len(names):
            out.print("Models of one name differ in dtype, layout or ranks, and share no block; in brackets: directory")
    if state["clients"]:
        counts = ("loads", "stores", "jobs", "copies", "leases", "questions")
        rows = [(escape(each["name"]), *(f"{each[name]}" for name in counts)) for each in state["clients"]]
        print_table(("client", *counts), rows)


def _rows_of(share: Mapping[str, Any], names: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each tier of a model's share; one that nobody has opened yet has none."""
    model = share["model"] or "not asked for yet"  # a folder of before this start, which does not say whose it is
    which = f" [{share['directory'][:8]}]" if names[share["model"]] > 1 or not share["model"] else ""
    about = (escape(model + which), f"{share['clients']}", f"{share['weight']:g}")
    tiers = share.get("tiers", ())
    if not tiers:
        yield (*about, "", "", "", "", "", "", "")
    for tier in tiers:
        counts = (tier["ready"], tier["num_slots"], tier["leased"] + tier["pending"], tier["hits"])
        name = tier["tier"]
        is_given = name in share["given"]
        sizes = [size_in_words(share[of][name]) if is_given else "" for of in ("given", "right")]
        yield (*about, name, *sizes, *(f"{count:,}" for count in counts))
        about = ("", "", "")
