"""The page as a browser and the command line would ask for it: a real cache with real traffic."""

import asyncio
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.support.backends import ScriptedBackend
from tests.support.caches import Recorder, a_while, keep, open_cache
from tests.support.engine import BLOCK_SIZE, MODEL, PAYLOAD_BYTES, SMALL_LIMITS, Engine, prompt, small_layout
from tests.support.virtual import advance
from tests.support.virtual import run as run_in_virtual_time
from tiered_kv import ConfigurationError, CPUTier, PageNotServed, PageServed, TieredKV, TieredKVSettings, hash_blocks
from tiered_kv.settings.page_address import DEFAULT, page_address
from tiered_kv.telemetry import Page
from tiered_kv.telemetry.page import page_server
from tiered_kv.telemetry.page.page_server import PageServer, Waits
from tiered_kv.telemetry.prompts import Asked
from tiered_kv.telemetry.watch import Moment, MomentHistory
from tiered_kv.values.keys import salt_digest
from tiered_kv.values.results import CacheStatistics

CPU = CPUTier(capacity=16 * PAYLOAD_BYTES)
HALF_A_QUESTION = b"""POST /explain.json HTTP/1.1\r
host: localhost\r
content-type: application/json\r
content-length: 9\r
\r
{"""


@asynccontextmanager
async def asking(page: Any, base_url: str = "http://localhost") -> AsyncIterator[httpx.AsyncClient]:  # noqa: ANN401 - any ASGI app
    """Ask an application without a server."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(page), base_url=base_url) as client:
        yield client


async def state_of(page: Page) -> Any:  # noqa: ANN401 - what JSON is
    """Return what the page shows."""
    async with asking(page) as client:
        answer = await client.get("/stats.json")
        assert answer.status_code == 200
        return answer.json()


async def test_it_shows_what_the_cache_did() -> None:
    """Sizes, hits by tier, why lookups and loads fell short, and the hour: the same numbers as `stats`."""
    page, engine = Page(), Engine()
    async with open_cache(CPU, engine=engine, page=page) as kv:
        await keep(kv, engine, prompt(6))
        await kv.evict(prompt(6)[4:5])
        assert (await kv.lookup(prompt(6))).num_blocks == 4
        await kv.load(prompt(6), engine.compute(prompt(6)))
        await kv.load(prompt(3, seed=9), engine.compute(prompt(3)))
        state = await state_of(page)
        assert state["model"] == MODEL.name
        (cpu,) = state["tiers"]
        assert (cpu["num_slots"], cpu["ready"], cpu["hits"]) == (16, 5, 4)
        assert cpu["used_bytes"] * 16 == cpu["capacity_bytes"] * 5 > 0
        hour = state["hour"]
        assert (hour["requested"], hour["missing"], hour["hits"]) == (9, 5, {"cpu": 4})
        assert hour["missing_because"] == {"removed": 2, "never stored": 3}
        assert hour["hit_rate"] == pytest.approx(4 / 9)
        fell_short = [(each["call"], each["found"], each["because"]) for each in state["shortfalls"]]
        assert fell_short == [("load", 0, "never stored"), ("lookup", 4, "removed")]
        assert sum(part["requested"] for part in state["parts"]) == 9
        assert [point["size"] for point in state["ghost"]] == [0.25, 0.5, 1.0, 2.0, 4.0]
        assert state["ghost_of"] == {"requested": 15, "part": 1.0, "tier": "cpu"}


async def test_a_prompt_that_falls_short_can_be_recognised() -> None:
    """By how long it was, whose, and when it was asked for."""
    page, engine = Page(), Engine()
    async with open_cache(CPU, engine=engine, page=page) as kv:
        before, keys = time.time(), hash_blocks(list(range(3 * BLOCK_SIZE)), block_size=BLOCK_SIZE, salt="chat")
        await kv.lookup(keys)
        await kv.lookup(prompt(2))
        anybodys, chats = (await state_of(page))["shortfalls"]
        assert (anybodys["tokens"], anybodys["tenant"]) == (2 * BLOCK_SIZE, "none")
        assert (chats["tokens"], chats["tenant"]) == (3 * BLOCK_SIZE, salt_digest("chat").hex())
        assert before <= chats["at"] <= time.time()


async def test_the_hit_rate_counts_what_a_load_did_not_bring() -> None:
    """What lookups found and a load then could not read is no hit; it is told in one row, and counted once."""
    page, engine, backend = Page(), Engine(), ScriptedBackend()
    async with open_cache(backend, engine=engine, page=page) as kv:
        await keep(kv, engine, prompt(8))
        assert (await kv.lookup(prompt(8))).num_blocks == 8
        backend.flip_byte(2)
        loaded = await kv.load(prompt(8), engine.compute(prompt(8)))
        assert loaded.num_blocks == 2
        assert (await kv.lookup(prompt(8))).num_blocks == 2
        state = await state_of(page)
        assert state["hour"]["hit_rate"] == pytest.approx(4 / 16)
        assert state["hour"]["missing_because"] == {"unreadable": 6, "corrupt": 6}
        assert [(each["found"], each["because"]) for each in state["shortfalls"]] == [(2, "corrupt"), (2, "unreadable")]


async def test_it_shows_breakers_and_what_failed() -> None:
    """A tier that is bypassed says so, and which calls went wrong how often."""
    page, engine, backend = Page(), Engine(), ScriptedBackend()
    async with open_cache(CPU, backend, engine=engine, page=page) as kv:
        for seed in range(3):
            backend.on_write.fail_next(OSError("full"))
            await keep(kv, engine, prompt(2, seed=seed))
        state = await state_of(page)
        tier = state["tiers"][1]
        assert tier["open_breakers"] == ["writes"]
        (trouble,) = state["troubles"]
        assert (trouble["tier"], trouble["call"], trouble["what"], trouble["times"]) == (
            tier["tier"],
            "write",
            "failed",
            3,
        )
        assert "full" in trouble["error"]
        assert trouble["at"] <= state["at"]


async def test_why_a_prompt_is_not_there_by_tokens_and_by_hashes() -> None:
    """What `explain` says of each block, to whoever knows the prompt, and its salt if it has one."""
    page, engine = Page(), Engine()
    tokens = list(range(4 * BLOCK_SIZE))
    keys = hash_blocks(tokens, block_size=BLOCK_SIZE)
    async with open_cache(CPU, engine=engine, page=page) as kv:
        await keep(kv, engine, keys)
        await kv.evict(keys[2:3])
        async with asking(page) as client:
            answer = (await client.post("/explain.json", json={"tokens": tokens})).json()
            assert [block["state"] for block in answer["blocks"]] == ["ready", "ready", "removed", "ready"]
            assert answer["blocks"][2]["says"] == "removed (cpu)"
            hashes = [row.tobytes().hex() for row in keys.words]
            answer = (await client.post("/explain.json", json={"hashes": hashes})).json()
            assert [block["state"] for block in answer["blocks"]] == ["ready", "ready", "removed", "ready"]
            for odd in (0, "abc", "0g", None):
                refused = await client.post("/explain.json", json={"hashes": [hashes[0], odd]})
                assert refused.json()["error"] == f"hashes are strings of hexadecimal digits, got {odd!r}"
            answer = (await client.post("/explain.json", json={"tokens": tokens, "salt": "another"})).json()
            assert {block["state"] for block in answer["blocks"]} == {"never stored"}


async def test_a_long_prompt_is_explained_whole_and_one_without_end_is_refused() -> None:
    """An answer has as many blocks as were asked for, up to a number that is named."""
    page, engine = Page(), Engine()
    async with open_cache(CPU, engine=engine, page=page) as kv, asking(page) as client:
        await keep(kv, engine, prompt(4))
        hashes = [row.tobytes().hex() for row in prompt(2500).words]
        answer = (await client.post("/explain.json", json={"hashes": hashes})).json()
        assert [block["state"] for block in answer["blocks"]] == ["ready"] * 4 + ["never stored"] * 2496
        assert answer["block_size"] == BLOCK_SIZE
        assert (await client.post("/explain.json", json={"hashes": []})).json()["blocks"] == []
        refused = await client.post("/explain.json", json={"tokens": [1] * 16_385 * BLOCK_SIZE})
        assert refused.status_code == 413
        assert "16,385 blocks, and at most 16,384 at once" in refused.json()["error"]
        refused = await client.post("/explain.json", json={"tokens": [1 << 30] * (1 << 18)})
        assert (refused.status_code, refused.json()["error"][:22]) == (413, "more than 2097152 byte")


@pytest.mark.parametrize(
    ("question", "status"),
    [
        ({"content": b"{}", "headers": {"content-type": "text/plain"}}, 415),
        ({"json": {"tokens": [-1] * 64}}, 400),
        ({"json": {"tokens": "words"}}, 400),
        ({"json": {"hashes": ["zz"]}}, 400),
        ({"json": {"tokens": [], "group": 7}}, 400),
        ({"json": {"tokens": [], "more": 1}}, 400),
        ({"json": [1]}, 400),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"[" * 100_000, "headers": {"content-type": "application/json"}}, 400),
        ({"content": b" " * (9 << 20), "headers": {"content-type": "application/json"}}, 413),
    ],
)
async def test_what_cannot_be_asked_is_refused_in_words(question: dict[str, Any], status: int) -> None:
    """Whatever is sent, the page answers, and another site's script may not ask at all."""
    page = Page()
    async with open_cache(CPU, page=page), asking(page) as client:
        answer = await client.post("/explain.json", **question)
        assert answer.status_code == status
        assert answer.json()["error"]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"group": 3}, "group is one of this cache's KV groups, 0 to 0, got 3"),
        ({"group": "0"}, "group is one of this cache's KV groups, 0 to 0, got '0'"),
        ({"salt": 7}, "salt is a string, got 7"),
    ],
)
async def test_what_is_wrong_in_a_question_is_named(asked: dict[str, object], why: str) -> None:
    """The group or the salt, and what was given."""
    page = Page()
    async with open_cache(CPU, page=page), asking(page) as client:
        answer = await client.post("/explain.json", json={"tokens": [], **asked})
        assert answer.json()["error"] == why


