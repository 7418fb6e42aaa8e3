"""Asking a cache that runs, by the address of its page."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import httpx
import typer
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # typing's own has no types at run time, before Python 3.12

from tiered_kv.settings.page_address import page_address, parts_of
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError

At = Annotated[
    str,
    typer.Option(
        "--at",
        envvar="TIERED_KV_PAGE",
        help="Where the cache's page is: HOST:PORT, unix:/PATH, or the URL where a program has mounted it.",
    ),
]

_TIMEOUT_S: Final = 10.0
_ADVICE: Final = "set page = true where it runs, or give its address: --at HOST:PORT, unix:/PATH or http://HOST/PATH"


class TierShown(TypedDict):
    """The part of a `TierStatistics` that is shown."""

    tier: str
    num_slots: int
    ready: int
    written: int
    corrupt: int
    capacity_bytes: int
    in_flight_bytes: int
    num_waiting: int
    bytes_read: int
    bytes_written: int
    is_bypassed: bool
    open_breakers: list[str]


class HourShown(TypedDict):
    """The part of a `Span` that is shown of the last hour."""

    hit_rate: float | None
    hits: dict[str, int]
    evicted: dict[str, int]
    bytes_read: dict[str, int]
    bytes_written: dict[str, int]
    missing_because: dict[str, int]
    dropped_because: dict[str, int]
    not_written: dict[str, dict[str, int]]


class CacheShown(TypedDict):
    """The part of a `CacheStatistics` that is shown."""

    transfers: int
    is_device_usable: bool


class Shortfall(TypedDict):
    """One prompt that was not found whole."""

    at: float
    tokens: int
    tenant: str
    found: int
    requested: int
    because: str


class Trouble(TypedDict):
    """How often calls of a tier went wrong, and what the last one told."""

    tier: str
    call: str
    what: str
    times: int
    error: str


class PageState(TypedDict):
    """What commands read of a page's ``stats.json``, which has more."""

    model: str
    at: float
    opened_at: float
    lag_s: float
    tiers: list[TierShown]
    cache: CacheShown
    hour: HourShown
    shortfalls: list[Shortfall]
    troubles: list[Trouble]


class BlockExplained(TypedDict):
    """The part of an `Explanation` that is read."""

    state: str
    says: str
    unknown_in: list[str]


class DigestsShown(TypedDict):
    """What blocks are named by."""

    model: str
    epoch: str
    tenant: str


class Explained(TypedDict):
    """What commands read of a page's answer to ``explain.json``."""

    block_size: int
    named_by: DigestsShown
    blocks: list[BlockExplained]


S = TypeVar("S")
_STATE: Final = TypeAdapter(PageState)
_EXPLAINED: Final = TypeAdapter(Explained)


class RunningCache:
    """One cache, asked over HTTP."""

    def __init__(self, client: httpx.Client, at: str) -> None:
        self._client = client
        self._at = at

    def state(self) -> PageState:
        """Return what its page shows.

        Raises:
            BackendUnavailableError: Nobody answers, no cache is open there, or its page is of another version.
        """
        return self._asked("GET", "stats.json", _STATE)

    def explain(self, question: dict[str, Any]) -> Explained:
        """Ask why blocks are there or are not.

        Raises:
            BackendUnavailableError: As `state`.
            ConfigurationError: It is no question.
        """
        return self._asked("POST", "explain.json", _EXPLAINED, json=question)

    def _asked(self, method: str, path: str, shape: TypeAdapter[S], **what: Any) -> S:  # noqa: ANN401 - as httpx has it
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
        no_page = BackendUnavailableError(f"what answers at {self._at} is no cache's page: {_ADVICE}")
        if not isinstance(said, dict) or ("error" not in said and answer.is_error):
            raise no_page
        if "error" in said:
            kind = BackendUnavailableError if answer.is_server_error else ConfigurationError
            raise kind(f"{self._at} answers: {said['error']}")
        try:
            shape.validate_python(said, strict=True)
        except ValidationError as error:
            wrong = error.errors()
            if any(each["type"] == "missing" and len(each["loc"]) == 1 for each in wrong):
                raise no_page from error
            where = ".".join(str(each) for each in wrong[0]["loc"])
            raise BackendUnavailableError(
                f"{self._at} is the page of another version of tiered-kv, which its own command can ask "
                f"({path}: {where}: {wrong[0]['msg']})"
            ) from error
        whole: Any = said  # also what no command reads: --json says it
        shown: S = whole
        return shown


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
