"""Tiers with ``encryption``: what lies on the medium, and who may read it, on the full path."""

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from anyio import fail_after

from tests.support.any_layout import AnyEngine, cpu, nvme, open_any, prompt
from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import Recorder, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine
from tests.support.engine import prompt as small_prompt
from tiered_kv import (
    BackendContext,
    BackendUnavailableError,
    BlockKey,
    BlocksCorrupted,
    ConfigurationError,
    CPULoadStoreSpec,
    Encryption,
    Outcome,
    Reason,
    RecordsRefused,
    TierFailed,
    TierResumed,
)
from tiered_kv.media.backend import Block, Recovered
from tiered_kv.media.record import Cipher
from tiered_kv_backends.memory import MemoryBackend
from tiered_kv_backends.shared_fs.shared_fs_backend import SharedFSBackend

OLD, NEW, NAMES = "01" * 32, "02" * 32, "03" * 32
N = 12


def keys(*hexadecimal: str, cipher: Cipher = "aes-256-gcm") -> Encryption:
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
async def test_only_who_has_the_key_reads(tmp_path: Path, kind: str, cipher: Cipher) -> None:
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
    if kind == "nvme":
        return
    events = Recorder()
    async with open_any(engine, cpu(4), medium(kind, tmp_path, keys(NEW)), emit=events) as kv:
        engine.wipe()
        loaded = await kv.load(prefix, engine.spec(range(N)))
        assert (loaded.num_blocks, [fault.reason for fault in loaded.faults]) == (0, [Reason.REFUSED])
        assert engine.count_right(prefix, range(N)) == 0
        await until_idle(kv)
    refused = events.of(RecordsRefused)
    assert refused
    assert {(event.tier, event.level) for event in refused} == {(kind, "error")}
    assert all("not among the keys" in event.reason for event in refused)


async def test_a_store_replaces_what_a_removed_key_wrote(tmp_path: Path) -> None:
    """In a shared tier with no memory above it, too: once a load was refused them, blocks are not there any more."""
    engine, prefix = AnyEngine(), prompt(N)
    shared = medium("shared_fs", tmp_path, keys(OLD))
    async with open_any(engine, cpu(0), shared) as kv:
        await kv.store(prefix, engine.fill(prefix, range(N)))
    async with open_any(engine, cpu(0), medium("shared_fs", tmp_path, keys(NEW))) as kv:
        (fault,) = (await kv.load(prefix, engine.spec(range(N)))).faults
        assert (fault.reason, "not among the keys" in fault.detail) == (Reason.REFUSED, True)
        for n in range(N):  # that load may have ended before it had read all
            assert not (await kv.load(prefix[n : n + 1], engine.spec([n]))).num_blocks
        assert [each.state for each in await kv.explain(prefix, ask=True)] == ["refused"] * N
        stored = await (await kv.store(prefix, engine.fill(prefix, range(N)))).settled()
        assert (stored[-1].written, stored[-1].present) == (N, 0)
        engine.wipe()
        assert (await kv.load(prefix, engine.spec(range(N)))).num_blocks == N
        assert engine.count_right(prefix, range(N)) == N


@pytest.mark.parametrize(
    ("lacking", "said"), [((NEW,), "which is not among the keys"), ((), "and there are no keys")], ids=["other", "none"]
)
async def test_an_owned_tier_whose_key_is_lacking_does_not_open(
    tmp_path: Path, lacking: Sequence[str], said: str
) -> None:
    """It says which key that is, and forgets nothing: a start that has the key serves all of it."""
    engine, prefix = AnyEngine(), prompt(N)
    async with open_any(engine, cpu(4), medium("nvme", tmp_path, keys(OLD))) as kv:
        await kv.store(prefix, engine.fill(prefix, range(N)))
    id_of_old = keys(OLD).make_seal().key_id.hex()
    found = f"nvme holds blocks that its keys do not open: .* sealed by key {id_of_old}, {said}"
    with pytest.raises(ConfigurationError, match=found):
        async with open_any(engine, cpu(0), medium("nvme", tmp_path, keys(*lacking))):
            pass
    async with open_any(engine, cpu(4), medium("nvme", tmp_path, keys(NEW, OLD))) as kv:
        engine.wipe()
        assert (await kv.load(prefix, engine.spec(range(N)))).num_blocks == N
        assert engine.count_right(prefix, range(N)) == N


class LockedBackend(ScriptedSlotBackend):
    """Is held while it is open, as a directory is, and refuses whoever opens it then."""

    is_held = False

    async def open(self, context: BackendContext) -> list[Recovered]:
        """Take the lock."""
        if self.is_held:
            raise ConfigurationError("held by another tier")
        self.is_held = True
        return await super().open(context)

    async def aclose(self) -> None:
        """Give it back."""
        await super().aclose()
        self.is_held = False


SPOILED: dict[str, tuple[Callable[[LockedBackend], None], str]] = {
    "memory": (lambda medium: medium.on_read.fail_next(OSError(errno.ENOMEM, "no memory")), "no memory"),
    "cancelled": (lambda medium: medium.on_read.fail_next(asyncio.CancelledError()), "CancelledError"),
    "answers": (lambda medium: medium.on_open.change_next(lambda found: found[1:]), "0 answers for 1 kinds"),
}


