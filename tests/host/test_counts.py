"""What is counted of a server's clients, wherever it is asked for, and what does not grow while a server hangs."""

import signal
import threading
from pathlib import Path

import anyio
import pytest

from tests.host.test_deaths import attached_at, served
from tests.support.any_layout import SMALL, STRIDE, AnyEngine, cpu, prompt
from tests.support.caches import until
from tests.support.serving import attached, serving
from tiered_kv import Outcomes, Reason, Shard, Snapshot
from tiered_kv.host import wire

KEYS = prompt(8)


async def test_stores_that_a_server_refuses_are_counted(tmp_path: Path) -> None:
    """One more than a client may have under way, and any of one that reads only: they are dropped."""
    engine, reading = AnyEngine(), AnyEngine()
    with serving(tmp_path, cpu(32), host={"stores_per_client": 1}) as server:
        async with attached(server, engine) as kv, attached(server, reading, read_only=True) as reader:
            first = kv.start_store(KEYS, engine.fill(KEYS, range(8)), layerwise=True)
            other = await kv.store(prompt(4, seed=1), engine.spec(range(8, 12)))
            assert other.drop_reasons == {"too many stores": 4}
            for layer in range(2):
                first.store_layer(layer)
            await first
            assert (await reader.store(prompt(2, seed=2), reading.spec(range(2)))).num_dropped == 2
            stats = kv.stats()
            assert (stats.store_requested, stats.stored, stats.dropped) == (14, 8, 6)
            assert stats.dropped_because == {"too many stores": 4, "read only": 2}


async def test_loads_that_a_server_refuses_are_counted(tmp_path: Path) -> None:
    """They are missed, for that reason."""
    engine, used = AnyEngine(), threading.Event()
    with serving(tmp_path, cpu(32), host={"loads_per_client": 1}) as server:
        async with attached(server, engine) as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(8)))
            first = kv.start_load(KEYS, engine.spec(range(8)), after=used)
            assert (await kv.load(KEYS, engine.spec(range(8, 16)))).missed_because == "too many loads"
            used.set()
            await first
            stats = kv.stats()
            assert (stats.requested, stats.missed_because) == (16, {"too many loads": 8})


@pytest.mark.parametrize("limit", ["jobs_per_client", "bytes_per_client"])
async def test_plans_that_a_server_refuses_are_counted(limit: str, tmp_path: Path) -> None:
    """Beside one that holds as much as a client may: stores are dropped, and loads missed. Each rank counts."""
    host = {limit: 1 if limit == "jobs_per_client" else 8 * 2 * STRIDE}
    with serving(tmp_path, cpu(64), host=host) as server:
        async with attached(server, shard=(Shard(0, 2), Shard(1, 2))) as kv:
            planner = kv.planner()
            for rank in range(2):
                planner.register_worker(rank=rank)
            job = planner.plan_store(KEYS)
            await job.planned()
            assert (await planner.plan_store([prompt(4, seed=1), prompt(4, seed=2)]).ended()).errors
            assert (await planner.plan_load(KEYS).ended()).errors
            stats = kv.stats()
            assert (stats.dropped, stats.dropped_because) == (16, {Reason.TOO_MANY_STORES: 16})
            assert (stats.missed, stats.missed_because) == (16, {Reason.TOO_MANY_LOADS: 16})
            job.cancel()


@pytest.mark.parametrize("num_moved", [8, 0])
async def test_what_one_rank_leaves_to_another_client_counts_once_it_is_there(tmp_path: Path, num_moved: int) -> None:
    """Of a store by all ranks: the other client's worker may fail, and then not every rank has what was copied out."""
    engine, both = AnyEngine(), Shard.every(2)
    with serving(tmp_path, cpu(32, 2 * STRIDE)) as server:
        async with attached(server, shard=both[0]) as one, attached(server, shard=both) as all_:
            (of_one := one.planner()).register_worker()
            planner = all_.planner()
            for rank in range(2):
                planner.register_worker(rank=rank)
            await (left := of_one.plan_store(KEYS, engine.spec(range(8)))).planned()
            job = planner.plan_store(KEYS, engine.spec(range(8)))
            assert [move.positions for move in (await job.planned()).moves] == [(), tuple(range(8))]
            of_one.complete(Outcomes(left.number, 0, num_moved))
            await left.ended()
            planner.complete(Outcomes(job.number, 1, 8))
            result = await job.ended()
            assert (result.num_blocks, int(result.mask.sum())) == (num_moved, num_moved)
            assert result.num_bytes == result.by_tier["cpu"].num_bytes == 8 * SMALL.groups[0].payload_bytes
            assert (await all_.lookup(KEYS)).num_blocks == num_moved


async def test_a_plan_to_store_of_who_only_reads_is_counted(tmp_path: Path) -> None:
    """As dropped for that, like any store of its."""
    with serving(tmp_path, cpu(16)) as server:
        async with attached(server, read_only=True) as reader:
            reader.planner().register_worker()
            assert (await reader.planner().plan_store(KEYS).ended()).errors == ("read only",)
            assert reader.stats().dropped_because == {Reason.READ_ONLY: 8}


