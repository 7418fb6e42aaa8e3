"""What a client of a server does beside the promises of the face: layers, threads, weights, models, rights."""

import asyncio
import errno
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import numpy as np
import pytest

from tests.support.any_layout import MODEL, SMALL, STRIDE, AnyEngine, cpu, memory, nvme, open_any, prompt
from tests.support.caches import Recorder, until
from tests.support.descriptors import num_open_in
from tests.support.serving import attached, serving
from tiered_kv import (
    BackendUnavailableError,
    BlockCache,
    BlockState,
    CapacityError,
    ClosedError,
    ConfigurationError,
    ConnectedKV,
    CPULoadStoreSpec,
    KVGroup,
    KVLayout,
    ModelIdentity,
    PrefetchResult,
    Reason,
    Shard,
    TieredKV,
    TieredKVServer,
    TierFault,
    TierStore,
    full,
    window,
)
from tiered_kv.cache.tiered_kv import TierCalls
from tiered_kv.host import handshake, protocol, wire
from tiered_kv.host.attachment import Attachment, Line
from tiered_kv.host.connection import Attempts, Begun, FarSide
from tiered_kv.host.protocol import Answered, Attach, Attached, Health, Keys, Slab
from tiered_kv.memory.cpu import CPUDevice
from tiered_kv.values.events import BlocksPrefetched, BlocksSettled, HostMemoryReady
from tiered_kv.values.keys import stored_keys
from tiered_kv.values.loop_calls import LoopCalls

KEYS = prompt(12)


@pytest.mark.both_loops
async def test_what_one_stores_another_loads(tmp_path: Path) -> None:
    """Engines of one model share blocks, whoever has stored them, and goes."""
    one, two = AnyEngine(), AnyEngine()
    with serving(tmp_path, cpu(24), nvme(tmp_path / "disk")) as server:
        async with attached(server, one) as kv:
            stored = await kv.store(prompt(40), one.fill(prompt(40), range(40)))
            assert await stored.settled() == (TierStore("cpu", written=24, dropped=16), TierStore("nvme", written=40))
        async with attached(server, two) as kv:
            assert (await kv.lookup(prompt(40))).num_blocks == 40
            loaded = await kv.load(prompt(40), two.spec(range(40)))
            assert loaded.num_blocks == two.count_right(prompt(40), range(40)) == 40
            assert loaded.by_tier == {"cpu": 24, "nvme": 16}


@pytest.mark.parametrize(
    "keys", [None, "prompt", 7, stored_keys([prompt(1), prompt(1, seed=1)])], ids=lambda keys: type(keys).__name__
)
async def test_what_are_no_keys_is_said_without_the_server(keys: Any, tmp_path: Path) -> None:  # noqa: ANN401 - anything
    """A client refuses them as a cache of one's own does, in calls that block and in those that are awaited.

    And those of several prompts, which only a planner takes.
    """
    with serving(tmp_path, cpu(24)) as server:
        async with attached(server, AnyEngine()) as kv:
            for call in (kv.touch, kv.prefetch, kv.lookup_nowait, kv.membership, kv.unpin):
                with pytest.raises(ConfigurationError, match="keys must be BlockKeys"):
                    call(keys)
            for start in (kv.start_load, kv.start_store, kv.submit_load, kv.submit_store):
                with pytest.raises(ConfigurationError, match="keys must be BlockKeys"):
                    start(keys, AnyEngine().spec([]))
            for each in (kv.lookup, kv.evict, kv.explain):
                with pytest.raises(ConfigurationError, match="keys must be BlockKeys"):
                    await each(keys)
            with pytest.raises(ConfigurationError, match="keys must be BlockKeys"):
                kv.count_lookup(keys, np.ones(1, np.bool_))
            with pytest.raises(ConfigurationError, match="a rank must be an int, 0 or more, got '0'"):
                kv.namespace(rank="0")  # type: ignore[arg-type]  # wrong on purpose


async def test_layers_come_and_go_one_by_one(tmp_path: Path) -> None:
    """A store takes layers in any order, and a load gives them in order; each may be waited for."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(24)) as server:
        async with attached(server, engine) as kv:
            storing = kv.start_store(KEYS, engine.fill(KEYS, range(12)), layerwise=True)
            for layer in (1, 0):
                assert (await kv.lookup(KEYS)).num_blocks == 0
                storing.store_layer(layer)
            assert (await storing).num_stored == 12
            engine.wipe()
            loading = kv.start_load(KEYS, engine.spec(range(12)), layerwise=True)
            assert await loading.admitted() == 12
            for layer in range(2):
                await loading.layer(layer)
            assert (await loading).num_blocks == engine.count_right(KEYS, range(12)) == 12
            with pytest.raises(ConfigurationError, match="stored already"):
                storing.store_layer(0)


async def test_two_that_miss_the_same_compute_it_once(tmp_path: Path) -> None:
    """A lookup says that another engine is storing what is missing, and a load waits for that engine's store."""
    one, two = AnyEngine(), AnyEngine()
    with serving(tmp_path, cpu(24)) as server:
        async with attached(server, one) as kv, attached(server, two) as other:
            await kv.store(KEYS[:4], one.fill(KEYS[:4], range(4)))
            assert (await other.lookup(KEYS)).num_pending == 0
            storing = kv.start_store(KEYS[4:10], one.fill(KEYS[4:10], range(4, 10)), layerwise=True)
            await until_pending(kv, 6)
            found = await other.lookup(KEYS)
            assert (found.num_blocks, found.num_pending) == (4, 6)
            loading = other.start_load(KEYS[:10], two.spec(range(10)), deadline_s=60)
            late = await other.load(KEYS[:10], two.spec(range(20, 30)), deadline_s=0.1)
            assert late.num_blocks == 4
            for layer in range(2):
                storing.store_layer(layer)
            assert (await loading).num_blocks == two.count_right(KEYS[:10], range(10)) == 10


async def until_pending(kv: ConnectedKV, n: int) -> None:
    """Wait until so many slots are being filled."""
    await until(lambda: kv.stats()["cpu"].pending == n)


