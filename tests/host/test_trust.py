"""Who may attach, what the server knows of them, and what one of them may have: as the documentation says."""

import asyncio
import fcntl
import logging
import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from tests.support.any_layout import LIMITS, MODEL, SMALL, STRIDE, AnyEngine, cpu, prompt
from tests.support.caches import until
from tests.support.serving import attached, serving
from tiered_kv import CacheLimits, ConfigurationError, Shard, Worker
from tiered_kv.host import handshake, protocol, wire
from tiered_kv.host.asked_calls import CALLS
from tiered_kv.host.protocol import Attach, Attached, MapSlab

KEYS = prompt(8)
LONG = prompt(24, seed=50)


async def test_the_socket_has_the_mode_and_the_group_that_were_asked_for(tmp_path: Path) -> None:
    """They decide who may attach; nobody sees the socket before it has them."""
    group = 4711 if os.geteuid() == 0 else os.getgid()
    with serving(tmp_path, cpu(8), host={"mode": "620", "group": str(group)}) as server:
        about = server.path.stat()
        assert stat.S_IMODE(about.st_mode) == 0o620
        assert about.st_gid == group


def test_a_socket_that_nobody_may_use_is_not_left(tmp_path: Path) -> None:
    """Where it cannot be given its group: not under the name that it had until then either."""
    with (
        pytest.raises(ConfigurationError, match="no group"),
        serving(tmp_path, cpu(8), host={"group": "no-such-group"}),
    ):
        pass
    assert [each for each in tmp_path.iterdir() if each.is_socket()] == []


async def test_whose_process_attaches_is_logged_and_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the system says it, beside what the client calls itself."""
    caplog.set_level(logging.INFO, "tiered_kv")
    name = f"engine (process {os.getpid()}, user {os.getuid()})"
    with serving(tmp_path, cpu(8)) as server:
        async with attached(server, name="engine"):
            assert [each["name"] for each in server.health()["clients"]] == [name]
    (said,) = [each.getMessage() for each in caplog.records if each.getMessage().startswith("host.attaching")]
    assert name in said
    assert f"gid={os.getgid()}" in said


async def test_a_user_may_be_one_who_reads(tmp_path: Path) -> None:
    """By the server's settings, whatever its engine asks for."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(8), host={"read_only_uids": [os.getuid()]}) as server:
        async with attached(server, engine) as kv:
            dropped = await kv.store(KEYS, engine.fill(KEYS, range(8)))
            assert dropped.drop_reasons == {"read only": 8}
            kv.planner().register_worker()
            assert (await kv.planner().plan_store(KEYS).ended()).errors == ("read only",)
            assert server.health()["clients"][0]["is_read_only"]


async def test_who_reads_gets_memory_that_cannot_be_written(tmp_path: Path) -> None:
    """Neither it nor a worker of it, by the descriptors that they get."""
    opening = Attach.of("reader", MODEL, SMALL, (Shard(),), is_read_only=True)
    with serving(tmp_path, cpu(8)) as server:
        path = os.fspath(server.path)
        connection, answer, descriptors = await asyncio.to_thread(handshake.begin, path, opening, 60.0)
        assert isinstance(answer, Attached)
        asked = MapSlab(answer.token, answer.slabs[0].name, page_locks=False)
        beside, _, mapped = await asyncio.to_thread(handshake.begin, path, asked, 60.0)
        for fd in (*descriptors, *mapped):
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        handshake.give_back(connection, descriptors)
        handshake.give_back(beside, mapped)


async def test_a_worker_of_who_reads_gets_what_is_stored_after_it_came(tmp_path: Path) -> None:
    """Its memory is the server's, and not what that was when it was mapped."""
    engine, reading = AnyEngine(), AnyEngine()
    with serving(tmp_path, cpu(8)) as server:
        async with attached(server, engine) as kv, attached(server, reading, read_only=True) as reader:
            planning = reader.planner()
            planning.register_worker()
            with Worker(planning.slabs(), layout=SMALL, device="cpu") as worker:
                worker.register_kv_caches(reading.caches[0])
                preparing = f"tiered_kv-pin-{planning.slabs()[0].pool}"
                await until(lambda: preparing not in [each.name for each in threading.enumerate()])
                await kv.store(KEYS, engine.fill(KEYS, range(8)))
                job = planning.plan_load(KEYS, reading.spec(range(8)))
                planning.complete(worker.execute(await job.planned()))
                assert (await job.ended()).num_blocks == reading.count_right(KEYS, range(8)) == 8


async def test_one_client_has_so_much_under_way(tmp_path: Path) -> None:
    """One load, one store or one job more brings nothing, by itself or by its bytes; others are served."""
    engine, other, may_begin = AnyEngine(), AnyEngine(), threading.Event()
    host = {"loads_per_client": 1, "stores_per_client": 1, "jobs_per_client": 1}
    with serving(tmp_path, cpu(24), host=host) as server:
        async with attached(server, engine) as kv, attached(server, other) as neighbour:
            await kv.store(KEYS, engine.fill(KEYS, range(8)))
            loading = kv.start_load(KEYS, engine.spec(range(8)), after=may_begin)
            await until(lambda: server.health()["clients"][0]["loads"] == 1)
            refused = await kv.load(KEYS, engine.spec(range(8, 16)))
            assert (refused.num_blocks, refused.faults[0].reason) == (0, "too many loads")
            assert (await neighbour.load(KEYS, other.spec(range(8)))).num_blocks == 8
            may_begin.set()
            assert (await loading).num_blocks == 8
            kv.planner().register_worker()
            await (planned := kv.planner().plan_load(KEYS)).planned()
            assert (await kv.planner().plan_load(KEYS).ended()).errors == ("too many jobs",)
            planned.cancel()


