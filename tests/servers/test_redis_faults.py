"""The ``redis`` medium where something is wrong: settings, credentials, servers that stall, die, move or are full."""

import asyncio
import itertools
import re
import time
import traceback
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from ports import free_port
from redis_server import (
    RedisServer,
    find_binary,
    make_certificates,
    run_cluster,
    run_redis,
    run_sentinel,
    tls_arguments,
)
from tiered_kv.media.backend import Block, Outcome
from tiered_kv.media.inventory import Found
from tiered_kv.settings.chain_settings import tier_from
from tiered_kv.testing import block_key, make_block, open_backend, open_context
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError, TieredKVError
from tiered_kv.values.keys import salt_digest
from tiered_kv_backends.redis import RedisBackend, tenants
from tiered_kv_backends.redis.servers import RedisSettings, Servers

SIZE = 1 << 20
TIMEOUT_S = 60.0
ACL = """
user default off
user admin on >admin ~* &* +@all
user kv on >correct-horse ~kv/* +@read +@write +cluster|slots +command +asking
user reader on >correct-horse ~kv/* +@read +cluster|slots +command
"""
_prefixes = (f"kv/{n}/" for n in itertools.count())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority and a certificate for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    (folder / "users.acl").write_text(ACL)
    return folder


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server, without TLS or passwords, that tests pause and restart."""
    with run_redis(find_binary("redis-server"), tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[RedisServer]:
    """One server with TLS and ACL users."""
    port = free_port()
    acl = ("--aclfile", certificates / "users.acl")
    words = ("--port", "0", "--tls-port", str(port), *tls_arguments(certificates), *acl)
    with run_redis(find_binary("redis-server"), tmp_path_factory.mktemp("guarded"), *words, port=port) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[list[RedisServer]]:
    """Three masters that speak TLS only."""
    folder = tmp_path_factory.mktemp("cluster")
    with run_cluster(find_binary("redis-server"), folder, certificates, certificates / "users.acl") as nodes:
        yield nodes


def backend_of(server: RedisServer, **settings: object) -> RedisBackend:
    """Return a backend that no other test's keys are in."""
    return RedisBackend(RedisSettings.model_validate({"url": server.url, "prefix": next(_prefixes), **settings}))


def guarded_settings(server: RedisServer, certificates: Path, **settings: object) -> dict[str, object]:
    """Return settings that are right for a server with TLS and ACL users, but for those given."""
    login = {"username": "kv", "password": "correct-horse", "ca_file": certificates / "ca.pem"}
    return {"url": f"rediss://127.0.0.1:{server.port}", **login, **settings}


async def why_not_open(backend: RedisBackend) -> TieredKVError:
    """Open a backend that cannot work, and return what it raises."""
    with open_context() as context, pytest.raises(TieredKVError) as caught:
        await backend.open(context)
    return caught.value


def blocks_of(n: int, num_bytes: int = SIZE) -> list[Block]:
    """Return as many blocks, each with bytes of its own."""
    return [make_block(bytes([i + 1]) * num_bytes, block_key(i)) for i in range(n)]


def empty(n: int, num_bytes: int = SIZE) -> list[Block]:
    """Return as many blocks to read into."""
    return [Block.empty(num_bytes) for _ in range(n)]


class HeldTime:
    """A clock that a test sets: a tier's, and the event loop's while that is held, however busy the machine is."""

    def __init__(self) -> None:
        self.now = asyncio.get_running_loop().time()

    def __call__(self) -> float:
        """Return its time, in seconds."""
        return self.now

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have no time limit run out but by this clock."""
        loop = asyncio.get_running_loop()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(loop, "time", self)
            yield


async def eventually(do: Callable[[], Awaitable[bool]], within_s: float = 20) -> None:
    """Repeat until it is so."""
    deadline = time.monotonic() + within_s
    while not await do():
        assert time.monotonic() < deadline, "it did not come to be"
        await asyncio.sleep(0.05)


class TestSettings:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"url": "http://localhost"},
            {"url": "redis://"},
            {"url": "redis://localhost/zero"},
            {"url": "redis://localhost:port"},
            {"url": "redis://a,b"},
            {"url": "redis://a,b", "cluster": True, "sentinel_master": "kv"},
            {"url": "redis://a/1", "cluster": True},
            {"url": "redis://a", "ttl_s": 0},
            {"url": "redis://a", "connections": 0},
            {"url": "redis://a", "prefix": ""},
        ],
    )
    def test_what_cannot_work_is_refused(self, wrong: dict[str, object]) -> None:
        """A wrong URL or combination is an error when settings are made."""
        with pytest.raises(ConfigurationError):
            RedisSettings.model_validate(wrong)

    def test_blocks_expire_after_a_day_unless_it_is_said_otherwise(self) -> None:
        """One server, whose memory others may need too."""
        settings = RedisSettings.model_validate({"url": "redis://a"})
        assert (settings.ttl_s, settings.cluster) == (86_400, False)

    def test_a_url_is_a_tier(self) -> None:
        """A tier can be written as one URL, of either scheme."""
        tier = tier_from("rediss://kv:p%40ss@[::1]:7000,b:7001?cluster=true&ttl_s=60")
        assert isinstance(tier, RedisSettings)
        assert (tier.medium, tier.cluster, tier.ttl_s) == ("redis", True, 60)

    def test_secrets_are_not_shown(self) -> None:
        """No password is in what settings look like, whether in the URL or beside it."""
        settings = RedisSettings.model_validate({"url": "redis://kv:hidden@localhost", "password": "hidden"})
        assert "hidden" not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"

    async def test_a_missing_certificate(self, certificates: Path) -> None:
        """A certificate's file that is not there is named."""
        settings = {"url": "rediss://127.0.0.1:1", "ca_file": certificates / "absent.pem"}
        error = await why_not_open(RedisBackend(RedisSettings.model_validate(settings)))
        assert isinstance(error, ConfigurationError)
        assert "absent.pem" in str(error)