async def test_it_reads_only_and_runs_nothing_of_others() -> None:
    """No method but GET changes or shows anything, no path leads elsewhere, and no script but its own is run."""
    page = Page()
    async with open_cache(CPU, page=page), asking(page) as client:
        assert (await client.post("/stats.json")).status_code == 405
        assert (await client.get("/explain.json")).status_code == 405
        assert (await client.get("/../pyproject.toml")).status_code == 404
        assert (await client.get("/metrics")).status_code == 404
        for path in ("/", "/page.css", "/page.js"):
            answer = await client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-security-policy"].startswith("default-src 'self'")
            assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in answer.text


async def test_it_is_mounted_in_one_line() -> None:
    """Below any path of a program of ours; before the cache opens and after it closed it says that there is none."""
    app, page = FastAPI(), Page()
    app.mount("/cache", page)
    async with asking(app) as client:
        assert (await client.get("/cache/stats.json")).status_code == 503
        async with open_cache(CPU, page=page):
            assert (await client.get("/cache/")).text.startswith("<!doctype html>")
            assert (await client.get("/cache/stats.json")).json()["model"] == MODEL.name
        assert (await client.get("/cache/stats.json")).status_code == 503


async def test_a_setting_serves_it_from_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """To this host alone; it answers while the cache's loop stands still, and says that it does."""
    monkeypatch.setenv("TIERED_KV_PAGE", "127.0.0.1:0")
    seen = Recorder()
    settings = TieredKVSettings(tiers=[CPU], limits=SMALL_LIMITS)
    cache = TieredKV.from_settings(settings, model=MODEL, layout=small_layout(), device="cpu", emit=seen)
    async with cache:
        (served,) = seen.of(PageServed)

        def ask(host: str = "") -> httpx.Response:
            return httpx.get(f"{served.address}stats.json", headers={"host": host} if host else {})

        assert (await asyncio.to_thread(ask)).json()["lag_s"] < 0.9
        assert (await asyncio.to_thread(ask, "rebound.example")).status_code == 421
        busy = asyncio.to_thread(ask)
        asked = asyncio.ensure_future(busy)
        await asyncio.sleep(0)
        while not asked.done():
            time.sleep(0.05)  # noqa: ASYNC251 - the loop stands still: that is the test
            await asyncio.sleep(0)
        assert (await asked).status_code == 200
    with pytest.raises(httpx.ConnectError):
        await asyncio.to_thread(ask)


