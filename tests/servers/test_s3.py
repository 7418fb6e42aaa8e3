"""The S3 medium on a Ceph gateway (or a mock), on files and in memory, and what it does when the gateway fails."""

import asyncio
import contextlib
import itertools
import os
import re
import ssl
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore", reason="obstore is missing: pip install 'tiered-kv[s3]'")

import obstore
from obstore.store import from_url

import ceph_server
from ceph_server import CephServer
from redis_server import make_certificates
from s3_server import S3Server, is_ceph, s3_server
from tiered_kv.media.backend import Block, Outcome
from tiered_kv.testing import GROUPS, BackendTests, block_key, make_block, open_backend, open_context
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError, TieredKVError
from tiered_kv.values.keys import BlockKey, Namespace, epoch_digest, hash_blocks, salt_digest
from tiered_kv.values.specs import LoadStoreSpec, ObjectLoadStoreSpec
from tiered_kv_backends.s3 import S3Backend, S3Settings, collect_epochs, s3_backend
from tiered_kv_backends.s3.doomed import mark_of

_PREFIXES = itertools.count()
SIZE = GROUPS[0].payload_bytes
RECORD = 4096 + SIZE


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One server with a bucket for all tests."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def ceph(server: S3Server) -> CephServer:
    """The gateway, for what no mock does."""
    return is_ceph(server)


def on(server: S3Server, **changes: object) -> S3Settings:
    """Return settings for a prefix that nobody else uses."""
    return S3Settings.model_validate(
        {
            "url": f"s3://blocks/test/{next(_PREFIXES)}",
            "endpoint": server.endpoint,
            "access_key_id": ceph_server.ACCESS_KEY,
            "secret_access_key": ceph_server.SECRET_KEY,
            **changes,
        }
    )


@pytest.fixture
def files(tmp_path: Path) -> S3Settings:
    """Settings for objects that are files, to be looked at."""
    return S3Settings(url=f"file://{tmp_path}/objects")


async def objects_at(spec: LoadStoreSpec, **options: object) -> list[bytes]:
    """Read what a spec says with a client of our own."""
    assert isinstance(spec, ObjectLoadStoreSpec)
    store = from_url(spec.url, **options)  # type: ignore[call-overload]  # its options are of the URL's scheme
    return [
        bytes(await obstore.get_range_async(store, name, start=offset, length=length))
        for name, offset, length in spec.places()
    ]


class TestOnAServer(BackendTests):
    capacity_bytes = None  # the bucket's lifecycle rule is its limit
    survives_reopening = True

    @pytest.fixture
    async def backend(self, server: S3Server) -> AsyncIterator[S3Backend]:
        """One with a prefix of its own."""
        async with open_backend(S3Backend(on(server))) as backend:
            yield backend

    async def records_at(self, spec: LoadStoreSpec) -> list[bytes]:
        """Give credentials and the spec's endpoint."""
        assert isinstance(spec, ObjectLoadStoreSpec)
        login = {"access_key_id": ceph_server.ACCESS_KEY, "secret_access_key": ceph_server.SECRET_KEY}
        config = {"endpoint": spec.endpoint, "region": "us-east-1", **login}
        return await objects_at(spec, config=config, client_options={"allow_http": True})


class TestOnFiles(BackendTests):
    capacity_bytes = None  # the bucket's lifecycle rule is its limit
    survives_reopening = True

    @pytest.fixture
    async def backend(self, files: S3Settings) -> AsyncIterator[S3Backend]:
        """One in the test's folder."""
        async with open_backend(S3Backend(files)) as backend:
            yield backend

    async def records_at(self, spec: LoadStoreSpec) -> list[bytes]:
        """The URL is enough."""
        return await objects_at(spec)


class TestInMemory(BackendTests):
    capacity_bytes = None  # the bucket's lifecycle rule is its limit

    @pytest.fixture
    async def backend(self) -> AsyncIterator[S3Backend]:
        """One that starts empty."""
        async with open_backend(S3Backend(S3Settings(url="memory:///"))) as backend:
            yield backend


def chain(num_blocks: int, weights: str = "w", salt: bytes = b"") -> list[BlockKey]:
    """Return the keys of a prompt, whose records are packed by sixteens."""
    space = Namespace(GROUPS[0].fingerprint, epoch_digest(weights), salt_digest(salt))
    return space.keys(hash_blocks(range(num_blocks), block_size=1, salt=salt))


