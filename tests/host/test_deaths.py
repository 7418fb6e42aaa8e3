"""Whoever dies: what was held for a client goes back when it is gone, and a client goes on without its server."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from tests.host.processes import Started, prompt_of, server, started, storing_client, stuck_client
from tests.support.any_layout import LIMITS, MODEL, SMALL, AnyEngine, cpu, memory, prompt
from tests.support.caches import Recorder, a_while, until
from tests.support.interrupts import interrupted_everywhere
from tests.support.serving import attached, serving
from tiered_kv import (
    BackendUnavailableError,
    BlockCache,
    BlockKeys,
    CacheLimits,
    ConfigurationError,
    ConnectedKV,
    Explanation,
    ModelIdentity,
    Outcome,
    PrefetchResult,
    Reason,
    TieredKV,
    TieredKVServer,
    TierFault,
    open_blocking,
)
from tiered_kv.cli.app import app
from tiered_kv_backends.memory import MemoryBackend

FOREVER_S = 60.0
"""For what comes at once unless something is broken."""


@asynccontextmanager
async def served(path: Path, **of_server: int) -> AsyncIterator[Started]:
    """Have a server in a process of its own."""
    with started(server, path, **of_server) as one:
        assert await asyncio.to_thread(one.hear) == "ready"
        yield one


def facts(path: Path) -> dict[str, Any]:
    """Return what a server says of itself, or nothing while there is none."""
    try:
        return TieredKVServer.health_at(path / "kv.sock", timeout_s=5.0)
    except Exception:  # noqa: BLE001 - whatever it is: it is asked again
        return {}


async def until_clean(path: Path) -> None:
    """Wait until a server holds nothing for anyone."""
    with anyio.fail_after(FOREVER_S):
        while True:
            now = await asyncio.to_thread(facts, path)
            tiers = [tier for share in now.get("shares", ()) for tier in share.get("tiers", ())]
            if tiers and not now["clients"] and not any(tier["leased"] or tier["pending"] for tier in tiers):
                return
            await a_while()


async def test_what_a_client_was_filling_is_a_miss_and_its_slots_go_back(tmp_path: Path) -> None:
    """Killed in the midst of a copy: not a byte of it is served; before its end its slots are nobody's."""
    async with served(tmp_path):
        with started(stuck_client, tmp_path / "kv.sock", prompt(8)) as client:
            assert await asyncio.to_thread(client.hear) == "stuck"
            engine = AnyEngine()
            async with attached_at(tmp_path, engine) as kv:
                assert (await kv.lookup(prompt(8))).num_blocks == 0
                assert kv.stats()["cpu"].pending == 8
                assert (await kv.load(prompt(8), engine.spec(range(8)), deadline_s=0.2)).num_blocks == 0
                for seed in range(1, 20):  # the tier is full many times over: not with these slots
                    keys = prompt(8, seed=seed)
                    await kv.store(keys, engine.fill(keys, range(8)))
                    assert (await kv.load(keys, engine.spec(range(8)))).num_blocks == 8
                    assert engine.count_right(keys, range(8)) == 8
                assert kv.stats()["cpu"].pending == 8
                client.kill()
                await until(lambda: kv.stats()["cpu"].pending == 0)
                assert (await kv.lookup(prompt(8))).num_blocks == 0
                keys = prompt(8)
                assert (await kv.store(keys, engine.fill(keys, range(8)))).num_stored == 8
                engine.wipe()
                assert (
                    (await kv.load(keys, engine.spec(range(8)))).num_blocks == engine.count_right(keys, range(8)) == 8
                )
        await until_clean(tmp_path)


