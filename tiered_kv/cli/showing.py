"""What all commands share: their options, and how answers and errors are shown.

Answers go to stdout, as tables or with ``--json`` as one line of JSON; all else to stderr.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from tiered_kv.errors import TieredKVError

if TYPE_CHECKING:
    from tiered_kv.settings import TieredKVSettings

_WIDTH: Final = 160
"""Of tables that go to a file or another program."""

AsJSON = Annotated[bool, typer.Option("--json", help="Answer with one line of JSON.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A TOML file; else $TIERED_KV_CONFIG and TIERED_KV_* are read.")
]

out = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
err = Console(stderr=True)


def settings_of(config: Path | None) -> "TieredKVSettings":
    """Read the settings of a file, or of the environment."""
    from tiered_kv.settings import TieredKVSettings  # noqa: PLC0415 - brings torch, which who only asks does without

    return TieredKVSettings() if config is None else TieredKVSettings.from_toml(config)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Say what went wrong in one line, and exit 2."""
    try:
        yield
    except TieredKVError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def fail(what: str) -> NoReturn:
    """Say it in one line, and exit 2."""
    sys.stderr.write(f"tiered-kv: {what}\n")
    raise typer.Exit(2)


def print_json(value: object) -> None:
    """Answer with one line of JSON."""
    sys.stdout.write(json.dumps(value) + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Answer with a table; its cells may have markup."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    with out.capture() as text:
        out.print(table, highlight=False)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in text.get().splitlines()))