def records(keys: Sequence[BlockKey]) -> list[Block]:
    """Return a record for each key, each with other bytes."""
    return [make_block(key.hash * (SIZE // 32), key) for key in keys]


async def store(backend: S3Backend, keys: Sequence[BlockKey]) -> None:
    """Store a record for each key."""
    assert await backend.write(keys, records(keys)) == [Outcome.STORED] * len(keys)


async def read(backend: S3Backend, keys: Sequence[BlockKey]) -> list[Outcome]:
    """Read, check the bytes of every hit, and return the outcomes."""
    into = [Block.empty(SIZE) for _ in keys]
    outcomes = await backend.read(keys, into)
    for key, block, outcome in zip(keys, into, outcomes, strict=True):
        assert outcome is not Outcome.HIT or bytes(block.payload) == key.hash * (SIZE // 32)
    return outcomes


def object_files(settings: S3Settings) -> list[Path]:
    """Return the files that the objects are."""
    root = Path(settings.url.removeprefix("file://"))
    return [path for path in root.rglob("*") if path.is_file()]


def lengths(settings: S3Settings) -> list[int]:
    """Return the lengths of all objects."""
    return sorted(path.stat().st_size for path in object_files(settings))


# Packs


async def test_whole_groups_share_an_object(files: S3Settings) -> None:
    """Of 40 blocks, 32 are stored in two objects and the rest one by one; all are read."""
    keys = chain(40)
    async with open_backend(S3Backend(files)) as backend:
        await store(backend, keys)
        assert lengths(files) == [RECORD] * 8 + [16 * RECORD] * 2
        assert await read(backend, keys) == [Outcome.HIT] * 40
        assert await backend.lookup(keys) == [Outcome.HIT] * 40
        assert await backend.lookup_prefix(keys) == 40


async def test_a_part_of_a_pack_is_read_by_another_client(server: S3Server) -> None:
    """Blocks of a pack are read by ranges by whoever knows the group's last key, from this call or from a lookup."""
    settings, keys = on(server), chain(40)
    async with open_backend(S3Backend(settings)) as writer, open_backend(S3Backend(settings)) as reader:
        await store(writer, keys)
        assert await read(reader, keys[5:16]) == [Outcome.HIT] * 11
        assert await reader.lookup_prefix(keys) == 40
        assert await read(reader, keys[16:21]) == [Outcome.HIT] * 5
        assert await read(reader, keys[21:40]) == [Outcome.HIT] * 19


async def test_a_group_stored_in_parts_is_stored_singly(files: S3Settings) -> None:
    """What arrives in two calls is read like what arrives in one."""
    keys = chain(16)
    async with open_backend(S3Backend(files)) as backend:
        await store(backend, keys[:7])
        await store(backend, keys[7:])
        assert lengths(files) == [RECORD] * 16
        assert await backend.lookup_prefix(keys) == 16
        assert await read(backend, keys) == [Outcome.HIT] * 16


class Counting(S3Backend):
    """Counts the objects that are asked for."""

    num_gets = 0

    async def _get(self, name: str, start: int, length: int, deadline: float) -> memoryview | Outcome:
        self.num_gets += 1
        return await super()._get(name, start, length, deadline)


async def test_blocks_that_lay_singly_are_not_looked_for_in_packs(files: S3Settings) -> None:
    """Of what was stored or read in parts no pack is asked for, which costs a round trip; and nothing is missed."""
    keys = chain(16)
    async with open_backend(Counting(files)) as writer, open_backend(Counting(files)) as reader:
        for start in range(0, 16, 4):
            await store(writer, keys[start : start + 4])
        for start in range(0, 16, 4):
            assert await read(writer, keys[start : start + 4]) == [Outcome.HIT] * 4
        assert writer.num_gets == 16
        for num_gets in (17, 33):  # the first time it asks for the pack too
            assert await read(reader, keys) == [Outcome.HIT] * 16
            assert reader.num_gets == num_gets
        await writer.delete(keys)
        await store(writer, keys)  # as one pack now, of which the reader does not know
        assert lengths(files) == [16 * RECORD]
        assert await read(reader, keys) == [Outcome.HIT] * 16
        before = reader.num_gets
        assert await read(reader, keys[3:9]) == [Outcome.HIT] * 6
        assert reader.num_gets == before + 1


async def test_deleting_a_block_takes_its_pack(files: S3Settings) -> None:
    """A deleted block is gone although others are in its object; other objects stay."""
    keys = chain(33)
    async with open_backend(S3Backend(files)) as backend:
        await store(backend, keys)
        await backend.delete(keys[3:4])
        assert await read(backend, keys) == [Outcome.MISS] * 16 + [Outcome.HIT] * 17


async def test_a_truncated_pack_is_corrupt_where_it_is_cut(files: S3Settings) -> None:
    """Blocks before the cut are read, those behind it are corrupt, however they are asked for; storing repairs it."""
    keys = chain(16)
    async with open_backend(S3Backend(files)) as backend:
        await store(backend, keys)
        (pack,) = object_files(files)
        os.truncate(pack, 4 * RECORD + 100)
        assert await read(backend, keys) == [Outcome.HIT] * 4 + [Outcome.CORRUPT] * 12
        assert await read(backend, keys[8:]) == [Outcome.CORRUPT] * 8
        await store(backend, keys)
        assert await read(backend, keys) == [Outcome.HIT] * 16


async def test_a_broken_block_of_a_pack_that_is_stored_anew_is_right(files: S3Settings) -> None:
    """Each time it is read with its group: from where it lies alone now, and the others still from the pack."""
    keys = chain(16)
    async with open_backend(S3Backend(files)) as backend:
        await store(backend, keys)
        (pack,) = object_files(files)
        data = bytearray(pack.read_bytes())
        data[6 * RECORD - 1] ^= 1
        pack.write_bytes(data)
        await store(backend, keys[5:6])
        for _ in range(2):
            assert await read(backend, keys) == [Outcome.HIT] * 16
        spec = await backend.locate(keys)
        assert spec is not None
        assert await objects_at(spec) == [bytes(block) for block in records(keys)]
        await store(backend, keys)
        assert await read(backend, keys) == [Outcome.HIT] * 16


class HeldDeletion(S3Backend):
    """Its next deletion goes when a test says so, and so does what is stored after that."""

    is_next_held = are_stores_held = False

    def hold(self) -> None:
        """Hold the next one."""
        self.is_next_held = True
        self.is_held, self.may_go, self.may_store = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def _delete_all(self, names: list[str], deadline: float) -> None:
        if self.is_next_held:
            self.is_next_held = False
            self.is_held.set()
            await self.may_go.wait()
            self.are_stores_held = True
        await super()._delete_all(names, deadline)

    async def _put(self, name: str, body: Sequence[memoryview] | bytes, deadline: float) -> None:
        if self.are_stores_held:
            await self.may_store.wait()
        await super()._put(name, body, deadline)


async def test_a_pack_that_is_stored_anew_outlives_who_was_about_to_delete_it(files: S3Settings) -> None:
    """A lookup deletes a pack of evicted blocks no later than a store of the same pack begins."""
    keys, others = chain(16), chain(1, "others")
    async with open_backend(S3Backend(files)) as other, open_backend(HeldDeletion(files)) as backend:
        await store(other, keys)
        assert not await backend.delete(keys[3:4])
        backend.hold()
        looking = asyncio.ensure_future(backend.lookup(keys))
        await backend.is_held.wait()
        storing = asyncio.ensure_future(store(backend, keys))
        for _ in range(20):  # it comes as far as it can meanwhile
            await backend.lookup(others)
        backend.may_go.set()
        assert await looking == [Outcome.MISS] * 16
        backend.may_store.set()
        await storing
        assert await read(backend, keys) == [Outcome.HIT] * 16
        assert await backend.delete([])


async def test_a_part_of_a_pack_is_said_to_be_where_it_is(files: S3Settings) -> None:
    """Blocks of a pack are ranges of one object, from whichever block on; those stored singly are objects."""
    keys = chain(20)
    async with open_backend(S3Backend(files)) as backend:
        await store(backend, keys)
        spec = await backend.locate(keys[3:])
        assert spec is not None
        assert [len(spec.names), *spec.ids] == [5] + [0] * 13 + [1, 2, 3, 4]
        assert list(spec.offsets) == [*range(3 * RECORD, 16 * RECORD, RECORD), 0, 0, 0, 0]
        assert await objects_at(spec) == [bytes(block) for block in records(keys[3:])]
        await backend.delete(keys[:1])
        await store(backend, keys[:5])
        spec = await backend.locate(keys[:5])
        assert spec is not None
        assert await objects_at(spec) == [bytes(block) for block in records(keys[:5])]


async def test_memory_of_this_process_is_no_place() -> None:
    """Objects in memory are found by nobody else: where they are is not said."""
    async with open_backend(S3Backend(S3Settings(url="memory:///"))) as backend:
        await store(backend, chain(2))
        assert await backend.locate(chain(2)) is None


# Presence


@pytest.mark.parametrize("num_there", [0, 1, 15, 16, 17, 32, 50, 63, 64, 70])
async def test_a_prefix_ends_where_it_ends(num_there: int) -> None:
    """A client that has seen nothing counts the blocks that are there, in packs or not."""
    keys = chain(70)
    async with open_backend(S3Backend(S3Settings(url="memory:///"))) as backend:
        await store(backend, keys[:num_there])
        assert await backend.lookup_prefix(keys) == num_there


async def test_an_answer_is_believed_until_a_load_fails(server: S3Server) -> None:
    """What others delete is still promised for a moment; the load that misses it ends that at once."""
    settings, keys = on(server, pack_bytes=0, answer_ttl_s=3600), chain(8)
    async with open_backend(S3Backend(settings)) as mine, open_backend(S3Backend(settings)) as other:
        await store(mine, keys)
        assert await mine.lookup_prefix(keys) == 8
        await other.delete(keys[5:])
        assert await mine.lookup_prefix(keys) == 8
        assert await read(mine, keys) == [Outcome.HIT] * 5 + [Outcome.MISS] * 3
        assert await mine.lookup_prefix(keys) == 5
        await store(mine, keys[5:])
        assert await mine.lookup_prefix(keys) == 8


class Late(S3Backend):
    """Its store's answers, whether an object is there, come when a test says so."""

    has_answered: asyncio.Event
    may_come: asyncio.Event

    async def _exists(self, name: str, deadline: float) -> bool:
        found = await super()._exists(name, deadline)
        self.has_answered.set()
        await self.may_come.wait()
        return found


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "deleted"])
async def test_an_answer_that_comes_late_is_not_believed(*, is_stored: bool) -> None:
    """Of a key that was stored or deleted while the store was asked for it, the next lookup asks again."""
    (key,) = chain(1)
    async with open_backend(Late({"url": "memory:///", "pack_bytes": 0, "answer_ttl_s": 3600})) as backend:
        backend.has_answered, backend.may_come = asyncio.Event(), asyncio.Event()
        if not is_stored:
            await store(backend, [key])
        looking = asyncio.ensure_future(backend.lookup_prefix([key]))
        await backend.has_answered.wait()
        await (store(backend, [key]) if is_stored else backend.delete([key]))
        backend.may_come.set()
        await looking
        assert await backend.lookup_prefix([key]) == is_stored


async def test_a_hole_is_found_by_the_load(server: S3Server) -> None:
    """Bisection may look past a hole; once a load has seen it, no lookup does."""
    keys = chain(8)
    async with open_backend(S3Backend(on(server, pack_bytes=0))) as backend:
        await store(backend, [*keys[:3], *keys[4:]])
        assert await backend.lookup_prefix(keys) == 8
        assert (await read(backend, keys)).index(Outcome.MISS) == 3
        assert await backend.lookup_prefix(keys) == 3


# Stores and deletes


async def test_create_only_replaces_nothing(server: S3Server) -> None:
    """With ``create_only`` the first record stays, and storing a second is no failure."""
    key, into = block_key(1), Block.empty(SIZE)
    async with open_backend(S3Backend(on(server, create_only=True))) as backend:
        for content in (b"1", b"2"):
            assert await backend.write([key], [make_block(content * SIZE, key)]) == [Outcome.STORED]
        assert await backend.read([key], [into]) == [Outcome.HIT]
        assert bytes(into.payload) == b"1" * SIZE


@pytest.mark.parametrize("kind", ["server", "files"])
async def test_old_epochs_and_tenants_can_be_deleted(kind: str, request: pytest.FixtureRequest) -> None:
    """What goes is what is named: epochs that are not kept and idle, and all of one salt."""
    settings = on(request.getfixturevalue("server")) if kind == "server" else request.getfixturevalue("files")
    old, new, tenant = chain(3, "step 1"), chain(3, "step 2"), chain(3, "step 2", b"tenant")
    async with open_backend(S3Backend(settings)) as backend:
        for keys in (old, new, tenant):
            await store(backend, keys)
        assert await collect_epochs(settings, keep_weights=["step 2"], idle_s=3600) == 0
        assert await collect_epochs(settings, keep_weights=["step 2"], idle_s=-3600) == 3
        assert await read(backend, [*old, *new]) == [Outcome.MISS] * 3 + [Outcome.HIT] * 3
        assert await S3Backend.delete_tenant(settings, b"tenant") == 3
        assert await read(backend, [*new, *tenant]) == [Outcome.HIT] * 3 + [Outcome.MISS] * 3


async def test_what_is_not_a_block_is_never_deleted(files: S3Settings) -> None:
    """Objects of others stay, however old, whether beside our folders or in them."""
    keys = chain(3)
    async with open_backend(S3Backend(files)) as backend:
        await store(backend, keys)
    root = Path(files.url.removeprefix("file://"))
    space, digest = keys[0].namespace.path, keys[0].hash.hex()
    foreign = {"models/llama/weights.bin", "backups/2026/x/y/z", f"{space}/README", f"{space}/x/{digest}", digest}
    foreign |= {f"{space.partition('/')[0]}/step 1/replicated/{'0' * 32}/{digest}"}
    for name in foreign:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"precious")
    assert await collect_epochs(files, keep_weights=[], idle_s=-3600) == 3
    async with open_backend(S3Backend(files)) as backend:
        await store(backend, keys)
    assert await S3Backend.delete_tenant(files, b"") == 3
    assert {str(path.relative_to(root)) for path in object_files(files)} == foreign


# Opening


async def test_tls_with_a_certificate_of_ones_own(ceph: CephServer) -> None:
    """With ``ca_file`` a store of a private authority is used over TLS, its bodies signed or not."""
    for sign in (False, True):
        settings = on(ceph, endpoint=ceph.tls_endpoint, ca_file=ceph.ca_file, sign_payload=sign)
        async with open_backend(S3Backend(settings)) as backend:
            await store(backend, chain(2))
            assert await read(backend, chain(2)) == [Outcome.HIT] * 2


async def test_certificates_are_trusted_beside_the_systems(
    ceph: CephServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``ca_file`` a store that the system's authorities vouch for is one still."""
    make_certificates(tmp_path)  # another authority's
    settings = on(ceph, endpoint=ceph.tls_endpoint, ca_file=tmp_path / "ca.pem")
    with open_context() as context, pytest.raises(ConfigurationError, match="TLS handshake"):
        await S3Backend(settings).open(context)
    monkeypatch.setenv("SSL_CERT_FILE", str(ceph.ca_file))
    async with open_backend(S3Backend(settings)) as backend:
        assert await backend.lookup(chain(1)) == [Outcome.MISS]


@pytest.mark.parametrize(
    ("host", "shown", "key", "message"),
    [
        ("127.0.0.2", "cert.pem", "key.pem", "its certificate is for other hosts"),
        ("127.0.0.1", "ca.pem", "ca.key", "its certificate is an authority's own"),
    ],
)
async def test_a_certificate_that_is_not_the_server_s(
    tmp_path: Path, host: str, shown: str, key: str, message: str
) -> None:
    """It is said what is wrong with it, as the client tells."""
    make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / shown, tmp_path / key)
    async with await asyncio.start_server(lambda _, writer: writer.close(), host, ssl=context) as server:
        endpoint = f"https://{host}:{server.sockets[0].getsockname()[1]}"
        settings = {"endpoint": endpoint, "ca_file": tmp_path / "ca.pem", "access_key_id": "AKTEST"}
        backend = S3Backend({"url": "s3://bucket", "secret_access_key": "hidden", **settings})
        with open_context() as opening, pytest.raises(ConfigurationError, match=message):
            await backend.open(opening)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"secret_access_key": "not-this-one"}, ConfigurationError, "refuses the credentials .*SignatureDoesNotMatch"),
        ({"access_key_id": "NOBODY"}, ConfigurationError, "refuses the credentials .*InvalidAccessKeyId"),
        ({"url": "s3://no-such-bucket/x"}, ConfigurationError, "no bucket of this name: s3://no-such-bucket/x"),
        ({"endpoint": "http://127.0.0.1:1"}, BackendUnavailableError, "does not answer: .*refused"),
        ({"endpoint": "TLS"}, ConfigurationError, "TLS handshake .*ca_file"),
        ({"endpoint": "TLS to plain"}, ConfigurationError, "TLS handshake .*http://"),
        ({"endpoint": "plain to TLS"}, BackendUnavailableError, "does not answer"),
        ({"options": {"no_such_option": "a-secret-value"}}, ConfigurationError, "no_such_option"),
        ({"ca_file": "/no/such/file"}, ConfigurationError, "No such file"),
    ],
)
async def test_what_cannot_work_is_said_at_open(
    ceph: CephServer, changes: dict[str, object], error: type[TieredKVError], message: str
) -> None:
    """Opening fails with the reason, and without the secrets."""
    endpoints = {
        "TLS": ceph.tls_endpoint,
        "TLS to plain": ceph.endpoint.replace("http:", "https:"),
        "plain to TLS": ceph.tls_endpoint.replace("https:", "http:"),
    }
    if "endpoint" in changes:
        changes = {"endpoint": endpoints.get(str(changes["endpoint"]), changes["endpoint"])}
    with pytest.raises(error, match=message) as caught:
        async with open_backend(S3Backend(on(ceph, **changes))):
            pass
    for secret in (ceph_server.SECRET_KEY, "not-this-one", "a-secret-value"):
        assert secret not in f"{caught.value!r} {caught.value.__cause__!r}"


