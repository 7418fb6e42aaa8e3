import asyncio
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.support.caches import until
from tiered_kv.media.backend import Block, Outcome, RecordShape
from tiered_kv.media.record import verify
from tiered_kv.testing import GROUPS, BackendTests, block_key, make_block, open_backend, open_context
from tiered_kv.values.errors import BackendUnavailableError, ClosedError, ConfigurationError
from tiered_kv.values.specs import LoadStoreSpec, RemoteLoadStoreSpec

MISSING = "mooncake or libibverbs is missing: pip install 'tiered-kv[mooncake]'; apt-get install libibverbs1"
pytest.importorskip("mooncake.store", reason=MISSING, exc_type=ImportError)

from mooncake.store import MooncakeDistributedStore  # noqa: E402 - after the check for it

from mooncake_server import MooncakeServer, mooncake_server  # noqa: E402 - after the check for its client
from ports import deaf_port, hung_resolver  # noqa: E402 - after the check for its client
from tiered_kv_backends import mooncake  # noqa: E402 - only where it can be imported
from tiered_kv_backends.mooncake import MooncakeBackend  # noqa: E402 - only where it can be imported

SIZE = 2 << 20
SHAPE = RecordShape(GROUPS[0].fingerprint, SIZE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer]:
    """One store for all tests that leave it as it is."""
    with mooncake_server(tmp_path_factory.mktemp("mooncake")) as server:
        yield server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[MooncakeServer]:
    """A store that a test may break."""
    with mooncake_server(tmp_path) as server:
        yield server


def backend_at(server: MooncakeServer, **settings: object) -> MooncakeBackend:
    """Return a client that gives no memory."""
    return MooncakeBackend(MooncakeBackend.Settings.model_validate({"url": server.url, **settings}))


@pytest.mark.parametrize(("protocol", "keeps"), [("tcp", False), ("rdma", True)])
def test_memory_that_rdma_knows_is_not_given_back(protocol: str, *, keeps: bool) -> None:
    """It is registered once, by its pages, and never again."""
    assert MooncakeBackend({"url": "mooncake://127.0.0.1:1", "protocol": protocol}).keeps_memory is keeps


class TestMooncakeBackend(BackendTests):
    capacity_bytes = None  # the store's segments are its limit
    survives_reopening = True

    @pytest.fixture
    async def backend(self, server: MooncakeServer) -> AsyncIterator[MooncakeBackend]:
        """A client of the running store, emptied."""
        server.clear()
        async with open_backend(backend_at(server)) as backend:
            yield backend

    async def records_at(self, spec: LoadStoreSpec) -> list[bytes]:
        """Join the store of the spec's URL with a client of our own."""
        assert isinstance(spec, RemoteLoadStoreSpec)
        client, master = MooncakeDistributedStore(), urlsplit(spec.url).netloc
        assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
        try:
            return [client.get(spec.names[number]) for number in spec.ids]
        finally:
            client.close()


def content(n: int) -> bytes:
    """Return what block ``n`` holds."""
    return np.random.default_rng(n).bytes(SIZE)


async def store(backend: MooncakeBackend, numbers: list[int]) -> list[Outcome]:
    """Write blocks of 2 MiB by number."""
    keys = [block_key(n) for n in numbers]
    return await backend.write(keys, [make_block(content(n), key) for n, key in zip(numbers, keys, strict=True)])


async def load(backend: MooncakeBackend, numbers: list[int]) -> dict[int, bytes]:
    """Read blocks by number; return what those found hold, and check that their records are right."""
    keys, into = [block_key(n) for n in numbers], [Block.empty(SIZE) for _ in numbers]
    found = [i for i, outcome in enumerate(await backend.read(keys, into)) if outcome is Outcome.HIT]
    assert [verify(keys[i], into[i]) for i in found] == [Outcome.HIT] * len(found)
    return {numbers[i]: bytes(into[i].payload) for i in found}