class TestOpening:
    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"password": "wrong-secret"}, "the login was refused: WRONGPASS"),
            ({"username": "nobody"}, "WRONGPASS"),
            ({"username": None, "password": None}, "Authentication required"),
            ({"username": "reader"}, "NOPERM"),
            ({"prefix": "others/"}, "NOPERM"),
            ({"ca_file": None}, "CERTIFICATE_VERIFY_FAILED"),
            ({"cluster": True}, "Cluster mode is not enabled"),
        ],
    )
    async def test_what_can_never_work(
        self, guarded: RedisServer, certificates: Path, wrong: dict[str, object], said: str
    ) -> None:
        """Wrong credentials, rights, certificates or kinds of server are errors of configuration, without secrets."""
        error = await why_not_open(backend_of(guarded, **guarded_settings(guarded, certificates, **wrong)))
        assert isinstance(error, ConfigurationError)
        assert said in str(error)
        assert "wrong-secret" not in str(error)
        assert "correct-horse" not in str(error)

    @pytest.mark.parametrize("login", [{}, {"username": "kv"}, {"password": "hidden" * 40}, {"cluster": True}])
    async def test_a_server_that_repeats_the_password(self, tmp_path: Path, login: dict[str, object]) -> None:
        """A password is in no error nor in what led to it, where AUTH is unknown and the server says what it got."""
        with run_redis(find_binary("redis-server"), tmp_path, "--rename-command", "AUTH", "") as server:
            settings = RedisSettings.model_validate({"url": server.url, "password": "hidden-secret", **login})
            error = await why_not_open(RedisBackend(settings))
            with pytest.raises(BackendUnavailableError) as deleting:
                await RedisBackend.delete_tenant(settings, "tenant")
            async with RedisBackend.inventory(settings) as inventory:
                with pytest.raises(BackendUnavailableError) as listing:
                    await anext(aiter(inventory.found()))
        for each in (error, deleting.value, listing.value):
            shown = "".join(traceback.format_exception(each))
            assert "unknown command" in shown
            assert "hidden" not in shown

    async def test_a_tenant_of_another_deployment_stays(self, redis: RedisServer) -> None:
        """One whose prefix goes on where ours ends, and keys of other programs with the same digits in them."""
        digits = salt_digest("ann").hex()[:32]
        path = f"{'a' * 64}/{'b' * 32}/0of1/{digits}/{'c' * 64}"
        names = [
            f"own/{path}",
            f"own/{path}.x16",
            f"own/eu/{path}",
            f"own/billing/{digits}/invoice",
            f"own/{path}/more",
        ]
        async with Redis.from_url(redis.url) as client:
            for name in names:
                await client.set(name, b"there")
            assert await RedisBackend.delete_tenant({"medium": "redis", "url": redis.url, "prefix": "own/"}, "ann") == 2
            assert [name for name in names if await client.exists(name)] == names[2:]
            await client.delete(*names)

    async def test_a_value_that_is_no_string_is_listed(self, redis: RedisServer) -> None:
        """What others put under a block's name hides no blocks: it is found, holds nothing to read, can be deleted."""
        backend, keys = backend_of(redis), [block_key(n) for n in range(3)]
        async with open_backend(backend), Redis(port=redis.port) as other:
            await backend.write(keys[:2], blocks_of(2, 10))
            await other.rpush(backend.settings.prefix + keys[2].path, b"x")
            async with RedisBackend.inventory(backend.settings) as inventory:
                found = [each async for some in inventory.found() for each in some]
                assert sorted(each.where for each in found) == sorted(key.path for key in keys)
                odd = next(each for each in found if each.where == keys[2].path)
                assert await inventory.read(odd) == b""
                await inventory.delete([odd])
            assert await backend.lookup(keys) == [Outcome.HIT, Outcome.HIT, Outcome.MISS]

    async def test_a_listing_keeps_nothing_of_what_it_has_listed(self, redis: RedisServer) -> None:
        """A medium has millions of blocks: what is not kept by who asked is kept by nobody."""
        settings = {"url": redis.url, "prefix": next(_prefixes)}
        num_keys, most_bytes = 60_000, 3 << 20  # of which a page of the listing has half
        folder = f"{'a' * 64}/{'b' * 32}/0of1/{'d' * 32}"
        async with Redis.from_url(redis.url) as client:
            names = [f"{settings['prefix']}{folder}/{n:064x}" for n in range(num_keys)]
            await client.mset(dict.fromkeys(names, b"x"))
            async with RedisBackend.inventory(RedisSettings.model_validate(settings)) as inventory:
                listing, num_found = inventory.found(), 0
                tracemalloc.start()
                try:
                    async for some in listing:
                        num_found += len(some)
                        del some
                        assert tracemalloc.get_traced_memory()[0] < most_bytes
                finally:
                    tracemalloc.stop()
                assert num_found >= num_keys
            await client.unlink(*names)

    async def test_a_lost_connection_keeps_no_block_of_a_tenant(self, redis: RedisServer) -> None:
        """What is deleted as it is listed is looked for again where a connection was cut in between."""
        prefix, num_keys = next(_prefixes), 3000  # about three pages of a listing
        folder = f"{'a' * 64}/{'b' * 32}/0of1/{salt_digest('ann').hex()[:32]}"
        async with Redis.from_url(redis.url) as client, cutting_proxy(redis.port, 300_000) as port:
            await client.mset({f"{prefix}{folder}/{n:064x}": b"x" for n in range(num_keys)})
            settings = {"url": f"redis://127.0.0.1:{port}", "prefix": prefix}
            assert await RedisBackend.delete_tenant(settings, "ann") == num_keys

    @pytest.mark.parametrize("verb", ["STRLEN", "GET", "UNLINK"])
    async def test_an_operator_waits_for_no_answer_without_end(self, redis: RedisServer, verb: str) -> None:
        """Listing, reading and deleting end where a server that answered stands still: each question has its time."""
        settings, keys = {"prefix": next(_prefixes), "timeout_s": 0.2}, [block_key(n) for n in range(3)]
        async with open_backend(backend_of(redis, **settings)) as backend:
            await backend.write(keys, blocks_of(3, 10))
        async with holding_proxy(redis.port) as (port, holds):
            held = backend_of(redis, **settings, url=f"redis://127.0.0.1:{port}").settings
            async with RedisBackend.inventory(held) as inventory:
                found = [each async for some in inventory.found() for each in some]
                holds[verb] = -1  # it never goes on
                with pytest.raises(BackendUnavailableError, match="no answer in time"):
                    await (inventory.read(found[0]) if verb == "GET" else RedisBackend.delete_tenant(held, b""))
                holds.clear()
                assert await RedisBackend.delete_tenant(held, b"") == 3

    async def test_a_server_that_repeats_the_password_later(self) -> None:
        """Nor where it lets us in, and then answers each command by what it was told before."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                for name in re.findall(rb"\*\d+\r\n\$\d+\r\n(\w+)", data):
                    writer.write(b"+OK\r\n" if name == b"AUTH" else b"-ERR no such thing, hidden-secret\r\n")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1") as server:
            url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            error = await why_not_open(RedisBackend({"url": url, "password": "hidden-secret"}))
        assert "no such thing, ***" in str(error)
        assert "hidden" not in "".join(traceback.format_exception(error))

    async def test_a_server_without_tls(self, redis: RedisServer) -> None:
        """TLS to a server that has none ends within the deadline."""
        backend = backend_of(redis, url=f"rediss://127.0.0.1:{redis.port}", connect_timeout_s=1)
        error = await why_not_open(backend)
        assert isinstance(error, ConfigurationError | BackendUnavailableError)
        assert "redis://" in str(error)

    @pytest.mark.parametrize("settings", [{}, {"password": "hidden"}, {"cluster": True}])
    async def test_no_redis(self, settings: dict[str, object]) -> None:
        """What answers in another protocol is asked to be looked at."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1") as server:
            url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            error = await why_not_open(RedisBackend(RedisSettings.model_validate({"url": url, **settings})))
        assert isinstance(error, ConfigurationError)
        assert "speaks another protocol: is it Redis? (" in str(error)

    async def test_a_server_with_tls(self, guarded: RedisServer) -> None:
        """No TLS to a server that wants it ends within the deadline, and says what may be meant."""
        error = await why_not_open(backend_of(guarded, url=guarded.url, connect_timeout_s=1))
        assert isinstance(error, BackendUnavailableError)
        assert "rediss://" in str(error)

    @pytest.mark.parametrize("kind", ["server", "node", "cluster"])
    @pytest.mark.parametrize("login", [{}, {"password": "hidden"}])
    async def test_a_server_with_all_the_clients_it_takes(
        self, tmp_path: Path, login: dict[str, object], kind: str
    ) -> None:
        """It may take us later, and no login was refused: nor by a node of a cluster, which has other words for it."""
        words = [part for name, value in login.items() for part in (f"--require{name[:4]}", str(value))]
        if is_node := kind != "server":
            words += ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
        with run_redis(find_binary("redis-server"), tmp_path, *words) as server:
            async with Redis(port=server.port, single_connection_client=True, **login) as only:  # type: ignore[arg-type]
                await only.config_set("maxclients", 1)
                error = await why_not_open(backend_of(server, **login, cluster=kind == "cluster"))
        assert isinstance(error, BackendUnavailableError)
        if kind != "cluster" or login:  # else redis-py may send before it hears that, and says that it cannot
            assert f"max number of clients {'+ cluster connections ' * is_node}reached" in str(error)
            assert str(error).startswith(f"Redis {kind.replace('node', 'server')} at 127.0.0.1:{server.port} has all ")

    @pytest.mark.parametrize("num_left", [0, 1])
    async def test_a_server_with_all_the_clients_it_takes_says_so_to_any_call(
        self, tmp_path: Path, num_left: int
    ) -> None:
        """To one that only reads, and to the second connection, where the first one was the last that it took."""
        with run_redis(find_binary("redis-server"), tmp_path) as server:
            async with Redis(port=server.port, single_connection_client=True) as only:
                await only.config_set("maxclients", 1 + num_left)
                error = await why_not_open(backend_of(server, read_only=not num_left))
        assert isinstance(error, BackendUnavailableError)
        assert "max number of clients reached" in str(error)

    async def test_a_server_with_all_the_clients_it_takes_by_tls(self, tmp_path: Path, certificates: Path) -> None:
        """It says nothing before there is TLS, and hangs up: it may be that, or that it wants to know who we are."""
        port, ca = free_port(), certificates / "ca.pem"
        words = ("--port", "0", "--tls-port", str(port), *tls_arguments(certificates))
        with run_redis(find_binary("redis-server"), tmp_path, *words, port=port) as server:
            async with Redis(port=port, ssl=True, ssl_ca_certs=str(ca), single_connection_client=True) as only:
                await only.config_set("maxclients", 1)
                error = await why_not_open(backend_of(server, url=f"rediss://127.0.0.1:{port}", ca_file=ca))
        assert isinstance(error, BackendUnavailableError)
        assert "has it all the clients that it takes, or does it want a cert_file?" in str(error)

    async def test_who_hangs_up_after_an_answer_is_asked_nothing_more(self) -> None:
        """What is sent then is lost, and would say no more than that."""

        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"60\r\n")
            writer.write(b"-ERR max number of clients reached\r\n")
            writer.close()

        async with await asyncio.start_server(refuse, "127.0.0.1") as server:
            url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            error = await why_not_open(RedisBackend(RedisSettings.model_validate({"url": url})))
        assert isinstance(error, BackendUnavailableError)
        assert "max number of clients reached" in str(error)

    async def test_a_server_that_ends_tls(self) -> None:
        """Behind a proxy that speaks TLS nobody may be there now: that may work later."""

        async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1 << 16)
            writer.close()

        async with await asyncio.start_server(leave, "127.0.0.1") as server:
            url = f"rediss://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            error = await why_not_open(RedisBackend(RedisSettings.model_validate({"url": url})))
        assert isinstance(error, BackendUnavailableError)
        assert "does it want a cert_file?" in str(error)

    @pytest.mark.parametrize("settings", [{}, {"cluster": True}, {"sentinel_master": "kv"}])
    async def test_nobody_there(self, settings: dict[str, object]) -> None:
        """A port that nobody listens on may work later."""
        url = f"redis://127.0.0.1:{free_port()}"
        error = await why_not_open(RedisBackend(RedisSettings.model_validate({"url": url, **settings})))
        assert isinstance(error, BackendUnavailableError)
        assert url.removeprefix("redis://") in str(error)
        assert "object at 0x" not in str(error)

    async def test_a_node_of_a_cluster(self, cluster: list[RedisServer], certificates: Path) -> None:
        """Who takes one node for the whole is told what to write."""
        error = await why_not_open(backend_of(cluster[0], **guarded_settings(cluster[0], certificates)))
        assert isinstance(error, ConfigurationError)
        assert "cluster = true" in str(error)

    async def test_certificates_are_trusted_beside_the_systems(
        self, guarded: RedisServer, cluster: list[RedisServer], certificates: Path, tmp_path: Path
    ) -> None:
        """With ``ca_file`` a server that the system's authorities vouch for is one still, for either client inside."""
        make_certificates(tmp_path)  # another authority's
        settings = {"ca_file": tmp_path / "ca.pem"}
        given = [
            guarded_settings(guarded, certificates, **settings),
            guarded_settings(cluster[0], certificates, cluster=True, **settings),
        ]
        for each in given:
            error = await why_not_open(backend_of(guarded, **each))
            assert "CERTIFICATE_VERIFY_FAILED" in str(error)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
            for each in given:
                async with open_backend(backend_of(guarded, **each)) as backend:
                    assert await backend.lookup([block_key(0)]) == [Outcome.MISS]

    async def test_a_paused_server(self, redis: RedisServer) -> None:
        """A server that accepts and never answers is unavailable within the deadline."""
        redis.pause()
        try:
            error = await why_not_open(backend_of(redis, connect_timeout_s=0.5))
        finally:
            redis.go_on()
        assert isinstance(error, BackendUnavailableError)


