"""The whole cache over real servers: they stall, come late, refuse, are shared; a process dies while it stores."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore", reason="obstore is missing: pip install 'tiered-kv[s3]'")

from redis.asyncio import Redis

import ceph_server
import chain_process
from mooncake_server import mooncake_server
from namespaces import hosts
from ports import deaf_port, free_port
from redis_server import find_binary, run_redis
from s3_server import S3Server, is_ceph, s3_server
from tests.support.caches import Recorder, keep, open_cache
from tests.support.engine import Engine, contents, prompt
from tiered_kv import (
    BackendUnavailableError,
    BlockKeys,
    ConfigurationError,
    GPULoadStoreSpec,
    LoadResult,
    StoreResult,
    TieredKV,
    hash_blocks,
)
from tiered_kv.settings.registry import resolve
from tiered_kv.values.events import TierFailed, TierResumed, TierStalled, TierTripped

NUM_BLOCKS = chain_process.NUM_BLOCKS
NEAR, FAR = prompt(NUM_BLOCKS, seed=1), prompt(NUM_BLOCKS, seed=2)
DEADLINE_S = 2.0
NO_HURRY_S = 30.0
"""Where all is to come, however busy the machine is."""
SCHEDULING_S = 1.0
"""What a loaded machine may add to a deadline."""
PACE_S = 0.02
_names = (f"test/{n}" for n in itertools.count())


@dataclass(frozen=True)
class Medium:
    """A server that runs, as a tier of a name of its own in it."""

    tier: dict[str, Any]
    stopped: Callable[[], AbstractContextManager[None]]
    """Within, it answers nobody."""

    @property
    def name(self) -> str:
        """The tier's, in results."""
        return str(self.tier["medium"])


@pytest.fixture(scope="module")
def redis_medium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Medium]:
    """A server without a password."""
    with run_redis(find_binary("redis-server"), tmp_path_factory.mktemp("redis")) as server:

        @contextmanager
        def stopped() -> Iterator[None]:
            server.pause()
            try:
                yield
            finally:
                server.go_on()

        yield Medium({"medium": "redis", "url": server.url}, stopped)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A gateway with a bucket."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")
def s3_medium(gateway: S3Server) -> Medium:
    """The gateway."""
    keys = {"access_key_id": ceph_server.ACCESS_KEY, "secret_access_key": ceph_server.SECRET_KEY}
    return Medium({"medium": "s3", "url": "s3://blocks/", "endpoint": gateway.endpoint, **keys}, gateway.stopped)


@pytest.fixture(scope="module")
def mooncake_medium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Medium]:
    """A store whose memory is in a process of its own. A client that waits for it cannot be told to stop waiting."""
    with mooncake_server(tmp_path_factory.mktemp("mooncake")) as server:
        yield Medium({"medium": "mooncake", "url": server.url}, server.stopped)


def tier_of(request: pytest.FixtureRequest, name: str, **settings: object) -> tuple[Medium, dict[str, Any]]:
    """Return a medium and a tier in it that no other test's blocks are in (but in Mooncake, which has no prefixes)."""
    medium: Medium = request.getfixturevalue(f"{name}_medium")
    own = {"redis": {"prefix": next(_names)}, "s3": {"url": f"s3://blocks/{next(_names)}"}}.get(name, {})
    return medium, {**medium.tier, **own, **settings}


async def load(
    kv: TieredKV, engine: Engine, keys: BlockKeys, start: int = 0, deadline_s: float = DEADLINE_S
) -> LoadResult:
    """Load into the pages from ``start`` on: in time, and nothing but right bytes."""
    pages, began = range(start, start + len(keys)), time.monotonic()
    loaded = await kv.load(keys, GPULoadStoreSpec(pages), deadline_s=deadline_s)
    assert time.monotonic() - began < deadline_s + SCHEDULING_S
    assert engine.read(pages)[: loaded.num_blocks] == contents(keys)[: loaded.num_blocks]
    await asyncio.sleep(PACE_S)  # the pace of the load, no wait for anything
    return loaded


async def store_few(kv: TieredKV, engine: Engine, seed: int) -> StoreResult:
    """Store a prompt of a few blocks from the engine's last pages."""
    keys = prompt(4, seed=seed)
    stored = await kv.store(keys, engine.compute(keys, range(engine.num_pages - 4, engine.num_pages)))
    await asyncio.sleep(PACE_S)
    return stored


