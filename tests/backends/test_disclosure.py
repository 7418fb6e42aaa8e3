"""What a medium tells of prompts: an attacker's exercise.

The attacker has the whole medium, knows the model, its weights, its layout and the tenants' salts, has a list of
prompts any of which may be stored, and may hash for as long as they like. Only the key is lacking.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from mooncake_server import mooncake_server
from redis_server import find_binary, run_redis
from tests.support.any_layout import BLOCK_SIZE, MODEL, SMALL, AnyEngine, cpu, open_any
from tiered_kv import BlockKeys, Encryption, Shard, epoch_digest, hash_blocks, salt_digest
from tiered_kv.settings.registry import resolve
from tiered_kv.tiers.tier import Naming
from tiered_kv.values.keys import NO_SALT, rows_of
from tiered_kv.values.layout import fingerprint
from tiered_kv_backends.memory import MemoryBackend
from tiered_kv_backends.redis import RedisBackend
from tiered_kv_backends.s3 import S3Backend

KEY, OTHER = "01" * 32, "02" * 32
NAMING = Naming(fingerprint(MODEL, SMALL, 0, "none"), Shard())
NUM_BLOCKS = 8
PAGE_BYTES = 1 << 12
WINDOW = 8
"""Bytes of a digest that are looked for, on each of their places in it: what is found by chance is found never."""
Dump = Callable[[], bytes]
HIDING: dict[str, dict[str, Any]] = {
    "encrypted": {"keys": [KEY]},
    "signed": {"keys": [KEY], "cipher": "aes-256-gmac"},
    "names alone": {"names_key": KEY},
}


def files_under(path: Path) -> bytes:
    """Return all names and all bytes there."""
    names = "\n".join(str(each.relative_to(path)) for each in sorted(path.rglob("*"))).encode()
    return names + b"".join(each.read_bytes() for each in path.rglob("*") if each.is_file())


def values_in(url: str) -> bytes:
    """Return all keys and values of a server."""

    async def read() -> bytes:
        async with Redis.from_url(url) as client:
            names = [name async for name in client.scan_iter()]
            values: list[bytes] = await client.mget(names)  # type: ignore[assignment]  # nothing is decoded
            return b"\n".join([*names, *values])

    return asyncio.run(read())


def memory_of(*pids: int) -> set[bytes]:
    """Return the pages that processes may write to: names and values of a store that has no files."""
    pages: set[bytes] = set()
    for pid in pids:
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                where, rights, *_ = line.split()
                start, end = (int(each, 16) for each in where.split("-"))
                for page in range(start, end, PAGE_BYTES) if rights.startswith("rw") else ():
                    with suppress(OSError):
                        memory.seek(page)
                        pages.add(memory.read(min(PAGE_BYTES, end - page)))
    return pages


@pytest.fixture(
    params=["nvme", "shared_fs", "s3", "s3 packs", "memory", "redis", pytest.param("mooncake", marks=pytest.mark.slow)]
)
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Callable[[Any], Any], Dump]]:
    """Return what makes a tier with some encryption, and what the attacker has of it."""
    kind, root = request.param, tmp_path / "kv"
    with ExitStack() as opened:
        if kind == "memory":
            made: list[MemoryBackend] = []

            def memory(encryption: Any) -> MemoryBackend:  # noqa: ANN401 - as settings have it
                made.append(MemoryBackend({"medium": "memory", "capacity": "8MiB", "encryption": encryption}))
                return made[0]

            yield memory, lambda: b"".join(b"%r %b" % (key.path, value) for key, value in made[0]._records.items())  # noqa: SLF001 - the attacker
        elif kind == "redis":
            server = opened.enter_context(run_redis(find_binary("redis-server"), tmp_path / "redis"))
            settings: dict[str, Any] = {"medium": "redis", "url": server.url}
            yield lambda encryption: RedisBackend({**settings, "encryption": encryption}), lambda: values_in(server.url)
        elif kind == "mooncake":
            store = opened.enter_context(mooncake_server(tmp_path, segment_bytes=16 << 20))
            from tiered_kv_backends.mooncake import MooncakeBackend  # noqa: PLC0415 - its client is there

            settings, pids = {"medium": "mooncake", "url": store.url}, (store.master.pid, store.storage.pid)
            empty = memory_of(*pids)
            yield (
                lambda encryption: MooncakeBackend({**settings, "encryption": encryption}),
                lambda: b"".join(memory_of(*pids) - empty),
            )
        elif kind.startswith("s3"):
            pack_bytes = (1 << 20) if kind == "s3 packs" else 0
            settings = {"medium": "s3", "url": f"file://{root}", "pack_bytes": pack_bytes}
            root.mkdir()
            yield lambda encryption: S3Backend({**settings, "encryption": encryption}), lambda: files_under(root)
        else:
            settings = {"medium": kind, "path": root, "capacity": "8MiB", "num_threads": 2}
            yield lambda encryption: {**settings, "encryption": encryption}, lambda: files_under(root)


def prompt(seed: int, salt: str) -> BlockKeys:
    """Return one of the attacker's list."""
    return hash_blocks(range(seed * 1000, seed * 1000 + NUM_BLOCKS * BLOCK_SIZE), block_size=BLOCK_SIZE, salt=salt)