async def test_a_load_with_gaps_and_one_of_several_groups(tmp_path: Path) -> None:
    """A mask says what is in place behind a hole; groups are loaded to the length that all have."""
    engine = AnyEngine(KVLayout((KVGroup(2, 1, 48, "bfloat16", 4), KVGroup(1, 2, 64, "float32", 8, "HND", 4))))
    one, two = prompt(12), prompt(6, group=1, block_size=8)
    with serving(tmp_path, {"medium": "cpu", "capacity": "1MiB"}) as server:
        async with attached(server, engine) as kv:
            await kv.store(one[:5], engine.fill(one[:5], range(5)))
            await kv.store(one[6:], engine.fill(one[6:], range(6, 12)))
            await kv.store(two, engine.fill(two, range(6)))
            loaded = await kv.load(one, engine.spec(range(12)), gaps=True)
            assert loaded.num_blocks == 5
            assert loaded.mask.tolist() == [True] * 5 + [False] + [True] * 6
            needs = [full(one), window(two, 16)]
            found = await kv.lookup_groups(needs)
            assert found.num_tokens == 16
            needs = [need.until(found.num_tokens) for need in needs]
            specs = [engine.spec(range(4), 0), engine.spec(range(2), 1)]
            assert (await kv.load_groups(needs, specs)).num_tokens == 16


async def test_any_thread_submits_and_polls(tmp_path: Path) -> None:
    """A synchronous engine submits, polls and asks from its own thread."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(24)) as server:
        async with attached(server, engine) as kv:

            def serve() -> None:
                ticket = kv.submit_store(KEYS, engine.fill(KEYS, range(12)))
                assert ticket.wait(60).num_stored == 12
                assert kv.membership(KEYS).tolist() == [BlockState.HIT] * 12
                assert kv.lookup_nowait(KEYS).num_blocks == 12
                kv.submit_load(KEYS, engine.spec(range(12, 24)))
                ((_, result),) = kv.poll(60)
                assert result.num_bytes == 12 * 1536

            await asyncio.to_thread(serve)
            assert engine.count_right(KEYS, range(12, 24)) == 12


@pytest.mark.both_loops
async def test_a_call_that_blocks_after_a_long_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked first, more than a socket takes at once, does not keep it from its answer."""
    monkeypatch.setattr("tiered_kv.host.connection._NOW_S", 60.0)
    engine, long = AnyEngine(), prompt(40_000, seed=5)
    with serving(tmp_path, cpu(24)) as server:
        async with attached(server, engine) as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(12)))
            looking = asyncio.ensure_future(kv.lookup(long))
            await asyncio.sleep(0)  # it is said
            assert kv.pin(KEYS, ttl_s=60.0).num_blocks == 12
            assert kv.lookup_nowait(KEYS).num_blocks == 12
            assert kv.stats()["cpu"].ready == 12
            assert (await kv.load(KEYS, engine.spec(range(12, 24)))).num_blocks == 12
            assert (await looking).num_blocks == 0


@pytest.mark.both_loops
async def test_threads_ask_while_the_event_loop_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own answer, whoever reads it from the connection, and however long the others' are."""
    monkeypatch.setattr("tiered_kv.host.connection._NOW_S", 60.0)
    engine = AnyEngine()
    with serving(tmp_path, cpu(64)) as server:
        async with attached(server, engine) as kv:
            await kv.store(prompt(60), engine.fill(prompt(60), range(60)))

            def ask(number: int) -> bool:
                keys, long = prompt(60)[: number + 1], prompt(8000, seed=number + 1)
                return all(
                    kv.lookup_nowait(keys).num_blocks == len(keys) and (kv.membership(long) == BlockState.MISS).all()
                    for _ in range(20)
                )

            asking = asyncio.gather(*(asyncio.to_thread(ask, number) for number in range(4)))
            looking = asyncio.gather(*(kv.lookup(prompt(8000, seed=9)) for _ in range(50)))
            for number in range(1, 60):
                assert kv.lookup_nowait(prompt(60)[:number]).num_blocks == number
                assert (await kv.load(prompt(60)[:4], engine.spec(range(60, 64)))).num_blocks == 4
            assert all(await asking)
            assert not any(found.num_blocks for found in await looking)


async def test_a_host_pool_is_memory_like_any(tmp_path: Path) -> None:
    """Blocks are loaded into memory that the engine has bound by name."""
    engine, pool = AnyEngine(), bytearray(16 * 1536)
    with serving(tmp_path, cpu(24)) as server:
        async with attached(server, engine) as kv:
            kv.register_host_pool("pool", np.frombuffer(pool, np.uint8).reshape(16, 1536))
            await kv.store(KEYS, engine.fill(KEYS, range(12)))
            assert (await kv.load(KEYS, CPULoadStoreSpec(range(12), "pool"))).num_blocks == 12
            kept = [pool[at * 1536 : (at + 1) * 1536] for at in range(12)]
            assert kept == [engine.content(key, 0, "") for key in KEYS]


async def test_an_engine_that_sleeps_lets_go_of_its_tensors(tmp_path: Path) -> None:
    """Until they are registered again, transfers are refused; the blocks stay with the server."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(24)) as server:
        async with attached(server, engine) as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(12)))
            kv.unregister_kv_caches()
            with pytest.raises(ConfigurationError, match=r"register_kv_caches\(\) comes before"):
                kv.start_load(KEYS, engine.spec(range(12)))
            engine.wipe()
            kv.register_kv_caches(engine.caches[0])
            assert (await kv.load(KEYS, engine.spec(range(12)))).num_blocks == engine.count_right(KEYS, range(12)) == 12


async def test_each_engine_has_its_weights(tmp_path: Path) -> None:
    """New weights in one engine hide its old blocks from it, and from no other."""
    one, two = AnyEngine(), AnyEngine()
    with serving(tmp_path, cpu(24)) as server:
        async with attached(server, one) as kv, attached(server, two) as other:
            await kv.store(KEYS, one.fill(KEYS, range(12)))
            kv.advance_epoch("w1")
            assert (await kv.lookup(KEYS)).num_blocks == 0
            assert (await kv.explain(KEYS[:1]))[0].state == "old epoch"
            assert (await other.lookup(KEYS)).num_blocks == 12
            loading = other.start_load(KEYS, two.spec(range(12)))
            other.advance_epoch("w1")
            assert (await loading).num_blocks == 0
            other.advance_epoch("w0")
            assert (await other.load(KEYS, two.spec(range(12)))).num_blocks == 12


async def test_a_sequence_is_swapped_out_and_in(tmp_path: Path) -> None:
    """A preempted sequence is pinned until it is back."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(24)) as server:
        async with attached(server, engine) as kv:
            assert (await kv.swap_out(KEYS, engine.fill(KEYS, range(12)))).num_pinned == 12
            await kv.store(prompt(20, seed=1), engine.fill(prompt(20, seed=1), range(20)))
            assert (await kv.swap_in(KEYS, engine.spec(range(12)))).num_blocks == 12
            assert engine.count_right(KEYS, range(12)) == 12
            assert kv.stats().pinned_bytes == 0