async def test_leases_and_pins_end_with_their_client(tmp_path: Path) -> None:
    """A client that has closed holds nothing but leases whose blocks have not ended; what others hold stays."""
    with serving(tmp_path, cpu(16)) as server:
        engine = AnyEngine()
        async with attached(server, engine) as kv:
            keys = prompt(8)
            await kv.store(keys, engine.fill(keys, range(8)))
            async with attached(server) as other:
                lease = other.lease(keys[:4])
                assert (await lease.__aenter__()).num_blocks == 4
                assert other.pin(keys[4:], ttl_s=600).num_blocks == 4
                assert kv.pin(keys[4:6], ttl_s=600).num_blocks == 2
                assert kv.stats()["cpu"].leased == 8
            await until(lambda: kv.stats()["cpu"].leased == 6)
            await lease.__aexit__(None, None, None)
            await until(lambda: kv.stats()["cpu"].leased == 2)
            assert (await kv.explain(keys[4:5]))[0].is_pinned


async def test_a_lease_shows_its_blocks_until_its_block_ends_though_the_client_closes(tmp_path: Path) -> None:
    """As with a cache of one's own: whoever stores meanwhile gets other slots."""
    engine, keys = AnyEngine(), prompt(4)
    with serving(tmp_path, cpu(8)) as server:
        async with attached(server, engine) as kv:
            await kv.store(keys, engine.fill(keys, range(4)))
            async with attached(server) as other, other.lease(keys) as lease:
                before = [bytes(view) for view in lease.views]
                await other.aclose()
                await kv.evict(keys)
                for seed in range(1, 9):  # the tier is full many times over
                    await kv.store(prompt(4, seed=seed), engine.fill(prompt(4, seed=seed), range(4)))
                assert [bytes(view) for view in lease.views] == before
                assert lease.num_blocks == kv.stats()["cpu"].leased == 4
            await until(lambda: len(server.health()["clients"]) == 1)
            assert kv.stats()["cpu"].leased == 0


def test_a_lease_that_a_thread_holds_shows_its_blocks_though_its_event_loop_has_ended(tmp_path: Path) -> None:
    """The end of `open_blocking` gives nothing back under a thread that is in its block yet; the end of that does."""
    engine, keys = AnyEngine(), prompt(4)
    is_held, is_left, seen = threading.Event(), threading.Event(), list[list[bytes]]()

    def hold() -> None:
        with other.lease(keys) as lease:
            seen.append([bytes(view) for view in lease.views])
            is_held.set()
            is_left.wait()
            seen.append([bytes(view) for view in lease.views])

    holding = threading.Thread(target=hold)
    with serving(tmp_path, cpu(8)) as server, open_blocking(blocking_client(server)) as kv:
        kv.register_kv_caches(engine.caches[0])
        kv.store(keys, engine.fill(keys, range(4)))
        with open_blocking(blocking_client(server)) as other:
            holding.start()
            is_held.wait()
        kv.evict(keys)
        for seed in range(1, 9):  # the tier is full many times over
            kv.store(prompt(4, seed=seed), engine.fill(prompt(4, seed=seed), range(4)))
        is_left.set()
        holding.join()
        assert len(seen[0]) == 4
        assert seen[0] == seen[1]
        kv.call(until, lambda: len(server.health()["clients"]) == 1)
        assert kv.stats()["cpu"].leased == 0


def test_a_lease_ends_wherever_its_thread_is_interrupted(tmp_path: Path) -> None:
    """Where it is left, too: else the client was there for as long as its process."""
    engine, keys = AnyEngine(), prompt(1)
    with serving(tmp_path, cpu(8)) as server, open_blocking(blocking_client(server)) as kv:
        kv.register_kv_caches(engine.caches[0])
        kv.store(keys, engine.fill(keys, range(1)))
        with open_blocking(blocking_client(server)) as other:

            def lease() -> None:
                with suppress(KeyboardInterrupt), other.lease(keys):
                    pass

            def interrupt() -> None:
                raise KeyboardInterrupt

            assert interrupted_everywhere(lease, interrupt, of="tiered_kv.cache.blocking") > 50
        kv.call(until, lambda: len(server.health()["clients"]) == 1)
        assert kv.stats()["cpu"].leased == 0