@pytest.mark.parametrize("url", ["bucket/prefix", "s3:///prefix", "s3://AKTEST:secret@bucket/prefix"])
def test_a_url_names_a_bucket_and_no_secrets(url: str) -> None:
    """What is no URL of a bucket is refused when settings are made, and not repeated."""
    with pytest.raises(ConfigurationError) as caught:
        S3Settings(url=url)
    assert "secret@" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"url": "ftp://bucket/prefix"}, "url: no store has URLs of ftp://: write s3://bucket/prefix"),
        ({"endpoint": "127.0.0.1:1"}, "endpoint: must be http://host"),
        ({"endpoint": "ftp://127.0.0.1"}, "endpoint: must be http://host"),
        ({"endpoint": "https://"}, "endpoint: must be http://host"),
        ({"endpoint": "https://u:hidden@store"}, "endpoint: secrets have no place in a URL"),
        ({"endpoint": "https://store?key=hidden"}, "endpoint: nothing comes behind the path"),
        ({"url": "s3://bucket?access_key_id=hidden"}, "url: nothing comes behind the path"),
    ],
)
def test_schemes_are_checked(wrong: dict[str, str], said: str) -> None:
    """The client ends the process's thread of an endpoint that has none."""
    with pytest.raises(ConfigurationError) as caught:
        S3Settings.model_validate({"url": "s3://bucket", **wrong})
    assert said in str(caught.value)
    assert "hidden" not in str(caught.value)