async def test_what_one_host_stores_another_loads(server: MooncakeServer) -> None:
    """Two clients of one store see each other's blocks, a batch of more than one call whole and in order."""
    server.clear()
    async with open_backend(backend_at(server)) as a, open_backend(backend_at(server)) as b:
        assert await store(a, list(range(20))) == [Outcome.STORED] * 20
        assert await b.lookup_prefix([block_key(n) for n in range(25)]) == 20
        assert await load(b, list(range(25))) == {n: content(n) for n in range(20)}


async def test_a_process_may_give_memory(own_server: MooncakeServer) -> None:
    """What lies in the memory of a process that leaves is a miss from then on, for the others too."""
    own_server.storage.kill()
    own_server.storage.wait()
    async with open_backend(backend_at(own_server)) as reader:
        async with open_backend(backend_at(own_server, segment="64MiB")) as giver:
            assert await within_30_s(giver, [1]) == [Outcome.STORED]
            assert (await load(reader, [1])).keys() == {1}
        assert not await load_or_nothing(reader, [1])


async def test_a_full_store_makes_room_or_refuses(server: MooncakeServer) -> None:
    """More than fits is stored in part; nothing fails, and what is found is right."""
    server.clear()
    async with open_backend(backend_at(server)) as backend:
        outcomes = [outcome for n in range(0, 160, 8) for outcome in await store(backend, list(range(n, n + 8)))]
        assert set(outcomes) <= {Outcome.STORED, Outcome.REFUSED}
        assert outcomes[:80] == [Outcome.STORED] * 80
        found = await load(backend, list(range(160)))
        assert found
        assert found == {n: content(n) for n in found}
    server.clear()


async def test_a_stopped_master_is_waited_for(own_server: MooncakeServer) -> None:
    """A call that finds the master standing still ends when it goes on, as if nothing had been."""
    async with open_backend(backend_at(own_server)) as backend:
        await store(backend, [1])
        own_server.master.send_signal(signal.SIGSTOP)
        reading = asyncio.ensure_future(load(backend, [1]))
        await asyncio.sleep(0)
        own_server.master.send_signal(signal.SIGCONT)
        assert await reading == {1: content(1)}


async def test_a_dead_host_costs_its_blocks(own_server: MooncakeServer) -> None:
    """Blocks whose memory has died are no hits and no bytes; stores are refused until there is memory again."""
    async with open_backend(backend_at(own_server)) as backend:
        await store(backend, [1, 2])
        own_server.storage.kill()
        own_server.storage.wait()
        assert not await load_or_nothing(backend, [1, 2])
        own_server.start_storage()
        assert await within_30_s(backend, [3]) == [Outcome.STORED]
        assert await load(backend, [3]) == {3: content(3)}


async def test_a_dead_master_is_unavailable(own_server: MooncakeServer) -> None:
    """Without its master the tier fails with an error of ours, whatever is asked."""
    async with open_backend(backend_at(own_server)) as backend:
        await store(backend, [1])
        own_server.master.kill()
        own_server.master.wait()
        calls = (
            backend.lookup([block_key(1)]),
            load(backend, [1]),
            store(backend, [2]),
            backend.delete([block_key(1)]),
        )
        for call in calls:
            with pytest.raises(
                BackendUnavailableError, match=r"its client says -900 \(its master, or another host, does not answer\)"
            ):
                await call


async def load_or_nothing(backend: MooncakeBackend, numbers: list[int]) -> dict[int, bytes]:
    """Read blocks of a store that may fail."""
    try:
        return await load(backend, numbers)
    except BackendUnavailableError:
        return {}


async def within_30_s(backend: MooncakeBackend, numbers: list[int]) -> list[Outcome]:
    """Store, again until it works: the master takes its time to notice who came and went."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if Outcome.REFUSED not in (outcomes := await store(backend, numbers)):
                return outcomes
        except BackendUnavailableError:
            pass
    return []


async def test_nobody_there(own_server: MooncakeServer) -> None:
    """Where no master listens, or it says nothing, opening is an error that says so, within the time limit."""
    with open_context() as context:
        own_server.master.kill()
        own_server.master.wait()
        with pytest.raises(BackendUnavailableError, match=r"127\.0\.0\.1:\d+: Connect call failed"):
            await backend_at(own_server).open(context)


async def test_a_master_that_does_not_answer() -> None:
    """A host that takes no connection ends in our error, not in the client's one and a half minutes."""
    with deaf_port() as deaf, open_context() as context:
        settings = MooncakeBackend.Settings(url=f"mooncake://127.0.0.1:{deaf}", timeout_s=0.2)
        with pytest.raises(BackendUnavailableError, match=r"no answer within 0\.2 s"):
            await MooncakeBackend(settings).open(context)