async def test_a_lease_is_of_one_block(tmp_path: Path) -> None:
    """What it held would be forgotten, or given back twice, if it was entered again."""
    engine, keys = AnyEngine(), prompt(4)
    with serving(tmp_path, cpu(8)) as server:
        async with attached(server, engine) as kv:
            await kv.store(keys, engine.fill(keys, range(4)))
            async with (lease := kv.lease(keys)):
                with pytest.raises(ConfigurationError, match="one `async with` block"):
                    await lease.__aenter__()
            with pytest.raises(ConfigurationError, match="one `async with` block"):
                await lease.__aenter__()
            await until(lambda: kv.stats()["cpu"].leased == 0)


def blocking_client(server: TieredKVServer) -> BlockCache:
    """Return a client that is not open yet."""
    return TieredKV.connect(f"unix://{server.path}", model=MODEL, layout=SMALL, device="cpu", emit=Recorder())


async def test_a_server_that_is_killed_is_missed_and_then_warm(tmp_path: Path) -> None:
    """While it is away lookups miss, loads bring nothing, stores are dropped; then NVMe has what was settled."""
    engine, keys = AnyEngine(), prompt(20)
    async with served(tmp_path) as first:
        stack = attached_at(tmp_path, engine)
        kv = await stack.__aenter__()
        await (await kv.store(keys, engine.fill(keys, range(20)))).settled()
        first.kill()
        assert (await kv.lookup(keys)).num_blocks == 0
        assert (await kv.load(keys, engine.spec(range(20)))).num_blocks == 0
        dropped = await kv.store(prompt(4, seed=1), engine.fill(prompt(4, seed=1), range(4)))
        assert dropped.drop_reasons == {"server away": 4}
        assert await dropped.settled() == ()
        assert kv.lookup_nowait(keys).num_blocks == kv.pin(keys, ttl_s=1).num_blocks == 0
        stats = kv.stats()
        assert stats.tiers == ()
        assert (stats.requested, stats.missed, stats.missed_because) == (20, 20, {"server away": 20})
        assert (stats.store_requested, stats.dropped, stats.dropped_because) == (4, 4, {"server away": 4})
    async with served(tmp_path):
        await until_found(kv, keys)
        engine.wipe()
        assert (await kv.load(keys, engine.spec(range(20)))).num_blocks == engine.count_right(keys, range(20)) == 20
        await stack.__aexit__(None, None, None)


async def test_a_load_under_way_ends_with_what_is_in_place(tmp_path: Path) -> None:
    """Its server is killed after it has asked for a copy: that ends, the rest of the prefix never comes.

    However long that takes: while no copy ends its memory has no room for the rest.
    """
    engine, keys, may_begin = AnyEngine(), prompt(32), threading.Event()
    async with served(tmp_path, num_blocks=8) as one, attached_at(tmp_path, engine) as kv:
        for first in range(0, 32, 8):
            stored = await kv.store(keys[first : first + 8], engine.fill(keys[first : first + 8], range(8)))
            await stored.settled()
        engine.wipe()
        loading = kv.start_load(keys, engine.spec(range(32)), after=may_begin)
        await until(lambda: facts(tmp_path)["clients"][0]["copies"] > 0)
        one.kill()
        await until(lambda: not kv.is_attached)
        assert not loading.done
        may_begin.set()
        loaded = await loading
        assert 0 < loaded.num_blocks == engine.count_right(keys, range(32)) < 32
        assert loaded.faults[0].reason == "server away"


async def test_every_call_ends_while_a_server_hangs(tmp_path: Path) -> None:
    """A stopped server costs a call its time limit, and those after it nothing; it is used again when it goes on."""
    engine, keys = AnyEngine(), prompt(8)
    async with served(tmp_path) as one, attached_at(tmp_path, engine, timeout_s=2.0) as kv:
        await kv.store(keys, engine.fill(keys, range(8)))
        one.send(signal.SIGSTOP)
        with anyio.fail_after(FOREVER_S):
            loaded = await kv.load(keys, engine.spec(range(8)), deadline_s=0.2)
            assert (loaded.num_blocks, loaded.faults[0].reason) == (0, "deadline")
            assert (await kv.lookup(keys)).num_blocks == 0
            assert (await kv.store(prompt(4, seed=1), engine.spec(range(4)))).num_dropped == 4
            assert kv.membership(keys).sum() == 0
            assert not kv.is_attached
        one.send(signal.SIGCONT)
        await until_found(kv, keys)