async def is_stored_in(kv: TieredKV, name: str, engine: Engine, seed: int) -> bool:
    """Store a prompt, and say whether it went to this tier."""
    settled = await (await store_few(kv, engine, seed)).settled()
    return any(tier.tier == name and tier.written for tier in settled)


# Servers that stall


@pytest.mark.parametrize(
    ("name", "timeout_s", "stall_s"),
    [
        pytest.param("redis", DEADLINE_S / 2, 5, id="redis_gives_up"),
        pytest.param("redis", DEADLINE_S * 1.5, 5, id="loads_from_redis_give_up"),
        pytest.param("redis", DEADLINE_S * 1.5, 20, marks=pytest.mark.slow, id="loads_from_redis_give_up_for_long"),
        pytest.param("s3", DEADLINE_S * 1.5, 5, id="loads_from_s3_give_up"),
        pytest.param("mooncake", DEADLINE_S / 2, 5, id="mooncake_is_given_up"),
    ],
)
async def test_a_stalled_server_costs_no_load_its_deadline(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, timeout_s: float, stall_s: float
) -> None:
    """While it stalls under load it is bypassed and the disk serves; within seconds of its return it is used again."""
    medium, tier = tier_of(request, name, timeout_s=timeout_s)
    disk = {"medium": "nvme", "path": str(tmp_path), "capacity": "16MiB"}
    engine, recorder = Engine(num_pages=4 * NUM_BLOCKS), Recorder()
    async with open_cache(tier, engine=engine) as kv:
        await keep(kv, engine, FAR)
    async with open_cache(disk, tier, engine=engine, emit=recorder) as kv:
        await keep(kv, engine, NEAR)
        assert (await load(kv, engine, FAR, deadline_s=NO_HURRY_S)).by_tier == {name: NUM_BLOCKS}
        with medium.stopped():
            assert await was_bypassed_under_load(kv, engine, name, stall_s)
        async with asyncio.timeout(30):
            loads = stores = False  # each has a breaker of its own, closed by the next call that goes well
            for seed in itertools.count(1000):
                loads |= (await load(kv, engine, FAR)).by_tier == {name: NUM_BLOCKS}
                stores = stores or await is_stored_in(kv, name, engine, seed)
                if loads and stores and not kv.stats()[name].is_bypassed:
                    break
        assert any(isinstance(event, TierStalled | TierTripped) for event in recorder.events)
        assert recorder.of(TierResumed)


async def was_bypassed_under_load(kv: TieredKV, engine: Engine, name: str, stall_s: float) -> bool:
    """Load what only the stalled tier has, and what the disk has, and store, all at once; the disk fails nobody."""
    ends, seeds, was_bypassed = time.monotonic() + stall_s, itertools.count(10), False

    async def load_far() -> None:
        nonlocal was_bypassed
        assert not (await load(kv, engine, FAR)).num_blocks
        was_bypassed |= kv.stats()[name].is_bypassed

    async def load_near() -> None:
        assert (await load(kv, engine, NEAR, NUM_BLOCKS)).by_tier == {"nvme": NUM_BLOCKS}

    async def again_and_again(do: Callable[[], Awaitable[object]]) -> None:
        while time.monotonic() < ends:
            await do()

    async with asyncio.TaskGroup() as group:
        for each in (load_far, load_far, load_near, lambda: store_few(kv, engine, next(seeds))):
            group.create_task(again_and_again(each))
    return was_bypassed


# Several processes


@pytest.mark.parametrize("name", ["redis", "s3", "mooncake"])
async def test_what_one_process_stores_another_loads(request: pytest.FixtureRequest, name: str) -> None:
    """Byte for byte, in both directions."""
    _, tier = tier_of(request, name)
    theirs, ours = prompt(NUM_BLOCKS, seed=3), prompt(NUM_BLOCKS, seed=4)
    engine = Engine()
    async with open_cache(tier, engine=engine) as kv:
        await keep(kv, engine, ours)
        assert await said_by([tier], "load", [4]) == [(4, NUM_BLOCKS)]
        assert await said_by([tier], "store", [3]) == [(3, NUM_BLOCKS)]
        engine.poison()
        loaded = await load(kv, engine, theirs, deadline_s=NO_HURRY_S)
        assert loaded.by_tier == {name: NUM_BLOCKS}, loaded.faults