@pytest.mark.parametrize("how", SPOILED)
async def test_a_tier_that_is_open_and_cannot_be_used_is_closed_and_tried_again(how: str) -> None:
    """Whatever kept it from being looked at: that is told, and the next attempt does not meet the lock of this one."""
    engine, prefix, events, medium = Engine(), small_prompt(4), Recorder(), LockedBackend(encryption=keys(OLD))
    medium.settings = medium.settings.model_copy(update={"required": False})
    async with open_cache(medium, engine=engine) as kv:
        await keep(kv, engine, prefix)
    spoil, error = SPOILED[how]
    spoil(medium)
    async with open_cache(medium, engine=engine, emit=events) as kv:
        await until(lambda: bool(events.of(TierResumed) or len(events.of(TierFailed)) > 1))
        (failed,) = events.of(TierFailed)
        assert failed.doing == "open"
        assert error in failed.error
        assert (await kv.lookup(prefix)).num_blocks == 4
    assert not medium.is_held


async def test_a_tier_that_does_not_close_either_says_why_it_was_not_opened() -> None:
    """That comes first: what closing it raised is told as an event."""
    engine, events, medium = Engine(), Recorder(), LockedBackend(encryption=keys(OLD))
    async with open_cache(medium, engine=engine) as kv:
        await keep(kv, engine, small_prompt(4))
    medium.settings = medium.settings.model_copy(update={"encryption": keys(NEW)})
    medium.on_close.fail_next(OSError(errno.EIO, "no answer"))
    with pytest.raises(ConfigurationError, match="its keys do not open"):
        async with open_cache(medium, emit=events):
            pass
    (failed,) = events.of(TierFailed)
    assert failed.doing == "close"
    assert "no answer" in failed.error
    assert not medium.is_held


async def test_what_a_removed_key_wrote_is_forgotten_when_it_is_met(tmp_path: Path) -> None:
    """A tier of which the keys open a part is used: the rest are misses, which are told, and give their slots back."""
    engine, first, second, events = AnyEngine(), prompt(N), prompt(N, seed=1), Recorder()
    for encryption, prefix in ((keys(OLD), first), (keys(NEW, OLD), second)):
        async with open_any(engine, cpu(0), medium("nvme", tmp_path, encryption)) as kv:
            await kv.store(prefix, engine.fill(prefix, range(N)))
    async with open_any(engine, cpu(0), medium("nvme", tmp_path, keys(NEW)), emit=events) as kv:
        for n in range(N):
            loaded = await kv.load(first[n : n + 1], engine.spec([n]))
            (fault,) = loaded.faults
            assert (loaded.num_blocks, fault.tier, fault.reason, fault.num_blocks) == (0, "nvme", Reason.REFUSED, 1)
        assert (await kv.load(second, engine.spec(range(N)))).num_blocks == N
        await until_idle(kv)
        assert kv.stats()["nvme"].ready == N
    assert sum(event.blocks for event in events.of(RecordsRefused)) == N


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


@pytest.mark.parametrize("backend", [ScriptedBackend, ScriptedSlotBackend])
async def test_a_store_without_memory_for_what_is_encrypted_fails(
    backend: type[ScriptedBackend | ScriptedSlotBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system has none to give: those blocks are not written, which is told, and nothing is held or waited for."""

    def none(_: int) -> Block:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    engine, prefix, events, medium = Engine(), small_prompt(4), Recorder(), backend(encryption=keys(OLD))
    async with open_cache(medium, engine=engine, emit=events) as kv:
        with monkeypatch.context() as without_memory, fail_after(30):
            without_memory.setattr(Block, "empty", none)
            (settled,) = await (await kv.store(prefix, engine.compute(prefix))).settled()
        assert (settled.written, settled.failed) == (0, 4)
        assert [(failed.doing, failed.blocks) for failed in events.of(TierFailed)] == [("write", 4)]
        await until_idle(kv)
        (settled,) = await (await kv.store(prefix, engine.compute(prefix))).settled()
        assert settled.written == 4


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


def talking() -> list[str]:
    """Fail with a key in the message, as no source of keys should."""
    raise RuntimeError(f"the server said {OLD}")


async def test_what_a_source_of_keys_says_is_not_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its error is what ours comes from, for who looks at a traceback; in no message or log of ours are its words."""
    failing = Encryption(keys_from=talking)
    with pytest.raises(BackendUnavailableError) as raised:
        async with open_any(AnyEngine(), medium("nvme", tmp_path, failing)):
            pass
    async with open_any(AnyEngine(), cpu(4), {**medium("nvme", tmp_path, failing), "required": False}) as kv:
        said = f"{raised.value!r} {raised.value} {kv.stats()!r} {caplog.text}"
    assert "RuntimeError" in said
    assert OLD[:16] not in said
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_keys_file_that_everybody_may_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By a warning that names it: in a container it may be meant so."""
    file = tmp_path / "keys"
    file.write_text(OLD)
    for mode, told in ((0o600, 0), (0o644, 1)):
        file.chmod(mode)
        caplog.clear()
        Encryption(keys_file=file).make_seal()
        assert [str(file) in record.message for record in caplog.records] == [True] * told


def test_a_shared_medium_takes_the_setting(tmp_path: Path) -> None:
    """By a URL too: a path of a file of keys."""
    settings = SharedFSBackend.Settings.of(f"shared-fs://{tmp_path}?capacity=1GiB&encryption=/run/secrets/kv")
    assert settings.encryption == Encryption(keys_file="/run/secrets/kv")
