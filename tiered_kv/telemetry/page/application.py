"""The ASGI application of the page: the page itself, what it shows as JSON, and why a prompt is not there.

It only reads, unless it has a token for KV hints; then it takes these too, see `HintsDoor`. It may run on the cache's
event loop or on any other: what it asks of the cache it asks in a thread, and a cache whose loop is busy is shown as it
was last. In what it shows, rates are parts of 1 and times are seconds since 1970.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, replace
from importlib.metadata import version
from importlib.resources import files
from typing import Any, Final

from tiered_kv.telemetry.page.hints_door import HintsDoor
from tiered_kv.telemetry.page.page_server import PageServer
from tiered_kv.telemetry.watch import Moment, Reading, Span, Watch
from tiered_kv.tiers.fates import Histogram
from tiered_kv.values.errors import ConfigurationError, TieredKVError
from tiered_kv.values.hints import ENVELOPES
from tiered_kv.values.keys import NO_SALT, BlockKeys, Namespace, hash_blocks

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Answer = tuple[int, str, bytes]
"""Status, content type, body."""
_MOST_ASKED_BYTES: Final = 2 << 20
"""Of a question: to decode that keeps other threads from running for 40 ms."""
_MOST_AT_ONCE: Final = 8
_MOST_EXPLAINED: Final = 1 << 14
"""Blocks of one question."""
_ENCODED_AT_ONCE: Final = 1024
"""Blocks: whoever encodes more keeps all other threads from running."""
_OF_HINTS: Final = {*ENVELOPES, "prompt_tokens"}
_ASSETS: Final = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_HEADERS: Final = [
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]


def state_of(watch: Watch) -> dict[str, Any]:
    """Return all that is known of a cache. From any thread but its own; takes a second where its loop is busy."""
    reading = watch.read()
    now = Moment(reading.at, reading.statistics, reading.asked)
    hour, parts = watch.history.until(now)
    statistics = asdict(reading.statistics)
    tiers = statistics.pop("tiers")
    return {
        "version": version("tiered-kv"),
        "model": reading.labels[0],
        "at": now.at,
        "opened_at": watch.started_at,
        "lag_s": reading.lag_s,
        "block_sizes": watch.watched.block_sizes,
        "named_by": [digests_of(each) for each in watch.watched.namespaces()],
        "tokens_per_block": reading.tokens_per_block,
        "tiers": tiers,
        "cache": statistics,
        "asked": asdict(reading.asked),
        "hour": _span(hour),
        "parts": [_span(part) for part in parts],
        "shortfalls": _shortfalls(watch),
        "troubles": _troubles(reading),
        "load_s": _quantiles(reading.load_seconds),
        "store_s": _quantiles(reading.store_seconds),
        "ghost": _ghost(reading, max((tier["capacity_bytes"] for tier in tiers), default=0)),
        "ghost_of": _ghost_of(reading),
    }


def digests_of(space: Namespace) -> dict[str, str]:
    """Return what blocks are named by, as `tiered-kv inspect` shows it: digests, and ``"none"`` without a salt."""
    model, epoch = space.fingerprint.hex(), space.epoch.hex()
    return {"model": model, "epoch": epoch, "shard": str(space.shard), "tenant": _tenant(space.salt)}


def _shortfalls(watch: Watch) -> list[dict[str, Any]]:
    """Tell the last ones so that a prompt can be recognised: by when, of whom, and how long it was."""
    sizes = zip(watch.watched.namespaces(), watch.watched.block_sizes, strict=True)
    tokens = {space.fingerprint: size for space, size in sizes}
    return [
        {name: value for name, value in vars(each).items() if isinstance(value, (str, int, float))}
        | {"tokens": each.requested * tokens.get(each.fingerprint, 0), "tenant": _tenant(each.salt)}
        for each in reversed(tuple(watch.prompts.shortfalls))
    ]


def _tenant(salt: bytes) -> str:
    return "none" if salt == NO_SALT else salt.hex()


def _span(span: Span) -> dict[str, Any]:
    return asdict(span) | {"hit_rate": span.hit_rate}


def _troubles(reading: Reading) -> list[dict[str, Any]]:
    tallies = reading.tallies
    kinds = {"failed": tallies.failures, "late": tallies.stalls}
    told = [
        {"tier": tier, "call": call, "what": what, "times": times, "error": error, "at": at}
        for what, counts in kinds.items()
        for (tier, call), times in counts.items()
        for error, at in [tallies.errors[tier, call]]
    ]
    return sorted(told, key=lambda each: -float(each["at"]))


def _quantiles(histogram: Histogram) -> dict[str, float]:
    """Return upper bounds of the ranges in which the median and the 99th percentile are; of none, nothing.

    Where one is beyond the last bound, ``most``, it is left out.
    """
    cumulated = histogram.cumulated()
    count = cumulated[-1][1]
    if not count:
        return {}
    found = {
        name: next(float(bound) for bound, seen in cumulated if seen >= part * count)
        for name, part in (("p50", 0.5), ("p99", 0.99))
    }
    known = {name: bound for name, bound in found.items() if bound != float("inf")}
    return known | {"count": count, "most": histogram.bounds[-1]}


def _ghost(reading: Reading, capacity_bytes: int) -> list[Mapping[str, float]]:
    if reading.lives is None or not reading.lives.ghost.requested:
        return []
    ghost = reading.lives.ghost
    return [
        {"size": size, "capacity_bytes": int(size * capacity_bytes), "hit_rate": hits / ghost.requested}
        for size, hits in ghost.hits.items()
    ]


def _ghost_of(reading: Reading) -> dict[str, Any]:
    """Say what the curve is about: how many uses, of which part of all blocks, at sizes of which tier."""
    if reading.lives is None:
        return {}
    ghost, tiers = reading.lives.ghost, reading.statistics.tiers
    return {
        "requested": ghost.requested,
        "part": ghost.rate,
        "tier": max(tiers, key=lambda tier: tier.num_slots).tier,
    }


class Page:
    """A page that shows one cache, for `TieredKV`'s argument ``page``. An ASGI application: mount it where you like.

    ``app.mount("/cache", page)``. It shows the cache while that is open, answers ``/stats.json`` and ``/explain.json``
    for `tiered-kv`, and ``/metrics`` if the cache has metrics. All that only reads, and asks nobody who they are: show
    it to operators. ``/hints.json`` takes KV hints, of whoever has the token for it.
    """

    def __init__(self, address: str = "", *, hints_token: str = "") -> None:
        """Make the page of a cache that is not open yet.

        Args:
            address: Where the cache is to serve it by itself, see `TieredKVSettings`; nowhere by default.
            hints_token: Who sends it may send hints, see `TieredKVSettings`; by default nobody.

        Raises:
            ConfigurationError: It is no address, the extra ``page`` is not installed, or the token is short.
        """
        self._door = HintsDoor(hints_token) if hints_token else None
        self._server = PageServer(self, address) if address else None
        self._is_claimed = False
        self._watch: Watch | None = None
        self._num_asked = 0

    def claim(self) -> None:
        """Become the page of one cache; called by it before it opens.

        Raises:
            ConfigurationError: It is another cache's.
        """
        if self._is_claimed:
            raise ConfigurationError("this Page is another cache's: make one for each")
        self._is_claimed = True

    def begin(self, watch: Watch) -> None:
        """Show a cache that has opened; called on its event loop."""
        self._watch = watch
        if self._server is not None:
            watch.tell(self._server.start())

    async def end(self) -> None:
        """Show the cache no more."""
        self._watch = None
        if self._door is not None:
            await self._door.end()
        if self._server is not None:
            await self._server.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI has it."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            status, kind, body = await self._answer(scope, receive)
            headers = [*_HEADERS, (b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        path, watch = scope["path"].removeprefix(scope.get("root_path", "")) or "/", self._watch
        asked = {"/explain.json"} | ({"/hints.json"} if self._door is not None else set())
        wanted = {"POST"} if path in asked else {"GET", "HEAD"}
        if path not in {*_ASSETS, "/stats.json", "/metrics", *asked}:
            return _problem(404, "there is no such page: go to /")
        if scope["method"] not in wanted:
            return _problem(405, f"{path} takes {' and '.join(sorted(wanted))}")
        if path in _ASSETS:
            name, kind = _ASSETS[path]
            return 200, kind, files(__package__).joinpath(name).read_bytes()
        if watch is None:
            return _problem(503, "no cache is open")
        if path in asked:
            return await self._asked(watch, scope, receive, self._door if path == "/hints.json" else None)
        return await asyncio.to_thread(_metrics_of if path == "/metrics" else self._state, watch)

    def _state(self, watch: Watch) -> Answer:
        return _said(state_of(watch) | ({"hints": self._door.counts} if self._door is not None else {}))

    async def _asked(self, watch: Watch, scope: Scope, receive: Receive, door: HintsDoor | None) -> Answer:
        """Explain what is there of a prompt, or take hints of it at a door."""
        if (refused := _refused(dict(scope["headers"]), door)) is not None:
            return refused
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return _problem(400, "the question was not finished")
            body += message.get("body", b"")
            if len(body) > _MOST_ASKED_BYTES:
                return _problem(413, f"more than {_MOST_ASKED_BYTES} bytes: ask for a shorter prompt")
            if not message.get("more_body"):
                break
        if self._num_asked >= _MOST_AT_ONCE:
            return _problem(503, "too many ask at once: try again")
        self._num_asked += 1
        try:
            more = _OF_HINTS if door is not None else set()
            keys, asked = await asyncio.to_thread(_keys_of, watch, bytes(body), more)
            return await (_hinted(watch, keys, asked, door) if door is not None else _explained(watch, keys))
        except TieredKVError as error:
            return _problem(400 if isinstance(error, ConfigurationError) else 503, str(error))
        finally:
            self._num_asked -= 1


def _refused(headers: Mapping[bytes, bytes], door: HintsDoor | None) -> Answer | None:
    if door is not None and not door.lets_in(headers):
        return _problem(401, "send the token for hints: Authorization: Bearer ...")
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip()
    if kind != b"application/json":  # which no other site's page may send without being asked
        return _problem(415, "send JSON, with the content type application/json")
    return None


async def _explained(watch: Watch, keys: BlockKeys) -> Answer:
    if len(keys) > _MOST_EXPLAINED:
        return _problem(413, f"{len(keys):,} blocks, and at most {_MOST_EXPLAINED:,} at once: ask for a shorter prompt")
    blocks = await watch.explain(keys)
    about = {
        "block_size": keys.block_size,
        "named_by": digests_of(replace(watch.watched.namespaces()[keys.group], salt=keys.salt_id)),
    }
    return 200, "application/json", await asyncio.to_thread(_in_json, about, blocks)


def _in_json(about: Mapping[str, Any], blocks: Sequence[object]) -> bytes:
    pieces = [
        json.dumps([vars(each) | {"says": str(each)} for each in blocks[start : start + _ENCODED_AT_ONCE]])[1:-1]
        for start in range(0, len(blocks), _ENCODED_AT_ONCE)
    ]
    return f'{json.dumps(about)[:-1]}, "blocks": [{", ".join(pieces)}]}}'.encode()


async def _hinted(watch: Watch, keys: BlockKeys, asked: Mapping[str, Any], door: HintsDoor) -> Answer:
    said = await door.take(watch, keys, asked)
    return _said(said) if said is not None else _problem(503, "too many hints wait: try again")


def _keys_of(watch: Watch, body: bytes, more: AbstractSet[str]) -> tuple[BlockKeys, dict[str, Any]]:
    """Return the blocks that are asked about, and all that is asked; names of ``more`` may be in there too."""
    try:
        asked = json.loads(body)
        if not isinstance(asked, dict) or not asked.keys() <= {"tokens", "hashes", "salt", "group", *more}:
            raise ConfigurationError('ask with {"tokens": [...]} or {"hashes": ["hex", ...]}, "salt" and "group"')
        group, salt = asked.get("group", 0), asked.get("salt", "")
        sizes = watch.watched.block_sizes
        if not isinstance(group, int) or not 0 <= group < len(sizes):
            raise ConfigurationError(
                f"group is one of this cache's KV groups, 0 to {len(sizes) - 1}, got {group!r:.80}"
            )
        if not isinstance(salt, str):
            raise ConfigurationError(f"salt is a string, got {salt!r:.80}")
        if "hashes" in asked:
            hashes = [_hash_of(each) for each in asked["hashes"]]
            return BlockKeys.from_hashes(hashes, block_size=sizes[group], salt=salt, group=group), asked
        return hash_blocks(asked.get("tokens", ()), block_size=sizes[group], salt=salt, group=group), asked
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"no such question: {error}") from error


def _hash_of(digits: Any) -> bytes:  # noqa: ANN401 - anything that JSON has
    try:
        return bytes.fromhex(digits)
    except (ValueError, TypeError):
        raise ConfigurationError(f"hashes are strings of hexadecimal digits, got {digits!r:.80}") from None


def _metrics_of(watch: Watch) -> Answer:
    if watch.registry is None:
        return _problem(404, "this cache has no metrics: set metrics = true")
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest  # noqa: PLC0415 - an extra, and it is there

    return 200, CONTENT_TYPE_LATEST, generate_latest(watch.registry)


def _said(value: object, status: int = 200) -> Answer:
    return status, "application/json", json.dumps(value, default=str).encode()


def _problem(status: int, what: str) -> Answer:
    return _said({"error": what}, status)


async def _live(receive: Receive, send: Send) -> None:
    """Begin and end with the server, which has nothing to wait for."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
