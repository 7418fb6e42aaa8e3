"""What a server shows of all its models: a page that lists them, each with the page of its cache, and its metrics."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

from tiered_kv.host.shares import Share
from tiered_kv.telemetry.page.application import Receive, Scope, Send
from tiered_kv.values.errors import ConfigurationError

if TYPE_CHECKING:  # the extra "metrics" may not be installed
    from prometheus_client.metrics_core import Metric

_HEADERS: Final = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
_COUNTS: Final = ("loads", "stores", "jobs", "copies", "leases", "questions")
Client = tuple[str, dict[str, Any]]
"""Its model, and what it has under way."""


class Pages:
    """An ASGI application: ``/`` lists models, ``/<directory>/`` is the page of one's cache, ``/metrics`` are all's."""

    def __init__(self, shares: Callable[[], Sequence[Share]], *, has_metrics: bool) -> None:
        """Show the pages of ``shares``; any thread asks for them."""
        self._shares = shares
        self._has_metrics = has_metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI has it."""
        if scope["type"] != "http":
            return
        directory, _, rest = scope["path"].lstrip("/").partition("/")
        share = next((each for each in self._shares() if each.page and each.directory == directory), None)
        if share is not None and share.page is not None and (rest or scope["path"].endswith("/")):
            await share.page({**scope, "root_path": f"/{directory}"}, receive, send)
        elif scope["path"] == "/metrics" and self._has_metrics:
            await _answer(send, 200, await asyncio.to_thread(_exposed), b"text/plain; version=0.0.4; charset=utf-8")
        elif scope["path"] == "/":
            await _answer(send, 200, self._listed().encode())
        elif scope["path"] in {"/stats.json", "/explain.json"}:  # tiered-kv asks as if this were the page of a cache
            models = {share.directory: share.name for share in self._shares() if share.page}
            said = {"error": "a server's models are shown here, not one cache: go to /", "models": models}
            await _answer(send, 404, json.dumps(said).encode(), b"application/json")
        else:
            await _answer(send, 404, b"there is no such page: go to /")

    def _listed(self) -> str:
        items = "".join(
            f'<li><a href="/{share.directory}/">{escape(share.name)}</a>, {share.num_clients} clients</li>'
            for share in self._shares()
            if share.page
        )
        return f"<!doctype html><title>tiered_kv</title><h1>Models of this host</h1><ul>{items}</ul>"


class HostMetrics:
    """A collector of prometheus_client: the clients and shares of a server, by model. For any thread."""

    def __init__(
        self, clients: Callable[[], Sequence[Client]], shares: Callable[[], Sequence[Share]], refused: Callable[[], int]
    ) -> None:
        """Be collected from now on, in prometheus_client's own registry.

        Raises:
            ConfigurationError: The extra ``metrics`` is not installed.
        """
        try:
            from prometheus_client import REGISTRY  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ConfigurationError("metrics need prometheus_client: pip install 'tiered-kv[metrics]'") from error
        self._clients, self._shares, self._refused = clients, shares, refused
        self._registry = REGISTRY
        REGISTRY.register(self)

    def close(self) -> None:
        """Be collected no more."""
        self._registry.unregister(self)

    def describe(self) -> list["Metric"]:
        """Claim no names: a program may have several servers."""
        return []

    def collect(self) -> Iterator["Metric"]:
        """Yield all, as prometheus_client asks. Clients, or models, of one name are added up."""
        from prometheus_client.core import CounterMetricFamily  # noqa: PLC0415 - an extra

        clients, shares = self._clients(), [share for share in self._shares() if share.cache is not None]
        models = sorted({share.name for share in shares})
        attached = [([model], sum(name == model for name, _ in clients)) for model in models]
        yield _gauge("clients", "Clients that are attached.", ["model"], attached)
        for count in _COUNTS:
            under_way = [([model], sum(counts[count] for of, counts in clients if of == model)) for model in models]
            yield _gauge(count, f"{count.capitalize()} of clients.", ["model"], under_way)
        held = Counter[tuple[str, str]]()
        for model, counts in clients:
            held[model, counts["name"]] += counts["bytes"]
        yield _gauge("client_bytes", "Held by transfers, leases and jobs.", ["model", "client"], held.items())
        for field, what in (("given", "share_bytes"), ("right", "share_right_bytes")):
            sizes = Counter[tuple[str, str]]()
            for share in shares:
                for tier, size in getattr(share, field).items():
                    sizes[share.name, tier] += size
            yield _gauge(what, "Of a tier, a model's.", ["model", "tier"], sizes.items())
        yield CounterMetricFamily("tiered_kv_host_refused", "Clients that were refused.", value=self._refused())


def _gauge(name: str, text: str, labels: list[str], values: Iterable[tuple[Sequence[str], int]]) -> "Metric":
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415 - an extra

    family = GaugeMetricFamily(f"tiered_kv_host_{name}", text, labels=labels)
    for each, value in values:
        family.add_metric(each, value)
    return family


def _exposed() -> bytes:
    from prometheus_client import REGISTRY, generate_latest  # noqa: PLC0415 - an extra, and it is there

    return generate_latest(REGISTRY)


async def _answer(send: Send, status: int, body: bytes, kind: bytes = b"text/html; charset=utf-8") -> None:
    await send({"type": "http.response.start", "status": status, "headers": [*_HEADERS, (b"content-type", kind)]})
    await send({"type": "http.response.body", "body": body})