async def test_a_socket_is_this_users_alone() -> None:
    """Mode 0600; what an ended process has left there is replaced, what is listened at is not, and none stays."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kv.sock"
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
        async with open_cache(CPU, page=f"unix:{path}"):
            assert path.stat().st_mode & 0o777 == 0o600
            assert await served_at(path) == 200
            seen = Recorder()
            async with open_cache(CPU, page=f"unix:{path}", emit=seen):
                assert len(seen.of(PageNotServed)) == 1
            assert await served_at(path) == 200
        assert not path.exists()


def is_ended(connection: socket.socket) -> bool:
    """Wait until the other side has ended a connection, whatever it has said before."""
    connection.settimeout(60)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


async def served_at(path: Path) -> int:
    """Return the status of what is answered at a socket."""

    def ask() -> httpx.Response:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            return client.get("http://localhost/stats.json")

    return (await asyncio.to_thread(ask)).status_code


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /stats.json HT",
        HALF_A_QUESTION,
        b"GET /page.css HTTP/1.1\r\nhost: localhost\r\n\r\nGET /page.css HTTP/1.1\r\n",
    ],
)
async def test_who_sends_no_whole_request_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """Nothing, half a head, half a body, or half of a second request: the connection ends."""
    monkeypatch.setattr(page_server, "_REQUEST_WITHIN_S", 0.1)
    with socket.socket(socket.AF_UNIX) as silent:
        async with open_cache(CPU, page=f"unix:{tmp_path}/kv.sock"):
            silent.connect(f"{tmp_path}/kv.sock")
            silent.sendall(said)
            assert await asyncio.to_thread(is_ended, silent)


class SlowClient(asyncio.Transport):
    """A connection that takes and sends little by little."""

    num_unread = 1 << 20
    is_aborted = False

    def get_write_buffer_size(self) -> int:
        """Return what it has not taken."""
        return self.num_unread

    def abort(self) -> None:
        """Take note that it was ended."""
        self.is_aborted = True


def test_a_slow_client_is_waited_for_while_it_goes_on() -> None:
    """As long as it takes of an answer or sends of a question; then no more, and in any case not for ever."""

    async def wait() -> None:
        waits, reads, sends, for_ever = Waits(), SlowClient(), SlowClient(), SlowClient()
        for each in (reads, sends, for_ever):
            waits.wait(each)
        for _ in range(10):
            await advance(9.0)
            reads.num_unread -= 1
            waits.wait(sends)
            waits.wait(for_ever)
        assert not reads.is_aborted
        assert not sends.is_aborted
        for _ in range(20):
            await advance(9.0)
            waits.wait(for_ever)
        assert reads.is_aborted
        assert sends.is_aborted
        assert for_ever.is_aborted

    run_in_virtual_time(wait)


async def test_silent_connections_keep_nobody_from_asking(tmp_path: Path) -> None:
    """However many there are, some are kept: the oldest one goes, and who asks is answered."""
    path = tmp_path / "kv.sock"
    async with open_cache(CPU, page=f"unix:{path}"), AsyncExitStack() as opened:
        silent = [opened.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(100)]
        for each in silent:
            each.connect(str(path))
        assert await served_at(path) == 200
        assert await asyncio.to_thread(is_ended, silent[0])


async def test_a_page_that_ends_leaves_the_socket_of_the_next_one(tmp_path: Path) -> None:
    """Which begins while the first one still waits for who is asking it; nor is one removed that others put there."""
    path = tmp_path / "kv.sock"
    first, second = (PageServer(Page(), f"unix:{path}") for _ in range(2))
    first.start()
    with socket.socket(socket.AF_UNIX) as asking_slowly:
        asking_slowly.connect(str(path))
        asking_slowly.sendall(HALF_A_QUESTION)
        ending = asyncio.ensure_future(first.stop())
        while isinstance(second.start(), PageNotServed):
            await a_while()
        await ending
    assert await served_at(path) == 503
    path.unlink()
    third = PageServer(Page(), f"unix:{path}")
    third.start()
    await second.stop()
    assert await served_at(path) == 503
    await third.stop()
    assert not path.exists()


async def test_a_port_that_is_taken_keeps_no_cache_from_serving() -> None:
    """It is said once, as a warning, and the cache works."""
    seen, engine = Recorder(), Engine()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with open_cache(CPU, engine=engine, page=taken.getsockname()[1], emit=seen) as kv:
            await keep(kv, engine, prompt(2))
            assert kv.stats().stored == 2
    (told,) = seen.of(PageNotServed)
    assert "in use" in told.error


def no_more(_: threading.Thread) -> None:
    """Start no thread, as on a system that gives no more."""
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("kind", ["port", "socket"])
async def test_a_thread_that_does_not_begin_keeps_no_cache_from_serving(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """It is said as a port that is taken is, and nobody listens there any more."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = tmp_path / "kv.sock"
    server = PageServer(Page(), f"unix:{path}" if kind == "socket" else f"127.0.0.1:{port}")
    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", no_more)
        told = server.start()
    assert isinstance(told, PageNotServed)
    assert told.error == "can't start new thread"
    assert not path.exists()
    if kind == "port":
        with socket.socket() as asking, pytest.raises(ConnectionRefusedError):
            asking.connect(("127.0.0.1", port))
    await server.stop()