async def test_calls_that_may_take_long_do_not_wait_for_a_server_that_hangs(tmp_path: Path) -> None:
    """What has a minute where a server works ends after the time of any other call where none says a word."""
    engine, keys = AnyEngine(), prompt(8)
    async with served(tmp_path) as one, attached_at(tmp_path, engine, timeout_s=1.0) as kv:
        await kv.store(keys, engine.fill(keys, range(8)))
        one.send(signal.SIGSTOP)
        with anyio.fail_after(FOREVER_S / 2):  # half of what they may take
            asked = kv.evict(keys), kv.clear(), kv.flush(), kv.drain(), kv.explain(keys, ask=True), kv.prefetch(keys)
            *unknown, drained, explained, prefetched = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(error) for error in unknown] == [BackendUnavailableError] * 3
        assert drained is False
        assert explained == [Explanation("server away")] * 8
        assert prefetched == PrefetchResult(0, 0, (TierFault("host", Reason.SERVER_AWAY, 8),))
        one.send(signal.SIGCONT)
        await until(lambda: kv.is_attached)
        await kv.flush()


async def test_a_call_that_takes_long_says_nothing_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefetch and a lease that wait for a slow medium go on past the time of a load; others bring what is there."""
    engine, cold, hot, may_read = AnyEngine(), prompt(8), prompt(4, seed=2), threading.Event()
    read = MemoryBackend.read

    async def read_late(self: MemoryBackend, *what: Any) -> list[Outcome]:  # noqa: ANN401 - as it has them
        await asyncio.to_thread(may_read.wait)
        return await read(self, *what)

    monkeypatch.setattr(MemoryBackend, "read", read_late)
    limits = CacheLimits(**{**dict(LIMITS), "load_timeout_s": 0.1})
    with serving(tmp_path, cpu(64), memory(), limits=limits) as server:
        async with attached(server, engine) as kv:
            await (await kv.store(cold, engine.fill(cold, range(8)))).settled()
            await kv.evict(cold, tier="cpu")
            await kv.store(hot, engine.fill(hot, range(8, 12)))
            bringing = kv.prefetch(cold[:4])
            leasing = asyncio.ensure_future(num_leased(kv, cold[4:]))
            for _ in range(2):
                late = await kv.load(cold, engine.spec(range(16, 24)))
                assert late.faults[0].reason is Reason.DEADLINE
                assert (await kv.load(hot, engine.spec(range(12, 16)))).num_blocks == 4
            assert kv.is_attached
            may_read.set()
            assert (await bringing).num_blocks == 4
            assert await leasing == 4


async def num_leased(kv: ConnectedKV, keys: BlockKeys) -> int:
    """Lease blocks, and say how many."""
    async with kv.lease(keys) as lease:
        return lease.num_blocks


async def test_who_waits_for_what_becomes_of_a_store_does_not_wait_for_a_server_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of its blocks, once the server has said nothing for the time of a call."""
    engine, keys, may_write, may_go_on = AnyEngine(), prompt(8), threading.Event(), threading.Event()
    write = MemoryBackend.write

    async def write_and_hang(self: MemoryBackend, *what: Any) -> list[Outcome]:  # noqa: ANN401 - as it has them
        await asyncio.to_thread(may_write.wait)
        may_go_on.wait()  # on the event loop of the server
        return await write(self, *what)

    monkeypatch.setattr(MemoryBackend, "write", write_and_hang)
    with serving(tmp_path, cpu(64), memory()) as server:
        async with attached(server, engine, timeout_s=1.0) as kv:
            stored = await kv.store(keys, engine.fill(keys, range(8)))
            waiting = [asyncio.ensure_future(stored.settled()) for _ in range(2)]
            try:
                may_write.set()
                with anyio.fail_after(FOREVER_S):
                    assert await asyncio.gather(*waiting) == [(), ()]
                assert not kv.is_attached
            finally:
                may_go_on.set()
            await until(lambda: kv.is_attached)
            assert (await kv.lookup(keys)).num_blocks == 8