async def test_an_event_that_never_comes_ends_at_the_deadline(tmp_path: Path) -> None:
    """A load whose blocks are in use for good writes to none of them, and lets go of its slots."""
    engine, never = AnyEngine(), threading.Event()
    with serving(tmp_path, cpu(24)) as server:
        async with attached(server, engine) as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(12)))
            engine.wipe()
            loaded = await kv.load(KEYS, engine.spec(range(12)), after=never, deadline_s=0.2)
            assert loaded.num_blocks == engine.count_right(KEYS, range(12)) == 0
            await until(lambda: kv.stats()["cpu"].leased == 0)
            never.set()


async def test_a_cancelled_load_touches_nothing_any_more(tmp_path: Path) -> None:
    """Once the cancellation is raised the blocks are the caller's, whatever the server asks for later."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(4), memory(), nvme(tmp_path / "disk")) as server:
        async with attached(server, engine) as kv:
            keys = prompt(40)
            await (await kv.store(keys, engine.fill(keys, range(40)))).settled()
            for steps in range(6):
                task = asyncio.ensure_future(kv.load(keys, engine.spec(range(40))))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                engine.wipe()
                await kv.lookup(keys)
                assert engine.count_right(keys, range(40)) == 0
            await until(lambda: kv.stats().transfers == 0)
            assert not any(tier.leased or tier.pending for tier in kv.stats().tiers)


async def test_models_keep_to_themselves_and_share_the_tiers(tmp_path: Path) -> None:
    """Another model's blocks are not found, and the first one's share shrinks for it; its blocks stay on the disk."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(32), nvme(tmp_path / "disk")) as server:
        async with attached(server, engine) as kv:
            await (await kv.store(KEYS, engine.fill(KEYS, range(12)))).settled()
            assert kv.stats()["cpu"].num_slots == 32
            async with attached(server, model=ModelIdentity("another", weights="w0")) as other:
                assert (await other.lookup(KEYS)).num_blocks == 0
                assert (other.stats()["cpu"].num_slots, kv.stats()["cpu"].num_slots) == (16, 16)
                assert (await kv.lookup(KEYS)).num_blocks == 12


async def test_layouts_of_one_model_keep_to_themselves(tmp_path: Path) -> None:
    """Engines of other block sizes or data types attach at once; each finds its own blocks, and no other."""
    bytes_of = KVLayout((KVGroup(2, 1, 48, "float32", 4),)), KVLayout((KVGroup(2, 1, 48, "bfloat16", 8),))
    engines = [AnyEngine(), *map(AnyEngine, bytes_of)]
    with serving(tmp_path, {"medium": "cpu", "capacity": "1MiB"}) as server:
        async with AsyncExitStack() as stack:
            for number, engine in enumerate(engines):
                kv = await stack.enter_async_context(attached(server, engine))
                keys = prompt(6, block_size=engine.layout.groups[0].block_size)
                assert (await kv.lookup(keys)).num_blocks == 0
                await kv.store(keys, engine.fill(keys, range(6), f"{number}"))
                assert (await kv.load(keys, engine.spec(range(6, 12)))).num_blocks == 6
                assert engine.count_right(keys, range(6, 12), f"{number}") == 6
        assert len(server.health()["shares"]) == 3


async def test_shares_are_the_same_after_a_restart(tmp_path: Path) -> None:
    """Models that an earlier server has left on the disk count once: what was a half is a half."""
    disk, another = nvme(tmp_path / "disk"), ModelIdentity("another", weights="w0")
    for _ in range(2):
        with serving(tmp_path, cpu(32), disk) as server:
            async with attached(server) as kv, attached(server, model=another) as other:
                assert (kv.stats()["cpu"].num_slots, other.stats()["cpu"].num_slots) == (16, 16)


async def test_what_others_keep_beside_the_models_is_not_touched(tmp_path: Path) -> None:
    """A directory of theirs may have any name: it is no model's, and is never reclaimed."""
    foreign = tmp_path / "disk" / ("0123456789abcdef" * 2)
    foreign.mkdir(parents=True, mode=0o700)
    (tmp_path / "disk").chmod(0o700)
    (foreign / "theirs").write_text("kept")
    with serving(tmp_path, cpu(32), nvme(tmp_path / "disk")) as server:
        async with attached(server):
            assert [share["directory"] for share in server.health()["shares"]] != [foreign.name]
            assert len(server.health()["shares"]) == 1
    assert (foreign / "theirs").read_text() == "kept"


async def test_ranks_have_parts_and_a_scheduler_sees_all(tmp_path: Path) -> None:
    """A block is there for a scheduler once every rank has stored its part."""
    engines = [AnyEngine(), AnyEngine()]
    with serving(tmp_path, cpu(64)) as server:
        async with (
            attached(server, shard=Shard.every(2)) as scheduler,
            attached(server, engines[0], shard=Shard(0, 2)) as one,
            attached(server, engines[1], shard=Shard(1, 2)) as two,
        ):
            for rank, kv in enumerate((one, two)):
                assert (await scheduler.lookup(KEYS)).num_blocks == 0
                await kv.store(KEYS, engines[rank].fill(KEYS, range(12), f"rank {rank}"))
            assert (await scheduler.lookup(KEYS)).num_blocks == 12
            assert (await two.load(KEYS, engines[1].spec(range(12)))).num_blocks == 12
            assert engines[1].count_right(KEYS, range(12), "rank 1") == 12
            assert [scheduler.namespace(rank=rank) for rank in range(2)] == [one.namespace(), two.namespace()]
            assert (await scheduler.lookup_groups([full(KEYS)])).num_tokens == 48
            with pytest.raises(ConfigurationError, match="an int, 0 or more"):
                scheduler.namespace(group="0")  # type: ignore[arg-type]  # wrong on purpose
            with pytest.raises(ConfigurationError, match="2 ranks"):
                scheduler.register_kv_caches(engines[0].caches[0])
            with pytest.raises(ConfigurationError, match="2 ranks"):
                await scheduler.load(KEYS, engines[0].spec(range(12)))
            with pytest.raises(ConfigurationError, match="2 ranks"):
                await scheduler.store(KEYS, engines[0].spec(range(12)))