# Faults


async def test_a_stalled_gateway_is_given_up_in_time(ceph: CephServer) -> None:
    """While it answers nobody every call fails before the cache stops waiting; then it serves again."""
    settings, keys = on(ceph, timeout_s=6, connect_timeout_s=3), chain(3)
    async with open_backend(S3Backend(settings)) as backend:
        await store(backend, keys)
        with ceph.stopped():
            for call in (
                lambda: read(backend, keys),
                lambda: store(backend, keys),
                lambda: backend.lookup_prefix(keys),
                lambda: backend.delete(chain(3, weights="others")),  # it may be done all the same, when all goes on
            ):
                async with asyncio.timeout(settings.timeout_s):
                    with pytest.raises(BackendUnavailableError, match="Timeout"):
                        await call()
            with pytest.raises(BackendUnavailableError, match=r"does not answer: .*Timeout"):
                async with asyncio.timeout(settings.timeout_s), open_backend(S3Backend(settings)):
                    pass
        assert await read(backend, keys) == [Outcome.HIT] * 3


async def test_a_killed_gateway_is_used_again_when_it_is_back(ceph: CephServer) -> None:
    """While it is down calls fail; the same client serves once it runs again, and blocks are as they were."""
    keys = chain(20)
    async with open_backend(S3Backend(on(ceph))) as backend:
        await store(backend, keys)
        ceph.kill()
        try:
            with pytest.raises(BackendUnavailableError, match="refused"):
                await read(backend, keys)
        finally:
            ceph.start()
        assert await read(backend, keys) == [Outcome.HIT] * 20


