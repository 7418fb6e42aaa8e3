"""``tiered-kv status`` and ``top`` on caches that work."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.backends import ScriptedBackend
from tests.support.caches import keep, open_cache
from tests.support.command_line import answer, run
from tests.support.engine import BLOCK_SIZE, MODEL, PAYLOAD_BYTES, Engine
from tiered_kv import CPUTier, PageServed, TieredKV, hash_blocks
from tiered_kv.settings import page_address
from tiered_kv.telemetry.page import page_server

CPU = CPUTier(capacity=16 * PAYLOAD_BYTES)
TOKENS = list(range(6 * BLOCK_SIZE))
DEEP = b"[" * 100_000


@pytest.fixture
def at(tmp_path: Path) -> str:
    """Return the address of the cache's page."""
    return f"unix:{tmp_path}/kv.sock"


@asynccontextmanager
async def working(at: str, backend: ScriptedBackend) -> AsyncIterator[tuple[TieredKV, Engine]]:
    """Yield a cache that has a prompt, but for one block, and has missed it once."""
    engine, keys = Engine(), hash_blocks(TOKENS, block_size=BLOCK_SIZE)
    async with open_cache(CPU, backend, engine=engine, page=at) as kv:
        await keep(kv, engine, keys)
        await kv.evict(keys[4:5])
        await kv.load(keys, engine.compute(keys))
        yield kv, engine