async def test_a_rolling_restart_loses_nothing_settled(tmp_path: Path) -> None:
    """SIGTERM drains: what was stored, though not settled yet, is there after the next start."""
    engine, keys = AnyEngine(), prompt(20)
    async with served(tmp_path) as first, attached_at(tmp_path, engine) as kv:
        await kv.store(keys, engine.fill(keys, range(20)))
        first.send(signal.SIGTERM)
        assert await asyncio.to_thread(first.join) == 0
        async with served(tmp_path):
            await until_found(kv, keys)


async def test_a_second_sigterm_ends_a_server_that_cannot_drain(tmp_path: Path) -> None:
    """It waits for a store that never ends, takes no other and no client, and is told again."""
    engine, keys = AnyEngine(), prompt(8)
    async with served(tmp_path) as one, attached_at(tmp_path, engine) as kv:
        storing = kv.start_store(keys, engine.fill(keys, range(8)), layerwise=True)
        await until(lambda: kv.stats()["cpu"].pending == 8)
        one.send(signal.SIGTERM)
        await until(lambda: facts(tmp_path)["is_draining"])
        status = await asyncio.to_thread(CliRunner().invoke, app, ["status", "--host", str(tmp_path / "kv.sock")])
        assert (status.exit_code, status.stdout.split(",")[0]) == (1, "draining")
        refused = await kv.store(prompt(4, seed=1), engine.fill(prompt(4, seed=1), range(8, 12)))
        assert refused.drop_reasons == {"draining": 4}
        with pytest.raises(BackendUnavailableError, match="about to end"):
            async with attached_at(tmp_path, engine, timeout_s=1.0):
                pass
        one.send(signal.SIGTERM)
        assert await asyncio.to_thread(one.join) == -signal.SIGTERM
        assert (await storing).num_stored == 0


async def test_rolling_restarts_under_traffic_lose_nothing_settled(tmp_path: Path) -> None:
    """An engine stores and loads all the time; each server drains, and the engine goes on with the next one."""
    said: list[int] = []
    with started(storing_client, tmp_path / "kv.sock", 0) as client:
        for _ in range(3):
            async with served(tmp_path) as one:
                said += [await asyncio.to_thread(client.hear) for _ in range(3)]
                one.send(signal.SIGTERM)
                assert await asyncio.to_thread(one.join) == 0
        client.kill()
        said += client.heard()
    engine = AnyEngine()
    async with served(tmp_path), attached_at(tmp_path, engine) as kv:
        for seed in said[-128:]:  # the disk has room for twice as many
            loaded = await kv.load(prompt_of(seed), engine.spec(range(8)))
            assert loaded.num_blocks == engine.count_right(prompt_of(seed), range(8)) == 8, f"prompt {seed}"


async def test_killed_again_and_again(tmp_path: Path) -> None:
    """Clients and the server are killed at any moment: all that is served is right, and nothing stays held."""
    async with served(tmp_path):
        for turn in range(4):
            with started(storing_client, tmp_path / "kv.sock", 1000 * turn) as client:
                for _ in range(turn + 1):
                    await asyncio.to_thread(client.hear)
                client.kill()
        await until_clean(tmp_path)
        engine = AnyEngine()
        async with attached_at(tmp_path, engine) as kv:
            for turn in range(4):
                for number in range(turn + 1):
                    keys = prompt_of(1000 * turn + number)
                    loaded = await kv.load(keys, engine.spec(range(8)))
                    assert loaded.num_blocks == engine.count_right(keys, range(8)) == 8


def attached_at(
    path: Path, engine: AnyEngine, *, model: ModelIdentity = MODEL, timeout_s: float = 5.0
) -> AbstractAsyncContextManager[ConnectedKV]:
    """Attach to the server at ``path``."""
    return attached(path / "kv.sock", engine, model=model, timeout_s=timeout_s)


async def until_found(kv: ConnectedKV, keys: BlockKeys) -> None:
    """Wait until all of a prompt is found."""
    with anyio.fail_after(FOREVER_S):
        while (await kv.lookup(keys)).num_blocks < len(keys):
            await a_while()