async def test_a_resolver_that_hangs_takes_no_thread_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a tier is opened again that is not required; a master without an address is an error of ours."""
    with hung_resolver(monkeypatch) as (asked, _), open_context() as context:
        for _ in range(20):
            with pytest.raises(BackendUnavailableError, match=r"no answer within 0\.02 s"):
                await MooncakeBackend({"url": "mooncake://a.server:1", "timeout_s": 0.02}).open(context)
        assert len(asked) == 1
        assert await asyncio.to_thread(len, asked) == 1
    with open_context() as context, pytest.raises(BackendUnavailableError, match=r"master at x+:1: x+: "):
        await MooncakeBackend({"url": f"mooncake://{'x' * 70}:1"}).open(context)


async def test_a_master_that_stands_still_keeps_nobody() -> None:
    """A host that takes connections and says nothing ends in our error in time: the client is not asked to join it."""
    with socket.create_server(("127.0.0.1", 0)) as mute, open_context() as context:
        settings = MooncakeBackend.Settings(url=f"mooncake://127.0.0.1:{mute.getsockname()[1]}", timeout_s=0.5)
        with pytest.raises(BackendUnavailableError, match=r"no answer within 0\.5 s"):
            await MooncakeBackend(settings).open(context)


async def test_what_the_client_says_of_joining_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last words of the process that joins first are in the error."""
    monkeypatch.setattr(mooncake, "_JOIN", "raise ImportError('no such client')")
    with socket.create_server(("127.0.0.1", 0)) as mute, open_context() as context:
        settings = MooncakeBackend.Settings(url=f"mooncake://127.0.0.1:{mute.getsockname()[1]}")
        with pytest.raises(BackendUnavailableError, match="its client says ImportError: no such client"):
            await MooncakeBackend(settings).open(context)


class SlowStore:
    """A client that joins when a test lets it.

    Attributes:
        joining: Those that were told to join, or have.
        may_join: For all of them.
    """

    joining: list["SlowStore"]
    may_join: threading.Event

    def setup(self, *_: object) -> int:
        """Join."""
        self.joining.append(self)
        self.may_join.wait()
        return 0

    def close(self) -> None:
        """Leave."""
        self.joining.remove(self)


