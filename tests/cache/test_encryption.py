"""Tiers with ``encryption``: what lies on the medium, and who may read it, on the full path."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.any_layout import AnyEngine, cpu, nvme, open_any, prompt
from tests.support.backends import ScriptedSlotBackend
from tests.support.caches import Recorder, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine
from tests.support.engine import prompt as small_prompt
from tiered_kv import (
    BackendUnavailableError,
    BlockKey,
    BlocksCorrupted,
    ConfigurationError,
    CPULoadStoreSpec,
    Encryption,
    Outcome,
    RecordsRefused,
)
from tiered_kv.media.backend import Block
from tiered_kv_backends.memory import MemoryBackend
from tiered_kv_backends.shared_fs.backend import SharedFSBackend

OLD, NEW, NAMES = "01" * 32, "02" * 32, "03" * 32
N = 12


def keys(*hexadecimal: str, cipher: str = "aes-256-gcm") -> Encryption:
    """Return encryption with these keys, the first of which writes; names are the same whichever it is."""
    return Encryption(keys=hexadecimal, cipher=cipher, names_key=NAMES)


def medium(kind: str, path: Path, encryption: Encryption | None) -> dict[str, object]:
    """Return the settings of a tier that outlives its cache."""
    if kind == "nvme":
        return {**nvme(path / kind), "encryption": encryption}
    return {"medium": "shared_fs", "path": path / kind, "capacity": "8MiB", "num_threads": 2, "encryption": encryption}


def bytes_under(path: Path) -> bytes:
    """Return all that lies there."""
    return b"".join(file.read_bytes() for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("kind", ["nvme", "shared_fs"])
@pytest.mark.parametrize("cipher", ["aes-256-gcm", "aes-256-gmac"])
async def test_only_who_has_the_key_reads(tmp_path: Path, kind: str, cipher: str) -> None:
    """No payload is on the medium in the clear; with the key every byte comes back, with another one nothing does."""
    engine, prefix = AnyEngine(), prompt(N, salt="tenant")
    async with open_any(engine, cpu(4), medium(kind, tmp_path, keys(OLD, cipher=cipher))) as kv:
        await kv.store(prefix, engine.fill(prefix, range(N)))
        await kv.flush()
        assert engine.count_right(prefix, range(N)) == N
        await until_idle(kv)
    stored = bytes_under(tmp_path)
    is_in_clear = [engine.content(digest, 0, "") in stored for digest in prefix]
    assert is_in_clear == [cipher == "aes-256-gmac"] * N
    async with open_any(engine, cpu(4), medium(kind, tmp_path, keys(NEW, OLD))) as kv:
        engine.wipe()
        assert (await kv.load(prefix, engine.spec(range(N)))).num_blocks == N
        assert engine.count_right(prefix, range(N)) == N
    events = Recorder()
    async with open_any(engine, cpu(4), medium(kind, tmp_path, keys(NEW)), emit=events) as kv:
        engine.wipe()
        assert (await kv.load(prefix, engine.spec(range(N)))).num_blocks == 0
        assert engine.count_right(prefix, range(N)) == 0
        await until_idle(kv)
    refused = events.of(RecordsRefused)
    assert refused
    assert {(event.tier, event.level) for event in refused} == {(kind, "error")}
    assert all("not among the keys" in event.reason for event in refused)


async def test_a_wrong_key_forgets_nothing(tmp_path: Path) -> None:
    """What an owned tier can't open is a miss, and served by a later start that has the key; but for what was evicted.

    What is stored meanwhile replaces it, and finds its room elsewhere.
    """
    engine, prefix, other = AnyEngine(), prompt(N), prompt(N, seed=1)
    async with open_any(engine, cpu(4), medium("nvme", tmp_path, keys(OLD))) as kv:
        await kv.store(prefix, engine.fill(prefix, range(N)))
    for first in (0, 2):
        async with open_any(engine, cpu(0), medium("nvme", tmp_path, keys(NEW))) as kv:
            for n in range(first, N):
                assert (await kv.load(prefix[n : n + 1], engine.spec([n]))).num_blocks == 0
            assert (await kv.lookup(prefix)).num_blocks == first
            await kv.store(other, engine.fill(other, range(N)))
            await kv.flush(sync=True)
            assert (await kv.load(other, engine.spec(range(N)))).num_blocks == N
            await kv.evict(prefix[N - 1 :])
            await kv.store(prefix[:2], engine.fill(prefix[:2], range(2)))
            await until_idle(kv)
    async with open_any(engine, cpu(4), medium("nvme", tmp_path, keys(OLD, NEW))) as kv:
        engine.wipe()
        assert (await kv.load(prefix, engine.spec(range(N)))).num_blocks == N - 1
        assert engine.count_right(prefix, range(N)) == N - 1
        assert (await kv.load(other, engine.spec(range(N)))).num_blocks == N


async def test_few_of_those_that_a_key_is_lacking_for_are_kept(tmp_path: Path) -> None:
    """An eighth of the tier: the rest takes new blocks. `clear` forgets them all."""
    engine, prefix = AnyEngine(), prompt(60)
    tier = {**medium("nvme", tmp_path, keys(OLD)), "capacity": "1MiB"}
    async with open_any(engine, cpu(0), tier) as kv:
        await kv.store(prefix, engine.fill(prefix, range(60)))
    wrong = {**tier, "encryption": keys(NEW)}
    async with open_any(engine, cpu(0), wrong) as kv:
        num_slots = kv.stats()["nvme"].num_slots
        for n in range(60):
            await kv.load(prefix[n : n + 1], engine.spec([n]))
        await until_idle(kv)
        assert kv.stats()["nvme"].free == num_slots - num_slots // 8
    async with open_any(engine, cpu(0), wrong) as kv:
        await kv.load(prefix[:1], engine.spec([0]))
        await kv.clear()
        assert kv.stats()["nvme"].free == num_slots
    async with open_any(engine, cpu(0), tier) as kv:
        assert (await kv.lookup(prefix)).num_blocks == 0


async def test_a_record_that_a_key_is_lacking_for_keeps_its_slot_until_it_is_forgotten() -> None:
    """Whatever else is refused meanwhile: nothing is written where the medium is about to forget something."""
    before, slots = ScriptedSlotBackend(16, encryption=keys(OLD)), ScriptedSlotBackend(16, encryption=keys(NEW))
    engine, prefix, others = AnyEngine(), prompt(N), prompt(8, seed=1)
    async with open_any(engine, cpu(16), before) as kv:
        await kv.store(prefix, engine.fill(prefix, range(N)))
        await kv.flush()
    slots.records = before.records
    async with open_any(engine, cpu(16), slots) as kv:
        assert (await kv.load(prefix[:1], engine.spec([0]))).num_blocks == 0
        slots.on_forget.hold()
        evicting = asyncio.create_task(kv.evict(prefix[:1]))
        await until(lambda: slots.on_forget.num_held == 1)
        assert (await kv.load(prefix[1:2], engine.spec([0]))).num_blocks == 0
        await (await kv.store(others, engine.fill(others, range(8)))).settled()
        slots.on_forget.release()
        await evicting
        await until_idle(kv)
        assert slots.clashes == []
        await kv.evict(others, tier="cpu")
        assert (await kv.load(others, engine.spec(range(8, 16)))).num_blocks == 8


class Resizable(ScriptedSlotBackend):
    """Has as many slots as it is given bytes, and keeps what was in those that it has no more."""

    def fit(self, capacity_bytes: int) -> int:
        """Count bytes."""
        return capacity_bytes


async def test_a_record_that_a_key_is_lacking_for_is_forgotten_with_its_slot() -> None:
    """Given up with the tier's capacity, it is in no books: an eviction by name has it forgotten all the same."""
    before, slots = Resizable(16, encryption=keys(OLD)), Resizable(16, encryption=keys(NEW))
    engine, prefix = AnyEngine(), prompt(2)
    async with open_any(engine, cpu(16), before) as kv:
        await kv.store(prefix, engine.fill(prefix, range(2)))
        await kv.flush()
    slots.records = before.records
    async with open_any(engine, cpu(16), slots) as kv:
        for n in range(2):
            assert (await kv.load(prefix[n : n + 1], engine.spec([0]))).num_blocks == 0
        await kv.resize("slots", 0)
        slots.on_checkpoint.fail_next(BackendUnavailableError("busy"))
        await kv.flush(sync=True)
        assert slots.num_records == 2
        await kv.evict(prefix)
        assert slots.num_records == 0