async def test_a_reader_changes_nothing(tmp_path: Path) -> None:
    """A read-only client loads; its stores are dropped, its evictions refused, and it cannot write the memory."""
    engine, reading = AnyEngine(), AnyEngine()
    with serving(tmp_path, cpu(24)) as server:
        async with attached(server, engine) as kv, attached(server, reading, read_only=True) as reader:
            await kv.store(KEYS, engine.fill(KEYS, range(12)))
            assert (await reader.load(KEYS, reading.spec(range(12)))).num_blocks == 12
            assert reading.count_right(KEYS, range(12)) == 12
            dropped = await reader.store(prompt(2, seed=1), reading.spec(range(2)))
            assert dropped.drop_reasons == {"read only": 2}
            with pytest.raises(ConfigurationError, match="read-only"):
                await reader.evict(KEYS)
            assert (await kv.lookup(KEYS)).num_blocks == 12


async def test_one_client_cannot_have_all(tmp_path: Path) -> None:
    """Beyond its limits a client's loads bring nothing and its stores are dropped; others are served."""
    engine, other = AnyEngine(), AnyEngine()
    host = {"loads_per_client": 1, "stores_per_client": 2, "leases_per_client": 1, "bytes_per_client": 2 * STRIDE}
    with serving(tmp_path, cpu(24), host=host) as server:
        async with attached(server, engine) as kv, attached(server, other) as neighbour:
            storing = kv.start_store(KEYS, engine.fill(KEYS, range(12)), layerwise=True)
            refused = await kv.store(prompt(1, seed=1), engine.spec([20]))
            assert refused.drop_reasons == {"too many stores": 1}
            assert (await neighbour.store(prompt(1, seed=1), other.spec([0]))).num_stored == 1
            for layer in range(2):
                storing.store_layer(layer)
            assert (await storing).num_stored == 12
            assert (await kv.load(KEYS, engine.spec(range(12)))).num_blocks == 12
            async with kv.lease(KEYS[:2]) as one, kv.lease(KEYS[2:4]) as two:
                assert (one.num_blocks, two.num_blocks) == (2, 0)


async def test_another_version_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Client and server of two versions name both, and the server goes on."""
    with serving(tmp_path, cpu(24)) as server:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(os.fspath(server.path))
            stranger.sendall(wire.greeting()[:6] + (wire.VERSION + 1).to_bytes(2, "little"))
            assert stranger.recv(100) == wire.greeting()
            assert stranger.recv(100) == b""
        said = [each.getMessage() for each in caplog.records if each.getMessage().startswith("host.version_refused")]
        assert [each.endswith(f"theirs={wire.VERSION + 1} ours={wire.VERSION}") for each in said] == [True]
        monkeypatch.setattr(wire, "version_in", lambda _: wire.VERSION + 1)
        with pytest.raises(ConfigurationError, match=rf"version {wire.VERSION + 1} .* version {wire.VERSION}"):
            async with attached(server):
                pass


async def test_what_cannot_be_a_message_ends_its_sender_alone(tmp_path: Path) -> None:
    """Garbage, a frame that is too long, and silence harm nobody else."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(24)) as server:
        async with attached(server, engine) as kv:
            for said in (
                b"GET / HTTP/1.1\r\n\r\n",
                wire.greeting() + b"\xff" * 64,
                wire.greeting() + b"\3\0\0\0abc",
                b"",
            ):
                with socket.socket(socket.AF_UNIX) as stranger:
                    stranger.connect(os.fspath(server.path))
                    stranger.sendall(said)
            await kv.store(KEYS, engine.fill(KEYS, range(12)))
            assert (await kv.load(KEYS, engine.spec(range(12)))).num_blocks == 12


async def test_a_client_that_talks_nonsense_keeps_what_it_holds_until_it_goes(tmp_path: Path) -> None:
    """It is told that nothing comes any more; it may be copying, so its slots wait for its goodbye or its end."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(24)) as server:
        async with attached(server, engine) as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(12)))
            opening = Attach.of("stranger", MODEL, SMALL, (Shard(),), is_read_only=False)
            connection, _, descriptors = await asyncio.to_thread(handshake.begin, os.fspath(server.path), opening, 10.0)
            said = Keys.of(KEYS, kv.namespace().epoch)
            connection.sendall(wire.frame(protocol.Lease(1, said)))
            await until(lambda: kv.stats()["cpu"].leased == 12)
            connection.sendall(b"\3\0\0\0abc")
            while await asyncio.to_thread(connection.recv, 4096):
                pass
            assert kv.stats()["cpu"].leased == 12
            handshake.give_back(connection, descriptors)
            assert (await kv.evict(KEYS)).num_blocks == 12


async def test_what_is_too_long_to_say_is_refused_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next questions of threads that wait are answered: none waits for what never came."""
    engine, long = AnyEngine(), prompt(24)
    with serving(tmp_path, cpu(24)) as server:
        async with attached(server, engine) as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(12)))
            monkeypatch.setattr(wire, "MOST_FRAME_BYTES", 700)
            loaded = await kv.load(long, engine.spec(range(24)))
            assert (loaded.num_blocks, loaded.faults[0].reason) == (0, Reason.TOO_MANY_KEYS)
            assert kv.lookup_nowait(KEYS).num_blocks == 12
            with pytest.raises(ConfigurationError, match="fewer keys"):
                kv.membership(long)
            assert kv.lookup_nowait(KEYS).num_blocks == 12


