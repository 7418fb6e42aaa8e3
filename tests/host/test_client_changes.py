"""What `events()` of a client gives, applied in order, is what the server's tiers hold; whoever changes them."""

import asyncio
import gc
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.host.test_deaths import attached_at, served, until_found
from tests.support.any_layout import STRIDE, AnyEngine, cpu, nvme, prompt
from tests.support.caches import until
from tests.support.serving import attached, serving
from tiered_kv import Added, BlockKeys, Changes, Cleared, ConnectedKV, Mirror, Removed, Shard, Snapshot, TierChange
from tiered_kv.host import session_jobs
from tiered_kv.values.keys import Names

KEYS = prompt(4)


async def keep(kv: ConnectedKV, engine: AnyEngine, keys: BlockKeys) -> None:
    """Store a prompt, and wait until every tier has it."""
    await kv.store(keys, engine.fill(keys, range(len(keys))))
    await kv.flush()


async def take(changes: Changes, is_enough: Callable[[list[TierChange]], bool]) -> list[TierChange]:
    """Take changes until they are enough; they are numbered without a gap."""
    taken: list[TierChange] = []
    async with asyncio.timeout(60):
        while not is_enough(taken):
            taken.append(await anext(changes))
    numbers = [change.sequence for change in taken]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    return taken


def names_in(changes: list[TierChange]) -> set[bytes]:
    """Return the names that changes are about."""
    return {row.tobytes() for change in changes for row in getattr(change, "names", ())}


def rows(names: Names) -> set[bytes]:
    """Return names as a set."""
    return {row.tobytes() for row in names}


async def test_a_snapshot_comes_first_and_then_every_change_in_order(tmp_path: Path) -> None:
    """Also of what other clients do; each by the names that the keys have here."""
    one, two = AnyEngine(), AnyEngine()
    with serving(tmp_path, cpu(16), nvme(tmp_path / "disk")) as server:
        async with attached(server, one) as kv, attached(server, two) as other:
            await keep(kv, one, KEYS)
            changes = kv.events()
            assert changes.places == (("cpu", 0, 0), ("nvme", 0, 0))
            first = await take(changes, lambda taken: len(taken) == 2)
            assert [type(change) for change in first] == [Snapshot, Snapshot]
            assert [change.place for change in first] == list(changes.places)
            assert all(names_in([change]) == rows(kv.namespace().names(KEYS)) for change in first)
            await keep(other, two, prompt(2, seed=1))
            await other.evict(KEYS[3:], tier="cpu")
            await other.clear()
            later = [change for change in await take(changes, _num_cleared(2)) if change.tier == "cpu"]
            assert [type(change) for change in later] == [Added, Removed, Cleared]
            assert names_in(later[:1]) == rows(kv.namespace().names(prompt(2, seed=1)))
            assert isinstance(later[1], Removed)
            assert (later[1].why, names_in([later[1]])) == ("removed", rows(kv.namespace().names(KEYS[3:])))


def _num_cleared(num: int) -> Callable[[list[TierChange]], bool]:
    return lambda taken: sum(isinstance(change, Cleared) for change in taken) == num


async def test_a_client_hears_of_its_own_rank(tmp_path: Path) -> None:
    """Another rank's blocks are not its own; its rank is the one that it stands for."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(32, 2 * STRIDE)) as server:
        async with (
            attached(server, engine, shard=Shard(0, 2)) as kv,
            attached(server, engine, shard=Shard(1, 2)) as other,
        ):
            changes = other.events()
            await keep(kv, engine, KEYS)
            await keep(other, engine, KEYS[:2])
            taken = await take(changes, lambda taken: len(names_in(taken)) == 2)
            assert {change.place for change in taken} == {("cpu", 0, 0)}
            assert names_in(taken) == rows(other.namespace().names(KEYS[:2]))


async def test_who_falls_behind_is_told_and_gets_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither side queues more than it may; what is told in the end is what is there."""
    monkeypatch.setattr(session_jobs, "_MOST_NAMES", 64)
    monkeypatch.setattr(session_jobs, "NAMES_A_MESSAGE", 3)
    engine, mirror = AnyEngine(), Mirror()
    with serving(tmp_path, cpu(8)) as server:
        async with attached(server, engine) as kv:
            changes = kv.events()
            for seed in range(40):  # a message more than the server may send ahead, and a queue more than it keeps
                await keep(kv, engine, prompt(4, seed=seed))
            held = [prompt(4, seed=seed) for seed in (38, 39)]

            def is_exact(taken: list[TierChange]) -> bool:
                if taken:
                    mirror.apply(taken[-1])
                return mirror.count() == 8 and all(mirror.prefix(kv.namespace().names(keys)) == 4 for keys in held)

            assert len(await take(changes, is_exact)) < 40
            assert changes.num_overflows > 0


async def test_leaving_the_loop_ends_the_stream(tmp_path: Path) -> None:
    """The server keeps nothing for it from then on. One that goes on ends with the client."""
    with serving(tmp_path, cpu(8)) as server:
        async with attached(server, AnyEngine()) as kv:
            async for change in kv.events():
                assert isinstance(change, Snapshot)
                break
            del change
            gc.collect()
            await until(lambda: server.health()["clients"][0]["streams"] == 0)
            changes = kv.events()
            following = asyncio.create_task(take(changes, lambda _: False))
            await until(lambda: server.health()["clients"][0]["streams"] == 1)
        with pytest.raises(StopAsyncIteration):
            await following


async def test_weights_and_servers_that_change_begin_it_anew(tmp_path: Path) -> None:
    """New weights give other names; a server that is killed has nothing, and the next one what is on its disk."""
    async with AsyncExitStack() as stack:
        first, engine = await stack.enter_async_context(served(tmp_path)), AnyEngine()
        kv = await stack.enter_async_context(attached_at(tmp_path, engine))
        stored = await kv.store(KEYS, engine.fill(KEYS, range(4)))
        await stored.settled()
        changes, mirror = kv.events(), Mirror()
        names = kv.namespace().names(KEYS)
        for change in await take(changes, lambda taken: len(taken) == 2):
            mirror.apply(change)
        assert mirror.prefix(names, "cpu") == mirror.prefix(names, "nvme") == 4
        kv.advance_epoch("w1")
        again = await take(changes, lambda taken: len(taken) == 2)
        assert [type(change) for change in again] == [Snapshot, Snapshot]
        kv.advance_epoch("w0")
        await take(changes, lambda taken: len(taken) == 2)
        first.kill()
        for change in await take(changes, _num_cleared(2)):
            mirror.apply(change)
        assert mirror.count() == 0
        await stack.enter_async_context(served(tmp_path))
        await until_found(kv, KEYS)
        for change in await take(changes, lambda taken: len(taken) == 2):
            mirror.apply(change)
        assert (mirror.prefix(names, "cpu"), mirror.prefix(names, "nvme")) == (0, 4)
