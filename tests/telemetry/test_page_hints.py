"""KV hints by HTTP, on the page's server: who may send them, what they do, and how much of it."""

import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from tests.support import any_layout
from tests.support.any_layout import AnyEngine
from tests.support.caches import keep, open_cache
from tests.support.engine import BLOCK_SIZE, MODEL, PAYLOAD_BYTES, Engine, small_layout
from tests.support.hints import hints
from tests.telemetry.test_page import asking
from tiered_kv import (
    BlockKeys,
    BlockState,
    ConfigurationError,
    CPUTier,
    KVLayout,
    Shard,
    TieredKV,
    TieredKVSettings,
    hash_blocks,
)
from tiered_kv.telemetry import Page

TOKEN = "0123456789abcdef"  # noqa: S105 - what must not be shown has to be something
SHORT = TOKEN[:9]
BEARER = {"Authorization": f"Bearer {TOKEN}"}
CPU = CPUTier(capacity=32 * PAYLOAD_BYTES, policy="lru")


def tokens(count: int, seed: int = 0) -> list[int]:
    """Return the tokens of so many blocks."""
    return [seed * 1000 + at for at in range(count * BLOCK_SIZE)]


def keys(count: int, seed: int = 0, salt: str = "") -> BlockKeys:
    """Return the names of these blocks."""
    return hash_blocks(tokens(count, seed), block_size=BLOCK_SIZE, salt=salt)


async def send(client: httpx.AsyncClient, *actions: tuple[str, dict[str, Any]], **asked: Any) -> Any:  # noqa: ANN401 - JSON
    """Send hints, and return what is answered."""
    answer = await client.post("/hints.json", json={"kv_hints": hints(*actions), **asked}, headers=BEARER)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_only_who_has_the_token_may_send_hints() -> None:
    """Nobody where there is none, as if there were no such address."""
    engine, asked = Engine(), {"tokens": tokens(1), "kv_hints": hints(("kv.pin", {}))}
    page = Page(hints_token=TOKEN)
    async with open_cache(CPU, engine=engine, page=page), asking(page) as client:
        for headers in ({}, {"Authorization": TOKEN}, {"Authorization": "Bearer 0123456789abcdee"}):
            assert (await client.post("/hints.json", json=asked, headers=headers)).status_code == 401
        assert (await client.post("/hints.json", json=asked, headers=BEARER)).status_code == 200
        assert (await client.get("/hints.json", headers=BEARER)).status_code == 405
    page = Page()
    async with open_cache(CPU, engine=engine, page=page), asking(page) as client:
        assert (await client.post("/hints.json", json=asked, headers=BEARER)).status_code == 404
        assert "hints" not in (await client.get("/stats.json")).json()


async def test_hints_say_which_blocks_go_first() -> None:
    """By tokens, or by the names that KV events have, of one tenant; what is not understood is counted."""
    page, engine = Page(hints_token=TOKEN), Engine()
    async with open_cache(CPU, engine=engine, page=page) as kv, asking(page) as client:
        for seed in range(4):
            await keep(kv, engine, keys(8, seed))
        said = await send(client, ("kv.demote", {}), ("kv.odd", {}), tokens=tokens(8, 3))
        assert said == {"actions": 1, "ignored": 1}
        named = [bytes(each).hex() for each in keys(8, 2)]
        await send(client, ("kv.demote", {"end": 4 * BLOCK_SIZE}), hashes=named)
        await settle(page)
        await keep(kv, engine, keys(12, 4))
        found = [(await kv.lookup(keys(8, seed))).num_blocks for seed in range(4)]
        assert found == [8, 8, 0, 0]
        assert int((kv.membership(keys(8, 2)[4:]) == BlockState.HIT).sum()) == 4, "only these were named"
        assert (await client.get("/stats.json")).json()["hints"] == {
            "actions": 2, "ignored": 1, "blocks": 0, "blocks_refused": 0,
        }  # fmt: skip