async def test_as_many_attach_at_once_as_there_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is being told that it is attached is one, not two."""
    send_opened, told = handshake.send_opened, list[asyncio.Event]()

    async def late(connection: socket.socket, answer: protocol.Opened, *descriptors: Any) -> None:  # noqa: ANN401 - as it is called
        if isinstance(answer, Attached):
            told.append(asyncio.Event())
            if len(told) == 1:
                async with asyncio.timeout(30):
                    await told[0].wait()
            told[0].set()
        await send_opened(connection, answer, *descriptors)

    monkeypatch.setattr(handshake, "send_opened", late)
    with serving(tmp_path, cpu(32), host={"clients": 2}) as server:
        async with AsyncExitStack() as stack:
            first = asyncio.ensure_future(stack.enter_async_context(attached(server, AnyEngine())))
            await until(lambda: len(told) == 1)
            await stack.enter_async_context(attached(server, AnyEngine()))
            await first


async def test_a_server_that_dies_as_one_attaches_is_away(tmp_path: Path) -> None:
    """A connection that ends before it began says nothing against either side: another server may come."""
    with socket.socket(socket.AF_UNIX) as dying:
        dying.bind(os.fspath(tmp_path / "kv.sock"))
        dying.listen()

        def die() -> None:
            connection, _ = dying.accept()
            connection.sendall(wire.greeting())
            connection.recv(wire.GREETING_BYTES)
            connection.recv(4096)
            connection.close()

        thread = threading.Thread(target=die)
        thread.start()
        with pytest.raises(BackendUnavailableError, match="closed the connection"):
            await asyncio.to_thread(handshake.begin, os.fspath(tmp_path / "kv.sock"), Health(), 60.0)
        thread.join()


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ("nothing", "No such file or directory: 'tiered-kv serve' starts one"),
        ("a file", "Connection refused: it is no socket"),
        ("a dead server's socket", "Connection refused: 'tiered-kv serve' starts one"),
    ],
)
def test_where_nobody_listens_it_says_what_to_do(there: str, said: str, tmp_path: Path) -> None:
    """Whatever is at the path that a client was given."""
    path = tmp_path / "kv.sock"
    if there == "a file":
        path.touch()
    elif there == "a dead server's socket":
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(os.fspath(path))
    with pytest.raises(BackendUnavailableError, match=f"^no server at .*kv.sock: {said}$"):
        TieredKVServer.health_at(path)


async def test_a_second_server_is_refused(tmp_path: Path) -> None:
    """One server a socket; a socket that a dead one has left is taken over."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(tmp_path / "kv.sock"))
    with serving(tmp_path, cpu(24)) as server:
        assert server.health()["is_ready"]
        with pytest.raises(ConfigurationError, match="another server"), serving(tmp_path, cpu(24)):
            pass


@pytest.mark.parametrize("num_bytes", [99, 103, 107])
async def test_a_path_as_long_as_one_may_be(num_bytes: int) -> None:
    """The system takes 107 bytes; whatever the server makes on its way there fits too, and nothing of it stays."""
    with TemporaryDirectory(prefix="kv-", dir="/tmp") as folder:
        path = Path(folder) / ("s" * (num_bytes - len(folder) - 1))
        with serving(Path(folder), cpu(24), host={"socket": path}) as server:
            async with attached(server) as kv:
                assert (await kv.lookup(KEYS)).num_blocks == 0
        assert os.listdir(folder) == [f"{path.name}.lock"]  # noqa: PTH208 - names


async def test_a_server_records_no_trace(tmp_path: Path) -> None:
    """What is asked for and cannot be is said at the start."""
    settings = {"tiers": [cpu(8)], "record_trace": str(tmp_path / "trace"), "host": {"socket": tmp_path / "s"}}
    with pytest.raises(ConfigurationError, match="record_trace"):
        TieredKVServer(settings)


@contextmanager
def answering(path: Path, answer: Callable[[Any], wire.Message], *, is_last: bool = False) -> Iterator[list[object]]:
    """Have a server with memory for one block listen at ``path`` for one client, whose first request has this answer.

    If that ``is_last`` the server is gone with it. Yields what it hears after that.
    """
    slab, heard = Slab("slab", 1, STRIDE, SMALL.groups[0].payload_bytes, 0, 0), list[object]()
    attached_as = wire.frame(Attached(b"", (slab,), "none", (), (), 600.0, 600.0, 0, 4096, is_read_only=False))
    memory = os.memfd_create("slab")
    os.ftruncate(memory, STRIDE)

    def answer_once() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(wire.greeting())
            connection.recv(wire.GREETING_BYTES)
            hear(connection)
            socket.send_fds(connection, [attached_as], [memory])
            os.close(memory)
            connection.sendall(wire.frame(answer(protocol.request_from(hear(connection)))))
            while not is_last and (said := hear(connection)):
                heard.append(protocol.request_from(said))

    def hear(connection: socket.socket) -> bytes:
        if not (size := connection.recv(wire.LENGTH.size, socket.MSG_WAITALL)):
            return b""
        return connection.recv(wire.LENGTH.unpack(size)[0], socket.MSG_WAITALL)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        thread = threading.Thread(target=answer_once)
        thread.start()
        yield heard
        thread.join()


async def test_an_answer_that_cannot_be_is_none(tmp_path: Path) -> None:
    """Of the right type, but not of this call: as if the server had not answered."""
    found = protocol.Found(1, (("cpu", 0, 1),), 1, 4, {}, 0, (None, None))
    with answering(tmp_path / "kv.sock", lambda asked: protocol.Answered(asked.id, wire.encoded(found))):
        async with attached(tmp_path / "kv.sock") as kv:
            assert (await kv.lookup(KEYS)).num_blocks == 0


async def test_a_lease_whose_server_is_gone_as_its_answer_is_taken_is_of_nothing(tmp_path: Path) -> None:
    """The loop's thread hears both while it waits for another answer: what was leased is nobody's memory any more."""
    path, said = tmp_path / "kv.sock", bytes(8)  # one slot
    with answering(path, lambda asked: protocol.Leased(asked.id, "slab", said), is_last=True):
        async with attached(path) as kv:

            async def lease() -> int:
                async with kv.lease(KEYS) as held:
                    return held.num_blocks

            leasing = asyncio.ensure_future(lease())
            await asyncio.sleep(0)
            assert not (kv.membership(KEYS) == BlockState.HIT).any()
            assert await leasing == 0


@pytest.mark.parametrize(("pool", "slots"), [("slab", b"\1" * 8), ("slab", b"1"), ("another", bytes(8))])
async def test_a_lease_of_slots_that_are_not_there_is_of_nothing(pool: str, slots: bytes, tmp_path: Path) -> None:
    """Past the end of what the server has passed on, of no number, of other memory; and the server hears its end."""
    number = []

    def lease(asked: protocol.Lease) -> protocol.Leased:
        number.append(asked.id)
        return protocol.Leased(asked.id, pool, slots)

    with answering(tmp_path / "kv.sock", lease) as heard:
        async with attached(tmp_path / "kv.sock") as kv:
            async with kv.lease(KEYS) as held:
                assert held.num_blocks == 0
            await until(lambda: protocol.Cancel(number[0]) in heard)