async def test_loads_that_new_weights_overtake_are_counted_as_missed(tmp_path: Path) -> None:
    """For that reason, as by a cache of one's own: with a plan or without; what had come before is a hit."""
    engine, used = AnyEngine(), threading.Event()
    with serving(tmp_path, cpu(32)) as server:
        async with attached(server, engine) as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(8)))
            load = kv.start_load(KEYS, engine.spec(range(8)), after=used)
            planner = kv.planner()
            planner.register_worker()
            job = planner.plan_load(KEYS[:4], engine.spec(range(8, 12)))
            plan = await job.planned()
            kv.advance_epoch("w1")
            used.set()
            assert (await load).missed_because == "epoch advanced"
            planner.complete(Outcomes(plan.job, 0, 4))
            assert (await job.ended()).errors == ("epoch advanced",)
            await kv.store(KEYS[:2], engine.spec(range(2)))
            assert (await kv.load(KEYS[:2], engine.spec(range(2)))).num_blocks == 2
            kv.advance_epoch("w2")
            stats = kv.stats()
            assert (stats.requested, stats.missed_because, stats.tiers[0].hits) == (14, {"epoch advanced": 12}, 2)


async def test_what_is_too_long_to_say_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of loads and stores, with a plan or without: the server never hears of them."""
    with serving(tmp_path, cpu(32)) as server:
        async with attached(server, engine := AnyEngine()) as kv:
            planner = kv.planner()
            planner.register_worker()
            with monkeypatch.context() as patch:
                patch.setattr(wire, "MOST_FRAME_BYTES", 200)
                await kv.store(KEYS, engine.spec(range(8)))
                await kv.load(KEYS, engine.spec(range(8)))
                for job in (planner.plan_store(KEYS, engine.spec(range(8))), planner.plan_load(KEYS)):
                    assert "fewer keys" in (await job.ended()).errors[0]
            stats = kv.stats()
            assert (stats.store_requested, stats.dropped_because) == (16, {"too many keys": 16})
            assert (stats.requested, stats.missed_because) == (16, {"too many keys": 16})


async def test_pins_of_all_clients_are_counted(tmp_path: Path) -> None:
    """In what each of them is told, and in the server's own metrics."""
    with serving(tmp_path, cpu(32)) as server:
        async with attached(server, engine := AnyEngine()) as kv, attached(server) as other:
            await kv.store(KEYS, engine.fill(KEYS, range(8)))
            assert other.pin(KEYS[:4], ttl_s=60).num_blocks == 4
            assert kv.pin(KEYS[4:6], ttl_s=60).num_blocks == 2
            assert kv.stats().pinned_bytes == other.stats().pinned_bytes == 6 * STRIDE
            shares = server._shares  # noqa: SLF001 - what its page and metrics show
            assert shares is not None
            (share,) = shares
            assert share.cache is not None
            seat = share.cache._seat  # noqa: SLF001 - likewise
            assert seat is not None
            assert seat.statistics().pinned_bytes == 6 * STRIDE


async def test_a_client_s_preemptions_are_counted(tmp_path: Path) -> None:
    """As those of an engine with a cache of its own."""
    with serving(tmp_path, cpu(32)) as server:
        async with attached(server, engine := AnyEngine()) as kv:
            await kv.swap_out(KEYS, engine.fill(KEYS, range(8)))
            assert kv.stats().num_preemptions == 1


async def test_streams_begin_anew_with_new_weights(tmp_path: Path) -> None:
    """Those that end meanwhile do not count against a client's number."""
    with serving(tmp_path, cpu(16), host={"leases_per_client": 3}) as server:
        async with attached(server, AnyEngine()) as kv:
            streams = [kv.events() for _ in range(3)]
            for weights in ("w1", "w2"):
                for each in streams:
                    with anyio.fail_after(30):
                        assert isinstance(await anext(each), Snapshot)
                kv.advance_epoch(weights)


@pytest.mark.parametrize(("host", "most"), [({"leases_per_client": 1}, 1), ({}, 16)])
async def test_one_stream_too_many_ends(host: dict[str, int], most: int, tmp_path: Path) -> None:
    """Whoever follows it does not wait for what never comes. There are few: each holds names in the server."""
    with serving(tmp_path, cpu(16), host=host) as server:
        async with attached(server, AnyEngine()) as kv:
            *some, other = [kv.events() for _ in range(most + 1)]
            with anyio.fail_after(30):
                assert all([isinstance(await anext(one), Snapshot) for one in some])
                assert [change async for change in other] == []


async def test_what_is_noted_to_a_server_that_hangs_is_bounded(tmp_path: Path) -> None:
    """An engine goes on to say what it uses, for as long as that takes."""
    keys = prompt(4000)
    async with served(tmp_path) as one, attached_at(tmp_path, AnyEngine(), timeout_s=1.0) as kv:
        one.send(signal.SIGSTOP)
        there = kv._connection.there  # noqa: SLF001 - ours
        assert there is not None
        for _ in range(500):
            kv.touch(keys)
        assert 0 < there.num_unsent < 8 << 20
        kv.lookup_nowait(KEYS)
        await until(lambda: not kv.is_attached)
        num_unsent = there.num_unsent
        kv.touch(keys)
        for _ in range(100):  # as often as it is looked in a minute, whether the server says something again
            there.look(0.5)
        assert there.num_unsent == num_unsent
        one.send(signal.SIGCONT)
        await until(lambda: kv.is_attached)