NO_OBJECTS = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
"""What a store without marks of evictions answers who lists them."""


SLOW_DOWN = "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


def a_part_of(names: Sequence[str]) -> str:
    """Return the answer that lists these objects, and says that there are more."""
    since = "<LastModified>2026-11-22T00:00:00.000Z</LastModified><Size>0</Size>"
    objects = "".join(f"<Contents><Key>{name}</Key>{since}</Contents>" for name in names)
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>more</NextContinuationToken>"
    return f"<ListBucketResult>{more}{objects}</ListBucketResult>"


class AnsweringServer:
    """Speaks enough HTTP to answer each request by what ``answer`` returns, and counts those under way; no listings."""

    def __init__(self, answers: Iterator[str], hold_until: int = 0) -> None:
        self.num_requests = 0
        self.most_at_once = 0
        self.hold_until = hold_until
        """Answers wait until so many requests have come."""
        self.listing = "200 OK"
        """How it answers who lists the marks of evictions, of which it has none; empty: not at all."""
        self.marks: Sequence[str] = ()
        """It lists these if there are any, and never answers who asks for more."""
        self.error = ""
        """What it says beside the status."""
        self._now = 0
        self._answers = answers
        self._enough = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")).strip():
                await reader.readexactly(int((re.search(rb"(?i)\r\ncontent-length: *(\d+)", head) or [b"", b"0"])[1]))
                status, body = "404 Not Found", self.error
                if b"list-type=2" in head:
                    if b"continuation-token" in head or not self.listing:
                        continue
                    status, body = self.listing, a_part_of(self.marks) if self.marks else NO_OBJECTS.decode()
                elif b"is-anybody-there" not in head:
                    self.num_requests += 1
                    self._now += 1
                    self.most_at_once = max(self.most_at_once, self._now)
                    if self.num_requests >= self.hold_until:
                        self._enough.set()
                    await self._enough.wait()
                    status = next(self._answers)
                    self._now -= 1
                writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def answering(
    answers: Iterator[str], hold_until: int = 0, **changes: object
) -> AsyncIterator[tuple[S3Backend, AnsweringServer]]:
    """Yield a backend that talks to an `AnsweringServer`, and the server."""
    answering_server = AnsweringServer(answers, hold_until)
    server = await asyncio.start_server(answering_server.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    settings = S3Settings.model_validate(
        {
            "url": "s3://blocks",
            "endpoint": f"http://127.0.0.1:{port}",
            "access_key_id": "A",
            "secret_access_key": "S",
            **changes,
        }
    )
    try:
        async with open_backend(S3Backend(settings)) as backend:
            yield backend, answering_server
    finally:
        server.close()


class GreedyServer:
    """Answers every GET of an object but the first with a body without end, or one that repeats the request."""

    def __init__(self, *, repeats: bool) -> None:
        self.repeats = repeats
        self.num_bytes = 0
        self.has_ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")).strip():
                if b"is-anybody-there" in head:
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                elif b"list-type=2" in head:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(NO_OBJECTS), NO_OBJECTS))
                elif self.repeats:
                    writer.write(b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n%b" % (len(head), head))
                else:
                    await self.pour(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()
            self.has_ended.set()

    async def pour(self, writer: asyncio.StreamWriter) -> None:
        """Send up to 256 MiB, where some KiB were asked for."""
        writer.write(b"HTTP/1.1 206 Partial\r\nContent-Length: 999999999999\r\nETag: x\r\n")
        writer.write(b"Last-Modified: Sun, 22 Nov 2026 00:00:00 GMT\r\n")
        writer.write(b"Content-Range: bytes 0-%d/%d\r\n\r\n" % (RECORD - 1, RECORD))
        while self.num_bytes < 256 << 20:
            writer.write(bytes(1 << 20))
            await writer.drain()
            self.num_bytes += 1 << 20


@asynccontextmanager
async def greedy(*, repeats: bool) -> AsyncIterator[tuple[S3Backend, GreedyServer]]:
    """Yield a backend that talks to a `GreedyServer`, and the server."""
    greedy_server = GreedyServer(repeats=repeats)
    server = await asyncio.start_server(greedy_server.serve, "127.0.0.1", 0)
    endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    settings = S3Settings.model_validate(
        {
            "url": "s3://blocks",
            "endpoint": endpoint,
            "access_key_id": "hidden-id",
            "secret_access_key": "hidden-key",
            "session_token": "hidden-token",
            "max_retries": 0,
        }
    )
    try:
        async with open_backend(S3Backend(settings)) as backend:
            yield backend, greedy_server
        del backend  # with the client's connections
        await greedy_server.has_ended.wait()
    finally:
        server.close()


async def test_no_more_is_taken_than_was_asked_for() -> None:
    """A server that goes on sending is hung up on; what it sent is no hit."""
    async with greedy(repeats=False) as (backend, server):
        with pytest.raises(BackendUnavailableError, match="more than the 8193 bytes"):
            await backend.read([block_key(1)], [Block.empty(SIZE)])
        assert server.num_bytes < 64 << 20


async def test_what_a_server_repeats_holds_no_secret() -> None:
    """Neither the error nor what it came from has a key or a token in it."""
    async with greedy(repeats=True) as (backend, _):
        with pytest.raises(BackendUnavailableError, match="400") as caught:
            await backend.read([block_key(1)], [Block.empty(SIZE)])
    assert "hidden" not in "".join(traceback.format_exception(caught.value))


async def test_what_a_server_repeats_at_opening_holds_no_secret() -> None:
    """Whatever the first answer is, neither the error nor what it came from has a key or a token in it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(head), head))
        await writer.drain()
        writer.close()

    login = {"access_key_id": "hidden-id", "secret_access_key": "hidden-key", "session_token": "hidden-token"}
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        backend = S3Backend({"url": "s3://blocks", "endpoint": endpoint, **login})
        with open_context() as context, pytest.raises(BackendUnavailableError, match="400") as caught:
            await backend.open(context)
    shown = "".join(traceback.format_exception(caught.value))
    assert "x-amz-security-token" in shown
    assert "hidden" not in shown


async def test_a_host_that_is_redirected_to_gets_no_key() -> None:
    """The client goes where a store sends it. With the session token, as is documented; with no key or signature."""
    asked = list[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        answers = itertools.repeat(f"307 Temporary Redirect\r\nLocation: http://127.0.0.1:{port}/elsewhere")
        login: dict[str, Any] = {"secret_access_key": "hidden-key", "session_token": "a-token"}
        async with answering(answers, access_key_id="hidden-id", **login) as (backend, server):
            assert await backend.read([block_key(1)], [Block.empty(SIZE)]) == [Outcome.MISS]
            assert server.num_requests
    assert asked
    for request in asked:
        assert b"hidden" not in request
        assert b"\r\nauthorization:" not in request.lower()


@pytest.mark.slow
def test_a_process_ends_well_after_its_last_call(tmp_path: Path) -> None:
    """The client's threads never find the interpreter gone, which aborts the process."""
    program = f"""
import asyncio, os
from tiered_kv.media.backend import Block
from tiered_kv.testing import block_key, make_block, open_backend
from tiered_kv_backends.s3 import S3Backend, S3Settings
async def main():
    async with open_backend(S3Backend(S3Settings(url="file://{tmp_path}"))) as backend:
        keys = [block_key(n) for n in range(8)]
        await backend.write(keys, [make_block(bytes(4096), key) for key in keys])
        await backend.read(keys, [Block.empty(4096) for _ in keys])
for _ in range(2):
    children = []
    while len(children) < 4 and all(children):
        children.append(os.fork())
    if not children[-1]:  # a child, which ends like any program does
        asyncio.run(main())
        break
    print(*[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert ended.stdout.split() == ["0"] * 8, ended.stderr


def test_a_process_that_made_a_client_waits_at_its_end() -> None:
    """Once, for a moment, however many it made: what the test above shows takes luck where the client is quick."""
    program = """
import time
time.sleep = lambda seconds: print("waits for", seconds)
from tiered_kv_backends.s3 import S3Settings
from tiered_kv_backends.s3.s3_client import make_store
for _ in range(2):
    make_store(S3Settings(url="memory:///"))
print("ends")
"""
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert ended.stdout.split("\n")[:-1] == ["ends", "waits for 0.3"], ended.stderr


async def test_connections_are_bounded() -> None:
    """However many blocks are asked for at once, no more requests than ``connections`` are under way."""
    async with answering(itertools.repeat("404 Not Found"), hold_until=3, connections=3) as (backend, server):
        assert await backend.lookup([block_key(n) for n in range(40)]) == [Outcome.MISS] * 40
        assert (server.num_requests, server.most_at_once) == (40, 3)


async def test_a_passing_failure_is_tried_again() -> None:
    """A 503 is retried, within ``max_retries``; what goes on failing fails, with the server's status."""
    answers = itertools.chain(["503 Slow Down"], itertools.repeat("404 Not Found"))
    async with answering(answers, max_retries=1) as (backend, server):
        assert await backend.lookup([block_key(1)]) == [Outcome.MISS]
        assert server.num_requests == 2
    async with answering(itertools.repeat("503 Slow Down"), max_retries=2) as (backend, server):
        with pytest.raises(BackendUnavailableError, match="503"):
            await backend.lookup_prefix([block_key(1)])
        assert server.num_requests == 3


async def test_a_store_that_may_be_carried_out_yet_has_failed() -> None:
    """It is not sent again, so that whoever evicts the block knows that it may come back; nor is a mark of it."""
    keys = chain(3)
    async with answering(itertools.repeat("500 Internal Server Error"), max_retries=2) as (backend, server):
        with pytest.raises(BackendUnavailableError, match="500"):
            await backend.write(keys[:1], records(keys[:1]))
        assert server.num_requests == 1
        with pytest.raises(BackendUnavailableError, match="500"):
            await backend.delete(keys[:1])
        assert server.num_requests == 1 + 1 + 3  # a deletion is repeated
    answers = itertools.chain(["200 OK\r\nETag: x", "503 Slow Down"], itertools.repeat("200 OK\r\nETag: x"))
    async with answering(answers, max_retries=2, connections=1) as (backend, server):
        assert await backend.write(keys, records(keys)) == [Outcome.STORED, Outcome.FAILED, Outcome.STORED]
        assert server.num_requests == 3
        assert ": 503 " in str(backend.describe()["last_error"])


@pytest.mark.parametrize(("status", "error"), [("503 Slow Down", SLOW_DOWN), ("429 Too Many Requests", "")])
async def test_a_store_that_is_refused_for_its_rate_is_sent_again(status: str, error: str) -> None:
    """Within ``max_retries``, as a store that says so does not carry it out later."""
    (key,), stored = chain(1), "200 OK\r\nETag: x"
    async with answering(itertools.chain([status] * 2, itertools.repeat(stored)), max_retries=2) as (backend, server):
        server.error = error
        assert await backend.write([key], records([key])) == [Outcome.STORED]
        assert server.num_requests == 3
    async with answering(itertools.repeat(status), max_retries=1) as (backend, server):
        server.error = error
        with pytest.raises(BackendUnavailableError, match=status[:3]):
            await backend.write([key], records([key]))
        assert server.num_requests == 2


async def test_a_store_that_goes_on_being_refused_ends_in_time() -> None:
    """No repetition begins in the second half of a call, however many may be made."""
    (key,) = chain(1)
    async with answering(itertools.repeat("429 Too Many Requests"), max_retries=10, timeout_s=2) as (backend, server):
        with pytest.raises(BackendUnavailableError, match="429"):
            await backend.write([key], records([key]))
        assert server.num_requests in range(1, 6)


async def test_what_was_evicted_is_known_before_anything_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a store does not say which blocks were evicted from packs, it is not asked for blocks; then it is again."""
    monkeypatch.setattr(s3_backend, "_READ_MARKS_EVERY_S", 0.0)
    async with answering(itertools.repeat("404 Not Found"), max_retries=0) as (backend, server):
        server.listing = "503 Slow Down"
        for call in (backend.lookup, backend.lookup_prefix, backend.locate):
            with pytest.raises(BackendUnavailableError, match=r"list evicted blocks of s3:.*503"):
                await call([block_key(1)])
        assert server.num_requests == 0
        server.listing = "200 OK"
        assert await backend.lookup([block_key(1)]) == [Outcome.MISS]


async def test_marks_that_take_too_long_to_list_are_asked_for_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evictions so many that their listing does not end in time make lookups slower; if nothing comes they fail."""
    monkeypatch.setattr(s3_backend, "_READ_MARKS_EVERY_S", 0.0)
    monkeypatch.setattr(s3_backend, "_LISTED_AT_ONCE", 1)
    monkeypatch.setattr(s3_backend, "REQUEST_WITHIN", 1.5 / 60)  # the questions after it have time, of a busy machine
    (key,), whole = chain(1, "others"), chain(16)
    async with answering(itertools.repeat("404 Not Found"), timeout_s=60) as (backend, server):
        server.marks = [mark_of(key)]
        assert await backend.lookup(whole) == [Outcome.MISS] * 16
        assert server.num_requests == 16 + 1 + 16
        server.listing = ""
        with pytest.raises(BackendUnavailableError, match=r"list evicted blocks of s3:.*: nothing came within 1\.5 s"):
            await backend.lookup(whole)


async def test_a_call_that_fails_leaves_no_request_behind() -> None:
    """Questions that are left are not asked any more; what is to be deleted is, and marked, as far as it can be."""
    keys = chain(5)
    async with answering(itertools.repeat("503 Slow Down"), max_retries=0, connections=2) as (backend, server):
        for call, num_requests in (
            (lambda: backend.delete(keys), range(6, 7)),
            (lambda: backend.lookup([block_key(n) for n in range(100)]), range(1, 10)),
        ):
            before = server.num_requests
            with pytest.raises(BackendUnavailableError, match="503"):
                await call()
            assert server.num_requests - before in num_requests
            names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]  # it has
            assert not [name for name in names if name.startswith("S3Backend.")]


async def test_one_failed_block_fails_alone() -> None:
    """A failure of one object is one FAILED; the others of the batch have their outcomes."""
    answers = itertools.chain(["403 Forbidden"], itertools.repeat("404 Not Found"))
    async with answering(answers, connections=1) as (backend, _):
        outcomes = await backend.read([block_key(n) for n in range(3)], [Block.empty(SIZE) for _ in range(3)])
        assert outcomes == [Outcome.FAILED, Outcome.MISS, Outcome.MISS]
        assert "403 Forbidden" in str(backend.describe()["last_error"])


async def test_one_failed_block_of_a_group_fails_alone() -> None:
    """Blocks that lie singly are read to the last before the call ends: then their buffers are the caller's."""
    answers = itertools.chain(["404 Not Found", "503 Slow Down"], itertools.repeat("404 Not Found"))
    async with answering(answers, connections=1, max_retries=0) as (backend, server):
        assert await read(backend, chain(16)) == [Outcome.FAILED, *[Outcome.MISS] * 15]
        assert server.num_requests == 1 + 16