async def test_who_waits_for_a_lease_as_the_client_closes_within_another_gets_none(tmp_path: Path) -> None:
    """The server, which keeps what is leased yet, answers nothing more; at the end of the block it hears a goodbye."""
    with answering(tmp_path / "kv.sock", lambda asked: protocol.Leased(asked.id, "slab", bytes(8))) as heard:
        async with attached(tmp_path / "kv.sock", timeout_s=60.0) as kv:

            async def lease() -> int:
                async with kv.lease(KEYS) as held:
                    return held.num_blocks

            async with kv.lease(KEYS) as held:
                leasing = asyncio.ensure_future(lease())
                await until(lambda: any(isinstance(each, protocol.Lease) for each in heard))
                await kv.aclose()
                assert await leasing == 0
                assert (held.num_blocks, protocol.Bye() in heard) == (1, False)
            await until(lambda: protocol.Bye() in heard)


async def test_a_load_ends_when_its_server_says_of_it_what_cannot_be(tmp_path: Path) -> None:
    """At once, as if the server had gone: nothing more is heard of this one."""
    engine, part = AnyEngine(), protocol.Part("slab", b"part of a slot", b"part of an id")
    with answering(tmp_path / "kv.sock", lambda asked: protocol.Copy(asked.id, 0, (part,), {})):
        async with attached(tmp_path / "kv.sock", engine, timeout_s=60.0) as kv:
            loaded = await kv.start_load(KEYS, engine.spec(range(12)), order="back")
            assert loaded.missed_because == Reason.SERVER_AWAY


@pytest.mark.parametrize("group", [1, -1])
async def test_a_server_of_other_kv_groups_is_refused(group: int, tmp_path: Path) -> None:
    """As one whose slots are of another size is; of what came with its answer nothing stays open."""
    path, payload_bytes = tmp_path / "kv.sock", SMALL.groups[0].payload_bytes
    slabs = (protocol.Slab("slab", 1, 4096, payload_bytes, group, 0),)
    said = wire.frame(Attached(b"", slabs, "none", (), (), 600.0, 600.0, 0, 4096, is_read_only=False))
    given, theirs = os.pipe()

    def answer_once() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(wire.greeting())
            socket.send_fds(connection, [said], [theirs])
            os.close(theirs)
            while connection.recv(4096):
                pass

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        thread = threading.Thread(target=answer_once)
        thread.start()
        with pytest.raises(ConfigurationError, match="KV group"):
            async with attached(path):
                pass
        thread.join()
    assert os.read(given, 1) == b""  # nobody has the other end
    os.close(given)


async def test_a_server_whose_codec_is_not_known_here_leaves_no_thread() -> None:
    """A client of it does not open, and may be made again and again."""
    there = Attached(b"", (), "another", (), (), 1.0, 1.0, 0, 4096, is_read_only=False)
    before = threading.enumerate()
    with pytest.raises(ConfigurationError, match="codec"):
        FarSide("cpu", SMALL, (Shard(),), print, there, LoopCalls(asyncio.get_running_loop()))
    assert threading.enumerate() == before


async def test_the_end_of_a_connection_is_looked_at_once() -> None:
    """While copies keep it open the event loop is not woken for it again and again."""
    loop, lost = asyncio.get_running_loop(), asyncio.Event()
    ours, theirs = socket.socketpair()
    ours.settimeout(0.0)
    line = Line(ours, LoopCalls(loop), print)
    line.start(lost.set)
    theirs.close()
    await lost.wait()
    assert not loop.remove_reader(ours)
    line.close()


class SocketWithoutRoom(socket.socket):
    """Of a system that has no memory for what is sent."""

    def send(self, *_: object) -> int:
        """Send nothing."""
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))


async def test_a_connection_on_which_a_message_is_lost_ends() -> None:
    """On both sides: what came after it would be taken for the rest of it, and what it says would never be heard."""
    lost, (ours, theirs) = asyncio.Event(), socket.socketpair()
    with theirs, SocketWithoutRoom(fileno=ours.detach()) as without_room:
        without_room.settimeout(0.0)
        line = Line(without_room, LoopCalls(asyncio.get_running_loop()), print)
        line.start(lost.set)
        line.send(protocol.Cancel(1))
        await lost.wait()
        assert theirs.recv(1) == b""
        line.close()


async def test_a_server_that_answers_a_part_of_a_call_is_not_silent() -> None:
    """Little of the call's time may be left for the next part: only who says nothing in all of it is."""
    there = Attached(b"", (), "none", (), (), 1.0, 1.0, 0, 4096, is_read_only=False)
    loop_calls, (ours, theirs) = LoopCalls(asyncio.get_running_loop()), socket.socketpair()
    ours.settimeout(0.0)
    with theirs:
        attachment = Attachment("", ours, there, [], CPUDevice(), loop_calls, print, 1.0, emit=print)
        since = time.monotonic()

        def answer_one() -> None:
            theirs.recv(1)
            theirs.sendall(wire.frame(Answered(1, wire.encoded(None))))

        answering = asyncio.ensure_future(asyncio.to_thread(answer_one))
        assert await asyncio.to_thread(attachment.ask_now, protocol.Ping, 60.0, since) is not None
        await answering
        assert await asyncio.to_thread(attachment.ask_now, protocol.Ping, 0.001, since) is None
        assert not attachment.is_silent
        assert await asyncio.to_thread(attachment.ask_now, protocol.Ping, 0.001, time.monotonic()) is None
        assert attachment.is_silent
        attachment.end()


async def test_what_a_server_fails_at_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is raised there: who waits for as long as the server is there would wait for good."""

    async def prefetch(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of the server's")

    with serving(tmp_path, cpu(24)) as server:
        async with attached(server) as kv:
            monkeypatch.setattr(TierCalls, "prefetch", prefetch)
            with anyio.fail_after(30):
                assert (await kv.prefetch(KEYS)).num_blocks == 0


@pytest.mark.parametrize("num_descriptors", [0, 2])
async def test_a_server_that_passes_on_a_wrong_number_of_slabs(num_descriptors: int, tmp_path: Path) -> None:
    """It is broken, and said to be; what came is closed."""
    slab = Slab("slab", 1, 4096, 4096, 0, 0)
    answer = wire.frame(Attached(b"", (slab,), "none", (), (), 1.0, 1.0, 0, 4096, is_read_only=False))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(tmp_path / "kv.sock"))
        listener.listen()
        before = num_open_in(Path("/dev/null"))

        def answer_wrongly() -> None:
            connection, _ = listener.accept()
            with connection, Path(os.devnull).open("rb") as given:
                connection.sendall(wire.greeting())
                connection.recv(wire.GREETING_BYTES)
                connection.recv(4096)
                socket.send_fds(connection, [answer], [given.fileno()] * num_descriptors)

        thread = threading.Thread(target=answer_wrongly)
        thread.start()
        with pytest.raises(ConfigurationError, match=f"1 slabs and {num_descriptors} descriptors"):
            async with attached(tmp_path / "kv.sock"):
                pass
        thread.join()
        assert num_open_in(Path("/dev/null")) == before


async def test_a_prefetch_to_no_tier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is refused when it is asked for, as by a cache of one's own, and no task has crashed."""
    with serving(tmp_path, cpu(24), nvme(tmp_path / "disk")) as server:
        async with attached(server) as kv:
            for to in ("nope", "nvme"):
                with pytest.raises(ConfigurationError, match=f"here: cpu; not '{to}'"):
                    kv.prefetch(KEYS, to=to)
            assert (await kv.prefetch(KEYS)).num_blocks == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.both_loops
