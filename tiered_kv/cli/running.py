"""Asking a cache that runs, by the address of its page.

What all commands share: their options, and how answers and errors are shown.

Answers go to stdout, as tables or with ``--json`` as one line of JSON; all else to stderr.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import httpx
import typer
from rich.console import Console
from rich.table import Table

from tiered_kv.settings.page_address import page_address, parts_of
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError, TieredKVError

if TYPE_CHECKING:
    from tiered_kv.settings.settings import TieredKVSettings


At = Annotated[
    str,
    typer.Option(
        "--at",
        envvar="TIERED_KV_PAGE",
        help="Where the cache's page is: HOST:PORT, unix:/PATH, or the URL where a program has mounted it.",
    ),
]

_TIMEOUT_S: Final = 10.0
_STATE: Final = {"model", "at", "lag_s", "tiers", "cache", "hour", "shortfalls", "troubles"}
"""What other JSON has not."""
_ADVICE: Final = "set page = true where it runs, or give its address: --at HOST:PORT, unix:/PATH or http://HOST/PATH"


class RunningCache:
    """One cache, asked over HTTP."""

    def __init__(self, client: httpx.Client, at: str) -> None:
        self._client = client
        self._at = at

    def state(self) -> dict[str, Any]:
        """Return what its page shows.

        Raises:
            BackendUnavailableError: Nobody answers, or no cache is open there.
        """
        return self._asked("GET", "stats.json", _STATE)

    def explain(self, question: dict[str, Any]) -> dict[str, Any]:
        """Ask why blocks are there or are not.

        Raises:
            BackendUnavailableError: As `state`.
            ConfigurationError: It is no question.
        """
        return self._asked("POST", "explain.json", {"block_size", "named_by", "blocks"}, json=question)

    def _asked(self, method: str, path: str, fields: AbstractSet[str], **what: Any) -> dict[str, Any]:  # noqa: ANN401 - as httpx has it
        try:
            answer = self._client.request(method, path, **what)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise BackendUnavailableError(f"no cache answers at {self._at} ({why}): {_ADVICE}") from error
        except ValueError:
            raise ConfigurationError("JSON cannot ask for NaN, for infinity, or for half a character") from None
        try:
            said = answer.json()
        except (ValueError, RecursionError):
            said = None
        if isinstance(said, dict) and isinstance(models := said.get("models"), dict):
            pages = ", ".join(f"{self._at}/{directory}/ ({name})" for directory, name in models.items())
            raise ConfigurationError(
                f"{self._at} shows a server's models, not one cache: ask one by --at: {pages or 'there is none yet'}"
            )
        if not isinstance(said, dict) and answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise BackendUnavailableError(f"what answers at {self._at} is too busy (503): ask again")
        if not isinstance(said, dict) or ("error" not in said and (answer.is_error or not said.keys() >= fields)):
            raise BackendUnavailableError(f"what answers at {self._at} is no cache's page: {_ADVICE}")
        if "error" in said:
            kind = BackendUnavailableError if answer.is_server_error else ConfigurationError
            raise kind(f"{self._at} answers: {said['error']}")
        return said


@contextmanager
def running_cache(at: str) -> Iterator[RunningCache]:
    """Yield the cache whose page is there: ``host:port``, ``unix:/path``, or the URL of a page that a program serves.

    Of a server's page at a socket, a model's is ``unix:/path/directory/``.

    Raises:
        ConfigurationError: That is no address.
        BackendUnavailableError: There is no such socket.
    """
    transport = None
    if at.startswith(("http://", "https://")):
        at = url = at.rstrip("/")
    else:
        try:
            address = page_address(at)
        except ConfigurationError:
            advice = 'write HOST:PORT, "unix:/path/of.sock", or a URL'
            raise ConfigurationError(f"--at {at}: that is no address of a page: {advice}") from None
        if not address:
            raise ConfigurationError(f"no address is given: {_ADVICE}")
        where = parts_of(address)
        if isinstance(where, str):
            path = Path(where)
            socket = next((each for each in (path, *path.parents) if each.is_socket()), None)
            if socket is None:  # httpx would leave one of its own open
                raise BackendUnavailableError(f"no cache answers at {address} (there is no socket): {_ADVICE}")
            transport = httpx.HTTPTransport(uds=str(socket))
            at, url = address.rstrip("/"), "/".join(["http://localhost", *path.relative_to(socket).parts])
        else:
            at = url = f"http://{address}"
    try:  # proxies are for what is elsewhere: a cache is asked for directly
        client = httpx.Client(base_url=f"{url}/", transport=transport, timeout=_TIMEOUT_S, trust_env=False)
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"--at {at}: that is no address of a page: {error}") from error
    with client:
        yield RunningCache(client, at)


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
    from tiered_kv.settings.settings import TieredKVSettings  # noqa: PLC0415 - brings torch, which who only asks does without

    return TieredKVSettings() if config is None else TieredKVSettings.from_toml(config)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Say what went wrong in one line, and exit 2."""
    try:
        yield
    except TieredKVError as error:
        fail(" ".join([str(error), *getattr(error, "__notes__", ())]))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def refuse_if(*contradictions: tuple[bool, str]) -> None:
    """Refuse options of which one would be ignored.

    Raises:
        ConfigurationError: One of them is so; with what is said of it.
    """
    for is_so, why in contradictions:
        if is_so:
            raise ConfigurationError(why)


def read_whole(path: str) -> bytes:
    """Return what a file holds, or stdin for ``-``."""
    return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()


def fail(what: str) -> NoReturn:
    """Say it in one line, and exit 2."""
    first, *others = what.splitlines() or [""]  # as of settings, a line for each that is wrong
    line = " ".join([first, "; ".join(each.strip() for each in others)]).rstrip()
    sys.stderr.write(f"tiered-kv: {line}\n")
    raise typer.Exit(2)


def print_json(value: object) -> None:
    """Answer with one line of JSON; what it has no number for, infinity and NaN, is null."""
    sys.stdout.write(json.dumps(_finite(value), allow_nan=False) + "\n")


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