def test_a_page_is_one_caches() -> None:
    """What is given to a second cache is refused before that opens."""
    page = Page()
    TieredKV([CPU], model=MODEL, layout=small_layout(), page=page)
    with pytest.raises(ConfigurationError, match="make one for each"):
        TieredKV([CPU], model=MODEL, layout=small_layout(), page=page)


@pytest.mark.parametrize(
    ("given", "address"),
    [
        (True, DEFAULT),
        ("true", DEFAULT),
        (False, ""),
        ("", ""),
        (8421, "127.0.0.1:8421"),
        ("8421", "127.0.0.1:8421"),
        (":8421", "127.0.0.1:8421"),
        ("[::1]:80", "[::1]:80"),
        ("0.0.0.0:80", "0.0.0.0:80"),
        ("unix:/run/kv.sock", "unix:/run/kv.sock"),
    ],
)
def test_an_address_is_said_in_few_ways(given: object, address: str) -> None:
    """To this host alone, where nothing else is said."""
    assert page_address(given) == address


@pytest.mark.parametrize("given", ["host", "host:port", "1:2:3", 70000, 1.5, "unix:", ["8421"], "http://localhost:1"])
def test_what_is_no_address_is_refused(given: object) -> None:
    """With what to write instead."""
    with pytest.raises(ConfigurationError, match="page must be an address"):
        page_address(given)


def test_the_hour_is_kept_in_bounded_memory() -> None:
    """However long a cache is open, an hour of it is kept, in at most 60 parts that add up to it."""

    async def hours() -> None:
        loop, requested = asyncio.get_running_loop(), 0
        history = MomentHistory(clock=loop.time)

        def count() -> tuple[CacheStatistics, Asked]:
            nonlocal requested
            requested += 5
            return CacheStatistics((), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), Asked(requested, 0, {}, 0, 0, {})

        history.begin(count)
        for _ in range(1000):
            await advance(10)
        history.end()
        whole, parts = history.until(Moment(loop.time(), *count()))
        assert 3590 <= whole.stop - whole.start <= 3620
        assert 50 <= len(parts) <= 61
        assert sum(part.requested for part in parts) == whole.requested == 5 * 361
        assert whole.hit_rate == 1

    run_in_virtual_time(hours)