async def test_a_prefetch_that_is_cancelled_at_once_has_an_answer(tmp_path: Path) -> None:
    """As one of a cache of one's own has, which is as open as this one; and the next one is heard."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(24)) as server:
        async with attached(server, engine) as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(12)))
            prefetching = kv.prefetch(KEYS)
            prefetching.cancel()
            assert (await prefetching).num_moved == 0
            assert (await kv.prefetch(KEYS)).num_blocks == 12


@pytest.mark.both_loops
async def test_a_prefetch_that_the_closing_overtakes_has_an_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes to what it would while no server is there, and nothing is said to have crashed."""
    with serving(tmp_path, cpu(24)) as server:
        async with attached(server) as kv:
            prefetching = kv.prefetch(KEYS)
        assert await prefetching == PrefetchResult(0, 0, (TierFault("host", Reason.SERVER_AWAY, 12),))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_tiers_are_known_while_no_server_is_there(tmp_path: Path) -> None:
    """Those of the last one: a name of none of them is said to be wrong, as while it was there, and is no miss."""
    with serving(tmp_path, cpu(24), nvme(tmp_path / "disk")) as server:
        client = attached(server)
        kv = await client.__aenter__()
    await until(lambda: not kv.is_attached)
    assert kv.media == {"cpu": "cpu", "nvme": "nvme"}
    with pytest.raises(ConfigurationError, match="here: cpu; not 'nope'"):
        kv.prefetch(KEYS, to="nope")
    with pytest.raises(ConfigurationError, match="no tier 'nope' here; there are cpu, nvme"):
        kv.membership(KEYS, tier="nope")
    with pytest.raises(ConfigurationError, match="no tier 'nope' here; there are cpu, nvme"):
        await kv.evict(KEYS, tier="nope")
    assert not (await kv.prefetch(KEYS)).num_blocks
    assert not kv.membership(KEYS, tier="nvme").any()
    await client.__aexit__(None, None, None)


async def test_an_attempt_to_attach_again_is_made_again_however_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its pauses are those of any: a server that is about to end, or a lack of descriptors, is no other case."""
    begin = Attempts.begin
    left = [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), ClosedError("ends"), CapacityError("full")]

    async def fails(attempts: Attempts) -> Begun:
        if left:
            raise left.pop()
        return await begin(attempts)

    with serving(tmp_path, cpu(24)) as server:
        client = attached(server)
        kv = await client.__aenter__()
    await until(lambda: not kv.is_attached)
    monkeypatch.setattr(Attempts, "begin", fails)
    with serving(tmp_path, cpu(24)):
        await until(lambda: kv.is_attached)
        await client.__aexit__(None, None, None)
    assert not left
    assert "background.failed" not in caplog.text


class Near(CPUDevice):
    """A device for which host memory is got ready."""

    kind = "near"


async def test_a_client_tells_what_becomes_of_its_blocks(tmp_path: Path) -> None:
    """Events of stores that are settled, of prefetches, and of memory that is ready, as of a cache of one's own."""
    engine, recorder = AnyEngine(), Recorder()
    with serving(tmp_path, cpu(24), nvme(tmp_path / "disk")) as server:
        async with attached(server, engine, emit=recorder, device=Near()) as kv:
            stored = await kv.store(KEYS, engine.fill(KEYS, range(12)))
            await stored.settled()
            await kv.evict(KEYS, tier="cpu")
            await kv.prefetch(KEYS)
            await until(lambda: bool(recorder.of(HostMemoryReady)))
            await until(lambda: bool(recorder.of(BlocksSettled)))
    assert recorder.of(BlocksSettled) == [BlocksSettled({"cpu": 12, "nvme": 12}, {})]
    assert [(each.blocks, each.moved, each.target) for each in recorder.of(BlocksPrefetched)] == [(12, 12, "cpu")]


async def test_nothing_but_a_socket_is_replaced(tmp_path: Path) -> None:
    """A file at the socket's path is refused, and stays as it is; so is a path without a directory."""
    precious = tmp_path / "kv.sock"
    precious.write_text("mine")
    with pytest.raises(ConfigurationError, match="something else than a socket"), serving(tmp_path, cpu(24)):
        pass
    assert precious.read_text() == "mine"
    with pytest.raises(ConfigurationError, match="there is no directory"), serving(tmp_path / "none", cpu(24)):
        pass


async def test_a_socket_may_have_any_name(tmp_path: Path) -> None:
    """What has a meaning in a URL has none there."""
    with serving(tmp_path, cpu(24), host={"socket": tmp_path / "kv?#%41.sock"}) as server:
        for url in (f"unix://{server.path}", f"unix:{server.path}"):  # the latter as the page's address is written
            async with TieredKV.connect(url, model=MODEL, layout=SMALL, device="cpu") as kv:
                assert kv.stats().tiers


@pytest.mark.parametrize("name", ["k" * 108, "k\0v", "k\ud800v"])
def test_a_socket_that_cannot_be_is_not_waited_for(name: str) -> None:
    """Nobody can serve there, however long a client tries."""
    with pytest.raises(ConfigurationError, match="the path of a socket has 107 bytes at most"):
        TieredKV.connect(f"unix:///{name}", model=MODEL, layout=SMALL)


async def test_a_model_that_takes_too_much_to_say_is_refused(tmp_path: Path) -> None:
    """A server hangs up on it without a word, which looks as if none were there."""
    told = ModelIdentity("model", weights="w0", extra=(("settings", "x" * (1 << 18)),))
    with serving(tmp_path, cpu(24)) as server, pytest.raises(ConfigurationError, match="to attach with, 262144 at"):
        async with attached(server, model=told):
            pass