def traces_of(keys: BlockKeys) -> set[bytes]:
    """Return what the attacker looks for: each digest that hashing alone can make of a prompt, in part, raw and hex."""
    batch = NAMING.batch(keys, epoch_digest(MODEL.weights))
    digests = [*keys, *rows_of(batch.names)]
    parts = {each[at : at + WINDOW] for each in digests for at in range(0, 32, WINDOW)}
    return parts | {part.hex().encode() for part in parts}


def store(tier: object, *prompts: BlockKeys) -> None:
    """Leave them on the medium, as a cache does."""

    async def run() -> None:
        engine = AnyEngine()
        async with open_any(engine, cpu(16), tier) as kv:  # type: ignore[arg-type]  # a tier of any kind
            for keys in prompts:
                await kv.store(keys, engine.fill(keys, range(NUM_BLOCKS)))
                await kv.flush()
            await kv.flush(sync=True)

    asyncio.run(run())


STORED, NOT_STORED = [prompt(n, salt) for n, salt in product((1, 2), ("", "ann"))], [prompt(3, ""), prompt(1, "bob")]


@pytest.mark.parametrize("how", HIDING)
def test_a_stored_prompt_cannot_be_told_from_another(medium: tuple[Callable[[Any], object], Dump], how: str) -> None:
    """Nothing that can be made of a known prompt without the key is anywhere on the medium, in names or in records.

    Nor are the digests of the model, the weights or a tenant: every digest there is a keyed one.
    """
    make, dump = medium
    store(make(Encryption(**HIDING[how])), *STORED)
    seen = dump()
    assert seen.count(b"TIEREDKV") >= len(STORED) * NUM_BLOCKS
    for keys in STORED + NOT_STORED:
        assert not [trace for trace in traces_of(keys) if trace in seen]
    for digest in (NAMING.fingerprint, epoch_digest(MODEL.weights), salt_digest("ann")):
        assert digest[:WINDOW] not in seen
        assert digest[:WINDOW].hex().encode() not in seen


def test_without_a_key_names_disclose(medium: tuple[Callable[[Any], object], Dump]) -> None:
    """The exercise has teeth: where no key hides names, the attacker's list is read off the medium."""
    make, dump = medium
    store(make(None), *STORED)
    seen = dump()
    assert [any(trace in seen for trace in traces_of(keys)) for keys in STORED] == [True] * len(STORED)
    assert [any(trace in seen for trace in traces_of(keys)) for keys in NOT_STORED] == [False] * len(NOT_STORED)


def test_equal_hashes_of_two_tenants_have_names_that_nothing_links(
    medium: tuple[Callable[[Any], object], Dump],
) -> None:
    """An engine's own hashes may be the same for all tenants: on the medium they aren't."""
    make, dump = medium
    hashes = [bytes([n]) * 8 for n in range(NUM_BLOCKS)]
    both = [BlockKeys.from_hashes(hashes, block_size=BLOCK_SIZE, salt=salt) for salt in ("ann", "bob")]
    store(make(Encryption(names_key=KEY)), *both)
    seen = dump()
    names = [rows_of(NAMING.batch(keys, epoch_digest(MODEL.weights)).names) for keys in both]
    seal = Encryption(names_key=KEY).make_seal()
    for keys in both:
        space = seal.names.hide_space(NAMING.namespace(keys.salt_id, epoch_digest(MODEL.weights)))
        assert space.salt[:16] in seen or space.salt[:16].hex().encode() in seen
    assert not [name for each in names for name in each if name[:WINDOW] in seen or name[-WINDOW:] in seen]
    assert NO_SALT not in {keys.salt_id for keys in both}


@pytest.mark.parametrize("medium", ["nvme", "shared_fs", "s3", "s3 packs", "redis"], indirect=True)
async def test_a_tenant_is_found_by_its_salt_and_the_key(medium: tuple[Callable[[Any], Any], Dump]) -> None:
    """Deleting one is a job that has the tier's settings; without the key in them it finds nothing of theirs."""
    make, _ = medium
    hiding = Encryption(keys=[KEY])
    made = make(hiding)
    delete_tenant = resolve(made["medium"] if isinstance(made, dict) else made.settings.medium).delete_tenant
    await asyncio.to_thread(store, made, *STORED)
    with_key, without = (each if isinstance(each, dict) else each.settings for each in (make(hiding), make(None)))
    assert await delete_tenant(without, "ann") == 0
    assert await delete_tenant(with_key, "ann") > 0
    assert await delete_tenant(with_key, "ann") == 0
    async with open_any(AnyEngine(), cpu(16), make(hiding)) as kv:
        there = [(await kv.lookup(keys)).num_blocks for keys in STORED]
    assert there == [NUM_BLOCKS if keys.salt_id == NO_SALT else 0 for keys in STORED]


def test_who_has_the_names_key_finds_what_was_stored(tmp_path: Path) -> None:
    """In another process, after other keys have come to seal; with another names key nothing is found."""
    settings = {"medium": "shared_fs", "path": tmp_path / "kv", "capacity": "8MiB", "num_threads": 2}

    def found(**keys: Any) -> int:  # noqa: ANN401 - as settings have them
        async def run() -> int:
            async with open_any(AnyEngine(), {**settings, "encryption": Encryption(**keys)}) as kv:
                return (await kv.lookup(STORED[0])).num_blocks

        return asyncio.run(run())

    store({**settings, "encryption": Encryption(keys=[KEY])}, STORED[0])
    assert found(keys=[KEY]) == NUM_BLOCKS
    assert found(keys=[OTHER, KEY], names_key=KEY) == NUM_BLOCKS
    assert found(keys=[OTHER, KEY]) == 0