@asynccontextmanager
async def answering(*bodies: bytes) -> AsyncIterator[str]:
    """Yield the address of something that answers with these, one after the other; the last again and again."""
    left = list(bodies)

    async def app(_: Any, __: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": left.pop(0) if len(left) > 1 else left[0]})

    server = page_server.PageServer(app, "127.0.0.1:0")
    served = server.start()
    assert isinstance(served, PageServed)
    try:
        yield served.address
    finally:
        await server.stop()


async def test_status_says_what_is_there_and_whether_all_is_well(at: str) -> None:
    """Tiers, hits and misses as `stats` has them; with a tier in trouble the exit code is 1, and it is named."""
    backend = ScriptedBackend()
    async with working(at, backend) as (kv, engine):
        state = await answer("status", "--at", at)
        assert state["model"] == MODEL.name
        assert state["hour"]["missing_because"] == {"removed": 2}
        shown = (await run("status", "--at", at)).stdout
        assert "no tier in trouble" in shown
        assert "removed 2" in shown
        assert shown.partition("Prompts that fell short:")[2].split()[-6:] == ["96", "none", "4", "of", "6", "removed"]
        for seed in range(3):
            backend.on_write.fail_next(OSError("full"))
            await keep(kv, engine, hash_blocks(range(BLOCK_SIZE * (seed + 1)), block_size=BLOCK_SIZE, salt="t")[seed:])
        result = await run("status", "--at", at)
        assert result.exit_code == 1
        assert "no writes" in result.stdout


async def test_a_page_that_is_busy_is_not_taken_for_something_else(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where too many ask at once it says so: to ask again helps, another address does not."""
    monkeypatch.setattr(page_server, "_MOST_CONNECTIONS", 1)
    async with open_cache(CPU, page=at):
        result = await run("status", "--at", at)
    assert result.exit_code == 2
    assert "too busy (503): ask again" in result.stderr


@pytest.mark.parametrize(
    "other",
    [
        b"{}",
        b'{"status": "ok"}',
        b'{"models": [1]}',
        b"[]",
        b"\xff\xfe\xfa",
        b'{"hour": null}',
        pytest.param(DEEP, id="deep"),
    ],
)
@pytest.mark.parametrize("command", [("status",), ("top", "--looks", "1"), ("explain", "-")])
async def test_what_answers_and_is_no_page_is_said_in_one_line(command: tuple[str, ...], other: bytes) -> None:
    """Whatever JSON something else has at that address."""
    async with answering(other) as address:
        result = await run(*command, "--at", address, stdin="[1, 2]")
    assert result.exit_code == 2
    assert "is no cache's page" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "where"),
    [
        (("status",), "tiers.0.is_bypassed"),
        (("status", "--json"), "hour.hits"),
        (("top", "--looks", "1"), "cache.transfers"),
        (("top", "--looks", "1", "--json"), "shortfalls.0.because"),
        (("explain", "-"), "blocks.5.says"),
        (("explain", "-", "--json"), "named_by.model"),
    ],
)
@pytest.mark.parametrize("value", ["of another type", None], ids=["changed", "gone"])
async def test_a_page_of_another_version_is_said_in_one_line(
    at: str, command: tuple[str, ...], where: str, value: str | None
) -> None:
    """With what differs there, and exit code 2."""
    async with working(at, ScriptedBackend()):
        if command[0] == "explain":
            said = json.loads((await run("explain", "-", "--at", at, "--json", stdin=json.dumps(TOKENS))).stdout)
        else:
            said = await answer("status", "--at", at)
    *path, name = where.split(".")
    of = said
    for step in path:
        of = of[int(step) if step.isdigit() else step]
    if value is None:
        del of[name]
    else:
        of[name] = [value]
    async with answering(json.dumps(said).encode()) as address:
        result = await run(*command, "--at", address, stdin="[1, 2]")
    assert result.exit_code == 2
    assert f".json: {where}: " in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


async def test_top_goes_on_with_the_next_cache_at_its_address(at: str) -> None:
    """A program that starts again with other tiers: counts of another cache are not compared with its own."""
    async with working(at, ScriptedBackend()):
        state = await answer("status", "--at", at)
    tiers = [{**tier, "tier": f"new {tier['tier']}"} for tier in state["tiers"]]
    by_tier = {
        name: {f"new {tier}": count for tier, count in state["hour"][name].items()}
        for name in ("hits", "evicted", "bytes_read", "bytes_written")
    }
    later = {"at": state["at"] + 1, "opened_at": state["at"], "tiers": tiers, "hour": state["hour"] | by_tier}
    async with answering(*(json.dumps(each).encode() for each in (state, state | later))) as address:
        result = await run("top", "--at", address, "--every", "0.2", "--looks", "2")
    assert result.exit_code == 0, result.exception
    assert "new cpu" in result.stdout


async def test_top_looks_again_and_again(at: str) -> None:
    """A line of JSON for each look, or a picture that is drawn anew."""
    async with working(at, ScriptedBackend()):
        result = await run("top", "--at", at, "--every", "0.2", "--looks", "2", "--json")
        first, second = map(json.loads, result.stdout.splitlines())
        assert first["at"] < second["at"]
        result = await run("top", "--at", at, "--every", "0.2", "--looks", "2")
        assert result.exit_code == 0
        assert "cpu" in result.stdout
        assert result.stdout.endswith("\n")
        for every in ("inf", "1e18"):  # no clock of a machine waits so long
            result = await run("top", "--at", at, "--every", every, "--looks", "2", "--json")
            assert (result.exit_code, result.stdout) == (2, "")


async def test_where_nobody_answers_is_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was asked, also where the environment says but "true"."""
    monkeypatch.setattr(page_address, "DEFAULT", "127.0.0.1:1")
    monkeypatch.setenv("TIERED_KV_PAGE", "true")
    assert "no cache answers at http://127.0.0.1:1 (" in (await run("status")).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--at", "unix:/no/such.sock"),
        ("status", "--at", "127.0.0.1:1"),
        ("status", "--at", "no address"),
        ("status", "--at", "http://[::"),
        ("top", "--at", "http://127.0.0.1:1/cache"),
        ("explain", "--at", "127.0.0.1:1"),
        ("explain", "/no/such/file", "--at", "127.0.0.1:1"),
    ],
)
async def test_what_cannot_be_asked_is_said_in_one_line(arguments: tuple[str, ...]) -> None:
    """With a remedy, and exit code 2."""
    result = await run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("tiered-kv: ")
    assert result.stderr.count("\n") == 1