@pytest.mark.parametrize("name", ["redis", "s3", "mooncake"])
async def test_a_process_killed_while_it_stores_harms_nobody(request: pytest.FixtureRequest, name: str) -> None:
    """What it had stored is there; of what it was storing there is a right prefix or nothing; others store on."""
    _, tier = tier_of(request, name)
    seeds, engine = range(100, 2000), Engine()
    with chain_process.start([tier], "store", seeds) as process:
        assert process.stdout is not None
        lines = [await asyncio.to_thread(process.stdout.readline) for _ in range(3)]
        process.kill()
        lines += process.stdout.readlines()
    settled = {int(seed): int(count) for seed, count in map(str.split, lines)}
    assert set(settled.values()) == {NUM_BLOCKS}
    async with open_cache(tier, engine=engine) as kv:
        for seed in seeds[: len(settled) + 2]:
            loaded = await load(kv, engine, prompt(NUM_BLOCKS, seed=seed), deadline_s=NO_HURRY_S)
            assert loaded.num_blocks == NUM_BLOCKS or seed not in settled, loaded.faults
            assert not kv.stats()[name].corrupt
        fresh = prompt(NUM_BLOCKS, seed=5)
        await keep(kv, engine, fresh)
        assert (await load(kv, engine, fresh, deadline_s=NO_HURRY_S)).by_tier == {name: NUM_BLOCKS}


async def test_two_hosts_share_redis(tmp_path: Path) -> None:
    """Hosts that have no memory, disk or loopback in common load what the other stored, byte for byte."""
    with hosts(2) as (one, other), run_redis(find_binary("redis-server"), tmp_path) as server:
        async with Redis(port=server.port) as admin:
            await admin.config_set("bind", f"127.0.0.1 {one.gateway} {other.gateway}")
            await admin.config_set("protected-mode", "no")
        for writer, reader, seed in ((one, other, 6), (other, one, 7)):
            at_writer = {"medium": "redis", "url": f"redis://{writer.gateway}:{server.port}"}
            at_reader = {"medium": "redis", "url": f"redis://{reader.gateway}:{server.port}"}
            assert await said_by([at_writer], "store", [seed], writer.within) == [(seed, NUM_BLOCKS)]
            assert await said_by([at_reader], "load", [seed], reader.within) == [(seed, NUM_BLOCKS)]


async def said_by(
    tiers: list[dict[str, Any]], doing: str, seeds: list[int], within: Sequence[str] = ()
) -> list[tuple[int, ...]]:
    """Return what a process that does this says, and wait for its end."""
    with chain_process.start(tiers, doing, seeds, within) as process:
        said, _ = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0
    return [tuple(map(int, line.split())) for line in said.splitlines()]


# Servers that are not there, or refuse


WRONG = [
    ("redis", {"password": "wrong"}, ConfigurationError, "invalid|WRONGPASS|AUTH"),
    ("redis", {"url": "NOBODY"}, BackendUnavailableError, "refused|Connect call failed"),
    ("redis", {"url": "DEAF"}, BackendUnavailableError, "within 0.5 s"),
    ("s3", {"secret_access_key": "wrong"}, ConfigurationError, "credentials"),
    ("s3", {"endpoint": "NOBODY"}, BackendUnavailableError, "does not answer"),
    ("s3", {"endpoint": "DEAF"}, BackendUnavailableError, "does not answer"),
    ("mooncake", {"url": "NOBODY"}, BackendUnavailableError, "Connect call failed"),
    ("mooncake", {"url": "DEAF"}, BackendUnavailableError, "no answer within 0.5 s"),
]
_CONNECT = {"redis": "connect_timeout_s", "s3": "connect_timeout_s", "mooncake": "timeout_s"}
_SCHEMES = {"redis": "redis", "s3": "http", "mooncake": "mooncake"}


@contextmanager
def addresses() -> Iterator[dict[str, str]]:
    """Yield where nobody listens, and where connections are taken and nothing more."""
    with deaf_port() as deaf:
        yield {"NOBODY": f"127.0.0.1:{free_port()}", "DEAF": f"127.0.0.1:{deaf}"}