class TestFaults:
    async def test_a_stall_ends_with_the_deadline(self, redis: RedisServer) -> None:
        """While a server stands still calls end with an error of ours; later it serves, and lent blocks are left."""
        keys, blocks, time_ = [block_key(n) for n in range(4)], blocks_of(4), HeldTime()
        async with open_backend(backend_of(redis, timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S)) as backend:
            await backend.write(keys, blocks)
            lent = empty(4)
            redis.pause()
            try:
                with time_.held():
                    calls = (
                        backend.read(keys, lent),
                        backend.write(keys, blocks),
                        backend.lookup(keys),
                        backend.delete([block_key(n) for n in range(4, 8)]),  # it may come to be when all goes on
                    )
                    calling, until = asyncio.gather(*calls, return_exceptions=True), time_.now + 1.1 * TIMEOUT_S
                    while not calling.done() and time_.now < until:  # as fast as it likes: nobody answers
                        time_.now += TIMEOUT_S / 100
                        await asyncio.sleep(0)
                    errors = calling.result()
            finally:
                redis.go_on()
            assert all(isinstance(error, BackendUnavailableError) for error in errors), errors
            for block in lent:
                block.payload[:] = b"\xff" * SIZE
            into = empty(4)
            assert await backend.read(keys, into) == [Outcome.HIT] * 4
            assert [bytes(block) for block in into] == [bytes(block) for block in blocks]
            assert all(block.payload == b"\xff" * SIZE for block in lent)

    async def test_a_restart_costs_no_call(self, redis: RedisServer) -> None:
        """After a crash and a restart the next call reconnects by itself; what the server lost is a miss."""
        keys, blocks = [block_key(n) for n in range(3)], blocks_of(3)
        async with open_backend(backend_of(redis)) as backend:
            assert await backend.write(keys, blocks) == [Outcome.STORED] * 3
            redis.kill()
            with pytest.raises(BackendUnavailableError):
                await backend.read(keys, empty(3))
            redis.restart()
            assert await backend.lookup(keys) == [Outcome.MISS] * 3
            redis.kill()
            redis.restart()
            assert await backend.write(keys, blocks) == [Outcome.STORED] * 3

    async def test_cancelled_calls_mix_up_no_replies(self, redis: RedisServer) -> None:
        """Whenever a call is cancelled, the ones after it get their own bytes, and its blocks are left alone."""
        keys, blocks = [block_key(n) for n in range(4)], blocks_of(4)
        async with open_backend(backend_of(redis, connections=1)) as backend:
            await backend.write(keys, blocks)
            for num_steps in range(1, 60, 3):
                lent = empty(2)
                calls = (backend.read(keys[:2], lent), backend.lookup(keys[:2]), backend.write(keys[:1], blocks[:1]))
                for call in calls:
                    task = asyncio.ensure_future(call)
                    for _ in range(num_steps):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task])
                before = [bytes(block) for block in lent]
                into = empty(2)
                assert await backend.read(keys[2:], into) == [Outcome.HIT] * 2
                assert [bytes(block) for block in into] == [bytes(block) for block in blocks[2:]]
                assert await backend.lookup([block_key(9), keys[0]]) == [Outcome.MISS, Outcome.HIT]
                assert [bytes(block) for block in lent] == before

    async def test_closing_ends_calls(self, redis: RedisServer) -> None:
        """A call that hangs when the tier closes ends with an error of ours."""
        backend = backend_of(redis)
        with open_context() as context:
            await backend.open(context)
            redis.pause()
            try:
                calls = [asyncio.ensure_future(backend.read([block_key(n)], empty(1))) for n in range(3)]
                for _ in range(20):  # until they wait for the server
                    await asyncio.sleep(0)
                await backend.aclose()
                errors = await asyncio.gather(*calls, return_exceptions=True)
            finally:
                redis.go_on()
        assert all(isinstance(error, BackendUnavailableError) for error in errors), errors

    async def test_no_more_connections_than_allowed(self, redis: RedisServer) -> None:
        """However many calls there are at once, a server sees so many connections and no more."""
        async with open_backend(backend_of(redis, connections=2)) as backend, Redis(port=redis.port) as observer:
            before = len(await observer.client_list())
            calls = [backend.write([block_key(n)], [make_block(b"x" * 4096, block_key(n))]) for n in range(50)]
            calls += [backend.lookup([block_key(n)]) for n in range(50)]
            await asyncio.gather(*calls)
            assert len(await observer.client_list()) <= before - 2 + 4

    async def test_a_cut_reply_is_asked_for_again(self, redis: RedisServer) -> None:
        """A connection that is lost in the middle of a body costs nothing when the next one holds."""
        key, block, into = block_key(1), blocks_of(1)[0], Block.empty(SIZE)
        async with (
            cutting_proxy(redis.port, cut_after=SIZE // 2) as proxy,
            open_backend(backend_of(redis, url=f"redis://127.0.0.1:{proxy}")) as backend,
        ):
            assert await backend.write([key], [block]) == [Outcome.STORED]
            assert await backend.read([key], [into]) == [Outcome.HIT]
            assert bytes(into) == bytes(block)

    async def test_a_full_server_refuses(self, tmp_path: Path) -> None:
        """Where nothing may be evicted, what does not fit is refused, and what is there is still read."""
        with run_redis(find_binary("redis-server"), tmp_path, "--maxmemory", "8mb") as server:
            async with open_backend(backend_of(server)) as backend:
                outcomes = [(await backend.write([block_key(n)], blocks_of(1)))[0] for n in range(12)]
                assert set(outcomes) == {Outcome.STORED, Outcome.REFUSED}
                assert await backend.read([block_key(0)], empty(1)) == [Outcome.HIT]

    async def test_a_server_that_takes_no_block_of_this_size(self, tmp_path: Path) -> None:
        """It hangs up in the middle of the block; what it said then is the error."""
        with run_redis(find_binary("redis-server"), tmp_path, "--proto-max-bulk-len", "1mb") as server:
            async with open_backend(backend_of(server)) as backend:
                with pytest.raises(BackendUnavailableError, match="invalid bulk length"):
                    await backend.write([block_key(0)], blocks_of(1, 4 << 20))

    async def test_what_the_server_evicted_is_a_miss(self, tmp_path: Path) -> None:
        """Where the server evicts, everything is stored, and what went is a miss."""
        words = ("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")
        with run_redis(find_binary("redis-server"), tmp_path, *words) as server:
            async with open_backend(backend_of(server)) as backend:
                keys = [block_key(n) for n in range(24)]
                for key in keys:
                    assert await backend.write([key], blocks_of(1)) == [Outcome.STORED]
                assert set(await backend.read(keys, empty(24))) == {Outcome.HIT, Outcome.MISS}

    async def test_another_kind_of_value_is_corrupt(self, redis: RedisServer) -> None:
        """A key that holds no string is corrupt, and a write repairs it."""
        backend = backend_of(redis)
        async with open_backend(backend), Redis(port=redis.port) as other:
            await other.rpush(backend.settings.prefix + block_key(1).path, b"x")
            assert await backend.read([block_key(1)], empty(1)) == [Outcome.CORRUPT]
            assert await backend.write([block_key(1)], blocks_of(1)) == [Outcome.STORED]
            assert await backend.read([block_key(1)], empty(1)) == [Outcome.HIT]


class TestPromises:
    async def test_what_is_read_lives_on(self, redis: RedisServer) -> None:
        """A record expires ``ttl_s`` after it was last stored or loaded."""
        backend = backend_of(redis, ttl_s=1000)
        name = backend.settings.prefix + block_key(0).path
        async with open_backend(backend), Redis(port=redis.port) as other:
            await backend.write([block_key(0)], blocks_of(1))
            assert 0 < await other.ttl(name) <= 1000
            await other.expire(name, 10)
            await backend.lookup([block_key(0)])
            assert await other.ttl(name) <= 10
            await backend.read([block_key(0)], empty(1))
            assert await other.ttl(name) > 10

    async def test_presence_is_one_round_trip(self, redis: RedisServer) -> None:
        """A thousand keys are asked for without waiting for any answer in between."""
        keys = [block_key(n) for n in range(1000)]
        async with (
            holding_proxy(redis.port) as (proxy, holds),
            open_backend(backend_of(redis, url=f"redis://127.0.0.1:{proxy}")) as backend,
        ):
            await backend.write(keys[:600], [make_block(b"x", key) for key in keys[:600]])
            holds["EXISTS"] = 1000
            assert await backend.lookup_prefix(keys) == 600

    @pytest.mark.both_loops
    async def test_both_loops(self, guarded: RedisServer, certificates: Path) -> None:
        """Bodies pass through TLS under asyncio's own loop and under uvloop."""
        keys, blocks, into = [block_key(n) for n in range(8)], blocks_of(8), empty(8)
        async with open_backend(backend_of(guarded, **guarded_settings(guarded, certificates))) as backend:
            assert await backend.write(keys, blocks) == [Outcome.STORED] * 8
            assert await backend.read(keys, into) == [Outcome.HIT] * 8
            assert [bytes(block) for block in into] == [bytes(block) for block in blocks]


class TestReadOnly:
    async def test_reading_takes_no_right_to_write(self, guarded: RedisServer, certificates: Path) -> None:
        """A ``read_only`` tier is served as a user who may only read, whatever the ``ttl_s``."""
        keys, into = [block_key(n) for n in range(3)], empty(3)
        settings = guarded_settings(guarded, certificates, prefix="kv/read-only/")
        async with open_backend(backend_of(guarded, **settings)) as backend:
            await backend.write(keys[:2], blocks_of(2))
        settings |= {"username": "reader", "read_only": True}
        async with open_backend(backend_of(guarded, **settings)) as backend:
            assert await backend.lookup(keys) == [Outcome.HIT, Outcome.HIT, Outcome.MISS]
            assert await backend.read(keys, into) == [Outcome.HIT, Outcome.HIT, Outcome.MISS]
            assert [bytes(block) for block in into[:2]] == [bytes(block) for block in blocks_of(2)]


class TestTopologies:
    async def test_a_slot_that_moves_is_followed(self, cluster: list[RedisServer], certificates: Path) -> None:
        """When a slot changes its node, the next call goes there by itself."""
        settings = guarded_settings(cluster[0], certificates, cluster=True)
        backend = backend_of(cluster[0], **settings)
        async with open_backend(backend):
            assert await backend.lookup([block_key(0)]) == [Outcome.MISS]
            await move_slot(cluster, certificates, backend.settings.prefix + block_key(0).path)
            assert await backend.write([block_key(0)], blocks_of(1)) == [Outcome.STORED]
            assert await backend.read([block_key(0)], empty(1)) == [Outcome.HIT]
            assert await backend.lookup([block_key(0)]) == [Outcome.HIT]

    async def test_a_slot_on_its_way_is_served(self, cluster: list[RedisServer], certificates: Path) -> None:
        """While a slot moves, what is still where it was is read there, and what is not is written and read ahead."""
        prefix = next(_prefixes) + "{moving}"  # one slot for all
        settings = guarded_settings(cluster[0], certificates, cluster=True, prefix=prefix)
        keys, blocks, into = [block_key(n) for n in range(4)], blocks_of(4), empty(4)
        async with open_backend(backend_of(cluster[0], **settings)) as backend:
            await backend.write(keys[:2], blocks[:2])
            async with slot_on_its_way(cluster, certificates, prefix):
                assert await backend.write(keys[2:], blocks[2:]) == [Outcome.STORED] * 2
                assert await backend.lookup(keys) == [Outcome.HIT] * 4
                assert await backend.read(keys, into) == [Outcome.HIT] * 4
                assert [bytes(block) for block in into] == [bytes(block) for block in blocks]
                assert await backend.read([block_key(9)], empty(1)) == [Outcome.MISS]
                await backend.delete(keys)
                assert await backend.lookup(keys) == [Outcome.MISS] * 4

    @pytest.mark.parametrize("has_arrived", [True, False], ids=["arrived", "on its way"])
    async def test_no_block_of_a_tenant_survives_as_its_slot_moves(
        self, cluster: list[RedisServer], certificates: Path, monkeypatch: pytest.MonkeyPatch, *, has_arrived: bool
    ) -> None:
        """To a node that was looked at, from one that was not yet; as long as it moves, that is said."""
        nodes, unlink = clients_of(cluster, certificates), tenants.RedisInventory.delete_some
        settings = guarded_settings(cluster[0], certificates, cluster=True)
        servers = Servers(RedisSettings.model_validate(settings))
        first, *_, last = [[node.port for node in cluster].index(each.address.port) for each in await servers.all()]
        await servers.aclose()
        settings["prefix"] = prefix = await prefix_held_by(nodes, last)
        keys, is_moved = [block_key(n) for n in range(4)], False

        async def unlink_and_move(
            inventory: tenants.RedisInventory, found: list[Found]
        ) -> tuple[int, BackendUnavailableError | None]:
            nonlocal is_moved
            gone = await unlink(inventory, found)  # what the first node has is nothing
            if not is_moved:
                is_moved = True
                await move_keys(nodes, prefix, to=first)
                if has_arrived:
                    await give_slot(nodes, prefix, first)
            return gone

        async with open_backend(backend_of(cluster[0], **settings)) as backend:
            await backend.write(keys, blocks_of(4))
            monkeypatch.setattr(tenants.RedisInventory, "delete_some", unlink_and_move)
            if not has_arrived:
                with pytest.raises(BackendUnavailableError, match="slots"):
                    await RedisBackend.delete_tenant(backend.settings, b"")
                await give_slot(nodes, prefix, first)
            assert await RedisBackend.delete_tenant(backend.settings, b"") == 4
            assert await backend.lookup(keys) == [Outcome.MISS] * 4
        for each in nodes:
            await each.aclose()

    async def test_a_slot_on_its_way_keeps_no_other_block_of_a_tenant(
        self, cluster: list[RedisServer], certificates: Path
    ) -> None:
        """What stands still goes, wherever the first node that is looked at says that a key is another's."""
        nodes, settings = clients_of(cluster, certificates), guarded_settings(cluster[0], certificates, cluster=True)
        servers = Servers(RedisSettings.model_validate(settings))
        first = [node.port for node in cluster].index((await servers.all())[0].address.port)
        await servers.aclose()
        keys = [block_key(n) for n in range(30)]
        async with open_backend(backend_of(cluster[0], **settings)) as backend:
            await backend.write(keys, blocks_of(30, 10))
            names = [backend.settings.prefix + key.path for key in keys]
            slots = [await slot_of(nodes, name) for name in names]
            moving = next(n for n, (_, _, holder) in enumerate(slots) if holder != first)
            num_moving = sum(slot == slots[moving][0] for slot, _, _ in slots)
            await move_keys(nodes, names[moving], to=first)
            with pytest.raises(BackendUnavailableError, match="moving"):
                await RedisBackend.delete_tenant(backend.settings, b"")
            await give_slot(nodes, names[moving], first)
            async with RedisBackend.inventory(backend.settings) as inventory:
                assert sum([len(some) async for some in inventory.found()]) == num_moving
            assert await RedisBackend.delete_tenant(backend.settings, b"") == num_moving
        for each in nodes:
            await each.aclose()

    async def test_a_node_that_takes_no_writes_keeps_no_block_on_the_others(
        self, cluster: list[RedisServer], certificates: Path
    ) -> None:
        """It is said, and the tenant's other blocks have gone: by a job for one tenant, and by what was listed."""
        nodes, settings = clients_of(cluster, certificates), guarded_settings(cluster[0], certificates, cluster=True)
        servers = Servers(RedisSettings.model_validate(settings))
        order = [[node.port for node in cluster].index(each.address.port) for each in await servers.all()]
        await servers.aclose()
        keys, refusing = [block_key(n) for n in range(30)], nodes[order[0]]
        async with open_backend(backend_of(cluster[0], **settings)) as backend:
            for by_tenant in (True, False):
                await backend.write(keys, blocks_of(30, 10))
                holders = [(await slot_of(nodes, backend.settings.prefix + key.path))[2] for key in keys]
                async with RedisBackend.inventory(backend.settings) as inventory:
                    found = [each async for some in inventory.found() for each in some]
                    await ask(refusing, "ACL SETUSER kv -unlink")
                    try:
                        with pytest.raises(BackendUnavailableError, match="permission"):
                            await (
                                RedisBackend.delete_tenant(backend.settings, b"")
                                if by_tenant
                                else inventory.delete(found)
                            )
                    finally:
                        await ask(refusing, "ACL SETUSER kv +unlink")
                left = [outcome is Outcome.HIT for outcome in await backend.lookup(keys)]
                assert left == [holder == order[0] for holder in holders]
            await backend.delete(keys)
        for each in nodes:
            await each.aclose()

    @pytest.mark.parametrize("has_arrived", [True, False], ids=["arrived", "on its way"])
    async def test_a_listing_that_slots_have_moved_under_is_not_taken_for_whole(
        self, cluster: list[RedisServer], certificates: Path, *, has_arrived: bool
    ) -> None:
        """Whoever deletes what is listed is told that there may be more."""
        nodes, settings = clients_of(cluster, certificates), guarded_settings(cluster[0], certificates, cluster=True)
        servers = Servers(RedisSettings.model_validate(settings))
        first, *_, last = [[node.port for node in cluster].index(each.address.port) for each in await servers.all()]
        await servers.aclose()
        settings["prefix"] = prefix = await prefix_held_by(nodes, last)
        async with open_backend(backend_of(cluster[0], **settings)) as backend:
            await backend.write([block_key(n) for n in range(4)], blocks_of(4))
        async with tenants.open_inventory(RedisSettings.model_validate(settings)) as inventory:
            listing = inventory.found()
            await anext(listing)  # of the first node
            await move_keys(nodes, prefix, to=first)
            if has_arrived:
                await give_slot(nodes, prefix, first)
            with pytest.raises(BackendUnavailableError, match="slots"):
                assert [len(some) async for some in listing if some] == []
            if not has_arrived:
                await give_slot(nodes, prefix, first)
            assert sum([len(some) async for some in inventory.found()]) == 4
        for each in nodes:
            await each.aclose()

    async def test_a_listing_waits_for_no_node_without_end(
        self, cluster: list[RedisServer], certificates: Path
    ) -> None:
        """Where one stands still once all have been listed, it cannot be told whether slots have moved."""
        limits = {"timeout_s": TIMEOUT_S, "connect_timeout_s": TIMEOUT_S}
        backend = backend_of(cluster[0], **guarded_settings(cluster[0], certificates, cluster=True, **limits))
        time_, nodes = HeldTime(), clients_of(cluster, certificates)
        async with open_backend(backend):
            await backend.write([block_key(n) for n in range(30)], blocks_of(30, 10))
        async with RedisBackend.inventory(backend.settings) as inventory:
            listing = inventory.found()
            for _ in cluster:
                assert await anext(listing)
            cluster[2].pause()
            try:
                with time_.held():
                    ending, until = asyncio.ensure_future(anext(listing, None)), time_.now + 3 * TIMEOUT_S
                    while not ending.done() and time_.now < until:
                        await ask(nodes[0], "PING")  # time passes as fast as it can answer
                        time_.now += 0.1
                    assert ending.done()
                    assert isinstance(ending.exception(), BackendUnavailableError)
            finally:
                cluster[2].go_on()
                for each in nodes:
                    await each.aclose()

    @pytest.mark.parametrize("at", [0, 2])  # the first is also the one that is asked who holds which keys
    async def test_a_stalled_node_costs_its_own_keys(
        self, at: int, cluster: list[RedisServer], certificates: Path
    ) -> None:
        """A node that stands still is waited for once: what the others hold is served, and later calls do not wait."""
        limits = {"timeout_s": TIMEOUT_S, "connect_timeout_s": TIMEOUT_S}
        settings = guarded_settings(cluster[0], certificates, cluster=True, **limits)
        time_, since_failed = HeldTime(), HeldTime()  # a node is left alone for a while, which is not to pass here
        backend, nodes = backend_of(cluster[0], **settings), clients_of(cluster, certificates)
        keys, into = [block_key(n) for n in range(30)], empty(30, 4096)
        blocks = [make_block(b"x" * 4096, key) for key in keys]
        lost = [(await slot_of(nodes, backend.settings.prefix + key.path))[2] == at for key in keys]
        expected = [Outcome.FAILED if each else Outcome.HIT for each in lost]

        async def is_whole() -> bool:
            since_failed.now += TIMEOUT_S
            with suppress(BackendUnavailableError):  # a node that stood still may be taken for a dead one
                return set(await backend.read(keys, empty(30, 4096))) == {Outcome.HIT}
            return False

        with open_context() as context:
            await backend.open(replace(context, clock=since_failed))
            try:
                assert await backend.write(keys, blocks) == [Outcome.STORED] * 30
                cluster[at].pause()
                try:
                    with time_.held():
                        reading = asyncio.ensure_future(backend.read(keys, into))
                        others = [n for n in range(30) if not lost[n]]
                        while not all(bytes(into[n]) == bytes(blocks[n]) for n in others):  # noqa: ASYNC110 - tell nobody
                            await asyncio.sleep(0)
                        assert await backend.lookup([keys[n] for n in others]) == [Outcome.HIT] * len(others)
                        assert not reading.done()
                        time_.now += TIMEOUT_S / 2  # as long as one node may take
                        assert await reading == expected
                        looking, until = asyncio.ensure_future(backend.lookup(keys)), time_.now + TIMEOUT_S / 3
                        while not looking.done() and time_.now < until:  # they are asked again, a tenth of the time
                            for each in (*nodes[:at], *nodes[at + 1 :]):  # which passes as fast as these can answer
                                await ask(each, "PING")
                            time_.now += 0.1
                        assert looking.done()
                        assert looking.result() == expected
                finally:
                    cluster[at].go_on()
                await eventually(is_whole, within_s=60)
            finally:
                await backend.aclose()
                for each in nodes:
                    await each.aclose()

    async def test_a_lost_node_costs_its_own_keys(self, cluster: list[RedisServer], certificates: Path) -> None:
        """While one node of a cluster is away, the blocks of the others are served, and it is named."""
        keys = [block_key(n) for n in range(30)]
        settings = guarded_settings(cluster[0], certificates, cluster=True)
        async with open_backend(backend_of(cluster[0], **settings)) as backend:
            await backend.write(keys, blocks_of(30, 4096))
            cluster[2].kill()
            try:
                outcomes = await backend.read(keys, empty(30, 4096))
            finally:
                cluster[2].restart()
            assert set(outcomes) == {Outcome.HIT, Outcome.FAILED}
            assert f"127.0.0.1:{cluster[2].port}" in str(backend.describe()["last_error"])

    async def test_a_slot_that_moves_at_opening(self, cluster: list[RedisServer], certificates: Path) -> None:
        """Who has said that it is a cluster, and meets a slot of which not all nodes know yet, may try again."""
        prefix = next(_prefixes) + "{moving}"  # one slot for all
        nodes = clients_of(cluster, certificates)
        slot, ids, source = await slot_of(nodes, prefix)
        others = [n for n in range(len(nodes)) if n != source]
        settings = guarded_settings(cluster[others[0]], certificates, cluster=True, prefix=prefix)

        async def has_moved() -> bool:
            error = await why_not_open(backend_of(cluster[others[0]], **settings))
            assert isinstance(error, BackendUnavailableError)
            return "MOVED" in str(error)  # the cluster may not have recovered yet from what it met before

        await ask(nodes[source], "CLUSTER SETSLOT", slot, "NODE", ids[others[0]])
        try:
            await eventually(has_moved)
        finally:
            await ask(nodes[source], "CLUSTER SETSLOT", slot, "NODE", ids[source])
            for node in nodes:
                await node.aclose()

    async def test_a_cluster_is_opened_without_a_lost_node(
        self, cluster: list[RedisServer], certificates: Path
    ) -> None:
        """Wherever the key lies that opening tries: what the other nodes hold is served from the beginning."""
        settings = guarded_settings(cluster[0], certificates, cluster=True)
        keys = [block_key(n) for n in range(30)]
        cluster[2].kill()
        try:
            for _ in range(12):
                async with open_backend(backend_of(cluster[0], **settings)) as backend:
                    assert set(await backend.lookup(keys)) == {Outcome.MISS, Outcome.FAILED}
        finally:
            cluster[2].restart()

    async def test_a_lost_node_is_left_alone(self, cluster: list[RedisServer], certificates: Path) -> None:
        """While one node of a cluster is away, calls do not have the others say each time who holds which keys."""
        keys = [block_key(n) for n in range(30)]
        backend = backend_of(cluster[0], **guarded_settings(cluster[0], certificates, cluster=True))
        watchers = clients_of(cluster, certificates)[:2]
        with open_context() as context:

            async def is_open() -> bool:
                with suppress(BackendUnavailableError):  # a node of another test has just come back
                    await backend.open(replace(context, clock=lambda: 0.0))
                    return True
                return False

            async def is_whole() -> bool:
                return set(await backend.lookup(keys)) == {Outcome.MISS}

            await eventually(is_open)
            try:
                await eventually(is_whole)
                before = [await num_asked(each) for each in watchers]
                cluster[2].kill()
                try:
                    for _ in range(10):
                        assert set(await backend.lookup(keys)) == {Outcome.MISS, Outcome.FAILED}
                    asked = [await num_asked(each) for each in watchers]
                finally:
                    cluster[2].restart()
                assert sum(asked) - sum(before) <= 3
            finally:
                await backend.aclose()
                for each in watchers:
                    await each.aclose()

    async def test_a_stalled_sentinel_is_passed_over(self, tmp_path: Path) -> None:
        """Where one Sentinel stands still, the next one is asked in the same call."""
        binary = find_binary("redis-server")
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
        with (
            run_redis(binary, tmp_path / "master") as master,
            run_sentinel(binary, tmp_path / "one", master) as one,
            run_sentinel(binary, tmp_path / "other", master) as other,
        ):
            url = f"{one.url},127.0.0.1:{other.port}"
            one.pause()
            async with open_backend(backend_of(master, url=url, sentinel_master="kv")) as backend:
                assert await backend.write([block_key(0)], blocks_of(1)) == [Outcome.STORED]

    @pytest.mark.parametrize(
        "becomes", [("REPLICAOF", "127.0.0.1", "1"), ("CONFIG", "SET", "min-replicas-to-write", "1")]
    )
    async def test_a_server_that_takes_no_writes_any_more_is_read(
        self, tmp_path: Path, becomes: tuple[str, ...]
    ) -> None:
        """What is read lives no longer for it then, which would be a write; what is absent is a miss."""
        with run_redis(find_binary("redis-server"), tmp_path) as server:
            async with Redis(port=server.port) as operator, open_backend(backend_of(server, ttl_s=1000)) as backend:
                await backend.write([block_key(0), block_key(2)], blocks_of(2))
                await ask(operator, *becomes)
                keys, into = [block_key(n) for n in range(3)], empty(3)
                assert await backend.read(keys, into) == [Outcome.HIT, Outcome.MISS, Outcome.HIT]
                assert [bytes(into[n].payload) for n in (0, 2)] == [bytes(block.payload) for block in blocks_of(2)]
                with pytest.raises(BackendUnavailableError, match=r"READONLY|NOREPLICAS"):
                    await backend.write([block_key(1)], blocks_of(1))

    async def test_a_failover_is_followed(self, tmp_path: Path) -> None:
        """When Sentinel names another master, calls go there, and what was replicated is there."""
        binary = find_binary("redis-server")
        with (
            run_redis(binary, tmp_path / "first") as first,
            run_redis(binary, tmp_path / "second", "--replicaof", "127.0.0.1", str(first.port)) as second,
            run_sentinel(binary, tmp_path, first) as sentinel,
        ):
            backend = backend_of(sentinel, sentinel_master="kv")
            async with Redis(port=sentinel.port) as watcher, Redis(port=second.port) as replica, open_backend(backend):
                await backend.write([block_key(0)], blocks_of(1))

                async def is_replicated() -> bool:
                    return bool(await replica.dbsize()) and len(await watcher.sentinel_slaves("kv")) == 1

                await eventually(is_replicated)
                first.kill()

                async def is_written() -> bool:
                    try:
                        return await backend.write([block_key(1)], blocks_of(1)) == [Outcome.STORED]
                    except BackendUnavailableError:
                        return False

                await eventually(is_written, within_s=40)
                assert await backend.read([block_key(0)], empty(1)) == [Outcome.HIT]


def clients_of(cluster: list[RedisServer], certificates: Path) -> list[Redis]:
    """Return a client that may do everything for each node."""
    login = {"username": "admin", "password": "admin", "ssl": True, "ssl_ca_certs": str(certificates / "ca.pem")}
    return [Redis(port=node.port, host="127.0.0.1", protocol=2, **login) for node in cluster]  # type: ignore[arg-type]


async def slot_of(nodes: list[Redis], name: str) -> tuple[int, list[str], int]:
    """Return the slot of a key, the nodes' ids, and which of them has it."""
    slot = await ask(nodes[0], "CLUSTER KEYSLOT", name)
    ids = [(await ask(node, "CLUSTER MYID")).decode() for node in nodes]
    shards = await ask(nodes[0], "CLUSTER SLOTS")
    return slot, ids, ids.index(next(shard[2][2].decode() for shard in shards if shard[0] <= slot <= shard[1]))


async def prefix_held_by(nodes: list[Redis], at: int) -> str:
    """Return a prefix of keys that are all in one slot, of this node."""
    while True:
        prefix = f"kv/{{{next(_prefixes)}}}"
        if (await slot_of(nodes, prefix))[2] == at:
            return prefix


async def move_keys(nodes: list[Redis], name: str, *, to: int) -> None:
    """Have the keys of a slot come to another node, as at the beginning of a resharding."""
    slot, ids, source = await slot_of(nodes, name)
    await ask(nodes[to], "CLUSTER SETSLOT", slot, "IMPORTING", ids[source])
    await ask(nodes[source], "CLUSTER SETSLOT", slot, "MIGRATING", ids[to])
    names = await ask(nodes[source], "CLUSTER GETKEYSINSLOT", slot, 1000)
    port = nodes[to].connection_pool.connection_kwargs["port"]
    there = "127.0.0.1", port, "", 0, 10_000, "AUTH2", "admin", "admin", "KEYS"
    assert await ask(nodes[source], "MIGRATE", *there, *names) in {b"OK", True}


async def give_slot(nodes: list[Redis], name: str, to: int) -> None:
    """Give a slot, whose keys have come, to a node, as at the end of a resharding."""
    slot, ids, source = await slot_of(nodes, name)
    for each in (nodes[to], nodes[source], *nodes):
        await ask(each, "CLUSTER SETSLOT", slot, "NODE", ids[to])


@asynccontextmanager
async def slot_on_its_way(cluster: list[RedisServer], certificates: Path, name: str) -> AsyncIterator[None]:
    """Let the slot of a key be on its way to another node, and have it stay where it was in the end."""
    nodes = clients_of(cluster, certificates)
    slot, ids, source = await slot_of(nodes, name)
    target = (source + 1) % len(ids)
    await ask(nodes[target], "CLUSTER SETSLOT", slot, "IMPORTING", ids[source])
    await ask(nodes[source], "CLUSTER SETSLOT", slot, "MIGRATING", ids[target])
    try:
        yield
    finally:
        for node in nodes:
            await ask(node, "CLUSTER SETSLOT", slot, "STABLE")
            await node.aclose()


async def move_slot(cluster: list[RedisServer], certificates: Path, name: str) -> None:
    """Give the slot of a key, in which there is none, to another node."""
    nodes = clients_of(cluster, certificates)
    slot, ids, source = await slot_of(nodes, name)
    owned = [await ask(node, "CLUSTER COUNTKEYSINSLOT", slot) for node in nodes]
    assert not any(owned)
    target = ids[(source + 1) % len(ids)]
    for node in sorted(zip(ids, nodes, strict=True), key=lambda pair: pair[0] != target):
        await ask(node[1], "CLUSTER SETSLOT", slot, "NODE", target)
    for each in nodes:
        await each.aclose()


async def num_asked(node: Redis) -> int:
    """Return how often a node was asked who holds which keys."""
    said = await node.info("commandstats")
    return int(said.get("cmdstat_cluster|slots", {"calls": 0})["calls"])


async def ask(node: Redis, *words: object) -> Any:  # noqa: ANN401 - whatever it answers
    """Send any command."""
    return await node.execute_command(*words)  # type: ignore[no-untyped-call]


@asynccontextmanager
async def cutting_proxy(port: int, cut_after: int) -> AsyncIterator[int]:
    """Yield the port of a proxy that once, after so many bytes of replies, closes a connection."""
    left = [cut_after]

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", port)
        upward = asyncio.ensure_future(pump(reader, upstream_writer))
        try:
            while data := await upstream_reader.read(65536):
                if 0 < left[0] <= len(data):
                    left[0] = 0
                    break
                left[0] -= len(data) if left[0] else 0
                writer.write(data)
                await writer.drain()
        finally:
            upward.cancel()
            writer.transport.abort()
            upstream_writer.close()

    async with serving(relay) as proxy:
        yield proxy


@asynccontextmanager
async def holding_proxy(port: int) -> AsyncIterator[tuple[int, dict[str, int]]]:
    """Yield the port of a proxy, and a dict: of a command named there, so many are awaited before any goes on."""
    holds: dict[str, int] = {}

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", port)
        downward = asyncio.ensure_future(pump(upstream_reader, writer))
        held = b""
        try:
            while data := await reader.read(65536):
                held += data
                if all(held.count(word.encode()) in {0, number} for word, number in holds.items()):
                    upstream_writer.write(held)
                    held = b""
        finally:
            downward.cancel()
            upstream_writer.close()
            writer.close()

    async with serving(relay) as proxy:
        yield proxy, holds


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what comes."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


@asynccontextmanager
async def serving(
    relay: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """Yield the port at which connections are relayed."""
    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