@pytest.mark.parametrize("num_bytes", [8, 16, 20, 24, 32])
async def test_an_action_names_blocks_by_the_end_of_the_engines_own_names(num_bytes: int) -> None:
    """However long these are: what the cache makes of short ones ends in zeros."""
    page, engine = Page(hints_token=TOKEN), Engine()
    names = [bytes([at + 1]) * num_bytes for at in range(8)]
    named = BlockKeys.from_hashes(names, block_size=BLOCK_SIZE, salt="a")
    async with open_cache(CPU, engine=engine, page=page) as kv, asking(page) as client:
        await keep(kv, engine, named)
        hashes = [int.from_bytes(each[-8:], "big") for each in names[2:5]]
        await send(client, ("kv.evict", {"block_hashes": hashes}), hashes=[each.hex() for each in names], salt="a")
        await settle(page)
        assert (kv.membership(named) == BlockState.HIT).tolist() == [at not in {2, 3, 4} for at in range(8)]


async def test_what_hints_keep_is_bounded_for_each_tenant() -> None:
    """By an eighth of the CPU tier, and a quarter for all: whoever sends them."""
    page, engine = Page(hints_token=TOKEN), Engine()
    async with open_cache(CPU, engine=engine, page=page) as kv, asking(page) as client:
        for salt in ("a", "b", "c"):
            await keep(kv, engine, keys(6, salt=salt))
            await send(client, ("kv.pin", {}), tokens=tokens(6), salt=salt)
        await settle(page)
        said = (await client.get("/stats.json")).json()["hints"]
        assert (said["blocks"], said["blocks_refused"]) == (8, 10)


async def test_what_hints_keep_is_bounded_on_each_rank() -> None:
    """A block takes a slot for each of them."""
    page, memory = Page(hints_token=TOKEN), CPUTier(capacity=2 * 32 * PAYLOAD_BYTES)
    cache = TieredKV([memory], model=MODEL, layout=small_layout(), shard=Shard.every(2), device="cpu", page=page)
    async with cache, asking(page) as client:
        for salt in ("a", "b", "c"):
            await send(client, ("kv.retain", {}), tokens=tokens(6), salt=salt)
        await settle(page)
        said = (await client.get("/stats.json")).json()["hints"]
        assert (said["blocks"], said["blocks_refused"]) == (8, 10)


async def test_what_hints_keep_is_bounded_in_each_group() -> None:
    """By an eighth of its slots in the CPU tier, and a quarter for all: states have few of their own."""
    page, states = Page(hints_token=TOKEN), replace(any_layout.SMALL.groups[0], slots_per_block=1 / 32)
    engine = AnyEngine(KVLayout((*any_layout.SMALL.groups, states)))
    memory = CPUTier(capacity=(512 + 64) * any_layout.STRIDE)
    cache = TieredKV([memory], model=MODEL, layout=engine.layout, limits=any_layout.LIMITS, device="cpu", page=page)
    async with cache as kv, asking(page) as client:
        for group, caches in enumerate(engine.caches):
            kv.register_kv_caches(caches, group=group)
        counted = []
        for group, num_blocks, salt in ((1, 20, "a"), (1, 20, "b"), (1, 20, "c"), (0, 64, "a"), (0, 64, "b")):
            wanted = any_layout.prompt(num_blocks, group=group, salt=salt)
            await kv.store(wanted, engine.fill(wanted, range(num_blocks)))
            named = [each.hex() for each in wanted]
            await send(client, ("kv.pin", {}), hashes=named, salt=salt, group=group)
            await settle(page)
            counted.append(sum(each.is_pinned for each in await kv.explain(wanted)))
        assert counted == [8, 8, 0, 64, 64]


async def test_only_what_is_a_tenants_own_is_removed() -> None:
    """Blocks without a salt are everybody's."""
    page, engine = Page(hints_token=TOKEN), Engine()
    async with open_cache(CPU, engine=engine, page=page) as kv, asking(page) as client:
        for salt in ("", "tenant"):
            await keep(kv, engine, keys(4, salt=salt))
            await send(client, ("kv.evict", {}), tokens=tokens(4), salt=salt)
        await settle(page)
        assert [(await kv.lookup(keys(4, salt=salt))).num_blocks for salt in ("", "tenant")] == [4, 0]