async def test_one_account_of_bytes_for_all_that_a_client_has(tmp_path: Path) -> None:
    """Leases, pins of all its tenants, jobs, loads, stores: what goes beyond holds nothing, and others are served."""
    engine, other = AnyEngine(num_blocks=128), AnyEngine()
    host = {"bytes_per_client": 16 * STRIDE}
    limits = CacheLimits(**{**dict(LIMITS), "pin_quota": 4 * STRIDE})
    with serving(tmp_path, cpu(64), host=host, limits=limits) as server:
        async with attached(server, engine) as kv, attached(server, other) as neighbour:
            tenants = [prompt(4, seed=salt, salt=str(salt)) for salt in range(8)]
            for keys in tenants:
                await kv.store(keys, engine.fill(keys, range(4)))
            await kv.store(LONG[:12], engine.fill(LONG[:12], range(12)))
            await kv.store(LONG[12:], engine.fill(LONG[12:], range(12)))
            async with kv.lease(LONG) as lease:
                assert lease.num_blocks == 16
                assert kv.pin(KEYS, ttl_s=60.0).num_blocks == 0
                await neighbour.store(prompt(8, seed=9), other.fill(prompt(8, seed=9), range(8)))
                async with neighbour.lease(prompt(8, seed=9)) as second:
                    assert second.num_blocks == 8
            assert [kv.pin(keys, ttl_s=60.0).num_blocks for keys in tenants] == [4, 4, 4, 4, 0, 0, 0, 0]
            async with kv.lease(LONG) as lease:
                assert lease.num_blocks == 0
            assert (await kv.load(LONG, engine.spec(range(24)))).num_blocks == 24  # the only one
            kv.planner().register_worker()
            (error,) = (await kv.planner().plan_load(LONG).ended()).errors
            assert "bytes to hold for a job" in error
            for keys in tenants:
                kv.unpin(keys)
            planned = kv.planner().plan_load(LONG[:10])
            assert (await planned.planned()).num_blocks == 10
            async with kv.lease(LONG) as lease:
                assert lease.num_blocks == 6
            planned.cancel()
            await planned.ended()
            await until(lambda: server.health()["clients"][0]["bytes"] == 0)


async def test_one_client_asks_so_much_at_once(tmp_path: Path) -> None:
    """Of questions that come together as many are answered as there may be; to the others the answer is that."""
    opening = Attach.of("curious", MODEL, SMALL, (Shard(),), is_read_only=False)
    with serving(tmp_path, cpu(8), host={"questions_per_client": 2}) as server:
        connection, _, descriptors = await asyncio.to_thread(handshake.begin, os.fspath(server.path), opening, 60.0)
        asked = (protocol.Call(number, "stats", wire.encoded(())) for number in range(1, 6))
        connection.sendall(b"".join(wire.frame(each) for each in asked))
        answers = []
        for _ in range(5):
            length = int.from_bytes(await asyncio.to_thread(connection.recv, 4, socket.MSG_WAITALL), "little")
            answers.append(protocol.reply_from(connection.recv(length, socket.MSG_WAITALL)))
        assert sorted(each.id for each in answers if isinstance(each, protocol.Answered)) == [1, 2]
        assert {each.kind for each in answers if isinstance(each, protocol.Failed)} == {"CapacityError"}
        handshake.give_back(connection, descriptors)


async def test_one_client_has_few_blocks_explained_at_once(tmp_path: Path) -> None:
    """What the server does in one go is bounded: a client asks in parts, and who asks for more is refused."""
    engine, many = AnyEngine(), prompt(3000)
    with serving(tmp_path, cpu(8)) as server:
        async with attached(server, engine) as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(8)))
            assert [str(each) for each in await kv.explain(many)] == ["ready, in cpu"] * 8 + ["never stored"] * 2992
            assert await kv.explain(many[:0]) == []
            message = kv._message(CALLS["explain"], CALLS["explain"].bind(many))  # noqa: SLF001 - as none of ours asks
            with pytest.raises(ConfigurationError, match="of 3000 keys, 1024 at most"):
                await kv._connection.ask(message)  # noqa: SLF001 - the same


async def test_a_message_is_never_about_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks a call is about, client and server say as much: of 4 as of 40."""
    engine, said = AnyEngine(), list[str]()
    frame = wire.frame

    def counted(message: wire.Message) -> bytes:
        said.append(message.name if isinstance(message, protocol.Call) else type(message).__name__)
        return frame(message)

    with serving(tmp_path, cpu(64), limits=CacheLimits()) as server:
        async with attached(server, engine) as kv:
            kv.pin(KEYS, ttl_s=60.0)
            monkeypatch.setattr(wire, "frame", counted)
            by_size = []
            for size in (4, 40):
                keys, blocks = prompt(size, seed=size), range(size)
                said.clear()
                await (await kv.store(keys, engine.fill(keys, blocks))).settled()
                await kv.lookup(keys)
                await kv.load(keys, engine.spec(blocks))
                await kv.prefetch(keys)
                kv.pin(keys, ttl_s=60.0)
                kv.unpin(keys)
                await kv.explain(keys)
                await kv.evict(keys)
                by_size.append(sorted(said))
            assert by_size[0] == by_size[1]
            assert "Ping" not in by_size[0]  # nor is a server that answers asked whether it is there
            assert len(by_size[0]) > 16