@pytest.mark.parametrize(
    "url", ["/run/kv.sock", "tcp://host/kv", "unix://", "unix://kv.sock", "unix:kv.sock", "unix:", 7]
)
def test_an_address_that_is_none(url: str) -> None:
    """What is no address of a server is refused before anything is tried."""
    with pytest.raises(ConfigurationError, match="unix:///run"):
        TieredKV.connect(url, model=MODEL, layout=SMALL)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"timeout_s": None}, "timeout_s must be a number of seconds, 0 or more, got None"),
        ({"name": 5}, "name must be text, and read_only a bool, got 5 and False"),
        ({"read_only": None}, "name must be text, and read_only a bool, got '' and None"),
    ],
)
def test_what_a_server_could_not_read_is_refused_before_it_is_asked(wrong: dict[str, Any], why: str) -> None:
    """It would close the connection, as of no client, and say nothing."""
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        TieredKV.connect("unix:///run/kv.sock", model=MODEL, layout=SMALL, **wrong)


@pytest.mark.parametrize("name", ["caf\udce9", "n" * (1 << 18)], ids=["bytes", "long"])
async def test_a_client_is_served_whatever_it_calls_itself(tmp_path: Path, name: str) -> None:
    """Its name is for people: by default that of a program, of which a file system may have any bytes."""
    with serving(tmp_path, cpu(16)) as server:
        async with TieredKV.connect(f"unix://{server.path}", model=MODEL, layout=SMALL, name=name) as kv:
            assert kv.is_attached


@pytest.mark.parametrize("timeout_s", [math.inf, 1e10])
async def test_a_client_may_wait_for_good(tmp_path: Path, timeout_s: float) -> None:
    """No time is too long for a socket."""
    with serving(tmp_path, cpu(16)) as server:
        async with TieredKV.connect(f"unix://{server.path}", model=MODEL, layout=SMALL, timeout_s=timeout_s) as kv:
            assert (await kv.lookup(KEYS)).num_blocks == 0


@pytest.mark.parametrize("tier", [{"medium": "gpu", "capacity": STRIDE}, {"medium": "cpu", "capacity": 0}])
async def test_tiers_that_a_server_cannot_have(tier: dict[str, object], tmp_path: Path) -> None:
    """A GPU is an engine's own, and blocks pass through the CPU tier: said before it listens."""
    settings = {
        "tiers": [tier, *([cpu(8)] if tier["medium"] == "gpu" else [memory()])],
        "host": {"socket": tmp_path / "s"},
    }
    with pytest.raises(ConfigurationError, match="a server"):
        async with TieredKVServer(settings):
            pass


async def test_a_server_that_ends_begins_nothing_more(tmp_path: Path) -> None:
    """While it waits for what is under way it answers that it is about to end: nothing is moved in what is closed."""
    engine, computed = AnyEngine(), threading.Event()
    settings = {"tiers": [cpu(24)], "host": {"socket": tmp_path / "kv.sock"}}
    async with TieredKVServer(settings, emit=Recorder()) as server, attached(server, engine) as kv:
        await kv.store(KEYS, engine.fill(KEYS, range(12)))
        storing = kv.start_store(prompt(4, seed=1), engine.spec(range(12, 16)), after=computed)
        await until(lambda: server.health()["clients"][0]["copies"] == 1)
        closing = asyncio.create_task(server.aclose())
        await until(lambda: not server.health()["is_ready"])
        loaded = await kv.load(KEYS, engine.spec(range(16, 28)))
        assert loaded.faults == (TierFault("host", Reason.SERVER_ENDING, 12),)
        dropped = await kv.store(prompt(4, seed=2), engine.spec(range(4)))
        assert dropped.drop_reasons == {Reason.SERVER_ENDING: 4}
        assert await dropped.settled() == ()
        assert kv.is_attached
        computed.set()
        await storing
        await closing


async def test_an_end_that_was_wanted_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who leaves has not lost the server: an operator is told of what went wrong alone."""
    with serving(tmp_path, cpu(16)) as server:
        async with attached(server, AnyEngine()):
            pass
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


async def test_a_lookup_asks_what_the_server_does_not_own(tmp_path: Path) -> None:
    """What is in none of its own tiers is found in another, though that has to be waited for."""
    engine, keys = AnyEngine(), prompt(8)
    with serving(tmp_path, cpu(64), memory()) as server:
        async with attached(server, engine) as kv:
            await (await kv.store(keys, engine.fill(keys, range(8)))).settled()
            await kv.evict(keys, tier="cpu")
            found = await kv.lookup(keys)
            assert [(run.tier, run.start, run.stop) for run in found.runs] == [("memory", 0, 8)]
            assert kv.lookup_nowait(keys).num_blocks == 0


async def test_what_a_client_that_drains_drops_is_told_as_of_a_cache_that_drains(tmp_path: Path) -> None:
    """The same result, the same tiers, the same events, and no sooner."""
    seen = list[tuple[list[object], ...]]()

    async def refused(kv: BlockCache, engine: AnyEngine, recorder: Recorder) -> None:
        assert await kv.drain()
        stored = await kv.store(KEYS, engine.spec(range(12)))
        tiers = await stored.settled()
        await until(lambda: bool(recorder.of(BlocksSettled)))
        seen.append(([stored.drop_reasons], [*tiers], [*recorder.of(BlocksSettled)]))

    engine, recorder = AnyEngine(), Recorder()
    with serving(tmp_path, cpu(24), nvme(tmp_path / "disk")) as server:
        async with attached(server, engine, emit=recorder) as kv:
            await refused(kv, engine, recorder)
    engine, recorder = AnyEngine(), Recorder()
    async with open_any(engine, cpu(24), nvme(tmp_path / "other"), emit=recorder) as own:
        await refused(own, engine, recorder)
    assert seen[0] == seen[1]
    assert seen[0][2] == [BlocksSettled({"cpu": 0, "nvme": 0}, {"cpu": 12, "nvme": 12})]


async def test_what_a_client_that_drains_drops_is_in_its_own_statistics(tmp_path: Path) -> None:
    """As in those of a cache that drains; the server never hears of it."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(32)) as server:
        async with attached(server, engine) as kv, attached(server) as other:
            await kv.store(KEYS, engine.fill(KEYS, range(12)))
            assert await kv.drain()
            await kv.store(prompt(4, seed=1), engine.spec(range(12, 16)))
            stats = kv.stats()
            assert (stats.store_requested, stats.stored, stats.dropped) == (16, 12, 4)
            assert stats.dropped_because == {Reason.DRAINING: 4}
            assert other.stats().dropped == 0