@pytest.mark.parametrize("how", ["late", "cancelled"])
async def test_what_is_joined_too_late_is_left(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that is not required is opened again and again: the memory that each try gives is taken back."""
    monkeypatch.setattr(SlowStore, "joining", [], raising=False)
    monkeypatch.setattr(SlowStore, "may_join", threading.Event(), raising=False)
    monkeypatch.setattr(mooncake, "MooncakeDistributedStore", SlowStore)
    monkeypatch.setattr(mooncake, "_join_elsewhere", lambda *_: "0")
    with socket.create_server(("127.0.0.1", 0)) as master, open_context() as context:
        url = f"mooncake://127.0.0.1:{master.getsockname()[1]}"
        backend = MooncakeBackend({"url": url, "timeout_s": 0.2 if how == "late" else 60.0, "num_threads": 1})
        for number in range(1, 4):
            opening = asyncio.ensure_future(backend.open(context))
            await until(lambda number=number: len(SlowStore.joining) == number)  # type: ignore[misc]  # each its own
            if how == "cancelled":
                opening.cancel()
            await asyncio.wait([opening])
            assert opening.cancelled() or isinstance(opening.exception(), BackendUnavailableError)
        SlowStore.may_join.set()
        await until(lambda: not SlowStore.joining)
        await backend.aclose()


class StuckStore(SlowStore):
    """One that joins at once, and answers nothing before it may.

    Attributes:
        num_closed: How often it was closed.
    """

    num_closed = 0

    def answer(self, *_: object) -> list[int]:
        """Ask the master."""
        self.may_join.wait()
        return [0]

    batch_is_exist = batch_remove = remove_by_regex = answer

    def setup(self, *_: object) -> int:
        """Join."""
        return 0

    def close(self) -> None:
        """Leave."""
        StuckStore.num_closed += 1


@pytest.mark.parametrize("call", ["lookup", "delete", "delete_salt"])
async def test_a_client_is_not_closed_under_a_call(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waited for it was cancelled, as at the end of a cache, and the thread is in the client yet."""
    monkeypatch.setattr(SlowStore, "may_join", threading.Event(), raising=False)
    monkeypatch.setattr(StuckStore, "num_closed", 0)
    monkeypatch.setattr(mooncake, "MooncakeDistributedStore", StuckStore)
    monkeypatch.setattr(mooncake, "_join_elsewhere", lambda *_: "0")
    with socket.create_server(("127.0.0.1", 0)) as master, open_context() as context:
        backend = MooncakeBackend({"url": f"mooncake://127.0.0.1:{master.getsockname()[1]}", "num_threads": 1})
        await backend.open(context)
        calls = {"delete_salt": partial(backend.delete_salt, "a" * 32)}
        calls |= {name: partial(getattr(backend, name), [block_key(1)]) for name in ("lookup", "delete")}
        asking = asyncio.ensure_future(calls[call]())
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        try:
            await backend.aclose()
            assert StuckStore.num_closed == 0
        finally:
            SlowStore.may_join.set()


class PartlyStore(StuckStore):
    """One that moves the first block of each batch, and fails with code -900 for all others."""

    def batch_get_into_multi_buffers(self, paths: list[str], _: object, sizes: list[list[int]]) -> list[int]:
        """Read."""
        return [sum(sizes[0]), *[-900] * (len(paths) - 1)]

    def batch_put_from_multi_buffers(self, paths: list[str], *_: object) -> list[int]:
        """Write."""
        return [0, *[-900] * (len(paths) - 1)]

    def answer(self, *_: object) -> list[int]:
        """Remove."""
        return []

    batch_remove = answer


async def test_why_some_blocks_of_a_batch_fail_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """For those who are told that some did: the call raises nothing."""
    monkeypatch.setattr(mooncake, "MooncakeDistributedStore", PartlyStore)
    monkeypatch.setattr(mooncake, "_join_elsewhere", lambda *_: "0")
    keys, blocks = [block_key(n) for n in range(3)], [Block.empty(SIZE) for _ in range(3)]
    with socket.create_server(("127.0.0.1", 0)) as master, open_context() as context:
        backend = MooncakeBackend({"url": f"mooncake://127.0.0.1:{master.getsockname()[1]}", "num_threads": 1})
        await backend.open(context)
        assert backend.describe() == {}
        for call, well in ((backend.read, Outcome.HIT), (backend.write, Outcome.STORED)):
            backend.last_error = ""
            assert await call(keys, blocks) == [well, Outcome.FAILED, Outcome.FAILED]
            said = str(backend.describe()["last_error"])
            assert said.endswith(
                "2 of 3 blocks could not be moved, its client says -900 (its master, or another host, does not answer)"
            )
        await backend.aclose()


async def test_a_closed_tier_says_so(server: MooncakeServer) -> None:
    """Calls after closing are an error of ours."""
    async with open_backend(backend_at(server)) as backend:
        pass
    for call in (backend.lookup([block_key(1)]), load(backend, [1]), store(backend, [1])):
        with pytest.raises(ClosedError):
            await call


@pytest.mark.parametrize("url", ["", "mooncake://", "mooncake://host", "http://host:1", "mooncake://host:1/path"])
def test_the_url_names_the_master(url: str) -> None:
    """Host and port are needed, nothing else may be there, and the message shows how."""
    with pytest.raises(ConfigurationError, match="mooncake://host:port"):
        MooncakeBackend.Settings(url=url)