@pytest.mark.parametrize(("name", "changes", "error", "message"), WRONG, ids=str)
async def test_a_required_tier_that_cannot_be_opened_is_an_error(
    request: pytest.FixtureRequest, name: str, changes: dict[str, str], error: type[Exception], message: str
) -> None:
    """The whole cache says so, with the reason, within the connect deadline; one not required does not hold it up."""
    limit_s = 0.5 if "DEAF" in changes.values() else 5.0  # who is to answer has time for it
    _, tier = tier_of(request, name, **{_CONNECT[name]: limit_s})
    if "secret_access_key" in changes:
        is_ceph(request.getfixturevalue("gateway"))
    with addresses() as nowhere:
        wrong = {key: f"{_SCHEMES[name]}://{nowhere[to]}" if to in nowhere else to for key, to in changes.items()}
        async with asyncio.timeout(limit_s + SCHEDULING_S):
            with pytest.raises(error, match=message):
                async with open_cache(tier | wrong):
                    pass
        if "DEAF" in changes.values() and name == "mooncake":
            return  # as above; its client has no time limit of its own
        engine, recorder = Engine(), Recorder()
        tiers = ({"medium": "cpu", "capacity": "1MiB"}, {**tier, **wrong, "required": False})
        async with asyncio.timeout(limit_s + 2 * SCHEDULING_S):
            async with open_cache(*tiers, engine=engine, emit=recorder) as kv:
                assert kv.stats()[name].is_bypassed
                await keep(kv, engine, NEAR)
                assert (await load(kv, engine, NEAR)).by_tier == {"cpu": NUM_BLOCKS}
                assert [(event.tier, event.doing) for event in recorder.of(TierFailed)][:1] == [(name, "open")]


async def test_redis_that_comes_up_later_is_used(tmp_path: Path) -> None:
    """The cache opens without it; once the server runs, and has the right password, blocks go there and come back."""
    port, binary = free_port(), find_binary("redis-server")
    tier = {"medium": "redis", "url": f"redis://127.0.0.1:{port}", "password": "right", "required": False}
    engine = Engine()
    async with open_cache(tier, engine=engine) as kv:
        assert kv.stats()["redis"].is_bypassed
        with run_redis(binary, tmp_path, "--requirepass", "right", port=port):
            await in_use(kv, "redis", engine)


async def test_redis_that_refused_the_password_is_used_once_it_takes_it(tmp_path: Path) -> None:
    """Credentials may be mended on the server: a tier not required is tried again after a refusal too."""
    with run_redis(find_binary("redis-server"), tmp_path, "--requirepass", "another") as server:
        tier = {"medium": "redis", "url": server.url, "password": "right", "required": False}
        engine, admin_url = Engine(), server.url.replace("//", "//:another@")
        async with open_cache(tier, engine=engine) as kv, Redis.from_url(admin_url) as admin:
            assert kv.stats()["redis"].is_bypassed
            await admin.config_set("requirepass", "right")
            await in_use(kv, "redis", engine)


async def test_s3_that_comes_up_later_is_used(request: pytest.FixtureRequest, gateway: S3Server) -> None:
    """The same with a gateway that is down when the cache is opened."""
    ceph = is_ceph(gateway)
    _, tier = tier_of(request, "s3", required=False)
    engine = Engine()
    async with AsyncExitStack() as stack:
        ceph.kill()
        try:
            kv = await stack.enter_async_context(open_cache(tier, engine=engine))
            assert kv.stats()["s3"].is_bypassed
        finally:
            ceph.start()
        await in_use(kv, "s3", engine)


async def in_use(kv: TieredKV, name: str, engine: Engine) -> None:
    """Wait until blocks are stored in this tier, and load some from it."""
    async with asyncio.timeout(30):
        seed = 2000
        while not await is_stored_in(kv, name, engine, seed):
            seed += 1
    assert (await load(kv, engine, prompt(4, seed=seed))).by_tier == {name: 4}


# Tenants


@pytest.mark.parametrize("name", ["redis", "s3", "mooncake", "shared_fs"])
async def test_a_tenants_blocks_can_be_deleted(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    """By the salt alone, in every shared medium by the same call; what others stored of the same prompt stays."""
    if name == "shared_fs":
        tier = {"medium": "shared_fs", "path": str(tmp_path), "capacity": "64MiB", "min_free_fraction": 0.0}
    else:
        _, tier = tier_of(request, name)
    tokens, engine = range(16 * NUM_BLOCKS), Engine()
    tenants = [hash_blocks(tokens, block_size=16, salt=salt) for salt in ("a", "b", "")]
    async with open_cache(tier, engine=engine) as kv:
        for keys in tenants:
            await keep(kv, engine, keys)
    delete_tenant = resolve(name).delete_tenant
    assert await delete_tenant(tier, "a") > 0
    async with open_cache(tier, engine=engine) as kv:
        assert [(await load(kv, engine, keys)).num_blocks for keys in tenants] == [0, NUM_BLOCKS, NUM_BLOCKS]