async def settle(page: Page) -> None:
    """Wait until what hints have asked for is done."""
    await page._door._hinted.settle()  # type: ignore[union-attr]  # noqa: SLF001 - nobody else has to wait for hints


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"kv_hints": "pin"},
        {"kv_hints": {}, "prompt_tokens": "many"},
        {"kv_hints": {}, "tokens": "many"},
        {"kv_hints": {}, "model": "other"},
    ],
)
async def test_what_is_no_hint_is_refused(asked: dict[str, Any]) -> None:
    """With words that say what one is; nothing is done."""
    page = Page(hints_token=TOKEN)
    async with open_cache(CPU, engine=Engine(), page=page), asking(page) as client:
        answer = await client.post("/hints.json", json=asked, headers=BEARER)
        assert answer.status_code == 400
        assert answer.json()["error"]
        assert (await client.get("/stats.json")).json()["hints"]["actions"] == 0


async def test_hints_are_read_in_a_thread() -> None:
    """As the event loop may be the cache's own, and there may be megabytes of them."""

    class Envelope(dict[str, Any]):
        def get(self, name: str, default: object = None) -> Any:  # noqa: ANN401 - as a dict has it
            threads.add(threading.get_ident())
            return super().get(name, default)

    page, threads = Page(hints_token=TOKEN), set[int]()
    async with open_cache(CPU, engine=Engine(), page=page):
        envelope = Envelope(hints(("kv.pin", {})))
        door, watch = page._door, page._watch  # noqa: SLF001 - by HTTP envelopes come as plain dicts
        assert door is not None
        assert watch is not None
        assert await door.take(watch, keys(4), {"kv_hints": envelope}) == {"actions": 1, "ignored": 0}
        assert threads
        assert threading.get_ident() not in threads


async def test_a_cache_without_memory_says_so() -> None:
    """As there is nothing to bound hints by."""
    page = Page(hints_token=TOKEN)
    async with open_cache("memory://?capacity=1MiB", engine=Engine(), page=page), asking(page) as client:
        asked = {"kv_hints": hints(("kv.pin", {})), "tokens": tokens(1)}
        answer = await client.post("/hints.json", json=asked, headers=BEARER)
        assert (answer.status_code, "no CPU tier" in answer.json()["error"]) == (400, True)


async def test_hints_go_where_the_page_is_mounted() -> None:
    """In a program of one's own."""
    app, page = FastAPI(), Page(hints_token=TOKEN)
    app.mount("/cache", page)
    async with open_cache(CPU, engine=Engine(), page=page), asking(app) as client:
        asked = {"kv_hints": hints(("kv.demote", {})), "tokens": tokens(1)}
        assert (await client.post("/cache/hints.json", json=asked, headers=BEARER)).status_code == 200


async def test_delayed_hints_end_with_the_cache() -> None:
    """None is left behind, and closing waits for none."""
    page, engine = Page(hints_token=TOKEN), Engine()
    async with open_cache(CPU, engine=engine, page=page) as kv, asking(page) as client:
        await keep(kv, engine, keys(2))
        assert await send(client, ("kv.prefetch", {"delay_seconds": 3600}), tokens=tokens(2)) == {
            "actions": 1, "ignored": 0,
        }  # fmt: skip


def test_a_token_that_is_guessed_is_refused() -> None:
    """As is one without a page; where it is right, nothing that is printed shows it."""
    with pytest.raises(ConfigurationError, match="16 characters"):
        Page(hints_token=SHORT)
    with pytest.raises(ConfigurationError, match="16 characters"):
        TieredKVSettings(page="127.0.0.1:0", page_hints_token=SHORT)
    with pytest.raises(ConfigurationError, match="set page too"):
        TieredKVSettings(page_hints_token=SecretStr(TOKEN))
    settings = TieredKVSettings(page="127.0.0.1:0", page_hints_token=TOKEN)
    assert TOKEN not in f"{settings!r} {settings}"
    assert TOKEN not in settings.model_dump_json()


async def test_the_token_comes_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the environment, as the adapters to engines have it."""
    monkeypatch.setenv("TIERED_KV_PAGE", "127.0.0.1:0")
    monkeypatch.setenv("TIERED_KV_PAGE_HINTS_TOKEN", TOKEN)
    monkeypatch.setenv("TIERED_KV_TIERS", '["cpu://?capacity=1MiB"]')
    told: list[Any] = []
    async with TieredKV.from_settings(model=MODEL, layout=small_layout(), emit=told.append):
        (served,) = [event for event in told if hasattr(event, "address")]
        async with httpx.AsyncClient(base_url=served.address) as client:
            await send(client, ("kv.demote", {}), tokens=tokens(1))