async def test_rotation(tmp_path: Path) -> None:
    """What the old key wrote is read until it is gone; what is written after the change needs the new key alone."""
    engine, first, second = AnyEngine(), prompt(N), prompt(N, seed=1)
    for encryption, prefix in ((keys(OLD), first), (keys(NEW, OLD), second)):
        async with open_any(engine, medium("shared_fs", tmp_path, encryption)) as kv:
            await kv.store(prefix, engine.fill(prefix, range(N)))
            await kv.flush()
    for encryption, found in ((keys(NEW, OLD), [N, N]), (keys(NEW), [0, N]), (keys(OLD), [N, 0])):
        async with open_any(engine, medium("shared_fs", tmp_path, encryption)) as kv:
            loaded = [(await kv.load(each, engine.spec(range(N)))).num_blocks for each in (first, second)]
            assert loaded == found


class Forger(MemoryBackend):
    """A medium that answers with whatever it has been given."""

    def __init__(self, encryption: Encryption) -> None:
        super().__init__({"medium": "memory", "capacity": "1MiB"})
        self.settings = self.settings.model_copy(update={"encryption": encryption})
        self.swap: dict[int, BlockKey] = {}

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Read another block than was asked for, where there is one to swap."""
        return await super().read([self.swap.get(key.position, key) for key in keys], into)


async def test_a_medium_that_flips_and_swaps_shortens_the_prefix() -> None:
    """Nothing that was not written with the key for this very block is served."""
    engine, prefix, events = Engine(), small_prompt(4), Recorder()
    backend = Forger(keys(OLD))
    async with open_cache(backend, engine=engine, emit=events) as kv:
        await kv.store(prefix, engine.compute(prefix))
        await kv.flush()
        records = backend._records  # noqa: SLF001 - the medium is the attacker
        last = next(key for key in records if key.position == 3)
        records[last] = records[last][:-1] + bytes([records[last][-1] ^ 1])
        engine.poison()
        assert (await kv.load(prefix, engine.compute(prefix))).num_blocks == 3
        backend.swap[1] = next(key for key in records if key.position == 2)
        assert (await kv.load(prefix, engine.compute(prefix))).num_blocks == 1
    assert events.of(BlocksCorrupted)


async def test_a_host_pool_gets_what_was_stored(tmp_path: Path) -> None:
    """Read straight into the engine's own memory, records are decrypted there."""
    engine, prefix = Engine(), small_prompt(8)
    tier = {"medium": "nvme", "path": tmp_path / "kv", "capacity": "8MiB", "encryption": keys(OLD)}
    async with open_cache(tier, engine=engine) as kv:
        await kv.store(prefix, engine.compute(prefix))
        await kv.flush()
        memory = np.zeros((8, PAYLOAD_BYTES + 4096), np.uint8)
        start = -memory.ctypes.data % 4096
        pool = memory.ravel()[start : start + 8 * PAYLOAD_BYTES].reshape(8, PAYLOAD_BYTES)
        kv.register_host_pool("pool", pool, direct=True)
        assert (await kv.load(prefix, CPULoadStoreSpec(range(8), "pool"))).num_blocks == 8
        kinds = [row.tobytes() for row in pool]
        await kv.load(prefix, engine.compute(prefix))
        assert len(set(kinds)) == 8
        assert kinds == engine.read(range(8))


def no_keys() -> list[str]:
    """Fail as a client of a key server may."""
    raise OSError("no answer")


async def test_a_tier_without_its_keys_does_not_open(tmp_path: Path) -> None:
    """A required one refuses, and says why; another one is bypassed, and tried again."""
    absent = Encryption(keys_file=tmp_path / "absent")
    with pytest.raises(ConfigurationError, match="absent"):
        async with open_any(AnyEngine(), medium("nvme", tmp_path, absent)):
            pass
    failing = Encryption(keys_from=no_keys)
    with pytest.raises(BackendUnavailableError, match="keys_from raised OSError"):
        async with open_any(AnyEngine(), medium("nvme", tmp_path, failing)):
            pass
    async with open_any(AnyEngine(), cpu(4), {**medium("nvme", tmp_path, failing), "required": False}) as kv:
        assert (await kv.lookup(prompt(2))).num_blocks == 0


def test_a_shared_medium_takes_the_setting(tmp_path: Path) -> None:
    """By a URL too: a path of a file of keys."""
    settings = SharedFSBackend.Settings.of(f"shared-fs://{tmp_path}?capacity=1GiB&encryption=/run/secrets/kv")
    assert settings.encryption == Encryption(keys_file="/run/secrets/kv")
